"""Compare, count and commit on the device: one launch for what `dflash_mlx.accept.accept_match` does in several.

    draft       d1 d2 d3          lane i compares d[i] with t[i]; the smallest i that differs is `accepted`
    target      t1 t2 t3 t4
    committed   t1 t2 t3 -1       d1, d2 accepted, then the bonus t3, which is the next anchor; -1 beyond

Knows arrays only. The bytes are few; what is saved is launches between two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import autotune
from .launch import Kernel
from .trials import lazy

# Target rows at which it is tried: drafts and one.
_ROWS = (2, 4, 8, 16)

_SOURCE = """
    const int N = draft_shape[1];
    const int row = int(threadgroup_position_in_grid.x);
    const int lane = int(thread_index_in_simdgroup);

    int differs = N;
    for (int i = lane; i < N; i += 32) {
        if (differs == N && draft[row * N + i] != target[row * (N + 1) + i]) differs = i;
    }
    const int kept = simd_min(differs);

    for (int i = lane; i <= N; i += 32) {
        committed[row * (N + 1) + i] = i <= kept ? int(target[row * (N + 1) + i]) : -1;
    }
    if (lane == 0) {
        accepted[row] = kept;
        bonus[row] = target[row * (N + 1) + kept];
    }
"""

KERNEL = Kernel("accept", inputs=("draft", "target"), outputs=("accepted", "bonus", "committed"), source=_SOURCE)


def accept_ops(draft: mx.array, target: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The answer, in MLX's own operations. Shapes as in `accept`."""
    n = draft.shape[1]
    match = (draft == target[:, :n]).astype(mx.int32)
    accepted = mx.cumprod(match, axis=1).sum(axis=1).astype(mx.int32)
    bonus = mx.take_along_axis(target, accepted[:, None], axis=1)[:, 0]
    committed = mx.where(mx.arange(n + 1)[None] <= accepted[:, None], target, mx.array(-1, dtype=mx.int32))
    return accepted, bonus, committed


def accept_kernel(draft: mx.array, target: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Launch: one simd group a sequence. Shapes as in `accept`."""
    return prepare(*draft.shape)(draft, target)


def prepare(b: int, n: int) -> Callable[..., tuple[mx.array, mx.array, mx.array]]:
    """`accept_kernel` for drafts [b, n], as a function of (draft, target)."""
    launch = KERNEL.prepared(
        template=[],
        grid=(32 * b, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(b,), (b,), (b, n + 1)],
        output_dtypes=[mx.int32] * 3,
    )

    def run(draft: mx.array, target: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        accepted, bonus, committed = launch(inputs=[draft, target])
        return accepted, bonus, committed

    return run


def accept(draft: mx.array, target: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Keep the leading draft tokens that the target chose too, and lay out what is committed.

    Shapes:
      - draft: [B, N] int32; target: [B, N + 1] int32
    Returns:
      - accepted: [B] int32, 0..N; bonus: [B] int32, the next anchor
      - committed: [B, N + 1] int32: accepted drafts, bonus, then -1
    Raises:
      ValueError: if target is not one longer than draft.
    """
    if target.shape != (draft.shape[0], draft.shape[1] + 1):
        raise ValueError(f"target is {target.shape} for drafts {draft.shape}; it must have one choice more than there are drafts")
    # This may be the first call in this process that asks for kernels.
    launch = autotune.planned(_plan, *draft.shape, draft.dtype, target.dtype) if autotune.may_run() else None
    return launch(draft, target) if launch else accept_ops(draft, target)


def _plan(b: int, n: int, dtype: mx.Dtype, target_dtype: mx.Dtype) -> Callable[..., tuple[mx.array, mx.array, mx.array]] | None:
    """A function of (draft, target) of these shapes and types by a kernel; None: MLX's operations serve them."""
    eligible = (
        b * n > 0  # an empty array has no buffer
        and dtype == target_dtype == mx.int32  # ids are compared as they are
    )
    question = autotune.Question(f"drafts B {b}", (autotune.Candidate(KERNEL),), partial(trials, b), _ROWS, nbytes=8 * b)
    return prepare(b, n) if eligible and autotune.choose(question, n + 1) else None


def trials(b: int, ways: Sequence[autotune.Candidate]) -> Callable[[int], autotune.Trial]:
    """Comparisons with MLX on made-up ids that often agree, for a number of target rows."""

    def one(rows: int) -> autotune.Trial:
        keys, n = mx.random.split(mx.random.key(0), 2), rows - 1
        target = mx.random.randint(0, 100, (b, rows), dtype=mx.int32, key=keys[0])
        draft = mx.where(mx.random.uniform(shape=(b, n), key=keys[1]) < 0.8, target[:, :n], target[:, 1:])
        mx.eval(draft, target)
        launch = lazy(lambda: prepare(b, n))
        stock = lambda draft: accept_ops(draft, target)  # noqa: E731
        return autotune.Trial(draft, [lambda draft: launch(draft, target) for _ in ways], stock, autotune.same_ids)

    return one
