"""Where a Hugging Face model's attention layers reach us: one function registered with transformers.

The function is registered with `AttentionInterface` and not with the mask interface, so transformers builds no mask and
hands over queries, keys and values after rotary embedding. What to do with them is up to the `Attend` that is current
on the calling thread: the probe records them, `PagedAttention` serves them. Latent attention hands over what it made of
the latent; the latent itself is noted on its way and put beside them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from server.model.attention import AttentionBackend
from server.model.attention.metadata import StepMetadata
from server.model.latent import LatentForm
from server.model.positions import Temperature
from server.model.spec import LayerSpec

IMPLEMENTATION = "sluice_paged"

# Arguments that other implementations need and that say nothing about the result in packed causal attention.
_HARMLESS = frozenset({"position_ids", "cache_position", "logits_to_keep", "cu_seq_lens_q", "cu_seq_lens_k"})


class UnexpectedAttention(RuntimeError):
    """A layer asked for attention of a kind that packed, paged, causal attention is not."""


@dataclass(slots=True, eq=False)
class AttentionCall:
    """What a layer handed over. query [H, T, key_dim], key [kv_heads, T, key_dim], value [kv_heads, T, value_dim].

    latent: [T, rank] of a layer that `note_latent` listens to, from which it made key and value.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sink: Tensor | None
    latent: Tensor | None = None

    @property
    def geometry(self) -> tuple[object, ...]:
        query, key, value = self.query, self.key, self.value
        return (
            query.shape[0],
            key.shape[0],
            key.shape[2],
            value.shape[2],
            self.scale,
            self.window,
            self.softcap,
            self.sink is not None,
        )


class Attend(Protocol):
    """Computes the attention of one layer for the packed tokens: [T, H, value_dim]."""

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor: ...


class _Current(threading.local):
    attend: Attend | None = None
    latent: tuple[nn.Module, Tensor] | None = None


_current = _Current()


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Send the attention of hooked models run on this thread to `attend`."""
    before = _current.attend
    _current.attend = attend
    try:
        yield
    finally:
        _current.attend = before
        _current.latent = None


def note_latents(module: nn.Module, projection: nn.Module) -> RemovableHandle:
    """From now on the attention calls of `module` carry what its `projection` expanded into their keys and values."""

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if _current.attend is not None:
            _current.latent = (module, inputs[0].flatten(0, -2))

    return projection.register_forward_pre_hook(note)


def _take_latent(module: nn.Module) -> Tensor | None:
    """The latent noted for this call of `module`. It is let go: no later call is to find it."""
    noted, _current.latent = _current.latent, None
    return noted[1] if noted is not None and noted[0] is module else None


def _hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """The attention function of transformers: query [1, H, T, D] and so on -> ([1, T, H, value_dim], no weights)."""
    attend, latent = _current.attend, _take_latent(module)
    if attend is None:
        raise RuntimeError("the model's attention is paged: run it through ModelRunner, or set another implementation")
    if attention_mask is not None:
        raise UnexpectedAttention("brings an attention mask of its own")
    if is_causal is False or (is_causal is None and module.__dict__.get("is_causal") is False):
        raise UnexpectedAttention("is bidirectional")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise UnexpectedAttention("attends to other keys than those of its own tokens (cross-attention or shared keys)")
    if dropout:
        raise UnexpectedAttention("uses dropout; call model.eval() first")
    for name, argument in rest.items():
        if isinstance(argument, Tensor) and name not in _HARMLESS:
            raise UnexpectedAttention(f"depends on an input that paged attention does not know ({name})")
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    call = AttentionCall(query[0], key[0], value[0], scale, sliding_window or None, softcap or None, s_aux, latent)
    return attend(module, call).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _hook)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A probed layer: its spec, the geometry every call must have, the backend that computes it, what its queries are
    scaled by beforehand, whose block tables it reads, and the matrices of a latent one."""

    spec: LayerSpec
    geometry: tuple[object, ...]
    backend: AttentionBackend
    temperature: Temperature | None
    group: int
    latent: LatentForm | None


class PagedAttention:
    """Writes a step's keys and values to the pool and attends through the layer's backend."""

    def __init__(self, layers: Mapping[nn.Module, Layer], steps: Sequence[StepMetadata]) -> None:
        """steps: the step as each table group sees it."""
        self._layers = layers
        self._steps = steps

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        layer = self._layers[module]
        if call.geometry != layer.geometry:
            raise UnexpectedAttention(
                f"layer {layer.spec.layer_idx} changed its attention after the probe: "
                f"{call.geometry} is not {layer.geometry}"
            )
        step, temperature, form = self._steps[layer.group], layer.temperature, layer.latent
        query, key, value = call.query, call.key, call.value
        if form is not None:
            if call.latent is None:
                raise UnexpectedAttention(f"layer {layer.spec.layer_idx} no longer expands a latent in each pass")
            query, key = form.absorb(query), form.row(call.latent, key)
            value = key
        key, value = step.pool.write(layer.spec.layer_idx, step.slots, key, value)
        query = query.transpose(0, 1)
        if temperature is not None:
            factors = step.once(temperature, lambda: temperature.factors(step.positions)[:, None, None])
            query = (query * factors).to(query.dtype)
        out = layer.backend.attend(query, key, value, call.sink, layer.spec, step)
        return out if form is None else form.expand(out)
