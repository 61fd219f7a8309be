"""Pairs and servers that the tests of serving/ share."""

import json

import mlx.core as mx
import pytest
from kit import with_template
from mlx_lm.tokenizer_utils import load as load_tokenizer
from serving_kit import THINKS, TOOLS, running

from dflash_mlx import load, load_drafter


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    path = with_template(tmp_path_factory.mktemp("served"), TOOLS)
    model, tokenizer = load(path, dtype=mx.float32)
    return model, tokenizer, load_drafter("tiny", model)


@pytest.fixture(scope="module")
def served(chatty):
    # Every round drafts, so that what is counted does not depend on what pays on this machine.
    with running(*chatty, block_size=8) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A tokenizer whose vocabulary has two marks as tokens of their own, ids 1536 and 1537."""
    path = tmp_path_factory.mktemp("thinker")
    with_template(path, THINKS)
    config = json.loads((path / "tokenizer.json").read_text())
    for i, mark in enumerate(("<think>", "</think>")):
        config["added_tokens"].append({**config["added_tokens"][0], "id": 1536 + i, "content": mark})
    (path / "tokenizer.json").write_text(json.dumps(config))
    return load_tokenizer(path)
