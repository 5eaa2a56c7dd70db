"""Prompts as token ids, and as the text each of them shows when echoed. All of it runs in a worker thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.api.errors import invalid, too_long
from server.api.sampling import check_ids
from server.api.wire import Prompt
from server.generation import ModelCard
from server.text.fim import FillInTheMiddle, encode_suffix
from server.text.stream import TextStream

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`pieces`: the text share of each id, joined the echoed text; None unless it is to be echoed.

    Where a suffix is laid out with the prompt, the pieces are those of the prompt alone.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...] | None = None


def tokenize(
    prompts: Iterable[Prompt],
    tokenizer: Tokenizer,
    model: ModelCard,
    *,
    add_special_tokens: bool = True,
    skip_special_tokens: bool = True,
    echo: bool = False,
    continued: bool = True,
    keep: int | None = None,
    fim: FillInTheMiddle | None = None,
    suffix: str = "",
) -> list[TokenizedPrompt]:
    """Each prompt's ids, at least one of them. Raises APIError 400.

    continued: whether an output follows, to which a character belongs that the prompt begins and does not end.
    keep: how many of the last ids are kept, None for all; a beginning-of-text token stays at the front.
    fim: lays each prompt out with the `suffix` that follows the output.
    """
    tokenized: list[TokenizedPrompt] = []
    after: list[int] = []
    if fim is not None:
        _check_length(suffix, tokenizer, model)
        after = encode_suffix(suffix, tokenizer)
        check_ids("suffix", after, model)
    for prompt in prompts:
        if isinstance(prompt, str):
            if keep is None:
                _check_length(prompt, tokenizer, model)
            ids = tokenizer.encode(prompt, add_special_tokens)
            if not ids and fim is None:
                raise invalid("prompt", f"'prompt' holds no tokens; send text{_or_bos(tokenizer)}.")
        else:
            ids = prompt
        check_ids("prompt", ids, model)  # also of text: a tokenizer may have tokens that the model has no place for
        if keep is not None and len(ids) > keep:
            head = ids[:1] if keep > 1 and ids[0] == tokenizer.bos_token_id else []
            prompt = ids = head + ids[len(ids) - keep + len(head) :]
        # A prompt too long for the model is refused by its length; its echo would only cost time.
        pieces = None
        if echo and len(ids) <= model.max_model_len:
            goes_on = continued and (fim is None or fim.closing is None)
            pieces = _echo(prompt, ids, tokenizer, skip_special_tokens, goes_on)
        laid_out = ids if fim is None else fim.lay_out(ids, after, tokenizer.bos_token_id)
        tokenized.append(TokenizedPrompt(tuple(laid_out), pieces))
    return tokenized


def _check_length(prompt: str, tokenizer: Tokenizer, model: ModelCard) -> None:
    """Refuse at once what cannot be short enough: tokenizing megabytes takes seconds that others would wait."""
    if len(prompt) <= model.max_model_len:
        return
    longest = tokenizer.longest_token
    if longest is not None and (least := len(prompt) // longest) >= model.max_model_len:
        raise too_long(
            f"'prompt' of {len(prompt)} characters makes at least {least} tokens, "
            f"the limit is {model.max_model_len} ({model.limited_by})."
        )


def _or_bos(tokenizer: Tokenizer) -> str:
    bos = tokenizer.bos_token_id
    return "" if bos is None else f", or [{bos}] to start from the beginning of a document"


def _echo(
    prompt: Prompt, ids: Sequence[int], tokenizer: Tokenizer, skip_special_tokens: bool, continued: bool
) -> tuple[str, ...]:
    """The pieces of a prompt, with special tokens shown or not, whichever gives back the text that was sent.

    A special token stands in the ids either because it was written in the prompt (then it is echoed) or because the
    tokenizer begins every text with it (then it is not).
    """
    pieces = _pieces(ids, tokenizer, skip_special_tokens, continued)
    if isinstance(prompt, str) and "".join(pieces) != prompt:
        other = _pieces(ids, tokenizer, not skip_special_tokens, continued)
        if "".join(other) == prompt:
            return other
    return pieces


def _pieces(ids: Sequence[int], tokenizer: Tokenizer, skip_special_tokens: bool, continued: bool) -> tuple[str, ...]:
    stream = TextStream(
        tokenizer, (), stop=(), include_stop_str=False, skip_special_tokens=skip_special_tokens, min_tokens=0
    )
    for token_id in ids:
        stream.append(token_id)
    if not continued:
        stream.finish()
    return tuple(stream.pieces)
