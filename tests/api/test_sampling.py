"""What becomes of the sampling fields of a body."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.api.sampling import AllowedTokens

VOCAB_SIZE = 100
IDS = st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1)


@given(IDS)
def test_the_mask_has_the_bits_of_the_allowed_tokens(ids: set[int]) -> None:
    mask = np.full(-(-VOCAB_SIZE // 32), -1, dtype=np.int32)
    AllowedTokens(ids).fill_mask(mask)
    assert {i for i in range(32 * len(mask)) if mask[i // 32] >> (i % 32) & 1} == ids
