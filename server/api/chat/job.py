"""From the body of a chat to the sequences it asks for. Everything that can be refused is refused here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from server.api.chat.grammar import reply_structure
from server.api.chat.messages import num_characters
from server.api.chat.tools import offered_tools
from server.api.chat.wire import ChatRequest
from server.api.errors import invalid, show, too_long
from server.api.exchange import Exchange
from server.api.parameters import ignored_header
from server.api.sampling import check_ids, output_cap, sampling_params, sibling
from server.api.sequences import sequences
from server.api.service import Service, served_name
from server.api.structure import constrainer, structure_of
from server.generation import GenerationRequest, ModelCard

if TYPE_CHECKING:
    from server.text.chat_template import ChatTemplate, Rendered
    from server.text.formats import ReplyFormat
    from server.text.reply import ReplyParser
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Translated:
    """What a route made of its body: a chat, the fields that nobody knows, and the body itself where that is none.

    switches: fields that change nothing unless the template reads one of these variables.
    """

    body: ChatRequest
    unknown: Sequence[str] = ()
    extra: Any = None
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatJob:
    """A chat that has passed every check, and what became of it.

    request_id: the exchange's, of which the id in the body is made.
    tools: those the reply may call, none where it must not.
    prompt_text: the rendered prompt.
    extra: as in `Translated`.
    """

    body: ChatRequest
    request_id: str
    model_name: str
    tokenizer: Tokenizer
    format: ReplyFormat
    tools: Sequence[Mapping[str, Any]]
    prompt_text: str
    requests: list[GenerationRequest]
    headers: dict[str, str]
    extra: Any = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def width(self) -> int:
        """Sequences of the one prompt."""
        return len(self.requests)

    @property
    def streaming(self) -> bool:
        return bool(self.body.stream)

    @property
    def num_numbers(self) -> int:
        """Log-probabilities in the whole answer, at most."""
        if not self.body.logprobs:
            return 0
        return sum(request.max_tokens for request in self.requests) * (1 + (self.body.top_logprobs or 0))

    @property
    def max_calls(self) -> float:
        """How many calls one reply may have; it ends with the last."""
        return 1 if self.body.parallel_tool_calls is False else float("inf")

    @cached_property
    def hidden_ids(self) -> frozenset[int]:
        """Special tokens that add nothing to the text."""
        request = self.requests[0]
        return self.tokenizer.special_ids - request.shown_special_ids if request.skip_special_tokens else frozenset()

    def parser(self) -> ReplyParser:
        """For one choice."""
        return self.format.parser(self.prompt_text, tools=self.tools)


def prepare(service: Service, exchange: Exchange, translated: Translated, *, endpoint: str, field: str) -> ChatJob:
    """Belongs in a worker. `field` is what the route calls the conversation. Raises APIError."""
    body = translated.body
    model, tokenizer = service.ready_model()
    name = served_name(body.model, model)
    max_tokens = _max_tokens(body, model)
    _check_together(body, max_tokens, service.settings.max_queued_requests)
    tools, choice = offered_tools(body.tools, body.tool_choice)
    params = sampling_params(body, model, (body.top_logprobs or 0) if body.logprobs else None)
    answer = structure_of(body)
    template = service.chat_template(tokenizer)
    reply_format = template.reply_format
    _check_length(body, tokenizer, model, field)
    rendered = render_prompt(body, tools, template, model, field)
    cap = output_cap(max_tokens, len(rendered.ids), model, field)
    parallel = body.parallel_tool_calls is not False
    structure = reply_structure(tools, choice, parallel, answer, reply_format, rendered.text)
    constrain = None
    if structure is not None:
        constrain = constrainer(service, structure.spec, structure.param, ignore_eos=body.ignore_eos is True)
    seed = service.fresh_seed() if body.seed is None else body.seed
    requests = sequences(
        body,
        tuple(rendered.ids),
        [sibling(params, seed, i) for i in range(body.n or 1)],
        cap,
        prefix=f"{exchange.request_id}/{service.fresh_serial()}",
        first=0,
        endpoint=endpoint,
        streaming=bool(body.stream),
        tenant=exchange.tenant,
        settings=service.settings,
        shown_special_ids=reply_format.marker_ids,
        constrain=constrain,
        ending=None if parallel or not tools else partial(reply_format.first_call, rendered.text, tools=tools),
    )
    return ChatJob(
        body,
        exchange.request_id,
        name,
        tokenizer,
        reply_format,
        tools,
        rendered.text,
        requests,
        ignored_header([*translated.unknown, *_unread(translated, template.source)]),
        translated.extra,
    )


def _max_tokens(body: ChatRequest, model: ModelCard) -> int:
    """Without a limit, the room that the prompt leaves."""
    asked, old = body.max_completion_tokens, body.max_tokens
    if asked is not None and old is not None and asked != old:
        raise invalid("max_tokens", f"'max_tokens' is {old} and 'max_completion_tokens' {asked}; send one of them.")
    limit = old if asked is None else asked
    return model.max_model_len if limit is None else limit


def _check_together(body: ChatRequest, max_tokens: int, most: int) -> None:
    """Fields that are fine each alone. `most` is how many sequences a request may have."""
    n = body.n or 1
    if n > most:
        raise invalid("n", f"'n' is {n}; one request may have up to {most} sequences (--max-queued-requests).")
    if body.stream_options and not body.stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.")
    if (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' must be at most {max_tokens}, the limit; got {body.min_tokens}.")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true.")
    if body.continue_final_message:
        if body.add_generation_prompt:
            message = (
                "'continue_final_message' goes on with the last message; 'add_generation_prompt' begins a new one."
            )
            raise invalid("continue_final_message", message)
        last = body.messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            message = "'continue_final_message' needs a last message of the assistant, without 'tool_calls'."
            raise invalid("continue_final_message", message)


def render_prompt(
    body: ChatRequest, tools: Sequence[Mapping[str, Any]], template: ChatTemplate, model: ModelCard, field: str
) -> Rendered:
    """The prompt, however long. Raises APIError 400."""
    from server.text.chat_template import TemplateFailed

    continues = bool(body.continue_final_message)
    starts = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = _template_kwargs(body, template.source)
    try:
        rendered = template.render(
            _roles(body.messages, template.source),
            tools=list(tools) or None,
            add_generation_prompt=starts,
            continue_final_message=continues,
            kwargs=kwargs,
        )
    except TemplateFailed as error:
        message = f"The chat template does not take this conversation: {error}."
        raise invalid(field, message, "template_failed") from None
    except RecursionError:
        raise invalid(field, "What the chat template is given is nested too deeply.", "template_failed") from None
    if not rendered.ids:
        raise invalid(field, f"The chat template makes an empty prompt of these '{field}'.")
    check_ids(field, rendered.ids, model)  # a tokenizer may have tokens that the model has no place for
    return rendered


def _check_length(body: ChatRequest, tokenizer: Tokenizer, model: ModelCard, field: str) -> None:
    """Refuse at once what cannot be short enough: rendering and tokenizing megabytes takes seconds."""
    characters = num_characters(body.messages)
    if characters <= model.max_model_len:
        return
    longest = tokenizer.longest_token
    if longest is not None and (least := characters // longest) >= model.max_model_len:
        message = f"'{field}' of {characters} characters make at least {least} tokens"
        raise too_long(f"{message}, the limit is {model.max_model_len} ({model.limited_by}).", field)


def _roles(messages: Sequence[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """The developer speaks as the system where the template knows no developer."""
    if "developer" in source:
        return list(messages)
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _unread(translated: Translated, source: str) -> list[str]:
    """What the client sent for the template, and it does not mention."""
    sent: Mapping[str, Any] = (translated.extra or translated.body).chat_template_kwargs or {}
    unread = [f"chat_template_kwargs.{name}" for name, value in sent.items() if value and name not in source]
    switches = translated.switches.items()
    return [*unread, *(name for name, variables in switches if not any(variable in source for variable in variables))]


def _template_kwargs(body: ChatRequest, source: str) -> dict[str, Any]:
    """The template's further variables, `reasoning_effort` among them where the template has a switch for it."""
    kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return kwargs
    if "reasoning_effort" in source:
        kwargs.setdefault("reasoning_effort", effort)
    elif "enable_thinking" in source:
        kwargs.setdefault("enable_thinking", effort != "none")
    elif effort != "none":
        message = f"'reasoning_effort' {show(effort)} is not supported: this model's chat template has no such switch."
        raise invalid("reasoning_effort", message, "unsupported_parameter")
    return kwargs
