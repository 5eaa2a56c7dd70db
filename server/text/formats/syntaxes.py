"""The markup of calls of each family of models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from server.text.formats.reader import Malformed, Waiting

if TYPE_CHECKING:
    from server.text.formats.parser import Reply

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_LONGEST_NAME = 256


def _checked(name: str) -> str:
    """A function's name, as OpenAI allows them, dots added.

    Raises:
        Malformed: it is none.
    """
    if not _NAME.fullmatch(name):
        raise Malformed
    return name


def _envelope(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


class Hermes:
    """Hermes 2 and 3, Qwen 2.5 and 3 and many more: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one each.

    A list of calls within one pair of tags, as SmolLM2 was taught, is read as well.
    """

    name: ClassVar[str] = "hermes"
    openers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    bare: ClassVar[bool] = False

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and arguments as JSON text, as the model writes them."""
        return "\n".join(f"<tool_call>\n{_envelope(*call)}\n</tool_call>" for call in calls)

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        reader = reply.reader
        yield from reader.skip_spaces()
        if (yield from reader.starts_with(["["])) is not None:
            yield from reply.envelopes(self.markers[1:])
        else:
            yield from reply.envelope(self.markers[1:])
            yield from reader.skip_spaces()
            yield from reader.starts_with(["}"])  # one too many is a common slip
        yield from reader.skip_spaces()
        yield from reader.expect(self.markers[1])


class BareJson(Hermes):
    """For templates that know no tools: as Hermes, in the words of our own instructions, the tags being optional."""

    name: ClassVar[str] = "json"
    bare: ClassVar[bool] = True

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        if opener:
            yield from super().read(reply, opener)
        else:
            yield from reply.envelope((), bare=True)


class Llama3:
    """Llama 3.1 to 3.3: {"name": ..., "parameters": {...}} after <|python_tag|> or alone, several separated by ";"."""

    name: ClassVar[str] = "llama3"
    openers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    bare: ClassVar[bool] = True

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(_envelope(*call, key="parameters") for call in calls)

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        reader = reply.reader
        yield from reader.skip_spaces()
        yield from reply.envelope((), bare=not opener)
        while True:
            reply.done()
            yield from reader.skip_spaces()
            yield from reader.starts_with([";"])
            yield from reader.skip_spaces()
            yield from reader.starts_with([opener] if opener else ["<|python_tag|>"])
            if not (yield from reader.more()) or reader.text[reader.pos] != "{":
                reader.pos = reader.mark
                return
            yield from reply.envelope((), bare=not opener)


class Mistral:
    """Mistral: [TOOL_CALLS] and a list of calls, or since tokenizer version 11 [TOOL_CALLS]name[ARGS]{...} for each."""

    name: ClassVar[str] = "mistral"
    openers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    bare: ClassVar[bool] = False

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return f"[TOOL_CALLS] [{', '.join(_envelope(*call) for call in calls)}]"

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


class DeepSeek:
    """DeepSeek V3, R1 (type, name and a fenced block of JSON) and V3.1 (name and JSON) with its tool tokens."""

    name: ClassVar[str] = "deepseek"
    openers: ClassVar[tuple[str, ...]] = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    markers: ClassVar[tuple[str, ...]] = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    bare: ClassVar[bool] = False

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        all_begin, begin, separator, end, all_end = self.markers
        return (
            all_begin
            + "\n".join(f"{begin}function{separator}{name}\n```json\n{text}\n```{end}" for name, text in calls)
            + all_end
        )

    def read(self, reply: Reply, opener: str) -> Waiting[None]:
        _, begin, separator, end, all_end = self.markers
        reader = reply.reader
        if opener != begin:
            yield from reader.skip_spaces()
            yield from reader.expect(begin)
        while True:
            name = (yield from reader.until((separator,), _LONGEST_NAME)).strip()
            yield from reader.expect(separator)
            fenced = (yield from reader.peek()) != "{"
            if fenced:
                name = (yield from reader.until(("\n", "{"), _LONGEST_NAME)).strip()
                yield from reader.skip_spaces()
                yield from reader.starts_with(["```json", "```"])
                yield from reader.skip_spaces()
            sink = reply.start(_checked(name))
            yield from reply.arguments(sink, (end,))
            yield from reader.skip_spaces()
            if (yield from reader.starts_with(["```"])) is not None:
                yield from reader.skip_spaces()
            yield from reader.expect(end)
            reply.done()
            yield from reader.skip_spaces()
            if (yield from reader.starts_with([begin])) is None:
                yield from reader.starts_with([all_end])
                return


Syntax: TypeAlias = Hermes | Llama3 | Mistral | DeepSeek

SYNTAXES: dict[str, Callable[[], Syntax]] = {
    syntax.name: syntax for syntax in (Hermes, Llama3, Mistral, DeepSeek, BareJson)
}
