"""Every target family that mlx-lm runs: with a drafter the ids are plain greedy decoding's, and nothing is left on the target.

No module between the checkpoint and the text may know a family by name: what works here works for a family that nobody named.
Quick: one run each. Full (`pytest -m full`): 200 tokens, several block sizes and drafters, 4 bit, quantized KV.
"""

import ast
import inspect

import mlx.core as mx
import pytest
from dflash_mlx.conversion import load_target
from families import (
    BASE,
    EVERY,
    FAMILIES,
    NOISY,
    OTHERS,
    PLAN,
    Recorder,
    V,
    agree,
    error,
    family,
    greedy_line,
    in_blocks,
    known_drafter,
    one_at_a_time,
    quantize,
    some_line,
)
from kit import flat, greedy_ids, ids_of, plant, run
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import gemma3n, iquestloopcoder, nanbeige

from dflash_mlx import generation, make_prompt_cache, prompt_cache, verify
from dflash_mlx import rollback as cache_module
from dflash_mlx.errors import CacheError, GenerationError, TapError
from dflash_mlx.models import intercept, recurrent
from dflash_mlx.models import target as taps
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.pair_checks import check_pair

# Those whose plain passes over one row and over many differ by rounding: other sums in MLA, Mamba-2 and rings.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.quick(9)
def test_a_family_gives_plain_decodings_ids_and_logits(name):
    model, prompt = family(name), some_line(19)
    line = greedy_line(model, prompt, 40)
    assert agree(model, line, 19, NOISY) == []
    # In plain mlx-lm nothing has changed.
    assert greedy_line(model, prompt, 40) == line
    # The logits of each kept row too, whatever the text: a line of greedy tokens may repeat itself.
    line = some_line(60)
    assert error(in_blocks(model, line, 19, PLAN), one_at_a_time(model, line, 19)) < TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.quick(9)
def test_drafted_ids_are_those_of_a_drafter_without_caches(name):
    """At every round: features of the whole text from one plain pass, and a drafter that has never seen any of it."""
    model, prompt = family(name), some_line(19)
    line = greedy_line(model, prompt, 30)
    drafter = known_drafter(model, line, "noisy")
    drafter.__class__ = Recorder
    drafter.drafted = {}
    assert ids_of(run(model, drafter, prompt, 30, block_size=5, prefill_step_size=7)) == line[19:]
    assert len(drafter.drafted) > 8
    target = Target(model, drafter.config.target_layer_ids)
    for at, drafted in drafter.drafted.items():
        features = target(mx.array([line[:at]]), mlx_lm_cache.make_prompt_cache(model)).features
        expected = Drafter.draft(drafter, mx.array([line[at]]), features, drafter.make_cache(), 0, 5)
        assert drafted == expected[0].tolist(), at


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.quick(9)
def test_a_row_too_many_is_seen_in_a_family(monkeypatch, name):
    model, line = family(name), some_line(50)
    expected = one_at_a_time(model, line, 19)
    plant(
        monkeypatch, cache_module, "rollback", "keep = length - point.length", "keep = min(length - point.length + 1, point.rows)"
    )
    try:
        seen = error(in_blocks(model, line, 19, PLAN), expected) > TOLERANCE
    except (CacheError, ValueError):
        seen = True
    assert seen


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_change_no_logit_and_leave_nothing_behind(name):
    model, ids = family(name), mx.array([some_line(23)])
    names, classes = set(flat(model)), [type(m) for _, m in model.named_modules()]
    cache = mlx_lm_cache.make_prompt_cache(model)
    target = Target(model, range(len(list(model.layers))))
    output = target(ids, cache)
    hidden, features = output.hidden, output.features
    assert mx.array_equal(target.head(hidden), model(ids, cache=mlx_lm_cache.make_prompt_cache(model)))
    assert features.shape == (1, 23, len(target.layers) * (features.shape[-1] // len(target.layers)))
    assert set(flat(model)) == names and [type(m) for _, m in model.named_modules()] == classes


def test_each_tap_is_its_layers_output(conformance):
    """Bit-exact reference states exist for the families beside the checkout: J = l + 1 is the output of layer l."""
    for path in sorted((conformance / "targets").iterdir()):
        model, _ = load_target(path)
        model.set_dtype(mx.float32)
        golden = mx.load(str(path / "golden.safetensors"))
        target = Target(model, (0, 1, 2))
        features = target(golden["input_ids"]).features
        for i in range(3):
            width = features.shape[-1] // 3
            got, expected = features[..., i * width : (i + 1) * width], golden[f"hidden_states.{i + 1}"]
            assert error(got, expected) < 1e-3, (path.name, i)


@pytest.mark.full
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_exact_for_200_tokens_with_every_drafter_and_block(name, bits):
    model, prompt = family(name), some_line(19)
    if bits:
        quantize(model, bits)
    line = greedy_line(model, prompt, 200)
    assert agree(model, line, 19, NOISY if bits else EVERY) == []
    assert greedy_line(model, prompt, 40) == line[: 19 + 40]


@pytest.mark.full
@pytest.mark.parametrize("bits", [None, 4])
def test_the_conformance_targets_are_exact_for_200_tokens(conformance, bits):
    paths = sorted((conformance / "targets").iterdir())
    assert len(paths) == 12
    for path in paths:
        model, _ = load_target(path)
        model.set_dtype(mx.float32)
        golden = mx.load(str(path / "golden.safetensors"))["greedy_ids"][0].tolist()
        assert greedy_ids(model, golden[:20], 48) == golden[20:]
        if bits:
            quantize(model, bits)
        line = greedy_line(model, golden[:20], 200)
        assert agree(model, line, 20, NOISY if bits else EVERY) == [], path.name
        assert greedy_line(model, golden[:20], 40) == line[: 20 + 40], path.name
        # Some of these repeat themselves: random tokens do not.
        line = some_line(90, 300)
        assert error(in_blocks(model, line, 20, PLAN), one_at_a_time(model, line, 20)) < TOLERANCE, path.name


@pytest.mark.full
def test_kv_bits_on_the_conformance_targets_runs_exactly_or_is_an_early_error(conformance):
    """Heads of 32 in most of them, beside recurrent states and short convolutions in some."""
    ran = []
    for path in sorted((conformance / "targets").iterdir()):
        model, _ = load_target(path)
        model.set_dtype(mx.float32)
        if kv_bits_agree(model):
            ran.append(path.name)
    assert {"qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe_text"} <= set(ran)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_kv_bits_runs_exactly_or_is_an_early_error(name):
    kv_bits_agree(family(name))


def kv_bits_agree(model):
    """Whether mlx-lm itself runs this target with a quantized cache. If so ids must be its own; if not, an early error."""
    prompt = some_line(19)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 24}
    try:
        line = greedy_line(model, prompt, 60, **options)
    except Exception:
        with pytest.raises(GenerationError, match="mlx-lm cannot quantize the caches of"):
            run(model, known_drafter(model, []), prompt, 5, **options)
        return False
    assert agree(model, line, 19, **options) == []
    return True


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_give_single_rows_logits_and_plain_ids(name):
    model, line = family(name), some_line(70)
    assert error(in_blocks(model, line, 19, PLAN), one_at_a_time(model, line, 19)) < TOLERANCE
    line = greedy_line(model, line[:19], 60)
    assert agree(model, line, 19, NOISY) == []


def test_layers_with_several_streams_are_refused():
    text = {
        **BASE,
        "model_type": "gemma3n_text",
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": V,
        "sliding_window": 16,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 6,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 4,
    }
    model = gemma3n.Model(gemma3n.ModelArgs.from_dict({"model_type": "gemma3n", "text_config": text}))
    with pytest.raises(TapError, match=r"layer 1 gives \[2, 1, 1, 48\]; .* Its layers carry several streams"):
        Target(model, (1,))(mx.array([[3]]))


@pytest.mark.parametrize("name", [*FAMILIES, "plamo", "plamo3", "openelm", "kimi_k3"])
def test_the_borrowed_head_comes_after_the_final_norm(name):
    """A norm inside it would be applied to the drafter's normed rows again, and would make it blind to their length."""
    target = Target(family(name))
    hidden = mx.random.normal((1, 2, target.embed(mx.array([[1]])).shape[-1]), key=mx.random.key(1))
    assert error(target.head(3 * hidden), target.head(hidden)) > 0.1


def test_layers_that_run_in_loops_or_in_pieces_are_refused():
    wide = {**BASE, "model_type": "x"}
    looped = nanbeige.Model(nanbeige.ModelArgs.from_dict({**wide, "num_loops": 2}))
    with pytest.raises(
        TapError, match="layer 1 ran 2 times in a pass; .* It runs its layers in loops, so a layer has several outputs"
    ):
        Target(looped, (1,))(mx.array([[3]]))
    pieces = iquestloopcoder.Model(iquestloopcoder.ModelArgs.from_dict({**wide, "loop_window_size": 16}))
    with pytest.raises(TapError, match="layer 1 ran 0 times.* in a pass; .* It runs its layers piece by piece, never as a whole"):
        Target(pieces, (1,))(mx.array([[3]]))


def test_no_module_on_the_way_compares_a_family_by_name():
    for module in (taps, intercept, recurrent, cache_module, prompt_cache, verify, generation):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Compare):
                assert "model_type" not in ast.unparse(node), f"{module.__name__}, line {node.lineno}"


def test_a_pair_is_checked_with_any_family():
    for name in ("kimi_k25", "nemotron_h", "plamo2", "longcat_flash_ngram"):
        model = family(name)
        drafter = known_drafter(model, [])
        check_pair(drafter.config, Target(model))
        assert Target(model).vocabulary >= V
        assert len(make_prompt_cache(model, drafter)) > 3
