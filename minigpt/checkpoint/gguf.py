"""GGUF, the one-file format of llama.cpp: read as a model of ours, and written from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, quantize, size_label
from gguf.constants import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGMLQuantizationType, GGUFValueType, LlamaFileType
from numpy.typing import NDArray
from torch import Tensor

from minigpt.checkpoint.files import write_atomically
from minigpt.checkpoint.gguf_config import ROPE_FACTORS, config_from_gguf, config_to_gguf, rope_factors, rounded
from minigpt.checkpoint.gguf_file import CHUNK_VALUES, GGUFFile
from minigpt.checkpoint.gguf_tokenizer import tokenizer_from_gguf, tokenizer_to_gguf
from minigpt.checkpoint.gguf_weights import Place, check_places, places, read_weights, stored_weight
from minigpt.checkpoint.weights import assign_weights
from minigpt.config import GGUFType, ModelConfig, SamplingConfig
from minigpt.errors import ConfigError
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer

Progress = Callable[[float], None]  # is told the share that is done

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32,
    "f16": LlamaFileType.MOSTLY_F16,
    "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
}
# Defaults of sampling as SamplingConfig and as llama.cpp call them.
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "penalty_repeat",
}
# In four bits these cost a small model most: they are a large share of it, and nothing after them mends their errors.
_EMBEDDINGS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class GGUFModel:
    """A GGUF file that has been checked: the model's shape, its tokenizer, and weights that are still on the disk."""

    file: GGUFFile
    config: ModelConfig
    tokenizer: Tokenizer
    places: dict[str, Place]

    def type_counts(self) -> dict[str, int]:
        """Return how many tensors are of which type, the most frequent first."""
        kinds = [tensor.type for tensor in self.file.tensors.values()]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind))}

    def generation(self) -> dict[str, Any]:
        """Return the settings of SamplingConfig that the file names; what cannot be one is left out."""
        found = {ours: self.file.metadata.get(f"general.sampling.{name}") for ours, name in _SAMPLING.items()}
        return {name: rounded(value) for name, value in found.items() if value is not None and _possible(name, value)}

    def exact_dtype(self) -> torch.dtype:
        """Return the narrowest type that keeps every value: the file's own where it is one, else float32.

        Norms in float32 beside matrices of 16 bits are looked at: mostly they were widened and fit again.
        """
        kinds = {self.file.tensors[name].type for name in self.places}
        narrow = kinds - {"F32"}
        if len(narrow) != 1 or not narrow <= FLOATS.keys():
            return torch.float32
        dtype = FLOATS[narrow.pop()]
        for name in self.places:
            if self.file.tensors[name].type == "F32":
                values = self.file.read(name, torch.float32)
                if not torch.equal(values.to(dtype).float(), values):
                    return torch.float32
        return dtype

    def build(self, dtype: torch.dtype, progress: Progress = lambda share: None) -> GPT:
        """Read the weights, one tensor at a time, into a model in evaluation mode."""
        with torch.device("meta"):
            model = GPT(self.config)
        weights: dict[str, Tensor] = {}
        total = sum(len(place.ours) for place in self.places.values())
        for name, weight in read_weights(self.file, self.places, dtype):
            weights[name] = weight
            progress(len(weights) / total)
        assign_weights(model, weights)
        return model.eval()


def _possible(name: str, value: Any) -> bool:
    try:
        SamplingConfig(**{name: value})
    except ConfigError:
        return False
    return True


def read_gguf(path: Path) -> GGUFModel:
    """Open a GGUF file and check all of it but the values; what is wrong or not supported is a ModelFolderError."""
    file = GGUFFile(path)
    config = config_from_gguf(file)
    expected = check_places(file, config)
    tokenizer = tokenizer_from_gguf(file, config.vocab_size, config.max_position_embeddings)
    return GGUFModel(file, config, tokenizer, expected)


def write_gguf(
    path: Path,
    model: GPT,
    tokenizer: Tokenizer,
    kind: GGUFType,
    about: Mapping[str, str] | None = None,
    generation: Mapping[str, Any] | None = None,
    progress: Progress = lambda share: None,
) -> list[str]:
    """Write a model atomically as GGUF; return the matrices whose rows do not fit blocks and stay float16.

    `about` goes into `general.*` (name, license), `generation` are defaults of sampling. Norms, biases and learned
    positions are float32, and in `q4_0` the embeddings are `q8_0`. Errors: ConfigError or ModelFolderError for a model
    that llama.cpp would not compute alike, before anything is written; TrainingError when the file cannot be written.
    """
    config = model.config
    name, shape = config_to_gguf(config)
    values = shape | tokenizer_to_gguf(tokenizer, config.vocab_size)
    total = model.num_parameters()
    general = dict(about or {}) | {"type": "model", "size_label": size_label(total, total, 0, 0)}
    values |= {f"general.{key}": value for key, value in general.items()}
    for key, value in (generation or {}).items():
        values[f"general.sampling.{_SAMPLING[key]}"] = value if key == "top_k" else float(value)
    values["general.file_type"] = int(_FILE_TYPES[kind])
    if kind in ("q8_0", "q4_0"):
        values["general.quantization_version"] = GGML_QUANT_VERSION
    layout = places(config)
    types = {name: _tensor_type(name, place.shape, kind) for name, place in layout.items()}
    writing = _Writing(name, values, model, layout, types)
    write_atomically(path, lambda temporary: writing.write(temporary, progress))
    wanted = GGMLQuantizationType[kind.upper()]
    return [name for name, found in types.items() if found == GGMLQuantizationType.F16 != wanted]


def _tensor_type(name: str, shape: tuple[int, ...], kind: GGUFType) -> GGMLQuantizationType:
    if len(shape) == 1 or name == "position_embd.weight":
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[kind.upper()]
    if wanted == GGMLQuantizationType.Q4_0 and name in _EMBEDDINGS:
        wanted = GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16 if shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted


@dataclass(frozen=True)
class _Writing:
    """What is written: the architecture's name, the metadata, and the tensors with their types."""

    architecture: str
    values: dict[str, Any]
    model: GPT
    layout: dict[str, Place]
    types: dict[str, GGMLQuantizationType]

    def write(self, path: Path, progress: Progress) -> None:
        writer = GGUFWriter(path, self.architecture)
        factors = rope_factors(self.model.config)
        try:
            for key, value in self.values.items():
                writer.add_key_value(key, value, _value_type(value))
            if factors is not None:
                _announce(writer, ROPE_FACTORS, tuple(factors.shape), GGMLQuantizationType.F32)
            for name, place in self.layout.items():
                _announce(writer, name, place.shape, self.types[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors.numpy())
            weights = self.model.state_dict()
            for count, (name, place) in enumerate(self.layout.items(), start=1):
                weight = stored_weight(place, weights.__getitem__)
                writer.write_tensor_data(encode(name, weight, self.types[name]))
                progress(count / len(self.layout))
        finally:
            writer.close()


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, list):
        return GGUFValueType.ARRAY
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    return kinds[type(value)]


def encode(name: str, weight: Tensor, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return a weight's bytes in a type of GGUF; one that float16 cannot hold is a ConfigError."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    flat = weight.detach().cpu().contiguous().view(-1)
    result = np.empty(flat.numel() // block * block_bytes, dtype=np.uint8)
    for start in range(0, flat.numel(), CHUNK_VALUES):
        part = flat[start : start + CHUNK_VALUES].float().numpy()
        if kind == GGMLQuantizationType.F16 and np.abs(part).max() > np.finfo(np.float16).max:
            raise ConfigError(f"{name} holds values beyond float16; choose --type bf16 or f32")
        # Blocks do not know of rows: as one long row they are done at once, not 16 at a time.
        raw = quantize(part.reshape(1, -1), kind).view(np.uint8).reshape(-1)
        place = start // block * block_bytes
        result[place : place + raw.size] = raw
    return result
