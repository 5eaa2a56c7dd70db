"""The parsers read the same however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.http1 import EventParser, ProtocolError, ResponseParser


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), cuts)
def test_chunked_body_survives_any_cut(chunks: list[bytes], cuts: list[int]) -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
    wire += b"".join(b"%X;ext=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    parser = ResponseParser()
    body = b"".join(parser.feed(piece) for piece in pieces(wire, cuts))
    assert body == b"".join(chunks)
    assert parser.status == 200
    assert parser.complete


@given(st.binary(max_size=40), cuts)
def test_body_of_known_length_survives_any_cut(content: bytes, cuts: list[int]) -> None:
    wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    parser = ResponseParser()
    assert b"".join(parser.feed(piece) for piece in pieces(wire, cuts)) == content
    assert parser.status == 404
    assert parser.complete


def test_every_proper_start_of_a_chunked_response_is_incomplete() -> None:
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for end in range(len(wire)):
        parser = ResponseParser()
        parser.feed(wire[:end])
        assert not parser.feed_eof(), wire[:end]


def test_a_body_without_framing_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nall") == b"all"
    assert not parser.complete
    assert parser.feed_eof()


@pytest.mark.parametrize("wire", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 ok\r\n\r\n"])
def test_other_protocols_are_told_apart(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(wire)


def test_a_bad_chunk_size_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="zz"):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")


@given(cuts, st.sampled_from([b"\n", b"\r\n"]))
def test_events_survive_any_cut(cuts: list[int], newline: bytes) -> None:
    lines = [b": keep-alive", b"", b"data: one", b"", b"event: x", b"data:two", b"data: lines", b"id: 3", b"", b""]
    parser = EventParser()
    events = [event for piece in pieces(newline.join(lines), cuts) for event in parser.feed(piece)]
    assert events == [b"one", b"two\nlines"]
