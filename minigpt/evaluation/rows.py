"""The rows of a task: a file of JSON objects, a folder of such files, or a zip archive that holds them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from minigpt.errors import DataError
from minigpt.text.decoding import BLOCK_BYTES, ReadCounts, reading, replace_surrogates
from minigpt.text.records import json_records, kind_of, quoted
from minigpt.text.sources import find_files

T = TypeVar("T")
_COMPRESSED = (".gz", ".zst")


class BadRow(Exception):
    """What is wrong with a row, without where it stands."""


@dataclass(frozen=True)
class RowFile:
    """One file of rows, by itself or as a member of a zip archive."""

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        """The file's name without folder and suffix."""
        path = PurePosixPath(self.path.name if self.member is None else self.member)
        return path.with_suffix("").stem if path.suffix in _COMPRESSED else path.stem

    def read(self, parse: Callable[[Mapping[str, Any]], T], expected: str, limit: int | None) -> list[T]:
        """Parse the rows, at most `limit`; what is wrong with one is a DataError that names file and line.

        `expected` says what rows look like. Errors: DataError too for no row at all, and for what cannot be read.
        """
        where_from = self.path if self.member is None else self.path / self.member
        blocks = None if self.member is None else _member_blocks(self.path, self.member)
        found = []
        for where, record in islice(json_records(where_from, ReadCounts(), blocks=blocks), limit):
            try:
                found.append(parse(record))
            except BadRow as bad:
                raise DataError(f"{where}: {bad}; {expected}") from bad
        if not found:
            raise DataError(f"{where_from}: no rows in it; {expected}")
        return found


def row_files(path: Path) -> list[RowFile]:
    """Return the files of rows that a path names, sorted: itself, those in a folder, or those in a zip archive.

    Errors: DataError where there is none.
    """
    if path.suffix.lower() != ".zip" or not path.is_file():
        return [RowFile(file) for file in find_files([path], kinds=("json",))]
    with _unzipping(path), zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
    members = [name for name in names if name.endswith(".jsonl") and not _is_hidden(PurePosixPath(name))]
    if not members:
        raise DataError(f"{path}: no .jsonl file in this archive; give one that holds rows")
    return [RowFile(path, name) for name in members]


def field_of(record: Mapping[str, Any], field: str) -> Any:
    """Return what a field holds; a BadRow where there is none."""
    if field not in record:
        raise BadRow(f'no field "{field}" (found: {quoted(list(record))})')
    return record[field]


def text_of(record: Mapping[str, Any], field: str) -> str:
    """Return a field's text; one that is missing, empty or something else is a BadRow."""
    return checked_text(field_of(record, field), f'field "{field}"')


def checked_text(value: Any, what: str) -> str:
    """Return text that is not blank, lone surrogates replaced; all else is a BadRow."""
    if not isinstance(value, str):
        raise BadRow(f"{what} holds {kind_of(value)}, not text")
    if not value.strip():
        raise BadRow(f"{what} is empty")
    return replace_surrogates(value)


def _is_hidden(path: PurePosixPath) -> bool:
    """Tell what file managers leave in archives from what people put there."""
    return path.name.startswith(".") or "__MACOSX" in path.parts


def _member_blocks(path: Path, member: str) -> Iterator[bytes]:
    with _unzipping(path), zipfile.ZipFile(path) as archive, archive.open(member) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


@contextmanager
def _unzipping(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with an archive into one line."""
    try:
        with reading(path):
            yield
    except zipfile.BadZipFile as error:
        raise DataError(f"{path}: no zip archive, or damaged ({error}); fetch it again") from error
    except RuntimeError as error:  # a password, or a compression that Python does not know
        raise DataError(f"{path}: cannot be unzipped ({error}); unzip it and give the folder") from error
