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
