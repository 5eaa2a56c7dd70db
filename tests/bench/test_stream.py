"""Accounting of one stream, against times written down by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from server.bench.record import Record, tokens_per_chunk
from server.bench.stream import CompletionStream

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def event(payload: Any) -> bytes:
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    block = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(block), block)


def text(piece: str, total: int | None = None, finish: str | None = None) -> bytes:
    chunk: dict[str, Any] = {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}
    if total is not None:
        chunk["usage"] = {"prompt_tokens": 5, "completion_tokens": total}
    return event(chunk)


def usage(completion: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": 5, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


def play(*reads: tuple[float, bytes], intended: float = 0.0, end: float | None = None) -> Record:
    """The record of a stream whose socket gave these bytes at these times, then closed."""
    stream = CompletionStream(Record(intended=intended, sent=intended))
    for now, data in reads:
        stream.feed(data, now)
    stream.finish(reads[-1][0] if end is None else end)
    return stream.record


def test_latencies_of_one_token_a_chunk() -> None:
    record = play(
        (10.25, HEAD),
        (10.5, text("")),  # a role or an empty piece is not a first token
        (11.0, text("a", 1)),
        (11.5, text("b", 2)),
        (13.5, text("c", 3, "length") + usage(3, cached=4)),
        (13.75, DONE + END),
        intended=10.0,
    )
    assert record.failure is None
    assert record.ttft == 1.0
    assert record.inter_token().tolist() == [0.5, 2.0]
    assert record.e2e == 3.75
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 3, 4)
    assert record.finish_reason == "length"


def test_a_chunk_of_several_tokens_shares_its_gap() -> None:
    record = play(
        (0.0, HEAD),
        (1.0, text("ab", 2)),
        (2.0, text("cdef", 6)),
        (2.5, text("g", 7, "stop") + usage(7) + DONE + END),
    )
    assert record.failure is None
    assert record.chunk_gaps().tolist() == [1.0, 0.5]
    assert record.inter_token().tolist() == [0.25, 0.25, 0.25, 0.25, 0.5]


def test_without_running_usage_tokens_are_spread_evenly() -> None:
    record = play(
        (0.0, HEAD), (1.0, text("ab")), (2.0, text("cd")), (4.0, text("ef", None, "stop") + usage(6) + DONE + END)
    )
    assert record.inter_token().tolist() == [0.5, 0.5, 1.0, 1.0]


def test_chunks_of_one_read_have_one_time() -> None:
    record = play((0.0, HEAD), (1.0, text("a", 1) + text("b", 2)), (2.0, text("c", 3, "stop") + usage(3) + DONE + END))
    assert record.inter_token().tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("totals", "output", "expected"),
    [
        ([1, 2, 3], 3, [1, 1, 1]),
        ([3, 3, 7], 7, [3, 1, 4]),
        ([None, None], 5, [2, 3]),
        ([1, None], 4, [2, 2]),
        ([None, None, None], 2, [1, 1, 1]),
        ([], 0, []),
    ],
)
def test_tokens_per_chunk(totals: list[int | None], output: int, expected: list[int]) -> None:
    assert tokens_per_chunk(totals, output).tolist() == expected


def test_samples_add_up_to_the_time_between_first_and_last_chunk() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        arrivals = np.cumsum(rng.exponential(size=rng.integers(1, 9))).tolist()
        totals = np.cumsum(rng.integers(0, 4, size=len(arrivals))).tolist()
        record = Record(intended=0.0, arrivals=arrivals, totals=totals, completion_tokens=totals[-1])
        assert record.inter_token().sum() == pytest.approx(arrivals[-1] - arrivals[0])


def test_chat_chunks_count_from_the_first_content() -> None:
    def delta(now: float, content: dict[str, str], finish: str | None = None) -> tuple[float, bytes]:
        return now, event({"choices": [{"index": 0, "delta": content, "finish_reason": finish}]})

    record = play(
        (0.0, HEAD),
        delta(1.0, {"role": "assistant", "content": ""}),
        delta(2.0, {"reasoning_content": "hm"}),
        delta(3.0, {"content": "x"}, "stop"),
        (4.0, DONE + END),
    )
    assert record.failure is None
    assert record.arrivals == [2.0, 3.0]
    assert record.output_tokens == 2  # no usage came: chunks are all there is to count


GOOD = text("a", 1, "stop") + usage(1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "connection closed before a response"),
        (HEAD, "stream cut before its end"),
        (HEAD + GOOD, "stream cut before its end"),
        (HEAD + GOOD[:-20], "stream cut before its end"),
        (HEAD + GOOD + END, "stream ended without [DONE]"),
        (HEAD + GOOD + DONE, "stream cut after [DONE]"),
        (HEAD + text("a", 1) + usage(1) + DONE + END, "stream ended without a finish_reason"),
        (
            HEAD + text("a") + event({"error": {"message": "the engine died"}}) + DONE + END,
            "error event: the engine died",
        ),
        (HEAD + event({"error": "plain"}) + END, "error event: plain"),
        (HEAD + event(b"{oops") + DONE + END, "event is not JSON: b'{oops'"),
        (HEAD + event([1]) + DONE + END, "event is not an object: b'[1]'"),
        (HEAD + event({"choices": [1]}) + DONE + END, "event is not a completion: b'{\"choices\": [1]}'"),
        (HEAD + event({"choices": [{"text": 5}]}) + END, 'event is not a completion: b\'{"choices": [{"text": 5}]}\''),
        (
            HEAD + event({"usage": {"prompt_tokens": "1"}}) + END,
            'event is not a completion: b\'{"usage": {"prompt_tokens": "1"}}\'',
        ),
        (HEAD + GOOD + DONE + text("b") + END, "event after [DONE]"),
        (b"HTTP/1.1 429 X\r\nContent-Length: 34\r\n\r\n" + b'{"error": {"message": "too many"}}', "HTTP 429: too many"),
        (b"HTTP/1.1 502 X\r\n\r\n<html>Bad Gateway", "HTTP 502: <html>Bad Gateway"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", "HTTP 500: empty body"),
        (b"garbage\r\n\r\n", "not an HTTP/1.1 response: 'garbage'"),
    ],
)
def test_what_is_not_whole_is_a_failure_with_its_reason(data: bytes, reason: str) -> None:
    assert play((1.0, data)).failure == reason


def test_a_whole_stream_is_no_failure() -> None:
    assert play((1.0, HEAD + GOOD + DONE + END)).failure is None
