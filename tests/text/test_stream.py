from __future__ import annotations

import codecs
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from server.text.stream import Delta, TextStream
from server.text.tokenizer import Tokenizer
from tests.text.conftest import CORPUS, KINDS, made

texts = st.text(st.sampled_from([*"the dogAB.\n  ", "é", "漢", "字", "🦜", "𝄞", "\u200d", "ﷺ"]), max_size=24)
BYTES = ["byte_level", "byte_fallback_bpe", "byte_fallback_unigram", "metaspace"]


def _stream(tokenizer: Tokenizer, prompt_ids: list[int], skip: bool = True, **options: object) -> TextStream:
    chosen = {"stop": (), "include_stop_str": False, "skip_special_tokens": skip, "min_tokens": 0} | options
    return TextStream(tokenizer, prompt_ids, **chosen)


def _run(stream: TextStream, ids: list[int]) -> list[Delta]:
    """All deltas of `ids`, up to the stop string if one comes."""
    deltas = []
    for token_id in ids:
        deltas.append(stream.append(token_id))
        if deltas[-1].stop is not None:
            return deltas
    return [*deltas, stream.finish()]


def _ids(tokenizer: Tokenizer) -> SearchStrategy[list[int]]:
    """Real text, random tokens of whole characters and special tokens, in any order."""
    decoded = [(i, tokenizer.decode([i], False)) for i in range(tokenizer.vocab_size)]
    whole = [i for i, text in decoded if text and "\ufffd" not in text]
    encoded = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    return _joined(st.lists(encoded | st.lists(st.sampled_from(whole), max_size=3), max_size=4))


def _joined(parts: SearchStrategy[list[list[int]]]) -> SearchStrategy[list[int]]:
    return parts.map(lambda lists: list(chain.from_iterable(lists)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_are_the_decoded_continuation(kind: str, data: DataObject, skip: bool) -> None:
    tokenizer = made(kind)
    prompt, output = data.draw(_ids(tokenizer)), data.draw(_ids(tokenizer))
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    assume(whole.startswith(before))
    stream = _stream(tokenizer, prompt, skip)
    deltas = _run(stream, output)
    assert "".join(delta.text for delta in deltas) == whole[len(before) :]
    assert "".join(stream.pieces) == whole[len(before) :]
    assert len(stream.pieces) == len(output) == sum(delta.released for delta in deltas)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_byte_level_tokens_join_to_what_they_decode_to(data: DataObject, skip: bool) -> None:
    tokenizer = made("byte_level")
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30)  # heads may have rows without a token
    prompt, output = data.draw(ids), data.draw(ids)
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    assume(whole.startswith(before))  # unless the output completes the prompt's last character
    assert "".join(delta.text for delta in _run(_stream(tokenizer, prompt, skip), output)) == whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte_fallback_bpe", "byte_fallback_unigram"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_byte_fallback_tokens_join_to_their_bytes(kind: str, data: DataObject) -> None:
    tokenizer = made(kind)
    output = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    prompt = tokenizer.encode("dog", add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in output)
    deltas = _run(_stream(tokenizer, prompt, skip=False), output)
    assert "".join(delta.text for delta in deltas) == joined.decode(errors="replace")


@pytest.mark.parametrize("kind", BYTES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stops_agree_with_brute_force(kind: str, data: DataObject) -> None:
    """Decode every beginning of the output anew and search it for every stop string."""
    tokenizer = made(kind)
    pieces = [tokenizer.encode(text, add_special_tokens=False) for text in ("A", "AA", " A", "B", "AB A", "🦜", "é")]
    output = data.draw(_joined(st.lists(st.sampled_from(pieces), max_size=8)))
    output += data.draw(st.lists(st.sampled_from([*chain.from_iterable(pieces)]), max_size=6))
    stops = data.draw(st.lists(st.text("AB 🦜é\ufffd", min_size=1, max_size=4), max_size=3))
    min_tokens = data.draw(st.integers(0, 5))
    include = data.draw(st.booleans())
    stream = _stream(
        tokenizer,
        tokenizer.encode("dog", add_special_tokens=False),
        stop=stops,
        include_stop_str=include,
        min_tokens=min_tokens,
    )
    raw = [tokenizer.token_bytes(token_id) or b"" for token_id in output]
    expected, used, stop = _brute_force(raw, stops, min_tokens, include)

    shown, num_released = "", 0
    for i, token_id in enumerate(output[:used], 1):
        delta = stream.append(token_id)
        shown += delta.text
        num_released += delta.released
        if delta.stop is not None:
            assert (i, delta.stop, num_released) == (used, stop, used)
            break
        text = _so_far(raw[:i])
        held = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        assert shown == text[: len(text) - held]
        assert num_released == _num_shown_whole(raw[:i], len(shown))
    else:
        delta = stream.finish()
        assert delta.stop == stop
        shown += delta.text
        assert num_released + delta.released == len(output)
    assert shown == expected
    assert "".join(stream.pieces) == b"".join(raw[:used]).decode(errors="replace")


def _so_far(raw: list[bytes]) -> str:
    """The text of some tokens but for a last character that is not whole yet."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(raw))


def _num_shown_whole(raw: list[bytes], num_shown: int) -> int:
    """How many of the first tokens have all their bytes in the first `num_shown` characters."""
    text = _so_far(raw)
    pending = codecs.utf_8_decode(b"".join(raw), "replace", False)[1]
    count = 0
    while count < len(raw):
        end = sum(map(len, raw[: count + 1]))
        if end > pending or len(_so_far(raw[: count + 1])) > num_shown:
            break
        count += 1
    assert num_shown <= len(text)
    return count


def _brute_force(raw: list[bytes], stops: list[str], min_tokens: int, include: bool) -> tuple[str, int, str | None]:
    """The text shown in the end, the tokens it took, and the stop string."""
    beginnings = [_so_far(raw[:i]) for i in range(len(raw) + 1)] + [b"".join(raw).decode(errors="replace")]
    for i, text in enumerate(beginnings):
        used = min(i, len(raw))
        if used <= min_tokens:
            continue
        floor = len(beginnings[min_tokens])
        found = [
            (start, start + len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > floor
        ]
        if found:
            start, end, stop = min(found)
            return text[: end if include else start], used, stop
    return beginnings[-1], len(raw), None


def _forced(token: str, stop: list[str], count: int = 5) -> tuple[str, int]:
    """Text and length of an output that repeats a token of the whole string `token`."""
    backend = made("byte_level")
    (token_id,) = (i for i in range(backend.vocab_size) if backend.decode([i], False) == token)
    stream = _stream(backend, backend.encode(f"dog {stop[0]}"), stop=stop)
    deltas = _run(stream, [token_id] * count)
    return "".join(delta.text for delta in deltas), len(stream.pieces)


def test_stop_strings_across_tokens() -> None:
    assert _forced("A", ["AAA"]) == ("", 3)
    assert _forced("AA", ["AAA"]) == ("", 2)
    assert _forced(" A", ["A A"]) == (" ", 2)
    assert _forced("A", ["B", "AA", "AAA"]) == ("", 2)
    assert _forced("A", ["B"]) == ("AAAAA", 5)


def test_a_character_over_several_tokens_comes_whole_and_its_tokens_with_it() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("🐘", add_special_tokens=False)
    stream = _stream(tokenizer, [tokenizer.vocab_size - 1])
    deltas = [stream.append(token_id) for token_id in ids]
    assert deltas == [Delta("", 0, None)] * (len(ids) - 1) + [Delta("🐘", len(ids), None)]
    assert stream.pieces == [""] * (len(ids) - 1) + ["🐘"]


def test_a_character_that_never_completes_settles_at_the_end() -> None:
    tokenizer = made("byte_level")
    first = tokenizer.encode("🐘", add_special_tokens=False)[0]
    stream = _stream(tokenizer, tokenizer.encode("dog"))
    assert stream.append(first) == Delta("", 0, None)
    assert stream.finish() == Delta("\ufffd", 1, None)
    assert stream.pieces == ["\ufffd"]


def test_a_character_begun_in_the_prompt_is_completed_by_the_output() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("🐘", add_special_tokens=False)
    assert [delta.text for delta in _run(_stream(tokenizer, ids[:2]), ids[2:])][-2:] == ["🐘", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_bpe"])
def test_the_prompts_broken_character_is_not_the_outputs(kind: str) -> None:
    tokenizer = made(kind)
    prompt = tokenizer.encode("🐘", add_special_tokens=False)[:-1]
    output = tokenizer.encode("dog", add_special_tokens=False)
    assert "\ufffd" not in "".join(delta.text for delta in _run(_stream(tokenizer, prompt), output))
    assert _run(_stream(tokenizer, prompt), []) == [Delta("", 0, None)]


@pytest.mark.parametrize("kind", ["byte_fallback_bpe", "metaspace"])
def test_a_continuation_keeps_its_leading_space_and_a_whole_text_has_none(kind: str) -> None:
    tokenizer = made(kind)
    output = tokenizer.encode("the dog", add_special_tokens=False)
    for prompt, text in (([], "the dog"), (tokenizer.encode("A", add_special_tokens=False), " the dog")):
        assert "".join(delta.text for delta in _run(_stream(tokenizer, prompt), output)) == text
    only_special = [tokenizer.bos_token_id]
    assert "".join(delta.text for delta in _run(_stream(tokenizer, only_special), output)) == "the dog"


def test_a_windowed_tokenizer_keeps_a_short_window() -> None:
    tokenizer = made("slow_bytes")
    stream = _stream(tokenizer, [])
    for _ in range(100):
        stream.append(3 + 0xF0)
    assert stream.append(3 + ord("A")).text == "A"
    assert len(stream._decoder._window) < 12
    for _ in range(100):
        assert stream.append(3 + ord("A")).text == "A"
    assert len(stream._decoder._window) < 12


def test_nothing_comes_after_the_end() -> None:
    tokenizer = made("byte_level")
    stream = _stream(tokenizer, [5])
    stream.finish()
    assert stream.finish() == Delta("", 0, None)
    with pytest.raises(RuntimeError, match="after the end"):
        stream.append(5)


@pytest.mark.embedded
def test_the_embedded_tokenizer(embedded: Tokenizer) -> None:
    def run(token_id: int, stop: list[str], count: int = 5) -> tuple[str, int]:
        stream = _stream(embedded, embedded.encode(f"x {stop}"), stop=stop)
        return "".join(delta.text for delta in _run(stream, [token_id] * count)), len(stream.pieces)

    assert run(49, ["AAA"]) == ("", 3)
    assert run(26024, ["AAAAAA"]) == ("", 2)
    assert run(330, ["A A"]) == (" ", 2)
    assert run(10813, [], 3) == ("\ufffd" * 3, 3)
    for text in CORPUS[:4]:
        ids = embedded.encode(text)
        deltas = _run(_stream(embedded, embedded.encode("漢")[:2]), ids)  # a prompt that ends inside a character
        assert "".join(delta.text for delta in deltas) == text
        assert not any("\ufffd" in delta.text for delta in deltas)
