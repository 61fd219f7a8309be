"""Float32 products of the tests' processes: the bits of MLX's Linux CPU build, several times as fast.

MLX hands them to the BLAS in its wheel. On Linux that is the reference BLAS, which sums one element after another: 1.5 GFLOP/s
on one core of an EPYC, and most of the tests' time. products.cpp sums sixteen side by side, each in the same order, so every
float is the same (core/test_products.py): 25 GFLOP/s. Importing this module, before MLX, compiles and loads it, here and, by
startup/, in the processes that tests start. On other machines and without a C++ compiler nothing changes.

DFLASH_MLX_TEST_PRODUCTS   path of the library; mlx: MLX's own products, as users have them (CI runs a part of the tests so)
"""

import atexit
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "DFLASH_MLX_TEST_PRODUCTS"
SOURCE = Path(__file__).with_suffix(".cpp")
# -ffp-contract=off: a product is rounded before it is added.
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")


def build(library: Path, options=OPTIONS) -> bool:
    """Whether the C++ compiler at hand has made `library`."""
    cxx = next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)
    return cxx is not None and not subprocess.run([cxx, *options, SOURCE, "-o", library], capture_output=True).returncode


def choose() -> None:
    """Build the library once for a session: the first process's folder is taken away when it ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder) / "products.so"
    os.environ[VARIABLE] = str(library) if build(library) else "mlx"


if (sys.platform, platform.machine()) == ("linux", "x86_64") and VARIABLE not in os.environ:
    choose()
if os.environ.get(VARIABLE, "mlx") != "mlx":
    # Global: MLX, loaded later, finds this cblas_sgemm before its BLAS's.
    ctypes.CDLL(os.environ[VARIABLE], ctypes.RTLD_GLOBAL)
