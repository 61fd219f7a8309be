"""One drafter pass for several rows drafts what each row's own pass drafts, whatever the publisher added to the layers."""

import mlx.core as mx
import pytest
from kit import flat, grow, raw_config, tiny_target

from dflash_mlx.batch.drafting import RowDraft, can_draft_rows, draft_rows
from dflash_mlx.config import DrafterConfig
from dflash_mlx.loading import make_drafter
from dflash_mlx.models.architectures import build_drafter
from dflash_mlx.models.target import Target

H, V = 24, 61
PROMPTS = [[5, 9, 33, 7, 20, 41, 2], [8, 50, 11]]
ALL_FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
# name: (what the config adds, tensors beside, whether one pass may draft for several rows)
KINDS = {
    "DFlash": ({}, {}, True),
    "a vector for masks": ({}, {"mask_embedding": (H,)}, True),
    "sinks": ({"attention_sink_bias": True, **ALL_FULL}, {}, False),
    "scaled values": ({"attention_value_scale": 0.612}, {}, False),
    "Laguna": ({"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna"}, {}, False),
    "MLA": (
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2], "attention_mode": "mla"}, "kv_lora_rank": 10,
         "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, **ALL_FULL},
        {}, False,
    ),
    "DFlare": ({"architectures": ["DFlareDraftModel"]}, {}, False),
    "DFly": ({"architectures": ["Qwen3DFlyModel"]}, {}, False),
    "Gemma 4's DSpark": (
        {"architectures": ["Gemma4DSparkModel"], "hidden_activation": "gelu_pytorch_tanh", "attention_k_eq_v": True},
        {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}, True,
    ),
    "Bonsai's DSpark": ({"architectures": ["DSparkDraftModel"], "log_snr_conditioning": True}, {}, True),
    "DSpark": ({"architectures": ["DSparkDraftModel"], "markov_rank": 7, "sample_from_anchor": True}, {}, True),
}  # fmt: skip


def drafter_of(name, model):
    changes, shapes, _ = KINDS[name]
    config = DrafterConfig.from_dict(raw_config(H, V, **changes))
    mx.random.seed(5)
    weights = flat(grow(build_drafter(config, {key: list(shape) for key, shape in shapes.items()}), 3.0))
    weights = {key: v if v.ndim > 1 else v + mx.random.normal(v.shape) for key, v in weights.items()}
    return make_drafter(config, weights, model)


@pytest.mark.parametrize("name", KINDS)
def test_rows_draft_together_what_they_draft_alone_or_are_drafted_alone(name):
    model = tiny_target()
    drafter = drafter_of(name, model)
    features = [Target(model, (0, 2))(mx.array([prompt])).features for prompt in PROMPTS]
    alone = [drafter.draft(mx.array([7 + r]), f, drafter.make_cache(), 0, 5)[0].tolist() for r, f in enumerate(features)]
    assert can_draft_rows(drafter) == KINDS[name][2]
    if name in ("MLA", "DFlare", "DFly"):
        # The keys and values of a group of rows are of one size, and a context has no axis of layers.
        return
    rows = [RowDraft(7 + r, f, drafter.make_cache(), 0) for r, f in enumerate(features)]
    together = draft_rows(drafter, rows, 5, None)[0].tolist()
    # A kind that may not is one that would draft something else.
    assert (together == alone) == KINDS[name][2]
