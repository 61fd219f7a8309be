"""What a chunk of a prompt costs beside mlx-lm's: the projection of the taps, each drafter layer's keys and values, no more."""

import io
import re
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import mlx_lm
import pytest
from families import some_line
from kit import letters, tiny_drafter, tiny_target
from mlx.utils import tree_flatten

from dflash_mlx import stream_generate
from dflash_mlx.models.target import Target


@pytest.fixture
def chunks(monkeypatch):
    """The primitives of each evaluation before the first token, counted by kind; runs 65 tokens in chunks of 32."""
    found, evaluate = [], mx.eval

    def counted(*trees):
        arrays = [array for _, array in tree_flatten(trees) if isinstance(array, mx.array)]
        mx.export_to_dot(text := io.StringIO(), *arrays)
        if kinds := Counter(re.findall(r'label ?= ?"(\w+)', text.getvalue())):
            found.append(kinds)
        return evaluate(*trees)

    def run(stream, model, **options):
        found.clear()
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", counted)
            next(stream(model, letters(), some_line(65, 61), max_tokens=1, prefill_step_size=32, **options))
        return list(found)

    return run


def beyond(ours, theirs):
    return {kind: n - theirs[kind] for kind, n in ours.items() if n > theirs[kind]}


def test_a_chunk_is_evaluated_once_and_adds_the_drafters_keys_and_values(chunks):
    model = tiny_target()
    drafter = tiny_drafter(model)
    plain, drafted = chunks(mlx_lm.stream_generate, model), chunks(stream_generate, model, draft_model=drafter, block_size=4)
    layers = len(drafter.layers)
    assert len(drafted) == len(plain) == 2
    for theirs, ours in zip(plain, drafted, strict=True):
        more = beyond(ours, theirs)
        # One product for the taps, two a layer: neither a head nor a layer of the target is run besides.
        assert more["Matmul"] == 1 + 2 * layers and more["SliceUpdate"] == layers and "Softmax" not in more
        # One copy of the taps, and those of the drafter's windows and rotations.
        assert more["Concatenate"] <= 1 + 2 * layers


def test_what_a_chunk_runs_besides_is_seen(chunks, monkeypatch):
    model = tiny_target()
    drafter, call = tiny_drafter(model), Target.__call__
    plain = chunks(mlx_lm.stream_generate, model)

    def wasteful(self, *args, **kwargs):
        output = call(self, *args, **kwargs)
        return replace(output, features=output.features + 0 * self.head(output.hidden)[..., :1])

    monkeypatch.setattr(Target, "__call__", wasteful)
    drafted = chunks(stream_generate, model, draft_model=drafter, block_size=4)
    assert beyond(drafted[0], plain[0])["Matmul"] > 1 + 2 * len(drafter.layers)
