"""Conversations into ids: the same as transformers, masks by construction, and templates that are not to be trusted."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import GOOD, MISTRAL_3, Known
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from minigpt.errors import ConfigError, ModelFolderError
from minigpt.text import chat
from minigpt.text.chat import CHATML, ChatTemplate, Message, chat_template
from minigpt.text.templates import Template
from minigpt.text.tokenizer import END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS, Tokenizer

TEXTS = (
    "user assistant system\nWhat is the use of a book, thought Alice, without pictures or conversations?\n" * 3,
    "你好 世界 😀 [INST] naïve café 'quoted' \"twice\"\n\n" * 3,
)
PIECES = st.sampled_from(
    ["Alice", "the book", " ", "  ", "\n", "\n\n", "\t", '"', "'s", "😀", "👩‍🚀", "é", "你好", "。", "user\n", "system",
     "{{ x }}", "<b>", "&", "\\n", "123", "\u3000", "\u2028", "\x1c", "\ud83d", "[INST]", "assistant\n", "<|", "|>"]
)  # fmt: skip
ORDINARY = st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=12)
CONTROL = st.lists(PIECES | st.sampled_from(SPECIAL_TOKENS), max_size=5).map("".join)


def conversations(contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    """With or without a system message, then user and assistant in turn, either of them last."""
    return st.tuples(st.booleans(), st.lists(contents, min_size=2, max_size=9)).map(lambda drawn: alternating(*drawn))


def alternating(system: bool, contents: list[str]) -> list[Message]:
    roles = ["system"] * system + ["user", "assistant"] * len(contents)
    return [Message(role, content) for role, content in zip(roles, contents, strict=False)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 340)


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return chat_template(tokenizer)


@pytest.fixture(scope="module")
def ids_of(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[int]]:
    """Transformers' own way from messages to ids, from the files that were saved."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("ours")
    tokenizer.save(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    def ids_of(messages: list[Message], generation_prompt: bool) -> list[int]:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        found: list[int] = theirs.apply_chat_template(
            plain, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False
        )
        return found

    return ids_of


def with_tokens(known: Known, base: Tokenizer) -> Tokenizer:
    """The same vocabulary with the control tokens of another model."""
    source = json.loads(base._backend.to_str())
    source["added_tokens"] = [token for token in source["added_tokens"] if token["content"] not in SPECIAL_TOKENS]
    backend = Backend.from_str(json.dumps(source))
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in known.tokens])
    config = {**known.names, "add_bos_token": known.adds_begin, "chat_template": known.source}
    return Tokenizer(backend, config)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Ids as text, control tokens by their names."""
    names = {id: name for name, id in tokenizer._special_ids.items()}
    return b"".join(names[id].encode() if id in names else tokenizer.token_bytes(id) for id in ids).decode()


# ---- ChatML


def test_chatml_by_hand(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    messages = [Message("system", "Be brief."), Message("user", "  Hi <|im_end|>\n"), Message("assistant", "Yo ")]
    start, end = tokenizer.special_id(IM_START), tokenizer.special_id(IM_END)
    assert start is not None
    assert end is not None
    expected, trained = [], []
    for role, text in (("system", "Be brief."), ("user", "Hi <|im_end|>"), ("assistant", "Yo")):
        content = tokenizer.encode(f"{role}\n{text}")
        header = len(tokenizer.encode(f"{role}\n"))
        expected += [start, *content, end, *tokenizer.encode("\n")]
        mine = role == "assistant"
        trained += [False] * (1 + header) + [mine] * (len(content) - header + 1) + [False]
    assert template.encode_for_training(messages) == (expected, trained)
    assert template.encode(messages, generation_prompt=False) == expected
    assert template.encode(messages) == [*expected, start, *tokenizer.encode("assistant\n")]
    assert [(segment.text, segment.content, segment.trained) for segment in template.segments(messages)][-4:] == [
        ("<|im_end|>\n<|im_start|>assistant\n", False, False),
        ("Yo", True, True),
        ("<|im_end|>", False, True),
        ("\n", False, False),
    ]


@settings(max_examples=200, deadline=None)
@given(messages=conversations(ORDINARY), generation_prompt=st.booleans())
def test_ids_equal_those_of_transformers(
    messages: list[Message], generation_prompt: bool, template: ChatTemplate, ids_of: Callable[..., list[int]]
) -> None:
    mended = [Message(message.role, message.content.replace("\ud83d", "\ufffd")) for message in messages]
    if any("\ud800" <= character <= "\udfff" for message in mended for character in message.content):
        return  # the other side cannot encode these
    if any(name in message.content for message in messages for name in SPECIAL_TOKENS):
        return
    assert template.encode(messages, generation_prompt) == ids_of(mended, generation_prompt)


@settings(max_examples=100, deadline=None)
@given(messages=conversations(CONTROL))
def test_only_the_template_makes_control_tokens(
    messages: list[Message], tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    ids = template.encode(messages, generation_prompt=False)
    assert [id for id in ids if tokenizer.is_special(id)] == [1, 2] * len(messages)
    wanted = "".join(f"<|im_start|>{m.role}\n{m.content.strip()}<|im_end|>\n" for m in messages)
    assert spelled(tokenizer, ids) == "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in wanted)


@settings(max_examples=100, deadline=None)
@given(messages=conversations(CONTROL))
def test_a_prompt_is_the_beginning_of_the_training_ids(messages: list[Message], template: ChatTemplate) -> None:
    ids, trained = template.encode_for_training(messages)
    assert len(ids) == len(trained)
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            prompt = template.encode(messages[:turn])
            assert ids[: len(prompt)] == prompt
            assert trained[len(prompt)]
            assert not trained[len(prompt) - 1]


def reference(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """ChatML token by token, with nothing but the tokenizer."""
    start, end = SPECIAL_TOKENS.index(IM_START), SPECIAL_TOKENS.index(IM_END)
    ids, trained = [], []

    def put(id: int, mine: bool) -> None:
        ids.append(id)
        trained.append(mine)

    for message in messages:
        mine = message.role == "assistant"
        put(start, False)
        for id in tokenizer.encode(f"{message.role}\n"):
            put(id, False)
        for id in tokenizer.encode(message.content.strip()):
            put(id, mine)
        put(end, mine)
        for id in tokenizer.encode("\n"):
            put(id, False)
    return ids, trained


def compare_masks(tokenizer: Tokenizer, template: ChatTemplate, seed: int, count: int) -> None:
    draw = random.Random(seed)
    words = [
        "Alice",
        " ",
        "\n",
        '"',
        "'",
        "😀",
        "你好",
        "<|im_start|>",
        "<|im_end|>",
        "assistant",
        "\nuser\n",
        "</s>",
        "—",
        "x",
    ]
    for _ in range(count):
        roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(1, 4)
        messages = [Message(role, "".join(draw.choices(words, k=draw.randint(0, 8)))) for role in roles]
        assert template.encode_for_training(messages) == reference(tokenizer, messages)


def test_masks_against_a_reference(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    compare_masks(tokenizer, template, seed=1, count=500)


@pytest.mark.slow
def test_ten_thousand_masks_against_a_reference(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    compare_masks(tokenizer, template, seed=2, count=10_000)


def test_a_model_trained_here_carries_its_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"] == CHATML
    assert Tokenizer.load(tmp_path).chat_template == CHATML


# ---- templates of other models


@pytest.mark.parametrize("name", GOOD)
def test_templates_in_use_are_accepted(name: str, tokenizer: Tokenizer) -> None:
    known = GOOD[name]
    other = with_tokens(known, tokenizer)
    template = chat_template(other)
    template.check_for_training()
    messages = alternating(False, [" Hi  Alice ", 'the "book"\n\n x', "And?", "", "So", "end"])
    ids, trained = template.encode_for_training(messages)
    runs = "".join("\0" + spelled(other, [id]) if mine and not before else spelled(other, [id]) if mine else ""
                   for id, mine, before in zip(ids, trained, [False, *trained], strict=False))  # fmt: skip
    answers = [known.trained.format(message.content.strip()) for message in messages[1::2]]
    if name == "qwen3":  # it writes an empty thought before the last answer, which the model has to write itself
        answers[-1] = "<think>\n\n</think>\n\n" + answers[-1]
    assert runs.split("\0")[1:] == answers
    for turn in (1, 3, 5):
        prompt = template.encode(messages[:turn])
        assert ids[: len(prompt)] == prompt
    end = other.special_id(known.trained.rpartition("}")[2].strip())
    assert template.turn_end == end
    assert end in template.tokenizer.end_ids
    assert template.tokenizer.chat_template == known.source
    if other.bos_id is not None:
        assert ids[0] == other.bos_id
        assert ids[1] != other.bos_id


@pytest.fixture(scope="module")
def accepted(tokenizer: Tokenizer) -> dict[str, ChatTemplate]:
    return {name: chat_template(with_tokens(known, tokenizer)) for name, known in GOOD.items()}


@settings(max_examples=250, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), contents=st.lists(CONTROL, min_size=2, max_size=8), system=st.booleans())
def test_prompts_begin_the_training_ids_of_every_template(
    name: str, contents: list[str], system: bool, accepted: dict[str, ChatTemplate]
) -> None:
    system = system and name not in ("gemma", "mistral")
    messages, template, known = alternating(system, contents), accepted[name], GOOD[name]
    ids, trained = template.encode_for_training(messages)
    ends = 0
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            prompt = template.encode(messages[:turn])
            assert ids[: len(prompt)] == prompt
            assert not any(trained[ends : len(prompt)])
            ends = next((i for i in range(len(prompt), len(ids)) if not trained[i]), len(ids))
            said = spelled(template.tokenizer, ids[len(prompt) : ends])
            content = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in message.content.strip())
            assert said.removeprefix("<think>\n\n</think>\n\n") == known.trained.format(content)
    assert not any(trained[ends:])


@pytest.mark.parametrize("name", [name for name in GOOD if name != "zephyr"])
def test_ids_of_other_templates_equal_those_of_transformers(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    other = with_tokens(GOOD[name], tokenizer)
    other.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for system in (False, True):
        contents = ["Hi  Alice", 'the "book"\n\n x', "你好 😀?", "1"]
        messages = alternating(system, contents)
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        except Exception as error:
            with pytest.raises(ModelFolderError, match=str(error)[:20]):
                chat_template(other).encode(messages)
        else:
            assert chat_template(other).encode(messages) == expected


@pytest.mark.parametrize("scheme", ["always", "first", "prepend"])
def test_spaces_before_texts_are_those_of_transformers(scheme: str, shared: Path, tmp_path: Path) -> None:
    """SentencePiece's alphabet: some put a space before every text between control tokens, some before the first."""
    transformers = pytest.importorskip("transformers")
    source = json.loads((shared / "models" / "stories260k" / "tokenizer.json").read_text(encoding="utf-8"))
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    if scheme == "prepend":
        source["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
        source["pre_tokenizer"] = None
    else:
        source["normalizer"], source["pre_tokenizer"] = None, space
    for name in ("llama2", "zephyr"):
        config = {**GOOD[name].names, "add_bos_token": True, "chat_template": GOOD[name].source}
        tokenizer = Tokenizer(Backend.from_str(json.dumps(source)), config)
        folder = tmp_path / name
        tokenizer.save(folder)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        messages = alternating(True, ["Be kind", "Once upon a time", "there was a cat", "Who"])
        plain = [{"role": message.role, "content": message.content} for message in messages]
        expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        if name == "zephyr":
            expected = [tokenizer.bos_id, *expected]
        found = chat_template(tokenizer).encode(messages)
        assert spelled(tokenizer, found) == spelled(tokenizer, expected)
        if name == "llama2" or scheme != "first":
            assert found == expected
        template = chat_template(tokenizer)
        template.check_for_training()
        messages.append(Message("assistant", "there was"))
        ids, trained = template.encode_for_training(messages)
        prompt = template.encode(messages[:-1])
        assert ids[: len(prompt)] == prompt
        assert [spelled(tokenizer, [id]) for id, mine in zip(ids, trained, strict=True) if mine][-1] == "</s>"
        assert not trained[len(prompt) - 1]


def test_a_begin_token_is_never_doubled_and_never_missing(tokenizer: Tokenizer) -> None:
    doubled = Known("{{ bos_token }}" + GOOD["gemma"].source, GOOD["gemma"].tokens, GOOD["gemma"].names, True)
    for known in (doubled, GOOD["gemma"], GOOD["zephyr"]):
        other = with_tokens(known, tokenizer)
        messages = alternating(False, ["a", "b"])
        ids, trained = chat_template(other).encode_for_training(messages)
        assert ids.count(other.bos_id or -1) == 1
        assert ids[0] == other.bos_id
        assert len(ids) == len(trained)
        assert [spelled(other, [id]) for id, mine in zip(ids, trained, strict=True) if mine][-2] == "b"


def test_a_turn_end_that_nobody_named_ends_an_answer_too(tokenizer: Tokenizer) -> None:
    other = with_tokens(GOOD["gemma"], tokenizer)
    template = chat_template(other)
    end = other.special_id("<end_of_turn>")
    assert end not in other.end_ids
    assert template.turn_end == end
    assert template.tokenizer.end_ids == (*other.end_ids, end)


def test_what_a_model_wrote_itself_is_kept_as_it_is(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    messages = alternating(False, ["Hi", "Alice", "and", "the book", "?"])
    letters = [id for letter in "Alice" for id in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("Alice")
    ids = template.encode(messages, answers={1: letters})
    assert tokenizer.decode(ids) == tokenizer.decode(template.encode(messages))
    prompt = template.encode(messages[:1])
    assert ids[: len(prompt) + len(letters) + 1] == [*prompt, *letters, template.turn_end]


# ---- templates that cannot be trained with

PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def body(content: str) -> str:
    """ChatML without the prompt for an answer, with the content as given."""
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}CONTENT{{ '<|im_end|>\\n' }}{% endfor %}"
    return source.replace("CONTENT", content)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (body("{{ m.content | upper }}") + PROMPT, "alters"),
        (body("{{ m.content | e }}") + PROMPT, "alters"),
        (body("{{ m.content[:100] }}") + PROMPT, "alters"),
        (body("{{ m.content.split() | join(' ') }}") + PROMPT, "alters"),
        (body("{{ m.content | tojson }}") + PROMPT, "alters"),
        (body("{{ m.content.replace('\\n', ' ') }}") + PROMPT, "alters"),
        (body("{{ m.content[1:] }}") + PROMPT, "to pieces"),
        (body("{{ m.content if loop.last }}") + PROMPT, "drops"),
        (body("{{ m.content }}{{ m.content }}") + PROMPT, "repeats"),
        ((body("{{ m.content }}")).replace("in messages", "in messages | reverse") + PROMPT, "reorders"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}assistant: ", "no end token"),
        ("{% for m in messages %}{{ '<|im_start|>' + m.content + '\\n' }}{% endfor %}", "begins with"),
        (body("{{ m.content }}"), "begins with"),
        (
            body("{{ m.content }}").replace("'<|im_end|>\\n'", "'\\n' if m.role == 'assistant' else '<|im_end|>\\n'")
            + PROMPT,
            "no end",
        ),
        ("{{ messages | length }}" + body("{{ m.content }}") + PROMPT, "does not begin as the prompt"),
        (body("{{ m.content }}") + "{% if add_generation_prompt %}<|im_start|>bot\n{% endif %}", "does not begin as"),
        ("{{ raise_exception('not today') }}", "not today"),
        (MISTRAL_3.source, "drops, repeats or reorders"),
    ],
)
def test_a_template_that_spoils_training_is_refused(source: str, reason: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source, tokenizer)
    with pytest.raises((ConfigError, ModelFolderError), match=reason) as caught:
        template.check_for_training()
    assert "--template chatml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_that_cannot_be_trained_with_may_still_answer(tokenizer: Tokenizer) -> None:
    other = with_tokens(MISTRAL_3, tokenizer)
    messages = alternating(True, ["Be kind", "a", "b", "c"])
    assert spelled(other, chat_template(other).encode(messages)) == "<s>[INST]a[/INST]b</s>[INST]Be kind\n\nc[/INST]"
    with pytest.raises(ConfigError, match="--template chatml"):
        chat_template(other).encode_for_training([*messages, Message("assistant", "d")])


def test_data_with_a_system_message_for_a_model_that_takes_none(tokenizer: Tokenizer) -> None:
    template = chat_template(with_tokens(GOOD["gemma"], tokenizer))
    with pytest.raises(ModelFolderError, match=r"does not take these messages .System role not supported"):
        template.encode_for_training(alternating(True, ["a", "b", "c"]))


# ---- which template, and messages


def test_the_template_of_a_model_without_one() -> None:
    ours = Tokenizer.train(TEXTS, 300)
    bare = Tokenizer(ours._backend, {})
    assert bare.chat_template is None
    assert chat_template(bare).source == CHATML
    assert chat_template(bare).tokenizer.chat_template == CHATML
    plain = with_tokens(Known("", (END_OF_TEXT,), {"eos_token": END_OF_TEXT}), ours)
    with pytest.raises(ConfigError, match=re.escape("no <|im_start|> and <|im_end|>")):
        chat_template(plain, "chatml")
    without = Tokenizer(plain._backend, {})
    with pytest.raises(ModelFolderError, match="no chat template"):
        chat_template(without)
    with pytest.raises(ConfigError, match="--template alpaca"):
        chat_template(ours, "alpaca")


def test_chatml_in_place_of_the_models_own(tokenizer: Tokenizer) -> None:
    other = tokenizer.with_chat("{{ raise_exception('broken') }}", [])
    template = chat_template(other, "chatml")
    template.check_for_training()
    assert template.tokenizer.chat_template == CHATML


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"chat_template": "a"}, "a"),
        ({"chat_template": [{"name": "rag", "template": "b"}, {"name": "default", "template": "c"}]}, "c"),
        ({"chat_template": {"default": "d", "rag": "e"}}, "d"),
        ({"chat_template": [{"name": "rag", "template": "b"}]}, None),
        ({"chat_template": 7}, None),
    ],
)
def test_where_a_template_is_found(config: dict[str, Any], expected: str | None, tokenizer: Tokenizer) -> None:
    assert Tokenizer(tokenizer._backend, {"eos_token": END_OF_TEXT, **config}).chat_template == expected


def test_a_template_in_its_own_file_comes_first(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'ü' }}", encoding="utf-8")
    assert Tokenizer.load(tmp_path).chat_template == "{{ 'ü' }}"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFolderError, match=r"chat_template\.jinja: not UTF-8"):
        Tokenizer.load(tmp_path)


# ---- what it costs


def test_a_prompt_is_rendered_but_for_what_comes_before_an_answer_for_the_first_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    render = Template.render

    def counting(self: Template, messages: Any, names: Any, generation_prompt: bool) -> str:
        rendered.append(len(messages))
        return render(self, messages, names, generation_prompt)

    monkeypatch.setattr(Template, "render", counting)
    template = chat_template(tokenizer)
    assert template.turn_end is not None
    rendered.clear()
    messages = alternating(False, ["Alice"] * 201)
    plain = template.encode(messages)
    assert sorted(rendered) == [1, 201]
    assert template.encode(messages, answers={place: tokenizer.encode("Alice") for place in range(1, 201, 2)}) == plain
    assert len(rendered) == 2
    template.encode_for_training(messages[:-1])
    assert sorted(rendered) == sorted([*range(1, 200, 2), 200, 201]), "for training each is made sure of"


def test_prompts_begin_the_training_ids_where_the_text_before_an_answer_touches_it(tokenizer: Tokenizer) -> None:
    source = body("{{ m.content }}").replace("m.role + '\\n'", "m.role + ' '") + PROMPT.replace("\\n", " ")
    template = ChatTemplate(source, tokenizer)
    template.check_for_training()
    assert tokenizer.encode("user the book") != tokenizer.encode("user ") + tokenizer.encode("the book")
    messages = alternating(False, ["the book"] * 8)
    ids, _ = template.encode_for_training(messages)
    for count in (7, 5, 3, 1):
        prompt = template.encode(messages[:count])
        assert ids[: len(prompt)] == prompt


def test_of_too_many_renderings_the_oldest_are_forgotten(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_MOST_KEPT", 3)
    template = chat_template(tokenizer)
    for count in range(1, 9):
        template.encode(alternating(False, ["Alice"] * count))
    monkeypatch.setattr(Template, "render", None)
    for count in (6, 7, 8):
        template.encode(alternating(False, ["the book"] * count))
