"""The command line in this process: what `python -m dflash_mlx.cli.app` does, without the seconds that importing mlx-lm takes.

Streams are Python's, not the system's. Tests of signals, of a reader that leaves, of terminals, and of what is imported at the
start run a process of their own.
"""

import contextlib
import io
import os
import subprocess
import sys
import warnings
from unittest import mock

from dflash_mlx.cli import app

# What Python itself does not show of a library.
_QUIET = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def run(*args: str, stdin: str | bytes | None = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a command to its end: its exit status, and the text of both streams. Standard input is a pipe that ends; None: closed.

    What a command changes for its process ends with it: environment variables and filters of warnings. An error that has not
    become a sentence and a status is raised.
    """
    out, err = io.StringIO(), io.StringIO()
    data = stdin.encode() if isinstance(stdin, str) else stdin
    given = None if data is None else io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    streams = {"argv": [app.__file__, *args], "stdin": given, "stdout": out, "stderr": err}
    with mock.patch.multiple(sys, **streams), mock.patch.dict(os.environ, env or {}), _warnings_on_stderr():
        try:
            app.main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
    assert isinstance(status, int), f"the command ended with the text {status!r} in place of a status"
    return subprocess.CompletedProcess(args, status, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _warnings_on_stderr():
    """Warnings as in a process that no pytest collects them from, and in the command's own form until it ends."""
    form = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for kind in _QUIET:
            warnings.simplefilter("ignore", kind)
        warnings.showwarning = lambda message, *place: sys.stderr.write(warnings.formatwarning(message, *place[:3]))
        try:
            yield
        finally:
            warnings.formatwarning = form
