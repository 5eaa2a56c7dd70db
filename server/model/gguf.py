"""GGUF files: converted once into a Hugging Face directory in the user's cache, and found there ever after.

The quantised weights are stored as the float32 values they stand for: 16-bit scales times small integers, which no
16-bit float holds exactly. So the converted model computes what the file says, and takes 4 bytes a weight on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.model.errors import ModelLoadError
from server.model.progress import Report, part, tensors_counted, weights_counted

MANIFEST = "sluice.json"
FORMAT = 1
"""Raised when what a conversion writes changes, so that older conversions are made anew."""

_SAMPLE = 1 << 20
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def cache_dir() -> Path:
    """Where converted models are kept: `SLUICE_CACHE`, else `sluice` in `XDG_CACHE_HOME` or ~/.cache."""
    if chosen := os.environ.get("SLUICE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sluice"


def converted(source: Path, report: Report) -> Path:
    """The directory of the model in the GGUF file `source`, converted into the cache on first use.

    A conversion that is incomplete or damaged is made again. Processes that start together convert once: the others
    wait. Raises ModelLoadError where the file is no GGUF model that transformers reads in full.
    """
    if not source.is_file():
        raise ModelLoadError(f"{source}: no such file")
    target = cache_dir() / "gguf" / f"{source.stem}-{_digest(source)[:16]}"
    if _is_intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_cache(target.parent, error) from None
    doing = f"converting {source.name}"
    with _only_one(target.with_name(target.name + ".lock"), report):
        if not _is_intact(target):
            for leftover in target.parent.glob(f"{target.name}.*.partial"):
                shutil.rmtree(leftover)
            partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
            try:
                _convert(source, partial, doing, report)
                _write_manifest(partial)
                if target.exists():
                    shutil.rmtree(target)
                partial.rename(target)
            except OSError as error:
                raise _no_cache(partial, error) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def _no_cache(path: Path, error: OSError) -> ModelLoadError:
    return ModelLoadError(f"{path} cannot be written ({error}); SLUICE_CACHE names another directory")


@contextmanager
def _only_one(path: Path, report: Report) -> Iterator[None]:
    """Hold a lock that other processes wait for; it goes with the process that holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that converts the same model", 0.0)
        lock.acquire()
    except OSError as error:
        raise _no_cache(path, error) from None
    try:
        yield
    finally:
        lock.release()


def _digest(source: Path) -> str:
    with source.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fingerprint(path: Path) -> str:
    """Size, first and last MiB: finds a file that was cut, emptied or replaced, without reading gigabytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        sample = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        sample += file.read(_SAMPLE)
    return f"{size}:{hashlib.sha256(sample).hexdigest()}"


def _write_manifest(directory: Path) -> None:
    files = {path.name: _fingerprint(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")


def _is_intact(directory: Path) -> bool:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return manifest["format"] == FORMAT and all(
            _fingerprint(directory / name) == expected for name, expected in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(source: Path, target: Path, doing: str, report: Report) -> None:
    """Read `source` with transformers and save model, tokenizer and generation defaults to `target`.

    Reading is most of the time: transformers passes over the header again and again, so the passes share one reader.
    """
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    report(doing, 0.0)
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    with _one_reader():
        generation = _inspect(source, target)
        report(doing, 0.2)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
            report(doing, 0.35)
            with (
                tensors_counted(modeling_gguf_pytorch_utils, part(report, doing, 0.7, 0.85)),
                weights_counted(part(report, doing, 0.85, 0.9)),
            ):
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    source.parent, **where, dtype=torch.float32, output_loading_info=True
                )
                model, info = loaded
        except (ValueError, NotImplementedError, KeyError, ImportError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"{source}: transformers cannot read this GGUF file: {error}") from error
    if absent := sorted(info["missing_keys"]):
        raise ModelLoadError(f"{source}: {len(absent)} of the model's weights are not in the file, first {absent[0]}")

    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(target)
    model.generation_config.update(**generation)
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    save_torch_state_dict(_without_ties(model.state_dict()), target, max_shard_size="5GB")
    report(doing, 1.0)


@contextmanager
def _one_reader() -> Iterator[None]:
    """While open, `gguf.GGUFReader` parses a file once and hands out the same reader again."""
    import gguf

    library: Any = gguf
    original = library.GGUFReader
    readers: dict[str, Any] = {}

    def shared(path: str | os.PathLike[str]) -> Any:
        real = os.path.realpath(path)
        if real not in readers:
            readers[real] = original(real)
        return readers[real]

    library.GGUFReader = shared
    try:
        yield
    finally:
        library.GGUFReader = original


def _without_ties(weights: dict[str, Any]) -> dict[str, Any]:
    """One name for each storage, the first, so that tied weights are stored once and tied again when loaded."""
    unique: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, weight in weights.items():
        unique.setdefault((weight.data_ptr(), tuple(weight.shape)), name)
    return {name: weights[name] for name in unique.values()}


def _inspect(source: Path, target: Path) -> dict[str, Any]:
    """What the header says of generation, in transformers' words: the ids that end a text, and sampling defaults.

    Raises ModelLoadError for what transformers would read without complaint and get wrong: one part of several, or
    rotary frequencies scaled in a way that it does not take over. Also where the disk has no room for the result.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise ModelLoadError(f"{source}: is no valid GGUF file ({error})") from error
    values = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")
    }
    architecture = values.get("general.architecture")
    if int(values.get("split.count", 1)) > 1:
        raise ModelLoadError(f"{source}: is one part of {values['split.count']}; merge them with 'gguf-split --merge'")
    scaling = values.get(f"{architecture}.rope.scaling.type", "none")
    scaled = scaling != "none" and architecture != "gpt-oss"
    if scaled or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ModelLoadError(
            f"{source}: has scaled rotary frequencies, which transformers does not read from GGUF files; "
            "serve the model's safetensors checkpoint instead"
        )
    needed = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if (free := shutil.disk_usage(target).free) < needed:
        raise ModelLoadError(
            f"converting {source.name} takes {needed / 2**30:.1f} GiB in {target.parent}, which has {free / 2**30:.1f} "
            "GiB free; SLUICE_CACHE names another directory"
        )
    generation: dict[str, Any] = {name: values[key] for key, name in _SAMPLING.items() if key in values}
    if generation:
        generation["do_sample"] = True  # transformers refuses to save sampling options beside greedy decoding
    if ends := {int(values[key]) for key in _ENDS if key in values}:
        generation["eos_token_id"] = sorted(ends)
    return generation
