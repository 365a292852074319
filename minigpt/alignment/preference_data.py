"""From files of preferences to encoded rows, in training and held out; what was found is told to a reporter."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minigpt.alignment.pairs import EncodedPair, at_the_end, fit_answers
from minigpt.alignment.preference import PreferenceMethod
from minigpt.config import ModelConfig
from minigpt.errors import ConfigError, DataError, MinigptError
from minigpt.text.chat import ChatTemplate, chat_template
from minigpt.text.conversations import split_conversations
from minigpt.text.fitting import FitCounts
from minigpt.text.preferences import Labelled, Pair, PreferenceCounts, load_labelled, load_pairs
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.chat_data import ChatRequest
from minigpt.training.runs import Reporter

Rows = Sequence[Pair | Labelled]
MOST_TOKENS = 2_048  # of an answer with its prompt, when nobody asks for more


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    """Rows to train on and to score; `examples` are prompts for answers before and after. `facts` go into the record.

    Their `digest` tells whether the same preferences are read again.
    """

    template: ChatTemplate
    context: int
    train: list[EncodedPair]
    held_out: list[EncodedPair]
    examples: Rows
    facts: dict[str, Any]

    @property
    def mean_length(self) -> int:
        """The positions of a row, both sides together, on the average."""
        return max(1, round(sum(len(pair.first) + len(pair.second) for pair in self.train) / len(self.train)))


def read_preferences(
    request: ChatRequest,
    method: PreferenceMethod,
    tokenizer: Tokenizer,
    model: ModelConfig,
    context: int | None,
    report: Reporter,
) -> PreferenceData:
    """Read, split and encode pairs, or for KTO answers that are marked; none is longer than `context` positions.

    To KTO a pair is two answers, a good and a bad one.

    Errors: DataError for bad rows, by file and line, and where nothing is left to train on; ConfigError for a template
    that cannot be trained with, or a context that the model does not have.
    """
    most = model.max_position_embeddings
    if context is not None and context > most:
        raise ConfigError(f"context is {context:,}, more than the model's {most:,}; give a smaller --context")
    length = context or min(most, MOST_TOKENS)
    template = chat_template(tokenizer, request.template)
    template.check_for_training()
    counts, fitted = PreferenceCounts(), FitCounts()
    read: Callable[..., Rows] = load_labelled if method == "kto" else load_pairs
    found = read(request.sources, request.options(), counts)
    train, held_out, leaks = _split(found, request.val_fraction)
    encoded = [_encoded(part, method, template, length, fitted) for part in (train, held_out)]
    if not encoded[0]:
        raise DataError(
            f"no answer is left in a context of {length:,} tokens: all {fitted.dropped:,} rows have longer prompts; "
            "choose a larger --context, or give shorter ones"
        )
    _tell(request, method, counts, fitted, encoded, leaks, report)
    facts = {"digest": _digest(found), "rows": len(found), "held_out": len(encoded[1]), **asdict(fitted)}
    return PreferenceData(
        template=template,
        context=length,
        train=encoded[0],
        held_out=encoded[1],
        examples=held_out or train,
        facts=facts,
    )


def _split(rows: Any, share: float) -> tuple[Any, Any, int]:
    split = split_conversations(rows, share)
    return split.train, split.held_out, split.leaks


def _encoded(
    rows: Rows, method: PreferenceMethod, template: ChatTemplate, context: int, counts: FitCounts
) -> list[EncodedPair]:
    """Encode rows; a reward is read behind an answer's last token, for which there must be room."""
    partners = _partners(len(rows))
    encoded = []
    for place, row in enumerate(rows):
        if isinstance(row, Pair):
            answers, good = [row.chosen, row.rejected], True
        else:
            other = rows[partners[place]]
            assert isinstance(other, Labelled)
            answers, good = [row.answer, other.answer], row.good
        room = context - 1 if method == "reward" else context
        try:
            fitted = fit_answers(row.prompt, answers, template, room, counts)
        except MinigptError as error:
            raise type(error)(f"{row.where}: {error}") from error
        if fitted is not None:
            first, second = map(at_the_end, fitted) if method == "reward" else fitted
            encoded.append(EncodedPair(first, second, good))
    return encoded


def _partners(count: int) -> list[int]:
    """Give each of so many rows another one, by a fixed shuffle; one alone has only itself."""
    order = np.random.Generator(np.random.Philox(key=[count, 0])).permutation(count)
    partners = [0] * count
    for place, following in zip(order, np.roll(order, -1), strict=True):
        partners[int(place)] = int(following)
    return partners


def _digest(rows: Rows) -> str:
    """Tell one set of preferences from another."""
    digest = hashlib.sha256()
    for row in rows:
        parts = (row.prompt, row.chosen, row.rejected) if isinstance(row, Pair) else (row.prompt, row.answer)
        turns = [[(message.role, message.content) for message in part] for part in parts]
        label = None if isinstance(row, Pair) else row.good
        digest.update(json.dumps([turns, label]).encode("utf-8"))
    return digest.hexdigest()


def _tell(
    request: ChatRequest,
    method: PreferenceMethod,
    counts: PreferenceCounts,
    fitted: FitCounts,
    encoded: Sequence[list[EncodedPair]],
    leaks: int,
    report: Reporter,
) -> None:
    shapes: Counter[str] = sum(counts.shapes.values(), Counter())
    train, held_out = encoded
    what = "marked answers" if method == "kto" else "pairs"
    parts = [request.named, " and ".join(shape for shape, _ in shapes.most_common())]
    parts += [f"{len(train) + len(held_out):,} {what}", *counts.notes()]
    if what != "pairs":
        parts.append(f"{sum(row.good for rows in encoded for row in rows):,} of them good")
    parts.append(f"{len(held_out):,} held out" if held_out else "none held out")
    if leaks:
        parts.append(f"{leaks:,} not, since training asks the same")
    if fitted.cut:
        parts.append(f"{fitted.cut:,} cut to fit")
    if fitted.dropped:
        parts.append(f"{fitted.dropped:,} dropped, since no answer was left in them")
    report.fact("data", ", ".join(parts))
    if counts.first_skipped is not None:
        report.warning(f"{counts.first_skipped} (the first of {counts.skipped.total():,} bad rows skipped)")
