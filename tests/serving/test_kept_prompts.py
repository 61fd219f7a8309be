"""`serve --prompt-cache-dir`: a restarted server answers as before, from what the last one kept, and says so in usage."""

import pytest
from serving_kit import ask, running

from dflash_mlx.errors import CacheError


def test_a_restarted_server_says_the_same_from_what_is_kept(chatty, tmp_path):
    model, tokenizer, drafter = chatty
    answers = []
    for _ in range(2):
        with running(model, tokenizer, drafter, prompt_cache_dir=str(tmp_path)) as served:
            answers.append(ask(served, max_tokens=12))
    first, again = answers
    assert again.choices == first.choices
    held = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert held[0] == 0 and held[1] == first.usage.prompt_tokens - 1


def test_a_directory_that_cannot_be_used_ends_the_start(chatty, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be used"), running(*chatty, prompt_cache_dir=str(tmp_path / "file")):
        pass
