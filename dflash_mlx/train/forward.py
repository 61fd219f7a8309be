"""The training pass: many blocks of one sequence at once, with the drafter's own layers.

Every block sees the context strictly before its anchor and itself, never another block. What differs from generation is
only how attention is laid out; projections, norms, rotations and masks inside a block are the drafter's own.
Source: DFlash, arXiv 2602.06036, section 4.2.

Dimensions: B documents, S ids of a document, A anchors a document, K block_size, H hidden, D head_dim.
"""

from __future__ import annotations

from functools import partial

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


def slot_hidden(
    drafter: Drafter, ids: mx.array, anchors: mx.array, pairs: list[tuple[mx.array, mx.array]], block_size: int
) -> mx.array:
    """The rows of `block_hidden` that draft, [B, A, K - 1, H]: all but the anchor's, or as many with it where that row drafts."""
    own = drafter.config.sample_from_anchor
    return block_hidden(drafter, ids, anchors, pairs, block_size - own)[:, :, 1 - own :]


def block_hidden(
    drafter: Drafter, ids: mx.array, anchors: mx.array, pairs: list[tuple[mx.array, mx.array]], block_size: int
) -> mx.array:
    """Hidden states of one block an anchor.

    Shapes:
      - ids: [B, S] int32; anchors: [B, A] int32 positions in it; pairs: from `context_keys_values`
    Returns: [B, A, K, H] after the final norm; slot k stands for position anchor + k.
    """
    (B, A), K = anchors.shape, block_size
    first = mx.take_along_axis(ids, anchors, axis=1).reshape(B * A, 1)
    masks = mx.full((B * A, K - 1), drafter.config.mask_token_id, dtype=mx.int32)
    h = drafter.embed_block(mx.concatenate([first.astype(mx.int32), masks], axis=1)).astype(drafter.norm.weight.dtype)
    for layer, (keys, values) in zip(drafter.layers, pairs, strict=True):
        h = layer.sublayers(h, partial(_attend, layer.self_attn, keys=keys, values=values, anchors=anchors))
    return drafter.norm(h).reshape(B, A, K, -1)
