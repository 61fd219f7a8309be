// A model's text as elements. The text is a stranger's: no HTML of it is read, nothing is fetched, and links are the web's.

import { lexer } from "./marked.esm.js";

const INLINE = { strong: "strong", em: "em", del: "del" };
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };

export function element(name, content = [], more = {}) {
  const made = Object.assign(document.createElement(name), more);
  made.append(...(Array.isArray(content) ? content : [content]));
  return made;
}

// The elements of a text in Markdown; where that cannot be read, the text as it is.
export function markdown(text) {
  try {
    return blocks(lexer(text));
  } catch {
    return [element("pre", text)];
  }
}

function blocks(tokens = []) {
  return tokens.flatMap((token) => {
    if (token.type === "heading") return element(`h${Math.min(token.depth + 2, 6)}`, inlines(token.tokens));
    if (token.type === "paragraph") return element("p", inlines(token.tokens));
    if (token.type === "blockquote") return element("blockquote", blocks(token.tokens));
    if (token.type === "code") return code(token);
    if (token.type === "hr") return element("hr");
    if (token.type === "list") return list(token);
    if (token.type === "table") return table(token);
    if (token.type === "space" || token.type === "def") return [];
    if (token.type === "html") return element("p", token.raw);
    return inlines([token]);
  });
}

function inlines(tokens = []) {
  return tokens.flatMap((token) => {
    if (token.type in INLINE) return element(INLINE[token.type], inlines(token.tokens));
    if (token.type === "codespan") return element("code", token.text);
    if (token.type === "br") return element("br");
    if (token.type === "link") return link(token.href, inlines(token.tokens));
    if (token.type === "image") return link(token.href, [token.text || token.href]);
    if (token.type === "checkbox") return element("input", [], { type: "checkbox", disabled: true, checked: token.checked });
    if (token.type === "escape") return token.text;
    if (token.type === "text") return token.tokens ? inlines(token.tokens) : plain(token.text);
    return token.raw;
  });
}

function plain(text) {
  return text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name) => ENTITIES[name]);
}

function link(href, content) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return element("span", content);
  return element("a", content, { href, target: "_blank", rel: "noopener noreferrer", title: href });
}

function code(token) {
  const copy = copyButton(() => token.text);
  const head = element("div", [element("span", (token.lang ?? "").slice(0, 40)), copy], { className: "code-head" });
  return element("div", [head, element("pre", element("code", token.text), { tabIndex: 0 })], { className: "code" });
}

export function copyButton(text) {
  const button = element("button", "Copy", { type: "button" });
  button.onclick = async () => {
    // Elsewhere than at 127.0.0.1, http has no clipboard.
    button.textContent = await (navigator.clipboard?.writeText(text()) ?? Promise.reject()).then(() => "Copied", () => "Not allowed");
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}

function list(token) {
  const items = token.items.map((item) => element("li", blocks(item.tokens), { className: item.task ? "task" : "" }));
  return token.ordered ? element("ol", items, { start: token.start || 1 }) : element("ul", items);
}

function table(token) {
  const row = (cells, name) =>
    element("tr", cells.map((cell, i) => element(name, inlines(cell.tokens), { className: token.align[i] ?? "" })));
  const head = element("thead", row(token.header, "th"));
  const body = element("tbody", token.rows.map((cells) => row(cells, "td")));
  return element("div", element("table", [head, body]), { className: "wide", tabIndex: 0 });
}
