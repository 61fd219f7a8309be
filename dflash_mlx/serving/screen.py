"""What the chat's terminal shows: text as it comes or growing Markdown, a line editor, and Ctrl-C while an answer runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from .commands import COMMANDS
from .interrupt import at_ctrl_c
from .sessions import history_file


def read_line(stream: TextIO) -> str:
    line = stream.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def line_editor(stdout: TextIO) -> Callable[[str], str]:
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
        history = FileHistory(str(history_file()))
    except OSError:
        history = InMemoryHistory()
    names = [f"/{name}" for name in COMMANDS]
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
def stop_on_ctrl_c(say: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """While an answer runs Ctrl-C asks it to stop after the present pass; a second one does not wait for that.

    say: called at once, also where the main thread is inside a long pass.
    """
    pressed = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        with at_ctrl_c(say):
            yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class PlainScreen:
    """Text as it comes; thinking goes to stderr, so that a pipe carries answers only."""

    def __init__(self, console: Console, notes: Console):
        self.console, self.notes = console, notes
        self.open: str | None = None

    def __enter__(self) -> PlainScreen:
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

    def stopping(self) -> None:
        """Said while the prompt is read, from another thread."""
        self.notes.print(Text("Stopping ...", "dim"))

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


class MarkdownScreen:
    """Markdown as it grows: finished blocks are printed for good, only the last one is drawn again."""

    def __init__(self, console: Console):
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self.kind, self.tail, self.drawn = "answer", "", 0.0

    def __enter__(self) -> MarkdownScreen:
        self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.update(Text(""), refresh=True)
        self.live.stop()
        self._print(self.tail)

    def progress(self, done: int, total: int) -> None:
        if total - done > 1:
            self.live.update(Text(f"reading {done} of {total} tokens", "dim"), refresh=True)

    def stopping(self) -> None:
        self.console.print(Text("Stopping ...", "dim"))

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
