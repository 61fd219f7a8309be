"""Drafters whose layers are not DFlash's own, in NumPy, float64 and without a cache, from their authors' formulas and configs.

Shares no code with the package. Sources: sgl-project/SpecForge, modeling/draft/domino.py (a6b6b023) and pull request 758 (MLA);
Tencent/AngelSlim, draft/qwen_dflare.py, and AngelSpec, draft/dfly.py; deepseek-ai/DeepSpec, modeling/dspark/gemma4/modeling.py
(afdfa7c); mlx-dspark 0.20.3, model.py (gates, norms stored less one, noise levels); transformers 5, modeling_rope_utils.py
(proportional RoPE).
"""

from types import SimpleNamespace

import numpy as np
import reference


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def inverse_frequencies(raw, head_dim):
    """(turns per position of each pair, how many values of a head are in pairs)."""
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta, part = rope.get("rope_theta", raw.get("rope_theta")), rope.get("partial_rotary_factor", 1.0)
    if rope.get("rope_type") == "proportional":
        # the first part of the pairs turns, at the whole head's frequencies
        turning = int(part * head_dim // 2)
        return np.r_[theta ** (-2 * np.arange(turning) / head_dim), np.zeros(head_dim // 2 - turning)], head_dim
    dims = int(head_dim * part)
    return theta ** (-np.arange(0, dims, 2) / dims), dims


def rotate(x, positions, raw):
    """[L, heads, D], the two halves of the rotated part as pairs."""
    inverse, dims = inverse_frequencies(raw, x.shape[-1])
    angles = positions[:, None, None] * inverse
    a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles), rest], -1)


def part(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


class Kind:
    """A drafter with full attention, bidirectional in its block; what a kind does otherwise is a method."""

    def __init__(self, raw, weights):
        self.raw, self.w, self.eps = raw, weights, raw["rms_norm_eps"]
        self.heads, self.kv, self.D = raw["num_attention_heads"], raw["num_key_value_heads"], raw.get("head_dim") or 1
        self.scale = self.D**-0.5

    def norm(self, x, weight):
        return rms(x, weight, self.eps)

    def contexts(self, features):
        one = self.norm(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"])
        return [one] * self.raw["num_hidden_layers"]

    def queries(self, w, x):
        return x @ w["q_proj.weight"].T, None

    def keys_values(self, w, context, x):
        rows = np.concatenate([context, x])
        return rows @ w["k_proj.weight"].T, rows @ w["v_proj.weight"].T

    def value_norm(self, v):
        return v

    def attention(self, w, context, x):
        C, K = len(context), len(x)
        q, gate = self.queries(w, x)
        k, v = (rows.reshape(C + K, self.kv, self.D) for rows in self.keys_values(w, context, x))
        q = rotate(self.norm(q.reshape(K, self.heads, self.D), w["q_norm.weight"]), np.arange(C, C + K), self.raw)
        k, v = rotate(self.norm(k, w["k_norm.weight"]), np.arange(C + K), self.raw), self.value_norm(v)
        out = np.zeros((K, self.heads, self.D))
        for h in range(self.heads):
            scores = q[:, h] @ k[:, h * self.kv // self.heads].T * self.scale
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h * self.kv // self.heads]
        out = out.reshape(K, -1)
        return (out if gate is None else out * sigmoid(gate)) @ w["o_proj.weight"].T

    def mlp(self, w, x):
        gate = x @ w["gate_proj.weight"].T
        return (self.activation(gate) * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T

    def activation(self, x):
        return x * sigmoid(x)

    def layer(self, w, context, h):
        h = h + self.attention(part(w, "self_attn."), context, self.norm(h, w["input_layernorm.weight"]))
        return h + self.mlp(part(w, "mlp."), self.norm(h, w["post_attention_layernorm.weight"]))

    def hidden(self, features, block):
        """[C, taps * H] and [K, H] to the final normed rows [K, H]."""
        for i, context in enumerate(self.contexts(features)):
            block = self.layer(part(self.w, f"layers.{i}."), context, block)
        return self.norm(block, self.w["norm.weight"])


class DFlare(Kind):
    def contexts(self, features):
        logits = self.w["layer_fusion_weights"]
        taps = features.reshape(len(features), logits.shape[1], -1)
        found = []
        for row in logits:
            share = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            mean = sum(share[t] * taps[:, t] for t in range(len(share)))
            found.append(self.norm(mean, self.w["hidden_norm.weight"]))
        return found

    def keys_values(self, w, context, x):
        return tuple(
            np.concatenate([context @ w[f"{name}_target.weight"].T, x @ w[f"{name}.weight"].T]) for name in ("k_proj", "v_proj")
        )


class DFly(Kind):
    def contexts(self, features):
        logits, base = self.w["layer_fusion_weights"], features @ self.w["fc.weight"].T
        taps = features.reshape(len(features), logits.shape[1], -1)
        shares = [np.exp(row) / np.exp(row).sum() for row in logits]
        means = [sum(share[t] * taps[:, t] for t in range(len(share))) for share in shares]
        return [self.norm(base + mean, self.w["hidden_norm.weight"]) for mean in means]

    def path(self, hidden, embedding, head, anchor):
        """Ids drafted from the rows [N, H] of the slots, each corrected by the token before it."""
        w, token, ids = part(self.w, "hidden_correction."), anchor, []
        for row in hidden:
            both = [self.norm(row, w["hidden_norm.weight"]), self.norm(embedding[token], w["embed_norm.weight"])]
            gate, up = (w[f"{name}.weight"] @ np.concatenate(both) for name in ("gate_proj", "up_proj"))
            token = int((head @ (row + w["down_proj.weight"] @ (gate * sigmoid(gate) * up))).argmax())
            ids.append(token)
        return ids


class Gemma4(Kind):
    def __init__(self, raw, weights):
        super().__init__(raw, weights)
        self.D, self.scale = raw["global_head_dim"], 1.0
        self.kv = raw["num_global_key_value_heads"] if raw["attention_k_eq_v"] else raw["num_key_value_heads"]

    def keys_values(self, w, context, x):
        rows = np.concatenate([context, x])
        keys = rows @ w["k_proj.weight"].T
        return keys, keys if self.raw["attention_k_eq_v"] else rows @ w["v_proj.weight"].T

    def value_norm(self, v):
        return self.norm(v, 1.0)

    def activation(self, x):
        return gelu_tanh(x)

    def layer(self, w, context, h):
        given = self.attention(part(w, "self_attn."), context, self.norm(h, w["input_layernorm.weight"]))
        h = h + self.norm(given, w["post_attention_layernorm.weight"])
        given = self.mlp(part(w, "mlp."), self.norm(h, w["pre_feedforward_layernorm.weight"]))
        return (h + self.norm(given, w["post_feedforward_layernorm.weight"])) * w["layer_scalar"]


class Qwen35(Kind):
    """`q_proj` [heads * 2 * D, H]: of each head its queries, then its gates."""

    def norm(self, x, weight):
        return rms(x, weight + (1.0 if self.raw["model_type"] == "qwen3_5" else 0.0), self.eps)

    def queries(self, w, x):
        both = (x @ w["q_proj.weight"].T).reshape(len(x), self.heads, 2, self.D)
        return both[:, :, 0].reshape(len(x), -1), both[:, :, 1].reshape(len(x), -1)


class Latent(Kind):
    """Queries, keys and values head by head from their narrow vectors; R values of each key are shared by all heads.

    RoPE pairs neighbours unless `rope_interleave` is false; YaRN's frequencies and factors by DeepSeek's formulas.
    """

    def turned(self, x, positions):
        raw = self.raw
        R, rope = raw["qk_rope_head_dim"], raw.get("rope_parameters") or {}
        theta = rope.get("rope_theta", raw.get("rope_theta"))
        inverse, size = theta ** (-np.arange(0, R, 2) / R), 1.0
        if rope.get("rope_type") == "yarn":
            factor, length = rope["factor"], rope["original_max_position_embeddings"]
            at = lambda turns: R * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(theta))  # noqa: E731
            low, high = max(np.floor(at(rope["beta_fast"])), 0), min(np.ceil(at(rope["beta_slow"])), R - 1)
            ramp = np.clip((np.arange(R // 2) - low) / max(high - low, 0.001), 0, 1)
            inverse = inverse / factor * ramp + inverse * (1 - ramp)
            size = self.magnitude(rope["mscale"]) / self.magnitude(rope["mscale_all_dim"])
        angles = positions[:, None] * inverse
        cos, sin = np.cos(angles) * size, np.sin(angles) * size
        out = np.empty_like(x)
        if raw.get("rope_interleave", True):
            a, b = x[:, 0::2], x[:, 1::2]
            out[:, 0::2], out[:, 1::2] = a * cos - b * sin, a * sin + b * cos
        else:
            a, b = x[:, : R // 2], x[:, R // 2 :]
            out[:, : R // 2], out[:, R // 2 :] = a * cos - b * sin, a * sin + b * cos
        return out

    def magnitude(self, mscale):
        return 0.1 * mscale * np.log(self.raw["rope_parameters"]["factor"]) + 1.0

    def attention(self, w, context, x):
        raw, C, K = self.raw, len(context), len(x)
        P, R, W, rank = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"], raw["kv_lora_rank"]
        rows, places = np.concatenate([context, x]), np.arange(C + K)
        if "q_proj.weight" in w:
            q = x @ w["q_proj.weight"].T
        else:
            q = self.norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
        both = rows @ w["kv_a_proj_with_mqa.weight"].T
        shared = self.turned(both[:, rank:], places)
        kv = self.norm(both[:, :rank], w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T
        scale = (P + R) ** -0.5
        if (raw.get("rope_parameters") or {}).get("rope_type") == "yarn":
            scale *= self.magnitude(raw["rope_parameters"]["mscale_all_dim"]) ** 2
        outs = []
        for h in range(self.heads):
            mine = q[:, h * (P + R) : (h + 1) * (P + R)]
            key, value = np.split(kv[:, h * (P + W) : (h + 1) * (P + W)], [P], axis=1)
            scores = (mine[:, :P] @ key.T + self.turned(mine[:, P:], places[C:]) @ shared.T) * scale
            p = np.exp(scores - scores.max(-1, keepdims=True))
            outs.append(p / p.sum(-1, keepdims=True) @ value)
        return np.concatenate(outs, axis=1) @ w["o_proj.weight"].T

    def layer(self, w, context, h):
        if "attention_conv.base_kernel" not in w:
            return super().layer(w, context, h)
        nested = self.raw["dflash_config"]
        sizes = SimpleNamespace(conv_kernel_size=nested["conv_kernel_size"], conv_group_size=nested["conv_group_size"])

        def around(name, x, sublayer):
            conv = part(w, name)
            return reference.convolved(conv, sizes, sublayer(reference.convolved(conv, sizes, x, x, 0)), x, 1)

        x = self.norm(h, w["input_layernorm.weight"])
        h = h + around("attention_conv.", x, lambda x: self.attention(part(w, "self_attn."), context, x))
        x = self.norm(h, w["post_attention_layernorm.weight"])
        return h + around("mlp_conv.", x, lambda x: self.mlp(part(w, "mlp."), x))


def noise_levels(weights, raw, rows):
    """[rows, H]: the greatest log signal-to-noise ratio at the anchor, the least at a mask, through waves and two matrices."""
    low, high, w = raw["min_log_snr"], raw["max_log_snr"], part(weights, "log_snr_embed.")
    found = []
    for row in range(rows):
        t = ((high if row == 0 else low) - low) / (high - low) * 1000
        angles = t * np.exp(-np.log(10000) * np.arange(64) / 64)
        inner = w["fc1.weight"] @ np.r_[np.sin(angles), np.cos(angles)] + w["fc1.bias"]
        found.append(w["fc2.weight"] @ (inner * sigmoid(inner)) + w["fc2.bias"])
    return np.array(found)


def domino_path(raw, weights, embedding, hidden, head, anchor):
    """The drafted ids of a block from its final rows [K, H] and the target's embedding and head [V, H].

    SpecForge computes the recurrence over the whole block anew for each token; here it goes one token at a time.
    """
    d, w = raw["dflash_config"], weights
    G = d["gru_hidden_dim"]
    state, token, ids = np.zeros(G), anchor, []
    for place in range(1, len(hidden)):
        row = hidden[place - 1] if d["shift_label"] else hidden[place]
        gi, gh = w["prefix_gru.weight_ih_l0"] @ embedding[token], w["prefix_gru.weight_hh_l0"] @ state
        r, z = sigmoid(gi[:G] + gh[:G]), sigmoid(gi[G : 2 * G] + gh[G : 2 * G])
        n = np.tanh(gi[2 * G :] + r * gh[2 * G :])
        state = (1 - z) * n + z * state
        logits = head @ row
        if place > d["pure_draft_prefix_len"]:
            narrow = w["embed_proj.0.weight"] @ np.concatenate([row, state])
            logits = logits + w["embed_proj.2.weight"] @ (narrow * sigmoid(narrow))
        token = int(logits.argmax())
        ids.append(token)
    return ids
