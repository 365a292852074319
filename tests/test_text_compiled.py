"""Text to ids in compiled C against the library: the same merges in every word, whatever the vocabulary."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minigpt import compiler
from minigpt.text import compiled as compiled_module
from minigpt.text.compiled import CompiledEncoder
from minigpt.text.pieces import cut
from minigpt.text.tokenizer import PATTERN
from minigpt.text.tokenizer_json import byte_alphabet
from minigpt.text.words import WordEncoder, word_encoder

ALPHABET = {byte: character for character, byte in byte_alphabet().items()}
FEW = "ab é中"


def symbols(word: str) -> str:
    return "".join(ALPHABET[byte] for byte in word.encode())


def backend(pairs: list[tuple[str, str]], extra: tuple[str, ...] = (), ignore_merges: bool = False) -> Backend:
    """A tokenizer of 256 bytes, the pairs given, joined, and extra words that no pair leads to."""
    tokens = [*ALPHABET.values(), *(left + right for left, right in pairs), *extra]
    vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    return with_words(models.BPE(vocab, pairs, ignore_merges=ignore_merges))


def with_words(model: models.BPE, pattern: str = PATTERN) -> Backend:
    result = Backend(model)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    return result


def encoder_of(tokenizer: Backend) -> WordEncoder:
    encoder = word_encoder(tokenizer, json.loads(tokenizer.to_str()))
    assert encoder is not None
    return encoder


def compiled_of(tokenizer: Backend) -> CompiledEncoder:
    if compiled_module._library() is None:
        pytest.skip("no C compiler here")
    found = encoder_of(tokenizer)._compiled
    assert found is not None
    return found


def check(tokenizer: Backend, found: CompiledEncoder, text: str) -> None:
    ids = found.encode(text)
    assert ids is not None
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)


def drawn(seed: int, count: int) -> list[tuple[str, str]]:
    """Pairs in any order, several of them to the same token and some of them twice."""
    draw = random.Random(seed)
    known = [*dict.fromkeys(symbols(FEW))]
    pairs = []
    for _ in range(count):
        left, right = draw.choice(known), draw.choice(known)
        known.append(left + right)
        pairs.append((left, right))
    draw.shuffle(pairs)
    return pairs


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 50),
    count=st.sampled_from((0, 5, 40, 200)),
    texts=st.lists(st.text(FEW, max_size=120), max_size=4),
)
def test_any_merges(seed: int, count: int, texts: list[str]) -> None:
    tokenizer = backend(drawn(seed, count))
    found = compiled_of(tokenizer)
    for text in texts:
        check(tokenizer, found, text)


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> tuple[Backend, CompiledEncoder]:
    """GPT-2's 50,000 merges, with words that may be long."""
    folder = shared / "data" / "tokenizer" / "gpt2_tokenizer"
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [(left, right) for left, right in map(str.split, filter(None, lines))]
    tokenizer = with_words(models.BPE(vocab, pairs))
    return tokenizer, compiled_of(tokenizer)


def test_real_text(gpt2: tuple[Backend, CompiledEncoder], shared: Path) -> None:
    paths = [*(shared / "data" / "pretrain").rglob("*.txt"), *(shared / "data" / "instruct").glob("*.json")]
    assert len(paths) > 12
    tokenizer, found = gpt2
    pieces = [piece for path in paths for piece in cut([path.read_text(encoding="utf-8")[:100_000]], 2000)]
    odd = 0
    for piece, expected in zip(pieces, tokenizer.encode_batch(pieces, add_special_tokens=False), strict=True):
        ids = found.encode(piece)
        odd += ids is None
        assert ids is None or ids.tolist() == expected.ids
    assert odd < len(pieces) / 50


@pytest.mark.parametrize("unit", ["a", " ", "\n", "=", "7", "哈", "😀", "ab", " the", "' ", "l's"])
def test_long_runs(gpt2: tuple[Backend, CompiledEncoder], unit: str) -> None:
    for count in (*range(1, 70), 1000, 100_000):
        check(*gpt2, unit * count)


@settings(max_examples=300, deadline=None)
@given(word=st.text(st.characters(categories=["Lu", "Ll", "Lo"], max_codepoint=0xFFFF), max_size=200))
def test_any_letters(gpt2: tuple[Backend, CompiledEncoder], word: str) -> None:
    tokenizer, found = gpt2
    ids = found.encode(word)
    assert ids is None or ids.tolist() == tokenizer.encode(word, add_special_tokens=False).ids


def test_words_share_the_few_places_for_those_that_are_kept(
    gpt2: tuple[Backend, CompiledEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_module, "_KNOWN_BITS", 1)
    tokenizer, _ = gpt2
    found = compiled_of(tokenizer)
    words = [
        f"{before}{word}{after}" for word in ("it", "\0", "中", "éa") for before in ("", "\0") for after in ("", "\0")
    ]
    for _ in range(3):
        for word in (*words, *reversed(words), "eighteenbytesaretoomany"):
            check(tokenizer, found, word)
    check(tokenizer, found, "".join("x" * count + " " for count in range(20)) * 2)


def test_an_odd_character_is_said(gpt2: tuple[Backend, CompiledEncoder]) -> None:
    found = gpt2[1]
    for odd in "\u0897\U0002ebf0\U0010ffff\U0001fbf1ſ":
        assert found.encode(odd) is None
        assert found.encode(f"a {odd}") is None
    for plain in ("a²½②Ⅷ中。é😀", "\U00020000", ""):
        assert found.encode(plain) is not None


def test_a_word_that_merges_do_not_lead_to() -> None:
    pairs = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a")]
    extra = ("bca", symbols("中国"), "Ġbcb", symbols("中")[:2], "<|x|>", "", symbols("\u0897"))
    tokenizer = backend(pairs, extra, ignore_merges=True)
    found, encoder = compiled_of(tokenizer), encoder_of(tokenizer)
    assert sorted(found.unreached) == sorted(["bca", "中国", " bcb", "<|x|>"])
    for text in ("bca abc", "abc bca\nabc bcb 中国\nbcbca bcaa", "中国 bca 中国中 <|x|>x", "\u0897"):
        assert encoder.encode(text).tolist() == tokenizer.encode(text).ids
    for text, right in (("bca", False), ("abc", True)):
        ids = found.encode(text)
        assert ids is not None
        assert (ids.tolist() == tokenizer.encode(text).ids) is right


def test_models_that_are_not_compiled() -> None:
    compiled_of(backend([("a", "b")]))
    strangers = tuple(f"t{n}x" for n in range(99))
    compiled_of(backend([], strangers))
    vocab = {character: id for id, character in enumerate(ALPHABET.values())}
    for tokenizer in (
        backend([], strangers, ignore_merges=True),
        with_words(models.BPE({**vocab, "ab": 7}, [])),
    ):
        encoder = encoder_of(tokenizer)
        assert encoder._compiled is None
        assert encoder.encode("a cab").tolist() == tokenizer.encode("a cab").ids


def test_bytes_that_have_no_id() -> None:
    vocab = {character: id for id, character in enumerate(ALPHABET.values()) if character not in ("a", ALPHABET[0xE4])}
    tokenizer = with_words(models.BPE(vocab, [], unk_token="Ġ"))
    found, encoder = compiled_of(tokenizer), encoder_of(tokenizer)
    for text, odd in (("b c", False), ("b a", True), ("中 c", True), ("哈", False)):
        assert (found.encode(text) is None) is odd
        assert encoder.encode(text).tolist() == tokenizer.encode(text).ids


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled_module._library.cache_clear()
    try:
        tokenizer = backend([("a", "b"), ("ab", "c")])
        encoder = encoder_of(tokenizer)
        assert encoder._compiled is None
        assert encoder.encode("abc ab 中").tolist() == tokenizer.encode("abc ab 中").ids
    finally:
        compiled_module._library.cache_clear()
