"""Shows an answer in the chat's terminal: text as it comes or growing Markdown, folded thinking, and the time of waiting."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from .draft_marks import DraftMarks
from .interrupt import at_ctrl_c
from .markdown import AnswerMarkdown, split_blocks
from .wrapping import WrappedText, printable

# Seconds without a change after which the screen says how many they are.
SILENT_S = 1.0


@contextmanager
def stop_on_ctrl_c(say: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """While an answer runs, Ctrl-C stops it after the current pass. A second Ctrl-C does not wait for that.

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


class _Waiting:
    """The live line under an answer. It shows what is running when no text has come for `SILENT_S`."""

    def __init__(self) -> None:
        self.what, self.since = "Waiting for the first token", time.monotonic()

    def heard(self, what: str = "Waiting for the next token") -> None:
        self.what, self.since = what, time.monotonic()

    def progress(self, done: int, total: int) -> None:
        if total - done > 1:
            self.what = f"Reading {done} of {total} tokens"

    def line(self) -> Text | None:
        silent = time.monotonic() - self.since
        return Text(f"{self.what} ({silent:.0f} s)", "dim") if silent >= SILENT_S else None


class _Thinking:
    """Thinking that is not shown: how long it took and how much it was."""

    def __init__(self) -> None:
        self.text, self.since = "", time.monotonic()

    def add(self, text: str) -> None:
        if not self.text:
            self.since = time.monotonic()
        self.text += text

    def line(self) -> Text:
        return Text(f"Thinking ({time.monotonic() - self.since:.0f} s, {len(self.text.split())} words)", "dim italic")

    def end(self) -> Text | None:
        """The line that stays in place of the thinking; None if there was no thinking."""
        text, self.text = self.text, ""
        if not text.strip():
            return None
        seconds = time.monotonic() - self.since
        return Text(f"Thought for {seconds:.1f} s, {len(text.split())} words. /thoughts shows them.", "dim italic")


class PlainScreen:
    """Text as it comes; thinking goes to stderr, so that a pipe carries answers only.

    Args:
      folded: show of thinking only how much it was.
      live: the console is a terminal that can draw a line anew: it says how long the first token takes.
    """

    def __init__(self, console: Console, notes: Console, *, folded: bool = False, live: bool = False):
        self.answer, self.thoughts = WrappedText(console), WrappedText(notes)
        self.console, self.notes, self.folded = console, notes, folded
        self.open: str | None = None
        self.waiting, self.thinking = _Waiting(), _Thinking()
        self.live = _Live(console, self._bottom) if live else None

    def __enter__(self) -> PlainScreen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()
        self._stop_live()

    def _bottom(self) -> Text:
        return self.thinking.line() if self.thinking.text else self.waiting.line() or Text("")

    def _stop_live(self) -> None:
        if self.live:
            live, self.live = self.live, None
            live.stop()

    def _close(self) -> None:
        if self.open == "thinking" and self.folded:
            self._stop_live()
            if line := self.thinking.end():
                self.notes.print(line)
        elif self.open:
            (self.answer if self.open == "answer" else self.thoughts).close()
        self.open = None

    def progress(self, done: int, total: int) -> None:
        self.waiting.progress(done, total)

    def stopping(self) -> None:
        """Called from another thread while the prompt is read."""
        if self.live:
            self.waiting.what = "Stopping"
        else:
            self.notes.print(Text("Stopping ...", "dim"))

    def show(self, kind: str, text: str, response: Any = None) -> None:
        """Show a piece of an answer, of kind "answer" or "thinking". response: the response that it came with."""
        if not text:
            return
        if self.open != kind:
            self._close()
        self.open = kind
        if kind == "thinking" and self.folded:
            self.thinking.add(text)
            return
        self._stop_live()
        if kind == "answer":
            self.answer.write(text)
        else:
            self.thoughts.write(text, "dim italic")


class MarkedScreen(PlainScreen):
    """All tokens of an answer, its thinking included, with their drafts marked."""

    def __init__(self, console: Console, notes: Console, marks: DraftMarks, *, live: bool = False):
        super().__init__(console, notes, live=live)
        self.marks, self.seen = marks, None

    def show(self, kind: str, text: str, response: Any = None) -> None:
        if response is not self.seen:
            self.seen = response
            self._stop_live()
            self.marks(response)

    def _close(self) -> None:
        self.marks.close()


class MarkdownScreen:
    """Markdown as it grows: finished blocks are printed for good, only the last one is drawn again.

    folded: show of thinking only how much it was.
    """

    def __init__(self, console: Console, *, folded: bool = True):
        self.console, self.folded = console, folded
        self.kind, self.tail, self.drawn, self.ended = "answer", "", 0.0, False
        self.waiting, self.thinking = _Waiting(), _Thinking()
        self.live = _Live(console, self._bottom)

    def __enter__(self) -> MarkdownScreen:
        self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self.live.lock:
            self.ended = True
            self.live.refresh()
        self.live.stop()
        self._end_kind()

    def _bottom(self) -> Any:
        if self.ended:
            return Text("")
        if self.thinking.text:
            return self.thinking.line()
        parts = [_Bottom(self._rendered(self.tail))] if self.tail.strip() else []
        if line := self.waiting.line():
            parts.append(line)
        return Group(*parts) if parts else Text("")

    def progress(self, done: int, total: int) -> None:
        self.waiting.progress(done, total)

    def stopping(self) -> None:
        self.live.print(Text("Stopping ...", "dim"))

    def show(self, kind: str, text: str, response: Any = None) -> None:
        if not text:
            return
        if kind != self.kind:
            with self.live.lock:
                self._end_kind()
                self.kind = kind
        self.waiting.heard()
        if kind == "thinking" and self.folded:
            self.thinking.add(text)
            return
        with self.live.lock:
            self.tail += text
        now = time.monotonic()
        # Drawing takes milliseconds: not more than 12 times a second.
        if now - self.drawn < 0.08:
            return
        self.drawn = now
        with self.live.lock:
            done, self.tail = split_blocks(self.tail)
            self._print(done)
            self.live.refresh()

    def _end_kind(self) -> None:
        """Print permanently what is still being redrawn."""
        if line := self.thinking.end():
            self.live.print(line)
        text, self.tail = self.tail, ""
        self._print(text)

    def _rendered(self, text: str) -> Any:
        return Text(printable(text).strip("\n"), "dim italic") if self.kind == "thinking" else AnswerMarkdown(text)

    def _print(self, text: str) -> None:
        if text.strip():
            self.live.print(self._rendered(text))


class _Live:
    """The last lines of a terminal, redrawn four times a second, and all text printed above them.

    rich's own thread may draw in the middle of a print and then erases lines of it: here one lock holds for both.
    """

    def __init__(self, console: Console, bottom: Callable[[], Any]):
        self.console, self.lock, self.ended = console, threading.RLock(), threading.Event()
        self.live = Live(
            console=console,
            get_renderable=bottom,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.ticking = threading.Thread(target=self._tick, daemon=True)

    def start(self) -> None:
        self.live.start()
        self.ticking.start()

    def stop(self) -> None:
        self.ended.set()
        self.ticking.join()
        self.live.stop()

    def refresh(self) -> None:
        with self.lock:
            self.live.refresh()

    def print(self, what: Any) -> None:
        with self.lock:
            self.console.print(what)

    def _tick(self) -> None:
        while not self.ended.wait(0.25):
            self.refresh()


@dataclass
class _Bottom:
    """The last lines of text that is too high for the screen."""

    inner: Any

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.inner, options, pad=False)
        for line in lines[-max(console.height - 3, 1) :]:
            yield from line
            yield Segment.line()
