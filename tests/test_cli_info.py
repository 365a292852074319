"""`minigpt info`: sizes of folders and presets, and how a model was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import error_of, minigpt
from tiny_folder import make_folder

from minigpt.checkpoint.folder import load
from minigpt.config import PRESETS, preset_config
from minigpt.model import size
from minigpt.model.transformer import GPT

RECORD: dict[str, Any] = {
    "data": {"named": "alice.txt"},
    "corpus": {"train_tokens": 59131},
    "plan": {"train": {"compute_dtype": "bfloat16", "optimizer": "adamw"}},
    "result": {"trained_tokens": 500_000, "bits_per_byte": 2.1875, "best_step": 9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), record=RECORD)


def test_a_folder_tells_its_size_and_origin(folder: Path) -> None:
    model = load(folder).model
    (found,) = minigpt("info", folder, "--json").objects
    assert found["model"] == str(folder)
    assert found["parameters"] == model.num_parameters()
    assert found["embedding_parameters"] == model.model.embed_tokens.weight.numel()
    assert (found["architecture"], found["context"]) == ("qwen3", 16)
    assert found["data"] == "alice.txt"
    assert found["bits_per_byte"] == 2.1875
    assert found["tokens_per_parameter"] == pytest.approx(500_000 / model.num_parameters())
    assert found["training_bytes"]["8"] == size.training_bytes(model.config, 8, 16, "bfloat16", "adamw")
    assert found["cache_bytes_per_1000_tokens"] == 2 * 2 * 2 * 8 * 1000 * 4  # k and v, layers, heads, width
    result = minigpt("info", "-m", folder)
    assert result.err == ""
    for text in (f"{model.num_parameters():,}", "alice.txt, 59.1k tokens", "2.188 bits/byte", "(bfloat16, adamw)"):
        assert text in result.out


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "transformer-2017"])
def test_a_preset_needs_no_folder(architecture: Any) -> None:
    options = ("--preset", "nano", "--vocab-size", 500, "--arch", architecture, "--context", 64)
    (found,) = minigpt("info", *options, "--json").objects
    config = preset_config("nano", vocab_size=500, architecture=architecture, context=64)
    assert found["parameters"] == GPT(config).num_parameters()
    assert found["flops_per_token"]["train"] == 3 * found["flops_per_token"]["generate"]
    assert "tokens_per_parameter" not in found
    assert f"preset nano: {architecture}" in minigpt("info", *options).out


def test_every_preset_can_be_shown() -> None:
    parameters = [minigpt("info", "--preset", name, "--json").objects[0]["parameters"] for name in PRESETS]
    assert parameters == sorted(parameters)


@pytest.mark.parametrize(
    "record", [{}, {"result": None}, {"data": [1], "result": {"trained_tokens": "many", "bits_per_byte": None}}]
)
def test_a_record_may_lack_anything(tmp_path: Path, record: dict[str, Any]) -> None:
    folder = make_folder(tmp_path / "model", record=record)
    (found,) = minigpt("info", folder, "--json").objects
    assert "bits_per_byte" not in found
    assert minigpt("info", folder).status == 0
    (folder / "minigpt.json").unlink()
    assert minigpt("info", folder).status == 0


def test_a_longer_context_takes_more(folder: Path) -> None:
    short, long = (minigpt("info", folder, "--context", n, "--json").objects[0] for n in (8, 16))
    assert short["training_bytes"]["32"] < long["training_bytes"]["32"]
    assert short["parameters"] == long["parameters"]


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such model folder" in error_of(minigpt("info", tmp_path / "nothing"))
    assert "holds no model" in error_of(minigpt("info", tmp_path))
    assert "give one of them" in error_of(minigpt("info", folder, "-m", folder), 2)
    assert "choose one" in error_of(minigpt("info", folder, "--preset", "nano"), 2)
    assert "--preset" in error_of(minigpt("info", folder, "--vocab-size", 500), 2)
    assert "huge" in error_of(minigpt("info", "--preset", "huge"), 2)
    assert "vocab_size" in error_of(minigpt("info", "--preset", "nano", "--vocab-size", 0))
    broken = make_folder(tmp_path / "broken")
    (broken / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")
    assert "bert" in error_of(minigpt("info", broken))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)
    assert "no model under runs/" in error_of(minigpt("info"))
