"""Tokenising in processes: the same ids in the same order, few batches at a time, and an end whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from minigpt.errors import DataError
from minigpt.text import corpus as corpus_module
from minigpt.text import workers as workers_module
from minigpt.text.corpus import build
from minigpt.text.sources import SourceOptions
from minigpt.text.split import scan
from minigpt.text.tokenizer import Tokenizer
from minigpt.text.workers import Batch, available_cores, encoded

TEXTS = [f"Story {n}: once upon a time there were {n} birds — 鸟 😀 ²." for n in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


def batches(texts: list[str]) -> Iterator[tuple[int, Batch]]:
    for number, text in enumerate(texts):
        yield number, ([text, "", text[:9]], [False, True, True])


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def test_the_ids_of_processes_are_those_of_one(tokenizer: Tokenizer) -> None:
    results = [
        [(number, [ids.tolist() for ids in arrays]) for number, arrays in encoded(tokenizer, batches(TEXTS), count)]
        for count in (1, 2)
    ]
    assert results[0] == results[1]
    assert results[0][3] == (3, tokenizer.encode_batch([TEXTS[3], "", TEXTS[3][:9]]))
    assert children() == []


def test_a_tokenizer_of_another_kind(shared: Path) -> None:
    stories = Tokenizer.load(shared / "models" / "stories260k")
    (_, arrays), *_ = encoded(stories, batches(TEXTS[:2]), 2)
    assert [ids.tolist() for ids in arrays] == stories.encode_batch([TEXTS[0], "", TEXTS[0][:9]], [False, True, True])


def test_only_a_few_batches_are_read_ahead(tokenizer: Tokenizer) -> None:
    read = 0

    def endless() -> Iterator[tuple[int, Batch]]:
        nonlocal read
        while True:
            read += 1
            yield read, ([TEXTS[0]], [False])

    results = encoded(tokenizer, endless(), 2)
    for done in range(1, 20):
        next(results)
        assert read <= done + 4
    results.close()
    assert children() == []


def test_a_process_that_is_killed_is_said(tokenizer: Tokenizer) -> None:
    results = encoded(tokenizer, batches(TEXTS), 2)
    next(results)
    for child in children():
        child.kill()
    with pytest.raises(DataError, match=r"^tokenizing: a process ended before its time; free some memory and run"):
        list(results)
    assert children() == []


def test_errors_of_the_source_come_through(tokenizer: Tokenizer) -> None:
    def broken() -> Iterator[tuple[int, Batch]]:
        yield from batches(TEXTS[:3])
        raise DataError("c4.jsonl:17: broken JSON")

    with pytest.raises(DataError, match=r"c4\.jsonl:17"):
        list(encoded(tokenizer, broken(), 2))
    assert children() == []


def test_processes_import_no_torch() -> None:
    program = "import sys, minigpt.text.workers; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout.strip() == b"False"


def test_a_corpus_by_processes(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    one = build(scan([path], SourceOptions()), tokenizer, tmp_path / "one")
    monkeypatch.setattr(corpus_module, "_BATCH_CHARS", 100)
    monkeypatch.setattr(corpus_module, "_BYTES_FOR_PROCESSES", 1)
    monkeypatch.setattr(corpus_module, "available_cores", lambda: 2)
    started: list[Tokenizer] = []
    original = workers_module._Worker.__init__
    monkeypatch.setattr(workers_module._Worker, "__init__", lambda self, t: (started.append(t), original(self, t))[1])
    two = build(scan([path], SourceOptions()), tokenizer, tmp_path / "two")
    assert len(started) == 2
    for name in ("train-00000.bin", "val-00000.bin", "corpus.json"):
        assert (two.folder / name).read_bytes() == (one.folder / name).read_bytes()


def test_cores() -> None:
    assert 1 <= available_cores() <= 4096
