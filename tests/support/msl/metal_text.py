"""Write the Metal file that MLX would generate for each kernel, for `xcrun metal` on a Mac.

    python tests/support/msl/metal_text.py OUT
    include="$(python -c 'import mlx; print(list(mlx.__path__)[0])')/include"
    for f in OUT/*.metal; do xcrun -sdk macosx metal -c -std=metal3.1 -I "$include" "$f" -o /dev/null || exit 1; done

The texts are the launchers' own, caught on their way to `mx.fast.metal_kernel`: nothing runs, no compiler is needed here.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
from emulator import ATTRIBUTES, CONSTANT_BELOW, TYPES

from dflash_mlx.kernels import names
from dflash_mlx.kernels.accept import accept_kernel
from dflash_mlx.kernels.block_attention import block_attention_kernel
from dflash_mlx.kernels.block_gather_qmm import block_gather_qmm_kernel
from dflash_mlx.kernels.block_heads import Heads, block_heads_kernel
from dflash_mlx.kernels.block_linear import Weights, block_linear_kernel
from dflash_mlx.kernels.block_qmm import TILE_TYPES, block_qmm_kernel, block_qmm_tiles_kernel
from dflash_mlx.kernels.gated_delta import gated_delta_kernel
from dflash_mlx.kernels.head_argmax import head_argmax_kernel

# What stands around a product, each a text: (norm, residual, gated).
AROUND = {"": (0, 0, 0), "_norm": (1, 0, 0), "_residual": (0, 1, 0), "_norm_gated": (1, 0, 1), "_norm_residual_gated": (1, 1, 1)}
LINEAR = [dense + form for dense in ("", "_dense") for form in (*AROUND, "_residual_heads")]


def metal_file(name, input_names, inputs, output_names, output_dtypes, source, header, template) -> str:
    """MLX's utilities, the signature by its rules, the body, and the instantiation."""
    parameters = []
    for n, a in zip(input_names, inputs, strict=True):
        space = "constant" if a.size < CONSTANT_BELOW else "device"
        parameters.append(f"const {space} {TYPES[a.dtype]}{'*' if a.ndim else '&'} {n} [[buffer({len(parameters)})]]")
        for end, kind in (("_shape", "int*"), ("_strides", "int64_t*"), ("_ndim", "int&")):
            if n + end in source and a.ndim:
                parameters.append(f"const constant {kind} {n}{end} [[buffer({len(parameters)})]]")
    for n, dtype in zip(output_names, output_dtypes, strict=True):
        parameters.append(f"device {TYPES[dtype]}* {n} [[buffer({len(parameters)})]]")
    parameters += [f"{kind} {n} [[{n}]]" for n, kind in ATTRIBUTES.items() if n in source]
    kinds, values = [], []
    for n, v in template:
        kinds.append(f"{'bool' if isinstance(v, bool) else 'int' if isinstance(v, int) else 'typename'} {n}")
        values.append(str(int(v)) if isinstance(v, int) else TYPES[v])
    line = f"template <{', '.join(kinds)}>\n" if kinds else ""
    use = f"{name}<{', '.join(values)}>"
    end = f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({use}) {use};\n' if kinds else "\n"
    body = ",\n  ".join(parameters)
    front = f'#include "mlx/backend/metal/kernels/utils.h"\n{header}\n{line}'
    return f"{front}[[kernel]] void {name}(\n  {body}) {{\n{source}\n}}\n{end}"


def collect() -> dict[str, str]:
    """name of a file: its text, for every kernel at types and shapes that make different texts."""
    texts: dict[str, str] = {}

    def metal_kernel(name, input_names, output_names, source, header="", ensure_row_contiguous=True):
        def launch(*, inputs, output_shapes, output_dtypes, template=(), **others):
            text = metal_file(name, input_names, inputs, output_names, output_dtypes, source, header, template)
            if text not in texts.values():
                texts[f"{name}_{sum(k.startswith(name + '_') for k in texts)}"] = text
            return [mx.zeros(s, dtype=d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    before, mx.fast.metal_kernel = mx.fast.metal_kernel, metal_kernel
    try:
        for name in names(text=True):
            EXAMPLES[name]()
    finally:
        mx.fast.metal_kernel = before
    return texts


def products(launch, types=(mx.float32, mx.float16, mx.bfloat16)):
    for dtype, bits, rows in itertools.product(types, (4, 8), (1, 2, 4, 8, 16)):
        launch(mx.zeros((rows, 256), dtype=dtype), *quantized(dtype, bits), 64, bits)


def quantized(dtype: mx.Dtype, bits: int) -> list[mx.array]:
    return mx.quantize(mx.zeros((64, 256), dtype=dtype), group_size=64, bits=bits)


def every_linear() -> None:
    for dtype in TILE_TYPES:
        x = mx.zeros((16, 256), dtype=dtype)
        for bits, rows in itertools.product((4, 8), (1, 2, 4, 8, 16)):
            linear(x[:rows], Weights(*quantized(dtype, bits), 64, bits))
        linear(x, Weights(mx.zeros((64, 256), dtype=dtype)))


def linear(x: mx.array, w: Weights) -> None:
    """Every form of a product."""
    n = w.w.shape[0]
    for norm, residual, gated in AROUND.values():
        given = (mx.zeros((x.shape[1],), dtype=x.dtype), 1e-6) if norm else None
        added = mx.zeros((x.shape[0], n // 2 if gated else n), dtype=x.dtype) if residual else None
        for tile in (8, 16):
            block_linear_kernel(x, w, given, added, bool(gated), tile=tile)
            if AROUND["_residual"] == (norm, residual, gated):
                block_linear_kernel(x.reshape(4, -1, 64), w, None, added, tile=tile, heads=True)


def every_heads() -> None:
    for dtype, traditional in itertools.product((mx.float32, mx.float16, mx.bfloat16), (False, True)):
        y, context, weight = (mx.zeros(shape, dtype=dtype) for shape in ((1, 2, 8 * 64), (1, 2, 8 * 64), (64,)))
        turns = mx.zeros((1, 1, 4, 64))
        block_heads_kernel(y, context, mx.array([256]), weight, weight, turns, Heads(4, 2, 64, 64, traditional, 1e-6))


def every_gather() -> None:
    for dtype, bits, pairs in itertools.product((mx.float32, mx.float16, mx.bfloat16), (4, 8), (2, 16)):
        experts = [a.reshape(4, 16, -1) for a in quantized(dtype, bits)]
        block_gather_qmm_kernel(mx.zeros((2, 256), dtype=dtype), *experts, mx.zeros((pairs,), dtype=mx.uint32), 64, bits)


def every_head() -> None:
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = mx.zeros((16, 256), dtype=dtype)
        for bits in (4, 8):
            w = quantized(dtype, bits)
            head_argmax_kernel(x, *w, 64, bits)
            head_argmax_kernel(x[:1], *w, 64, bits, softcap=30.0, logit_bias=mx.zeros((64,), dtype=dtype))
        head_argmax_kernel(x, x)


def every_attention() -> None:
    for dtype, (d, hq, hk) in itertools.product((mx.float32, mx.float16, mx.bfloat16), ((64, 64, 8), (128, 32, 8), (256, 24, 4))):
        if d * dtype.size <= 512:
            q, kv = mx.zeros((1, hq, 16, d), dtype=dtype), mx.zeros((1, hk, 64, d), dtype=dtype)
            block_attention_kernel(q, kv, kv, 0.1)
            block_attention_kernel(q[:, :, :1], kv, kv, 0.1, window=32, sinks=mx.zeros((hq,), dtype=dtype))
            block_attention_kernel(q, kv, kv, 0.1, causal=False)


def every_recurrence() -> None:
    for dtype, vector in itertools.product((mx.float32, mx.float16, mx.bfloat16), (False, True)):
        k, v = mx.zeros((1, 2, 2, 128), dtype=dtype), mx.zeros((1, 2, 4, 128), dtype=dtype)
        g = mx.zeros((1, 2, 4, 128) if vector else (1, 2, 4))
        gated_delta_kernel(k, k, v, g, v[..., 0], mx.zeros((1, 4, 128, 128)))


def every_accept() -> None:
    for n in (3, 15):
        accept_kernel(mx.zeros((1, n), dtype=mx.int32), mx.zeros((1, n + 1), dtype=mx.int32))


# What launches each registered kernel at types and shapes that make different texts.
EXAMPLES = {
    "block_qmm": lambda: products(block_qmm_kernel),
    "block_qmm_tiles": lambda: [products(partial(block_qmm_tiles_kernel, tile=tile), TILE_TYPES) for tile in (8, 16)],
    "block_linear": every_linear,
    "block_heads": every_heads,
    "block_gather_qmm": every_gather,
    "head_argmax": every_head,
    "block_attention": every_attention,
    "accept": every_accept,
    "gated_delta": every_recurrence,
}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    texts = collect()
    for name, text in texts.items():
        (out / f"{name}.metal").write_text(text)
    print(f"{len(texts)} texts in {out}")


if __name__ == "__main__":
    main()
