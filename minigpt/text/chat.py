"""Conversations into ids, and which of them a model is trained to say: the only place that knows chat templates.

A template is rendered with a placeholder for each content, so that what it wrote and what people wrote stay apart: only
the template makes control tokens, and the tokens to train are found by construction, never by searching text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

from minigpt.errors import ConfigError, ModelFolderError
from minigpt.text.templates import Template, TemplateRefusal
from minigpt.text.tokenizer import CHATML, IM_END, IM_START, Tokenizer

__all__ = ["CHATML", "ChatTemplate", "Message", "Segment", "chat_template"]

_OFFER = "train with ChatML in its place: --template chatml"
_MOST_KEPT = 1000  # renderings: one for each order of roles; the oldest goes first

# Characters that stand for nothing, around the number of a message.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_PLACEHOLDER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

# What a template may not change: blanks, line ends, quotes, signs that HTML escapes, length.
_PROBES = (
    "Say \"yes\"  or 'no',\n\n  then <b> & {{ x }} \\n.",
    "ÄÖ straße 猫😀\tMixed Case",
    "- one\n- two\n" * 200 + "end",
    "1 < 2",
)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; ``role`` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation: a content or what the template wrote; ``trained`` is what a model learns."""

    text: str
    content: bool
    trained: bool


@dataclass(frozen=True)
class _Part:
    """A piece of a conversation whose contents are left open."""

    text: str
    pieces: tuple[int | str, ...]  # the ids of control tokens, and the text between them
    message: int | None  # the number of the message whose content belongs here
    turn: int | None  # the number of the answer that this is part of, where the model has to write it

    def filled(self, messages: Sequence[Message]) -> tuple[int | str, ...]:
        """The pieces, or the content of the message."""
        return self.pieces if self.message is None else (messages[self.message].content.strip(),)


_Rendering = tuple[tuple[str, ...], bool]  # roles, and whether the beginning of an answer is put behind them


@dataclass(frozen=True)
class _Layout:
    """The parts of all conversations with the same roles, and what keeps them from being trained on."""

    parts: tuple[_Part, ...]
    fault: str


class ChatTemplate:
    """A chat template together with the tokenizer that its conversations are encoded with.

    Contents are trimmed. A conversation begins with the begin token, once, where the model has one. Errors: every
    method may raise a ModelFolderError for a template that is broken or does not take the messages.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self._template = Template(source)
        self._tokenizer = tokenizer
        self._rendered: dict[_Rendering, str] = {}
        self._layouts: dict[tuple[*_Rendering, bool], _Layout] = {}
        self._headers: dict[str, int | None] = {}  # what stands before an answer, and how much of it is in the prompt

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with this template in its files, and with the template's turn end among its end ids."""
        ends = [] if self.turn_end is None else [self.turn_end]
        if self.source == self._tokenizer.chat_template and set(ends) <= set(self._tokenizer.end_ids):
            return self._tokenizer
        return self._tokenizer.with_chat(self.source, ends)

    @cached_property
    def turn_end(self) -> int | None:
        """The control token that the template writes next after every answer, be it in the middle or the last one."""
        try:
            text = self._render(("user", "assistant") * 2, False)
        except ModelFolderError:
            return None
        ends = list(_PLACEHOLDER.finditer(text))
        if [match[1] for match in ends] != ["0", "1", "2", "3"]:
            return None
        after = text[ends[1].end() : ends[2].start()], text[ends[3].end() :]
        middle, last = (next((id for *_, id in self._tokenizer.control_tokens(part)), None) for part in after)
        return middle if middle == last else None

    def segments(self, messages: Sequence[Message], generation_prompt: bool = False) -> list[Segment]:
        """Return what a conversation is rendered to, in pieces; joined they are its text."""
        parts = self._layout(messages, generation_prompt, exact=True).parts
        texts = [part.text if part.message is None else messages[part.message].content.strip() for part in parts]
        return [
            Segment(text, part.message is not None, part.turn is not None)
            for text, part in zip(texts, parts, strict=True)
        ]

    def encode(
        self,
        messages: Sequence[Message],
        generation_prompt: bool = True,
        answers: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, by default up to where the assistant begins to speak.

        ``answers`` are the ids that a model wrote itself as the message of that index, without an end token; they are
        taken as they are, so that they are found again in a cache.
        """
        return self._encode(self._layout(messages, generation_prompt), messages, answers or {})[0]

    def encode_for_training(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Return the ids of a whole conversation, and for each whether a model is trained to say it.

        Trained is what the model has to write itself: from the end of the generation prompt, which a prompt for this
        turn ends with, through the content to its end token. The ids up to there are those of the prompt.
        Errors: ConfigError where the template keeps these messages from that.
        """
        layout = self._layout(messages, False, exact=True)
        if layout.fault:
            raise ConfigError(f"chat template: {layout.fault}; {_OFFER}")
        return self._encode(layout, messages, {})

    def check_for_training(self) -> None:
        """Try the template on conversations of all kinds; one that cannot be trained with is a ConfigError."""
        for turns in range(1, 5):
            for system in (False, True):
                roles = ["system"] * system + ["user", "assistant"] * turns
                messages = [Message(role, _PROBES[i % len(_PROBES)]) for i, role in enumerate(roles)]
                try:
                    self.encode_for_training(messages)
                    plain = [{"role": message.role, "content": message.content} for message in messages]
                    rendered = self._template.render(plain, self._tokenizer.named_tokens, False)
                except TemplateRefusal as error:
                    if system:  # some models have no system message; data that has one will meet this error
                        continue
                    raise ConfigError(f"{error}; {_OFFER}") from error
                if rendered != "".join(segment.text for segment in self.segments(messages)):
                    raise ConfigError(f"chat template: it alters what the messages say; {_OFFER}")

    def _layout(self, messages: Sequence[Message], generation_prompt: bool, exact: bool = False) -> _Layout:
        """Return the parts of a conversation; where each answer begins is worked out for itself where it is ``exact``.

        That takes a rendering of all that comes before it, so in prompts answers after the same words begin alike.
        """
        key = tuple(message.role for message in messages), generation_prompt, exact
        if key not in self._layouts:
            _make_room(self._layouts)
            self._layouts[key] = self._lay_out(*key)
        return self._layouts[key]

    def _lay_out(self, roles: tuple[str, ...], generation_prompt: bool, exact: bool) -> _Layout:
        """Render roles with placeholders and cut the text at contents and at what the model has to write."""
        text = self._render(roles, generation_prompt)
        contents = {match.span(): int(match[1]) for match in _PLACEHOLDER.finditer(text)}
        spans, fault = self._spans(text, roles, exact)
        cuts = {0, len(text), *(place for span in (*contents, *spans) for place in span)}
        parts = []
        waiting = sorted(spans, reverse=True)
        for start, end in pairwise(sorted(cuts)):
            if waiting and start >= waiting[-1][1]:
                waiting.pop()
            turn = spans[waiting[-1]] if waiting and start >= waiting[-1][0] else None
            message = contents.get((start, end))
            pieces = () if message is not None else self._split(text[start:end])
            parts.append(_Part(text[start:end], pieces, message, turn))
        return _Layout(tuple(parts), fault)

    def _spans(self, text: str, roles: tuple[str, ...], exact: bool) -> tuple[dict[tuple[int, int], int], str]:
        """Return where in a rendered text which answer stands, and what is wrong with the template, if anything."""
        places = list(_PLACEHOLDER.finditer(text))
        if [int(match[1]) for match in places] != list(range(len(roles))):
            return {}, "it drops, repeats or reorders messages"
        contents = [(0, 0), *(place.span() for place in places)]
        starts = {
            turn: self._start(text, roles[:turn], contents[turn][1], contents[turn + 1][0], exact)
            for turn, role in enumerate(roles)
            if role == "assistant"
        }
        spans, faults = {}, []
        for turn, start in starts.items():
            place = places[turn]
            if start is None:
                faults.append("a conversation with an answer does not begin as the prompt for that answer does")
                continue
            if any(
                self._tokenizer.is_special(id) for *_, id in self._tokenizer.control_tokens(text[start : place.start()])
            ):
                faults.append("it does not put into a prompt what an answer begins with")
            limit = places[turn + 1].start() if turn + 1 < len(places) else len(text)
            limit = min(limit, starts.get(turn + 1) or limit)
            ends = [end for _, end, id in self._tokenizer.control_tokens(text[place.end() : limit]) if id in self._ends]
            if ends:
                spans[start, place.end() + ends[0]] = turn
            else:
                faults.append("it puts no end token after an answer")
        return spans, "".join(faults[:1])

    def _start(self, text: str, before: tuple[str, ...], begin: int, end: int, exact: bool) -> int | None:
        """Return where the prompt for an answer ends, between two contents; None where the text does not begin so."""
        header = text[begin:end]
        if exact or header not in self._headers:
            try:
                prompt = self._render(before, True)
                length = len(prompt) if text.startswith(prompt) else -1
            except ModelFolderError:
                length = -1
            _make_room(self._headers)
            self._headers[header] = length - begin if begin <= length <= end else None
        offset = self._headers[header]
        return None if offset is None else begin + offset

    @cached_property
    def _ends(self) -> set[int]:
        return {*self._tokenizer.end_ids, *([] if self.turn_end is None else [self.turn_end])}

    def _render(self, roles: tuple[str, ...], generation_prompt: bool) -> str:
        """Render roles with placeholders for what they say; the beginnings of a conversation come again and again."""
        key = roles, generation_prompt
        if key not in self._rendered:
            messages = [{"role": role, "content": f"{_OPEN}{i}{_CLOSE}"} for i, role in enumerate(roles)]
            text = self._template.render(messages, self._tokenizer.named_tokens, generation_prompt)
            if set(_PLACEHOLDER.sub("", text)) & {_OPEN, _CLOSE}:
                raise ModelFolderError("chat template: it takes messages to pieces; use another with --template chatml")
            _make_room(self._rendered)
            self._rendered[key] = text
        return self._rendered[key]

    def _split(self, text: str) -> tuple[int | str, ...]:
        """Cut text of the template into the ids of control tokens and the ordinary text between them."""
        pieces: list[int | str] = []
        place = 0
        for start, end, id in self._tokenizer.control_tokens(text):
            pieces += [text[place:start], id]
            place = end
        return tuple(piece for piece in (*pieces, text[place:]) if piece != "")

    def _encode(
        self, layout: _Layout, messages: Sequence[Message], answers: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], list[bool]]:
        """Encode the parts of a conversation, with the begin token once at its start."""
        ids: list[int] = []
        trained: list[bool] = []
        before: int | str = ""
        for turn, parts in groupby(layout.parts, key=lambda part: part.turn):
            pieces = [piece for part in parts for piece in part.filled(messages)]
            new = self._encode_pieces(pieces, before)
            if turn is not None and turn in answers:
                new = [*answers[turn], new[-1]]
            ids += new
            trained += [turn is not None] * len(new)
            before = next((piece for piece in reversed(pieces) if piece != ""), before)
        begin = self._tokenizer.bos_id
        if begin is not None:
            written = next((i for i, id in enumerate(ids) if id != begin), len(ids))
            ids, trained = [begin, *ids[written:]], [False, *trained[written:]]
        return ids, trained

    def _encode_pieces(self, pieces: Sequence[int | str], before: int | str) -> list[int]:
        """Encode neighbouring texts as one, as they would be in the whole; ``before`` is the piece before them."""
        ids: list[int] = []
        for _, group in groupby((piece for piece in pieces if piece != ""), key=lambda piece: isinstance(piece, str)):
            run = list(group)
            if isinstance(run[0], str):
                after_control = isinstance(before, int) and self._tokenizer.prefix_only_once
                continuing = after_control or (isinstance(before, str) and before != "")
                ids += self._tokenizer.encode("".join(map(str, run)), continuing=continuing)
            else:
                ids += [int(id) for id in run]
            before = run[-1]
        return ids


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= _MOST_KEPT:
        del kept[next(iter(kept))]


def chat_template(tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
    """Return the template of a model, or ChatML for one without that has its control tokens; ``chatml`` asks for it.

    Errors: ConfigError for an override that is not possible; ModelFolderError where there is no template to be had.
    """
    has_chatml = None not in (tokenizer.special_id(IM_START), tokenizer.special_id(IM_END))
    if override not in (None, "chatml"):
        raise ConfigError(f"--template {override}: no such template; the one there is to choose is chatml")
    if override == "chatml" and not has_chatml:
        raise ConfigError(f"--template chatml: the tokenizer has no {IM_START} and {IM_END}; leave it out")
    source = CHATML if override else tokenizer.chat_template
    if source is None and not has_chatml:
        raise ModelFolderError(
            f"the model has no chat template, and no {IM_START} and {IM_END} for one; choose a model made for chat"
        )
    return ChatTemplate(CHATML if source is None else source, tokenizer)
