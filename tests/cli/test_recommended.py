"""What a target's generation_config.json recommends: chat and serve use it, generate names it, and --temp 0 wants none of it."""

import json
from types import SimpleNamespace

import pytest
from kit import with_template
from serving_kit import ask, running
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.sampling import SamplingSettings

FILE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "top_p": "much"}


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (folder := tmp_path / "target").mkdir()
    with_template(folder)
    (folder / "generation_config.json").write_text(json.dumps(FILE))
    return str(folder)


@pytest.fixture
def settings(monkeypatch):
    """What chat and serve would sample with."""
    found = []

    def serve(options, open_pair, say):
        open_pair()
        found.append(options.recommended)

    class Room(SimpleNamespace):
        drawing = interactive = failed = False

        def __init__(self, conversation, *args, **kwargs):
            found.append({name: getattr(conversation.settings, name) for name in ("temp", "top_k", "repetition_penalty")})

        def run(self):
            pass

    monkeypatch.setattr("dflash_mlx.serving.server.serve", serve)
    monkeypatch.setattr("dflash_mlx.serving.chat.Chat", Room)
    return found


def said(command, target, *more):
    result = CliRunner().invoke(app, [command, "--model", target, *more], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_chat_and_serve_use_what_is_recommended_and_say_so_once(command, target, settings):
    out = said(command, target)
    assert settings == [{"temp": 0.6, "top_k": 20, "repetition_penalty": 1.05}]
    assert out.count("recommends --temp 0.6 --top-k 20 --repetition-penalty 1.05: used. --temp 0 turns that off.") == 1
    assert out.count("top_p is 'much'; it must be a number from 0 to 1; it is ignored.") == 1 and "fewer drafts" not in out


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_what_the_user_gives_goes_before_it_and_temp_0_wants_none(command, target, settings):
    out = said(command, target, "--temp", "0.9")
    assert settings[0]["top_k"] == 20 and settings[0].get("temp", 0.9) == 0.9 and "recommends --top-k 20 --rep" in out
    out = said(command, target, "--temp", "0")
    assert settings[1] in ({}, {"temp": 0.0, "top_k": 0, "repetition_penalty": 1.0}) and "recommends" not in out


def test_another_model_in_a_chat_brings_what_is_recommended_for_it(target, tmp_path, monkeypatch):
    # The built-in pair recommends nothing; `target` does, and says so when it is taken.
    lines = f"/set\n/model {target}\n/set\n/set temp 0\n/model tiny\n/set temp default\n"
    result = CliRunner().invoke(app, ["chat", "--model", "tiny"], input=lines, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    found = [line.split(", xtc")[0] for line in result.output.splitlines() if line.startswith("temp ")]
    assert found == [f"temp {temp}, top_p 1.0, top_k {k}, min_p 0.0" for temp, k in ((0.0, 0), (0.6, 20), (0.0, 0), (0.0, 0))]
    assert result.output.count("recommends --temp 0.6 --top-k 20 --repetition-penalty 1.05: used.") == 1


def test_its_cost_in_accepted_drafts_is_said_where_there_is_a_drafter(target, settings):
    assert "Sampling keeps fewer drafts" in said("serve", target, "--draft-model", "tiny")


def test_generate_stays_greedy_and_names_what_is_recommended(target, tmp_path):
    out = said("generate", target, "-p", "def f", "-m", "4", "--json")
    assert "recommends --temp 0.6 --top-k 20 --repetition-penalty 1.05; generate uses --temp 0 unless you give these." in out
    (tmp_path / "target" / "generation_config.json").unlink()
    text = [line for line in out.splitlines() if line.startswith("{")]
    other = said("generate", target, "-p", "def f", "-m", "4", "--json")
    assert "recommends" not in other
    ids = [json.loads(line)["token_ids"] for line in [*text, *(one for one in other.splitlines() if one.startswith("{"))]]
    assert ids[0] == ids[1]


def test_a_request_goes_before_it_and_one_at_temperature_0_is_greedy(pair, monkeypatch):
    asked, make = [], SamplingSettings.make
    monkeypatch.setattr(SamplingSettings, "make", lambda self, *a: asked.append(self) or make(self, *a))
    model, tokenizer, _ = pair
    recommended = {"temp": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    with running(model, tokenizer, recommended=recommended) as served:
        ask(served, max_tokens=1)
        ask(served, max_tokens=1, temperature=0.3, extra_body={"top_k": -1})
        ask(served, max_tokens=1, temperature=0)
    assert asked == [
        SamplingSettings(**recommended),
        SamplingSettings(temp=0.3, top_k=0, repetition_penalty=1.05),
        SamplingSettings(),
    ]
