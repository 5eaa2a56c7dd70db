"""Finds out how a loaded model attends, and refuses what could only be served wrongly.

transformers merely warns when a model ignores the attention function it is told to use, and such a model then runs and
gives wrong numbers. So nothing is believed: a forward pass over a few tokens must reach our function exactly once for
each layer, and (`check_numbers`) chunked, paged forward passes beside a distant neighbour must reproduce the logits of
the unmodified model. Latent attention is served from its latent if what the layer computed in that pass is the latent
times its matrix; else as it arrives, expanded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from server.model.hook import IMPLEMENTATION, AttentionCall, UnexpectedAttention, attending, note_latents
from server.model.latent import LatentForm, NotLatent, latent_form, projection_of
from server.model.spec import LayerSpec, UnsupportedModel

logger = logging.getLogger(__name__)

_KEPT_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True, eq=False)
class ProbedLayer:
    """An attention module, its spec, the geometry of its calls, the type of what it caches and, if that is the latent,
    the matrices that expand it."""

    module: nn.Module
    spec: LayerSpec
    geometry: tuple[object, ...]
    dtype: torch.dtype
    latent: LatentForm | None


def refuse_by_config(model: PreTrainedModel) -> None:
    """Refuse what the configuration already rules out.

    Raises:
        UnsupportedModel: encoder-decoder, multimodal, or with layers that keep other state than keys and values.
    """
    config, name = model.config, type(model).__name__
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoder-only language models can be served.")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModel(f"{name} is a multimodal model; only text models can be served, so load its text model.")
    others = sorted(set(_layer_types(config)) - _KEPT_LAYER_TYPES)
    if others or getattr(model, "_is_stateful", False):
        kinds = f" ({', '.join(others)})" if others else ""
        raise UnsupportedModel(
            f"{name} has layers that keep other state than keys and values{kinds}, which a paged KV cache cannot hold."
        )


@torch.inference_mode()
def probe(model: PreTrainedModel) -> tuple[ProbedLayer, ...]:
    """Hook the model and record each layer, in order of layer index.

    Raises:
        UnsupportedModel: a layer does not attend through the hook, exactly once, in a way that can be served.
    """
    refuse_by_config(model)
    config, name = model.config, type(model).__name__
    model.set_attn_implementation(IMPLEMENTATION)
    recorder = _Recorder(model)
    ids = probe_tokens(config, _PROBE_TOKENS).to(model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    try:
        with attending(recorder):
            model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    except UnexpectedAttention as error:
        raise UnsupportedModel(f"{name} cannot be served: its attention {error}.") from error
    except Exception as error:
        raise UnsupportedModel(f"{name} cannot run packed sequences: a trial pass failed with {error!r}.") from error
    for reason in sorted(recorder.not_latent):
        logger.warning("%s has latent attention that is cached expanded, in many times the memory: %s", name, reason)
    layers, expected = recorder.layers, config.num_hidden_layers
    if len({layer.spec.layer_idx for layer in layers}) != len(layers):
        raise UnsupportedModel(f"{name} cannot be served: a layer attends more than once in one forward pass.")
    if len(layers) > expected:
        raise UnsupportedModel(f"{name} cannot be served: {len(layers)} layers attend, but its config has {expected}.")
    if len(layers) < expected:
        raise UnsupportedModel(
            f"{name} cannot be served: {expected - len(layers)} of its {expected} layers compute attention themselves "
            "instead of through transformers' attention interface, so they would ignore the KV cache."
        )
    return tuple(sorted(layers, key=lambda layer: layer.spec.layer_idx))


def probe_tokens(config: PreTrainedConfig, count: int) -> Tensor:
    """[count] token ids, spread over the vocabulary and away from the special ids at its start."""
    usable: int = config.vocab_size - 3
    return 3 + torch.arange(count) * 7919 % usable


def check_numbers(
    model: PreTrainedModel,
    expected: Tensor,
    compute: Callable[[int | None], Tensor],
    max_model_len: int,
    first_chunk: int,
) -> None:
    """Compare hooked logits with those of the unmodified model.

    expected: [n, V], the unmodified model's logits of `probe_tokens(n)`.
    compute: given the position of a neighbour in the same batch, or None for no neighbour, the logits [n, V] that the
        hooked model computes for the same tokens in chunks.
    first_chunk: tokens of the first chunk. They read nothing from the cache, so they are judged apart: right ones must
        not outvote wrong ones.

    Raises:
        UnsupportedModel: the numbers differ by more than rounding explains.
    """
    name = type(model).__name__
    alone = compute(None)
    if not (
        _close(alone[:first_chunk], expected[:first_chunk]) and _close(alone[first_chunk:], expected[first_chunk:])
    ):
        raise UnsupportedModel(
            f"{name} cannot be served: with a paged cache its logits are not those of the unmodified model."
        )
    if not _close(compute(max_model_len - 1), alone):
        raise UnsupportedModel(
            f"{name} cannot be served: its positions depend on the longest sequence of the batch, so that requests "
            "would change each other's results."
        )


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Whether rounding explains the difference for most tokens; a router's near tie may flip the others."""
    tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 0.2
    expected = expected.double()
    error = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return bool(error.median() < tolerance)


class _Recorder:
    """Takes the place of attention: notes each call and returns zeros of the right shape."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[ProbedLayer] = []
        self.not_latent: set[str] = set()
        self._layer_types = _layer_types(model.config)
        self._chunk: int | None = getattr(model.config, "attention_chunk_size", None)
        projections = ((module, projection_of(module)) for module in model.modules())
        self._projections: dict[nn.Module, tuple[nn.Module, RemovableHandle]] = {
            module: (projection, note_latents(module, projection))
            for module, projection in projections
            if projection is not None
        }

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        layer_idx = module.__dict__.get("layer_idx")
        if not isinstance(layer_idx, int):
            raise UnexpectedAttention("does not say which layer it belongs to")
        chunked = layer_idx < len(self._layer_types) and self._layer_types[layer_idx] == "chunked_attention"
        spec = LayerSpec(
            layer_idx=layer_idx,
            num_heads=call.query.shape[0],
            num_kv_heads=call.key.shape[0],
            key_dim=call.key.shape[2],
            value_dim=call.value.shape[2],
            scale=call.scale,
            window=call.window,
            chunk=self._chunk if chunked else None,
            softcap=call.softcap,
            has_sink=call.sink is not None,
        )
        if spec.num_heads % spec.num_kv_heads:
            raise UnexpectedAttention(f"shares {spec.num_kv_heads} KV heads unevenly among {spec.num_heads} heads")
        form = self._latent_form(module, call)
        if form is not None:
            width = form.rank + form.rope_dim
            spec = replace(spec, num_kv_heads=1, key_dim=width, value_dim=width, latent_rank=form.rank)
        self.layers.append(ProbedLayer(module, spec, call.geometry, call.key.dtype, form))
        return call.value.new_zeros(call.query.shape[1], spec.num_heads, call.value.shape[2])

    def _latent_form(self, module: nn.Module, call: AttentionCall) -> LatentForm | None:
        if module not in self._projections:
            return None
        projection, handle = self._projections[module]
        try:
            if call.latent is None:
                raise NotLatent("its expansion of the latent is not computed in each pass")
            return latent_form(module, projection, call.latent, call.key, call.value)
        except NotLatent as reason:
            self.not_latent.add(str(reason))
            handle.remove()
            return None


def _layer_types(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])
