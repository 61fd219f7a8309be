"""From the launches of a round to milliseconds: five rates a chip, fitted on public figures and tried on others. PREDICTIONS.

    a launch      the larger of its bytes over the bandwidth that is reached and its multiply-adds over its kernel's rate; a
                  product with a weight that rows share goes through it once a row tile, and multiplies the padding of a tile too
    the gap       comes on top where a launch waits for another; launches that wait for none are beside each other
    a round       the sum over its launches, and what the host builds while the device has nothing to do

Fixed is what the makers say of a chip. Fitted are the rates, on the figures named here. No share is above 0.65 of a chip's
arithmetic or 0.85 of its bandwidth unless a public figure shows more. Three do: at 1 row MLX read weights at 0.97 of an M3 Max's
bandwidth, and 32 padded rows ran at 0.79 of its arithmetic (both mlx 3863); two whole plain passes on an M5 Max fit 0.93.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ledger_metal import Gpu, Launch

# No goal is called met by a prediction whose anchors are further off than this.
MOST_ERROR = 0.25


@dataclass(frozen=True)
class Chip:
    """gbps, tflops: the maker's bandwidth, and its rate for float32 vectors.

    bandwidth: the share that is reached. In multiply-adds a second, wide: a quantized weight by few rows; block: by the matrix
    kernel, which pads rows to block_rows. gap_us: from a launch to the one that waits for it.
    """

    name: str
    gpu: Gpu
    gbps: float
    tflops: float
    bandwidth: float
    wide: float
    block: float
    gap_us: float = 0.0
    block_rows: int = 32

    @property
    def vector(self) -> float:
        """Multiply-adds a second of every other kernel."""
        return 0.65 * self.tflops * 1e12 / 2


def launch_s(launch: Launch, chip: Chip) -> float:
    """Seconds of a launch alone, without a gap."""
    bandwidth = chip.gbps * 1e9 * chip.bandwidth
    if not launch.weight_bytes:
        return max(launch.nbytes / bandwidth, launch.macs / chip.vector)
    if launch.kernel == "qmm":
        tiles, rate = -(-launch.rows // chip.block_rows), chip.block
        padded = tiles * chip.block_rows
    else:
        tiles, rate = launch.tiles, chip.wide
        padded = tiles * -(-launch.rows // tiles)
    macs = launch.macs / launch.rows * padded
    weights = tiles * max(launch.weight_bytes / bandwidth, macs / tiles / rate)
    return weights + (launch.nbytes - launch.weight_bytes) / bandwidth


def round_ms(launches: Sequence[Launch], chip: Chip) -> float:
    return 1e3 * sum(launch_s(launch, chip) + launch.waits * chip.gap_us * 1e-6 for launch in launches)


# --- public figures

# M3 Max, K 5120, N 17408, 4 bit, weights not in a cache: ms by rows, MLX 0.32.0 (mlx pull request 3863, 2026-07-22, "main").
M3_MAX_MS = {1: 0.129, 2: 0.129, 4: 0.165, 6: 0.263, 8: 0.323, 9: 0.405, 12: 0.508, 16: 0.509, 24: 0.514, 32: 0.513, 33: 1.002}
_WEIGHTS = 5120 * 17408
# M5 Max, 4 bit, N 16384, K 250112: 8 rows 10.888 ms; 10 rows 16.561 ms, by blocks of 64 rows (mlx pull request 3791, 2026-08-07).
_M5_WEIGHTS = 16384 * 250112
# M5 with 10 cores, K 5120, N 13824, blocks of 32 rows: 14 rows 833.1 us, 32 rows 804.2 us (mlx pull request 4171, 2026-08-11).
_M5_BASE_WEIGHTS = 5120 * 13824

# Bandwidths: Apple's announcements of M3 Max (October 2023) and M5 Max (March 2026). tflops: bench/roofline.py's.
M3_MAX = Chip(
    "M3 Max (40 cores)",
    Gpu(15, "s"),
    400,
    14.1,
    bandwidth=_WEIGHTS * (0.5 + 4 / 64) / 0.129e-3 / 400e9,
    wide=5 * _WEIGHTS / (0.405e-3 / 2),
    block=32 * _WEIGHTS / 0.509e-3,
)
M5_MAX = Chip(
    "M5 Max (40 cores)",
    Gpu(17, "s", nax=True),
    614,
    4 * 3.76,
    bandwidth=0.85,
    wide=4 * _M5_WEIGHTS / (10.888e-3 / 2),
    # Four times the cores of the M5 that was measured.
    block=4 * 32 * _M5_BASE_WEIGHTS / 804.2e-6,
)
# As MLX 0.31.1 has it: blocks of 64 rows, from 10 rows on.
M5_MAX_BEFORE = replace(M5_MAX, name="M5 Max, MLX 0.31.1", block=64 * _M5_WEIGHTS / 16.561e-3, block_rows=64)
M5_BASE = replace(M5_MAX, name="M5 (10 cores)", gpu=Gpu(17, "g", nax=True), gbps=153.6, tflops=3.76)
M5_BASE = replace(M5_BASE, wide=M5_MAX.wide / 4, block=M5_MAX.block / 4)

# Plain decoding by mlx-lm on an M5 Max, MLX 0.31.1, 4 bit, 1,024 tokens: 33.55 and 143.03 tokens a second (bstnxbt/dflash-mlx).
PLAIN_MS = {"qwen3.5-27b": 1e3 / 33.55, "qwen3.6-35b-a3b": 1e3 / 143.03}


def fitted(plain: dict[str, Sequence[Launch]]) -> tuple[Chip, Chip, Chip]:
    """M3 Max, M5 Max and the M5 Max of MLX 0.31.1, with the gap and the M5's bandwidth that `PLAIN_MS` asks for.

    plain: the launches of a plain pass of both models, on an M5 Max.
    """
    low, high = 0.5, 1.0
    a, b = (plain[name] for name in PLAIN_MS)

    def gap_us(share: float, launches: Sequence[Launch], ms: float) -> float:
        alone = round_ms(launches, replace(M5_MAX, bandwidth=share, gap_us=0.0))
        return 1e3 * (ms - alone) / sum(launch.waits for launch in launches)

    def differ(share: float) -> float:
        return gap_us(share, a, PLAIN_MS["qwen3.5-27b"]) - gap_us(share, b, PLAIN_MS["qwen3.6-35b-a3b"])

    for _ in range(40):
        share = (low + high) / 2
        low, high = (share, high) if differ(share) < 0 else (low, share)
    gap = gap_us(share, b, PLAIN_MS["qwen3.6-35b-a3b"])
    of = {"bandwidth": share, "gap_us": gap}
    return replace(M3_MAX, gap_us=gap), replace(M5_MAX, **of), replace(M5_MAX_BEFORE, **of)


class Check(NamedTuple):
    """A public figure, and what the model says. fitted: whether a rate was made from it."""

    what: str
    public_ms: float
    predicted_ms: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted_ms / self.public_ms - 1


def product(K: int, N: int, rows: int, limit: int) -> Launch:
    """A 4-bit product alone, by the matrix kernel from `limit` rows on."""
    weights = K * N * (0.5 + 4 / 64)
    if rows >= limit:
        return Launch("qmm", "", weights, K * N * rows, weights, rows)
    return Launch("qmv wide", "", weights, K * N * rows, weights, rows, -(-rows // 5))


def checks(chips: Sequence[Chip], launches: Callable[[str, int, Chip], Sequence[Launch]]) -> list[Check]:
    """Every public figure beside its prediction. launches: of a model's round with so many rows."""
    m3, m5, before = chips
    out = []
    for rows, ms in M3_MAX_MS.items():
        # The MLX that was measured left the vector kernels at 10 rows.
        one = product(5120, 17408, rows, 10)
        out.append(Check(f"M3 Max, 5120 x 17408, rows: {rows}", ms, 1e3 * launch_s(one, m3), rows in (1, 9, 16)))
    for rows, ms in ((14, 0.8331), (32, 0.8042)):
        one = product(5120, 13824, rows, 13)
        out.append(Check(f"M5, 5120 x 13824, rows: {rows}", ms, 1e3 * launch_s(one, M5_BASE), rows == 32))
    one = product(250112, 16384, 8, 13)
    out.append(Check("M5 Max, 250112 x 16384, rows: 8", 10.888, 1e3 * launch_s(one, m5), True))
    for name, ms in PLAIN_MS.items():
        out.append(Check(f"M5 Max, plain step of {name}", ms, round_ms(launches(name, 1, m5), m5), True))
    # Splash: 60 to 68 ms a cycle are 1.3 to 1.45 plain steps.
    out.append(
        Check(
            "M3 Max, plain step of qwen3.5-27b", (60 / 1.3 + 68 / 1.45) / 2, round_ms(launches("qwen3.5-27b", 1, m3), m3), False
        )
    )
    # Cycles of bstnxbt/dflash-mlx at 16 rows: another program on the same operations of MLX's.
    for name, ms in (("qwen3.5-27b", 127.0), ("qwen3.6-35b-a3b", 37.5)):
        out.append(Check(f"M5 Max, MLX 0.31.1, 16-row cycle of {name}", ms, round_ms(launches(name, 16, before), before), False))
    return out
