"""`minigpt import`: a model folder like the one the file was made of, its types, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import contents, error_of, minigpt
from tiny_folder import make_folder

from minigpt.checkpoint.folder import load
from minigpt.checkpoint.gguf import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny", "llama")


def gguf_of(folder: Path, path: Path, kind: str = "f32", dtype: torch.dtype = torch.float32) -> Path:
    """Write a folder's model as GGUF, its weights rounded to `dtype` first."""
    loaded = load(folder)
    write_gguf(
        path, loaded.model.to(dtype).float(), loaded.tokenizer, kind, {"name": "Tiny", "license": "mit"}, {"top_k": 5}
    )  # type: ignore[arg-type]
    return path


def test_the_folder_writes_what_the_model_of_the_file_writes(folder: Path, tmp_path: Path) -> None:
    path = gguf_of(folder, tmp_path / "Tiny.f32.gguf")
    result = minigpt("import", path, "-o", tmp_path / "in")
    assert (result.status, result.out) == (0, "")
    lines = {line.split()[0]: line for line in result.err.splitlines()}
    assert list(lines) == ["file", "tokenizer", "model", "next"]
    assert "llama, 2 layers x 32, context 16" in lines["file"]
    assert "byte-level (qwen2) BPE" in lines["tokenizer"]
    assert "with a chat template" in lines["tokenizer"]
    assert "as float32" in lines["model"]
    for command in (["generate", "Alice", "-t", "0", "-n", "9"], ["tokenizer", "encode", "Alice 12"]):
        found, expected = (minigpt(*command, "-m", model) for model in (tmp_path / "in", folder))
        assert found.out == expected.out != ""
    record = json.loads((tmp_path / "in" / "minigpt.json").read_text(encoding="utf-8"))
    types = {"F32": 20}
    assert record == {"imported": {"file": "Tiny.f32.gguf", "types": types, "name": "Tiny", "license": "mit"}}
    assert load(tmp_path / "in").generation == {"top_k": 5}
    ours = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "in" / "config.json").read_text(encoding="utf-8")) == ours
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


def test_without_a_folder_it_goes_to_runs_and_is_the_newest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gguf_of(folder, tmp_path / "Tiny.f32.gguf")
    result = minigpt("import", "Tiny.f32.gguf", "--json")
    assert result.status == 0
    parameters = load(folder).model.num_parameters()
    vocab_size = load(folder).tokenizer.vocab_size
    assert result.objects == [
        {
            "model": str(Path("runs/Tiny.f32")), "architecture": "llama", "parameters": parameters,
            "dtype": "float32", "types": {"F32": 20}, "vocab_size": vocab_size,
        }
    ]  # fmt: skip
    assert minigpt("generate", "Alice", "-t", "0").status == 0


@pytest.mark.parametrize(
    ("kind", "given", "stored"),
    [
        ("f32", None, torch.float32),
        ("f16", None, torch.float16),
        ("bf16", None, torch.bfloat16),
        ("q8_0", None, torch.float32),
        ("q8_0", "bfloat16", torch.bfloat16),
        ("f32", "float16", torch.float16),
    ],
)
def test_what_is_stored_keeps_every_value_unless_told_otherwise(
    folder: Path, tmp_path: Path, kind: str, given: str | None, stored: torch.dtype
) -> None:
    path = gguf_of(folder, tmp_path / "x.gguf", kind, {"f16": torch.float16, "bf16": torch.bfloat16}.get(kind, stored))
    result = minigpt("import", path, "-o", tmp_path / "in", *(["--dtype", given] if given else []))
    assert result.status == 0, result.err
    loaded = load(tmp_path / "in")
    assert loaded.model.lm_head.weight.dtype == stored
    config = json.loads((tmp_path / "in" / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == str(stored).removeprefix("torch.")


def test_a_model_is_not_replaced_unless_told_so(folder: Path, tmp_path: Path) -> None:
    path = gguf_of(folder, tmp_path / "x.gguf")
    place = make_folder(tmp_path / "taken", "qwen3")
    (place / "last").mkdir()
    (place / "last" / "state.safetensors").touch()
    for name in ("notes.txt", "metrics.jsonl", "model-00001-of-00002.safetensors"):
        (place / name).write_text("x\n", encoding="utf-8")
    before = contents(place)
    message = error_of(minigpt("import", path, "-o", place))
    assert "holds config.json already" in message
    assert "--overwrite" in message
    assert contents(place) == before
    assert minigpt("import", path, "-o", place, "--overwrite").status == 0
    assert load(place).model.config.architecture == "llama"
    assert set(contents(place)) == {*contents(folder), "README.md", "notes.txt"}, "nothing of the older model is left"


def test_a_bad_file_changes_nothing(folder: Path, tmp_path: Path) -> None:
    path = gguf_of(folder, tmp_path / "x.gguf")
    data = path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-100])
    place = make_folder(tmp_path / "taken", "qwen3")
    before = contents(place)
    message = error_of(minigpt("import", tmp_path / "cut.gguf", "-o", place, "--overwrite"))
    assert "cut.gguf is cut short" in message
    assert contents(place) == before
    assert "no such file" in error_of(minigpt("import", tmp_path / "none.gguf", "-o", tmp_path / "new"))
    assert "no GGUF file" in error_of(minigpt("import", folder / "model.safetensors", "-o", tmp_path / "new"))
    with torch.no_grad():
        loaded = load(folder)
        loaded.model.model.norm.weight[0] = 1e6
        write_gguf(tmp_path / "wide.gguf", loaded.model, loaded.tokenizer, "f32")
    message = error_of(minigpt("import", tmp_path / "wide.gguf", "-o", place, "--overwrite", "--dtype", "float16"))
    assert "output_norm.weight holds values that float16 cannot" in message
    assert contents(place) == before
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def test_what_cannot_be_written_is_one_line(folder: Path, tmp_path: Path) -> None:
    path = gguf_of(folder, tmp_path / "x.gguf")
    (tmp_path / "file").touch()
    assert "cannot write" in error_of(minigpt("import", path, "-o", tmp_path / "file" / "in"))
    assert "exists already" in error_of(minigpt("import", path, "-o", tmp_path / "file"))
