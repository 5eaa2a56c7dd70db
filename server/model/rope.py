"""Rotary embeddings whose frequencies depend on the longest sequence of a batch, fixed for all lengths.

transformers recomputes the frequencies of "dynamic" (NTK) and "longrope" embeddings from the greatest position of each
forward pass. In a packed batch one request's length would then change its neighbours' results, and cached keys would
have been rotated by other frequencies than today's queries. The frequencies are therefore computed once, for the
longest sequence that will be served.
"""

from __future__ import annotations

import logging

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)

_PINNED = "pinned"


def pin_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix every length-dependent rotary embedding of the model at the frequencies for `max_model_len` tokens."""
    for module in model.modules():
        kinds = module.__dict__.get("rope_type")
        if isinstance(kinds, str) and _depends_on_length(kinds):
            module.rope_type = _PINNED
            _set_frequencies(module, kinds, max_model_len, layer_type=None)
        elif isinstance(kinds, dict):
            pinned = {layer_type: kind for layer_type, kind in kinds.items() if _depends_on_length(kind)}
            if pinned:
                module.rope_type = {**kinds, **dict.fromkeys(pinned, _PINNED)}  # type: ignore[assignment]
            for layer_type, kind in pinned.items():
                _set_frequencies(module, kind, max_model_len, layer_type)


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _set_frequencies(module: nn.Module, kind: str, max_model_len: int, layer_type: str | None) -> None:
    prefix, where = ("", {}) if layer_type is None else (f"{layer_type}_", {"layer_type": layer_type})
    buffer = module.get_buffer(f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, buffer.device, seq_len=max_model_len, **where)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    logger.info("%s rotary embedding fixed at its frequencies for %d tokens", kind, max_model_len)
