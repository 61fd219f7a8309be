"""`dflash-mlx chat`: the loop of a conversation in a terminal, a dumb terminal or through a pipe.

It reads a line, does a command (`commands`) or lets the `Conversation` answer, and shows that (`screen`). Knows nothing of how
models are found: the command line hands in a function that loads a pair.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from contextlib import closing
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from ..errors import DFlashError
from ..first_use import try_after_answer
from ..generation import GenerationResponse
from .commands import run_command
from .conversation import Conversation, Pair
from .screen import MarkdownScreen, PlainScreen, line_editor, read_line, stop_on_ctrl_c
from .sessions import write_session


class Chat:
    """The loop: read a line, do a command or answer a message.

    Args:
      load: (target name, drafter name) to a `Pair`.
      marker: (tokenizer, stream) to a function that shows a response with its drafts marked.
      given: names of settings that the user gave: what changes nothing here is said once.
      session: name under which the session is kept after every turn; None: it is kept only when told.
    """

    def __init__(
        self,
        conversation: Conversation,
        load: Callable[[str | None, str | None], Pair],
        marker: Callable[[Any, TextIO], Callable[[GenerationResponse], None]],
        *,
        given: Collection[str] = (),
        session: str | None = None,
        plain: bool = False,
        stdin: TextIO | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ):
        self.conversation, self.load, self.marker, self.given, self.session = conversation, load, marker, given, session
        self.stdin, self.stdout, self.stderr = stdin or sys.stdin, stdout or sys.stdout, stderr or sys.stderr
        self.interactive = self.stdin.isatty()
        smart = self.interactive and self.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
        self.console = Console(file=self.stdout, highlight=False)
        self.notes = Console(file=self.stderr, highlight=False, soft_wrap=True)
        # Whether Markdown could be drawn here, and whether it is.
        self.drawing = smart
        self.markdown = smart and not plain
        self.show_drafts = self.failed = False
        self.read = self._reader(smart)

    def _reader(self, smart: bool) -> Callable[[str], str]:
        if not self.interactive:
            return lambda prompt: read_line(self.stdin)
        if smart:
            try:
                return line_editor(self.stdout)
            except ImportError:
                self.note("Line editing, history and pasting need prompt_toolkit: pip install prompt_toolkit")
        if self.stdout.isatty():
            return input

        def read(prompt: str) -> str:
            self.stderr.write(prompt)
            self.stderr.flush()
            return read_line(self.stdin)

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
                    if run_command(self, text):
                        break
                else:
                    self.say(text[1:] if text.startswith("//") else text)
                    # While the answer is read.
                    try_after_answer()
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
                raise DFlashError("this tokenizer has no chat template, so there is no place for --system", "Leave it out")
        self.note_without_effect(self.given)
        if self.conversation.messages:
            self.note(f"Continuing a session of {len(self.conversation.messages)} messages.")

    def note_without_effect(self, names: Collection[str]) -> None:
        """Say of each of these settings that changes nothing here why it does not."""
        for name, why in self.conversation.without_effect(names).items():
            more = " /set temp 0.7 samples." if why == "at temperature 0" else ""
            self.note(f"{name} has no effect {why}.{more}")

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
                    f"the input ended after {len(lines)} lines of a message that three double quotes began",
                    "Nothing was sent: end it with a line of three double quotes",
                ) from None
            line = "\n".join(lines)
        # A pipe may hold bytes that are no text.
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def say(self, text: str) -> None:
        """Add a message and answer it."""
        self.conversation.messages.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        talk = self.conversation
        count = len(talk.messages)
        mark = self.marker(talk.pair.tokenizer, self.stdout) if self.show_drafts and talk.pair.drafter else None
        screen = MarkdownScreen(self.console) if self.markdown and not talk.raw else PlainScreen(self.console, self.notes)
        seen = None
        try:
            with (
                stop_on_ctrl_c(lambda: talk.last or screen.stopping()) as pressed,
                screen,
                closing(talk.answer(pressed, screen.progress)) as pieces,
            ):
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
            write_session(self.session, self.conversation.state())

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
