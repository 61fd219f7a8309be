"""ggml blocks against `gguf.dequantize`: equal to the last bit for every type that is said to be carried over exactly."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from dflash_mlx.conversion.gguf.blocks import AffineTensor, affine_bits, can_decode, decode
from gguf import GGMLQuantizationType as Kind

EXACT = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K]
DEQUANTIZED = [Kind.Q2_K, Kind.Q3_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ2_XXS, Kind.IQ3_S, Kind.TQ1_0]


def random_blocks(kind: Kind, rows: tuple[int, ...], width: int, seed: int = 0) -> np.ndarray:
    """[*rows, row bytes]: random bytes, which reach every bit of a block; blocks with infinities or NaNs are made zero."""
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (int(np.prod(rows)) * width // elements, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.dequantize(blocks, kind)).all(axis=-1)
    blocks[~finite] = 0
    assert finite.mean() > 0.5
    return blocks.reshape(*rows, -1)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_affine_form_holds_every_weight_exactly(kind):
    data = random_blocks(kind, (6,), 512)
    value, fate = decode(data, kind)
    assert isinstance(value, AffineTensor)
    assert value.bits == affine_bits(kind) and value.group_size == 32
    np.testing.assert_array_equal(np.array(value.dequantize()), gguf.dequantize(data, kind))
    assert "exactly" in fate and kind.name in fate


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q5_K], ids=lambda kind: kind.name)
def test_experts_keep_their_leading_axis(kind):
    data = random_blocks(kind, (3, 5), 256)
    value, _ = decode(data, kind)
    assert value.dequantize().shape == (3, 5, 256)
    np.testing.assert_array_equal(np.array(value.dequantize()), gguf.dequantize(data, kind))


def test_more_blocks_than_one_chunk_are_all_unpacked():
    data = random_blocks(Kind.Q4_0, (2100,), 1024)
    assert data.size // 18 > 1 << 16
    value, _ = decode(data, Kind.Q4_0)
    np.testing.assert_array_equal(np.array(value.dequantize()), gguf.dequantize(data, Kind.Q4_0))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_scales_of_ordinary_weights_are_stored_in_float16(kind):
    weight = np.random.default_rng(1).normal(0, 0.08, (7, 96)).astype(np.float32)
    value, fate = decode(gguf.quantize(weight, kind), kind)
    assert value.scales.dtype == value.biases.dtype == mx.float16
    assert "float16 scales" in fate


def test_scales_beyond_float16_are_stored_in_float32():
    # d = 600: -128 d = -76800 is past float16's 65504, where it would become -inf
    data = gguf.quantize(np.linspace(-600 * 127, 600 * 127, 64, dtype=np.float32).reshape(1, 64), Kind.Q8_0)
    value, fate = decode(data, Kind.Q8_0)
    assert value.scales.dtype == value.biases.dtype == mx.float32
    assert "float32 scales" in fate
    np.testing.assert_array_equal(np.array(value.dequantize()), gguf.dequantize(data, Kind.Q8_0))


def test_the_smallest_float16_scales_stay_exact():
    blocks = np.zeros((1, 34), np.uint8)
    blocks[0, :2] = np.array([2.0**-24], np.float16).view(np.uint8)
    blocks[0, 2:] = np.arange(-16, 16, dtype=np.int8).view(np.uint8)
    value, _ = decode(blocks, Kind.Q8_0)
    assert value.scales.dtype == mx.float16
    np.testing.assert_array_equal(np.array(value.dequantize())[0], np.arange(-16, 16) * 2.0**-24)


def test_bfloat16_does_not_pass_through_float16():
    # 1e30 overflows float16 and 1e-30 vanishes in it
    exact = np.array([[1e30, -1e-30, 3.0e38, 1.0078125]], np.float32).view(np.uint32) & 0xFFFF0000
    data = (exact >> 16).astype(np.uint16).view(np.uint8)
    value, fate = decode(data, Kind.BF16)
    assert value.dtype == mx.bfloat16 and value.shape == (1, 4)
    np.testing.assert_array_equal(np.array(value.astype(mx.float32)), exact.view(np.float32))
    assert "bit for bit" in fate


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_floats_keep_their_type_and_bits(dtype):
    data = np.random.default_rng(2).normal(size=(3, 5)).astype(dtype)
    value, _ = decode(data, Kind.F32 if dtype is np.float32 else Kind.F16)
    np.testing.assert_array_equal(np.array(value), data)
    assert np.array(value).dtype == dtype


@pytest.mark.parametrize("kind", DEQUANTIZED, ids=lambda kind: kind.name)
def test_other_types_are_dequantized_to_float32(kind):
    data = random_blocks(kind, (4,), 512)
    value, fate = decode(data, kind)
    assert value.dtype == mx.float32
    np.testing.assert_array_equal(np.array(value), gguf.dequantize(data, kind))
    assert fate == f"{kind.name} dequantized to float32"


def test_a_vector_is_dequantized_since_it_has_no_rows():
    data = random_blocks(Kind.Q8_0, (1,), 64)[0]
    value, _ = decode(data, Kind.Q8_0)
    np.testing.assert_array_equal(np.array(value), gguf.dequantize(data, Kind.Q8_0))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(bad):
    data = gguf.quantize(np.ones((2, 32), np.float32), Kind.Q4_1)
    data[1, 2:4] = np.array([bad], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="infinite or not a number"):
        decode(data, Kind.Q4_1)


def test_types_that_gguf_cannot_dequantize_are_known():
    assert can_decode(Kind.Q6_K) and can_decode(Kind.F16)
    assert not can_decode(Kind.Q8_K) and not can_decode(Kind.I8) and not can_decode(Kind.F64)


@pytest.mark.parametrize("plant", ["nibbles in ggml's order", "bias of another type"])
def test_a_planted_fault_in_the_affine_form_shows(plant):
    data = random_blocks(Kind.Q4_0, (6,), 256)
    value, _ = decode(data, Kind.Q4_0)
    if plant == "nibbles in ggml's order":
        packed = np.ascontiguousarray(data.reshape(6, 8, 18)[..., 2:]).view(np.uint32).reshape(6, -1)
        value = AffineTensor(mx.array(packed), value.scales, value.biases, 32, 4)
    else:
        value = AffineTensor(value.weight, value.scales, value.biases * 2, 32, 4)
    assert not np.array_equal(np.array(value.dequantize()), gguf.dequantize(data, Kind.Q4_0))
