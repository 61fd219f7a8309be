import errno
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import cli_kit
import mlx.core as mx
import mlx.nn as nn
import pytest
from kit import Oracle, flat, greedy_ids, letters, run, tiny_drafter, tiny_target

import dflash_mlx
from dflash_mlx import machine
from dflash_mlx.machine import size_text, wired_limit
from dflash_mlx.pairs.builtin import builtin_path

LIMIT, BEFORE = 1_000_000_000, 123


@pytest.fixture
def device(monkeypatch):
    """A device with a wired limit, as an Apple GPU has; returns the list of limits set."""
    limits = [BEFORE]

    def set_limit(value):
        limits.append(value)
        return limits[-2]

    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": LIMIT})
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    return limits


def test_the_limit_is_raised_once_and_put_back_by_the_last_of_overlapping_generators(device):
    model, stream = tiny_target(), mx.default_stream(mx.default_device())
    first, second = wired_limit([model], stream), wired_limit([model], stream)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert device == [BEFORE, LIMIT]
    second.__exit__(None, None, None)
    assert device == [BEFORE, LIMIT, BEFORE]


def test_the_limit_is_put_back_after_an_error(device):
    with pytest.raises(KeyError), wired_limit([tiny_target()], mx.default_stream(mx.default_device())):
        raise KeyError
    assert device == [BEFORE, LIMIT, BEFORE]


def test_both_models_count_and_shared_arrays_count_once(device, monkeypatch):
    stream = mx.default_stream(mx.default_device())
    model, other = tiny_target(), tiny_target(seed=4)
    size = sum(a.nbytes for a in flat(model).values())
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": int(1.5 * size)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with wired_limit([model, nn.Sequential(model)], stream):
            pass
    with (
        pytest.warns(UserWarning, match="the models take .* GB, close to the .* GB that the GPU may hold"),
        wired_limit([model, other], stream),
    ):
        pass


def test_without_such_a_limit_nothing_is_set(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda *_: {})
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("set"))
    with wired_limit([tiny_target()], mx.default_stream(mx.default_device())):
        pass


def test_generators_raise_the_limit_while_they_are_open_and_print_nothing(device, capsys):
    model = tiny_target()
    prompt = [5, 9, 33]
    oracle = tiny_drafter(model, cls=Oracle).learn(prompt + greedy_ids(model, prompt, 30), model)
    steps = [dflash_mlx.stream_generate(model, letters(), prompt, 20, oracle, block_size=5) for _ in range(2)]
    next(steps[0]), next(steps[1])
    assert device == [BEFORE, LIMIT]
    steps[0].close()
    assert device == [BEFORE, LIMIT]
    steps[1].close()
    assert device == [BEFORE, LIMIT, BEFORE]
    run(model, oracle, prompt, 9)
    assert device == [BEFORE, LIMIT, BEFORE, LIMIT, BEFORE]
    assert capsys.readouterr() == ("", "")


def test_sizes_below_a_tenth_of_a_gigabyte_are_told_in_megabytes():
    assert [size_text(n) for n in (5_300_000, 99_940_000, 100_000_000, 1_280_000_000)] == [
        "5.3 MB",
        "99.9 MB",
        "0.10 GB",
        "1.28 GB",
    ]


# ---- directories, files, switches


def a_file(path):
    path.write_text("mine")


def no_permission(path):
    path.mkdir(mode=0o500)


def below_a_file(path):
    a_file(path)
    return path / "below"


@pytest.mark.parametrize("spoil", [a_file, no_permission, below_a_file])
@pytest.mark.parametrize("named", [True, False])
def test_a_cache_directory_that_cannot_be_used_names_its_variable(tmp_path, monkeypatch, spoil, named):
    if spoil is no_permission and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    monkeypatch.delenv("DFLASH_MLX_CACHE", raising=False)
    directory = tmp_path / ("mine" if named else "dflash-mlx")
    directory = spoil(directory) or directory
    if named:
        monkeypatch.setenv("DFLASH_MLX_CACHE", str(directory))
        match = f"DFLASH_MLX_CACHE is {re.escape(str(directory))}, which cannot be used: .*. Set DFLASH_MLX_CACHE to a directory"
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory.parent))
        if spoil is below_a_file:
            directory = directory / "dflash-mlx"
        match = r"the cache directory is .* \(DFLASH_MLX_CACHE is not set\), which cannot be used: "
    with pytest.raises(machine.CacheDirectoryError, match=match):
        machine.usable_cache_directory()
    with pytest.raises(machine.CacheDirectoryError, match=match):
        builtin_path("smollm2", "target")


def test_a_usable_cache_directory_is_made_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "a" / "b"))
    assert machine.usable_cache_directory() == tmp_path / "a" / "b" and not list((tmp_path / "a" / "b").iterdir())


@pytest.mark.parametrize("content", ["grüß", "grüß".encode(), lambda part: part.write_text("grüß", encoding="utf-8")])
def test_a_file_is_written_whole_with_the_mode_that_was_asked_for(tmp_path, content):
    machine.write_atomically(tmp_path / "a.json", content, mode=0o600)
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "grüß" and (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_or_is_interrupted_leaves_the_old_file_and_no_other(tmp_path):
    (tmp_path / "a.json").write_text("old")
    for error in (OSError("full"), KeyboardInterrupt()):

        def write(part, error=error):
            part.write_text("half")
            raise error

        with pytest.raises(type(error)):
            machine.write_atomically(tmp_path / "a.json", write)
        assert (tmp_path / "a.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[write] Unable to write 8 bytes to file.")],
    ids=["ours", "mlx"],
)
def test_a_file_that_a_full_disk_has_no_room_for_is_named(tmp_path, error):
    """The system's own error there names no file, and MLX's neither."""
    (tmp_path / "a.safetensors").write_text("old")

    def write(part):
        raise error

    with pytest.raises(OSError, match=r"a\.safetensors cannot be written: .*(No space left|Unable to write).*Free some space"):
        machine.write_atomically(tmp_path / "a.safetensors", write)
    assert (tmp_path / "a.safetensors").read_text() == "old"


def test_a_json_cache_keeps_the_newest_entries_and_survives_a_damaged_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    cache = machine.JsonCache("deep/times.json", most=2)
    assert cache.read() == {} and all(cache.put(key, {"s": 1}) for key in "abac")
    assert list(cache.read()) == ["a", "c"]
    for damage in ("", "[]", "{", "[" * 100_000):
        cache.path.write_text(damage)
        assert cache.read() == {}
    assert cache.put("d", 1) and cache.read() == {"d": 1}


def test_a_json_cache_that_cannot_be_written_says_so_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path / "file"))
    cache = machine.JsonCache("times.json")
    assert not cache.put("a", 1) and not cache.put("a", 1) and cache.read() == {}
    told = [record.getMessage() for record in caplog.records]
    assert (
        len(told) == 1
        and f"DFLASH_MLX_CACHE is {tmp_path / 'file'}, which cannot be used: " in told[0]
        and "[Errno" not in told[0]
    )
    assert told[0].endswith("Set DFLASH_MLX_CACHE to a directory that can be written.")


def test_every_variable_of_ours_is_described_once_and_read_through_the_table():
    package = Path(dflash_mlx.__file__).parent
    named = {name for path in package.rglob("*.py") for name in re.findall(r"\bDFLASH_[A-Z_]+\b", path.read_text())}
    assert named == {name for name in machine.ENVIRONMENT if name.startswith("DFLASH_")}
    assert all(switch.about and switch.values for switch in machine.ENVIRONMENT.values())
    with pytest.raises(KeyError):
        machine.switch("DFLASH_MLX_TYPO")


@pytest.mark.parametrize(
    "name,meant",
    [
        *(("DFLASH_MLX_KERNEL", "DFLASH_MLX_KERNELS"), ("DFLASH_KERNELS", "DFLASH_MLX_KERNELS")),
        *(("DFLASH_MLX_CACHE_DIR", "DFLASH_MLX_CACHE"), ("DFLASH_MLX_API_KEY", "DFLASH_API_KEY")),
        *(("DFLASH_MLX_COMPILE", None), ("DFLASH_MLX_TEST_ROWS", None), ("DFLASH_OTHER_TOOL", None), ("MLX_KERNELS", None)),
    ],
)
def test_a_variable_that_is_mistyped_is_said_in_every_command(monkeypatch, name, meant):
    monkeypatch.setenv(name, "auto")
    assert machine.mistyped_switches() == ({name: meant} if meant else {})
    said = cli_kit.run("models", env={name: "auto"}).stderr
    assert (f"{name} is set and nothing reads it. Did you mean {meant}?" in said) == bool(meant)


def test_the_machine_module_needs_no_mlx():
    code = "import sys, dflash_mlx.machine; sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


AT_EASE = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
LIMITED = "CPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 8\n\tCPU_Speed_Limit \t= 62\n"


IN_USE = """System-wide power settings:
Currently in use:
 standby              1
 powermode            0
 lowpowermode         0
 sleep                1 (sleep prevented by powerd)
"""


@pytest.mark.parametrize("batt, therm, live, slowed", [
    ("Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t100%; charged", AT_EASE, IN_USE, ""),
    ("Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t71%; discharging", AT_EASE, IN_USE, "battery"),
    ("Now drawing from 'AC Power'", LIMITED, IN_USE, "heat"),
    ("Now drawing from 'AC Power'", LIMITED.replace("62", "100"), IN_USE, ""),
    ("Now drawing from 'AC Power'", "Note: Thermal warning level set to 5", IN_USE, "heat"),
    ("Now drawing from 'AC Power'", AT_EASE, IN_USE.replace("lowpowermode         0", "lowpowermode 1"), "low power mode"),
    ("Now drawing from 'AC Power'", AT_EASE, " powermode            1\n", "low power mode"),
    ("Now drawing from 'AC Power'", AT_EASE, " powermode            2\n", ""),
    ("Now drawing from 'Battery Power'", LIMITED, " lowpowermode 1", "battery and heat and low power mode"),
    ("", "", "", ""),
])  # fmt: skip
def test_what_pmset_prints_is_read(batt, therm, live, slowed, monkeypatch):
    """Texts as pmset's manual and users show them; none was read on a Mac here."""
    monkeypatch.setattr(machine, "_pmset", {"batt": batt, "therm": therm, "live": live}.get)
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.slowed_by() == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.slowed_by() == slowed


def test_macos_build_is_read_from_its_own_file(tmp_path):
    file = tmp_path / "SystemVersion.plist"
    assert machine._build(str(file)) == ""
    file.write_text('<plist version="1.0"><dict><key>ProductBuildVersion</key><string>24F74</string></dict></plist>')
    assert machine._build(str(file)) == "24F74"
    file.write_text("no plist")
    assert machine._build(str(file)) == ""


def test_costs_from_battery_or_heat_are_measured_again_on_power(monkeypatch, tmp_path):
    from dflash_mlx.draft_length import cost_store
    from dflash_mlx.draft_length.cost_model import CostModel

    monkeypatch.setenv("DFLASH_MLX_CACHE", str(tmp_path))
    cases = [("", "", True), ("", "battery", True), ("battery", "battery", True), ("battery", "", False), ("heat", "", False)]
    for saved, now, holds in cases:
        monkeypatch.setattr(cost_store, "slowed_by", lambda saved=saved: saved)
        cost_store.save_cost_model("a", CostModel(1.0, 1.0, 1.0, {1: 1.0}))
        monkeypatch.setattr(cost_store, "slowed_by", lambda now=now: now)
        assert bool(cost_store.load_cost_model("a")) is holds, (saved, now)
