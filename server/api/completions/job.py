"""From the body of a completion to the sequences it asks for. Everything that can be refused is refused here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server.api.errors import invalid
from server.api.exchange import Exchange
from server.api.fields import read_fields
from server.api.parameters import COMPLETIONS, ignored_header
from server.api.prompts import TokenizedPrompt, tokenize
from server.api.sampling import output_cap, sampling_params, sibling
from server.api.sequences import sequences
from server.api.service import Service, served_name
from server.api.structure import constrainer, structure_of
from server.api.wire import CompletionRequest
from server.generation import GenerationRequest, ModelCard
from server.text.fim import FillInTheMiddle

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

ENDPOINT = "completions"
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """A body that has passed every check, and what became of it.

    requests: `width` for each prompt, side by side; where `best_of` asks for more than `n`, the best are shown.
    """

    body: CompletionRequest
    id: str
    model_name: str
    tokenizer: Tokenizer
    prompts: list[TokenizedPrompt]
    requests: list[GenerationRequest]
    headers: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def n(self) -> int:
        """Choices shown of each prompt."""
        return self.body.n or 1

    @property
    def width(self) -> int:
        """Sequences generated for each prompt."""
        return _width(self.body)

    @property
    def streaming(self) -> bool:
        return bool(self.body.stream)


async def prepare(service: Service, exchange: Exchange, raw: Mapping[str, Any], large: bool) -> Job:
    """`raw` as a job, made in a worker; a `large` body has one of its own. Raises APIError."""
    worker = service.in_large_worker if large else service.in_worker
    return await worker(_job, service, exchange, raw)


def _job(service: Service, exchange: Exchange, raw: Mapping[str, Any]) -> Job:
    body, unknown = read_fields(raw, CompletionRequest, COMPLETIONS)
    model, tokenizer = service.ready_model()
    name = served_name(body.model, model)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    _check_together(body, max_tokens, service.settings.max_queued_requests)
    params = sampling_params(body, model, body.logprobs)
    if _width(body) > (body.n or 1) and params.logprobs is None:
        params = dataclasses.replace(params, logprobs=0)  # to choose by
    structure = structure_of(body)
    constrain = None
    if structure is not None:
        constrain = constrainer(service, structure.spec, structure.param, ignore_eos=body.ignore_eos is True)
    fim = _fim(body, tokenizer) if body.suffix else None
    if fim is not None and not body.ignore_eos:
        params = dataclasses.replace(params, stop_token_ids=params.stop_token_ids | fim.end_ids)
    prompts = tokenize(
        body.prompt,
        tokenizer,
        model,
        add_special_tokens=body.add_special_tokens is not False,
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=bool(body.echo),
        continued=max_tokens > 0,
        keep=_kept(body.truncate_prompt_tokens, max_tokens, model),
        fim=fim,
        suffix=body.suffix or "",
    )
    caps = [output_cap(max_tokens, len(prompt.ids), model) for prompt in prompts]
    prefix = f"{exchange.request_id}/{service.fresh_serial()}"
    requests: list[GenerationRequest] = []
    for prompt, cap in zip(prompts, caps, strict=True):
        seed = service.fresh_seed() if body.seed is None else body.seed
        requests += sequences(
            body,
            prompt.ids,
            [sibling(params, seed, i) for i in range(_width(body))],
            cap,
            prefix=prefix,
            first=len(requests),
            endpoint=ENDPOINT,
            streaming=bool(body.stream),
            tenant=exchange.tenant,
            settings=service.settings,
            prompt_logprobs=body.logprobs if body.echo else None,
            constrain=constrain,
        )
    id_ = f"cmpl-{exchange.request_id}"
    return Job(body, id_, name, tokenizer, prompts, requests, ignored_header(unknown))


def _width(body: CompletionRequest) -> int:
    return body.best_of or body.n or 1


def _check_together(body: CompletionRequest, max_tokens: int, most: int) -> None:
    """Fields that are fine each alone. `most` is how many sequences a request may have."""
    n, width = body.n or 1, _width(body)
    if width < n:
        raise invalid("best_of", f"'best_of' must be at least 'n', {n}; got {width}.")
    if width > n and body.stream:
        raise invalid("best_of", "'best_of' beyond 'n' cannot be streamed: the best are known when all are complete.")
    if len(body.prompt) * width > most:
        field, value = ("best_of", width) if width > n else ("n", n)
        raise invalid(
            "prompt" if width == 1 else field,
            f"{len(body.prompt)} prompts with {field} = {value} make {len(body.prompt) * width} sequences; "
            f"one request may have up to {most} (--max-queued-requests).",
        )
    if body.stream_options and not body.stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.")
    if (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' must be at most 'max_tokens', {max_tokens}; got {body.min_tokens}.")


def _fim(body: CompletionRequest, tokenizer: Tokenizer) -> FillInTheMiddle:
    fim = FillInTheMiddle.of(tokenizer)
    if fim is None:
        raise invalid(
            "suffix",
            "'suffix' is not supported: this model's tokenizer has no tokens to fill in the middle with; "
            "put all text into 'prompt'.",
            "unsupported_parameter",
        )
    if body.echo and body.logprobs is not None:
        raise invalid(
            "suffix",
            "'suffix' cannot be combined with both 'echo' and 'logprobs': the model does not see the prompt as text.",
        )
    if body.truncate_prompt_tokens is not None:
        raise invalid("suffix", "'suffix' cannot be combined with 'truncate_prompt_tokens'; shorten the prompt.")
    return fim


def _kept(asked: int | None, max_tokens: int, model: ModelCard) -> int | None:
    """How many of a prompt's last tokens are kept, None for all of them."""
    if asked != -1:
        return asked
    room = model.max_model_len - max_tokens
    if room < 1:
        raise invalid(
            "truncate_prompt_tokens",
            f"'truncate_prompt_tokens' of -1 keeps what fits beside 'max_tokens', but {max_tokens} of at most "
            f"{model.max_model_len} tokens ({model.limited_by}) leave nothing; lower 'max_tokens'.",
        )
    return room
