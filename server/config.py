"""Every option of `sluice serve`, defined once: a flag, an environment variable and a key of a config file.

`server.flags` reads the flags and the file and words the errors. Everything is checked before a model is looked at:
neither module imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from server.values import MOST_BYTES, Names, Origins, Secrets, Size

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
ENV_PREFIX = "SLUICE_"

_AUTO_SEQS = {"cpu": 32, "cuda": 256}
_AUTO_TOKENS = {"cpu": 512, "cuda": 4096}
_AUTO_STALL_SECONDS = {"cpu": 300.0, "cuda": 60.0}
_LEAST_QUEUED_TOKENS = 2**20
MOST_KV_BUDGET = 2**30


def least_kv_budget(block_size: int) -> int:
    """Tokens: room for the attention sinks and as many recent tokens, in no less than two blocks."""
    return max(8, 2 * block_size)


class UnusableOption(Exception):
    """An option that is well formed but cannot be used here: a file that cannot be read, a package that is missing."""


def _option(
    group: str,
    default: Any,
    text: str,
    *,
    shown: str | None = None,
    expects: str | None = None,
    secret: bool = False,
    **constraints: Any,
) -> Any:
    """A field with what its help and its errors say. `shown` words the default, `expects` what is possible.

    secret: errors do not show what was given.
    """
    extra: JsonDict = {"group": group, "shown": shown, "expects": expects, "secret": secret}
    return Field(default, description=text, json_schema_extra=extra, **constraints)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much one step may hold: `max_num_seqs` sequences, `max_num_batched_tokens` tokens in all."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Objectives:
    """What the operator promises of a request: seconds to its first token, and from token to token on average."""

    ttft_seconds: float = 2.0
    inter_token_seconds: float = 0.2


class Environment(EnvSettingsSource):
    """Variables `SLUICE_...`, without those that Kubernetes sets for a Service that is itself named sluice."""

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        if re.match(r"\w+://", str(values.get("port", ""))):
            del values["port"]
        return values


class ServeSettings(BaseSettings):
    """The options of a server, checked. Attribute `max_num_seqs` is `--max-num-seqs`, `SLUICE_MAX_NUM_SEQS` and
    `max_num_seqs` in a config file. Immutable.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    model: str | None = _option(
        "Model",
        None,
        "Hugging Face id, local directory or .gguf file",
        shown=f"the embedded {EMBEDDED_MODEL}",
        expects="a Hugging Face id, a directory or a .gguf file",
        min_length=1,
    )
    served_model_name: Names = _option(
        "Model",
        [],
        "names under which clients ask for the model",
        shown="the model as given",
        expects="one or more names, none of them empty",
    )
    revision: str | None = _option(
        "Model",
        None,
        "branch, tag or commit on the Hugging Face hub",
        shown="the default branch",
        expects="a branch, tag or commit",
        min_length=1,
    )
    trust_remote_code: bool = _option("Model", False, "run model code that comes with the checkpoint")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "Model", "auto", "type of weights and computation; auto is float32 on a CPU and the checkpoint's own on a GPU"
    )
    max_model_len: int | None = _option(
        "Model", None, "most tokens, prompt and output, of one request", shown="the model's own limit", ge=1
    )

    chat_template: str | None = _option(
        "Chat",
        None,
        "chat template: a file, Jinja itself or the name of one of the model's templates",
        shown="the model's own",
        expects="a file that exists, a Jinja template or the name of one of the model's",
        min_length=1,
    )
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "deepseek", "json"] = _option(
        "Chat", "auto", "how the model writes tool calls; auto is what its chat template shows"
    )

    device: str = _option(
        "Device and memory",
        "auto",
        "where the model runs; auto takes a GPU where there is one",
        expects="auto, cpu, cuda or cuda:N",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
    )
    attention_backend: Literal["auto", "reference", "cpu"] = _option(
        "Device and memory", "auto", "how attention over the cache is computed"
    )
    gpu_memory_utilization: float = _option(
        "Device and memory",
        0.9,
        "share of the GPU memory left after weights and the largest step that the cache takes",
        gt=0,
        le=1,
        allow_inf_nan=False,
    )
    kv_bytes: Size | None = _option(
        "Device and memory",
        None,
        "exact size of the cache in bytes, or as 512MiB or 8GiB",
        shown="from the memory there is",
        expects="a size of 1 byte to 1024TiB, such as 536870912, 512MiB or 8GiB",
        ge=1,
        le=MOST_BYTES,
    )
    kv_blocks: int | None = _option(
        "Device and memory",
        None,
        "exact number of cache blocks for sequences; one more is kept for padding",
        shown="from the memory there is",
        ge=1,
        le=2**31 - 2,  # block ids have 32 bits
    )
    block_size: int = _option("Device and memory", 16, "tokens a cache block holds", ge=1, le=1024)
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = _option(
        "Device and memory",
        "auto",
        "how the cache stores numbers; auto is as --dtype, int8 and fp8 are less exact and about a quarter of float32",
    )
    kv_policy: Literal["none", "h2o", "window"] | None = _option(
        "Device and memory",
        None,
        "lets requests have a budget, which keeps the most attended tokens (h2o) or the newest (window); none does not",
        shown="h2o with --kv-budget, else none",
    )
    kv_budget: int | None = _option(
        "Device and memory",
        None,
        "most tokens of a request that stay in its cache, at the cost of quality; a request may ask for less",
        shown="no limit",
        ge=1,
        le=MOST_KV_BUDGET,
    )
    kv_host_memory: Size = _option(
        "Device and memory",
        0,
        "main memory that takes cached blocks which the pool gives up, as 8GiB, until they are wanted again",
        shown="none",
        expects="a size of up to 1024TiB, such as 512MiB or 8GiB",
        ge=0,
        le=MOST_BYTES,
    )
    enable_prefix_caching: bool = _option(
        "Device and memory", True, "keep the cache of finished requests for prompts that begin the same"
    )
    prefix_sharing: Literal["all", "key"] = _option(
        "Device and memory",
        "all",
        "who shares the cache of a common beginning: everybody (all), or requests under one API key's name (key)",
    )

    max_num_seqs: int | None = _option(
        "Scheduling", None, "most requests computed together", shown="32 on a CPU, 256 on a GPU", ge=1, le=65536
    )
    max_num_batched_tokens: int | None = _option(
        "Scheduling",
        None,
        "most tokens in one step; at least max-num-seqs + block-size",
        shown="512 on a CPU, 4096 on a GPU",
        ge=2,
        le=2**20,
    )
    max_queued_requests: int = _option(
        "Scheduling",
        256,
        "requests that may wait (one more is a 429), and sequences that one may ask for",
        ge=1,
        le=10**6,
    )
    max_queued_tokens: int | None = _option(
        "Scheduling",
        None,
        "prompt tokens that may wait (more are a 429); one prompt of full length always may",
        shown="1048576, or 4 prompts of full length where that is more",
        ge=1,
        le=2**40,
    )
    queue_timeout: float | None = _option(
        "Scheduling",
        None,
        "seconds that a request may wait before it starts (then a 503); a request may ask for less",
        shown="no limit",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    request_timeout: float | None = _option(
        "Scheduling",
        None,
        "seconds that a request may take in all, then it ends with what it has (504 if nothing); it may ask for less",
        shown="no limit",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    stall_timeout: float | None = _option(
        "Scheduling",
        None,
        "seconds that one step may take before /health turns 503; above the longest step of a healthy machine",
        shown="300 on a CPU, 60 on a GPU",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    scheduling_policy: Literal["fcfs", "fair"] = _option(
        "Scheduling",
        "fcfs",
        "who starts next: by priority and arrival (fcfs), or whoever's API key has had the least tokens (fair)",
    )
    admission: Literal["optimistic", "reserve"] = _option(
        "Scheduling",
        "optimistic",
        "blocks a request needs to start: those of its prompt (optimistic) or of its longest answer too (reserve)",
    )
    seed: int | None = _option(
        "Scheduling",
        None,
        "base of the seeds of requests that bring none",
        shown="a new one each start",
        ge=-(2**63),
        le=2**63 - 1,
    )

    host: str = _option("Server", "127.0.0.1", "address to listen on", expects="a host name or address", min_length=1)
    port: int = _option("Server", 8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    drain_delay: float = _option(
        "Server",
        0.0,
        "seconds that new requests are still taken at shutdown, while /ready is 503 already and load balancers leave",
        ge=0,
        le=86400,
        allow_inf_nan=False,
    )
    shutdown_timeout: float = _option(
        "Server", 30.0, "seconds that running requests get to finish at shutdown", ge=0, le=86400, allow_inf_nan=False
    )
    api_key: Secrets = _option(
        "Server",
        [],
        "key that clients must send, or several; other users of the machine see it in ps: prefer --api-key-file",
        shown="no key is asked for",
        expects="one or more keys of 1 to 512 printable ASCII characters without spaces, separated by commas",
        secret=True,
    )
    api_key_file: str | None = _option(
        "Server",
        None,
        "file of keys, one a line as KEY or NAME:KEY (the log shows NAME), read again when it changes",
        shown="none",
        expects="a file",
        min_length=1,
    )
    public_metrics: bool = _option("Metrics", False, "answer /metrics without a key, as /health and /ready always are")
    cors_origin: Origins = _option(
        "Server",
        [],
        "origin of web pages that may call the server, or several, or * for all",
        shown="none",
        expects="one or more origins such as https://example.org, with no path, or *",
    )
    max_body_size: Size = _option(
        "Server",
        8 * 2**20,
        "largest body of a request, in bytes or as 512KiB or 8MiB",
        shown="8MiB",
        expects="a size from 1KiB to 1GiB",
        ge=2**10,
        le=2**30,
    )
    sse_keep_alive: float = _option(
        "Server",
        15.0,
        "seconds of silence after which a stream gets a comment, so that no proxy closes it; 0 sends none",
        ge=0,
        le=3600,
        allow_inf_nan=False,
    )
    slo_ttft: float = _option(
        "Metrics",
        Objectives.ttft_seconds,
        "seconds to the first token within which a request counts as served well (requests_slo_total)",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    slo_inter_token: float = _option(
        "Metrics",
        Objectives.inter_token_seconds,
        "seconds between two of its tokens, on average, within which it does",
        gt=0,
        le=86400,
        allow_inf_nan=False,
    )
    debug_endpoints: bool = _option(
        "Server", False, "answer /debug/kv, which shows who holds which blocks of the cache"
    )
    metrics_compat: Literal["none", "vllm"] = _option(
        "Metrics", "none", "whose names /metrics has too, for dashboards, routers and autoscalers that know only those"
    )
    otlp_endpoint: str | None = _option(
        "Server",
        None,
        "collector that gets a trace of each request over OTLP/HTTP, as http://localhost:4318",
        shown="what the OTEL_EXPORTER_OTLP_ variables say, or none",
        expects="an http:// or https:// URL",
        pattern=r"^https?://[^/\s]+\S*$",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option("Server", "info", "least severity that is logged")
    log_format: Literal["text", "json"] = _option("Server", "text", "lines for people, or one JSON object a line")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, Environment(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1; a file that says `port: yes` is mistaken, not asking for port 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("a truth value is no number")
        return value

    @field_validator("chat_template")
    @classmethod
    def _is_there(cls, value: str | None) -> str | None:
        """What can only be a file must be one, which is said before any weights load."""
        if value is None or "{{" in value or "{%" in value or not re.search(r"[/.]", value):
            return value
        if not Path(value).is_file():
            raise ValueError("there is no such file")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ServeSettings:
        if self.kv_bytes is not None and self.kv_blocks is not None:
            raise PydanticCustomError(
                "together", "--kv-bytes and --kv-blocks both fix the size of the cache: give one of them"
            )
        if self.kv_budget is not None and self.kv_policy == "none":
            raise PydanticCustomError(
                "together", "--kv-policy none keeps the whole cache of a request, --kv-budget a part: give one of them"
            )
        if self.kv_budget is not None and self.kv_budget < self.least_kv_budget:
            raise PydanticCustomError(
                "together",
                "--kv-budget is {budget}, but must be at least {least} with --block-size {size}: raise it, or lower "
                "the other",
                {"budget": self.kv_budget, "least": self.least_kv_budget, "size": self.block_size},
            )
        if self.kv_host_memory and not self.enable_prefix_caching:
            raise PydanticCustomError(
                "together",
                "--kv-host-memory keeps blocks of the prefix cache, which --no-enable-prefix-caching turns off: "
                "give one of them",
            )
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < (least := (self.max_num_seqs or 1) + self.block_size):
            parts = "--block-size + 1" if self.max_num_seqs is None else "--max-num-seqs + --block-size"
            raise PydanticCustomError(
                "together",
                "--max-num-batched-tokens is {tokens}, but must be at least {least} ({parts}), so that a prompt "
                "advances while every other request decodes: raise it, or lower one of the others",
                {"tokens": tokens, "least": least, "parts": parts},
            )
        return self

    @property
    def eviction(self) -> Literal["h2o", "window"] | None:
        """What requests with a budget keep unless they say otherwise; None where no request may have a budget."""
        if self.kv_policy is None:
            return None if self.kv_budget is None else "h2o"
        return None if self.kv_policy == "none" else self.kv_policy

    @property
    def least_kv_budget(self) -> int:
        """The smallest that the server or a request may set, in tokens."""
        return least_kv_budget(self.block_size)

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.slo_ttft, self.slo_inter_token)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names clients use, the first of them in answers."""
        return tuple(self.served_model_name) or (self.model or EMBEDDED_MODEL,)

    def step_limits(self, device_type: str) -> StepLimits:
        """The limits of a step on a device of type "cpu" or "cuda", where "auto" has become a number.

        What the operator gave is kept; what is left to us adapts to it, so that the two always fit together.
        """
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is None:
            seqs = _AUTO_SEQS[device_type] if tokens is None else min(_AUTO_SEQS[device_type], tokens - self.block_size)
        return StepLimits(seqs, tokens or max(_AUTO_TOKENS[device_type], seqs + self.block_size))

    def queued_tokens_limit(self, max_model_len: int) -> int:
        """Prompt tokens that may wait; room for one prompt of full length even where the operator gave less."""
        if self.max_queued_tokens is None:
            return max(_LEAST_QUEUED_TOKENS, 4 * max_model_len)
        return max(self.max_queued_tokens, max_model_len)

    def stall_limit(self, device_type: str) -> float:
        """Seconds after which a step counts as hanging on a device of type "cpu" or "cuda"."""
        return self.stall_timeout or _AUTO_STALL_SECONDS[device_type]
