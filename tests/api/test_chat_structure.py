"""What a chat's reply is bound to: forced calls, strict tools, structured answers, and both together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.api.chat.grammar import reply_structure
from server.api.chat.tools import Named, ToolChoice
from server.api.errors import APIError
from server.api.structure import Structure
from server.text.formats import reply_format
from server.text.grammar import GrammarCompiler, GrammarSpec
from server.text.tokenizer import Tokenizer

VOCABULARY, EOS = 49152, 2
pytestmark = pytest.mark.embedded


def tool(name: str, strict: bool = False) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"tz": {"type": "string"}},
        "required": ["tz"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS = [tool("get_time"), tool("get_date")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWER = Structure(GrammarSpec("json_schema", json.dumps(SCHEMA)), "response_format")
TIME = '<tool_call>\n{"name": "get_time", "arguments": {"tz": "UTC"}}\n</tool_call>'
DATE = TIME.replace("time", "date")
THOUGHT = "<think>hm</think>\n\n"
PLAIN, REASONING = "<tool_call>", "<tool_call> </think>"


@pytest.fixture(scope="module")
def tokenizer(embedded_path: Path) -> Tokenizer:
    return Tokenizer.load(str(embedded_path))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCABULARY, [EOS])


def permits(compiler: GrammarCompiler, tokenizer: Tokenizer, structure: Structure | None, text: str) -> bool:
    """Whether `text` and the end after it may be written."""
    if structure is None:
        return True
    state = compiler.compile(structure.spec).start()
    mask = np.zeros(VOCABULARY // 32, dtype=np.int32)
    for token_id in [*tokenizer.encode(text, False), EOS]:
        state.fill_mask(mask)
        if not mask[token_id // 32] >> (token_id % 32) & 1:
            return False
        state.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("source", "choice", "parallel", "answer", "good", "bad"),
    [
        (PLAIN, "auto", True, None, ["Hello", TIME, '{"a":'], []),
        (PLAIN, "required", True, None, [TIME, TIME + "\n" + DATE], ["Hello", "", '{"a": 1}', TIME + "x"]),
        (PLAIN, "required", False, None, [TIME, DATE], [TIME + "\n" + DATE]),
        (PLAIN, Named("get_date"), True, None, [DATE], [TIME, "Hello"]),
        (PLAIN, Named("get_date"), True, ANSWER, [DATE], [TIME, '{"a": 1}']),
        (REASONING, "required", True, None, [TIME, THOUGHT + TIME], [THOUGHT, THOUGHT + "Hello"]),
        (PLAIN, "auto", True, ANSWER, ['{"a": 1}', TIME], ["Hello", '{"a": "x"}', TIME + '{"a": 1}']),
        (REASONING, "auto", True, ANSWER, [THOUGHT + '{"a": 1}', THOUGHT + TIME, TIME], [THOUGHT + "Hello", "Hello"]),
        ("[TOOL_CALLS]", "auto", True, ANSWER, ['{"a": 1}'], ["Hello", "[TOOL_CALLS]"]),
    ],
)
def test_replies(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    source: str,
    choice: ToolChoice,
    parallel: bool,
    answer: Structure | None,
    good: Sequence[str],
    bad: Sequence[str],
) -> None:
    structure = reply_structure(TOOLS, choice, parallel, answer, reply_format(source, tokenizer, None), "")
    for text in good:
        assert permits(compiler, tokenizer, structure, text), text
    for text in bad:
        assert not permits(compiler, tokenizer, structure, text), text


def test_an_answer_without_tools(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    form = reply_format(PLAIN, tokenizer, None)
    assert reply_structure([], "none", True, None, form, "") is None
    structure = reply_structure([], "none", True, ANSWER, form, "")
    assert structure == ANSWER


def test_strict_tools_bind_the_calls_and_leave_the_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tools: list[Mapping[str, Any]] = [tool("get_time", strict=True), tool("get_date")]
    structure = reply_structure(tools, "auto", True, None, reply_format(PLAIN, tokenizer, None), "")
    assert structure is not None
    assert structure.param == "tools"
    for text in ("Hello", "Well. " + TIME, DATE.replace('{"tz": "UTC"}', '{"x": 1}')):
        assert permits(compiler, tokenizer, structure, text), text
    assert not permits(compiler, tokenizer, structure, TIME.replace('{"tz": "UTC"}', '{"x": 1}'))


def test_calls_of_bare_json_cannot_be_told_from_a_json_answer(tokenizer: Tokenizer) -> None:
    form = reply_format("<|python_tag|>", tokenizer, None)
    with pytest.raises(APIError, match="bare JSON") as raised:
        reply_structure(TOOLS, "auto", True, ANSWER, form, "")
    assert raised.value.param == "response_format"
