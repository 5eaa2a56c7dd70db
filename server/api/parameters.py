"""Fields of a body that are not acted upon: refused, harmless or unknown.

A server that answers 200 to a constraint it drops misleads its client, so the known fields of OpenAI and of other
servers that would change the answer are refused by name; null, false, empty text and each one's own neutral value ask
for nothing and pass. Fields that only describe the request are accepted. All others are reported in a header.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from server.api.errors import invalid

IGNORED_HEADER = "x-sluice-ignored-parameters"
MOST_NAMES = 16
_LONGEST_NAME = 60

HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_NO_TOOLS = "tools are not offered on this route"
_NO_SAMPLER = "this sampler is not offered; temperature, top_k, top_p and min_p are"
_NO_SCORES = "use 'echo' with 'logprobs' to score a prompt"
_NO_TOKEN_IDS = "answers hold text; use 'logprobs' for the tokens' strings"

Unsupported: TypeAlias = Mapping[str, tuple[str, tuple[object, ...]]]
"""name -> (what to do instead, values that ask for nothing)"""

COMMON: Unsupported = {
    "audio": ("this is a text model", ()),
    "bad_words": ("use 'logit_bias'", ([],)),
    "best_of": ("ask for that many with 'n' and choose", (1,)),
    "custom_logit_processor": ("use 'logit_bias'", ()),
    "data_parallel_rank": ("there is one engine", ()),
    "detokenize": ("text is always returned", (True,)),
    "dry_multiplier": (_NO_SAMPLER, (0,)),
    "dynatemp_range": (_NO_SAMPLER, (0,)),
    "early_stopping": ("beam search is not offered", ()),
    "guided_decoding_backend": ("there is one library of grammars; leave it out", ("auto",)),
    "guided_whitespace_pattern": ("JSON is written on one line, as Python's json.dumps does", ()),
    "id_slot": ("requests have no slots; prefixes are shared by themselves", (-1,)),
    "images": ("this is a text model", ([],)),
    "kv_transfer_params": ("this server does not pass its cache on", ()),
    "length_penalty": ("beam search is not offered", (1,)),
    "logits_processors": ("use 'logit_bias'", ([],)),
    "logprob_token_ids": (_NO_SCORES, ([],)),
    "lora": ("adapters are not offered", ([],)),
    "lora_path": ("adapters are not offered", ()),
    "max_new_tokens": ("use 'max_tokens'", ()),
    "mirostat": (_NO_SAMPLER, (0,)),
    "modalities": ("this is a text model", (["text"],)),
    "n_keep": ("a context is never shifted", (0,)),
    "n_predict": ("use 'max_tokens'", ()),
    "n_probs": ("use 'logprobs'", (0,)),
    "no_stop_trim": ("use 'include_stop_str_in_output'", ()),
    "post_sampling_probs": ("log-probabilities are those before sampling", ()),
    "prompt_embeds": ("use 'prompt'", ()),
    "reasoning_budget_tokens": ("use 'max_tokens'", (-1,)),
    "repeat_last_n": ("'repetition_penalty' looks at all of the text", (-1,)),
    "repeat_penalty": ("use 'repetition_penalty'", (1,)),
    "repetition_detection": ("use 'stop' or 'max_tokens'", ()),
    "request_id": ("send it as the header x-request-id", ()),
    "return_hidden_states": ("answers hold text and log-probabilities", ()),
    "return_progress": ("prompts report no progress", ()),
    "return_prompt_text": ("use /tokenize and /detokenize", ()),
    "return_token_ids": (_NO_TOKEN_IDS, ()),
    "return_tokens": ("use 'return_token_ids'", ()),
    "return_tokens_as_token_ids": (_NO_TOKEN_IDS, ()),
    "rid": ("send it as the header x-request-id", ()),
    "samplers": ("the order of the samplers is fixed: min_p, top_k, top_p", ([],)),
    "sampling_params": ("put its fields into the body itself", ()),
    "sampling_seed": ("use 'seed'", ()),
    "session_params": ("send the whole prompt; what it shares with earlier ones is cached", ({},)),
    "spaces_between_special_tokens": ("special tokens are joined as they are", (True,)),
    "stop_regex": ("use 'stop'", ([],)),
    "stream_interval": ("every token is sent as soon as it is certain", (1,)),
    "structural_tag": ("use 'tools', or a grammar in 'structured_outputs'", ()),
    "t_max_predict_ms": ("use 'request_timeout', in seconds", (0, -1)),
    "tfs_z": (_NO_SAMPLER, (1,)),
    "thinking_token_budget": ("use 'max_tokens'", ()),
    "timings_per_token": ("answers have no timings; /metrics does", ()),
    "top_a": (_NO_SAMPLER, (0,)),
    "top_n_sigma": (_NO_SAMPLER, (-1, 0)),
    "truncate_prompt_tokens": ("shorten the prompt before it is sent", ()),
    "truncation_side": ("prompts are cut on the left", ("left",)),
    "typical_p": (_NO_SAMPLER, (1,)),
    "use_beam_search": ("beam search is not offered", ()),
    "vllm_xargs": ("this server has no such arguments", ({},)),
    "xtc_probability": (_NO_SAMPLER, (0,)),
}

COMPLETIONS: Unsupported = {
    **COMMON,
    "chat_template": ("this route has no template", ()),
    "chat_template_kwargs": ("this route has no template", ({},)),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "functions": (_NO_TOOLS, ([],)),
    "max_completion_tokens": ("use 'max_tokens'", ()),
    "messages": ("this route takes a 'prompt'", ()),
    "parallel_tool_calls": (_NO_TOOLS, (True,)),
    "prompt_logprobs": (_NO_SCORES, ()),
    "reasoning_effort": ("this route has no template", ()),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "tools": (_NO_TOOLS, ([],)),
    "top_logprobs": ("use 'logprobs': it is a number here", (0,)),
}


def check_unhandled(body: Mapping[str, Any], handled: Collection[str], unsupported: Unsupported) -> list[str]:
    """Names of the unknown fields of `body`. Raises APIError 400 for an `unsupported` one that asks for something."""
    unknown: list[str] = []
    for name, value in body.items():
        if name in handled or name in HARMLESS:
            continue
        if name in unsupported:
            hint, neutral = unsupported[name]
            if value is not None and value is not False and value != "" and value not in neutral:
                raise invalid(name, f"'{name}' is not supported: {hint}.", "unsupported_parameter")
        else:
            unknown.append(name)
    return unknown


def ignored_header(names: Collection[str]) -> dict[str, str]:
    """The header that names them, none without any. Its value is a few hundred bytes: what clients call their fields,
    stripped of all that has no place in a header.
    """
    shown = [re.sub(r"[^A-Za-z0-9_.\[\]-]", "?", name[:_LONGEST_NAME]) or "?" for name in list(names)[:MOST_NAMES]]
    if len(names) > len(shown):
        shown.append("...")
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}
