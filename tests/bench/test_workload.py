from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from server.bench.client import BenchError
from server.bench.workload import Workload, fit_prefix, load_prompts, poisson_arrivals


def test_packaged_prompts_are_many_and_varied() -> None:
    prompts = load_prompts()
    lengths = sorted(map(len, prompts))
    assert len(set(prompts)) == len(prompts) >= 60
    assert lengths[0] < 40
    assert lengths[-1] > 1200
    assert sum(len(prompt.encode()) > len(prompt) for prompt in prompts) > 5


def test_prompts_of_files(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_text("one\n\ntwo words\n", encoding="utf-8")
    assert load_prompts(lines) == ["one", "two words"]
    objects = tmp_path / "a.jsonl"
    objects.write_text('{"prompt": "one\\ntwo", "id": 3}\n"three"\n', encoding="utf-8")
    assert load_prompts(objects) == ["one\ntwo", "three"]


@pytest.mark.parametrize("content", ["{", '{"text": "x"}', "3", '""', ""])
def test_a_bad_prompt_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchError, match=r"bad\.jsonl"):
        load_prompts(path)
    with pytest.raises(BenchError, match=r"absent\.txt"):
        load_prompts(tmp_path / "absent.txt")


def bodies(workload: Workload, count: int) -> list[dict[str, object]]:
    return [json.loads(body) for body in itertools.islice(workload.bodies(), count)]


def test_each_prompt_comes_once_a_lap_behind_prefix_and_a_tag_of_its_own() -> None:
    workload = Workload(["a", "b", "c"], "m", 7, run="r", prefix="PRE ", seed=1, extras={"ignore_eos": True})
    sent = bodies(workload, 6)
    prompts = [str(body["prompt"]) for body in sent]
    assert all(prompt.startswith("PRE [r-") for prompt in prompts)
    assert len(set(prompts)) == 6
    for lap in (prompts[:3], prompts[3:]):
        assert sorted(prompt[-1] for prompt in lap) == ["a", "b", "c"]
    assert sent[0] == {
        "prompt": prompts[0],
        "model": "m",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    again = [str(body["prompt"])[-1] for body in bodies(workload, 6)]
    assert again == [prompt[-1] for prompt in prompts]  # the same order at every load, under new tags
    assert not set(prompts) & {str(body["prompt"]) for body in bodies(workload, 6)}


def test_verbatim_and_token_id_prompts_go_as_they_are() -> None:
    assert {body["prompt"] for body in bodies(Workload(["a", "b"], "m", 1, "r", verbatim=True), 2)} == {"a", "b"}
    assert bodies(Workload([[1, 2]], "m", 1, "r"), 1)[0]["prompt"] == [1, 2]
    chat = bodies(Workload(["a"], "m", 1, "r", chat=True, verbatim=True), 1)[0]
    assert chat["messages"] == [{"role": "user", "content": "a"}]
    assert "prompt" not in chat


def test_a_mix_asks_for_answers_of_their_own_length() -> None:
    sent = bodies(Workload(["unused"], "m", 7, run="r", mix=[("a", 1), ("b", 20), ("c", 300)]), 6)
    asked = [(str(body["prompt"])[-1], body["max_tokens"]) for body in sent]
    assert sorted(asked[:3]) == sorted(asked[3:]) == [("a", 1), ("b", 20), ("c", 300)]
    assert len({str(body["prompt"]) for body in sent}) == 6


def test_with_a_schema_every_second_body_is_constrained() -> None:
    sent = bodies(Workload(["a", "b", "c"], "m", 7, run="r", schema={"type": "array"}), 6)
    formats = [body.get("response_format") for body in sent]
    asked = {"type": "json_schema", "json_schema": {"name": "bench", "schema": {"type": "array"}, "strict": True}}
    assert formats == [asked, None] * 3


def test_poisson_arrivals_are_a_poisson_process() -> None:
    times = np.asarray(list(itertools.islice(poisson_arrivals(5.0, seed=3), 20_000)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)  # an exponential's mean and deviation are equal
    assert np.exp(-1) == pytest.approx((gaps > 0.2).mean(), abs=0.02)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)
    assert list(itertools.islice(poisson_arrivals(5.0, seed=3), 5)) == times[:5].tolist()
    assert list(itertools.islice(poisson_arrivals(5.0, seed=4), 5)) != times[:5].tolist()


@pytest.mark.parametrize("tokens", [16, 512, 3000])
async def test_a_prefix_is_measured_out_by_the_servers_own_count(tokens: int) -> None:
    async def count(prompt: str) -> int:
        return len(prompt.split()) + 1  # a tokenizer unlike the first guess of four characters a token

    prefix = await fit_prefix("\n\n".join(load_prompts()), tokens, count, "tag")
    assert prefix.startswith("[tag] ")
    assert abs(await count(prefix) - tokens) <= max(1, tokens // 100)


async def test_a_prefix_that_cannot_be_measured_out_is_an_error() -> None:
    async def count(prompt: str) -> int:
        return 10_000

    with pytest.raises(BenchError, match="10000"):
        await fit_prefix("text", 64, count, "tag")
