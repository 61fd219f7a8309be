"""The chat as a person sees it: a terminal of 40, 80 and 200 columns, with a model that says what a script holds."""

import itertools
import json
import re
import shutil
import sys
import time
from contextlib import contextmanager

import pytest
import talker
from screen import Screen, private_words

from dflash_mlx.serving.commands import COMMANDS

pytestmark = pytest.mark.full

ANSWER = (
    "Here is a *list* of incomprehensible words in a paragraph that is longer than any line of forty columns:\n\n"
    "1. one\n2. two three four five six seven eight nine ten eleven\n\n"
    "```python\nprint('one line of code')\n```\n\nThe `List<int>` is a List<int>.\nA second line.\n\n"
    "| name | meaning of it | incomprehensibilities |\n| - | - | - |\n| alpha | the first of letters | none |\n\nThe end of it."
)


@pytest.fixture
def home(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "VISUAL": "", "EDITOR": ""}


class Talk:
    """A chat with a scripted model. `say` sends a line; `hear` waits for words, however they are wrapped."""

    def __init__(self, screen):
        self.screen = screen

    @property
    def words(self):
        return " ".join(self.screen.text.split())

    def hear(self, *texts):
        for text in texts:
            until = time.monotonic() + 60
            while text not in self.words and time.monotonic() < until and self.screen.read(0.05):
                pass
            assert text in self.words, f"{text!r} did not come:\n{self.screen.text}"

    def say(self, line, *texts):
        self.screen.send(f"{line}\r")
        self.hear(*texts)

    def leave(self):
        self.screen.send("\x04")
        assert self.screen.end() == 0
        assert not self.screen.torn and not self.screen.over, self.screen.text


@contextmanager
def chat(env, columns=80, cwd=None, **script):
    # At 40 columns a list of commands alone takes more lines than a screen has.
    words = [sys.executable, talker.PROGRAM, json.dumps(script)]
    with Screen(words, columns=columns, lines=60, env=env, program=True, cwd=cwd) as screen:
        talk = Talk(screen)
        talk.hear("/help lists commands.", " >")
        yield talk


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_answers_and_notices_are_wrapped_and_never_torn(home, columns):
    with chat(home, columns, answer=ANSWER, thinking="hm " * 40, delay_s=0.02) as talk:
        talk.say("hello", "Thought for", "/thoughts shows them.", "The end of it.", "tokens/s")
        words = talk.words
        assert "1. one" in words and "2. two three" in words
        assert "The List<int> is a List<int>." in words and "A second line." in words and "incomprehensibilities" in words
        assert "hm hm hm" not in words
        # What is on the screen now was drawn a hundred times; no line of it stands there twice.
        assert words.count("Here is a list") == 1 and words.count("print('one line of code')") == 1
        talk.say("/help", "is written with //. >")
        talk.say("/hepl", "there is no command /hepl. Did you mean /help? >")
        talk.say("/thoughts", "hm hm hm")
        talk.say("/thoughts on", "shown as it comes")
        talk.say("/sessions", "begins with", "last now 2 scripted hello")
        talk.say("/set", "max_tokens 1024")
        talk.say("/system " + "be brief and clear " * 10, "System message: be brief")
        talk.leave()
        assert (
            talk.words.startswith("scripted, 7.2 million parameters, 14.4 MB, on the ") and "Drafting is off: there" in talk.words
        )


# Each command with what it takes, as it does what it is for and as it is refused.
TYPED = """/help
/system be brief and clear, and say what is not known
/system
/undo
/retry
/file notes.txt
/file absent-file-of-a-long-name.txt
/edit words
/copy
/save kept
/load kept
/load ../x
/sessions
/model
/model another with-two drafters
/set temp 0.7
/set colour red
/stats
/thoughts on
/thoughts perhaps
/drafts
/drafts
/clear
/hepl"""


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_every_command_of_a_chat_is_within_the_width_and_in_no_words_of_ours(home, tmp_path, columns):
    assert {line.split()[0].lstrip("/") for line in TYPED.splitlines()} >= {*COMMANDS} - {"exit"}
    (tmp_path / "notes.txt").write_text("alpha beta\n")
    with chat(
        {**home, "EDITOR": shutil.which("true")}, columns, cwd=str(tmp_path), answer="Yes.", thinking="hm", drafter=True
    ) as talk:
        talk.say("hello", "tokens/s")
        for line in TYPED.splitlines():
            # The clock of a prompt: each command leaves an empty one behind it.
            before = talk.words.count(">")
            talk.screen.send(f"{line}\r")
            until = time.monotonic() + 30
            while not (talk.words.endswith(" >") and talk.words.count(">") > before) and time.monotonic() < until:
                talk.screen.read(0.05)
            assert talk.words.endswith(" >"), talk.screen.text
        talk.leave()
    said = "\n".join(line for line in talk.screen.text.splitlines() if not line.startswith("> "))
    assert not private_words(re.sub("/stats.*?(?=> )", "", said, flags=re.DOTALL)), said


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_text_without_markdown_is_wrapped_as_it_comes(home, columns):
    answer = "incomprehensible words stand in lines of any width " * 8 + "\n    indented\nand CJK: " + "\u4f60\u597d" * 60
    with chat(home, columns, answer=answer, raw=True, delay_s=0.01) as talk:
        talk.say("hello", "tokens/s")
        rows = talk.screen.text.splitlines()
        assert "    indented" in rows and all("incompreh" not in row or "incomprehensible" in row for row in rows)
        assert talk.screen.text.replace("\n", "").count("\u4f60") == 60
        talk.leave()


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("raw", [False, True])
def test_keys_typed_during_an_answer_are_not_shown_in_it_and_wait_at_the_next_prompt(home, columns, raw):
    with chat(home, columns, answer="word " * 40, delay_s=0.04, raw=raw) as talk:
        talk.say("hello", "word word")
        talk.screen.send("quick")
        talk.hear("word " * 12)
        talk.screen.send("er and")
        talk.hear("tokens/s", "> quicker and")
        before = talk.words[: talk.words.index("tokens/s")]
        assert "q" not in before and before.count("word") == 40, talk.screen.text
        # Two lines that are pasted meanwhile are one message still, and Ctrl-C throws nothing away.
        talk.screen.send("\x15")
        talk.say("again", "> again word word")
        talk.screen.send("\x1b[200~one\rtwo\x1b[201~ three")
        talk.screen.send("\x03")
        talk.hear("stopped", "one two three")
        talk.screen.send("\x03")
        talk.hear("Ctrl-D or /exit leaves. >")
        talk.leave()


def test_a_long_paste_is_folded_and_sent_whole(home, tmp_path):
    with chat(home, echo=True) as talk:
        talk.screen.send("\x1b[200~" + "\r".join(f"line {i}" for i in range(30)) + "\x1b[201~")
        talk.hear("> [paste 1: 30 lines]")
        assert "line 3" not in talk.words
        talk.say(" and more", "line 29 and more")
        # Another chat gets it from the history as text: the mark would mean nothing there.
        talk.leave()
    history = (tmp_path / "state" / "dflash-mlx" / "history").read_text()
    assert "line 29 and more" in history and "[paste" not in history


def test_a_message_is_written_in_the_users_editor(home, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "written\\nbehind %s" "$(cat "$1")" > "$1"\n')
    editor.chmod(0o700)
    with chat({**home, "EDITOR": str(editor)}, echo=True) as talk:
        talk.say("/edit first words", "written behind first words", "3 tokens")
        talk.screen.send("half a line")
        talk.hear("> half a line")
        talk.screen.send("\x18\x05")
        talk.hear("> written behind half a line")
        talk.say(", ended", "behind half a line, ended 5 tokens")
        talk.leave()


def test_files_go_with_a_message_and_their_size_is_shown(home, tmp_path):
    (tmp_path / "notes.txt").write_text("alpha\nbeta\n")
    (tmp_path / "with blank.txt").write_text("gamma")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00")
    (tmp_path / "much.txt").write_text("word " * 600)
    with chat(home, cwd=str(tmp_path), echo=True) as talk:
        talk.say("/file picture.png", "Error: picture.png is not text: byte 0 is 0x89.")
        talk.say("/file much.txt", "much.txt has 600 tokens; the target's context holds 500.")
        talk.say("look @much.txt", "Give a part of it. >")
        talk.say("/file absent.txt", "absent.txt does not exist")
        talk.say("/file notes.txt", "notes.txt: 11 bytes, 2 lines, 2 tokens. It goes with your next message.")
        talk.say(
            'see @"with blank.txt", me@host, @dataclass, @no/such and @gone.txt',
            "with blank.txt: 5 bytes, 1 line, 1 token.",
            "@no/such is not a file here",
            "@gone.txt is not a file here",
        )
        talk.hear("alpha beta", "gamma", "tokens/s")
        talk.say("plain", "tokens/s")
        talk.screen.send("/file no\t")
        talk.hear("> /file notes.txt")
        talk.screen.send("\x15")
        talk.leave()
    kept = json.loads((tmp_path / "state" / "dflash-mlx" / "sessions" / "last.json").read_text())
    texts = [message["content"] for message in kept["messages"] if message["role"] == "user"]
    assert texts[0].startswith('see @"with blank.txt"') and texts[0].endswith("with blank.txt:\n```\ngamma\n```")
    assert "notes.txt:\n```\nalpha\nbeta\n```" in texts[0] and texts[1] == "plain"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_session_that_goes_on_is_recapped(home, columns):
    with chat(home, columns, answer="Forty-two, said the machine.", model="one") as talk:
        talk.say("what is the answer to everything?", "tokens/s")
        talk.say("/system Be brief.", "System message")
        talk.say("/set temp 0.7", "temp 0.7")
        talk.say("/copy", "Copied 29 letters")
        talk.leave()
    with chat(home, columns, answer="", model="two", thinking="") as talk:
        talk.hear("Continuing a session of 2 messages.", "That session was with one; it goes on with two.", "temp 0.7")
        talk.hear("System message: Be brief.", "You: what is the answer to everything?", "Answer: Forty-two, said the machine.")
        talk.say("and now?", "The answer is empty: the model ended it at once.")
        talk.say("/load ../x", "'../x' cannot be the name of a session")
        talk.leave()


def test_an_answer_of_thinking_alone_says_so_and_a_slow_one_shows_its_seconds(home):
    with chat(home, thinking="hm hm", wait_s=3) as talk:
        talk.say("hello", "(1 s)", "(2 s)", "The model thought and gave no answer")
        talk.leave()
        # Not counted: what Python and MLX take to start.
        begun = [at for at in talk.screen.changes if at > talk.screen.changes[1]]
        assert max(b - a for a, b in itertools.pairwise(begun)) < 2
