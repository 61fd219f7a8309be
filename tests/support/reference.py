"""A drafter in NumPy, float64 and without any cache: every row of the context from its features, at every call.

Written from the published format alone, for v1 and DFlash 2. Nothing of the package is used but the parsed config.
"""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
    """[L, heads, D] with the two halves of a head as pairs."""
    D = x.shape[-1]
    angles = positions[:, None, None] * theta ** (-np.arange(0, D, 2) / D)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)


def seen(K, C, causal, window):
    """bool [K, C + K], one test at a time."""
    table = np.zeros((K, C + K), dtype=bool)
    for j in range(K):
        for c in range(C):
            table[j, c] = window is None or (C + j) - c < window
        for i in range(K):
            table[j, C + i] = i <= j or not causal
    return table


def attend(w, config, layer, x, context, theta):
    K, C = len(x), len(context)
    heads, kv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = np.concatenate([context, x])
    at = np.arange(C + K)
    q = rms_norm(linear(w, "q_proj", x).reshape(K, heads, D), w["q_norm.weight"], config.rms_norm_eps)
    k = rms_norm(linear(w, "k_proj", rows).reshape(C + K, kv, D), w["k_norm.weight"], config.rms_norm_eps)
    v = linear(w, "v_proj", rows).reshape(C + K, kv, D)
    q, k = rotate(q, at[C:], theta), rotate(k, at, theta)
    out = np.zeros((K, heads, D))
    table = seen(K, C, config.causal[layer], config.windows[layer])
    for h in range(heads):
        scores = q[:, h] @ k[:, h * kv // heads].T / np.sqrt(D)
        scores = np.where(table, scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        p = np.exp(scores - top)
        # A sink is one more logit of the softmax, of a key without a value.
        sink = np.exp(w["attention_sink_bias"][h] - top) if "attention_sink_bias" in w else 0.0
        out[:, h] = p / (p.sum(-1, keepdims=True) + sink) @ v[:, h * kv // heads]
    out *= config.attention_value_scale or 1.0
    if "g_proj.weight" in w:
        out *= np.log1p(np.exp(x @ w["g_proj.weight"].T))[..., None]
    return linear(w, "o_proj", out.reshape(K, -1))


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def mlp(w, x):
    gate = x @ w["gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w["up_proj.weight"].T)) @ w["down_proj.weight"].T


def convolved(w, config, x, made_from, side):
    """DFlash 2's convolution with every index written out; `made_from` is the sublayer's input."""
    K, H = x.shape
    taps, group = config.conv_kernel_size, config.conv_group_size
    c = (made_from @ w["kernel_projection.weight"].T).reshape(K, 2, taps, H // group)
    out = np.zeros_like(x)
    for i in range(K):
        for ch in range(H):
            for t in range(min(taps, i + 1)):
                out[i, ch] += (w["base_kernel"][side, t, ch] + c[i, side, t, ch // group]) * x[i - t, ch]
    return out


def part(weights, prefix):
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def hidden_states(weights, config, features, block):
    """Final normed rows [K, H] of a block [K, H] after features [C, n_taps * H_target] of every context row."""
    eps = config.rms_norm_eps
    if "aux_hidden_norms.0.weight" in weights:
        parts = np.split(features, len(config.target_layer_ids), axis=-1)
        features = np.concatenate([rms_norm(p, weights[f"aux_hidden_norms.{i}.weight"], eps) for i, p in enumerate(parts)], -1)
    context = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    h = block
    for layer in range(config.num_hidden_layers):
        theta = config.ropes[layer].theta
        w = part(weights, f"layers.{layer}.")

        def around(name, x, sublayer, w=w):
            conv = part(w, name)
            if not conv:
                return sublayer(x)
            return convolved(conv, config, sublayer(convolved(conv, config, x, x, 0)), x, 1)

        attention, feed = part(w, "self_attn."), part(w, "mlp.")
        x = rms_norm(h, w["input_layernorm.weight"], eps)
        # Laguna's context passes each layer's input norm.
        own = rms_norm(context, w["input_layernorm.weight"], eps) if "g_proj.weight" in attention else context
        h = h + around("attention_conv.", x, lambda x: attend(attention, config, layer, x, own, theta))  # noqa: B023
        x = rms_norm(h, w["post_attention_layernorm.weight"], eps)
        h = h + around("mlp_conv.", x, lambda x: mlp(feed, x))  # noqa: B023
    return rms_norm(h, weights["norm.weight"], eps)


def scores(weights, hidden, unary, candidates, token):
    """[k] scores of one slot's candidates after `token`."""
    s = part(weights, "candidate_selector.")
    query = s["predecessor_codebook"][token] * (s["hidden_projection.weight"] @ hidden)
    return np.array([u + query @ s["successor_codebook"][c] for u, c in zip(unary, candidates, strict=True)])


def selected(weights, config, hidden, logits, anchor):
    """The selector's greedy path over the mask slots' hidden [N, H] and scaled logits [N, V]."""
    path, token = [], anchor
    for h, row in zip(hidden, logits, strict=True):
        best = np.argsort(-row)[: config.selector_top_k]
        token = int(best[np.argmax(scores(weights, h, row[best], best, token))])
        path.append(token)
    return path


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def markov_rows(weights, kind, hidden, logits, anchor, pick):
    """DSpark's walk over the slots' hidden [N, H] and logits [N, R]: ids, and the confidence head's probability of each.

    pick: (slot, logits [R]) to a row of the head. The head's ids are the target's by `d2t`, where there is one.
    Written from the published formulas: W1, W2 of the Markov head, its gate or its recurrent step, and a logistic confidence.
    """
    m, token = part(weights, "markov_head."), anchor
    rank, d2t = m["markov_w1.weight"].shape[1], weights.get("d2t")
    state, ids, sure = np.zeros(rank), [], []
    for slot, (h, row) in enumerate(zip(hidden, logits, strict=True)):
        e = m["markov_w1.weight"][min(token, len(m["markov_w1.weight"]) - 1)]
        latent = e
        if kind == "gated":
            latent = sigmoid(m["gate_proj.weight"] @ np.concatenate([h, e]) + m["gate_proj.bias"]) * e
        if kind == "rnn":
            z = m["joint_proj.weight"] @ np.concatenate([state, e, h]) + m["joint_proj.bias"]
            g = sigmoid(z[:rank])
            state = g * state + (1 - g) * np.tanh(z[rank : 2 * rank])
            latent = np.tanh(z[2 * rank :])
        chosen = int(pick(slot, row[: len(m["markov_w2.weight"])] + m["markov_w2.weight"] @ latent))
        if "confidence_head.proj.weight" in weights:
            w = weights["confidence_head.proj.weight"][0]
            seen_by_it = np.concatenate([h, e]) if len(w) > len(h) else h
            sure.append(sigmoid(w @ seen_by_it + weights.get("confidence_head.proj.bias", np.zeros(1))[0]))
        token = chosen + int(d2t[chosen]) if d2t is not None else chosen
        ids.append(token)
    return ids, sure
