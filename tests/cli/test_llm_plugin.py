"""`llm -m dflash/tiny`: the plugin answers as the package does, goes on with a conversation, and takes the sampling options."""

import json
import tomllib
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

llm = pytest.importorskip("llm")

from dflash_mlx import generate, load  # noqa: E402
from dflash_mlx.sampling_settings import SamplingSettings  # noqa: E402


@pytest.fixture(scope="module")
def model():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    plugin, found = import_module(project["project"]["entry-points"]["llm"]["dflash"]), {}
    plugin.register_models(lambda one: found.setdefault(one.model_id, one))
    assert {"dflash/smollm2", "dflash/tiny"} <= {*found}
    return found["dflash/tiny"]


def test_an_answer_and_the_turn_after_it_are_the_packages_own(model):
    target, tokenizer = load("tiny")
    talk = model.conversation()
    first = talk.prompt("def test_", max_tokens=12)
    pieces = [*first]
    assert len(pieces) > 1 and first.text() == generate(target, tokenizer, "def test_", max_tokens=12)
    assert first.usage().output == 12
    second = talk.prompt("\nclass ", max_tokens=6).text()
    ids = [*tokenizer.encode("def test_" + first.text()), *tokenizer.encode("\nclass ", add_special_tokens=False)]
    assert second == generate(target, tokenizer, ids, max_tokens=6)


def test_an_answer_is_held_to_a_schema_or_to_any_object(model):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert json.loads(model.prompt("x = ", schema=schema, max_tokens=60).text()).keys() == {"a"}
    assert model.prompt("x = ", json_object=True, max_tokens=3).text().startswith("{")
    with pytest.raises(Exception, match="uniqueItems"):
        model.prompt("x", schema={"type": "array", "uniqueItems": True}).text()
    # The next answer is free again.
    assert not model.prompt("def test_", max_tokens=3).text().startswith("{")


def test_every_sampling_setting_is_an_option_and_is_checked(model):
    names = {one.name for one in fields(SamplingSettings)}
    assert names <= {*model.Options.model_fields}
    texts = {model.prompt("x = ", temp=1.0, seed=seed, max_tokens=12).text() for seed in (1, 1, 2, 3)}
    assert len(texts) > 1
    with pytest.raises(Exception, match="top_p"):
        model.prompt("x", temp=1.0, top_p=7.0).text()
    with pytest.raises(Exception, match="no place for a system prompt"):
        model.prompt("x", system="be brief").text()
