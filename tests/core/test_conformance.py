"""The loop and the drafter against the authors' own outputs: every token and every drafted id.

The quick tier runs what lies in tests/data; the full tier everything in ../shared/conformance.
"""

import json

import mlx.core as mx
import pytest
from kit import DATA, meets, references, run, variant

from dflash_mlx.config import DrafterConfig
from dflash_mlx.loading import make_drafter

GENERATION = json.loads((DATA / "generation.json").read_text())
# Short and 230 tokens.
SOME_PROMPTS = (0, 6)


@pytest.mark.parametrize("index", range(len(GENERATION)))
@pytest.mark.quick(3)
def test_the_pair_generates_the_authors_ids_and_rounds(pair, index):
    model, tokenizer, drafter = pair
    case = GENERATION[index]
    got = run(model, drafter, case["prompt"], max_tokens=len(case["greedy_ids"]), tokenizer=tokenizer, block_size=8)
    assert got[0].prompt_tokens == len(case["prompt_ids"])
    assert case["dflash_ids"] == case["greedy_ids"]
    assert meets(got, case["greedy_ids"], case["rounds"])
    lengths = case["acceptance_lengths"][:-1]
    assert got[-1].stats.acceptance_lengths[: len(lengths)] == lengths


def check_variant(pair, path, prompts):
    model, tokenizer, _ = pair
    reference = references(path)
    drafter = variant(model, reference["config"])
    for i in prompts:
        case = reference["prompts"][i]
        block = drafter.config.block_size
        got = run(model, drafter, case["prompt_ids"], len(case["ids"]), tokenizer, block_size=block)
        assert meets(got, case["ids"], case["rounds"]), f"{path.stem}, prompt {i}"


@pytest.mark.parametrize("name", sorted(p.stem for p in (DATA / "variants").glob("*.json")))
@pytest.mark.quick(2)
def test_variants_draft_what_the_authors_layers_draft(pair, name):
    check_variant(pair, DATA / "variants" / f"{name}.json", SOME_PROMPTS)


@pytest.mark.full
def test_all_variants_draft_what_the_authors_layers_draft(pair, conformance):
    paths = sorted((conformance / "pair" / "variants").glob("*.json"))
    assert paths
    for path in paths:
        check_variant(pair, path, range(8))


def check_forward(drafter, path):
    """Four chained calls with one context cache: float32 against float32, other summation order, hence 1e-4 of the largest."""
    reference = mx.load(str(path))
    cache, start = drafter.make_cache(), 0
    for step in range(4):
        at = {k.split(".")[1]: v for k, v in reference.items() if k.startswith(f"step{step}.")}
        block = at["noise_embedding"] if "noise_embedding" in at else drafter._embed(at["block_ids"])
        hidden = drafter(block, at["target_hidden"], cache, start)
        start += at["target_hidden"].shape[1]
        assert [entry.offset for entry in cache] == [start] * len(cache)
        assert_close(hidden, at["hidden"], f"{path.parent.name} step {step}")
        if "logits" in at:
            assert mx.array_equal(drafter._embed(at["block_ids"]), block)
            assert_close(drafter._head(hidden), at["logits"], f"logits, step {step}")


def assert_close(got, expected, what):
    assert got.shape == expected.shape and got.dtype == mx.float32, what
    error = (mx.abs(got - expected).max() / mx.abs(expected).max()).item()
    assert error < 1e-4, f"{what}: {error:.1e} relative"


def random_drafter(pair, folder):
    config = DrafterConfig.from_dict(json.loads((folder / "config.json").read_text()))
    return make_drafter(config, dict(mx.load(str(folder / "model.safetensors"))), pair[0])


def check_random_drafter(pair, folder):
    model, tokenizer, _ = pair
    drafter = random_drafter(pair, folder)
    check_forward(drafter, folder / "forward.safetensors")
    for i, case in enumerate(references(folder / "rounds.json")):
        block = drafter.config.block_size
        got = run(model, drafter, case["prompt_ids"], len(case["ids"]), tokenizer, block_size=block)
        assert meets(got, case["ids"], case["rounds"]), f"{folder.name}, prompt {i}"


def test_four_chained_drafter_calls_agree_with_the_authors(pair):
    check_forward(pair[2], DATA / "drafter_forward.safetensors")


def test_a_random_one_layer_drafter_agrees_with_the_authors(pair):
    check_random_drafter(pair, DATA / "one-layer")


@pytest.mark.full
def test_all_random_drafters_agree_with_the_authors(pair, conformance):
    folders = sorted(p for p in (conformance / "drafters").iterdir() if p.is_dir())
    assert folders
    for folder in folders:
        check_random_drafter(pair, folder)


@pytest.mark.full
def test_the_data_beside_the_tests_is_the_reference_data(conformance):
    pairs = [(DATA / "generation.json", conformance / "pair" / "generation.json")]
    pairs += [(p, conformance / "pair" / "variants" / p.name) for p in (DATA / "variants").glob("*.json")]
    pairs += [(p, conformance / "drafters" / "one-layer" / p.name) for p in (DATA / "one-layer").iterdir()]
    assert len(pairs) == 10
    for ours, theirs in pairs:
        assert ours.read_bytes() == theirs.read_bytes(), ours.name
