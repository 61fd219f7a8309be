"""Matrices as other tools pack them, and the same matrices in MLX's modes. Values do not change.

Knows which tensors make up one matrix in each published packing, and MLX's layouts: `affine` (w = scales * q + biases for each
group of 32, 64 or 128 inputs), `mxfp4`, `nvfp4`, `mxfp8`. What no mode can hold exactly becomes floats. Knows no files,
no models and no configs beyond what the record says of one matrix.

Sources (layouts only): vllm-project/compressed-tensors, src/compressed_tensors/compressors (pack_quantized, naive_quantized,
nvfp4, mxfp4, mxfp8) and quantization/lifecycle/forward.py (what a packed value means); AutoGPTQ's and AutoAWQ's qlinear
modules; NVIDIA ModelOpt's NVFP4 export; AMD Quark's MXFP4 export; `mx.quantize`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.errors import ConversionError

from .quantize import BITS, GROUP_SIZES

FLOAT_CHECKPOINT = "Use the float checkpoint that it was made from"
# The fp8 (E4M3) code of 1.0: with this scale everywhere, nvfp4 gives the plain fp4 values.
_FP8_ONE = 0x38
# mlx-lm's `sanitize` unpacks these and rounds them again if they are packed.
_TAKEN_APART = ("kv_b_proj",)
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


@dataclass(frozen=True)
class Packed:
    """The tensors of one matrix as a checkpoint has them.

    - name: the module, "model.layers.0.mlp.up_proj"; source: the checkpoint, for messages
    - tensors, types: last part of the name ("weight_packed") -> array, and its type in the file's header ("I32")
    - stated: what the config says about this matrix: num_bits, symmetric, group_size, zeros_minus_one, in_blocks (whether
      several rows share a scale), act_order; may be empty
    - floats: the half type of the checkpoint's own floats
    """

    name: str
    source: str
    tensors: Mapping[str, mx.array]
    types: Mapping[str, str]
    stated: Mapping
    floats: mx.Dtype = mx.bfloat16

    def need(self, part: str) -> mx.array:
        if part not in self.tensors:
            raise ConversionError(f"{self.name}.{part} is missing in {self.source}", "Download the checkpoint again")
        return self.tensors[part]

    def refuse(self, what: str, remedy: str = FLOAT_CHECKPOINT) -> ConversionError:
        return ConversionError(f"{self.name} in {self.source} {what}", remedy)


@dataclass(frozen=True)
class Matrix:
    """One matrix for MLX: only `weight` if it is float; else with scales (and biases) and the options of its mode.

    how: what was done, in words for the user.
    """

    tensors: Mapping[str, mx.array]
    options: Mapping | None
    how: str


def plain(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def read_matrix(parts: Packed, keep_packed: bool = True) -> Matrix | None:
    """The matrix of one module, as floats unless `keep_packed`; None if its tensors have no packing of `PACKINGS`.

    Raises:
      ConversionError: the packing is known and its tensors contradict one another or the record, or cannot be expressed.
    """
    main = next((parts.tensors[name] for name in ("weight_packed", "qweight", "weight") if name in parts.tensors), None)
    reader = next((read for fits, read in PACKINGS if fits(parts)), None) if main is not None and main.ndim == 2 else None
    matrix = reader(parts) if reader else None
    if matrix is None or matrix.options is None or (keep_packed and not parts.name.endswith(_TAKEN_APART)):
        return matrix
    scales = matrix.tensors["scales"]
    floats = parts.floats if scales.dtype == mx.uint8 else scales.dtype
    wide = [part.astype(mx.float32) if mx.issubdtype(part.dtype, mx.floating) else part for part in matrix.tensors.values()]
    weight = mx.dequantize(*wide, **matrix.options, dtype=mx.float32).astype(floats)
    return Matrix({"weight": weight}, None, f"{matrix.how.partition(':')[0]}: dequantized, because mlx-lm takes it apart")


# --- bit strings ------------------------------------------------------------------------------------------------------


def unpack(words: mx.array, bits: int, columns: int) -> mx.array:
    """[..., words] uint32 -> [..., columns] uint8, value i from bit i * bits of the little-endian string of a row.

    Also reads the older layout, in which no value crosses two words: its number of words differs if `bits` does not divide 32.
    """
    per_word = 32 // bits
    if 32 % bits == 0 or words.shape[-1] == -(-columns // per_word) != -(-columns * bits // 32):
        shifts = mx.arange(per_word, dtype=mx.uint32) * bits
        values = (words[..., None] >> shifts) & ((1 << bits) - 1)
    else:
        # eight values fill `bits` bytes
        octets = words.view(mx.uint8)
        octets = mx.pad(octets, [(0, 0)] * (octets.ndim - 1) + [(0, -octets.shape[-1] % bits)])
        octets = octets.reshape(*octets.shape[:-1], -1, bits).astype(mx.uint64)
        string = mx.sum(octets << (mx.arange(bits, dtype=mx.uint64) * 8), axis=-1, keepdims=True)
        values = (string >> (mx.arange(8, dtype=mx.uint64) * bits)) & ((1 << bits) - 1)
    return values.astype(mx.uint8).reshape(*words.shape[:-1], -1)[..., :columns]


def pack(values: mx.array, bits: int) -> mx.array:
    """[..., n] uint8 below 2**bits, n a multiple of 32 -> [..., n * bits / 32] uint32: the string that `unpack` reads."""
    octets = values
    if bits != 8:
        eights = values.reshape(*values.shape[:-1], -1, 8).astype(mx.uint64)
        string = mx.sum(eights << (mx.arange(8, dtype=mx.uint64) * bits), axis=-1, keepdims=True)
        octets = string.view(mx.uint8)[..., :bits].reshape(*values.shape[:-1], -1)
    return mx.contiguous(octets).view(mx.uint32)


# --- integers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Integers:
    """w = scales * (values - zeros), one scale for each group of inputs.

    Shapes:
      - words: [out, columns * bits / 32] uint32, the bit string of `unpack`; or values: [out, columns] uint8
      - scales: [out, groups]; zeros: [out, groups], counted as `values` are
    """

    bits: int
    columns: int
    scales: mx.array
    zeros: mx.array
    words: mx.array | None = None
    values: mx.array | None = None

    def to_mlx(self, parts: Packed, packing: str) -> Matrix:
        if self.zeros.shape != self.scales.shape:
            has = f"has zero points for {list(self.zeros.shape)} rows and groups, and scales for {list(self.scales.shape)}"
            raise parts.refuse(has, "Download the checkpoint again")
        group = _group(parts, self.columns, self.scales.shape[-1])
        # MLX's groups must also fit into a short last group.
        shared = math.gcd(group, self.columns)
        size = next((size for size in sorted(GROUP_SIZES, reverse=True) if shared % size == 0), None)
        if size is None:
            how = f"{packing}: dequantized, because MLX has no groups of {shared} inputs"
            return Matrix({"weight": self._floats(group)}, None, how)
        scales, biases = _exactly(self.scales, -self.zeros.astype(mx.float32) * self.scales.astype(mx.float32))
        wide = [mx.repeat(part, group // size, axis=-1)[:, : self.columns // size] for part in (scales, biases)]
        bits = next(bits for bits in BITS if bits >= self.bits)
        if self.words is not None and bits == self.bits and self.words.shape[-1] * 32 == self.columns * bits:
            weight = self.words
        else:
            weight = pack(self._values(), bits)
        tensors = {"weight": weight, "scales": wide[0], "biases": wide[1]}
        options = {"group_size": size, "bits": bits}
        return Matrix(tensors, options, f"{packing}: kept packed as {bits}-bit affine, group {size}")

    def _values(self) -> mx.array:
        return unpack(self.words, self.bits, self.columns) if self.values is None else self.values

    def _floats(self, group: int) -> mx.array:
        """[out, columns] in the type of the scales, rounded once, as the packing's own tools do it."""
        scales, zeros = (
            mx.repeat(part.astype(mx.float32), group, axis=-1)[..., : self.columns] for part in (self.scales, self.zeros)
        )
        return ((self._values().astype(mx.float32) - zeros) * scales).astype(self.scales.dtype)


def _group(parts: Packed, columns: int, groups: int) -> int:
    """Number of inputs per scale. The last group may be shorter if the record says how long the others are."""
    stated = parts.stated.get("group_size")
    if isinstance(stated, int) and stated > 0 and -(-columns // stated) == groups:
        return stated
    if columns % groups == 0:
        return columns // groups
    raise parts.refuse(f"has {groups} scales for each row of {columns} inputs, which no group size gives")


def _exactly(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    """Scales and biases in the type of the scales if it holds every bias exactly, else in float32. Shapes: as given."""
    narrow = biases.astype(scales.dtype)
    if mx.array_equal(narrow.astype(mx.float32), biases).item():
        return scales, narrow
    return scales.astype(mx.float32), biases


def _row_scales(parts: Packed, name: str, rows: int) -> mx.array:
    """A scale or zero point per tensor, row, group or block of rows, as [rows, groups]."""
    value = parts.need(name)
    value = value.reshape(1, 1) if value.size == 1 else value[:, None] if value.ndim == 1 else value
    shared = value.ndim == 2 and value.shape[0] not in (1, rows)
    if value.ndim != 2 or rows % value.shape[0] or (shared and parts.stated.get("in_blocks") is False):
        raise parts.refuse(f"has {name} of shape {list(value.shape)} for {rows} rows")
    return mx.repeat(value, rows // value.shape[0], axis=0)


def _check_order(parts: Packed, name: str, columns: int, groups: int) -> None:
    """Raises unless each group is a run of neighbouring inputs. -1 everywhere is how tools write "not used"."""
    if name not in parts.tensors and not parts.stated.get("act_order"):
        return
    index = parts.need(name).astype(mx.int32)
    run = mx.arange(columns, dtype=mx.int32) // _group(parts, columns, groups)
    if index.shape == run.shape and (mx.array_equal(index, run).item() or mx.all(index == -1).item()):
        return
    raise parts.refuse(
        f"is quantized in activation order (act-order, {name}); in MLX's modes a group is a run of neighbouring inputs",
        "Use a checkpoint quantized without act-order (actorder or desc_act off), or the float checkpoint",
    )


def _stated_bits(parts: Packed, possible: list[int], what: str) -> int:
    """The record's number of bits, which must fit the shapes; if the record has none, the number that follows from the shapes."""
    stated = parts.stated.get("num_bits")
    if stated in possible or (stated is None and len(possible) == 1):
        return stated or possible[0]
    said = f"config.json says {stated} bits" if stated is not None else "config.json does not say how many bits it has"
    raise parts.refuse(f"is {what}; {said}", "Take config.json from the repository that the weights came from")


def _compressed_integers(parts: Packed) -> Matrix:
    """compressed-tensors' pack-quantized: int32 words, each value plus half its range; zero points packed along the outputs."""
    words = parts.need("weight_packed")
    rows, scales = words.shape[0], _row_scales(parts, "weight_scale", words.shape[0])
    if "weight_shape" in parts.tensors:
        columns = int(parts.tensors["weight_shape"][-1].item())
    else:
        columns = words.shape[-1] * 32 // int(parts.stated.get("num_bits") or 4)
    possible = [b for b in range(1, 9) if words.shape[-1] in (-(-columns * b // 32), -(-columns // (32 // b)))]
    bits = _stated_bits(parts, possible, f"{words.shape[-1]} words for {columns} inputs")
    _check_order(parts, "weight_g_idx", columns, scales.shape[-1])
    zeros = mx.full(scales.shape, 1 << (bits - 1), dtype=mx.int32)
    if "weight_zero_point" in parts.tensors:
        if parts.types["weight_zero_point"] == "I32":
            down = mx.contiguous(parts.tensors["weight_zero_point"].T).view(mx.uint32)
            zeros = unpack(down, bits, rows).T.astype(mx.int32)
        else:
            zeros = (1 << (bits - 1)) + _row_scales(parts, "weight_zero_point", rows).astype(mx.int32)
    elif parts.stated.get("symmetric") is False:
        parts.need("weight_zero_point")
    words = words.view(mx.uint32)
    return _Integers(bits, columns, scales, zeros, words=words).to_mlx(parts, "integers packed in int32")


def _int8(parts: Packed) -> Matrix:
    """compressed-tensors' int-quantized and naive-quantized: one signed byte per value, for any number of bits."""
    weight = parts.need("weight")
    rows, columns = weight.shape
    scales = _row_scales(parts, "weight_scale", rows)
    _check_order(parts, "weight_g_idx", columns, scales.shape[-1])
    bits = parts.stated.get("num_bits") or 8
    half = 1 << (bits - 1)
    if bits > 8 or (bits < 8 and (mx.min(weight).item() < -half or mx.max(weight).item() >= half)):
        raise parts.refuse(
            f"has bytes beyond the {bits} bits that config.json says", "Take config.json from the repository of the weights"
        )
    zeros = mx.full(scales.shape, half, dtype=mx.int32)
    if "weight_zero_point" in parts.tensors:
        zeros = half + _row_scales(parts, "weight_zero_point", rows).astype(mx.int32)
    elif parts.stated.get("symmetric") is False:
        parts.need("weight_zero_point")
    values = (weight.astype(mx.int16) + half).astype(mx.uint8)
    return _Integers(bits, columns, scales, zeros, values=values).to_mlx(parts, "8-bit integers" if bits == 8 else "integers")


def _gptq(parts: Packed) -> Matrix:
    """AutoGPTQ: words along the inputs; zero points along the outputs, stored one less, except in the newer `gptq_v2`.

    Shapes: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in]
    """
    qweight, scales, qzeros = parts.need("qweight"), parts.need("scales"), parts.need("qzeros")
    groups, rows = scales.shape
    possible = [bits for bits in range(2, 9) if qzeros.shape[-1] in (-(-rows * bits // 32), -(-rows // (32 // bits)))]
    bits = _stated_bits(parts, possible, f"{qzeros.shape[-1]} words of zero points for {rows} outputs")
    columns = qweight.shape[0] * 32 // bits
    _check_order(parts, "g_idx", columns, groups)
    zeros = unpack(qzeros.view(mx.uint32), bits, rows).astype(mx.int32)
    # All zero points are half the range, so the matrix is symmetric and they are stored as they are, whatever the record says.
    if not mx.all(zeros == 1 << (bits - 1)).item():
        zeros = zeros + int(parts.stated.get("zeros_minus_one", True))
    words = mx.contiguous(qweight.T).view(mx.uint32)
    return _Integers(bits, columns, mx.contiguous(scales.T), zeros.T, words=words).to_mlx(parts, "GPTQ")


def _awq(parts: Packed) -> Matrix:
    """AutoAWQ's GEMM layout: eight outputs per word, the even ones in its lower half.

    Shapes: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    """
    qweight, scales = parts.need("qweight"), parts.need("scales")
    columns, rows = qweight.shape[0], scales.shape[-1]
    if parts.stated.get("num_bits") not in (None, 4):
        raise parts.refuse(f"is AWQ of 4 bits; config.json says {parts.stated['num_bits']}")

    def outputs(words: mx.array) -> mx.array:
        values = (words.view(mx.uint32)[..., None] >> mx.array(_AWQ_SHIFTS, dtype=mx.uint32)) & 15
        return values.reshape(words.shape[0], -1).T

    if parts.stated.get("symmetric") is False:
        parts.need("qzeros")
    zeros = outputs(parts.tensors["qzeros"]) if "qzeros" in parts.tensors else mx.full((rows, scales.shape[0]), 8)
    values = mx.contiguous(outputs(qweight).astype(mx.uint8))
    return _Integers(4, columns, mx.contiguous(scales.T), zeros.astype(mx.int32), values=values).to_mlx(parts, "AWQ")


# --- small floats -----------------------------------------------------------------------------------------------------


def _fp4(parts: Packed) -> Matrix:
    """Two fp4 values (E2M1) per byte, low half first: MXFP4 has a power of two per 32 inputs, NVFP4 an fp8 scale per 16.

    NVFP4 also has a factor for the whole matrix: compressed-tensors divides by `weight_global_scale`, ModelOpt multiplies by
    `weight_scale_2`. `mx.quantized_matmul` takes no such factor, so it goes into the fp8 scales if they hold the products
    exactly.
    """
    codes = mx.contiguous(parts.need(_fp4_part(parts))).view(mx.uint32)
    scales, columns = parts.need("weight_scale"), codes.shape[-1] * 8
    if scales.shape[:-1] != codes.shape[:-1]:
        raise parts.refuse(f"has scales of shape {list(scales.shape)} for {codes.shape[0]} rows")
    group = columns // scales.shape[-1]
    if group == 32 and parts.types["weight_scale"] in ("U8", "F8_E8M0"):
        return Matrix({"weight": codes, "scales": scales}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, "MXFP4: kept packed")
    if group != 16 or parts.types["weight_scale"] not in ("F8_E4M3", "U8"):
        raise parts.refuse(f"is fp4 with a {parts.types['weight_scale']} scale for {group} inputs, neither NVFP4 nor MXFP4")
    exact = mx.from_fp8(scales, dtype=mx.float32)
    if "weight_global_scale" in parts.tensors:
        exact = exact / parts.tensors["weight_global_scale"].astype(mx.float32).reshape(1, -1)
    else:
        own = "weight_scale_2" if "weight_scale_2" in parts.tensors else "weight_global_scale"
        exact = exact * parts.need(own).astype(mx.float32).reshape(1, -1)
    if not mx.all(mx.isfinite(exact)).item():
        raise parts.refuse("has scales that are no numbers, or are divided by a global scale of 0", "Download it again")
    folded = mx.to_fp8(exact)
    if mx.array_equal(mx.from_fp8(folded, dtype=mx.float32), exact).item():
        options = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
        return Matrix({"weight": codes, "scales": folded}, options, "NVFP4: kept packed")
    bare = mx.dequantize(codes, mx.full(scales.shape, _FP8_ONE, mx.uint8), group_size=16, bits=4, mode="nvfp4", dtype=mx.float32)
    weight = (bare * mx.repeat(exact, 16, axis=-1)).astype(parts.floats)
    how = f"NVFP4: dequantized to {plain(parts.floats)}, because fp8 scales do not hold their products with the global scale"
    return Matrix({"weight": weight}, None, how)


# Bytes of two fp4 values for one scale, by the scale's type: 16 inputs of NVFP4, 32 of MXFP4.
_FP4_BYTES_A_SCALE = {"F8_E4M3": 8, "U8": 16, "F8_E8M0": 16}


def _fp4_part(parts: Packed) -> str | None:
    """The tensor that holds fp4 codes: `weight_packed`, or with ModelOpt and Quark `weight`, half as wide as its inputs."""
    if parts.types.get("weight_packed") == "U8":
        return "weight_packed"
    scale = parts.tensors.get("weight_scale")
    if parts.types.get("weight") != "U8" or scale is None or scale.ndim != 2:
        return None
    each = _FP4_BYTES_A_SCALE.get(parts.types["weight_scale"], 0)
    return "weight" if parts.tensors["weight"].shape[-1] == each * scale.shape[-1] else None


def _mxfp8(parts: Packed) -> Matrix:
    """fp8 values (E4M3) and powers of two for 32 inputs, or for blocks of rows and inputs that are repeated to those."""
    weight, scales = parts.need("weight"), parts.tensors[_exponents_part(parts)]
    for axis, size in ((-2, 1), (-1, 32)):
        scales = mx.repeat(scales, weight.shape[axis] // scales.shape[axis] // size, axis=axis)
    tensors = {"weight": mx.contiguous(weight).view(mx.uint32), "scales": scales}
    return Matrix(tensors, {"group_size": 32, "bits": 8, "mode": "mxfp8"}, "MXFP8: kept packed")


def _exponents_part(parts: Packed) -> str | None:
    """The name of the scales of fp8 values if they are exponents (E8M0) that groups of 32 inputs can have."""
    for name in ("weight_scale", "weight_scale_inv", "scale"):
        scale, weight = parts.tensors.get(name), parts.tensors.get("weight")
        if scale is None or parts.types[name] not in ("U8", "F8_E8M0"):
            continue
        whole = scale.ndim == weight.ndim == 2 and weight.shape[0] % scale.shape[0] == 0
        return name if whole and weight.shape[1] % (32 * scale.shape[1]) == 0 else None
    return None


def _is_gptq(parts: Packed) -> bool:
    return _outputs_a_word(parts) == 1


def _is_awq(parts: Packed) -> bool:
    return _outputs_a_word(parts) == 8


def _outputs_a_word(parts: Packed) -> float:
    """How many outputs a column of `qweight` holds; 0 if there is no such matrix."""
    qweight, scales = parts.tensors.get("qweight"), parts.tensors.get("scales")
    return scales.shape[-1] / qweight.shape[-1] if qweight is not None and scales is not None and scales.ndim == 2 else 0


def _marlin(parts: Packed) -> Matrix:
    raise parts.refuse("is packed for Marlin's 2:4 sparse kernels (marlin-24), which no mode of MLX holds")


# (do these tensors have the packing?, how to read it), asked in this order
PACKINGS: tuple[tuple[Callable[[Packed], bool | str | None], Callable[[Packed], Matrix]], ...] = (
    (lambda parts: "scale_packed" in parts.tensors, _marlin),
    (lambda parts: parts.types.get("weight_packed") == "I32", _compressed_integers),
    (_fp4_part, _fp4),
    (lambda parts: parts.types.get("weight") == "I8" and "weight_scale" in parts.tensors, _int8),
    (lambda parts: parts.types.get("weight") in ("F8_E4M3", "U8") and _exponents_part(parts), _mxfp8),
    (_is_gptq, _gptq),
    (_is_awq, _awq),
)
# the last parts of tensor names in these packings
PARTS = frozenset(
    "weight weight_packed weight_scale weight_scale_inv scale weight_scale_2 weight_global_scale weight_zero_point weight_shape "
    "weight_g_idx scale_packed meta qweight qzeros scales g_idx".split()
)
