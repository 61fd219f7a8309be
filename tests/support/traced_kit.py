"""Compiled passes in tests: targets with them, caches, one verify pass, and how near two passes are."""

import mlx.core as mx
from kit import letters
from mlx_lm.models import cache as mlx_lm_cache

import dflash_mlx
from dflash_mlx.models.target import Target
from dflash_mlx.rollback import rollback_point
from dflash_mlx.traced import buffers, compiled
from dflash_mlx.traced.compiled_verify import CompiledVerify
from dflash_mlx.verify import verify_block

PROMPT = [5, 9, 33, 7, 12, 40, 2]
BLOCK = [20, 41, 3, 17, 8]


def blocks_of(model, layer_ids=(0, 2), always=True):
    target = Target(model, layer_ids)
    target.accelerator = CompiledVerify(target, compiled.model_parts(model), always)
    return target


def filled(model, target, prompt=PROMPT):
    cache = mlx_lm_cache.make_prompt_cache(model)
    target(mx.array(prompt if isinstance(prompt[0], list) else [prompt]), cache)
    mx.eval([buffers.held(entry) for entry in cache])
    return cache


def verify(target, cache, block=BLOCK, length=None):
    """One pass over `block`: what it gives, and the point that undoes it."""
    length = buffers.rows_of(cache)[0].offset if length is None else length
    point = rollback_point(cache, length)
    drafted = mx.array([block[1:]], dtype=mx.int32)
    return verify_block(target, mx.array(block[:1]), drafted, cache, point), point


def stream(model, drafter, prompt, n, tokenizer=None, **options):
    options.setdefault("block_size", drafter.config.block_size)
    return dflash_mlx.stream_generate(model, tokenizer or letters(), prompt, n, drafter, **options)


def near(a, b):
    # float32; attention over a longer buffer and fused operations round apart. 1e-5 of the largest value.
    return (mx.abs(a - b).max() <= 1e-5 * mx.abs(b).max()).item()
