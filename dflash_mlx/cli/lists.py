"""`dflash-mlx models` and `cache`: what can be run here, and what is kept here."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from .options import AsJson, option, refuse
from .output import columns_of, say, wrapped

KEPT = "What is kept"
_BELOW = (
    "Sizes are for 4-bit weights; the text's KV cache comes on top. ?: the drafter's size is not known, so 'perhaps' fits "
    "without it. The line under a model names its drafter; where it has several, auto takes the first."
)
_RUN_ONE = 'dflash-mlx generate --model mlx-community/Qwen3-4B-4bit --draft-model auto --no-thinking -p "Hello"'


def models(as_json: AsJson = False) -> None:
    """List the models that have a drafter, with sizes and whether they fit on this machine.

    Memory is computed for a model and its drafter in 4 bits; the KV cache comes on top.
    """
    from ..machine import limit_bytes, limit_text
    from ..tools.columns import align

    # Smallest first: the top of the list runs on a small Mac.
    rows, limit = [*_built_in(), *sorted(_published(), key=lambda row: row["target_gb"])], limit_bytes() / 1e9
    for row in rows:
        row["fits"] = _fits(row["memory_gb"], row["drafter_gb"] is not None, limit)
    if as_json:
        print(json.dumps(rows))
        return
    lines, below = [["model", "size", "drafter", "memory", "fits here"]], []
    for row in rows:
        sizes = [_size(row[name]) for name in ("target_gb", "drafter_gb", "memory_gb")]
        lines.append([row["target"], *sizes, row["fits"]])
        note = f": {row['note']}" if row["note"] else ""
        below.append(f"{row['draft_model']}{note}" if row["draft_model"] != row["target"] else row["note"])
    print(*align(lines, columns_of(sys.stdout), below), sep="\n")
    text = limit_text()
    print(wrapped(f"{text[0].upper()}{text[1:]}. {_BELOW}", sys.stdout))
    print(wrapped(f"To run one in 4 bits:\n{_RUN_ONE}", sys.stdout, indent=2))


def _size(gb: float | None) -> str:
    from ..machine import size_text

    return "?" if gb is None else f"{gb:.0f} GB" if gb >= 99.5 else f"{gb:.1f} GB" if gb >= 1 else size_text(gb * 1e9)


def _fits(memory_gb: float, is_whole: bool, limit_gb: float) -> str:
    """Whether a pair of this size fits here. is_whole: the drafter's size is known and included; it may be half the target's."""
    if memory_gb > limit_gb:
        return "no"
    if is_whole:
        return "yes" if memory_gb <= 0.9 * limit_gb else "hardly"
    return "yes" if 1.5 * memory_gb <= 0.9 * limit_gb else "perhaps"


def _built_in() -> list[dict[str, Any]]:
    from ..pairs.builtin import BUILTIN_PAIRS, DEFAULT_PAIR, packaged

    rows = []
    for name, pair in BUILTIN_PAIRS.items():
        drafter = packaged(name, "drafter")
        size = sum(f.stat().st_size for f in drafter.glob("*.safetensors")) / 1e9
        note = f"built in{', the default' if name == DEFAULT_PAIR else ''}"
        sizes = {"target_gb": pair.target_gb, "drafter_gb": size, "memory_gb": pair.target_gb + size}
        rows.append({"target": name, "draft_model": name, **sizes, "built_in": True, "note": note, "about": pair.about})
    return rows


def _published() -> list[dict[str, Any]]:
    from ..pairs.published import PUBLISHED

    rows = []
    for pair in PUBLISHED:
        target, drafter = pair.target_4_bit_gb, pair.drafter_4_bit_gb
        sizes = {"target_gb": target, "drafter_gb": drafter, "memory_gb": target + (drafter or 0)}
        rows.append({"target": pair.target, "draft_model": pair.repo, **sizes, "built_in": False, "note": pair.note})
    return rows


def cache(
    delete: Annotated[list[str] | None, option(KEPT, help="Delete the entry of this name; can be repeated. Asks first.")] = None,
    yes: Annotated[bool, option(KEPT, "--yes", "-y", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what this program keeps on disk, with size and age: models, timings, chat sessions, prompt caches.

    Models from Hugging Face are in its own cache, which other programs share: use `hf cache` for those.
    """
    from ..machine import size_text
    from ..tools.columns import age_text
    from ..tools.stored import KINDS, named, stored

    if yes and not delete:
        raise refuse("--yes", "it has no effect without --delete")
    found = stored()
    if delete:
        _delete(named(delete, found), yes)
        return
    if as_json:
        keys = ("name", "kind", "size_bytes", "used_at")
        print(json.dumps([{**{key: getattr(one, key) for key in keys}, "path": str(one.path)} for one in found]))
        return
    for kind, heading in KINDS.items():
        if some := [one for one in found if one.kind == kind]:
            print(heading)
            for one in some:
                size = size_text(one.size_bytes) if one.size_bytes >= 1e5 else f"{one.size_bytes / 1e3:.1f} kB"
                print(wrapped(f"{size:>10}  {age_text(one.used_at):>9}  {one.name}", sys.stdout, indent=12))
    if not found:
        say("Nothing is kept here yet.")
        return
    total = size_text(sum(one.size_bytes for one in found))
    say(f"{total} in all; the age is that of the last use.\nTo delete one: dflash-mlx cache --delete NAME")


def _delete(chosen: list[Any], yes: bool) -> None:
    """Delete these, after asking unless `yes`.

    Raises:
      DFlashError: there is no terminal to ask at.
    """
    from ..errors import DFlashError
    from ..machine import size_text

    for one in chosen:
        say(f"{one.name}: {size_text(one.size_bytes)} in {one.path}")
    if not yes:
        if not sys.stdin.isatty():
            raise DFlashError("deleting must be confirmed, which needs a terminal, so nothing was deleted", "Give --yes")
        sys.stderr.write(f"Delete {'this' if len(chosen) == 1 else f'these {len(chosen)}'}? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("Nothing was deleted.")
            return
    for one in chosen:
        one.delete()
        say(f"Deleted {one.name}.")
