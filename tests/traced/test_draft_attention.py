"""A drafter's attention in a trace: what serves it, and that the same ids are drafted."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kit import DATA, TINY, meets, references, run, tiny_drafter, tiny_target, variant
from metal_device import MetalDevice
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx import traced
from dflash_mlx.config import DrafterConfig
from dflash_mlx.kernels import autotune, block_linear
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.dflash2 import DFlash2Drafter
from dflash_mlx.models.drafter import Attention, DecoderLayer
from dflash_mlx.traced import buffers, compiled, compiled_draft, draft_attention

FULL = {"layer_types": None, "sliding_window": None}


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A made-up Metal GPU on which every kernel and every trace is used; its units take float32 too."""
    device = MetalDevice().install(monkeypatch, tmp_path)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "on")
    monkeypatch.setenv(traced.VARIABLE, "on")
    monkeypatch.setattr(block_linear, "TILE_TYPES", (mx.float32,))
    return device


def names(device):
    return [name for name, *_ in device.launches]


def drafts(drafter, K=6, rounds=((0, 9), (4, 2), (5, 6))):
    """Hidden rows of passes one after the other, by the modules and traced: rounds of (drafted before, kept) context rows."""
    H, taps = drafter.config.target_hidden_size, len(drafter.config.target_layer_ids)
    passes = compiled_draft.CompiledDraft(drafter, compiled.model_parts(drafter), True)
    plain, ours, start, out = drafter.make_cache(), drafter.make_cache(), 0, []
    for i, (_, rows) in enumerate(rounds):
        ids = mx.random.randint(0, 40, (1, K), key=mx.random.key(i)).astype(mx.int32)
        features = mx.random.normal((1, rows, taps * H), key=mx.random.key(100 + i))
        stock = drafter.mask_rows(ids, features, plain, start)
        # The first round fills the caches: nothing is traced while they are empty.
        mine = passes.draft(ids, features, ours, start) if i else drafter.mask_rows(ids, features, ours, start)
        assert mine is not None, passes.refused
        out.append((stock, mine))
        start += rows
        mx.eval(stock, mine)
        assert [entry.offset for entry in ours] == [start] * len(ours)
    assert passes.passes == len(rounds) - 1 and not passes.refused
    return out, passes


def alike(pairs):
    return all((mx.abs(a - b).max() <= 2e-5 * mx.abs(a).max()).item() for a, b in pairs)


KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "neighbours rotated": {},
    "a part rotated": {},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "one head for all": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True},
}
ROPES = {"neighbours rotated": nn.RoPE(16, traditional=True), "a part rotated": nn.RoPE(8)}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_pass_drafts_what_the_modules_draft(kind, bits, device):
    model = tiny_target(hidden=32)
    drafter = tiny_drafter(model, hidden_size=32, intermediate_size=64, head_dim=16, **FULL, **KINDS[kind])
    for layer in drafter.layers:
        attention = layer.self_attn
        attention.q_norm.weight, attention.k_norm.weight = mx.random.uniform(0.5, 2, (2, 16))
        if kind in ROPES:
            attention.rope = ROPES[kind]
        if bits:
            nn.quantize(layer, 32, bits)
    if kind == "biases":
        # They are zero where they are made.
        biases = {name: mx.random.normal(a.shape) for name, a in tree_flatten(drafter.parameters()) if name.endswith("proj.bias")}
        drafter.update(tree_unflatten([*biases.items()]))
        assert biases
    pairs, _ = drafts(drafter)
    assert alike(pairs) and names(device).count("block_heads") >= len(drafter.layers)


def test_layers_whose_positions_turn_otherwise_have_tables_of_their_own(device):
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, num_hidden_layers=3, **FULL)
    drafter.layers[1].self_attn.rope = nn.RoPE(16, base=50.0)
    pairs, _ = drafts(drafter)
    assert alike(pairs) and "block_heads" in names(device)


def test_a_dflash_2_drafter_whose_convolutions_stand_between_norm_and_attention(device):
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}
    model = tiny_target(hidden=32)
    drafter = tiny_drafter(model, cls=DFlash2Drafter, hidden_size=32, intermediate_size=64, head_dim=16, **FULL, **sizes)
    pairs, _ = drafts(drafter)
    assert alike(pairs) and "block_heads" in names(device)


@pytest.mark.parametrize("K", [8, 9])
def test_blocks_of_more_rows_than_mlx_writes_head_by_head(K, device):
    """Up to 8 rows o_proj is given heads, of more the rows that are a view there."""
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, **FULL)
    pairs, _ = drafts(drafter, K)
    forms = {name for name in names(device) if name.startswith("block_linear") and "heads" in name}
    assert alike(pairs) and bool(forms) == (K <= 8)


def test_a_context_of_several_blocks_and_one_that_is_filled_up(device):
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, **FULL)
    pairs, _ = drafts(drafter, 4, rounds=((0, 9), (0, 1), (3, 4), (0, 7), (0, 16)))
    assert alike(pairs)


def test_the_trained_drafter_drafts_the_authors_ids(pair, device):
    """Text, and what was kept of each draft, with every kernel and every trace in use."""
    model, tokenizer, _ = pair
    case = references(DATA / "generation.json")[-1]
    drafter = variant(model, json.loads((TINY / "drafter" / "config.json").read_text()))
    got = run(model, drafter, case["prompt"], len(case["greedy_ids"]), tokenizer, block_size=8)
    assert meets(got, case["greedy_ids"], case["rounds"])
    assert drafter.pair.accelerator.passes[1].passes and "block_heads" in names(device)


def check_conformance(pair, folder, device):
    config = DrafterConfig.from_dict(json.loads((folder / "config.json").read_text()))
    drafter = make_drafter(config, dict(mx.load(str(folder / "model.safetensors"))), pair[0])
    for case in references(folder / "rounds.json"):
        got = run(pair[0], drafter, case["prompt_ids"], len(case["ids"]), pair[1], block_size=config.block_size)
        assert meets(got, case["ids"], case["rounds"]), folder.name
    assert drafter.pair.accelerator.passes[1].passes and "block_heads" in names(device)


def test_a_random_drafter_drafts_the_authors_ids(pair, device):
    check_conformance(pair, DATA / "one-layer", device)


@pytest.mark.full
@pytest.mark.parametrize("name", ["attention-bias", "block-16", "llama3-rope", "yarn"])
def test_all_random_drafters_draft_the_authors_ids(name, pair, conformance, device):
    check_conformance(pair, conformance / "drafters" / name, device)


def test_of_the_contexts_weights_there_is_a_copy_that_is_told_and_of_the_blocks_none(device):
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, **FULL)
    before = {name: mx.array(a) for name, a in tree_flatten(drafter.parameters())}
    _, passes = drafts(drafter)
    kv = [layer.self_attn[name].weight for layer in drafter.layers for name in ("k_proj", "v_proj")]
    assert passes.held == sum(a.nbytes for a in kv)
    assert all(mx.array_equal(before[name], a) for name, a in tree_flatten(drafter.parameters()))
    for q, k, v in ((x.self_attn.q_proj.weight, x.self_attn.k_proj.weight, x.self_attn.v_proj.weight) for x in drafter.layers):
        assert [address(k), address(v)] == [address(q) + q.nbytes, address(q) + q.nbytes + k.nbytes]


def address(array):
    return np.asarray(memoryview(array)).ctypes.data


def left_alone(drafter):
    return draft_attention.attention_calls(drafter, compiled_draft._draft_calls, 6, 6) == ([], [])


def test_what_attends_in_another_way_is_left_to_itself(device):
    model = tiny_target(hidden=32)

    def made(**changes):
        return tiny_drafter(model, hidden_size=32, head_dim=16, **FULL, **changes)

    assert not left_alone(made())

    class Other(Attention):
        pass

    class Otherwise(nn.RoPE):
        def __call__(self, x, offset=0):
            return mx.fast.rope(x, 16, traditional=True, base=10000.0, scale=1.0, offset=offset)

    class Apart(DecoderLayer):
        def own_context(self, context):
            return context * 2

    drafter = made()
    drafter.layers[1].self_attn.__class__ = Other
    assert left_alone(drafter)
    drafter = made()
    drafter.layers[1].__class__ = Apart
    assert left_alone(drafter)
    drafter = made()
    drafter.layers[0].self_attn.rope = lambda x, offset: x
    assert left_alone(drafter)
    # It turns other numbers than it says.
    drafter = made()
    drafter.layers[0].self_attn.rope = Otherwise(16)
    assert left_alone(drafter)
    drafter = made()
    drafter.layers[0].self_attn.k_norm.eps = 1.0
    assert left_alone(drafter)
    for name in ("q_proj", "k_proj"):
        drafter = made()
        nn.quantize(drafter.layers[0].self_attn, 32, 4, class_predicate=lambda path, _, name=name: path == name)
        assert left_alone(drafter)
    drafter = made()
    nn.quantize(drafter.layers[0].self_attn, 32, 4, class_predicate=lambda name, _: name.endswith("_proj"))
    assert left_alone(drafter)
    assert left_alone(made(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))


def test_products_that_mlx_serves_are_given_heads_side_by_side(device, monkeypatch):
    monkeypatch.setattr(block_linear, "TILE_TYPES", ())
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, **FULL)
    pairs, _ = drafts(drafter)
    assert alike(pairs) and {name for name in names(device) if "block" in name} == {"block_heads"}


def test_where_the_text_is_off_attention_is_as_before(device, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "block_linear,block_qmm")
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, **FULL)
    pairs, passes = drafts(drafter)
    assert alike(pairs) and passes.held == 0 and "block_heads" not in names(device)


def test_a_text_that_is_switched_off_between_answers_is_traced_out(device):
    drafter = tiny_drafter(tiny_target(hidden=32), hidden_size=32, head_dim=16, **FULL)
    passes = compiled_draft.CompiledDraft(drafter, compiled.model_parts(drafter), True)
    cache = drafter.make_cache()
    ids, features = mx.array([[4, 3, 3, 3, 3, 3]]), mx.random.normal((1, 6, 64))
    mx.eval(drafter.mask_rows(ids, features, cache, 0))
    other = [buffers.copied(entry) for entry in cache]
    with_text = passes.draft(ids, features, cache, 6)
    mx.eval(with_text)
    assert passes.held
    autotune.switch_off("block_heads", "a test says so")
    device.launches.clear()
    without = passes.draft(ids, features, other, 6)
    mx.eval(without)
    assert not passes.held and "block_heads" not in names(device) and alike([(without, with_text)])
