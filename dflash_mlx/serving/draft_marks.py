"""An answer with its drafts marked, in colours or, where there are none, in the marks of a word diff."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from .draft_kinds import DraftKinds
from .wrapping import WrappedText

# Style, and what stands round a text where there are no colours.
KINDS = {
    "accepted": ("green", "{}"),
    "rejected": ("red strike", "[-{}-]"),
    "bonus": ("bold yellow", "{{+{}+}}"),
    "plain": ("", "{}"),
}
MEANINGS = {
    "accepted": "drafted and right",
    "rejected": "drafted and wrong, not part of the text",
    "bonus": "the model's own token after drafts",
    "plain": "not drafted",
}


def has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> Text:
    """What the marks mean, in one line, drawn as they are."""
    parts = []
    for kind, (style, marks) in KINDS.items():
        meaning = MEANINGS[kind]
        parts.append(Text(meaning, style) if has_colours(console) else Text(marks.format(meaning)))
    return Text.assemble("Drafts: ", Text("; ").join(parts), ".")


class DraftMarks:
    """Shows the responses of one run with their drafts marked. `close` ends the last line."""

    def __init__(self, tokenizer: Any, console: Console):
        self.tokenizer, self.out = tokenizer, WrappedText(console)
        self.coloured = has_colours(console)
        self.kinds = DraftKinds()

    def __call__(self, response: Any) -> None:
        kind = self.kinds.of(response)
        if kind == "bonus":
            last = response.stats.rounds[-1]
            rejected = self.tokenizer.decode(last["drafted"][last["accepted"] : last["width"]])
            self._put(rejected.replace("\n", "\u21b5"), "rejected")
        # Drafted and right, whoever drafted it.
        self._put(response.text, "accepted" if kind == "looked_up" else kind)

    def close(self) -> None:
        self.out.close()

    def _put(self, text: str, kind: str) -> None:
        style, marks = KINDS[kind]
        if text:
            self.out.write(text if self.coloured else marks.format(text), style if self.coloured else "")
