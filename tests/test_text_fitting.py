"""Conversations that are too long lose their past by the rule, and keep an answer to learn or are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_folder import TEXT

from minigpt.errors import DataError, ModelFolderError
from minigpt.text.chat import ChatTemplate, Message, chat_template
from minigpt.text.conversations import Conversation
from minigpt.text.fitting import Encoded, FitCounts, encode_conversations, fit
from minigpt.text.tokenizer import Tokenizer

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END, LINE = 5, 10


class Letters:
    """A template and tokenizer in one: role, letters, an end, a line end; a letter is a token."""

    def __init__(self) -> None:
        self.tokenizer = self

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, continuing: bool) -> str:
        assert continuing
        return "".join(map(chr, ids))

    def encode_for_training(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        ids, trained = [], []
        for message in messages:
            content = [*self.encode(message.content.strip()), END]
            ids += [ROLES[message.role], *content, LINE]
            trained += [False, *([message.role == "assistant"] * len(content)), False]
        return ids, trained


LETTERS = cast(ChatTemplate, Letters())


def say(*texts: str) -> list[Message]:
    """Messages written as s:text, u:text, a:text, t:text."""
    return [Message(next(role for role in ROLES if role[0] == text[0]), text[2:]) for text in texts]


def fitted(context: int, *texts: str) -> tuple[str | None, FitCounts]:
    """The text of what is left, and the letters that are learned in capitals."""
    counts = FitCounts()
    found = fit(say(*texts), LETTERS, context, counts)
    if found is None:
        return None, counts
    assert len(found) == len(found.ids) - 1 <= context
    assert found.trained[-1]
    names = {1: "<s>", 2: "<u>", 3: "<a>", 4: "<t>", END: ".", LINE: "\n"}
    letters = [names.get(id, chr(id)) for id in found.ids.tolist()]
    return "".join(
        letter.upper() if trained else letter for letter, trained in zip(letters, found.trained, strict=True)
    ), counts


WHOLE = "<s>sys.\n<u>one.\n<a>TWO.\n<u>three.\n<a>FOUR.\n<u>five.\n<a>SIX."
TEXTS = ("s:sys", "u:one", "a:two", "u:three", "a:four", "u:five", "a:six")


def test_what_fits_is_whole_up_to_the_last_target() -> None:
    text, counts = fitted(100, *TEXTS)
    assert text == WHOLE
    assert counts == FitCounts()


def size(text: str) -> int:
    for role in ("<s>", "<u>", "<a>", "<t>"):
        text = text.replace(role, "r")
    return len(text)


def test_the_oldest_turns_go_first_and_whole() -> None:
    whole, without_one = size(WHOLE), "<s>sys.\n<u>three.\n<a>FOUR.\n<u>five.\n<a>SIX."
    last = "<s>sys.\n<u>five.\n<a>SIX."
    assert fitted(whole - 1, *TEXTS) == (WHOLE, FitCounts())
    assert fitted(whole - 2, *TEXTS) == (without_one, FitCounts(cut=1))
    assert fitted(size(without_one) - 1, *TEXTS) == (without_one, FitCounts(cut=1))
    assert fitted(size(without_one) - 2, *TEXTS) == (last, FitCounts(cut=1))
    assert fitted(size(last) - 1, *TEXTS) == (last, FitCounts(cut=1))


def test_a_turn_with_tools_goes_as_one() -> None:
    texts = ("u:add", "a:call", "t:result", "a:done", "u:more", "a:call", "t:four", "a:it is four")
    newest = "<u>more.\n<a>CALL.\n<t>four.\n<a>IT IS FOUR."
    for context in range(size(newest) - 1, size("<u>add.\n<a>CALL.\n<t>result.\n<a>DONE.\n" + newest) - 1):
        assert fitted(context, *texts) == (newest, FitCounts(cut=1))


def test_then_the_question_is_cut_at_its_beginning() -> None:
    texts = ("s:sys", "u:old", "a:old", "u:abcdefghijklmnopqrstuvwxyz", "a:yes")
    assert fitted(30, *texts)[0] == "<s>sys.\n<u>jklmnopqrstuvwxyz.\n<a>YES."
    assert size("<s>sys.\n<u>jklmnopqrstuvwxyz.\n<a>YES.") == 31
    assert fitted(17, *texts)[0] == "<s>sys.\n<u>wxyz.\n<a>YES."
    assert fitted(15, *texts)[0] == "<s>sys.\n<u>wxyz.\n<a>YE", "a quarter of the context and no less"


def test_then_the_answer_at_its_end_and_its_end_token_with_it() -> None:
    texts = ("u:abcdefghijklmnop", "a:0123456789012345678901234567890123456789")
    text, counts = fitted(19, *texts)
    assert text == "<u>lmnop.\n<a>01234567890"
    assert size(text) == 20
    assert counts == FitCounts(cut=1)
    assert fitted(19, "u:ab", texts[1])[0] == "<u>ab.\n<a>01234567890123"


def test_a_row_without_a_target_is_dropped() -> None:
    """Fault 12: a long prompt, a short answer, a short context."""
    assert fitted(16, "s:" + "x" * 40, "u:a", "a:b") == (None, FitCounts(dropped=1))
    assert fitted(2, "u:a", "a:b") == (None, FitCounts(dropped=1))
    conversation = Conversation("x:1", tuple(say("s:" + "x" * 40, "u:a", "a:b")))
    with pytest.raises(DataError, match=r"^no answer is left in a context of 16 tokens: in all 2 conversations what "):
        encode_conversations([conversation] * 2, LETTERS, 16, FitCounts())


def test_half_a_character_is_not_left_at_the_cut() -> None:
    tokenizer = Tokenizer.train([TEXT], 280)  # most Chinese characters are three tokens
    template = chat_template(tokenizer)
    counts = FitCounts()
    for context in range(40, 60):
        found = fit(say("u:" + "猫" * 30, "a:yes"), template, context, counts)
        assert found is not None
        assert len(found) <= context
        assert "\ufffd" not in tokenizer.decode(found.ids.tolist())
    assert counts == FitCounts(cut=20)


def test_what_has_no_answer_left_is_left_out_of_the_rest() -> None:
    texts = (("u:short", "a:yes"), ("u:" + "long" * 9, "a:yes"), ("s:" + "x" * 40, "u:a", "a:b"), ("u:two", "a:no"))
    conversations, counts = [Conversation(f"x:{n}", tuple(say(*text))) for n, text in enumerate(texts)], FitCounts()
    assert [len(one) for one in encode_conversations(conversations, LETTERS, 20, counts)] == [12, 20, 9]
    assert counts == FitCounts(cut=1, dropped=1)


def test_what_the_template_refuses_is_named_by_line() -> None:
    class Refusing(Letters):
        def encode_for_training(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
            raise ModelFolderError("chat template: no system message")

    with pytest.raises(ModelFolderError, match=r"^x\.jsonl:7: chat template: no system message$"):
        encode_conversations(
            [Conversation("x.jsonl:7", tuple(say("u:a", "a:b")))], cast(Any, Refusing()), 9, FitCounts()
        )


texts_of = st.text("abcdefgh ", min_size=1, max_size=30).filter(str.strip)
turn = st.tuples(texts_of, st.lists(st.tuples(texts_of, texts_of), max_size=2), texts_of)


@settings(deadline=None, max_examples=150)
@given(st.none() | texts_of, st.lists(turn, min_size=1, max_size=6), st.integers(1, 120))
def test_whatever_is_cut_is_the_end_of_the_conversation(
    system: str | None, turns: list[tuple[str, list[tuple[str, str]], str]], context: int
) -> None:
    """What is left, but for a cut question, is the system message and some of the newest turns, up to the limit."""
    texts = [] if system is None else [f"s:{system}"]
    for question, calls, answer in turns:
        texts += [f"u:{question}", *(text for call, result in calls for text in (f"a:{call}", f"t:{result}"))]
        texts.append(f"a:{answer}")
    counts = FitCounts()
    found = fit(say(*texts), LETTERS, context, counts)
    whole = _up_to_last(LETTERS.encode_for_training(say(*texts)))
    if len(whole.ids) <= context + 1:
        assert found is not None
        assert found.ids.tolist() == whole.ids.tolist()
        assert counts == FitCounts()
        return
    if found is None:
        assert counts == FitCounts(dropped=1)
        return
    assert counts == FitCounts(cut=1)
    assert found.trained[1:].any()
    candidates = [texts[: system is not None] + texts[start:] for start in range(len(texts)) if texts[start][0] == "u"]
    suffixes = [_up_to_last(LETTERS.encode_for_training(say(*part))) for part in candidates[1:]]
    fitting = [part for part in suffixes if len(part.ids) <= context + 1]
    if fitting:
        assert found.ids.tolist() == fitting[0].ids.tolist(), "as many turns as fit"
        return
    head = 0 if system is None else len(system.strip()) + 3
    assert found.ids.tolist()[:head] == whole.ids.tolist()[:head]


def _up_to_last(pair: tuple[list[int], list[bool]]) -> Encoded:
    import numpy as np

    end = max(place for place, flag in enumerate(pair[1]) if flag) + 1
    return Encoded(np.array(pair[0][:end]), np.array(pair[1][:end]))
