"""`minigpt finetune`: what is said, what is refused, and that a run goes on exactly where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import CPU, Result, contents, error_of, minigpt
from tiny_chat import PAIRS, make_base, write_chats

from minigpt.checkpoint.files import read_tensors, write_tensors
from minigpt.checkpoint.folder import load, save_weights
from minigpt.cli.finetune import BUNDLED
from minigpt.training.run_folder import RunFolder

SETTINGS = (*CPU, "--seed", "7", "--batch-size", "2", "--val-fraction", "0.3", "--set", "train.eval_every=3")
STEPS = ("--steps", "8")
TIMINGS = ("tokens_per_second", "elapsed", "waited")
KINDS = {"full": (), "lora": ("--lora-rank", "2", "--lora-dropout", "0.1"), "noise": ("--neftune-alpha", "5")}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with conversations and nothing else."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)
    monkeypatch.setattr("minigpt.training.finetune.ANSWER_TOKENS", 3)  # of models that know nothing
    write_chats(Path("chats.jsonl"))


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch)


@dataclass(frozen=True)
class Done:
    """A run that nothing stopped, for tests that leave it as it is: what was said, and the folder it was started in."""

    result: Result
    place: Path

    @property
    def folder(self) -> Path:
        return self.place / "runs" / "chats"


@pytest.fixture(scope="module")
def done(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    @cache
    def run(kind: str, budget: tuple[str, ...] = STEPS) -> Done:
        place = tmp_path_factory.mktemp("done")
        with pytest.MonkeyPatch.context() as patch:
            alone(place, patch)
            return Done(finetune(base, *KINDS[kind], budget=budget), place)

    return run


def finetune(base: Path, *arguments: object, budget: tuple[str, ...] = STEPS) -> Result:
    return minigpt("finetune", "chats.jsonl", "-m", base, *SETTINGS, *budget, *arguments)


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
    (weights,) = (path.name for path in Path(one).glob("*.safetensors"))
    assert (Path(one) / weights).read_bytes() == (Path(other) / weights).read_bytes()
    before, after = (json.loads((Path(run) / "minigpt.json").read_text(encoding="utf-8")) for run in (one, other))
    assert before["examples"] == after["examples"]
    assert before["result"] | {"seconds": 0} == after["result"] | {"seconds": 0}


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    append = RunFolder.append_metrics

    def interrupted(folder: RunFolder, row: dict[str, Any]) -> None:
        append(folder, row)
        if row["step"] == step and "loss" in row:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(RunFolder, "append_metrics", interrupted)


# What is said, and what comes out


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_few_seconds_from_end_to_end(base: Path, kind: str) -> None:
    """A budget of time, and all else chosen: the model learns, and what it learned can be asked for."""
    result = minigpt("finetune", "chats.jsonl", "-m", base, "--minutes", "0.05", "--seed", "7", *KINDS[kind], *CPU)
    assert result.status == 0, result.err
    assert "plan       " in result.err
    scores = [row["bits_per_byte"] for row in rows("runs/chats") if "bits_per_byte" in row]
    assert len(scores) >= 2, "before the first step and after the last"
    assert scores[-1] < scores[0] * (0.9 if kind == "full" else 1)
    asked = ("-m", "runs/chats", "-n", "8", "-t", "0", *CPU)
    (answer,) = minigpt("generate", "--chat", "Say cat", "--json", *asked).objects
    chat = minigpt("chat", *asked, stdin=b"Say cat\n")
    assert (chat.status, chat.out.strip()) == (0, answer["text"].strip())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_what_is_said_and_left(
    base: Path, done: Callable[..., Done], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = done(kind).result
    monkeypatch.chdir(done(kind).place)
    assert (result.status, result.out) == (0, ""), result.err
    facts = [
        "data       chats.jsonl, prompt/response, 24 conversations of 48 messages, 7 held out\n", "template   ChatML; ",
        "rows       ", "model      qwen3, 2 layers", "device     cpu, ", "plan       8 steps of 2 rows", "memory     ",
        "step 8/8  loss ", "done       runs/chats: ", "question   ", "  before   ", "  after    ",
        "next       minigpt chat -m runs/chats\n",
    ]  # fmt: skip
    places = [result.err.index(fact) for fact in facts]
    assert places == sorted(places)
    assert "\x1b" not in result.err
    names = {path.name for path in Path("runs/chats").iterdir()}
    expected = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "minigpt.json", "metrics.jsonl"}
    model, adapter = ("model.safetensors", "config.json"), ("adapter_model.safetensors", "adapter_config.json")
    assert names >= {*expected, *(model if kind == "full" else adapter), "last", "loss.svg"}
    assert ("config.json" in names) == (kind == "full")
    assert ("an adapter of rank 2 with " in result.err) == (kind == "lora")
    record = load(Path("runs/chats")).record
    assert record["base"]["folder"] == str(base)
    assert record["base"]["record"] == load(base).record
    assert record["chat"]["template"] == "chatml"
    assert len(record["result"]["answers"]) == len(record["examples"]) == 3


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_tuned_model_is_used_as_any_other(
    base: Path, done: Callable[..., Done], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done(kind).place)
    asked = ("generate", "Say", "--max-new-tokens", "4", "--seed", "1", *CPU)
    named = minigpt(*asked, "-m", "runs/chats")
    assert named.status == 0, named.err
    assert minigpt(*asked).out == named.out, "the newest run under runs/"
    assert minigpt("eval", "chats.jsonl", "--field", "prompt", *CPU, "-m", "runs/chats").status == 0
    assert minigpt("info", "runs/chats").status == 0
    model = load(Path("runs/chats"))
    assert model.tokenizer.chat_template == load(base).tokenizer.chat_template
    assert model.tokenizer.end_ids == load(base).tokenizer.end_ids


@pytest.mark.parametrize("variant", ["qwen3", "gpt2"])
def test_an_adapter_is_merged_into_a_folder_of_its_own(tmp_path: Path, variant: str) -> None:
    base = make_base(tmp_path / "tiny", variant)
    finetune(base, "--lora", "-o", "adapter")
    result = minigpt("export", "--merge", "-m", "adapter", "-o", "merged")
    assert result.status == 0, result.err
    shutil.rmtree(base)
    merged = load(Path("merged"))
    assert "adapter_config.json" not in contents(Path("merged"))
    assert error_of(minigpt("generate", "a", "-m", "adapter")).startswith(
        "adapter/adapter_config.json: its base model "
    )
    assert minigpt("finetune", "chats.jsonl", "-m", "merged", "-o", "again", *CPU, *STEPS).status == 0
    assert merged.record["base"]["folder"] == str(base)
    assert "is no adapter" in error_of(minigpt("export", "--merge", "-m", "merged", "-o", "more"))
    assert "--merge it is --dtype" in error_of(minigpt("export", "--merge", "--type", "f16", "-m", "merged"), 2)


@pytest.mark.parametrize(("first", "then"), [("full", "lora"), ("lora", "full")])
def test_one_kind_replaces_the_other(base: Path, done: Callable[..., Done], first: str, then: str) -> None:
    shutil.copytree(done(first).folder, "runs/chats")
    message = error_of(finetune(base, *KINDS[then]))
    assert message == (
        "runs/chats holds a model already; continue it with --resume, or write elsewhere with -o, "
        "or replace it with --overwrite"
    )
    assert finetune(base, *KINDS[then], "--overwrite").status == 0
    same_run("runs/chats", done(then).folder)
    assert contents(Path("runs/chats")).keys() == contents(done(then).folder).keys()


def test_the_settings_file_is_heard_and_the_command_line_beats_it(base: Path) -> None:
    Path("t.toml").write_text("[train]\nlearning_rate = 0.5\ntotal_steps = 2\n[lora]\nrank = 3\ntargets = ['q_proj']\n")
    result = minigpt("finetune", "chats.jsonl", "-m", base, *CPU, "--config", "t.toml", "--lr", "0.001")
    assert result.status == 0, result.err
    record = json.loads(Path("runs/chats/minigpt.json").read_text(encoding="utf-8"))
    assert record["plan"]["train"]["learning_rate"] == 0.001
    assert record["plan"]["train"]["total_steps"] == 2
    assert record["request"]["lora"] == {"rank": 3, "alpha": 6.0, "targets": ["q_proj"], "dropout": 0.0}


# Stopped and resumed


@pytest.mark.parametrize(
    ("kind", "budget", "at"),
    [
        ("full", STEPS, 2),
        ("lora", STEPS, 4),
        ("lora", ("--tokens", "1800"), 2),
        ("noise", ("--epochs", "6"), 5),
    ],
)
def test_a_stopped_run_goes_on_exactly(
    base: Path,
    done: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    budget: tuple[str, ...],
    at: int,
) -> None:
    whole = done(kind, budget).folder
    with monkeypatch.context() as patch:
        interrupt_at(patch, at)
        stopped = finetune(base, *KINDS[kind], "-o", "parts", budget=budget)
    assert stopped.status == 130
    assert stopped.err.splitlines()[-1] == (f"stopped at step {at}; continue with: minigpt finetune -o parts --resume")
    assert RunFolder(whole).load_state()[1]["progress"]["step"] > at + 1  # type: ignore[index]
    result = minigpt("finetune", "-o", "parts", "--resume")
    assert result.status == 0, result.err
    assert f"resume     step {at} of " in result.err
    same_run(whole, "parts")
    assert minigpt("finetune", "-o", "parts", "--resume").status == 0, "a finished run has nothing left to do"
    same_run(whole, "parts")


def test_a_run_killed_before_its_first_save_begins_again(
    base: Path, done: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = done("full").folder

    class Killed(BaseException):
        pass

    def kill(*arguments: Any, **keywords: Any) -> None:
        raise Killed

    for place in ("save_all_but_weights", "_run"):
        with monkeypatch.context() as patch:
            patch.setattr(f"minigpt.training.finetune.{place}", kill)
            with pytest.raises(Killed):
                finetune(base, "-o", place)
        result = minigpt("finetune", "-o", place, "--resume")
        assert result.status == 0, result.err
        same_run(whole, place)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_state", kill)  # after the model to begin with was scored and kept
        with pytest.raises(Killed):
            finetune(base, "-o", "scored")
    assert minigpt("finetune", "-o", "scored", "--resume").status == 0
    same_run(whole, "scored")


@pytest.fixture(scope="module")
def stopped_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        alone(place, patch)
        interrupt_at(patch, 2)
        assert finetune(base, "--lora", "-o", "stopped").status == 130
    return place / "stopped"


@pytest.fixture
def stopped(stopped_run: Path) -> Path:
    folder = Path(shutil.copytree(stopped_run, "stopped"))
    record = (folder / "minigpt.json").read_text(encoding="utf-8")
    here = record.replace(str(stopped_run.parent), str(Path.cwd()))  # where its data is
    assert here != record
    (folder / "minigpt.json").write_text(here, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--lr", "0.5"), "this run was begun with learning_rate 0.002, not 0.5; "),
        (("--epochs", "3"), "this run was begun with no epochs, not 3.0; "),
        (("--dropout", "0.3"), "this run was begun with dropout 0.0, not 0.3; "),
        (("--lora-dropout", "0.3"), "this run was begun with lora_dropout 0.0, not 0.3; "),
        (("--lora-rank", "3"), "this run was begun with lora_rank 16, not 3; "),
        (("--template", "chatml"), "this run was begun with no template, not chatml; "),
        (("-m", "elsewhere"), "this run was begun with base "),
        (("other.jsonl",), "this run was begun with chats.jsonl, not other.jsonl; leave the source out to continue it"),
    ],
)
def test_other_settings_are_not_resumed(stopped: Path, more: tuple[str, ...], message: str) -> None:
    before = contents(stopped)
    data = () if more[0].endswith(".jsonl") else ("chats.jsonl",)
    found = error_of(minigpt("finetune", *data, *more, "-o", stopped, "--resume"))
    assert found.startswith(message.replace("0.002", "0.001"))
    assert contents(stopped) == before


def test_what_was_said_may_be_said_again(base: Path) -> None:
    both = ("--dropout", "0.1", "--lora-dropout", "0.2", "--lora-alpha", "8", "--lora-rank", "2")
    assert finetune(base, *both, "-o", "out").status == 0
    for more in (both, ("--lora-rank", "2"), ("--dropout", "0.1")):
        again = minigpt("finetune", "chats.jsonl", *more, "-o", "out", "--resume")
        assert again.status == 0, again.err


def test_text_that_no_run_left_is_not_removed(base: Path) -> None:
    Path("out").mkdir()
    Path("out/stdin.txt").write_text("mine", encoding="utf-8")
    assert finetune(base, "-o", "out").status == 0
    assert Path("out/stdin.txt").read_text(encoding="utf-8") == "mine"


def test_an_adapter_is_scored_as_it_was_trained(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(base)
    narrow = Path(shutil.copytree(base, "narrow"))
    save_weights(narrow, loaded.model, torch.bfloat16)
    scored: list[torch.dtype] = []
    monkeypatch.setattr(
        "minigpt.cli.finetuning._answers",
        lambda run, model, count: scored.append(model.lm_head.weight.dtype) or [""] * count,  # type: ignore[func-returns-value]
    )
    assert finetune(narrow, "--lora", "-o", "out").status == 0
    assert set(scored) == {torch.float32}


def test_what_has_changed_is_not_resumed(base: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Path("chats.jsonl").read_bytes()
    write_chats(Path("chats.jsonl"), [*PAIRS, ("Say more", "more!")])
    message = error_of(minigpt("finetune", "-o", stopped, "--resume"))
    assert message == "chats.jsonl has changed since this run began; put the old data back, or start again"
    Path("chats.jsonl").write_bytes(old)
    copy = Path(shutil.copytree(base, "copy"))
    record = json.loads((stopped / "minigpt.json").read_text(encoding="utf-8"))
    record["request"]["base"] = str(copy.resolve())
    (stopped / "minigpt.json").write_text(json.dumps(record), encoding="utf-8")
    stored, metadata = read_tensors(copy / "model.safetensors")
    write_tensors(copy / "model.safetensors", {n: t * 1.001 for n, t in stored.items()}, metadata)
    message = error_of(minigpt("finetune", "-o", stopped, "--resume"))
    assert message.endswith("copy has changed since this run began; put the old model back, or start again")
    Path("chats.jsonl").unlink()
    assert "chats.jsonl: no such file" in error_of(minigpt("finetune", "-o", stopped, "--resume"))


@pytest.mark.parametrize(
    "change", [{"data": 3}, {"request": {"base": "b"}}, {"plan": {}}, {"chat": []}, {"examples": 1}]
)
def test_a_damaged_record_is_one_line(stopped: Path, change: dict[str, Any]) -> None:
    record = json.loads((stopped / "minigpt.json").read_text(encoding="utf-8"))
    (stopped / "minigpt.json").write_text(json.dumps(record | change), encoding="utf-8")
    message = error_of(minigpt("finetune", "-o", stopped, "--resume"))
    assert "minigpt.json is not the record of a run that can be continued" in message


def test_only_a_tuning_run_is_resumed(base: Path, tmp_path: Path) -> None:
    message = error_of(minigpt("finetune", "-o", "nothing", "--resume"))
    assert message == "nothing holds no tuning run to continue; start one with DATA and -m MODEL"
    assert not Path("nothing").exists()
    shutil.copytree(base, "model")
    message = error_of(minigpt("finetune", "-o", "model", "--resume"))
    assert message == "model holds a model already; write elsewhere with -o, or replace it with --overwrite"


# Refused before anything is begun

BAD: list[tuple[dict[str, Any] | str, str]] = [
    ({"prompt": "hi"}, 'chats.jsonl:25: no field "response"'),
    ({"prompt": "hi", "response": ""}, "chats.jsonl:25: "),
    ({"prompt": "hi", "response": 7}, "chats.jsonl:25: "),
    ({"messages": [{"role": "assistant", "content": "hi"}]}, "chats.jsonl:25: "),
    ("{broken", "chats.jsonl:25: "),
]


def add_row(row: dict[str, Any] | str) -> None:
    with open("chats.jsonl", "a", encoding="utf-8") as file:
        file.write(row if isinstance(row, str) else json.dumps(row) + "\n")


@pytest.mark.parametrize(("row", "where"), BAD)
def test_a_bad_row_is_named_before_training(base: Path, row: dict[str, Any] | str, where: str) -> None:
    add_row(row)
    assert where in error_of(finetune(base, "-o", "out"))
    assert not Path("out/config.json").exists()


def test_bad_rows_can_be_skipped(base: Path) -> None:
    for row, _ in BAD:
        add_row(row)
    result = finetune(base, "--skip-bad")
    assert result.status == 0, result.err
    assert "24 conversations of 48 messages" in result.err
    assert "5 bad rows skipped" in result.err
    assert f"{BAD[0][1]}" in result.err


REFUSED: list[tuple[tuple[str, ...], int, str]] = [
    (("--resume", "--overwrite"), 2, "--resume continues a run and --overwrite replaces it; choose one"),
    (("--mix-share", "0.2"), 2, "--mix-share needs text to mix in; name it with --mix FILE"),
    (("--weight", "chats.jsonl"), 2, "--weight chats.jsonl: give a file, an equals sign and a number: chats.jsonl=2"),
    (("--weight", "chats.jsonl=x"), 2, "--weight chats.jsonl=x: give a file, an equals sign and a number: "),
    (("--map", "prompt"), 2, "--map prompt: give the field, an equals sign and its name in the file"),
    (("--set", "model.dropout=0.1"), 2, "--set model.dropout=0.1: unknown section 'model' (known: train, lora)"),
    (("--weight", "other.jsonl=2"), 1, "no conversation comes from there"),
    (("--weight", "chats.jsonl=0"), 1, "=0: it must be above 0, at most 1000"),
    (("--map", "promt=ask"), 1, "--map promt=ask: no field 'promt' is read; choose from "),
    (("--mix", "chats.jsonl", "--mix-share", "1"), 1, "mix_share is 1.0; it must be a share between 0 and 1"),
    (("--val-fraction", "1"), 1, "val_fraction is 1.0; it must be 0 for none, or a share below 1"),
    (("--template", "llama"), 1, "--template llama: no such template; the one there is to choose is chatml"),
    (("--context", "65"), 1, "context is 65, more than the model's 64; give a smaller --context"),
    (("--context", "4"), 1, "no answer is left in a context of 4 tokens: "),
    (("--steps", "0"), 1, "steps is 0; it must be a whole number of at least 1"),
    (("--epochs", "1"), 1, "--steps and --epochs are both given; a run has one budget"),
    (("--lora-targets", "q_proj,lm_head"), 1, "lora: target 'lm_head' is unknown (choose from q_proj"),
    (("--lora-rank", "0"), 1, "lora: rank is 0; it must be a whole number of at least 1"),
    (("--set", "lora.rang=3"), 1, "lora: unknown setting 'rang'"),
    (("--neftune-alpha", "-1"), 1, "neftune_alpha is -1.0; it must be from 0, for none, to 100"),
    (("--dropout", "1"), 1, "dropout is 1.0; it must be from 0, for none, to below 1"),
    (("--set", "train.patience=x"), 1, "train: patience is 'x'; it must be a whole number of at least 0"),
    (("-m", "nowhere"), 1, "nowhere: no such model folder; "),
    (("missing.jsonl",), 1, "missing.jsonl: no such file"),
]


@pytest.mark.parametrize(("more", "status", "message"), REFUSED)
def test_what_is_wrong_is_one_line(base: Path, more: tuple[str, ...], status: int, message: str) -> None:
    assert message in error_of(finetune(base, *more, "-o", "out"), status)
    assert not [name for name in contents(Path()) if name.startswith("out/") and not name.endswith(".lock")]


def test_data_inside_the_output_folder_is_not_written_over(base: Path) -> None:
    Path("out").mkdir()
    write_chats(Path("out/metrics.jsonl"))
    message = error_of(minigpt("finetune", "out/metrics.jsonl", "-m", base, "-o", "out", "--overwrite", *STEPS))
    assert "would write over this" in message


def test_a_target_the_architecture_lacks_is_one_line(tmp_path: Path) -> None:
    gpt2 = make_base(tmp_path / "gpt2", "gpt2")
    message = error_of(finetune(gpt2, "--lora-targets", "gate_proj"))
    assert message.startswith("lora targets: gpt2 has no gate_proj (choose from q_proj, ")


def test_ending_early_is_said(base: Path) -> None:
    result = finetune(base, "--lr", "3", "--set", "train.patience=1", "--set", "train.warmup_steps=0")
    assert result.status == 0, result.err
    assert "ended early: the held-out score was no better in the last 1 evaluation" in result.err
    assert "bits/byte at step 0 (best)" in result.err


def test_no_data_is_the_bundled_instructions(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(BUNDLED, files=lambda: [Path("chats.jsonl").resolve()])
    monkeypatch.setattr("minigpt.cli.finetune.BUNDLED", here)
    assert error_of(minigpt("finetune", "--resume")).startswith("runs/bundled-chat holds no tuning run to continue; ")
    result = minigpt("finetune", "-m", base, *CPU, "--steps", "1")
    assert result.status == 0, result.err
    assert result.err.startswith("data       the bundled instructions, ")
    assert result.err.endswith("next       minigpt chat -m runs/bundled-chat\n")
    assert minigpt("finetune", "--resume").status == 0


def test_standard_input_is_not_read(base: Path) -> None:
    message = error_of(minigpt("finetune", "-", "-m", base, stdin=b'{"prompt": "a", "response": "b"}'), 2)
    assert message.startswith("- (standard input) is not read here")
