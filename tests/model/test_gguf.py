import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import server.model.gguf as conversion
from server.model.embedded import embedded_file
from server.model.errors import ModelLoadError
from server.model.gguf import MANIFEST, cache_dir, converted
from tests.model.tiny_gguf import END, TOKENS, tiny_llama, write_gguf

ROOT = Path(__file__).parent.parent.parent


def silent(doing: str, fraction: float) -> None:
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_llama())


@pytest.mark.parametrize("quantize", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_is_the_one_that_was_written(tmp_path: Path, tied: bool, quantize: object) -> None:
    original = tiny_llama(tied)
    source = write_gguf(tmp_path / "tiny.gguf", original, quantize)
    model = AutoModelForCausalLM.from_pretrained(converted(source, silent))
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(model(tokens).logits, original(tokens).logits, rtol=1e-5, atol=1e-5)
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_tied_weights_are_stored_once(source: Path) -> None:
    weights = load_file(converted(source, silent) / "model.safetensors")
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights


def test_tokenizer_template_and_generation_defaults_come_along(tmp_path: Path) -> None:
    more = {"tokenizer__ggml__eot_token_id": 5, "general__sampling__temp": 0.5, "general__sampling__top_k": 20}
    path = converted(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **more), silent)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("the cat" + END).input_ids
    assert [TOKENS[token] for token in ids] == ["th", "e", "Ġ", "c", "a", "t", END]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [5, len(TOKENS) - 1]
    assert (generation["temperature"], generation["top_k"]) == (0.5, 20)


def test_progress_goes_from_nothing_to_all(source: Path) -> None:
    told: list[tuple[str, float]] = []
    converted(source, lambda doing, fraction: told.append((doing, fraction)))
    assert {doing for doing, _ in told} == {"converting tiny.gguf"}
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(set(fractions)) > 20  # each tensor counts


def test_second_use_is_from_the_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted(source, silent)
    elsewhere = source.with_name("copied.gguf")
    shutil.copy(source, elsewhere)

    def fail(*arguments: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(conversion, "_convert", fail)
    assert converted(source, silent) == first
    with pytest.raises(AssertionError):
        converted(write_gguf(elsewhere, tiny_llama(tied=False)), silent)


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "no manifest", "broken manifest", "older format"])
def test_damaged_cache_is_made_again(source: Path, damage: str) -> None:
    path = converted(source, silent)
    weights, manifest = path / "model.safetensors", path / MANIFEST
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-100])
    elif damage == "changed":
        weights.write_bytes(bytes(len(whole)))
    elif damage == "missing":
        (path / "tokenizer.json").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text('{"format": 1')
    else:
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
    assert converted(source, silent) == path
    assert weights.read_bytes() == whole
    assert (path / "tokenizer.json").exists()


def test_failed_conversion_leaves_nothing_behind(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_write_manifest", lambda directory: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        converted(source, silent)
    assert [path.suffix for path in (cache / "gguf").iterdir()] == [".lock"]
    (cache / "gguf" / f"{next((cache / 'gguf').iterdir()).stem}.left.partial").mkdir()
    monkeypatch.undo()
    monkeypatch.setenv("SLUICE_CACHE", str(cache))
    assert converted(source, silent).exists()
    assert not list((cache / "gguf").glob("*.partial"))


def test_processes_that_start_together_convert_once(source: Path) -> None:
    code = f"""
import pathlib
import server.model.gguf as conversion
convert = conversion._convert
def told(*arguments):
    print("converting")
    convert(*arguments)
conversion._convert = told
print(conversion.converted(pathlib.Path({str(source)!r}), lambda doing, fraction: None))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(len(lines) for lines in outputs) == [1, 1, 2]
    assert len({lines[-1] for lines in outputs}) == 1


# What is refused


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        converted(path, silent)
    return str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.gguf") == f"{tmp_path / 'no.gguf'}: no such file"


def test_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"plain text, and enough of it to be read as a header")
    assert "is no valid GGUF file" in refusal(path)


def test_truncated_file(source: Path) -> None:
    source.write_bytes(source.read_bytes()[:-5000])
    assert str(source) in refusal(source)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"llama__rope__scaling__type": "yarn"}, "scaled rotary frequencies"),
        ({"split__count": 3}, "one part of 3"),
    ],
)
def test_what_would_be_read_wrongly(tmp_path: Path, more: dict[str, object], part: str) -> None:
    assert part in refusal(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **more))


def test_unknown_tokenizer(source: Path) -> None:
    length = b"\x04\0\0\0\0\0\0\0"
    assert source.read_bytes().count(length + b"gpt2") == 1
    source.write_bytes(source.read_bytes().replace(length + b"gpt2", length + b"zzzz"))
    assert "transformers cannot read this GGUF file" in refusal(source)


def test_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    every = model.named_parameters
    monkeypatch.setattr(
        model, "named_parameters", lambda: [item for item in every() if "layers.1.mlp.up_proj" not in item[0]]
    )
    assert "first model.layers.1.mlp.up_proj.weight" in refusal(write_gguf(tmp_path / "tiny.gguf", model))


def test_cache_that_cannot_be_written(source: Path, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    message = refusal(source)
    assert "cannot be written" in message
    assert "SLUICE_CACHE" in message


def test_full_disk_is_found_before_the_work(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert "SLUICE_CACHE names another directory" in refusal(source)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.delenv("SLUICE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/sluice")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "sluice"


# The embedded model


@pytest.mark.embedded
def test_embedded_weights_are_the_values_of_the_file(embedded_path: Path) -> None:
    """Against gguf's own dequantisation; Q and K are stored interleaved and are compared as sets of rows."""
    weights = load_file(embedded_path / "model.safetensors")
    reader = gguf.GGUFReader(embedded_file())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    pairs = {f"{names.get_name(name.rpartition('.')[0])}.weight": name for name in weights}
    assert {tensor.name for tensor in reader.tensors} == pairs.keys()
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and not tensor.name.startswith(("blk.0.", "blk.29.")):
            continue
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        actual = weights[pairs[tensor.name]].numpy()
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            expected, actual = expected[np.lexsort(expected.T)], actual[np.lexsort(actual.T)]
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.embedded
def test_embedded_model_continues_as_known(embedded_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_path)
    tokenizer = AutoTokenizer.from_pretrained(embedded_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert prompt.tolist() == [[504, 3575, 282, 4649, 314]]
    output = model.generate(prompt, max_new_tokens=7, do_sample=False)
    assert tokenizer.decode(output[0, 5:]) == " Paris.\n\nThe answer is"
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
