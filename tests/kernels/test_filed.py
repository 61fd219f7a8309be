"""Texts of CUDA kernels in files of the cache directory: right whatever stands there, and the text itself where none can."""

import os
from pathlib import Path

import pytest

from dflash_mlx.kernels.launch import _filed

TEXT = "int a = 1;\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def included(line):
    """The file that a line includes."""
    assert line.startswith('#include "/') and line.endswith('"\n')
    return Path(line[len('#include "') : -2])


def test_a_text_is_in_a_file_of_its_own(cache):
    file = included(_filed(TEXT))
    assert file.parent == cache / "kernels" and file.read_text() == TEXT
    assert included(_filed(TEXT)) == file != included(_filed(TEXT + "\n"))
    assert len(list(file.parent.iterdir())) == 2


@pytest.mark.parametrize("found", [b"int", b"", b"\xff\xfe", TEXT.replace("1", "2").encode()])
def test_a_file_that_holds_anything_else_is_written_again(cache, found):
    file = included(_filed(TEXT))
    file.write_bytes(found)
    assert included(_filed(TEXT)) == file and file.read_text() == TEXT


def test_where_no_file_can_be_the_text_is_handed_over(cache):
    cache.write_text("not a directory")
    assert _filed(TEXT) == TEXT
    cache.unlink()
    file = included(_filed(TEXT))
    file.unlink()
    file.mkdir()
    assert _filed(TEXT) == TEXT


@pytest.mark.parametrize(
    "name, can",
    [("a b'c", True), ("ü☃", True), ('a"b', False), ("a\\b", False), ("a\nb", False), ("a\rb", False), ("\udcff", False)],
)
def test_names_that_a_line_cannot_hold_are_not_put_into_it(tmp_path, monkeypatch, name, can):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / name))
    try:
        os.mkdir(tmp_path / name)
    except (OSError, ValueError):
        pytest.skip("no file system for this name")
    line = _filed(TEXT)
    line.encode()
    assert included(line).read_text() == TEXT if can else line == TEXT


def test_a_relative_directory_is_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_MLX_CACHE", "here")
    line = _filed(TEXT)
    monkeypatch.chdir("/")
    assert included(line).read_text() == TEXT
