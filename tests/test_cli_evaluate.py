"""`minigpt eval` against one forward pass after another."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from commands import CPU, error_of, minigpt
from tiny_folder import TEXT, make_folder

from minigpt.checkpoint.folder import load
from minigpt.cli.tasks import perplexity

SHORT = "Alice had peeped"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def nats(folder: Path, ids: list[int]) -> list[float]:
    """The loss of each token but the first, in one pass: for texts that fit in the context."""
    model = load(folder).model
    with torch.no_grad():
        logs = model(torch.tensor([ids])).double().log_softmax(-1)[0]
    return [-float(logs[place, id]) for place, id in enumerate(ids[1:])]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_short_text_by_hand(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder).tokenizer
    ids = [tokenizer.end_of_text_id, *tokenizer.encode(SHORT)]
    assert len(ids) < 16
    expected = nats(folder, ids)
    (found,) = minigpt("eval", write(tmp_path / "a.txt", SHORT), "-m", folder, *CPU, "--json").objects
    assert (found["tokens"], found["bytes"]) == (len(expected), len(SHORT))
    assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / len(SHORT), rel=1e-5)
    assert found["model"] == str(folder)


def test_between_documents_stands_a_token_that_is_context_only(folder: Path, tmp_path: Path) -> None:
    tokenizer = load(folder).tokenizer
    documents = ["Alice", "é猫"]
    ids, counted = [], []
    for document in documents:
        inner = tokenizer.encode(document)
        ids += [tokenizer.end_of_text_id, *inner]
        counted += [False, *[True] * len(inner)]
    expected = [loss for loss, counts in zip(nats(folder, ids), counted[1:], strict=True) if counts]
    rows = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    files = [write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.txt", "<|endoftext|>".join(documents))]
    for file in files:
        (found,) = minigpt("eval", file, "-m", folder, *CPU, "--json").objects
        assert found["tokens"] == len(expected)
        assert found["bytes"] == len(b"Alice") + len("é猫".encode())
        assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_files_are_scored_one_by_one_and_in_all(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", TEXT * 5)
    write(tmp_path / "b.txt", SHORT)
    (found,) = minigpt("eval", tmp_path, "-m", folder, *CPU, "--json").objects
    assert [Path(file["file"]).name for file in found["files"]] == ["a.txt", "b.txt"]
    assert found["tokens"] == sum(file["tokens"] for file in found["files"])
    assert found["bytes"] == len(TEXT) * 5 + len(SHORT) == sum(file["bytes"] for file in found["files"])
    total = sum(file["loss"] * file["tokens"] for file in found["files"])
    assert found["loss"] == pytest.approx(total / found["tokens"])
    table = minigpt("eval", tmp_path, "-m", folder, *CPU)
    assert table.err == ""
    lines = table.out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "all"]
    assert lines[-1].split()[1:] == [
        f"{found['bits_per_byte']:.4f}", f"{found['loss']:.4f}", f"{found['perplexity']:,.2f}",
        f"{found['tokens']:,}", f"{found['bytes']:,}",
    ]  # fmt: skip


def test_a_table_stays_in_line_whatever_the_name_and_the_loss(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "a\x1b[1m.txt", TEXT)
    lines = minigpt("eval", tmp_path / "a\x1b[1m.txt", "-m", folder, *CPU).out.splitlines()
    assert "\x1b" not in lines[1]
    assert len(lines[0]) == len(lines[1])
    assert [perplexity(value) for value in (3.14159, 999_999.0, 1e300)] == ["3.14", "999,999.00", "1.00e+300"]


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_pipe_is_a_file(folder: Path, tmp_path: Path, arguments: list[str]) -> None:
    text = (TEXT + "猫\r\n") * 2
    (piped,) = minigpt("eval", *arguments, "-m", folder, *CPU, "--json", stdin=text.encode()).objects
    (read,) = minigpt("eval", write(tmp_path / "a.txt", text), "-m", folder, *CPU, "--json").objects
    assert piped["files"][0].pop("file") == "stdin"
    read["files"][0].pop("file")
    assert piped == read


def test_a_limit_scores_about_so_many_tokens(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", TEXT * 40)
    (whole,) = minigpt("eval", file, "-m", folder, *CPU, "--json").objects
    for limit in (1, 50, 400):
        (found,) = minigpt("eval", file, "-m", folder, *CPU, "--json", "--limit-tokens", limit).objects
        assert found["tokens"] <= max(limit, 8)
        assert found["tokens"] >= 0.8 * limit
        assert found["bytes"] / found["tokens"] == pytest.approx(whole["bytes"] / whole["tokens"], rel=0.5)
    (enough,) = minigpt("eval", file, "-m", folder, *CPU, "--json", "--limit-tokens", 10**9).objects
    assert enough == whole


def test_bytes_that_are_no_text_are_counted_as_what_they_become(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"caf\xe9 Alice")
    result = minigpt("eval", file, "-m", folder, *CPU, "--json")
    assert result.objects[0]["bytes"] == len("caf\ufffd Alice".encode())
    assert "1 bytes were no UTF-8" in result.err


@pytest.mark.parametrize("variant", ["gpt2", "transformer-2017"])
def test_other_positions_are_scored_too(tmp_path: Path, variant: str) -> None:
    folder = make_folder(tmp_path / "model", variant)
    (found,) = minigpt("eval", "-m", folder, *CPU, "--json", stdin=(TEXT * 3).encode()).objects
    assert found["bytes"] == len(TEXT) * 3
    assert math.isfinite(found["loss"])


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.txt", "")
    assert "empty.txt: no text in it" in error_of(minigpt("eval", empty, "-m", folder, *CPU))
    assert "no such file" in error_of(minigpt("eval", tmp_path / "nothing.txt", "-m", folder, *CPU))
    assert "no text; name files" in error_of(minigpt("eval", "-m", folder), 2)
    assert "only once" in error_of(minigpt("eval", "-", "-", "-m", folder, stdin=b"a"), 2)
    assert "no text came through" in error_of(minigpt("eval", "-", "-m", folder, *CPU, stdin=b""))
    rows = write(tmp_path / "a.jsonl", '{"body": "x"}\n')
    assert "a.jsonl:1" in error_of(minigpt("eval", rows, "-m", folder, *CPU))
    assert "no such model folder" in error_of(minigpt("eval", rows, "-m", tmp_path / "nothing"))
