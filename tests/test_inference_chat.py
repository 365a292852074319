"""A conversation: the cache between turns, what fits, what is forgotten, and answers that are broken off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from parrot import make_parrot
from variants import VARIANTS, make_model

from minigpt.config import ModelConfig, SamplingConfig
from minigpt.errors import DataError
from minigpt.inference import chat as conversation
from minigpt.inference import engine
from minigpt.inference.chat import Chat, Forgotten, Said, fit
from minigpt.inference.engine import TokenEvent, collect, stream, stream_from
from minigpt.model.cache import KVCache
from minigpt.text.chat import ChatTemplate, Message, chat_template
from minigpt.text.tokenizer import Tokenizer

TEXT = "Alice was beginning to get very tired of sitting by her sister.\nuser system assistant 猫 café\n"
ANSWER = "Alice get the bank"
SAMPLING = SamplingConfig(max_new_tokens=12, temperature=1.0)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return chat_template(Tokenizer.train([TEXT] * 3, 300))


def random_chat(template: ChatTemplate, variant: str = "qwen3", context: int = 256, **options: Any) -> Chat:
    """A chat with a model that says anything: half characters and control tokens too."""
    shape = {**vars(VARIANTS[variant]), "vocab_size": template.tokenizer.vocab_size}
    return Chat(make_model(ModelConfig(**{**shape, "max_position_embeddings": context})), template, **options)


def parrot_chat(**options: Any) -> Chat:
    model, tokenizer = make_parrot(ANSWER, **options)
    return Chat(model, chat_template(tokenizer))


def text_of(events: Any) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent))


def prompts_of(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the whole prompt of each answer, what is in the cache already with it."""
    prompts: list[list[int]] = []

    def recording(*arguments: Any, **options: Any) -> Any:
        prompts.append(list(arguments[3]))
        return stream_from(*arguments, **options)

    monkeypatch.setattr(conversation, "stream_from", recording)
    return prompts


def read_by_model(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the prompt tokens that the model reads, call by call."""
    read: list[list[int]] = []
    prefill = engine.prefill

    def recording(model: Any, cache: KVCache, prompts: Sequence[Sequence[int]], *more: Any) -> torch.Tensor:
        read.append(list(prompts[0]))
        return prefill(model, cache, prompts, *more)

    monkeypatch.setattr(engine, "prefill", recording)
    return read


@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "transformer-2017", "mistral", "llama-long-rope"])
def test_only_new_tokens_are_read_and_the_answers_are_those_of_a_fresh_start(
    variant: str, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = random_chat(template, variant, context=400, system="Be kind.")
    read = read_by_model(monkeypatch)
    prompt: list[int] = []
    held = 0  # tokens of the conversation when the answer before was done
    for turn, question in enumerate(("Hi", "the 猫", "café?", "")):
        answer = list(chat.ask(question, SAMPLING, seed=turn))
        said = chat._all(0)
        answers = {place: one.ids for place, one in enumerate(said[:-1]) if one.ids is not None}
        prompt = template.encode([one.message for one in said[:-1]], answers=answers)
        fresh = list(stream(chat.model, template.tokenizer, [prompt], SAMPLING, [turn]))
        assert [event.token_id for event in answer if isinstance(event, TokenEvent)] == [e.token_id for e in fresh]
        new = len(prompt) - held
        if turn:  # the last token of an answer is not in the cache yet; before it, all is
            assert new <= len(read[2 * turn]) <= new + 1
        held = len(prompt) + len(said[-1].ids or ())
    assert chat.prefilled == sum(len(one) for one in read[::2])


def test_tokens_read_by_hand() -> None:
    chat = parrot_chat()
    template = chat.template
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.0)
    assert text_of(chat.ask("Hi", sampling, 0)) == ANSWER
    first = len(template.encode([Message("user", "Hi")]))
    assert chat.prefilled == first
    assert text_of(chat.ask("the bank", sampling, 1)) == ANSWER
    more = template.tokenizer.encode("the bank")
    header = len(template.encode([Message("user", "")]))
    assert chat.prefilled - first == 1 + 1 + header + len(more)  # the end of the answer, a line end, the new turn
    assert [message.content for message in chat.messages] == ["Hi", ANSWER, "the bank", ANSWER]


def test_undo_and_retry_set_the_cache_back() -> None:
    chat = parrot_chat()
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.0)
    for question in ("Hi", "the bank"):
        assert text_of(chat.ask(question, sampling, 0)) == ANSWER
    before = chat.prefilled
    assert text_of(chat.retry(sampling, 1)) == ANSWER
    assert chat.prefilled - before == 1  # the logits after the prompt are made again
    before = chat.prefilled
    assert chat.undo()
    assert [message.content for message in chat.messages] == ["Hi", ANSWER]
    assert text_of(chat.ask("the sister", sampling, 2)) == ANSWER
    asked = len(chat.template.tokenizer.encode("the sister"))
    header = len(chat.template.encode([Message("user", "")]))
    assert chat.prefilled - before <= 2 + header + asked
    assert chat.undo()
    assert chat.undo()
    assert not chat.undo()
    assert chat.messages == []
    with pytest.raises(DataError, match="nothing was asked"):
        list(chat.retry(sampling, 0))


def test_a_retried_answer_draws_anew_and_the_same_seed_repeats_it(template: ChatTemplate) -> None:
    chat = random_chat(template)
    first = text_of(chat.ask("Hi", SAMPLING, 1))
    assert text_of(chat.retry(SAMPLING, 2)) != first
    assert text_of(chat.retry(SAMPLING, 1)) == first
    assert len(chat.messages) == 2


@pytest.mark.parametrize("variant", ["qwen3", "gpt2", "mistral"])
def test_past_the_context_the_oldest_turns_go_and_the_system_message_stays(
    variant: str, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = random_chat(template, variant, context=120, system="Be kind.")
    read, prompts = read_by_model(monkeypatch), prompts_of(monkeypatch)
    forgotten = 0
    for turn in range(14):
        events = list(chat.ask(f"the sister {turn}", SAMPLING, turn))
        forgotten += sum(event.turns for event in events if isinstance(event, Forgotten))
        assert len(prompts[-1]) + sum(isinstance(event, TokenEvent) for event in events) <= 120
        text = template.tokenizer.decode(prompts[-1])
        assert text.startswith("system\nBe kind.\nuser\nthe sister")
        if any(isinstance(event, Forgotten) for event in events):
            assert "the sister 0\n" not in text
            assert f"the sister {turn}\n" in text
    assert forgotten >= 6
    assert sum(len(one) > 60 for one in read) < 8, "room is made for several turns at once"
    assert len(chat.messages) == 1 + 2 * 14, "what the model forgot is still there to be saved"


def test_a_question_longer_than_the_context_loses_its_beginning_and_it_is_said(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 64 and 65 tokens pasted twice."""
    chat = random_chat(template, context=64, system="Be kind.")
    prompts = prompts_of(monkeypatch)
    pasted = "Alice 猫 " * 20 + "the end"
    assert len(template.tokenizer.encode(pasted)) > 65
    for turn in range(2):
        events = list(chat.ask(pasted, SAMPLING, turn))
        assert isinstance(events[0], Forgotten)
        assert events[0].turns == turn
        assert events[0].tokens > 10
        assert collect((e for e in events if isinstance(e, TokenEvent)), 1)[0].finish_reason in ("length", "end")
        text = template.tokenizer.decode(prompts[-1])
        assert text.startswith("system\nBe kind.\nuser\n")
        assert "the end\n" in text
        assert "\ufffd" not in text.partition("assistant")[0]
    assert chat.messages[1].content == pasted


def test_a_system_message_that_leaves_no_room_is_an_error_and_nothing_was_asked(template: ChatTemplate) -> None:
    chat = random_chat(template, context=64, system="Alice " * 60)
    with pytest.raises(DataError, match="shorten the system message"):
        list(chat.ask("Hi", SAMPLING, 0))
    assert len(chat.messages) == 1
    chat.system = "Be kind."
    list(chat.ask("Hi", SAMPLING, 0))
    assert len(chat.messages) == 3


def test_a_context_too_short_for_the_template_alone_says_so(template: ChatTemplate) -> None:
    header = len(template.encode([Message("user", "")]))
    with pytest.raises(DataError, match=f"without the question there are {header} tokens already"):
        fit([Said(Message("user", "Hi"))], template, header)


@pytest.mark.parametrize(
    ("messages", "advice"),
    [
        ([("user", "Hi"), ("assistant", "{}"), ("tool", "LONG")], "shorten the tool message, allow fewer new tokens"),
        ([("system", "Be kind."), ("user", "Hi"), ("assistant", "LONG"), ("tool", "x")], "shorten the assistant mess"),
        ([("system", "LONG"), ("user", "Hi")], "shorten the system message, allow"),
        ([("user", "Hi"), ("assistant", "x"), ("tool", "LONG"), ("user", "LONG" * 9)], ""),
    ],
)
def test_what_is_to_be_shortened_is_what_is_too_long(
    messages: list[tuple[str, str]], advice: str, template: ChatTemplate
) -> None:
    said = [Said(Message(role, text.replace("LONG", "Alice " * 60))) for role, text in messages]
    if not advice:
        assert fit(said, template, 64).cut > 100
        return
    with pytest.raises(DataError, match=advice) as caught:
        fit(said, template, 64)
    assert str(caught.value).startswith("without the question there are ")


def test_what_fits_by_hand(template: ChatTemplate) -> None:
    turns = [Said(Message("system", "s"))]
    for turn in range(5):
        turns += [Said(Message("user", f"q{turn}")), Said(Message("assistant", "a"))]
    turns.append(Said(Message("user", "last")))
    whole = template.encode([one.message for one in turns])
    assert fit(turns, template, len(whole)).ids == whole
    assert fit(turns, template, len(whole)).left_out == 0
    fitted = fit(turns, template, len(whole) - 1)
    assert fitted.left_out % 2 == 0
    kept = [turns[0], *turns[1 + fitted.left_out :]]
    assert fitted.ids == template.encode([one.message for one in kept])
    assert len(fitted.ids) <= (len(whole) - 1) * 3 // 4
    longer = [turns[0], *turns[fitted.left_out - 1 :]]
    assert len(template.encode([one.message for one in longer])) > (len(whole) - 1) * 3 // 4
    least = len(template.encode([turns[0].message, turns[-1].message]))
    fitted = fit(turns, template, least)
    assert (len(fitted.ids), fitted.left_out, fitted.cut) == (least, 10, 0)


def test_an_answer_that_is_broken_off_stays_as_far_as_it_got() -> None:
    sampling = SamplingConfig(max_new_tokens=1000, temperature=0.0)
    chat = parrot_chat(endless=True, context=2048)
    events = chat.ask("Hi", sampling, 0)
    shown = text_of(islice(events, 9))
    events.close()  # type: ignore[attr-defined]
    assert shown.startswith(ANSWER)
    assert chat.messages == [Message("user", "Hi"), Message("assistant", shown)]
    before = chat.prefilled
    events = chat.ask("the bank", sampling, 0)
    next(events)
    assert chat.prefilled - before < 30
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert len(chat.messages) == 4
    assert chat.undo()
    assert [message.role for message in chat.messages] == ["user", "assistant"]


def test_an_interrupt_while_a_prompt_is_read_leaves_a_cache_that_can_be_trusted(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, other = (random_chat(template, context=400) for _ in range(2))
    for one in (chat, other):
        list(one.ask("Hi", SAMPLING, 0))
    forward = chat.model.model.forward

    def interrupted(*arguments: Any) -> torch.Tensor:
        forward(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.model.model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(chat.ask("the sister", SAMPLING, 1))
    monkeypatch.undo()
    assert chat.messages == other.messages, "as if never asked"
    assert text_of(chat.ask("the 猫", SAMPLING, 2)) == text_of(other.ask("the 猫", SAMPLING, 2))


@pytest.mark.parametrize("where", ["prompt", "prefill", "before the first token"])
def test_a_retry_that_comes_to_nothing_leaves_the_old_answer(
    where: str, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, other = (random_chat(template, context=400) for _ in range(2))
    for one in (chat, other):
        list(one.ask("Hi", SAMPLING, 0))
    before = chat.messages

    def failing(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    if where == "prompt":
        monkeypatch.setattr(template, "encode", failing)
    elif where == "prefill":
        monkeypatch.setattr(engine, "prefill", failing)
    else:
        monkeypatch.setattr(engine, "next_tokens", failing)
    with pytest.raises(KeyboardInterrupt):
        list(chat.retry(SAMPLING, 1))
    monkeypatch.undo()
    assert chat.messages == before
    assert text_of(chat.retry(SAMPLING, 2)) == text_of(other.retry(SAMPLING, 2))
    assert chat.messages == other.messages


def test_a_retry_with_settings_that_leave_no_room_leaves_the_old_answer(template: ChatTemplate) -> None:
    chat = random_chat(template, context=128, system="Alice " * 25)
    list(chat.ask("Hi", SAMPLING, 0))
    before = chat.messages
    with pytest.raises(DataError, match="allow fewer new tokens"):
        list(chat.retry(replace(SAMPLING, max_new_tokens=1000), 0))
    assert chat.messages == before
    chat.load([Message("assistant", "Alice")])
    with pytest.raises(DataError, match="nothing was asked"):
        list(chat.retry(SAMPLING, 0))
    assert chat.messages == [Message("assistant", "Alice")]


def test_an_interrupt_before_a_prompt_is_there_leaves_nothing_asked(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = random_chat(template)

    def interrupted(*_: Any, **__: Any) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(template, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(chat.ask("Hi", SAMPLING, 0))
    assert chat.messages == []


def test_closing_before_the_answer_leaves_a_cache_that_can_be_trusted(template: ChatTemplate) -> None:
    chat, other = (random_chat(template, context=64) for _ in range(2))
    for one in (chat, other):
        list(one.ask("Hi", SAMPLING, 0))
    events = chat.ask("Alice " * 80, SAMPLING, 1)
    assert isinstance(next(events), Forgotten)
    events.close()  # type: ignore[attr-defined]
    assert chat.messages == other.messages
    chat.reset()
    other.reset()
    assert text_of(chat.ask("the 猫", SAMPLING, 2)) == text_of(other.ask("the 猫", SAMPLING, 2))


def test_stop_strings_do_not_leave_what_was_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, prompts = parrot_chat(), prompts_of(monkeypatch)
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.0, stop=(" the",))
    assert text_of(chat.ask("Hi", sampling, 0)) == "Alice get"
    assert text_of(chat.ask("Hi", sampling, 0)) == "Alice get"
    assert prompts[1] == chat.template.encode(chat.messages[:-1]), "the answer as people read it"


def test_a_long_answer_ends_with_the_context(template: ChatTemplate) -> None:
    chat = parrot_chat(endless=True, context=64)
    events = list(chat.ask("Hi", SamplingConfig(max_new_tokens=10_000, temperature=0.0), 0))
    assert isinstance(events[-1], TokenEvent)
    assert events[-1].finish_reason == "length"
    assert len(chat.template.encode([Message("user", "Hi")])) + len(events) == 64
    assert chat._cache is not None
    assert chat._cache.capacity == 64


def test_the_cache_grows_as_needed(template: ChatTemplate) -> None:
    chat = random_chat(template, context=4000)
    capacities = set()
    fresh = random_chat(template, context=4000)
    for turn in range(4):
        question = "Alice 猫 " * 40
        text = text_of(chat.ask(question, SAMPLING, turn))
        assert chat._cache is not None
        capacities.add(chat._cache.capacity)
        fresh._cache = None
        fresh._held = []
        assert text_of(fresh.ask(question, SAMPLING, turn)) == text
    assert len(capacities) > 1
    assert max(capacities) < 4000


def test_loading_goes_on_from_another_conversation() -> None:
    chat = parrot_chat()
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.0)
    chat.load([Message("system", "Be kind."), Message("user", "Hi"), Message("assistant", "Yo")])
    assert chat.system == "Be kind."
    assert text_of(chat.ask("the bank", sampling, 0)) == ANSWER
    saved = chat.messages
    again = parrot_chat()
    again.load(saved)
    assert again.messages == saved
    again.load(saved[1:])
    assert again.system is None
    again.reset()
    assert again.messages == []


def test_a_context_of_ones_own_is_never_above_that_of_the_model(template: ChatTemplate) -> None:
    assert random_chat(template, context=128, **{}).context == 128
    chat = random_chat(template)
    assert Chat(chat.model, template, context=99).context == 99
    assert Chat(chat.model, template, context=9999).context == 256


# The cache


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_set_back_and_one_grown_are_as_good_as_new(variant: str) -> None:
    model = make_model(replace(VARIANTS[variant], max_position_embeddings=32))
    tokens = torch.randint(0, model.config.vocab_size, (1, 20), generator=torch.Generator().manual_seed(2))
    expected = model(tokens)
    cache = KVCache(model.config, 1, 12)
    model(torch.cat([tokens[:, :5], tokens[:, 9:16]], dim=1), cache)
    cache.truncate(5)
    assert cache.lengths == [5]
    cache.grow(20)
    assert cache.capacity == 20
    torch.testing.assert_close(model(tokens[:, 5:], cache), expected[:, 5:], rtol=1e-4, atol=1e-4)
    cache.truncate(99)
    assert cache.lengths == [20]


def test_a_ring_that_has_gone_around_cannot_be_set_back() -> None:
    model = make_model(VARIANTS["qwen3"])
    cache = KVCache(model.config, 1, 16)
    for token in range(17):
        model(torch.tensor([[token]]), cache)
    for call in (cache.truncate, cache.grow):
        with pytest.raises(AssertionError):
            call(16)
