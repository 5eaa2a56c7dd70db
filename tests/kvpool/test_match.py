"""The longest chain that every group of layers can go on from, against its definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from server.kvpool.blocks import BlockPool
from server.kvpool.layout import EVERYTHING, Visibility
from server.kvpool.prefix import PrefixCache, PrefixNode

SIZE = 4
LENGTH = 20

GROUPS = {
    "everything": (EVERYTHING,),
    "a window": (Visibility(window=10),),
    "one token in sight": (Visibility(window=1),),
    "mixed": (EVERYTHING, Visibility(window=7), Visibility(window=18)),
    "chunks": (EVERYTHING, Visibility(chunk=12), Visibility(window=9)),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("use_host", [False, True])
def test_the_longest_chain_is_the_longest_of_all_that_serve(groups: tuple[Visibility, ...], use_host: bool) -> None:
    rng = random.Random(0)
    tokens = np.arange(LENGTH * SIZE + 1)
    for missing in (0.0, 0.05, 0.2, 0.5, 1.0):
        for _ in range(20):
            pool = BlockPool(LENGTH * len(groups))
            cache = PrefixCache(pool, SIZE, groups)
            keys: list[bytes] = []
            cache.extend_keys(keys, tokens, "")
            nodes: list[PrefixNode] = []
            for index in range(LENGTH):
                blocks = [0 if rng.random() < missing else pool.allocate(1)[0] for _ in groups]
                parent = nodes[-1] if nodes else None
                node = cache.publish(parent, keys[index], "", tokens[index * SIZE : (index + 1) * SIZE], blocks)
                assert node is not None
                node.host = [rng.choice((-1, 0)) for _ in groups]
                nodes.append(node)

            def serves(length: int, nodes: list[PrefixNode] = nodes) -> bool:
                return all(
                    nodes[index].blocks[group] or (use_host and nodes[index].host[group] == 0)
                    for group, visibility in enumerate(groups)
                    for index in range(visibility.first(length * SIZE) // SIZE, length)
                )

            longest = max(length for length in range(LENGTH + 1) if serves(length))
            assert cache.match(keys, tokens, "", use_host=use_host) == nodes[:longest]
