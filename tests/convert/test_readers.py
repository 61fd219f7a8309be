"""What `convert` writes is read by transformers and by mlx-lm, with its tokenizer. `scripts/check_versions.sh` runs this file
with the oldest and the newest versions of both."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from convert_kit import CONFORMANCE, FAMILIES, copy_checkpoint, family, llama_weights, spelled_by_transformers_4, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer

from dflash_mlx import convert, load

# Each has a trap: nested RoPE with scaling, a window in every layer, a text model inside a wrapper, a list of layer kinds.
QUICK = ["gemma4_text", "mistral-window", "gemma4-wrapper", "qwen3_5_moe_text", "gpt_oss"]
SPELLINGS = {"transformers-5": None, "transformers-4": spelled_by_transformers_4}


def add_tokenizer(directory, words=40):
    """A tokenizer of whole words, as transformers saves one."""
    vocabulary = {f"word{i}": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "word1", "chat_template": "{{ messages[0].content }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


# The two of gemma 4's full layers: an older transformers does not find them in what a newer one saved; `convert` does.
FULL = ("global_head_dim", "num_global_key_value_heads")
UNTOLD = (*FULL, "dtype", "architectures", "_name_or_path", "_sliding_window_pattern", "sliding_window_pattern", "type")


def without(values, names):
    """A config without some keys, at every depth."""
    return {k: without(v, names) if isinstance(v, dict) else v for k, v in values.items() if k not in names}


def text_values(directory):
    """Transformers' reading of a text model's config; what its layers are made from, not what it derives from that."""
    return without(AutoConfig.from_pretrained(directory).get_text_config().to_dict(), UNTOLD)


def differences(before, after, at=""):
    """Where a config says something else than another; keys that only the later one has are not looked at."""
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(after.get(key), dict):
            yield from differences(value, after[key], f"{at}{key}.")
        elif value != after.get(key):
            yield f"{at}{key}: {value} became {after.get(key)}"


def reading_faults(source, written):
    """What of a converted directory transformers and mlx-lm do not read as they read the source."""
    faults = list(differences(text_values(source), text_values(written)))
    before, after = (AutoTokenizer.from_pretrained(path) for path in (source, written))
    for what in (lambda t: t.encode("word7 word3"), lambda t: t.eos_token_id, lambda t: t.chat_template):
        if what(before) != what(after):
            faults.append(f"tokenizer: {what(before)} became {what(after)}")
    model, wrapped = mlx_lm.load(str(written))
    if wrapped.eos_token_ids != {1}:
        faults.append(f"EOS {wrapped.eos_token_ids}")
    # MLX has experts on a CPU in float32 only
    model.set_dtype(mx.float32)
    if not mx.all(mx.isfinite(model(mx.array([[7, 3]])))).item():
        faults.append("logits")
    return faults


@pytest.fixture
def source(tmp_path, conformance):
    def make(name, spelling):
        if name in CONFORMANCE:
            path = copy_checkpoint(conformance / "targets" / name, tmp_path / "source", SPELLINGS[spelling])
        else:
            path, _ = family(name, tmp_path / "source", SPELLINGS[spelling])
        add_tokenizer(path)
        return path

    return make


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CONFORMANCE + FAMILIES]
)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_transformers_and_mlx_lm_read_what_convert_writes(source, tmp_path, name, spelling):
    path = source(name, spelling)
    convert(str(path), str(tmp_path / "mlx"))
    assert reading_faults(path, tmp_path / "mlx") == []


@pytest.mark.parametrize("name", ["gemma4-wrapper", pytest.param("qwen3_5", marks=pytest.mark.full)])
def test_what_is_quantized_and_turned_back_is_read(source, tmp_path, name):
    # Read as quantized, a wrapper's config has a record in its inner part too.
    path = source(name, "transformers-5")
    convert(str(path), str(tmp_path / "q"), quantize=True, q_group_size=32)
    convert(str(tmp_path / "q"), str(tmp_path / "mlx"), dequantize=True)
    assert reading_faults(path, tmp_path / "q") == reading_faults(path, tmp_path / "mlx") == []


BASE = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "a window in every layer": {"model_type": "mistral", "sliding_window": 16},
    "yarn at top level": {"model_type": "llama", "rope_theta": 5000.0, "rope_scaling": YARN},
    "yarn in parameters": {"model_type": "llama", "rope_parameters": {"rope_theta": 5000.0, **YARN}},
    "linear, flat, beside a local base": GEMMA3 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
    "linear, nested, beside a local base": GEMMA3
    | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **LINEAR},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        }
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_spelling_of_rope_and_windows_is_read_back(tmp_path, name):
    config = BASE | CONFIGS[name]
    weights = llama_weights()
    if config["model_type"] == "gemma3_text":
        for layer in range(2):
            block = f"model.layers.{layer}."
            weights |= {block + f"{part}_feedforward_layernorm.weight": mx.ones(32) for part in ("pre", "post")}
            weights |= {block + f"self_attn.{part}_norm.weight": mx.ones(16) for part in ("q", "k")}
    path = write_checkpoint(tmp_path / "source", config, weights)
    add_tokenizer(path)
    convert(str(path), str(tmp_path / "mlx"))
    assert reading_faults(path, tmp_path / "mlx") == []
    # mlx-lm by itself rotates as `load` does, which compares with transformers: behind YaRN's 32 positions too. It has no
    # window in mistral, which `convert` notes.
    ids = mx.arange(16 if config["model_type"] == "mistral" else 60)[None]
    ours, _ = load(str(path), dtype=mx.float32)
    theirs, _ = mlx_lm.load(str(tmp_path / "mlx"))
    theirs.set_dtype(mx.float32)
    assert mx.allclose(ours(ids), theirs(ids), atol=1e-4).item()
