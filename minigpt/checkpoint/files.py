"""Files that are either whole or not there: atomic writes, and safetensors read with suspicion."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from minigpt.errors import ModelFolderError, TrainingError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling, flush it to the disk and rename it over `path`.

    Whenever the machine stops, `path` is the old file or the new one. A full disk is a TrainingError.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except (OSError, safetensors.SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
        raise TrainingError(f"cannot write {path}: {reason}; what was there before is kept") from error
    finally:
        with contextlib.suppress(OSError):  # nothing is left of it after the rename, or no folder to hold it
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, UTF-8 with plain newlines."""
    write_atomically(path, lambda temporary: _write_bytes(temporary, text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A file name that is no UTF-8 holds lone surrogates; as JSON escapes they can be written, and come back the same.
    data = text.encode("utf-8", "backslashreplace")
    write_atomically(path, lambda temporary: _write_bytes(temporary, data))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; anything else is a ModelFolderError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelFolderError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is no valid JSON ({error}); it may be cut short") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object")
    return value


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda p: safetensors.torch.save_file(contiguous, p, metadata=dict(metadata)))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file and its metadata; a missing, cut or hostile one is a ModelFolderError that names it."""
    check_tensor_file(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ModelFolderError(f"{path} is no valid safetensors file ({_first_line(error)})") from error


def check_tensor_file(path: Path) -> None:
    """Compare a safetensors header with the file's size before anything is mapped."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelFolderError(
                    f"{path} is no safetensors file, or cut short (it has {size:,} bytes; its header claims {length:,})"
                )
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelFolderError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{path} is no safetensors file (its header cannot be read)") from error
    if size < expected:
        raise ModelFolderError(f"{path} is cut short (header says {expected:,} bytes, file has {size:,})")


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
