"""The files of the chat's sessions and history, which only the user can read, and what a session file may hold."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import DFlashError
from ..machine import state_directory, write_atomically
from .conversation import VERSION, Settings


def session_path(name: str) -> Path:
    """A session's file: always one in the folder of kept sessions. A name may be written with its .json.

    Raises:
      DFlashError: the name is not a plain file name; "../x" is an example.
    """
    stem = name.removesuffix(".json")
    if not stem or not stem.isprintable() or set(stem) & set("/\\:") or stem.startswith(".") or len(os.fsencode(stem)) > 200:
        raise DFlashError(
            f"{name[:60]!r} cannot be the name of a session",
            "Give a name without slashes, colons and a leading dot, such as work",
        )
    return state_directory() / "sessions" / f"{stem}.json"


def read_session(name: str) -> dict[str, Any]:
    """A kept session's state.

    Raises:
      DFlashError: there is no session of this name, or the file is something else.
    """
    path = session_path(name)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.get("version") == 1:
            state = _upgraded(state)
        fault = _fault(state)
    except FileNotFoundError:
        raise DFlashError(f"there is no kept session {path}", "/save makes one") from None
    except DFlashError as error:
        fault = str(error)
    except (ValueError, RecursionError):
        fault = "it is not JSON in UTF-8"
    if fault:
        raise DFlashError(f"{path} is not a session of this version: {fault}", "Give another name")
    return state


def write_session(name: str, state: dict[str, Any]) -> Path:
    """Store a session, readable by the user only and never half written. Returns: its file."""
    path = session_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(state, ensure_ascii=False), mode=0o600)
    return path


def history_file() -> Path:
    """The file of the lines typed so far, which no other user of this machine can read.

    Raises:
      OSError: it cannot be made, or is not a file. DFlashError: there is no directory for it.
    """
    path = state_directory() / "history"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        # Opening a pipe would wait for its reader.
        raise OSError(f"{path} is no file")
    # Earlier versions left the file readable for others.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    path.chmod(0o600)
    return path


def _upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """A session of version 1, in which a top_p of 0 meant off, as one of this version."""
    settings = state.get("settings")
    if isinstance(settings, dict) and settings.get("top_p") == 0:
        settings = {name: value for name, value in settings.items() if name != "top_p"}
    return {**state, "version": VERSION, "settings": settings}


def _fault(state: Any) -> str | None:
    """Why `state` is not a session, in words; None if it is one. Raises: DFlashError for a setting's value."""
    if not isinstance(state, dict) or state.get("version") != VERSION:
        return f'it does not begin with {{"version": {VERSION}'

    kinds = {"version": int, "model": str, "draft_model": (str, type(None)), "system": (str, type(None)), "settings": dict}
    kinds["messages"] = list
    for name, kind in kinds.items():
        if name not in state or not isinstance(state[name], kind):
            return f"{name!r} is absent or of another type"
    given = state.get("given", [])
    if not isinstance(given, list) or not all(isinstance(name, str) and name in state["settings"] for name in given):
        return "'given' is no list of its settings"
    if not isinstance(state.get("url"), (str, type(None))):
        return "'url' is of another type"
    if odd := [*(state.keys() - {*kinds, "given", "url"}), *(state["settings"].keys() - {one.name for one in fields(Settings)})]:
        return f"{odd[0]!r} is unknown"
    Settings(**state["settings"])
    for n, message in enumerate(state["messages"]):
        texts = {**message} if isinstance(message, dict) else {}
        ids = texts.pop("ids", [])
        known = texts.keys() <= {"role", "content", "reasoning_content"} and {"role", "content"} <= texts.keys()
        if not known or not all(isinstance(text, str) for text in texts.values()) or texts["role"] not in ("user", "assistant"):
            return f"message {n} is neither a user's nor an assistant's"
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            return f"message {n} has ids that are no tokens"
    return None
