"""JSON lines, JSON arrays and parquet rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minigpt.errors import DataError
from minigpt.text.decoding import ReadCounts
from minigpt.text.records import json_records, json_texts, parquet_texts


def texts(path: Path, content: str | bytes, field: str = "text") -> list[tuple[str, str]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(where.removeprefix(f"{path.parent}/"), text) for where, text in json_texts(path, field, ReadCounts())]


def error(path: Path, content: str | bytes, field: str = "text") -> str:
    with pytest.raises(DataError) as raised:
        texts(path, content, field)
    assert "\n" not in str(raised.value)
    return str(raised.value).removeprefix(f"{path.parent}/")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "c4.jsonl"


def test_one_object_a_line(lines: Path) -> None:
    content = '{"text": "one"}\n\n  \r\n{"text": "two", "id": 7}\r\n{"text": ""}'
    assert texts(lines, content) == [("c4.jsonl:1", "one"), ("c4.jsonl:4", "two"), ("c4.jsonl:5", "")]
    assert texts(lines, b"") == texts(lines, b"\n\n") == []


def test_lines_end_at_a_line_feed_only(lines: Path) -> None:
    """Fault 11: U+2028, U+0085 and VT inside strings are no line ends."""
    strange = "a\u2028b\u2029c\u0085d\u001ce"
    content = f'{{"text": "{strange}"}}\n{{"text": "f\\u000bg"}}\n'.replace("\u001c", "\\u001c")
    assert texts(lines, content) == [("c4.jsonl:1", strange), ("c4.jsonl:2", "f\x0bg")]


def test_errors_name_file_line_and_fields(lines: Path) -> None:
    """Fault 11: a good row, a blank line, then each kind of bad row."""
    good = '{"text": "good"}\n\n'
    assert error(lines, good + '{"id": 1, "conversation": "hi"}') == (
        'c4.jsonl:3: no field "text" (found: "id", "conversation"); name it with --field conversation'
    )
    assert error(lines, good + "{}") == (
        'c4.jsonl:3: no field "text" (found: none); name the field that holds the text with --field'
    )
    assert error(lines, good + '{"text": "cut') == (
        "c4.jsonl:3: broken JSON (Unterminated string starting at, column 10); one object a line is expected"
    )
    assert error(lines, good + '{"text": null}').startswith('c4.jsonl:3: field "text" holds null, not text; ')
    assert error(lines, good + '{"text": ["a"]}').startswith('c4.jsonl:3: field "text" holds a list, not text; ')
    assert error(lines, good + '"text"').startswith("c4.jsonl:3: a string where an object is expected; ")
    assert error(lines, good + "[" * 100_000).startswith("c4.jsonl:3: broken JSON (nested too deeply)")
    assert error(lines, good + '{"text": ' + "9" * 5000 + "}").startswith("c4.jsonl:3: broken JSON (")


def test_many_fields_stay_one_short_line(lines: Path) -> None:
    message = error(lines, json.dumps({f"field {n}" * 20: n for n in range(100)}))
    assert len(message) < 600
    assert ", ...)" in message


def test_a_broken_escape_is_replaced_and_counted(lines: Path) -> None:
    """Fault 4: half a surrogate pair, and a byte that is no UTF-8."""
    lines.write_bytes(b'{"text": "a\\ud83d"}\n{"text": "b\xff"}\n{"text": "\\ud83d\\ude00"}\n')
    counts = ReadCounts()
    assert [text for _, text in json_texts(lines, "text", counts)] == ["a\ufffd", "b\ufffd", "😀"]
    assert counts.bad_bytes == 2


def test_an_array_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    content = '\n[\n {"text": "one"},\n {"text":\n "two"} , {"text": "three"}\n]\n'
    assert texts(path, content) == [("all.json:3", "one"), ("all.json:4", "two"), ("all.json:5", "three")]
    assert texts(path, "[]") == []
    items = [{"text": f"{n}"} for n in range(50)]
    for indent in (None, 1):
        assert [text for _, text in texts(path, json.dumps(items, indent=indent))] == [item["text"] for item in items]


def test_json_lines_in_spite_of_the_name(tmp_path: Path) -> None:
    assert texts(tmp_path / "x.json", '{"text": "one"}\n{"text": "two"}\n') == [
        ("x.json:1", "one"),
        ("x.json:2", "two"),
    ]


def test_errors_in_an_array(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    assert error(path, '[{"text": "one"},\n{"t": "two"}]').startswith('all.json:2: no field "text" (found: "t"); ')
    assert error(path, '[{"text": "one"},\n{"text": ]').startswith("all.json:2: broken JSON (Expecting value")
    assert error(path, '[{"text": "one"}\n{"text": "two"}]').startswith("all.json:1: broken JSON (no comma after")
    assert error(path, '[{"text": "one"}').startswith("all.json:1: broken JSON (no comma after")
    assert error(path, "[\n1]").startswith("all.json:2: a number where an object is expected")
    assert error(path, '[{"text": "one"}] []').startswith("all.json: broken JSON (more text after the array)")
    assert error(path, "[").startswith("all.json:1: broken JSON (")


def test_records_keep_every_field(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": [{"role": "user"}], "n": 1}\n', encoding="utf-8")
    assert list(json_records(path, ReadCounts())) == [(f"{path}:1", {"messages": [{"role": "user"}], "n": 1})]


def parquet(path: Path, column: Any, name: str = "text") -> Path:
    pq.write_table(pa.table({name: column, "id": pa.array(range(len(column)))}), path)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()])
def test_parquet(tmp_path: Path, kind: Any) -> None:
    values = [f"row {n} é" for n in range(700)]
    column = pa.array([value.encode() for value in values], kind) if kind == pa.binary() else pa.array(values, kind)
    path = parquet(tmp_path / "x.parquet", column)
    found = list(parquet_texts(path, "text", ReadCounts()))
    assert found == [(f"{path}:{n}", value) for n, value in enumerate(values, start=1)]


def test_bad_bytes_in_parquet(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"a\xffb"], pa.binary()).buffers())
    counts = ReadCounts()
    found = [text for _, text in parquet_texts(parquet(tmp_path / "x.parquet", broken), "text", counts)]
    assert found == ["ok", "a\ufffdb"]
    assert counts.bad_bytes == 1


def test_parquet_errors(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(DataError) as raised:
            list(parquet_texts(path, "text", ReadCounts()))
        return str(raised.value).removeprefix(f"{tmp_path}/")

    path = tmp_path / "x.parquet"
    assert message(parquet(path, pa.array(["a"]), name="content")) == (
        'x.parquet: no field "text" (found: "content", "id"); name it with --field content'
    )
    assert message(parquet(path, pa.array([1]))).startswith('x.parquet: field "text" holds int64, not text; ')
    assert message(parquet(path, pa.array(["a", None]))).startswith('x.parquet:2: field "text" is null, not text; ')
    path.write_bytes(b"PAR1 no parquet")
    assert message(path).startswith("x.parquet: not parquet or damaged (")
    path.write_bytes(b"")
    assert message(path).startswith("x.parquet: not parquet or damaged (")
    assert message(tmp_path / "y.parquet").startswith("y.parquet: cannot be read: ")
