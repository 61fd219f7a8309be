"""ggml tensor data -> MLX arrays: which block types MLX's affine format holds exactly, and how their bits move.

Knows the byte layout of ggml's blocks and of MLX's affine format (w = scale * q + bias for each group of inputs). Knows nothing
of files, tensor names or models. Block types that affine cannot hold are dequantized by the `gguf` package.

Layouts: ggml-quants.h and ggml-quants.c of ggml-org/llama.cpp; `mx.quantize` of MLX.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind

GROUP_SIZE = 32

# Blocks unpacked at a time. So the 64-bit words take 16 MB (Q4_0) to 128 MB (K types), however large the tensor
_CHUNK_BLOCKS = 1 << 16


@dataclass(frozen=True)
class AffineTensor:
    """A weight in MLX's affine layout: w = scales * q + biases for each group of `group_size` inputs.

    Shapes (leading axes, if any, are experts):
      - weight: [..., out, in * bits / 32] uint32
      - scales, biases: [..., out, in / group_size]; float16 where that holds every one of them exactly, else float32

    The float16 is storage, not arithmetic: `mx.dequantize` in float16 rounds every weight, so float32 activations need scales and
    biases cast to float32 first (measured on SmolLM2-135M: float16 embedding scales move logits by 0.03).
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    def dequantize(self) -> mx.array:
        """The float32 weight, [..., out, in]."""
        return mx.dequantize(
            self.weight,
            self.scales.astype(mx.float32),
            self.biases.astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
        )


def _half(block: np.ndarray, start: int) -> np.ndarray:
    """[blocks, bytes] -> the float16 at byte `start` of each, [blocks, 1] float32."""
    return np.ascontiguousarray(block[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes -> [..., 2n]: all low nibbles first (elements 0..n-1), then all high ones (n..2n-1), as ggml orders them."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """[blocks, 4] bytes -> [blocks, 32]: bit i of the little-endian word is the fifth bit of element i, here worth 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[blocks, 12] bytes -> the eight 6-bit scales and eight 6-bit minima of a Q4_K or Q5_K block, both [blocks, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low 6 bits; bytes 8-11 hold the low 4 bits of scales (low nibble)
    and minima (high nibble) 4-7, whose high 2 bits are the top 2 bits of bytes 0-3 and 4-7.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 0x0F) | ((a >> 6) << 4)], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    return scales, minima


# Each takes blocks [n, bytes] and gives q [n, groups, 32] uint8 and scale and bias of w = scale * q + bias, [n, groups] float32.
# Scale and bias are exact in float32: a float16 times a power of two, or (K) times a 6-bit integer.
def _split_q4_0(block):
    d = _half(block, 0)
    return _nibbles(block[:, 2:])[:, None], d, -8 * d


def _split_q4_1(block):
    return _nibbles(block[:, 4:])[:, None], _half(block, 0), _half(block, 2)


def _split_q5_0(block):
    d = _half(block, 0)
    return (_nibbles(block[:, 6:]) | _fifth_bits(block[:, 2:6]))[:, None], d, -16 * d


def _split_q5_1(block):
    return (_nibbles(block[:, 8:]) | _fifth_bits(block[:, 4:8]))[:, None], _half(block, 0), _half(block, 2)


def _split_q8_0(block):
    # int8 + 128 is the same byte with its sign bit flipped
    d = _half(block, 0)
    return (block[:, 2:] ^ 0x80)[:, None], d, -128 * d


def _split_q4_k(block):
    scales, minima = _k_scales(block[:, 4:16])
    q = _nibbles(block[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return q, _half(block, 0) * scales, -(_half(block, 2) * minima)


def _split_q5_k(block):
    scales, minima = _k_scales(block[:, 4:16])
    q = _nibbles(block[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    # bit g of byte i is the fifth bit of element i of group g
    fifth = (block[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return q | (fifth << 4), _half(block, 0) * scales, -(_half(block, 2) * minima)


# type: (bits, splitter). Absent on purpose: Q2_K, Q3_K, Q6_K have groups of 16, which affine does not offer; the IQ, TQ, MXFP4 and
# NVFP4 types are not affine.
_AFFINE: dict[Kind, tuple[int, Callable]] = {
    Kind.Q4_0: (4, _split_q4_0),
    Kind.Q4_1: (4, _split_q4_1),
    Kind.Q5_0: (5, _split_q5_0),
    Kind.Q5_1: (5, _split_q5_1),
    Kind.Q8_0: (8, _split_q8_0),
    Kind.Q4_K: (4, _split_q4_k),
    Kind.Q5_K: (5, _split_q5_k),
}


def affine_bits(kind: Kind) -> int | None:
    """The bits of the affine form that holds this type exactly, None where there is none. Group size is always 32."""
    return _AFFINE[kind][0] if kind in _AFFINE else None


@lru_cache
def can_decode(kind: Kind) -> bool:
    """Whether `decode` can read this type: a float, or one that the installed `gguf` package dequantizes."""
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return True
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def decode(data: np.ndarray, kind: Kind) -> tuple[mx.array | AffineTensor, str]:
    """One tensor's data from `gguf.GGUFReader` -> its value for MLX, and a sentence about what was done.

    Shapes:
      - data: [..., in] for F32 and F16; else bytes, [..., in / block elements * block bytes]
    Returns:
      - an AffineTensor if the type has an exact affine form and there are rows to group ([out, in] or more axes);
        else [..., in] in float32, float16 or bfloat16
      - the fate, for the conversion record
    Raises:
      ValueError: if a block's scale or minimum is not finite.
    """
    if kind == Kind.BF16:
        # keep the bits: float16 has five exponent bits, bfloat16 has eight
        return mx.array(np.ascontiguousarray(data).view(np.uint16)).view(mx.bfloat16), "BF16 kept bit for bit"
    if kind in (Kind.F32, Kind.F16):
        return mx.array(data), f"{kind.name} kept bit for bit"
    if kind not in _AFFINE or data.ndim < 2:
        return mx.array(_dequantize(data, kind)), f"{kind.name} dequantized to float32"

    bits, split = _AFFINE[kind]
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    groups = elements // GROUP_SIZE
    weight = np.empty((len(blocks), groups, bits), np.uint32)
    scales = np.empty((len(blocks), groups), np.float32)
    biases = np.empty((len(blocks), groups), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        q, scales[part], biases[part] = split(np.ascontiguousarray(blocks[part]))
        weight[part] = _pack(q, bits)
    rows = data.shape[:-1]
    scales, biases, dtype = _store(scales, biases)
    tensor = AffineTensor(
        mx.array(weight.reshape(*rows, -1)),
        mx.array(scales.reshape(*rows, -1)),
        mx.array(biases.reshape(*rows, -1)),
        GROUP_SIZE,
        bits,
    )
    return tensor, f"{kind.name} carried over exactly: affine {bits}-bit, group {GROUP_SIZE}, {dtype} scales and biases"


def _dequantize(data: np.ndarray, kind: Kind) -> np.ndarray:
    """`gguf.dequantize` in pieces, because it holds two float32 copies of its input. [..., row bytes] -> [..., in] float32."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((len(blocks), elements), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        out[part] = gguf.dequantize(np.ascontiguousarray(blocks[part]), kind)
    return out.reshape(*data.shape[:-1], -1)


def _pack(q: np.ndarray, bits: int) -> np.ndarray:
    """[..., 32] values below 2**bits -> [..., bits] uint32: value i in bits i * bits and up of one little-endian bit string."""
    if bits == 8:
        packed = q
    else:
        # 8 values fill `bits` whole bytes, so no value straddles two words
        shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
        words = np.bitwise_or.reduce(q.reshape(*q.shape[:-1], 4, 8).astype(np.uint64) << shifts, axis=-1)
        packed = words[..., None].view(np.uint8)[..., :bits].reshape(*q.shape[:-1], 4 * bits)
    return np.ascontiguousarray(packed).view(np.uint32)


def _store(scales: np.ndarray, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """Scales and biases in float16 if that changes none of them, else in float32.

    -8 d and -128 d are exact in float16 up to its largest value (65504), and d * scale of the K types mostly is not, so this
    is tested for each tensor. Both get the same type, as MLX requires.
    """
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ValueError("a block scale or minimum is infinite or not a number")
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16), biases.astype(np.float16)
    if all(np.array_equal(half, exact) for half, exact in zip(halves, (scales, biases), strict=True)):
        return *halves, "float16"
    return scales, biases, "float32"
