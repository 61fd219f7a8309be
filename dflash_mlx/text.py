"""Text as it grows: where it stops. Knows no tokens and no models."""

from __future__ import annotations

from collections.abc import Sequence


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
