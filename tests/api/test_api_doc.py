"""docs/api.md has every field, with what is possible, every refusal with its way out, and every error code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from server.api.chat.wire import CHAT, ChatRequest
from server.api.messages import wire as messages
from server.api.parameters import COMMON, COMPLETIONS, HARMLESS, Unsupported
from server.api.responses import wire as responses
from server.api.routes.tokenize import Detokenize, TokenizePrompt
from server.api.structure import StructureFields
from server.api.wire import CompletionRequest, DecodingFields, SamplingFields

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    begin = PAGE.index(f"\n{title}\n") + len(title) + 2
    following = re.search(r"^#", PAGE[begin:], re.MULTILINE)
    return PAGE[begin : begin + following.start()] if following else PAGE[begin:]


def rows(text: str) -> dict[str, str]:
    """The rest of each table row by the name in its first cell."""
    return {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)}


ALL = section("### All that generate")
FIELDS: list[tuple[str, type[BaseModel], list[type[BaseModel]]]] = [
    ("### All that generate", DecodingFields, []),
    ("### All that generate", SamplingFields, []),
    ("### All that generate", StructureFields, []),
    ("### Completions", CompletionRequest, [SamplingFields, StructureFields]),
    ("### Chat", ChatRequest, [SamplingFields, StructureFields]),
    ("### Responses", responses.ResponsesRequest, [DecodingFields]),
    ("### Messages", messages.MessagesRequest, [DecodingFields]),
    ("### Tokens", TokenizePrompt, []),
    ("### Tokens", Detokenize, []),
]


@pytest.mark.parametrize(("title", "kind", "shared"), FIELDS)
def test_every_field_is_there_with_what_is_possible(
    title: str, kind: type[BaseModel], shared: list[type[BaseModel]]
) -> None:
    described = rows(section(title))
    inherited = {name: field.description for base in shared for name, field in base.model_fields.items()}
    for name, field in kind.model_fields.items():
        if inherited.get(name) == field.description:
            continue
        possible, default, _ = described[name].split(" | ")
        assert possible == field.description
        assert default


def test_no_field_is_there_that_is_not_taken() -> None:
    for title in {title for title, _, _ in FIELDS}:
        known = {name for other, kind, _ in FIELDS if other == title for name in kind.model_fields}
        assert rows(section(title)).keys() <= known


@pytest.mark.parametrize(
    ("begin", "table", "base"),
    [
        ("With a value", COMMON, {}),
        ("On completions:", COMPLETIONS, COMMON),
        ("On chat:", CHAT, COMMON),
        ("On responses:", responses.RESPONSES, COMMON),
        ("On messages:", messages.MESSAGES, COMMON),
    ],
)
def test_every_refusal_is_there_with_its_way_out(begin: str, table: Unsupported, base: Mapping[str, object]) -> None:
    text = section("## Refused fields").partition(begin)[2]
    text = re.split(r"^(?:On \w+:|Accepted)", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert rows(text) == {name: hint for name, (hint, _) in table.items() if base.get(name) != table[name]}


def test_harmless_fields_are_named() -> None:
    named = section("## Refused fields").partition("Accepted")[2]
    for name in HARMLESS | responses.HARMLESS | messages.HARMLESS:
        assert f"`{name}`" in named


def codes() -> set[str]:
    """The words that `invalid` and `APIError` are called with."""
    found: set[str] = set()
    for path in (ROOT / "server" / "api").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("invalid", "APIError"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                given += node.args[2:] if getattr(node.func, "id", "") == "invalid" else []
                found |= {str(value.value) for value in given if isinstance(value, ast.Constant)}
    return found


def test_every_code_is_there() -> None:
    assert {"invalid_json", "queue_timeout", "unsupported_parameter"} <= codes()
    assert [code for code in sorted(codes()) if f"`{code}`" not in section("## Errors")] == []
