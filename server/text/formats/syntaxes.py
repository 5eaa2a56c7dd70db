"""The markup of calls of each family of models."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from server.text.formats.reader import Malformed, Waiting

if TYPE_CHECKING:
    from server.text.formats.parser import Reply

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_LONGEST_NAME = 256


class Syntax(ABC):
    """The markup of the calls of one family of models. Calls are `begin`, what `around` says, `separator`, ..., `end`.

    openers: texts at which calls begin.
    markers: texts that are tokens of their own in the family's vocabularies.
    bare: whether a JSON object at the start of the answer is a call where it names a function that is offered.
    """

    name: ClassVar[str]
    openers: ClassVar[tuple[str, ...]]
    markers: ClassVar[tuple[str, ...]]
    bare: ClassVar[bool] = False
    begin = ""
    separator = "\n"
    end = ""

    def __init__(self, source: str) -> None:  # noqa: B027  # most families have one variant
        """`source` is the chat template, which shows the variant of the markup."""

    @abstractmethod
    def around(self, name: str) -> tuple[str, str]:
        """The text of a call of `name` before its arguments, a JSON object, and after them."""

    @abstractmethod
    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        """Read what follows `opener`, "" for none, leniently. Raises Malformed where it is no call."""

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and arguments as JSON text, as the model writes them."""
        written = []
        for name, arguments in calls:
            before, after = self.around(name)
            written.append(before + arguments + after)
        return self.begin + self.separator.join(written) + self.end


class Hermes(Syntax):
    """Hermes 2 and 3, Qwen 2.5 and 3 and many more: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one each.

    A list of calls within one pair of tags, as SmolLM2 was taught, is read as well.
    """

    name = "hermes"
    openers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")

    def around(self, name: str) -> tuple[str, str]:
        before, after = _envelope(name)
        return f"<tool_call>\n{before}", f"{after}\n</tool_call>"

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        reader = reply.reader
        closers = ("</tool_call>",)
        yield from reader.skip_spaces()
        if (yield from reader.starts_with(["["])) is not None:
            yield from reply.envelopes(closers)
        else:
            yield from reply.envelope(closers)
            yield from reader.skip_spaces()
            yield from reader.starts_with(["}"])  # one too many is a common slip
        yield from reader.skip_spaces()
        yield from reader.expect("</tool_call>")


class BareJson(Hermes):
    """For templates that know no tools: as Hermes, in the words of our own instructions, the tags being optional."""

    name = "json"
    bare = True

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        if opener:
            yield from super().read(reply, opener)
        else:
            yield from reply.envelope((), bare=True)


class Llama3(Syntax):
    """Llama 3.1 to 3.3: {"name": ..., "parameters": {...}} after <|python_tag|> or alone, several separated by ";"."""

    name = "llama3"
    openers = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    bare = True
    separator = "; "

    def around(self, name: str) -> tuple[str, str]:
        return _envelope(name, "parameters")

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        reader = reply.reader
        yield from reader.skip_spaces()
        yield from reply.envelope((), bare=not opener)
        while True:
            reply.done()
            yield from reader.skip_spaces()
            yield from reader.starts_with([";"])
            yield from reader.skip_spaces()
            yield from reader.starts_with(self.openers)
            if not (yield from reader.more()) or reader.text[reader.pos] != "{":
                reader.pos = reader.mark
                return
            yield from reply.envelope((), bare=not opener)


class Mistral(Syntax):
    """Mistral: [TOOL_CALLS] and a list of calls, or since tokenizer version 11 [TOOL_CALLS]name[ARGS]{...} for each."""

    name = "mistral"
    openers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._listed = "[ARGS]" not in source
        if self._listed:
            self.begin, self.separator, self.end = "[TOOL_CALLS][", ", ", "]"
        else:
            self.separator = ""

    def around(self, name: str) -> tuple[str, str]:
        return _envelope(name) if self._listed else (f"[TOOL_CALLS]{name}[ARGS]", "")

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        reader = reply.reader
        yield from reader.skip_spaces()
        char = yield from reader.peek()
        if char == "[":
            reader.pos += 1
            yield from reply.envelopes(())
        elif char == "{":
            yield from reply.envelope(())
        else:
            name = _checked((yield from reader.until(("[CALL_ID]", "[ARGS]", "{"), _LONGEST_NAME)).strip())
            call_id = None
            if (yield from reader.starts_with(["[CALL_ID]"])) is not None:
                call_id = (yield from reader.until(("[ARGS]", "{"), _LONGEST_NAME)).strip()
            yield from reader.starts_with(["[ARGS]"])
            sink = reply.start(name, call_id)
            yield from reader.skip_spaces()
            yield from reply.arguments(sink, ())


_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


class DeepSeek(Syntax):
    """DeepSeek V3, R1 (type, name and a fenced block of JSON) and V3.1 (name and JSON) with its tool tokens."""

    name = "deepseek"
    openers = (_ALL_BEGIN, _BEGIN)
    markers = (_ALL_BEGIN, _BEGIN, _SEPARATOR, _END, _ALL_END)
    begin = _ALL_BEGIN
    end = _ALL_END

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self._fenced = "```json" in source or _SEPARATOR not in source
        self.separator = "\n" if self._fenced else ""

    def around(self, name: str) -> tuple[str, str]:
        if self._fenced:
            return f"{_BEGIN}function{_SEPARATOR}{name}\n```json\n", f"\n```{_END}"
        return f"{_BEGIN}{name}{_SEPARATOR}", _END

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        reader = reply.reader
        if opener == _ALL_BEGIN:
            yield from reader.skip_spaces()
            yield from reader.expect(_BEGIN)
        while True:
            name = (yield from reader.until((_SEPARATOR,), _LONGEST_NAME)).strip()
            yield from reader.expect(_SEPARATOR)
            if (yield from reader.peek()) != "{":
                name = (yield from reader.until(("\n", "{"), _LONGEST_NAME)).strip()
                yield from reader.skip_spaces()
                yield from reader.starts_with(["```json", "```"])
                yield from reader.skip_spaces()
            sink = reply.start(_checked(name))
            yield from reply.arguments(sink, (_END,))
            yield from reader.skip_spaces()
            if (yield from reader.starts_with(["```"])) is not None:
                yield from reader.skip_spaces()
            yield from reader.expect(_END)
            reply.done()
            yield from reader.skip_spaces()
            if (yield from reader.starts_with([_BEGIN])) is None:
                yield from reader.starts_with([_ALL_END])
                return


def _checked(name: str) -> str:
    """A function's name. Raises Malformed where it is none."""
    if not _NAME.fullmatch(name):
        raise Malformed
    return name


def _envelope(name: str, key: str = "arguments") -> tuple[str, str]:
    return f'{{"name": {json.dumps(name)}, "{key}": ', "}"


SYNTAXES: dict[str, Callable[[str], Syntax]] = {
    syntax.name: syntax for syntax in (Hermes, Llama3, Mistral, DeepSeek, BareJson)
}
