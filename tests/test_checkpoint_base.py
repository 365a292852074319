"""What a model folder consists of: one list for all that write, replace or look for models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_folder import make_folder

from minigpt.checkpoint.base import PARTS, holds_model, is_part, parts_in, section, weights_path
from minigpt.checkpoint.folder import load, save_weights

SHARDS = ("model-00001-of-00012.safetensors", "model-00012-of-00012.safetensors", "model-00001-of-000002.safetensors")


def test_parts_are_listed_in_the_order_in_which_they_go(tmp_path: Path) -> None:
    for name in (*reversed(PARTS), *SHARDS, "README.md", "notes.txt", "model.gguf", "xmodel-1-of-2.safetensors"):
        (tmp_path / name).touch()
    assert parts_in(tmp_path) == [*PARTS, *sorted(SHARDS)]
    assert parts_in(tmp_path / "none") == parts_in(tmp_path / "README.md") == []


def test_all_that_a_model_is_saved_as_is_a_part(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    names = {path.name for path in folder.iterdir()}
    save_weights(folder, load(folder).model, max_shard_bytes=20_000)
    names |= {path.name for path in folder.iterdir()}
    assert len(names) > 8
    assert [name for name in names if not is_part(name)] == []


def test_weights_in_one_file_in_several_and_of_an_adapter(tmp_path: Path) -> None:
    assert weights_path(tmp_path) is None
    for name in ("model.safetensors.index.json", "model.safetensors"):
        (tmp_path / name).touch()
        assert weights_path(tmp_path) == tmp_path / name, "as long as there is a single file it is the one that is read"
        assert not holds_model(tmp_path), "weights alone are no model"
    (tmp_path / "adapter_config.json").touch()
    assert weights_path(tmp_path) is None, "not the adapter's"
    assert holds_model(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    assert weights_path(tmp_path) == tmp_path / "adapter_model.safetensors"


@pytest.mark.parametrize("record", [{}, {"a": 1}, {"a": {"b": [1]}}, {"a": None}])
def test_a_section_of_a_record_that_is_not_there_is_empty(record: dict[str, object]) -> None:
    assert section(record, "a", "b") == {}
    assert section({"a": {"b": {"c": 1}}}, "a", "b") == {"c": 1}


def test_looking_for_models_loads_nothing_heavy() -> None:
    heavy = "{'numpy', 'safetensors', 'tokenizers', 'torch'}"
    script = f"import sys, minigpt.checkpoint.base\nprint(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
