"""Why a model cannot be served, said without importing torch."""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be loaded as asked. The message says what is wrong and what would work."""
