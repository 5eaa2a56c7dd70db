"""The prefix cache: computed blocks found again by the tokens they and all blocks before them hold.

A full block's key is a keyed hash over its parent's key and its own tokens, so that equal keys mean equal prefixes;
the first parent is derived from the salt, so that tenants with different salts never meet. The hash key is drawn anew
in each process. A hit is believed only after its tokens, and those of its ancestors, have been compared: a collision
costs a miss and never serves another prompt's cache.

The keys form a tree. A node stands for one block of tokens behind its parent's, and knows where each group of layers
has it: in a block of the pool, in one of host memory, in both or nowhere (any more). It lives as long as one of them
has it or another node hangs on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from server.kvpool.blocks import BlockPool
from server.kvpool.layout import EVERYTHING, Visibility
from server.kvpool.tier import HostTier
from server.step import Int64Array

NOT_ON_HOST = -1


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A block of tokens in the tree: its key, its parent, the salt and its tokens as bytes.

    blocks, host: for each table group the pool's block that holds it, 0 for none, and the host's, NOT_ON_HOST for none.
    children: how many nodes hang on it.
    """

    key: bytes
    parent: PrefixNode | None
    salt: str
    tokens: bytes
    blocks: list[int]
    host: list[int]
    children: int = 0

    @property
    def is_empty(self) -> bool:
        return not any(self.blocks) and self.children == 0 and all(block == NOT_ON_HOST for block in self.host)


class PrefixCache:
    """Finds and publishes full blocks of `pool`. Only computed tokens may be published; see `Scheduler.commit`.

    groups: what the layers of each table group see.
    num_host_blocks: blocks of the second tier, `host`, which is None without one.
    saves: blocks to be copied to the host tier before they are written again, as (pool block, host block); whoever
        plans the step takes them.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        groups: Sequence[Visibility] = (EVERYTHING,),
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.host: HostTier[tuple[PrefixNode, int]] | None = None
        if num_host_blocks:
            self.host = HostTier(num_host_blocks, self._forget_on_host)
        self.saves: list[tuple[int, int]] = []
        self._pool = pool
        self._groups = tuple(groups)
        self._limited = [index for index, group in enumerate(groups) if group.reach is not None]
        self._unlimited = [index for index, group in enumerate(groups) if group.reach is None]
        self._hash_key = os.urandom(16)
        self._nodes: dict[bytes, PrefixNode] = {}
        self._holder: dict[int, tuple[PrefixNode, int]] = {}  # block of the pool -> its node and group
        pool.on_evict = self._give_up

    def extend_keys(self, keys: list[bytes], tokens: Int64Array, salt: str) -> None:
        """Append to `keys`, the keys of the first full blocks of `tokens`, those of the full blocks that follow."""
        size = self.block_size
        for index in range(len(keys), len(tokens) // size):
            parent = keys[index - 1] if index else self._hash(salt.encode())
            keys.append(self._hash(parent + tokens[index * size : (index + 1) * size].tobytes()))

    def match(
        self,
        keys: list[bytes],
        tokens: Int64Array,
        salt: str,
        known: Sequence[PrefixNode] = (),
        *,
        use_host: bool = True,
    ) -> list[PrefixNode]:
        """The longest chain that `tokens` start with and every group can go on from, without taking references.

        A group whose layers look back only so far needs what they see from the first token behind the chain, the others
        need all of it. Never covers all of `tokens`: the last one must be computed, for the logits that follow it.

        known: an earlier answer for the same tokens, whose nodes need not be compared again.
        use_host: whether blocks that only host memory has count.
        """
        path = self._walk(keys, tokens, salt, known)

        def has(index: int, group: int) -> bool:
            node = path[index]
            return bool(node.blocks[group]) or (use_host and node.host[group] != NOT_ON_HOST)

        length = len(path)
        for group in self._unlimited:
            length = next((index for index in range(length) if not has(index, group)), length)
        # From here to `length` a group has all blocks. No block is looked at twice, since every chain as long as to
        # need one that is missing needs it: asked of long prompts again and again while they wait.
        lowest = dict.fromkeys(self._limited, length)
        settled = False
        while not settled:
            settled = True
            for group in self._limited:
                lower, needed = min(lowest[group], length), self.first_needed(group, length)
                while lower > needed and has(lower - 1, group):
                    lower -= 1
                lowest[group] = lower
                if lower > needed:
                    length, settled = lower - 1, False
        return path[:length]

    def first_needed(self, group: int, length: int) -> int:
        """The first of `length` blocks that the token behind them sees in this group."""
        return self._groups[group].first(length * self.block_size) // self.block_size

    def _walk(self, keys: list[bytes], tokens: Int64Array, salt: str, known: Sequence[PrefixNode]) -> list[PrefixNode]:
        """The longest path of nodes that `tokens` start with, whatever of them is still held."""
        size = self.block_size
        path: list[PrefixNode] = []
        parent: PrefixNode | None = None
        for index in range((len(tokens) - 1) // size):
            node = self._nodes.get(keys[index])
            if node is None:
                break
            if index >= len(known) or known[index] is not node:
                content = tokens[index * size : (index + 1) * size].tobytes()
                if not _is(node, parent, salt, content):
                    break
            path.append(node)
            parent = node
        return path

    def publish(
        self, parent: PrefixNode | None, key: bytes, salt: str, tokens: Int64Array, blocks: Sequence[int]
    ) -> PrefixNode | None:
        """Publish a computed full block behind `parent`; returns the node the next block of the sequence hangs on.

        blocks: for each group the block that holds it, 0 where it is out of sight. Where a group has the same prefix
            published already, that block stays and this one remains private to its sequence.
        Returns None, and publishes nothing, when another prefix has the same key.
        """
        content = tokens.tobytes()
        if parent is not None:
            parent = self._attach(parent)
            if parent is None:
                return None
        node = self._nodes.get(key)
        if node is None:
            groups = len(self._groups)
            node = self._insert(PrefixNode(key, parent, salt, content, [0] * groups, [NOT_ON_HOST] * groups))
        elif not _is(node, parent, salt, content):
            self._prune(parent)
            return None
        for group, block in enumerate(blocks):
            if block and not node.blocks[group]:
                self._hold(node, group, block)
        return node

    def restore(self, places: Sequence[tuple[PrefixNode, int]]) -> list[tuple[int, int]]:
        """Take blocks, with a reference each, for what only host memory has of these nodes and groups.

        Returns the copies to make, as (host block, pool block). There must be as many blocks available.
        """
        assert self.host is not None
        for node, group in places:  # all of them first: taking blocks may make the host forget others
            self.host.load(node.host[group])
        blocks = self._pool.allocate(len(places))
        for (node, group), block in zip(places, blocks, strict=True):
            self._hold(node, group, block)
        return [(node.host[group], block) for (node, group), block in zip(places, blocks, strict=True)]

    def check_integrity(self) -> None:
        """Every node's blocks are kept by the pool, no block has two nodes and every node hangs on the tree."""
        held, on_host, children = 0, 0, dict.fromkeys(map(id, self._nodes.values()), 0)
        for key, node in self._nodes.items():
            assert node.key == key, "a node is found under another key"
            assert not node.is_empty, "a node stands for nothing"
            if node.parent is not None:
                assert self._nodes.get(node.parent.key) is node.parent, "a node hangs on one that has been forgotten"
                children[id(node.parent)] += 1
            for group, block in enumerate(node.blocks):
                if block:
                    held += 1
                    assert self._holder.get(block) == (node, group), f"block {block} does not know its node"
                    assert self._pool.is_published(block), f"block {block} is in the prefix cache but not kept"
            on_host += sum(block != NOT_ON_HOST for block in node.host)
        assert held == len(self._holder), "a block is published under two keys"
        assert all(node.children == children[id(node)] for node in self._nodes.values()), "children are miscounted"
        assert on_host == (0 if self.host is None else self.host.num_used), "host blocks are lost"
        if self.host is not None:
            self.host.check_integrity()

    def _hold(self, node: PrefixNode, group: int, block: int) -> None:
        node.blocks[group] = block
        self._holder[block] = (node, group)
        self._pool.publish(block)

    def _insert(self, node: PrefixNode) -> PrefixNode:
        self._nodes[node.key] = node
        if node.parent is not None:
            node.parent.children += 1
        return node

    def _attach(self, node: PrefixNode) -> PrefixNode | None:
        """The node of the tree that stands for the same prefix as `node`, which may have been forgotten meanwhile.

        None when another prefix has taken a key of its chain since.
        """
        forgotten: list[PrefixNode] = []
        last: PrefixNode | None = node
        while last is not None and self._nodes.get(last.key) is not last:
            forgotten.append(last)
            last = last.parent
        for detached in reversed(forgotten):
            found = self._nodes.get(detached.key)
            if found is None:
                detached.parent = last
                found = self._insert(detached)
            elif not _is(found, last, detached.salt, detached.tokens):
                self._prune(last)
                return None
            last = found
        return last

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, key=self._hash_key, digest_size=16).digest()

    def _give_up(self, block: int) -> None:
        """The pool wants the block for something else: keep its content on the host where there is room."""
        node, group = self._holder.pop(block)
        node.blocks[group] = 0
        if self.host is not None and node.host[group] != NOT_ON_HOST:
            self.host.touch(node.host[group])
        elif self.host is not None:
            node.children += 1  # what the host forgets for it must not take the node along
            target = self.host.save((node, group))
            node.children -= 1
            if target is not None:
                node.host[group] = target
                self.saves.append((block, target))
        self._prune(node)

    def _forget_on_host(self, held: tuple[PrefixNode, int]) -> None:
        node, group = held
        node.host[group] = NOT_ON_HOST
        self._prune(node)

    def _prune(self, node: PrefixNode | None) -> None:
        """Forget a node that stands for nothing any more, and those before it that only led to it."""
        while node is not None and node.is_empty and self._nodes.get(node.key) is node:
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children -= 1
            node = node.parent


def _is(node: PrefixNode, parent: PrefixNode | None, salt: str, tokens: bytes) -> bool:
    return node.salt == salt and node.tokens == tokens and node.parent is parent
