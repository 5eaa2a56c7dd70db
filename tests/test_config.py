from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config import ServeSettings
from server.flags import SettingsError, build_parser, load_settings
from server.values import parse_size


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv)
    return str(caught.value)


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str, name: str = "sluice.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


# Where a value comes from


def test_defaults() -> None:
    settings = load_settings([])
    assert settings.model is None
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.enable_prefix_caching
    assert settings.served_names == ("SmolLM2-135M-Instruct",)


def test_flag_over_variable_over_file_over_default(monkeypatch: pytest.MonkeyPatch, config_file) -> None:
    path = config_file("port = 1001\nblock-size = 8\nmax_num_seqs = 4\n")
    monkeypatch.setenv("SLUICE_PORT", "1002")
    monkeypatch.setenv("SLUICE_BLOCK_SIZE", "32")
    settings = load_settings(["--config", path, "--port", "1003"])
    assert (settings.port, settings.block_size, settings.max_num_seqs, settings.seed) == (1003, 32, 4, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "s.toml",
            'model = "gpt2"\nserved_model_name = ["a", "b"]\nkv_bytes = "1GiB"\nenable_prefix_caching = false\n',
        ),
        (
            "s.yaml",
            "model: gpt2\nserved-model-name: [a, b]\nkv-bytes: 1GiB\nenable-prefix-caching: false\nseed: null\n",
        ),
    ],
)
def test_file_formats(config_file, name: str, text: str) -> None:
    settings = load_settings(["--config", config_file(text, name)])
    assert settings.model == "gpt2"
    assert settings.served_names == ("a", "b")
    assert settings.kv_bytes == 2**30
    assert settings.enable_prefix_caching is False


def test_config_file_named_by_variable(monkeypatch: pytest.MonkeyPatch, config_file) -> None:
    monkeypatch.setenv("SLUICE_CONFIG", config_file("port = 1001\n"))
    assert load_settings([]).port == 1001


def test_every_option_has_flag_variable_and_key(monkeypatch: pytest.MonkeyPatch, config_file) -> None:
    """One value for each option, given in all three ways, means the same."""
    values = {
        "model": "gpt2",
        "served_model_name": "a",
        "revision": "main",
        "trust_remote_code": "true",
        "dtype": "bfloat16",
        "max_model_len": "100",
        "chat_template": "tool_use",
        "tool_format": "hermes",
        "device": "cuda:1",
        "attention_backend": "reference",
        "gpu_memory_utilization": "0.5",
        "kv_bytes": "1GiB",
        "kv_blocks": "7",
        "block_size": "8",
        "kv_cache_dtype": "int8",
        "kv_policy": "h2o",
        "kv_budget": "512",
        "kv_host_memory": "1GiB",
        "debug_endpoints": "true",
        "enable_prefix_caching": "false",
        "prefix_sharing": "key",
        "max_num_seqs": "3",
        "max_num_batched_tokens": "99",
        "max_queued_requests": "5",
        "max_queued_tokens": "6",
        "queue_timeout": "1.5",
        "request_timeout": "60",
        "stall_timeout": "9",
        "scheduling_policy": "fair",
        "admission": "reserve",
        "seed": "-3",
        "host": "0.0.0.0",
        "port": "1",
        "drain_delay": "1.5",
        "shutdown_timeout": "2.5",
        "api_key": "k",
        "api_key_file": "/run/secrets/keys",
        "public_metrics": "true",
        "cors_origin": "https://example.org",
        "max_body_size": "1MiB",
        "sse_keep_alive": "0",
        "slo_ttft": "1.5",
        "slo_inter_token": "0.1",
        "metrics_compat": "vllm",
        "otlp_endpoint": "http://localhost:4318",
        "log_level": "debug",
        "log_format": "json",
    }
    assert values.keys() == ServeSettings.model_fields.keys()
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        by_flag = {
            "model": [value],
            "trust_remote_code": ["--trust-remote-code"],
            "public_metrics": ["--public-metrics"],
            "debug_endpoints": ["--debug-endpoints"],
            "enable_prefix_caching": ["--no-enable-prefix-caching"],
        }.get(name, [flag, value])
        given = load_settings(by_flag)
        assert getattr(given, name) != ServeSettings.model_fields[name].default
        assert load_settings(["--config", config_file(f'{name} = "{value}"')]) == given
        with monkeypatch.context() as patch:
            patch.setenv(f"SLUICE_{name.upper()}", value)
            assert load_settings([]) == given


def test_names_from_flags_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(["m", "--served-model-name", "a", "b"]).served_names == ("a", "b")
    assert load_settings(["m"]).served_names == ("m",)
    monkeypatch.setenv("SLUICE_SERVED_MODEL_NAME", "x, y")
    assert load_settings([]).served_names == ("x", "y")


def test_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_KV_BYTES", "")
    assert load_settings([]).kv_bytes is None


def test_variables_that_kubernetes_sets_for_a_service_named_sluice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_PORT", "tcp://10.3.0.7:8000")
    monkeypatch.setenv("SLUICE_PORT_8000_TCP_ADDR", "10.3.0.7")
    monkeypatch.setenv("SLUICE_SERVICE_HOST", "10.3.0.7")
    assert load_settings([]).port == 8000


def test_lists_from_flags_leave_the_model_alone() -> None:
    settings = load_settings(["--api-key", "a,b", "--api-key", "c", "--cors-origin", "http://localhost:3000", "gpt2"])
    assert [key.get_secret_value() for key in settings.api_key] == ["a", "b", "c"]
    assert settings.cors_origin == ["http://localhost:3000"]
    assert settings.model == "gpt2"


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sesame" not in repr(load_settings(["--api-key", "sesame"]))
    assert "sesame" not in refusal("--api-key", "open sesame")
    assert "--api-key" in refusal("--api-key", ",")
    monkeypatch.setenv("SLUICE_API_KEY", "")
    assert "SLUICE_API_KEY is empty" in refusal()


# What is refused, and how


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--port", "70000"], ["--port", "'70000'", "at most 65535"]),
        (["--port", "http"], ["--port", "'http'", "a whole number"]),
        (["--dtype", "fp8"], ["--dtype", "'fp8'", "auto, float32, bfloat16, float16"]),
        (["--device", "cuda:x"], ["--device", "auto, cpu, cuda or cuda:N"]),
        (["--gpu-memory-utilization", "1.2"], ["--gpu-memory-utilization", "above 0 and at most 1"]),
        (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization"]),
        (["--kv-bytes", "8 parsecs"], ["--kv-bytes", "8GiB"]),
        (["--kv-bytes", "0"], ["--kv-bytes", "1 byte to 1024TiB"]),
        (["--chat-template", "./nowhere.jinja"], ["--chat-template", "a file that exists"]),
        (["--kv-blocks", "0"], ["--kv-blocks", "at least 1"]),
        (["--shutdown-timeout", "inf"], ["--shutdown-timeout", "at most 86400"]),
        (["--cors-origin", "https://example.org/"], ["--cors-origin", "with no path"]),
        (["--max-body-size", "2GiB"], ["--max-body-size", "1GiB"]),
        (["--otlp-endpoint", "localhost:4317"], ["--otlp-endpoint", "http://"]),
        (["--served-model-name", "a,,b"], ["--served-model-name", "none of them empty"]),
        (["--queue-timeout", "0"], ["--queue-timeout", "a number above 0 and at most 86400"]),
        (["--request-timeout", "inf"], ["--request-timeout", "a number above 0"]),
        (["--scheduling-policy", "lottery"], ["--scheduling-policy", "fcfs, fair"]),
        (["--seed", str(2**63)], ["--seed", "at most 9223372036854775807"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--prot", "1"], ["--prot is no option", "did you mean --port?"]),
        (["--no-enable-prefix-cachin"], ["did you mean --no-enable-prefix-caching?"]),
        (["--max-num-seq=4"], ["--max-num-seq is no option", "did you mean --max-num-seqs?"]),
        (["--model", "gpt2"], ["--model is no option", "sluice serve MODEL"]),
        (["a", "b"], ["'b' is one argument too many"]),
        (["--kv-policy", "lru"], ["--kv-policy is 'lru'", "one of none, h2o, window"]),
        (["--kv-bytes", "9" * 400 + ".5GiB"], ["--kv-bytes", "1 byte to 1024TiB"]),
        (["--kv-host-memory", "1025TiB"], ["--kv-host-memory", "up to 1024TiB"]),
        (["--kv-blocks", str(2**31 - 1)], ["--kv-blocks", "at most 2147483646"]),
        (["--kv-budget", "512", "--kv-policy", "none"], ["--kv-budget", "--kv-policy", "one of them"]),
        (["--kv-budget", "31"], ["--kv-budget", "31", "at least 32", "--block-size 16"]),
        (["--kv-budget", "7", "--block-size", "1"], ["--kv-budget", "at least 8"]),
        (["--kv-host-memory", "1GiB", "--no-enable-prefix-caching"], ["--kv-host-memory", "give one of them"]),
        (["--kv-bytes", "1GiB", "--kv-blocks", "9"], ["--kv-bytes", "--kv-blocks", "one of them"]),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "79"], ["--max-num-batched-tokens is 79", "at least 80"]),
        (["--max-num-batched-tokens", "16"], ["--max-num-batched-tokens is 16", "at least 17"]),
    ],
)
def test_bad_flag_is_one_line_that_names_it(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_every_bad_option_is_named_with_where_it_came_from(monkeypatch: pytest.MonkeyPatch, config_file) -> None:
    monkeypatch.setenv("SLUICE_BLOCK_SIZE", "x")
    path = config_file("port = -1\n")
    lines = refusal("--config", path, "--dtype", "int4").splitlines()
    assert len(lines) == 3
    assert any("--block-size is 'x' (from SLUICE_BLOCK_SIZE)" in line for line in lines)
    assert any(f"--port is -1 (in {path})" in line for line in lines)
    assert any(line.startswith("--dtype is 'int4', but") for line in lines)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("s.toml", "max_num_seq = 4", "'max_num_seq' is no option; did you mean max_num_seqs?"),
        ("s.toml", "port = ", "no valid TOML"),
        ("s.yaml", "port: [", "no valid YAML"),
        ("s.yaml", "- port", "'option: value'"),
        ("s.yaml", "port: yes", "--port is True"),
        ("s.yaml", "block-size: 8\nblock_size: 16", "given twice"),
        ("s.json", "{}", "must end in .toml, .yaml or .yml"),
    ],
)
def test_bad_file(config_file, name: str, text: str, part: str) -> None:
    message = refusal("--config", config_file(text, name))
    assert part in message
    assert "\n" not in message


def test_missing_file() -> None:
    assert "--config nowhere.toml: cannot be read" in refusal("--config", "nowhere.toml")


def test_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_MAX_NUM_SEQ", "4")
    assert refusal() == "SLUICE_MAX_NUM_SEQ is no option; did you mean SLUICE_MAX_NUM_SEQS?"


# Values


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("8GiB", 2**33),
        ("8gi", 2**33),
        ("8G", 2**33),
        ("512 MB", 512 * 10**6),
        ("1.5k", 1536),
        ("1.0000000000009765625TiB", 2**40 + 1),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 2", "1.5.2G", "8GiBs"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


@given(
    seqs=st.none() | st.integers(1, 65536),
    tokens=st.none() | st.integers(2, 2**20),
    block_size=st.integers(1, 1024),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_step_limits_fit_together(seqs: int | None, tokens: int | None, block_size: int, device: str) -> None:
    """Whatever is given and whatever is left to us, a prompt advances by a block while all others decode."""
    argv = ["--block-size", str(block_size)]
    argv += [] if seqs is None else ["--max-num-seqs", str(seqs)]
    argv += [] if tokens is None else ["--max-num-batched-tokens", str(tokens)]
    try:
        limits = load_settings(argv).step_limits(device)
    except SettingsError:
        assert tokens is not None
        assert tokens < (seqs or 1) + block_size
    else:
        assert limits.max_num_seqs >= 1
        assert limits.max_num_batched_tokens >= limits.max_num_seqs + block_size
        assert seqs in (None, limits.max_num_seqs)
        assert tokens in (None, limits.max_num_batched_tokens)


def test_step_limits_left_to_us() -> None:
    settings = load_settings([])
    assert (settings.step_limits("cpu").max_num_seqs, settings.step_limits("cpu").max_num_batched_tokens) == (32, 512)
    assert (settings.step_limits("cuda").max_num_seqs, settings.step_limits("cuda").max_num_batched_tokens) == (
        256,
        4096,
    )


@pytest.mark.parametrize(
    ("given", "length", "limit"),
    [([], 8192, 2**20), ([], 2**20, 2**22), (["--max-queued-tokens", "9000"], 8192, 9000),
     (["--max-queued-tokens", "5"], 8192, 8192)],
)  # fmt: skip
def test_one_prompt_of_full_length_always_may_wait(given: list[str], length: int, limit: int) -> None:
    assert load_settings(given).queued_tokens_limit(length) == limit


def test_a_step_may_take_longer_on_a_cpu() -> None:
    assert (load_settings([]).stall_limit("cpu"), load_settings([]).stall_limit("cuda")) == (300, 60)
    assert load_settings(["--stall-timeout", "7"]).stall_limit("cpu") == 7


def test_help_names_every_option_with_its_default() -> None:
    page = " ".join(build_parser("sluice serve").format_help().split())
    for name in ServeSettings.model_fields:
        if name != "model":
            assert f"--{name.replace('_', '-')} " in page.replace(",", " ")
    for shown in ("(default: 127.0.0.1)", "(default: 32 on a CPU, 256 on a GPU)", "(default: on)", "(default: 16)"):
        assert shown in page
