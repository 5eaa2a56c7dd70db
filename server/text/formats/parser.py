"""The parser of replies: reasoning, content and calls, whatever the markup of the calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from server.text.formats.reader import Malformed, Reader, Sink, Waiting
from server.text.formats.reasoning import Tags
from server.text.reply import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallSyntax(Protocol):
    """The markup of the calls of one family of models.

    openers: texts at which calls begin.
    bare: whether a JSON object at the start of the answer is a call where it names a function that is offered.
    """

    @property
    def openers(self) -> tuple[str, ...]: ...

    @property
    def bare(self) -> bool: ...

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        """Read what follows `opener`, "" for none. Raises Malformed where it is no call."""
        ...


class Reply:
    """The parser of one reply.

    tags: how the model marks reasoning, None where it does not. opened: whether the prompt has begun it.
    syntax: the markup of calls. names: the functions that are offered; without any, no call is looked for.
    num_complete: calls whose arguments have all been read.
    """

    def __init__(self, tags: Tags | None, opened: bool, syntax: CallSyntax, names: Collection[str]) -> None:
        self.reader = Reader()
        self._tags = tags
        self._opened = opened
        self._syntax = syntax
        self._names = frozenset(names)
        self._parts: list[Part] = []
        self._num_calls = 0
        self.num_complete = 0
        self._run = self._reply()

    def feed(self, text: str) -> list[Part]:
        self.reader.feed(text)
        return self._advance()

    def finish(self) -> list[Part]:
        self.reader.ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._run, None)
        parts, self._parts = self._parts, []
        return parts

    def start(self, name: str, call_id: str | None = None) -> Sink:
        """A call begins, for good. Returns where its arguments go."""
        index = self._num_calls
        self._num_calls += 1
        self._parts.append(ToolCallStart(index, name, call_id))
        self.done()

        def arguments(text: str) -> None:
            self.done()
            last = self._parts[-1] if self._parts else None
            if isinstance(last, ToolCallArguments):
                self._parts[-1] = ToolCallArguments(index, last.text + text)
            elif text:
                self._parts.append(ToolCallArguments(index, text))

        return arguments

    def done(self) -> None:
        """What is read so far is settled and can no longer become content."""
        self.reader.mark = self.reader.pos

    def arguments(self, sink: Sink, closers: Sequence[str]) -> Waiting[None]:
        """Read the arguments of a call that has begun: a JSON object, a JSON string that holds one, or null.

        What is no JSON is handed on as it is, up to the first of `closers`.
        """
        reader = self.reader
        char = yield from reader.peek()
        try:
            if char in '"n':
                sink(_object_text((yield from reader.read_json())))
            else:
                yield from reader.json_value(sink)
        except Malformed:
            if reader.ended or not closers:
                raise
            if (closer := (yield from reader.text_before(closers, sink))) is not None:
                reader.pos -= len(closer)
        self.num_complete = self._num_calls

    def envelope(self, closers: Sequence[str], *, bare: bool = False) -> Waiting[None]:
        """Read {"name": ..., "arguments": {...}}, in any order and with other fields, as one call.

        bare: nothing else says that this is a call, so it must name a function that is offered and hold nothing else.
        """
        reader = self.reader
        name: str | None = None
        call_id: str | None = None
        held: str | None = None  # arguments that came before the name
        sink: Sink | None = None
        complete = False
        yield from reader.expect("{")
        yield from reader.skip_spaces()
        while (yield from reader.starts_with(["}"])) is None:
            key = _string((yield from reader.read_json()))
            yield from reader.skip_spaces()
            yield from reader.expect(":")
            yield from reader.skip_spaces()
            if key == "name" and name is None:
                name = _string((yield from reader.read_json()))
                if bare and name not in self._names:
                    raise Malformed
                if held is not None or not bare:
                    sink = self.start(name, call_id)
                if held is not None:
                    self._hand(sink, held)
                    complete = True
            elif key in ARGUMENT_KEYS and not complete and held is None:
                if name is None:
                    held = yield from reader.read_json()
                else:
                    sink = sink or self.start(name, call_id)
                    yield from self.arguments(sink, closers)
                    complete = True
            elif bare and key not in ("type", "id"):
                raise Malformed
            else:
                value = yield from reader.read_json()
                if key == "id" and value.startswith('"'):
                    call_id = _string(value)
            yield from reader.skip_spaces()
            if (yield from reader.starts_with([","])) is None:
                if (yield from reader.starts_with(["}"])) is None and not complete:
                    raise Malformed
                break
            yield from reader.skip_spaces()
        if name is None:
            raise Malformed
        if not complete:
            self._hand(sink or self.start(name, call_id), "{}")

    def _hand(self, sink: Sink | None, arguments: str) -> None:
        assert sink is not None
        sink(_object_text(arguments))
        self.num_complete = self._num_calls

    def envelopes(self, closers: Sequence[str]) -> Waiting[None]:
        """Read a list of calls whose opening bracket has been read."""
        reader = self.reader
        while True:
            yield from reader.skip_spaces()
            yield from self.envelope(closers)
            self.done()
            yield from reader.skip_spaces()
            if (yield from reader.starts_with([","])) is None:
                yield from reader.expect("]")
                return

    def _reply(self) -> Waiting[None]:
        reader, tags = self.reader, self._tags
        if tags is not None and (self._opened or (yield from self._opens(tags))):
            yield from reader.skip_spaces()
            self.done()
            if (yield from reader.text_before([tags.close], self._reasoning)) is None:
                return
            yield from reader.skip_spaces()
            self.done()
        yield from self._answer()

    def _opens(self, tags: Tags) -> Waiting[bool]:
        yield from self.reader.skip_spaces()
        if (yield from self.reader.starts_with([tags.open])) is not None:
            return True
        self.reader.pos = self.reader.mark
        return False

    def _answer(self) -> Waiting[None]:
        reader, syntax = self.reader, self._syntax
        if not self._names:
            yield from reader.text_before([], self._content)
            return
        if syntax.bare:
            yield from reader.skip_spaces()
            if (yield from reader.more()) and reader.text[reader.pos] == "{":
                yield from self._attempt("")
            reader.pos = reader.mark
        while (opener := (yield from reader.text_before(syntax.openers, self._content))) is not None:
            yield from self._attempt(opener)

    def _attempt(self, opener: str) -> Waiting[None]:
        """Read calls. Where there is none, the opener is content; where they break off, what follows them is."""
        reader = self.reader
        num_calls = self._num_calls
        before = reader.pos - len(opener) - reader.mark  # white space that is content if the opener is
        try:
            yield from self._syntax.read(self, opener)
            self.done()
            yield from reader.skip_spaces()
            self.done()
        except Malformed:
            if self._num_calls == num_calls:
                reader.pos = reader.mark + before + 1
                self._content(reader.text[reader.mark : reader.pos])
                self.done()
            elif reader.ended:
                reader.pos = len(reader.text)
                self.done()
            else:
                reader.pos = reader.mark

    def _content(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Content):
            self._parts[-1] = Content(last.text + text)
        else:
            self._parts.append(Content(text))

    def _reasoning(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, Reasoning):
            self._parts[-1] = Reasoning(last.text + text)
        else:
            self._parts.append(Reasoning(text))


class FirstCall:
    """Reads a reply as it grows until a call of it is complete; a `server.generation.Ending`."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def feed(self, text: str) -> bool:
        self._reply.feed(text)
        return self._reply.num_complete > 0


def _string(text: str) -> str:
    """The value of a JSON string. Raises Malformed where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise Malformed
    return value


def _object_text(text: str) -> str:
    """Arguments given as null, or as a string that holds an object, as the text of an object."""
    try:
        value: Any = json.loads(text)
        if value is None:
            return "{}"
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    return text


def names_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)
