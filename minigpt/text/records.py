"""Records with fields, as JSON lines, one JSON array or parquet rows, and the text field in them.

Every error names the file and the line or row: ``chats.jsonl:17``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from minigpt.errors import DataError
from minigpt.text.decoding import ReadCounts, decode_blocks, decode_utf8, read_blocks, reading, replace_surrogates

# An array is parsed in memory; above this, one object a line is the format to use.
_ARRAY_MAX_CHARS = 1 << 29
_ROWS_PER_BATCH = 256
_BLANK = re.compile(r"[ \t\r\n]*")


class BrokenJSON(DataError):
    """Text that is no JSON, where a record of another kind is merely a DataError."""


def json_texts(path: Path, field: str, counts: ReadCounts) -> Iterator[tuple[str, str]]:
    """Yield where ("c4.jsonl:17") and the text of one field for each object in a JSON file.

    Errors: DataError for broken JSON, a record that is no object, a missing field, or one that holds no text.
    """
    for where, record in json_records(path, counts):
        yield where, replace_surrogates(_text_field(record, field, where), counts)


def json_records(
    path: Path,
    counts: ReadCounts,
    skip: Callable[[DataError], None] | None = None,
    *,
    blocks: Iterable[bytes] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where and each object of a file that holds one object a line, or one array of objects.

    Lines end at a line feed only: U+2028, U+0085 and the like inside strings are no line ends. Blank lines are skipped.
    Errors: DataError for broken JSON and records that are no object; with `skip` that is called instead, and reading
    goes on. An array ends where its JSON is broken. `blocks` are the file's bytes where its path cannot be opened.
    """
    blocks = read_blocks(path) if blocks is None else blocks
    lines = enumerate(_lines(decode_blocks(blocks, path, counts)), start=1)
    first = True
    for number, line in lines:
        if not line.strip():
            continue
        if first and line.lstrip().startswith("["):
            yield from _array_records(chain([line], (line for _, line in lines)), number, path, skip)
            return
        first = False
        where = f"{path}:{number}"
        try:
            record = _as_object(_line_value(line, where), where)
        except DataError as error:
            if skip is None:
                raise
            skip(error)
            continue
        yield where, record


def _line_value(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BrokenJSON(f"{where}: broken JSON ({_reason(error)}); one object a line is expected") from error


def _lines(chunks: Iterable[str]) -> Iterator[str]:
    held: list[str] = []
    for chunk in chunks:
        first, *others = chunk.split("\n")
        held.append(first)
        if others:
            yield "".join(held)
            yield from others[:-1]
            held = [others[-1]]
    yield "".join(held)


def _array_records(
    lines: Iterable[str], number: int, path: Path, skip: Callable[[DataError], None] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the items of an array whose first line is ``number``, each with the line it begins on."""
    text = _joined(lines, path)
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    counted = 0
    closed = False
    while not closed:
        position = _skip_blank(text, position)
        number, counted = number + text.count("\n", counted, position), position
        where = f"{path}:{number}"
        if text.startswith("]", position):  # an empty array, or a comma before the end
            position += 1
            break
        try:
            record, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise BrokenJSON(f"{where}: broken JSON ({_reason(error)}); an array of objects is expected") from error
        if skip is not None and not isinstance(record, dict):
            skip(_no_object(record, where))
        else:
            yield where, _as_object(record, where)
        position = _skip_blank(text, position)
        if text[position : position + 1] not in ("]", ","):
            raise BrokenJSON(f"{where}: broken JSON (no comma after this item); an array of objects is expected")
        closed = text[position] == "]"
        position += 1
    if _skip_blank(text, position) != len(text):
        raise BrokenJSON(f"{path}: broken JSON (more text after the array); give one array, or one object a line")


def _joined(lines: Iterable[str], path: Path) -> str:
    kept: list[str] = []
    size = 0
    for line in lines:
        kept.append(line)
        size += len(line) + 1
        if size > _ARRAY_MAX_CHARS:
            raise DataError(f"{path}: a JSON array this large does not fit in memory; save it as one object a line")
    return "\n".join(kept)


def _skip_blank(text: str, position: int) -> int:
    match = _BLANK.match(text, position)
    assert match is not None
    return match.end()


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _as_object(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise _no_object(record, where)
    return record


def _no_object(record: Any, where: str) -> DataError:
    return DataError(f'{where}: {kind_of(record)} where an object is expected; write it as {{"field": "..."}}')


def _text_field(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(_missing(field, list(record), [key for key in record if isinstance(record[key], str)], where))
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f'{where}: field "{field}" holds {kind_of(value)}, not text; name another one with --field')
    return value


def _missing(field: str, names: list[str], with_text: list[str], where: str) -> str:
    advice = f"name it with --field {with_text[0]}" if with_text else "name the field that holds the text with --field"
    return f'{where}: no field "{field}" (found: {quoted(names)}); {advice}'


def quoted(names: list[str]) -> str:
    """List the names of fields that were found, for people."""
    return (", ".join(f'"{name[:40]}"' for name in names[:8]) or "none") + (", ..." if len(names) > 8 else "")


def kind_of(value: Any) -> str:
    """Name a JSON value for people."""
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def parquet_texts(path: Path, field: str, counts: ReadCounts) -> Iterator[tuple[str, str]]:
    """Yield where ("web.parquet:17", rows from 1) and the text of one column for each row, a batch of rows at a time.

    Errors: DataError without pyarrow, for a damaged file, a missing column, or one that holds no text.
    """
    with _parquet(path) as file:
        _check_column(file.schema_arrow, field, path)
        row = 0
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[field]):
            for value in _column_bytes(batch.column(0), path, field):
                row += 1
                if value is None:
                    raise DataError(f'{path}:{row}: field "{field}" is null, not text; drop such rows first')
                yield f"{path}:{row}", decode_utf8(value, counts)


def parquet_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where ("chats.parquet:17", rows from 1) and each row with all its columns.

    Errors: DataError without pyarrow, for a damaged file, or for text that is no UTF-8.
    """
    with _parquet(path) as file:
        row = 0
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH):
            try:
                records = batch.to_pylist()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: text that is no UTF-8 behind row {row}; write the file again") from error
            for record in records:
                row += 1
                yield f"{path}:{row}", record


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Open a parquet file; whatever is wrong with it while it is read is a DataError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{path}: reading .parquet needs the pyarrow package: pip install pyarrow") from None
    try:
        with reading(path), pq.ParquetFile(path) as file:
            yield file
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not parquet or damaged ({reason}); fetch or write the file again") from error


def _check_column(schema: Any, field: str, path: Path) -> None:
    if field not in schema.names:
        with_text = [column.name for column in schema if str(column.type) in ("string", "large_string", "string_view")]
        raise DataError(_missing(field, list(schema.names), with_text, str(path)))


def _column_bytes(column: Any, path: Path, field: str) -> list[bytes | None]:
    """Return the column's values as bytes: strings in a file may break UTF-8, and the policy for that is ours."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    texts = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
    if column.type not in texts:
        raise DataError(f'{path}: field "{field}" holds {column.type}, not text; name another one with --field')
    if column.type not in (pa.binary(), pa.large_binary(), pa.binary_view()):
        column = column.cast(pa.binary() if column.type == pa.string() else pa.large_binary())
    values: list[bytes | None] = column.to_pylist()
    return values
