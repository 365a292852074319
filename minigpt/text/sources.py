"""Files, folders, JSON lines, parquet and standard input into documents.

A document is a stream of pieces, so a text file larger than memory is read like any other. Text files hold one document
each unless ``<|endoftext|>`` or a separator of the caller's stands between several; JSON lines and parquet hold one a
row. What happens to bytes that are no text is told in ``decoding``.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minigpt.errors import ConfigError, DataError
from minigpt.text.decoding import ReadCounts, decode_blocks, normalise_newlines, read_blocks, reading
from minigpt.text.pieces import Piece, document_pieces
from minigpt.text.records import json_texts, parquet_texts

# What is taken from a folder; a file that is named is read whatever its suffix.
# fmt: off
_TEXT_SUFFIXES = frozenset((
    ".txt", ".md", ".markdown", ".rst", ".org", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".log", ".srt",
    ".toml", ".yaml", ".yml", ".ini", ".cfg", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cs", ".js",
    ".mjs", ".ts", ".jsx", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".rb", ".php", ".pl", ".lua", ".jl", ".r",
    ".hs", ".ml", ".ex", ".swift", ".sql", ".css", ".scss", ".sh", ".bash", ".zsh", ".ps1", ".vim", ".el", ".lisp",
    ".clj", ".f90", ".asm", ".proto",
))
# fmt: on
_JSON_SUFFIXES = frozenset((".jsonl", ".ndjson", ".json", ".jsonlines"))
_PARQUET_SUFFIX = ".parquet"
_COMPRESSED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    r"""How documents are read: the field of a JSON line or a parquet row, what else ends a document in text files
    (``\n`` and ``\t`` may be written as two characters), and the least characters a document must have.

    Errors: ConfigError for an empty field or separator or a negative length.
    """

    field: str = "text"
    separator: str | None = None
    min_chars: int = 0

    def __post_init__(self) -> None:
        if not self.field:
            raise ConfigError("field: an empty name; give the name of the field that holds the text")
        if self.separator == "":
            raise ConfigError(r"separator: empty; give the text that stands between documents, for example '\n\n'")
        if self.min_chars < 0:
            raise ConfigError(f"min_chars: {self.min_chars} is below 0; give 0 or more")


def find_files(sources: Sequence[str | Path], kinds: Collection[str] = ("text", "json", "parquet")) -> list[Path]:
    """Return the files that sources name: files, folders (walked, sorted), and glob patterns; each file once.

    From a folder come files of these kinds only, by their suffix. Errors: DataError for a source that does not exist
    (with the nearest name beside it) or holds no such file.
    """
    found: dict[Path, Path] = {}
    for source in sources:
        for path in _expand(source, kinds):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _expand(source: str | Path, kinds: Collection[str]) -> list[Path]:
    path = Path(source)
    if not str(source):
        raise DataError("source: an empty name; give a file or a folder")
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _walk(path, kinds)
        if not files:
            if "text" not in kinds:
                raise DataError(f"{path}: no records in this folder; looked for .jsonl, .json and .parquet files")
            raise DataError(f"{path}: no text files in this folder; looked for .txt, .md, .jsonl, .parquet and others")
        return files
    if path.exists():
        raise DataError(f"{path}: not a file that can be read twice; pipe it to standard input instead")
    if glob.has_magic(str(source)):
        matches = [Path(match) for match in sorted(glob.glob(str(source), recursive=True))]
        files = [file for match in matches for file in (_walk(match, kinds) if match.is_dir() else [match])]
        if not files:
            raise DataError(f"{source}: no file matches this pattern; check the folder and the suffix")
        return files
    raise DataError(f"{path}: no such file{_nearest(path)}")


def _nearest(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (there is no folder {folder})"
    with reading(folder):
        names = os.listdir(folder)
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (there is {folder / close[0]})" if close else "; check the name and the folder"


def _walk(folder: Path, kinds: Collection[str]) -> list[Path]:
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and kind_of_file(path) in kinds and path.is_file():
                files.append(path)
    return files


def kind_of_file(path: Path) -> str | None:
    """Return "text", "json" or "parquet" by the suffix under ``.gz`` or ``.zst``, or None for one that is unknown."""
    suffix = path.suffix.lower()
    if suffix == _PARQUET_SUFFIX:
        return "parquet"
    if suffix in _COMPRESSED_SUFFIXES:
        suffix = Path(path.stem).suffix.lower()
    if suffix in _JSON_SUFFIXES:
        return "json"
    return "text" if suffix in _TEXT_SUFFIXES else None


def read_pieces(files: Sequence[Path], options: SourceOptions, *, counts: ReadCounts | None = None) -> Iterator[Piece]:
    """Yield the pieces of all documents, file by file; ``counts`` is counted up on the way.

    A document that is empty is left out. Errors: DataError with file and line (or row) for what cannot be read, is not
    text, or lacks the field.
    """
    counts = counts if counts is not None else ReadCounts()
    separator = None if options.separator is None else _unescape(options.separator)
    for path in files:
        kind = kind_of_file(path)
        if kind == "parquet":
            rows = parquet_texts(path, options.field, counts)
        elif kind == "json":
            rows = json_texts(path, options.field, counts)
        else:
            chunks = decode_blocks(read_blocks(path), path, counts)
            yield from document_pieces(normalise_newlines(chunks), str(path), separator)
            continue
        for where, text in rows:
            yield from document_pieces([text], where)


def _unescape(separator: str) -> str:
    for written, meant in ((r"\r", "\r"), (r"\n", "\n"), (r"\t", "\t")):
        separator = separator.replace(written, meant)
    return separator.replace("\r\n", "\n").replace("\r", "\n")
