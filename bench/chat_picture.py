"""A picture of a real chat, for README: runs `dflash_mlx.serving.chat` on given lines and draws what it printed.

python bench/chat_picture.py docs/chat.svg --model tiny --draft-model tiny -- "def test_" /drafts "class Stack:" /stats
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dflash_mlx import load, load_drafter
from dflash_mlx.cli.output import draft_marker
from dflash_mlx.serving import chat
from dflash_mlx.serving.conversation import Conversation, Pair, Settings
from dflash_mlx.serving.screen import MarkdownScreen


class Tty(io.StringIO):
    """Text that a terminal would be sent."""

    def isatty(self):
        return True


class Once(MarkdownScreen):
    """Draws an answer when it is complete: a picture has no time."""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._print(self.tail)

    def progress(self, done, total):
        pass

    def show(self, kind, text):
        if kind != self.kind:
            self._print(self.tail)
            self.kind, self.tail = kind, ""
        self.tail += text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("svg")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("lines", nargs="+")
    args = parser.parse_args()

    model, tokenizer = load(args.model)
    drafter = load_drafter(args.draft_model, model) if args.draft_model else None
    pair = Pair(args.model, args.draft_model, model, tokenizer, drafter)
    screen, lines = Tty(), iter(args.lines)
    chat.MarkdownScreen = Once
    room = chat.Chat(
        Conversation(pair, Settings(max_tokens=args.max_tokens)),
        None,
        draft_marker,
        stdin=Tty(),
        stdout=screen,
        stderr=screen,
    )
    for console in (room.console, room.notes):
        console.width = args.width

    def read(prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        screen.write(f"\x1b[1m{prompt}{line}\x1b[0m\n")
        return line

    room.read = read
    room.run()
    printed = re.sub(r"\x1b\[[0-9;?]*[A-LN-Za-ln-z]", "", screen.getvalue())
    picture = Console(record=True, width=args.width, file=io.StringIO())
    picture.print(Text.from_ansi(printed))
    # Rich's template names fonts on a server; the reader's own monospace font will do.
    svg = re.sub(r"@font-face \{.*?\}", "", picture.export_svg(title="dflash-mlx chat"), flags=re.S)
    Path(args.svg).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
