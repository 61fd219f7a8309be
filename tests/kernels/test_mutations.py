"""Each barrier, bound and mask of each kernel, removed in turn: the checks of the other test files must notice every one.

A mutant that changes no result is listed with the reason. Run with `pytest -m full`.
"""

import dataclasses
import importlib.util
import re
from functools import partial
from pathlib import Path

import emulator
import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.kernels import (
    accept,
    block_attention,
    block_gather_qmm,
    block_heads,
    block_linear,
    block_qmm,
    gated_delta,
    head_argmax,
)


def checks_of(name):
    """The module of tests that stands beside this one for a kernel."""
    path = Path(__file__).with_name(f"test_{name}.py")
    spec = importlib.util.spec_from_file_location(f"checks_of_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


test_accept = checks_of("accept")
test_block_attention = checks_of("block_attention")
test_block_gather_qmm = checks_of("block_gather_qmm")
test_block_heads = checks_of("block_heads")
test_block_linear = checks_of("block_linear")
test_block_qmm = checks_of("block_qmm")
test_gated_delta = checks_of("gated_delta")
test_head_argmax = checks_of("head_argmax")

pytestmark = [
    pytest.mark.full,
    pytest.mark.emulator,
]


def matching(text: str, at: int) -> int:
    """Index of the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError("unbalanced")


def conjuncts(condition: str) -> list[str]:
    """Parts of a condition joined by && outside parentheses."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(condition):
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth == 0 and condition[i : i + 2] == "&&":
            parts.append(condition[begin:i])
            begin = i + 2
    return [*parts, condition[begin:]]


def mutants(source: str):
    """(what was done, the text) for every removable guard of a body."""
    lines = source.split("\n")

    def swap(n: int, new: str) -> str:
        return "\n".join([*lines[:n], new, *lines[n + 1 :]])

    for n, line in enumerate(lines):
        code = line.split("//")[0]
        if "_barrier(" in code:
            yield f"{n + 1}: no barrier", swap(n, "")
        for m in re.finditer(r"\bif \(", code):
            end = matching(code, m.end() - 1)
            condition = code[m.end() : end]
            for new in ("true", "false") if "return" in code[end:] else ("true",):
                yield f"{n + 1}: if ({condition}) -> {new}", swap(n, f"{code[: m.end()]}{new}{code[end:]}")
            parts = conjuncts(condition)
            for i in range(len(parts) if len(parts) > 1 else 0):
                rest = "&&".join(parts[:i] + parts[i + 1 :])
                yield f"{n + 1}: if without {parts[i].strip()}", swap(n, f"{code[: m.end()]}{rest}{code[end:]}")
        if m := re.match(r"(\s*(?:if \(\w+(?: > 0)?\) )?(?:const )?(?:bool )?(?:seen|inside) = )(.*);$", code):
            parts = conjuncts(m[2])
            for i in range(len(parts)):
                rest = "&&".join(parts[:i] + parts[i + 1 :]) or "true"
                yield f"{n + 1}: without {parts[i].strip()}", swap(n, f"{m[1]}{rest};")
        if re.search(r"\bfor \(", code) and "pragma" not in lines[n - 1]:
            begin = code.index("for (") + 4
            head = code[begin : matching(code, begin)]
            if " < " in head or " <= " in head:
                new = head.replace(" <= ", " < ") if " <= " in head else head.replace(" < ", " <= ")
                yield f"{n + 1}: loop {new.split(';')[1].strip()}", swap(n, code.replace(head, new))
        if m := re.search(r"\((first \+ c|8 \* m \+ r|c) < (N|M) \? \1 : \2 - 1\)", code):
            yield f"{n + 1}: no clamp", swap(n, code.replace(m.group(), f"({m[1]})"))
        if m := re.search(r"(\w+\[?i?\]? > -INFINITY) \? ([^:]*(?:::[^:]*)*) : 0\.0f", code):
            yield f"{n + 1}: always {m[2]}", swap(n, code.replace(m.group(), m[2]))


def check_block_qmm():
    test_block_qmm.check(mx.float32, 4, 32, [(9, 64), (33, 544)], rows=(3,))
    test_block_qmm.test_a_row_that_is_not_finite_stays_alone(block_qmm.block_qmm_kernel)


def check_block_qmm_tiles():
    check, launch = test_block_qmm.check, test_block_qmm.TILES
    check(mx.float16, 4, 64, [(9, 64), (33, 9 * 64)], rows=(3, 9), launch=launch)
    check(mx.bfloat16, 8, 32, [(17, 3 * 32)], rows=(3,), launch=launch)


def check_block_qmm_eights():
    check, launch = test_block_qmm.check, test_block_qmm.EIGHTS
    check(mx.float16, 4, 64, [(9, 64), (33, 9 * 64)], rows=(3, 9), launch=launch)
    check(mx.bfloat16, 4, 32, [(17, 3 * 32)], rows=(3,), launch=launch)
    check(mx.bfloat16, 8, 32, [(17, 3 * 32)], rows=(3,), launch=launch)
    check(mx.float16, 8, 64, [(9, 64)], rows=(3,), launch=launch)


def check_block_linear(form, bits=(4, 8), tile=16):
    check = partial(test_block_linear.check, launch=partial(block_linear.block_linear_kernel, tile=tile))
    shapes = [(18, 64), (34, 9 * 64)] if "gated" in form else [(9, 64), (33, 9 * 64)]
    check(form, mx.float16, bits[0], 64, shapes, rows=(3, 9))
    check(form, mx.bfloat16, bits[-1], 32, [(18, 3 * 32)], rows=(3,))


def check_block_linear_norm():
    check_block_linear("norm")
    test_block_linear.test_a_row_that_is_not_finite_stays_alone("norm", "bfloat16", 4, 64)


def check_block_linear_residual():
    check_block_linear("residual")


def check_block_linear_gated():
    check_block_linear("gated")


def check_block_linear_dense():
    check_block_linear("", bits=(16,))


def check_block_linear_eights():
    check_block_linear("norm residual gated", tile=8)
    check_block_linear("norm residual gated", bits=(8, 4), tile=8)


def check_block_linear_dense_eights():
    check_block_linear("norm", bits=(16,), tile=8)


def check_block_gather_qmm():
    check, made = test_block_gather_qmm.check, test_block_gather_qmm.made
    x, w = made(4, 17, 96, rows=64)
    check(x, w, [3, 2, 1, 0] * 8 + [2] * 32)
    x, w = made(6, 9, 64, rows=3)
    check(x, w, [5, 0, 1, 2, 5, 0])


def check_block_heads():
    for form in ("a part", "neighbours"):
        test_block_heads.check(test_block_heads.FORMS[form], mx.float32, rows=(1,))


def check_accept():
    for n in (1, 7, 65):
        test_accept.test_every_place_of_the_first_difference(n)


def check_gated_delta():
    t = test_gated_delta
    t.check(*t.made(3, b=2), rows=(1, 2))
    t.check(*t.made(2, vector=True))


def check_head_argmax():
    t = test_head_argmax
    t.check(*t.made(299, 288, mx.float32, 4, rows=3))
    t.test_the_only_large_logit_is_found_anywhere(32)
    t.test_the_only_large_logit_is_found_anywhere(298)
    t.test_a_nan_logit_is_chosen_as_mlx_does_and_its_margin_is_nan()
    t.test_the_lowest_id_wins_a_tie_and_the_margin_is_zero((127, 128))
    t.test_the_reduction_over_many_stripes()


def check_block_attention():
    t = test_block_attention
    t.check(*t.made(258, hq=6, hk=2, m=3), rows=(1,))
    t.check(*t.made(70, hq=6, hk=2, m=3), rows=(), start=250)
    t.check(*t.made(70, hq=6, hk=2, m=3), rows=(), window=20, sinks=mx.array([3.0, -1.0, 0.5, 2.0, 0.0, 1.0]), start=250)
    t.check(*t.made(40, hq=6, hk=2, m=3), rows=(), causal=False)
    t.test_a_later_row_that_is_not_finite_spoils_no_earlier_row()


SAVES_WORK = "only saves work: what is computed beyond it is masked or not stored"
# (kernel, mutant as `numbered` names it): why no result changes.
SAME = {
    ("head_argmax", "if (first < N) -> true #1"): SAVES_WORK,
    ("head_argmax", "if (m < M) -> true #2"): SAVES_WORK,
    ("block_gather_qmm", "if without leader == none #1"): "any earlier pair of the expert will do",
    ("block_attention", "if (first < S && !before) -> true #1"): SAVES_WORK,
    ("block_attention", "if without first < S #1"): SAVES_WORK,
    ("block_attention", "if without !before #1"): SAVES_WORK,
    ("block_attention", "if (r < R) -> true #2"): SAVES_WORK,
    ("block_attention", "if (first_row + SIMDGROUPS * i < R) -> true #1"): SAVES_WORK,
    ("block_attention_reduce", "if (part != 0.0f) -> true #1"): "adds zero times a finite number: only -0.0 could tell",
}
# Of the text in tile_product.py, whose conditions on a form are constants.
NO_NORM = "only a norm reads what is computed"
ALWAYS = "true in this form"
NEVER = "in this form nothing reads what is computed, or it is not reached"
PRODUCTS = {
    "block_qmm_tiles",
    "block_qmm_tiles_EIGHTS",
    *(f"block_linear_{form}" for form in ("norm", "residual", "gated", "dense")),
}
NORMS_OWN = ("if (NORM) -> true #1", "loop m <= M #1", "loop k <= K #1", "if (lane == 0) -> true #1", "no barrier #1")
SAME |= {(kernel, what): NO_NORM for kernel in PRODUCTS - {"block_linear_norm"} for what in NORMS_OWN}
SAME |= {("block_linear_norm", f"if (NORM) -> true #{i}"): ALWAYS for i in (1, 2)}
SAME |= {(kernel, "if without (!GATED || h == 0) #1"): ALWAYS for kernel in PRODUCTS - {"block_linear_gated"}}
SAME[("block_linear_gated", "if (GATED) -> true #1")] = ALWAYS
SAME[("block_linear_residual", "if (RESIDUAL) -> true #1")] = ALWAYS
SAME |= {(kernel, f"if (BITS < 16) -> true #{i}"): ALWAYS for kernel in PRODUCTS - {"block_linear_dense"} for i in (1, 2)}
SAME |= {("block_linear_dense", f"if (BITS == 16) -> true #{i}"): ALWAYS for i in (1, 2, 3)}
EIGHTS = {"block_qmm_tiles_EIGHTS"}
SAME |= {(kernel, "if (BITS < 16) -> true #3"): ALWAYS for kernel in EIGHTS}
SAME |= {(kernel, "if (PAIRS > 1) -> true #1"): NO_NORM for kernel in EIGHTS}
SAME |= {(kernel, "if (PAIRS == 2) -> true #1"): "what is left is weights of 16 bits" for kernel in EIGHTS}
# Both forms of row_tiles.py with all that may stand around them.
AROUND, AROUND_DENSE = "block_linear_EIGHTS_norm_residual_gated", "block_linear_EIGHTS_dense_norm"
QUANTIZED = tuple(f"if (BITS < 16) -> true #{i}" for i in (1, 2, 3))
NORMED = ("if (NORM) -> true #1", "if (NORM) -> true #2")
SAME |= {(AROUND, what): ALWAYS for what in (*QUANTIZED, *NORMED, "if (GATED) -> true #1", "if (RESIDUAL) -> true #1")}
SAME |= {
    (AROUND, what): "what is left is weights of 16 bits" for what in ("if (PAIRS > 1) -> true #1", "if (PAIRS == 2) -> true #1")
}
SAME |= {(AROUND_DENSE, what): ALWAYS for what in (*NORMED, "if (BITS == 16) -> true #1", "if without (!GATED || h == 0) #1")}
SAME |= {(AROUND_DENSE, what): NEVER for what in QUANTIZED[1:]}
DENSE = ("if (BITS < 16) -> true #1", "if (BITS < 16) -> true #2", "if (HALF) -> true #1", "if (BITS == 4) -> true #1")
SAME |= {("block_linear_dense", what): NEVER for what in DENSE}


def numbered(source: str):
    """Mutants named by what was done and its count, so that names outlive line numbers: (name, line, text)."""
    count: dict[str, int] = {}
    for label, text in mutants(source):
        line, what = label.split(": ", 1)
        count[what] = count.get(what, 0) + 1
        yield f"{what} #{count[what]}", line, text


TEXTS = [
    (block_qmm, "KERNEL", check_block_qmm),
    (block_qmm, "TILES", check_block_qmm_tiles),
    (block_qmm, "EIGHTS", check_block_qmm_eights),
    # One text: what `_kernel` is given, in the place of a name.
    (block_linear, (4, True, False, False, 16), check_block_linear_norm),
    (block_linear, (4, False, True, False, 16), check_block_linear_residual),
    (block_linear, (4, False, False, True, 16), check_block_linear_gated),
    (block_linear, (16, False, False, False, 16), check_block_linear_dense),
    (block_linear, (4, True, True, True, 8), check_block_linear_eights),
    (block_linear, (16, True, False, False, 8), check_block_linear_dense_eights),
    (block_heads, "KERNEL", check_block_heads),
    (block_gather_qmm, "KERNEL", check_block_gather_qmm),
    (accept, "KERNEL", check_accept),
    (gated_delta, "KERNEL", check_gated_delta),
    (head_argmax, "KERNEL", check_head_argmax),
    (head_argmax, "REDUCE", check_head_argmax),
    (block_attention, "KERNEL", check_block_attention),
    (block_attention, "REDUCE", check_block_attention),
]


def place(monkeypatch, module, name, kernel):
    """Put a kernel where its launcher finds it; of a text with forms, in the place of this form alone."""
    if isinstance(name, str):
        monkeypatch.setattr(module, name, kernel)
    else:
        monkeypatch.setattr(module, "_kernel", lambda *form: kernel if ORIGINAL(*form).form == kernel.form else ORIGINAL(*form))


ORIGINAL = block_linear._kernel
IDS = ["-".join((m.__name__.split(".")[-1], n if isinstance(n, str) else ORIGINAL(*n).form)) for m, n, _ in TEXTS]


@pytest.mark.parametrize("module, name, check", TEXTS, ids=IDS)
def test_every_mutant_is_caught(module, name, check, monkeypatch):
    kernel = getattr(module, name) if isinstance(name, str) else ORIGINAL(*name)
    check()
    alive, names = [], []
    for what, line, source in numbered(kernel.source):
        place(monkeypatch, module, name, dataclasses.replace(kernel, source=source))
        # The reduction's own test launches the name that it imported.
        monkeypatch.setattr(test_head_argmax, "REDUCE", head_argmax.REDUCE)
        names.append(what)
        try:
            with np.errstate(all="ignore"):
                check()
        except emulator.CompileFault as e:
            pytest.fail(f"{kernel.name} line {line}, {what}: not a mutant, it does not compile: {e}")
        except (AssertionError, emulator.KernelFault):
            continue
        alive.append(what)
    same = {what for of, what in SAME if of == kernel.name + kernel.form}
    assert same <= set(names), f"listed, but no such mutant: {same - set(names)}"
    assert set(alive) == same, f"of {len(names)} mutants alive: {set(alive) - same}; listed but caught: {same - set(alive)}"
    assert len(names) >= 3
