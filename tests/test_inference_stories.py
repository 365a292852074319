"""A trained model of another project, against figures computed with `transformers`."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from minigpt.checkpoint.folder import LoadedModel, load
from minigpt.config import SamplingConfig
from minigpt.evaluation.bits import Score
from minigpt.inference.engine import collect, stream
from minigpt.inference.scoring import score

PROMPTS = ("Once upon a time", "Tom and Jane are friends.")


@pytest.fixture(scope="module")
def stories(shared: Path) -> LoadedModel:
    folder = shared / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("models/stories260k is not there")
    return load(folder)


@pytest.fixture(scope="module")
def figures(shared: Path) -> dict[str, Any]:
    path = shared / "models" / "reference.json"
    if not path.is_file():
        pytest.skip("models/reference.json is not there")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["stories260k"]
    return found


def continued(stories: LoadedModel, prompt: list[int], new: int) -> tuple[list[int], str]:
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=new)
    row = collect(stream(stories.model, stories.tokenizer, [prompt], sampling, [0]), 1)[0]
    return [event.token_id for event in row.tokens], row.text


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.no_grad()
def test_ids_and_logits(stories: LoadedModel, figures: dict[str, Any], prompt: str) -> None:
    ids = stories.tokenizer.encode_prompt(prompt)
    assert ids == figures[prompt]["ids"]
    best = stories.model(torch.tensor([ids]))[0, -1].topk(5)
    assert best.indices.tolist() == [token for token, _ in figures[prompt]["top5"]]
    assert best.values.tolist() == pytest.approx([value for _, value in figures[prompt]["top5"]], abs=1e-4)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text(stories: LoadedModel, figures: dict[str, Any], prompt: str) -> None:
    ids, text = continued(stories, figures[prompt]["ids"], 40)
    assert ids == figures[prompt]["greedy_ids"]
    # The figures are of the new ids alone; what goes on from a text keeps the space before its first word.
    assert stories.tokenizer.decode(ids) == figures[prompt]["text"]
    assert text in (figures[prompt]["text"], " " + figures[prompt]["text"])
    whole = stories.tokenizer.decode(figures[prompt]["ids"] + ids)
    assert whole == prompt + text


def test_a_text_from_nothing_begins_without_a_space(stories: LoadedModel) -> None:
    ids, text = continued(stories, stories.tokenizer.encode_prompt(""), 5)
    assert text == stories.tokenizer.decode(ids)
    assert not text.startswith(" ")


def test_the_loss_of_100_stories(stories: LoadedModel, figures: dict[str, Any], shared: Path) -> None:
    text = (shared / "data" / "pretrain" / "en" / "tinystories_val.txt").read_text(encoding="utf-8")
    nats, tokens, size = 0.0, 0, 0
    for story in re.split(r"\n\n(?=Once upon a time)", text)[1:101]:  # the file begins in the middle of one
        ids = np.array(stories.tokenizer.encode_prompt(story))[:512]  # one context
        losses = score(stories.model, partial(between, ids), len(ids))
        nats, tokens = nats + float(losses.sum(dtype=np.float64)), tokens + len(losses)
        size += len(stories.tokenizer.decode(ids.tolist()).encode())
    expected = figures["tinystories_val_100"]
    assert tokens == expected["tokens"]
    assert nats / tokens == pytest.approx(expected["nats_per_token"], rel=1e-5)
    assert Score(nats, tokens, size).bits_per_byte == pytest.approx(expected["bits_per_byte"], rel=1e-5)


def between(ids: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    return ids[start:stop]
