"""block_heads' text against norm and rotation in float64, and each row count against one row, in the emulator."""

import emulator
import mlx.core as mx
import numpy as np
import pytest
from checks import f64, ulp

from dflash_mlx.kernels import autotune
from dflash_mlx.kernels import block_heads as module
from dflash_mlx.kernels.block_heads import Heads, block_heads_kernel, block_heads_ops, block_heads_plan, turns_of

needs_compiler = pytest.mark.emulator
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
EPS = 1e-5
# Relative, of an inverse root before anything is rounded: as block_linear's.
CLOSE = 2.0**-21
# Heads of one step of a simd group and of several; all numbers rotated, or a part; both ways of pairing.
FORMS = {
    "halves": Heads(4, 2, 64, 64, False, EPS),
    "neighbours": Heads(2, 2, 40, 40, True, EPS),
    "a part": Heads(3, 1, 72, 24, False, EPS),
    "a part of neighbours": Heads(2, 1, 96, 32, True, EPS),
}


def rotation(heads):
    return lambda x, offset: mx.fast.rope(x, heads.dims, traditional=heads.traditional, base=100.0, scale=1.0, offset=offset)


def made(heads, K=3, S=2, dtype=mx.float32, spare=2, before=8, seed=0):
    """Arrays of `block_heads_kernel`: columns of nobody after the block's, other layers' before and after the context's."""
    HQ, HK, D = heads[:3]
    rng = np.random.default_rng(seed)
    # Rows of sizes that a norm evens out, with a mean that is not zero.
    y, context = (
        mx.array(np.arange(1, n + 1)[:, None] / 4 * (rng.normal(size=(1, n, columns)) + 0.25)).astype(dtype)
        for n, columns in ((K, (HQ + 2 * HK) * D + spare), (S, before + 2 * HK * D + 3))
    )
    q_weight, k_weight = (mx.array(rng.uniform(-2, 2, D)).astype(dtype) for _ in range(2))
    first = mx.array([before], dtype=mx.int32)
    return y, context, first, q_weight, k_weight, turns_of(rotation(heads), heads, S + K, 5)


def to(values, dtype):
    unit = ulp(values, dtype)
    return np.round(values / unit) * unit


def exact(y, context, first, q_weight, k_weight, turns, heads):
    """(least, largest) right q, k and v in float64: a norm's root may be `CLOSE` off, a rotation what float32 rounds."""
    HQ, HK, D, dims, traditional, eps = heads
    dtype, (K, S), at = y.dtype, (y.shape[1], context.shape[1]), first.item()
    own, shared = f64(y)[0, :, : (HQ + 2 * HK) * D].reshape(K, -1, D), f64(context)[0, :, at : at + 2 * HK * D].reshape(S, -1, D)
    c, s = (np.zeros((S + K, 1, D)) for _ in range(2))
    pairs = np.stack([np.arange(dims)[0::2], np.arange(dims)[1::2]]) if traditional else np.arange(dims).reshape(2, -1)
    partner, sign = np.arange(D), np.zeros(D)
    c[:], table = 1, f64(turns).reshape(S + K, dims)
    for i, j in pairs.T:
        partner[[i, j]], sign[[i, j]] = [j, i], [-1, 1]
        c[:, 0, i] = c[:, 0, j] = table[:, i]
        s[:, 0, i] = s[:, 0, j] = table[:, j]

    def turned(x, weight, rows):
        inverse = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + float(np.float32(eps)))
        ends = []
        for by in (-CLOSE, CLOSE):
            n = to(to(x * inverse * (1 + by), dtype) * f64(weight), dtype)
            ends.append(n * c[rows] + sign * n[..., partner] * s[rows])
        size = np.abs(n) * np.abs(c[rows]) + np.abs(n[..., partner] * s[rows])
        off = 2 * ulp(size, mx.float32) + np.abs(ends[0] - ends[1])
        low, high = np.minimum(*ends) - off, np.maximum(*ends) + off
        return to(low, dtype).swapaxes(0, 1), to(high, dtype).swapaxes(0, 1)

    q = turned(own[:, :HQ], q_weight, slice(S, None))
    k = turned(np.concatenate([shared[:, :HK], own[:, HQ : HQ + HK]]), k_weight, slice(None))
    v = np.concatenate([shared[:, HK:], own[:, HQ + HK :]]).swapaxes(0, 1)
    return q, k, (v, v)


def check(heads, dtype, K=3, S=2, rows=(1, 2)):
    """All rows against float64; the first `rows` of the block, and of the context, are the same bits without the others."""
    arrays = y, context, first, *norms, turns = made(heads, K, S, dtype)
    with emulator.emulated():
        got = block_heads_kernel(*arrays, heads)
        mx.eval(got)
        for a, (low, high) in zip(got, exact(*arrays, heads), strict=True):
            assert a.dtype == dtype and a.shape == (1, *low.shape)
            assert np.all((low <= f64(a)[0]) & (f64(a)[0] <= high))
        q, k, v = got
        for n in rows:
            fewer = block_heads_kernel(y[:, :n], context, first, *norms, turns[:, :, : S + n], heads)
            same = zip(fewer, (q[:, :, :n], k[:, :, : S + n], v[:, :, : S + n]), strict=True)
            assert all(mx.array_equal(a, b) for a, b in same), f"{n} rows of a block are other bits than among {K}"
        ends = mx.concatenate([turns[:, :, S - 1 : S], turns[:, :, -1:]], axis=2)
        last = block_heads_kernel(y[:, K - 1 :], context[:, S - 1 :], first, *norms, ends, heads)
        for a, whole in zip(last, got, strict=True):
            n = a.shape[2]
            at = [S - 1, S + K - 1] if n == 2 else [K - 1]
            assert mx.array_equal(a, whole[:, :, at]), "a row alone is other bits than among others"


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("form", FORMS)
def test_heads_are_normed_turned_and_laid_out(form, dtype):
    check(FORMS[form], TYPES[dtype])


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("K, S", [(1, 1), (1, 64), (8, 8), (16, 16), (16, 5), (7, 33)])
def test_numbers_of_rows(K, S):
    check(Heads(4, 1, 128, 128, False, EPS), mx.bfloat16, K, S, rows=(1, K))


@needs_compiler
@pytest.mark.parametrize("begin, scale", [(0, 1.0), (1000, 1.25)])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_what_the_layers_own_operations_give(form, begin, scale):
    """From any position, with a rotation that scales too (YaRN): by the rotation itself, and by the table that is read off it."""
    heads, plain = FORMS[form], rotation(FORMS[form])
    y, context, first, *norms, _ = made(heads)

    def rotate(x, offset):
        scaled = mx.concatenate([x[..., : heads.dims] * scale, x[..., heads.dims :]], axis=-1)
        return plain(scaled, begin + offset)

    turns = turns_of(rotate, heads, 5, 0)
    with emulator.emulated():
        ours = block_heads_kernel(y, context, first, *norms, turns, heads)
        mx.eval(ours)
    stock = block_heads_ops(y, context, first.item(), *norms, turns, heads, rotate)
    table = block_heads_ops(y, context, first, *norms, turns, heads)
    for mine, *others in zip(ours, stock, table, strict=True):
        for other in others:
            np.testing.assert_allclose(np.array(mine), np.array(other), rtol=0, atol=1e-5)


@needs_compiler
def test_a_row_that_is_not_finite_stays_alone():
    heads = FORMS["halves"]
    y, context, *rest = made(heads)
    with emulator.emulated():
        want = block_heads_kernel(y, context, *rest, heads)
        bad = mx.where(mx.arange(3)[:, None] == 1, mx.array(float("nan")), y)
        got = block_heads_kernel(bad, context, *rest, heads)
    for a, b in zip(got, want, strict=True):
        spoilt = b.shape[2] - 2
        keep = mx.array([i for i in range(b.shape[2]) if i != spoilt])
        assert mx.array_equal(a[:, :, keep], b[:, :, keep]) and bool(mx.all(mx.isnan(a[:, :, spoilt])))


GOOD = {"K": 3, "S": 2, "dtype": mx.float16, "weights": (mx.float16, mx.float16), "context": mx.float16, "heads": FORMS["halves"]}
CHANGES = {
    "no row": {"K": 0},
    "17 rows": {"K": 17},
    "no context": {"S": 0},
    "integers": {"dtype": mx.int32, "weights": (mx.int32, mx.int32), "context": mx.int32},
    "weights of another type": {"weights": (mx.float16, mx.float32)},
    "a context of another type": {"context": mx.float32},
    "heads of 12": {"heads": Heads(4, 2, 12, 12, False, EPS)},
    "nothing rotated": {"heads": Heads(4, 2, 64, 0, False, EPS)},
    "more rotated than there is": {"heads": Heads(4, 2, 64, 128, False, EPS)},
    "an odd part rotated": {"heads": Heads(4, 2, 64, 33, False, EPS)},
}


@pytest.fixture
def asked(monkeypatch):
    """What choices were asked for. The answer is no."""
    calls = []
    monkeypatch.setattr(autotune, "choose", lambda question, rows: calls.append(question.shape))
    monkeypatch.setattr(autotune, "_plans", {})
    return calls


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_eligible_goes_to_mlx(change, asked):
    assert block_heads_plan(**GOOD | CHANGES[change]) is None and not asked


def test_what_is_eligible_is_chosen_for_its_heads(asked):
    for K, S in ((1, 64), (16, 1)):
        assert block_heads_plan(**GOOD | {"K": K, "S": S}) is None
    block_heads_plan(**GOOD | {"heads": FORMS["neighbours"]})
    assert asked == [f"heads {mx.float16} HQ 4 HK 2 D 64 rotated 64"] * 2 + [
        f"heads {mx.float16} HQ 2 HK 2 D 40 rotated 40 traditional"
    ]


@needs_compiler
def test_a_trial_finds_the_text_right_and_a_wrong_one_wrong(monkeypatch):
    ways = (autotune.Candidate(module.KERNEL),)
    with emulator.emulated():
        for dtype in TYPES.values():
            tried = [module.trials(dtype, FORMS["halves"], ways)(m) for m in (1, 4)]
            assert [t.check() for t in tried] == [[None], [None]]
        right = module.turns_of
        monkeypatch.setattr(module, "turns_of", lambda rotation, heads, rows, offset: right(rotation, heads, rows, 1))
        assert "differs from stock MLX" in module.trials(mx.float32, FORMS["halves"], ways)(4).check()[0]


@needs_compiler
def test_a_plan_that_was_tried_launches_the_kernel(found_faster):
    found_faster("block_heads")
    arrays = made(FORMS["halves"], dtype=mx.float16)
    with emulator.emulated():
        launch = block_heads_plan(**GOOD)
        want = block_heads_kernel(*arrays, FORMS["halves"])
        assert all(mx.array_equal(a, b) for a, b in zip(launch(*arrays), want, strict=True))
        assert {result.kernel for result in autotune.results()} == {"block_heads"}
