"""Keys and values in one byte a number, with a scale for each token and head.

The scale is symmetric: the largest magnitude of the row over the largest that the byte holds. A row is scaled by itself
alone, as it is written, so that what a token contributes depends neither on its neighbours nor on the step that
computed it, and blocks are shared as exactly as unquantised ones. A latent row has two parts of different magnitude,
the latent and the rotary part, and a scale for each.

int8: 127 steps either way, rounded to the nearest. fp8: e4m3 (Micikevicius et al., arXiv:2209.05433, section 3), 448 at
most; its bytes are kept as uint8, since torch indexes float8 on no CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.kvpool.layout import CACHE_DTYPES, CacheDtype

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of a row of zeros, or of nearly nothing: 0 over it is 0, and it has an inverse."""


def storage_dtype(dtype: CacheDtype) -> torch.dtype:
    """What the numbers of such a cache are stored in."""
    stored: torch.dtype = {"int8": torch.int8, "fp8": torch.uint8}.get(dtype.name) or getattr(torch, dtype.name)
    return stored


def unscaled(dtype: torch.dtype) -> CacheDtype:
    """The cache that stores numbers as the model computes them."""
    return CACHE_DTYPES[str(dtype).removeprefix("torch.")]


def one(stored: torch.dtype) -> int:
    """The byte that is 1 times its scale."""
    return 1 if stored == torch.int8 else 0x38


def quantise(rows: Tensor, widths: Sequence[int], stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [.., D] in bytes of the type `stored`, and their scales, float32 [.., len(widths)].

    widths: the parts of a row that have a scale each; they sum to D.
    A row with a NaN or an infinity in it keeps no finite number.
    """
    limit = 127.0 if stored == torch.int8 else 448.0
    parts = rows.float().split(list(widths), -1)
    scales = torch.stack([_largest(part) for part in parts], -1).div_(limit).clamp_min_(_SMALLEST_SCALE)
    scaled = torch.cat([part / scale for part, scale in zip(parts, scales.split(1, -1), strict=True)], -1)
    if stored == torch.int8:
        return scaled.round_().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dequantise(stored: Tensor, scales: Tensor, widths: Sequence[int], out: Tensor) -> Tensor:
    """Write bytes [.., D] times their scales [.., len(widths)] to `out` [.., D] of any floating type, and return it.

    The product is taken in float32 and rounded to the type of `out`.
    """
    if stored.dtype == torch.int8:
        out.copy_(stored)
    else:
        out.copy_(_shifted(stored))
        scales = scales * _SHIFT
    for part, scale in zip(out.split(list(widths), -1), scales.split(1, -1), strict=True):
        part.mul_(scale)
    return out


def _largest(part: Tensor) -> Tensor:
    return part.abs().amax(-1) if part.shape[-1] else part.new_zeros(part.shape[:-1])


_SHIFT = 2.0**8
"""By how much the exponents of float16 and e4m3 are biased apart."""


def _shifted(stored: Tensor) -> Tensor:
    """Bytes of e4m3 over _SHIFT, as float16, exactly; a NaN, which only a row has whose scale is one, becomes 480.

    Sign, exponent and fraction are put where float16 has them. Torch's own conversion takes ten times as long on a CPU.
    """
    widened = stored.view(torch.int8).to(torch.int16)
    return widened.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)
