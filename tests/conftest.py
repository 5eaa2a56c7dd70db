"""What all tests share. Set before torch is first imported: one thread each, and no network."""

import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
for name in [name for name in os.environ if name.startswith("SLUICE_") and name != "SLUICE_CACHE"]:
    del os.environ[name]  # an operator's own settings are no part of a test


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """The directory of the embedded model, converted into the user's cache if it is not there yet."""
    from server.model.embedded import embedded_model

    return embedded_model(lambda doing, fraction: None)
