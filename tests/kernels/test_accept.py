"""accept's text against the loop's own rule, in the emulator."""

import emulator
import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.accept import accept_match
from dflash_mlx.kernels.accept import accept, accept_kernel, accept_ops

pytestmark = pytest.mark.emulator


def by_hand(draft, target):
    """Token by token in Python."""
    kept, last, out = [], [], []
    for d, t in zip(draft.tolist(), target.tolist(), strict=True):
        a = 0
        while a < len(d) and d[a] == t[a]:
            a += 1
        kept.append(a), last.append(t[a]), out.append(d[:a] + [t[a]] + [-1] * (len(d) - a))
    return kept, last, out


@pytest.mark.parametrize("n", [1, 2, 7, 15, 31, 32, 33, 64, 65])
def test_every_place_of_the_first_difference(n):
    places = range(n + 1) if n < 32 else [0, 1, 30, 31, 32, 33, n - 1, n]
    target = mx.array(np.random.default_rng(n).integers(0, 9, (len(places), n + 1)), dtype=mx.int32)
    draft = np.array(target[:, :n])
    for row, place in enumerate(places):
        if place < n:
            draft[row, place] += 1
            draft[row, place + 1 :: 3] += 1  # later ones may agree again or not, in the same lane or another
    draft = mx.array(draft, dtype=mx.int32)
    with emulator.emulated():
        got = [a.tolist() for a in accept_kernel(draft, target)]
    assert got == list(by_hand(draft, target)) == [a.tolist() for a in accept_ops(draft, target)]
    assert got[:2] == [a.tolist() for a in accept_match(draft, target)]


def test_strided_inputs():
    wide = mx.array(np.random.default_rng(0).integers(0, 2, (6, 40)), dtype=mx.int32)
    draft, target = wide[::2, :9], wide[::2, 10:20]
    with emulator.emulated():
        assert [a.tolist() for a in accept_kernel(draft, target)] == list(by_hand(draft, target))


def test_the_dispatcher_takes_mlx_without_a_gpu_and_checks_shapes(monkeypatch):
    monkeypatch.delenv("DFLASH_MLX_KERNELS", raising=False)
    draft, target = mx.array([[5, 6]], dtype=mx.int32), mx.array([[5, 7, 8]], dtype=mx.int32)
    assert [a.tolist() for a in accept(draft, target)] == [[1], [7], [[5, 7, -1]]]
    empty = accept(draft[:, :0], target[:, :1])
    assert [a.tolist() for a in empty] == [[0], [5], [[5]]]
    with pytest.raises(ValueError, match="it must have one choice more than there are drafts"):
        accept(draft, target[:, :2])
