"""The training pass: many blocks of one sequence at once, with the drafter's own layers, and the loss on them.

Every block sees the context strictly before its anchor and itself, never another block. What differs from generation is
only how attention is laid out; projections, norms, rotations and masks inside a block are the drafter's own.
Source: DFlash, arXiv 2602.06036, section 4.2; weights that adapt to acceptance: D-PACE.

Dimensions: B documents, S ids of a document, A anchors a document, K block_size, H hidden, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ..models.drafter import Attention, Drafter


def context_mask(anchors: mx.array, S: int, K: int, window: int | None) -> mx.array:
    """Which context rows each block row sees.

        ids      0 1 2 3 4 5 6      anchor at 3: context rows 0, 1, 2 (the target has not read the anchor yet);
                       a . . .      with a window, row j also needs (3 + j) - c < window

    Shapes:
      - anchors: [B, A] int32
    Returns:
      - bool [B, A, K, S] (K is 1 without a window: all rows of a block see the same)
    """
    c = mx.arange(S)[None, None, None, :]
    at = anchors[:, :, None, None]
    seen = c < at
    if window is not None:
        seen = seen & ((at + mx.arange(K)[None, None, :, None]) - c < window)
    return seen


def _attend(attn: Attention, x: mx.array, keys: mx.array, values: mx.array, anchors: mx.array) -> mx.array:
    """Attention of B x A blocks to their document's context and to themselves.

    Shapes:
      - x: [B * A, K, H] normed block rows; keys, values: [B, n_kv, S, D] of the context; anchors: [B, A]
    Returns: [B * A, K, H]
    """
    (B, A), (_, K, _), (_, n_kv, S, D) = anchors.shape, x.shape, keys.shape
    repeat = attn.n_heads // n_kv
    at = anchors.reshape(-1)
    q = attn.queries(x, at).reshape(B, A, n_kv, repeat * K, D)  # query heads of one key head lie beside each other
    k, v = attn.keys_values(x, at)
    # [B, A, n_kv, repeat * K, D] -> [B, n_kv, A * repeat * K, D]: one product a document and key head
    q_all = q.transpose(0, 2, 1, 3, 4).reshape(B, n_kv, A * repeat * K, D) * attn.scale
    context = (q_all @ keys.swapaxes(-1, -2)).reshape(B, n_kv, A, repeat, K, S)
    seen = context_mask(anchors, S, K, attn.window)[:, None, :, None]
    context = mx.where(seen, context, mx.finfo(context.dtype).min)
    k, v = k.reshape(B, A, n_kv, K, D), v.reshape(B, A, n_kv, K, D)
    block = (q * attn.scale) @ k.swapaxes(-1, -2)
    block = block.reshape(B, A, n_kv, repeat, K, K)
    if attn.causal:
        block = mx.where(mx.arange(K)[None, :] <= mx.arange(K)[:, None], block, mx.finfo(block.dtype).min)
    scores = mx.concatenate([context, block.transpose(0, 2, 1, 3, 4, 5)], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    out = weights[..., :S].reshape(B, n_kv, A * repeat * K, S) @ values
    out = out.reshape(B, n_kv, A, repeat, K, D).transpose(0, 2, 1, 3, 4, 5)  # [B, A, n_kv, repeat, K, D]
    inner = weights[..., S:].transpose(0, 2, 1, 3, 4, 5).reshape(B, A, n_kv, repeat * K, K) @ v
    out = out + inner.reshape(out.shape)
    out = out.transpose(0, 1, 4, 2, 3, 5).reshape(B * A, K, attn.n_heads * D)
    return attn.o_proj(out)


def context_keys_values(drafter: Drafter, features: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Keys and values of whole documents, one pair a layer.

    Shapes:
      - features: [B, S, n_taps * H_target], row 0 at position 0
    Returns: per layer, keys and values [B, n_kv, S, D]
    """
    context = drafter.context(features).astype(drafter.norm.weight.dtype)
    return [layer.self_attn.keys_values(context, 0) for layer in drafter.layers]


def block_hidden(
    drafter: Drafter, ids: mx.array, anchors: mx.array, pairs: list[tuple[mx.array, mx.array]], block_size: int
) -> mx.array:
    """Hidden states of one block an anchor.

    Shapes:
      - ids: [B, S] int32; anchors: [B, A] int32 positions in it; pairs: from `context_keys_values`
    Returns: [B, A, K, H] after the final norm; slot k stands for position anchor + k.
    """
    (B, A), K = anchors.shape, block_size
    assert all(rope.kind != "longrope" for rope in drafter.config.ropes), "LongRoPE takes one offset"
    first = mx.take_along_axis(ids, anchors, axis=1).reshape(B * A, 1)
    masks = mx.full((B * A, K - 1), drafter.config.mask_token_id, dtype=mx.int32)
    h = drafter._embed(mx.concatenate([first.astype(mx.int32), masks], axis=1)).astype(drafter.norm.weight.dtype)
    for layer, (keys, values) in zip(drafter.layers, pairs, strict=True):
        h = h + _attend(layer.self_attn, layer.input_layernorm(h), keys, values, anchors)
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    return drafter.norm(h).reshape(B, A, K, -1)


def labels_of(ids: mx.array, answer: mx.array, anchors: mx.array, keep: mx.array, K: int) -> tuple[mx.array, mx.array]:
    """What each slot should draft, and which slots count.

        ids      u u a b c E u u     answer 0 0 1 1 1 1 0 0, anchor at a (slot 0): slots 1.. want b c E, then none:
                     0 1 2 3 4 5     after the first id that is no answer nothing of the block counts

    Shapes:
      - ids: [B, S] int32; answer: [B, S] bool; anchors: [B, A]; keep: [B, A] bool
    Returns:
      - labels: [B, A, K - 1] int32; counts: [B, A, K - 1] bool
    """
    (B, S), A = ids.shape, anchors.shape[1]
    at = anchors[:, :, None] + mx.arange(1, K)[None, None, :]
    flat = mx.minimum(at, S - 1).reshape(B, A * (K - 1))
    labels = mx.take_along_axis(ids, flat, axis=1).reshape(at.shape)
    inside = mx.take_along_axis(answer, flat, axis=1).reshape(at.shape) & (at < S) & keep[:, :, None]
    return labels, mx.cumprod(inside.astype(mx.int32), axis=-1) > 0


def decay_weights(K: int, gamma: float) -> mx.array:
    """exp(-(k - 1) / gamma) for slots k = 1 .. K - 1: an early miss ends the block, so early slots weigh more."""
    return mx.exp(-mx.arange(K - 1, dtype=mx.float32) / gamma)


def adaptive_weights(ce: mx.array, counts: mx.array, alpha: float = 0.5) -> mx.array:
    """D-PACE: a slot weighs what the slots from it on can still win, given how likely the slots before it pass.

        w_j = sum over m >= j of the product over i <= m of ((1 - alpha) exp(-ce_i) + alpha)

    Shapes:
      - ce: [..., K - 1] float32 cross entropies; counts: [..., K - 1] bool
    Returns: [..., K - 1], to be normalised by the number of blocks (dividing by the sum would cancel their meaning).
    """
    passes = mx.where(counts, (1 - alpha) * mx.exp(-ce) + alpha, 1.0)
    reach = mx.cumprod(passes, axis=-1) * counts
    return mx.cumsum(reach, axis=-1, reverse=True)


def block_loss(
    head: Callable[[mx.array], mx.array],
    hidden: mx.array,
    labels: mx.array,
    counts: mx.array,
    gamma: float | None,
    chunk_blocks: int = 512,
) -> tuple[mx.array, dict[str, mx.array]]:
    """Weighted cross entropy of drafted slots; memory is that of one chunk of logits, whatever the number of blocks.

    The head is frozen, so the gradient of each chunk's logits goes straight to its hidden rows while they exist. The
    value returned carries that gradient: its derivative is the loss's, its number is the loss.

    Shapes:
      - hidden: [B, A, K - 1, H] slots 1 ..; labels, counts: [B, A, K - 1]; gamma: decay, or None for D-PACE weights
    Returns:
      - loss; {"ce": sum of counted cross entropies, "slots": [K - 1] counted, "hits": [K - 1] right,
        "runs": [K - 1] right with all slots before right}
    """
    n, H = labels.shape[-1], hidden.shape[-1]
    rows, labels, counts = hidden.reshape(-1, n, H), labels.reshape(-1, n), counts.reshape(-1, n)
    fixed = None if gamma is None else decay_weights(n + 1, gamma)
    if fixed is None:
        norm = mx.maximum(counts[:, 0].sum(), 1)
    else:
        norm = mx.maximum((counts * fixed).sum(), 1e-6)
    loss = surrogate = mx.array(0.0)
    metrics = {"ce": mx.array(0.0), "slots": counts.sum(0), "hits": 0, "runs": 0}
    done = None
    for start in range(0, rows.shape[0], chunk_blocks):
        part = slice(start, start + chunk_blocks)
        h, want, count = mx.stop_gradient(rows[part]), labels[part], counts[part]
        if done is not None:
            # Chunks run one after the other, so that one chunk of logits is alive at a time.
            h = mx.depends([h], [done])[0]
        logits = head(h)
        high = logits.astype(mx.float32)
        lse = mx.logsumexp(high, axis=-1, keepdims=True)
        ce = (lse - mx.take_along_axis(high, want[..., None], axis=-1))[..., 0]
        weight = adaptive_weights(ce, count) if fixed is None else fixed * count
        is_label = mx.arange(logits.shape[-1]) == want[..., None]
        # Divided by `norm` behind the head: in float16 these slopes must not get smaller than they are.
        slope = ((mx.exp(high - lse) - is_label) * weight[..., None]).astype(logits.dtype)
        done = mx.stop_gradient(mx.vjp(head, [h], [slope])[1][0])
        surrogate = surrogate + (rows[part].astype(mx.float32) * done.astype(mx.float32)).sum() / norm
        hit = (mx.argmax(logits, axis=-1) == want) & count
        loss = loss + (weight * ce).sum() / norm
        metrics["ce"] = metrics["ce"] + (ce * count).sum()
        metrics["hits"] = metrics["hits"] + hit.sum(0)
        metrics["runs"] = metrics["runs"] + mx.cumprod(hit.astype(mx.int32), axis=-1).sum(0)
    loss = mx.stop_gradient(loss)
    return loss + surrogate - mx.stop_gradient(surrogate), metrics
