"""Prompts to token ids, where the tokenizer and the model disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.api.errors import APIError
from server.api.prompts import tokenize
from tests.api.fake_engine import FakeEngine


def test_text_with_a_token_that_the_model_has_no_place_for_is_refused() -> None:
    """Tokens added to a tokenizer, but not to the model, would index beyond its embedding and end the engine."""
    engine = FakeEngine()
    smaller = replace(engine.card, vocab_size=100)
    (harmless,) = tokenize(["AB"], engine.tokenizer, smaller)
    assert harmless.ids == (65, 66)
    with pytest.raises(APIError, match="0 to 99; got 195") as refused:
        tokenize(["AB\u00ff"], engine.tokenizer, smaller)
    assert refused.value.status == 400
    assert refused.value.param == "prompt"


def test_text_that_cannot_be_short_enough_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(max_model_len=64)
    fits = "x" * 63
    assert len(tokenize([fits], engine.tokenizer, engine.card)[0].ids) == 63
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_: pytest.fail("a hopeless prompt was encoded"))
    with pytest.raises(APIError, match=r"at least 1000000 tokens, the limit is 64 \(--max-model-len\)") as refused:
        tokenize(["x" * 10**6], engine.tokenizer, engine.card)
    assert refused.value.code == "context_length_exceeded"
