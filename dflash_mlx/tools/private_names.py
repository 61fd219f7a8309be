"""Takes the names of people and machines out of what is sent to others. Knows nothing of what the text is about."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..machine import mac_says

# Names that many machines have, and that say nothing of anyone.
_ANYBODYS = set(
    "root admin administrator system user users runner ubuntu debian localhost home host mac macbook pro local".split()
)
# From a slash that begins a path to its last part; not a URL's, nor a fraction's.
_PATH = re.compile(r"(?<![\w/:.~>])/(?:[^\s/'\"`:;,()\[\]<>|]+/)+([^\s/'\"`:;,()\[\]<>|]*)")


def cleaner(keep: Collection[str] = ()) -> Callable[[Any], Any]:
    """What takes plain values and gives them without a host's or a user's name, and with `~` for every directory.

    "/Users/jane/work/x.json: no space" becomes "~/x.json: no space".

    Args:
      keep: keys whose values are this program's own words or a maker's, such as "Apple M4 Max": a user may be called Max.
    """
    directories = sorted({name for name in _directories() if len(name) > 1}, key=len, reverse=True)
    named = [(re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", flags), word) for name, flags, word in _names()]

    def text(value: str) -> str:
        for directory in directories:
            value = value.replace(directory, "~")
        # Names of disks may have blanks, and so may what stands in quotes.
        value = re.sub(r"/(?:Volumes|Users|home|media|mnt)/[^/'\"]+/", "/~/", value)
        value = re.sub(r"(['\"])/(?:[^'\"/]+/)+([^'\"/]*)\1", r"\1~/\2\1", value)
        # A second time for what came between: "~/a/b" of a directory that was replaced.
        value = _PATH.sub(lambda m: f"~/{m.group(1)}", value)
        value = re.sub(r"~/(?:[^\s/'\"`:;,()\[\]<>|]+/)+", "~/", value)
        for name, word in named:
            value = name.sub(word, value)
        return value

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            return {text(str(key)): of if key in keep else clean(of) for key, of in value.items()}
        return [clean(of) for of in value] if isinstance(value, (list, tuple)) else value

    return clean


def _directories() -> Iterator[str]:
    """Directories that errors may name, blanks in them and all."""
    with suppress(RuntimeError, OSError):
        yield str(Path.home())
        yield str(Path.home().resolve())
    with suppress(OSError):
        yield str(Path.cwd())
    yield from (sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(Path(__file__).resolve().parents[2]))


def _names() -> Iterator[tuple[str, int, str]]:
    """(name, flags of its pattern, what stands for it); a short name is taken as it is written."""
    for word, found in (("user", _users()), ("host", _hosts())):
        for name in sorted({name.strip() for name in found}, key=len, reverse=True):
            if len(name) > 1 and name.lower() not in _ANYBODYS:
                yield name, re.IGNORECASE if len(name) > 3 else 0, word


def _users() -> Iterator[str]:
    with suppress(KeyError, OSError, ImportError):
        yield getpass.getuser()
    with suppress(KeyError, ImportError):
        import pwd

        entry = pwd.getpwuid(os.getuid())
        yield entry.pw_name
        yield Path(entry.pw_dir).name
        # The full name, before the first comma, and each of its words.
        yield (whole := entry.pw_gecos.partition(",")[0])
        yield from (word for word in whole.split() if len(word) > 2)
    with suppress(RuntimeError):
        yield Path.home().name
    yield from (os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER"))


def _hosts() -> Iterator[str]:
    for name in (socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")):
        yield name
        yield name.partition(".")[0]
    for kind in ("ComputerName", "LocalHostName"):
        yield mac_says("/usr/sbin/scutil", "--get", kind)
