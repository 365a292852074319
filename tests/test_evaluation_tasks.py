"""LAMBADA, BLiMP, ARC and PIQA: what is asked, what counts as right, and published figures of real models."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parrot import build
from tiny_folder import make_folder

from minigpt.checkpoint.folder import LoadedModel, load
from minigpt.errors import DataError
from minigpt.evaluation.shares import Share
from minigpt.evaluation.tasks import Result, overall, run_task

LAMBADA = [
    {"context": "Alice had peeped into the book. ", "continuation": "her"},
    {"context": "she", "continuation": "had no pictures"},
]
BLIMP = [
    {"sentence_good": "Alice was tired.", "sentence_bad": "Alice were tired.", "UID": "x"},
    {"sentence_good": "It had pictures.", "sentence_bad": "It pictures had.", "UID": "x"},
    {"sentence_good": "sitting by the bank", "sentence_bad": "the by bank sitting", "UID": "x"},
]
ARC = [
    {"query": "Question: Who is it?\n", "choices": ["Alice", "the book", "her sister on the bank"], "gold": 2},
    {"query": "Question: What?", "choices": ["a book", "nothing"], "gold": 0},
    {"query": "Question: Why?", "choices": ["tired", "bank", "a", "very tired"], "gold": 1},
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_folder(tmp_path_factory.mktemp("model")))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ask(loaded: LoadedModel, task: str, path: Path, **options: Any) -> list[Result]:
    return run_task(loaded.model, loaded.tokenizer, task, path, **options)


def nats(loaded: LoadedModel, context: str, choice: str) -> tuple[float, bool]:
    """The loss of a choice whose tokens do not join those of its context, and whether each was the likeliest.

    One token at a time, from the last sixteen before it.
    """
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(context) or [tokenizer.end_of_text_id]
    total, greedy = 0.0, True
    new = tokenizer.encode(choice)
    assert [*tokenizer.encode(context), *new] == tokenizer.encode(context + choice)
    assert len(new) <= 16
    start = max(0, len(ids) + len(new) - 1 - 16)  # the end of a long context is kept
    with torch.no_grad():
        for id in new:
            after = loaded.model(torch.tensor([ids[start:]])).double().log_softmax(-1)[0, -1]
            total -= float(after[id])
            greedy &= int(after.argmax()) == id
            ids.append(id)
    return total, greedy


def best(scores: Sequence[float]) -> int:
    return min(range(len(scores)), key=scores.__getitem__)


def test_lambada_asks_for_the_whole_continuation(loaded: LoadedModel, tmp_path: Path) -> None:
    (found,) = ask(loaded, "lambada", write(tmp_path / "l.jsonl", LAMBADA))
    scored = [nats(loaded, row["context"].rstrip(), f" {row['continuation']}") for row in LAMBADA]
    assert found.right == Share(sum(greedy for _, greedy in scored) / 2, 2)
    assert found.perplexity == pytest.approx(math.exp(sum(loss for loss, _ in scored) / 4), rel=1e-4), "four words"
    assert (found.name, found.rows, found.right_per_byte, found.chance) == ("l", 2, None, None)


def test_lambada_is_right_when_the_model_says_all_of_it(loaded: LoadedModel, tmp_path: Path) -> None:
    tokenizer = loaded.tokenizer
    model = build(tokenizer, [tokenizer.encode("Alice")[-1], *tokenizer.encode(" had no")], 64)
    rows = [{"context": "Alice", "continuation": word} for word in ("had no", "had", "had nothing", "no")]
    (found,) = run_task(model, tokenizer, "lambada", write(tmp_path / "l.jsonl", rows))
    assert found.right == Share(0.5, 4)


def test_blimp_compares_sentences_by_sum_and_by_byte(loaded: LoadedModel, tmp_path: Path) -> None:
    (found,) = ask(loaded, "blimp", write(tmp_path / "b.jsonl", BLIMP))
    summed = per_byte = 0
    for row in BLIMP:
        texts = [row["sentence_good"], row["sentence_bad"]]
        losses = [nats(loaded, "", text)[0] for text in texts]
        summed += best(losses) == 0
        per_byte += best([loss / len(text) for loss, text in zip(losses, texts, strict=True)]) == 0
    assert (found.right, found.right_per_byte) == (Share(summed / 3, 3), Share(per_byte / 3, 3))
    assert found.chance == 0.5
    assert found.perplexity is None


@pytest.mark.parametrize("task", ["arc", "piqa"])
def test_choices_go_on_from_the_question(loaded: LoadedModel, tmp_path: Path, task: str) -> None:
    (found,) = ask(loaded, task, write(tmp_path / "a.jsonl", ARC))
    summed = per_byte = 0
    for row in ARC:
        losses = [nats(loaded, f"{row['query'].rstrip()}\nAnswer:", f" {choice}")[0] for choice in row["choices"]]
        summed += best(losses) == row["gold"]
        per_byte += best([n / len(c) for n, c in zip(losses, row["choices"], strict=True)]) == row["gold"]
    assert (found.right, found.right_per_byte) == (Share(summed / 3, 3), Share(per_byte / 3, 3))
    assert found.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)
    assert found.cut == 3, "none fits into a context of 16"


def test_bytes_are_those_of_the_text_without_the_space(loaded: LoadedModel, tmp_path: Path) -> None:
    """Each token here costs the same, so the sum is the number of tokens, and per byte long tokens win."""
    tokenizer = loaded.tokenizer
    model = build(tokenizer, [], 256)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert len(tokenizer.encode(" was beginning to")) > len(tokenizer.encode(" zqx")) == 4
    long = {"query": "Q", "choices": ["zqx", "was beginning to"], "gold": 1}
    short = {"query": "Q", "choices": ["zqx", "was beginning to"], "gold": 0}
    tie = {"query": "Q", "choices": ["zqx", "xqz"], "gold": 0}
    for row, summed, per_byte in ((long, 0, 1), (short, 1, 0), (tie, 0, 0)):
        (found,) = run_task(model, tokenizer, "arc", write(tmp_path / "a.jsonl", [row]))
        assert found.right_per_byte is not None
        assert (found.right.value, found.right_per_byte.value) == (summed, per_byte)
    # By the character, two of three bytes each would be dearer than two of one.
    row = {"query": "Q", "choices": ["猫猫", "zq"], "gold": 0}
    tokens = [len(tokenizer.encode(f" {choice}")) for choice in row["choices"]]
    assert tokens[0] / 6 < tokens[1] / 2 < tokens[0] / 2
    (found,) = run_task(model, tokenizer, "arc", write(tmp_path / "a.jsonl", [row]))
    assert found.right_per_byte == Share(1.0, 1)


def test_a_model_that_is_broken_gets_nothing_right(loaded: LoadedModel, tmp_path: Path) -> None:
    model = build(loaded.tokenizer, [], 256)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    (found,) = run_task(model, loaded.tokenizer, "blimp", write(tmp_path / "b.jsonl", BLIMP))
    assert (found.right.value, found.right_per_byte) == (0.0, Share(0.0, 3))


def test_a_folder_is_asked_file_by_file(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    write(tmp_path / "all" / "b.jsonl", BLIMP)
    write(tmp_path / "all" / "a.jsonl", BLIMP[1:])
    told: list[tuple[str, float]] = []
    found = ask(loaded, "blimp", tmp_path / "all", progress=lambda name, share: told.append((name, share)))
    assert [(result.name, result.rows) for result in found] == [("a", 2), ("b", 3)]
    assert told == [("a", pytest.approx(0.4)), ("b", pytest.approx(1.0))]
    alone = [ask(loaded, "blimp", tmp_path / "all" / f"{name}.jsonl")[0] for name in "ab"]
    assert found == alone
    whole = overall(found)
    assert whole.right.value == pytest.approx((alone[0].right.value + alone[1].right.value) / 2)
    assert (whole.name, whole.rows, whole.chance) == ("mean", 5, 0.5)
    first = ask(loaded, "blimp", tmp_path / "all", limit=2)
    assert [result.rows for result in first] == [2, 2]


def test_perplexities_of_files_become_one(loaded: LoadedModel, tmp_path: Path) -> None:
    for name, rows in (("a", LAMBADA[:1]), ("b", LAMBADA[1:])):
        write(tmp_path / f"{name}.jsonl", rows)
    parts = ask(loaded, "lambada", tmp_path)
    (tmp_path / "a.jsonl").unlink()
    (whole,) = ask(loaded, "lambada", write(tmp_path / "b.jsonl", LAMBADA))
    assert overall(parts).perplexity == pytest.approx(whole.perplexity, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("lambada", {"context": "a"}, 'no field "continuation" (found: "context")'),
        ("lambada", {"context": "a", "continuation": ""}, 'field "continuation" is empty'),
        ("blimp", {"sentence_good": "a"}, 'no field "sentence_bad"'),
        ("blimp", {"sentence_good": 1, "sentence_bad": "a"}, 'field "sentence_good" holds a number, not text'),
        ("arc", {"query": "a", "choices": ["a", "b"]}, 'no field "gold"'),
        ("arc", {"query": "a", "choices": "ab", "gold": 0}, 'field "choices" holds a string, not a list'),
        ("arc", {"query": "a", "choices": ["a"], "gold": 0}, "holds 1 of them, not two or more"),
        ("arc", {"query": "a", "choices": ["a", " "], "gold": 0}, "choice 1 is empty"),
        ("piqa", {"query": "a", "choices": ["a", 2], "gold": 0}, "choice 1 holds a number, not text"),
        ("piqa", {"query": "a", "choices": ["a", "b"], "gold": 2}, 'field "gold" is 2; the choices are 0 to 1'),
        ("piqa", {"query": "a", "choices": ["a", "b"], "gold": -1}, 'field "gold" is -1'),
        ("piqa", {"query": "a", "choices": ["a", "b"], "gold": True}, 'field "gold" holds true or false'),
        ("piqa", {"query": "a", "choices": ["a", "b"], "gold": "0"}, 'field "gold" holds a string'),
    ],
)
def test_a_row_that_cannot_be_asked(
    loaded: LoadedModel, tmp_path: Path, task: str, row: dict[str, Any], said: str
) -> None:
    good = {"lambada": LAMBADA, "blimp": BLIMP}.get(task, ARC)[0]
    path = write(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(DataError) as caught:
        ask(loaded, task, path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert said in str(caught.value)
    assert f"; a row of {task} is {{" in str(caught.value)


def members(shared: Path, folder: Path, names: Sequence[str]) -> Path:
    """Unpack some paradigms of BLiMP."""
    with zipfile.ZipFile(shared / "data" / "eval" / "BLiMP.zip") as archive:
        for name in names:
            (folder / f"{name}.jsonl").write_bytes(archive.read(f"data/{name}.jsonl"))
    return folder


def published(shared: Path, model: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((shared / "models" / "reference.json").read_text(encoding="utf-8"))[model]
    return figures


def blimp(loaded: LoadedModel, shared: Path, folder: Path, expected: dict[str, float], limit: int) -> None:
    found = ask(loaded, "blimp", members(shared, folder, list(expected)), limit=limit)
    assert {result.name: result.right.value for result in found} == pytest.approx(expected)


def test_figures_of_stories260k(shared: Path, tmp_path: Path) -> None:
    expected = published(shared, "stories260k")["blimp_first_200"]
    blimp(load(shared / "models" / "stories260k"), shared, tmp_path, expected, 200)


@pytest.mark.slow
def test_figures_of_smollm2(shared: Path, smollm2: Path, tmp_path: Path) -> None:
    loaded, expected = load(smollm2, dtype=torch.float32), published(shared, "smollm2-135m-instruct")
    (found,) = ask(loaded, "lambada", shared / "data" / "eval" / "lambada_openai.jsonl", limit=60)
    assert found.right.value == pytest.approx(expected["lambada_first_60"]["acc"])
    assert found.perplexity == pytest.approx(expected["lambada_first_60"]["ppl"], rel=1e-3)
    blimp(loaded, shared, tmp_path, expected["blimp_first_50"], 50)
