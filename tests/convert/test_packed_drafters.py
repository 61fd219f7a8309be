"""Drafters as other tools pack and file them: every drafted id is NumPy's, from the values that were packed.

Files are those of vllm-project/speculators (model.py and models/dflash/core.py at c05b95b3: `embed_tokens`, `lm_head`, `d2t`,
`t2d`, `verifier_lm_head`, `verifier_norm`) with matrices as vllm-project/compressed-tensors packs them. `packers` and `reference`
share no code with the package.
"""

import json
from functools import partial

import mlx.core as mx
import numpy as np
import packers
import pytest
import reference
from kit import flat, grow, ids_of, raw_config, rounds_of, run, tiny_target

from dflash_mlx import convert, load_drafter
from dflash_mlx.config import DrafterConfig
from dflash_mlx.models.architectures import build_drafter
from dflash_mlx.models.target import Target

H, V, RANK = 64, 61, 32
PROMPT = [5, 9, 33, 7, 20, 41, 2, 8, 50]
KEEP = [i for i in range(V) if i % 4 != 1]
SIZES = {"intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
OUTER = ("block_size", "mask_token_id", "target_layer_ids", "architectures", "dflash_config")


def group(bits, kind, form, strategy, **more):
    return {"format": form, "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "strategy": strategy, **more}}


def record(*args, **more):
    """What llm-compressor writes beside the weights. The drafter's own head is packed too: nothing is ignored."""
    packed = group(*args, **more)
    return {"quant_method": "compressed-tensors", "format": args[2], "config_groups": {"group_0": packed}, "ignore": []}


FP8 = ("float-quantized", "channel")
# name: (packer, record, mode that the matrices have in MLX, None for floats)
PACKINGS = {
    "int4": (
        partial(packers.pack_quantized, bits=4, group=32, symmetric=False),
        record(4, "int", "pack-quantized", "group", group_size=32, symmetric=False),
        "affine",
    ),
    "int8 in words": (partial(packers.pack_quantized, bits=8, group=32), record(8, "int", "pack-quantized", "group"), "affine"),
    "int8": (packers.int_quantized, record(8, "int", "int-quantized", "channel"), "affine"),
    "int8, one scale": (partial(packers.int_quantized, tensor=True), record(8, "int", "int-quantized", "tensor"), "affine"),
    "fp8, a scale a row": (packers.fp8, record(8, "float", *FP8), None),
    "fp8, one scale": (partial(packers.fp8, rows=0, dtype="F32"), record(8, "float", "naive-quantized", "tensor"), None),
    "fp8 in blocks": (
        partial(packers.fp8, rows=16, columns=32, dtype="F32", name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        None,
    ),
    "MXFP4": (packers.mxfp4, record(4, "float", "mxfp4-pack-quantized", "group", group_size=32), "mxfp4"),
    "MXFP8": (packers.mxfp8, record(8, "float", "mxfp8-quantized", "group", group_size=32), "mxfp8"),
    "NVFP4 that folds": (
        partial(packers.nvfp4, divisor=0.5),
        record(4, "float", "nvfp4-pack-quantized", "tensor_group", group_size=16),
        "nvfp4",
    ),
    "NVFP4": (
        lambda weight: (lambda parts, values: (parts, packers.bf16(values)))(*packers.nvfp4(weight, 1234.5)),
        record(4, "float", "nvfp4-pack-quantized", "tensor_group", group_size=16),
        None,
    ),
}
DSPARK = {
    "markov_rank": RANK, "markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}  # fmt: skip
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4}
# name: (algorithm of speculators, what its config adds, rows of its head)
KINDS = {"dflash": ("dflash", {}, KEEP), "dflash2": ("dflash2", DFLASH2, None), "dspark": ("dspark", DSPARK, KEEP)}


def speculators_config(kind, packing):
    """One level for the layers, one for what the drafter adds; taps counted from the embedding."""
    algorithm, more, keep = KINDS[kind]
    flat_one = raw_config(H, V, **SIZES, layer_types=["full_attention"] * 2, sliding_window=None)
    inner = {key: value for key, value in flat_one.items() if key not in OUTER}
    block = flat_one["block_size"]
    return {
        "architectures": [{"dspark": "DSparkDraftModel"}.get(kind, "DFlashDraftModel")],
        "speculators_model_type": algorithm,
        "speculators_version": "0.5.0",
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 3,
        "block_size": block - (kind == "dspark"),
        "draft_vocab_size": len(keep) if keep else V,
        "speculators_config": {"algorithm": algorithm, "proposal_methods": [{"speculative_tokens": block - 1}]},
        **more,
        **({"quantization_config": PACKINGS[packing][1]} if packing else {}),
    }


def side_tensors(model, keep):
    """What speculators files beside the layers: an embedding, a head of the draft vocabulary, both maps, the verifier's parts."""
    rng = np.random.default_rng(3)
    rows = len(keep) if keep else V
    tensors = {
        "embed_tokens.weight": rng.normal(size=(V, H)) * 0.5,
        "lm_head.weight": rng.normal(size=(rows, H)),
        # not trained with: NaN until it is loaded from the verifier
        "verifier_lm_head.weight": np.full((rows, H), np.nan) if keep else rng.normal(size=(rows, H)),
        "verifier_norm.weight": rng.normal(size=H),
    }
    return {name: packers.bf16(value) for name, value in tensors.items()}


def is_linear(name, value):
    names = (".weight", "_proj", "fc", "markov_w2")
    of_linear = name.endswith(".weight") and any(part in name for part in names[1:]) or "lm_head" in name
    return of_linear and value.ndim == 2 and value.shape[0] > 1 and not np.isnan(value).any()


def filed(path, kind, packing, model):
    """Writes such a folder. -> values [name] in float64 that NumPy computes with."""
    config, keep = speculators_config(kind, packing), KINDS[kind][2]
    shapes = {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)} if kind == "dspark" else {}
    mx.random.seed(5)
    weights = flat(grow(build_drafter(DrafterConfig.from_dict(config), shapes), 3.0))
    values = {name: packers.bf16(np.array(value)) for name, value in weights.items()} | side_tensors(model, keep)
    tensors = {}
    for name, value in values.items():
        if packing and is_linear(name, value):
            parts, values[name] = PACKINGS[packing][0](value)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": entry for part, entry in parts.items()}
        else:
            tensors[name] = packers.as_type(value, "BF16")[:2]
    if keep:
        tensors["d2t"] = ("I64", np.array(keep) - np.arange(len(keep)))
        tensors["t2d"] = ("BOOL", np.isin(np.arange(V), keep))
        values["d2t"] = tensors["d2t"][1]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    packers.write_safetensors(path / "model.safetensors", tensors)
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def drafted_by_numpy(model, config, values, line, at):
    features = np.array(Target(model, (0, 2))(mx.array([line[:at]])).features[0], dtype=np.float64)
    rows = config.block_size - config.sample_from_anchor
    block = values["embed_tokens.weight"][[line[at], *[config.mask_token_id] * (rows - 1)]]
    hidden = reference.hidden_states(values, config, features, block)[not config.sample_from_anchor :]
    logits = hidden @ values["lm_head.weight"].T
    if config.markov_rank:
        return reference.markov_rows(values, config.markov_head_type, hidden, logits, line[at], lambda _, row: row.argmax())[0]
    if config.selector_rank:
        return reference.selected(values, config, hidden, logits, line[at])
    best = logits.argmax(-1)
    return [int(i + values["d2t"][i]) for i in best]


# each packing once, each kind of drafter in several; one of each kind in the quick tier
CASES = [(packing, list(KINDS)[i % 3]) for i, packing in enumerate(PACKINGS)] + [(None, kind) for kind in KINDS]
QUICK = ("int4", "MXFP4", "fp8, one scale", "NVFP4")
PARAMS = [
    pytest.param(*case, id=f"{case[0] or 'floats'}-{case[1]}", marks=() if case[0] in QUICK else pytest.mark.full)
    for case in CASES
]


@pytest.fixture(scope="module")
def target():
    return tiny_target(hidden=H)


@pytest.mark.parametrize("packing, kind", PARAMS)
def test_a_speculators_drafter_drafts_numpys_ids_however_it_is_packed(tmp_path, target, packing, kind):
    values = filed(tmp_path / "packed", kind, packing, target)
    plain = ids_of(run(target, None, PROMPT, 8))
    line = [*PROMPT, *plain]
    convert(str(tmp_path / "packed"), str(tmp_path / "out"))
    for folder in ("packed", "out"):
        drafter = load_drafter(str(tmp_path / folder), target)
        mode = PACKINGS[packing][2] if packing else None
        assert {getattr(layer, "mode", None) for layer in (drafter.fc, drafter.lm_head, drafter.layers[1].mlp.down_proj)} == {
            mode
        }
        got, at = run(target, drafter, PROMPT, 8, block_size=5), len(PROMPT)
        assert ids_of(got) == plain
        for drafted, accepted, _ in rounds_of(got):
            if at < len(line):
                assert drafted == drafted_by_numpy(target, drafter.config, values, line, at), (folder, at)
            at += accepted + 1


def test_packed_parts_of_the_verifier_and_a_fused_projection_are_read(tmp_path, target):
    """poolside's Laguna: q, k and v in one matrix, here in other bits than the rest, under the prefix that transformers adds."""
    raw = raw_config(H, V, **SIZES, architectures=["DFlashLagunaForCausalLM"], model_type="laguna", is_causal=True)
    int8 = group(8, "int", "int-quantized", "channel") | {"targets": ["re:.*qkv_proj"]}
    groups = {"group_0": int8, "group_1": group(4, "int", "pack-quantized", "group", group_size=32)}
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    mx.random.seed(6)
    weights = {name: np.array(v) for name, v in flat(grow(build_drafter(DrafterConfig.from_dict(raw), {}), 3.0)).items()}
    values, tensors = dict(weights), {}
    for layer in ("layers.0.self_attn", "layers.1.self_attn"):
        fused = np.concatenate([weights.pop(f"{layer}.{part}_proj.weight") for part in "qkv"])
        parts, packed = packers.int_quantized(fused)
        tensors |= {f"model.{layer}.qkv_proj.{part}": entry for part, entry in parts.items()}
        for part, rows in zip("qkv", np.split(packed, [128, 192]), strict=True):
            values[f"{layer}.{part}_proj.weight"] = rows
    for name, value in (weights | {"verifier_lm_head.weight": np.ones((V, H), np.float32)}).items():
        if value.ndim == 1 or "g_proj" in name:
            tensors[f"model.{name}"] = ("F32", value)
            continue
        parts, values[name] = packers.pack_quantized(value, bits=4, group=32)
        tensors |= {f"model.{name.removesuffix('.weight')}.{part}": entry for part, entry in parts.items()}
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    packers.write_safetensors(folder / "model.safetensors", tensors)
    convert(str(folder), str(tmp_path / "out"))
    values = {name: np.asarray(value, np.float64) for name, value in values.items()}
    values |= {"embed_tokens.weight": np.array(target.model.embed_tokens.weight, np.float64)}
    values |= {"lm_head.weight": np.array(target.lm_head.weight, np.float64), "d2t": np.zeros(V)}
    plain = ids_of(run(target, None, PROMPT, 8))
    for source in (folder, tmp_path / "out"):
        drafter, at = load_drafter(str(source), target), len(PROMPT)
        assert [drafter.layers[0].self_attn.k_proj.bits, drafter.layers[0].mlp.up_proj.bits] == [8, 4]
        for drafted, accepted, _ in rounds_of(run(target, drafter, PROMPT, 8, block_size=5)):
            line = [*PROMPT, *plain]
            if at < len(line):
                assert drafted == drafted_by_numpy(target, drafter.config, values, line, at), (source.name, at)
            at += accepted + 1
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert {name.rpartition(".")[2] for name in written if "." in name} == {"q_proj", "k_proj", "v_proj"}
