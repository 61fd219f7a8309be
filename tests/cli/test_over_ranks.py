"""`mlx.launch ... dflash-mlx generate | serve`: what is refused, who speaks, and what happens when a rank dies."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from io import StringIO
from types import SimpleNamespace

import mlx.core as mx
import pytest
from cli_kit import run
from kit import figures_of, with_template
from launching import SUPPORT, free_port, launched, output_of
from sharded import saved_family

from dflash_mlx import load, load_drafter, loading, ranks
from dflash_mlx.cli import app, generate, inputs, over_ranks, server_options
from dflash_mlx.kernels.autotune import KernelError
from dflash_mlx.rank_run import RankPair
from dflash_mlx.serving.chat import Chat
from dflash_mlx.serving.remote import Remote, RemoteConversation

CLI = SUPPORT / "over_ranks_cli.py"
TINY = ("--model", "tiny", "--draft-model", "tiny")


def ends(process, within_s):
    """What a launcher printed, once it has ended by itself."""
    try:
        return process.communicate(timeout=within_s)[0]
    finally:
        process.kill()


def test_rank_0_alone_speaks_and_a_prompt_comes_from_its_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("def test_")
    words = ("generate", *TINY, "--prompt-file", tmp_path / "prompt.txt", "-m", "8", "--block-size", "4", "--json")
    said = output_of(2, CLI, tmp_path, *words)
    assert said.count('"token_ids"') == 1, said
    result = json.loads(next(line for line in said.splitlines() if '"token_ids"' in line))
    alone = output_of(1, CLI, tmp_path, *words)
    assert result["token_ids"] == json.loads(next(line for line in alone.splitlines() if '"token_ids"' in line))["token_ids"]
    assert {r["width"] for r in result["rounds"]} >= {3} and "WARN" not in said


@pytest.mark.full
def test_a_first_run_times_its_passes_on_both_ranks_and_ends(tmp_path):
    said = output_of(2, CLI, tmp_path, "generate", *TINY, "-p", "def test_", "-m", "24", env={"DFLASH_MLX_CACHE": str(tmp_path)})
    assert said.count("24 tokens, ") == 1 and "WARN" not in said and "Error" not in said, said


def test_heads_that_do_not_divide_get_one_sentence(tmp_path):
    # The tiny pair has 6 heads, and 2 of keys: three ranks cannot have equal shares of these.
    said = output_of(3, CLI, tmp_path, "generate", *TINY, "-p", "a", "-m", "4")
    assert said.count("tiny does not divide by 3 ranks: n_kv_heads is 2. Use another number of machines, or one.") == 1, said
    assert "On rank" not in said


def test_what_ranks_cannot_do_is_refused(monkeypatch):
    from typer.testing import CliRunner

    from dflash_mlx.cli.app import app

    monkeypatch.setenv("MLX_RANK", "0")
    for words, sentence in (
        (("generate", *TINY, "-p", "a", "--pipeline"), "it needs --draft-model none"),
        (("serve", *TINY, "--pipeline"), "it needs --draft-model none"),
        (
            ("serve", *TINY[:2], "--draft-model", "none", "--pipeline", "--prompt-cache-gb", "1"),
            "a prompt has another size on each machine",
        ),
        (("generate", *TINY, "-p", "-"), "never ends standard input"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and sentence in " ".join(result.output.split()).replace("│ ", ""), result.output


@pytest.fixture
def as_rank_1(monkeypatch):
    """Rank 1 of two in this process, whose rank 0 always broadcasts the same text."""
    asked = []

    def run_on_rank_0(make, what):
        asked.append(what)
        return json.dumps({"type": "integer"})

    one = SimpleNamespace(
        rank=1,
        size=2,
        leads=False,
        is_failed=False,
        asked=asked,
        run_on_rank_0=run_on_rank_0,
        has_ended=lambda s: False,
        leave=lambda: None,
    )
    monkeypatch.setenv("MLX_RANK", "1")
    monkeypatch.setattr(ranks, "join", lambda: one)
    monkeypatch.setattr(ranks, "joined", lambda: one)
    monkeypatch.setattr(over_ranks, "_muted", [])
    handler = signal.getsignal(signal.SIGINT)
    yield one
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("forced", ["on", "accept"])
def test_kernels_that_are_forced_are_refused_before_a_weight_is_read(forced, as_rank_1, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", forced)
    monkeypatch.setattr(loading, "load", lambda *about, **given: pytest.fail("read"))
    sentence = f"DFLASH_MLX_KERNELS is {forced}, and over several machines rank 0's trials choose the kernels. Unset the variable"
    with pytest.raises(KernelError, match=sentence):
        inputs.load_pair("tiny", "tiny", None, None, None, False)
    # In Python: at the first run.
    monkeypatch.undo()
    model, _ = load("tiny")
    pair = RankPair(model, load_drafter("tiny", model), as_rank_1)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", forced)
    with pytest.raises(KernelError, match=sentence):
        pair.prepare_target()


def test_a_schema_file_is_read_on_rank_0_alone(as_rank_1, tmp_path):
    demand = generate._read_schema(str(tmp_path / "only on rank 0.json"), as_rank_1)
    assert demand == generate._read_schema('{"type": "integer"}') and as_rank_1.asked == ["the schema"]


@pytest.mark.parametrize("launched", [True, False])
def test_after_ctrl_c_nothing_is_computed_that_other_ranks_do_not_compute(launched, monkeypatch, capsys):
    if launched:
        monkeypatch.setenv("MLX_RANK", "0")
    else:
        monkeypatch.delenv("MLX_RANK", raising=False)
    computed = []

    class Last:
        text, token, finish_reason, stats = "x", 1, None, None
        prompt_tokens = prompt_tps = generation_tps = peak_memory = 0

        @property
        def logprobs(self):
            computed.append(1)
            return mx.array([float("nan")])

    def interrupted():
        yield Last()
        raise KeyboardInterrupt

    assert generate.run(interrupted(), lambda response: None)["finish_reason"] == "interrupted"
    assert bool(computed) is not launched and ("computed NaN" in capsys.readouterr().err) is not launched


@pytest.mark.parametrize("words", [("chat", *TINY), ("bench",), ("models",), ("train", "eval", "--model", "tiny")])
def test_a_command_that_each_rank_would_run_whole_is_refused(words, as_rank_1, monkeypatch):
    more = ("--draft-model", "tiny", "--data", "x") if words[0] == "train" else ()
    as_rank_1.has_ended = lambda s: True
    done = run(*words, *more)
    # Rank 0 says it.
    assert done.returncode == 1 and not done.stdout + done.stderr
    as_rank_1.rank, as_rank_1.leads = 0, True
    over_ranks._muted[:] = []
    done = run(*words, *more, env={"MLX_RANK": "0"})
    name = " ".join(words[: 1 + (words[0] == "train")])
    sentence = f"Error: dflash-mlx {name} does not run over several machines: generate, serve and train run do. Start it without"
    assert done.returncode == 1 and " ".join(done.stderr.split()).startswith(sentence), done.stderr


def test_log_lines_of_other_ranks_are_muted_too(as_rank_1, monkeypatch):
    log, said = logging.getLogger(), StringIO()
    monkeypatch.setattr(log, "handlers", [])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, said)
    server_options._log_to_stderr("warning", False)
    over_ranks.begin(False, "tiny", "tiny")
    log.warning("a line")
    assert len(log.handlers) == 1 and said.getvalue() == ""


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("reason", ["interrupted", "stop"])
def test_after_ctrl_c_rank_0_times_no_passes_that_the_others_would_have_to_run(launched, reason, monkeypatch):
    timed = []
    monkeypatch.setattr(over_ranks, "is_over_ranks", lambda: launched)
    monkeypatch.setattr(over_ranks, "begin", lambda *_, **__: None)
    monkeypatch.setattr(inputs, "load_pair", lambda *_: ("target", "drafter", None, None, "the drafter"))
    monkeypatch.setattr(generate, "_answer", lambda *_: figures_of(finish_reason=reason))
    monkeypatch.setattr(generate, "_measure_for_the_next", lambda *given: timed.append(given[:3]))
    done = run("generate", *TINY, "-p", "x", "--temp", "0")
    assert done.returncode == (130 if reason == "interrupted" else 0), done.stderr
    assert timed == ([] if launched and reason == "interrupted" else [("target", "drafter", "the drafter")])


def test_with_a_traceback_too_rank_0_is_not_told_that_this_rank_is_done(as_rank_1, monkeypatch):
    def fails():
        raise ValueError("a fault")

    monkeypatch.setattr(app, "app", fails)
    monkeypatch.setenv("DFLASH_TRACEBACK", "1")
    muted, shown = StringIO(), StringIO()
    over_ranks._muted[:] = [muted]
    monkeypatch.setattr(sys, "__stderr__", shown)
    monkeypatch.setattr(sys, "stderr", muted)
    with pytest.raises(ValueError, match="a fault"):
        app.main()
    assert as_rank_1.is_failed and sys.stderr is shown


@pytest.mark.full
def test_a_pipeline_of_two_ranks_writes_what_one_process_writes(tmp_path):
    """Each has some of the layers; sums are not split, so all bits are the same."""
    words = ("generate", "--model", saved_family(tmp_path, "qwen3_moe"), "-p", "def test_", "-m", "8", "--json")
    alone = json.loads(run(*words).stdout)
    said = output_of(2, CLI, tmp_path, *words, "--draft-model", "none", "--pipeline")
    assert said.count('"token_ids"') == 1, said
    assert json.loads(next(line for line in said.splitlines() if '"token_ids"' in line))["token_ids"] == alone["token_ids"]
    assert len(set(alone["token_ids"])) > 4


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_by_its_closed_connection(tmp_path, dies):
    process = launched(2, CLI, tmp_path, "generate", *TINY, "-p", "def", "-m", "3000", "--block-size", "4")
    shown = []
    reader = threading.Thread(target=lambda: [shown.append(line) for line in process.stdout], daemon=True)
    reader.start()
    pids = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    until = time.monotonic() + 120
    while time.monotonic() < until and not (all(path.exists() for path in pids) and len(shown) > 3):
        time.sleep(0.2)
    try:
        os.kill(int(pids[dies].read_text()), signal.SIGKILL)
        began = time.monotonic()
        # By its silence they would end 20 s later.
        while time.monotonic() < began + 30 and _is_alive(int(pids[1 - dies].read_text())):
            time.sleep(0.05)
        took = time.monotonic() - began
        process.wait(60)
        reader.join(60)
    finally:
        process.kill()
    said = "".join(shown)
    assert took < ranks._SILENT_S - 5, said
    sentence = f"Error: rank {dies} has ended, and rank {1 - dies} cannot go on without it. Start all ranks again."
    assert said.count(sentence) == 1, said


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


def ask(port, **body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({"max_tokens": 10, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def leave_in_the_middle(port):
    """A client that reads the beginning of a long answer and goes."""
    body = json.dumps({"prompt": "def f", "max_tokens": 3000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(head.encode() + body)
        assert b"200" in client.recv(400)
        client.recv(400)


@contextmanager
def serving(count, tmp_path, *words):
    """A server on so many ranks that is ready: its port, its lines so far, and its process."""
    port = free_port()
    process = launched(count, CLI, tmp_path, "serve", *words, "--port", port)
    shown = []
    threading.Thread(target=lambda: [shown.append(line) for line in process.stdout], daemon=True).start()
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None and not any("Serving" in line for line in shown):
            time.sleep(0.2)
        yield port, shown, process
    finally:
        process.kill()


@pytest.mark.parametrize("rows", ["1", "3"])
def test_a_server_on_two_ranks_answers_as_one_rank_does(tmp_path, rows):
    prompts = ["import os\n", "def test_", "class A:\n    def"]
    bodies = [{"prompt": p} for p in prompts] + [{"prompt": prompts[0], "temperature": 0.8, "seed": 3}]
    answers = {}
    for count in (1, 2):
        with serving(count, tmp_path, *TINY, "--max-batch", rows, "--block-size", "4") as (port, shown, process):
            found = [None] * len(bodies)

            def one(i, found=found, port=port):
                found[i] = ask(port, **bodies[i])

            threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            leave_in_the_middle(port)
            # The first one again, from what the server has kept, beside what is left of the one that was given up.
            answers[count] = [*found, ask(port, **bodies[0])]
            os.kill(int((tmp_path / "pid-0").read_text()), signal.SIGINT)
            process.wait(120)
        assert "Error" not in "".join(shown), shown
    assert answers[2] == answers[1] and answers[2][0] == answers[2][-1]


class Deadly(StringIO):
    """The screen of a chat whose server loses a rank as the first word of an answer comes. began_at: when."""

    def __init__(self, pid):
        super().__init__()
        self.pid, self.began_at = pid, None

    def write(self, text):
        if text.strip() and self.began_at is None:
            os.kill(self.pid, signal.SIGKILL)
            self.began_at = time.monotonic()
        return super().write(text)


@pytest.mark.full
def test_chat_talks_to_two_ranks_and_says_that_they_are_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ("--model", with_template(tmp_path), "--draft-model", "tiny")
    alone = run("chat", *words, "--temp", "0", "-m", "12", stdin="def f\n")
    with serving(2, tmp_path, *words, "--block-size", "4") as (port, shown, process):
        url = f"127.0.0.1:{port}"
        done = run("chat", "--url", url, "--temp", "0", "-m", "12", stdin="def f\n")
        assert done.returncode == 0 and done.stdout == alone.stdout and "12 tokens" in done.stderr, done.stderr
        remote, notes = Remote(url), StringIO()
        talk = RemoteConversation(remote, remote.pair(None), {"temp": 0.0, "max_tokens": 3000})
        screen = Deadly(int((tmp_path / "pid-1").read_text()))
        Chat(talk, None, stdin=StringIO("def f\nand more\n"), stdout=screen, stderr=notes).run()
        took = time.monotonic() - screen.began_at
        process.wait(60)
    said = notes.getvalue()
    assert took < ranks._SILENT_S - 5, said
    assert f"Error: http://{url}/v1 ended the answer in the middle. /retry asks again." in said, said
    assert f"no server answers at http://{url}/v1" in said, said
    assert "Error: rank 1 has ended, and rank 0 cannot go on without it." in "".join(shown), shown
