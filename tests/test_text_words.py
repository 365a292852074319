"""Ids word by word against the library: the same for every text, whatever is in it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minigpt.text import words as words_module
from minigpt.text.pieces import cut
from minigpt.text.tokenizer import PATTERN, SPECIAL_TOKENS, Tokenizer
from minigpt.text.tokenizer_json import byte_alphabet
from minigpt.text.words import WordEncoder, word_encoder

LLAMA3 = PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SAMPLE = (
    "It's what they'll say, we've 1234 of them; I'd DON'T. The cat sat on the mat_and_the hat!\n\n  if x:\n\ty = 2\n"
    "红楼梦中国古典小说，红楼梦。中国人　中国\u3000\u3000\n"
    "naïve café e\u0301 Привет мир привет हिन्दी ไทย 한국어 😀👍🏽 ½ ② Ⅷ\n"
) * 8
# What patterns look at, what libraries differ on, and what normalisation changes.
ALPHABET = [
    *"aBsſtdemlLvV'’ \n\t\r_-!.,0159é中国。， 　",
    *"\x00\x1c\x1d\x1f\x85\xa0\u1680\u180e\u2028\u2029\u200b\u200d\ufeff\u3000\u0301\u0327²½②Ⅷ一〇٣߀",
    *"İıßﬁﬆ가\u1100\u1161ÅA\u030aहि้😀👍🏽\U0002ebf0\U00031350\U0001fbf1\U00020000\U0001d7d8\ufffd",
    *("'S", "'re", "'LL", "12", "345", "<|im_start|>", "<|endoftext|>", " \n", "\n\n"),
]


def with_all_pairs(source: dict[str, Any]) -> dict[str, Any]:
    """Let all bytes of the alphabet join in pairs, so that other words have other ids."""
    table = {byte: character for character, byte in byte_alphabet().items()}
    symbols = [table[byte] for byte in sorted(set("".join(ALPHABET[:64]).encode()))]
    vocab, merges = source["model"]["vocab"], source["model"]["merges"]
    for left in symbols:
        for right in symbols:
            vocab.setdefault(left + right, len(vocab))
            merges.append([left, right])
    return source


def backend(kind: str) -> Backend:
    """A tokenizer of some thousand ids with the pre-tokenizer and the normalizer of a known model."""
    split = {"ours": PATTERN, "qwen": PATTERN, "llama3": LLAMA3}
    pre: Any
    if kind in split:
        parts = [pre_tokenizers.Split(Regex(split[kind]), behavior="isolated")]
        pre = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif kind == "smollm":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        pre = pre_tokenizers.Sequence(parts)
    else:
        pre = pre_tokenizers.ByteLevel(add_prefix_space=kind == "gpt2 with a space")
    result = Backend.from_str(json.dumps(with_all_pairs(json.loads(Tokenizer.train([SAMPLE], 420)._backend.to_str()))))
    result.pre_tokenizer = pre
    if kind == "qwen":
        result.normalizer = normalizers.NFC()
        result.add_tokens(["<tool_call>"])
    result.encode_special_tokens = True
    return result


KINDS = ("ours", "qwen", "llama3", "gpt2", "smollm")
BACKENDS = {kind: backend(kind) for kind in KINDS}


def encoder_of(tokenizer: Backend, compiled: bool) -> WordEncoder:
    """An encoder that is compiled, where there is a compiler, or one that is not."""
    encoder = word_encoder(tokenizer, json.loads(tokenizer.to_str()))
    assert encoder is not None
    encoder._compiled = encoder._compiled if compiled else None
    return encoder


ENCODERS = {kind: [encoder_of(BACKENDS[kind], compiled) for compiled in (True, False)] for kind in KINDS}


def check(kind: str, text: str) -> None:
    expected = BACKENDS[kind].encode(text, add_special_tokens=False).ids
    for encoder in ENCODERS[kind]:
        assert encoder.encode(text).tolist() == expected, repr(text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400)
@given(text=st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join))
def test_the_ids_of_strange_text_are_the_library_s(kind: str, text: str) -> None:
    check(kind, text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_ids_of_any_text_are_the_library_s(kind: str, text: str) -> None:
    check(kind, text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_of_the_first_plane_is_taken_as_the_library_takes_it(kind: str) -> None:
    """Beside a letter, a digit, an apostrophe, a space and itself: wherever its class changes the words."""
    codes = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1F300, 0x1FB00), *range(0x20000, 0x2A6E0, 97)]
    plain = [chr(code) for code in codes if not words_module._odd_characters().match(chr(code))]
    assert len(plain) > 50_000
    step = 4096
    for start in range(0, len(plain), step):
        check(kind, "\n".join(f"a{c}b{c}{c} {c}1{c}!{c}'{c}  {c}" for c in plain[start : start + step : 3]))


CHOICES = [
    [*alternatives, *([None] if place in words_module._LEFT_OUT else [])]
    for place, alternatives in enumerate(words_module._ALTERNATIVES)
]


@settings(max_examples=100, deadline=None)
@given(
    parts=st.tuples(*map(st.sampled_from, CHOICES)),
    texts=st.lists(st.lists(st.sampled_from(ALPHABET), max_size=40).map("".join), min_size=1, max_size=6),
)
def test_any_pattern_that_is_made_of_known_alternatives(parts: tuple[str | None, ...], texts: list[str]) -> None:
    tokenizer = Backend.from_str(BACKENDS["ours"].to_str())
    pattern = "|".join([*filter(None, parts), r"\s+"])
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), last])
    tokenizer.encode_special_tokens = True
    for compiled in (True, False):
        encoder = encoder_of(tokenizer, compiled)
        for text in (*texts, SAMPLE):
            assert encoder.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_added_tokens(kind: str) -> None:
    for text in (*SPECIAL_TOKENS, "hi <tool_call>\nthere <tool_call>", "<tool_call"):
        check(kind, f"say {text} now\nand\n{text}")


def real_texts(shared: Path, characters: int) -> Iterator[str]:
    files = [*sorted((shared / "data").rglob("*.txt")), *sorted((shared / "data").rglob("*.json*"))]
    assert len(files) > 20
    for path in files:
        yield from cut([path.read_text(encoding="utf-8")[:characters]])


@pytest.mark.parametrize("kind", KINDS)
def test_real_text(kind: str, shared: Path) -> None:
    for piece in real_texts(shared, 10_000):
        check(kind, piece)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_real_text(kind: str, shared: Path) -> None:
    for piece in real_texts(shared, 10**9):
        check(kind, piece)


def test_a_full_table_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_module, "_MOST_WORDS", 7)
    monkeypatch.setattr(words_module, "_LONGEST_WORD", 4)
    encoder = encoder_of(BACKENDS["ours"], compiled=False)
    assert encoder.encode(SAMPLE).tolist() == BACKENDS["ours"].encode(SAMPLE, add_special_tokens=False).ids
    table = encoder._ids.__self__  # type: ignore[attr-defined]
    assert 0 < len(table) <= 7
    assert all(len(word) <= 4 for word in table)


@pytest.mark.parametrize("compiled", [True, False])
def test_text_without_spaces_goes_to_the_library_unless_it_is_compiled(compiled: bool) -> None:
    tokenizer = Tokenizer.train([SAMPLE], 420)
    encoder = tokenizer._words
    assert encoder is not None
    if not compiled:
        encoder._compiled = None
    assert all(map(encoder.suits, ("", "x" * 99, "Sherlock Holmes — a study", "Привет мир, привет")))
    suit = encoder._compiled is not None
    assert [encoder.suits(text) for text in ("红楼梦中国古典小说", "中国 " + "古典小说，" * 9)] == [suit, suit]
    texts = ["It's — a cat", "红楼梦中国古典小说" * 9, "", "naïve café"]
    expected = [tokenizer._backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer.encode_batch(texts, [False, True, False, True]) == expected


def changed(**parts: Any) -> dict[str, Any]:
    source: dict[str, Any] = json.loads(BACKENDS["ours"].to_str())
    model = source["model"] | parts.pop("model", {})
    return source | {"model": model} | parts


def split_by(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, last]}


def test_tokenizers_that_are_not_known_are_left_to_the_library() -> None:
    assert word_encoder(BACKENDS["ours"], changed()) is not None
    token = {"content": "<x>", "special": False, "lstrip": False, "rstrip": False}
    for source in (
        changed(normalizer={"type": "NFKC"}),
        changed(model={"dropout": 0.1}),
        changed(model={"end_of_word_suffix": "</w>"}),
        changed(pre_tokenizer=None),
        changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        changed(pre_tokenizer=split_by(PATTERN, behavior="Removed")),
        changed(pre_tokenizer=split_by(PATTERN, invert=True)),
        changed(pre_tokenizer=split_by(r"\w+|\s+")),
        changed(pre_tokenizer=split_by(r"\s+")),
        changed(pre_tokenizer=split_by(PATTERN.replace(r"\p{N}|", ""))),
        changed(pre_tokenizer=split_by(r"\s+|" + PATTERN)),
        changed(added_tokens=[token | {"lstrip": True}]),
        changed(added_tokens=[token | {"content": "a\nb"}]),
    ):
        assert word_encoder(BACKENDS["ours"], source) is None, source["pre_tokenizer"]


def test_a_tokenizer_travels_between_processes() -> None:
    tokenizer = Tokenizer.train([SAMPLE], 400)
    tokenizer = tokenizer.with_chat("{{ messages }}", [5])
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode_batch([SAMPLE]) == tokenizer.encode_batch([SAMPLE])
    for name in ("vocab_size", "end_of_text_id", "end_ids", "bos_id", "pad_id", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert again.fingerprint() == tokenizer.fingerprint()


def test_numbers_that_are_no_digits_are_odd() -> None:
    odd = words_module._odd_characters()
    assert all(odd.match(character) for character in "²½②Ⅷſ\u0897\U0002ebf0")
    assert not any(odd.match(character) for character in "a1 中。é😀👍\u0301\u3000一Ａ\U00020000")
