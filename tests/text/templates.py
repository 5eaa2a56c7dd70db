# ruff: noqa: E501
"""Chat templates of the same shape as those of the common families, shorter, and tokenizers for them."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from server.text.tokenizer import Tokenizer

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system
Be brief.<|im_end|>
{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As SmolLM2's: no tools."""

QWEN = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call: <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') if message.content else '' %}<|im_start|>assistant
{{ content }}{% for tool_call in message.tool_calls or [] %}
{%- if not loop.first or content %}
{% endif %}<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen3's: tools in Hermes's form, reasoning that the model opens itself."""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

{% if tools %}Environment: ipython
{% endif %}{{ system }}<|eot_id|>
{%- if tools %}{% set first = messages[0]['content'] | trim %}{% set messages = messages[1:] -%}
<|start_header_id|>user<|end_header_id|>

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}{{ first }}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) -%}
<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] | trim }}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else -%}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}{# <|python_tag|> #}"""

MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if loop.first and system is defined %}[INST] {{ system + '\\n\\n' + message.content }}[/INST]
{%- else %}[INST] {{ message.content }}[/INST]{% endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""

DEEPSEEK = """{%- set ns = namespace(system='', tool=false) %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] \
+ '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
"""As R1's: tools not shown, arguments as text, no content with calls, reasoning opened by the template."""

PARTS = """{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"""
"""As some vision models': contents are lists."""

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "[THINK]", "[/THINK]", "[ARGS]", "[CALL_ID]",
]  # fmt: skip
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def chat_tokenizer(template: str | dict[str, str] | None, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, and the tokens of all families. `adds_bos`: its post-processor puts <s> before each text."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    if adds_bos:
        bos = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def wrapped(template: str | dict[str, str] | None, adds_bos: bool = False) -> Tokenizer:
    return Tokenizer(chat_tokenizer(template, adds_bos))
