"""What it costs to hold a float drafter in 4 or 8 bits: the error of each projection, and tau.

    python bench/draft_bits.py --model tiny --draft-model tiny [--prompts FILE] [--block-size B] [--max-tokens 64] [--limit N]
        [--out result.json]

The error of a projection is the root mean square of the difference of its outputs over that of its outputs, on what the float
drafter feeds it in one block after the first prompt: the mean over layers, and the largest. `weight` is the same of the matrix.
tau is the real loop's, greedy, over all rounds of all prompts: `dflash-mlx bench`'s own, or those of a file as its `--prompts`.
The text is the target's, so where its logits do not depend on the number of rows (a CPU) all three drafters see the same.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

BITS = ("none", 8, 4)


def inputs_of(drafter: Any, features: mx.array, ids: mx.array) -> dict[str, mx.array]:
    """Linear layer's path -> its inputs [n, K] over one block after these context features. Shapes: features [1, S, taps * H]."""
    names = {id(module): path for path, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    seen: dict[str, list[mx.array]] = {}
    own = nn.Linear.__call__

    def call(layer: nn.Linear, x: mx.array) -> mx.array:
        if name := names.get(id(layer)):
            seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))
        return own(layer, x)

    nn.Linear.__call__ = call
    try:
        mx.eval(drafter.draft(ids, features, drafter.make_cache(), 0, drafter.config.block_size))
    finally:
        nn.Linear.__call__ = own
    return {name: mx.concatenate(inputs) for name, inputs in seen.items()}


def rms(x: mx.array) -> float:
    return mx.sqrt(mx.mean(mx.square(x.astype(mx.float32)))).item()


def errors(drafter: Any, held: Any, inputs: dict[str, mx.array]) -> dict[str, dict[str, float]]:
    """Projection's name -> relative errors of its matrices and outputs over all layers."""
    floats, quantized = dict(drafter.named_modules()), dict(held.named_modules())
    found: dict[str, list[tuple[float, float]]] = {}
    for name, x in inputs.items():
        layer, other = floats[name], quantized[name]
        if not hasattr(other, "scales"):
            continue
        back = mx.dequantize(other.weight, other.scales, other.biases, group_size=other.group_size, bits=other.bits)
        y = layer(x)
        found.setdefault(re.sub(r"^layers\.\d+\.", "", name), []).append(
            (rms(back - layer.weight) / rms(layer.weight), rms(other(x) - y) / rms(y))
        )
    return {
        name: {"weight": float(np.mean(pairs, 0)[0]), "output": float(np.mean(pairs, 0)[1]), "most": float(np.max(pairs, 0)[1])}
        for name, pairs in found.items()
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both measurements of one pair."""
    from dflash_mlx import load, load_drafter, stream_generate
    from dflash_mlx.models.target import Target
    from dflash_mlx.text import encode
    from dflash_mlx.tools.bench_prompts import builtin_prompts, read_prompts

    model, tokenizer = load(args.model)
    drafters = {bits: load_drafter(args.draft_model, model, bits=bits) for bits in BITS}
    own = drafters["none"]
    chat = tokenizer.has_chat_template
    asked = read_prompts(args.prompts, chat) if args.prompts else builtin_prompts(chat)
    texts = [text for prompts in asked.kinds.values() for text in prompts[: args.limit]]
    if chat:
        texts = [tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts]
    prompts = [encode(tokenizer, text) for text in texts]

    features = Target(model, own.config.taps(len(model.layers)))(mx.array(prompts[0][:-1])[None]).features
    inputs = inputs_of(own, features, mx.array(prompts[0][-1:]))
    K = args.block_size or own.config.block_size
    result: dict[str, Any] = {
        "model": args.model,
        "draft_model": args.draft_model,
        "drafter_sha256": own.digest(),
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "block_size": K,
        "errors": {str(bits): errors(own, drafters[bits], inputs) for bits in BITS if bits != "none"},
        "tau": {},
    }
    for bits, drafter in drafters.items():
        lengths: list[int] = []
        for prompt in prompts:
            *_, last = stream_generate(model, tokenizer, prompt, args.max_tokens, drafter, block_size=K, prompt_lookup=False)
            lengths += last.stats.acceptance_lengths
        result["tau"][str(bits)] = {"tau": float(np.mean(lengths)), "rounds": len(lengths)}
    return result


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['draft_model']} for {result['model']}: relative error, mean over layers (largest)", ""]
    lines.append(f"{'projection':22} {'8 bit weight':>13} {'output':>16} {'4 bit weight':>13} {'output':>16}")
    for name in result["errors"]["4"]:
        cells = []
        for bits in ("8", "4"):
            one = result["errors"][bits][name]
            cells += [f"{one['weight']:13.4f}", f"{one['output']:8.4f} ({one['most']:.3f})"]
        lines.append(f"{name:22} {' '.join(cells)}")
    lines += ["", f"tau, block {result['block_size']}, greedy, {result['prompts']} prompts of {result['max_tokens']} tokens"]
    for bits, found in result["tau"].items():
        name = "float" if bits == "none" else f"{bits} bit"
        lines.append(f"{name:6} {found['tau']:.3f} ({found['rounds']} rounds)")
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--draft-model", required=True)
    p.add_argument("--prompts")
    p.add_argument("--block-size", type=int)
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--limit", type=int, help="prompts of each kind")
    p.add_argument("--out")
    args = p.parse_args()
    result = measure(args)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
