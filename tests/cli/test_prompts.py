"""Prompts of the command line as mlx-lm makes them: answers that have begun. What is said of text that means nothing."""

import json
from types import SimpleNamespace

import mlx.core as mx
import pytest
from kit import with_template

from dflash_mlx import load
from dflash_mlx.cli.inputs import encode_prompt
from dflash_mlx.errors import DFlashError

COUNTS = dict.fromkeys(("prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps", "peak_memory"), 1)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("prefill", ["Sure,", "Sure, ", " 1\n2"])
def test_an_answer_that_has_begun_is_written_as_mlx_lm_writes_it(tmp_path, prefill, system):
    _, tokenizer = load(with_template(tmp_path))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": "x y"}, {"role": "assistant", "content": prefill}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith(f"[assistant] {prefill}")
    assert encode_prompt(tokenizer, "x y", system, False, prefill=prefill) == tokenizer.encode(text, add_special_tokens=False)


def test_an_answer_can_begin_only_through_a_chat_template():
    with pytest.raises(DFlashError, match="--prefill-response needs a chat template"):
        encode_prompt(load("tiny")[1], "x", None, False, prefill="Sure")


def test_what_goes_on_behind_the_beginning_keeps_its_blank(tmp_path):
    """The text is what the ids add to the prompt's, as for any text that is continued."""
    from typer.testing import CliRunner

    from dflash_mlx.cli.app import app

    path = with_template(tmp_path)
    given = ["generate", "--model", path, "-p", "def f(x):", "--prefill-response", "def f(x):\n   ", "-m", "6", "--json"]
    done = CliRunner().invoke(app, given)
    answer, (_, tokenizer) = json.loads(done.stdout), load(path)
    assert done.exit_code == 0 and answer["text"] == tokenizer.decode(answer["token_ids"])


def test_text_of_a_model_that_computes_nan_is_said_to_mean_nothing(capsys):
    from dflash_mlx.cli.generate import run

    def responses(value):
        logprobs = mx.array([0.0, value])
        yield SimpleNamespace(text="x", token=1, finish_reason="length", logprobs=logprobs, stats=None, **COUNTS)

    for value, said in ((-mx.inf, False), (mx.nan, True)):
        run(responses(value), lambda response: None)
        assert ("this text means nothing" in capsys.readouterr().err) == said
