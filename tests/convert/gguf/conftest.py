"""A sound file for the tests that damage it."""

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import FAMILIES, random_weights, write_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    write_model(path, "llama", random_weights(FAMILIES["llama"]), Kind.Q4_1)
    return path.read_bytes()
