"""What the JSON files of a tokenizer say: its alphabet, its parts, and what puts a space before every text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minigpt.errors import ModelFolderError

SPACE = "▁"  # what SentencePiece writes for a space


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table from visible characters to bytes: printable bytes stand for themselves."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def byte_characters() -> str:
    """Return the characters of that table in the order of their bytes."""
    alphabet = byte_alphabet()
    return "".join(sorted(alphabet, key=alphabet.__getitem__))


def components(component: Any) -> Iterator[dict[str, Any]]:
    """Yield a component of tokenizer.json and, where it is a sequence, all inside it."""
    if isinstance(component, dict):
        yield component
        for key in ("normalizers", "pretokenizers", "decoders"):
            for inner in component.get(key) or ():
                yield from components(inner)


def is_byte_level(source: dict[str, Any]) -> bool:
    """Tell the two alphabets apart; any other one is a ValueError."""
    kind = source["model"].get("type")
    if kind not in ("BPE", "Unigram"):
        raise ValueError(f"it is of type {kind}; byte-level BPE and SentencePiece-style tokenizers are supported")
    parts = [part for key in ("normalizer", "pre_tokenizer", "decoder") for part in components(source.get(key))]
    if any(part.get("type") == "ByteLevel" for part in parts):
        return True
    if not any(SPACE in json.dumps(part, ensure_ascii=False) for part in parts):
        raise ValueError("it is neither byte-level nor SentencePiece-style")
    return False


def without_prefix(source: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json without what puts a space before every text."""
    source = json.loads(json.dumps(source))
    if isinstance(source.get("normalizer"), dict):
        if source["normalizer"].get("type") == "Prepend":
            source["normalizer"] = None
        elif "normalizers" in source["normalizer"]:
            kept = [part for part in source["normalizer"]["normalizers"] if part.get("type") != "Prepend"]
            source["normalizer"]["normalizers"] = kept
    for part in components(source.get("pre_tokenizer")):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
        elif part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    return source


def prefix_only_once(source: dict[str, Any]) -> bool:
    """Tell whether a space is put before the first text alone, not after every control token as well."""
    return any(part.get("prepend_scheme") == "first" for part in components(source.get("pre_tokenizer")))


def read_text(path: Path) -> str:
    """Return a text file of a model folder; one that cannot be read, or is no UTF-8, is a ModelFolderError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise ModelFolderError(f"{path}: not UTF-8 (byte {error.start}); damaged, copy it again") from error


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder; one that is missing is empty with ``missing_ok``.

    Whatever else is wrong with it is a ModelFolderError that names the file.
    """
    if missing_ok and not path.exists():
        return {}
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelFolderError(f"{path}: no valid JSON ({reason}); it may be cut short, copy it again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: holds no JSON object; copy it again")
    return value
