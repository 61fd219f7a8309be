"""The DFlash drafter: one pass fills a block `[anchor, MASK, MASK, ...]` from the target's context features.

Knows its layers, their masks and positions, and its own context cache. Does not know files. Of the target it has only the two
functions that `bind` gives it: token ids to embeddings, hidden states to logits. A drafter that has an embedding or a head uses
its own. `architectures` lists the variants.
Source: DFlash, arXiv 2602.06036, section 4 and appendix A; masks, windows and DFlash 2 as in the published checkpoints.

Dimensions: B batch, S new context rows, C context rows in all, K block_size, H hidden, D head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..config import DrafterConfig
from ..kernels.layer_routes import attention
from ..rollback import append_window
from .head_scale import finish_head
from .rope import make_rope

# Log-probabilities [..., V] and noise [..., V] to scores [..., V]; the token with the largest score is drawn (Gumbel-max).
Noised = Callable[..., mx.array]


class Attention(nn.Module):
    """Block attention with KV injection: keys and values of the context are computed from the target's features."""

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        heads, kv_heads, D, bias = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.attention_bias
        self.n_heads, self.n_kv_heads, self.scale = heads, kv_heads, D**-0.5
        self.causal, self.window = config.causal[layer], config.windows[layer]
        self.q_proj = nn.Linear(config.hidden_size, heads * D, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * D, bias=bias)
        self.o_proj = nn.Linear(heads * D, config.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.rope = make_rope(config.ropes[layer], config.max_position_embeddings)
        # These two kinds of RoPE depend on the whole length, block included, so cached keys stay unrotated until they are used.
        self.rotates_late = config.ropes[layer].kind in ("dynamic", "longrope")

    def queries(self, x: mx.array, offset: int) -> mx.array:
        """[B, K, H] block rows to rotated queries [B, n_heads, K, D]; `offset` is the anchor's position."""
        B, K, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(B, K, self.n_heads, -1)).transpose(0, 2, 1, 3)
        return self.rope(q, offset=offset)

    def keys_values(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """[B, L, H] rows to rotated keys and values, both [B, n_kv_heads, L, D]; `offset` is the first row's position."""
        k, v = self.cached_kv(x, offset)
        return (self.rope(k, offset=offset) if self.rotates_late else k), v

    def cached_kv(self, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """`keys_values` as the cache stores them: keys are not rotated yet if the rotation depends on the whole length."""
        return self.normed_kv(self.k_proj(x), self.v_proj(x), offset)

    def normed_kv(self, k: mx.array, v: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        """`cached_kv` of rows that k_proj and v_proj have projected, [B, L, n_kv_heads * D] each."""
        B, L, _ = k.shape
        k = self.k_norm(k.reshape(B, L, self.n_kv_heads, -1)).transpose(0, 2, 1, 3)
        v = v.reshape(B, L, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        return (k if self.rotates_late else self.rope(k, offset=offset)), v

    def inject(self, context: mx.array, cache: Any, start: int) -> None:
        """Append keys and values of context rows at positions start, start + 1, ... that the cache does not hold yet."""
        k, v = self.cached_kv(context, start)
        held = cache.offset - start
        if held < context.shape[1]:
            self._append(cache, k[:, :, held:], v[:, :, held:])

    def _append(self, cache: Any, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if self.window is None:
            return cache.update_and_fetch(k, v)
        return append_window(cache, k, v)

    def __call__(self, x: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        """Attend from the block to the context and to the block.

        Shapes:
          - x: [B, K, H] normed block rows, the first at position start + S; context: [B, S, H] new context rows
        Returns: [B, K, H]. The cache then holds context rows only: block keys and values serve this pass alone.
        """
        B, K, _ = x.shape
        # In a compiled pass the offset is an array, and the cache a buffer that is filled only in part.
        buffered = hasattr(cache, "attend")
        end = cache.block_offset if buffered else start + context.shape[1]
        q = self.queries(x, end)
        # One product and one rotation for context and block: block rows follow the last context row.
        k, v = self.cached_kv(mx.concatenate([context, x], axis=1), start)
        # Leave out rows that the cache holds already. In a compiled pass offset and start are the same array, not known yet.
        if cache.offset is not start:
            held = cache.offset - start
            k, v = k[:, :, held:], v[:, :, held:]
        k, v = self.fetch(k, v, cache, K)
        if self.rotates_late:
            k = self.rope(k, offset=end + K - k.shape[2])
        if buffered:
            out = cache.attend(q, k, v, self.scale, self.causal)
        else:
            mask = block_mask(K, k.shape[2] - K, self.causal, self.window)
            out = self.attend(q, k, v, mask)
        return self.o_proj(self.gate_output(out.transpose(0, 2, 1, 3), x).reshape(B, K, -1))

    def fetch(self, k: mx.array, v: mx.array, cache: Any, K: int) -> tuple[mx.array, mx.array]:
        """The cached rows and these new ones [B, n_kv_heads, S + K, D]: context, then K block rows. Only context stays cached."""
        if self.window is None or hasattr(cache, "attend"):
            k, v = cache.update_and_fetch(k, v)
            cache.trim(K)
            return k, v
        new = k.shape[2] - K
        keys, values = append_window(cache, k[:, :, :new], v[:, :, :new])
        return mx.concatenate([keys, k[:, :, new:]], axis=2), mx.concatenate([values, v[:, :, new:]], axis=2)

    def attend(self, q: mx.array, k: mx.array, v: mx.array, mask: mx.array | str | None) -> mx.array:
        """Rows [B, n_heads, K, D] to keys and values [B, n_kv_heads, C + K, D], under `block_mask`."""
        return attention(q, k, v, self.scale, mask)

    def gate_output(self, out: mx.array, x: mx.array) -> mx.array:
        """The attention output [B, K, n_heads, D] unchanged; a gated variant multiplies it by a gate made of x [B, K, H]."""
        return out


def block_mask(K: int, C: int, causal: bool, window: int | None) -> mx.array | str | None:
    """Which of the last C context rows and K block rows each block row sees. None: all of them.

        position   p-C ... p-1 | p  p+1 ... p+K-1     row j sees context row c if (p + j) - c < window,
                     context   |      block           and of the block all rows, or those up to j if causal

    Returns: bool [K, C + K] (True: seen), "causal", or None.
    Source: the published checkpoints' reference code; the window never cuts inside the block.
    """
    if window is None or C + K <= window:
        return "causal" if causal else None
    j, c = mx.arange(K)[:, None], mx.arange(C)[None, :]
    context = (C - c) + j < window
    block = mx.arange(K)[None, :] <= j if causal else mx.ones((K, K), dtype=mx.bool_)
    return mx.concatenate([context, block], axis=1)


@cache
def _is_anchor(block_size: int) -> mx.array:
    """[1, block_size] bool, True for slot 0. Made once a process: an operation less in each round."""
    return mx.array([[True] + [False] * (block_size - 1)])


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    attention_class = Attention

    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, h: mx.array, context: mx.array, cache: Any, start: int) -> mx.array:
        """[B, K, H] to [B, K, H]. This layer's input norm applies to block rows only, not to context rows."""
        return self.sublayers(h, lambda x: self.self_attn(x, self.own_context(context), cache, start))

    def own_context(self, context: mx.array) -> mx.array:
        """The context rows [B, S, H] that this layer attends to; a variant may compute its own."""
        return context

    def sublayers(self, h: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """Attention and MLP with norms and residuals; `attend` maps normed rows [B, K, H] to [B, K, H]."""
        h = h + attend(self.input_layernorm(h))
        return h + self.mlp(self.post_attention_layernorm(h))


class Drafter(nn.Module):
    """A DFlash drafter with the published tensor names. `bind` it to a target before `draft`."""

    layer_class = DecoderLayer

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        features = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config, layer) for layer in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._embed = self._head = self._target = None
        # The `DFlashPair` of this drafter and its target, set once. It keeps what changes during runs.
        self.pair: Any = None
        # (whether it was trained with thinking, where that is stated); None if nowhere. Set by the loader.
        self.stated_thinking: tuple[bool, str] | None = None
        # Identifies the weights of a drafter from files (`Checkpoint.digest`); set by the loader.
        self.digest: Callable[[], str | None] = lambda: None

    def bind(self, embed: Callable[[mx.array], mx.array], head: Callable[[mx.array], mx.array], target: Any = None) -> Drafter:
        """Borrow the target's embedding (ids [B, L] to [B, L, H]) and head (hidden [B, L, H] to logits [B, L, V]).

        They include the target's scale and soft-cap. A drafter that has its own embedding or head always uses that, with the
        scale and soft-cap of its config (`finish_head`).
        """
        scale = self.config.input_embedding_scale or 1.0
        self._embed = (lambda ids: self.embed_tokens(ids) * scale) if "embed_tokens" in self else embed
        own = finish_head(self.config, self.lm_head, self.lm_head, "the drafter's own head") if "lm_head" in self else None
        self._head = own or head
        # Not a submodule, so that quantizing the drafter leaves the target alone.
        vars(self)["_target"] = target
        return self

    @property
    def target(self) -> Any:
        """The target model object whose embedding and head are borrowed, or None."""
        return self._target

    def make_cache(self) -> list[Any]:
        """One empty context cache per layer. Full layers keep all rows, sliding ones the last window - 1."""
        return [KVCache() if w is None else RotatingKVCache(max_size=w - 1) for w in self.config.windows]

    def context(self, features: mx.array) -> mx.array:
        """Tapped states [B, S, n_taps * H_target] to context rows [B, S, H], the same for every layer."""
        return self.hidden_norm(self.fc(features))

    def inject(self, features: mx.array, cache: list[Any], start: int) -> None:
        """Put context rows into the cache without drafting: prefill, and rounds that draft nothing.

        Shapes:
          - features: [B, S, n_taps * H_target], row 0 at position `start`. Rows that a layer holds already are skipped.
        """
        context = self.context(features)
        for layer, entry in zip(self.layers, cache, strict=True):
            layer.self_attn.inject(layer.own_context(context), entry, start)

    def __call__(self, block: mx.array, features: mx.array, cache: list[Any], start: int) -> mx.array:
        """One drafter pass.

        Shapes:
          - block: [B, K, H] embedded block, anchor first, at position start + S
          - features: [B, S, n_taps * H_target] new context rows, row 0 at position `start`
        Returns: [B, K, H] after the final norm; row k stands for the token at the anchor's position + k.
        """
        context = self.context(features)
        h = block
        for layer, entry in zip(self.layers, cache, strict=True):
            h = layer(h, context, entry, start)
        return self.norm(h)

    def draft(self, anchor: mx.array, features: mx.array, cache: list[Any], start: int, block_size: int) -> mx.array:
        """Propose the block_size - 1 tokens after the anchor.

        Shapes:
          - anchor: [B] int32; features: [B, S, n_taps * H_target], row 0 at position `start`
        Returns: [B, block_size - 1] int32
        """
        return self.choose(self.slots(anchor, features, cache, start, block_size), anchor)[0]

    def draft_with_confidence(
        self,
        anchor: mx.array,
        features: mx.array,
        cache: list[Any],
        start: int,
        block_size: int,
        *noise: Any,
        n: int | None = None,
        accelerator: Any = None,
    ) -> tuple[mx.array, mx.array | None]:
        """As `draft`, with the drafter's confidence in each slot: its largest probability there, [B, block_size - 1] float32.

        The confidence is None if the head computes no logits. Widths then depend on past acceptance alone.
        noise: `noised` and `noise` of `choose`; n: run the head for the first n slots only; accelerator: as for `slots`.
        """
        return self.choose(self.slots(anchor, features, cache, start, block_size, accelerator)[:, :n], anchor, *noise)

    def slots(
        self, anchor: mx.array, features: mx.array, cache: list[Any], start: int, block_size: int, accelerator: Any = None
    ) -> mx.array:
        """One pass over `[anchor, MASK, MASK, ...]`, arguments as in `draft`. Returns: normed rows of the masks, [B, N, H].

        accelerator: the run's (`Target.accelerator`), which may run the pass in place of the modules; None: they run it.
        """
        ids = mx.where(_is_anchor(block_size), anchor[:, None].astype(mx.int32), self.config.mask_token_id)
        if accelerator and (hidden := accelerator.draft(ids, features, cache, start)) is not None:
            return hidden
        return self.mask_rows(ids, features, cache, start)

    def mask_rows(self, ids: mx.array, features: mx.array, cache: list[Any], start: int) -> mx.array:
        """As `slots`, for a block given as ids [B, K], by the modules themselves."""
        hidden = self(self.embed_block(ids), features, cache, start)
        # Slot 0 is the anchor itself: its row predicts nothing.
        return hidden[:, 1:]

    def embed_block(self, ids: mx.array) -> mx.array:
        """[B, K] ids to [B, K, H]; mask slots get the drafter's own mask embedding, if it has one."""
        block = self._embed(ids)
        if "mask_embedding" not in self:
            return block
        return mx.where((ids == self.config.mask_token_id)[..., None], self.mask_embedding.astype(block.dtype), block)

    def choose(
        self, hidden: mx.array, anchor: mx.array, noised: Noised | None = None, noise: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The likeliest token in each mask slot, and its probability.

        Shapes:
          - hidden: [B, N, H] normed rows of the mask slots; anchor: [B]
        Args:
          noised, noise: how the target adds noise, and its noise [B, N, V] at these slots. The ids are then drawn with it.
        Returns: ids [B, N] int32; the greatest probabilities, without noise, [B, N] float32. Both are lazy.
        """
        logits = self._head(hidden)
        scores = logits if noised is None else self._noised(logits.astype(mx.float32), noise, noised)
        return self.target_ids(mx.argmax(scores, axis=-1)), mx.softmax(logits.astype(mx.float32), axis=-1).max(axis=-1)

    def _noised(self, logits: mx.array, noise: mx.array, noised: Noised) -> mx.array:
        """Add the target's noise [..., V] to the head's logits [..., R]: scores of the head's tokens, whose argmax is drawn."""
        if "d2t" in self:
            noise = noise[..., self.target_ids(mx.arange(logits.shape[-1]))]
        both = min(logits.shape[-1], noise.shape[-1])  # the longer one ends in padding
        return noised(logits[..., :both] - mx.logsumexp(logits, axis=-1, keepdims=True), noise[..., :both])

    def target_ids(self, ids: mx.array) -> mx.array:
        """Map the head's ids to the target's. A head with a reduced vocabulary has a table d2t: target id minus head id."""
        return (ids + self.d2t[ids]).astype(mx.int32) if "d2t" in self else ids.view(mx.int32)

    def draw(
        self, hidden: mx.array, anchor: mx.array, probabilities: Callable[[mx.array], mx.array], temperature: float, key: mx.array
    ) -> tuple[mx.array, mx.array | None, mx.array]:
        """Sample the slots' tokens instead of taking the likeliest, and return the probabilities they were drawn with.

        Shapes:
          - hidden: [B, N, H] normed rows of the mask slots; anchor: [B]
        Args:
          probabilities: log-probabilities [..., V] to those that a sampler draws with (filters, then temperature).
        Returns: drawn ids [B, N] int32; the ids that could be drawn [B, N, k], None for all in their order; the probability of
          each [B, N, k].
        """
        logits = self._head(hidden)
        q = probabilities(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        drawn = mx.random.categorical(mx.log(q), key=key)
        every = self.target_ids(mx.broadcast_to(mx.arange(q.shape[-1]), q.shape)) if "d2t" in self else None
        return self.target_ids(drawn), every, q

    def first_not_finite(self, features: mx.array) -> tuple[str, str] | None:
        """The first part whose output overflows in a pass over features [1, S, n_taps * H_target], and its type; or None."""
        block = self.embed_block(mx.full((1, 2), self.config.mask_token_id, dtype=mx.int32))
        hidden = self(block, features, self.make_cache(), 0)
        parts = {
            "the tapped layers": features,
            "the drafter's fc": self.fc(features),
            "the drafter's layers": hidden,
            "the head": self._head(hidden),
        }
        for name, values in parts.items():
            if not mx.isfinite(values).all().item():
                return name, str(values.dtype).removeprefix("mlx.core.")
        return None
