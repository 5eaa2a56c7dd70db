"""What changes nothing is named, deep inside a body too; what clients send back of an answer is not."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.chat.wire import ChatRequest
from server.api.fields import unknown_members
from server.api.messages.wire import MessagesRequest
from server.api.responses.wire import ResponsesRequest
from tests.api.conftest import Served

PARTS = [{"type": "text", "text": "a", "colour": "red"}]
FUNCTION = {"name": "f", "parameters": {"anything": 1}, "strcit": True}
CHAT = {
    "messages": [
        {"role": "user", "content": PARTS, "weight": 1, "audio": None, "annotations": []},
        {"role": "assistant", "content": "b", "reasoning": "c", "refusal": None},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "stream_options": {"include_usgae": True},
    "chat_template_kwargs": {"free": 1},
}
ITEM = {"type": "output_text", "text": "x", "annotations": [{"a": 1}], "logprobs": [{"token": "x"}]}
RESPONSES = {
    "input": [{"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [ITEM], "x": 1}],
    "tools": [{"type": "function", "name": "f", "parameters": {"free": 1}, "defer": True}],
    "text": {"format": {"type": "json_schema", "schema": {"free": 1}, "srtict": True}},
    "reasoning": {"effort": "low", "depth": 3},
}
MESSAGES = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
    "system": [{"type": "text", "text": "x", "citations": [1]}],
    "tools": [{"name": "f", "input_schema": {"free": 1}, "input_examples": [{}]}],
    "thinking": {"type": "enabled", "budget_tokens": 5},
}


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (
            ChatRequest,
            CHAT,
            [
                "messages[0].content[0].colour",
                "messages[0].weight",
                "stream_options.include_usgae",
                "tools[0].function.strcit",
            ],
        ),
        (ResponsesRequest, RESPONSES, ["input[0].x", "reasoning.depth", "text.format.srtict", "tools[0].defer"]),
        (MessagesRequest, MESSAGES, ["system[0].citations", "thinking.budget_tokens", "tools[0].input_examples"]),
    ],
)
def test_unknown_members_are_named(kind: Any, body: dict[str, Any], names: list[str]) -> None:
    assert unknown_members(body, kind) == names


def test_only_so_many_are_looked_for() -> None:
    assert len(unknown_members({"messages": [{"role": "user", "x": 1}] * 4000}, ChatRequest)) == 17


async def test_they_stand_in_the_header(served: Served) -> None:
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "x", "weight": 1, "a\r\nb: c": 1}], "stream": stream}
        response = await served.client.post("/v1/chat/completions", json=body)
        assert response.headers["x-sluice-ignored-parameters"] == "messages[0].a??b??c, messages[0].weight"
