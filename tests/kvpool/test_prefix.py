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
from server.kvpool.layout import EVERYTHING, Visibility
from server.kvpool.prefix import PrefixCache, PrefixNode
from server.kvpool.table import BlockTable
from server.step import Int64Array

SIZE = 2
Prefix = tuple[str, tuple[int, ...]]  # the salt and all tokens up to the end of a block
Content = tuple[int, Prefix]  # a block's group of layers, and what it holds
WINDOW, CHUNK = Visibility(window=4), Visibility(chunk=6)
GROUPS = [(EVERYTHING,), (EVERYTHING,), (WINDOW,), (CHUNK,), (Visibility(window=1),), (EVERYTHING, WINDOW, CHUNK)]


def array(tokens: list[int]) -> Int64Array:
    return np.array(tokens, dtype=np.int64)


@dataclass
class Sequence:
    """One holder of blocks, as the scheduler keeps it: a table for each group."""

    tokens: list[int]
    salt: str
    tables: list[BlockTable] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    node: PrefixNode | None = None
    published: int = 0
    collided: bool = False

    def prefix(self, blocks: int) -> Prefix:
        return self.salt, tuple(self.tokens[: blocks * SIZE])

    @property
    def blocks(self) -> list[int]:
        """In the order of the tokens, those of all groups for each."""
        columns = range(max(table.end for table in self.tables))
        return [int(t.ids[column]) for column in columns for t in self.tables if t.first <= column < t.end]


class CollidingCache(PrefixCache):
    """All keys are one of four, the same in every run."""

    def _hash(self, data: bytes) -> bytes:
        return bytes([crc32(data) % 4])


class ConstantCache(PrefixCache):
    """All keys are the same."""

    def _hash(self, data: bytes) -> bytes:
        return b"same"


class CacheMachine(RuleBasedStateMachine):
    """Sequences arrive, share, grow, publish, forget and leave, and host memory keeps what the pool gives up.

    contents, host_contents: what each block really holds, as (group, prefix). Copies are made when a step begins, so
    that what is arranged for them before is also put to the test.
    known, host_known: what must be found, and where.
    """

    cache_class: type[PrefixCache] = PrefixCache
    exact = True  # whether every published prefix must be found

    @initialize(
        capacity=st.integers(2, 14), groups=st.sampled_from(GROUPS), num_host_blocks=st.sampled_from([0, 1, 3, 30])
    )
    def start(self, capacity: int, groups: tuple[Visibility, ...], num_host_blocks: int) -> None:
        self.groups = groups
        self.pool = BlockPool(capacity * len(groups))
        self.cache = self.cache_class(self.pool, SIZE, groups, num_host_blocks)
        self.known: dict[Content, int] = {}
        self.host_known: dict[Content, int] = {}
        self.contents: dict[int, Content] = {}
        self.host_contents: dict[int, Content] = {}
        self.sequences: list[Sequence] = []
        self.fresh: list[int] = []
        self.loads: list[tuple[int, int]] = []
        self.expected: list[tuple[int, Content]] = []
        give_up = self.pool.on_evict

        def on_evict(block: int) -> None:
            content = next(content for content, where in self.known.items() if where == block)
            del self.known[content]
            before = len(self.cache.saves)
            give_up(block)
            for _, host_block in self.cache.saves[before:]:
                self.host_known[content] = host_block

        self.pool.on_evict = on_evict
        if self.cache.host is not None:
            forget = self.cache.host._on_evict

            def on_host_evict(held: tuple[PrefixNode, int]) -> None:
                node, group = held
                content = next(c for c, where in self.host_known.items() if where == node.host[group])
                assert content[0] == group
                del self.host_known[content]
                forget(held)

            self.cache.host._on_evict = on_host_evict

    def begin_step(self) -> None:
        """Copy as arranged: to the host what the pool gave up, then back what was asked for."""
        saves, self.cache.saves = self.cache.saves, []
        assert len({host_block for _, host_block in saves}) == len(saves), "a host block is saved to twice"
        for block, host_block in saves:
            self.host_contents[host_block] = self.contents[block]
        for block in self.fresh:
            self.contents.pop(block, None)
        for host_block, block in self.loads:
            self.contents[block] = self.host_contents[host_block]
        for block, content in self.expected:
            assert self.contents[block] == content, "another prompt's block was found"
        self.fresh, self.loads, self.expected = [], [], []
        if self.cache.host is not None:
            self.cache.host.unpin()

    def longest(self, sequence: Sequence, use_host: bool) -> int:
        """How many blocks of its prompt the cache must have: every length is tried."""
        found = set(self.known) | (set(self.host_known) if use_host else set())
        everything = [prefix for _, prefix in set(self.known) | set(self.host_known)]
        best = 0
        for length in range(1, (len(sequence.tokens) - 1) // SIZE + 1):
            salt, tokens = sequence.prefix(length)
            if not any(other == salt and text[: len(tokens)] == tokens for other, text in everything):
                break  # nobody has come this way, or nothing is left of it
            needed = [
                (group, sequence.prefix(token // SIZE + 1))
                for group, visibility in enumerate(self.groups)
                for token in range(visibility.first(length * SIZE), length * SIZE)
            ]
            if found.issuperset(needed):
                best = length
        return best

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from(["", "", "a"]),
        use_host=st.sampled_from([True, True, False]),
    )
    def arrive(self, tokens: list[int], salt: str, use_host: bool) -> None:
        sequence = Sequence(list(tokens), salt)
        self.cache.extend_keys(sequence.keys, array(tokens), salt)
        chain = self.cache.match(sequence.keys, array(tokens), salt, use_host=use_host)
        assert self.cache.match(sequence.keys, array(tokens), salt, chain, use_host=use_host) == chain

        assert len(chain) * SIZE < len(tokens), "the whole prompt was found"
        longest = self.longest(sequence, use_host)
        assert len(chain) == longest if self.exact else len(chain) <= longest

        hits, missing = [], []
        for group in range(len(self.groups)):
            first = self.cache.first_needed(group, len(chain))
            table = BlockTable()
            table.start_at(first)
            sequence.tables.append(table)
            for node in chain[first:]:
                if node.blocks[group]:
                    hits.append(node.blocks[group])
                else:
                    assert use_host
                    missing.append((node, group))
        columns = -(-len(tokens) // SIZE)
        needed = len(missing) + len(self.groups) * (columns - len(chain))
        if needed > self.pool.num_available - sum(self.pool.is_cached(block) for block in hits):
            return
        self.pool.acquire(hits)
        if missing:
            loads = self.cache.restore(missing)
            self.loads += loads
            self.fresh += [block for _, block in loads]
            for node, group in missing:
                self.known[group, sequence.prefix(chain.index(node) + 1)] = node.blocks[group]
        for group, table in enumerate(sequence.tables):
            table.append([node.blocks[group] for node in chain[table.first :]])
            for index in range(table.first, len(chain)):
                self.expected.append((int(table.ids[index]), (group, sequence.prefix(index + 1))))
            self.allocate(table, columns - len(chain))
        sequence.node = chain[-1] if chain else None
        sequence.published = len(chain)
        self.sequences.append(sequence)

    def allocate(self, table: BlockTable, count: int) -> None:
        blocks = self.pool.allocate(count, after=table.last)
        self.fresh += blocks
        table.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute_one_block(self, data: st.DataObject) -> None:
        """Publish the next full block of a sequence, the way a commit does."""
        self.begin_step()
        sequence = data.draw(st.sampled_from(self.sequences))
        index = sequence.published
        if sequence.collided or len(sequence.tokens) < (index + 1) * SIZE:
            return
        tokens = array(sequence.tokens)
        self.cache.extend_keys(sequence.keys, tokens, sequence.salt)
        blocks, prefix = [int(table.ids[index]) for table in sequence.tables], sequence.prefix(index + 1)
        for group, block in enumerate(blocks):
            self.contents[block] = (group, prefix)
        content = tokens[index * SIZE : (index + 1) * SIZE]
        node = self.cache.publish(sequence.node, sequence.keys[index], sequence.salt, content, blocks)
        if node is None:
            assert not self.exact, "two prefixes had the same key"
            sequence.collided = True
            return
        for group, block in enumerate(blocks):
            first = self.known.setdefault((group, prefix), block)
            assert node.blocks[group] == first, "the first publication of a prefix was replaced"
        sequence.node = node
        sequence.published += 1

    @precondition(lambda self: self.sequences and self.pool.num_available >= len(self.groups))
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.tokens.append(token)
        for table in sequence.tables:
            if len(sequence.tokens) > table.end * SIZE:
                self.allocate(table, 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Give back what no layer of a group sees any more."""
        self.begin_step()
        sequence = data.draw(st.sampled_from(self.sequences))
        for visibility, table in zip(self.groups, sequence.tables, strict=True):
            self.pool.release(table.drop_before(visibility.first(sequence.published * SIZE) // SIZE))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.begin_step()
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(sequence.blocks)

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        self.pool.check_integrity([sequence.blocks for sequence in self.sequences])
        copied = {block for _, block in self.loads}
        for content, block in self.known.items():
            assert block in copied or self.contents[block] == content
            assert self.pool.is_published(block)
        saved = {host_block for _, host_block in self.cache.saves}
        for content, host_block in self.host_known.items():
            assert host_block in saved or self.host_contents[host_block] == content
        host = self.cache.host
        assert len(self.host_known) == (0 if host is None else host.num_used)


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

    def __init__(self, capacity: int = 16, num_host_blocks: int = 0) -> None:
        self.pool = BlockPool(capacity)
        self.cache = PrefixCache(self.pool, SIZE, num_host_blocks=num_host_blocks)

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

    def match(self, tokens: list[int], salt: str = "") -> list[PrefixNode]:
        keys: list[bytes] = []
        self.cache.extend_keys(keys, array(tokens), salt)
        return self.cache.match(keys, array(tokens), salt)

    def find(self, tokens: list[int], salt: str = "") -> list[int]:
        return [node.blocks[0] for node in self.match(tokens, salt)]

    def fill(self) -> None:
        """Have the pool give up all that is only cached; a step comes to its end."""
        self.pool.release(self.pool.allocate(self.pool.num_available))
        assert self.cache.host is not None
        self.cache.host.unpin()


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


def test_host_memory_forgets_what_was_used_longest_ago_wherever_it_was_used() -> None:
    book = Book(capacity=2, num_host_blocks=2)
    for tokens in ([1, 2], [3, 4]):
        book.pool.release(book.write(tokens))
    book.fill()
    for tokens in ([1, 2, 0], [3, 4, 0]):
        ((_, block),) = book.cache.restore([(node, 0) for node in book.match(tokens)])
        book.pool.release([block])
    (again,) = book.find([1, 2, 0])
    book.pool.acquire([again])  # the pool has both, and this one is used once more
    book.pool.release([again])
    book.fill()
    assert len(book.cache.saves) == 2, "what the host has is copied again"

    book.pool.release(book.write([5, 6]))
    book.fill()
    assert [len(book.match([*tokens, 0])) for tokens in ([1, 2], [3, 4], [5, 6])] == [1, 0, 1]
    book.cache.check_integrity()


def test_what_is_about_to_be_copied_back_is_not_forgotten_for_what_gives_way_to_it() -> None:
    book = Book(capacity=2, num_host_blocks=2)
    book.pool.release(book.write([1, 2, 3, 4]))
    book.fill()
    for tokens in ([5, 6], [7, 8]):
        book.pool.release(book.write(tokens))
    chain = book.match([1, 2, 3, 4, 0])
    loads = book.cache.restore([(node, 0) for node in chain])
    assert [host_block for host_block, _ in loads] == [node.host[0] for node in chain]
    assert sorted(block for _, block in loads) == [1, 2]
    assert [len(book.match([*tokens, 0])) for tokens in ([1, 2, 3, 4], [5, 6], [7, 8])] == [2, 0, 0]
    book.cache.check_integrity()


def test_a_node_outlives_its_last_move_though_the_host_forgets_its_other_group_for_it() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, SIZE, (EVERYTHING, Visibility(window=4)), num_host_blocks=1)
    assert cache.host is not None
    keys: list[bytes] = []
    cache.extend_keys(keys, array([1, 2]), "")
    blocks = pool.allocate(2)
    cache.publish(None, keys[0], "", array([1, 2]), blocks)
    pool.release(blocks)
    for _ in blocks:  # one in each step
        pool.allocate(1)
        cache.host.unpin()
        cache.check_integrity()
    assert (cache.host.num_saved, cache.host.num_evicted) == (2, 1)


@pytest.mark.parametrize("forgotten", [1, 2])
def test_a_collision_behind_a_forgotten_prefix_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, forgotten: int
) -> None:
    """Blocks out of sight are given back while the sequence goes on; then another prefix takes one of its keys."""
    monkeypatch.setattr(PrefixCache, "_hash", lambda self, data: data[-16:])  # looks at the block alone
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE, (Visibility(window=1),))
    texts = [array([1, 2]), array([5, 6]), array([7, 8])]
    node = None
    for text in texts[:forgotten]:
        blocks = pool.allocate(1)
        node = cache.publish(node, text.tobytes(), "", text, blocks)
        pool.release(blocks)
    pool.release(pool.allocate(8))
    cache.publish(None, array([5, 6]).tobytes(), "", array([5, 6]), pool.allocate(1))
    mine = pool.allocate(1)
    assert cache.publish(node, texts[forgotten].tobytes(), "", texts[forgotten], mine) is None
    assert not pool.is_published(mine[0])
    cache.check_integrity()


def test_keys_differ_between_caches() -> None:
    keys: list[list[bytes]] = [[], []]
    for found in keys:
        Book().cache.extend_keys(found, array([1, 2]), "")
    assert keys[0] != keys[1]
