"""Weights in one file or several: what is saved comes back, no hostile index leads anywhere, and memory stays small."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from variants import VARIANTS, make_model

from minigpt.checkpoint import weights as module
from minigpt.checkpoint.base import INDEX, WEIGHTS, weights_path
from minigpt.checkpoint.files import StoredTensor, read_json, read_tensors, write_json, write_tensors
from minigpt.checkpoint.weights import assign_weights, load_weights, save_weights
from minigpt.config import ModelConfig, preset_config
from minigpt.errors import ModelFolderError, TrainingError
from minigpt.model.size import parameters
from minigpt.model.transformer import GPT

CONFIG = VARIANTS["qwen3"]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
SMALL = 8_000  # bytes; the embedding alone is 7,808 in float32


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A good qwen3 model in several files, for tests to spoil."""
    folder = tmp_path / "model"
    save_weights(folder, make_model(CONFIG), max_shard_bytes=SMALL)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def refusal(folder: Path) -> str:
    """The one line that says why a folder does not load; it is found before any data is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTensor, "read", lambda *_: pytest.fail("data is read before everything is checked"))
        with pytest.raises(ModelFolderError) as caught:
            load_weights(folder, CONFIG)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = read_json(folder / INDEX)
    change(index["weight_map"])
    write_json(folder / INDEX, index)


def shard_of(folder: Path, name: str) -> Path:
    return folder / str(read_json(folder / INDEX)["weight_map"][name])


def change_shard(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors, metadata = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors, metadata)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_shards_come_back_bit_by_bit(config: ModelConfig, tmp_path: Path) -> None:
    model = make_model(config)
    save_weights(tmp_path, model, max_shard_bytes=SMALL)
    assert weights_path(tmp_path) == tmp_path / INDEX
    assert equal(load_weights(tmp_path, config), model)
    index = read_json(tmp_path / INDEX)
    shards = [path for path in sorted(tmp_path.iterdir()) if path.name != INDEX]
    assert [path.name for path in shards] == [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 3
    total, placed = 0, {}
    for path in shards:
        with safetensors.safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
        tensors = read_tensors(path)[0]
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= SMALL or len(tensors) == 1
        total += size
        placed |= dict.fromkeys(tensors, path.name)
    assert index == {"metadata": {"total_size": total}, "weight_map": placed}
    assert total == 4 * parameters(config)


def test_what_fits_is_one_file_without_an_index(tmp_path: Path) -> None:
    model = make_model(CONFIG)
    size = 4 * parameters(CONFIG)
    save_weights(tmp_path, model, max_shard_bytes=size)
    assert names(tmp_path) == [WEIGHTS]
    save_weights(tmp_path, model, max_shard_bytes=size - 1)
    assert len(names(tmp_path)) == 3


def test_a_tensor_that_is_too_large_has_a_file_alone(tmp_path: Path) -> None:
    save_weights(tmp_path, make_model(CONFIG), max_shard_bytes=1)
    places = read_json(tmp_path / INDEX)["weight_map"]
    assert len(set(places.values())) == len(places)
    assert equal(load_weights(tmp_path, CONFIG), make_model(CONFIG))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["qwen3-untied", "gpt2"])
def test_another_type_is_written_and_noted(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, model = VARIANTS[name], make_model(VARIANTS[name])
    write_json(tmp_path / "config.json", {"vocab_size": 61, "dtype": "float32"})
    save_weights(tmp_path, model, dtype)
    assert read_json(tmp_path / "config.json") == {"vocab_size": 61, "dtype": str(dtype).removeprefix("torch.")}
    assert {tensor.dtype for tensor in read_tensors(tmp_path / WEIGHTS)[0].values()} == {dtype}
    kept = load_weights(tmp_path, config)
    for name, weight in model.state_dict().items():
        assert torch.equal(kept.state_dict()[name], weight.to(dtype)), name
    assert equal(load_weights(tmp_path, config, dtype=torch.float32), kept.float())
    assert model.lm_head.weight.dtype == torch.float32  # the model itself stays as it is


@pytest.mark.parametrize("order", [(None, SMALL), (SMALL, None), (SMALL, 3 * SMALL), (3 * SMALL, SMALL)], ids=str)
def test_nothing_of_the_old_files_is_left(order: tuple[int | None, int | None], tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").write_bytes(b"somebody else's")
    for seed, most in enumerate(order):
        save_weights(tmp_path, make_model(CONFIG, seed), max_shard_bytes=most)
        ours = [WEIGHTS] if most is None else [INDEX, *read_json(tmp_path / INDEX)["weight_map"].values()]
        assert names(tmp_path) == sorted({*ours, "other.safetensors"})
    assert equal(load_weights(tmp_path, CONFIG), make_model(CONFIG, 1))


@pytest.mark.parametrize("before", [None, SMALL, 3 * SMALL])
@pytest.mark.parametrize("after", [None, SMALL])
def test_a_full_disk_leaves_the_old_weights(
    before: int | None, after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights(tmp_path, make_model(CONFIG, 0), max_shard_bytes=before)
    found, save = names(tmp_path), safetensors.torch.save_file

    def full(tensors: dict[str, Tensor], filename: Path, metadata: dict[str, str]) -> None:
        save(tensors, filename, metadata)
        if NORM in tensors:  # the last one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(TrainingError, match="No space left on device; what was there before is kept"):
        save_weights(tmp_path, make_model(CONFIG, 1), max_shard_bytes=after)
    assert names(tmp_path) == found
    assert equal(load_weights(tmp_path, CONFIG), make_model(CONFIG, 0))


@pytest.mark.parametrize(("before", "after", "seed"), [(None, SMALL, 0), (SMALL, None, 1), (3 * SMALL, SMALL, 1)])
def test_a_stop_before_the_old_files_are_gone_leaves_one_whole_model(
    before: int | None, after: int | None, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The single file is the one that is read, as long as it is there."""
    save_weights(tmp_path, make_model(CONFIG, 0), max_shard_bytes=before)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_remove_stale", stop)
    with pytest.raises(KeyboardInterrupt):
        save_weights(tmp_path, make_model(CONFIG, 1), max_shard_bytes=after)
    assert equal(load_weights(tmp_path, CONFIG), make_model(CONFIG, seed))


@pytest.mark.parametrize(
    "file",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "a\0.safetensors",
        "pytorch_model.bin",
        "config.json",
        "..",
        ".",
        "",
    ],
    ids=repr,
)
def test_an_index_that_names_what_is_no_file_of_the_folder(file: str, sharded: Path) -> None:
    change_index(sharded, lambda places: places.update({NORM: file}))
    assert f"{sharded / INDEX} names {file!r}, which is no .safetensors file of this folder" in refusal(sharded)


def test_links_that_lead_out_of_the_folder(sharded: Path, tmp_path: Path) -> None:
    shard = shard_of(sharded, NORM)
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    assert f"names {shard.name!r}, a link that leads out of this folder" in refusal(sharded)
    shard.unlink()
    shard.symlink_to(shard.name)  # round in a circle
    assert "no such file" in refusal(sharded)
    shard.unlink()
    (tmp_path / "elsewhere.safetensors").rename(sharded / "renamed")
    shard.symlink_to("renamed")
    assert equal(load_weights(sharded, CONFIG), make_model(CONFIG))
    (tmp_path / "link").symlink_to(sharded)
    assert equal(load_weights(tmp_path / "link", CONFIG), make_model(CONFIG))


def test_the_links_of_a_hub_cache_are_followed(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sharded.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert equal(load_weights(snapshot, CONFIG), make_model(CONFIG))


def test_a_missing_file(sharded: Path) -> None:
    shard = shard_of(sharded, NORM)
    shard.unlink()
    assert refusal(sharded) == f"{shard}: no such file, though {INDEX} names it; copy it again"
    shard.mkdir()
    assert "no such file" in refusal(sharded)


def test_a_cut_file_among_others(sharded: Path) -> None:
    shard = shard_of(sharded, NORM)
    os.truncate(shard, shard.stat().st_size - 1)
    assert f"{shard} is cut short" in refusal(sharded)


def test_a_weight_that_is_not_where_the_index_says(sharded: Path) -> None:
    first, last = shard_of(sharded, EMBEDDING), shard_of(sharded, NORM)
    assert first != last
    change_index(sharded, lambda places: places.update({NORM: first.name}))
    assert refusal(sharded) == f"{first} has no weight {NORM!r}, though {INDEX} says so"
    change_index(sharded, lambda places: places.update({NORM: last.name, "model.extra": last.name}))
    assert refusal(sharded) == f"{last} has no weight 'model.extra', though {INDEX} says so"


def test_a_weight_in_two_files(sharded: Path) -> None:
    first, last = shard_of(sharded, EMBEDDING), shard_of(sharded, NORM)
    change_shard(first, lambda tensors: tensors.update({NORM: torch.ones(32)}))
    assert refusal(sharded) == f"{last} and {first.name} both have a weight {NORM!r}"


def test_weights_that_do_not_fit_the_model(sharded: Path) -> None:
    shard = shard_of(sharded, NORM)
    change_shard(shard, lambda tensors: tensors.update({"model.extra": torch.ones(1)}))  # the index is silent on it
    assert f"{sharded / INDEX} has a weight 'model.extra' with no place" in refusal(sharded)
    change_shard(shard, lambda tensors: (tensors.pop("model.extra"), tensors.update({NORM: torch.ones(31)})))
    assert f"{shard}: {NORM} is [31], but config.json asks for [32]" in refusal(sharded)
    change_shard(shard, lambda tensors: tensors.update({NORM: torch.ones(32).to(torch.int8)}))
    assert f"{shard}: {NORM} has type I8; supported are F32, BF16, F16, F64" in refusal(sharded)
    change_shard(shard, lambda tensors: tensors.pop(NORM))
    change_index(sharded, lambda places: places.pop(NORM))
    assert f"{sharded / INDEX} has no weight {NORM!r}" in refusal(sharded)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map":']
)
def test_an_index_that_is_none(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    assert str(sharded / INDEX) in refusal(sharded)


def test_one_file_goes_before_an_index(sharded: Path) -> None:
    write_json(sharded / INDEX, {"weight_map": {NORM: "../x"}})
    write_tensors(sharded / WEIGHTS, make_model(CONFIG, 5).state_dict() | {"lm_head.weight": torch.ones(61, 32)}, {})
    assert equal(load_weights(sharded, CONFIG), make_model(CONFIG, 5))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied", "gpt2", "qwen2"])
@pytest.mark.parametrize("most", [None, SMALL])
def test_each_weight_is_read_once(name: str, most: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, reads, read = VARIANTS[name], 0, StoredTensor.read

    def count(self: StoredTensor, *arguments: Any) -> Tensor:
        nonlocal reads
        reads += self.nbytes
        return read(self, *arguments)

    save_weights(tmp_path, make_model(config), max_shard_bytes=most)
    monkeypatch.setattr(StoredTensor, "read", count)
    load_weights(tmp_path, config)
    assert reads == 4 * parameters(config)


def test_a_loaded_weight_has_memory_of_its_own(tmp_path: Path) -> None:
    """So that training can write to it, and moving one weight frees what it took."""
    for name in ("gpt2", "qwen3"):
        save_weights(tmp_path, make_model(VARIANTS[name]))
        model = load_weights(tmp_path, VARIANTS[name])
        places = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        assert len(places) == len(list(model.parameters()))
        assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())
        assert all(weight.is_contiguous() for weight in model.parameters())


LOAD = """
import json, sys
from pathlib import Path
import torch
from minigpt.checkpoint.weights import load_weights
from minigpt.config import ModelConfig

def field(path, name):
    with open(path) as file:
        return int(next(line for line in file if line.startswith(name)).split()[1])

torch.set_num_threads(1)
config = ModelConfig(**json.loads(sys.argv[2]))
torch.ones(64, 64) @ torch.ones(64, 64)
memory, read = field("/proc/self/status", "VmRSS"), field("/proc/self/io", "rchar")
dtype = None if sys.argv[3] == "None" else getattr(torch, sys.argv[3])
model = load_weights(Path(sys.argv[1]), config, dtype=dtype)
read = field("/proc/self/io", "rchar") - read
sum(weight.detach().sum() for weight in model.parameters())
print((field("/proc/self/status", "VmHWM") - memory) * 1024, read)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize(
    ("architecture", "stored", "asked", "most"),
    [
        ("llama", torch.bfloat16, None, None),
        ("llama", torch.bfloat16, None, 100_000_000),
        ("gpt2", torch.bfloat16, None, None),
        ("gpt2", torch.float32, None, None),
        ("llama", torch.bfloat16, "float32", None),
        ("gpt2", torch.bfloat16, "float32", 100_000_000),
    ],
    ids=str,
)
def test_half_a_gigabyte_loads_in_little_more_than_its_size(
    architecture: Any, stored: torch.dtype, asked: str | None, most: int | None, tmp_path: Path
) -> None:
    config = preset_config("large", vocab_size=50_000, architecture=architecture)
    layers = 16 if stored == torch.bfloat16 else 6
    config = replace(config, num_hidden_layers=layers)
    with torch.device("meta"):
        model = module.GPT(config)
    model = model.to_empty(device="cpu").to(stored)
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.5)
    save_weights(tmp_path, model, max_shard_bytes=most)
    del model
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 400e6 < size < 650e6
    arguments = [sys.executable, "-c", LOAD, str(tmp_path), json.dumps(vars(config)), str(asked)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    shutil.rmtree(tmp_path)  # pytest would keep it for three runs
    peak, read = map(int, result.stdout.split())
    if asked is None:
        assert peak < 1.2 * size
    else:  # twice as wide, and the largest tensor as it is stored
        assert peak < 1.05 * (2 * size + stored.itemsize * config.vocab_size * config.hidden_size)
    assert read < 1.01 * size


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied"])
def test_assigned_weights_are_the_models_own_without_a_copy(name: str) -> None:
    """For every format that is read: only a tied output embedding stays one with the input's when it is trained."""
    with torch.device("meta"):
        model = GPT(VARIANTS[name])
    weights = dict(make_model(VARIANTS[name], 5).state_dict())
    if name == "qwen3":
        del weights["lm_head.weight"]
    given = set(weights)
    assign_weights(model, weights)
    assert set(weights) == given
    assert all(model.state_dict()[key].data_ptr() == weight.data_ptr() for key, weight in weights.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "qwen3")
