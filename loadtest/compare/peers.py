"""How each server is started, known to be ready, asked, and described.

A peer is installed by the user; its program and its model come from the command line. Every command ends in
`--host H --port P`, which all of them understand.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFReader, LlamaFileType

import server
from server.bench import process
from server.bench.client import BenchError, Client

CACHE_BLOCK = 32
VERSION_SECONDS = 120.0  # some load all of torch to print it
SHIM = Path(__file__).with_name("openvino_server.py")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every server is set to, where it can be set.

    threads: that compute.
    batch: most requests computed together.
    context: most tokens of a request, prompt and output.
    dtype: of weights and key-value cache, by torch's name.
    """

    threads: int
    batch: int
    context: int
    dtype: str
    prefix_caching: bool

    @property
    def cache_blocks(self) -> int:
        """Blocks that hold the cache of a full batch."""
        return self.batch * -(-self.context // CACHE_BLOCK)


@dataclass(frozen=True, slots=True)
class Spec:
    """A server as the command line names it: `name` is KIND or KIND:LABEL, `target` a program or a URL."""

    name: str
    target: str
    model: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def is_url(self) -> bool:
        return self.target.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class Peer:
    """One server, ready to be started as often as there are turns.

    command: empty where the server runs already, at `url`.
    environment: beside our own.
    ready: the path that answers 200 once requests are served.
    version_command, version_pattern: what prints the version, and the group of the output that is it.
    numbers, batch, prefix_cache, threads: what it computes with, in words.
    endless: fields that make it go on after its end-of-text token where it refuses `ignore_eos`.
    done_event: see `Client`.
    note: anything else that a reader of the numbers must know.
    """

    name: str
    numbers: str
    threads: str
    batch: str
    prefix_cache: str
    command: tuple[str, ...] = ()
    url: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"
    version_command: tuple[str, ...] = ()
    version_pattern: str = r"(\d+\.\d\S*)"
    endless: Mapping[str, Any] = field(default_factory=dict)
    done_event: bool = True
    note: str = ""

    @asynccontextmanager
    async def serving(self, show: Callable[[str], None]) -> AsyncIterator[str]:
        """The URL of the server, which is gone afterwards unless it ran before."""
        if self.url:
            yield self.url
            return
        port = process.free_port()
        url = f"http://127.0.0.1:{port}"
        command = [*self.command, "--host", "127.0.0.1", "--port", str(port)]
        async with process.running(command, url, show, self.ready, self.environment):
            yield url

    async def version(self) -> str:
        """As the server's program or, where it runs already, its /version tells it; "unknown" where neither does."""
        if self.url:
            return await _version_at(self.url)
        if not self.version_command:
            return server.__version__
        found = re.search(self.version_pattern, await _output(self.version_command))
        return found[1].strip() if found else "unknown"

    def shown_command(self) -> str:
        """As one would type it, without host and port."""
        if self.url:
            return f"runs already at {self.url}"
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(self.command)])


def sluice(model: str | None, flags: Sequence[str], wanted: Wanted) -> Peer:
    """Our own server."""
    command = [*process.SERVE, *([model] if model else []), "--dtype", wanted.dtype]
    command += ["--max-num-seqs", str(wanted.batch), "--max-model-len", str(wanted.context)]
    command += ["--enable-prefix-caching" if wanted.prefix_caching else "--no-enable-prefix-caching", *flags]
    return Peer(
        "sluice",
        f"{wanted.dtype} weights and cache",
        str(wanted.threads),
        str(wanted.batch),
        _on(wanted.prefix_caching),
        tuple(command),
        environment=_omp(wanted),
        ready="/ready",
    )


def llama_server(spec: Spec, wanted: Wanted) -> Peer:
    """llama.cpp's own server. Its context is split evenly among its slots."""
    model = _model(spec, "a GGUF file")
    cache = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[wanted.dtype]
    command = [spec.target, "--model", model]
    command += ["--threads", str(wanted.threads), "--threads-batch", str(wanted.threads)]
    command += ["--parallel", str(wanted.batch), "--ctx-size", str(wanted.batch * wanted.context)]
    command += ["--cache-type-k", cache, "--cache-type-v", cache]
    command.append("--cache-prompt" if wanted.prefix_caching else "--no-cache-prompt")
    return Peer(
        spec.name,
        f"{_gguf_type(Path(model))} weights, {cache} cache",
        str(wanted.threads),
        str(wanted.batch),
        _on(wanted.prefix_caching) + " (by slot)",
        (*command, *spec.arguments),
        version_command=(spec.target, "--version"),
        version_pattern=r"version: *(.+)",
    )


def vllm(spec: Spec, wanted: Wanted) -> Peer:
    """vLLM. Its CPU build takes one thread for each core that it is bound to."""
    command = [spec.target, "serve", _model(spec, "a directory or a name on the Hub"), "--dtype", wanted.dtype]
    command += ["--max-num-seqs", str(wanted.batch), "--max-model-len", str(wanted.context)]
    command.append("--enable-prefix-caching" if wanted.prefix_caching else "--no-enable-prefix-caching")
    return Peer(
        spec.name,
        f"{wanted.dtype} weights and cache",
        str(wanted.threads),
        str(wanted.batch),
        _on(wanted.prefix_caching),
        (*command, *spec.arguments),
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"0-{wanted.threads - 1}"},
        version_command=(spec.target, "--version"),
    )


def transformers(spec: Spec, wanted: Wanted) -> Peer:
    """`transformers serve`. Without a number of blocks its cache takes most of the machine's memory."""
    command = [spec.target, "serve", _model(spec, "a directory or a name on the Hub"), "--dtype", wanted.dtype]
    command += ["--continuous-batching", "--cb-block-size", str(CACHE_BLOCK)]
    command += ["--cb-num-blocks", str(wanted.cache_blocks)]
    return Peer(
        spec.name,
        f"{wanted.dtype} weights and cache",
        str(wanted.threads),
        f"what a cache of {wanted.cache_blocks} blocks of {CACHE_BLOCK} holds",
        "on (cannot be set)",
        (*command, *spec.arguments),
        environment=_omp(wanted),
        version_command=(spec.target, "version"),
        # No token has the id -1; a configuration replaces the model's own, so it must name the padding too.
        endless={"generation_config": json.dumps({"eos_token_id": -1, "pad_token_id": 0})},
        done_event=False,
    )


def openvino(spec: Spec, wanted: Wanted) -> Peer:
    """OpenVINO GenAI, which has no server: the user's Python runs one of ours over its ContinuousBatchingPipeline."""
    model = _model(spec, "a directory with openvino_model.xml")
    precision = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[wanted.dtype]
    command = [spec.target, str(SHIM), "--model", model, "--threads", str(wanted.threads), "--precision", precision]
    command += ["--max-num-seqs", str(wanted.batch), "--kv-blocks", str(wanted.cache_blocks)]
    if wanted.prefix_caching:
        command.append("--prefix-caching")
    return Peer(
        spec.name,
        f"{_openvino_type(Path(model))} weights, {precision} arithmetic and cache",
        str(wanted.threads),
        str(wanted.batch),
        _on(wanted.prefix_caching),
        (*command, *spec.arguments),
        version_command=(spec.target, "-c", "import openvino_genai; print(openvino_genai.__version__)"),
        note="behind a shim of ours: it has no server of its own",
    )


def running(spec: Spec) -> Peer:
    """A server that runs already: we know nothing of how."""
    unknown = "as it was started"
    return Peer(spec.name, unknown, unknown, unknown, unknown, url=spec.target)


ADAPTERS: dict[str, Callable[[Spec, Wanted], Peer]] = {
    "llama-server": llama_server,
    "vllm": vllm,
    "transformers": transformers,
    "openvino": openvino,
}


def build(spec: Spec, wanted: Wanted) -> Peer:
    """The peer that the command line means. Raises BenchError where its model is missing or cannot be read."""
    return running(spec) if spec.is_url else ADAPTERS[spec.kind](spec, wanted)


def _model(spec: Spec, what: str) -> str:
    if spec.model is None:
        raise BenchError(f"--peer-model {spec.name}=MODEL is missing: {what}")
    return spec.model


def _omp(wanted: Wanted) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(wanted.threads)}


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _gguf_type(path: Path) -> str:
    """What most weights of the file are stored as, as llama.cpp names it: F32, F16, Q4_1, ..."""
    try:
        kind = GGUFReader(path).get_field("general.file_type")
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} is no GGUF file: {error}") from None
    if kind is None:
        return "unnamed"
    return LlamaFileType(int(kind.contents())).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _openvino_type(directory: Path) -> str:
    """The element type that takes most bytes of the exported model's constants."""
    path = directory / "openvino_model.xml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    sizes: Counter[str] = Counter()
    for kind, size in re.findall(r'<data element_type="(\w+)" [^>]*size="(\d+)"', text):
        sizes[kind] += int(size)
    return sizes.most_common(1)[0][0] if sizes else "unnamed"


async def _output(command: Sequence[str]) -> str:
    """All that a short command prints. Raises BenchError where it cannot be run or fails."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise BenchError(f"{command[0]} cannot be run: {error.strerror or error}") from None
    try:
        async with asyncio.timeout(VERSION_SECONDS):
            printed = (await child.communicate())[0].decode("utf-8", "replace").strip()
    except TimeoutError:
        raise BenchError(f"{shlex.join(command)} did not end within {VERSION_SECONDS:.0f} s") from None
    finally:
        await process.end(child)
    if child.returncode:
        raise BenchError(f"{shlex.join(command)} ended with status {child.returncode}:\n{printed[-1000:]}")
    return printed


async def _version_at(url: str) -> str:
    try:
        response = await Client(url, timeout=10.0).request("GET", "/version")
        return str(response.json()["version"]) if response.status == 200 else "unknown"
    except (OSError, TimeoutError, ValueError, LookupError, TypeError):
        return "unknown"  # a server need not have such a route
