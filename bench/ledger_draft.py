"""A drafter's pass on a Mac, ordinary and traced with our texts: what it launches.

    python bench/ledger_draft.py           launches of a pass of five layers, blocks of 8 and 16 rows, at 1k

Counted as `bench/ledger.py` counts, on small sizes of the published form of `qwen3-8b` (heads of 128, four to a key head), for
launches depend on sizes only where MLX splits a product. A trace is walked as the operations that it was put together from,
before MLX fuses what is elementwise. Each of our texts is one launch. Nothing here ran on a Mac.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ledger_models
import mlx.core as mx
import mlx.nn as nn
from ledger_metal import Gpu, Launch, Ledger
from ledger_walk import Walk, as_on_metal

from dflash_mlx.kernels import autotune, block_linear
from dflash_mlx.kernels.launch import Kernel
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.traced import buffers, compiled, compiled_pair, fusion

fusion_weights = fusion.weights_of
CONTEXT, GPU = 1024, Gpu(15, "s")
SMALL = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048}


def small(block: int) -> Drafter:
    """A target of six layers and a drafter of five, 4 bit, for blocks of so many rows."""
    of = copy.deepcopy(ledger_models.published()["qwen3-8b"])
    of.target.update(SMALL, num_hidden_layers=6)
    taps = {"mask_token_id": 9, "target_layer_ids": [0, 1, 2, 3, 4]}
    of.drafter.update(SMALL, num_target_layers=6, block_size=block, dflash_config=taps)
    return ledger_models.build(of)


def _chosen(question: autotune.Question, rows: int) -> Any:
    """Our texts wherever they may serve, but attention's, which is two launches."""
    return next((c for c in question.candidates if isinstance(c.kernel, Kernel) and c.kernel.name != "block_attention"), None)


def _untried(passes: compiled.CompiledPass, arrays: Any, filled: Any, cache: Any, place: Any, length: int, *_: Any) -> Any:
    """In the place of a trial: the pass with its fused linears."""
    spare = [buffers.copied(entry) for entry in cache]
    noted = passes._noted(arrays, spare, length)
    return functools.partial(buffers.traceable, passes._traced(noted), [*map(type, cache)])


def _weights(layer: nn.Module, rows: int) -> block_linear.Weights | None:
    """In memory of their own: an export takes no input of its for a constant."""
    found = fusion_weights(layer, rows)
    found = found and found.copied()
    mx.eval(found.arrays if found else [])
    return found


@contextlib.contextmanager
def with_our_texts() -> Iterator[None]:
    """Ours are chosen, and a trace is the function that would be compiled."""
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (autotune, "choose", _chosen),
            (autotune, "allowed", lambda kernel: True),
            (autotune, "_plans", {}),
            (fusion, "weights_of", _weights),
            (compiled.CompiledPass, "_tried", _untried),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield


def launches(block: int, traced: bool) -> list[Launch]:
    """Of a pass over a block of so many rows, after a round that left half of them and one pending."""
    drafter = small(block)
    with with_our_texts():
        walk = Walk(drafter, CONTEXT, kernels=traced)
        walk.widen(buffers.capacity_for(CONTEXT + 4 * block))
        if traced:
            walk.pair.target.accelerator = compiled_pair.CompiledPair(walk.pair.target, drafter, True)
            # Fused weights are copies of what the drafter has now, not of what stands for it in a walk.
            with as_on_metal(lambda *_: None, True), walk._stood_in(walk.tags.scalars()):
                walk._round(walk.inputs(block // 2 + 1), block, block // 2, block // 2 + 1, lambda _: None)
        round_ = walk.primitives(block, block // 2, block // 2 + 1)
        if traced:
            assert walk.pair.target.accelerator.passes[1].passes == 2
    return [launch for launch in Ledger(round_, GPU).launches if launch.stage == "draft"]


def main() -> None:
    for block in (8, 16):
        for traced in (False, True):
            found = launches(block, traced)
            kinds = ", ".join(f"{n} {kernel}" for kernel, n in Counter(launch.kernel for launch in found).most_common())
            waits = sum(launch.waits for launch in found)
            print(f"{block} rows, {'traced' if traced else 'ordinary'}: {len(found)} launches, {waits} of them wait: {kinds}")


if __name__ == "__main__":
    main()
