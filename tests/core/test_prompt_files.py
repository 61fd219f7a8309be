"""Prefixes in a directory: a new process goes on from them as the old one would, and nothing there is trusted unread."""

import logging
import os
import resource
import signal
import subprocess
import sys
import time

import mlx.core as mx
import pytest
from families import family, known_drafter, some_line
from kit import ids_of, letters, rounds_of, run, tiny_qwen3, tiny_target
from mlx_lm.models.cache import KVCache

from dflash_mlx import make_prompt_cache, prompt_files
from dflash_mlx.cli.prompt_file import read_prompt_file
from dflash_mlx.errors import CacheError
from dflash_mlx.prompt_files import PrefixFiles, models_key
from dflash_mlx.serving.prefix_cache import CacheOptions, PrefixCache, stream_from_prefix

# One of each kind of entry, and mixed lists; what the caches are told.
KINDS = {
    "plain": ("llama", {}),
    "window": ("gemma3", {}),
    "recurrence": ("qwen3_next", {}),
    "chunks": ("llama4", {}),
    "list": ("deepseek_v32", {}),
    "list of arrays and windows": ("baichuan_m1", {}),
    "rotating with kept rows": (tiny_qwen3, {"max_kv_size": 24}),
    "quantized": (lambda: tiny_target(seed=3, head_dim=32), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 40}),
}


def opened(directory, model, drafter=None, limit=1 << 30, caches=None):
    """A store as a process that starts now has it."""
    store = PrefixCache(6)
    store.keep_in(PrefixFiles(directory, limit), model, drafter, "served", caches or CacheOptions())
    return store


def write_all(store):
    while store.write_next(quiet_s=0):
        pass


def turn(store, model, drafter, prompt, n=8, **options):
    block = {"block_size": drafter.config.block_size} if drafter is not None else {}
    opened = stream_from_prefix(model, letters(), prompt, store, "pair", draft_model=drafter, max_tokens=n, **block, **options)
    return opened.held, list(opened.responses)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def filled(directory, model, line, n=4):
    """A directory with one prefix in it, which its store has read and answered."""
    store = opened(directory, model)
    _, responses = turn(store, model, None, line, n)
    write_all(store)
    assert len(names(directory)) == 1
    return [*line, *ids_of(responses)]


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(6)
def test_a_restarted_process_goes_on_as_the_old_one_would(kind, with_drafter, tmp_path):
    name, held_as = KINDS[kind]
    model = family(name) if isinstance(name, str) else name()
    caches, line = CacheOptions(**held_as), [i % 50 for i in some_line(60)]
    drafter = known_drafter(model, line, "noisy") if with_drafter else None
    old = opened(tmp_path, model, drafter, caches=caches)
    asked = {"caches": caches, "shared": [(40, "user")]}
    _, first = turn(old, model, drafter, line, **asked)
    write_all(old)
    new = opened(tmp_path, model, drafter, caches=caches)
    # What follows the answer, and a prompt that leaves the first one before its end.
    for prompt in ([*line, *ids_of(first), 3, 4, 5], [*line[:45], 6, 7]):
        (held, want), (held_again, got) = (turn(store, model, drafter, prompt, **asked) for store in (old, new))
        # Chunks that are gone are read again.
        assert held_again == held and (held >= 40 or kind == "chunks" and prompt[45:47] == [6, 7])
        assert ids_of(got) == ids_of(want)
        assert not with_drafter or rounds_of(got) == rounds_of(want)


def test_generate_reads_what_a_server_kept(tmp_path):
    model, line = tiny_target(), some_line(20, 61)
    filled(tmp_path, model, line)
    (file,) = tmp_path.iterdir()
    held = read_prompt_file(str(file))
    assert held.model == "served" and held.rows == 24 and file.stat().st_mode & 0o777 == 0o600
    assert type(held.entries[0]) is KVCache


def test_a_conversation_keeps_one_file_and_the_oldest_go_beyond_the_limit(tmp_path):
    model, line = tiny_target(), some_line(20, 61)
    for _ in range(3):
        line = [*filled(tmp_path, model, line), 5]
    (size,) = (path.stat().st_size for path in tmp_path.iterdir())
    store, first = opened(tmp_path, model, limit=int(2.5 * size)), names(tmp_path)
    for start in (7, 9, 11):
        turn(store, model, None, [start, *line])
        write_all(store)
        assert len(names(tmp_path)) <= 2
    assert first[0] not in names(tmp_path)
    # One that does not fit at all is not written again and again.
    small = opened(tmp_path, model, limit=100)
    turn(small, model, None, [13, *line])
    assert small.write_next(quiet_s=0) and not small.write_next(quiet_s=0)


def test_nothing_is_written_before_the_server_is_at_rest(tmp_path):
    model = tiny_target()
    store = opened(tmp_path, model)
    turn(store, model, None, some_line(20, 61))
    assert not store.write_next() and not names(tmp_path)
    store._changed_at -= 31
    assert store.write_next() and len(names(tmp_path)) == 1 and not store.write_next()


def lora(model, scale):
    from mlx_lm.tuner.lora import LoRALinear

    layer = model.layers[0].self_attn
    layer.q_proj = LoRALinear.from_base(layer.q_proj, r=2, scale=scale)
    layer.q_proj.lora_b = mx.ones_like(layer.q_proj.lora_b)
    layer.q_proj.lora_a = mx.ones_like(layer.q_proj.lora_a)
    return model


def half(model):
    model.set_dtype(mx.float16)
    return model


def nudged(model):
    norm = model.model.norm
    norm.weight = norm.weight + mx.array([1e-3, *[0.0] * (norm.weight.size - 1)])
    return model


def other_base(model):
    model.args.rope_theta += 1
    return model


@pytest.mark.parametrize("on_host", [True, False])
def test_the_key_tells_weights_types_settings_and_drafters_apart(on_host, monkeypatch):
    # As on a GPU, where arrays are summed up; compiling takes a CPU seconds.
    monkeypatch.setattr(prompt_files, "_on_host", lambda: on_host)
    monkeypatch.setattr(mx, "compile", lambda function, shapeless: function)
    models = [tiny_target(), tiny_target(seed=5), half(tiny_target()), nudged(tiny_target()), other_base(tiny_target())]
    keys = [models_key([model]) for model in [*models, lora(tiny_target(), 2.0), lora(tiny_target(), 3.0)]]
    model = tiny_target()
    keys += [models_key([model, known_drafter(model, some_line(9, 61))]), models_key([model], CacheOptions(kv_bits=8))]
    assert len({*keys}) == len(keys) and keys[0] == models_key([tiny_target()])


def test_sums_tell_bytes_apart_by_value_place_and_length(monkeypatch):
    data = mx.random.randint(0, 256, (1003,)).astype(mx.uint8)
    others = [data[:-1], mx.concatenate([data[4:8], data[:4], data[8:]]), mx.concatenate([data[1:], data[:1]])]
    for i in range(0, 1003, 59):
        others.append(mx.where(mx.arange(1003) == i, data ^ (1 << i % 8), data))
    # Two words that change by as much in opposite ways.
    words = data[:1000].view(mx.uint32)
    others += [words.view(mx.uint8), mx.concatenate([words[:1] + 1, words[1:2] - 1, words[2:]]).view(mx.uint8)]
    found = [tuple(prompt_files.array_sums(one).tolist()) for one in (data, *others)]
    assert len({*found}) == len(found)
    monkeypatch.setattr(prompt_files, "_WORDS", 100)
    assert tuple(prompt_files.array_sums(data).tolist()) == found[0]


def test_another_models_files_are_not_used_and_stay(tmp_path):
    line = some_line(20, 61)
    filled(tmp_path, tiny_target(), line)
    kept, other = names(tmp_path), tiny_target(seed=5)
    store = opened(tmp_path, other)
    held, responses = turn(store, other, None, line)
    assert held == 0 and ids_of(responses) == ids_of(run(other, None, line, 8)) and names(tmp_path) == kept


def cut_short(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def zero_the_end(path):
    # As a power cut may leave it.
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def empty(path):
    path.write_bytes(b"")


def no_header(path):
    path.write_bytes(b"\xff" * 400)


def of_another_key(path):
    path.rename(path.with_name(f"{'0' * 16}{path.name[16:]}"))


DAMAGES = [cut_short, flip_a_bit, zero_the_end, empty, no_header]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_file_costs_a_line_and_no_answer(damage, tmp_path, caplog):
    model, line = tiny_target(), some_line(20, 61)
    line = [*filled(tmp_path, model, line), 5]
    (path,) = tmp_path.iterdir()
    damage(path)
    store = opened(tmp_path, model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            held, responses = turn(store, model, None, line)
            assert ids_of(responses) == ids_of(run(model, None, line, 8))
    assert [record.getMessage().startswith(f"{path} is not used: ") for record in caplog.records] == [True]
    write_all(store)
    assert turn(opened(tmp_path, model), model, None, [*line, 3])[0] >= 24


def test_files_that_are_not_ours_are_neither_read_nor_taken_away(tmp_path, caplog):
    model, line = tiny_target(), some_line(20, 61)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 5000)
    os.mkdir(tmp_path / f"{'a' * 16}-{'b' * 16}-{'c' * 16}.safetensors")
    store = opened(tmp_path, model, limit=300_000)
    before = names(tmp_path)
    for start in range(4):
        turn(store, model, None, [start, *line])
        write_all(store)
    assert set(before) < set(names(tmp_path)) and not caplog.records
    filled(other := tmp_path / "other", model, line)
    (path,) = other.iterdir()
    key = PrefixFiles(other, 1 << 30)
    key.belong_to("served", "0" * 16)
    of_another_key(path)
    assert key.prefixes() == [] and "another model" in caplog.text


def test_two_processes_use_one_directory_by_turns(tmp_path):
    model, line = tiny_target(), some_line(20, 61)
    one, two = opened(tmp_path, model), opened(tmp_path, model)
    _, first = turn(one, model, None, line)
    write_all(one)
    # Written after the other had started.
    assert turn(two, model, None, [*line, *ids_of(first), 3])[0] == 28
    other = [9, *line]
    turn(two, model, None, other)
    write_all(two)
    found = two.files.find([*other, 1], 0)
    for path in tmp_path.iterdir():
        path.unlink()
    # Taken away between the listing and the reading.
    assert one.files.load(found) is None and turn(one, model, None, [*other, 1])[0] == 0


def test_a_full_disk_costs_one_line(tmp_path, caplog, monkeypatch):
    model = tiny_target()
    store = opened(tmp_path, model)
    for start in range(3):
        turn(store, model, None, [start, *some_line(20, 61)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        write_all(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, was)
    assert len(caplog.records) == 1 and "is not kept" in caplog.text and names(tmp_path) == []
    # Answers go on, and what comes later is written again.
    line = some_line(25, 61)[::-1]
    assert ids_of(turn(store, model, None, line)[1]) == ids_of(run(model, None, line, 8))
    write_all(store)
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize("what", ["a file", "no place"])
def test_a_directory_that_cannot_be_used_is_refused_at_once(what, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot be used: .*Name one that can be written"):
        PrefixFiles(tmp_path / "file" / ("x" if what == "no place" else "."), 1000)


KILLED = """
import os, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from test_prompt_files import opened, turn, tiny_target, some_line
from mlx_lm.models import cache as mlx_lm_cache
model = tiny_target()
store = opened(Path({folder!r}), model)
turn(store, model, None, [1, *some_line(20, 61)])
save = mlx_lm_cache.save_prompt_cache

def half(name, *args):
    save(name, *args)
    os.truncate(name, 3000)
    print("writing", flush=True)
    time.sleep(60)

mlx_lm_cache.save_prompt_cache = half
store.write_next(quiet_s=0)
"""


@pytest.mark.full
def test_kill_9_in_the_middle_of_a_write_leaves_a_usable_directory(tmp_path, caplog):
    model, line = tiny_target(), some_line(20, 61)
    line = [*filled(tmp_path, model, line), 5]
    script = KILLED.format(path=[os.path.dirname(__file__), *sys.path], folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(left) == 1
    assert turn(opened(tmp_path, model), model, None, line)[0] == 24 and not caplog.records
    # Another process may still be writing it; after ten minutes nobody is.
    assert left[0].exists()
    os.utime(left[0], (time.time() - 700,) * 2)
    opened(tmp_path, model)
    assert not left[0].exists()


def test_a_kind_that_the_format_does_not_hold_is_named_once(tmp_path, caplog):
    class Own(KVCache):
        pass

    model = tiny_target()
    store = opened(tmp_path, model)
    for start in range(2):
        cache = make_prompt_cache(model)
        cache[0].__class__ = Own
        store.insert_cache("pair", [start, 1, 2], cache)
    write_all(store)
    assert len(caplog.records) == 1 and "does not hold Own" in caplog.text and names(tmp_path) == []
