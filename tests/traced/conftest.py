"""Fixtures of the tests of traced passes."""

import pytest

from dflash_mlx import traced


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setenv(traced.VARIABLE, "on")
