"""A checkpoint of random weights with a tokenizer to match, written without any network."""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

END = "<|end|>"


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a Llama-like model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int


ONE_BILLION = Size(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=32000, context=8192)
TINY = Size(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocab=1000, context=2048)


def write_checkpoint(directory: Path, size: Size, device: str, seed: int = 0) -> int:
    """Write config, weights (bfloat16) and tokenizer into `directory`; returns the number of parameters."""
    model = random_model(size, device, seed)
    model.save_pretrained(directory)
    tokenizer = build_tokenizer(size.vocab)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(size: Size, device: str, seed: int = 0) -> PreTrainedModel:
    """A Llama of random weights in bfloat16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        bos_token_id=size.vocab - 1,
        eos_token_id=size.vocab - 1,
        pad_token_id=size.vocab - 1,
    )
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose ids are all text: bytes, then pairs and triples of printable characters, then the end.

    Random weights draw every id alike, so an id without text would leave a stream silent. Needs at least 257 ids, at
    most about 860,000.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in string.printable if letter in set(words)]
    pairs = [(first, second) for first in letters for second in letters]
    triples = [(first + second, third) for first, second in pairs for third in letters]
    merges: list[tuple[str, str]] = (pairs + triples)[: vocab_size - len(words) - 1]
    vocab = {word: index for index, word in enumerate([*words, *(a + b for a, b in merges), END])}
    assert len(vocab) == vocab_size, f"a vocabulary of {vocab_size} cannot be made"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)
