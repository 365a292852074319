"""Checkable instructions: what the model is asked, what counts as right, and what stands beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from parrot import make_parrot
from tiny_folder import make_folder

from minigpt.checkpoint.folder import LoadedModel, load
from minigpt.config import SamplingConfig
from minigpt.errors import DataError, ModelFolderError
from minigpt.evaluation import instructions
from minigpt.evaluation.instructions import Answer, Row, answer_rows, is_right, read_rows, tally
from minigpt.evaluation.shares import Share
from minigpt.inference.engine import collect, stream
from minigpt.text.tokenizer import Tokenizer

SAYS = "Alice by"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_folder(tmp_path_factory.mktemp("model"), "llama", context=128))


def row(output: str, instruction: str = "Say it.", given: str = "", kind: str = "") -> Row:
    return Row(instruction=instruction, input=given, output=output, kind=kind)


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def test_only_the_spacing_of_words_is_free() -> None:
    for answer in ("a  b", " a b\n", "a\n\tb", "a\u3000b"):
        assert is_right(answer, row("a b "))
    for answer in ("ab", "A b", "a b.", "a", "", "a b a b"):
        assert not is_right(answer, row("a b"))


def test_rows_are_read_and_checked(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [row("a", given="x", kind="k"), {"instruction": "i", "output": "o", "input": None}]
    )
    assert read_rows(path) == [row("a", given="x", kind="k"), row("o", "i")]
    assert read_rows(path, 1) == [row("a", given="x", kind="k")]
    for bad, said in (
        ({"instruction": "i"}, 'no field "output"'),
        ({"instruction": " ", "output": "o"}, 'field "instruction" is empty'),
        ({"instruction": "i", "output": 3}, 'field "output" holds a number, not text'),
        ({"instruction": "i", "output": "o", "input": []}, 'field "input" holds a list, not text'),
        ({"instruction": "i", "output": "o", "kind": 1}, 'field "kind" holds a number, not text'),
    ):
        with pytest.raises(DataError) as caught:
            read_rows(write(path, [row("a"), bad]))
        assert str(caught.value).startswith(f"{path}:2: {said}")


def test_the_prompt_is_one_user_message_and_the_answer_is_greedy(loaded: LoadedModel) -> None:
    rows = [row("a"), row("the bank", "Repeat.", "the bank"), row("b", "Repeat.", " \n")]
    prompts = ["Say it.", "Repeat.\n\nthe bank", "Repeat."]
    sampling = SamplingConfig(max_new_tokens=2 * len(loaded.tokenizer.encode("the bank")) + 16, temperature=0.0)
    for one, prompt in zip(answer_rows(loaded.model, loaded.tokenizer, rows), prompts, strict=True):
        tokenizer = loaded.tokenizer
        start, end = (tokenizer.special_id(name) for name in ("<|im_start|>", "<|im_end|>"))
        assert start is not None
        assert end is not None
        turn = [start, *tokenizer.encode(f"user\n{prompt}"), end, *tokenizer.encode("\n")]
        ids = [*turn, start, *tokenizer.encode("assistant\n")]
        (alone,) = collect(stream(loaded.model, tokenizer, [ids], sampling, [7]), 1)
        assert one.text == alone.text
        assert one.ended is (alone.finish_reason == "end")
        assert not one.cut


def test_the_batch_makes_no_difference(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("a", "Say " + "it " * (n * 7 % 5)) for n in range(9)]
    expected = [answer_rows(loaded.model, loaded.tokenizer, [one])[0] for one in rows]
    for name, size in (("BATCH_ROWS", 2), ("BATCH_TOKENS", 1), ("BATCH_TOKENS", 10**9)):
        monkeypatch.setattr(instructions, name, size)
        shares: list[float] = []
        assert answer_rows(loaded.model, loaded.tokenizer, rows, shares.append) == expected
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_what_a_model_says_is_counted() -> None:
    model, tokenizer = make_parrot(SAYS)
    rows = [row(SAYS, kind="good"), row("no", kind="bad"), row(f" {SAYS}\n", kind="good"), row(SAYS, kind="bad")]
    answers = answer_rows(model, tokenizer, rows)
    assert [answer.right for answer in answers] == [True, False, True, True]
    assert all(answer.ended and not answer.cut for answer in answers)
    bad, good, whole = tally(answers)
    assert [result.kind for result in (bad, good, whole)] == ["bad", "good", "all"]
    assert (bad.right, good.right, whole.right) == (Share(0.5, 2), Share(1.0, 2), Share(0.75, 4))
    assert (bad.constant, good.constant, whole.constant) == (0.5, 1.0, 0.75)
    assert whole.constant_answer == SAYS


def test_a_question_too_long_loses_its_beginning_and_leaves_room_for_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = make_parrot(SAYS, context=64)
    prompts: list[list[int]] = []

    def recording(*arguments: Any) -> Any:
        prompts.extend(arguments[2])
        return stream(*arguments)

    monkeypatch.setattr(instructions, "stream", recording)
    long = row(SAYS, "Repeat.", "Alice " * 60 + "the end")
    short = row(SAYS, "Repeat.", "the end")
    answers = answer_rows(model, tokenizer, [long, short])
    assert [answer.cut for answer in answers] == [True, False]
    assert [answer.right for answer in answers] == [True, True]
    shorter, longer = sorted(prompts, key=len)
    new_tokens = 2 * len(tokenizer.encode(SAYS)) + 16
    assert len(longer) <= 64 - new_tokens < len(longer) + 3, "as much as there is room for"
    text = tokenizer.decode(longer)
    assert text.startswith("user\n")
    assert text.endswith("Alice the end\nassistant\n")
    assert tokenizer.decode(shorter) == "user\nRepeat.\n\nthe end\nassistant\n"


def test_a_context_without_room_for_a_question_is_one_clear_line() -> None:
    model, tokenizer = make_parrot(SAYS, context=16)
    with pytest.raises(DataError, match="take a model with a longer context"):
        answer_rows(model, tokenizer, [row(SAYS)])


def test_an_answer_that_does_not_end_is_cut_and_wrong() -> None:
    model, tokenizer = make_parrot(SAYS, endless=True)
    (answer,) = answer_rows(model, tokenizer, [row(SAYS)])
    assert not answer.ended
    assert not answer.right
    assert answer.text.startswith(SAYS)
    assert len(tokenizer.encode(answer.text)) == 2 * len(tokenizer.encode(SAYS)) + 16


def test_kinds_are_only_told_where_there_are_some() -> None:
    answers = [Answer(row("a"), "a", True, False), Answer(row("b"), "a", False, False)]
    (whole,) = tally(answers)
    assert (whole.kind, whole.rows, whole.right.value, whole.ended, whole.constant) == ("all", 2, 0.5, 0.5, 0.5)
    mixed = tally([*answers, Answer(row("a", kind="k"), "x", True, False)])
    assert [(result.kind, result.rows) for result in mixed] == [("no kind", 2), ("k", 1), ("all", 3)]


def test_a_model_without_a_way_to_chat_says_so(loaded: LoadedModel) -> None:
    from tokenizers import Tokenizer as Backend

    source = json.loads(loaded.tokenizer._backend.to_str())
    for token in source["added_tokens"]:
        token["content"] = token["content"].replace("<|im_", "<|other_")
    source["model"]["vocab"] = {name.replace("<|im_", "<|other_"): id for name, id in source["model"]["vocab"].items()}
    other = Tokenizer(Backend.from_str(json.dumps(source)), {"eos_token": "<|endoftext|>"})
    with pytest.raises(ModelFolderError, match="no chat template"):
        answer_rows(loaded.model, other, [row("a")])


def test_gradients_are_left_alone(loaded: LoadedModel) -> None:
    answer_rows(loaded.model, loaded.tokenizer, [row("a")])
    assert torch.is_grad_enabled()
