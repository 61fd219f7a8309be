"""docs/tour.md (what every command prints) and docs/options.md (its --help), as a terminal of 80 columns shows them.

    python scripts/tour.py            run all of them and write both pages
    python scripts/tour.py --pages    make only docs/options.md, in seconds
    python scripts/tour.py --check    compare both pages with a fresh run, up to figures; exit status 1: they differ

Runs the built-in pair `tiny` on the CPU, in an empty home directory, without a network. The pages name neither the machine nor
the user nor a path.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/support"))

from screen import COMMAND, Screen  # noqa: E402

PAGE, OPTIONS = ROOT / "docs/tour.md", ROOT / "docs/options.md"
COLUMNS = 80
PAIR = "--model tiny --draft-model tiny"
INTRO = """# A tour

What each command says, in a terminal of 80 columns, with the built-in pair `tiny`: a toy that writes beginnings of Python, made
for tests. It ran on a CPU, where its drafts are seldom worth their cost. `python scripts/tour.py` makes this page; a test
compares it with a fresh run, up to figures. All options: [options.md](options.md).
"""
OPTIONS_INTRO = """# Options

What `--help` says, for every command. `python scripts/tour.py --pages` makes this page; a test compares it with the program.
What the commands print when they run: [tour.md](tour.md).
"""
# Title, what is said of it, the command.
COMMANDS = [
    (
        "Generate",
        "The answer goes to stdout, everything else to stderr. The first run of a model also times it, so it is slow.",
        f'generate {PAIR} -p "def test_" -m 24',
    ),
    ("", "`--stats` adds statistics.", f'generate {PAIR} -p "def test_" -m 24 --block-size 4 --stats'),
    ("Models", "", "models"),
    ("Doctor", "", f"doctor {PAIR}"),
    ("Convert", "", "convert --hf-path tiny --mlx-path tiny-4bit -q"),
    (
        "Bench",
        "`--block-size 4` makes it draft: by itself it drafts where that is faster.",
        f"bench {PAIR} --kinds function,copy --temp 0 --trials 1 -m 16 --block-size 4",
    ),
    (
        "Train",
        "First the model writes text. (This is far too little to learn from: [training.md](training.md).)",
        "train data --model tiny --out text --answer-tokens 20 --rows 2 --max-len 64 --held-out 1",
    ),
    (
        "",
        "Then a drafter learns from it.",
        "train run --model tiny --data text --out drafter --steps 2 --layers 1 --block-size 4 --batch 2 --anchors 4 --max-len 64",
    ),
    ("", "Then it is measured.", "train eval --model tiny --draft-model drafter --data text"),
]
HELP = ["", "generate", "chat", "serve", "convert", "bench", "train", "train data", "train run", "train eval"]
HELP += ["models", "doctor", "cache"]
CHAT = ["def test_", "/drafts", "class Stack:", "/set", "/hepl"]
REQUEST = {"prompt": "def test_", "max_tokens": 8}

# What a machine or a moment decides is left out of the comparison.
_DECIDED_HERE = [
    r"Timing the model and its drafter once, [^.]*\.( Ctrl-C skips this\.)?",
    r"Not done after # s; the next run tries again\. To time them without a limit: dflash-mlx doctor( --(draft-)?model tiny){2}",
    r"Drafting (is|was) (on|off)[^.]*\.",
    r"Meanwhile the model and its drafter were timed, once; that slowed this answer\.",
    r", slowed once by timing the model",
    r", # times as fast as without drafts",
    r"(?<=tokens/s), # tokens a round",
    r", drafting off, as it would be slower here",
    r"(Not faster|Faster|About as fast) here[^.]*\.",
    r"(?<=B) (yes|no|hardly|perhaps)(?= )",
    r"(?<=\?) (yes|no|hardly|perhaps)(?= )",
]


@dataclass
class Shown:
    """A command and what stood on the screen at its end; over, torn: rows that the terminal had to break."""

    title: str
    about: str
    command: str
    text: str
    over: list[str]
    torn: list[str]

    def markdown(self) -> str:
        title = f"\n## {self.title}\n" if self.title else ""
        about = f"\n{self.about}\n" if self.about else ""
        return f"{title}{about}\n```text\n$ {self.command}\n{self.text}\n```\n"


def tour() -> Iterator[Shown]:
    """Run every command, one after the other, in one empty home directory.

    Raises:
      AssertionError: a command ended with another exit status than 0; names it and what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        for title, about, command in COMMANDS:
            yield _shown(title, about, command, folder)
        yield _shown(
            "Chat",
            "With `--block-size 4` there are drafts to mark; a terminal with colours has these for the marks.",
            f"chat {PAIR} --max-tokens 24 --block-size 4",
            folder,
            _chat,
        )
        yield from _serve(folder)
        yield _shown("Cache", "", "cache", folder)


def help_pages() -> Iterator[Shown]:
    """The --help of every command."""
    with tempfile.TemporaryDirectory() as folder:
        for command in HELP:
            yield _shown(f"dflash-mlx {command}".strip(), "", f"{command} --help".strip(), folder)


def _alone(folder: str) -> list[str]:
    """What begins a command line in an environment that holds nothing of the user's."""
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    kept |= {"HOME": folder, "LANG": "C.UTF-8", "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    return ["env", "-i", *(f"{name}={value}" for name, value in kept.items()), *COMMAND]


def _shown(title: str, about: str, command: str, folder: str, act: Callable[[Screen], None] | None = None) -> Shown:
    words = [*_alone(folder), *shlex.split(command)]
    with Screen(words, columns=COLUMNS, lines=60, cwd=folder, program=True) as screen:
        if act:
            act(screen)
        assert screen.end(300) == 0, f"{command}:\n{screen.text}"
    return Shown(title, about, f"dflash-mlx {command}", nameless(screen.text, folder), screen.over, screen.torn)


def _chat(screen: Screen) -> None:
    for i, line in enumerate(CHAT):
        _wait(screen, lambda i=i: len(re.findall("^>", screen.text, re.MULTILINE)) > i)
        screen.send(f"{line}\r")
    _wait(screen, lambda: len(re.findall("^>", screen.text, re.MULTILINE)) > len(CHAT))
    screen.send("\x04")


def _wait(screen: Screen, done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert screen.read() and time.monotonic() < until, f"the chat did not go on:\n{screen.text}"


def _serve(folder: str) -> Iterator[Shown]:
    """The server, a request and its answer, and Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = []

    def act(screen: Screen) -> None:
        screen.wait_for("/v1")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(REQUEST).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as got:
            found = json.load(got)
        # One is made up, the other names the system.
        answer.append(json.dumps(found | {"id": "cmpl-...", "system_fingerprint": "..."}, indent=1))
        screen.send("\x03")

    shown = _shown("Serve", "Until Ctrl-C.", f"serve {PAIR} --port {port}", folder, act)
    for name in ("command", "text"):
        setattr(shown, name, getattr(shown, name).replace(str(port), "8080"))
    yield shown
    given = f"curl -s http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\\n  -d '{json.dumps(REQUEST)}'"
    yield Shown("", "A request to it, and its answer:", given, answer[0], [], [])


def nameless(text: str, folder: str) -> str:
    """A screen without the machine: its paths, chip, system, wheels and commit."""
    text = (
        text.replace(os.path.realpath(folder), "~")
        .replace(folder, "~")
        .replace("Usage: python -m dflash_mlx", "Usage: dflash-mlx")
    )
    text = re.sub(r"^power .*\n( {12}.*\n)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(machine|system|wheels)( +).*(\n {12}.*)*", r"\1\2(of this machine)", text, flags=re.MULTILINE)
    text = re.sub(r"(with tiny on )[^$]*?(,\s\d{4}-\d\d-\d\d)", r"\1(this machine)\2", text)
    text = re.sub(r"(on the CPU) \(.*?\)", r"\1", text, flags=re.DOTALL)
    return re.sub(r",\s+commit\s+[0-9a-f]{12}(\s+and\s+changes)?", "", text)


def page(intro: str, shown: Iterable[Shown]) -> str:
    return intro + "".join(one.markdown() for one in shown)


def without_figures(text: str) -> list[str]:
    """The page's words, section by section: figures and units masked, lines joined, what a machine decides left out."""
    text = re.sub(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+)?", "#", text)
    text = re.sub(r"# (kB|MB|GB|B)\b", "# B", text)
    text = re.sub(r"# (ms|s|min|h|days?)\b", "# s", text)
    text = re.sub(r"(?<=  )now(?=  )", "# s", text)
    text = re.sub(r"#(?:\s+#)+", "#", text)
    found = []
    for block in text.split("```"):
        words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", block).split()) + " "
        for pattern in _DECIDED_HERE:
            words = re.sub(pattern, "", words)
        found += re.split(r"(?<=[.:]) ", " ".join(words.split()))
    return found


def differences(committed: str, fresh: str) -> list[str]:
    """Lines of a diff; [] where both pages say the same up to figures."""
    a, b = without_figures(committed), without_figures(fresh)
    return list(difflib.unified_diff(a, b, "the page", "a fresh run", lineterm="", n=1))


def main() -> None:
    fresh = {OPTIONS: page(OPTIONS_INTRO, help_pages())}
    if "--pages" not in sys.argv[1:]:
        fresh[PAGE] = page(INTRO, tour())
    if "--check" not in sys.argv[1:]:
        for file, text in fresh.items():
            file.write_text(text, encoding="utf-8")
    elif found := [line for file, text in fresh.items() for line in differences(file.read_text(encoding="utf-8"), text)]:
        print(*found, "python scripts/tour.py makes the pages anew.", sep="\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
