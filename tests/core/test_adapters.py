"""Weights that mlx-lm trained over a target: mlx-lm's own layers and files, and the target that the drafter then sees."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from kit import TINY, full_forward, greedy_ids, ids_of, rounds_of, run
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from packers import as_type, pack_quantized, write_safetensors

from dflash_mlx import convert, load, load_drafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.loading import activation_dtype
from dflash_mlx.models.target import Target

PROMPT = [1, 40, 7, 22, 9, 31, 5]
KEYS = {"layers": None, "ends": ["model.embed_tokens", "lm_head", "self_attn.v_proj", "mlp.down_proj"]}


def adapter(folder, kind="lora", keys=None, scale=6.0, base=TINY / "target", spread=0.3):
    """What mlx_lm.lora writes, with random weights that change every answer."""
    model, _ = mlx_lm.load(str(base))
    model.freeze()
    mx.random.seed(3)
    parameters = {"rank": 4, "scale": scale, "dropout": 0.1, **({"keys": keys} if keys else {})}
    linear_to_lora_layers(model, 8, dict(parameters), use_dora=kind == "dora")
    weights = {
        name: mx.random.normal(value.shape) * spread if name.endswith("lora_b") else value
        for name, value in tree_flatten(model.trainable_parameters())
    }
    config = {"fine_tune_type": kind, "num_layers": 8, "lora_parameters": parameters}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return str(folder)


def mlx_lms(path, base=TINY / "target"):
    """The target as mlx-lm loads it with an adapter, in float32 as ours is on a CPU."""
    model, _ = mlx_lm.load(str(base), adapter_path=path)
    model.set_dtype(mx.float32)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize("block_size", [2, 8, None])
@pytest.mark.parametrize(("kind", "keys"), [("lora", "layers"), ("dora", "layers"), ("lora", "ends")])
def test_an_adapted_target_says_what_mlx_lm_says_with_the_same_adapter(tmp_path, kind, keys, block_size):
    path = adapter(tmp_path / "adapter", kind, KEYS[keys])
    model, _ = load("tiny", adapter_path=path)
    drafter = load_drafter("tiny", model)
    theirs = mlx_lms(path)
    expected = greedy_ids(theirs, PROMPT, 40)
    assert ids_of(run(model, drafter, PROMPT, 40, block_size=block_size)) == expected
    plain, _ = load("tiny")
    assert greedy_ids(plain, PROMPT, 40) != expected


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_an_adapter_changes_no_number_type_of_its_target(tmp_path, dtype):
    """Scales that are computed in float32 go back to the files' type, also in the layers that an adapter wraps."""
    record = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    weights = {"num_bits": 4, "type": "int", "group_size": 64, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    base = shutil.copytree(TINY / "target", tmp_path / "packed", copy_function=shutil.copyfile)
    config = json.loads((base / "config.json").read_text())
    tensors = {}
    for name, value in mx.load(str(base / "model.safetensors")).items():
        exact = np.array(value.astype(mx.float32))
        if not name.endswith("_proj.weight"):
            tensors[name] = as_type(exact, "BF16")[:2]
            continue
        parts, _ = pack_quantized(exact, symmetric=False)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": entry for part, entry in parts.items()}
    write_safetensors(base / "model.safetensors", tensors)
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": record | {"config_groups": groups}}))
    plain, _ = load(str(base), dtype=dtype)
    adapted, _ = load(str(base), dtype=dtype, adapter_path=adapter(tmp_path / "adapter"))
    found = {name.replace(".linear.", "."): value.dtype for name, value in tree_flatten(adapted.parameters())}
    assert {name: kind for name, kind in found.items() if "lora" not in name} == {
        name: value.dtype for name, value in tree_flatten(plain.parameters())
    }
    assert activation_dtype(adapted) == activation_dtype(plain) != mx.float32


@pytest.mark.full
def test_taps_and_drafts_are_those_of_the_adapted_target(tmp_path):
    path = adapter(tmp_path / "adapter")
    model, _ = load("tiny", adapter_path=path)
    drafter = load_drafter("tiny", model)
    target = Target(model, drafter.config.target_layer_ids)
    theirs = mlx_lms(path)
    outputs = full_forward(theirs, PROMPT)
    wanted = mx.concatenate([outputs[i] for i in target.layer_ids], axis=-1)
    features = target(mx.array([PROMPT])).features
    assert mx.allclose(features[0], wanted, rtol=1e-5, atol=1e-5).item()
    plain, _ = load("tiny")
    assert not mx.allclose(Target(plain, target.layer_ids)(mx.array([PROMPT])).features[0], wanted, rtol=0.1, atol=0.1).item()
    # Every drafted id: as of a drafter that has seen none of the text before.
    line = PROMPT + greedy_ids(theirs, PROMPT, 24)
    at = len(PROMPT)
    for drafted, accepted, _ in rounds_of(run(model, drafter, PROMPT, 24, block_size=8)):
        if drafted:
            features = target(mx.array([line[:at]])).features
            assert drafted == drafter.draft(mx.array([line[at]]), features, drafter.make_cache(), 0, 8)[0].tolist(), at
        at += accepted + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: None, "there is no such directory"),
        (lambda d: d.mkdir(), "adapter_config.json is not there"),
        (lambda d: (d.mkdir(), (d / "adapter_model.safetensors").touch()), "its files are those of PEFT"),
        (lambda d: (adapter(d), (d / "adapters.safetensors").unlink()), "does not fit tiny|cannot be read"),
        (lambda d: (adapter(d), (d / "adapters.safetensors").write_bytes(b"x")), "does not fit tiny"),
        (lambda d: (adapter(d), (d / "adapter_config.json").write_text("{}")), "does not fit tiny: .*num_layers"),
        (
            lambda d: (adapter(d), mx.save_safetensors(str(d / "adapters.safetensors"), {"model.nope.lora_a": mx.ones((2, 2))})),
            "model.nope.lora_a: not an adapter parameter",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_sentence(tmp_path, spoil, message):
    spoil(tmp_path / "a")
    with pytest.raises(CheckpointError, match=message) as raised:
        load("tiny", adapter_path=str(tmp_path / "a"))
    assert "\n" not in str(raised.value)


# Measured over five prompts of 64 tokens: 2.35 tokens a round in 4 bits, 2.25 with an adapter of this spread (8 bits: 2.37, 2.12;
# floats: 2.32, 2.11), 1.4 with three times the spread, 1.0 with ten times. Of these two prompts it loses more.
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.quick(1)
def test_a_quantized_target_with_an_adapter_keeps_its_drafter(tmp_path, bits):
    base = tmp_path / "quantized"
    convert(str(TINY / "target"), str(base), quantize=True, q_bits=bits)
    path = adapter(tmp_path / "adapter", base=base, spread=0.01)
    theirs, tau = mlx_lms(path, base), {}
    for name, given in (("plain", None), ("adapted", path)):
        model, tokenizer = load(str(base), adapter_path=given) if given else load(str(base))
        drafter, rounds, changed = load_drafter("tiny", model), [], []
        for text in ("class Stack:\n    def", "import os\n\ndef read_"):
            prompt = tokenizer.encode(text)
            got = run(model, drafter, prompt, 40, block_size=8)
            rounds += [accepted + 1 for drafted, accepted, _ in rounds_of(got) if drafted]
            changed.append(ids_of(got) != greedy_ids(theirs, prompt, 40))
        # Each answer is mlx-lm's with the adapter, and each is another without it.
        assert all(changed) if name == "plain" else not any(changed)
        tau[name] = sum(rounds) / len(rounds)
    assert tau["adapted"] > 0.5 * tau["plain"] > 1, tau
