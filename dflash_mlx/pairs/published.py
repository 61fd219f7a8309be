"""Which published drafter belongs to which target. Knows names; fetches nothing.

The drafters are those that DFlash's authors list (z-lab on the hub: README of z-lab/dflash and their collections), and DSpark
ones that their trainers list (README of deepseek-ai/DeepSpec, cards of LiquidAI's LFM2.5-DSpark, RadixArk's collection), and a
DFly one (AngelSpec's docs/concepts/dfly.md), all read in November 2026. Of several drafters of a target the first is taken. Sizes
are of bfloat16 weights: computed from the published shapes, or the repo's own where stated there; None where neither is known.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..hub import cached_repo, hub_name


@dataclass(frozen=True)
class PublishedDrafter:
    """target: the base model; repo: its drafter on Hugging Face; billions: the target's parameters in 1e9, from its name or card;
    size_gb: of the drafter, 1e9 bytes, if known; note: what its card asks for; thinking: enable_thinking in its training, if
    stated."""

    target: str
    repo: str
    billions: float
    size_gb: float | None = None
    note: str = ""
    thinking: bool | None = None

    @property
    def target_4_bit_gb(self) -> float:
        """Size of the target in 4 bits, with a scale and a bias per 64 inputs."""
        return self.billions * _BITS / 8

    @property
    def drafter_4_bit_gb(self) -> float | None:
        """Size of the drafter in 4 bits, as a Mac holds it; None if not known."""
        return None if self.size_gb is None else self.size_gb * _BITS / 16


_BITS = 4.5

PUBLISHED = (
    PublishedDrafter("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", 4, 1.07, "for --no-thinking", False),
    PublishedDrafter("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", 8.2, 2.10, "for --no-thinking", False),
    PublishedDrafter("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", 30.5),
    PublishedDrafter("Qwen/Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash", 80),
    PublishedDrafter("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash", 4, 1.07),
    PublishedDrafter("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", 9),
    PublishedDrafter("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", 27),
    PublishedDrafter("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash", 35, 0.95),
    PublishedDrafter("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash", 122),
    PublishedDrafter("Qwen/Qwen3.5-397B-A17B", "z-lab/Qwen3.5-397B-A17B-DFlash", 397),
    PublishedDrafter("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", 27, 3.46),
    PublishedDrafter("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", 35, 0.77),
    PublishedDrafter("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", 27, 3.85, "DFlash 2"),
    PublishedDrafter("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash", 21, 1.57),
    PublishedDrafter("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", 117),
    PublishedDrafter("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", 31),
    PublishedDrafter("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 8),
    PublishedDrafter("google/gemma-4-26B-A4B-it", "z-lab/gemma-4-26B-A4B-it-DFlash", 26),
    PublishedDrafter("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash", 1000, 6.96),
    PublishedDrafter("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", 4, None, "DSpark, for --no-thinking", False),
    PublishedDrafter("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", 8.2, None, "DSpark, for --no-thinking", False),
    PublishedDrafter("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", 14.8, None, "DSpark, for --no-thinking", False),
    PublishedDrafter("google/gemma-4-12B-it", "deepseek-ai/dspark_gemma4_12b_block7", 12, None, "DSpark"),
    PublishedDrafter("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B-DFly-Block8", 8.2, None, "DFly"),
    PublishedDrafter("Qwen/Qwen3.8-27B", "RadixArk/Qwen3.8-27B-DSpark", 27, None, "DSpark"),
    PublishedDrafter("LiquidAI/LFM2.5-1.2B-Instruct", "LiquidAI/LFM2.5-1.2B-Instruct-DSpark", 1.2, None, "DSpark"),
    PublishedDrafter("LiquidAI/LFM2.5-2.6B", "LiquidAI/LFM2.5-2.6B-DSpark", 2.6, None, "DSpark"),
    PublishedDrafter("LiquidAI/LFM2.5-8B-A1B", "LiquidAI/LFM2.5-8B-A1B-DSpark", 8, None, "DSpark"),
    PublishedDrafter("LiquidAI/LFM2.5-24B-A2B", "LiquidAI/LFM2.5-24B-A2B-DSpark", 24, 0.66, "DSpark"),
)

# Endings that name a packing of the same model, not another model.
_PACKING = re.compile(
    r"""[-_.](?:
        \d+(?:\.\d+)?-?bits? | gs?\d+                         # 4bit, 4-bits; groups: g32, gs64
        | i?[qw]\d+(?:[-_.][\w.]+)? | w\d+a\d+ | ud | i1         # Q4_K_M, IQ4_XS, w4a16, UD-Q4_K_XL, i1-Q4_K_M
        | int[48] | fp(?:8|16|32) | bf16 | f16 | f32 | dynamic
        | nvfp4(?:a16)? | mxfp[48](?:_moe)?
        | awq | gptq | dwq | autoround | hqq | bnb | optiq | qat | mlx | gguf | unsloth | quantized | unquantized
        | \d{5}-of-\d{5}                                         # the first of a GGUF file's parts
    )$""",
    re.IGNORECASE | re.VERBOSE,
)


def base_name(name: str) -> str:
    """A model's name without organisation, directory and packing: `mlx-community/Qwen3-8B-4bit` gives `qwen3-8b`."""
    short = Path(name.rstrip("/")).name.removesuffix(".gguf")
    while (stripped := _PACKING.sub("", short)) != short:
        short = stripped
    # Meta's repos were renamed between releases.
    return short.lower().replace("meta-llama", "llama")


def published_drafter(model: str) -> PublishedDrafter | None:
    """The published drafter of a target given as hub repo or directory; None if none is known.

    A directory is known by what its conversion.json or its model card says it was made from, by the repo that it is in the hub
    cache, else by its own name.
    """
    # Some publishers put the organisation into the name: Qwen_Qwen3-8B-Q4_K_M.gguf.
    known = {base_name(name): entry for entry in reversed(PUBLISHED) for name in (entry.target, entry.target.replace("/", "_"))}
    for name in (*_origins(Path(model).expanduser()), hub_name(model)[0]):
        if found := known.get(base_name(name)):
            return found
    return None


def nearest_target(model: str) -> str | None:
    """The target with a published drafter whose name is most like a model's; None: none is like it."""
    known = {base_name(entry.target): entry.target for entry in PUBLISHED}
    near = difflib.get_close_matches(base_name(model), known, n=1, cutoff=0.7)
    return known[near[0]] if near else None


# What a card says of the template's setting, and how.
_THINKING = {
    True: re.compile(
        r"enable_thinking\W{1,3}true|(?:trained|made) with thinking(?! (?:mode )?(?:disabled|off|turned))", re.IGNORECASE
    ),
    False: re.compile(
        r"enable_thinking\W{1,3}false|without thinking|non-thinking|thinking (?:mode )?(?:is )?(?:disabled|turned off)",
        re.IGNORECASE,
    ),
}


def stated_thinking(drafter: str, directory: Path, raw: Mapping[str, Any]) -> tuple[bool, str] | None:
    """The template's enable_thinking that a drafter was trained with, and where that stands; None where nothing states it.

    Asked in this order: its config.json, its card (not one that speaks of both settings), the list of published drafters.

    Args:
      drafter: hub repo or directory as given; directory: its files; raw: its config.json
    """
    nested = raw.get("dflash_config") if isinstance(raw.get("dflash_config"), Mapping) else {}
    for part in (nested, raw):
        if isinstance(part.get("enable_thinking"), bool):
            return part["enable_thinking"], "config.json"
    card = directory / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        said = [setting for setting, pattern in _THINKING.items() if pattern.search(text)]
        if len(said) == 1:
            return said[0], "its card"
    known = {entry.repo.rpartition("/")[2].lower(): entry for entry in PUBLISHED if entry.thinking is not None}
    for name in (*_origins(directory), drafter):
        if found := known.get(base_name(name)):
            return found.thinking, f"{found.repo}'s card"
    return None


def _origins(directory: Path) -> list[str]:
    """Names that a local directory's own files, and its place in the hub cache, give for the model it was made from."""
    names = []
    record, card = directory / "conversion.json", directory / "README.md"
    if record.is_file():
        names.append(json.loads(record.read_text(encoding="utf-8")).get("source", {}).get("path_or_repo", ""))
    if card.is_file():
        names += re.findall(r"^(?:base_model:|-)\s*[\"']?([\w.-]+/[\w.-]+)", card.read_text(encoding="utf-8"), re.MULTILINE)
    return [name for name in (*names, cached_repo(directory)) if name]
