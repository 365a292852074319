"""Instructions with one right answer each: what share of them a model answers rightly, by its own greedy words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from minigpt.config import SamplingConfig
from minigpt.evaluation.rows import BadRow, row_files, text_of
from minigpt.evaluation.shares import Share
from minigpt.inference.chat import Said, fit, room_for_answer
from minigpt.inference.engine import collect, stream
from minigpt.model.transformer import GPT
from minigpt.text.chat import Message, chat_template
from minigpt.text.decoding import replace_surrogates
from minigpt.text.instructions import joined
from minigpt.text.records import kind_of
from minigpt.text.tokenizer import Tokenizer

EXPECTED = 'a row of instructions is {"instruction": …, "input": …, "output": …, "kind": …}'
BATCH_ROWS = 32
BATCH_TOKENS = 16384  # of prompts and answers together
SPARE_TOKENS = 16


class Row(TypedDict):
    """An instruction, what it works on (may be empty), the answer, and the kind of task (may be empty)."""

    instruction: str
    input: str
    output: str
    kind: str


@dataclass(frozen=True)
class Answer:
    """What a model answered to a row, and whether it ended by itself; `cut` questions lost their beginning."""

    row: Row
    text: str
    ended: bool
    cut: bool

    @property
    def right(self) -> bool:
        """Whether it is the answer of the row."""
        return is_right(self.text, self.row)


@dataclass(frozen=True, kw_only=True)
class KindResult:
    """How the rows of a kind were answered; `constant` is the share right if all were answered `constant_answer`."""

    kind: str
    rows: int
    right: Share
    ended: float
    constant: float
    constant_answer: str


def is_right(answer: str, row: Row) -> bool:
    """Tell whether an answer is that of the row; how words are spaced does not count."""
    return _plain(answer) == _plain(row["output"])


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """Read the rows of a file, at most `limit`; a DataError names file and line of one that is none.

    Fields `input` and `kind` may be missing.
    """
    return [row for file in row_files(path) for row in file.read(_row, EXPECTED, limit)]


def answer_rows(
    model: GPT, tokenizer: Tokenizer, rows: Sequence[Row], progress: Callable[[float], None] | None = None
) -> list[Answer]:
    """Answer every row greedily as one user message in the model's chat template; in order, whatever the batches.

    Answers end at twice the tokens of the longest right one and a few more: none that is longer could be right. A
    question too long to leave room for that, half of the context at most, loses its beginning.
    `progress` is told the share that is done. Errors: ModelFolderError for a model without chat template; DataError for
    a context that has no room for a question.
    """
    template = chat_template(tokenizer)
    longest = max(map(len, tokenizer.encode_batch([row["output"] for row in rows])))
    sampling = SamplingConfig(max_new_tokens=2 * longest + SPARE_TOKENS, temperature=0.0)
    context = model.config.max_position_embeddings
    limit = context - room_for_answer(context, sampling.max_new_tokens)
    fitted = [fit([Said(Message("user", joined(row["instruction"], row["input"])))], template, limit) for row in rows]
    prompts = [one.ids for one in fitted]
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    answers: dict[int, Answer] = {}
    while len(answers) < len(rows):
        batch = _batch(order[len(answers) :], prompts, min(context, sampling.max_new_tokens))
        events = stream(model, template.tokenizer, [prompts[i] for i in batch], sampling, [0] * len(batch))
        for i, done in zip(batch, collect(events, len(batch)), strict=True):
            answers[i] = Answer(rows[i], done.text, done.finish_reason == "end", fitted[i].cut > 0)
        if progress is not None:
            progress(len(answers) / len(rows))
    return [answers[i] for i in range(len(rows))]


def tally(answers: Sequence[Answer]) -> list[KindResult]:
    """Count what was answered rightly: of each kind, in the order of their names, and last of all rows."""
    kinds = sorted({answer.row["kind"] for answer in answers})
    parts = [(kind, [answer for answer in answers if answer.row["kind"] == kind]) for kind in kinds if any(kinds)]
    return [_count(kind, part) for kind, part in (*parts, ("all", answers))]


def _count(kind: str, answers: Sequence[Answer]) -> KindResult:
    rows = len(answers)
    constant, times = Counter(_plain(answer.row["output"]) for answer in answers).most_common(1)[0]
    return KindResult(
        kind=kind or "no kind",
        rows=rows,
        right=Share(sum(answer.right for answer in answers) / rows, rows),
        ended=sum(answer.ended for answer in answers) / rows,
        constant=times / rows,
        constant_answer=constant,
    )


def _plain(text: str) -> str:
    return " ".join(text.split())


def _row(record: Mapping[str, Any]) -> Row:
    given, kind = (_may_be_empty(record, field) for field in ("input", "kind"))
    return Row(instruction=text_of(record, "instruction"), input=given, output=text_of(record, "output"), kind=kind)


def _may_be_empty(record: Mapping[str, Any], field: str) -> str:
    """Return a field's text; what is missing or null is empty."""
    value = record.get(field)
    if value is not None and not isinstance(value, str):
        raise BadRow(f'field "{field}" holds {kind_of(value)}, not text')
    return replace_surrogates(value or "")


def _batch(order: Sequence[int], prompts: Sequence[Sequence[int]], new_tokens: int) -> Sequence[int]:
    """Take as many of the next rows, by the length of their prompts, as fit in one batch; at least one."""
    size = 1
    while size < min(BATCH_ROWS, len(order)) and (size + 1) * (len(prompts[order[size]]) + new_tokens) <= BATCH_TOKENS:
        size += 1
    return order[:size]
