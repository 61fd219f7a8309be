"""The chat's line editor, on prompt_toolkit: history, folded pastes and $EDITOR."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TextIO

from ..errors import DFlashError
from .attachments import path_at_end
from .sessions import history_file

# A paste of more lines or letters than these is shown as one mark.
FOLD_LINES, FOLD_LETTERS = 8, 800


def read_line(stream: TextIO) -> str:
    line = stream.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


class Pastes:
    """Long pasted texts, each under the mark that stands for it in the line."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """A pasted text as the line shows it: as it is, or its mark if it is long."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.count("\n") + 1
        if lines <= FOLD_LINES and len(text) <= FOLD_LETTERS:
            return text
        size = f"{lines} lines" if lines > 1 else f"{len(text)} letters"
        mark = f"[paste {len(self.texts) + 1}: {size}]"
        self.texts[mark] = text
        return mark

    def unfold(self, text: str) -> str:
        """A line with the texts in place of their marks."""
        for mark, pasted in self.texts.items():
            text = text.replace(mark, pasted)
        return text


class LineEditor:
    """Reads a message. Call it with the prompt; it returns the text, with pasted texts unfolded.

    Args:
      commands: those that Tab completes.

    Raises, when called:
      EOFError: Ctrl-D on an empty line. KeyboardInterrupt: Ctrl-C.
    """

    def __init__(self, stdout: TextIO, commands: Callable[[], Iterable[str]] = tuple):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output

        self.pastes = Pastes()
        self.output = create_output(stdout)
        self.session: PromptSession[str] = PromptSession(
            history=self._history(),
            key_bindings=self._keys(),
            multiline=True,
            prompt_continuation="  ",
            completer=completer(commands),
            complete_while_typing=False,
            tempfile_suffix=".md",
            output=self.output,
        )
        # Text to begin with in $EDITOR at the next prompt; None: no editor.
        self._to_edit: str | None = None

    def __call__(self, prompt: str) -> str:
        text, self._to_edit = self._to_edit, None
        try:
            if text is None:
                return self.pastes.unfold(self.session.prompt(prompt))
            opened = lambda: self.session.default_buffer.open_in_editor(validate_and_handle=True)  # noqa: E731
            return self.pastes.unfold(self.session.prompt(prompt, default=text, pre_run=opened))
        finally:
            # What is pasted while an answer runs keeps its marks, so that its lines are not sent one by one.
            self.output.enable_bracketed_paste()
            self.output.flush()

    def edit(self, text: str) -> None:
        """Open $EDITOR with this text at the next prompt; what is saved there is sent."""
        self._to_edit = text

    def close(self) -> None:
        self.output.disable_bracketed_paste()
        self.output.flush()

    def _history(self) -> Any:
        """The lines of earlier chats. They hold pasted texts unfolded: marks mean nothing later."""
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        try:
            kind, arguments = FileHistory, [str(history_file())]
        except (DFlashError, OSError):
            kind, arguments = InMemoryHistory, []
        pastes = self.pastes

        class Unfolded(kind):
            def append_string(self, string: str) -> None:
                super().append_string(pastes.unfold(string))

            def store_string(self, string: str) -> None:
                # A full disk only means that later chats lack this line.
                with suppress(OSError):
                    super().store_string(string)

        return Unfolded(*arguments)

    def _keys(self) -> Any:
        from prompt_toolkit.key_binding import KeyBindings
        from prompt_toolkit.keys import Keys

        keys = KeyBindings()

        @keys.add("enter")
        def _send(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _new_line(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def _paste(event: Any) -> None:
            event.current_buffer.insert_text(self.pastes.fold(event.data))

        @keys.add("c-x", "c-e")
        def _edit(event: Any) -> None:
            buffer = event.current_buffer
            buffer.text = self.pastes.unfold(buffer.text)
            buffer.open_in_editor()

        return keys


def completer(commands: Callable[[], Iterable[str]]) -> Any:
    """Completion by Tab: commands at the beginning of a line, and paths after `@` or `/file `."""
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class Ours(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
            text = document.text_before_cursor
            if (path := path_at_end(text)) is not None:
                hidden = os.path.basename(path).startswith(".")
                shown = lambda name: hidden or not os.path.basename(name).startswith(".")  # noqa: E731
                yield from PathCompleter(file_filter=shown, expanduser=True).get_completions(Document(path), complete_event)
            elif text.startswith("/") and " " not in text:
                yield from (Completion(name, -len(text)) for name in commands() if name.startswith(text))

    return Ours()
