from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from server.model.noise import exponential, noise_keys, seed_words
from server.model.sampler import Sampler
from server.step import History, NonFiniteLogits, SamplingParams, StepPlan, TokenLogprobs

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
Row = tuple[SamplingParams, History | None, int]


def _plan(rows: list[Row], scores: list[tuple[int, int]] | None = None) -> StepPlan:
    """A plan of which only the sampler's part means anything; sample i belongs to sequence 2 i."""
    nothing = np.zeros(0, dtype=np.int64)
    scores = scores or []
    return StepPlan(
        step=0,
        input_ids=nothing,
        positions=nothing,
        slots=nothing,
        query_starts=np.zeros(1, dtype=np.int32),
        context_lens=np.zeros(0, dtype=np.int32),
        block_tables=np.zeros((1, 0, 0), dtype=np.int32),
        logit_indices=nothing,
        sample_rows=np.arange(len(rows), dtype=np.int32) * 2,
        out_indices=np.array([out_index for _, _, out_index in rows], dtype=np.int64),
        params=tuple(params for params, _, _ in rows),
        histories=tuple(history for _, history, _ in rows),
        score_targets=np.array([target for target, _ in scores], dtype=np.int64),
        score_tops=np.array([top for _, top in scores], dtype=np.int64),
        score_rows=np.arange(len(scores), dtype=np.int32) * 3,
    )


def _draw(logits: torch.Tensor, *params: SamplingParams, out_index: int = 0) -> list[int]:
    plan = _plan([(param, None, out_index) for param in params])
    return Sampler(logits.shape[1]).sample(logits, plan)[0].tolist()


def _history(rng: np.random.Generator, vocab_size: int) -> History:
    return History(rng.integers(0, vocab_size, rng.integers(1, 40)), rng.integers(0, vocab_size, rng.integers(0, 30)))


# An independent implementation, one token after the other, in float64.


def _edited(logits: np.ndarray, params: SamplingParams, history: History | None, out_index: int) -> np.ndarray:
    x = logits.astype(np.float64)
    if history is not None:
        prompt, output = history.prompt.tolist(), history.output.tolist()
        for token in set(prompt + output):
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        for token in set(output):
            x[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if out_index < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    return x


def _probs(logits: np.ndarray, params: SamplingParams, history: History | None, out_index: int) -> np.ndarray:
    x = _edited(logits, params, history, out_index)
    if params.temperature < 1e-5:
        return np.eye(len(x))[np.argmax(x)]
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    ranked = sorted(range(len(p)), key=lambda token: (-p[token], token))
    if params.top_k:
        p[ranked[params.top_k :]] = 0
    p /= p.sum()
    mass = 0.0
    for rank, token in enumerate(ranked):
        if mass >= params.top_p:
            p[ranked[rank:]] = 0
            break
        mass += p[token]
    return p / p.sum()


def _raced(p: np.ndarray, params: SamplingParams, out_index: int) -> int:
    keys = noise_keys(seed_words([params.seed]), np.array([out_index]))
    noise = exponential(torch.arange(len(p), dtype=torch.int32), torch.from_numpy(keys))[0]
    return int(np.argmax(p / noise.double().numpy()))


def _logprobs(logits: torch.Tensor) -> np.ndarray:
    x = logits.double().cpu().numpy()
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def _random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def maybe(value: float, default: float) -> float:
        return float(value) if rng.random() < 0.4 else default

    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-4, 0.3, 1.0, 1.7])),
        top_k=int(maybe(rng.integers(1, vocab_size + 10), 0)),
        top_p=maybe(rng.uniform(0.05, 0.999), 1.0),
        min_p=maybe(rng.uniform(0.001, 0.5), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias={int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, vocab_size, 3)}
        if rng.random() < 0.3
        else {},
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        logprobs=int(rng.integers(0, 5)) if rng.random() < 0.4 else None,
        min_tokens=int(maybe(rng.integers(0, 8), 0)),
        stop_token_ids=frozenset(rng.integers(0, vocab_size, 2).tolist() if vocab_size > 4 else []),
    )


def _random_rows(rng: np.random.Generator, count: int, vocab_size: int) -> list[Row]:
    rows = []
    for _ in range(count):
        params = _random_params(rng, vocab_size)
        history = _history(rng, vocab_size) if params.needs_history else None
        rows.append((params, history, int(rng.integers(0, 10))))
    return rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "count"), [(1, 20), (3, 60), (50, 200), (700, 60), (2500, 40)])
def test_draws_agree_with_brute_force(vocab_size: int, count: int, dtype: torch.dtype, device: str) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = _random_rows(rng, count, vocab_size)
    # Two decimals make ties, and flat distributions take the cuts beyond the first few hundred tokens.
    logits = torch.from_numpy(rng.normal(size=(count, vocab_size)) * rng.choice([0.3, 3.0], (count, 1))).round(
        decimals=2
    )
    logits = logits.to(device, dtype)
    before = logits.clone()
    token_ids, _ = Sampler(vocab_size).sample(logits, _plan(rows))
    assert torch.equal(logits, before)
    wrong = []
    for row, (params, history, out_index) in enumerate(rows):
        p = _probs(logits[row].float().cpu().numpy(), params, history, out_index)
        if token_ids[row] != _raced(p, params, out_index):
            wrong.append((row, params, p[token_ids[row]]))
    assert not wrong


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.8, min_p=0.1),
        SamplingParams(top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
    ],
)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    """Chi-square over many seeds, and over many output indices of one seed."""
    draws = 20_000
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=24) * 1.5).float()
    p = _probs(logits.numpy(), params, None, 0)
    rows = logits.expand(draws, -1)
    by_seed = [(replace(params, seed=seed), None, 0) for seed in range(draws)]
    fixed = replace(params, seed=77)
    by_index: list[Row] = [(fixed, None, index) for index in range(draws)]
    for plan in (_plan(by_seed), _plan(by_index)):
        counts = np.bincount(Sampler(24).sample(rows, plan)[0], minlength=24)
        assert not counts[p == 0].any()
        kept = p > 0
        statistic = ((counts[kept] - draws * p[kept]) ** 2 / (draws * p[kept])).sum()
        freedom = kept.sum() - 1
        assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab_size", [37, 1003, 6000])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_request_draws_the_same_alone_and_in_any_batch(vocab_size: int, threads: int) -> None:
    rng = np.random.default_rng(5)
    rows = _random_rows(rng, 40, vocab_size)
    logits = torch.from_numpy(rng.normal(size=(40, vocab_size)) * 2).float()
    torch.set_num_threads(threads)
    try:
        alone = []
        for row in range(40):
            token_ids, logprobs = Sampler(vocab_size).sample(logits[row : row + 1], _plan(rows[row : row + 1]))
            alone.append((int(token_ids[0]), logprobs[0]))
        sampler = Sampler(vocab_size)
        for size in (40, 13, 40, 2):
            chosen = rng.permutation(40)[:size]
            token_ids, logprobs = sampler.sample(logits[chosen], _plan([rows[row] for row in chosen]))
            assert list(zip(token_ids.tolist(), logprobs, strict=True)) == [alone[row] for row in chosen]
    finally:
        torch.set_num_threads(1)


def test_a_seed_draws_the_same_again_and_another_seed_or_index_does_not() -> None:
    logits = torch.zeros(2, 10_000)
    params = SamplingParams(seed=123)
    first = _draw(logits, params, SamplingParams(seed=124))
    assert _draw(logits, params, SamplingParams(seed=124)) == first
    assert first[0] != first[1]
    assert _draw(logits, params, params)[0] == _draw(logits, params, params)[1]
    assert _draw(logits[:1], params, out_index=1) != first[:1]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert _draw(logits, *[SamplingParams(temperature=0)] * 2) == [1, 0]
    assert _draw(logits, *[SamplingParams(temperature=9e-6)] * 2) == [1, 0]
    assert _draw(logits, *[SamplingParams(temperature=0, logit_bias={3: 0.5})] * 2) == [1, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_ends_of_top_k_and_top_p(seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 2000))).float().round(decimals=1)
    free = _draw(logits, SamplingParams(seed=seed))
    greedy = _draw(logits, SamplingParams(temperature=0))
    for top_k in (2000, 2001, 2**31, 2**63):
        assert _draw(logits, SamplingParams(seed=seed, top_k=top_k)) == free
    assert _draw(logits, SamplingParams(seed=seed, top_p=1 - 1e-12)) == free
    assert _draw(logits, SamplingParams(seed=seed, top_k=1)) == greedy
    assert _draw(logits, SamplingParams(seed=seed, top_p=1e-9)) == greedy
    assert _draw(logits, SamplingParams(seed=seed, top_p=0.0)) == greedy


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_p=0.45), {0, 1}),  # the token that crosses p stays
        (SamplingParams(top_p=0.35), {0}),
        (SamplingParams(top_k=2, top_p=0.55), {0}),  # top_p is a share of what top_k left: 4/7 is enough
        (SamplingParams(min_p=0.6, top_p=0.55), {0}),  # and of what min_p left
        (SamplingParams(min_p=0.45), {0, 1, 2}),
        (SamplingParams(min_p=0.6, top_k=3), {0, 1}),
        (SamplingParams(min_p=0.45, temperature=0.5), {0, 1}),  # 4 : 3 : 2 are 16 : 9 : 4 at this temperature
        (SamplingParams(top_k=3), {0, 1, 2}),
    ],
)
def test_each_cut_is_of_what_the_one_before_it_left(params: SamplingParams, kept: set[int]) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert set(_draw(logits.expand(300, -1), *[replace(params, seed=seed) for seed in range(300)])) == kept


@pytest.mark.parametrize("top_p", [1.0, 0.0001])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_temperature_overflows(top_p: float, scale: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 500))).float() * scale
    greedy = _draw(logits, SamplingParams(temperature=0))
    for temperature in (1e-4, 1e-5, 9.9e-6, 1e-6, 1e-12, 1e-38, 1e-300):
        assert _draw(logits, SamplingParams(temperature=temperature, top_p=top_p, seed=8)) == greedy
    assert 0 <= _draw(logits, SamplingParams(temperature=2.0, top_p=top_p))[0] < 500


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 2] = 50.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=frozenset({2, 99, -1}))
        for out_index in range(3):
            assert _draw(logits, params, out_index=out_index) != [2]
        assert _draw(logits, params, out_index=3) == [2]


def test_an_id_without_a_logit_never_reaches_the_next_row() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 0] = 1.0
    history = History(np.array([4, 5]), np.array([4, 4]))
    stray = SamplingParams(
        temperature=0,
        logit_bias={4: -100.0, -1: 100.0},
        repetition_penalty=9.0,
        frequency_penalty=2.0,
        min_tokens=5,
        stop_token_ids=frozenset({4}),
    )
    neighbour = SamplingParams(temperature=0, repetition_penalty=1.01, logit_bias={3: 0.1})
    plan = _plan([(stray, history, 0), (neighbour, History(np.array([1]), np.array([1])), 0)])
    assert Sampler(4).sample(logits, plan)[0].tolist() == [0, 0]


def test_a_bias_of_a_hundred_forces_and_forbids() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 100)) * 5).float()
    best = int(logits[0].argmax())
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9, top_k=5)):
        assert _draw(logits[:1], replace(params, logit_bias={49: 100.0})) == [49]
        assert _draw(logits[:1], replace(params, logit_bias={best: -100.0})) != [best]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_are_the_raw_distributions(dtype: torch.dtype, device: str) -> None:
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.normal(size=(6, 300)) * 4).to(device, dtype)
    wanted = [None, 0, 1, 5, 20, 400]
    rows: list[Row] = [
        (SamplingParams(temperature=2.0, top_k=3, logit_bias={7: 90.0}, seed=i, logprobs=n), None, 0)
        for i, n in enumerate(wanted)
    ]
    token_ids, reports = Sampler(300).sample(logits, _plan(rows))
    assert token_ids.tolist() == [7] * 6
    exact = _logprobs(logits)
    assert reports[0] is None
    for row in range(1, 6):
        _check_report(reports[row], exact[row], 7, wanted[row] or 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_logprobs_of_the_targets(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(30, 3000)) * 4).to(dtype)
    scores = [(int(rng.integers(3000)), int(rng.integers(0, 21))) for _ in range(30)]
    reports = Sampler(3000).score(logits, _plan([], scores))
    assert len(reports) == 30
    for report, row, (target, top) in zip(reports, _logprobs(logits), scores, strict=True):
        _check_report(report, row, target, top)


def _check_report(report: TokenLogprobs | None, exact: np.ndarray, token_id: int, top: int) -> None:
    assert report is not None
    assert report.token_id == token_id
    assert report.logprob <= 0
    assert report.logprob == pytest.approx(exact[token_id], abs=1e-5)
    ranked = sorted(range(len(exact)), key=lambda token: (-exact[token], token))[:top]
    assert [token for token, _ in report.top] == ranked
    assert [logprob for _, logprob in report.top] == pytest.approx(exact[ranked], abs=1e-5)


def test_the_greedy_token_leads_its_report_even_among_equals() -> None:
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    logits[0, 1234:4000] = 2.0
    plan = _plan([(SamplingParams(temperature=0, logprobs=3), None, 0)])
    (token_id,), (report,) = Sampler(5000).sample(logits, plan)
    assert report is not None
    assert token_id == 1234
    assert [token for token, _ in report.top] == [1234, 1235, 1236]


def test_nothing_to_sample_or_score() -> None:
    token_ids, logprobs = Sampler(10).sample(torch.empty(0, 10), _plan([]))
    assert (token_ids.tolist(), logprobs) == ([], ())
    assert Sampler(10).score(torch.empty(0, 10), _plan([])) == ()


def test_rows_a_head_is_padded_with_are_never_drawn() -> None:
    logits = torch.zeros(3, 16)
    logits[:, 10:] = 100.0
    kinds = (SamplingParams(temperature=0, logprobs=1), SamplingParams(), SamplingParams(top_p=0.9))
    token_ids, logprobs = Sampler(10).sample(logits, _plan([(params, None, 0) for params in kinds]))
    assert (token_ids < 10).all()
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(-100 - math.log(6), abs=1e-4)


def test_a_sampler_follows_changing_batches() -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(4, 64))).float()
    rows = _random_rows(rng, 4, 64)
    sampler = Sampler(64)
    for step in range(12):
        params, history, _ = rows[step % 4]
        rows[step % 4] = (replace(params, temperature=float(step % 3), seed=step), history, step)
        rows = [(params, history, step) for params, history, _ in rows]
        again = sampler.sample(logits, _plan(rows))
        assert again[0].tolist() == Sampler(64).sample(logits, _plan(rows))[0].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, logprobs=2)]
)
def test_logits_that_are_no_numbers_are_an_error_that_names_the_sequence(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(3, 200)
    logits[1, 150] = bad
    with pytest.raises(NonFiniteLogits, match=r"sequence\(s\) 2 ") as caught:
        Sampler(200).sample(logits, _plan([(params, None, 0)] * 3))
    assert caught.value.sequences == (2,)
    with pytest.raises(NonFiniteLogits) as caught:
        Sampler(200).score(logits, _plan([], [(0, 0), (1, 1), (2, 2)]))
    assert caught.value.sequences == (3,)


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((1, 3000), -math.inf)
    logits[0, [5, 2900]] = 0.0
    for params in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.99), SamplingParams(min_p=0.5)):
        drawn = {_draw(logits, replace(params, seed=seed))[0] for seed in range(40)}
        assert drawn == {5, 2900}
