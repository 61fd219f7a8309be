"""The commands of the chat: what a line that begins with `/` does.

Each is one function, which gets the chat and the text after the name. Its name and help line are beside it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..errors import DFlashError
from ..tools.columns import count
from .conversation import Conversation, Settings
from .draft_marks import legend
from .recap import kept_sessions, recap, setting_text, short
from .sessions import read_session, session_path, write_session

if TYPE_CHECKING:
    from .chat import Chat

_FOOT = """\
Ctrl-C stops an answer and keeps what there is. Alt-Enter starts a new line; Ctrl-X Ctrl-E opens the line in $EDITOR; a message \
between two lines of three double quotes may have many lines. @PATH in a message adds that text file. A message that begins \
with / is written with //."""
# Names that other programs use.
_OTHER_NAMES = {"?": "help", "quit": "exit", "bye": "exit", "q": "exit"}


@dataclass(frozen=True)
class Command:
    """run: given the chat and what follows the name; True ends the chat. takes: what may follow, for people; "": nothing.
    changes: a kept session is written again afterwards, so that what was cleared does not stay on disk."""

    run: Callable[[Chat, str], bool | None]
    takes: str
    about: str
    changes: bool


COMMANDS: dict[str, Command] = {}


def _command(name: str, takes: str, about: str, *, changes: bool = False) -> Callable:
    def add(function: Callable[[Chat, str], bool | None]) -> Callable[[Chat, str], bool | None]:
        COMMANDS[name] = Command(function, takes, about, changes)
        return function

    return add


def _needs_models(talk: Conversation, what: str) -> None:
    """Raises: DFlashError if a server answers."""
    if talk.url is not None:
        raise DFlashError(f"{what} needs models that run here, and {talk.url} answers", "dflash-mlx chat --model M runs one here")


def columns(rows: list[tuple[str, ...]]) -> Table:
    """Rows with the last column wrapped, and the others too if there is no room."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def run_command(chat: Chat, text: str) -> bool:
    """Run the command of a line `/name rest`. Returns: whether the chat ends.

    Raises:
      DFlashError: no such command, or words after one that takes none.
    """
    name, _, rest = text[1:].strip().partition(" ")
    name, rest = _OTHER_NAMES.get(name, name), rest.strip()
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name.lower(), COMMANDS, 1)
        remedy = f"Did you mean /{near[0]}?" if near else "/help lists them; // begins a message with a slash"
        raise DFlashError(f"there is no command /{short(name)}", remedy)
    if rest and not command.takes:
        # An error, because the user meant something by these words.
        raise DFlashError(f"/{name} takes no argument; found {short(rest)!r}", "Leave it out")
    ends = command.run(chat, rest)
    if chat.session and command.changes:
        write_session(chat.session, chat.conversation.state())
    return bool(ends)


@_command("help", "", "this list")
def _help(chat: Chat, rest: str) -> None:
    chat.show(columns([(f"/{name} {one.takes}", one.about) for name, one in COMMANDS.items()]))
    chat.note(_FOOT, "")


@_command("system", "TEXT", "set the system message; alone: show it; off: remove it", changes=True)
def _system(chat: Chat, rest: str) -> None:
    talk = chat.conversation
    if rest and talk.raw:
        raise DFlashError(
            "this tokenizer has no chat template, so there is no place for a system message", "Write it in a message"
        )
    if rest:
        talk.system = None if rest == "off" else rest
    chat.note(f"System message: {talk.system}" if talk.system else "No system message.")


@_command("clear", "", "forget the conversation", changes=True)
def _clear(chat: Chat, rest: str) -> None:
    chat.conversation.messages.clear()
    chat.files.clear()
    chat.note("Cleared.")


@_command("undo", "", "take back the last message and its answer", changes=True)
def _undo(chat: Chat, rest: str) -> None:
    text = chat.conversation.undo()
    chat.note("Nothing to undo." if text is None else f"Took back: {short(text)}")


@_command("retry", "", "answer the last message again")
def _retry(chat: Chat, rest: str) -> None:
    talk, before = chat.conversation, list(chat.conversation.messages)
    text = talk.undo()
    if text is None:
        raise DFlashError("there is no message to answer again", "Write one")
    if talk.greedy:
        chat.note("Temperature 0 gives the same answer again; /set temp 0.7 for another.")
    elif talk.settings.seed is not None:
        talk.set("seed", str((talk.settings.seed + 1) % (1 << 32)))
        chat.note(f"Seed {talk.settings.seed}.")
    count = len(talk.messages)
    try:
        chat.say(text)
    finally:
        if len(talk.messages) == count:
            # No new answer came: the old one stays.
            talk.messages = before


@_command("edit", "[TEXT]", "write a message in $EDITOR (also Ctrl-X Ctrl-E in a line)")
def _edit(chat: Chat, rest: str) -> None:
    if chat.editor is None:
        raise DFlashError("/edit needs a terminal that can be drawn on", "Write the message in a line")
    chat.editor.edit(rest)


@_command("file", "PATH", "add a text file to the next message (also @PATH in a message)")
def _file(chat: Chat, rest: str) -> None:
    if not rest:
        raise DFlashError("/file needs the path of a text file", "Give one, as in /file notes.txt")
    found = chat.attach(rest.strip("\"'"))
    chat.note(f"{found.about()}. It goes with your next message.")


@_command("copy", "", "copy the last answer to the clipboard")
def _copy(chat: Chat, rest: str) -> None:
    texts = [message["content"] for message in chat.conversation.messages if message["role"] == "assistant"]
    if not texts:
        raise DFlashError("there is no answer to copy", "Write a message")
    if not chat.drawing:
        raise DFlashError("/copy needs a terminal, which holds the clipboard", "Take the answer from the output")
    # OSC 52: the terminal copies it to the clipboard, also through ssh.
    chat.stdout.write(f"\x1b]52;c;{base64.b64encode(texts[-1].encode()).decode()}\x07")
    chat.stdout.flush()
    chat.note(f"Copied {len(texts[-1]):,} letters, if this terminal lets programs copy (OSC 52).")


@_command("save", "[NAME]", "keep the session (default: last)")
def _save(chat: Chat, rest: str) -> None:
    name = rest or chat.session or "last"
    if session_path(name).exists():
        # A file that is not a session is not overwritten: it may be important.
        read_session(name)
    chat.note(f"Saved as {write_session(name, chat.conversation.state())}.")


@_command("load", "[NAME]", "continue a kept session")
def _load(chat: Chat, rest: str) -> None:
    state, talk = read_session(rest or "last"), chat.conversation
    talk.restore(state)
    chat.note("\n".join(recap(talk, state)))


@_command("sessions", "", "list the kept sessions; /load NAME continues one")
def _sessions(chat: Chat, rest: str) -> None:
    rows = kept_sessions()
    if not rows:
        chat.note("No session is kept. /save makes one.")
        return
    chat.show(columns([("name", "age", "messages", "model", "begins with"), *rows]))


@_command("model", "[M [D]]", "show the models, or change to target M with drafter D (or auto)", changes=True)
def _model(chat: Chat, rest: str) -> None:
    talk = chat.conversation
    if rest:
        name, *drafter = rest.split()
        if len(drafter) > 1:
            raise DFlashError(f"/model takes a target and a drafter; found {short(rest)!r}", "Give /model TARGET [DRAFTER]")
        if drafter:
            _needs_models(talk, "a drafter")
        pair = chat.load(name, drafter[0] if drafter else None)
        if pair.has_chat_template != talk.pair.has_chat_template and talk.messages:
            raise DFlashError(
                f"only one of {talk.pair.name} and {name} has a chat template, so this conversation cannot go on", "/clear first"
            )
        talk.use(pair)
        for message in talk.messages:
            # Ids belong to the tokenizer that made them.
            message.pop("ids", None)
    pair = talk.pair
    if talk.url is not None:
        chat.note(f"Model {pair.name} of {talk.url}.")
        return
    chat.note(f"Target {pair.name}, " + (f"drafter {pair.draft_name}." if pair.draft_name else "no drafter."))


@_command("set", "[NAME VALUE]", "show or change a setting, such as temp 0.7; NAME default resets it", changes=True)
def _set(chat: Chat, rest: str) -> None:
    talk = chat.conversation
    if rest:
        name, _, value = rest.replace("=", " ").partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name == "block_size":
            _needs_models(talk, name)
        if name == "block_size" and talk.pair.drafter is None:
            raise DFlashError("there is no drafter, so block_size has no effect", "/model TARGET DRAFTER adds one")
        if value:
            talk.set(name, value)
        chat.note_without_effect([name])
    values = asdict(talk.settings)
    chat.note(", ".join(f"{one.name} {setting_text(values[one.name])}" for one in fields(Settings)))


@_command("stats", "", "totals of this session")
def _stats(chat: Chat, rest: str) -> None:
    totals = chat.conversation.totals
    lines = [
        f"{count(totals.answers, 'answer')}, {count(totals.tokens, 'token')}",
        f"prompts: {count(totals.prompt_tokens, 'token')}, {totals.reused_tokens:,} of them reused",
    ]
    if totals.rounds:
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in totals.seconds.items())
        lines.append(f"tau {totals.committed / totals.rounds:.2f} (mean of accepted + 1 over {totals.rounds} rounds); {seconds}")
    if totals.lookup_rounds:
        lines.append(f"prompt lookup: {totals.looked_up} tokens in {totals.lookup_rounds} of these rounds")
    last = chat.conversation.last
    if last and last.stats and last.stats.width_reason:
        lines.append(f"last answer: {last.stats.width_reason}")
    chat.note("\n".join(lines), "")


@_command("thoughts", "[on|off]", "show what the model thought last; on, off: show thinking as it comes, or fold it")
def _thoughts(chat: Chat, rest: str) -> None:
    if rest not in ("", "on", "off"):
        raise DFlashError(f"/thoughts takes on or off; found {short(rest)!r}", "Alone it shows the last thinking")
    if rest:
        chat.folded = rest == "off"
        chat.note("Thinking is folded." if chat.folded else "Thinking is shown as it comes.")
        return
    last = next((m for m in reversed(chat.conversation.messages) if m["role"] == "assistant"), {})
    chat.note(last.get("reasoning_content") or "The last answer came without thinking.")


@_command("drafts", "", "mark in answers which tokens were drafted, and which drafts were wrong, or stop doing so")
def _drafts(chat: Chat, rest: str) -> None:
    _needs_models(chat.conversation, "/drafts")
    if chat.conversation.pair.drafter is None:
        raise DFlashError("there is no drafter, so no drafts can be marked", "/model TARGET DRAFTER adds one")
    chat.show_drafts = not chat.show_drafts
    chat.note("Drafts are marked in answers." if chat.show_drafts else "Drafts are not marked.")
    if chat.show_drafts:
        chat.show(legend(chat.console))


@_command("exit", "", "leave (also Ctrl-D)")
def _exit(chat: Chat, rest: str) -> bool:
    return True
