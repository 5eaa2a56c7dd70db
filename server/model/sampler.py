"""Draws the next token of each sequence and reports log-probabilities.

A token is drawn by an exponential race: with independent unit exponentials e_i, the i with the greatest p_i / e_i is
distributed as p. This is the Gumbel-max trick (Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NIPS 2014)
without its logarithms. The noise is stateless (`server.model.noise`), and every operation on a row is exact or rounds
without regard to the other rows, so a request's draw is the same alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from server.model.masks import Masks
from server.model.noise import exponential, noise_keys, seed_words
from server.step import History, Int32Array, Int64Array, NonFiniteLogits, SamplingParams, StepPlan, TokenLogprobs

GREEDY_BELOW = 1e-5

# Rows are worked on in blocks of this many logits: on a CPU a block's scratch stays in the cache, on a GPU it bounds
# the memory while a block still fills the card.
_CPU_BLOCK = 2**19
_GPU_BLOCK = 2**23
_NARROWEST = 128

_Kind = Literal["greedy", "race", "truncated"]


class Sampler:
    """Samples with each row's own parameters.

    Logits are penalised (repetition over prompt and output, frequency and presence over the output), biased, and
    robbed of stop tokens before `min_tokens`; then divided by the temperature and cut by min_p, top_k and top_p, in
    this order, each on what the one before it left. min_p is relative to the likeliest token; top_k and top_p rank by
    logit and then by token id, and top_p keeps the token that crosses p. Greedy rows take the greatest logit, the
    first of equals.

    A constraint's mask comes after the bias and before the temperature, so that all cuts are made among the permitted
    tokens. One that permits stop tokens alone has them drawn even before `min_tokens`.

    vocab_size: tokens from this id on are never drawn; heads padded beyond the vocabulary have rows without a text.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params: tuple[SamplingParams, ...] = ()
        self._constrained: tuple[int, ...] = ()
        self._groups: list[_Group] = []
        self._ids = torch.empty(0, dtype=torch.int32)

    def sample(
        self, logits: Tensor, plan: StepPlan, masks: Masks | None = None
    ) -> tuple[Int64Array, tuple[TokenLogprobs | None, ...]]:
        """Draw the plan's S samples from logits [S, V] of any floating dtype and device; they are left unchanged.

        Log-probabilities are those of the logits as they came, over all V.

        masks: of the samples that have a constraint.

        Raises:
            NonFiniteLogits: some row has no finite greatest logit.
        """
        params = plan.params
        if not params:
            return np.empty(0, dtype=np.int64), ()
        drawable = logits[:, : self._vocab_size]
        best, picks = drawable.max(dim=-1)
        for group in self._groups_for(params, masks.rows if masks is not None else (), drawable):
            picks[group.rows] = group.draw(drawable, plan, self._ids, masks)
        token_ids, finite = torch.stack((picks, best.isfinite().long())).cpu().numpy()
        if not finite.all():
            raise NonFiniteLogits(tuple(sorted({int(plan.sample_rows[row]) for row in np.flatnonzero(finite == 0)})))

        logprobs: list[TokenLogprobs | None] = [None] * len(params)
        wanted = [row for row, param in enumerate(params) if param.logprobs is not None]
        if wanted:
            tops = [params[row].logprobs or 0 for row in wanted]
            reports = _report(logits, wanted, token_ids[wanted], tops, plan.sample_rows[wanted])
            for row, report in zip(wanted, reports, strict=True):
                logprobs[row] = report
        return token_ids, tuple(logprobs)

    def score(self, logits: Tensor, plan: StepPlan) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the plan's P scored prompt tokens under logits [P, V].

        Raises:
            NonFiniteLogits: as for `sample`.
        """
        rows = range(len(plan.score_targets))
        return tuple(_report(logits, rows, plan.score_targets, plan.score_tops.tolist(), plan.score_rows))

    def _groups_for(
        self, params: tuple[SamplingParams, ...], constrained: tuple[int, ...], logits: Tensor
    ) -> list[_Group]:
        """The rows that need more than the greatest logit. Parameters are compared by identity, so a batch whose
        members stay keeps its tensors from step to step."""
        if self._ids.shape[0] != logits.shape[1] or self._ids.device != logits.device:
            self._ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
            self._params = ()
        if params != self._params or constrained != self._constrained:
            self._groups = _make_groups(params, constrained, logits)
            self._params, self._constrained = params, constrained
        return self._groups


def _make_groups(params: tuple[SamplingParams, ...], constrained: tuple[int, ...], logits: Tensor) -> list[_Group]:
    """Partition rows by the work they need, so that a row never pays for its neighbour's."""
    num_logits = logits.shape[1]
    mask_of = {row: index for index, row in enumerate(constrained)}
    members: dict[tuple[_Kind, bool, bool], list[int]] = {}
    for row, param in enumerate(params):
        kind = _kind(param, num_logits)
        bans = bool(param.min_tokens and param.stop_token_ids)
        if kind != "greedy" or param.needs_history or param.logit_bias or bans or row in mask_of:
            members.setdefault((kind, param.needs_history, row in mask_of), []).append(row)
    step = _block_rows(logits)
    return [
        _Group(
            [(row, params[row]) for row in rows[start : start + step]],
            kind,
            num_logits,
            logits.device,
            [mask_of[row] for row in rows[start : start + step]] if is_constrained else None,
        )
        for (kind, _, is_constrained), rows in members.items()
        for start in range(0, len(rows), step)
    ]


def _kind(params: SamplingParams, num_logits: int) -> _Kind:
    if params.temperature < GREEDY_BELOW:
        return "greedy"
    return "truncated" if 0 < params.top_k < num_logits or params.top_p < 1.0 else "race"


class _Group:
    """Rows of one kind, penalised and constrained all or none, with their parameters as columns [n, 1] on the device.

    mask_rows: where in `Masks.bits` each row's mask is; None where the rows are free.
    """

    def __init__(
        self,
        members: list[tuple[int, SamplingParams]],
        kind: _Kind,
        num_logits: int,
        device: torch.device,
        mask_rows: list[int] | None,
    ) -> None:
        params = [param for _, param in members]
        self._members = members
        self._kind = kind
        self._device = device
        self._mask_rows = mask_rows
        self.rows = torch.tensor([row for row, _ in members], device=device)
        self._penalties = _Penalties.of(params, device) if params[0].needs_history else None
        self._bias = torch.from_numpy(_flatten([param.logit_bias for param in params], num_logits)).to(device)
        self._bias_values = self._column(
            [value for param in params for token_id, value in param.logit_bias.items() if 0 <= token_id < num_logits]
        ).flatten()
        if kind == "greedy":
            return
        self._seeds = seed_words([param.seed for param in params])
        self._inverse_temperature = self._column([1.0 / param.temperature for param in params])
        self._floor = (
            self._column([math.log(param.min_p) if param.min_p > 0 else -math.inf for param in params])
            if any(param.min_p > 0 for param in params)
            else None
        )
        top_k = [param.top_k if 0 < param.top_k < num_logits else 0 for param in params]
        self._most_k = max(top_k)
        self._top_k = self._column([float(k or math.inf) for k in top_k])
        self._top_p = self._column([param.top_p if param.top_p < 1.0 else math.inf for param in params], torch.float64)

    def draw(self, logits: Tensor, plan: StepPlan, ids: Tensor, masks: Masks | None) -> Tensor:
        """Token ids [n] of the group's rows, from logits [S, V] and the int32 `ids` 0 .. V - 1."""
        x = logits[self.rows].float()
        self._edit(x, plan, masks)
        if self._kind == "greedy":
            return x.argmax(dim=-1)
        # With the greatest logit at 0, no temperature can overflow.
        x.sub_(x.amax(dim=-1, keepdim=True)).mul_(self._inverse_temperature)
        if self._floor is not None:
            x = torch.where(x < self._floor, -math.inf, x)
        out_indices = plan.out_indices[[row for row, _ in self._members]]
        keys = torch.from_numpy(noise_keys(self._seeds, out_indices)).to(self._device)
        if self._kind == "race":
            return x.exp_().div_(exponential(ids, keys)).argmax(dim=-1)
        return self._draw_truncated(x, keys)

    def _edit(self, x: Tensor, plan: StepPlan, masks: Masks | None) -> None:
        if self._penalties is not None:
            histories = [history for row, _ in self._members if (history := plan.histories[row]) is not None]
            self._penalties.apply(x, histories)
        flat = x.view(-1)
        if len(self._bias):
            flat.index_add_(0, self._bias, self._bias_values)
        banned = [
            param.stop_token_ids if plan.out_indices[row] < param.min_tokens else () for row, param in self._members
        ]
        bans = torch.from_numpy(_flatten(banned, x.shape[1])).to(self._device) if any(banned) else None
        if self._mask_rows is not None and masks is not None:
            permitted = _unpack(torch.from_numpy(masks.bits[self._mask_rows]).to(self._device), x.shape[1])
            if bans is not None:
                left = permitted.clone()
                left.view(-1).index_fill_(0, bans, False)
                permitted = torch.where(left.any(dim=-1, keepdim=True), left, permitted)
            # A permitted token stays above the others even where the model gave it minus infinity.
            x.clamp_(min=torch.finfo(x.dtype).min).masked_fill_(~permitted, -math.inf)
        elif bans is not None:
            flat.index_fill_(0, bans, -math.inf)

    def _draw_truncated(self, x: Tensor, keys: Tensor) -> Tensor:
        """Race among the top_k and top_p tokens of the scaled logits x [n, V].

        Few tokens hold most of the mass, so the leading ones are looked at first and more only for rows whose cut lies
        beyond them; the last resort is a full sort.
        """
        probs = x.softmax(dim=-1)
        num_logits = x.shape[1]
        picks = torch.empty(len(x), dtype=torch.int64, device=x.device)
        rows = torch.arange(len(x), device=x.device)
        width = _NARROWEST
        while width < self._most_k:
            width *= 8
        while len(rows):
            width = min(width, num_logits)
            ids = _leading(x[rows], width)
            top_k = self._top_k[rows]
            mass = probs[rows].gather(1, ids).double()
            # A row with top_k has its k tokens among these; its top_p is a share of their mass.
            mass.masked_fill_(torch.arange(width, device=x.device) >= top_k, 0.0)
            before = mass.cumsum(dim=-1) - mass
            total = torch.where(top_k.isfinite(), mass.sum(dim=-1, keepdim=True), 1.0)
            kept = (before < self._top_p[rows] * total) & (mass > 0)
            kept[:, 0] = True
            weights = x[rows].gather(1, ids).exp_().mul_(kept)
            won = weights.div_(exponential(ids.int(), keys[rows])).argmax(dim=-1, keepdim=True)
            picks[rows] = ids.gather(1, won).squeeze(1)
            if width == num_logits:
                break
            rows = rows[kept[:, -1] & ~top_k.isfinite().squeeze(1)]
            width *= 8
        return picks

    def _column(self, values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _Penalties:
    """Columns [n, 1] of the penalties, defined as by OpenAI (frequency, presence) and CTRL (repetition,
    arXiv:1909.05858, section 4.1)."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    @classmethod
    def of(cls, params: list[SamplingParams], device: torch.device) -> _Penalties:
        columns = [(param.repetition_penalty, param.frequency_penalty, param.presence_penalty) for param in params]
        repetition, frequency, presence = torch.tensor(columns, dtype=torch.float32, device=device).T.unsqueeze(-1)
        return cls(repetition, frequency, presence)

    def apply(self, x: Tensor, histories: list[History]) -> None:
        """Penalise the float32 logits x [n, V] in place."""
        num_logits = x.shape[1]
        outputs = torch.from_numpy(_flatten([history.output for history in histories], num_logits)).to(x.device)
        prompts = torch.from_numpy(_flatten([history.prompt for history in histories], num_logits)).to(x.device)
        counts = torch.zeros_like(x)
        counts.view(-1).scatter_add_(0, outputs, torch.ones_like(outputs, dtype=x.dtype))
        in_output = counts > 0
        seen = in_output.clone()
        seen.view(-1).index_fill_(0, prompts, True)
        penalised = torch.where(x > 0, x / self.repetition, x * self.repetition)
        torch.where(seen, penalised, x, out=x)
        x.sub_(counts.mul_(self.frequency)).sub_(in_output * self.presence)


def _flatten(ids: Sequence[Collection[int] | Int64Array], num_logits: int) -> Int64Array:
    """Positions in a flattened [n, num_logits] of the token ids of each row; ids without a logit are left out, for they
    would land in the next row."""
    flat = []
    for row, row_ids in enumerate(ids):
        array = row_ids if isinstance(row_ids, np.ndarray) else np.fromiter(row_ids, np.int64, len(row_ids))
        flat.append(array[(array >= 0) & (array < num_logits)] + row * num_logits)
    return np.concatenate(flat)


def _unpack(bits: Tensor, num_logits: int) -> Tensor:
    """Masks as bool [n, num_logits] from int32 [n, W], of which bit `i % 32` of word `i // 32` is id i's."""
    return _octets(bits.device)[bits.view(torch.uint8).int()].view(torch.bool)[:, :num_logits].contiguous()


@cache
def _octets(device: torch.device) -> Tensor:
    """For each byte its eight bits as bools, the least first, in one int64 [256]."""
    octets = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(octets.view(np.int64).ravel()).to(device)


def _leading(x: Tensor, width: int) -> Tensor:
    """Ids [n, width] of the greatest values of float32 x [n, V], greatest first, equal ones by id.

    Value and id are packed into one integer, which leaves no ties for the device to break as it likes.
    """
    bits = x.view(torch.int32)
    # Negative floats order backwards as integers: flip all but their sign.
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    ids = torch.arange(x.shape[1], device=x.device)
    keys = ordered.long().bitwise_left_shift_(32).bitwise_or_(0xFFFFFFFF - ids)
    leading = keys.topk(width).values if width < x.shape[1] else keys.sort(dim=-1, descending=True).values
    return 0xFFFFFFFF - leading.bitwise_and_(0xFFFFFFFF)


def _report(
    logits: Tensor, rows: Sequence[int], targets: Int64Array, tops: list[int], sequences: Int32Array
) -> Iterator[TokenLogprobs]:
    """Log-probabilities of the target of each row of logits [*, V], and of as many of its likeliest tokens."""
    step = _block_rows(logits)
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        x = logits[torch.tensor(rows[block], device=logits.device)].float()
        best = x.amax(dim=-1, keepdim=True)
        if not best.isfinite().all():
            bad = (~best.isfinite()).flatten().cpu().numpy()
            raise NonFiniteLogits(tuple(sorted(set(sequences[block][bad].tolist()))))
        # Summed in float64 because a float32 sum rounds differently with the shape of the batch.
        norm = (x - best).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64).log().float() + best
        ids = torch.from_numpy(targets[block, None]).to(x.device)
        if most := min(max(tops[block]), x.shape[1]):
            ids = torch.cat((ids, _leading(x, most)), dim=1)
        values = (x.gather(1, ids) - norm).tolist()
        for token_ids, logprobs, top in zip(ids.tolist(), values, tops[block], strict=True):
            pairs = tuple(zip(token_ids[1 : top + 1], logprobs[1 : top + 1], strict=True))
            yield TokenLogprobs(token_ids[0], logprobs[0], pairs)


def _block_rows(logits: Tensor) -> int:
    return max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _GPU_BLOCK) // logits.shape[1])
