"""`dflash-mlx chat`: the loop of a conversation in a terminal, a dumb terminal or through a pipe.

It reads a line, runs a command (`commands`) or lets the `Conversation` answer, and shows the result (`screen`). It does not know
how models are found: the command line passes a function that loads a pair.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing, nullcontext
from io import TextIOWrapper
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from ..errors import DFlashError, error_text
from ..first_use import try_after_answer
from .attachments import Attachment, named_files, no_files, read_attachment, with_files
from .commands import COMMANDS, run_command
from .conversation import Conversation, Pair
from .draft_marks import DraftMarks
from .editor import LineEditor, read_line
from .keys import keys_wait
from .log_lines import held_log
from .recap import figures, first_line, nothing_shown, recap
from .screen import MarkdownScreen, MarkedScreen, PlainScreen, stop_on_ctrl_c
from .sessions import write_session


class Chat:
    """The loop: read a line, do a command or answer a message.

    Args:
      load: (target name, drafter name) to a `Pair`.
      given: names of settings that the user gave. One without effect here is reported once.
      session: name under which the session is saved after every turn; None: it is saved only on request.
      resumed: the state of a session that is continued; a recap of it is shown.
    """

    def __init__(
        self,
        conversation: Conversation,
        load: Callable[[str | None, str | None], Pair],
        *,
        given: Collection[str] = (),
        session: str | None = None,
        resumed: Mapping[str, Any] | None = None,
        plain: bool = False,
        stdin: TextIO | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ):
        self.conversation, self.load, self.given, self.session, self.resumed = conversation, load, given, session, resumed
        self.stdin, self.stdout, self.stderr = stdin or sys.stdin, stdout or sys.stdout, stderr or sys.stderr
        if isinstance(self.stdin, TextIOWrapper):
            # In every locale, bytes that are not text are read as half surrogates.
            self.stdin.reconfigure(errors="surrogateescape")
        self.interactive = self.stdin.isatty()
        # Whether Markdown could be drawn here, and whether it is.
        self.drawing = self.interactive and self.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
        self.markdown = self.drawing and not plain
        self.console = Console(file=self.stdout, highlight=False)
        # A terminal's notes are wrapped between words; a file's lines stay whole.
        self.notes = Console(file=self.stderr, highlight=False, soft_wrap=not self.stderr.isatty())
        self.show_drafts = self.failed = False
        self.folded = self.drawing
        # Files that go with the next message.
        self.files: list[Attachment] = []
        self.editor = LineEditor(self.stdout, lambda: [f"/{name}" for name in COMMANDS]) if self.drawing else None

    def read(self, prompt: str) -> str:
        """A line; with the line editor it may be several. Raises: EOFError at the end of the input, KeyboardInterrupt."""
        if self.editor:
            return self.editor(prompt)
        if self.interactive and self.stdout.isatty():
            return input(prompt)
        if self.interactive:
            self.stderr.write(prompt)
            self.stderr.flush()
        return read_line(self.stdin)

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line that is not part of an answer: on stderr, dimmed."""
        self.notes.print(Text(text, style))

    def show(self, what: Any) -> None:
        """Print something drawn that is not part of an answer, such as a table."""
        self.notes.print(what)

    def run(self) -> None:
        """Chat until Ctrl-D, `/exit` or the end of a pipe."""
        with ExitStack() as stack:
            if self.editor:
                stack.callback(self.editor.close)
                stack.enter_context(keys_wait(self.stdin))
            self._greet()
            self._turns()
            if self.interactive and self.session and self.conversation.messages:
                self.note(f"Session kept: dflash-mlx chat --session {self.session}")

    def _turns(self) -> None:
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
                    if (drafter := self.conversation.pair.drafter) is not None:
                        drafter.pair.finish_measuring(limit_s=1.0)
            except KeyboardInterrupt:
                self.note("Interrupted.")
            except BrokenPipeError:
                # The reader of the answers has closed the pipe.
                raise
            except Exception as error:
                # A turn that fails does not end the chat.
                self.note(f"Error: {error_text(error)}", "red")
                self.failed = True

    def _greet(self) -> None:
        talk = self.conversation
        self.note(first_line(talk) + (" /help lists commands." if self.interactive else ""))
        if self.conversation.raw:
            self.note("This tokenizer has no chat template: what you type is continued as it is.")
            if self.conversation.system is not None:
                raise DFlashError("this tokenizer has no chat template, so there is no place for --system", "Leave it out")
        self.note_without_effect(self.given)
        if self.resumed is not None:
            self.note("\n".join(recap(talk, self.resumed)))

    def note_without_effect(self, names: Collection[str]) -> None:
        """For each of these settings that has no effect here, say why."""
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
        # A pipe may hold bytes that are not text.
        return line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def attach(self, name: str) -> Attachment:
        """Attach a text file to the next message. Raises: DFlashError, as `read_attachment`."""
        found = read_attachment(name, self.conversation.pair.tokenizer, self.conversation.limit)
        self.files.append(found)
        return found

    def say(self, text: str) -> None:
        """Add a message, with the files that go with it, and answer it."""
        talk, waiting = self.conversation, self.files
        count = len(talk.messages)
        self.files = list(waiting)
        try:
            for name in named_files(text):
                self.note(f"{self.attach(name).about()}.")
            for name in no_files(text):
                self.note(f"@{name} is not a file here; it is sent as a word.")
            talk.messages.append({"role": "user", "content": with_files(text, self.files, raw=talk.raw)})
            self._answer()
        finally:
            # If this message was refused or taken back, its attached files stay for the next one.
            self.files = [] if len(talk.messages) > count else waiting

    def _screen(self) -> PlainScreen:
        """The object that shows one answer."""
        talk = self.conversation
        if self.show_drafts and talk.pair.drafter:
            return MarkedScreen(self.console, self.notes, DraftMarks(talk.pair.tokenizer, self.console), live=self.drawing)
        if self.markdown and not talk.raw:
            return MarkdownScreen(self.console, folded=self.folded)
        return PlainScreen(self.console, self.notes, folded=self.folded, live=self.drawing)

    def _answer(self) -> None:
        talk, screen = self.conversation, self._screen()
        count = len(talk.messages)
        # The reader of keys has turned off the terminal's echo for the whole chat.
        quiet = keys_wait(self.stdin, lines=True) if self.interactive and not self.editor else nullcontext()
        try:
            with (
                quiet,
                stop_on_ctrl_c(lambda: talk.last or screen.stopping()) as pressed,
                ExitStack() as log,
                screen,
                closing(talk.answer(pressed, screen.progress)) as pieces,
            ):
                for n, shown in enumerate(pieces):
                    if n == 0:
                        log.enter_context(held_log())
                    screen.show(*shown)
        finally:
            if len(talk.messages) == count:
                # There is no answer, so the message is not part of the conversation.
                talk.undo()
        if talk.last is None:
            self.note("Stopped before the first token; the message is taken back.")
            return
        if nothing := nothing_shown(talk.messages[-1], talk.stopped):
            self.note(nothing)
        self.note(figures(talk))
        if self.session:
            write_session(self.session, talk.state())
