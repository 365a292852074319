"""Conversations into ids that fit a context, and which of the ids are learned.

One that is too long loses its past first, by a rule: the oldest turns go, each whole, while the system message and the
newest turn stay; then the beginning of the newest question, down to a quarter of the context; then the end of the
answer, with the token that would have ended it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minigpt.errors import DataError, MinigptError
from minigpt.text.chat import ChatTemplate, Message
from minigpt.text.conversations import Conversation

_LEAST_QUESTION = 4  # a question keeps at least the context divided by this


@dataclass(frozen=True, eq=False)
class Encoded:
    """The ids (N,) of a conversation up to the last that is learned, and flags (N,) of those that are."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]

    def __len__(self) -> int:
        """Count the positions that a model reads: the last id is a target only."""
        return len(self.ids) - 1


@dataclass
class FitCounts:
    """How many conversations were cut to fit, and how many were dropped since no answer was left in the context."""

    cut: int = 0
    dropped: int = 0


def encode_conversations(
    conversations: Iterable[Conversation], template: ChatTemplate, context: int, counts: FitCounts
) -> list[Encoded]:
    """Encode conversations for training, none longer than ``context`` positions; those without an answer are left out.

    Errors: DataError when none is left; what the template refuses, such as a system message, with file and line.
    """
    encoded: list[Encoded] = []
    for conversation in conversations:
        try:
            one = fit(conversation.messages, template, context, counts)
        except MinigptError as error:
            raise type(error)(f"{conversation.where}: {error}") from error
        if one is not None:
            encoded.append(one)
    if not encoded:
        raise nothing_left(context, counts)
    return encoded


def nothing_left(context: int, counts: FitCounts) -> DataError:
    """Say that no conversation has an answer within the context."""
    return DataError(
        f"no answer is left in a context of {context:,} tokens: in all {counts.dropped:,} conversations what comes "
        "before it is longer; choose a larger --context, or give shorter conversations"
    )


def fit(messages: Sequence[Message], template: ChatTemplate, context: int, counts: FitCounts) -> Encoded | None:
    """Encode one conversation for training, cut by the rule where it is too long; None where no answer is left."""
    limit = context + 1
    encoded = _encode(messages, template)
    too_long = len(encoded.ids) > limit
    if too_long:
        encoded = _encode(shortened(messages, template, limit), template)
        encoded = _up_to_last_target(encoded.ids[:limit], encoded.trained[:limit])
    if len(encoded.ids) < 2:  # a first id is never predicted
        counts.dropped += 1
        return None
    counts.cut += too_long
    return encoded


def _encode(messages: Sequence[Message], template: ChatTemplate) -> Encoded:
    ids, trained = template.encode_for_training(messages)
    return _up_to_last_target(np.array(ids, dtype=np.int32), np.array(trained, dtype=np.bool_))


def _up_to_last_target(ids: NDArray[np.int32], trained: NDArray[np.bool_]) -> Encoded:
    """Leave out what follows the last learned id, which carries no loss."""
    targets = np.flatnonzero(trained)
    end = int(targets[-1]) + 1 if len(targets) else 0
    return Encoded(ids[:end], trained[:end])


def shortened(messages: Sequence[Message], template: ChatTemplate, limit: int) -> list[Message]:
    """Take away the oldest turns until `limit` ids are left, and where the newest turn is still too long, the beginning
    of its question.
    """
    head = [message for message in messages[:1] if message.role == "system"]
    first = first_turn_kept(messages, lambda first: len(_encode([*head, *messages[first:]], template).ids) <= limit)
    question, *answers = messages[first:]

    def shortened(text: str) -> list[Message]:
        return [*head, Message(question.role, text), *answers]

    least = max(1, limit // _LEAST_QUESTION)
    text, _ = without_beginning(
        question.content, template, lambda text: len(_encode(shortened(text), template).ids) - limit, least
    )
    return shortened(text)


def first_turn_kept(messages: Sequence[Message], fits: Callable[[int], bool]) -> int:
    """Return where the oldest turn that is kept begins: a turn is a question with all up to the next one.

    ``fits(place)`` tells whether the messages from there on fit, behind the system message. The newest turn is kept
    whether it fits or not, and the first, whose place is that behind the system message, is never kept.
    """
    head = 1 if messages[0].role == "system" else 0
    questions = [place for place, message in enumerate(messages) if message.role == "user" and place > head]
    if not questions:
        return head
    return questions[bisect_left(questions, True, hi=len(questions) - 1, key=fits)]


def without_beginning(
    text: str, template: ChatTemplate, excess: Callable[[str], int], least: int = 0
) -> tuple[str, int]:
    """Cut the beginning of a text until ``excess`` tells that no token is too many, or ``least`` tokens are left.

    Return what is left, and how many tokens went.
    """
    tokenizer = template.tokenizer
    whole = ids = tokenizer.encode(text.strip())
    while len(ids) > least and (over := excess(text)) > 0:
        ids = ids[len(ids) - max(least, len(ids) - over) :]
        text = tokenizer.decode(ids, continuing=True).lstrip("\ufffd")  # half a character
    return text, len(whole) - len(ids)
