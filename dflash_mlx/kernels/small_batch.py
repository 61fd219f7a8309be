"""Products and attention of a block's few rows, by the MLX operations that cost a GPU the least.

MLX's CUDA build records operations as graphs and updates a graph that it has seen. A product of several rows is cuBLAS's, whose
kernels on an H100 come in clusters, and a graph with those is made anew each time; a product of one row is a kernel of MLX's
own. Attention of 4 rows and more, without cuDNN, is some ten operations; with it, one, but for each new number of keys cuDNN
makes a plan first: 84 ms a pass of 16 rows, 13 at a known length, 14 without cuDNN (SmolLM2-135M, H200, mlx 0.32.4).

    matmul_as_gemv       x[M, K] times W[N, K]     M products of a matrix and a vector: each row is computed as if it were alone
    gqa_folded_attention   Q[HQ, M, D], K, V[HK]     the HQ / HK heads that share keys, and the rows, as rows of one product; the
                                                 mask comes with it, made once a pass

The second also serves one row in each of many texts (`serves_many_texts`), where `train data` writes.

A 16-row pass of SmolLM2-135M in bfloat16 took 12.0 ms, 10.1 with the first, 9.7 with the second, 8.0 with both (H100, mlx
0.32.4, without cuDNN; bench/results/few-rows-smollm2-bf16-H100.json, by hand, not yet by this code). Weights are read M
times, so large ones gain nothing: like a kernel, each runs where a trial on the machine found it right and faster. Neither needs
compiling.

Knows nothing of layers, caches or passes.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from . import autotune
from .block_qmm import MAX_ROWS, TOLERANCE, TRIAL_BYTES, TRIAL_COLUMNS, TYPES
from .launch import Form

PRODUCTS = Form("matmul_as_gemv")
FOLDED = Form("gqa_folded_attention")
# A drafter computes keys for a block and for as many new context rows.
MOST_PRODUCT_ROWS = 2 * MAX_ROWS
# MLX has a kernel on CUDA for the attention of up to 3 rows.
LEAST_ATTENTION_ROWS = 4
TRIAL_KEYS = 512
# From this many keys on, MLX hands attention of one row to cuDNN. Its own kernel, for fewer keys, reads them once for each query
# head and gets slower with each: a layer of 2,048 texts took 438 us at 128 keys, folded 121; 579 at 200, folded 165; with cuDNN
# 186 at 260, folded 422 (SmolLM2-135M's 9 heads and 3 of keys, bfloat16, H200, mlx 0.32.4).
CUDNN_KEYS, MANY_TEXTS, HALF = 256, 64, (mx.float16, mx.bfloat16)
# MLX reads this once a process, at its first attention on CUDA.
CUDNN = "MLX_CUDA_USE_CUDNN_SDPA"

Launch = Callable[..., mx.array]


def here() -> bool:
    """Whether products can be of use: on a GPU whose backend is CUDA."""
    return mx.cuda.is_available() and autotune.has_gpu()


def choose_cudnn(few_lengths: bool) -> None:
    """Set whether MLX uses cuDNN for attention in this process. To be called before the first attention on a GPU.

    It has an effect only on CUDA, and only if neither the user nor a pair loaded earlier has set it: MLX reads it once.

    Args:
      few_lengths: whether passes run over buffers, of which few lengths occur. cuDNN plans anew for each number of keys, and an
        ordinary verify pass meets a new number each round: then cuDNN is not asked.
    """
    if mx.cuda.is_available() and CUDNN not in os.environ:
        os.environ[CUDNN] = "1" if few_lengths else "0"


def _cudnn_takes(dtype: mx.Dtype, *sizes: int) -> bool:
    """Whether MLX hands attention of several rows to cuDNN: in one operation, but each new number of keys needs a new plan.

    Source: supports_sdpa_cudnn in MLX's scaled_dot_product_attention.cpp.
    """
    fits = all(size % 8 == 0 and size <= 128 for size in sizes)
    return os.environ.get(CUDNN, "1") != "0" and dtype in (mx.float16, mx.bfloat16) and fits


def matmul_as_gemv(x: mx.array, w: mx.array) -> mx.array:
    """x[1, M, K] times w[N, K], transposed: [1, M, N]. A row's bits do not depend on M."""
    return rows_apart(x, w).reshape(1, x.shape[1], w.shape[0])


def rows_apart(x: mx.array, w: mx.array) -> mx.array:
    """What `matmul_as_gemv` is made of, w being [N, K] or the same M times over, [M, N, K]: [M, N, 1]."""
    _, m, k = x.shape
    return mx.matmul(w, mx.reshape(x, (m, k, 1)))


def fixed_product(w: mx.array) -> Callable[[mx.array], mx.array]:
    """x [..., K] -> the values of x W^T of W[N, K], in some shape: for passes that are traced, where views are operations of
    every pass. Those of W are made once."""
    turned, spread = w.T[None], {}
    mx.eval(turned)

    def product(x: mx.array) -> mx.array:
        if x.ndim != 3 or x.shape[0] != 1:
            return x @ w.T
        if not (autotune.may_run() and matmul_as_gemv_plan(x, w)):
            return x @ turned
        m = x.shape[1]
        if m not in spread:
            spread[m] = mx.broadcast_to(w, (m, *w.shape))
            mx.eval(spread[m])
        return rows_apart(x, spread[m])

    return product


def matmul_as_gemv_plan(x: mx.array, w: mx.array) -> Launch | None:
    """`matmul_as_gemv`, if it serves (x, w); None: MLX's product does."""
    return autotune.planned(_products, x.shape, x.dtype, w.shape, w.dtype)


def _products(shape: tuple[int, ...], dtype: mx.Dtype, w_shape: tuple[int, ...], w_dtype: mx.Dtype) -> Launch | None:
    few = len(shape) == 3 and shape[0] == 1 and 2 <= shape[1] <= MOST_PRODUCT_ROWS
    if not (here() and few and dtype == w_dtype and dtype in TYPES):
        return None
    n, k = w_shape
    block = shape[1] <= MAX_ROWS
    about = f"float product {dtype} N {n} K {k}" + ("" if block else " for a drafter's keys")
    made = functools.partial(product_trials, min(n, TRIAL_COLUMNS), k, dtype)
    rows = (2, 8, MAX_ROWS) if block else (24, MOST_PRODUCT_ROWS)
    question = autotune.Question(about, (autotune.Candidate(PRODUCTS),), made, rows, nbytes=n * k * dtype.size)
    return matmul_as_gemv if autotune.choose(question, shape[1]) else None


def product_trials(n: int, k: int, dtype: mx.Dtype, ways: Sequence[autotune.Candidate]) -> Callable[[int], autotune.Trial]:
    """For a row count: a comparison with MLX's product, over more matrices than fit into the GPU's cache."""
    keys = mx.random.split(mx.random.key(0), 2)
    first = mx.random.normal((n, k), dtype=dtype, key=keys[0])
    weights = [first, *(first + 0 for _ in range(min(15, TRIAL_BYTES // first.nbytes)))]
    x, turn = mx.random.normal((1, MOST_PRODUCT_ROWS, k), dtype=dtype, key=keys[1]), itertools.cycle(weights)
    mx.eval(weights, x)

    def one(m: int) -> autotune.Trial:
        ours, stock = lambda x: [matmul_as_gemv(x, next(turn))], lambda x: [x @ next(turn).T]
        return autotune.Trial(x[:, :m], [ours for _ in ways], stock, autotune.same_floats(TOLERANCE[dtype]))

    return one


def folded_mask(mask: mx.array | str, m: int, s: int, shared: int, dtype: mx.Dtype) -> mx.array:
    """A mask as `gqa_folded_attention` takes it.

    Args:
      mask: "causal", the m rows being the last of s; or an array [m, s], leading axes of 1 allowed: True where a key is seen, or
        floats to add.
      shared: query heads that share one of keys.
    Returns: [shared * m, s], to add to scores.
    """
    if isinstance(mask, str):
        mask = mx.arange(s)[None] <= mx.arange(s - m, s)[:, None]
    mask = mx.reshape(mask, (m, s))
    added = mx.where(mask, mx.array(0, dtype), mx.array(-math.inf, dtype)) if mask.dtype == mx.bool_ else mask.astype(dtype)
    return mx.broadcast_to(added, (shared, m, s)).reshape(shared * m, s)


def gqa_folded_attention(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None, scale: float) -> mx.array:
    """Attention in three operations; on Metal in MLX's one.

    Shapes:
      - queries: [B, HQ, M, D]; keys: [B, HK, S, D]; values: [B, HK, S, E]; mask: of `folded_mask`, [HQ / HK * M, S]; None: each
        row sees all keys
    Returns:
      - [B, HQ, M, E]
    """
    b, hq, m, d = queries.shape
    hk = keys.shape[1]
    folded = mx.reshape(queries, (b, hk, hq // hk * m, d))
    if not mx.cuda.is_available():
        out = mx.fast.scaled_dot_product_attention(folded, keys, values, scale=scale, mask=mask)
        return out.reshape(b, hq, m, values.shape[3])
    keys = keys.swapaxes(-1, -2)
    scores = (folded * scale) @ keys if mask is None else mx.addmm(mask, folded, keys, alpha=scale)
    return (mx.softmax(scores, axis=-1, precise=True) @ values).reshape(b, hq, m, values.shape[3])


def serves_many_texts(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether `gqa_folded_attention` is to serve one row in each of many texts, where every row sees all keys of its text."""
    (b, hq, m, d), (_, hk, s, _), dtype = queries.shape, keys.shape, queries.dtype
    many = m == 1 and b >= MANY_TEXTS and hq > hk and dtype in HALF
    return many and (s < CUDNN_KEYS or not _cudnn_takes(dtype, d, values.shape[3])) and autotune.allowed(FOLDED)


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """MLX's attention of a few rows, when each call has another number of keys."""
    out = folded_or_none(queries, keys, values, scale, mask) if autotune.may_run() else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask) if out is None else out


def folded_or_none(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    buffer: bool = False,
    fold: Callable[..., mx.array] | None = None,
) -> mx.array | None:
    """`gqa_folded_attention`, if it serves these arguments; None: MLX's attention does.

    Args:
      buffer: as in `gqa_folded_attention_plan`; fold: makes the folded mask in the place of `folded_mask`.
    """
    launch = gqa_folded_attention_plan(queries, keys, values, scale, mask, buffer)
    return launch(queries, keys, values, mask, fold or folded_mask) if launch else None


class Folded(NamedTuple):
    """`gqa_folded_attention` as a plan: of queries, keys, values and a mask that `fold` folds, as `folded_mask` does."""

    scale: float

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array | str | None,
        fold: Callable[..., mx.array] = folded_mask,
    ) -> mx.array:
        m, s, shared = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
        added = None if mask is None else fold(mask, m, s, shared, queries.dtype)
        return gqa_folded_attention(queries, keys, values, added, self.scale)


def gqa_folded_attention_plan(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None, buffer: bool = False
) -> Folded | None:
    """A function of (queries, keys, values, mask); None: MLX's attention serves them.

    Args:
      buffer: whether the keys are a buffer, which is as long in the next pass.
    """
    s, types = keys.shape[2], (queries.dtype, keys.dtype, values.dtype)
    if isinstance(mask, mx.array) and (mask.size != queries.shape[2] * s or mask.shape[-1] != s):
        return None
    return autotune.planned(_attention, queries.shape, keys.shape[1], values.shape[3], types, scale, buffer, mask is None)


def _attention(
    shape: tuple[int, ...], hk: int, e: int, types: tuple[mx.Dtype, ...], scale: float, buffer: bool, unmasked: bool
) -> Folded | None:
    (b, hq, m, d), dtype = shape, types[0]
    if not (autotune.has_gpu() and b == 1 and m <= MAX_ROWS and hq % hk == 0 and {*types} == {dtype} and dtype in TYPES):
        return None
    about, least = f"attention {dtype} HQ {hq} HK {hk} D {d}{f' E {e}' if e != d else ''}", LEAST_ATTENTION_ROWS
    if not mx.cuda.is_available():
        # MLX has a kernel for up to 8 rows and one for more. A target's attention is a question of `block_attention`.
        about, least = f"{about} of a drafter{' full' if unmasked else ''}", MAX_ROWS // 2
        if hq == hk:
            return None
    elif _cudnn_takes(dtype, d, e):
        # Known without a trial: a plan is dearer than anything that is done instead, and one operation is cheapest where few
        # lengths occur (16-row pass, H100: 6.3 ms, folded 6.8; 4 rows: 4.6, 5.4).
        return Folded(scale) if m > 1 and not buffer and autotune.allowed(FOLDED) else None
    elif m < least or unmasked:
        return None
    made = functools.partial(attention_trials, hq, hk, d, e, dtype, unmasked)
    question = autotune.Question(about, (autotune.Candidate(FOLDED),), made, (least, MAX_ROWS))
    return Folded(scale) if autotune.choose(question, m) else None


def attention_trials(
    hq: int, hk: int, d: int, e: int, dtype: mx.Dtype, unmasked: bool, ways: Sequence[autotune.Candidate]
) -> Callable[[int], autotune.Trial]:
    """Comparisons with MLX's attention to 512 keys, causal unless unmasked. On CUDA the mask is made beforehand, as a target's
    pass makes it once for its layers; a drafter's layers make it each."""
    key = mx.random.split(mx.random.key(0), 3)
    q = mx.random.normal((1, hq, MAX_ROWS, d), dtype=dtype, key=key[0])
    k = mx.random.normal((1, hk, TRIAL_KEYS, d), dtype=dtype, key=key[1])
    v = mx.random.normal((1, hk, TRIAL_KEYS, e), dtype=dtype, key=key[2])
    mx.eval(q, k, v)
    same, scale = autotune.same_floats({mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}[dtype]), d**-0.5

    def one(m: int) -> autotune.Trial:
        causal, fold = None if unmasked else "causal", folded_mask
        if mx.cuda.is_available() and causal:
            mask = folded_mask(causal, m, TRIAL_KEYS, hq // hk, dtype)
            mx.eval(mask)
            fold = lambda *_: mask  # noqa: E731
        ours = lambda q: [Folded(scale)(q, k, v, causal, fold)]  # noqa: E731
        stock = lambda q: [mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=causal)]  # noqa: E731
        return autotune.Trial(q[:, :, :m], [ours for _ in ways], stock, same)

    return one
