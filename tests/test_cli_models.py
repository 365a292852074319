"""The model that is meant where none is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minigpt.cli.models import complete_model, resolve


def put(name: str, time: int) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (time, time))


def test_every_kind_of_model_under_runs_is_found_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)
    for folder in ("whole", "parts", ".parts.partial"):
        put(f"runs/{folder}/config.json", 9)
    put("runs/whole/model.safetensors", 1)
    put("runs/parts/model.safetensors.index.json", 3)
    put("runs/adapter/adapter_config.json", 9)
    put("runs/adapter/adapter_model.safetensors", 2)
    put("runs/begun/adapter_config.json", 9)  # before the first evaluation
    put("runs/half/model.safetensors", 9)
    put("runs/.parts.partial/model.safetensors", 9)
    put("runs/file", 9)
    assert complete_model("runs/") == ["runs/parts", "runs/adapter", "runs/whole"]
    assert resolve(None) == Path("runs/parts")
