"""Reference targets on disk in several spellings, and the comparison with their goldens, shared by the converter's tests."""

import copy
import json
import shutil
from pathlib import Path

import mlx.core as mx
from dflash_mlx.conversion import load_target
from mlx_lm.generate import generate_step

from dflash_mlx.models.target import Target

DATA = Path(__file__).parents[1] / "data"
FAMILIES = sorted(path.stem for path in (DATA / "families").glob("*.safetensors"))
CONFORMANCE = [
    "gemma4_text", "glm4", "gpt_oss", "lfm2", "llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "smollm3",
]  # fmt: skip
# float32 against float32 with other summation orders; the project's bound for every family
TOLERANCE = 2e-4


def in_float32(path, **options):
    """A target as `dflash_mlx.load` gives it on a CPU: the weights as they are, computed in float32."""
    model, _ = load_target(path, **options)
    model.set_dtype(mx.float32)
    return model


def golden_faults(model, golden: dict) -> list[str]:
    """What of a golden a model does not meet: logits, hidden states (to TOLERANCE of the largest value) and greedy ids."""
    faults = []

    def compare(name, ours, theirs):
        difference = mx.abs(ours.astype(mx.float32) - theirs).max() / mx.abs(theirs).max()
        if not difference.item() < TOLERANCE:
            faults.append(f"{name} differs by {difference.item():.1e}")

    ids = golden["input_ids"].astype(mx.int32)
    compare("logits", model(ids), golden["logits"])
    layers = len(model.layers)
    output = Target(model, range(layers))(ids)
    hidden, features = output.hidden, output.features
    size = hidden.shape[-1]
    for layer in range(layers - 1):
        if f"hidden_states.{layer + 1}" in golden:
            compare(f"layer {layer}", features[..., layer * size : (layer + 1) * size], golden[f"hidden_states.{layer + 1}"])
    last = golden.get("last_hidden", golden.get(f"hidden_states.{layers}"))
    compare("final hidden state", hidden, last)
    expected = golden["greedy_ids"][0].tolist()
    given = 20 if len(expected) == 68 else 16
    steps = generate_step(mx.array(expected[:given]), model, max_tokens=len(expected) - given)
    if [int(token) for token, _ in steps] != expected[given:]:
        faults.append("greedy ids differ")
    return faults


def family(name: str, directory: Path, config=None) -> tuple[Path, dict]:
    """A made family of tests/data as a checkpoint directory; `config` may rewrite its config. -> (path, golden)."""
    tensors, metadata = mx.load(str(DATA / "families" / f"{name}.safetensors"), return_metadata=True)
    raw = json.loads(metadata["config"])
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v for k, v in tensors.items() if not k.startswith("golden.")}
    write_checkpoint(directory, config(raw) if config else raw, weights)
    return directory, {k.removeprefix("golden."): v for k, v in tensors.items() if k.startswith("golden.")}


def write_checkpoint(directory: Path, config: dict, weights: dict, name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / name), weights)
    return directory


def copy_checkpoint(source: Path, directory: Path, config=None) -> Path:
    """Copy of a reference target without its golden, writable, with its config rewritten."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "golden.safetensors":
            shutil.copyfile(file, directory / file.name)
    if config:
        raw = json.loads((source / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config(raw)))
    return directory


def spelled_by_transformers_4(raw: dict) -> dict:
    """A transformers-5 config as transformers 4 wrote it: RoPE at top level, `torch_dtype`, the older names."""
    raw = copy.deepcopy(raw)
    for part in (raw, raw.get("text_config") or {}):
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
        rope = part.pop("rope_parameters", None)
        if rope and any(isinstance(value, dict) for value in rope.values()):
            _nested_rope(part, rope)
        elif rope:
            _flat_rope(part, rope)
        for override in list((part.pop("per_layer_config", None) or {}).values())[:1]:
            for key, old in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
                if key in override:
                    part[old] = override[key]
        if part.get("model_type") == "qwen3_moe" and "num_local_experts" in part:
            part["num_experts"] = part.pop("num_local_experts")
    raw["transformers_version"] = "4.57.1"
    return raw


def _flat_rope(part: dict, rope: dict) -> None:
    part["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        part["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    part["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling


def _nested_rope(part: dict, rope: dict) -> None:
    if not part["model_type"].startswith("gemma3"):
        # gemma 4 was nested from its first release
        part["rope_parameters"] = rope
        return
    _flat_rope(part, rope["full_attention"])
    part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]


SOME_CONFIG = {"model_type": "llama"}


def shards(directory, count=2, index=True):
    """A sharded checkpoint: one tensor t1, t2, ... a file."""
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for i, name in enumerate(names, start=1):
        write_checkpoint(directory, SOME_CONFIG, {f"t{i}": mx.ones((i, 3))}, name)
    if index:
        weight_map = {f"t{i}": name for i, name in enumerate(names, start=1)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def llama_config(**changes):
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, vocab_size=64, max_position_embeddings=128,
        rope_theta=5000.0, tie_word_embeddings=False,
    )  # fmt: skip
    config.update(changes)
    return {k: v for k, v in config.items() if v is not None}


def llama_weights():
    """Random weights under published names; H != heads * D != V, I distinct."""
    h, i, v, q, kv = 32, 48, 64, 64, 32
    mx.random.seed(3)
    shapes = {"model.embed_tokens.weight": (v, h), "lm_head.weight": (v, h), "model.norm.weight": (h,)}
    for layer in range(2):
        p = f"model.layers.{layer}."
        shapes |= {p + f"self_attn.{n}_proj.weight": s for n, s in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q)))}
        shapes |= {p + f"mlp.{n}_proj.weight": s for n, s in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i)))}
        shapes |= {p + f"{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
    return {name: mx.random.normal(shape) * (0.4 if len(shape) > 1 else 1.0) for name, shape in shapes.items()}


def mark_fp8(file, names):
    """Change the dtype of some tensors in a safetensors header from U8 to F8_E4M3 (MLX writes only the former)."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in names:
        header[name]["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
