"""Where each token of an answer came from, and which letters of the answer are its own.

Knows responses of a run and pieces of text. Knows no HTTP.
"""

from __future__ import annotations

from typing import Any

# accepted: drafted by the drafter and right. looked_up: copied from earlier text, and right. bonus: the target's own token
# after drafts. plain: nothing was drafted.
KINDS = ("accepted", "looked_up", "bonus", "plain")


class DraftKinds:
    """Names the kind of each response of one run, in the order in which they come."""

    def __init__(self) -> None:
        self._rounds = self._drafting = self._looked_up = 0
        self._kinds = "accepted", "plain"

    def of(self, response: Any) -> str:
        """A name of KINDS."""
        stats = response.stats
        if stats is not None and stats.n_rounds > self._rounds:
            # A round is counted before its first token comes.
            looked_up = sum(stats.looked_up.values())
            drafted = "looked_up" if looked_up > self._looked_up else "accepted"
            own = "bonus" if stats.n_drafting > self._drafting else "plain"
            self._kinds = drafted, own
            self._rounds, self._drafting, self._looked_up = stats.n_rounds, stats.n_drafting, looked_up
        drafted, own = self._kinds
        return drafted if response.from_draft else own


class LetterKinds:
    """Gives the letters of an answer the kinds of their tokens.

    Letters come out later than their tokens where they may begin a mark, and marks never come out.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, str]] = []

    def add(self, text: str, kind: str) -> None:
        """The text of one token."""
        if text:
            self._held.append((kind, text))

    def take(self, text: str) -> list[dict[str, str]]:
        """`text`, which is next in the answer, as {"kind", "text"} for each token; the texts joined are `text`."""
        at = "".join(letters for _, letters in self._held).find(text)
        if at < 0:
            # The reader of tool calls wrote this text; it comes from no token.
            return [{"kind": "plain", "text": text}]
        told, held, left, end = [], [], at, at + len(text)
        place = 0
        for kind, letters in self._held:
            own = letters[max(left - place, 0) : max(end - place, 0)]
            rest = letters[max(end - place, 0) :]
            place += len(letters)
            if own:
                told.append({"kind": kind, "text": own})
            if rest:
                held.append((kind, rest))
        self._held = held
        return told
