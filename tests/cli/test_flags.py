"""Every flag of every command changes something, or is refused, or the run itself says that it has no effect.

The flags are those of the real command line: a new one without an entry here fails. Models, servers, trainers and the like are
stand-ins that write down what they were given; what is compared is that, the output and the exit status.
"""

import json
import re
from types import FunctionType, SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from kit import TINY, with_template
from mlx_lm.models import cache as mlx_lm_cache
from typer.main import get_command
from typer.testing import CliRunner

from dflash_mlx import load
from dflash_mlx.chat_template import template_variables, without_effect
from dflash_mlx.cli.app import app
from dflash_mlx.sampling_settings import SamplingSettings
from dflash_mlx.serving.conversation import VERSION
from dflash_mlx.serving.sessions import write_session

ROOT = get_command(app)
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{% if enable_thinking %}hm{% endif %}"


def commands(group=ROOT, path=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


FLAGS = [
    (" ".join(path), flag)
    for path, command in commands()
    for parameter in command.params
    for flag in (*parameter.opts, *parameter.secondary_opts)
    if flag.startswith("--") and flag != "--help"
]
# What a command is given beside the flag.
BASE = {
    "generate": ["--model", "M", "--draft-model", "D", "-p", "x", "--temp", "1"],
    "chat": ["--model", "M", "--draft-model", "D", "--temp", "1"],
    "serve": ["--model", "M", "--draft-model", "D", "--temp", "1"],
    "bench": ["--model", "M", "--draft-model", "D", "--temp", "1"],
    "doctor": ["--model", "M", "--draft-model", "D"],
    "convert": ["--hf-path", "M"],
    "models": [],
    "cache": [],
    "train data": ["--model", "M", "--out", "O", "--minutes", "1"],
    "train run": ["--model", "M", "--data", "DATA", "--out", "O", "--steps", "1"],
    "train eval": ["--model", "M", "--draft-model", "D", "--data", "DATA"],
}
# Of each flag a value that is not the default; None: a switch. What has to stand beside it comes behind.
SAMPLING = {
    "--temp": ["0.5"],
    "--top-p": ["0.5"],
    "--top-k": ["5"],
    "--min-p": ["0.1"],
    "--xtc-probability": ["0.5"],
    "--xtc-threshold": ["0.2", "--xtc-probability", "0.5"],
    "--repetition-penalty": ["1.1"],
    "--repetition-context-size": ["5", "--repetition-penalty", "1.1"],
    "--presence-penalty": ["1"],
    "--presence-context-size": ["5", "--presence-penalty", "1"],
    "--frequency-penalty": ["1"],
    "--frequency-context-size": ["5", "--frequency-penalty", "1"],
    "--seed": ["3"],
}
COMMON = {
    "--model": ["N"],
    "--draft-model": ["E"],
    "--max-tokens": ["7"],
    "--system": ["be brief"],
    "--thinking": [],
    "--no-thinking": [],
    "--block-size": ["3"],
    "--prefill-step-size": ["9"],
    "--exact": [],
    "--dtype": ["float16"],
    "--draft-bits": ["8"],
    "--last-tap": ["before"],
    "--pipeline": [],
    "--revision": ["v1"],
    "--trust-remote-code": [],
    "--json": [],
    "--prompts": ["FILE"],
    "--out": ["OTHER"],
    "--dense": [],
    "--no-dense": [],
    "--max-len": ["64"],
    "--adapter-path": ["A"],
    "--system-prompt": ["be brief"],
    "--num-draft-tokens": ["2"],
    "--chat-template-args": ['{"enable_thinking": true}'],
    "--chat-template-config": ['{"enable_thinking": true}'],
}
KV = {
    "--max-kv-size": ["64"],
    "--kv-bits": ["8"],
    "--kv-group-size": ["32", "--kv-bits", "8"],
    "--quantized-kv-start": ["0", "--kv-bits", "8"],
}
VALUES = {
    "generate": {
        "--prompt": ["y"],
        "--prompt-file": ["FILE"],
        "--json-schema": ["SCHEMA"],
        "--stop": ["st"],
        "--prompt-lookup": [],
        "--no-prompt-lookup": [],
        "--copy": [],
        "--no-copy": [],
        **KV,
        "--prefill-response": ["Sure"],
        "--prompt-cache-file": ["CACHE.safetensors"],
        "--raw": [],
        "--ignore-chat-template": [],
        "--show-drafts": [],
        "--stats": [],
    },
    "chat": {
        "--session": ["s"],
        "--plain": [],
        **KV,
        "--prompt-cache-dir": ["KEPT"],
        "--prompt-cache-dir-gb": ["3", "--prompt-cache-dir", "KEPT"],
        "--url": ["http://127.0.0.1:1"],
        "--api-key": ["k"],
    },
    "serve": {
        "--host": ["0.0.0.0"],
        "--port": ["1"],
        "--api-key": ["k"],
        "--max-body-mb": ["1"],
        "--max-queue": ["3"],
        "--max-batch": ["3"],
        "--prefill-share": ["0.25"],
        "--unload-after": ["9"],
        "--model-name": ["m"],
        "--model-aliases": ["a,b"],
        "--any-model-name": [],
        "--allowed-origins": ["http://a"],
        **KV,
        "--prompt-cache-size": ["3"],
        "--prompt-cache-gb": ["0"],
        "--prompt-cache-dir": ["KEPT"],
        "--prompt-cache-dir-gb": ["3", "--prompt-cache-dir", "KEPT"],
        "--verbose": [],
        "--log-level": ["info"],
        "--log-prompts": [],
        "--log-json": [],
    },
    "bench": {
        "--kinds": ["code"],
        "--context": ["9"],
        "--trials": ["2"],
        "--batch": ["1,4"],
        "--plot": ["P.png"],
        "--html": ["P.html"],
        "--compare": ["A.json", "B.json"],
        "--max-seconds": ["3"],
        "--kernels": ["off"],
        "--hopeless": [],
    },
    "doctor": {"--report": ["R.json"], "--details": []},
    "convert": {
        "--hf-path": ["N"],
        "--mlx-path": ["OTHER"],
        "--quantize": [],
        "--q-bits": ["8", "-q"],
        "--q-group-size": ["32", "-q"],
        "--q-mode": ["mxfp4", "-q"],
        "--dequantize": [],
        "--quant-predicate": ["mixed_4_6", "-q"],
        "--to": ["gguf"],
        "--vocab": ["t.gguf", "--to", "gguf"],
        "--force": [],
    },
    "cache": {"--delete": ["session/a"], "--yes": []},
    "train data": {"--minutes": ["2"], "--answer-tokens": ["9"], "--rows": ["3"], "--greedy": ["0.5"], "--held-out": ["2"]},
    "train run": {
        "--data": ["DATA2"],
        "--minutes": ["2"],
        "--steps": ["2"],
        "--init": ["E"],
        "--layers": ["2"],
        "--taps": ["1,2"],
        "--mask-token-id": ["4"],
        "--batch": ["2"],
        "--anchors": ["2"],
        "--accumulate": ["2"],
        "--lr": ["0.1"],
        "--loss": ["decay"],
        "--architecture": ["dflash2"],
        "--selector-rank": ["8", "--architecture", "dflash2"],
        "--learn-from": ["target"],
        "--tv": ["0.5", "--architecture", "dflash2"],
        "--predecessor": ["own", "--architecture", "dflash2"],
        "--patience": ["2"],
        "--pause-minutes": ["2"],
        "--plot": ["P.html"],
    },
    "train eval": {"--data": ["DATA2"], "--limit": ["1"]},
}


def given(command, flag):
    """The words that give a flag, or None where this table does not know it."""
    for table in (VALUES.get(command, {}), SAMPLING, COMMON):
        if flag in table:
            return [flag, *table[flag]]
    return None


def told(value):
    """A value without what differs from run to run."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, dict):
        return {k: told(v) for k, v in value.items() if k != "prompt_progress_callback"}
    if isinstance(value, (list, tuple)):
        return [told(v) for v in value]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@pytest.fixture
def outcome(monkeypatch, tmp_path, pair):
    """Runs words of the command line; gives exit status, output and what every stand-in was given."""
    model, plain, drafter = pair
    calls = []
    (tmp_path / "FILE").write_text("def f():\n")
    (tmp_path / "SCHEMA").write_text("{}")
    filled = mlx_lm_cache.make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=filled)
    mlx_lm_cache.save_prompt_cache(str(tmp_path / "CACHE.safetensors"), filled, {"model": "M"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "auto")

    def stand_in(place, result=None):
        def call(*args, **kwargs):
            calls.append((place, told(args), told(kwargs)))
            return result(*args, **kwargs) if isinstance(result, FunctionType) else result

        monkeypatch.setattr(f"dflash_mlx.{place}", call)

    class Tokenizer:
        has_chat_template, has_thinking, has_tool_calling, chat_template = True, False, False, TEMPLATE

        def __getattr__(self, name):
            return getattr(plain, name)

        def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=True, **variables):
            calls.append(("template", told(messages), told(variables)))
            return "x" if not tokenize else [1, 2]

    tokenizer = Tokenizer()
    stand_in("loading.load", (model, tokenizer))
    stand_in("loading.load_drafter", drafter)
    stand_in("loading.check_run")

    class Response(SimpleNamespace):
        pass

    def responses(*args, **kwargs):
        import dataclasses

        fields = ("text", "token", "from_draft", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps")
        made = dataclasses.make_dataclass("Response", [*fields, "peak_memory", "finish_reason", "stats", "logprobs"])
        yield made("a stop", 5, True, 2, 1.0, 1, 1.0, 0.1, "length", None, None)

    stand_in("generation.stream_generate", responses)
    monkeypatch.setattr(SamplingSettings, "make", lambda self, *_: (repr(self), []))

    class Room(SimpleNamespace):
        drawing = interactive = failed = False

        def __init__(self, conversation, *args, **kwargs):
            held = [conversation.caches, conversation.files and conversation.files.limit_bytes]
            said = [conversation.settings, conversation.system, *held, conversation.pair.name]
            calls.append(("chat", told(said), told(kwargs)))

        def run(self):
            pass

    monkeypatch.setattr("dflash_mlx.serving.chat.Chat", Room)
    monkeypatch.setattr("dflash_mlx.serving.prefix_cache.CacheOptions.check", lambda *_: None)
    stand_in("serving.server.serve", lambda options, open_pair, say: open_pair() and None)
    monkeypatch.setattr("logging.basicConfig", lambda **k: calls.append(("log", told(k))))
    stand_in("tools.doctor.diagnose", {"faults": []})
    stand_in("tools.doctor.render", "a report")
    record = {"ended": "complete", "runs": []}
    stand_in("tools.bench.Bench", lambda *given: SimpleNamespace(go=lambda: given[7](record) or record))
    stand_in("tools.bench_record.write_record")
    for name, result in (
        ("bench_record.table", "a table"),
        ("bench_record.faults", []),
        ("bench_plot.plot", None),
        ("bench_plot.check_plot", None),
    ):
        stand_in(f"tools.{name}", result)
    stand_in("tools.bench_page.write_page")
    stand_in("tools.bench_record.compare", "two records")
    stand_in("tools.bench_record.read_record", {})
    stand_in("train.start.dense", model)
    converted = SimpleNamespace(notes=[], summary=lambda: "done")
    stand_in("conversion.convert", converted)

    kept = SimpleNamespace(name="session/a", kind="session", size_bytes=1, used_at=0, path="a", delete=lambda: None)
    stand_in("tools.stored.stored", [kept])
    monkeypatch.setattr("dflash_mlx.tools.columns.age_text", lambda used_at: "1 day")

    class Docs:
        ids, split = np.array([1]), np.array([0])

        def __len__(self):
            return 4

        def pick(self, which):
            calls.append(("pick", told([*which])))
            return self

    stand_in("train.docs.load_docs", Docs())
    stand_in("train.data.make_data", {"conversations": 1, "answer_tokens": 1, "answer_tps": 1.0})
    stand_in("train.trainer.train")
    stand_in("train.curves.write_curves")
    stand_in("train.start.mask_token", 3)
    stand_in("train.start.check_text")
    stand_in("cli.train._source", "0123")
    stand_in("conversion.load_drafter_weights", (json.loads((TINY / "drafter" / "config.json").read_text()), {}))
    row = {"temp": 0.0, "block_size": 4, "looped": False, "kind": "k", "answers": 1}
    stand_in("train.offline_tau.evaluate", [{**row, "drafter": 1.0, "zeroed": 1.0, "lookup": 1.0, "bigram": 1.0}])

    def run(words):
        calls.clear()
        result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
        fault = result.exception
        assert fault is None or isinstance(fault, SystemExit) or type(fault).__module__.startswith("dflash_mlx"), fault
        return result.exit_code, result.output, repr(fault), told(calls)

    return run


def test_every_flag_has_an_entry_and_every_entry_a_flag():
    missing = [(command, flag) for command, flag in FLAGS if given(command, flag) is None]
    assert not missing
    stale = [(command, flag) for command, table in VALUES.items() for flag in table if (command, flag) not in FLAGS]
    assert not stale and set(BASE) == {command for command, _ in FLAGS}


@pytest.mark.parametrize(("command", "flag"), FLAGS)
def test_every_flag_changes_something(outcome, command, flag):
    words = given(command, flag)
    beside = words[2:] if len(words) > 2 and words[2].startswith("-") else []
    base = [*command.split(), *BASE[command], *beside]
    for name in (flag, {"--prompt-file": "--prompt"}.get(flag, flag), {"--minutes": "--steps"}.get(flag, flag)):
        if name in base or name == "--prompt" and "-p" in base:
            at = base.index(name if name in base else "-p")
            rest = base[:at] + base[at + 2 :]
            with_flag = [*rest, *words[: len(words) - len(beside)]]
            break
    else:
        with_flag = [*base, *words[: len(words) - len(beside)]]
    if flag == "--compare":
        with_flag = ["bench", *words]
    without, got = outcome(base), outcome(with_flag)
    assert got != without, f"{flag} changes nothing"
    assert got[0] == without[0] or got[0] == 2 and "no effect" in got[1] or "needs" in got[1] + got[2], got[:3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--model", "M", "-p", "x", "--seed", "3"], "--seed has no effect at temperature 0"),
        (
            ["generate", "--model", "M", "-p", "x", "--temp", "1", "--top-p", "0", "--seed", "3"],
            "--seed has no effect with top_p 0",
        ),
        (
            ["generate", "--model", "M", "-p", "x", "--temp", "1", "--top-k", "1", "--seed", "3"],
            "--seed has no effect with top_k 1",
        ),
        (["generate", "--model", "M", "-p", "x", "--trust-remote-code"], "--trust-remote-code has no effect"),
        (["generate", "--model", "M", "-p", "x", "--top-k", "3"], "no effect at temperature 0; give --temp"),
        (["generate", "--model", "M", "-p", "x", "--temp", "1", "--xtc-threshold", "0.2"], "no effect without --xtc-probability"),
        (["generate", "--model", "M", "-p", "x", "--repetition-context-size", "9"], "no effect without --repetition-penalty"),
        (["generate", "--model", "M", "-p", "x", "--quantized-kv-start", "9"], "no effect without --kv-bits"),
        (["serve", "--chat-template-args", '{"no_such": 1}'], "no_such of --chat-template-args has no effect"),
        (["chat", "--plain"], "--plain has no effect here"),
        (["chat", "--url", "x", "--kv-bits", "8"], "it needs a model that runs here"),
        (["chat", "--api-key", "k"], "no effect without --url"),
        (["bench", "--kernels", "on"], "--kernels has no effect"),
        (["bench", "--dense"], "--dense has no effect on the target"),
        (["train", "eval", *BASE["train eval"], "--dense"], "--dense has no effect on the target"),
        (["train", "run", *BASE["train run"], "--no-dense"], "--no-dense has no effect: on this device that is the default"),
        (["bench", "--temp", "0", "--top-k", "3"], "no effect at temperature 0"),
        (["bench", "--batch", "4", "--top-p", "0.9"], "no effect at temperature 0; give --temp"),
        (["serve", "--draft-model", "none", "--max-batch", "4"], "requests run together with one only"),
        (["serve", "--draft-model", "none", "--prefill-share", "0.3"], "--prefill-share: it has no effect here"),
        (["serve", *BASE["serve"], "--max-batch", "1", "--prefill-share", "0.3"], "--prefill-share: it has no effect here"),
        (["serve", *BASE["serve"], "--exact", "--prefill-share", "0.3"], "--prefill-share: it has no effect here"),
        (["serve", "--prompt-cache-gb", "0", "--prompt-cache-size", "3"], "no effect with --prompt-cache-gb 0"),
        (["bench", "--compare", "A", "B", "--trials", "3"], "no effect with --compare"),
        (["bench", "--compare", "A", "B", "--json"], "no effect with --compare"),
        (["convert", "--hf-path", "M", "--q-bits", "4"], "no effect without --quantize"),
        (["convert", "--hf-path", "M", "--q-mode", "mxfp4"], "no effect without --quantize"),
        (
            ["convert", "--hf-path", "M", "-q", "--q-bits", "4", "--quant-predicate", "mixed_4_6"],
            "no effect with --quant-predicate",
        ),
        (["generate", *BASE["generate"], "--block-size", "3", "--no-prompt-lookup"], "no effect with --block-size"),
        (["bench", "--temp", "0", "--context", "0", "--seed", "3"], "--seed has no effect at temperature 0 without --context"),
        (["train", "run", "--model", "M", "--data", "D", "--out", "O", "--steps", "1", "--init", "E", "--layers", "3"], "--init"),
        (["train", "run", "--model", "M", "--data", "D", "--out", "O", "--steps", "1", "--tv", "0.5"], "--architecture dflash2"),
    ],
)
def test_what_has_no_effect_is_said_in_the_run(outcome, words, message):
    code, output, *_ = outcome(words)
    assert message in output and code in (0, 2), output


def test_an_admitted_origin_may_end_with_a_slash(outcome):
    serve = ["serve", *BASE["serve"], "--allowed-origins"]
    slashed = outcome([*serve, "http://a.example/,*,http://b.example:8080/"])
    assert slashed == outcome([*serve, "http://a.example,*,http://b.example:8080"])
    assert "['http://a.example', '*', 'http://b.example:8080']" in str(slashed)


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/app", "a.example", "http://"])
def test_what_no_browser_sends_as_an_origin_is_refused_with_an_example(outcome, origin):
    code, output, *_ = outcome(["serve", *BASE["serve"], "--allowed-origins", f"http://a.example,{origin}"])
    assert code == 2 and "is not an origin" in output and "http://localhost:3000" in output


@pytest.mark.parametrize(
    "origin", ["*", "null", "https://a.example", "http://[::1]:8080", "chrome-extension://abcdef", "tauri://localhost"]
)
def test_every_form_of_an_origin_is_taken(outcome, origin):
    assert f"['{origin}']" in str(outcome(["serve", *BASE["serve"], "--allowed-origins", origin]))


@pytest.mark.parametrize(
    ("flag", "spaced", "found"),
    [
        ("--allowed-origins", " http://a.example/, http://b.example:8080 , ", "['http://a.example', 'http://b.example:8080']"),
        ("--model-aliases", "a , b", "['a', 'b']"),
    ],
)
def test_blanks_around_the_commas_of_a_list_are_no_part_of_its_names(outcome, flag, spaced, found):
    words = ["serve", *BASE["serve"], flag]
    assert outcome([*words, spaced]) == outcome([*words, spaced.replace(" ", "")])
    assert found in str(outcome([*words, spaced]))


def test_an_adapter_belongs_to_the_model_of_the_session_that_is_continued(outcome, monkeypatch):
    state = {"model": "M", "draft_model": None, "system": None, "settings": {}, "messages": []}
    monkeypatch.setattr("dflash_mlx.serving.conversation.Conversation.restore", lambda *_: None)
    write_session("s", state | {"version": VERSION})
    code, output, _, calls = outcome(["chat", "--session", "s", "--adapter-path", "A"])
    loaded = [more for place, _, more in calls if place == "loading.load"]
    assert code == 0 and [one["adapter_path"] for one in loaded] == ["A"] and "runs without it" not in output


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_said_to_have_no_effect_where_the_template_does_not_read_it(tmp_path, capsys, thinking):
    from dflash_mlx.cli.inputs import encode_prompt, say_unread_template_args

    for template, silent in ((TEMPLATE, True), (TEMPLATE.partition("{% if enable")[0], False)):
        tokenizer = load(with_template(tmp_path, template))[1]
        encode_prompt(tokenizer, "x", None, False, thinking)
        flag = "--thinking" if thinking else "--no-thinking"
        assert (f"{flag} has no effect" in capsys.readouterr().err) is not silent
        # What a server says once, of its own flags.
        say_unread_template_args(tokenizer, {"enable_thinking": thinking, "other": 1}, thinking)
        said = capsys.readouterr().err
        assert (f"{flag} has no effect" in said) is not silent and "other of --chat-template-args has no effect" in said


def test_what_came_to_nothing_is_said_below_the_text():
    from dflash_mlx.cli.generate import run

    said = []

    def responses():
        try:
            figures = dict.fromkeys(("prompt_tokens", "prompt_tps", "generation_tps", "peak_memory"), 1)
            yield SimpleNamespace(text="a", token=1, finish_reason="stop", stats=None, **figures)
        finally:
            said.append("kv_bits=8 had no effect")

    run(responses(), lambda response: said.append(response.text), end=lambda _: said.append("\n"))
    assert said == ["a", "\n", "kv_bits=8 had no effect"]


@pytest.mark.parametrize("template", ["{{ messages }}", "{# enable_thinking #} {{ messages }} enable_thinking"])
def test_a_template_reads_what_it_names_outside_comments_and_text(template):
    without, reads = (SimpleNamespace(has_chat_template=True, chat_template=text) for text in (template, TEMPLATE))
    assert without_effect(without, ["enable_thinking", "messages"]) == ["enable_thinking"]
    assert without_effect(reads, ["enable_thinking"]) == []
    named = SimpleNamespace(has_chat_template=True, chat_template={"default": template, "tool_use": TEMPLATE})
    assert template_variables(named) >= {"enable_thinking", "messages"}
    assert template_variables(SimpleNamespace(has_chat_template=False)) == set()


def test_a_new_sampling_setting_appears_in_every_command_by_itself():
    import subprocess
    import sys

    script = """
import dataclasses, sys
from dflash_mlx import sampling_settings as s
fields = [("made_up", float, s.setting(0.5, float, 0, 1, "off", "Made up."))]
made = dataclasses.make_dataclass("SamplingSettings", fields, bases=(s.SamplingSettings,), frozen=True)
s.SamplingSettings = made
from typer.main import get_command
from dflash_mlx.chat_template import template_variables, without_effect
from dflash_mlx.cli.app import app
for name in ("generate", "chat", "serve", "bench"):
    assert any("--made-up" in p.opts for p in get_command(app).commands[name].params), name
from dflash_mlx.serving.conversation import Settings
assert Settings().changed("made_up", "0.25").made_up == 0.25
from dflash_mlx.serving.requests import SAMPLING
assert "made_up" in SAMPLING
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
