"""Drafters whose layers are not DFlash's own, in NumPy, float64 and without a cache, from their authors' formulas and configs.

Shares no code with the package. Sources: sgl-project/SpecForge, modeling/draft/domino.py (a6b6b023); Tencent/AngelSlim,
draft/qwen_dflare.py; deepseek-ai/DeepSpec, modeling/dspark/gemma4/modeling.py (afdfa7c); mlx-dspark 0.20.3, model.py (gates, and
norms stored less one); transformers 5, modeling_rope_utils.py (proportional RoPE).
"""

import numpy as np


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
        self.heads, self.kv, self.D = raw["num_attention_heads"], raw["num_key_value_heads"], raw["head_dim"]
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
