"""`dflash-mlx chat`: a conversation in a terminal, a dumb terminal or through a pipe.

`Conversation` holds messages and makes answers; `Chat` holds the commands and the screen. Knows terminals, chat templates and
prompt reuse. Knows nothing of how models are found: the command line hands in a function that loads a pair.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.sample_utils import make_sampler
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from ..errors import DFlashError
from ..generation import GenerationResponse
from ..machine import state_directory, write_atomically
from ..models.target import Target
from ..options import largest_block
from .prefix_cache import PrefixCache, stream_from_prefix

HELP = """\
/help              this list
/system TEXT       set the system message; alone: show it; off: remove it
/clear             forget the conversation
/undo              take back the last message and its answer
/retry             answer the last message again
/save [NAME]       keep the session (default: last)
/load [NAME]       continue a kept session
/model [M [D]]     show the models, or change to target M with drafter D (or auto)
/set [NAME VALUE]  show or change a setting: temp 0.7, top_p, top_k, min_p, seed, max_tokens, block_size, thinking
/stats             totals of this session
/drafts            mark accepted, rejected and bonus tokens in answers, or stop doing so
/exit              leave (also Ctrl-D)
Ctrl-C stops an answer and keeps what there is. Alt-Enter starts a new line; a message between two lines of three double
quotes may have many. A message that begins with / is written with //."""


@dataclass
class Pair:
    """Loaded models under the names that the user gave."""

    name: str
    draft_name: str | None
    model: Any
    tokenizer: Any
    drafter: Any


# Of each number among the settings: its type, and the least and most that it may be.
_RANGES = {
    "temp": (float, 0, None),
    "top_p": (float, 0, 1),
    "top_k": (int, 0, None),
    "min_p": (float, 0, 1),
    "seed": (int, 0, (1 << 32) - 1),
    "max_tokens": (int, 1, None),
    "block_size": (int, 1, None),
}


@dataclass
class Settings:
    """What `/set` changes; None and 0 mean the default of `generate`.

    Raises:
      DFlashError: a value of another type or out of its range.
    """

    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 1024
    block_size: int | None = None
    thinking: bool | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            self._check(one.name, getattr(self, one.name))

    def _check(self, name: str, value: Any) -> None:
        if value is None and getattr(Settings, name) is None:
            return
        if name == "thinking":
            if not isinstance(value, bool):
                raise DFlashError(f"expected thinking to be on, off or default; found {value!r}.")
            return
        kind, low, high = _RANGES[name]
        fits = type(value) in (int, kind) and value >= low and (high is None or value <= high) and value != float("inf")
        if not fits:
            span = f"at least {low}" if high is None else f"from {low} to {high}"
            what = "a whole number" if kind is int else "a number"
            raise DFlashError(f"expected {name} to be {what} {span}; found {value!r}. 'default' takes it back.")

    def changed(self, name: str, text: str) -> Settings:
        """These settings with one field as a user typed it; 'default' takes it back.

        Raises:
          DFlashError: an unknown name, or a value out of its range.
        """
        names = [one.name for one in fields(self)]
        if name not in names:
            raise DFlashError(f"expected a setting; found {name!r}. There are: {', '.join(names)}.")
        if text == "default":
            value = getattr(Settings, name)
        elif name == "thinking":
            value = {"on": True, "off": False}.get(text, text)
        else:
            try:
                value = _RANGES[name][0](text)
            except ValueError:
                # What is no number is refused as it was typed.
                value = text
        return replace(self, **{name: value})

    def check_pair(self, vocabulary: int, largest: int | None) -> None:
        """Whether a pair can do this. largest: the most slots of its drafter's block; None: no drafter, no blocks.

        Raises:
          DFlashError: what is too much for it.
        """
        if self.top_k >= vocabulary:
            raise DFlashError(f"expected top_k below {vocabulary}, the target's vocabulary; found {self.top_k}.")
        if largest is not None and self.block_size is not None and self.block_size > largest:
            raise DFlashError(f"expected block_size of at most {largest} with this drafter; found {self.block_size}.")

    def sampler(self) -> Any:
        """mlx-lm's sampler for these settings; None is greedy."""
        if self.temp < 1e-5:
            return None
        return make_sampler(self.temp, self.top_p, self.min_p, top_k=self.top_k)


@dataclass
class Totals:
    """What `/stats` shows, summed over the answers of a session."""

    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    committed: int = 0
    copied_rounds: int = 0
    copied: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "verify", "rollback", "host"), 0.0))


class Conversation:
    """Messages, settings and the caches that carry them from turn to turn.

    Without a chat template a message is continued as it is: the target sees all texts joined, and messages keep their ids.
    """

    def __init__(self, pair: Pair, settings: Settings, system: str | None = None):
        self.settings, self.system = settings, system
        self.messages: list[dict[str, Any]] = []
        self.totals = Totals()
        self.use(pair)

    def use(self, pair: Pair) -> None:
        """Go on with other models; they have no caches yet.

        Raises:
          DFlashError: the settings ask for what they cannot do.
        """
        target = Target(pair.model)
        vocabulary, largest = target.vocabulary, largest_block(pair.drafter) if pair.drafter else None
        self.settings.check_pair(vocabulary, largest)
        self.pair, self.vocabulary, self.largest = pair, vocabulary, largest
        # Positions the target was made for, where its config says.
        self.limit = target.context_length
        # The last few states: an undone or retried turn starts from one of them.
        self.store = PrefixCache(6)
        self.used = self.held = 0
        self.last: GenerationResponse | None = None
        self.stopped = False

    def set(self, name: str, text: str) -> None:
        """Change one setting; refused, all stay as they are. Raises: DFlashError, as `Settings.changed` and `check_pair`."""
        changed = self.settings.changed(name, text)
        changed.check_pair(self.vocabulary, self.largest)
        self.settings = changed

    @property
    def raw(self) -> bool:
        return not self.pair.tokenizer.has_chat_template

    def undo(self) -> str | None:
        """Take back the last message with its answer; returns the message."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def prompt(self) -> tuple[list[int], int]:
        """Ids of the whole conversation, and how many of them the next turn will surely begin with.

        Raises:
          DFlashError: the chat template refuses the messages, or the conversation fills the context.
        """
        tokenizer = self.pair.tokenizer
        if self.raw:
            ids = [token for message in self.messages for token in self._raw_ids(message)]
            common = len(ids)
        else:
            messages = [{"role": "system", "content": self.system}] if self.system is not None else []
            messages += [{k: v for k, v in m.items() if k != "ids"} for m in self.messages]
            extra = {} if self.settings.thinking is None else {"enable_thinking": self.settings.thinking}
            try:
                ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **extra)
                shown = tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=False, **extra)
            except Exception as error:
                # Templates raise what they like; jinja's own classes say what they refuse.
                raise DFlashError(f"the chat template refused this conversation: {error}") from error
            common = next((i for i, pair in enumerate(zip(ids, shown, strict=False)) if pair[0] != pair[1]), len(shown))
        if self.limit and len(ids) >= self.limit:
            raise DFlashError(
                f"expected a conversation below the target's {self.limit} positions; it has {len(ids)} tokens. /undo or /clear."
            )
        return ids, min(common, len(ids))

    def _raw_ids(self, message: dict[str, Any]) -> list[int]:
        if "ids" not in message:
            first = message is self.messages[0]
            message["ids"] = list(self.pair.tokenizer.encode(message["content"], add_special_tokens=first))
        return message["ids"]

    def answer(
        self, should_stop: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> Iterator[tuple[str, str, GenerationResponse]]:
        """Yield (kind, text, response) with kind "answer" or "thinking"; the answer then joins the messages.

        Ended early (should_stop, a closed generator, an error), what there is joins them all the same, if anything.
        """
        self.last, self.stopped = None, False
        tokenizer, settings = self.pair.tokenizer, self.settings
        ids, common = self.prompt()
        state = None if self.raw else self._text_state(ids)
        room = self.limit - len(ids) if self.limit else settings.max_tokens
        turn = stream_from_prefix(
            self.pair.model,
            tokenizer,
            ids,
            self.store,
            (self.pair.name, self.pair.draft_name),
            draft_model=self.pair.drafter,
            shared=[(common, "user"), (len(ids) - 1, "user")],
            should_stop=should_stop,
            prompt_progress_callback=progress,
            max_tokens=min(settings.max_tokens, room),
            sampler=settings.sampler(),
            seed=settings.seed,
            block_size=settings.block_size if self.pair.drafter else None,
        )
        self.held = turn.held
        texts, tokens = {"answer": "", "thinking": ""}, []

        def kept(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
            # One piece at least: a mark of its drafts hangs on every token.
            pieces = [piece for piece in pieces if piece[1]] or pieces[-1:]
            pieces = [("thinking" if kind == "reasoning" else "answer", text) for kind, text in pieces]
            for kind, text in pieces:
                texts[kind] += text
            return pieces

        try:
            with closing(turn.responses) as responses:
                for response in responses:
                    self.last = response
                    if not (response.finish_reason == "stop" and self.raw):
                        tokens.append(response.token)
                    pieces = [("normal", response.text)]
                    if state:
                        state, pieces = TextStateMachine.split(state, response.text)
                    for kind, text in kept(pieces):
                        yield kind, text, response
            if state and self.last is not None:
                # Letters that might have begun a mark, at the end of an answer or where it was stopped.
                state, rest, where = TextStateMachine.flush(state)
                for kind, text in kept([(where, rest)] if rest else []):
                    yield kind, text, self.last
        finally:
            self.stopped = self.last is None or self.last.finish_reason is None
            if self.last is not None:
                message: dict[str, Any] = {"role": "assistant", "content": texts["answer"]}
                if texts["thinking"]:
                    message["reasoning_content"] = texts["thinking"].strip("\n")
                    message["content"] = texts["answer"].lstrip("\n")
                if self.raw:
                    message["ids"] = tokens
                self.messages.append(message)
                self._count(len(ids), len(tokens))

    def _text_state(self, ids: list[int]) -> Any:
        """mlx-lm's machine that tells thinking from the answer, where the prompt of these ids leaves it."""
        tokenizer, start = self.pair.tokenizer, "normal"
        if tokenizer.has_thinking and tokenizer.rfind_think_start(ids) > tokenizer.rfind_think_end(ids):
            start = "reasoning"
        return make_text_state_machine(tokenizer).make_state(tokenizer.response_initial_state or start)

    def _count(self, prompt_tokens: int, tokens: int) -> None:
        self.used = prompt_tokens + tokens
        totals = self.totals
        totals.answers += 1
        totals.prompt_tokens += prompt_tokens
        totals.reused_tokens += self.held
        totals.tokens += tokens
        stats = self.last.stats if self.last else None
        if stats:
            totals.rounds += stats.n_drafting
            totals.committed += stats.n_committed
            totals.copied_rounds += stats.sources["copy"]["rounds"]
            totals.copied += stats.sources["copy"]["accepted"]
            for name, value in stats.seconds.items():
                totals.seconds[name] += value

    def state(self) -> dict[str, Any]:
        """Plain values for a session file."""
        return {
            "version": 1,
            "model": self.pair.name,
            "draft_model": self.pair.draft_name,
            "system": self.system,
            "settings": asdict(self.settings),
            "messages": self.messages,
        }

    def restore(self, state: dict[str, Any], given: dict[str, Any] | None = None) -> None:
        """Take messages, system message and settings from `state()`, except those settings that are `given`; models stay.

        Raises:
          DFlashError: the models here cannot do what the settings say; nothing has changed.
        """
        settings = Settings(**{**state["settings"], **(given or {})})
        settings.check_pair(self.vocabulary, self.largest)
        self.system, self.settings = state["system"], settings
        # Ids belong to the tokenizer that made them.
        known = all(i < self.vocabulary for m in state["messages"] for i in m.get("ids", ()))
        same = state["model"] == self.pair.name and known
        self.messages = [{k: v for k, v in m.items() if same or k != "ids"} for m in state["messages"]]


class Chat:
    """The loop: read a line, do a command or answer a message.

    Args:
      load: (target name, drafter name) to a `Pair`.
      marker: (tokenizer, stream) to a function that shows a response with its drafts marked.
      session: name under which the session is kept after every turn; None: it is kept only when told.
    """

    def __init__(
        self,
        conversation: Conversation,
        load: Callable[[str | None, str | None], Pair],
        marker: Callable[[Any, TextIO], Callable[[GenerationResponse], None]],
        *,
        session: str | None = None,
        plain: bool = False,
        stdin: TextIO | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ):
        self.conversation, self.load, self.marker, self.session = conversation, load, marker, session
        self.stdin, self.stdout, self.stderr = stdin or sys.stdin, stdout or sys.stdout, stderr or sys.stderr
        self.interactive = self.stdin.isatty()
        smart = self.interactive and self.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
        self.console = Console(file=self.stdout, highlight=False)
        self.notes = Console(file=self.stderr, highlight=False, soft_wrap=True)
        self.markdown = smart and not plain
        self.show_drafts = self.failed = False
        self.read = self._reader(smart)

    def _reader(self, smart: bool) -> Callable[[str], str]:
        if not self.interactive:
            return lambda prompt: _line(self.stdin)
        if smart:
            try:
                return _line_editor(self.stdout)
            except ImportError:
                self.note("Line editing, history and pasting need prompt_toolkit: pip install prompt_toolkit")
        if self.stdout.isatty():
            return input

        def read(prompt: str) -> str:
            self.stderr.write(prompt)
            self.stderr.flush()
            return _line(self.stdin)

        return read

    def note(self, text: str, style: str = "dim") -> None:
        """A line that is not part of an answer: stderr, quiet."""
        self.notes.print(Text(text, style))

    def run(self) -> None:
        """Until Ctrl-D, `/exit` or the end of a pipe."""
        self._greet()
        while True:
            try:
                text = self._message()
            except EOFError:
                break
            except KeyboardInterrupt:
                self.note("Ctrl-D or /exit leaves.")
                continue
            if not text.strip():
                continue
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if self._command(text) == "exit":
                        break
                else:
                    self._say(text[1:] if text.startswith("//") else text)
            except KeyboardInterrupt:
                self.note("Interrupted.")
            except BrokenPipeError:
                # Nobody reads the answers any more.
                raise
            except Exception as error:
                # One turn that fails does not end the others.
                kind = "" if isinstance(error, (DFlashError, OSError, ValueError)) else f"{type(error).__name__}: "
                self.note(f"Error: {kind}{error}", "red")
                self.failed = True
        if self.interactive and self.session and self.conversation.messages:
            self.note(f"Session kept: dflash-mlx chat --session {self.session}")

    def _greet(self) -> None:
        pair = self.conversation.pair
        how = f"drafter {pair.draft_name}" if pair.draft_name else "no drafter: plain decoding"
        self.note(f"{pair.name}, {how}." + (" /help lists commands." if self.interactive else ""))
        if self.conversation.raw:
            self.note("This tokenizer has no chat template: what you type is continued as it is.")
            if self.conversation.system is not None:
                raise DFlashError("expected a chat template for --system; this tokenizer has none. Leave --system out.")
        if self.conversation.messages:
            self.note(f"Continuing a session of {len(self.conversation.messages)} messages.")

    def _message(self) -> str:
        """One message: a line, or the lines between two lines of three double quotes."""
        line = self.read("> ")
        if line.strip() == '"""':
            lines = []
            try:
                while (line := self.read(". ")).strip() != '"""':
                    lines.append(line)
            except EOFError:
                raise DFlashError(
                    f"expected a line of three double quotes to end the message; found the end of the input after {len(lines)} "
                    "lines. Nothing was sent."
                ) from None
            line = "\n".join(lines)
        # A pipe may hold bytes that are no text.
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _say(self, text: str) -> None:
        self.conversation.messages.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        talk = self.conversation
        count = len(talk.messages)
        mark = self.marker(talk.pair.tokenizer, self.stdout) if self.show_drafts and talk.pair.drafter else None
        screen = _MarkdownScreen(self.console) if self.markdown and not talk.raw else _PlainScreen(self.console, self.notes)
        seen = None
        try:
            with _ctrl_c() as pressed, screen, closing(talk.answer(pressed, screen.progress)) as pieces:
                for kind, piece, response in pieces:
                    if mark is None:
                        screen.show(kind, piece)
                    elif response is not seen:
                        mark(response)
                    seen = response
        finally:
            if len(talk.messages) == count:
                # Nothing came: the message is not part of the conversation.
                talk.undo()
        if mark:
            self.stdout.write("\n")
        self._status()
        if self.session:
            self._save(self.session)

    def _status(self) -> None:
        talk, last = self.conversation, self.conversation.last
        if last is None:
            self.note("Stopped before the first token; the message is taken back.")
            return
        parts = [f"{last.generation_tokens} tokens", f"{last.generation_tps:.1f} tokens/s"]
        if last.stats and last.stats.tau is not None:
            parts.append(f"tau {last.stats.tau:.2f}")
        if last.stats and last.stats.width_reason and 2 * last.stats.widths.get(0, 0) > last.stats.n_rounds:
            parts.append(last.stats.width_reason.partition(":")[0])
        limit = f" of {talk.limit}" if talk.limit else ""
        parts.append(f"context {talk.used}{limit} ({talk.held} reused)")
        if talk.stopped:
            parts.append("stopped")
        elif last.finish_reason == "length":
            parts.append(f"cut at {last.generation_tokens} tokens")
        self.note(", ".join(parts))

    # Commands: one method each, given what follows the name.

    def _command(self, text: str) -> str | None:
        name, _, rest = text[1:].strip().partition(" ")
        command = getattr(self, f"_do_{name}", None) if name.isalpha() else None
        if command is None:
            raise DFlashError(f"expected a command; found /{name}. /help lists them; // begins a message with a slash.")
        rest = rest.strip()
        if rest and name not in _TAKING:
            # Words that would be dropped were meant for something.
            raise DFlashError(f"expected /{name} alone; found {_short(rest)!r} behind it.")
        result = command(rest)
        if self.session and name in _CHANGING:
            self._save(self.session)
        return result

    def _do_help(self, rest: str) -> None:
        self.note(HELP, "")

    def _do_exit(self, rest: str) -> str:
        return "exit"

    def _do_system(self, rest: str) -> None:
        if rest and self.conversation.raw:
            raise DFlashError("expected a chat template for /system; this tokenizer has none.")
        if rest:
            self.conversation.system = None if rest == "off" else rest
        self.note(f"System message: {self.conversation.system}" if self.conversation.system else "No system message.")

    def _do_clear(self, rest: str) -> None:
        self.conversation.messages.clear()
        self.note("Cleared.")

    def _do_undo(self, rest: str) -> None:
        text = self.conversation.undo()
        self.note("Nothing to undo." if text is None else f"Took back: {_short(text)}")

    def _do_retry(self, rest: str) -> None:
        talk = self.conversation
        text = talk.undo()
        if text is None:
            raise DFlashError("expected a message to answer again; there is none.")
        if talk.settings.temp == 0:
            self.note("Temperature 0 gives the same answer again; /set temp 0.7 for another.")
        elif talk.settings.seed is not None:
            talk.settings.seed = (talk.settings.seed + 1) % (1 << 32)
            self.note(f"Seed {talk.settings.seed}.")
        self._say(text)

    def _do_save(self, rest: str) -> None:
        name = rest or self.session or "last"
        if session_path(name).exists():
            # What is no session may be somebody's file.
            read_session(name)
        self.note(f"Saved as {self._save(name)}.")

    def _save(self, name: str) -> Path:
        path = session_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readable by the user alone, and never half written.
        write_atomically(path, json.dumps(self.conversation.state(), ensure_ascii=False), mode=0o600)
        return path

    def _do_load(self, rest: str) -> None:
        state = read_session(rest or "last")
        talk = self.conversation
        talk.restore(state)
        if state["model"] != talk.pair.name:
            self.note(f"That session was with {state['model']}; it goes on with {talk.pair.name}.")
        self.note(f"Continuing a session of {len(talk.messages)} messages.")

    def _do_model(self, rest: str) -> None:
        talk = self.conversation
        if rest:
            name, *drafter = rest.split()
            if len(drafter) > 1:
                raise DFlashError(f"expected /model TARGET [DRAFTER]; found {rest!r}.")
            pair = self.load(name, drafter[0] if drafter else None)
            if pair.tokenizer.has_chat_template != talk.pair.tokenizer.has_chat_template and talk.messages:
                raise DFlashError("expected a target of the same kind (with or without a chat template). /clear first.")
            talk.use(pair)
            for message in talk.messages:
                # Ids belong to the tokenizer that made them.
                message.pop("ids", None)
        pair = talk.pair
        self.note(f"Target {pair.name}, " + (f"drafter {pair.draft_name}." if pair.draft_name else "no drafter."))

    def _do_set(self, rest: str) -> None:
        settings = self.conversation.settings
        if rest:
            name, _, value = rest.replace("=", " ").partition(" ")
            name, value = name.replace("-", "_"), value.strip()
            if name == "block_size" and self.conversation.pair.drafter is None:
                raise DFlashError("expected a drafter for block_size; there is none. /model TARGET DRAFTER adds one.")
            if value:
                self.conversation.set(name, value)
                settings = self.conversation.settings
            if name in ("top_p", "top_k", "min_p", "seed") and settings.temp == 0:
                self.note(f"{name} has no effect until /set temp 0.7 or the like.")
        # As they are typed: 1 is no switch, though it equals True.
        shown = {None: "default", True: "on", False: "off"}
        values = [v if type(v) in (int, float) else shown[v] for v in asdict(settings).values()]
        self.note(", ".join(f"{one.name} {value}" for one, value in zip(fields(settings), values, strict=True)))

    def _do_stats(self, rest: str) -> None:
        totals = self.conversation.totals
        lines = [
            f"{totals.answers} answers, {totals.tokens} tokens",
            f"prompts: {totals.prompt_tokens} tokens, {totals.reused_tokens} of them reused",
        ]
        if totals.rounds:
            seconds = ", ".join(f"{name} {value:.2f} s" for name, value in totals.seconds.items())
            lines.append(
                f"tau {totals.committed / totals.rounds:.2f} (mean of accepted + 1 over {totals.rounds} rounds); {seconds}"
            )
        if totals.copied_rounds:
            lines.append(f"copied from the text: {totals.copied} tokens in {totals.copied_rounds} of these rounds")
        last = self.conversation.last
        if last and last.stats and last.stats.width_reason:
            lines.append(f"last answer: {last.stats.width_reason}")
        self.note("\n".join(lines), "")

    def _do_drafts(self, rest: str) -> None:
        if self.conversation.pair.drafter is None:
            raise DFlashError("expected a drafter for /drafts; there is none. /model TARGET DRAFTER adds one.")
        self.show_drafts = not self.show_drafts
        self.note("Drafts are marked in answers." if self.show_drafts else "Drafts are not marked.")


# Commands that something may follow.
_TAKING = ("system", "save", "load", "model", "set")
# Commands after which a kept session is written again: what was cleared must not stay on disk.
_CHANGING = ("clear", "undo", "set", "system", "model")


def session_path(name: str) -> Path:
    """A session's file: a path if `name` looks like one, else a name among the kept sessions."""
    return (
        Path(name).expanduser() if os.sep in name or name.endswith(".json") else state_directory() / "sessions" / f"{name}.json"
    )


def read_session(name: str) -> dict[str, Any]:
    """A kept session's state.

    Raises:
      DFlashError: if there is none of this name, or the file is something else.
    """
    path = session_path(name)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        fault = _fault(state)
    except FileNotFoundError:
        raise DFlashError(f"expected a kept session; found no {path}. /save makes one.") from None
    except DFlashError as error:
        fault = str(error)
    except (ValueError, RecursionError):
        fault = "it is not JSON in UTF-8"
    if fault:
        raise DFlashError(f"expected a session written by this version; {path} is something else: {fault}")
    return state


def _fault(state: Any) -> str | None:
    """What keeps `state` from being a session's, in words; None: nothing. Raises: DFlashError for a setting's value."""
    if not isinstance(state, dict) or state.get("version") != 1:
        return 'no {"version": 1, ...}.'
    kinds = {"version": int, "model": str, "draft_model": (str, type(None)), "system": (str, type(None)), "settings": dict}
    kinds["messages"] = list
    for name, kind in kinds.items():
        if name not in state or not isinstance(state[name], kind):
            return f"{name!r} is absent or of another type."
    if odd := [*(state.keys() - kinds), *(state["settings"].keys() - {one.name for one in fields(Settings)})]:
        return f"{odd[0]!r} is unknown."
    Settings(**state["settings"])
    for n, message in enumerate(state["messages"]):
        texts = {**message} if isinstance(message, dict) else {}
        ids = texts.pop("ids", [])
        known = texts.keys() <= {"role", "content", "reasoning_content"} and {"role", "content"} <= texts.keys()
        if not known or not all(isinstance(text, str) for text in texts.values()) or texts["role"] not in ("user", "assistant"):
            return f"message {n} is none of a user's or an assistant's."
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            return f"message {n} has ids that are no tokens."
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _line(stream: TextIO) -> str:
    line = stream.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _line_editor(stdout: TextIO) -> Callable[[str], str]:
    """prompt_toolkit: editing, history across sessions, pasted blocks as one message, command names by Tab."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    try:
        state_directory().mkdir(parents=True, exist_ok=True)
        history = FileHistory(str(state_directory() / "history"))
    except OSError:
        history = InMemoryHistory()
    names = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]
    session: PromptSession[str] = PromptSession(
        history=history,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter(names, sentence=True),
        complete_while_typing=False,
        output=create_output(stdout),
    )
    return session.prompt


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """While an answer runs Ctrl-C asks it to stop after the present round; a second one does not wait for that."""
    pressed = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class _PlainScreen:
    """Text as it comes; thinking goes to stderr, so that a pipe carries answers only."""

    def __init__(self, console: Console, notes: Console):
        self.console, self.notes = console, notes
        self.open: str | None = None

    def __enter__(self) -> _PlainScreen:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def _close(self) -> None:
        if self.open:
            (self.console if self.open == "answer" else self.notes).file.write("\n")
        self.console.file.flush()
        self.open = None

    def progress(self, done: int, total: int) -> None:
        pass

    def show(self, kind: str, text: str) -> None:
        if not text:
            return
        if self.open != kind:
            self._close()
        self.open = kind
        if kind == "answer":
            self.console.file.write(text)
            self.console.file.flush()
        else:
            self.notes.print(Text(text, "dim italic"), end="")


class _MarkdownScreen:
    """Markdown as it grows: finished blocks are printed for good, only the last one is drawn again."""

    def __init__(self, console: Console):
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self.kind, self.tail, self.drawn = "answer", "", 0.0

    def __enter__(self) -> _MarkdownScreen:
        self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.update(Text(""), refresh=True)
        self.live.stop()
        self._print(self.tail)

    def progress(self, done: int, total: int) -> None:
        if total - done > 1:
            self.live.update(Text(f"reading {done} of {total} tokens", "dim"), refresh=True)

    def show(self, kind: str, text: str) -> None:
        if not text:
            return
        if kind != self.kind:
            self._print(self.tail)
            self.kind, self.tail = kind, ""
        self.tail += text
        now = time.monotonic()
        # Drawing takes milliseconds: not more than 12 times a second.
        if now - self.drawn < 0.08:
            return
        self.drawn = now
        done, self.tail = split_blocks(self.tail)
        self.live.update(_Bottom(self._rendered(self.tail)))
        self._print(done)
        self.live.refresh()

    def _rendered(self, text: str) -> Any:
        return Text(text.strip("\n"), "dim italic") if self.kind == "thinking" else Markdown(text)

    def _print(self, text: str) -> None:
        if text.strip():
            self.console.print(self._rendered(text))


@dataclass
class _Bottom:
    """The last lines of what is too high for the screen."""

    inner: Any

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.inner, options, pad=False)
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()


def split_blocks(text: str) -> tuple[str, str]:
    """Cut growing Markdown behind its last finished block: (finished, the rest).

        "# A\\n\\ntext\\n\\n- one\\n"  ->  ("# A\\n\\ntext\\n\\n", "- one\\n")

    An empty line ends a block, but not inside a code fence.
    """
    fence, cut, at, ended = None, 0, 0, False
    for line in text.splitlines(keepends=True):
        # An indented line after an empty one still belongs to its list item.
        if ended and not line[0].isspace():
            cut = at
        at += len(line)
        mark = line.lstrip()[:3]
        ended = fence is None and line == "\n" or ended and line[0].isspace()
        if fence is None and mark in ("```", "~~~"):
            fence = mark
        elif fence is not None and mark == fence:
            fence = None
    return text[:cut], text[cut:]
