"""Multi-head latent attention, served from the latent (DeepSeek-V2, arXiv:2405.04434, section 2.1.2 and appendix C).

Such a layer derives the keys and values of all its heads from one latent per token by a matrix, `kv_b_proj`, and adds
one rotary key that the heads share. transformers hands over the expanded keys and values. Caching [latent | rotary key]
instead takes a small part of the memory: since

    q_nope . (W_UK c) = (W_UK^T q_nope) . c    and    sum_j p_j (W_UV c_j) = W_UV (sum_j p_j c_j),

the matrix moves from the cached tokens to the query and to the output, and what is left is attention with one KV head
whose keys and values are the same rows. To a backend it is multi-query attention like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class NotLatent(ValueError):
    """Keys and values are not what the absorbed form assumes; the message, "its ...", completes a sentence."""


def projection_of(module: nn.Module) -> nn.Module | None:
    """What expands the latents of a multi-head latent attention module; its input is the latent. None for others."""
    projection = getattr(module, "kv_b_proj", None)
    known = isinstance(projection, nn.Module) and all(isinstance(getattr(module, name, None), int) for name in _WIDTHS)
    return projection if known else None


@dataclass(frozen=True, slots=True, eq=False)
class LatentForm:
    """The matrices of one layer, views of its `kv_b_proj` where that stores plain numbers.

    to_key: W_UK, [H, nope, rank]. to_value: W_UV, [H, v, rank]. rope_dim: width of the rotary key.
    """

    to_key: Tensor
    to_value: Tensor
    rope_dim: int

    @property
    def rank(self) -> int:
        return self.to_key.shape[2]

    def row(self, latent: Tensor, key: Tensor) -> Tensor:
        """What is cached of T tokens, [1, T, rank + rope], from latent [T, rank] and key [H, T, nope + rope]."""
        return torch.cat((latent, key[0, :, self.to_key.shape[1] :]), dim=-1)[None]

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [H, T, nope + rope] as they meet cached rows, [H, T, rank + rope]."""
        nope = self.to_key.shape[1]
        return torch.cat((torch.bmm(query[..., :nope], self.to_key), query[..., nope:]), dim=-1)

    def expand(self, mixed: Tensor) -> Tensor:
        """Values [T, H, v] from rows [T, H, rank + rope] that attention has mixed."""
        return torch.bmm(mixed[..., : self.rank].transpose(0, 1), self.to_value.transpose(1, 2)).transpose(0, 1)


def latent_form(module: nn.Module, projection: nn.Module, latent: Tensor, key: Tensor, value: Tensor) -> LatentForm:
    """The absorbed form of a layer, proven on tokens that it computed.

    latent [T, rank], key [H, T, nope + rope], value [H, T, v]: as the unmodified module made them of each other.

    Raises:
        NotLatent: they do not follow from the latent and one rotary key by the matrix alone.
    """
    rank, nope, rope, width = (int(getattr(module, name)) for name in _WIDTHS)
    heads = key.shape[0]
    if (latent.shape[1], key.shape[2], value.shape[2], value.shape[0]) != (rank, nope + rope, width, heads):
        raise NotLatent("its keys and values have other widths than it says")
    if getattr(projection, "bias", None) is not None:
        raise NotLatent("its expansion of the latent has a bias")
    if not torch.equal(key[1:, :, nope:], key[:1, :, nope:].expand(heads - 1, -1, -1)):
        raise NotLatent("its heads do not share one rotary key")
    matrix = _matrix(projection, latent)
    if matrix.shape != (heads * (nope + width), rank):
        raise NotLatent("its expansion of the latent has a matrix of another shape")
    to_key, to_value = matrix.view(heads, nope + width, rank).split((nope, width), dim=1)
    for part, made in ((to_key, key[..., :nope]), (to_value, value)):
        if not _close(torch.matmul(latent, part.transpose(1, 2)), made):
            raise NotLatent("its keys and values are not the latent times the matrix")
    return LatentForm(to_key, to_value, rope)


def _matrix(projection: nn.Module, latent: Tensor) -> Tensor:
    """The matrix of a linear module without a bias, [out, rank]; a quantised one is asked what it does to a basis."""
    weight = getattr(projection, "weight", None)
    if isinstance(weight, Tensor) and type(weight) in (Tensor, nn.Parameter) and weight.dtype == latent.dtype:
        return weight
    basis = torch.eye(latent.shape[1], dtype=latent.dtype, device=latent.device)
    images: Tensor = projection(basis)
    return images.T.contiguous()


def _close(actual: Tensor, expected: Tensor) -> bool:
    """Whether rounding explains the difference."""
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 0.02
    return bool((actual.double() - expected.double()).norm() <= tolerance * expected.double().norm())
