"""FAULTS.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parents[1]


def test_every_test_that_the_table_names_exists():
    missing, named, file = [], 0, None
    for line in (HERE / "FAULTS.md").read_text().splitlines():
        if not line or line.startswith("|"):
            file = None
        for name in re.findall(r"`((?:\w+/)*test_\w+(?:\.py(?:::\w+)?)?)`", line):
            # A bare name is in the file of the name before it.
            file, test = name.split("::") if "::" in name else (name, None) if name.endswith(".py") else (file, name)
            source = (HERE / file).read_text() if file and (HERE / file).is_file() else ""
            named += 1
            if not source or test and f"def {test}(" not in source:
                missing.append(f"{file}::{test}")
    assert named > 50 and not missing, missing
