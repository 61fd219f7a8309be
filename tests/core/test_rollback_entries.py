"""The flat list that carries a pair's caches. Rolling back is in test_rollback.py, turns and files in test_prompt_cache.py."""

import mlx.core as mx
import pytest
from kit import tiny_drafter, tiny_target
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache

from dflash_mlx import make_prompt_cache, trim_prompt_cache
from dflash_mlx.errors import CacheError
from dflash_mlx.prompt_cache import PairCache, is_pair_cache


def rows(entry, n):
    entry.update_and_fetch(mx.zeros((1, 2, n, 8)), mx.zeros((1, 2, n, 8)))


@pytest.fixture
def entries():
    """A target of four layers at 9 rows; a drafter of a sliding and a full layer at 7, two rows pending, ten ids."""
    entries = PairCache.make([KVCache() for _ in range(4)], [RotatingKVCache(max_size=10), KVCache()])
    for entry, n in zip(entries[:-1], [9] * 4 + [7] * 2, strict=True):
        rows(entry, n)
    pair = PairCache(entries, 4, list(range(30, 40)), 9, mx.arange(2 * 48, dtype=mx.float32).reshape(1, 2, 48))
    pair.write()
    return entries


def test_what_was_written_is_read(entries):
    pair = PairCache.read(entries)
    assert (pair.n_target, pair.ids, pair.rows, pair.pending) == (4, list(range(30, 40)), 9, 2)
    assert pair.target == entries[:4] and pair.drafter == entries[4:6]
    assert pair.features.shape == (1, 2, 48)


def test_a_list_goes_through_mlx_lms_file_and_back(entries, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, entries)
    again = PairCache.read(load_prompt_cache(file))
    pair = PairCache.read(entries)
    assert (again.n_target, again.ids, again.rows) == (pair.n_target, pair.ids, pair.rows)
    assert mx.array_equal(again.features, pair.features).item()
    assert [type(e) for e in again.entries] == [type(e) for e in entries]
    assert [e.offset for e in again.entries[:-1]] == [9] * 4 + [7] * 2


def test_an_empty_list_has_no_ids_and_nothing_pending():
    model = tiny_target()
    pair = PairCache.read(make_prompt_cache(model, tiny_drafter(model)))
    assert (pair.ids, pair.rows, pair.features, pair.pending) == ([], 0, None, 0)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [KVCache()],
        [KVCache(), ArraysCache(2)],
        [KVCache(), ArraysCache(3)],
        [ArraysCache(3) for _ in range(4)],
    ],
    ids=["empty", "plain", "two arrays", "three empty arrays", "recurrent layers"],
)
def test_other_lists_are_not_taken_for_a_pairs(entries):
    assert not is_pair_cache(entries)
    with pytest.raises(CacheError, match="the prompt cache has no drafter's part; a target with a DFlash drafter needs one"):
        PairCache.read(entries)


def test_recurrent_states_of_three_arrays_are_not_taken_for_a_pairs():
    state = ArraysCache(3)
    for i in range(3):
        state[i] = mx.zeros((1, 4), dtype=mx.int32)
    assert not is_pair_cache([KVCache(), state])


@pytest.mark.parametrize(
    "cut,ids,target,drafter,pending",
    [
        (0, 10, 9, 7, 2),
        (1, 9, 9, 7, 2),
        (2, 8, 8, 7, 1),
        (3, 7, 7, 7, 0),
        (5, 5, 5, 5, 0),
        (10, 0, 0, 0, 0),
        (99, 0, 0, 0, 0),
    ],
)
def test_trimming_cuts_ids_rows_and_pending_features_to_the_same_token(entries, cut, ids, target, drafter, pending):
    before = PairCache.read(entries).features
    assert trim_prompt_cache(entries, cut) == 10 - ids
    pair = PairCache.read(entries)
    assert pair.ids == list(range(30, 30 + ids)) and pair.rows == target
    assert [e.offset for e in entries[:-1]] == [target] * 4 + [drafter] * 2
    assert pair.pending == pending
    # The oldest pending rows stay: they follow what the drafter holds.
    assert not pending or mx.array_equal(pair.features, before[:, :pending]).item()
