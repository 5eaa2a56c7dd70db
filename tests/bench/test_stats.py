from __future__ import annotations

import numpy as np
import pytest

from server.bench.stats import Distribution


def test_percentiles_by_hand() -> None:
    found = Distribution.of([4.0, 1.0, 3.0, 2.0])  # positions 0 to 3; the median lies at 1.5, p95 at 2.85
    assert found == Distribution(4, 2.5, 2.5, pytest.approx(3.85), pytest.approx(3.97), 4.0)


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 1000):
        samples = rng.exponential(size=size)
        found = Distribution.of(samples)
        assert found is not None
        assert found.count == size
        assert [found.p50, found.p95, found.p99] == [np.percentile(samples, q) for q in (50, 95, 99)]


def test_no_samples_have_no_distribution() -> None:
    assert Distribution.of([]) is None
