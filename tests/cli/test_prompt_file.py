"""generate --prompt-cache-file: what mlx_lm.cache_prompt wrote goes on as in mlx-lm's own generate, with a drafter too."""

import json
import sys

import mlx.core as mx
import mlx_lm
import pytest
from families import known_drafter
from kit import TINY, greedy_ids, grow, ids_of, rounds_of, run, tiny_qwen3, with_template
from mlx_lm import cache_prompt
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from typer.testing import CliRunner

from dflash_mlx.cli.app import app
from dflash_mlx.cli.prompt_file import encode_query, read_prompt_file
from dflash_mlx.errors import CacheError
from dflash_mlx.pair import adopt_cache
from dflash_mlx.prompt_cache import PairCache, trim_prompt_cache

LINE = [(i * 17 + 3) % 50 for i in range(30)]


def filled(model, ids):
    entries = mlx_lm_cache.make_prompt_cache(model)
    list(generate_step(mx.array(ids), model, max_tokens=0, prompt_cache=entries))
    return entries


@pytest.mark.parametrize("temp", [0, 1])
@pytest.mark.parametrize("block_size", [4, None])
def test_a_drafter_goes_on_behind_what_mlx_lm_read(block_size, temp):
    from mlx_lm.sample_utils import make_sampler

    model = tiny_qwen3()
    whole = LINE + greedy_ids(model, LINE, 40)
    drafter = known_drafter(model, whole[20:], layer_types=["full_attention"] * 2, sliding_window=None)
    options = {"sampler": make_sampler(temp), "seed": 5} if temp else {}
    plain = run(model, None, LINE[20:], 40, prompt_cache=filled(model, LINE[:20]), **options)
    cache = adopt_cache(model, drafter, filled(model, LINE[:20]))
    drafted = run(model, drafter, LINE[20:], 40, prompt_cache=cache, block_size=block_size, **options)
    assert ids_of(drafted) == ids_of(plain)
    if not temp:
        assert ids_of(plain) == whole[30:]
    if block_size and not temp:
        assert drafted[-1].stats.tau > 1.2
        assert PairCache.read(cache).drafter[0].offset == PairCache.read(cache).rows - 20 - PairCache.read(cache).pending
        # It goes on, and can be cut, also into what no drafter saw.
        more = run(model, drafter, [7, 8], 6, prompt_cache=cache, block_size=4)
        assert ids_of(more) == greedy_ids(model, [*whole, 7, 8], 6)
        ids = PairCache.read(cache).ids
        assert trim_prompt_cache(cache, len(ids) - 25) == len(ids) - 25
        again = run(model, drafter, LINE[25:], 40, prompt_cache=cache, block_size=4)
        assert ids_of(again) == whole[30:]
        assert trim_prompt_cache(cache, len(PairCache.read(cache).ids) - 12)
        assert ids_of(run(model, drafter, LINE[12:], 40, prompt_cache=cache, block_size=4)) == whole[30:]


def test_drafts_behind_it_are_those_of_a_drafter_that_saw_only_what_follows():
    """Its positions count from there: distances are what attention sees of them."""
    from dflash_mlx.models.drafter import Drafter
    from dflash_mlx.models.target import Target

    model = tiny_qwen3()
    drafter = known_drafter(model, LINE)
    drafter.__class__ = Drafter
    grow(drafter)
    cache = adopt_cache(model, drafter, filled(model, LINE[:20]))
    got = run(model, drafter, LINE[20:], 12, prompt_cache=cache, block_size=4)
    line, target, at = LINE + ids_of(got), Target(model, drafter.config.taps(len(model.layers))), len(LINE)
    for drafted, accepted, _ in rounds_of(got):
        if drafted:
            features = target(mx.array([line[:at]])).features[:, 20:]
            expected = Drafter.draft(drafter, mx.array([line[at]]), features, drafter.make_cache(), 0, 4)[0].tolist()
            assert drafted == expected, at
        at += accepted + 1


def test_the_command_says_what_mlx_lms_generate_says(tmp_path, monkeypatch, capsys):
    path, file = with_template(tmp_path), str(tmp_path / "book.safetensors")
    monkeypatch.setattr(sys, "argv", ["x", "--model", path, "--prompt-cache-file", file, "--prompt", "for i in range(10):"])
    cache_prompt.main()
    theirs, tokenizer = mlx_lm.load(path)
    theirs.set_dtype(mx.float32)
    begun = tokenizer.apply_chat_template(
        [{"role": "user", "content": "for i in range(10):"}], add_generation_prompt=False, continue_final_message=True
    )
    query = encode_query(tokenizer, " print(", False, {})
    assert tokenizer.decode(query) == " print(\n[assistant] "
    expected = greedy_ids(theirs, [*begun, *query], 12)
    for more in ([], ["--draft-model", str(TINY / "drafter"), "--block-size", "4"]):
        done = CliRunner().invoke(
            app, ["generate", "--model", path, "--prompt-cache-file", file, "-p", " print(", "-m", "12", "--json", *more]
        )
        assert json.loads(done.stdout)["token_ids"] == expected and f"holds {len(begun)} tokens" in done.stderr
        assert ("drafting starts from what follows" in done.stderr) is bool(more)


def test_what_is_no_prompt_cache_or_another_models_is_refused(tmp_path):
    model = tiny_qwen3()
    file = str(tmp_path / "c.safetensors")
    mlx_lm_cache.save_prompt_cache(file, filled(model, LINE[:5]), {"model": "org/M-4bit"})
    held = read_prompt_file(file)
    assert held.rows == 5 and held.check("other/m-8bit", None) == "other/m-8bit" and held.check(None, None) == "org/M-4bit"
    with pytest.raises(CacheError, match="was made with org/M-4bit, and --model is N"):
        held.check("N", None)
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    with pytest.raises(CacheError, match="is no prompt cache"):
        read_prompt_file(str(tmp_path / "bad.safetensors"))
    with pytest.raises(FileNotFoundError):
        read_prompt_file(str(tmp_path / "absent.safetensors"))
    drafter = known_drafter(model, LINE)
    with pytest.raises(CacheError, match="has 1 entries; qwen3 needs 3"):
        adopt_cache(model, drafter, held.entries[:1])
