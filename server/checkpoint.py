"""Finds a model's config.json and counts the bytes of its weights, without loading any."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config import EMBEDDED_MODEL
from server.kvpool.layout import CACHE_DTYPES

_FLOATS = {"F64", "F32", "F16", "BF16"}  # those that loading converts to the dtype asked for


class UnknownCheckpoint(Exception):
    """The model or the size of its weights is not to be found; the message names the way out."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parsed config.json of `name`, and the directory with its weights if there is one."""

    name: str
    config: Mapping[str, Any]
    directory: Path | None


@dataclass(frozen=True, slots=True)
class Weights:
    """Size of all weights in memory, tied ones once. `source` says how it is known."""

    nbytes: int
    parameters: int | None
    source: str


def find_checkpoint(model: str | None, revision: str | None = None) -> Checkpoint:
    """Look up a config.json, a directory that has one, a .gguf file or a Hugging Face id; None is the embedded model.

    A Hugging Face id is looked for in the local cache first, then on the hub, where its config.json alone is fetched.
    Raises UnknownCheckpoint.
    """
    if model is None:
        return _read(EMBEDDED_MODEL, _converted(None))
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _read(model, _converted(path))
    if path.exists():
        return _read(model, path)
    if path.suffix == ".json" or model.startswith((".", "/", "~")):
        raise UnknownCheckpoint(f"there is no {model}")
    return _read(model, _from_hub(model, revision).parent)


def count_weights(checkpoint: Checkpoint, dtype: str) -> Weights:
    """Bytes of the weights once loaded as `dtype`; quantised ones as they are stored.

    Counted by building the architecture on torch's meta device, which takes no memory, or else by the headers of the
    safetensors files. Raises UnknownCheckpoint where neither is possible.
    """
    quantised = bool(checkpoint.config.get("quantization_config"))
    weights = (None if quantised else _built(checkpoint, dtype)) or _stored(checkpoint.directory, dtype)
    if weights is None:
        reason = "is quantised" if quantised else "is of an architecture that transformers does not know"
        raise UnknownCheckpoint(
            f"{checkpoint.name} {reason}, and there are no safetensors files beside its config to add up: give the "
            "size of its weights with --weights-bytes"
        )
    return weights


def _converted(path: Path | None) -> Path:
    from server.model.embedded import embedded_file
    from server.model.errors import ModelLoadError
    from server.model.gguf import converted
    from server.model.progress import Progress

    try:
        with Progress(lambda doing, fraction: None) as progress:
            return converted(path or embedded_file(), progress)
    except ModelLoadError as error:
        raise UnknownCheckpoint(str(error)) from error


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            return Path(hf_hub_download(model, "config.json", revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(hf_hub_download(model, "config.json", revision=revision))
    except (OSError, ValueError) as error:
        raise UnknownCheckpoint(
            f"{model} is no file or directory, and its config.json cannot be had from the Hugging Face cache or hub "
            f"({str(error).splitlines()[0]}): check the name and the network, or give a path to a config.json"
        ) from error


def _read(name: str, path: Path) -> Checkpoint:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownCheckpoint(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UnknownCheckpoint(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnknownCheckpoint(f"{file} is no model config: it holds no JSON object")
    return Checkpoint(name, config, file.parent)


def _built(checkpoint: Checkpoint, dtype: str) -> Weights | None:
    """Count the parameters of the architecture; None where transformers does not know it."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    try:
        with torch.device("meta"):
            config = CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config))
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UnknownCheckpoint(
            f"transformers refuses the config of {checkpoint.name} ({str(error).splitlines()[0]}): correct it, or give "
            "the size of the weights with --weights-bytes"
        ) from error
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    return Weights(sum(count * size for count, size in sizes), sum(count for count, _ in sizes), "the architecture")


def _stored(directory: Path | None, dtype: str) -> Weights | None:
    """Add up the tensors of all safetensors files; None unless all are there."""
    if directory is None:
        return None
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = {directory / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    else:
        files = set(directory.glob("*.safetensors"))
    if not files or not all(file.exists() for file in files):
        return None
    nbytes = parameters = 0
    for file in files:
        for tensor in _header(file).values():
            count, (start, end) = math.prod(tensor["shape"]), tensor["data_offsets"]
            parameters += count
            nbytes += count * CACHE_DTYPES[dtype].element_bytes if tensor["dtype"] in _FLOATS else end - start
    return Weights(nbytes, parameters, "the safetensors files")


def _header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: eight bytes of length, then JSON of the tensors' types, shapes and places."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header
