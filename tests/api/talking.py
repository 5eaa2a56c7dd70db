"""A fake engine whose replies a test writes, behind a template with reasoning and tool calls in the Hermes form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.api.fake_engine import EOS, ByteTokenizer, FakeEngine

TEMPLATE = """
{%- if tools %}tools:{{ tools | tojson }}|{% endif %}
{%- for m in messages %}{{ m.role }}:
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if not loop.last or add_generation_prompt %}|{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}<think>
</think>{% endif %}{% endif %}
"""

REASONED = "<think>Well, é.</think>"


class TalkingTokenizer(ByteTokenizer):
    chat_templates: Mapping[str, str] = {"default": TEMPLATE}


class TalkingEngine(FakeEngine):
    """Says `reply`, as far as `max_tokens` goes."""

    def __init__(self, reply: str) -> None:
        super().__init__(max_model_len=4000)
        self.bytes = TalkingTokenizer()
        self.reply = reply
        self.tokens = lambda request: [*self.reply.encode(), EOS]

    @property
    def prompt(self) -> str:
        """The last prompt that it was given."""
        return self.bytes.decode(self.requests[-1].prompt_ids, False)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream in which each has a name, the one in its data."""
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        first, second = block.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        events.append(data)
    return events
