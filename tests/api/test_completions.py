"""What a completion says, streamed or whole, and what the engine is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.api.sampling import AllowedTokens
from server.generation import GenerationRequest
from tests.api.conftest import Serve, Served
from tests.api.fake_engine import BOS, EOS, ByteTokenizer, FakeEngine


def choice_of(request: GenerationRequest) -> int:
    """Which of its prompt's sequences a request is, where there are three of each."""
    return int(request.request_id.rpartition("/")[2]) % 3


async def both(served: Served, **body: Any) -> dict[str, Any]:
    """The answer to `body`, after it was seen that the stream says the same."""
    body.setdefault("seed", 1)
    whole = await served.complete(**body)
    events = await served.events(stream_options={"include_usage": True}, **body)
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in [*events, usage]}) == 1
    assert all(event["usage"] is None for event in events)
    for choice in whole["choices"]:
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is None:
            assert all(part["logprobs"] is None for part in own)
        else:
            for name, values in choice["logprobs"].items():
                assert [value for part in own for value in part["logprobs"][name]] == values
    return whole


async def test_answer_has_the_shape_of_openai(served: Served) -> None:
    response = await served.client.post(
        "/v1/completions", json={"prompt": "xyz", "temperature": 0, "max_tokens": 3}, headers={"x-request-id": "abc-1"}
    )
    assert response.headers["x-request-id"] == "abc-1"
    answer = response.json()
    created = answer.pop("created")
    assert type(created) is int
    assert answer == {
        "id": "cmpl-abc-1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_defaults_are_those_of_openai(served: Served) -> None:
    answer = await both(served, prompt="x")
    request = served.engine.requests[0]
    assert answer["usage"]["completion_tokens"] == request.max_tokens == 16
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1)
    assert params.stop_token_ids == {EOS}
    assert request.stop == ()
    assert request.prompt_logprobs is None
    assert params.logprobs is None
    assert served.engine.requests[1].streaming


async def test_model_defaults_come_before_openais_and_after_the_request(served: Served) -> None:
    served.engine.card.default_sampling.update(temperature=0.6, top_k=20.0, top_p=0.9)
    await served.complete(prompt="x", top_p=0.5)
    params = served.engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.5, 0.0)
    shown = (await served.client.get("/v1/models/tiny")).json()["default_sampling"]
    assert shown == {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0, "repetition_penalty": 1}


async def test_every_field_reaches_the_engine(served: Served) -> None:
    await served.complete(
        prompt="x",
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=-1.5,
        frequency_penalty=1,
        repetition_penalty=1.2,
        logit_bias={"65": -100, "66": 2.5},
        seed=-(2**63),
        stop=["END"],
        stop_token_ids=[10],
        ignore_eos=True,
        allowed_token_ids=[66, 70],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=0,
        priority=-3,
        cache_salt="tenant",
        cache_prompt=False,
    )
    request = served.engine.requests[0]
    params = request.params
    assert request.max_tokens == 7
    assert (params.min_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (2, 0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-1.5, 1, 1.2)
    assert params.logit_bias == {65: -100, 66: 2.5}
    assert params.seed == -(2**63)
    assert params.stop_token_ids == {10}
    assert params.logprobs == 0
    assert isinstance(request.constraint, AllowedTokens)
    assert request.stop == ("END",)
    assert (request.include_stop_str, request.skip_special_tokens) == (True, False)
    assert (request.priority, request.cache_salt, request.endpoint) == (-3, "tenant", "completions")
    assert not request.read_cache
    assert (request.streaming, request.leader, request.prompt_logprobs) == (False, None, None)


async def test_top_k_without_effect_is_no_limit(served: Served) -> None:
    for top_k in (0, -1, 258, 259, 2**31, 2**63):
        await served.complete(prompt="x", top_k=top_k)
        assert served.engine.requests[-1].params.top_k == 0


async def test_all_forms_of_prompts(served: Served) -> None:
    forms: list[tuple[Any, list[list[int]]]] = [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["ab", [99]], [[97, 98], [99]]),
        ("🦜", [[0xF0, 0x9F, 0xA6, 0x9C]]),
    ]
    for prompt, ids in forms:
        served.engine.streams.clear()
        answer = await both(served, prompt=prompt, temperature=0, max_tokens=2)
        assert [list(request.prompt_ids) for request in served.engine.requests[: len(ids)]] == ids
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert answer["usage"]["completion_tokens"] == 2 * len(ids)


async def test_echo_of_a_prompt_that_ends_inside_a_character(served: Served) -> None:
    """The output may complete it; only without one it is settled."""
    begun, rest = list("a🦜".encode()[:3]), list("🦜".encode()[2:])
    served.engine.tokens = lambda request: rest
    for max_tokens, text in ((2, "a🦜"), (0, "a\ufffd")):
        choice = (await both(served, prompt=begun, echo=True, max_tokens=max_tokens, logprobs=0))["choices"][0]
        assert choice["text"] == text
        assert "".join(choice["logprobs"]["tokens"]) == text


async def test_choices_are_numbered_by_prompt_and_siblings_differ(served: Served) -> None:
    served.engine.cached_tokens = 2
    answer = await both(served, prompt=["abc", "defgh"], n=3, seed=5, max_tokens=4)
    requests = served.engine.requests[:6]
    assert [len(request.prompt_ids) for request in requests] == [3, 3, 3, 5, 5, 5]
    seeds = [request.params.seed for request in requests]
    assert seeds[0] == 5
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]  # a prompt draws the same alone and in a list
    assert [request.leader for request in requests] == [
        None, requests[0].request_id, requests[0].request_id, None, requests[3].request_id, requests[3].request_id,
    ]  # fmt: skip
    assert len({choice["text"] for choice in answer["choices"][:3]}) == 3
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 24,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_equal_prompts_without_a_seed_draw_apart(served: Served) -> None:
    await served.complete(prompt=["x", "x"])
    await served.complete(prompt="x")
    assert len({request.params.seed for request in served.engine.requests}) == 3


async def test_seed_of_the_server_makes_runs_repeat(serve: Serve) -> None:
    seeds = []
    for _ in range(2):
        async with serve(seed=7) as served:
            await served.complete(prompt=["x", "x"])
            seeds.append([request.params.seed for request in served.engine.requests])
    assert seeds[0] == seeds[1]


async def test_stop_string_ends_the_text_but_not_its_tokens(served: Served) -> None:
    answer = await both(served, prompt="d", temperature=0, stop=["de", "d"], logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "d")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert answer["usage"]["completion_tokens"] == 4


async def test_the_best_are_the_likeliest_per_token(served: Served) -> None:
    """Of three the second is short and the third likelier; all that were generated are counted."""
    lengths = {0: 4, 1: 2, 2: 4}
    served.engine.tokens = lambda request: [98 + choice_of(request)] * lengths[choice_of(request)] + [EOS]
    served.engine.logprob = lambda request: (-1.0, -0.75, -0.25)[choice_of(request)]
    answer = await served.complete(prompt=["x", "yz"], n=2, best_of=3, max_tokens=9)
    assert [choice["text"] for choice in answer["choices"]] == ["dddd", "cc"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * (5 + 3 + 5)
    assert answer["usage"]["prompt_tokens"] == 3
    one = await served.complete(prompt="x", best_of=3, max_tokens=9, logprobs=1, echo=True)
    assert [choice["text"] for choice in one["choices"]] == ["xdddd"]
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [None] + [-0.25] * 5


async def test_best_of_as_many_as_asked_for_is_no_choice(served: Served) -> None:
    answer = await both(served, prompt="x", n=2, best_of=2)
    assert len(answer["choices"]) == 2
    assert served.engine.requests[0].params.logprobs is None


async def test_end_of_sequence_has_no_stop_reason(served: Served) -> None:
    served.engine.tokens = lambda request: [97, EOS]
    choice = (await both(served, prompt="x"))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)
    choice = (await both(served, prompt="x", stop_token_ids=[97]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", 97)


async def test_max_tokens_is_cut_to_the_room_left(served: Served) -> None:
    answer = await both(served, prompt="x" * 60, max_tokens=65_535)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64
    assert (await both(served, prompt="x" * 63, max_tokens=1))["usage"]["total_tokens"] == 64
    assert (await both(served, prompt="x" * 60))["usage"]["completion_tokens"] == 4
    assert (await both(served, prompt="x" * 64, max_tokens=0, echo=True))["usage"]["total_tokens"] == 64


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_echo_alone_returns_the_prompt(served: Served, logprobs: int | None) -> None:
    answer = await both(served, prompt="Red green", max_tokens=0, echo=True, logprobs=logprobs)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Red green", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 9
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.5] * 8


async def test_echo_with_logprobs_partitions_the_text(served: Served) -> None:
    answer = await both(served, prompt="\n\nA 🦜\n1", echo=True, logprobs=1, max_tokens=3, temperature=0)
    text, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    assert text == "\n\nA 🦜\n1abc"
    assert "".join(logprobs["tokens"]) == text
    lengths = {name: len(values) for name, values in logprobs.items()}
    assert set(lengths.values()) == {answer["usage"]["total_tokens"]}
    for i, offset in enumerate(logprobs["text_offset"]):
        assert offset == len("".join(logprobs["tokens"][:i]))
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    for token, value, top in list(zip(*(logprobs[name] for name in lengths if name != "text_offset"), strict=True))[1:]:
        assert max(top, key=top.__getitem__) == token  # as lm-eval finds out whether a token was the likeliest
        assert top[token] == value


async def test_echo_of_several_prompts_and_choices(served: Served) -> None:
    answer = await both(served, prompt=["xy", [122]], n=2, echo=True, max_tokens=1, temperature=0)
    assert [choice["text"] for choice in answer["choices"]] == ["xya", "xya", "za", "za"]


async def test_a_prompt_is_scored_once_for_all_its_choices(served: Served) -> None:
    """Those of its siblings that are ahead of it wait for its scores."""
    late = asyncio.Event()
    served.engine.delay = lambda request: None if request.leader else late.wait()
    asking = asyncio.create_task(served.events(prompt=["xy", "z!"], n=2, echo=True, logprobs=1, max_tokens=3, seed=1))
    await served.engine.until(lambda: sum(stream.over for stream in served.engine.streams) == 2)
    late.set()
    events = (await asking)[:-1]
    assert [request.prompt_logprobs for request in served.engine.requests] == [1, None, 1, None]
    for index in range(4):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [value for part in own for value in part["logprobs"]["token_logprobs"]] == [None] + [-0.5] * 4
        assert "".join(part["text"] for part in own).startswith(("xy", "z!")[index // 2])
    await both(served, prompt=["xy", "z!"], n=2, echo=True, logprobs=1, max_tokens=3)


async def test_token_ids_beside_the_text(served: Served) -> None:
    served.engine.tokens = lambda request: [*"🦜".encode(), EOS]
    body = {"prompt": ["xy", [122]], "max_tokens": 9, "return_token_ids": True, "n": 2}
    answer = await served.complete(**body)
    ids = [*"🦜".encode(), EOS]
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids] * 4
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[120, 121]] * 2 + [[122]] * 2
    events = (await served.events(**body))[:-1]
    for index, prompt in enumerate([[120, 121]] * 2 + [[122]] * 2):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for part in own for token in part["token_ids"]] == ids
        assert [part.get("prompt_token_ids") for part in own] == [prompt] + [None] * (len(own) - 1)
    assert "token_ids" not in (await served.complete(prompt="x"))["choices"][0]


async def test_tokens_as_ids(served: Served) -> None:
    body = {"prompt": "é", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    logprobs = (await both(served, **body, return_tokens_as_token_ids=True))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:195", "token_id:169", "token_id:97", "token_id:98"]
    assert logprobs["text_offset"] == (await both(served, **body))["choices"][0]["logprobs"]["text_offset"]
    assert logprobs["top_logprobs"][2] == {"token_id:97": -0.5}


async def test_long_prompts_are_cut_from_the_left_where_asked(served: Served) -> None:
    answer = await both(served, prompt=["abcdef", [1, 2]], truncate_prompt_tokens=3, max_tokens=1, echo=True)
    assert [list(request.prompt_ids) for request in served.engine.requests[:2]] == [[100, 101, 102], [1, 2]]
    assert answer["choices"][0]["text"].startswith("def")
    assert answer["usage"]["prompt_tokens"] == 5
    served.engine.streams.clear()
    await served.complete(prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(served.engine.requests[0].prompt_ids) == 54
    served.engine.bytes = ByteTokenizer(adds_bos=True)
    await served.complete(prompt="abcdef", truncate_prompt_tokens=3)
    assert list(served.engine.requests[1].prompt_ids) == [BOS, 101, 102]


async def test_the_middle_of_two_texts(served: Served) -> None:
    """The markers are the tokenizer's, and what models write after the middle ends it. Echoed is the prompt alone."""
    served.engine.bytes = ByteTokenizer(adds_bos=True)
    served.engine.bytes.named |= {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 4}
    served.engine.tokens = lambda request: [97]
    answer = await both(served, prompt=["de", [102], ""], suffix="xy", echo=True)
    requests = served.engine.requests[:3]
    after = [2, 120, 121, 3]
    assert [list(one.prompt_ids) for one in requests] == [
        [BOS, 1, 100, 101, *after],
        [1, 102, *after],
        [BOS, 1, *after],
    ]
    assert requests[0].params.stop_token_ids == {EOS, 4}
    assert [choice["text"] for choice in answer["choices"]] == ["dea", "fa", "a"]
    assert answer["usage"]["prompt_tokens"] == 8 + 6 + 6
    await served.complete(prompt="de", suffix="xy", ignore_eos=True)
    assert served.engine.requests[-1].params.stop_token_ids == frozenset()


@pytest.mark.parametrize("skip", [True, False])
async def test_echo_shows_special_tokens_only_if_they_were_sent(served: Served, skip: bool) -> None:
    served.engine.bytes = ByteTokenizer(adds_bos=True)
    answer = await both(served, prompt="xy", echo=True, max_tokens=0, skip_special_tokens=skip, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("xy", ["", "x", "y"])
    assert answer["usage"]["prompt_tokens"] == 3
    answer = await both(served, prompt=[BOS, 120], echo=True, max_tokens=0, skip_special_tokens=skip)
    assert answer["choices"][0]["text"] == ("x" if skip else "<s>x")
    answer = await both(served, prompt="xy", max_tokens=0, add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == 2


async def test_zero_logprobs_are_those_of_the_drawn_tokens(served: Served) -> None:
    logprobs = (await both(served, prompt="x", max_tokens=2, temperature=0, logprobs=0))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }


async def test_usage_in_every_chunk_when_asked(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events(prompt="xy", max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 3]


async def test_no_usage_unless_asked(served: Served) -> None:
    for options in (None, {}, {"include_usage": False}):
        events = await served.events(prompt="x", max_tokens=2, stream_options=options)
        assert len(events) == 3
        assert all("usage" not in event for event in events[:-1])


async def test_a_sequence_of_outputs_without_text_makes_no_chunks(served: Served) -> None:
    served.engine.tokens = lambda request: list("🦜!".encode())
    events = await served.events(prompt="x", max_tokens=8)
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["🦜", "!"]


async def test_clients_at_once_get_their_own(served: Served) -> None:
    served.engine.step_seconds = 0.001

    async def one(letter: str) -> None:
        body = {"prompt": letter, "max_tokens": 20, "logit_bias": {str(ord(letter)): 100}}
        if ord(letter) % 2:
            assert (await served.complete(**body))["choices"][0]["text"] == letter * 20
        else:
            events = await served.events(**body)
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == letter * 20

    await asyncio.gather(*(one(letter) for letter in "abcdefghijklmnop"))
    assert not served.engine.open


async def test_several_names(serve: Serve) -> None:
    async with serve(FakeEngine(names=("tiny", "org/tiny-2"))) as served:
        assert (await served.complete(prompt="x", model="org/tiny-2"))["model"] == "org/tiny-2"
        assert (await served.complete(prompt="x", model=None))["model"] == "tiny"
