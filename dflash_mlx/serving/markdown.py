"""Markdown of an answer, drawn by rich so that nothing of the answer is lost, and cut where a block has ended."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import ListItem, Markdown, MarkdownElement, TableElement
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from .wrapping import printable


class _Item(ListItem):
    """A list's item whose number keeps its point; rich leaves it out."""

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        width = len(str(last_number)) + 3
        lines = console.render_lines(self.elements, options.update(width=options.max_width - width), style=self.style)
        style = console.get_style("markdown.item.number", default="none")
        for i, line in enumerate(lines):
            yield Segment(("" if i else f"{number}. ").rjust(width), style)
            yield from line
            yield Segment.line()


class _WholeWordTable(TableElement):
    """A table whose columns hold at least their longest words; where those do not fit, each row as lines of "heading: cell".

    rich makes the widest columns narrow first, whatever words stand in them, and cuts these.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            yield from [table] if self._set_widths(table, console, options) else self._lines()

    def _set_widths(self, table: Any, console: Console, options: ConsoleOptions) -> bool:
        """Give the columns widths in which no word is torn; False: there are none."""
        wide = options.update(width=10_000)
        rows = [self.header.row] if self.header and self.header.row else []
        rows += self.body.rows if self.body else []
        if not isinstance(table, Table) or not table.columns or not rows:
            return False
        cells = zip_longest(*([Measurement.get(console, wide, cell.content) for cell in row.cells] for row in rows))
        sizes = [[size for size in column if size] for column in cells]
        least = [max(size.minimum for size in column) for column in sizes]
        more = [max(size.maximum for size in column) - low for column, low in zip(sizes, least, strict=True)]
        room = options.max_width - (Measurement.get(console, wide, table).maximum - sum(more))
        if room < 0:
            return False
        if room < sum(more):
            for column, low, extra in zip(table.columns, least, more, strict=False):
                column.width = low + extra * room // sum(more)
        return True

    def _lines(self) -> Iterator[Text]:
        heads = [cell.content for cell in self.header.row.cells] if self.header and self.header.row else []
        for row in self.body.rows if self.body else []:
            for head, cell in zip(heads, row.cells, strict=False):
                yield Text.assemble((f"{head.plain}: ", "markdown.table.header"), cell.content)
            yield Text("")


class AnswerMarkdown(Markdown):
    """rich's Markdown with lines as the model wrote them, tags as text, and addresses written out.

    rich drops tags (List<int> would be List), joins lines (a poem would be a paragraph), and hides addresses in links that not
    every terminal shows.
    """

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "list_item_open": _Item,
        "table_open": _WholeWordTable,
    }

    def __init__(self, text: str):
        super().__init__("", hyperlinks=False)
        self.markup = printable(text)
        parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self.parsed = [_with_lines(token) for token in parser.parse(self.markup)]


def _with_lines(token: Token) -> Token:
    for child in token.children or ():
        if child.type == "softbreak":
            child.type = "hardbreak"
    return token


def split_blocks(text: str) -> tuple[str, str]:
    """Cut growing Markdown after its last finished block: (finished, the rest).

        "# A\\n\\ntext\\n\\n- one\\n"  ->  ("# A\\n\\ntext\\n\\n", "- one\\n")

    An empty line ends a block, but not inside a code fence.
    """
    fence, cut, at, ended = None, 0, 0, False
    for line in text.splitlines(keepends=True):
        # An indented line after an empty one still belongs to its list item.
        if ended and not line[0].isspace():
            cut = at
        at += len(line)
        mark = line.lstrip()[:3]
        ended = fence is None and line == "\n" or ended and line[0].isspace()
        if fence is None and mark in ("```", "~~~"):
            fence = mark
        elif fence is not None and mark == fence:
            fence = None
    return text[:cut], text[cut:]
