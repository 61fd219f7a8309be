"""Make a trained drafter the built-in one of `smollm2`.

    python scripts/swap_drafter.py DRAFTER            quantize it to 4 bits, compare what has to be equal, put it in place
    python scripts/swap_drafter.py DRAFTER --dry-run  say what would change, and change nothing

Puts config.json and model.safetensors into `dflash_mlx/pairs/smollm2/drafter`, writes the rows of the model card, and puts the
new size where a page or a test names the old one. Prints what has to be run and written by hand then. Nothing else depends on
that drafter: no test holds ids that it drafted (those of `tiny` do).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from dflash_mlx import convert
from dflash_mlx.config import DrafterConfig
from dflash_mlx.machine import size_text

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "dflash_mlx/pairs/smollm2"
MOST_BYTES = 18_000_000
NAMES_THE_SIZE = ("docs/tour.md", "tests/cli/test_widths.py")
EQUAL = ("block_size", "hidden_size", "target_layer_ids", "mask_token_id", "num_target_layers", "vocab_size")
BY_HAND = """Then, in this order:
  python -m dflash_mlx doctor --model smollm2 --draft-model smollm2
      its expected tau: `_EXPECTED_TAU` in dflash_mlx/tools/doctor.py
  python bench/acceptance_rules.py --model smollm2 --draft-model OLD smollm2 --out R.json \\
      --prompts bench/prompts/smollm2-final.jsonl
      a record in bench/results/; docs/training.md: the table of DFlash 2, and "The built-in drafter stays ..." there
  dflash-mlx bench --model smollm2 --draft-model smollm2
      on the GPU, old and new in one run; docs/benchmarks.md, README.md
  python scripts/tour.py --check
  pytest tests/cli/test_widths.py tests/core/test_builtin.py tests/core/test_docs.py
By hand: the last paragraph of the model card (tokens, runs), "How the built-in drafter was made" in docs/training.md, and a
line in CHANGELOG.md.
bench/results/smollm2-acceptance*.json, bench-smollm2-*.json and the others stay: each names its drafter's SHA-256."""


def size_of(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def prepared(drafter: Path, to: Path) -> Path:
    """The drafter in 4 bits; as it is where its files are quantized."""
    if json.loads((drafter / "config.json").read_text()).get("quantization"):
        return drafter
    convert(str(drafter), str(to), quantize=True)
    return to


def faults(old: DrafterConfig, new: DrafterConfig, size: int) -> list[str]:
    """What keeps the new drafter from taking the old one's place."""
    found = [
        f"{name} is {getattr(new, name)}, was {getattr(old, name)}" for name in EQUAL if getattr(new, name) != getattr(old, name)
    ]
    return found + ([f"it takes {size_text(size)}, at most {size_text(MOST_BYTES)} may be shipped"] if size > MOST_BYTES else [])


def card_rows(config: DrafterConfig, folder: Path) -> list[str]:
    """Rows of the model card's table."""
    name = "DFlash 2" if config.architecture == "DFlash2DraftModel" else "DFlash"
    held = mx.load(str(folder / "model.safetensors"))
    packed = {n.removesuffix(".scales") for n in held if n.endswith(".scales")}
    # An id of 32 bits holds eight weights of 4.
    weights = sum(
        a.size * (8 if n.removesuffix(".weight") in packed else 1) for n, a in held.items() if not n.endswith(("les", "ases"))
    )
    selector = f", selector of rank {config.selector_rank} over {config.selector_top_k} candidates" if name == "DFlash 2" else ""
    taps = ", ".join(map(str, config.target_layer_ids))
    return [
        f"| architecture | {name}, {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {config.num_key_value_heads} KV heads, block {config.block_size}, taps {taps}, "
        f"mask id {config.mask_token_id}{selector} |",
        f"| parameters | {weights / 1e6:.1f} M, affine 4 bit in groups of 64: {size_of(folder) / 1e6:.1f} MB |",
    ]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("drafter", type=Path)
    p.add_argument("--dry-run", action="store_true")
    args = p.parse_args()
    old_size, changed = size_of(PLACE / "drafter"), []
    with tempfile.TemporaryDirectory() as made:
        folder = prepared(args.drafter, Path(made) / "drafter")
        old, new = (DrafterConfig.from_dict(json.loads((f / "config.json").read_text())) for f in (PLACE / "drafter", folder))
        size = size_of(folder)
        if found := faults(old, new, size):
            print("It cannot take the place:", *found, sep="\n  ", file=sys.stderr)
            return 1
        texts = {PLACE / "README.md": card(card_rows(new, folder))}
        for name in NAMES_THE_SIZE:
            text = (ROOT / name).read_text()
            assert size_text(old_size) in text, f"{name} does not name {size_text(old_size)}"
            # In a column of its own the width stays.
            texts[ROOT / name] = text.replace(size_text(old_size), size_text(size).rjust(len(size_text(old_size))))
        changed = [PLACE / "drafter/config.json", PLACE / "drafter/model.safetensors", *texts]
        if not args.dry_run:
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(folder / file, PLACE / "drafter" / file)
            for path, text in texts.items():
                path.write_text(text)
    print(f"{size_text(old_size)} -> {size_text(size)}; " + ("would change:" if args.dry_run else "changed:"))
    print(*(f"  {path.relative_to(ROOT)}" for path in changed), BY_HAND, sep="\n")
    return 0


def card(rows: list[str]) -> str:
    """The model card with these rows in the place of those of the same names."""
    text = (PLACE / "README.md").read_text()
    for row in rows:
        start = row.split("|")[1]
        text, n = re.subn(rf"^\|{re.escape(start)}\|.*$", lambda _, row=row: row, text, flags=re.M)
        assert n == 1, f"the model card has no single row{start}"
    return text


if __name__ == "__main__":
    sys.exit(main())
