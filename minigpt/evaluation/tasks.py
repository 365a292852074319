"""Tasks that a language model answers by what it finds likeliest: LAMBADA, BLiMP, ARC, PIQA.

Nothing is generated: each choice is scored as the continuation of a context, as in EleutherAI's lm-evaluation-harness.
Of several choices the one with the highest log-probability is the answer: once summed over its tokens (`acc` there),
once divided by its UTF-8 bytes without the space before it, which does not favour short ones. `acc_norm` there divides
by characters: the two are the same only where every choice is plain ASCII. A tie is no right answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minigpt.evaluation.continuations import Continuation, Likelihood, encode, likelihoods
from minigpt.evaluation.rows import BadRow, checked_text, field_of, row_files, text_of
from minigpt.evaluation.shares import Share, mean
from minigpt.model.transformer import GPT
from minigpt.text.records import kind_of
from minigpt.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """A context, the continuations to choose from, each with the space before it, and the place of the right one."""

    context: str
    choices: tuple[str, ...]
    right: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a model got right of a file's rows, or of several files: then the mean of their shares.

    `right_per_byte` and `chance` belong to questions with several choices; `nats` (the loss of all words) and `words`
    to those with one. `cut` rows are longer than the context, and lost their beginning.
    """

    name: str
    rows: int
    right: Share
    right_per_byte: Share | None = None
    chance: float | None = None
    nats: float = 0.0
    words: int = 0
    cut: int = 0

    @property
    def perplexity(self) -> float | None:
        """e to the loss a word; None for questions with several choices."""
        return math.exp(min(self.nats / self.words, 700.0)) if self.words else None


def run_task(
    model: GPT,
    tokenizer: Tokenizer,
    task: str,
    path: Path,
    *,
    limit: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[Result]:
    """Ask a model the questions of a file, or of each file in a folder or zip archive, at most `limit` of each file.

    `progress` is told the file's name and the share that is done of all. Errors: DataError for a row that is not one
    of the task's; every file is read before the first is scored.
    """
    parse, expected = TASKS[task]
    files = {file: file.read(parse, expected, limit) for file in row_files(path)}
    total, results = sum(map(len, files.values())), []
    done = 0
    for file, questions in files.items():
        tell = partial(_tell, progress, file.name, done / total, len(questions) / total)
        results.append(_ask(model, tokenizer, file.name, questions, tell))
        done += len(questions)
    return results


def _tell(progress: Callable[[str, float], None] | None, name: str, before: float, part: float, share: float) -> None:
    """Pass on that a share is done of a file that is a part of all."""
    if progress is not None:
        progress(name, before + share * part)


def overall(results: Sequence[Result]) -> Result:
    """Put the results of several files together: the mean of their shares, and the perplexity of all words."""
    per_byte = [result.right_per_byte for result in results if result.right_per_byte is not None]
    chance = [result.chance for result in results if result.chance is not None]
    return Result(
        name="mean",
        rows=sum(result.rows for result in results),
        right=mean([result.right for result in results]),
        right_per_byte=mean(per_byte) if per_byte else None,
        chance=sum(chance) / len(chance) if chance else None,
        nats=sum(result.nats for result in results),
        words=sum(result.words for result in results),
        cut=sum(result.cut for result in results),
    )


def _ask(
    model: GPT, tokenizer: Tokenizer, name: str, questions: Sequence[Question], progress: Callable[[float], None]
) -> Result:
    """Score every choice of every question and count what is right."""
    items = encode(tokenizer, [(question.context, question.choices) for question in questions])
    found = iter(likelihoods(model, [item for choices in items for item in choices], progress))
    scored = [[next(found) for _ in choices] for choices in items]
    rows, context = len(questions), model.config.max_position_embeddings
    cut = sum(any(_is_cut(item, context) for item in choices) for choices in items)
    if len(questions[0].choices) == 1:
        right = Share(sum(choices[0].greedy for choices in scored) / rows, rows)
        nats = -sum(choices[0].logprob for choices in scored)
        words = sum(len(question.choices[0].split()) for question in questions)
        return Result(name=name, rows=rows, right=right, nats=nats, words=words, cut=cut)
    pairs = list(zip(questions, scored, strict=True))
    summed = sum(_chosen([found.logprob for found in choices]) == q.right for q, choices in pairs)
    per_byte = sum(_chosen(_per_byte(q, choices)) == q.right for q, choices in pairs)
    chance = sum(1 / len(question.choices) for question in questions) / rows
    return Result(
        name=name,
        rows=rows,
        right=Share(summed / rows, rows),
        right_per_byte=Share(per_byte / rows, rows),
        chance=chance,
        cut=cut,
    )


def _is_cut(item: Continuation, context: int) -> bool:
    return len(item.ids) - 1 > context


def _per_byte(question: Question, found: Sequence[Likelihood]) -> list[float]:
    return [
        one.logprob / len(choice.strip().encode("utf-8")) for choice, one in zip(question.choices, found, strict=True)
    ]


def _chosen(scores: Sequence[float]) -> int | None:
    """The place of the highest score, or None for a tie, or where scores are no numbers."""
    best = max(scores)
    return scores.index(best) if scores.count(best) == 1 and not any(map(math.isnan, scores)) else None


def _lambada(record: Mapping[str, Any]) -> Question:
    """Paperno et al. 2016: the last word of a passage that can only be guessed from all of it."""
    return Question(text_of(record, "context").rstrip(), (f" {text_of(record, 'continuation').strip()}",))


def _blimp(record: Mapping[str, Any]) -> Question:
    """Warstadt et al. 2020: of two sentences that differ a little, the grammatical one is likelier."""
    return Question("", (text_of(record, "sentence_good").strip(), text_of(record, "sentence_bad").strip()))


def _multiple_choice(record: Mapping[str, Any]) -> Question:
    """ARC (Clark et al. 2018) and PIQA (Bisk et al. 2020): a question, and answers of which one is right."""
    query, choices, gold = text_of(record, "query"), field_of(record, "choices"), field_of(record, "gold")
    if not isinstance(choices, list):
        raise BadRow(f'field "choices" holds {kind_of(choices)}, not a list')
    if len(choices) < 2:
        raise BadRow(f'field "choices" holds {len(choices)} of them, not two or more')
    texts = [checked_text(choice, f"choice {number}").strip() for number, choice in enumerate(choices)]
    if not isinstance(gold, int) or isinstance(gold, bool):
        raise BadRow(f'field "gold" holds {kind_of(gold)}, not the number of a choice')
    if not 0 <= gold < len(choices):
        raise BadRow(f'field "gold" is {gold}; the choices are 0 to {len(choices) - 1}')
    return Question(f"{query.rstrip()}\nAnswer:", tuple(f" {text}" for text in texts), gold)


# What reads a row of each task, and what a row looks like.
TASKS: dict[str, tuple[Callable[[Mapping[str, Any]], Question], str]] = {
    "lambada": (_lambada, 'a row of lambada is {"context": …, "continuation": …}'),
    "blimp": (_blimp, 'a row of blimp is {"sentence_good": …, "sentence_bad": …}'),
    "arc": (_multiple_choice, 'a row of arc is {"query": …, "choices": […, …], "gold": 0}'),
    "piqa": (_multiple_choice, 'a row of piqa is {"query": …, "choices": […, …], "gold": 0}'),
}
