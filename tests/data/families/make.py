"""Make the reference outputs of this directory with transformers: tiny random targets of families that mlx-lm reads wrongly.

    pip install torch transformers==5.17.0
    python tests/data/families/make.py [NAME ...]

Needs PyTorch, which nothing else here does, so the tests read the files and never run this. Each NAME.safetensors holds the
weights as transformers saves them (bfloat16), and under `golden.` the ids, float32 logits, the last hidden state and greedy ids;
its header's metadata holds config.json. Weights are scaled up and norms moved off one, or a tiny model repeats itself.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 96
BASE = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
    head_dim=8,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
VISION = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    patch_size=4,
    position_embedding_size=16,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
PATTERN = ["sliding_attention", "full_attention", "sliding_attention"]

# name: (model type, config, saved with stacked experts)
FAMILIES = {
    "mistral-window": ("mistral", dict(sliding_window=16), False),
    "phi3-window": ("phi3", dict(sliding_window=16), False),
    "qwen3-window": ("qwen3", dict(use_sliding_window=True, sliding_window=16, max_window_layers=1), False),
    "gemma2": ("gemma2", dict(sliding_window=16, query_pre_attn_scalar=8), False),
    "gemma3-irregular": ("gemma3_text", dict(sliding_window=16, query_pre_attn_scalar=8, layer_types=PATTERN), False),
    "starcoder2": ("starcoder2", dict(sliding_window=16), False),
    "glm-partial": ("glm", dict(head_dim=16, num_hidden_layers=2), False),
    "llama-yarn": ("llama", dict(rope_parameters={**YARN, "attention_factor": 1.3, "truncate": False}), False),
    "deepseek-yarn": (
        "deepseek_v3",
        dict(
            num_hidden_layers=2,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            num_key_value_heads=4,
            rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        False,
    ),
    "mixtral-stacked": (
        "mixtral",
        dict(num_hidden_layers=2, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        True,
    ),
    "qwen3-moe-stacked": ("qwen3_moe", dict(EXPERTS, num_hidden_layers=2), True),
    "gemma4-wrapper": (
        "gemma4",
        dict(
            text_config={
                **BASE,
                "global_head_dim": 16,
                "sliding_window": 16,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 16,
                "layer_types": PATTERN[1:] + ["full_attention"],
            },
            vision_config=VISION,
            audio_config=None,
        ),
        False,
    ),
}


def build(name: str):
    model_type, options, _ = FAMILIES[name]
    wrapper = "text_config" in options
    config = CONFIG_MAPPING[model_type](**(options if wrapper else {**BASE, **options}))
    cls = AutoModelForImageTextToText if wrapper else AutoModelForCausalLM
    model = cls.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    embedding = 0.1 if "gemma" in name else 1.0
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            scale = embedding if "embed" in key else 1.6 / value.shape[-1] ** 0.5
            value.copy_(noise * scale if value.ndim >= 2 else value + 0.2 * noise)
            value.copy_(value.to(torch.bfloat16).float())
        for key, value in model.named_buffers():
            if "correction_bias" in key:
                value.copy_((0.1 * torch.randn(value.shape, generator=generator)).to(torch.bfloat16).float())
    return model


def make(name: str, directory: Path) -> None:
    model = build(name)
    ids = torch.randint(2, VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        greedy = ids[:, :16]
        for _ in range(24):
            greedy = torch.cat([greedy, model(input_ids=greedy, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    with tempfile.TemporaryDirectory() as scratch:
        model.to(torch.bfloat16).save_pretrained(scratch, save_original_format=not FAMILIES[name][2])
        tensors = load_file(f"{scratch}/model.safetensors")
        config = Path(scratch, "config.json").read_text()
    tensors = {k: v for k, v in tensors.items() if "vision" not in k and "audio" not in k}
    tensors |= {
        "golden.input_ids": ids.int(),
        "golden.logits": output.logits.float().contiguous(),
        "golden.last_hidden": output.hidden_states[-1].float().contiguous(),
        "golden.greedy_ids": greedy.int(),
    }
    save_file(tensors, str(directory / f"{name}.safetensors"), metadata={"config": json.dumps(json.loads(config))})


if __name__ == "__main__":
    for chosen in sys.argv[1:] or FAMILIES:
        make(chosen, Path(__file__).parent)
