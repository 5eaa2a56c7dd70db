from __future__ import annotations

import numpy as np
import pytest
import torch

from server.model.noise import exponential, noise_keys, seed_words

torch.set_num_threads(1)

M32 = 0xFFFFFFFF


def _noise(seeds: list[int], out_indices: list[int], num_ids: int, device: str = "cpu") -> torch.Tensor:
    keys = noise_keys(seed_words(seeds), np.array(out_indices, dtype=np.int64))
    return exponential(torch.arange(num_ids, dtype=torch.int32, device=device), torch.from_numpy(keys).to(device))


def _uniform(noise: torch.Tensor) -> np.ndarray:
    return -np.expm1(-noise.double().numpy())


def _bits(token_id: int, first: int, second: int) -> int:
    """The hash in Python's unbounded integers."""
    x = token_id ^ first
    x ^= x >> 16
    x = x * 0x85EBCA6B & M32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & M32
    x ^= x >> 16
    x ^= second
    x ^= x >> 15
    x = x * 0x2C1B3C6D & M32
    return (x ^ x >> 16) & 0x7FFFFFFF


def _token_with(bits: int, first: int, second: int) -> int:
    """The token id whose hash is `bits`: every step above undone."""

    def unshift(x: int, distance: int) -> int:
        y = x
        for _ in range(32 // distance):
            y = x ^ y >> distance
        return y

    x = unshift(bits, 16) * pow(0x2C1B3C6D, -1, 2**32) & M32
    x = unshift(unshift(x, 15) ^ second, 16) * pow(0xC2B2AE35, -1, 2**32) & M32
    x = unshift(x, 13) * pow(0x85EBCA6B, -1, 2**32) & M32
    return unshift(x, 16) ^ first


def test_the_hash_is_that_of_unsigned_integers() -> None:
    keys = noise_keys(seed_words([3, -1, 2**63]), np.array([0, 7, 10**12]))
    ids = torch.tensor([0, 1, 2, 49151, 2**31 - 1, -1, -(2**31)], dtype=torch.int32)
    for row, (first, second) in zip(exponential(ids, torch.from_numpy(keys)), keys.tolist(), strict=True):
        bits = np.array([_bits(token_id & M32, first & M32, second & M32) for token_id in ids.tolist()])
        np.testing.assert_allclose(row.numpy(), -np.log1p(-(bits + 0.5) / 2**31), rtol=1e-5)


def test_the_ends_of_the_range_are_finite_and_positive() -> None:
    first, second = 0x12345678, 0x0BADF00D
    for bits in (0, 1, 2**31 - 1, 2**31 - 2, 2**31 - 65):
        token_id = _token_with(bits, first, second)
        assert _bits(token_id, first, second) == bits
        signed = torch.tensor([token_id - 2**32 if token_id >= 2**31 else token_id], dtype=torch.int32)
        value = exponential(signed, torch.tensor([[first, second]], dtype=torch.int32)).item()
        assert 1e-10 < value < 17


def test_noise_is_exponential() -> None:
    uniform = _uniform(_noise([11, 12, 13, 14], [0, 0, 5, 9], 250_000)).ravel()
    counts, _ = np.histogram(uniform, bins=256, range=(0, 1))
    expected = uniform.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)
    for tail in (1e-3, 1e-4, 1e-5):  # the small end decides the races
        assert abs((uniform < tail).sum() - tail * uniform.size) < 5 * np.sqrt(tail * uniform.size)


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 4096])
def test_neighbouring_token_ids_are_independent(distance: int) -> None:
    uniform = _uniform(_noise([5], [3], 200_000))[0]
    assert abs(_correlation(uniform[:-distance], uniform[distance:])) < 5


def test_neighbouring_seeds_and_indices_are_independent() -> None:
    seeds, indices = [*range(8), 2**32, 2**63, -1], [*range(8)]
    pairs = [(seed, index) for seed in seeds for index in indices]
    uniform = _uniform(_noise([seed for seed, _ in pairs], [index for _, index in pairs], 20_000))
    correlations = np.corrcoef(uniform) * np.sqrt(uniform.shape[1])
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 6


def test_one_token_over_many_draws_is_uniform() -> None:
    for seeds, indices in ((list(range(50_000)), [0] * 50_000), ([9] * 50_000, list(range(50_000)))):
        uniform = _uniform(_noise(seeds, indices, 2))
        for token in range(2):
            counts, _ = np.histogram(uniform[:, token], bins=64, range=(0, 1))
            expected = len(uniform) / 64
            assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(2 * 63)
            assert abs(_correlation(uniform[:-1, token], uniform[1:, token])) < 5
        assert abs(_correlation(uniform[:, 0], uniform[:, 1])) < 5


def test_seeds_are_any_64_bits() -> None:
    assert seed_words([-1, 2**64 - 1]).tolist() == [2**64 - 1] * 2
    assert not torch.equal(_noise([0], [0], 100), _noise([2**63], [0], 100))
    assert not torch.equal(_noise([1], [2], 100), _noise([2], [1], 100))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_makes_the_same_noise() -> None:
    torch.testing.assert_close(_noise([1, 2], [3, 4], 50_000, "cuda").cpu(), _noise([1, 2], [3, 4], 50_000))


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of independent samples."""
    return float(np.corrcoef(a, b)[0, 1] * np.sqrt(len(a)))
