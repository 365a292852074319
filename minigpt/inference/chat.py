"""A conversation with a model: what was said, what of it still fits, and the cache that is kept between turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from minigpt.config import SamplingConfig
from minigpt.errors import DataError
from minigpt.inference.engine import TokenEvent, stream_from
from minigpt.model.cache import KVCache
from minigpt.model.transformer import GPT
from minigpt.text.chat import ChatTemplate, Message
from minigpt.text.fitting import first_turn_kept, without_beginning

LEAST_CAPACITY = 256  # tokens that a cache begins with; it grows by doubling


@dataclass(frozen=True)
class Said:
    """A message, and for an answer the ids that the model wrote, where they spell it exactly."""

    message: Message
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Fitted:
    """What of a conversation goes into a prompt: its ids, the messages left out, the tokens cut off the last one."""

    ids: list[int]
    left_out: int = 0
    cut: int = 0


@dataclass(frozen=True)
class Forgotten:
    """An event before an answer: the conversation is past the context, and so much of it the model no longer sees.

    `turns` questions with their answers went; of the newest question the first `tokens` were cut off.
    """

    turns: int
    tokens: int


def room_for_answer(context: int, max_new_tokens: int) -> int:
    """How many tokens of the context a prompt leaves free: those of the answer, half of the context at most."""
    return min(max_new_tokens, context // 2)


def fit(said: Sequence[Said], template: ChatTemplate, limit: int) -> Fitted:
    """Encode a conversation as a prompt of at most `limit` tokens.

    The system message stays. Of the rest the oldest turns go, each whole, until a quarter of the limit is free, so that
    the next turns can be put behind what is in the cache. A last question too long by itself loses its beginning.
    Errors: DataError where nothing of the last question would be left.
    """
    ids = _encode(said, template)
    if len(ids) <= limit:
        return Fitted(ids)
    head = [turn for turn in said[:1] if turn.message.role == "system"]
    first = first_turn_kept(
        [turn.message for turn in said],
        lambda first: len(_encode([*head, *said[first:]], template)) <= limit * 3 // 4,
    )
    kept = [*head, *said[first:]]
    question = kept[len(head)].message

    def encoded(text: str) -> list[int]:
        kept[len(head)] = Said(Message(question.role, text))
        return _encode(kept, template)

    text, cut = without_beginning(question.content, template, lambda text: len(encoded(text)) - limit)
    ids = encoded(text)
    if len(ids) > limit or (cut and not text.strip()):
        others = [turn.message for turn in (*head, *kept[len(head) + 1 :])]
        longest = max(others, key=lambda message: len(message.content), default=None)
        advice = "" if longest is None else f"shorten the {longest.role} message, "
        raise DataError(
            f"without the question there are {len(encoded('')):,} tokens already, and the context has room for "
            f"{limit:,} beside an answer; {advice}allow fewer new tokens, or take a model with a longer context"
        )
    return Fitted(ids, first - len(head), cut)


def _encode(said: Sequence[Said], template: ChatTemplate) -> list[int]:
    answers = {place: turn.ids for place, turn in enumerate(said) if turn.ids is not None}
    return template.encode([turn.message for turn in said], answers=answers)


class Chat:
    """A conversation that goes on: questions in, answers as a stream of events out. It prints nothing.

    Only tokens that are new are read by the model: the cache stays as it is between turns, and is set back to the last
    token that a new prompt shares with it. An answer that is broken off, by an exception or by closing the stream,
    stays as far as it got; before its first token, all is as if it had never been asked for.
    """

    def __init__(
        self,
        model: GPT,
        template: ChatTemplate,
        system: str | None = None,
        context: int | None = None,
        *,
        speculate: bool = False,
    ) -> None:
        self.model, self.template, self.speculate = model, template, speculate
        self.context = min(context or model.config.max_position_embeddings, model.config.max_position_embeddings)
        self.prefilled = 0  # tokens of prompts that the model has read, for whoever wants to know
        self._system = system
        self._said: list[Said] = []
        self._first = 0  # the first message that the model still sees
        self._cache: KVCache | None = None
        self._held: list[int] = []  # the ids in the cache

    @property
    def system(self) -> str | None:
        """The system message; a new one holds from the next answer on."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system, self._first = text, 0

    @property
    def messages(self) -> list[Message]:
        """Everything that was said, also what the model no longer sees."""
        return [turn.message for turn in self._all(0)]

    def load(self, messages: Sequence[Message]) -> None:
        """Go on from another conversation; its system message, or its lack of one, holds too."""
        head = [message for message in messages[:1] if message.role == "system"]
        self.system = head[0].content if head else None
        self._said = [Said(message) for message in messages[len(head) :]]

    def reset(self) -> None:
        """Begin anew; the system message stays."""
        self._said, self._first = [], 0

    def undo(self) -> bool:
        """Take back the last question and all after it; False where there is none."""
        questions = [place for place, turn in enumerate(self._said) if turn.message.role == "user"]
        if questions:
            self._said, self._first = self._said[: questions[-1]], 0
        return bool(questions)

    def ask(self, question: str, sampling: SamplingConfig, seed: int) -> Iterator[Forgotten | TokenEvent]:
        """Put a question and yield the answer; before it an event where something is forgotten.

        Errors: DataError and ModelFolderError where no prompt can be made of it.
        """
        yield from self._answer([*self._said, Said(Message("user", question))], sampling, seed)

    def retry(self, sampling: SamplingConfig, seed: int) -> Iterator[Forgotten | TokenEvent]:
        """Answer the last question again. Errors: DataError where there is none, and those of a question."""
        answers = sum(1 for _ in takewhile(lambda turn: turn.message.role == "assistant", reversed(self._said)))
        said = self._said[: len(self._said) - answers]
        if not said:
            raise DataError("nothing was asked yet; there is no answer to try again")
        yield from self._answer(said, sampling, seed)

    def _all(self, first: int) -> list[Said]:
        head = [] if self._system is None else [Said(Message("system", self._system))]
        return [*head, *self._said[first:]]

    def _prompt(self, sampling: SamplingConfig) -> tuple[list[int], Forgotten | None]:
        """Make the prompt for an answer of all that fits, and say what is forgotten from now on."""
        limit = self.context - room_for_answer(self.context, sampling.max_new_tokens)
        fitted = fit(self._all(self._first), self.template, limit)
        gone = self._said[self._first : self._first + fitted.left_out]
        self._first += fitted.left_out
        if not (gone or fitted.cut):
            return fitted.ids, None
        return fitted.ids, Forgotten(sum(turn.message.role == "user" for turn in gone), fitted.cut)

    def _answer(self, said: list[Said], sampling: SamplingConfig, seed: int) -> Iterator[Forgotten | TokenEvent]:
        """Go on from what was said with an answer; where no token of it comes, nothing has changed."""
        before = self._said, self._first
        self._said, ids, text, cache = said, list[int](), "", None
        try:
            prompt, forgotten = self._prompt(sampling)
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.context - len(prompt)))
            cache = self._reuse(prompt, len(prompt) + sampling.max_new_tokens)
            if forgotten is not None:
                yield forgotten
            tokenizer, speculate = self.template.tokenizer, self.speculate
            for event in stream_from(self.model, tokenizer, cache, prompt, sampling, seed, speculate=speculate):
                ids.append(event.token_id)
                text += event.text
                yield event
        finally:
            if cache is not None:
                self._held = [*prompt, *ids][: cache.lengths[0]]
            if ids:
                self._keep(ids, text)
            else:
                self._said, self._first = before

    def _reuse(self, prompt: list[int], needed: int) -> KVCache:
        """Return the cache, set back to what it shares with the prompt, with room for `needed` tokens."""
        capacity = min(max(LEAST_CAPACITY, 1 << (needed - 1).bit_length()), self.context)
        if self._cache is None:
            weight = next(self.model.parameters())
            self._cache = KVCache(self.model.config, 1, capacity, device=weight.device, dtype=weight.dtype)
        elif self._cache.capacity < needed:
            self._cache.grow(capacity)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._held, prompt, strict=False)))
        same = min(same, len(prompt) - 1)  # the logits after the last token are not in the cache
        self._held = self._held[:same]
        self._cache.truncate(same)
        self.prefilled += len(prompt) - same
        return self._cache

    def _keep(self, ids: list[int], text: str) -> None:
        """Take note of an answer, whole or broken off."""
        written = ids[:-1] if ids and ids[-1] in self.template.tokenizer.end_ids else ids
        exact = self.template.tokenizer.decode(written, continuing=True) == text  # no stop string, no half character
        self._said.append(Said(Message("assistant", text.strip()), tuple(written) if exact else None))
