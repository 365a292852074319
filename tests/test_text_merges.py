"""Merges in compiled C against the library's model: the same ids for every word."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minigpt import compiler
from minigpt.text import merges as merges_module
from minigpt.text.merges import Merges, merges
from minigpt.text.tokenizer_json import byte_alphabet
from minigpt.text.words import word_encoder

ALPHABET = {byte: character for character, byte in byte_alphabet().items()}
FEW = "ab é中"


def library() -> Any:
    return merges_module._library() or pytest.skip("no C compiler here")


def symbols(word: str) -> str:
    return "".join(ALPHABET[byte] for byte in word.encode())


def backend(pairs: list[tuple[str, str]], extra: tuple[str, ...] = (), ignore_merges: bool = False) -> Backend:
    """A tokenizer of 256 bytes, the pairs given, joined, and extra words that no pair leads to."""
    tokens = [*ALPHABET.values(), *(left + right for left, right in pairs), *extra]
    vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    result = Backend(models.BPE(vocab, pairs, ignore_merges=ignore_merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return result


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


def check(tokenizer: Backend, found: Merges | None, words: list[str]) -> None:
    assert found is not None
    expected = [token.id for word in words for token in tokenizer.model.tokenize(symbols(word))]
    assert found.encode("".join(words), words).tolist() == expected


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 50),
    count=st.sampled_from((0, 5, 40, 200)),
    words=st.lists(st.text(FEW, max_size=60), max_size=8),
)
def test_any_merges(seed: int, count: int, words: list[str]) -> None:
    library()
    tokenizer = backend(drawn(seed, count))
    check(tokenizer, merges(tokenizer), words)


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> tuple[Backend, Merges]:
    """GPT-2's 50,000 merges."""
    folder = shared / "data" / "tokenizer" / "gpt2_tokenizer"
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    tokenizer = Backend(models.BPE(vocab, [(left, right) for left, right in map(str.split, filter(None, lines))]))
    return tokenizer, Merges(library(), json.loads(tokenizer.to_str())["model"])


def test_words_and_lines_of_real_text(gpt2: tuple[Backend, Merges], shared: Path) -> None:
    paths = [*(shared / "data" / "pretrain").rglob("*.txt"), *(shared / "data" / "instruct").glob("*.json")]
    assert len(paths) > 12
    for path in paths:
        text = path.read_text(encoding="utf-8")[:60_000]
        for pattern in (r"\s?\S+|\s", r".+|\n", r"(?s).{,7}"):
            check(*gpt2, re.findall(pattern, text))


@pytest.mark.parametrize("unit", ["a", " ", "\n", "=", "哈", "😀", "ab", "the "])
def test_long_runs(gpt2: tuple[Backend, Merges], unit: str) -> None:
    check(*gpt2, [unit * count for count in (*range(1, 70), 1000, 20_000)])


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=99)))
def test_any_words(gpt2: tuple[Backend, Merges], words: list[str]) -> None:
    check(*gpt2, words)


def test_words_share_the_few_places_for_those_that_are_kept(
    gpt2: tuple[Backend, Merges], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merges_module, "_KNOWN_BITS", 1)
    tokenizer = gpt2[0]
    found = Merges(library(), json.loads(tokenizer.to_str())["model"])
    words = [
        f"{before}{word}{after}" for word in ("it", "\0", "中", "éa") for before in ("", "\0") for after in ("", "\0")
    ]
    check(
        tokenizer, found, [word for _ in range(3) for word in [*words, *reversed(words), "eighteen bytes are too many"]]
    )
    check(tokenizer, found, [" x" * count for count in range(20)] * 2)


def test_a_word_that_merges_do_not_lead_to() -> None:
    pairs = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a")]
    extra = ("bca", symbols("中国"), "Ġbcb", symbols("中")[:2], "<|x|>x", "")
    tokenizer = backend(pairs, extra, ignore_merges=True)
    library()
    found = merges(tokenizer)
    assert found is not None
    assert sorted(found.unreached) == sorted(["bca", "中国", " bcb", "<|x|>x"])
    encoder = word_encoder(tokenizer, json.loads(tokenizer.to_str()))
    assert encoder is not None
    for text in ("bca abc", "abc bca\nabc bcb 中国\nbcbca bcaa", "中国 bca 中国中 <|x|>x"):
        assert encoder.encode(text).tolist() == tokenizer.encode(text).ids
    assert encoder.encode("bca").tolist() != found.encode("bca", ["bca"]).tolist()
    assert encoder.encode("abc").tolist() == found.encode("abc", ["abc"]).tolist()


def test_models_that_are_left_to_the_library() -> None:
    library()
    assert merges(backend([("a", "b")])) is not None
    assert merges(backend([], tuple(f"t{n}x" for n in range(99)), ignore_merges=True)) is None
    assert merges(backend([], tuple(f"t{n}x" for n in range(99)))) is not None
    vocab = {character: id for id, character in enumerate(ALPHABET.values())}
    assert merges(Backend(models.BPE({**vocab, "ab": 7}, []))) is None
    del vocab["a"]
    assert merges(Backend(models.BPE(vocab, []))) is None


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    merges_module._library.cache_clear()
    try:
        tokenizer = backend([("a", "b"), ("ab", "c")])
        assert merges(tokenizer) is None
        encoder = word_encoder(tokenizer, json.loads(tokenizer.to_str()))
    finally:
        merges_module._library.cache_clear()
    assert encoder is not None
    assert encoder.encode("abc ab 中").tolist() == tokenizer.encode("abc ab 中").ids
