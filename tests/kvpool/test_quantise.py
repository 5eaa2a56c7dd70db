"""Quantised rows against the bounds of their formats, alone and in company."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from server.kvpool.layout import CACHE_DTYPES
from server.kvpool.quantise import dequantise, quantise, storage_dtype

BYTES = [torch.int8, torch.uint8]


def rows(seed: int, shape: tuple[int, ...], magnitude: float) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude


def there_and_back(values: Tensor, widths: tuple[int, ...], stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is read again, and the scales."""
    data, scales = quantise(values, widths, stored)
    assert data.dtype == stored
    return dequantise(data, scales, widths, torch.empty_like(values)), scales


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 3000.0, 1e30]), st.sampled_from([(8,), (5, 3)]))
def test_int8_is_off_by_half_a_step_at_most(seed: int, magnitude: float, widths: tuple[int, ...]) -> None:
    values = rows(seed, (3, 4, 8), magnitude)
    read, scales = there_and_back(values, widths, torch.int8)
    for part, back, scale in zip(values.split(widths, -1), read.split(widths, -1), scales.unbind(-1), strict=True):
        torch.testing.assert_close(scale, part.abs().amax(-1) / 127)
        assert ((part - back).abs() <= scale[..., None] * 0.50001).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 3000.0, 1e30]), st.sampled_from([(8,), (5, 3)]))
def test_fp8_keeps_three_bits_behind_the_first(seed: int, magnitude: float, widths: tuple[int, ...]) -> None:
    """Off by a 16th at most, or by half the smallest step of 2^-9."""
    values = rows(seed, (3, 4, 8), magnitude) * rows(seed + 1, (3, 4, 8), 1.0) ** 8  # of many orders of magnitude
    read, scales = there_and_back(values, widths, torch.uint8)
    for part, back, scale in zip(values.split(widths, -1), read.split(widths, -1), scales.unbind(-1), strict=True):
        torch.testing.assert_close(scale, part.abs().amax(-1) / 448)
        assert ((part - back).abs() <= torch.maximum(part.abs() / 16, scale[..., None] * 2**-10) * 1.00001).all()


def test_fp8_bytes_are_those_of_torch() -> None:
    """Every finite byte, by the conversion that torch has of its own."""
    data = torch.arange(256, dtype=torch.uint8)
    data = data[(data & 0x7F) != 0x7F]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scale = torch.tensor([0.37])
        read = dequantise(data, scale, (len(data),), torch.empty(len(data), dtype=dtype))
        assert torch.equal(read, (data.view(torch.float8_e4m3fn).float() * scale).to(dtype))


@pytest.mark.parametrize("stored", BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_does_not_know_its_neighbours(stored: torch.dtype, dtype: torch.dtype) -> None:
    values = (rows(0, (4, 37, 20), 1.0) * rows(1, (4, 37, 1), 1.0).exp()).to(dtype)
    together = quantise(values, (12, 8), stored)
    read = dequantise(*together, (12, 8), torch.empty_like(values))
    for head in range(4):
        for token in range(37):
            alone = quantise(values[head, token], (12, 8), stored)
            assert torch.equal(together[0][head, token], alone[0])
            assert torch.equal(together[1][head, token], alone[1])
            assert torch.equal(read[head, token], dequantise(*alone, (12, 8), torch.empty(20, dtype=dtype)))


@pytest.mark.parametrize("stored", BYTES)
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-39, 3e-38])
def test_rows_of_next_to_nothing_stay_so(stored: torch.dtype, largest: float) -> None:
    values = torch.zeros(2, 8)
    values[1, 3] = largest
    data, scales = quantise(values, (8,), stored)
    read = dequantise(data, scales, (8,), torch.empty_like(values))
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert not data[0].any(), "zeros over nothing"
    assert not read[0].any()
    assert (read - values).abs().max() <= 1e-38


@pytest.mark.parametrize("stored", BYTES)
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_shows_and_hurts_nobody_else(stored: torch.dtype, fault: float, dtype: torch.dtype) -> None:
    values = rows(3, (3, 16), 1.0).to(dtype)
    healthy, _ = there_and_back(values, (16,), stored)
    for places in ([5], [0, 15], list(range(16))):
        broken = values.clone()
        broken[1, places] = fault
        read, _ = there_and_back(broken, (16,), stored)
        assert not read[1].isfinite().any()
        assert torch.equal(read[[0, 2]], healthy[[0, 2]])


def test_every_cache_type_has_a_storage_of_its_size() -> None:
    for dtype in CACHE_DTYPES.values():
        assert storage_dtype(dtype).itemsize == dtype.element_bytes
        assert storage_dtype(dtype).is_floating_point == (not dtype.scale_bytes)
