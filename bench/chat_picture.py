"""A picture of a real chat, for README: types lines into `dflash-mlx chat` in a terminal and draws what stands there at the end.

python bench/chat_picture.py docs/chat.svg --model tiny --draft-model tiny -- "def test_" /drafts "class Stack:"
"""

import argparse
import io
import itertools
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from screen import Screen  # noqa: E402


def styled(cell) -> str:
    """The style of one cell of the screen, in rich's words."""
    words = [word for word in ("bold", "underscore", "italics", "reverse") if getattr(cell, word)]
    words = [{"underscore": "underline", "italics": "italic"}.get(word, word) for word in words]
    # pyte's names: brown is yellow; others are six hexadecimal digits.
    colour = {"brown": "yellow", "default": ""}.get(cell.fg, cell.fg)
    if re.fullmatch("[0-9a-f]{6}", colour):
        colour = f"#{colour}"
    elif colour.startswith("bright"):
        colour = "bright_" + colour[6:].replace("brown", "yellow")
    return " ".join([*words, colour]).strip()


def drawn(screen: Screen) -> Text:
    """All rows of a screen, those that went off its top too."""
    terminal, text = screen.terminal, Text()
    rows = [*terminal.history.top, *(terminal.buffer[y] for y in range(terminal.lines))]
    for row in rows:
        for style, cells in itertools.groupby((row[x] for x in range(screen.columns)), styled):
            text.append("".join(cell.data for cell in cells), style or None)
        text.append("\n")
    text.rstrip()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", required=True)
    parser.add_argument("--options", default="", help="more options of the chat, in one text")
    parser.add_argument("--width", type=int, default=88)
    parser.add_argument("lines", nargs="+")
    args = parser.parse_args()

    command = ["chat", "--model", args.model, "--draft-model", args.draft_model, *args.options.split()]
    with Screen(command, columns=args.width, lines=60) as screen:
        for n in range(len(args.lines) + 1):
            until = time.monotonic() + 300
            while len(re.findall("^>", screen.text, re.MULTILINE)) <= n:
                if not screen.read() or time.monotonic() > until:
                    parser.exit(1, f"the chat did not go on:\n{screen.text}\n")
            if n < len(args.lines):
                screen.send(f"{args.lines[n]}\r")
        text = drawn(screen)
        screen.send("\x04")
    picture = Console(record=True, width=args.width, file=io.StringIO())
    picture.print(text)
    # Rich's template names fonts on a server; the reader's own monospace font will do.
    svg = re.sub(r"@font-face \{.*?\}", "", picture.export_svg(title="dflash-mlx chat"), flags=re.DOTALL)
    Path(args.svg).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
