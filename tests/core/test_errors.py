"""Every error that the package raises on purpose says what is wrong first, with the value wanted or with what to do."""

import ast
import errno
import os
import re
from pathlib import Path

import pytest

from dflash_mlx import errors

ROOT = Path(__file__).parents[2]
KINDS = {*(name for name in vars(errors) if name.endswith("Error")), "RequestError"}
# Sentences that stand the thing to do, or what was wanted, before what is wrong.
BACKWARDS = re.compile(r"^(expected|must|use|give|set|need|invalid)\b|\bexpected (it|to|left)\b", re.IGNORECASE)
SAYS_WHAT_IS_WANTED = re.compile(r"\b(must|may|at most|at least|are 0 to)\b")


def errors_of(path):
    """(line, sentences) of each error with sentences of its own; values in them are "{}"."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(getattr(node, "func", None), "id", None)
        if name in KINDS and node.args and isinstance(node.args[0], (ast.Constant, ast.JoinedStr)):
            parts = (arg.values if isinstance(arg, ast.JoinedStr) else [arg] for arg in node.args[:2])
            yield (
                node,
                ["".join(getattr(part, "value", "{}") if isinstance(part, ast.Constant) else "{}" for part in p) for p in parts],
            )


@pytest.mark.parametrize("folder", ["dflash_mlx", "convert"])
def test_an_error_says_what_is_wrong_first_and_then_what_to_do(folder):
    seen, faults = 0, []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node, (problem, *remedy) in errors_of(path):
            seen += 1
            if any(word.arg == "status" and getattr(word.value, "value", 0) == 500 for word in node.keywords):
                continue
            backwards = BACKWARDS.search(problem) or problem.endswith(".")
            lacks = not remedy and not SAYS_WHAT_IS_WANTED.search(problem)
            if backwards or lacks:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno} {problem!r} {remedy}")
    assert seen > 50 and not faults, "\n".join(faults)


@pytest.mark.parametrize("names", [(), ("file",)])
def test_an_error_of_the_system_is_said_without_its_number(names):
    for number in (errno.EINVAL, errno.EEXIST, errno.ENOSPC, errno.ENOTDIR):
        said = errors.error_text(OSError(number, os.strerror(number), *names))
        assert "Errno" not in said and str(number) not in said and len(said) > 8
