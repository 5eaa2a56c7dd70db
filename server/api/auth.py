"""API keys: who may ask, and under which name.

A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`. With keys in use every path needs one, also one that
does not exist, but for GET and HEAD of the probes and, by choice, of /metrics. /metrics is guarded by default: it
stands on the port that clients reach, and tells each of them how busy the others are; Prometheus can send a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import APIError
from server.api.exchange import Exchange
from server.config import ServeSettings, UnusableOption
from server.values import check_key

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_PROBES = frozenset({"/health", "/ready"})
_CHALLENGE = {"www-authenticate": "Bearer"}


class Keyring:
    """The keys in use, as digests, with the name of each one's holder."""

    def __init__(
        self, keys: Iterable[SecretStr], path: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises UnusableOption if the file cannot be used, or if it holds no key."""
        self._given = {_digest(key.get_secret_value()): _short_name(key.get_secret_value()) for key in keys}
        self._path = path
        self._clock = clock
        self._looked = clock()
        self._seen: object = None
        self._holders = self._given
        if path is not None:
            self._seen = _state(path)
            self._holders = self._given | _read(path)

    def holder(self, given: Iterable[str]) -> str | None:
        """The name that goes with the first good key of those given, or None. Takes as long for a bad one."""
        self._look()
        found: str | None = None
        for key in given:
            digest = _digest(key)
            for known, name in self._holders.items():
                if hmac.compare_digest(digest, known) and found is None:
                    found = name
        return found

    def _look(self) -> None:
        """Read the file again if it has changed. One that cannot be used any more changes nothing."""
        if self._path is None or (now := self._clock()) - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        state = _state(self._path)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._holders = self._given | _read(self._path)
        except UnusableOption as error:
            logger.error("%s; the keys from before stay in use", error)
        else:
            logger.info("read %s again: %d keys in use", self._path, len(self._holders))


def load_keys(settings: ServeSettings) -> Keyring | None:
    """The keys that the options name, None if they name none. Raises UnusableOption."""
    if not settings.api_key and settings.api_key_file is None:
        return None
    return Keyring(settings.api_key, None if settings.api_key_file is None else Path(settings.api_key_file))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _short_name(key: str) -> str:
    """For a key without a name: always the same, and no help in guessing a key of usual length."""
    return "key-" + hashlib.sha256(b"sluice tenant" + key.encode()).hexdigest()[:8]


def _state(path: Path) -> object:
    """What differs once a file has been changed, or replaced; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> dict[bytes, str]:
    """The keys of a file: lines `KEY` or `NAME:KEY`, empty ones and those that begin with # left out."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UnusableOption(f"--api-key-file {path}: cannot be read ({reason})") from None
    keys: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, key = _parse(line.strip())
        try:
            check_key(SecretStr(key))
        except ValueError as error:
            raise UnusableOption(f"--api-key-file {path}: line {number}: {error}") from None
        if not re.fullmatch(r"[\w.@-]{1,64}", name, re.ASCII):
            raise UnusableOption(
                f"--api-key-file {path}: line {number}: a name is 1 to 64 letters, digits, '_', '.', '@' or '-'"
            )
        if keys.setdefault(_digest(key), name) != name:
            raise UnusableOption(f"--api-key-file {path}: line {number}: this key is already another name's")
    if not keys:
        raise UnusableOption(f"--api-key-file {path}: holds no key; write one a line, as KEY or NAME:KEY")
    return keys


def _parse(line: str) -> tuple[str, str]:
    """Name and key. What follows the first colon, where there is one, is the key."""
    name, colon, key = line.partition(":")
    return (name.rstrip(), key.lstrip()) if colon else (_short_name(line), line)


class AuthMiddleware:
    """Lets through what carries a good key, and notes whose it is; all else is a 401."""

    def __init__(self, app: ASGIApp, keys: Keyring, public_metrics: bool) -> None:
        self._app = app
        self._keys = keys
        self._public = _PROBES | {"/metrics"} if public_metrics else _PROBES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in self._public and scope["method"] in ("GET", "HEAD")):
            await self._app(scope, receive, send)
            return
        exchange: Exchange = scope["state"]["exchange"]
        given = _given(Headers(scope=scope))
        holder = self._keys.holder(given)
        if holder is None:
            refusal = _refusal(bool(given))
            exchange.notes["error"] = refusal.code
            await refusal.response(scope["path"], exchange.request_id)(scope, receive, send)
            return
        exchange.tenant = holder
        await self._app(scope, receive, send)


def _given(headers: Headers) -> list[str]:
    bearers = []
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            bearers.append(key.strip())
    return bearers + headers.getlist("x-api-key")


def _refusal(had_key: bool) -> APIError:
    message = "This API key is not known here." if had_key else "This server asks for an API key."
    return APIError(
        401,
        f"{message} Send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers=_CHALLENGE,
    )
