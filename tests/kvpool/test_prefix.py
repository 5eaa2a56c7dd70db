"""The prefix cache against a dictionary of whole prefixes, with an honest hash and with one that collides."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.kvpool.blocks import BlockPool
from server.kvpool.prefix import PrefixCache, PrefixNode
from server.step import Int64Array

SIZE = 2
Prefix = tuple[str, tuple[int, ...]]  # the salt and all tokens up to the end of a block


def array(tokens: list[int]) -> Int64Array:
    return np.array(tokens, dtype=np.int64)


@dataclass
class Sequence:
    """One holder of blocks, as the scheduler keeps it."""

    tokens: list[int]
    salt: str
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    node: PrefixNode | None = None
    published: int = 0
    collided: bool = False

    def prefix(self, blocks: int) -> Prefix:
        return self.salt, tuple(self.tokens[: blocks * SIZE])


class CollidingCache(PrefixCache):
    """All keys are one of four, the same in every run."""

    def _hash(self, data: bytes) -> bytes:
        return bytes([crc32(data) % 4])


class ConstantCache(PrefixCache):
    """All keys are the same."""

    def _hash(self, data: bytes) -> bytes:
        return b"same"


class CacheMachine(RuleBasedStateMachine):
    """Sequences arrive, share, grow, publish and leave. `contents` says what each block really holds."""

    cache_class: type[PrefixCache] = PrefixCache
    exact = True  # whether every published prefix must be found

    @initialize(capacity=st.integers(2, 14))
    def start(self, capacity: int) -> None:
        self.pool = BlockPool(capacity)
        self.cache = self.cache_class(self.pool, SIZE)
        forget = self.pool.on_evict
        self.known: dict[Prefix, int] = {}
        self.contents: dict[int, Prefix] = {}
        self.sequences: list[Sequence] = []

        def on_evict(block: int) -> None:
            forget(block)
            if self.known.get(self.contents[block]) == block:
                del self.known[self.contents[block]]

        self.pool.on_evict = on_evict

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10), salt=st.sampled_from(["", "a"]))
    def arrive(self, tokens: list[int], salt: str) -> None:
        sequence = Sequence(list(tokens), salt)
        self.cache.extend_keys(sequence.keys, array(tokens), salt)
        chain = self.cache.match(sequence.keys, array(tokens), salt)

        assert len(chain) * SIZE < len(tokens), "the whole prompt was found"
        for index, node in enumerate(chain):
            assert self.contents[node.blocks[0]] == sequence.prefix(index + 1), "another prompt's block was found"
            assert self.pool.is_published(node.blocks[0])
        longest = 0
        while (longest + 1) * SIZE < len(tokens) and sequence.prefix(longest + 1) in self.known:
            longest += 1
        assert len(chain) == longest if self.exact else len(chain) <= longest

        hits = [node.blocks[0] for node in chain]
        needed = -(-len(tokens) // SIZE) - len(hits)
        if needed > self.pool.num_available - sum(self.pool.is_cached(block) for block in hits):
            return
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(needed, after=hits[-1] if hits else None)
        sequence.node = chain[-1] if chain else None
        sequence.published = len(chain)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute_one_block(self, data: st.DataObject) -> None:
        """Publish the next full block of a sequence, the way a commit does."""
        sequence = data.draw(st.sampled_from(self.sequences))
        index = sequence.published
        if sequence.collided or len(sequence.tokens) < (index + 1) * SIZE:
            return
        tokens = array(sequence.tokens)
        self.cache.extend_keys(sequence.keys, tokens, sequence.salt)
        block, prefix = sequence.blocks[index], sequence.prefix(index + 1)
        self.contents[block] = prefix
        content = tokens[index * SIZE : (index + 1) * SIZE]
        node = self.cache.publish(sequence.node, sequence.keys[index], sequence.salt, content, [block])
        if node is None:
            assert not self.exact, "two prefixes had the same key"
            sequence.collided = True
            return
        if prefix in self.known:
            assert node.blocks[0] == self.known[prefix], "the first publication of a prefix was replaced"
        else:
            assert node.blocks[0] == block
            self.known[prefix] = block
        sequence.node = node
        sequence.published += 1

    @precondition(lambda self: self.sequences and self.pool.num_available)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.tokens.append(token)
        if len(sequence.tokens) > len(sequence.blocks) * SIZE:
            sequence.blocks += self.pool.allocate(1, after=sequence.blocks[-1])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(sequence.blocks)

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        self.pool.check_integrity([sequence.blocks for sequence in self.sequences])
        for prefix, block in self.known.items():
            assert self.contents[block] == prefix
            assert self.pool.is_published(block)


class CollidingMachine(CacheMachine):
    cache_class = CollidingCache
    exact = False


class ConstantMachine(CacheMachine):
    cache_class = ConstantCache
    exact = False


TestCache = CacheMachine.TestCase
TestCollidingHash = CollidingMachine.TestCase
TestConstantHash = ConstantMachine.TestCase
TestCache.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestCollidingHash.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestConstantHash.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class Book:
    """A cache of blocks of two tokens, filled by hand."""

    def __init__(self, capacity: int = 16) -> None:
        self.pool = BlockPool(capacity)
        self.cache = PrefixCache(self.pool, SIZE)

    def write(self, tokens: list[int], salt: str = "") -> list[int]:
        """Publish all full blocks of `tokens` behind what is known already; returns the blocks, still held."""
        keys: list[bytes] = []
        self.cache.extend_keys(keys, array(tokens), salt)
        blocks = self.pool.allocate(-(-len(tokens) // SIZE))
        node = None
        for index, key in enumerate(keys):
            content = array(tokens)[index * SIZE : (index + 1) * SIZE]
            node = self.cache.publish(node, key, salt, content, [blocks[index]])
            assert node is not None
        return blocks

    def find(self, tokens: list[int], salt: str = "") -> list[int]:
        keys: list[bytes] = []
        self.cache.extend_keys(keys, array(tokens), salt)
        return [node.blocks[0] for node in self.cache.match(keys, array(tokens), salt)]


def test_the_longest_common_prefix_of_full_blocks_is_found() -> None:
    book = Book()
    blocks = book.write([1, 2, 3, 4, 5])
    assert book.find([1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert book.find([1, 2, 3, 9, 5, 6]) == blocks[:1]
    assert book.find([3, 4, 5]) == [], "a block is not found without the blocks before it"


@pytest.mark.parametrize(("length", "found"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)])
def test_a_prompt_is_never_found_whole(length: int, found: int) -> None:
    book = Book()
    blocks = book.write([1, 2, 3, 4, 5, 6])
    assert book.find([1, 2, 3, 4, 5, 6, 7][:length]) == blocks[:found]


def test_salts_never_meet() -> None:
    book = Book()
    blocks = book.write([1, 2, 3], salt="a")
    assert book.find([1, 2, 3], salt="a") == blocks[:1]
    assert book.find([1, 2, 3], salt="b") == []
    assert book.find([1, 2, 3]) == []


def test_a_salt_cannot_be_forged_by_a_colliding_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_hash", lambda self, data: b"same")
    book = Book()
    book.write([1, 2], salt="a")
    assert book.find([1, 2, 3], salt="b") == []


def test_a_forged_collision_is_a_miss_and_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_hash", lambda self, data: b"same")
    book = Book()
    first = book.write([1, 2])
    assert book.find([1, 2, 3]) == first
    assert book.find([7, 8, 3]) == []
    (other,) = book.pool.allocate(1)
    assert book.cache.publish(None, b"same", "", array([7, 8]), [other]) is None
    assert not book.pool.is_published(other)
    assert book.find([1, 2, 3]) == first


def test_a_collision_of_an_ancestor_is_a_miss_though_the_block_itself_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a block agree and its key agrees, but the block before it held something else."""
    monkeypatch.setattr(PrefixCache, "_hash", lambda self, data: data[-16:])  # looks at the block alone
    book = Book()
    blocks = book.write([1, 2, 5, 6])
    book.write([3, 4])
    assert book.find([1, 2, 5, 6, 0]) == blocks
    assert len(book.find([3, 4, 5, 6, 0])) == 1


def test_the_second_publication_of_a_prefix_stays_private() -> None:
    book = Book(capacity=4)
    first, second = book.write([1, 2, 3, 4]), book.write([1, 2, 3, 4])
    assert book.find([1, 2, 3, 4, 5]) == first
    book.pool.release(second)
    assert (book.pool.num_free, book.pool.num_cached) == (2, 0)
    book.pool.release(first)
    assert (book.pool.num_free, book.pool.num_cached) == (2, 2)


def test_a_chain_is_whole_again_when_an_evicted_ancestor_is_computed_again() -> None:
    book = Book(capacity=6)
    head = book.write([1, 2])
    twin = book.write([1, 2, 3, 4])  # its first block is a private duplicate, its second is published
    book.pool.release(head)
    book.pool.allocate(4)  # takes the three free ones and evicts the head
    assert book.pool.num_evictions == 1
    assert book.find([1, 2, 3, 4, 5]) == [], "the tail cannot be reached without its head"

    key: list[bytes] = []
    book.cache.extend_keys(key, array([1, 2]), "")
    book.cache.publish(None, key[0], "", array([1, 2]), twin[:1])
    assert book.find([1, 2, 3, 4, 5]) == twin
    book.cache.check_integrity()


def test_keys_differ_between_caches() -> None:
    keys: list[list[bytes]] = [[], []]
    for found in keys:
        Book().cache.extend_keys(found, array([1, 2]), "")
    assert keys[0] != keys[1]
