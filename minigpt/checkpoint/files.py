"""Files that are either whole or not there: atomic writes, and safetensors read with suspicion."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from minigpt.errors import ModelFolderError, TrainingError
from minigpt.text.tokenizer_json import read_json as read_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
# Bytes a number; more types than any weight of ours may have, so that an unknown one is named as such later.
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling, flush it to the disk and rename it over `path`.

    Whenever the machine stops, `path` is the old file or the new one. A full disk is a TrainingError.
    """
    write_together({path: write})


def write_together(writes: Mapping[Path, Callable[[Path], None]]) -> None:
    """Write several files as `write_atomically` does one; they are renamed in this order once all are on the disk.

    A set of files cannot be replaced in one step: what ties them together, such as an index, comes last.
    """
    temporary = {path: path.with_name(f".{path.name}.partial") for path in writes}
    path = next(iter(writes))
    try:
        for path, write in writes.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary[path].touch()
            mode = temporary[path].stat().st_mode  # of any new file; safetensors lets nobody but the owner read its own
            write(temporary[path])
            temporary[path].chmod(mode)
            with open(temporary[path], "rb+") as file:
                os.fsync(file.fileno())
        for path in writes:
            os.replace(temporary[path], path)
        for folder in {path.parent for path in writes}:
            _flush_folder(folder)
    except (OSError, safetensors.SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
        raise TrainingError(f"cannot write {path}: {reason}; what was there before is kept") from error
    finally:
        for left in temporary.values():
            with contextlib.suppress(OSError):  # nothing is left of it after the rename, or no folder to hold it
                left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, UTF-8 with plain newlines."""
    write_atomically(path, lambda temporary: _write_bytes(temporary, text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, json_writer(value))


def json_writer(value: Any) -> Callable[[Path], None]:
    """Return what writes a value as JSON, for `write_together`."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A file name that is no UTF-8 holds lone surrogates; as JSON escapes they can be written, and come back the same.
    data = text.encode("utf-8", "backslashreplace")
    return lambda temporary: _write_bytes(temporary, data)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically."""
    write_atomically(path, tensor_writer(lambda: tensors, metadata))


def tensor_writer(make: Callable[[], Mapping[str, Tensor]], metadata: Mapping[str, str]) -> Callable[[Path], None]:
    """Return what writes the tensors that `make` gives when their turn comes, for `write_together`."""

    def write(temporary: Path) -> None:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in make().items()}
        safetensors.torch.save_file(contiguous, temporary, metadata=dict(metadata))

    return write


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file and its metadata; a missing, cut or hostile one is a ModelFolderError that names it."""
    stored_tensors(path)  # before anything is mapped
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ModelFolderError(f"{path} is no valid safetensors file ({_first_line(error)})") from error


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says of one tensor, before any of its data is read."""

    path: Path
    dtype: str  # as it is spelled there: F32, BF16, …
    shape: tuple[int, ...]
    start: int  # its first byte in the file
    end: int

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return self.end - self.start

    def read(self, dtype: torch.dtype, buffer: Tensor | None = None) -> Tensor:
        """Read the data, into memory of its own or into the beginning of `buffer` (uint8).

        `dtype` is what the spelled type stands for.
        """
        data = torch.empty(self.nbytes, dtype=torch.uint8) if buffer is None else buffer[: self.nbytes]
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                count = file.readinto(data.numpy().data)
        except OSError as error:
            raise ModelFolderError(f"{self.path}: {error.strerror}") from error
        if count != self.nbytes:
            raise ModelFolderError(f"{self.path} was cut short while it was read; copy it again")
        return data.view(dtype).view(self.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read what a safetensors file holds from its header, compared with the file's size.

    A missing, cut or hostile file is a ModelFolderError that names it.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelFolderError(
                    f"{path} is no safetensors file, or cut short (it has {size:,} bytes; its header claims {length:,})"
                )
            header = json.loads(file.read(length))
        first = 8 + length
        tensors = {name: _stored(path, entry, first) for name, entry in header.items() if name != "__metadata__"}
        expected = _covered(tensors.values(), first)
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelFolderError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{path} is no safetensors file (its header cannot be read)") from error
    if size < expected:
        raise ModelFolderError(f"{path} is cut short (header says {expected:,} bytes, file has {size:,})")
    if size > expected:
        raise ModelFolderError(f"{path} is too long (header says {expected:,} bytes, file has {size:,})")
    return tensors


def _covered(tensors: Iterable[StoredTensor], first: int) -> int:
    """Return where the data ends; ValueError where tensors overlap or leave a gap, which the format forbids."""
    end = first
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end:
            raise ValueError("an overlap or a gap")
        end = tensor.end
    return end


def _stored(path: Path, entry: Any, first: int) -> StoredTensor:
    """Read one entry of a header; ValueError or TypeError where it is none."""
    start, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not (isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in (start, end, *shape))):
        raise ValueError("a type, a shape or an offset is something else")
    width = SIZES.get(dtype)
    if end < start or (width is not None and end - start != width * math.prod(shape)):
        raise ValueError("offsets do not fit the shape")
    return StoredTensor(path, dtype, shape, first + start, first + end)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _flush_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
