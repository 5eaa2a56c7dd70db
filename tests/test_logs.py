"""Lines that people can read and collectors can parse, and that no client can forge."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from server.logs import set_up_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("server", "uvicorn")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(False)


def logged(log_format: str, message: str, **extra: Any) -> str:
    stream = io.StringIO()
    set_up_logging("info", log_format, stream)
    logging.getLogger("server.test").info(message, extra=extra)
    return stream.getvalue()


def test_json_says_each_thing_once() -> None:
    line = logged("json", "request", request_id="abc", status=200, tenant="ann")
    entry = json.loads(line)
    assert (entry["message"], entry["request_id"], entry["status"]) == ("request", "abc", 200)
    assert line.count("abc") == line.count("ann") == 1


def test_text_shows_the_fields() -> None:
    assert logged("text", "request", request_id="abc", total_ms=1.5).endswith(
        "INFO    request request_id=abc total_ms=1.5\n"
    )


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_value_cannot_forge_a_line(log_format: str) -> None:
    line = logged(log_format, "request", param="x\n00:00:00 INFO    request status=200 \x1b[31m" + "y" * 5000)
    assert line.count("\n") == 1
    assert line.rstrip("\n").isprintable()
    if log_format == "text":
        assert len(line) < 300
