"""Text as it grows: where it stops; and what one token adds to it. Knows tokenizers, no models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer


class StopText:
    """Cuts growing text before the first stop string, wherever its letters fall in tokens."""

    def __init__(self, words: Sequence[str]):
        self.words, self.held = list(words), ""

    def feed(self, text: str, last: bool = False) -> tuple[str, bool]:
        """Returns: the text that is surely before any stop string, and whether one was met.

        Text that may begin one is held until the next call; `last` gives it out.
        """
        text, self.held = self.held + text, ""
        starts = [at for at in (text.find(word) for word in self.words) if at >= 0]
        if starts:
            return text[: min(starts)], True
        if not last:
            longest = max(map(len, self.words), default=1) - 1
            for length in range(min(longest, len(text)), 0, -1):
                if any(word.startswith(text[-length:]) for word in self.words):
                    text, self.held = text[:-length], text[-length:]
                    break
        return text, False


def prompt_thinking(tokenizer: Any, ids: Sequence[int]) -> bool | None:
    """The template's enable_thinking that a prompt of token ids was rendered with, told by how it ends.

    None: the tokenizer's template has no such setting, or the prompt does not end as the template lets an answer begin.
    """
    if not getattr(tokenizer, "has_chat_template", False):
        return None
    message = [{"role": "user", "content": "x"}]
    try:
        on, off = (
            list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False, enable_thinking=setting))
            for setting in (True, False)
        )
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything; this one then tells nothing
        return None
    shared = next((i for i, (a, b) in enumerate(zip(on, off, strict=False)) if a != b), min(len(on), len(off)))
    if on == off:
        return None
    # With what comes before them, so that an end without letters of its own is told too; the longer end first.
    ends = sorted(((rendered[max(shared - 3, 0) :], setting) for rendered, setting in ((on, True), (off, False))), key=_length)
    return next((setting for end, setting in reversed(ends) if list(ids[-len(end) :]) == end), None)


def _length(end: tuple[list[int], bool]) -> int:
    return len(end[0])


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """What one token adds to the text in UTF-8, also where it is only part of a character; None where that is unknown."""
    name, way = tokenizer.convert_ids_to_tokens(token), tokenizer.detokenizer
    if isinstance(name, str) and isinstance(way, SPMStreamingDetokenizer):
        return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("\u2581", " ").encode()
    if isinstance(name, str) and isinstance(way, BPEStreamingDetokenizer):
        known = all(letter in _BYTES for letter in name)
        return bytes(_BYTES[letter] for letter in name) if known else name.encode()
    text = tokenizer.decode([token])
    return None if "\ufffd" in text else text.encode()


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: printable ones as they are, the others in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
