"""Matrices packed in NumPy as other tools pack them, each with the values that it stands for. Shares no code with the package.

Layouts as published: vllm-project/compressed-tensors (pack_quantized/helpers.py, nvfp4/helpers.py, mx_utils.py), AutoGPTQ's and
AutoAWQ's qlinear modules, the OCP microscaling formats, NVIDIA ModelOpt's NVFP4 export.
"""

import json
import struct
from pathlib import Path

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([E2M1, -E2M1])
_CODES = np.arange(256)
_EXPONENT, _FRACTION = (_CODES >> 3) & 15, _CODES & 7
# fp8 E4M3: bias 7, no infinities, 0x7f and 0xff are no numbers
E4M3 = np.where(_EXPONENT == 0, _FRACTION / 8 * 2.0**-6, (1 + _FRACTION / 8) * 2.0 ** (_EXPONENT - 7.0)).astype(np.float32)
E4M3 = np.where(_CODES > 127, -E4M3, E4M3)


def bf16(values):
    """float32 values rounded to bfloat16, to nearest and ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def as_type(values, dtype):
    """(header type, array to store, float32 values) of floats in BF16, F16 or F32."""
    if dtype == "BF16":
        rounded = bf16(values)
        return dtype, (rounded.view(np.uint32) >> 16).astype(np.uint16), rounded
    stored = np.asarray(values, {"F16": np.float16, "F32": np.float32}[dtype])
    return dtype, stored, stored.astype(np.float32)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """name -> (type in the header, array of the same bytes): also types that NumPy lacks."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """What `write_safetensors` wrote."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    kinds = {"I32": "i4", "I64": "i8", "I8": "i1", "F32": "f4", "F16": "f2", "BF16": "u2"}
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            array = np.frombuffer(raw[begin:end], kinds.get(entry["dtype"], "u1")).reshape(entry["shape"])
            found[name] = entry["dtype"], array
    return found


def bit_string(values, bits):
    """[rows, n] -> [rows, ceil(n * bits / 32)] int32: value i in bits i * bits and up; the last word is filled with zeros."""
    one_a_bit = ((values[..., None].astype(np.int64) >> np.arange(bits)) & 1).reshape(len(values), -1).astype(np.uint8)
    octets = np.packbits(one_a_bit, axis=-1, bitorder="little")
    return np.ascontiguousarray(np.pad(octets, [(0, 0), (0, -octets.shape[1] % 4)])).view(np.int32)


def whole_in_words(values, bits):
    """The older layout: as many whole values as an int32 holds, the other bits empty."""
    per = 32 // bits
    padded = np.pad(values.astype(np.int64), [(0, 0), (0, -values.shape[1] % per)]).reshape(len(values), -1, per)
    return (padded << (np.arange(per) * bits)).sum(-1).astype(np.uint32).view(np.int32)


def _integers(weight, bits, groups, symmetric, scale_dtype):
    """-> (signed integers [out, in], scale entry, zero points [out, groups] int, values) at one scale for in / groups inputs."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    rows, columns = weight.shape
    grouped = weight.reshape(rows, groups, -1)
    if symmetric:
        scale, zero = np.abs(grouped).max(-1) / (high + 0.5), np.zeros((rows, groups), np.int64)
    else:
        scale = np.maximum((grouped.max(-1) - grouped.min(-1)) / (high - low), 1e-6)
        zero = np.clip(np.round(low - grouped.min(-1) / scale), low, high).astype(np.int64)
    kind, stored, scale = as_type(scale, scale_dtype)
    wide = scale.repeat(columns // groups, 1), zero.repeat(columns // groups, 1)
    integers = np.clip(np.round(weight / np.maximum(wide[0], 1e-9)) + wide[1], low, high).astype(np.int64)
    return integers, (kind, stored), zero, ((integers - wide[1]) * wide[0]).astype(np.float32)


def _with_a_short_group(weight, bits, group, symmetric, scale_dtype):
    """`_integers` of groups of this size, the last of which may have fewer inputs."""
    columns = weight.shape[1]
    whole = np.pad(weight, [(0, 0), (0, -columns % group)])
    integers, scale, zero, values = _integers(whole, bits, whole.shape[1] // group, symmetric, scale_dtype)
    return integers[:, :columns], scale, zero, values[:, :columns]


def pack_quantized(weight, bits=4, group=64, symmetric=True, dtype="BF16", dense=True, packed_zeros=True, float_out=False):
    """compressed-tensors pack-quantized; group 0: one scale a row. float_out: what its tools give in the scales' own type."""
    rows, columns = weight.shape
    integers, scale, zero, values = _with_a_short_group(weight, bits, group or columns, symmetric, dtype)
    half, words = 1 << (bits - 1), bit_string if dense else whole_in_words
    tensors = {
        "weight_packed": ("I32", words(integers + half, bits)),
        "weight_scale": scale,
        "weight_shape": ("I64", np.array([rows, columns])),
    }
    if not symmetric and packed_zeros:
        tensors["weight_zero_point"] = ("I32", words((zero + half).T, bits).T)
    elif not symmetric:
        tensors["weight_zero_point"] = ("I8", zero.astype(np.int8))
    return tensors, bf16(values) if float_out else values


def int_quantized(weight, bits=8, group=0, symmetric=True, dtype="BF16", tensor=False):
    """compressed-tensors int-quantized and naive-quantized: a signed byte a value."""
    if tensor:
        integers, scale, zero, values = _integers(weight.reshape(1, -1), bits, 1, symmetric, dtype)
        integers, values, scale = integers.reshape(weight.shape), values.reshape(weight.shape), (scale[0], scale[1].reshape(1))
        zero = zero.reshape(1)
    else:
        groups = weight.shape[1] // group if group else 1
        integers, scale, zero, values = _integers(weight, bits, groups, symmetric, dtype)
    tensors = {"weight": ("I8", integers.astype(np.int8)), "weight_scale": scale}
    return tensors if symmetric else tensors | {"weight_zero_point": ("I8", zero.astype(np.int8))}, values


def _nearest(values, table):
    """Index of the entry of `table` that is nearest to each value."""
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def _fp4(weight, group, scale):
    """Codes, two a byte with the first in the low half, and the fp4 values, for scales [out, in / group]."""
    codes = _nearest(weight / np.maximum(scale.repeat(group, 1), 1e-12), FP4)
    return codes[:, ::2] | (codes[:, 1::2] << 4), FP4[codes]


def _powers(weight, group, largest):
    """E8M0: bytes and powers of two, such that the largest of each group is at most `largest`."""
    peak = np.abs(weight.reshape(len(weight), -1, group)).max(-1)
    exponents = np.ceil(np.log2(np.maximum(peak, 1e-12) / largest)).astype(int) + 127
    return exponents.astype(np.uint8), 2.0 ** (exponents - 127.0)


def mxfp4(weight, scale_type="U8"):
    exponents, scale = _powers(weight, 32, 6)
    codes, values = _fp4(weight, 32, scale)
    exact = (values * scale.repeat(32, 1)).astype(np.float32)
    return {"weight_packed": ("U8", codes), "weight_scale": (scale_type, exponents)}, exact


def mxfp8(weight, block_rows=1, block=32, scale_type="U8", name="weight_scale"):
    rows, columns = weight.shape
    blocks = weight.reshape(rows // block_rows, block_rows, columns // block, block).swapaxes(1, 2)
    exponents, scale = _powers(blocks.reshape(rows // block_rows, -1), block_rows * block, 448)
    wide = scale.repeat(block_rows, 0).repeat(block, 1)
    codes = np.delete(_CODES, (127, 255))[_nearest(weight / wide, np.delete(E4M3, (127, 255)))].astype(np.uint8)
    return {"weight": ("F8_E4M3", codes), name: (scale_type, exponents)}, (E4M3[codes] * wide).astype(np.float32)


def nvfp4(weight, divisor, modelopt=False):
    """NVFP4: fp8 scales for 16 inputs that are `divisor` times what they stand for; ModelOpt stores 1 / divisor and no `_packed`.

    Values in float32: rounded to bfloat16 where the scales cannot take the divisor up.
    """
    divisor = np.float32(divisor)
    peak = np.abs(weight.reshape(len(weight), -1, 16)).max(-1) / 6
    codes8 = _nearest(peak * divisor, E4M3[:127])
    factor = np.float32(1) / divisor
    scale = E4M3[codes8] * factor if modelopt else E4M3[codes8] / divisor
    codes, values = _fp4(weight, 16, scale)
    exact = (values * scale.repeat(16, 1)).astype(np.float32)
    if modelopt:
        factor = ("F32", np.array(factor))
        return {"weight": ("U8", codes), "weight_scale": ("F8_E4M3", codes8), "weight_scale_2": factor}, exact
    divided = ("F32", np.array([divisor]))
    return {"weight_packed": ("U8", codes), "weight_scale": ("F8_E4M3", codes8), "weight_global_scale": divided}, exact


def gptq(weight, bits=4, group=64, symmetric=True, v2=False, order=None):
    """AutoGPTQ: words down the inputs; zero points stored less one, but in gptq_v2. order: input -> group, for act-order."""
    columns = weight.shape[1]
    integers, (kind, scale), zero, _ = _with_a_short_group(weight, bits, group, symmetric, "F16")
    half = 1 << (bits - 1)
    zeros = (zero + half).T - (0 if v2 else 1)
    index = np.arange(columns) // group if order is None else order
    # a zero point of 0 cannot be stored less one
    zeros = np.maximum(zeros, 0)
    meant = (zeros + (0 if v2 else 1)).T.repeat(group, 1)[:, :columns]
    tensors = {
        "qweight": ("I32", bit_string(integers + half, bits).T),
        "qzeros": ("I32", bit_string(zeros, bits)),
        "scales": (kind, scale.T),
        "g_idx": ("I32", index.astype(np.int32)),
    }
    return tensors, ((integers + half - meant) * scale.astype(np.float32).repeat(group, 1)[:, :columns]).astype(np.float32)


def awq(weight, group=64, zeros=True):
    """AutoAWQ GEMM: eight outputs in a word, in the order 0 2 4 6 1 3 5 7 from its lowest bits."""
    integers, (kind, scale), zero, values = _integers(weight, 4, weight.shape[1] // group, not zeros, "F16")

    def words(table):
        eights = table.reshape(len(table), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.int64)
        return (eights << (np.arange(8) * 4)).sum(-1).astype(np.uint32).view(np.int32)

    tensors = {"qweight": ("I32", words((integers + 8).T)), "scales": (kind, scale.T)}
    return tensors | ({"qzeros": ("I32", words((zero + 8).T))} if zeros else {}), values


def fp8(weight, rows=1, columns=0, dtype="BF16", name="weight_scale"):
    """E4M3 values and a scale for each block of rows and columns (0: all of them; the last rows may be fewer):
    compressed-tensors' float-quantized and naive-quantized, and DeepSeek's blocks. Values in
    bfloat16, as the publishers' tools write them out."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    padded = np.pad(weight, [(0, -len(weight) % rows), (0, 0)])
    blocks = padded.reshape(len(padded) // rows, rows, -1, columns)
    kind, stored, scale = as_type(np.abs(blocks).max((1, 3)) / 448, dtype)
    wide = scale.repeat(rows, 0).repeat(columns, 1)[: len(weight)]
    codes = np.delete(_CODES, (127, 255))[_nearest(weight / wide, np.delete(E4M3, (127, 255)))].astype(np.uint8)
    return {"weight": ("F8_E4M3", codes), name: (kind, stored)}, bf16(E4M3[codes] * wide)
