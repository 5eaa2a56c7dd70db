"""Stateless sampling noise: exponential variates that depend on (seed, output index, token id) and on nothing else.

A counter-based generator in the sense of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): there
is no state to carry, so batching, preemption, recomputation and speculation cannot change what a request draws. The
host turns (seed, output index) into two 32-bit keys with the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014);
the device mixes them into each token id with the MurmurHash3 32-bit finaliser (Appleby), in wrapping int32 arithmetic,
which gives the same bits on every device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.step import Int32Array, Int64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = 0xFFFFFFFFFFFFFFFF


def seed_words(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """The request seeds, any integers, as 64-bit words."""
    return np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)


def noise_keys(seeds: npt.NDArray[np.uint64], out_indices: Int64Array) -> Int32Array:
    """Two keys for each of the n draws: [n], [n] -> int32 [n, 2].

    The output index steps along the SplitMix64 sequence that starts at the mixed seed, so neither neighbouring seeds
    nor neighbouring indices have related keys.
    """
    keys = _mix64(_mix64(seeds + _GOLDEN) + (out_indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.ascontiguousarray(keys).view(np.int32).reshape(-1, 2)


def exponential(token_ids: Tensor, keys: Tensor) -> Tensor:
    """Unit exponential noise of each token: int32 [V] or [n, V] and int32 [n, 2] -> float32 [n, V], on their device.

    Every value is finite and above 0. The uniform variate has 31 bits and the finest steps of a float near 0: small
    exponentials decide a race, so that end is the one that needs the resolution.
    """
    first, second = keys[:, :1], keys[:, 1:]
    bits = torch.bitwise_xor(token_ids, first)
    _mix32(bits)
    # A second keyed round: with one, two draws whose first keys agree in the high bits would permute the same noise.
    bits.bitwise_xor_(second)
    _xor_shift(bits, 15)
    bits.mul_(0x2C1B3C6D)
    _xor_shift(bits, 16)
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    # The largest integers round up to 1.0 in float32, which would make an infinite exponential.
    return uniform.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_()


def _mix64(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix32(bits: Tensor) -> None:
    _xor_shift(bits, 16)
    bits.mul_(0x85EBCA6B - 2**32)
    _xor_shift(bits, 13)
    bits.mul_(0xC2B2AE35 - 2**32)
    _xor_shift(bits, 16)


def _xor_shift(bits: Tensor, distance: int) -> None:
    # int32 shifts copy the sign; masking it off makes this the unsigned shift the mixers are built on.
    bits.bitwise_xor_((bits >> distance).bitwise_and_((1 << (32 - distance)) - 1))
