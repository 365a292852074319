"""The weights of a model folder: one safetensors file, or several with an index.

All that headers say is checked before any data is read; then one tensor after the other is read, once, into the memory
where it stays, so that loading takes little more than the model itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from minigpt.checkpoint.base import INDEX, SHARD, WEIGHTS
from minigpt.checkpoint.files import (
    StoredTensor,
    json_writer,
    read_json,
    stored_tensors,
    tensor_writer,
    write_json,
    write_together,
)
from minigpt.checkpoint.huggingface import from_stored, known_name, layout, same_form, stored_shape, to_stored
from minigpt.config import ModelConfig
from minigpt.errors import ModelFolderError
from minigpt.model.transformer import GPT

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def load_weights(
    folder: Path, config: ModelConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> GPT:
    """Build the model around the stored weights, all of type `dtype`; None is the type of the stored embedding.

    A weight that is missing, has no place, or another shape or type than it can have is a ModelFolderError.
    """
    where, found = _find(folder)
    stored = _known(found, config)
    model = _empty_model(where, config, len(stored))
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    names = layout(shapes, config)
    expected = {name: stored_shape([shapes[our] for our in ours], ours, config) for name, ours in names.items()}
    _check_fit(where, stored, expected)
    (embedding,) = (name for name, ours in names.items() if ours == ("model.embed_tokens.weight",))
    weights = _read(stored, names, config, torch.device(device), dtype or FLOATS[stored[embedding].dtype])
    assign_weights(model, weights)
    return model


def assign_weights(model: GPT, weights: Mapping[str, Tensor]) -> None:
    """Make tensors under our names the weights of a model, without a copy; a tied output embedding is the input's."""
    tied = model.config.tie_word_embeddings
    embedding = {"lm_head.weight": weights["model.embed_tokens.weight"]} if tied else {}
    model.load_state_dict({**weights, **embedding}, assign=True)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight


def save_weights(
    folder: Path, model: GPT, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None
) -> None:
    """Write a model's weights under the names of `transformers`, and their type into the config.json that is there.

    `dtype` None keeps the model's own. More than `max_shard_bytes` become several files with an index, none of them
    larger unless a single tensor is. A folder that is read at any moment holds the old weights or the new ones, but
    for the instant in which files of the same names are renamed. A full disk is a TrainingError.
    """
    weights = model.state_dict()
    dtype = dtype or model.model.embed_tokens.weight.dtype
    names = layout(weights, model.config)
    sizes = {name: sum(weights[n].numel() for n in ours) * dtype.itemsize for name, ours in names.items()}
    shards = _shards(sizes, max_shard_bytes)
    files = [WEIGHTS] if len(shards) == 1 else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _count(shards)]

    def converted(shard: Sequence[str]) -> dict[str, Tensor]:
        parts = {name: [weights[n].to(dtype) for n in names[name]] for name in shard}
        return {name: to_stored(part, names[name], model.config) for name, part in parts.items()}

    writes = {
        folder / file: tensor_writer(partial(converted, shard), {"format": "pt"})
        for file, shard in zip(files, shards, strict=True)
    }
    if len(shards) > 1:
        places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        writes[folder / INDEX] = json_writer({"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})
    write_together(writes)
    _remove_stale(folder, {path.name for path in writes})
    _note_dtype(folder / "config.json", str(dtype).removeprefix("torch."))


def _count(shards: Sequence[object]) -> range:
    return range(1, len(shards) + 1)


def _shards(sizes: Mapping[str, int], most: int | None) -> list[list[str]]:
    """Share names out over files in their order, a new file wherever the next tensor would be too much."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and most is not None and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _remove_stale(folder: Path, written: set[str]) -> None:
    """Remove the files of the weights that were here before; one file goes before an index, an index before its files.

    As long as the single file is there it is the one that is read.
    """
    for name in (WEIGHTS, INDEX, *sorted(path.name for path in folder.iterdir() if SHARD.fullmatch(path.name))):
        if name not in written:
            (folder / name).unlink(missing_ok=True)


def _note_dtype(path: Path, dtype: str) -> None:
    if path.is_file() and (raw := read_json(path)).get("dtype") != dtype:
        write_json(path, raw | {"dtype": dtype})


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights; one that is missing, damaged or hostile is a ModelFolderError."""
    return sorted({tensor.path for tensor in _find(folder)[1].values()})


def _find(folder: Path) -> tuple[Path, dict[str, StoredTensor]]:
    """Return the file that stands for a folder's weights, and all that their headers say."""
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS, stored_tensors(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return folder / INDEX, _sharded(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    hint = f"; {pickles[0]} is a pickle, which can run code and is never opened" if pickles else ""
    raise ModelFolderError(f"{folder} holds no {WEIGHTS}{hint}")


def _sharded(folder: Path) -> dict[str, StoredTensor]:
    """Read the headers of all files that an index names, each weight where the index says."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelFolderError(f"{folder / INDEX} has no weight_map from weights to files; copy it again")
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        for name, tensor in stored_tensors(_shard(folder, file)).items():
            if name in found:
                raise ModelFolderError(f"{tensor.path} and {found[name].path.name} both have a weight {name!r}")
            found[name] = tensor
    for name, file in places.items():
        if name not in found or found[name].path.name != file:
            raise ModelFolderError(f"{folder / file} has no weight {name!r}, though {INDEX} says so")
    return found


def _shard(folder: Path, file: str) -> Path:
    """Return the path of a file that an index names; it must be one of the folder, and not lead out of it.

    The cache of the Hugging Face hub holds links into the `blobs` beside its `snapshots`: those are followed.
    """
    path, home = folder / file, Path(os.path.realpath(folder))
    if Path(file).name != file or not file.endswith(".safetensors") or re.search(r"[\\/:\0]", file):
        raise ModelFolderError(f"{folder / INDEX} names {file!r}, which is no .safetensors file of this folder")
    homes = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    if not any(Path(os.path.realpath(path)).is_relative_to(place) for place in homes):
        raise ModelFolderError(f"{folder / INDEX} names {file!r}, a link that leads out of this folder; copy the file")
    if not os.path.isfile(path):
        raise ModelFolderError(f"{path}: no such file, though {INDEX} names it; copy it again")
    return path


def _known(found: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Give weights their full names, and leave the constants out that older files carry along."""
    stored: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        full = known_name(name, config)
        if full in stored:
            raise ModelFolderError(f"{tensor.path} has a weight {full!r} twice, with its prefix and without")
        if full is not None:
            stored[full] = tensor
    return stored


def _empty_model(where: Path, config: ModelConfig, weights: int) -> GPT:
    """Build the model without memory for its weights; a size that no file of weights can have is an error."""
    misfit = ModelFolderError(f"{where} does not hold a model of the size that config.json asks for")
    if config.num_hidden_layers > weights:
        raise misfit
    try:
        with torch.device("meta"):
            return GPT(config)
    except (RuntimeError, TypeError) as error:  # more bytes, or a larger number, than PyTorch can count
        raise misfit from error


def _read(
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, Sequence[str]],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Read one tensor after the other, under our names.

    What stays as it is stored is read into the memory where it stays. All else passes through one buffer: memory that
    is taken and given back for each tensor would leave holes.
    """
    direct = {
        name
        for name, ours in names.items()
        if device.type == "cpu"
        and FLOATS[stored[name].dtype] == dtype
        and same_form(len(stored[name].shape), ours, config)
    }
    buffer = torch.empty(max((stored[name].nbytes for name in names.keys() - direct), default=0), dtype=torch.uint8)
    weights: dict[str, Tensor] = {}
    for name, ours in names.items():
        whole = stored[name].read(FLOATS[stored[name].dtype], None if name in direct else buffer)
        for our, part in zip(ours, from_stored(whole, ours, config), strict=True):
            weights[our] = part if name in direct else torch.empty(part.shape, dtype=dtype, device=device).copy_(part)
    return weights


def _check_fit(where: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names, shapes and types of stored weights with those that the model has."""
    missing = sorted(expected.keys() - stored.keys())
    unexpected = sorted(stored.keys() - expected.keys() - {"lm_head.weight"})  # a tied one may be stored all the same
    if missing or unexpected:
        what = f"has no weight {missing[0]!r}" if missing else f"has a weight {unexpected[0]!r} with no place"
        raise ModelFolderError(f"{where} {what} in the model of config.json")
    for name, shape in expected.items():
        found = stored[name]
        if found.shape != shape:
            raise ModelFolderError(
                f"{found.path}: {name} is {list(found.shape)}, but config.json asks for {list(shape)}"
            )
        if found.dtype not in FLOATS:
            raise ModelFolderError(f"{found.path}: {name} has type {found.dtype}; supported are {', '.join(FLOATS)}")
