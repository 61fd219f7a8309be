"""Text files that go with a message of the chat: `/file PATH`, and `@PATH` within the message."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DFlashError
from ..machine import size_text
from ..tools.columns import count

# The largest file that is read, in bytes. A context seldom holds more than a tenth of that.
LARGEST = 4_000_000
# A word with one of these suffixes counts as a file's name, even if there is no such file.
_SUFFIXES = tuple(
    f".{kind}" for kind in "txt md rst tex csv tsv json yaml yml toml xml html css py js ts c h cpp rs go swift sh log".split()
)
# @path, @"a path with blanks"; not an address such as me@host.
_NAMED = re.compile(r"""(?<!\S)@(?:"([^"\n]+)"|([^\s"]+))""")


@dataclass(frozen=True)
class Attachment:
    """A file's name as it was written, its text, and how many bytes and tokens it has; None: tokens cannot be counted here."""

    name: str
    text: str
    size_bytes: int
    tokens: int | None

    def about(self) -> str:
        lines = self.text.count("\n") + (not self.text.endswith("\n"))
        size = f"{self.size_bytes:,} bytes" if self.size_bytes < 100_000 else size_text(self.size_bytes)
        tokens = "" if self.tokens is None else f", {count(self.tokens, 'token')}"
        return f"{self.name}: {size}, {count(lines, 'line')}{tokens}"

    def block(self) -> str:
        """The text as the model reads it: under its name, in a fence that is longer than any in it."""
        fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", self.text))])
        end = "" if self.text.endswith("\n") else "\n"
        return f"{self.name}:\n{fence}\n{self.text}{end}{fence}"


def read_attachment(name: str, tokenizer: Any, limit: int | None) -> Attachment:
    """Read a text file.

    Args:
      tokenizer: None: its tokens are not counted. limit: tokens that the target's context holds; None: unknown.

    Raises:
      DFlashError: there is no such file, it is not text, or it is more than the model can read.
    """
    path = os.path.expanduser(name)
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no file" if os.path.exists(path) else "does not exist"
        raise DFlashError(f"{name} {what}", "Give the path of a text file")
    size = os.path.getsize(path)
    if size > LARGEST:
        raise DFlashError(f"{name} has {size_text(size)}; at most {size_text(LARGEST)} can be read", "Give a part of it")
    data = Path(path).read_bytes()
    try:
        text = data.decode("utf-8-sig")
        wrong = data.find(0)
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        raise DFlashError(f"{name} is not text: byte {wrong} is 0x{data[wrong]:02x}", "Give a text file in UTF-8")
    if not text:
        raise DFlashError(f"{name} is empty", "Give a file with text in it")
    tokens = len(tokenizer.encode(text, add_special_tokens=False)) if tokenizer is not None else None
    if limit and tokens is not None and tokens >= limit:
        raise DFlashError(f"{name} has {tokens:,} tokens; the target's context holds {limit:,}", "Give a part of it")
    return Attachment(name, text, len(data), tokens)


def _names(message: str) -> Iterator[tuple[str, bool]]:
    """The name after each @ of a message, once each: (name, whether it is a file or another existing path)."""
    seen = set()
    for quoted, word in _NAMED.findall(message):
        # "see @notes.txt." names notes.txt.
        names = [quoted] if quoted else [word, word.rstrip(".,;:!?)]}'")]
        found = [name for name in names if _leads_somewhere(name)]
        name = (found or names[-1:])[0]
        if name not in seen:
            seen.add(name)
            yield name, bool(found)


def _leads_somewhere(name: str) -> bool:
    path = os.path.expanduser(name)
    # A word that is also a folder's name counts as a word.
    return os.path.isfile(path) or "/" in name and os.path.exists(path)


def named_files(message: str) -> list[str]:
    """The files that a message names with @."""
    return [name for name, found in _names(message) if found]


def no_files(message: str) -> list[str]:
    """Paths after @ that lead nowhere. A word without a slash or a known suffix, such as a decorator, is only a word."""
    return [name for name, found in _names(message) if not found and ("/" in name or name.lower().endswith(_SUFFIXES))]


def with_files(message: str, files: list[Attachment], *, raw: bool) -> str:
    """A message followed by its files. raw: without a chat template a text is continued, so the files come first."""
    if raw:
        return "".join(file.text for file in files) + message
    return "\n\n".join([message, *(file.block() for file in files)])


def path_at_end(text: str) -> str | None:
    """The path at the end of a line, after `@` or `/file `, which Tab completes."""
    found = re.search(r"""(?:^/file\s+|(?<!\S)@)"?([^\s"]*)$""", text)
    return found and found.group(1)
