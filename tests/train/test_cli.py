"""The three commands of `dflash-mlx train`, end to end on the built-in target."""

import json

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.pairs.builtin import builtin_path


def call(*words):
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.mark.full
def test_data_run_and_eval_make_a_drafter_that_generate_accepts(tmp_path, pair):
    data, out = str(tmp_path / "data"), str(tmp_path / "drafter")
    size = ["--answer-tokens", "200", "--rows", "8", "--max-len", "96", "--held-out", "4"]
    made = call("data", "--model", "tiny", "--out", data, *size)
    texts = ("Writing held-out questions: 4 of each kind", "Held out: 4 of 4 answered", " of 8 answers kept.")
    places = [made.stderr.index(text) for text in texts]
    assert places == sorted(places)
    run = ["run", "--model", "tiny", "--data", data, "--out", out, "--steps", "2", "--layers", "1", "--block-size", "4"]
    call(*run, "--mask-token-id", "3", "--batch", "4", "--anchors", "4", "--max-len", "96")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["block_size"] == 4 and config["dflash_config"]["target_layer_ids"] == [1, 2, 3]
    got = call("eval", "--model", "tiny", "--draft-model", out, "--data", data, "--limit", "4", "--json")
    rows = json.loads(got.stdout)["tau"]
    assert rows and all(r["drafter"] >= 1 for r in rows)
    ask = ["eval", "--model", "tiny", "--draft-model", out, "--data", data, "--json"]
    once, twice = (json.loads(call(*words).stdout)["tau"] for words in (ask, [*ask, "--data", data]))
    assert [r["answers"] for r in twice] == [2 * r["answers"] for r in once]
    model, tokenizer, _ = pair
    from dflash_mlx import load_drafter, stream_generate

    drafter = load_drafter(out, model)
    last = list(stream_generate(model, tokenizer, "import os\n", max_tokens=6, draft_model=drafter, block_size=8))[-1]
    assert last.stats.tau >= 1
    # A built-in drafter is named as everywhere else; one step at the smallest rate leaves it what it was.
    further = str(tmp_path / "further")
    small = ["--steps", "1", "--lr", "0", "--batch", "4", "--anchors", "4", "--max-len", "96"]
    call("run", "--model", "tiny", "--data", data, "--out", further, "--init", "tiny", *small)
    first, second = (mx.load(str(path / "model.safetensors")) for path in (builtin_path("tiny", "drafter"), tmp_path / "further"))
    assert set(first) == set(second) and all(mx.array_equal(first[name], second[name]) for name in first)


def test_run_without_data_says_what_to_do(tmp_path):
    result = CliRunner().invoke(app, ["train", "run", "--model", "tiny", "--data", str(tmp_path), "--out", "x", "--steps", "1"])
    assert result.exit_code == 1 and "First: dflash-mlx train data" in str(result.exception)


@pytest.mark.full
def test_a_data_folder_without_its_held_out_text_is_finished_by_the_same_command(tmp_path):
    data = tmp_path / "data"
    size = ["--answer-tokens", "200", "--rows", "8", "--max-len", "96", "--held-out", "1"]
    call("data", "--model", "tiny", "--out", str(data), *size)
    (data / "heldout.npz").unlink()
    asked = ["train", "eval", "--model", "tiny", "--draft-model", "tiny", "--data", str(data)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1
    todo = "has no files heldout.npz. Run the same `train data` command again to finish it."
    assert todo in str(result.exception)
    small = ["--steps", "1", "--lr", "0", "--batch", "4", "--anchors", "4", "--max-len", "96", "--init", "tiny"]
    done = call("run", "--model", "tiny", "--data", str(data), "--out", str(tmp_path / "drafter"), *small)
    assert [line for line in done.stderr.splitlines() if "no held-out text" in line and "`train data`" in line]
