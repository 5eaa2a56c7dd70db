"""Sluice: an OpenAI-compatible server for Hugging Face language models on a paged, continuously batched KV pool."""

__version__ = "0.1.0"
