"""The chat as people use it: a pseudo-terminal, a dumb terminal, a pipe; and the parts that need no process."""

import itertools
import json
import os
import re
import subprocess
import sys

import pexpect
import pytest
from kit import scripted, with_template
from mlx_lm.tokenizer_utils import TokenizerWrapper
from rich.console import Console

from dflash_mlx import generation
from dflash_mlx.draft_length.policy import FixedDraftLength
from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.chat import Chat, Conversation, Pair, Settings, _MarkdownScreen, read_session, split_blocks

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
    return subprocess.run(
        [*COMMAND, *args], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=120, env=env, encoding="utf-8"
    )


class Terminal:
    """A chat in a pseudo-terminal; `say` waits for the status line of the answer."""

    def __init__(self, env, *args):
        self.child = pexpect.spawn(
            COMMAND[0], [*COMMAND[1:], *args], env=env, encoding="utf-8", timeout=60, dimensions=(30, 100), codec_errors="replace"
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
    done = piped(["def test_", "/stats"], home, *PAIR, "-m", "12", "--block-size", "8")
    assert done.returncode == 0, done.stderr
    plain = subprocess.run([*COMMAND[:-1], "generate", *PAIR, "-m", "12", "-p", "def test_"], capture_output=True, text=True)
    assert done.stdout == plain.stdout
    assert "no chat template" in done.stderr and "tau" in done.stderr and "context 15 of 4096 (0 reused)" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_a_failing_line_of_a_pipe_does_not_stop_the_others_but_the_exit_status_tells(home):
    lines = ["/nonsense", "/set temp hot", "//x", "def f", "/retry in French", "/set max_tokens 1", "/set thinking off"]
    done = piped(lines, home, *PAIR, "-m", "4")
    assert done.returncode == 1
    assert "expected /retry alone; found 'in French' behind it" in done.stderr
    assert "max_tokens 1, block_size default, thinking default" in done.stderr
    assert "max_tokens 1, block_size default, thinking off" in done.stderr
    assert "found /nonsense" in done.stderr and "expected temp to be a number at least 0; found 'hot'" in done.stderr
    assert done.stderr.count("4 tokens,") == 2 and "Traceback" not in done.stderr


def test_models_change_and_a_failing_change_keeps_the_old_one(home):
    lines = ["/model", "def f", "/model tiny", "/drafts", "(x):", "/model no/such/folder", "/model tiny auto", "/model", "y"]
    done = piped(lines, {**home, "HF_HUB_OFFLINE": "1"}, *PAIR, "-m", "4", "--block-size", "8")
    said = [line for line in done.stderr.splitlines() if line.startswith("Target ")]
    assert said == ["Target tiny, drafter tiny.", "Target tiny, no drafter.", *["Target tiny, drafter tiny."] * 2], done.stderr
    assert "expected a drafter for /drafts" in done.stderr and "no/such/folder" in done.stderr and done.returncode == 1
    # Three answers, the second without a drafter and so without tau.
    figures = [line for line in done.stderr.splitlines() if "tokens/s" in line]
    assert ["tau" in line for line in figures] == [True, False, True]


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
        env=home,
    )
    assert done.returncode == 0, done.stderr
    path = os.path.join(home["XDG_STATE_HOME"], "dflash-mlx", "sessions", "kept.json")
    assert os.stat(path).st_mode & 0o777 == 0o600
    messages = json.loads(open(path, encoding="utf-8").read())["messages"]
    assert messages[0] == {"role": "user", "content": "first\n\nsecond 👩‍🚀"} and len(messages) == 2


def test_a_block_that_is_never_closed_is_an_error_and_not_lost_in_silence(home):
    done = piped(['"""', "line one", "line two"], home)
    assert done.returncode == 1 and done.stdout == ""
    assert "expected a line of three double quotes to end the message" in done.stderr


def test_a_broken_session_ends_the_command_and_is_not_written_over(home, tmp_path):
    kept = tmp_path / "dflash-mlx" / "sessions" / "s1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"version": 1, "settings": {"temp": "hot"}}')
    done = piped(["def a", "/save s1"], home, *PAIR, "--session", "s1")
    assert done.returncode == 1 and done.stderr.startswith("Error: expected a session") and "Traceback" not in done.stderr
    # Nor by name from another chat: what is no session may be somebody's file.
    done = piped(["def a", "/load s1", "/save s1"], home, *PAIR, "-m", "2")
    assert done.returncode == 1 and done.stderr.count("s1.json is something else") == 2
    assert kept.read_text() == '{"version": 1, "settings": {"temp": "hot"}}'


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


def test_without_prompt_toolkit_a_terminal_is_told_what_is_missing_and_works(home, tmp_path):
    (tmp_path / "hidden" / "prompt_toolkit").mkdir(parents=True)
    (tmp_path / "hidden" / "prompt_toolkit" / "__init__.py").write_text("raise ImportError('not installed')")
    env = {**home, "PYTHONPATH": os.pathsep.join([str(tmp_path / "hidden"), home.get("PYTHONPATH", "")])}
    child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], *PAIR, "-m", "4"], env=env, encoding="utf-8", timeout=60)
    child.expect("pip install prompt_toolkit")
    child.expect("> ")
    child.sendline("def f")
    child.expect("4 tokens, ")
    child.expect("> ")
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


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
    assert child.exitstatus == 0 and "\x1b" not in seen and "prompt_toolkit" not in seen


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


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("# A\n\ntext\n\n- one\n", "# A\n\ntext\n\n"),
        ("one\n\n", ""),
        ("one\n\ntw", "one\n\n"),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("- a\n\n  still a\n\nb", "- a\n\n  still a\n\n"),
        ("", ""),
    ],
)
def test_growing_markdown_is_cut_behind_its_last_finished_block(text, done):
    assert split_blocks(text) == (done, text[len(done) :])


@pytest.mark.parametrize("redraw", [0.0, float("inf")])
def test_markdown_that_comes_letter_by_letter_is_printed_for_good_once(redraw):
    text = "# Title\n\nSome *words* and `code`.\n\n1. one\n2. two\n\n```python\nx = 1\n\ny = 2\n```\n\nThe end."
    console = Console(force_terminal=True, width=60, height=20, record=True, file=open(os.devnull, "w"))
    screen, kept = _MarkdownScreen(console), []
    show = screen._print
    screen._print = lambda part: (kept.append(part), show(part))
    with screen:
        for letter in text:
            # Drawn again at every letter, or never before the end.
            screen.drawn = redraw
            screen.show("answer", letter)
    assert "".join(kept) == text
    drawn = console.export_text()
    assert all(line in drawn for line in ("Title", "Some words and code.", " 1 one", " 2 two", "x = 1", "y = 2", "The end."))


class Thinking:
    """A tokenizer whose token i is one character, with <think> marks and a template that opens a thinking block."""

    chat_template = "thinks"
    bos_token = eos_token_id = None
    alphabet = "abcdefghijklmnopqrstuvwxyz </>"

    def get_vocab(self):
        return {"<think>": 59, "</think>": 60}

    def decode(self, ids):
        return "".join({59: "<think>", 60: "</think>"}.get(i) or self.alphabet[i % 30] for i in ids)

    def encode(self, text, add_special_tokens=True):
        return {"<think>": [59], "</think>": [60]}.get(text) or [self.alphabet.find(c) % 30 for c in text]

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True, return_dict=False, **kwargs):
        ids = [t for m in messages for t in self.encode(m["content"])]
        return ids + ([59] if add_generation_prompt and kwargs.get("enable_thinking", True) else [])


def talk_with(model, tokenizer, **settings):
    return Conversation(Pair("m", None, model, tokenizer, None), Settings(**settings))


def heard(conversation):
    got = {"answer": "", "thinking": ""}
    for kind, text, _ in conversation.answer(lambda: False, lambda done, total: None):
        got[kind] += text
    return got


def test_thinking_that_the_template_opened_is_kept_apart_from_the_answer():
    tokenizer = TokenizerWrapper(Thinking())
    words = tokenizer.encode("hmm") + [60] + tokenizer.encode("yes")
    conversation = talk_with(scripted(words), tokenizer, max_tokens=len(words))
    conversation.messages.append({"role": "user", "content": "go"})
    assert heard(conversation) == {"thinking": "hmm", "answer": "yes"}
    assert conversation.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "hmm"}


def test_letters_that_might_have_begun_a_mark_are_not_lost_where_an_answer_stops():
    tokenizer = TokenizerWrapper(Thinking())
    # "<" may begin "<think>" until the next letter is known.
    conversation = talk_with(scripted([60, *tokenizer.encode("yes <b"), *[0] * 20]), tokenizer, max_tokens=20)
    conversation.messages.append({"role": "user", "content": "go"})
    texts, looks = "", itertools.count(1)
    # It is asked twice during the prompt and after each token: </think>, four letters and "<".
    for _, text, _ in conversation.answer(lambda: next(looks) > 7, lambda done, total: None):
        texts += text
    assert texts == conversation.messages[-1]["content"] == "yes <" and conversation.stopped


def test_a_format_of_answers_that_mlx_lm_knows_says_where_thinking_begins():
    # As gpt-oss's, whose vocabulary has no marks that open and close thinking.
    class Channels(Thinking):
        def get_vocab(self):
            return {}

    transitions = {"normal": [("<final>", "normal"), ("<thought>", "reasoning")], "reasoning": [("<final>", "normal")]}
    for start, thinking in (("reasoning", "hmm"), ("normal", "")):
        tokenizer = TokenizerWrapper(Channels(), response_format={"transitions": transitions, "initial_state": start})
        words = tokenizer.encode("hmm<final>yes")
        conversation = talk_with(scripted(words), tokenizer, max_tokens=len(words))
        conversation.messages.append({"role": "user", "content": "say"})
        assert heard(conversation) == {"thinking": thinking, "answer": "yes" if thinking else "hmmyes"}


def test_stats_count_the_tokens_that_were_copied(pair, monkeypatch):
    model, tokenizer, drafter = pair
    # Always where something stood before.
    monkeypatch.setattr(generation, "draft_length_policy", lambda *_: FixedDraftLength(7))
    conversation, rounds, tokens = Conversation(Pair("m", "d", model, tokenizer, drafter), Settings(max_tokens=60)), 0, 0
    for text in ("import os\n", "import os\n"):
        conversation.messages.append({"role": "user", "content": text})
        heard(conversation)
        copied = conversation.last.stats.sources["copy"]
        rounds, tokens = rounds + copied["rounds"], tokens + copied["accepted"]
    said = []
    room = Chat(conversation, None, None)
    monkeypatch.setattr(room, "note", lambda text, style="dim": said.append(text))
    room._do_stats("")
    assert rounds > 2 and f"copied from the text: {tokens} tokens in {rounds} of these rounds" in said[0]


def test_without_a_chat_template_texts_are_joined_as_they_are(pair):
    model, tokenizer, drafter = pair
    conversation = Conversation(Pair("m", "d", model, tokenizer, drafter), Settings(max_tokens=5))
    conversation.messages.append({"role": "user", "content": "def test"})
    heard(conversation)
    conversation.messages.append({"role": "user", "content": "(x)"})
    ids, _ = conversation.prompt()
    answer = conversation.messages[1]["ids"]
    assert ids == [*tokenizer.encode("def test"), *answer, *tokenizer.encode("(x)")] and len(answer) == 5
    assert conversation.undo() == "(x)" and conversation.undo() == "def test" and conversation.undo() is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temp", "-1", "temp to be a number at least 0; found -1.0"),
        ("temp", "nan", "found nan"),
        ("temp", "inf", "found inf"),
        ("top_p", "1.5", "from 0 to 1"),
        ("seed", "4294967296", "from 0 to 4294967295"),
        ("max_tokens", "2.5", "a whole number"),
        ("thinking", "maybe", "on, off or default"),
        ("colour", "red", "found 'colour'. There are: temp"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(name, text, message):
    with pytest.raises(DFlashError, match=re.escape(message)):
        Settings().changed(name, text)


def test_a_setting_taken_back_is_the_default():
    assert Settings(temp=0.5, seed=3, thinking=True).changed("temp", "default").changed("seed", "default") == Settings(
        thinking=True
    )
    assert Settings().changed("thinking", "on").changed("top_p", "1") == Settings(thinking=True, top_p=1)


def test_what_this_pair_cannot_do_is_refused_at_set_and_changes_nothing(pair):
    model, tokenizer, drafter = pair
    conversation = Conversation(Pair("m", "d", model, tokenizer, drafter), Settings())
    conversation.set("top_k", "1535")
    conversation.set("block_size", "64")
    kept = conversation.settings
    for name, text, message in (
        ("top_k", "1536", "expected top_k below 1536, the target's vocabulary; found 1536"),
        ("block_size", "65", "expected block_size of at most 64 with this drafter; found 65"),
        ("temp", "hot", "found 'hot'"),
    ):
        with pytest.raises(DFlashError, match=message):
            conversation.set(name, text)
        assert conversation.settings == kept
    with pytest.raises(DFlashError, match="expected top_k below 1536"):
        Conversation(Pair("m", None, model, tokenizer, None), Settings(top_k=9999))
    # Without a drafter there are no blocks; with one the same settings are too much.
    plain = Conversation(Pair("m", None, model, tokenizer, None), Settings(block_size=9999))
    with pytest.raises(DFlashError, match="expected block_size of at most 64"):
        plain.use(Pair("m", "d", model, tokenizer, drafter))
    assert plain.pair.draft_name is None
    with pytest.raises(DFlashError, match="expected top_k below 1536"):
        conversation.restore({**conversation.state(), "settings": {"top_k": 2000}, "system": "other"})
    assert conversation.settings == kept and conversation.system is None


SESSION = {"version": 1, "model": "m", "draft_model": None, "system": None, "settings": {}, "messages": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "no {"),
        ({"version": 2}, "no {"),
        ({"model": 3}, "'model' is absent or of another type"),
        ({"system": []}, "'system' is absent or of another type"),
        ({"messages": {}}, "'messages' is absent or of another type"),
        ({"colour": "red"}, "'colour' is unknown"),
        ({"settings": {"heat": 1}}, "'heat' is unknown"),
        ({"settings": {"temp": "hot"}}, "expected temp to be a number at least 0; found 'hot'"),
        ({"settings": {"temp": True}}, "found True"),
        ({"settings": {"top_k": 2.5}}, "expected top_k to be a whole number at least 0; found 2.5"),
        ({"settings": {"max_tokens": None}}, "expected max_tokens to be a whole number at least 1; found None"),
        ({"settings": {"seed": -1}}, "expected seed to be a whole number from 0 to 4294967295; found -1"),
        ({"settings": {"thinking": "yes"}}, "expected thinking to be on, off or default; found 'yes'"),
        ({"messages": ["hi"]}, "message 0 is none of a user's or an assistant's"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "message 1 is none"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 0 is none"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "message 0 is none"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "message 0 is none"),
        ({"messages": [{"role": "user", "content": "x", "ids": [1, -1]}]}, "message 0 has ids that are no tokens"),
        ({"messages": [{"role": "user", "content": "x", "ids": [True]}]}, "message 0 has ids that are no tokens"),
        ({"messages": [{"role": "user", "content": "x", "ids": "1"}]}, "message 0 has ids that are no tokens"),
    ],
)
def test_a_file_that_is_no_session_is_refused_by_name_and_left_alone(tmp_path, content, message):
    file = tmp_path / "x.json"
    text = content if isinstance(content, str) else json.dumps({**SESSION, **content})
    file.write_text(text)
    with pytest.raises(DFlashError, match=re.escape("x.json is something else: ") + ".*" + re.escape(message)):
        read_session(str(file))
    assert file.read_text() == text
    with pytest.raises(DFlashError, match="found no .*absent.json"):
        read_session(str(tmp_path / "absent.json"))
