"""Logging: lines for people, or one JSON object a line for collectors."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
_LONGEST_VALUE = 200


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """A line for people: time, level, message, and what `extra` gave as `name=value`, which cannot forge a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        values = "".join(f" {name}={_plain(value)}" for name, value in _extra(record).items())
        return super().formatMessage(record) + values


def _plain(value: object) -> str:
    """One printable word, in quotes if it would not be one otherwise."""
    text = str(value)
    if re.fullmatch(r"[!-~]+", text) is None:
        text = json.dumps(text)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, RFC 3339), level, logger, message, what `extra` gave, and any exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= _extra(record)
        if record.exc_info:
            entry["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(entry, default=str)


def set_up_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send all logging to `stream` (standard error). Called once, at the start of a server.

    Our own loggers and uvicorn's speak from `level` up; libraries speak from warnings up, or at our level if higher.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    for name in ("server", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
