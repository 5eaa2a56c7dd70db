"""The prefix cache: computed blocks found again by the tokens they and all blocks before them hold.

A full block's key is a keyed hash over its parent's key and its own tokens, so that equal keys mean equal prefixes;
the first parent is derived from the salt, so that tenants with different salts never meet. The hash key is drawn anew
in each process. A hit is believed only after its tokens, and those of its ancestors, have been compared: a collision
costs a miss and never serves another prompt's cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from server.kvpool.blocks import BlockPool
from server.step import Int64Array


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A published block: its key, its parent in the chain, the salt, its tokens as bytes, and where they are cached."""

    key: bytes
    parent: PrefixNode | None
    salt: str
    tokens: bytes
    block: int


def _same_prefix(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    """Whether two chains hold the same tokens; one step unless an ancestor was evicted and computed again."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.salt != b.salt:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Finds and publishes full blocks of `pool`. Only computed tokens may be published; see `Scheduler.commit`."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self._pool = pool
        self._hash_key = os.urandom(16)
        self._nodes: dict[bytes, PrefixNode] = {}
        self._key_of_block: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def extend_keys(self, keys: list[bytes], tokens: Int64Array, salt: str) -> None:
        """Append to `keys`, the keys of the first full blocks of `tokens`, those of the full blocks that follow."""
        size = self.block_size
        for index in range(len(keys), len(tokens) // size):
            parent = keys[index - 1] if index else self._hash(salt.encode())
            keys.append(self._hash(parent + tokens[index * size : (index + 1) * size].tobytes()))

    def match(
        self, keys: list[bytes], tokens: Int64Array, salt: str, known: Sequence[PrefixNode] = ()
    ) -> list[PrefixNode]:
        """The longest published chain that `tokens` start with, without taking references.

        Never covers the whole of `tokens`: the last one must be computed, for the logits that follow it.
        known: an earlier answer for the same tokens, whose nodes need not be compared again.
        """
        size = self.block_size
        chain: list[PrefixNode] = []
        parent: PrefixNode | None = None
        for index in range((len(tokens) - 1) // size):
            node = self._nodes.get(keys[index])
            if node is None:
                break
            if index >= len(known) or known[index] is not node:
                content = tokens[index * size : (index + 1) * size].tobytes()
                if not self._is(node, parent, salt, content):
                    break
            chain.append(node)
            parent = node
        return chain

    def publish(
        self, parent: PrefixNode | None, key: bytes, salt: str, tokens: Int64Array, block: int
    ) -> PrefixNode | None:
        """Publish a computed full block behind `parent`; returns the node the next block of the sequence hangs on.

        When the same prefix is published already, that block stays and this one remains private to its sequence.
        Returns None, and publishes nothing, when another prefix has the same key.
        """
        content = tokens.tobytes()
        node = self._nodes.get(key)
        if node is not None:
            return node if self._is(node, parent, salt, content) else None
        node = PrefixNode(key, parent, salt, content, block)
        self._nodes[key] = node
        self._key_of_block[block] = key
        self._pool.publish(block)
        return node

    def check_integrity(self) -> None:
        """Every node's block is kept by the pool, and no block has two nodes."""
        assert len(self._nodes) == len(self._key_of_block), "a block is published under two keys"
        for key, node in self._nodes.items():
            assert self._key_of_block.get(node.block) == key, f"block {node.block} does not know its key"
            assert self._pool.is_published(node.block), f"block {node.block} is in the prefix cache but not kept"

    def _is(self, node: PrefixNode, parent: PrefixNode | None, salt: str, tokens: bytes) -> bool:
        if node.salt != salt or node.tokens != tokens or not _same_prefix(node.parent, parent):
            return False
        node.parent = parent  # the ancestor may have been evicted and published anew; keep the chain short to compare
        return True

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._hash_key, digest_size=16).digest()

    def _forget(self, block: int) -> None:
        del self._nodes[self._key_of_block.pop(block)]
