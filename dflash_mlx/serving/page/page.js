// The chat at `/`: messages, their stream, and chats that stay in this browser. Markdown is markdown.js's.

import { copyButton, element, markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "seed", "max_tokens"];
const CHAT = "dflash-mlx.chat.";
const KEY = "dflash-mlx.key";
const kept = window.localStorage;

// A chat: {id, changed, system, sampling, messages}. A message: {role, content}; of the assistant also `reasoning`, which like
// its content is a list of [kind, text], then `figures`, `reason` and `error`.
let chat = newChat();
// The request under way: {abort, message, wait}.
let running = null;
// The place of the user's message that is being changed.
let editing = null;

// Chats

function newChat(like) {
  return { id: `${Date.now()}`, changed: 0, system: like?.system ?? "", sampling: { ...like?.sampling }, messages: [] };
}

function readChat(key) {
  try {
    return JSON.parse(kept.getItem(key));
  } catch {
    return null;
  }
}

function chats() {
  const names = Object.keys(kept).filter((key) => key.startsWith(CHAT));
  return names.map(readChat).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function keep() {
  chat.changed = Date.now();
  try {
    kept.setItem(CHAT + chat.id, JSON.stringify(chat));
    showChats();
  } catch {
    say("This chat is not kept: the browser’s store is full. Delete older chats.");
  }
}

function open(next) {
  stop();
  chat = next;
  editing = null;
  history.replaceState(null, "", `#${chat.id}`);
  showMenu(false);
  say("");
  showChats();
  show();
  $("messages").scrollTop = $("messages").scrollHeight;
}

// On a narrow screen the chats lie over the messages when asked for.
function showMenu(on) {
  document.body.classList.toggle("menu", on);
  $("menu").ariaExpanded = `${on}`;
}

function showChats() {
  $("sessions").replaceChildren(
    ...chats().map((one) => {
      const name = button(one.messages[0]?.content.slice(0, 60) || "Empty", () => (one.id === chat.id ? showMenu(false) : open(readChat(CHAT + one.id))));
      name.ariaCurrent = `${one.id === chat.id}`;
      const drop = button("×", () => {
        if (!confirm("Delete this chat?")) return;
        kept.removeItem(CHAT + one.id);
        one.id === chat.id ? open(newChat(chat)) : showChats();
      });
      drop.ariaLabel = "Delete this chat";
      return element("li", [name, drop]);
    }),
  );
}

// Messages

function button(name, onclick) {
  return element("button", name, { type: "button", onclick });
}

const textOf = (parts) => parts.map(([, text]) => text).join("");

function coloured(parts) {
  return element("div", parts.map(([kind, text]) => element("span", text, { className: kind })), { className: "letters" });
}

// Draw all messages, or the last one alone.
function show(lastOnly = false) {
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  if (lastOnly && box.lastChild) {
    const thinking = box.lastChild.querySelector("details")?.open;
    const made = drawn(chat.messages.at(-1), chat.messages.length - 1);
    if (thinking && made.querySelector("details")) made.querySelector("details").open = true;
    box.lastChild.replaceWith(made);
  } else {
    const empty = element("p", "Ask something. What is written here stays on this server and in this browser.", { className: "empty" });
    box.replaceChildren(...(chat.messages.length ? chat.messages.map(drawn) : [empty]));
  }
  if (atEnd) box.scrollTop = box.scrollHeight;
  $("send").textContent = running ? "Stop" : "Send";
}

function drawn(message, place) {
  if (message.role === "user") {
    if (editing === place) return editor(message, place);
    const change = button("Edit", () => ((editing = place), show(), document.querySelector(".edit textarea").focus()));
    return element("article", [element("div", message.content, { className: "said" }), tools([change])], { className: "user" });
  }
  const live = running?.message === message;
  const content = textOf(message.content);
  const inside = [];
  if (message.reasoning.length) {
    const body = $("drafts").checked ? coloured(message.reasoning) : element("div", textOf(message.reasoning), { className: "letters" });
    inside.push(element("details", [element("summary", live && !content ? "Thinking …" : "Thinking"), body]));
  }
  inside.push($("drafts").checked ? coloured(message.content) : element("div", markdown(content), { className: "markdown" }));
  if (live && !content && !message.reasoning.length) inside.push(element("p", running.wait, { className: "note" }));
  if (message.error) inside.push(element("p", message.error, { className: "error" }));
  if (message.reason === "length") {
    inside.push(element("p", "Cut at the token limit, which Settings can raise.", { className: "note" }));
  }
  const retry = button("Retry", () => (chat.messages.splice(place), answer()));
  const figures = element("span", figuresOf(message), { className: "note" });
  if (!live) inside.push(tools([copyButton(() => content), retry, figures]));
  return element("article", inside, { className: "assistant" });
}

function tools(buttons) {
  return element("div", buttons, { className: "tools" });
}

function editor(message, place) {
  const box = element("textarea", [], { value: message.content, rows: 4, ariaLabel: "Message" });
  const leave = () => ((editing = null), show());
  const send = () => {
    if (!box.value.trim()) return;
    chat.messages.splice(place);
    editing = null;
    ask(box.value);
  };
  box.onkeydown = (event) => {
    if (isSend(event)) event.preventDefault(), send();
    if (event.key === "Escape") leave();
  };
  return element("article", [box, tools([button("Cancel", leave), button("Send", send)])], { className: "user edit" });
}

function figuresOf(message) {
  const { tokens_per_second: rate, tokens_per_round: round } = message.figures ?? {};
  if (!rate) return "";
  return `${rate.toFixed(1)} tokens/s` + (round ? ` · ${round.toFixed(2)} tokens a round` : "");
}

function say(text) {
  $("figures").textContent = text;
}

// Asking

function ask(text) {
  chat.messages.push({ role: "user", content: text });
  answer();
}

async function answer() {
  stop();
  const history = chat.messages.map(({ role, content }) => ({ role, content: role === "user" ? content : textOf(content) }));
  const message = { role: "assistant", content: [], reasoning: [] };
  const here = (running = { abort: new AbortController(), message, wait: "Waiting …" });
  const owner = chat;
  chat.messages.push(message);
  keep();
  show();
  $("messages").scrollTop = $("messages").scrollHeight;
  say("");
  const body = {
    messages: chat.system ? [{ role: "system", content: chat.system }, ...history] : history,
    ...chat.sampling,
    stream: true,
    show_drafts: true,
  };
  try {
    const reply = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: here.abort.signal });
    await read(reply.body, here);
    if (!message.reason) throw new Error("The connection ended before the answer did.");
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
    if (error.status === 401) askForKey();
  }
  if (running === here) {
    running = null;
    say("");
  }
  // Another chat may be open by now.
  if (chat === owner) keep(), show();
}

function stop() {
  if (!running) return;
  running.abort.abort();
  running = null;
  keep();
  show();
}

async function request(address, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (kept.getItem(KEY)) headers.Authorization = `Bearer ${kept.getItem(KEY)}`;
  const reply = await fetch(address, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  });
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => ({}));
  throw Object.assign(new Error(told.error?.message ?? `The server answers ${reply.status}.`), { status: reply.status });
}

// The events of a stream: lines that begin with "data: "; one with ":" tells how far the prompt is.
async function read(stream, here) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (let step = await reader.read(); !step.done; step = await reader.read()) {
    const lines = (held + step.value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      const [, done, all] = line.match(/^: prompt (\d+)\/(\d+)/) ?? [];
      if (all) here.wait = `Reading the prompt: ${done} of ${all} tokens`;
      if (line.startsWith("data: ") && line !== "data: [DONE]") take(JSON.parse(line.slice(6)), here.message);
    }
    refresh(here);
  }
}

function take(event, message) {
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices[0];
  if (!choice) return;
  const { delta, drafts = {} } = choice;
  for (const name of ["reasoning", "content"]) {
    if (!delta[name]) continue;
    for (const { kind, text } of drafts[name] ?? [{ kind: "plain", text: delta[name] }]) {
      const last = message[name].at(-1);
      last?.[0] === kind ? (last[1] += text) : message[name].push([kind, text]);
    }
  }
  message.figures = { tokens_per_second: drafts.tokens_per_second, tokens_per_round: drafts.tokens_per_round };
  message.reason = choice.finish_reason ?? message.reason;
}

let due = false;
// At most once a frame.
function refresh(here) {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    if (running !== here) return;
    show(true);
    say(figuresOf(here.message));
  });
}

// Settings

function openSettings(note = "Chats and the key stay in this browser.") {
  const fields = $("options").querySelector("form").elements;
  fields.system.value = chat.system;
  for (const name of SAMPLING) fields[name].value = chat.sampling[name] ?? "";
  fields.key.value = kept.getItem(KEY) ?? "";
  $("key-note").textContent = note;
  $("options").returnValue = "";
  $("options").showModal();
}

function askForKey() {
  if ($("options").open) return;
  openSettings("This server asks for its API key: what `--api-key` was given.");
  $("options").querySelector("form").elements.key.focus();
}

$("options").onclose = () => {
  if ($("options").returnValue !== "save") return;
  const fields = $("options").querySelector("form").elements;
  chat.system = fields.system.value;
  chat.sampling = Object.fromEntries(SAMPLING.filter((name) => fields[name].value !== "").map((name) => [name, Number(fields[name].value)]));
  fields.key.value ? kept.setItem(KEY, fields.key.value) : kept.removeItem(KEY);
  if (chat.messages.length) keep();
  nameModel();
};

async function nameModel() {
  try {
    const { data } = await (await request("v1/models")).json();
    const name = data[0].id.split("/").at(-1);
    $("model").textContent = name;
    $("model").title = data[0].draft_model ? `${data[0].id}, drafter ${data[0].draft_model}` : `${data[0].id}, no drafter`;
    document.title = name;
  } catch (error) {
    if (error.status === 401) askForKey();
    else say(error.message);
  }
}

// What is pressed

// Enter that ends a composition of letters sends nothing.
const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight}px`;
}

$("composer").onsubmit = (event) => {
  event.preventDefault();
  if (running) return stop();
  const text = $("text").value;
  if (!text.trim()) return;
  $("text").value = "";
  grow();
  ask(text);
};
$("text").oninput = grow;
$("text").onkeydown = (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  if (!running) $("composer").requestSubmit();
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !$("options").open) stop();
};
$("new").onclick = () => open(newChat(chat));
$("menu").onclick = (event) => (event.stopPropagation(), showMenu(true));
$("chat").onclick = () => showMenu(false);
window.onpagehide = stop;
$("settings").onclick = () => openSettings();
$("drafts").onchange = () => {
  $("legend").hidden = !$("drafts").checked;
  show();
};
$("cancel").onclick = () => $("options").close();
window.onstorage = showChats;

open(readChat(CHAT + location.hash.slice(1)) ?? newChat());
nameModel();
