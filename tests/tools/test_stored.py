"""dflash-mlx cache and models: what is listed, and that only what was listed and named is deleted."""

import io
import json
import os
import shutil
import time

import pytest
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.cli.lists import _delete
from dflash_mlx.errors import DFlashError
from dflash_mlx.tools.columns import age_text
from dflash_mlx.tools.stored import PROMPT_CACHES, named, stored


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A machine with one of everything, and things that are no business of ours."""
    cache, state, hub = tmp_path / "cache", tmp_path / "state", tmp_path / "hub"
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(cache))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    for repo in ("models--org--M-4bit", "datasets--org--D"):
        snapshot = hub / repo / "snapshots" / ("0" * 40)
        for folder in (snapshot, hub / repo / "refs", hub / repo / "blobs"):
            folder.mkdir(parents=True)
        (hub / repo / "refs" / "main").write_text("0" * 40)
        (hub / repo / "blobs" / "b").write_bytes(b"x" * 200_000)
        (snapshot / "model.safetensors").symlink_to(hub / repo / "blobs" / "b")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    for path in (
        *(cache / "SmolLM2" / "config.json", cache / ".fetched-1" / "x.gguf", cache / "cost_models.json"),
        *(cache / ".SmolLM2.partial-mac-12-ab" / "model.safetensors", cache / ".other" / "x", cache / ".DS_Store"),
        *(cache / "kernels" / "tuning.json", cache / PROMPT_CACHES / "book.safetensors", cache / "notes.txt"),
        *(state / "dflash-mlx" / "sessions" / "last.json", state / "dflash-mlx" / "history"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (cache / "linked").symlink_to(outside)
    (cache / "linked.json").symlink_to(outside / "config.json")
    return tmp_path


NAMES = ["SmolLM2", "org/M-4bit", "measured/cost_models", "measured/tuning", "session/last", "prompts/book"]
NAMES += ["unfinished/SmolLM2.partial-mac-12-ab", "unfinished/fetched-1"]


def run(*words, answer=None):
    return CliRunner().invoke(app, ["cache", *words], input=answer)


def test_the_list_has_every_kind_and_nothing_else(kept):
    assert [one.name for one in stored()] == NAMES
    rows = json.loads(run("--json").stdout)
    assert [row["name"] for row in rows] == NAMES and rows[1]["size_bytes"] == 200_000
    text = run().output
    assert all(name in text for name in NAMES) and "0.2 MB" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("folder", ["cache", "cache/kernels", "cache/prompt_caches", "state/dflash-mlx/sessions", "hub"])
def test_a_folder_that_is_a_file_is_said_and_is_not_an_empty_list(kept, folder):
    shutil.move(kept / folder, kept / "moved")
    assert run().exit_code == 0  # what is not there yet is empty
    (kept / folder).write_text("x")
    done = run()
    assert isinstance(done.exception, DFlashError) and "Nothing is kept" not in done.output
    variable = {"cache": "DFLASH_MLX_CACHE", "state": "XDG_STATE_HOME", "hub": "HF_HUB_CACHE"}[folder.split("/")[0]]
    assert f"{kept / folder}" in str(done.exception) and variable in str(done.exception)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_was_named_is_deleted(kept, name):
    def files():
        return {path for path in kept.rglob("*") if path.is_file() or path.is_symlink()}

    (one,) = named([name], stored())
    before = files()
    done = run("--delete", name, "--yes")
    assert done.exit_code == 0 and f"Deleted {name}." in done.output
    gone = before - files()
    assert gone and all(path == one.path or one.path in path.parents for path in gone)
    assert [other.name for other in stored()] == [other for other in NAMES if other != name]


@pytest.mark.parametrize("name", ["linked", "measured/linked", "../outside", "history", "notes", "org/D", ""])
def test_what_is_not_listed_is_not_deleted(kept, name):
    before = sorted(kept.rglob("*"))
    done = run("--delete", "session/last", "--delete", name, "--yes")
    assert isinstance(done.exception, DFlashError) and "Nothing was deleted" in str(done.exception)
    assert sorted(kept.rglob("*")) == before


def test_where_nobody_can_be_asked_nothing_is_deleted(kept):
    done = run("--delete", "session/last", answer="y\n")
    assert isinstance(done.exception, DFlashError) and "Give --yes" in str(done.exception)
    assert [one.name for one in stored()] == NAMES


@pytest.mark.parametrize(("answer", "left"), [("y\n", 7), ("n\n", 8), ("\n", 8), ("", 8)])
def test_a_question_is_asked_first(kept, monkeypatch, answer, left):
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    _delete(named(["session/last"], stored()), yes=False)
    assert len(stored()) == left


def test_ages_are_words():
    now = time.time()
    assert [age_text(now - s, now) for s in (5, 120, 7300, 90000, 260000)] == ["now", "2 min", "2 h", "1 day", "3 days"]


def test_an_empty_machine_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    assert stored() == [] and "Nothing is kept here yet" in run().output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("gb", "said"), [(1000, "yes"), (5.5, "hardly"), (1.0, "no")])
def test_models_says_what_fits_here(monkeypatch, gb, said):
    monkeypatch.setattr("dflash_mlx.machine.limit_bytes", lambda: int(gb * 1e9))
    rows = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert next(row for row in rows if row["target"] == "Qwen/Qwen3-8B")["fits"] == said
    text = CliRunner().invoke(app, ["models"]).output
    # The sentences below are not wrapped for a pipe.
    assert max(map(len, text[: text.index("Sizes are")].splitlines()[:-1])) <= 80
    lines = [line.split() for line in text.splitlines() if line.startswith("Qwen/Qwen3-8B ")]
    assert ["Qwen/Qwen3-8B", "4.6", "GB", "0.59", "GB", "5.2", "GB", said] in lines
