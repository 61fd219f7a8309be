"""Which candidate serves each row count, from what trials measured. Pure: knows no device, no file and no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .launch import Form, Kernel

# Row counts at which an operation is tried, the one-row check first. A count between two of them takes the larger one's verdict.
ROWS = (1, 2, 4, 8, 16)
# At one row a candidate may take up to this many times stock MLX's time: the row then has the same bits alone as among others.
ONE_ROW_SLACK = 1.03
# From two rows on, another family takes a row count over only if it needs less than this share of the time: bits differ there.
ANOTHER_FAMILY = 0.9


@dataclass(frozen=True)
class Candidate:
    """One way to serve an operation: a kernel with launch options (its plan).

    options: by name, such as columns; order: names of the options that change the order of a row's sums. Candidates of one
      `family` differ in no such option, and give a row the same bits.
    """

    kernel: Kernel | Form
    options: tuple[tuple[str, int], ...] = ()
    order: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self._with(dict(self.options))

    @property
    def family(self) -> str:
        return self._with({name: value for name, value in self.options if name in self.order})

    def _with(self, options: Mapping[str, int]) -> str:
        return " ".join([self.kernel.name, *(f"{name} {value}" for name, value in options.items())])


@dataclass(frozen=True)
class Measured:
    """What the trial of an operation at one row count found, by candidates' names.

    families: of all candidates; seconds: of one call; wrong: whose values differ, and how; refused: what did not compile or
      launch, and why. A candidate in none of the three was not reached within the trial's time.
    crash: why there was no trial.
    """

    families: dict[str, str]
    stock_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    crash: str | None = None

    def reason(self, name: str) -> str:
        """A sentence about a candidate."""
        if said := self.crash or self.wrong.get(name) or self.refused.get(name):
            return said
        if name not in self.seconds:
            return "not timed: its trial took too long, or it was off"
        # A made-up clock may stand still.
        return f"right, {self.stock_s / max(self.seconds[name], 1e-12):.2f} times as fast as stock MLX"


def tried_rows(rows: int, tried: Sequence[int]) -> int:
    """The row count whose verdict holds for `rows`: the next larger one that is tried, or the largest."""
    return next((t for t in tried if rows <= t), tried[-1])


def verdicts(table: Mapping[int, Measured], forced: bool = False, off: Collection[str] = ()) -> dict[int, str]:
    """The candidate that serves each row count, by name. Stock MLX serves the counts that are left out.

                     A, 2 columns   A, 4 columns    B      stock      verdict
          1 row         10.4           10.2         9         10      A, 4 columns: within 3 %
          4 rows        12             11          10.5       20      A, 4 columns
         16 rows        15             30          21         20      A, 2 columns

    One family serves all counts at which it is faster than stock MLX, each by its fastest plan, so that these rows agree bit for
    bit: the family that saves most time in sum. From two rows on, another family takes over a count where it is a tenth faster,
    unless `forced`. A candidate that was wrong or refused at one count serves none.

    Args:
      table: by row count. forced: faster than stock MLX or not. off: candidates that are to serve none.
    """
    families = {name: family for measured in table.values() for name, family in measured.families.items()}
    out = {*off, *(name for measured in table.values() for name in (*measured.wrong, *measured.refused))}
    best: dict[int, str] = {}
    most = float("-inf") if forced else 0.0
    for family in dict.fromkeys(families.values()):
        found, saved = {}, 0.0
        for rows, measured in table.items():
            of = [name for name in measured.seconds if families[name] == family and name not in out]
            if not of:
                continue
            name = min(of, key=measured.seconds.__getitem__)
            took, stock_s = measured.seconds[name], measured.stock_s
            if forced or took < stock_s or rows == 1 and took <= ONE_ROW_SLACK * stock_s:
                found[rows] = name
                saved += stock_s - took
        if found and saved > most:
            best, most = found, saved
    for rows, measured in {} if forced else table.items():
        of = [name for name in measured.seconds if name not in out]
        if not of or not best or rows == 1:
            continue
        name = min(of, key=measured.seconds.__getitem__)
        now_s = min(measured.stock_s, measured.seconds[best[rows]] if rows in best else measured.stock_s)
        if measured.seconds[name] < ANOTHER_FAMILY * now_s:
            best[rows] = name
    return best
