"""Loads a model of any origin through transformers, with its tokenizer and what its authors say about sampling."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from server.config import ServeSettings
from server.model.errors import ModelLoadError
from server.model.memory import available_memory, readable
from server.model.progress import Progress, Report, part, weights_counted
from server.model.source import Source, find_source
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_VOCABULARIES = ("tokenizer*.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready for the runner: in evaluation mode, on its device, its attention untouched.

    root, revision: what was asked for, and the commit of a hub model.
    max_model_len: most tokens of one request, by the model or by --max-model-len.
    eos_token_ids: every id that the model's files say ends a text.
    default_sampling: what generation_config.json sets of temperature, top_p, top_k, min_p and repetition_penalty.
    weight_bytes: memory of parameters and buffers, tied ones counted once.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    root: str
    revision: str | None
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_sampling: dict[str, float] = field(default_factory=dict)
    weight_bytes: int = 0


def load_model(settings: ServeSettings, report: Report) -> LoadedModel:
    """Find, download or convert, check and load the model that `settings` names.

    report: called with what is being done and the share of it that is done; a terminal also gets a bar.
    Raises ModelLoadError with one sentence for the operator. What is cheap to check is checked before weights load.
    """
    with Progress(report) as progress:
        device = find_device(settings.device)
        source = find_source(settings.model, settings.revision, settings.trust_remote_code, progress)
        config = _read_config(source, settings.trust_remote_code)
        max_model_len = _max_model_len(config, settings.max_model_len)
        tokenizer = _load_tokenizer(source, settings, progress)
        dtype = _dtype(settings.dtype, config, device)
        model = _load_weights(source, config, dtype, device, settings.trust_remote_code, progress)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        root=source.root,
        revision=source.revision,
        dtype=model.dtype,
        device=device,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(source, tokenizer, config),
        default_sampling=_default_sampling(source),
        weight_bytes=_weight_bytes(model),
    )


def find_device(name: str) -> torch.device:
    """The device that `--device` names; "auto" is the first GPU, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda:0" if count else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not count:
            reason = "this build of torch is for CPUs only" if torch.version.cuda is None else "torch finds no GPU"
            raise ModelLoadError(f"--device is {name}, but {reason}; --device cpu or auto works here")
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise ModelLoadError(f"--device is {name}, but the GPUs here are cuda:0 to cuda:{count - 1}")
    return device


def _read_config(source: Source, trust_remote_code: bool) -> PretrainedConfig:
    """The model's config. Raises ModelLoadError where it is not one of a decoder that predicts the next token."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _failure(source, "its config.json cannot be used", error) from error
    kind = config.model_type
    bidirectional = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and config.to_dict().get("is_decoder") is False
    if config.is_encoder_decoder or bidirectional:
        shape = "an encoder and a decoder" if config.is_encoder_decoder else "an encoder"
        raise ModelLoadError(f"{source.root} ({kind}) is {shape}; only decoder-only models can be served")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "AutoModelForCausalLM" not in _remote_classes(config):
        raise ModelLoadError(f"{source.root} ({kind}) is no model that continues text, as far as transformers knows")
    return config


def _remote_classes(config: PretrainedConfig) -> dict[str, str]:
    classes: dict[str, str] = config.to_dict().get("auto_map") or {}
    return classes


def _max_model_len(config: PretrainedConfig, asked: int | None) -> int:
    text = config.get_text_config(decoder=True).to_dict()
    limits = [int(text[key]) for key in _LENGTH_KEYS if text.get(key)]
    if not limits:
        if asked is None:
            raise ModelLoadError("the model's config says nothing of its longest context: give it with --max-model-len")
        return asked
    if asked is not None and asked > limits[0]:
        raise ModelLoadError(f"--max-model-len is {asked}, but the model's limit is {limits[0]} tokens")
    return asked or limits[0]


def _load_tokenizer(source: Source, settings: ServeSettings, report: Report) -> Tokenizer:
    report("loading the tokenizer", 0.0)
    if not any(path.is_file() for pattern in _VOCABULARIES for path in source.path.glob(pattern)):
        raise ModelLoadError(f"{source.root} has no tokenizer: none of {', '.join(_VOCABULARIES)} is in {source.path}")
    try:
        tokenizer = Tokenizer.load(str(source.path), None, settings.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise _failure(source, "its tokenizer cannot be loaded", error) from error
    report("loading the tokenizer", 1.0)
    return tokenizer


def _dtype(asked: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """As asked; "auto" is float32 on a CPU, where it is the fastest type and the exact one, else the checkpoint's."""
    if asked != "auto":
        dtype = getattr(torch, asked)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cpu":
        return torch.float32
    return _stored_dtype(config) or torch.bfloat16


def _stored_dtype(config: PretrainedConfig) -> torch.dtype | None:
    dtype = config.dtype or config.get_text_config(decoder=True).dtype
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _load_weights(
    source: Source,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    report: Report,
) -> PreTrainedModel:
    _check_memory(source, config, dtype, device)
    doing = "loading the weights"
    report(doing, 0.0)
    try:
        with weights_counted(part(report, doing, 0.0, 1.0)):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source.path,
                config=config,
                dtype=dtype,
                device_map={"": device} if device.type == "cuda" else None,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"{source.root} does not fit the memory of {device}: {error}") from error
    except Exception as error:  # transformers, safetensors and remote code raise all kinds
        raise _failure(source, "its weights cannot be loaded", error) from error
    model, info = loaded
    assert isinstance(model, PreTrainedModel)
    if absent := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"{source.root}: {len(absent)} of the model's weights are not in the checkpoint (first {absent[0]}), "
            "and would be random"
        )
    report(doing, 1.0)
    model.requires_grad_(False)  # from_pretrained has set evaluation mode
    return model


def _check_memory(source: Source, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that cannot fit, before the system ends the process for trying."""
    stored = sum(path.stat().st_size for path in source.path.glob("*.safetensors"))
    stored_dtype = _stored_dtype(config)
    if not stored or stored_dtype is None or config.to_dict().get("quantization_config"):
        return
    needed = stored * dtype.itemsize // stored_dtype.itemsize
    if needed > (free := available_memory(device)):
        raise ModelLoadError(
            f"the weights of {source.root} take {readable(needed)} in {_name(dtype)}, but {device} has "
            f"{readable(free)} free: serve a smaller model"
            + (", or give --dtype bfloat16" if dtype.itemsize > 2 else "")
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _failure(source: Source, what: str, error: Exception) -> ModelLoadError:
    text = str(error)
    if "trust_remote_code" in text:
        return ModelLoadError(
            f"{source.root}: {what} without running code that comes with it; if you trust it, give --trust-remote-code"
        )
    return ModelLoadError(f"{source.root}: {what}: {type(error).__name__}: {' '.join(text.split())}")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is no valid JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def _eos_token_ids(source: Source, tokenizer: Tokenizer, config: PretrainedConfig) -> frozenset[int]:
    """Ids that the files themselves give; the defaults of transformers' config classes may be some other word's id."""
    values: list[Any] = [tokenizer.eos_token_id]
    raw = _json(source.path / "config.json")
    for table in (_json(source.path / "generation_config.json"), raw, raw.get("text_config") or {}):
        ids = table.get("eos_token_id")
        values += ids if isinstance(ids, list) else [ids]
    vocabulary = config.get_text_config(decoder=True).vocab_size
    found = frozenset(value for value in values if isinstance(value, int) and 0 <= value < vocabulary)
    if not found:
        logger.warning("%s names no end-of-sequence token: answers end at max_tokens or a stop string", source.root)
    return found


def _default_sampling(source: Source) -> dict[str, float]:
    values = _json(source.path / "generation_config.json")
    return {
        key: values[key]
        for key in _SAMPLING_KEYS
        if isinstance(values.get(key), int | float) and not isinstance(values[key], bool)
    }


def _weight_bytes(model: PreTrainedModel) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors(model)}
    return sum(storages.values())


def _tensors(model: PreTrainedModel) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
