"""`sluice plan` from the command line: its numbers, its table, its JSON, its errors."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.checkpoint import Checkpoint, count_weights
from server.plan import main

CONFIGS = Path(__file__).parents[1] / "docs" / "configs"
GIB = 2**30
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def plan(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    assert main([*map(str, argv), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def planned(result: dict[str, Any]) -> dict[str, Any]:
    """The choice of cache that the rest of a plan is about."""
    (choice,) = (choice for choice in result["caches"] if choice["planned"])
    return dict(choice)


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """What the command says as it fails, whoever of it and its parser refuses."""
    status: object
    try:
        status = main([*map(str, argv)])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_llama_3_70b(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(
        capsys,
        CONFIGS / "llama-3-70b.json",
        "--memory",
        "80GiB",
        "--utilization",
        1,
        "--weights-bytes",
        0,
        "--seq-len",
        8192,
    )
    assert result["bytes_per_token"] == 327_680
    assert planned(result)["fits"] == [{"tokens": 8192, "bytes": 5 * GIB // 2, "sequences": 31}]  # 32 less the trash
    by_kind = {row["kind"]: row for row in result["sharing"]}
    assert by_kind["MHA"]["bytes_per_token"] * 8192 == 20 * GIB
    assert by_kind["MQA"]["bytes_per_token"] == 327_680 // 8
    assert [kind for kind, row in by_kind.items() if row["own"]] == ["GQA"]


def test_gemma_2_27b(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, CONFIGS / "gemma-2-27b.json", "--memory", "80GiB", "--utilization", 1, "--weights-bytes", 0)
    by_kind = {row["kind"]: row for row in result["sharing"]}
    assert (by_kind["GQA"]["bytes_per_token"], by_kind["MHA"]["bytes_per_token"]) == (376_832, 753_664)
    assert by_kind["MHA"]["tokens"] == pytest.approx(114_000, rel=0.001)
    assert [(group["layers"], group["window"]) for group in result["layers"]] == [(23, 4096), (23, None)]
    assert any(
        "23 of 46 layers look back 4,096" in note and f"a token further back takes {376_832 // 2:,} B" in note
        for note in result["notes"]
    )


def test_windows_bound_what_their_layers_take(capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma-2-27B: 23 layers keep all of a sequence, 23 at most 4,096 tokens and the part of a block before them."""
    argv = (CONFIGS / "gemma-2-27b.json", "--max-model-len", 65536, "--seq-len", 4096, 65536, "--weights-bytes", 0)
    result = plan(capsys, *argv, "--memory", "10GiB", "--utilization", 1)
    half = 376_832 // 2 * 16  # a block of half of the layers
    assert (result["bytes_per_block"], result["layers_per_block"]) == (half, 23)
    free = 10 * GIB // half - 1
    assert (result["blocks"], result["tokens"]) == (free, free // 2 * 16)
    short, long = planned(result)["fits"]
    assert (short["bytes"], short["sequences"]) == (2 * 256 * half, free // (2 * 256))
    assert (long["bytes"], long["sequences"]) == ((4096 + 257) * half, free // (4096 + 257))
    assert planned(result)["longest"] == (free - 257) * 16
    (own,) = (row for row in result["sharing"] if row["own"])
    assert own["longest_bytes"] == long["bytes"]
    assert [choice["budget"] for choice in result["caches"]] == [None, None]
    assert any("cannot have a budget" in note for note in result["notes"])


def test_a_token_further_back_takes_what_the_layers_without_a_window_store(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = ["full_attention", "full_attention", "sliding_attention"] * 2
    config.write_text(json.dumps({**TINY, "num_hidden_layers": 6, "layer_types": types, "sliding_window": 64}))
    result = plan(capsys, config, "--weights-bytes", 0)
    assert result["layers_per_block"] == 2
    assert any(f"further back takes {4 * 2 * (8 + 8) * 2:,} B" in note for note in result["notes"])


def test_where_every_layer_has_a_window_any_length_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps({**TINY, "model_type": "mistral", "sliding_window": 64}))
    result = plan(capsys, config, "--weights-bytes", 0, "--memory", "1MiB")
    assert planned(result)["longest"] is None
    assert any("2 of 2 layers look back 64 tokens and keep no more than that" in note for note in result["notes"])
    cramped = plan(capsys, config, "--weights-bytes", 0, "--memory", "10KiB")
    assert planned(cramped)["longest"] == cramped["blocks"] * 16 == 48


def test_layers_of_different_widths_keep_everything_and_the_plan_says_so(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = ["sliding_attention", "full_attention"]
    wide = {**TINY, "layer_types": types, "sliding_window": 64, "head_dim": 8, "global_head_dim": 16}
    config.write_text(json.dumps(wide))
    result = plan(capsys, config, "--weights-bytes", 0, "--memory", "1MiB", "--seq-len", 512)
    assert planned(result)["fits"][0]["bytes"] == 512 * 2 * 2 * (8 + 16) * 2
    assert any("1 of 2 layers look back 64 tokens only, but the pool keeps" in note for note in result["notes"])


def test_every_way_to_keep_the_cache_of_llama_3_70b(capsys: pytest.CaptureFixture[str]) -> None:
    """80 layers of 8 heads: a bfloat16 head takes 512 B, an int8 one 256 and two scales, and a score 4 more."""
    argv = (CONFIGS / "llama-3-70b.json", "--weights-bytes", 0, "--memory", "80GiB", "--utilization", 1)
    result = plan(capsys, *argv, "--seq-len", 8192, "--kv-budget", 2048, 1024)
    assert [(choice["dtypes"], choice["budget"]) for choice in result["caches"]] == [
        (dtypes, budget) for budget in (None, 1024, 2048) for dtypes in (["bfloat16"], ["int8", "fp8"])
    ]
    heads = [choice["bytes_per_token"] / 640 for choice in result["caches"]]
    assert heads == [512, 264, 516, 268, 516, 268]
    for choice in result["caches"]:
        held = {None: 8192, 1024: 1280, 2048: 2560}[choice["budget"]]
        blocks = 80 * GIB // (16 * choice["bytes_per_token"]) - 1
        assert choice["fits"][0]["sequences"] == blocks // (held // 16)
        assert choice["longest"] == (blocks * 16 if choice["budget"] is None else None)
    assert planned(result)["dtypes"] == ["bfloat16"]
    assert planned(plan(capsys, *argv, "--kv-cache-dtype", "fp8"))["dtypes"] == ["int8", "fp8"]


def test_a_cache_type_of_its_own_is_what_the_plan_is_about(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (config, "--weights-bytes", 0, "--memory", "1MiB", "--dtype", "float32", "--lengths", "16,17")
    whole, small = (plan(capsys, *argv, "--kv-cache-dtype", dtype) for dtype in ("auto", "int8"))
    assert whole == plan(capsys, *argv, "--kv-cache-dtype", "float32")
    assert (whole["bytes_per_token"], small["bytes_per_token"]) == (2 * 2 * 16 * 4, 2 * 2 * (16 + 8))
    assert (small["dtype"], small["cache_dtype"], small["weight_bytes"]) == ("float32", "int8", 0)
    assert small["waste"][0]["allocated_bytes"] == 2 * 512 * small["bytes_per_token"]
    assert small["tokens"] > 2 * whole["tokens"]
    assert [choice["dtypes"] for choice in whole["caches"]] == [
        ["float32"],
        ["bfloat16", "float16"],
        ["int8", "fp8"],
    ]
    wider = plan(capsys, config, "--weights-bytes", 0, "--kv-cache-dtype", "float32")
    assert [choice["dtypes"] for choice in wider["caches"]] == [["float32"], ["bfloat16"], ["int8", "fp8"]]
    assert planned(wider)["dtypes"] == ["float32"]


def test_a_budget_is_shown_where_the_lengths_exceed_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def budgets(*argv: object) -> set[int]:
        result = plan(capsys, config, "--weights-bytes", 0, "--max-model-len", 4096, *argv)
        return {choice["budget"] for choice in result["caches"]} - {None}

    assert budgets("--seq-len", 1280) == set()
    assert budgets("--seq-len", 1281) == {1024}
    assert budgets("--seq-len", 100, "--kv-budget", 50) == {50}


def test_host_memory_is_counted_in_tokens_of_prefixes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (config, "--weights-bytes", 0, "--memory", "1MiB")
    assert plan(capsys, *argv)["host"] is None
    result = plan(capsys, *argv, "--kv-host-memory", "10KiB")
    assert result["host"] == {"bytes": 10240, "blocks": 5, "tokens": 80}  # 2,048 B a block
    assert main([*map(str, argv), "--kv-host-memory", "10KiB"]) == 0
    assert "Host     10.00 KiB of main memory: 5 blocks, 80 tokens" in capsys.readouterr().out


def test_deepseek_v3(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, CONFIGS / "deepseek-v3.json", "--weights-bytes", "1GiB")
    assert result["bytes_per_token"] == 70_272
    assert [(row["kind"], row["own"]) for row in result["sharing"]] == [
        ("MHA", False),
        ("GQA", False),
        ("MLA", True),
        ("MQA", False),
    ]
    assert result["notes"] == []


def test_weights_are_counted_as_the_model_that_is_loaded(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for tied in (False, True):
        given = {**TINY, "tie_word_embeddings": tied}
        config.write_text(json.dumps(given))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.bfloat16)
        storage = {p.data_ptr(): p.nbytes for p in model.parameters()}
        for dtype, factor in (("auto", 1), ("float32", 2)):
            result = plan(capsys, config, "--dtype", dtype)
            assert result["weight_bytes"] == factor * sum(storage.values())
            assert result["weight_source"] == "the architecture"


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A file with a header and no contents worth reading."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_weights_of_unknown_and_quantised_models_come_from_the_files(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {**TINY, "model_type": "never-heard-of"}
    quantised = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    for given, reason in ((unknown, "does not know"), (quantised, "quantised")):
        config.write_text(json.dumps(given))
        message = refusal(capsys, config)
        assert reason in message
        assert "--weights-bytes" in message
    write_safetensors(tmp_path / "a.safetensors", {"w": ("F32", [4, 5], 80), "q": ("F8_E4M3", [7], 7)})
    write_safetensors(tmp_path / "b.safetensors", {"v": ("BF16", [3], 6)})
    assert plan(capsys, tmp_path)["weight_bytes"] == 20 * 2 + 7 + 3 * 2  # floats as bfloat16, the rest as stored
    assert plan(capsys, tmp_path, "--dtype", "float32")["weight_bytes"] == 20 * 4 + 7 + 3 * 4
    index = {"weight_map": {"w": "a.safetensors", "u": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "--weights-bytes" in refusal(capsys, tmp_path)


def test_header_sum_is_what_transformers_saves(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**TINY, "tie_word_embeddings": True}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32).save_pretrained(tmp_path)
    unknown = Checkpoint("x", {**given, "model_type": "never-heard-of"}, tmp_path)
    known = Checkpoint("x", given, None)
    stored, built = count_weights(unknown, "bfloat16"), count_weights(known, "bfloat16")
    assert (stored.nbytes, stored.parameters) == (built.nbytes, built.parameters)


def test_waste_of_given_lengths(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("[16, 17\n 100]")
    given = plan(capsys, config, "--weights-bytes", 0, "--memory", "1MiB", "--lengths", "16,17,100")
    assert given == plan(capsys, config, "--weights-bytes", 0, "--memory", "1MiB", "--lengths", file)
    reserved, pages = given["waste"]
    per_token = given["bytes_per_token"]
    assert per_token == 2 * 2 * (8 + 8) * 2
    assert reserved["allocated_bytes"] == 3 * 512 * per_token
    assert pages["allocated_bytes"] == (16 + 32 + 112) * per_token
    assert reserved["used_bytes"] == pages["used_bytes"] == 133 * per_token
    assert pages["at_once"] > reserved["at_once"]


def test_the_table_says_what_the_json_says(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [config, "--weights-bytes", "2KiB", "--memory", "64MiB", "--lengths", "5,40,300", "--seq-len", "512", "100"]
    result = plan(capsys, *argv)
    assert main([*map(str, argv)]) == 0
    text = capsys.readouterr().out
    for number in (result["bytes_per_token"], result["blocks"], result["tokens"]):
        assert f"{number:,}" in text
    rows = [line.split() for line in text.splitlines()]
    for choice in result["caches"]:
        cells = [f"{fit['sequences']:,}" for fit in choice["fits"]]
        name = [*(["*"] if choice["planned"] else []), *" or ".join(choice["dtypes"]).split()]
        assert [*name, f"{choice['bytes_per_token']:,}", f"{choice['longest']:,}", *cells] in rows
    assert [row[0] for row in rows if row[-1:] and row[-1] == f"{result['tokens']:,}"] == ["*"]
    for waste in result["waste"]:
        assert any(f"{waste['waste_ratio']:.1%}" in row and row[-1] == f"{waste['at_once']:,}" for row in rows)
    for table in text.split("\n\n")[1:]:
        assert len({len(line) for line in table.splitlines()[1:]}) == 1, "columns line up on the right"


def test_weights_larger_than_the_memory(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, config, "--weights-bytes", "2GiB", "--memory", "1GiB")
    assert (result["cache_bytes"], result["tokens"]) == (0, 0)
    assert {fit["sequences"] for choice in result["caches"] for fit in choice["fits"]} == {0}
    assert {choice["longest"] for choice in result["caches"]} == {0}
    assert any(note.startswith("the weights alone do not fit the memory: give") for note in result["notes"])


def test_lengths_to_fit_by_default_end_at_the_longest(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lengths(*argv: object) -> list[int]:
        result = plan(capsys, config, "--weights-bytes", 0, *argv)
        return [fit["tokens"] for fit in planned(result)["fits"]]

    assert lengths() == [512]
    assert lengths("--max-model-len", 4096) == [1024, 4096]
    assert lengths("--max-model-len", 5000) == [1024, 4096, 5000]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seq-len", "513"], "513 tokens are more than the model's 512: raise --max-model-len"),
        (["--lengths", "5,600"], "600 tokens are more than the model's 512"),
        (["--lengths", "no-such-file"], "no list of lengths, nor a file"),
        (["--memory", "1025TiB"], "'1025TiB' is more than 1024TiB"),
        (["--kv-host-memory", "9" * 400 + ".5GiB"], "--kv-host-memory"),
        (["--lengths", "5,0"], "'0' is no whole number of at least 1"),
        (["--lengths", ","], "has no lengths"),
        (["--memory", "5XB"], "--memory: 'XB' is no unit of size"),
        (["--utilization", "1.5"], "no share above 0, at most 1"),
        (["--utilization", "nan"], "no share above 0, at most 1"),
        (["--block-size", "0"], "--block-size"),
        (["--dtype", "int3"], "--dtype"),
        (["--dtype", "int8"], "--dtype"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype"),
        (["--kv-budget", "0"], "--kv-budget"),
        (["--kv-budget", "64", "31"], "--kv-budget must be at least 32 tokens with --block-size 16"),
        (["--kv-host-memory", "1XB"], "--kv-host-memory"),
    ],
)
def test_bad_options_are_named(config: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refusal(capsys, config, "--weights-bytes", "1KiB", *argv)


def test_a_config_that_is_silent_on_its_length_needs_the_flag(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(json.dumps({key: value for key, value in TINY.items() if key != "max_position_embeddings"}))
    argv = (config, "--weights-bytes", 0, "--lengths", "5,9")
    assert "give --max-model-len" in refusal(capsys, *argv)
    assert plan(capsys, *argv, "--max-model-len", 64)["waste"][0]["allocated_bytes"] == 2 * 64 * 128


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no model config"),
        ('{"model_type": "mamba"}', "no attention heads"),
        (json.dumps({**TINY, "vocab_size": "many"}), "transformers refuses the config"),
    ],
)
def test_bad_configs_are_explained(
    config: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    config.write_text(content)
    assert message in refusal(capsys, config)


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no ./nowhere" in refusal(capsys, "./nowhere")
    assert "config.json: No such file" in refusal(capsys, tmp_path)


def test_a_name_that_is_neither_here_nor_on_the_hub(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(capsys, "someone/never-made-this")
    assert "someone/never-made-this is no file or directory" in message
    assert "give a path to a config.json" in message
    assert "no file or directory" in refusal(capsys, "not a repo id//")


@pytest.mark.embedded
def test_the_embedded_model_is_planned_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    result = plan(capsys, "--dtype", "float32", "--memory", "8GiB")
    assert result["bytes_per_token"] == 46_080
    assert result["weight_parameters"] == 134_515_008


def test_planning_with_given_weights_imports_no_torch(config: Path) -> None:
    code = (
        "import sys; from server.plan import main; "
        f"assert main([{str(config)!r}, '--weights-bytes', '1GiB']) == 0; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
