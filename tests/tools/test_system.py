"""What a made-up Mac tells of itself, and that no name of a person or a machine gets through."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.tools import private_names, system

TOLD = {
    "sw_vers -productVersion": "26.1\n",
    "sw_vers -buildVersion": "25B78\n",
    "sysctl -n hw.perflevel0.physicalcpu": "8\n",
    "sysctl -n hw.perflevel1.physicalcpu": "4\n",
    "pmset -g batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=7733)\t64%; discharging; 3:10\n",
    "pmset -g therm": "Note: No thermal warning level has been recorded\nCPU Power notify\n\tCPU_Speed_Limit \t= 80\n",
    "pmset -g": "System-wide power settings:\nCurrently in use:\n lowpowermode         1\n",
}


@pytest.fixture
def mac(monkeypatch):
    """A Mac with an M5 whose Python was built with an older SDK."""

    def run(command, **options):
        assert options["env"]["SYSTEM_VERSION_COMPAT"] == "0"
        name = " ".join([Path(command[0]).name, *command[1:]])
        return subprocess.CompletedProcess(command, 0, stdout=TOLD[name])

    info = {"device_name": "Apple M5", "architecture": "applegpu_g17s", "max_recommended_working_set_size": 26_800_000_000}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(system, "machine", lambda: {"chip": "Apple M5", "memory_gb": 34.4, "cores": 12, "system": "Darwin"})
    monkeypatch.setattr(system, "machine_fault", lambda: None)
    monkeypatch.setattr(system.platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *device: info)
    monkeypatch.setattr(system, "wheels", lambda: {"mlx-metal": "0.32.4 py3-none-macosx_15_0_arm64"})


def test_a_mac_tells_its_parts_its_power_and_its_heat(mac):
    found = system.facts()
    assert (found["architecture"], found["working_set_gb"], found["macos"]) == ("applegpu_g17s", 26.8, "26.1 (25B78)")
    assert found["cores_by_kind"] == {"performance": 8, "efficiency": 4}
    assert found["power"] == {
        "source": "Battery Power",
        "battery": "64 %, discharging",
        "power_mode": 1,
        "heat": ["Note: No thermal warning level has been recorded", "CPU Power notify", "CPU_Speed_Limit = 80"],
    }
    assert "7733" not in json.dumps(found)
    text = "\n".join(system.lines(found))
    for part in ("12 cores (8 performance, 4 efficiency)", "working set 26.8 GB", "macOS 26.1 (25B78)", "Battery Power; 64 %"):
        assert part in text


@pytest.mark.parametrize(
    ("settings", "mode", "shown"),
    [
        ("lowpowermode 1", 1, "discharging; Low Power Mode; "),
        ("powermode 1", 1, "discharging; Low Power Mode; "),
        ("powermode 2", 2, "discharging; High Power Mode; "),
        ("lowpowermode 0", 0, "discharging; Note: "),
        ("", None, "discharging; Note: "),
    ],
)
def test_a_power_mode_that_changes_the_speed_is_on_doctors_line(mac, monkeypatch, settings, mode, shown):
    monkeypatch.setitem(
        TOLD, "pmset -g", f"System-wide power settings:\nCurrently in use:\n {settings.replace(' ', '         ')}\n"
    )
    found = system.facts()
    (power,) = [line for line in system.lines(found) if line.startswith("power ")]
    assert found["power"]["power_mode"] == mode and f"power       Battery Power; 64 %, {shown}" in power
    assert ("Power Mode" in power) == bool(mode)


def test_a_wheel_without_an_m5s_matrix_units_is_named_where_there_could_be_one(mac, monkeypatch):
    (fault,) = system.faults(found := system.facts())
    assert fault.startswith(
        "mlx-metal is the wheel for macOS 15, which does not use this GPU's matrix units, on macOS 26.1 (25B78)"
    )
    assert "sees macOS 16.0" in fault and fault.endswith("mlx==0.32.4 mlx-metal==0.32.4")
    right = {"wheels": {"mlx-metal": "0.32.4 py3-none-macosx_26_0_arm64"}}
    for other in ({"architecture": "applegpu_g16s"}, {"architecture": None}, {"macos": "15.6 (24G84)"}, {"macos": None}, right):
        assert not system.faults(found | other)


def test_the_wheels_that_are_installed_here_are_named_with_their_tags():
    assert any("manylinux" in wheel or "macosx" in wheel for wheel in system.wheels().values()), system.wheels()


@pytest.fixture
def jane(monkeypatch):
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, "jdoe")
    monkeypatch.setenv("HOME", "/Users/jdoe")
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(private_names.socket, "gethostname", lambda: "Janes-MacBook.fritz.box")
    monkeypatch.setattr(private_names.platform, "node", lambda: "Janes-MacBook.fritz.box")


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot open /Users/jdoe/work/acme/x.json: no space", "cannot open ~/x.json: no space"),
        ("/Users/jdoe", "~"),
        ("at '/Volumes/Jane SSD/a b/m.json'", "at '~/m.json'"),
        ("at /Volumes/Jane SSD/m.json", "at ~/m.json"),
        ("/opt/homebrew/lib/python3.12/site-packages/mlx/nn.py:12", "~/nn.py:12"),
        ("jdoe@Janes-MacBook says JDOE", "user@host says user"),
        ("Janes-MacBook.fritz.box", "host"),
        ("3/4 rows, mlx/core and https://a.example/b/c", "3/4 rows, mlx/core and https://a.example/b/c"),
    ],
)
def test_paths_become_a_tilde_and_names_go(jane, text, clean):
    assert private_names.cleaner()({"error": [text]}) == {"error": [clean]}


def test_a_user_who_is_called_as_a_chip_is_leaves_the_chip_its_name(jane, monkeypatch):
    monkeypatch.setenv("USER", "max")
    given = {"chip": "Apple M4 Max", "error": "max has no file", "n": 3, "none": None}
    assert private_names.cleaner(keep=("chip",))(given) == {**given, "error": "user has no file"}


def test_root_is_nobodys_name(monkeypatch):
    monkeypatch.setenv("USER", "root")
    assert "root" not in {name for name, *_ in private_names._names()} and os.environ["USER"] == "root"
