"""The chat as people use it: a pseudo-terminal, a dumb terminal, a pipe."""

import json
import os
import re
import subprocess
import sys

import pexpect
import pytest
from cli_kit import run
from kit import with_template

COMMAND = [sys.executable, "-m", "dflash_mlx.cli.app", "chat"]
PAIR = ("--model", "tiny", "--draft-model", "tiny")
# What a terminal draws with, and what it asks the terminal for.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>()][0-9A-B]?|\r")


@pytest.fixture(scope="session")
def chatty(tmp_path_factory):
    """The built-in target with a chat template."""
    return with_template(tmp_path_factory.mktemp("chatty"))


@pytest.fixture
def home(tmp_path):
    """An environment whose sessions and history lie in a folder of this test."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}


def piped(lines, env, *args):
    return run("chat", *args, stdin="\n".join(lines) + "\n", env=env)


class Terminal:
    """A chat in a pseudo-terminal; `say` waits for the status line of the answer."""

    def __init__(self, env, *args):
        self.child = pexpect.spawn(
            COMMAND[0],
            [*COMMAND[1:], *args],
            env=env,
            encoding="utf-8",
            timeout=180,
            dimensions=(30, 100),
            codec_errors="replace",
        )
        self.child.expect("lists commands")
        self.ready()

    def ready(self):
        """Wait until the line editor listens: pasting is marked, the cursor is shown."""
        self.child.expect(r"\x1b\[\?2004h")
        self.child.expect(r"\x1b\[\?25h")

    def say(self, text, wait=r"context \d+"):
        self.child.send(text + "\r")
        self.child.expect(wait)
        shown = CONTROL.sub("", self.child.before)
        held = self.child.after
        self.ready()
        return shown + held + CONTROL.sub("", self.child.before)

    def leave(self):
        self.child.send("\x04")
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


def test_a_pipe_carries_answers_on_stdout_and_everything_else_on_stderr(home):
    command = [*COMMAND, *PAIR, "-m", "12", "--block-size", "8"]
    done = subprocess.run(command, input="def test_\n/stats\n", capture_output=True, text=True, timeout=120, env=home)
    assert done.returncode == 0, done.stderr
    plain = run("generate", *PAIR, "-m", "12", "-p", "def test_")
    assert done.stdout == plain.stdout
    assert (
        "no chat template" in done.stderr and "tokens a round" in done.stderr and "context 15 of 4096 (0 reused)" in done.stderr
    )
    assert "\x1b" not in done.stdout + done.stderr


def test_a_failing_line_of_a_pipe_does_not_stop_the_others_but_the_exit_status_tells(home):
    lines = ["/nonsense", "/set temp hot", "//x", "def f", "/retry in French", "/set max_tokens 1", "/set thinking off"]
    done = piped(lines, home, *PAIR, "-m", "4")
    assert done.returncode == 1
    assert "/retry takes no argument; found 'in French'" in done.stderr
    assert "max_tokens 1, block_size default, thinking default" in done.stderr
    assert "max_tokens 1, block_size default, thinking off" in done.stderr
    assert "there is no command /nonsense" in done.stderr and "temp is 'hot'; it must be a number" in done.stderr
    assert done.stderr.count("4 tokens,") == 2 and "Traceback" not in done.stderr


def test_models_change_and_a_failing_change_keeps_the_old_one(home):
    lines = ["/model", "def f", "/model tiny", "/drafts", "(x):", "/model no/such/folder", "/model tiny auto", "/model", "y"]
    done = piped(lines, {**home, "HF_HUB_OFFLINE": "1"}, *PAIR, "-m", "4", "--block-size", "8")
    said = [line for line in done.stderr.splitlines() if line.startswith("Target ")]
    assert said == ["Target tiny, drafter tiny.", "Target tiny, no drafter.", *["Target tiny, drafter tiny."] * 2], done.stderr
    assert (
        "there is no drafter, so no drafts can be marked" in done.stderr
        and "no/such/folder" in done.stderr
        and done.returncode == 1
    )
    # Three answers, the second without a drafter.
    figures = [line for line in done.stderr.splitlines() if "tokens/s" in line]
    assert ["tokens a round" in line for line in figures] == [True, False, True]


@pytest.mark.full
def test_a_reader_that_leaves_ends_the_chat(home):
    process = subprocess.Popen(
        [*COMMAND, *PAIR, "-m", "200"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=home
    )
    process.stdin.write("def f\n" * 3)
    process.stdin.close()
    process.stdout.read(3)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in process.stderr.read()


def test_a_block_between_triple_quotes_is_one_message_and_bytes_that_are_no_text_do_no_harm(home, chatty):
    done = subprocess.run(
        [*COMMAND, "--model", chatty, "-m", "3"],
        input='"""\nfirst\n\nsecond 👩‍🚀\n"""\n/save kept\n'.encode() + b"\xff\xfe\n",
        capture_output=True,
        timeout=120,
        env=home | {"PYTHONIOENCODING": "utf-8:strict"},  # as in a locale other than C
    )
    assert done.returncode == 0, done.stderr
    path = os.path.join(home["XDG_STATE_HOME"], "dflash-mlx", "sessions", "kept.json")
    assert os.stat(path).st_mode & 0o777 == 0o600
    messages = json.loads(open(path, encoding="utf-8").read())["messages"]
    assert messages[0] == {"role": "user", "content": "first\n\nsecond 👩‍🚀"} and len(messages) == 2


@pytest.mark.full
def test_a_block_that_is_never_closed_is_an_error_and_not_lost_in_silence(home):
    done = piped(['"""', "line one", "line two"], home)
    assert done.returncode == 1 and done.stdout == ""
    assert "the input ended after 2 lines of a message that three double quotes began" in done.stderr


@pytest.mark.full
def test_a_broken_session_ends_the_command_and_is_not_written_over(home, tmp_path):
    kept = tmp_path / "dflash-mlx" / "sessions" / "s1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"version": 1, "settings": {"temp": "hot"}}')
    done = piped(["def a", "/save s1"], home, *PAIR, "--session", "s1")
    assert (
        done.returncode == 1
        and done.stderr.startswith("Error: ")
        and "s1.json is not a session" in done.stderr
        and "Traceback" not in done.stderr
    )
    # Nor by name from another chat: what is no session may be somebody's file.
    done = piped(["def a", "/load s1", "/save s1"], home, *PAIR, "-m", "2")
    assert done.returncode == 1 and done.stderr.count("s1.json is not a session") == 2
    assert kept.read_text() == '{"version": 1, "settings": {"temp": "hot"}}'


@pytest.mark.full
def test_what_was_cleared_does_not_stay_in_a_named_session(home, tmp_path):
    piped(["def a"], home, "-m", "4", "--session", "s1")
    kept = tmp_path / "dflash-mlx" / "sessions" / "s1.json"
    assert len(json.loads(kept.read_text())["messages"]) == 2
    piped(["/set temp 0.9", "/clear", "/exit"], home, "--session", "s1")
    state = json.loads(kept.read_text())
    assert state["messages"] == [] and state["settings"]["temp"] == 0.9


def test_a_second_turn_runs_only_what_is_new(home, chatty):
    done = piped(["def add(a, b):", "and now subtract"], home, "--model", chatty, "--draft-model", "tiny", "-m", "8")
    assert done.returncode == 0, done.stderr
    (used, _), (_, reused) = re.findall(r"context (\d+) of 4096 \((\d+) reused\)", done.stderr)
    # The last token of an answer that was cut by its limit, and what the template puts behind it, may differ.
    assert int(reused) >= int(used) - 2 > 10


def test_a_dumb_terminal_gets_no_control_sequences(home, chatty):
    child = pexpect.spawn(
        COMMAND[0], [*COMMAND[1:], "--model", chatty, "-m", "4"], env={**home, "TERM": "dumb"}, encoding="utf-8", timeout=60
    )
    child.expect("> ")
    seen = child.before
    child.sendline("def f")
    child.expect("4 tokens, ")
    seen += child.before
    child.expect("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0 and "\x1b" not in seen


@pytest.mark.full
def test_ten_turns_in_a_terminal_with_ctrl_c_an_emoji_a_pasted_block_and_a_resumed_session(home, chatty):
    args = ("--model", chatty, "--draft-model", "tiny", "-m", "12", "--block-size", "8")
    chat = Terminal(home, *args)
    assert "12 tokens" in chat.say("def add(a, b):")
    chat.say("/set max_tokens 2000", "max_tokens 2000")
    # An answer that is stopped keeps what there is, and the session.
    chat.child.send("class Node:\r")
    chat.child.expect(r"\x1b\[\?2004l")
    chat.child.expect(r"[a-z]+\W+[a-z]+\W+[a-z]+")
    chat.child.sendintr()
    chat.child.expect("stopped")
    chat.ready()
    chat.say("/set max_tokens 8", "max_tokens 8")
    assert "8 tokens" in chat.say("👩‍🚀 → naïve?")
    # A pasted block of several lines is one message.
    assert "8 tokens" in chat.say("\x1b[200~for i in range(3):\n    print(i)\n\nprint('end')\x1b[201~")
    chat.say("/undo", "Took back: for i in range")
    assert "8 tokens" in chat.say("first line\x1b\rsecond line")
    assert "8 tokens" in chat.say("/retry", r"same answer again[\s\S]*context \d+")
    assert "tau" in chat.say("/stats", "rollback")
    chat.say("/drafts", "Drafts are marked")
    assert "context" in chat.say("x = ")
    chat.say("/system Be brief.", "System message: Be brief.")
    chat.say("/save work", "Saved as")
    chat.say("and then")
    assert chat.leave() == 0
    sessions = os.path.join(home["XDG_STATE_HOME"], "dflash-mlx", "sessions")
    work, last = (json.load(open(os.path.join(sessions, f"{n}.json"), encoding="utf-8")) for n in ("work", "last"))
    said = [m["content"] for m in work["messages"] if m["role"] == "user"]
    assert said == ["def add(a, b):", "class Node:", "👩‍🚀 → naïve?", "first line\nsecond line", "x = "]
    assert work["system"] == "Be brief." and len(last["messages"]) == len(work["messages"]) + 2
    again = Terminal(home, *args[:4], "--session", "last")
    again.say("/set", "max_tokens 8")
    again.say("/load work", "Continuing a session of 10 messages")
    assert "8 tokens" in again.say("more")
    assert "8 tokens" in again.say("and a tenth turn")
    # The line that the first chat read last is the newest of the history.
    again.child.send("\x1b[A" * 5)
    again.child.expect("and then")
    again.child.sendintr()
    again.ready()
    assert again.leave() == 0
