import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

import server.model.loader as loader
from server.config import ServeSettings
from server.model.errors import ModelLoadError
from server.model.loader import LoadedModel, find_device, load_model
from tests.model.tiny_gguf import tiny_llama, write_gguf
from tests.tiny_checkpoint import MAX_MODEL_LEN, save_tiny_checkpoint

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "tiny")


def load(model: Path | None, **settings: object) -> LoadedModel:
    return load_model(
        ServeSettings.model_validate({"model": str(model), "device": "cpu", **settings}), lambda doing, fraction: None
    )


def refusal(model: Path, **settings: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(model, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(path: Path, **changes: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def test_model_is_the_one_transformers_loads(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    tokens = torch.arange(20)[None]
    expected = AutoModelForCausalLM.from_pretrained(checkpoint)(tokens).logits
    torch.testing.assert_close(loaded.model(tokens).logits, expected)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.root, loaded.revision, loaded.device) == (str(checkpoint), None, torch.device("cpu"))
    assert loaded.max_model_len == MAX_MODEL_LEN
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("häuser"), True) == "häuser"
    assert loaded.weight_bytes >= sum(4 * parameter.numel() for parameter in loaded.model.parameters())


def test_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    original = tiny_llama()
    source = write_gguf(tmp_path / "tiny.gguf", original)
    loaded = load(source)
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(loaded.model(tokens).logits, original(tokens).logits, rtol=1e-5, atol=1e-5)
    assert loaded.root == str(source)


@pytest.mark.embedded
def test_embedded_model(embedded_path: Path) -> None:
    loaded = load_model(ServeSettings(device="cpu"), lambda doing, fraction: None)
    assert (loaded.root, loaded.max_model_len, loaded.eos_token_ids) == ("SmolLM2-135M-Instruct", 8192, {2})
    weights = 134_515_008  # with the embedding, which is the head too, counted once
    assert 4 * weights <= loaded.weight_bytes < 4 * weights + 4096


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_dtype(checkpoint: Path, name: str) -> None:
    loaded = load(checkpoint, dtype=name)
    assert loaded.dtype == loaded.model.lm_head.weight.dtype == getattr(torch, name)


def test_dtype_auto_is_float32_on_a_cpu_and_the_checkpoints_on_a_gpu(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", dtype="bfloat16")
    assert load(checkpoint).dtype == torch.float32
    config = AutoConfig.from_pretrained(checkpoint)
    assert loader._dtype("auto", config, torch.device("cuda")) == torch.bfloat16


def test_progress_is_told_for_each_weight(checkpoint: Path) -> None:
    told: list[tuple[str, float]] = []
    load_model(
        ServeSettings(model=str(checkpoint), device="cpu"), lambda doing, fraction: told.append((doing, fraction))
    )
    assert list(dict.fromkeys(doing for doing, _ in told)) == ["loading the tokenizer", "loading the weights"]
    fractions = [fraction for doing, fraction in told if doing == "loading the weights"]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert len(set(fractions)) > 10


def test_a_local_model_never_touches_the_network(checkpoint: Path) -> None:
    code = """
import socket, sys
def refuse(*arguments):
    raise SystemExit("touched the network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from server.config import ServeSettings
from server.model.loader import load_model
print(load_model(ServeSettings(model=sys.argv[1], device="cpu"), lambda doing, fraction: None).max_model_len)
"""
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{MAX_MODEL_LEN}\n", done.stderr


# What the files say


def test_shorter_and_longer_context(checkpoint: Path) -> None:
    assert load(checkpoint, max_model_len=100).max_model_len == 100
    assert (
        refusal(checkpoint, max_model_len=MAX_MODEL_LEN + 1)
        == "--max-model-len is 513, but the model's limit is 512 tokens"
    )


def test_every_end_of_text_the_files_name(checkpoint: Path) -> None:
    edit(checkpoint / "generation_config.json", eos_token_id=[7, 9, 10_000])
    edit(checkpoint / "config.json", eos_token_id=8)
    assert load(checkpoint).eos_token_ids == {7, 8, 9, 256}  # 256 is the tokenizer's; 10,000 is no token


def test_no_end_of_text_is_taken_from_transformers_defaults(checkpoint: Path) -> None:
    """LlamaConfig's class says 2, which here is an ordinary letter."""
    config = json.loads((checkpoint / "config.json").read_text())
    del config["eos_token_id"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "generation_config.json").unlink()
    assert load(checkpoint).eos_token_ids == {256}


def test_sampling_defaults(checkpoint: Path) -> None:
    assert load(checkpoint).default_sampling == {}
    edit(checkpoint / "generation_config.json", do_sample=True, temperature=0.6, top_k=20, top_p=None, max_new_tokens=9)
    assert load(checkpoint).default_sampling == {"temperature": 0.6, "top_k": 20}


# What is refused


def test_encoders(tmp_path: Path) -> None:
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    }
    BertLMHeadModel(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    assert "(bert) is an encoder; only decoder-only models" in refusal(tmp_path / "bert")
    t5 = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "(t5) is an encoder and a decoder; only decoder-only models" in refusal(tmp_path / "t5")


def test_model_of_another_kind(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", model_type="vit")
    assert "(vit) is no model that continues text" in refusal(checkpoint)


def test_unknown_architecture(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", model_type="from-the-future")
    assert "config.json cannot be used" in refusal(checkpoint)


def test_code_that_comes_with_the_model(checkpoint: Path) -> None:
    """Nothing runs unasked, and no question is put to a terminal."""
    (checkpoint / "evil.py").write_text("raise SystemExit('ran')")
    edit(checkpoint / "config.json", model_type="own", auto_map={"AutoConfig": "evil.Config"})
    assert "if you trust it, give --trust-remote-code" in refusal(checkpoint)


def test_missing_tokenizer(checkpoint: Path) -> None:
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer" in refusal(checkpoint)


def test_missing_weights_are_not_made_up(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", num_hidden_layers=3)
    message = refusal(checkpoint)
    assert "first model.layers.2." in message
    assert "would be random" in message


def test_weights_of_another_shape(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", intermediate_size=48)
    assert "its weights cannot be loaded" in refusal(checkpoint)


def test_cut_weights(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "its weights cannot be loaded" in refusal(checkpoint)


def test_weights_larger_than_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_memory", lambda device: 1000)
    message = refusal(checkpoint)
    assert "cpu has 1,000 bytes free" in message
    assert "--dtype bfloat16" in message


def test_unknown_context_length(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    config = loaded.model.config
    del config.max_position_embeddings
    with pytest.raises(ModelLoadError, match="--max-model-len"):
        loader._max_model_len(config, None)
    assert loader._max_model_len(config, 77) == 77


@pytest.mark.parametrize(
    ("gpus", "name", "expected"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, "cpu", "cpu"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert str(find_device(name)) == expected


def test_absent_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match=r"--device is cuda:0, but .*; --device cpu or auto works here"):
        find_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelLoadError, match="--device is cuda:2, but the GPUs here are cuda:0 to cuda:1"):
        find_device("cuda:2")
