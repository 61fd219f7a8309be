"""What is reused of a prompt: after a restart too, by `--prompt-cache-dir`; told in usage and in `/health`."""

import json

import pytest
from kit import scripted
from serving_kit import ask, read, running

from dflash_mlx.errors import CacheError
from dflash_mlx.serving.prefix_cache import CacheOptions


def test_a_restarted_server_says_the_same_from_what_is_kept(chatty, tmp_path):
    model, tokenizer, drafter = chatty
    answers = []
    for _ in range(2):
        with running(model, tokenizer, drafter, block_size=8, prompt_cache_dir=str(tmp_path)) as served:
            answers.append(ask(served, max_tokens=12))
    first, again = answers
    assert again.choices == first.choices
    held = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert held[0] == 0 and held[1] == first.usage.prompt_tokens - 1


def test_a_directory_that_cannot_be_used_ends_the_start(chatty, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be used"), running(*chatty, prompt_cache_dir=str(tmp_path / "file")):
        pass


def test_health_tells_how_much_of_a_running_prompt_is_reused_and_how_far_it_is(chatty):
    text = "a b c d " * 40
    model = scripted([7] * 10_000, vocab=1536, wait_s=0.01)
    with running(model, chatty[1], caches=CacheOptions(prefill_step_size=8)) as served:
        assert served.post("/v1/completions", {"prompt": text, "max_tokens": 1})[0] == 200
        with served.send("/v1/completions", {"prompt": text + "e f g h " * 40, "max_tokens": 1}) as link:
            seen = {}
            while seen.get("done", 0) <= seen.get("reused", 0):
                seen = json.loads(served.get("/health")[1]).get("prompt", {})
            assert 0 < seen["reused"] < seen["done"] <= seen["tokens"] and read(link)[0] == 200
        served.wait_idle()
        assert "prompt" not in json.loads(served.get("/health")[1])
