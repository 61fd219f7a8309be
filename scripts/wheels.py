"""Can every dependency of an interpreter that is not here be had as a wheel, for Linux and for a Mac?

    python scripts/wheels.py 3.14 FOLDER      downloads them into FOLDER; exit status 1 if one is missing

pip reads environment markers for the machine that it runs on, so the markers of our own requirements are evaluated here for the
other platform. mlx asks for its Metal half by such a marker: it is named below.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

# A wheel is asked for by its own tag: of these, newest first.
PLATFORMS = {
    "linux": " ".join(
        f"manylinux_{tag}_x86_64" for tag in ("2_35", "2_34", "2_31", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")
    )
}
PLATFORMS["darwin"] = "macosx_14_0_arm64"
EXTRAS = {"linux": ["cpu", "train", "dev"], "darwin": ["train", "dev"]}
ALSO = {"linux": [], "darwin": ["mlx-metal>=0.32.4,<0.33"]}


def requirements(platform: str, version: str) -> list[str]:
    """What `pip install .[...]` would ask for there, without markers."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS[platform] for line in project["optional-dependencies"][name])]
    there = {"sys_platform": platform, "python_version": version}
    found = []
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(there):
            wanted.marker = None
            found.append(str(wanted))
    return found + ALSO[platform]


def main() -> int:
    version, folder = sys.argv[1:]
    for platform, names in PLATFORMS.items():
        command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "--python-version", version]
        command += ["--implementation", "cp", "-d", f"{folder}/{platform}-{version}"]
        for name in names.split():
            command += ["--platform", name]
        if subprocess.run([*command, *requirements(platform, version)]).returncode:
            print(f"Python {version} on {platform}: not every dependency is there as a wheel", file=sys.stderr)
            return 1
        print(f"Python {version} on {platform}: every dependency is there as a wheel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
