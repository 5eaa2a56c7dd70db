"""Percentiles of a set of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles interpolate linearly between the two nearest samples, as numpy's default does."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: npt.ArrayLike) -> Distribution | None:
        """The distribution of some samples, None where there are none."""
        values = np.asarray(samples, dtype=np.float64)
        if not values.size:
            return None
        p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
        return cls(values.size, float(values.mean()), p50, p95, p99, float(values.max()))
