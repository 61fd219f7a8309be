"""The steps of the macOS job, one a call. Each ends with what it found; exit status 1: something is wrong.

    python scripts/mac.py rows          are one row and many bit-equal on this CPU? (tests marked `rows_equal` need it)
    python scripts/mac.py emulator      does the emulator build and run here? (tests marked `emulator` need it)
    python scripts/mac.py texts         every kernel's text through Apple's compiler, in each version of Metal that MLX asks for
    python scripts/mac.py kernels       every kernel on this GPU: right, and rows bit-equal. Times are not looked at
    python scripts/mac.py generate      the built-in pairs on this GPU, kernels off and on: the same ids, but for ties

`--made-up` runs rows, emulator, kernels and generate without a Mac: a CPU whose rows differ, and the emulator for the GPU.
What a hosted runner may lack is skipped by its name: the emulator on a Mac, and `simdgroup_matrix` on its paravirtual GPU.
Each kernel and each generation is a process of its own with a limit, so that one that hangs costs the others nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support/msl"))

import emulator
import metal_text
import mlx.core as mx
import on_off
import rows as cpu_rows

from dflash_mlx.kernels import REGISTRY, names

ROOT = Path(__file__).resolve().parents[1]
MATRICES = "simdgroup_matrix"
# GPUs of hosted runners, where a feature of Apple's own ones may be missing.
VIRTUAL = "Paravirtual"
XCRUN = ("xcrun", "-sdk", "macosx", "metal")
TOOLCHAIN = ("xcodebuild", "-downloadComponent", "MetalToolchain")


def on_mac() -> bool:
    return sys.platform == "darwin"


def said(text: str) -> str:
    """The last line that holds something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing")


def ended(command: Sequence[str], seconds: float, **environment: str) -> tuple[str | None, str]:
    """Run a process: (what is wrong with its end, or None; what it said)."""
    env = {**os.environ, **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s", ""
    except OSError as error:
        return f"{command[0]} does not run: {error.strerror}", ""
    if done.returncode:
        return f"ended with {done.returncode}: {said(done.stderr)}", done.stdout + done.stderr
    return None, done.stdout


# ---- the CPU


def rows(made_up: bool) -> int:
    """Report; of a CPU that is made up to differ, wrong unless the difference is found."""
    if made_up:
        cpu_rows.make_differ()
    found = cpu_rows.difference()
    print(f"rows_equal: {'one row and many are bit-equal on this CPU' if found is None else f'not on this CPU: {found}'}")
    if found:
        print("tests marked rows_equal are skipped by that name; ids are compared up to ties")
    return int(made_up and found is None)


def try_emulator() -> int:
    """Skipped by its name on a Mac where it does not build; elsewhere that is wrong."""
    reason = emulator.missing()
    print(f"emulator: {'builds and runs here' if reason is None else f'skipped, not here: {reason}'}")
    return int(reason is not None and not on_mac())


# ---- the texts


def versions(macos: str) -> list[str]:
    """Metal versions that MLX compiles for on a macOS and the two before it: 4.0 came with macOS 26."""
    return ["3.1", "3.2", *["4.0"] * (int(macos.split(".")[0] or 0) >= 26)]


def find_toolchain(seconds: float) -> str | None:
    """See that `xcrun metal` runs. Xcode 26 has its compiler as a download of its own, which at times fails: three tries."""
    for attempt in range(4):
        wrong, _ = ended([*XCRUN, "--version"], 120)
        if wrong is None or attempt == 3 or not on_mac():
            return wrong
        print(f"xcrun metal {wrong}\n{' '.join(TOOLCHAIN)}", flush=True)
        failed, _ = ended(TOOLCHAIN, seconds)
        print(f"the download {failed}" if failed else "downloaded", flush=True)
    raise AssertionError


def texts(macos: str, seconds: float) -> int:
    """Compile each text without fast math, as MLX does, and name each that Apple's compiler refuses, with its first error."""
    if wrong := find_toolchain(seconds):
        print(f"texts: Apple's compiler is not here: {wrong}")
        return 1
    found = metal_text.collect()
    include = Path(next(iter(__import__("mlx").__path__))) / "include"
    with tempfile.TemporaryDirectory() as folder:
        for name, text in found.items():
            (Path(folder) / f"{name}.metal").write_text(text)

        def compiled(job: tuple[str, str]) -> str | None:
            name, version = job
            command = [*XCRUN, "-c", f"-std=metal{version}", "-fmetal-math-mode=safe", "-I", str(include)]
            file = Path(folder) / f"{name}.metal"
            wrong, output = ended([*command, str(file), "-o", str(file.with_suffix(f".{version}.air"))], 120)
            errors = [line for line in output.splitlines() if "error:" in line] or [wrong]
            return None if wrong is None else f"{name} in Metal {version}: {errors[0]}"

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            refused = [r for r in pool.map(compiled, itertools.product(found, versions(macos))) if r]
    print("".join(f"{line}\n" for line in refused), end="")
    print(f"texts: {len(found)} in Metal {', '.join(versions(macos))}: {len(refused)} refused")
    return int(bool(refused))


# ---- the GPU


def gpu_name(made_up: bool) -> str | None:
    """What MLX calls the GPU; None: it finds none."""
    if made_up:
        return "made up: the emulator"
    return mx.device_info(mx.Device(mx.gpu)).get("device_name", "GPU") if mx.metal.is_available() else None


def check(name: str, made_up: bool, seconds: float) -> str | None:
    """What is wrong with one kernel, or with matrix units."""
    command = [sys.executable, str(ROOT / "tests/support/msl/on_gpu.py"), name, *["--made-up"] * made_up]
    wrong, output = ended(command, seconds)
    if wrong:
        print(output, flush=True)
    return wrong


def without_matrices(gpu: str, made_up: bool, seconds: float) -> str | None:
    """Why kernels with matrix units are to be skipped; None: they run, or have to.

    A Mac's own GPU has matrix units, so what is wrong with them there is a fault of the kernels that use them.
    """
    wrong = check("matrix_units", made_up, seconds)
    if wrong:
        print(f"{MATRICES}: not on {gpu}: {wrong}", flush=True)
    return wrong if VIRTUAL in gpu else None


def uses_matrices(name: str) -> bool:
    return any(MATRICES in kernel.text for kernel in REGISTRY[name].load())


def kernels(gpu: str, made_up: bool, seconds: float) -> int:
    """Every text of ours, whether or not a pass on Metal uses it today."""
    lacking, wrong = without_matrices(gpu, made_up, seconds), []
    for name in names(text=True):
        begin = time.monotonic()
        if lacking and uses_matrices(name):
            print(f"{name}: skipped, {MATRICES} is not on {gpu}: {lacking}", flush=True)
            continue
        found = check(name, made_up, seconds)
        wrong += [name] * bool(found)
        print(f"{name}: {found or 'right, rows bit-equal'} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"kernels on {gpu}: " + (f"wrong: {', '.join(wrong)}" if wrong else "all that ran are right"))
    return int(bool(wrong))


def generate(gpu: str, pairs: Sequence[str], tokens: int, made_up: bool, seconds: float) -> int:
    """Each pair with kernels off, then with all that can run here by name: one that is wrong in its trial is an error."""
    lacking = "made up" if made_up else without_matrices(gpu, made_up, seconds)
    on = ",".join(name for name in names(on="metal", text=True) if not (lacking and uses_matrices(name)))
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs:
            record = str(Path(folder) / f"{pair}.json")
            for setting in ("off", on):
                command = [sys.executable, on_off.__file__, pair, record, "--tokens", str(tokens), *["--made-up"] * made_up]
                found, output = ended(command, seconds, DFLASH_MLX_KERNELS=setting)
                print(output, end="", flush=True)
                if found:
                    wrong.append(f"{pair}, kernels {setting}: {found}")
                    break
            else:
                print(f"{pair}: {json.loads(Path(record).read_text())['summary']}", flush=True)
    print("".join(f"{line}\n" for line in wrong), end="")
    print(f"generate on {gpu}: {'wrong' if wrong else 'ids with kernels are those without, but for ties'}")
    return int(bool(wrong))


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("step", choices=["rows", "emulator", "texts", "kernels", "generate"])
    p.add_argument("--made-up", action="store_true", help="run the step without a Mac")
    p.add_argument("--seconds", type=float, default=300, help="limit of each process of a step")
    p.add_argument("--pairs", nargs="+", default=["tiny", "smollm2"])
    p.add_argument("--tokens", type=int, default=48, help="of each answer")
    args = p.parse_args(arguments)
    if args.step == "rows":
        return rows(args.made_up)
    if args.step == "emulator":
        return try_emulator()
    if args.step == "texts":
        return texts(platform.mac_ver()[0], args.seconds)
    gpu = gpu_name(args.made_up)
    if gpu is None:
        print(f"{args.step}: MLX finds no GPU here")
        return 1
    if args.step == "kernels":
        return kernels(gpu, args.made_up, args.seconds)
    return generate(gpu, args.pairs, args.tokens, args.made_up, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
