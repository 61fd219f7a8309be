"""What `kernel_run` tries each kernel on: shapes of an 8B and of a 27B model, made-up values.

`SHAPES` has a function for each kernel with a text of ours: (bench, model) -> (shape, least rows), the most telling first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import mlx.core as mx

from ..kernels import accept as accepting
from ..kernels import block_attention as attention
from ..kernels import block_gather_qmm as gathering
from ..kernels import block_heads as drafting
from ..kernels import block_linear as linear
from ..kernels import block_qmm as qmm
from ..kernels import gated_delta as recurrence
from ..kernels import head_argmax as head
from ..kernels import trials
from ..kernels.launch import Kernel
from ..kernels.verdicts import Candidate
from .kernel_run import ROWS, Bench, Call, Shape, plan_name

MOST = max(ROWS)
# Copies of weights that no cache holds together.
SPREAD_BYTES = 512e6
# Rows of a weight matrix that are made or written out at a time.
PART = 16384

# (name, N, K); Qwen3-8B and Qwen3.6-27B, the largest first.
LAYERS = {
    "8B": [
        ("head", 151936, 4096),
        ("gate or up", 12288, 4096),
        ("down", 4096, 12288),
        ("q or o", 4096, 4096),
        ("k or v", 1024, 4096),
    ],
    "27B": [
        ("head", 248320, 5120),
        ("gate or up", 17408, 5120),
        ("down", 5120, 17408),
        ("q and its gate", 12288, 5120),
        ("k or v", 1024, 5120),
    ],
}
# Of SmolLM2-135M, whose launches bind, and of Qwen3-8B: (name, N, K, what stands around the product)
AROUND = {
    "8B": [
        ("qkv", 960, 576, "norm"),
        ("gate and up", 3072, 576, "norm gated"),
        ("down", 576, 1536, "residual"),
        ("qkv", 6144, 4096, "norm"),
        ("gate and up", 24576, 4096, "norm gated"),
        ("down", 4096, 12288, "residual"),
    ],
    "27B": [("gate and up", 34816, 5120, "norm gated"), ("down", 5120, 17408, "residual")],
}
# Key heads, value heads and their size: Qwen3.5-9B's and 27B's recurrent layers.
RECURRENT = {"8B": (16, 32, 128), "27B": (16, 48, 128)}
HEADS = {"8B": (151936, 4096), "27B": (248320, 5120)}
# Query heads, KV heads and their size, of the layers of published drafters for Qwen3.
DRAFTER = (32, 8, 128)
# (model, query heads, KV heads, head dimension, keys, window)
CACHES = {
    "8B": [
        ("Qwen3-8B", 32, 8, 128, 8192, 0),
        ("Qwen3-8B", 32, 8, 128, 32768, 0),
        ("Qwen3-8B", 32, 8, 128, 1024, 0),
    ],
    "27B": [("Qwen3.6-27B", 24, 4, 256, 8192, 0), ("gpt-oss", 64, 8, 64, 8192, 128)],
}
# Qwen3.6-35B-A3B: 256 experts, 8 a row; gpt-oss-20b: 32 experts, 4 a row. (name, experts, a row, N, K)
EXPERTS = {"8B": [("A3B gate or up", 256, 8, 512, 2048)], "27B": [("gpt-oss gate or up", 32, 4, 2880, 2880)]}

Shapes = Iterator[tuple[Shape, int]]


def block_qmm(bench: Bench, model: str) -> Shapes:
    yield from _products(bench, qmm.KERNEL, qmm.prepare, model)


def block_qmm_tiles(bench: Bench, model: str) -> Shapes:
    # Matrix units multiply 16-bit numbers.
    if bench.dtype != mx.float32:
        yield from _products(bench, qmm.TILES, qmm.prepare_tiles, model)


def _products(bench: Bench, text: Kernel, prepare: Callable, model: str) -> Shapes:
    for bits, (name, n, k) in itertools.product(bench.bits, LAYERS[model][: 1 if bench.quick else None]):
        what = f"{bits} bit {model} {name} N {n} K {k}"
        if bench.fits(what, 3 * n * k * bits / 8):
            yield _product(bench, text, prepare, what, n, k, bits), 1


def _product(bench: Bench, text: Kernel, prepare: Callable, what: str, n: int, k: int, bits: int) -> Shape:
    dtype, first = bench.dtype, quantized(n, k, 64, bits, bench.dtype)
    size = _size(first)
    turn = itertools.cycle([first, *([a + 0 for a in first] for _ in range(_copies(size) - 1))])
    x = mx.random.normal((MOST, k), dtype=dtype, key=mx.random.key(2))
    answer = exact(x, first, 64, bits)

    def way(options: dict[str, int]) -> Call:
        made = cache(lambda shape: prepare(shape, dtype, n, 64, bits, **options))
        return lambda x: [made(x.shape)(x, *next(turn))]

    plans = bench.plans([c for c in qmm.candidates(dtype, n, 64, bits) if c.kernel.name == text.name])
    return Shape(
        text.name,
        what,
        {plan: way(options) for plan, options in plans},
        lambda x: [qmm.block_qmm_ops(x, *next(turn), 64, bits)],
        lambda rows: x[:rows],
        bench.same,
        lambda rows: size,
        lambda rows: [answer[:rows]],
        partial(_each_row, x),
    )


def block_linear(bench: Bench, model: str) -> Shapes:
    for bits, (name, n, k, form) in itertools.product((4, 16), AROUND[model]):
        what = f"{bits} bit {name} N {n} K {k} {form}"
        if bench.fits(what, 3 * n * k * bits / 8):
            yield _around(bench, what, n, k, bits, form), 1


def _around(bench: Bench, what: str, n: int, k: int, bits: int, form: str) -> Shape:
    eps, residual, gated = 1e-6 if "norm" in form else None, "residual" in form, "gated" in form
    x, first, scale, rest = linear.made(n, k, 64, bits, bench.dtype, bool(eps), residual, gated)
    size = _size(first.arrays)
    turn = itertools.cycle([first, *(first.copied() for _ in range(_copies(size) - 1))])
    norm = (scale, eps) if eps else None

    def ours(x: mx.array, at: int = 0) -> list[mx.array]:
        return [linear.block_linear_kernel(x, next(turn), norm, rest if rest is None else rest[at : at + x.shape[0]], gated)]

    def stock(x: mx.array) -> list[mx.array]:
        return [linear.block_linear_ops(x, next(turn), norm, rest if rest is None else rest[: x.shape[0]], gated)]

    def alone(call: Call, rows: int) -> list[mx.array]:
        return [mx.concatenate([call(x[m : m + 1], m)[0] for m in range(rows)])]

    given, nbytes = (lambda rows: x[:rows]), (lambda rows: size)
    return Shape("block_linear", what, {"": ours}, stock, given, bench.same_formed, nbytes, None, alone)


def block_heads(bench: Bench, model: str) -> Shapes:
    """Rows are a block's, after as many of a context."""
    if model != "8B":
        return
    HQ, HK, D = DRAFTER
    heads = drafting.Heads(HQ, HK, D, D, False, 1e-6)
    made = cache(drafting.trials(bench.dtype, heads, (Candidate(drafting.KERNEL),)))
    y, context, first, *norms, rotation = drafting.made(bench.dtype, heads)
    turns = drafting.turns_of(rotation, heads, 2 * MOST, 0)

    def alone(call: Call, rows: int) -> list[mx.array]:
        """The block's rows one by one, each after the whole context: queries, its key and its value."""
        at = [mx.concatenate([turns[:, :, :rows], turns[:, :, rows + m : rows + m + 1]], axis=2) for m in range(rows)]
        each = [drafting.block_heads_kernel(y[:, m : m + 1], context[:, :rows], first, *norms, at[m], heads) for m in range(rows)]
        held = [a[:, :, :rows] for a in each[0][1:]]
        q, k, v = (mx.concatenate([a[:, :, -1:] for a in of], axis=2) for of in zip(*each, strict=True))
        return [q, *(mx.concatenate([a, b], axis=2) for a, b in zip(held, (k, v), strict=True))]

    yield (
        Shape(
            "block_heads",
            f"a drafter's HQ {HQ} HK {HK} D {D}",
            {plan_name(Candidate(drafting.KERNEL)): lambda y: list(made(y.shape[1]).ours[0](y))},
            lambda y: list(made(y.shape[1]).stock(y)),
            lambda rows: made(rows).x,
            made(1).same,
            lambda rows: 2 * rows * (HQ + 4 * HK) * D * bench.dtype.size,
            None,
            alone,
        ),
        1,
    )


def block_gather_qmm(bench: Bench, model: str) -> Shapes:
    for name, experts, share, n, k in EXPERTS[model]:
        yield _experts(bench, f"4 bit {name}", experts, share, n, k), 1


def _experts(bench: Bench, what: str, experts: int, share: int, n: int, k: int) -> Shape:
    keys = mx.random.split(mx.random.key(2), 2)
    w = [a.reshape(experts, n, -1) for a in quantized(experts * n, k, 32, 4, bench.dtype)]
    x = mx.random.normal((MOST, k), dtype=bench.dtype, key=keys[0])
    ids = mx.argsort(mx.random.uniform(shape=(MOST, experts), key=keys[1]), axis=-1)[:, :share].astype(mx.uint32)
    turn = itertools.cycle([w, [a + 0 for a in w]])
    right = mx.stack([x[m].astype(mx.float32) @ dense([a[ids[m]] for a in w], 32, 4).swapaxes(1, 2) for m in range(MOST)])
    mx.eval(ids, right)

    def way(options: dict[str, int]) -> Call:
        made = cache(lambda shape: gathering.prepare(shape, bench.dtype, (experts, n), (shape[0] * share,), 32, 4, **options))
        return lambda x, at=0: [made(x.shape)(x, *next(turn), ids[at : at + x.shape[0]].reshape(-1))]

    def alone(call: Call, rows: int) -> list[mx.array]:
        return [mx.concatenate([call(x[m : m + 1], m)[0] for m in range(rows)])]

    return Shape(
        "block_gather_qmm",
        what,
        {plan: way(options) for plan, options in bench.plans(gathering.candidates())},
        lambda x: [gathering.block_gather_qmm_ops(x, *next(turn), ids[: x.shape[0]].reshape(-1), 32, 4)],
        lambda rows: x[:rows],
        bench.same,
        lambda rows: _size(w) * len({i for row in ids[:rows].tolist() for i in row}) // experts,
        lambda rows: [right[:rows].reshape(-1, n)],
        alone,
    )


def head_argmax(bench: Bench, model: str) -> Shapes:
    v, h = HEADS[model]
    what = f"4 bit {model} V {v} H {h}"
    if bench.fits(what, 3 * v * h / 2):
        yield _head(bench, what, v, h), 1


def _head(bench: Bench, what: str, v: int, h: int) -> Shape:
    w, x = quantized(v, h, 64, 4, bench.dtype), mx.random.normal((MOST, h), dtype=bench.dtype, key=mx.random.key(1))
    logits = exact(x, w, 64, 4).astype(bench.dtype)
    two = mx.topk(logits.astype(mx.float32), 2, axis=-1)
    right = (mx.argmax(logits, axis=-1).astype(mx.int32), mx.max(two, axis=-1) - mx.min(two, axis=-1))
    mx.eval(right)

    def way(options: dict[str, int]) -> Call:
        made = cache(lambda shape: head.prepare(shape, bench.dtype, v, (64, 4), **options))
        return lambda x: list(made(x.shape)(x, *w))

    return Shape(
        "head_argmax",
        what,
        {plan: way(options) for plan, options in bench.plans(head.candidates())},
        lambda x: list(head.head_argmax_ops(x, *w, 64, 4)),
        lambda rows: x[:rows],
        head.same_choices(bench.dtype, h),
        lambda rows: _size(w),
        lambda rows: [a[:rows] for a in right],
        partial(_each_row, x),
    )


def accept(bench: Bench, model: str) -> Shapes:
    """Rows are the target's: drafts and one."""
    if model != "8B":
        return
    keys = mx.random.split(mx.random.key(0), 2)
    target = mx.random.randint(0, 100, (1, MOST), dtype=mx.int32, key=keys[0])
    draft = mx.where(mx.random.uniform(shape=(1, MOST - 1), key=keys[1]) < 0.8, target[:, :-1], target[:, 1:])
    mx.eval(draft, target)

    def ours(x: mx.array) -> list[mx.array]:
        return list(accepting.accept_kernel(x, target[:, : x.shape[1] + 1]))

    def stock(x: mx.array) -> list[mx.array]:
        return list(accepting.accept_ops(x, target[:, : x.shape[1] + 1]))

    given, nbytes = (lambda rows: draft[:, : rows - 1]), (lambda rows: 4 * (2 * rows - 1))
    ways = {plan_name(Candidate(accepting.KERNEL)): ours}
    yield Shape("accept", "drafts of one sequence", ways, stock, given, trials.same_ids, nbytes), 2


def gated_delta(bench: Bench, model: str) -> Shapes:
    hk, hv, d = RECURRENT[model]
    state = (1, hv, d, d)
    about = ((1, MOST, hk, d), (1, MOST, hv, d), False, bench.dtype, mx.float32, bench.dtype, mx.float32)
    made = cache(recurrence.trials(*about, (Candidate(recurrence.KERNEL),)))

    def calls(which: Callable[[trials.Trial], Call]) -> Call:
        return lambda q: list(which(made(q.shape[1]))(q))

    yield (
        Shape(
            "gated_delta",
            f"{model} HK {hk} HV {hv} D {d}",
            {plan_name(Candidate(recurrence.KERNEL)): calls(lambda trial: trial.ours[0])},
            calls(lambda trial: trial.stock),
            lambda rows: made(rows).x,
            made(1).same,
            lambda rows: 2 * 4 * math.prod(state),
        ),
        1,
    )


def block_attention(bench: Bench, model: str) -> Shapes:
    for name, hq, hk, d, s, window in CACHES[model][: 2 if bench.quick else None]:
        if d * bench.dtype.size <= 512:
            yield _attention(bench, f"{name} S {s}" + (f" window {window}" if window else ""), hq, hk, d, s, window), 1


def _attention(bench: Bench, what: str, hq: int, hk: int, d: int, s: int, window: int) -> Shape:
    dtype, keys = bench.dtype, mx.random.split(mx.random.key(3), 3)
    q = mx.random.normal((1, hq, MOST, d), dtype=dtype, key=keys[0])
    k, v = (mx.random.normal((1, hk, s, d), dtype=dtype, key=key) for key in keys[1:])
    turn = itertools.cycle([(k, v), *((k + 0, v + 0) for _ in range(_copies(2 * k.nbytes, 16) - 1))])
    mx.eval(q, k, v)

    def way(options: dict[str, int]) -> Call:
        made = cache(lambda shape: attention.prepare(shape, dtype, hk, d**-0.5, True, window, False, **options))

        def call(q: mx.array, unseen: int = 0) -> list[mx.array]:
            """unseen: newest keys that are left out."""
            pair = next(turn)
            return [made(q.shape)(q, *([a[:, :, : s - unseen] for a in pair] if unseen else pair), None, 0)]

        return call

    def alone(call: Call, rows: int) -> list[mx.array]:
        each = [call(q[:, :, i : i + 1], MOST - 1 - i)[0] for i in range(MOST - rows, MOST)]
        return [mx.concatenate(each, axis=2)]

    return Shape(
        "block_attention",
        what,
        {plan: way(options) for plan, options in bench.plans(attention.candidates())},
        lambda q: [attention.block_attention_ops(q, *next(turn), d**-0.5, True, window)],
        lambda rows: q[:, :, MOST - rows :],
        trials.same_floats({4: 1e-4, 2: 5e-2}[dtype.size]),
        lambda rows: 2 * k.nbytes * (min(s, window + rows) if window else s) // s,
        None,
        alone,
    )


SHAPES: dict[str, Callable[[Bench, str], Shapes]] = {
    of.__name__: of
    for of in (
        block_qmm,
        block_qmm_tiles,
        block_linear,
        block_heads,
        block_gather_qmm,
        accept,
        head_argmax,
        block_attention,
        gated_delta,
    )
}


def _each_row(x: mx.array, call: Call, rows: int) -> list[mx.array]:
    """Each row of x [.., K] in a launch of its own, joined again."""
    alone = [call(x[m : m + 1]) for m in range(rows)]
    return [mx.concatenate(parts) for parts in zip(*alone, strict=True)]


def quantized(n: int, k: int, group_size: int, bits: int, dtype: mx.Dtype) -> list[mx.array]:
    """Made-up weights [n, k], quantized part by part: they are never all there in `dtype`."""
    parts = []
    for at in range(0, n, PART):
        w = mx.random.normal((min(PART, n - at), k), dtype=dtype, key=mx.random.key(at + 1))
        parts.append(mx.quantize(w, group_size=group_size, bits=bits))
        mx.eval(parts[-1])
    whole = [mx.concatenate(of) for of in zip(*parts, strict=True)] if len(parts) > 1 else list(parts[0])
    mx.eval(whole)
    return whole


def dense(weights: Sequence[mx.array], group_size: int, bits: int) -> mx.array:
    """[..., N, K] float32."""
    w, scales, biases = weights
    return mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)


def exact(x: mx.array, weights: Sequence[mx.array], group_size: int, bits: int) -> mx.array:
    """x [M, K] times weights [N, K] in float32, to [M, N]; written out part by part."""
    parts = []
    for at in range(0, weights[0].shape[0], PART):
        parts.append(x.astype(mx.float32) @ dense([a[at : at + PART] for a in weights], group_size, bits).T)
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=1)


def _size(arrays: Sequence[mx.array]) -> int:
    return sum(a.nbytes for a in arrays)


def _copies(bytes_each: int, most: int = 64) -> int:
    """Copies that together are larger than any cache; one where one is."""
    return max(1, min(most, math.ceil(SPREAD_BYTES / max(bytes_each, 1))))
