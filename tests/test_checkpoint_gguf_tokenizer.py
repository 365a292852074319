"""Tokenizers in GGUF files: the same ids out and in, the same cuts as llama.cpp, and every refusal."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as package
import pytest
import torch
from gguf.constants import TokenType
from gguf_bytes import altered
from tiny_folder import TEXT
from tokenizers import Tokenizer as Backend
from variants import VARIANTS, make_model

from minigpt.checkpoint.folder import load
from minigpt.checkpoint.gguf import read_gguf, write_gguf
from minigpt.checkpoint.gguf_patterns import PRE_TOKENIZERS, known_as, pre_tokenizer_json
from minigpt.checkpoint.gguf_tokenizer import implied_merges, tokenizer_to_gguf
from minigpt.errors import ModelFolderError
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import END_OF_TEXT, IM_END, Tokenizer

KEY = "tokenizer.ggml."
TEXTS = (
    "", " ", "  two  spaces ", "Alice was beginning to get very tired", "don't 12345 x!=y\n\n\tz",
    "猫 é 😀👩‍👩‍👧 e\u0301",
    "<|endoftext|><|im_start|></s><unk>", "\x00\x7f\u2028\u200b", "▁ ▁▁", "a" * 50,
)  # fmt: skip


def model_for(tokenizer: Tokenizer, more: int = 0) -> GPT:
    return make_model(replace(VARIANTS["llama"], vocab_size=tokenizer.vocab_size + more))


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.train([TEXT, "猫 and café\n"], 290)


@pytest.fixture(scope="module")
def byte_level(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "ours.gguf"
    write_gguf(path, model_for(ours), ours, "f32")
    return path


@pytest.fixture(scope="module")
def sentencepiece(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Path]:
    tokenizer = Tokenizer.load(shared / "models" / "stories260k")
    path = tmp_path_factory.mktemp("gguf") / "stories.gguf"
    write_gguf(path, model_for(tokenizer), tokenizer, "f32")
    return tokenizer, path


def refusal(path: Path) -> str:
    with pytest.raises(ModelFolderError) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_ours_comes_back_with_all_that_it_knows(ours: Tokenizer, byte_level: Path) -> None:
    theirs = read_gguf(byte_level).tokenizer
    for text in TEXTS:
        ids = ours.encode_prompt(text)
        assert theirs.encode_prompt(text) == ids
        assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.vocab_size == ours.vocab_size
    assert theirs.end_ids == ours.end_ids
    assert theirs.end_of_text_id == ours.end_of_text_id
    assert (theirs.bos_id, theirs.pad_id) == (ours.bos_id, ours.pad_id) == (None, 3)
    assert theirs.chat_template == ours.chat_template
    assert theirs.named_tokens == ours.named_tokens
    assert [theirs.special_id(name) for name in (END_OF_TEXT, IM_END)] == [0, 2]


def test_what_llama_cpp_is_told_of_ours(ours: Tokenizer, byte_level: Path) -> None:
    fields = package.GGUFReader(byte_level).fields
    found = {name.removeprefix(KEY): field.contents() for name, field in fields.items() if name.startswith("tokenizer")}
    tokens, types, merges = (found.pop(name) for name in ("tokens", "token_type", "merges"))
    assert found == {
        "model": "gpt2", "pre": "qwen2", "bos_token_id": 0, "eos_token_id": 0, "eot_token_id": 2,
        "padding_token_id": 3, "add_bos_token": False, "tokenizer.chat_template": ours.chat_template,
    }  # fmt: skip
    assert types == [TokenType.CONTROL] * 4 + [TokenType.NORMAL] * 286
    assert tokens[:5] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "!"]
    assert merges[0].replace(" ", "") == tokens[260]


def test_stories_come_back_with_the_same_ids(sentencepiece: tuple[Tokenizer, Path]) -> None:
    ours, path = sentencepiece
    theirs = read_gguf(path).tokenizer
    draw = random.Random(0)
    words = [ours.decode([id], continuing=True) for id in range(259, ours.vocab_size)]
    mixed = ["".join(draw.choices(words, k=12)) for _ in range(200)]
    for text in (*TEXTS, *mixed):
        ids = ours.encode_prompt(text)
        assert theirs.encode_prompt(text) == ids, text
        assert theirs.decode(ids[1:]) == ours.decode(ids[1:])
        assert theirs.encode(text, continuing=True) == ours.encode(text, continuing=True)
    assert (theirs.bos_id, theirs.end_ids) == (ours.bos_id, ours.end_ids) == (1, (2,))
    backend = Backend.from_str(json.dumps(theirs.source))  # what other programs read puts the begin token first too
    assert backend.encode("Lily").ids == theirs.encode_prompt("Lily")


def naive_sentencepiece(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Merge the pair with the best score, the leftmost of equals, until none makes a token; bytes for what is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    return [
        id
        for piece in pieces
        for id in ([ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode("utf-8")])
    ]


def test_scores_mean_what_sentencepiece_means_by_them(sentencepiece: tuple[Tokenizer, Path]) -> None:
    _, path = sentencepiece
    fields = package.GGUFReader(path).fields
    tokens, scores = fields[f"{KEY}tokens"].contents(), fields[f"{KEY}scores"].contents()
    assert fields[f"{KEY}token_type"].contents()[:5] == [
        TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE, TokenType.BYTE,
    ]  # fmt: skip
    ids = {token: id for id, token in enumerate(tokens)}
    theirs = read_gguf(path).tokenizer
    for text in ("Once upon a time, there was a little girl", "hello  there 猫", "thethethere and then", "x😀"):
        assert theirs.encode(text) == naive_sentencepiece(text, ids, scores)


def test_merges_are_implied_in_the_order_of_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    draw = random.Random(3)
    words = dict.fromkeys([*"abc▁", *("".join(draw.choices("abc▁", k=draw.randint(2, 6))) for _ in range(300))])
    scores = {word: float(draw.randint(-9, 0)) for word in words}  # with many that are equal
    ids = {word: id for id, word in enumerate(scores)}
    expected = [list(pair) for pair in generate_merges(ids, scores)]
    assert len(expected) > 300
    assert implied_merges(scores) == expected


def test_text_makes_no_control_token_out_of_its_parts(sentencepiece: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    _, path = sentencepiece
    tokens = list(package.GGUFReader(path).fields[f"{KEY}tokens"].contents())
    tokens[-1] = "s>"
    assert "<" in tokens
    assert len(set(tokens)) == len(tokens)
    scores = [0.0] * len(tokens)
    theirs = read_gguf(altered(path, tmp_path, values={f"{KEY}tokens": tokens, f"{KEY}scores": scores})).tokenizer
    assert theirs.encode("<s>", continuing=True) == [tokens.index("<"), 511]
    assert theirs.special_id("<s>") == 1


def test_without_a_space_first_there_is_none(sentencepiece: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    ours, path = sentencepiece
    theirs = read_gguf(altered(path, tmp_path, values={f"{KEY}add_space_prefix": False})).tokenizer
    assert theirs.encode("Once upon") == ours.encode("Once upon", continuing=True) != ours.encode("Once upon")
    assert theirs.decode(theirs.encode(" x")) == " x"
    assert tokenizer_to_gguf(theirs, theirs.vocab_size)[f"{KEY}add_space_prefix"] is False


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " say", " 12345", " …!", "\n\n", " x", "'", "LL"]),
        ("smollm", ["I", "'ll", " say", " ", "1", "2", "3", "4", "5", " …!", "\n\n", " x", "'", "LL"]),
        ("llama-bpe", ["I", "'ll", " say", " ", "123", "45", " …!\n\n", " x", "'LL"]),
        ("qwen2", ["I", "'ll", " say", " ", "1", "2", "3", "4", "5", " …!\n\n", " x", "'LL"]),
        ("default", ["I", "'", "ll", " say", " ", "123", "45", " ", "…!", "\n\n", " x", "'", "LL"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_llama_cpp_does(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    source = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": pre_tokenizer_json(PRE_TOKENIZERS[name]), "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }  # fmt: skip
    backend = Backend.from_str(json.dumps(source))
    assert backend.pre_tokenizer is not None
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in found] == pieces


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_name_is_read_and_found_again(name: str, byte_level: Path, tmp_path: Path) -> None:
    read = read_gguf(altered(byte_level, tmp_path, values={f"{KEY}pre": name}))
    pre, found = PRE_TOKENIZERS[name], PRE_TOKENIZERS[known_as(read.tokenizer.source)]
    assert (found.patterns, found.ignore_merges) == (pre.patterns, pre.ignore_merges)
    assert read.tokenizer.source["model"]["ignore_merges"] == name.startswith("llama")


def test_llama_3_begins_with_its_begin_token_where_the_file_does_not_say(byte_level: Path, tmp_path: Path) -> None:
    for values, bos in (
        ({f"{KEY}pre": "llama-bpe"}, 0),
        ({f"{KEY}pre": "qwen2"}, None),
        ({f"{KEY}pre": "qwen2", f"{KEY}add_bos_token": True}, 0),
        ({f"{KEY}pre": "llama-bpe", f"{KEY}add_bos_token": False}, None),
    ):
        drop = () if f"{KEY}add_bos_token" in values else (f"{KEY}add_bos_token",)
        assert read_gguf(altered(byte_level, tmp_path, drop=drop, values=values)).tokenizer.bos_id == bos


def test_smollm_has_the_layout_of_its_makers(byte_level: Path, tmp_path: Path) -> None:
    source = read_gguf(altered(byte_level, tmp_path, values={f"{KEY}pre": "smollm"})).tokenizer.source
    assert source["pre_tokenizer"] == {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }


def changed_types(path: Path, changes: dict[int, int]) -> list[int]:
    types = list(package.GGUFReader(path).fields[f"{KEY}token_type"].contents())
    for id, kind in changes.items():
        types[id] = int(kind)
    return types


def test_tokens_are_what_their_types_say(ours: Tokenizer, byte_level: Path, tmp_path: Path) -> None:
    the = ours.encode(" the")
    assert len(the) == 1
    changes = {the[0]: TokenType.USER_DEFINED, 280: TokenType.UNUSED, 289: TokenType.UNUSED, 288: TokenType.UNUSED}
    merges = package.GGUFReader(byte_level).fields[f"{KEY}merges"].contents()[:20]
    values = {f"{KEY}token_type": changed_types(byte_level, changes), f"{KEY}merges": merges}
    path = altered(byte_level, tmp_path, values=values)
    read = read_gguf(path)
    added = {token["id"]: token for token in read.tokenizer.source["added_tokens"]}
    assert added[0]["special"]
    assert not added[the[0]]["special"]
    assert added[280]["special"], "never made from text"
    assert (read.config.vocab_size, read.tokenizer.vocab_size) == (290, 288), "fillers at the end are left out"
    content = added[the[0]]["content"]
    assert read.tokenizer.encode(f"a{content}a")[1] == the[0], "a user's token is cut out of text first"


def test_ends_of_a_turn_come_back(byte_level: Path, tmp_path: Path, ours: Tokenizer) -> None:
    read = read_gguf(altered(byte_level, tmp_path, values={f"{KEY}eos_token_id": 1, f"{KEY}eom_token_id": 7}))
    assert set(read.tokenizer.end_ids) == {0, 1, 2, 7}
    again = tokenizer_to_gguf(read.tokenizer, 290)
    assert [again[f"{KEY}{name}_token_id"] for name in ("eos", "eot", "eom")] == [1, 2, 7]
    fields = package.GGUFReader(byte_level).fields
    tokens, merges = (list(fields[f"{KEY}{name}"].contents()) for name in ("tokens", "merges"))
    tokens[289] = "<|eot_id|>"
    types = changed_types(byte_level, {289: TokenType.CONTROL})
    merges = [merge for merge in merges if merge.replace(" ", "") in tokens]
    values = {f"{KEY}tokens": tokens, f"{KEY}token_type": types, f"{KEY}merges": merges}
    assert 289 in read_gguf(altered(byte_level, tmp_path, values=values)).tokenizer.end_ids


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"pre": "gpt-4o"}, "pre-tokenizer 'gpt-4o' is not supported (supported: gpt-2, qwen2,"),
        ({"pre": 7}, "pre-tokenizer 7 is not supported"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is no list"),
        ({"tokens": ["a"]}, "has 1 tokens of 290 types, but the embedding has 290 rows"),
        ({"token_type": [1]}, "has 290 tokens of 1 types"),
        ({"token_type": "normal"}, "tokenizer.ggml.token_type is no list"),
        ({"merges": ["zz qq"]}, "its tokenizer cannot be used"),
        ({"merges": ["nospace"]}, "its tokenizer cannot be used"),
        ({"merges": 3}, "tokenizer.ggml.merges is no list"),
        ({"eos_token_id": 290}, "tokenizer.ggml.eos_token_id is 290, no token of the vocabulary"),
        ({"bos_token_id": "begin"}, "tokenizer.ggml.bos_token_id is begin, no token of the vocabulary"),
        ({"padding_token_id": True}, "tokenizer.ggml.padding_token_id is True"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; it must be true or false"),
    ],
)
def test_a_wrong_tokenizer_is_refused(byte_level: Path, tmp_path: Path, values: dict[str, Any], words: str) -> None:
    changes = {f"{KEY}{name}": value for name, value in values.items()}
    assert words in refusal(altered(byte_level, tmp_path, values=changes))


def test_what_a_tokenizer_lacks_is_named(byte_level: Path, tmp_path: Path) -> None:
    for name in ("tokens", "merges"):
        assert f"{KEY}{name} is missing" in refusal(altered(byte_level, tmp_path, drop=(f"{KEY}{name}",)))
    assert "model None" in refusal(altered(byte_level, tmp_path, drop=(f"{KEY}model",)))
    assert "pre-tokenizer None" in refusal(altered(byte_level, tmp_path, drop=(f"{KEY}pre",)))


def test_a_token_that_is_there_twice_is_refused(byte_level: Path, tmp_path: Path) -> None:
    tokens = list(package.GGUFReader(byte_level).fields[f"{KEY}tokens"].contents())
    tokens[9] = tokens[8]
    assert "vocabulary twice" in refusal(altered(byte_level, tmp_path, values={f"{KEY}tokens": tokens}))


def test_scores_are_needed_for_sentencepiece(sentencepiece: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    _, path = sentencepiece
    assert "scores is missing" in refusal(altered(path, tmp_path, drop=(f"{KEY}scores",)))
    tokens = [*package.GGUFReader(path).fields[f"{KEY}tokens"].contents()[:-1], "x" * 200_000]
    assert "token of 200,000 characters" in refusal(altered(path, tmp_path, values={f"{KEY}tokens": tokens}))
    assert "3 scores for 512 tokens" in refusal(altered(path, tmp_path, values={f"{KEY}scores": [0.0, 1.0, 2.0]}))


def changed(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    """The same tokenizer with other parts in its tokenizer.json."""
    source = tokenizer.source
    model = parts.pop("model", {})
    source |= parts
    source["model"] |= model
    return Tokenizer(Backend.from_str(json.dumps(source)), {"eos_token": END_OF_TEXT})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "changes text first"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}}, "no name for that"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}}, "text by no pattern"),
        ({"model": {"ignore_merges": True}}, "no name for that"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_llama_cpp_would_not_do_alike_is_refused(
    ours: Tokenizer, tmp_path: Path, parts: dict[str, Any], words: str
) -> None:
    for part in parts.values():
        if "add_prefix_space" in part:
            part["trim_offsets"] = True
    with pytest.raises(ModelFolderError, match=words):
        write_gguf(tmp_path / "model.gguf", model_for(ours), changed(ours, **parts), "f32")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_composed_first_is_written(ours: Tokenizer) -> None:
    assert tokenizer_to_gguf(changed(ours, normalizer={"type": "NFC"}), 290)[f"{KEY}pre"] == "qwen2"


def test_transformers_reads_the_tokenizer_alike(ours: Tokenizer, byte_level: Path, tmp_path: Path) -> None:
    """The folder that comes of a file, and the file itself."""
    import transformers

    read_gguf(byte_level).tokenizer.save(tmp_path)
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.AutoTokenizer.from_pretrained(byte_level.parent, gguf_file=byte_level.name),
    ):
        for text in ("Alice was 123", "don't!\n\n猫 😀"):
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)


def test_a_model_with_a_real_tokenizer_says_the_same_after_the_way_through_gguf(shared: Path, tmp_path: Path) -> None:
    loaded = load(shared / "models" / "stories260k", dtype=torch.float32)
    write_gguf(tmp_path / "stories.gguf", loaded.model, loaded.tokenizer, "f32")
    read = read_gguf(tmp_path / "stories.gguf")
    assert read.config == loaded.model.config
    ids = torch.tensor([loaded.tokenizer.encode_prompt("Once upon a time, there was " * 12)])
    with torch.no_grad():
        assert torch.equal(read.build(torch.float32)(ids), loaded.model(ids))
