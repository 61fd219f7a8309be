"""Answers of a built-in pair on the device at hand, with DFLASH_MLX_KERNELS as it is set: `off` first, then with kernels.

    DFLASH_MLX_KERNELS=off     python tests/support/on_off.py tiny RECORD      writes the answers
    DFLASH_MLX_KERNELS=accept  python tests/support/on_off.py tiny RECORD      is compared with them, id by id

Behind a tie (`rows.TIE`) the comparison goes on with the text of `off`. Exit status 1: another id where there is no tie, more
ties than one in 50 ids, or no launch. `--made-up`: the emulator is the GPU, and nothing is tried before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import environment
import mlx.core as mx
import mlx.nn as nn
import rows

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.kernels import autotune
from dflash_mlx.kernels.routing import kernel_calls

PROMPTS = ("def test_", "Explain why the sky is blue.", "import os\n\ndef main():")
ROWS = 8


def count_launches(metal_kernel) -> Counter:
    """Count launches of what `mx.fast.metal_kernel` makes from here on, by name."""
    launches: Counter = Counter()

    def counting(name, *given, **options):
        launch = metal_kernel(name, *given, **options)

        def run(*given, **options):
            launches[name] += 1
            return launch(*given, **options)

        return run

    mx.fast.metal_kernel = counting
    return launches


def make_up_gpu() -> None:
    """The emulator is the GPU and kernels run untried: a trial would take it minutes."""
    sys.path.insert(0, str(Path(__file__).parent / "msl"))
    import emulator

    mx.set_default_device(mx.cpu)
    mx.fast.metal_kernel = emulator.metal_kernel
    autotune.has_gpu = lambda: True
    autotune.choose = lambda question, rows: next((c for c in question.candidates if autotune.allowed(c.kernel)), None)


def compare(answer, model, prompts, right) -> tuple[int, list[str]]:
    """(ties, differences that are none): what `answer` says behind each prompt against what is right there."""
    ties, wrong = 0, []
    for prompt, said in zip(prompts, right, strict=True):
        done = 0
        while done < len(said):
            ours = answer([*prompt, *said[:done]], len(said) - done)
            at = rows.first_difference(said[done:], ours)
            if at is None:
                break
            if at >= min(len(ours), len(said) - done):
                wrong.append(f"after {done + at} ids one answer ends and the other goes on")
                break
            apart, tie = rows.gap(model, [*prompt, *said[: done + at]], said[done + at], ours[at])
            if not tie:
                wrong.append(f"id {done + at} is {ours[at]} and not {said[done + at]}: logits {apart:.2g} apart, no tie")
                break
            ties, done = ties + 1, done + at + 1
    return ties, wrong


def main(arguments: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pair")
    p.add_argument("record", type=Path)
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--made-up", action="store_true")
    args = p.parse_args(arguments)
    if args.made_up:
        make_up_gpu()
    launches = count_launches(mx.fast.metal_kernel)
    model, tokenizer = load(args.pair)
    if not kernel_calls(model):
        nn.quantize(model, 32, 4)
    drafter = load_drafter(args.pair, model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]

    def answer(prompt: list[int], most: int) -> list[int]:
        # A fixed width: to choose one, passes would be timed.
        return [r.token for r in stream_generate(model, tokenizer, prompt, most, draft_model=drafter, block_size=ROWS)]

    with tempfile.TemporaryDirectory() as folder:
        # What a runner's GPU is found to be good at is not the user's.
        environment.own_cache(os.environ, Path(folder))
        if os.environ[autotune.VARIABLE] == "off":
            answers = [answer(prompt, args.tokens) for prompt in prompts]
            args.record.write_text(json.dumps({"answers": answers}))
            print(f"{args.pair}, kernels off: {sum(map(len, answers))} ids, {sum(launches.values())} launches of ours")
            sys.exit(1 if launches else 0)
        right = json.loads(args.record.read_text())["answers"]
        ties, wrong = compare(answer, model, prompts, right)
    ids = sum(map(len, right))
    counted = ", ".join(f"{name.removeprefix('dflash_')} {n}" for name, n in launches.items()) or "none"
    summary = f"{ids} ids, {ties} ties, launches: {counted}"
    args.record.write_text(json.dumps({"answers": right, "summary": summary}))
    if wrong or not launches or ties > max(1, ids // 50):
        sys.exit(f"{args.pair}: {'; '.join([*wrong, summary])}")


if __name__ == "__main__":
    main()
