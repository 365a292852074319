"""Token shards: ids, borders, cache, and what happens when something goes wrong."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import numpy as np
import pytest

from minigpt.errors import DataError
from minigpt.text import corpus as corpus_module
from minigpt.text.corpus import Corpus, TokenArray, build
from minigpt.text.decoding import spool
from minigpt.text.sources import SourceOptions, find_files
from minigpt.text.split import Part, scan, training_sample
from minigpt.text.tokenizer import Tokenizer

STORIES = [f"Story {n}.\n\nOnce upon a time, {n} birds sat on {n * 7} trees — 鸟 😀.\n" for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(STORIES, 300)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in STORIES), encoding="utf-8")
    return path


def left_in(cache: Path) -> list[str]:
    """The names in a cache folder, but for the files by which runs keep out of each other's way."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def ids(array: TokenArray) -> list[int]:
    return array.read(0, len(array)).tolist()  # type: ignore[no-any-return]


def expected_ids(texts: list[str], tokenizer: Tokenizer) -> list[int]:
    return [id for text in texts for id in [*tokenizer.encode(text), tokenizer.end_of_text_id]]


def test_documents_end_with_end_of_text(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    result = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    train, val = (tokenizer.decode(ids(array)) for array in (result.train, result.val))
    assert ids(result.train) == expected_ids([text for text in STORIES if text in train], tokenizer)
    assert ids(result.val) == expected_ids([text for text in STORIES if text in val], tokenizer)
    assert sorted((train + val).split("Story")) == sorted("".join(STORIES).split("Story"))
    assert (result.meta["documents"], ids(result.val).count(tokenizer.end_of_text_id)) == (20, 2)
    assert (result.train_bytes, result.val_bytes) == (len(train.encode()), len(val.encode()))


def test_the_end_of_one_document_is_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Fault 9: both shares end with end-of-text, and together they are the text."""
    path = tmp_path / "x.txt"
    path.write_text("".join(STORIES), encoding="utf-8", newline="")
    result = build(scan([path], SourceOptions(), val_fraction=0.2), tokenizer, tmp_path / "cache")
    for array in (result.train, result.val):
        assert [place for place, id in enumerate(ids(array)) if id == 0] == [len(array) - 1]
    train, val = (tokenizer.decode(ids(array)) for array in (result.train, result.val))
    assert train + val == "".join(STORIES)
    assert result.meta["split"] == "ends"


@pytest.mark.parametrize("shard_tokens", [5, 64, 100, 10**6])
def test_shards_of_any_size_hold_the_same_ids(
    source: Path, tokenizer: Tokenizer, tmp_path: Path, shard_tokens: int
) -> None:
    result = build(
        scan([source], SourceOptions(), val_fraction=0), tokenizer, tmp_path / "cache", shard_tokens=shard_tokens
    )
    expected = np.array(expected_ids(STORIES, tokenizer))
    assert len(result.train) == len(expected)
    assert len(result.train.shards) == -(-len(expected) // shard_tokens)
    rng = np.random.default_rng(shard_tokens)
    for start, stop in [
        (0, 0),
        (0, len(expected)),
        *np.sort(rng.integers(0, len(expected) + 1, (40, 2)), axis=1).tolist(),
    ]:
        found = result.train.read(start, stop)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, expected[start:stop])
    assert (len(result.val), result.val.read(0, 0).tolist()) == (0, [])


def test_reading_beyond_the_end(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    result = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    for start, stop in ((0, len(result.train) + 1), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            result.train.read(start, stop)


def test_the_same_ids_from_file_folder_and_pipe(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Fault 6, and tokenised once: the key stands for the content."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "one.txt").write_bytes("".join(STORIES).replace("\n", "\r\n").encode())
    spool(io.BytesIO((folder / "one.txt").read_bytes()), tmp_path / "stdin.txt")
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "".join(STORIES)}), encoding="utf-8")
    folders = set()
    for name in ("books/one.txt", "books", "stdin.txt", "x.jsonl"):
        result = scan(find_files([tmp_path / name]), SourceOptions())
        assert (
            Tokenizer.train(training_sample(result, 10**6), 290).fingerprint()
            == Tokenizer.train(training_sample(scan([folder / "one.txt"], SourceOptions()), 10**6), 290).fingerprint()
        )
        folders.add(build(result, tokenizer, tmp_path / "cache").folder)
    assert len(folders) == 1


def test_a_large_document_in_pieces_and_batches(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_BATCH_CHARS", 100_000)
    text = "".join(STORIES) * 200
    path = tmp_path / "x.txt"
    path.write_text(text, encoding="utf-8", newline="")
    result = build(scan([path], SourceOptions(), val_fraction=0), tokenizer, tmp_path / "cache")
    assert ids(result.train) == [*tokenizer.encode(text), tokenizer.end_of_text_id]


def test_batches_stay_small_while_parts_stream() -> None:
    """Memory stays flat: no more is taken than the batch that is given."""
    taken = 0

    def endless() -> Iterator[Part]:
        nonlocal taken
        while True:
            taken += 1
            yield Part("x" * 65_536, "train", False)

    batches = corpus_module._batches(endless())
    for count in range(1, 5):
        batch = next(batches)
        assert sum(len(part.text) for part in batch) == corpus_module._BATCH_CHARS
        assert taken == count * len(batch)


def test_wide_ids_take_four_bytes(tokenizer: Tokenizer, source: Path, tmp_path: Path) -> None:
    narrow = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    assert narrow.dtype == np.dtype("<u2")
    wide_tokenizer = Tokenizer.train(STORIES, 300)
    wide_tokenizer.vocab_size = 65_537
    wide = build(scan([source], SourceOptions()), wide_tokenizer, tmp_path / "other cache")
    assert wide.dtype == np.dtype("<u4")
    assert ids(wide.train) == ids(narrow.train)


def test_a_tokenizer_with_a_space_before_every_text(shared: Path, tmp_path: Path) -> None:
    """Only documents begin with that space, not their pieces."""
    stories = Tokenizer.load(shared / "models" / "stories260k")
    text = "Once upon a time there was a little girl.\n" * 3000
    (tmp_path / "x.txt").write_text(text, encoding="utf-8", newline="")
    result = build(scan([tmp_path / "x.txt"], SourceOptions(), val_fraction=0), stories, tmp_path / "cache")
    assert ids(result.train) == [*stories.encode(text), stories.end_of_text_id]


def test_a_complete_corpus_is_used_again(
    source: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    monkeypatch.setattr(corpus_module, "_write_shards", None)  # a second run must not get there
    again = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    assert again.folder == first.folder
    assert ids(again.train) == ids(first.train)
    opened = Corpus.load(first.folder)
    assert (ids(opened.val), opened.meta) == (ids(first.val), first.meta)


def test_the_key_is_content_tokenizer_and_split(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folders = {
        build(scan([source], options, val_fraction=fraction), one, tmp_path / "cache").folder
        for options in (SourceOptions(), SourceOptions(min_chars=len(STORIES[0]) + 1))
        for fraction in (0.1, 0.2)
        for one in (tokenizer, Tokenizer.train(STORIES, 299))
    }
    assert len(folders) == 8


@pytest.mark.parametrize("damage", ["no meta", "short shard", "odd shard", "no shard", "broken meta", "other format"])
def test_a_damaged_corpus_is_redone(source: Path, tokenizer: Tokenizer, tmp_path: Path, damage: str) -> None:
    result = scan([source], SourceOptions())
    first = build(result, tokenizer, tmp_path / "cache")
    expected, folder, shard = ids(first.train), first.folder, first.train.shards[0]
    del first
    meta = folder / "corpus.json"
    if damage == "no meta":
        meta.unlink()
    elif damage == "no shard":
        shard.unlink()
    elif damage == "broken meta":
        meta.write_text("[]", encoding="utf-8")
    elif damage == "other format":
        meta.write_text(meta.read_text(encoding="utf-8").replace('"format": 1', '"format": 99'), encoding="utf-8")
    else:
        shard.write_bytes(shard.read_bytes()[: -2 if damage == "short shard" else -1])
    with pytest.raises(DataError, match=r"not a complete corpus .*; delete the folder and run again"):
        Corpus.load(folder)
    assert ids(build(result, tokenizer, tmp_path / "cache").train) == expected


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a complete corpus"):
        Corpus.load(tmp_path / "nowhere")


def test_an_interrupted_build_leaves_nothing(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache", progress=interrupt)
    assert left_in(tmp_path / "cache") == []


def test_a_full_disk_is_said_and_leaves_nothing(
    source: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(DataError, match=r"^cannot write .*: No space left on device; free some space"):
        build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file")
    with pytest.raises(DataError, match=r"^cannot write .*cache: "):
        build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")


def test_files_that_change_publish_nothing(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    result = scan([source], SourceOptions())
    source.write_text(source.read_text(encoding="utf-8").replace("birds", "trees"), encoding="utf-8")
    with pytest.raises(DataError, match=r"changed while being read"):
        build(result, tokenizer, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


def test_two_runs_at_once(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The slower run takes what the faster one has written."""
    result = scan([source], SourceOptions())
    cache = tmp_path / "cache"

    def other_run(done: int) -> None:
        if not [name for name in left_in(cache) if "." not in name]:
            build(result, tokenizer, cache)

    slower = build(result, tokenizer, cache, progress=other_run)
    assert left_in(cache) == [slower.folder.name]
    assert len(slower.train) > 0


def test_what_a_killed_run_left_is_cleared(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in ("old.tmp", "new.tmp"):
        (cache / name).mkdir(parents=True)
        (cache / name / "train-00000.bin").write_bytes(b"x")
    long_ago = time.time() - 2 * 3600
    for path in (cache / "old.tmp" / "train-00000.bin", cache / "old.tmp"):
        os.utime(path, (long_ago, long_ago))
    build(scan([source], SourceOptions()), tokenizer, cache)
    assert not (cache / "old.tmp").exists()
    assert (cache / "new.tmp").exists(), "another run may be writing it"


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is a batch, and each third one is written to the journal."""
    monkeypatch.setattr(corpus_module, "_BATCH_PARTS", 1)
    monkeypatch.setattr(corpus_module, "_JOURNAL_BATCHES", 3)


def stopped(source: Path, tokenizer: Tokenizer, cache: Path, steps: int, **options: int) -> None:
    """Build a corpus, and be stopped after so many batches."""
    left = steps

    def stop(done: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(scan([source], SourceOptions()), tokenizer, cache, progress=stop, **options)


@pytest.mark.parametrize("steps", [1, 3, 4, 20, 38])
@pytest.mark.parametrize("shard_tokens", [50, 10**6])
@pytest.mark.usefixtures("small_batches")
def test_a_stopped_build_goes_on_where_it_was(
    source: Path, tokenizer: Tokenizer, tmp_path: Path, steps: int, shard_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build(scan([source], SourceOptions()), tokenizer, tmp_path / "whole", shard_tokens=shard_tokens)
    cache = tmp_path / "cache"
    stopped(source, tokenizer, cache, steps, shard_tokens=shard_tokens)
    journal = list(cache.glob("*.part/journal.json"))
    assert len(journal) == (steps >= 3)
    encoded: list[str] = []
    original = Tokenizer.encode_arrays
    monkeypatch.setattr(
        Tokenizer,
        "encode_arrays",
        lambda self, texts, continues: (encoded.extend(texts), original(self, texts, continues))[1],
    )
    again = build(scan([source], SourceOptions()), tokenizer, cache, shard_tokens=shard_tokens)
    assert len(encoded) == 40 - steps // 3 * 3, "a text and its end for each of twenty documents"
    assert left_in(cache) == [again.folder.name]
    assert again.meta == whole.meta
    names = sorted(path.name for path in whole.folder.iterdir())
    assert sorted(path.name for path in again.folder.iterdir()) == names
    for name in names:
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name


@pytest.mark.parametrize("damage", ["journal", "short shard", "no shard", "other shards", "other parts"])
@pytest.mark.usefixtures("small_batches")
def test_what_cannot_be_gone_on_from_is_done_again(
    source: Path, tokenizer: Tokenizer, tmp_path: Path, damage: str
) -> None:
    whole = build(scan([source], SourceOptions()), tokenizer, tmp_path / "whole")
    stopped(source, tokenizer, tmp_path / "cache", 20)
    (work,) = (tmp_path / "cache").glob("*.part")
    journal = json.loads((work / "journal.json").read_text(encoding="utf-8"))
    if damage == "journal":
        (work / "journal.json").write_bytes(b"{")
    elif damage == "short shard":
        (work / "train-00000.bin").write_bytes(b"xx")
    elif damage == "no shard":
        (work / "train-00000.bin").unlink()
    else:
        changes = {"other shards": {"shard_tokens": 7}, "other parts": {"parts": journal["parts"] - 2}}
        (work / "journal.json").write_text(json.dumps(journal | changes[damage]), encoding="utf-8")
    again = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    assert (ids(again.train), ids(again.val)) == (ids(whole.train), ids(whole.val))


@pytest.mark.usefixtures("small_batches")
def test_a_run_beside_the_one_at_work_writes_its_own(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    cache, names = tmp_path / "cache", set()
    lock = filelock.FileLock(cache / f".{build(scan([source], SourceOptions()), tokenizer, cache).folder.name}.lock")
    shutil.rmtree(next(path for path in cache.iterdir() if path.is_dir()))
    with lock:
        build(scan([source], SourceOptions()), tokenizer, cache, progress=lambda done: names.update(left_in(cache)))
    assert [Path(name).suffix for name in names] == [".tmp"]


def test_progress_ends_at_the_bytes_of_the_scan(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    seen: list[int] = []
    result = scan([source], SourceOptions())
    build(result, tokenizer, tmp_path / "cache", progress=seen.append)
    assert seen[-1] == result.bytes


def test_a_moved_corpus_opens(source: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = build(scan([source], SourceOptions()), tokenizer, tmp_path / "cache")
    shutil.copytree(first.folder, tmp_path / "elsewhere")
    assert ids(Corpus.load(tmp_path / "elsewhere").train) == ids(first.train)
