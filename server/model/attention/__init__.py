"""Attention over the paged pool: what a backend is, and which ones there are."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from server.model.attention.metadata import StepMetadata
from server.model.spec import LayerSpec


class AttentionBackend(Protocol):
    """Computes the attention of one layer for all packed tokens of a step.

    Backends may keep scratch memory between steps; they are used by one thread.
    """

    name: str

    def supports(self, spec: LayerSpec, device: torch.device) -> bool:
        """Whether the backend computes such a layer on such a device."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, spec: LayerSpec, step: StepMetadata
    ) -> Tensor:
        """Attend from query [T, H, key_dim] to the pool, where this step's keys and values already are.

        key [kv_heads, T, key_dim], value [kv_heads, T, value_dim]: this step's own, still in hand.
        sink: [H] logits, None unless `spec.has_sink`.
        Returns [T, H, value_dim].
        """
        ...


def select_backends(name: str, specs: tuple[LayerSpec, ...], device: torch.device) -> tuple[AttentionBackend, ...]:
    """The backend of each layer: the named one where it can compute the layer, the reference elsewhere.

    name: "reference", "cpu", or "auto" for the fastest on the device.

    Raises:
        ValueError: the name is unknown or the backend does not run on the device at all.
    """
    from server.model.attention.cpu import CpuBackend
    from server.model.attention.reference import ReferenceBackend

    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    reference = ReferenceBackend()
    if name == "reference":
        return (reference,) * len(specs)
    if name != "cpu":
        raise ValueError(f"unknown attention backend {name!r}; choose auto, reference or cpu")
    if device.type != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device.type}; choose auto or reference")
    cpu = CpuBackend()
    return tuple(cpu if cpu.supports(spec, device) else reference for spec in specs)
