"""Session files: what is no session is refused by name and left alone."""

import json
import os
import re
import stat
from types import SimpleNamespace

import pytest

from dflash_mlx.errors import DFlashError
from dflash_mlx.serving.editor import LineEditor, Pastes
from dflash_mlx.serving.sessions import history_file, read_session, session_path, write_session

SESSION = {"version": 2, "model": "m", "draft_model": None, "system": None, "settings": {}, "messages": []}


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    """The folder of kept sessions, empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "dflash-mlx" / "sessions"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it does not begin with"),
        ({"version": 3}, "it does not begin with"),
        ({"model": 3}, "'model' is absent or of another type"),
        ({"system": []}, "'system' is absent or of another type"),
        ({"messages": {}}, "'messages' is absent or of another type"),
        ({"colour": "red"}, "'colour' is unknown"),
        ({"settings": {"heat": 1}}, "'heat' is unknown"),
        ({"settings": {"temp": "hot"}}, "temp is 'hot'; it must be a number from 0"),
        ({"settings": {"temp": True}}, "temp is True"),
        ({"settings": {"top_k": 2.5}}, "top_k is 2.5; it must be a whole number from 0"),
        ({"settings": {"max_tokens": None}}, "max_tokens is None; it must be a whole number of at least 1"),
        ({"settings": {"seed": -1}}, "seed is -1; it must be a whole number from 0 to 4294967295"),
        ({"settings": {"thinking": "yes"}}, "thinking is 'yes'; it must be on, off or default"),
        ({"messages": ["hi"]}, "message 0 is neither a user's nor an assistant's"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "message 1 is neither"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 0 is neither"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "message 0 is neither"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "message 0 is neither"),
        ({"messages": [{"role": "user", "content": "x", "ids": [1, -1]}]}, "message 0 has ids that are no tokens"),
        ({"messages": [{"role": "user", "content": "x", "ids": [True]}]}, "message 0 has ids that are no tokens"),
        ({"messages": [{"role": "user", "content": "x", "ids": "1"}]}, "message 0 has ids that are no tokens"),
    ],
)
def test_a_file_that_is_no_session_is_refused_by_name_and_left_alone(sessions, content, message):
    file = sessions / "x.json"
    text = content if isinstance(content, str) else json.dumps({**SESSION, **content})
    file.write_text(text)
    with pytest.raises(DFlashError, match=re.escape("x.json is not a session of this version: ") + ".*" + re.escape(message)):
        read_session("x")
    assert file.read_text() == text
    with pytest.raises(DFlashError, match="there is no kept session .*absent.json"):
        read_session("absent")


@pytest.mark.parametrize("name", ["../x", "/nowhere/x", "a/b", "..", ".hidden", "", ".json", "a\\b", "C:x", "a\nb", "a" * 201])
def test_a_session_stays_in_the_folder_of_sessions(sessions, name):
    for use in (session_path, read_session, lambda name: write_session(name, SESSION)):
        with pytest.raises(DFlashError, match="cannot be the name of a session"):
            use(name)
    assert not [*sessions.parent.parent.rglob("*.json")]


def test_a_session_may_be_named_with_its_ending(sessions):
    assert write_session("work.json", SESSION) == write_session("work", SESSION) == sessions / "work.json"
    assert session_path("für später 2").parent == sessions


def test_a_session_of_version_1_keeps_its_meaning_of_top_p_0(sessions):
    file = sessions / "x.json"
    file.write_text(json.dumps({**SESSION, "version": 1, "settings": {"temp": 0.7, "top_p": 0.0}}))
    assert read_session("x")["settings"] == {"temp": 0.7}
    file.write_text(json.dumps({**SESSION, "settings": {"temp": 0.7, "top_p": 0.0}}))
    assert read_session("x")["settings"] == {"temp": 0.7, "top_p": 0.0}


def test_sessions_and_the_history_of_lines_are_readable_by_their_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        (tmp_path / "dflash-mlx").mkdir()
        (tmp_path / "dflash-mlx" / "history").write_text("left by an earlier version\n")
        files = [write_session("one", SESSION), history_file()]
        files.append(history_file())
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
    assert files[1].read_text() == "left by an earlier version\n"


@pytest.mark.parametrize("kind", ["a pipe", "no home", "a full disk"])
def test_a_history_that_cannot_be_kept_costs_the_chat_nothing(tmp_path, monkeypatch, kind):
    pytest.importorskip("prompt_toolkit")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "dflash-mlx").mkdir()
    if kind == "a pipe":
        os.mkfifo(history_file().parent / "pipe")
        os.replace(tmp_path / "dflash-mlx" / "pipe", tmp_path / "dflash-mlx" / "history")
    elif kind == "no home":
        monkeypatch.setenv("XDG_STATE_HOME", "~nobody-of-this-name")
    history = LineEditor._history(SimpleNamespace(pastes=Pastes()))
    if kind == "a full disk" and os.path.exists("/dev/full"):
        history.filename = "/dev/full"
    history.append_string("a line")
    assert "a line" in history.get_strings()
    if kind == "no home":
        with pytest.raises(DFlashError, match="~nobody-of-this-name has no home directory.*Set XDG_STATE_HOME"):
            history_file()
