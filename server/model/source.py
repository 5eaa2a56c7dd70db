"""Finds the files of a model: the embedded one, a directory, a GGUF file or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from server.config import EMBEDDED_MODEL
from server.model.embedded import embedded_model
from server.model.errors import ModelLoadError
from server.model.gguf import converted
from server.model.progress import Report, download_bar, part

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_NEVER = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True, slots=True)
class Source:
    """A model's directory; `root` is what the operator asked for, `revision` the commit of a hub model."""

    path: Path
    root: str
    revision: str | None = None


def find_source(model: str | None, revision: str | None, trust_remote_code: bool, report: Report) -> Source:
    """Bring the files of `model` (None: the embedded one) into one directory. What is local never touches the network.

    Raises ModelLoadError where there is no such model, or it cannot be had.
    """
    path = Path(model).expanduser() if model is not None else None
    is_local = path is None or path.exists() or not _HUB_ID.fullmatch(str(model)) or path.suffix == ".gguf"
    if is_local and revision is not None:
        raise ModelLoadError(f"--revision {revision} applies to models of the Hugging Face hub, not to local ones")
    if path is None:
        return Source(embedded_model(report), EMBEDDED_MODEL)
    if not is_local:
        return _from_hub(str(model), revision, trust_remote_code, report)
    if path.suffix == ".gguf":
        return Source(converted(path, report), str(model))
    return Source(_directory(path), str(model))


def _directory(path: Path) -> Path:
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or directory")
    if not path.is_dir():
        raise ModelLoadError(f"{path}: is neither a directory nor a .gguf file")
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f"; to serve {files[0].name}, name that file" if files else ""
        raise ModelLoadError(f"{path}: has no config.json, so it is no Hugging Face model{hint}")
    return path


def _from_hub(repo: str, revision: str | None, trust_remote_code: bool, report: Report) -> Source:
    """Download what is not in the hub's cache yet; without a network, what is there is used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    doing = f"downloading {repo}"
    report(doing, 0.0)

    def fetch(patterns: list[str]) -> Path:
        bar = download_bar(part(report, doing, 0.0, 1.0))
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_NEVER, tqdm_class=bar)
        )

    try:
        path = fetch([*_SMALL_FILES, "*.safetensors", *(["*.py"] if trust_remote_code else [])])
        if not any(path.glob("*.safetensors")):
            path = fetch(["*.bin"])
    except GatedRepoError:
        raise ModelLoadError(
            f"{repo} is a gated repository: ask for access on its page, then set HF_TOKEN to your token"
        ) from None
    except RepositoryNotFoundError:
        raise ModelLoadError(
            f"{repo} is no directory here and no repository on the Hugging Face hub (a private one needs HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise ModelLoadError(f"{repo} has no revision {revision!r}, which --revision asks for") from None
    except HFValidationError as error:
        raise ModelLoadError(f"{repo} is no directory here and no valid repository name: {error}") from None
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE forbids to ask the hub" if HF_HUB_OFFLINE else "the hub cannot be reached or fails"
        raise ModelLoadError(
            f"{repo} is no directory here, not in the Hugging Face cache, and {reason}: check the name and the "
            "network, or name a local directory or .gguf file"
        ) from error
    except Exception as error:  # the HTTP client's errors share no base with the hub's
        raise ModelLoadError(f"{repo} cannot be downloaded: {type(error).__name__}: {error}") from error
    return Source(path, repo, path.name)
