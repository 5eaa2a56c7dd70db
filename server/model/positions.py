"""What models derive from positions in a way that a packed batch would break, and how it is set right.

transformers recomputes the frequencies of "dynamic" (NTK) and "longrope" rotary embeddings from the greatest position
of each forward pass. In a packed batch one request's length would then change its neighbours' results, and cached keys
would have been rotated by other frequencies than today's queries. The frequencies are therefore computed once, for the
longest sequence that will be served.

Llama 4 scales the queries of its layers without rotary embedding by their place in the forward pass, which is their
position only if there is one sequence. The hook scales by the position instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)

_PINNED = "pinned"
_ORIGINAL = "rope_type_before_pinning"


def pin_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix every length-dependent rotary embedding of the model at the frequencies for `max_model_len` tokens.

    May be called again with another length.
    """
    for module in model.modules():
        kinds = module.__dict__.setdefault(_ORIGINAL, module.__dict__.get("rope_type"))
        if isinstance(kinds, str) and _depends_on_length(kinds):
            module.__dict__["rope_type"] = _PINNED
            _set_frequencies(module, kinds, max_model_len, layer_type=None)
        elif isinstance(kinds, dict):
            moving = {layer_type: kind for layer_type, kind in kinds.items() if _depends_on_length(kind)}
            module.__dict__["rope_type"] = {**kinds, **dict.fromkeys(moving, _PINNED)}
            for layer_type, kind in moving.items():
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


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are scaled by `1 + strength * log(1 + floor((p + 1) / span))` (arXiv:2501.19399)."""

    span: float
    strength: float

    def factors(self, positions: Tensor) -> Tensor:
        """[T] float32 factors of positions [T]."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.span)) * self.strength + 1.0


def take_over_temperature(module: nn.Module) -> Temperature | None:
    """Stop an attention module from scaling queries by their place in the pass; what to scale by instead, if it did."""
    settings = module.__dict__
    if not settings.get("attn_temperature_tuning") or settings.get("use_rope"):
        return None
    settings["attn_temperature_tuning"] = False
    return Temperature(settings["floor_scale"], settings["attn_scale"])
