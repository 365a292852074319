"""`minigpt train`: every way to give text, what is refused, and that nothing that existed is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import CPU, TINY, Result, contents, error_of, minigpt
from torch import Tensor

from minigpt.checkpoint.folder import load
from minigpt.model.transformer import GPT
from minigpt.text.corpus import Corpus
from minigpt.training.batches import Batch
from minigpt.training.objectives import NextToken
from minigpt.training.run_folder import RunFolder

WORDS = "the cat sat on a mat and saw one red bird in every old tree by night while rain fell"
TEXT = "".join(f"{n}. {WORDS[n % 40 :]} {WORDS[: n * 7 % 50]}.\n" for n in range(60))  # about 4 kB
STEPS = (*TINY, "--steps", "6", "--set", "train.eval_every=3")
TIMINGS = ("tokens_per_second", "elapsed", "waited")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "cats.txt").write_text(TEXT, encoding="utf-8")
    trained(train(folder / "cats.txt", "-o", folder / "run"), str(folder / "run"))
    return folder / "run"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "cats.txt"
    path.write_text(TEXT, encoding="utf-8")
    return Path("cats.txt")


def train(*arguments: object, stdin: bytes | None = None) -> Result:
    return minigpt("train", *STEPS, *arguments, stdin=stdin)


def trained(result: Result, folder: str) -> str:
    """Check that a run went well and left a whole model; return what was said."""
    assert result.status == 0, result.err
    assert result.out == ""
    assert "\x1b" not in result.err
    names = {path.name for path in Path(folder).iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        "minigpt.json", "metrics.jsonl", "last", "loss.svg",
    }  # fmt: skip
    load(Path(folder))
    return result.err


def digest(folder: str) -> str:
    return str(json.loads((Path(folder) / "minigpt.json").read_text(encoding="utf-8"))["corpus"]["digest"])


def rows(folder: Path | str) -> list[dict[str, Any]]:
    metrics = RunFolder(Path(folder)).read_metrics()
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in metrics]


def same_run(one: Path | str, other: Path | str) -> None:
    first, second = RunFolder(Path(one)).load_state(), RunFolder(Path(other)).load_state()
    assert first is not None
    assert second is not None
    assert first[0].keys() == second[0].keys()
    assert all(first[0][name].equal(second[0][name]) for name in first[0])
    assert rows(one) == rows(other)
    assert (Path(one) / "model.safetensors").read_bytes() == (Path(other) / "model.safetensors").read_bytes()


# Sources


def test_one_file_and_what_is_said(source: Path) -> None:
    said = trained(train(source), "runs/cats")
    facts = [
        "corpus     cats.txt, ",
        "tokenizer  byte-level BPE, 300 tokens",
        "tokens     ",
        "model      qwen3, 2 layers",
    ]
    facts += [
        "device     cpu, ",
        "plan       6 steps",
        "memory     about ",
        "step 6/6  loss ",
        "done       runs/cats: ",
    ]
    facts += ["next       echo "]
    places = [said.index(f"\n{fact}" if i else fact) for i, fact in enumerate(facts)]
    assert places == sorted(places)
    assert "last 10% held out" in said
    command = re.search(r"^next       echo \"(.+)\" \| minigpt generate -m runs/cats$", said, re.M)
    assert command, "a command that can be pasted"
    assert command[1].strip()


def test_the_same_text_by_every_road(source: Path, whole: Path) -> None:
    data = source.read_bytes()
    Path("books/deep").mkdir(parents=True)
    Path("books/deep/one.txt").write_bytes(data)
    Path("books/picture.png").write_bytes(b"\x89PNG\0\0")
    trained(train("books", "-o", "runs/folder"), "runs/folder")
    trained(train("books/**/*.txt", "-o", "runs/glob"), "runs/glob")
    said = trained(train("-", stdin=data), "runs/stdin")
    assert said.startswith("corpus     stdin, "), "tokenised before: nothing to wait for"
    trained(train("-o", "runs/pipe", stdin=data), "runs/pipe")
    for name in ("folder", "glob", "stdin", "pipe"):
        same_run(whole, f"runs/{name}")
    assert Path("runs/stdin/stdin.txt").read_bytes() == data


def test_where_a_run_goes_without_being_told(source: Path) -> None:
    from minigpt.cli.train import _sources, _stem

    names = {
        "cats.txt": "cats", "a/b.tar.gz": "b", "books/": "books", "*.txt": "text", "data/tale*.txt": "tale",
        ".hidden": "text", "红楼梦.txt": "红楼梦", "a and 3 more": "a",
    }  # fmt: skip
    for given, name in names.items():
        assert _stem(_sources([given], resume=False)[0]) == name
    assert _stem(_sources(["-"], resume=False)[0]) == "stdin"


def test_no_source_is_the_bundled_corpus(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.cli.train.bundled_corpus", lambda: [source.resolve(), Path("more.txt").resolve()])
    Path("more.txt").write_text(TEXT.upper())
    said = trained(train(), "runs/bundled")
    assert said.startswith("corpus     the bundled corpus, 11.8 kB, 2 documents, ")


@pytest.mark.parametrize("arguments", [("-",), ()])
def test_zero_bytes_from_a_pipe_are_an_error(arguments: tuple[str, ...]) -> None:
    message = error_of(train(*arguments, stdin=b""))
    assert message.startswith("stdin: no text came through the pipe; ")
    assert [name for name in contents(Path()) if not name.endswith(".lock")] == []


def test_dash_at_dev_null_and_at_a_closed_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_of(train("-")).startswith("stdin: no text came through the pipe; ")
    monkeypatch.setattr("minigpt.cli.stdin.sys.stdin", None)
    assert "Traceback" not in train("-").err


def test_json_lines_with_a_field_and_several_documents() -> None:
    lines = [json.dumps({"body": line, "id": n}) for n, line in enumerate(TEXT.splitlines())]
    Path("notes.jsonl").write_text("\n".join([*lines, lines[0], lines[1]]) + "\n", encoding="utf-8")
    said = trained(train("notes.jsonl", "--field", "body", "--min-chars", "20"), "runs/notes")
    assert "60 documents, 2 duplicates dropped, 10% of the documents held out" in said
    message = error_of(train("notes.jsonl", "-o", "x"))
    assert message.startswith("notes.jsonl:1: ") or "/notes.jsonl:1: " in message
    assert "body" in message


def test_a_separator_and_bad_bytes_are_said(source: Path) -> None:
    Path("mixed.txt").write_bytes(source.read_bytes() + b"\n\n---\n\nhello \xff\xfe" + TEXT[::-1].encode())
    said = trained(train("mixed.txt", "--separator", r"\n---\n"), "runs/mixed")
    assert ", 2 documents, last 10% of each held out" in said
    assert "\nwarning: 2 bytes were no UTF-8 and were replaced by U+FFFD\n" in said


@pytest.mark.parametrize("share", ["0", "0.0002", "0.5"])
def test_any_share_may_be_held_out(source: Path, share: str) -> None:
    said = trained(train(source, "--val-fraction", share), "runs/cats")
    assert ("bits/byte" in said) == (share == "0.5")


# The output folder


def test_a_folder_that_holds_a_model_is_not_touched(source: Path) -> None:
    trained(train(source), "runs/cats")
    before = contents(Path("runs/cats"))
    message = error_of(train(source))
    assert message == (
        "runs/cats holds a model already; continue it with --resume, or write elsewhere with -o, "
        "or replace it with --overwrite"
    )
    assert contents(Path("runs/cats")) == before
    trained(train(source, "--overwrite", "--lr", "0.5"), "runs/cats")
    assert contents(Path("runs/cats"))["model.safetensors"] != before["model.safetensors"]
    assert len([row for row in rows("runs/cats") if "loss" in row]) == 6


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "metrics.jsonl", "last/mine.txt"])
@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_files_that_are_not_ours_are_not_written_over(source: Path, name: str, resume: tuple[str, ...]) -> None:
    Path("mine/last").mkdir(parents=True)
    Path("mine/last").rmdir()
    Path("mine", name).parent.mkdir(exist_ok=True)
    Path("mine", name).write_text("mine")
    before = contents(Path("mine"))
    message = error_of(train(source, "-o", "mine", *resume))
    assert message == (
        f"mine holds {name.split('/')[0]} already; write elsewhere with -o, or replace it with --overwrite"
    )
    assert contents(Path("mine")) == before
    trained(train(source, "-o", "mine", "--overwrite"), "mine")


def test_a_model_that_is_no_run_is_not_resumed(source: Path) -> None:
    trained(train(source), "runs/cats")
    Path("runs/cats/minigpt.json").unlink()
    before = contents(Path("runs/cats"))
    message = error_of(train(source, "--resume"))
    assert message == "runs/cats holds a model already; write elsewhere with -o, or replace it with --overwrite"
    assert error_of(train("-o", "runs/cats", "--resume")) == message
    assert contents(Path("runs/cats")) == before
    for broken in ("{}", '{"made_by": "finetune"}'):
        Path("runs/cats/minigpt.json").write_text(broken)
        assert "already" in error_of(train(source, "--resume"))
    for broken in ("[]", "{", '{"made_by": "train"}', '{"made_by": "train", "data": 3, "request": {}}'):
        Path("runs/cats/minigpt.json").write_text(broken)
        assert error_of(train(source, "--resume")).startswith("runs/cats/minigpt.json")
    trained(train(source, "--overwrite"), "runs/cats")


def test_resume_and_overwrite_exclude_each_other(source: Path) -> None:
    assert "--resume" in error_of(train(source, "--resume", "--overwrite"), 2)


def test_resume_needs_a_run(source: Path) -> None:
    assert error_of(train("--resume")) == "runs/bundled holds no run to continue; start one without --resume"
    assert not Path("runs").exists()


def test_a_mistyped_source_leaves_nothing(source: Path) -> None:
    for more in ((), ("--overwrite",), ("--resume",)):
        assert "no such file" in error_of(train("cat.txt", *more))
        assert not Path("runs").exists()


def test_the_only_copy_of_a_text_is_not_removed(source: Path) -> None:
    trained(train("-", "-o", "runs/a", stdin=source.read_bytes()), "runs/a")
    before = contents(Path("runs/a"))
    for text in ("runs/a/stdin.txt", "runs/a"):
        message = error_of(train(text, "-o", "runs/a", "--overwrite"))
        assert message.endswith(": a run in runs/a would write over this text; write elsewhere with -o")
        assert contents(Path("runs/a")) == before
    trained(train("runs/a/stdin.txt", "-o", "runs/b"), "runs/b")


def test_piped_text_alone_is_in_nobodys_way(source: Path) -> None:
    Path("mine").mkdir()
    Path("mine/stdin.txt").write_text("mine")
    trained(train(source, "-o", "mine"), "mine")
    assert Path("mine/stdin.txt").read_text() == "mine"


def test_a_folder_in_use_is_said(source: Path) -> None:
    folder = RunFolder(Path("runs/cats"))
    folder.lock()
    try:
        assert error_of(train(source)) == (
            "runs/cats is in use by another run; wait for it, or write elsewhere with -o"
        )
    finally:
        folder.unlock()


def test_a_place_that_cannot_be_written(source: Path) -> None:
    before = contents(Path())
    for place in ("cats.txt", "cats.txt/x", "/proc/nothing/here"):
        assert error_of(train(source, "-o", place)).startswith(f"cannot write {place}: ")
    assert contents(Path()) == before


def _full(*arguments: Any, **keywords: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 5, 8, 11])
def test_a_full_disk_is_one_line_and_nothing_old_is_lost(
    source: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The disk is full from the n-th flush on; what is in the folder can be continued, or was not there before."""
    real, done = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal done
        done += 1
        if done > calls:
            _full()
        real(descriptor)

    monkeypatch.setattr("os.fsync", fsync)
    message = error_of(train(source))
    assert message.startswith("cannot write ")
    assert "No space left on device" in message
    monkeypatch.setattr("os.fsync", real)
    assert not list(Path().rglob("*.partial"))
    trained(train(source, "--resume"), "runs/cats")
    same_run(whole, "runs/cats")


def test_a_full_disk_while_text_is_piped_keeps_the_old_text(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(train("-", stdin=TEXT.encode()), "runs/stdin")
    before = contents(Path("runs/stdin"))
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _full)
        assert "No space left" in error_of(train("-", "--overwrite", stdin=TEXT.upper().encode()))
    assert contents(Path("runs/stdin")) == before
    assert "fewer than one window" in error_of(train("-", "--overwrite", stdin=b"too short"))
    assert contents(Path("runs/stdin")) == before, "bad text does not replace a good run"


# Bad input


def test_a_missing_file_names_the_nearest(source: Path) -> None:
    message = error_of(train("cat.txt"))
    assert re.fullmatch(r"(\S*/)?cat\.txt: no such file \(there is (\S*/)?cats\.txt\)", message)
    assert "no folder" in error_of(train("nowhere/cat.txt"))
    assert "no file matches" in error_of(train("*.md"))


def test_files_that_hold_no_text(source: Path) -> None:
    Path("empty.txt").touch()
    Path("blank.txt").write_text(" \n\n")
    Path("binary.txt").write_bytes(b"MZ\0\0\x01")
    Path("short.txt").write_text("abc def")
    Path("void").mkdir()
    for name, words in {
        "empty.txt": "no text in it", "blank.txt": "no text in it", "binary.txt": "looks binary",
        "void": "no text files",
        "short.txt": "fewer than one window of 16 + 1; give more text or a smaller --context",
    }.items():  # fmt: skip
        message = error_of(train(name, "-o", "runs/x"))
        assert words in message
    assert not Path("runs/x/config.json").exists()


def test_an_old_run_survives_bad_text(source: Path) -> None:
    trained(train(source), "runs/cats")
    before = contents(Path("runs/cats"))
    Path("short.txt").write_text("abc def")
    for arguments in (("short.txt",), ("nothing.txt",), (source, "--context", "100000"), (source, "--vocab-size", "9")):
        error_of(train(*arguments, "-o", "runs/cats", "--overwrite"))
        assert contents(Path("runs/cats")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab-size", "50"], "vocab_size is 50; it must be from "),
        (["--preset", "giant"], "'giant' is not one of 'nano', "),
        (["--arch", "rnn"], "'rnn' is not one of 'qwen3', "),
        (["--optimizer", "sgd"], "'sgd' is not one of"),
        (["--device", "tpu"], "--device tpu: no such kind of device"),
        (["--device", "cuda:99"], "--device cuda:99: this machine"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--minutes", "1"], "--minutes and --steps are both given"),
        (["--steps", "0"], "steps is 0"),
        (["--steps", "1.5"], "'--steps': Input should be a valid integer"),
        (["--lr", "nan"], "learning_rate is nan"),
        (["--lr", "-1"], "learning_rate is -1"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--batch-size", "-5"], "batch_size is -5"),
        (["--context", "0"], "context is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", "99999999999999999999"], "seed is 99999999999999999999"),
        (["--val-fraction", "1"], "val_fraction is 1.0"),
        (["--val-fraction", "nan"], "val_fraction is nan"),
        (["--min-chars", "-3"], "min_chars: -3 is below 0"),
        (["--field", ""], "field: an empty name"),
        (["--separator", ""], "separator: empty"),
        (["--tokenizer-sample-mb", "nan"], "tokenizer_sample_mb is nan"),
        (["--tokenizer-sample-mb", "-1"], "tokenizer_sample_mb is -1"),
        (["--tokenizer", "nowhere"], "--tokenizer has a vocabulary of its own"),
        (["--set", "train"], "--set train: write it as section.key=value"),
        (["--set", "train.lr"], "write it as section.key=value"),
        (["--set", "optimizer.lr=1"], "unknown section 'optimizer' (known: model, train)"),
        (["--set", "train.speed=1"], "train: unknown setting 'speed' (known: "),
        (["--set", "train.micro_batch_size=many"], "micro_batch_size is 'many'"),
        (["--set", "train.beta1=1.5"], "train: beta1 is 1.5; it must be in [0, 1)"),
        (["--set", "model.layers=3"], "model: unknown setting 'layers' (known: "),
        (["--set", "model.dropout=nan"], "model: dropout is nan"),
        (["--set", "model.num_key_value_heads=3"], "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (["--config", "nowhere.toml"], "nowhere.toml: No such file"),
    ],
)
def test_mistakes_are_one_line_each(source: Path, arguments: list[str], words: str) -> None:
    usage = any(text in words for text in ("is not one of", "a valid", "--tokenizer has", "section"))
    result = train(source, *arguments)
    message = error_of(result, 2 if usage else 1)
    assert words in message
    assert len(result.err.splitlines()) == 1
    assert sorted(contents(Path())) == ["cats.txt"], "refused before anything is read or written"


def test_a_vocabulary_larger_than_the_text_gives_is_said(source: Path) -> None:
    said = trained(minigpt("train", source, "--preset", "nano", *CPU, "--context", "16", "--steps", "1",
                           "--vocab-size", "5000"), "runs/cats")  # fmt: skip
    found = re.search(
        r"^tokenizer  byte-level BPE, (\d+) tokens .*; the text has no more than these of the 5,000", said, re.M
    )
    assert found
    assert load(Path("runs/cats")).model.config.vocab_size == int(found[1]) < 5000


def test_a_tokenizer_of_another_model(source: Path) -> None:
    trained(train(source), "runs/cats")
    arguments = ("--preset", "nano", *CPU, "--context", "16", "--steps", "1")
    said = trained(minigpt("train", source, *arguments, "--tokenizer", "runs/cats", "-o", "b"), "b")
    assert f"\ntokenizer  from {Path('runs/cats').resolve()}, 300 tokens\n" in said
    assert json.loads(Path("b/minigpt.json").read_text())["data"]["tokenizer"] == str(Path("runs/cats").resolve())
    one, other = (
        json.loads(Path("b/tokenizer.json").read_text()),
        json.loads(Path("runs/cats/tokenizer.json").read_text()),
    )
    assert one == other
    message = error_of(minigpt("train", source, *arguments, "--tokenizer", "nowhere", "-o", "c"))
    assert message.startswith(str(Path("nowhere").resolve()))


# Settings


def settings_of(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    plan = json.loads((Path(folder) / "minigpt.json").read_text(encoding="utf-8"))["plan"]
    return plan["model"], plan["train"]


def test_the_command_line_beats_set_beats_the_file_beats_the_preset(source: Path) -> None:
    Path("run.toml").write_text(
        "[model]\nhidden_size = 48\nnum_hidden_layers = 1\ndropout = 0.25\n"
        "max_position_embeddings = 24\nvocab_size = 290\narchitecture = 'llama'\n"
        "[train]\nlearning_rate = 0.5\nbatch_size = 3\nweight_decay = 0.0\ntotal_steps = 4\nseed = 11\n"
        "schedule = 'linear'\ncompute_dtype = 'float32'\n"
    )
    arguments = ("--config", "run.toml", "--preset", "nano", "--device", "cpu")
    trained(minigpt("train", source, *arguments, "-o", "file"), "file")
    model, train_ = settings_of("file")
    assert (model["hidden_size"], model["num_hidden_layers"], model["dropout"]) == (48, 1, 0.25)
    assert (model["num_attention_heads"], model["architecture"]) == (4, "llama")
    assert (model["max_position_embeddings"], model["vocab_size"], train_["context"]) == (24, 290, 24)
    assert (train_["learning_rate"], train_["batch_size"], train_["weight_decay"]) == (0.5, 3, 0.0)
    assert (train_["total_steps"], train_["seed"], train_["schedule"]) == (4, 11, "linear")
    more = ("--set", "train.learning_rate=0.25", "--set", "train.batch_size=5", "--set", "model.dropout=0.0")
    trained(minigpt("train", source, *arguments, *more, "--batch-size", "2", "--seed", "12", "--steps", "2",
                    "--arch", "qwen3", "--vocab-size", "295", "--context", "20", "-o", "line"), "line")  # fmt: skip
    model, train_ = settings_of("line")
    assert (train_["learning_rate"], train_["batch_size"], train_["seed"], train_["total_steps"]) == (0.25, 2, 12, 2)
    assert (model["architecture"], model["vocab_size"], train_["context"]) == ("qwen3", 295, 20)
    assert (model["hidden_size"], model["dropout"]) == (48, 0.0)
    trained(minigpt("train", source, *arguments, "--epochs", "1", "-o", "epochs"), "epochs")
    assert settings_of("epochs")[1]["total_steps"] > 4, "a budget on the command line beats the file's"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model", "run.toml: no valid TOML"),
        ("[speed]\nx = 1", "run.toml: unknown section 'speed' (known: model, train)"),
        ("train = 3", "run.toml: unknown section 'train'"),
        ("[train]\nlr = 3", "train: unknown setting 'lr'"),
        ("[train]\nlearning_rate = 'fast'", "train: learning_rate is 'fast'"),
        ("[train]\nlearning_rate = 1979-05-27", "train: learning_rate is "),
        ("[train]\ncompute_dtype = 'int4'", "compute_dtype 'int4' is unknown (choose from "),
        ("[model]\narchitecture = 'rnn'", "architecture 'rnn' is unknown (choose from "),
        ("[model]\nvocab_size = 'all'", "vocab_size is 'all'"),
        ("[train]\nseed = 'x'", "seed is 'x'"),
    ],
)
def test_mistakes_in_the_file_are_one_line_each(source: Path, text: str, words: str) -> None:
    Path("run.toml").write_text(text)
    arguments = ("--device", "cpu", "--steps", "1", "--preset", "nano")
    assert words in error_of(minigpt("train", source, *arguments, "--config", "run.toml"))
    assert not Path("runs").exists()


# Resuming


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal when the n-th row of metrics is written."""
    real = RunFolder.append_metrics

    def append(self: RunFolder, row: dict[str, Any]) -> None:
        real(self, row)
        if row["step"] == step and "loss" in row:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RunFolder, "append_metrics", append)


BUDGETS = {"steps": ("--steps", "6"), "tokens": ("--tokens", "400"), "epochs": ("--epochs", "0.3")}


@pytest.mark.parametrize(("budget", "number", "status"), [("steps", 15, 143), ("tokens", 2, 130), ("epochs", 2, 130)])
def test_stopped_and_resumed_equals_uninterrupted(
    source: Path, monkeypatch: pytest.MonkeyPatch, budget: str, number: int, status: int
) -> None:
    settings = ("train.eval_every=3", "model.dropout=0.1", "train.micro_batch_size=3")
    options = (*TINY, *BUDGETS[budget], *(word for setting in settings for word in ("--set", setting)))
    assert minigpt("train", source, *options, "-o", "whole").status == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, number)
        result = minigpt("train", source, *options)
    assert result.status == status
    assert result.err.splitlines()[-1] == (
        "stopped at step 4; continue with: minigpt train cats.txt -o runs/cats --resume"
    )
    load(Path("runs/cats"))
    resumed = minigpt(*result.err.splitlines()[-1].partition("minigpt ")[2].split(), "--device", "cpu")
    assert resumed.status == 0, resumed.err
    assert "\nresume     step 4 of " in f"\n{resumed.err}"
    same_run("whole", "runs/cats")


def test_the_way_on_is_said_for_every_source(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my texts").mkdir()
    shutil.copy(source, "my texts/one.txt")
    shutil.copy(source, "other.txt")
    Path("other.txt").write_text(TEXT.upper())
    ways: dict[tuple[str, ...], str] = {
        ("my texts",): "minigpt train 'my texts' -o 'runs/my texts' --resume",
        ("cats.txt", "other.txt"): "minigpt train -o runs/cats --resume",
        ("*.txt", "-o", "all"): "minigpt train '*.txt' -o all --resume",
        ("-",): "minigpt train -o runs/stdin --resume",
    }
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        for arguments, way in ways.items():
            result = train(*arguments, stdin=TEXT.encode() if arguments == ("-",) else None)
            assert (result.status, result.err.splitlines()[-1]) == (130, f"stopped at step 2; continue with: {way}")
    import shlex

    for way in ways.values():
        assert minigpt(*shlex.split(way)[1:], "--device", "cpu", stdin=b"other text").status == 0, "stdin is not read"


def test_resuming_reads_no_stdin_and_takes_dash_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert train("-", stdin=TEXT.encode()).status == 130
    assert minigpt("train", "-", "-o", "runs/stdin", "--resume", *CPU, stdin=b"something else").status == 0
    assert Path("runs/stdin/stdin.txt").read_bytes() == TEXT.encode()


def test_another_source_or_other_settings_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("dogs.txt").write_text(TEXT.replace("cat", "dog"))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert train(source).status == 130
    before = contents(Path("runs/cats"))
    out = ("-o", "runs/cats", "--resume", "--device", "cpu")
    for arguments, words in {
        ("dogs.txt",): "this run was begun with cats.txt, not dogs.txt; leave the source out to continue it, or",
        ("-",): "this run was begun with cats.txt, not stdin; ",
        ("--steps", "12"): "this run was begun with steps 6, not 12; ",
        ("--minutes", "1"): "this run was begun with no minutes, not 1.0; ",
        ("--lr", "0.3"): "this run was begun with learning_rate 0.0",
        ("--batch-size", "8"): "this run was begun with batch_size 4, not 8; ",
        ("--context", "8"): "this run was begun with context 16, not 8; ",
        ("--preset", "micro"): "this run was begun with preset nano, not micro; ",
        ("--arch", "gpt2"): "this run was begun with architecture qwen3, not gpt2; ",
        ("--seed", "8"): "this run was begun with seed 7, not 8; ",
        ("--dtype", "bfloat16"): "this run was begun with compute_dtype float32, not bfloat16; ",
        ("--val-fraction", "0.2"): "this run was begun with val_fraction 0.1, not 0.2; ",
        ("--min-chars", "9"): "this run was begun with min_chars 0, not 9; ",
        ("--set", "model.dropout=0.5"): "this run was begun with dropout 0.0, not 0.5; ",
        ("--tokenizer", "runs/cats"): f"this run was begun with no tokenizer, not {Path('runs/cats').resolve()}; ",
    }.items():
        assert error_of(minigpt("train", *arguments, *out)).startswith(words)
        assert contents(Path("runs/cats")) == before
    assert train(source, "--resume").status == 0, "what is the same may be said again"


def test_a_default_that_is_said_is_no_less_said(source: Path) -> None:
    begun = ("--arch", "llama", "--min-chars", "5", "--val-fraction", "0.2", "--tokenizer-sample-mb", "1")
    assert minigpt("train", source, *TINY, *begun, "--steps", "1", "--field", "body").status == 0
    out = ("-o", "runs/cats", "--resume", "--device", "cpu")
    for option, default, words in (
        ("--arch", "qwen3", "architecture llama, not qwen3"),
        ("--seed", "0", "seed 7, not 0"),
        ("--field", "text", "field body, not text"),
        ("--min-chars", "0", "min_chars 5, not 0"),
        ("--val-fraction", "0.1", "val_fraction 0.2, not 0.1"),
        ("--tokenizer-sample-mb", "16", "sample_megabytes 1.0, not 16.0"),
    ):
        assert error_of(minigpt("train", option, default, *out)).startswith(f"this run was begun with {words}; ")
    assert minigpt("train", *out, *begun).status == 0


def test_a_run_goes_on_where_it_began(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(train(source), "runs/cats")
    record = Path("runs/cats/minigpt.json")
    assert json.loads(record.read_text(encoding="utf-8"))["device"] == "cpu"
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("torch.cuda.device_count", lambda: 1)
        assert minigpt("train", "-o", "runs/cats", "--resume").status == 0, "on the CPU"
    record.write_text(record.read_text(encoding="utf-8").replace('"device": "cpu"', '"device": "cuda"'))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert error_of(minigpt("train", "-o", "runs/cats", "--resume")) == (
        "this run was begun on cuda, which is not here; name another with --device"
    )
    assert minigpt("train", "-o", "runs/cats", "--resume", "--device", "cpu").status == 0


def test_a_damaged_state_is_named(source: Path) -> None:
    trained(train(source), "runs/cats")
    folder = RunFolder(Path("runs/cats"))
    state = folder.load_state()
    assert state is not None
    for config in ({**state[1]["config"], "speed": 3}, None):
        folder.save_state(state[0], state[1] | {"config": config} if config else {})
        assert error_of(minigpt("train", "-o", "runs/cats", "--resume", *CPU)).startswith(
            "runs/cats/last/state.safetensors"
        )


def test_a_finished_run_ends_well_again_and_changes_nothing(source: Path) -> None:
    trained(train(source), "runs/cats")
    shutil.copytree("runs/cats", "before")
    said = trained(minigpt("train", "-o", "runs/cats", "--resume", "--device", "cpu"), "runs/cats")
    assert "done       runs/cats: " in said
    same_run("before", "runs/cats")


def test_a_lost_cache_is_made_again_and_changed_text_is_refused(
    source: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert train(source).status == 130
    (shards,) = (folder for folder in Path("runs/.cache/corpus").iterdir() if folder.is_dir())
    before = contents(shards)
    shutil.rmtree(shards)
    source.write_text(TEXT.replace("cat", "cow"), encoding="utf-8")
    kept = contents(Path("runs/cats"))
    message = error_of(minigpt("train", "-o", "runs/cats", "--resume", "--device", "cpu"))
    assert message == "cats.txt has changed since this run began; put the old text back, or start again"
    source.unlink()
    assert "no such file" in error_of(minigpt("train", "-o", "runs/cats", "--resume", "--device", "cpu"))
    assert contents(Path("runs/cats")) == kept
    source.write_text(TEXT, encoding="utf-8")
    (shards.parent / "x").mkdir()
    monkeypatch.chdir("runs")  # the text is found from anywhere
    assert minigpt("train", "-o", "cats", "--resume", "--device", "cpu").status == 0
    monkeypatch.chdir("..")
    assert contents(shards) == before
    same_run(whole, "runs/cats")


def test_a_damaged_cache_is_made_again(source: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert train(source).status == 130
    (shards,) = (folder for folder in Path("runs/.cache/corpus").iterdir() if folder.is_dir())
    (shards / "train-00000.bin").write_bytes(b"\1")
    assert minigpt("train", "-o", "runs/cats", "--resume", "--device", "cpu").status == 0
    Corpus.load(shards)
    same_run(whole, "runs/cats")


def test_a_run_killed_before_its_first_save_begins_again(
    source: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written last, the same command with --resume ends as the uninterrupted run."""
    places = ("prepare", "save_description", "_run")
    for place in places:
        for stdin in (None, TEXT.encode()):
            out, sources = Path("runs") / f"{place}-{stdin is None}", [source] if stdin is None else ["-"]
            with monkeypatch.context() as patch:
                patch.setattr(f"minigpt.training.pretrain.{place}", _killed)
                with pytest.raises(_Killed):
                    train(*sources, "-o", out, stdin=stdin)
            assert train(*sources, "-o", out, "--resume", stdin=stdin).status == 0
            same_run(whole, out)
            if place == "_run":  # the record is there: nothing has to be said again
                shutil.rmtree(out / "last")
                assert minigpt("train", "-o", out, "--resume", "--device", "cpu").status == 0
                same_run(whole, out)


class _Killed(BaseException):
    pass


def _killed(*arguments: Any, **keywords: Any) -> None:
    raise _Killed


FRESH = "holds no run to continue yet; it begins at the beginning\n"


def die_at(patch: pytest.MonkeyPatch, place: str) -> None:
    """Die at a place as from kill -9: nothing is cleaned up after it."""
    patch.setattr(place, _killed)
    patch.setattr("minigpt.training.pretrain.drop_unused_text", lambda folder: None)


@pytest.mark.parametrize("place", ["scan", "build", "make_plan"])
def test_piped_text_is_piped_once(whole: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with monkeypatch.context() as patch:
        die_at(patch, f"minigpt.training.pretrain.{place}")
        with pytest.raises(_Killed):
            train("-", "-o", "run", stdin=TEXT.encode())
    with monkeypatch.context() as patch:  # and killed again
        die_at(patch, f"minigpt.training.pretrain.{place}")
        with pytest.raises(_Killed):
            train("-o", "run", "--resume")
    said = trained(train("-o", "run", "--resume"), "run")
    assert said.startswith(f"run {FRESH}corpus     stdin, ")
    assert Path("run/stdin.txt").read_bytes() == TEXT.encode()
    same_run(whole, "run")


def test_piped_text_outlives_ctrl_c(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("minigpt.training.pretrain.build", lambda *a, **k: os.kill(os.getpid(), signal.SIGINT))
        assert train("-", "-o", "run", stdin=TEXT.encode()).status == 130
    trained(train("-o", "run", "--resume"), "run")
    same_run(whole, "run")


def test_killed_while_text_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run").mkdir()
    Path("run/.stdin.txt.part").write_text("half")
    assert error_of(train("-o", "run", "--resume")) == (
        "run holds no run to continue: its text came through the pipe in part; pipe it again"
    )
    trained(train("-", "-o", "run", "--resume", stdin=TEXT.encode()), "run")
    assert not Path("run/.stdin.txt.part").exists()


def test_killed_before_the_folder_or_with_the_bundled_text(
    source: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minigpt.cli.train.bundled_corpus", lambda: [source.resolve()])
    assert trained(train(source, "--resume"), "runs/cats").startswith(f"runs/cats {FRESH}")
    Path("runs/bundled").mkdir()
    for arguments, folder in (((), "runs/bundled"), (("-o", "own"), "own")):
        said = trained(train("--resume", *arguments), folder)
        assert said.startswith(f"{folder} {FRESH}corpus     the bundled corpus, ")
        same_run(whole, folder)


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize("place", ["os.replace", "shutil.rmtree", "minigpt.training.pretrain.save_description"])
def test_killed_while_an_old_run_is_cleared(
    source: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, place: str, piped: bool
) -> None:
    """From the new record on the new run can be begun again, and nothing of the old one is taken for it."""
    trained(train("-", "-o", "run", "--seed", "3", stdin=TEXT.upper().encode()), "run")
    text, sources = (TEXT.encode(), ["-"]) if piped else (None, [source])
    real = RunFolder.clear

    def clear(self: RunFolder, *, keep_text: bool) -> None:
        die_at(patch, place)
        real(self, keep_text=keep_text)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "clear", clear)
        with pytest.raises(_Killed):
            train(*sources, "-o", "run", "--overwrite", stdin=text)
    trained(train("-o", "run", "--resume"), "run")
    same_run(whole, "run")
    assert (Path("run/stdin.txt").read_bytes() == text) if piped else not Path("run/stdin.txt").exists()
    assert "uncleared" not in Path("run/minigpt.json").read_text(encoding="utf-8")


def test_a_loss_that_breaks_ends_with_one_line_and_the_state_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = iter(range(100)), NextToken.loss_sum

    def loss_sum(self: NextToken, model: GPT, batch: Batch) -> Tensor:
        return real(self, model, batch) * (float("nan") if next(calls) == 2 else 1.0)

    monkeypatch.setattr(NextToken, "loss_sum", loss_sum)
    assert re.fullmatch(
        r"the loss became NaN at step 3; the last good state is in runs/cats/last \(step \d\); try a lower --lr",
        error_of(train(source)),
    )
    assert RunFolder(Path("runs/cats")).load_state() is not None


# Signals, seen from outside


@pytest.fixture
def process(source: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that would take hours, in a process of its own, at its second line of progress at the latest."""
    command = [sys.executable, "-m", "minigpt", "train", str(source), *TINY, "--steps", "1000000", "-o", "run"]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield child
    child.kill()
    child.communicate()


def wait_for_steps(folder: Path, child: subprocess.Popen[str]) -> None:
    """Wait until a run has taken some steps."""
    while not (folder / "metrics.jsonl").exists() or len(rows(folder)) < 3:
        assert child.poll() is None
        time.sleep(0.05)


def test_ctrl_c_saves_and_says_how_to_go_on(process: subprocess.Popen[str]) -> None:
    wait_for_steps(Path("run"), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    found = re.fullmatch(
        r"stopped at step ([\d,]+); continue with: minigpt train cats.txt -o run --resume", err.splitlines()[-1]
    )
    assert found, err
    state = RunFolder(Path("run")).load_state()
    assert state is not None
    assert state[1]["progress"]["step"] == int(found[1].replace(",", ""))
    load(Path("run"))


def test_a_second_ctrl_c_leaves_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minigpt.cli import signals

    left: list[int] = []
    written: list[bytes] = []
    monkeypatch.setattr("os._exit", left.append)
    monkeypatch.setattr("os.write", lambda descriptor, data: written.append(data))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, fileno=lambda: 2))
    with signals.stop_request() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop(), left, stop.exit_status) == (True, [], 130)
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]
        assert written == [b"\x1b[?25h"], "a terminal has its cursor again"
        os.kill(os.getpid(), signal.SIGTERM)
        assert left == [130, 143]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    from minigpt.cli import signals

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.stop_request() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_reading_loses_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    trained(train(source), "runs/cats")
    before = contents(Path("runs/cats"))
    for place in ("scan", "build"):
        with monkeypatch.context() as patch:
            patch.setattr(f"minigpt.training.pretrain.{place}", lambda *a, **k: os.kill(os.getpid(), number))
            result = train(source, "--overwrite")
        assert (result.status, result.err.splitlines()[-1]) == (status, "stopped")
        assert contents(Path("runs/cats")) == before
