"""The tokenizer against faults 1 to 7, other libraries, and tokenizers that it did not train."""

from __future__ import annotations

import codecs
import errno
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minigpt.errors import ConfigError, DataError, ModelFolderError
from minigpt.text.pieces import cut
from minigpt.text.streaming import StreamDecoder
from minigpt.text.tokenizer import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    PAD,
    SPECIAL_TOKENS,
    Tokenizer,
)

LINES = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:",
    "“and what is the use of a book,” thought Alice “without pictures or conversations?”",
    "if x != y:\n        return [n for n in range(10)]\n",
    "红楼梦 是 中国 古典 小说 😀 naïve café",
)
TEXT = "\n\n".join(LINES * 6)
STRANGE = (
    "",
    "hello",
    "hello !",
    "x != y",
    "  lead",
    "trail  ",
    "\ttab\t\t",
    "a\n\n\nb",
    "é😀",
    "e\u0301x",
    "\x00\x01",
    "﷽",
    "\ufffd",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 400)


@pytest.fixture(scope="module")
def stories(shared: Path) -> Tokenizer:
    return Tokenizer.load(shared / "models" / "stories260k")


@pytest.fixture(scope="module")
def gpt2(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    files = shared / "data" / "tokenizer" / "gpt2_tokenizer"
    backend = Backend(models.BPE.from_file(str(files / "encoder.json"), str(files / "vocab.bpe")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    backend.save(str(path))
    return Tokenizer.load(path)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(id) for id in ids), decoder.flush()]


def test_the_layout_of_a_trained_vocabulary(tokenizer: Tokenizer) -> None:
    assert [tokenizer.special_id(name) for name in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert (tokenizer.end_of_text_id, tokenizer.pad_id, tokenizer.bos_id) == (0, 3, None)
    assert tokenizer.end_ids == (tokenizer.special_id(END_OF_TEXT), tokenizer.special_id(IM_END))
    assert sorted(tokenizer.token_bytes(id) for id in range(4, 260)) == [bytes([byte]) for byte in range(256)]
    assert tokenizer.vocab_size == 400
    assert tokenizer.special_id("Alice") is None


def test_merges_against_a_naive_trainer() -> None:
    """The most frequent pair of each round, counted with a plain loop; no ties in this text."""
    words = {"low": 7, "lower": 4, "lowest": 3, "newer": 9}
    text = "".join(f"\n{word}" * count for word, count in words.items())  # a line end is no part of a word
    pieces = {word: list(word) for word in words}
    merges = []
    for _ in range(5):
        counts: dict[tuple[str, str], int] = {}
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                counts[pair] = counts.get(pair, 0) + words[word]
        best = max(counts, key=lambda pair: counts[pair])
        if sorted(counts.values())[-2:].count(counts[best]) > 1:
            break  # a tie: any order is right
        merges.append("".join(best))
        for word, parts in pieces.items():
            joined = "\0".join(parts).replace("\0".join(best), "".join(best))
            pieces[word] = joined.split("\0")
    assert len(merges) >= 2
    tokenizer = Tokenizer.train([text], MIN_VOCAB_SIZE + len(merges))
    learned = [tokenizer.token_bytes(id).decode() for id in range(MIN_VOCAB_SIZE, tokenizer.vocab_size)]
    assert learned == merges


def test_streaming_holds_back_half_a_character(tokenizer: Tokenizer) -> None:
    """Fault 1: half a character came out as U+FFFD, combining marks twice."""
    id_of_byte = {tokenizer.token_bytes(id): id for id in range(4, 260)}
    for text in ("x😀y", "e\u0301x", "中文", "naïve"):
        ids = [id_of_byte[bytes([byte])] for byte in text.encode()]
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""


@settings(max_examples=150)
@given(st.lists(st.integers(0, 420), max_size=12))
def test_streamed_equals_decoded(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Fault 1, for any ids: broken bytes, control tokens and ids beyond the vocabulary too."""
    expected = b"".join(tokenizer.token_bytes(id) for id in ids).decode("utf-8", "replace")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == expected


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀")[:-1]
    assert streamed(tokenizer, ids)[-1] == "\ufffd"
    decoder = StreamDecoder(tokenizer)
    assert decoder.push_all(ids) == "x"
    assert (decoder.flush(), decoder.flush(), decoder.push_all(tokenizer.encode("y"))) == ("\ufffd", "", "y")


def test_unseen_characters_survive() -> None:
    """Fault 2."""
    tokenizer = Tokenizer.train(["hello world hello there"], 300)
    assert tokenizer.decode(tokenizer.encode("hello é😀")) == "hello é😀"


@pytest.mark.parametrize("text", STRANGE)
def test_nothing_is_added_or_taken_away(tokenizer: Tokenizer, text: str) -> None:
    """Fault 3."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert int(tokenizer.byte_lengths()[ids].sum()) == len(text.encode()) if ids else text == ""


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    """Fault 4."""
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.encode_batch(["a\ud83db"]) == [tokenizer.encode("a\ufffdb")]
    assert Tokenizer.train(["ab \udc80 ab"], 300).vocab_size > MIN_VOCAB_SIZE


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_users_cannot_write_control_tokens(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    """Fault 5: also after save and load, in batches and in prompts."""
    tokenizer.save(tmp_path)
    for one in (tokenizer, Tokenizer.load(tmp_path)):
        text = f"hi {name}user {name}"
        for ids in (one.encode(text), one.encode_prompt(text), one.encode_batch([text])[0]):
            assert not set(ids) & {0, 1, 2, 3}
            assert one.decode(ids) == text


def test_control_tokens_are_never_learned() -> None:
    """Fault 6: a separator in the corpus changes nothing in the vocabulary, and blank lines are learned."""
    texts = [f"The end of story {n}.\n\nThe beginning\n\nof it" for n in range(9)]
    plain = Tokenizer.train(texts, 400)
    assert Tokenizer.train([END_OF_TEXT.join(texts)], 400).fingerprint() == plain.fingerprint()
    assert Tokenizer.train([IM_START.join([*texts, PAD])], 400).fingerprint() == plain.fingerprint()
    assert b"\n\n" in {plain.token_bytes(id) for id in range(plain.vocab_size)}


def test_training_does_not_depend_on_how_text_comes_in() -> None:
    """Fault 6: the same from one string and from its pieces; and the same in another process."""
    text = TEXT * 3
    once = Tokenizer.train([text], 350).fingerprint()
    assert Tokenizer.train(iter([text]), 350).fingerprint() == once
    assert Tokenizer.train(cut([text], 50), 350).fingerprint() == once
    program = (
        "import sys; from minigpt.text.tokenizer import Tokenizer; "
        "print(Tokenizer.train([sys.stdin.buffer.read().decode()], 350).fingerprint())"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        input=text.encode(),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert other.stdout.decode().strip() == once


def test_sizes_that_cannot_be() -> None:
    """Fault 7."""
    for size in (50, MIN_VOCAB_SIZE - 1, MAX_VOCAB_SIZE + 1, -1):
        with pytest.raises(
            ConfigError, match=rf"vocab_size: {size:,} is outside 260 \(256 bytes and 4 control tokens\)"
        ):
            Tokenizer.train(["text"], size)
    assert Tokenizer.train(["text"], MIN_VOCAB_SIZE).vocab_size == MIN_VOCAB_SIZE


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    """Fault 7."""
    tokenizer = Tokenizer.train(["one line of text, one line"], 100_000)
    assert MIN_VOCAB_SIZE < tokenizer.vocab_size < MIN_VOCAB_SIZE + 30


@pytest.mark.parametrize("texts", [[], [""], [END_OF_TEXT, ""]])
def test_an_empty_corpus_is_an_error(texts: list[str]) -> None:
    """Fault 7."""
    with pytest.raises(DataError, match=r"^tokenizer: no text to learn from; "):
        Tokenizer.train(texts, 300)


def test_errors_of_the_source_come_through() -> None:
    def broken() -> Iterator[str]:
        yield "text " * 9
        raise DataError("c4.jsonl:17: broken JSON")

    with pytest.raises(DataError, match=r"c4\.jsonl:17"):
        Tokenizer.train(broken(), 300)


def test_prompts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_prompt("Alice") == tokenizer.encode("Alice")
    assert tokenizer.encode_prompt("") == [tokenizer.end_of_text_id]


def test_batches_equal_single_texts(tokenizer: Tokenizer) -> None:
    texts = [*STRANGE, *LINES]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts, [True] * len(texts)) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


@settings(max_examples=100)
@given(st.text(st.sampled_from(list("ab1!' \n\u3000é中")), max_size=60), st.integers(1, 9))
def test_ids_of_pieces_are_ids_of_the_whole(tokenizer: Tokenizer, text: str, piece_chars: int) -> None:
    pieces = list(cut([text], piece_chars, reach_chars=10_000))
    assert [id for ids in tokenizer.encode_batch(pieces) for id in ids] == tokenizer.encode(text)


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path, {"model_max_length": 256})
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    for name in ("vocab_size", "end_of_text_id", "pad_id", "end_ids", "bos_id"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["clean_up_tokenization_spaces"] is False
    assert config["model_max_length"] == 256
    assert (config["eos_token"], config["pad_token"]) == (END_OF_TEXT, PAD)
    loaded.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert Tokenizer.load(tmp_path / "tokenizer.json").fingerprint() == tokenizer.fingerprint()


def test_other_fingerprints_for_other_tokenizers(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train([TEXT], 399).fingerprint() != tokenizer.fingerprint()


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Fault 3 and promise 6: an exported tokenizer needs no code of ours and cleans nothing up."""
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (TEXT, *STRANGE):
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.end_of_text_id, tokenizer.pad_id)


def test_a_full_disk_keeps_the_old_files(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"^cannot write .*tokenizer.json: No space left on device"):
        Tokenizer.train(["other words, other words"], 270).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_signal_while_loading_is_no_damaged_file(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(BaseException):
        pass

    def from_str(text: str) -> None:
        raise Signalled

    tokenizer.save(tmp_path)
    monkeypatch.setattr("minigpt.text.tokenizer.Backend", SimpleNamespace(from_str=from_str))
    with pytest.raises(Signalled):
        Tokenizer.load(tmp_path)


def test_files_are_written_or_it_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"^cannot write .*file: "):
        tokenizer.save(tmp_path / "file")


# Tokenizers of other models


def test_stories260k(stories: Tokenizer, shared: Path) -> None:
    reference = json.loads((shared / "models" / "reference.json").read_text(encoding="utf-8"))["stories260k"]
    prompts = [prompt for prompt, entry in reference.items() if "ids" in entry]
    assert prompts
    for prompt in prompts:
        assert stories.encode_prompt(prompt) == reference[prompt]["ids"]
        assert stories.decode(reference[prompt]["ids"]) == prompt
    assert (stories.vocab_size, stories.bos_id, stories.end_of_text_id, stories.end_ids) == (512, 1, 2, (2,))
    assert stories.pad_id is None
    assert stories.encode_prompt("") == [1]
    assert stories.encode("<s>") == [id for id in stories.encode("<s>") if id > 2], "typed by a user"


def test_stories260k_bytes(stories: Tokenizer) -> None:
    for text in ("hello", " hello", "a\n\n b😀  ", "é"):
        ids = stories.encode(text)
        assert stories.decode(ids) == "".join(streamed(stories, ids)) == text
        assert b"".join(map(stories.token_bytes, ids)) == b" " + text.encode()
        assert int(stories.byte_lengths()[ids].sum()) == len(text.encode()) + 1
    assert stories.token_bytes(stories.encode("\n")[-1]) == b"\n"
    assert [stories.token_bytes(id) for id in (0, 1, 2, 511_000, -1)] == [b""] * 5


def test_a_space_at_the_start_of_a_continuation_is_kept(stories: Tokenizer) -> None:
    prompt, whole = stories.encode("Once upon"), stories.encode("Once upon a time")
    assert whole[: len(prompt)] == prompt
    assert stories.decode(whole[len(prompt) :], continuing=True) == " a time"
    decoder = StreamDecoder(stories, continuing=True)
    assert "".join(decoder.push(id) for id in whole[len(prompt) :]) == " a time"


def test_pieces_of_a_document_get_no_space_before_them(stories: Tokenizer) -> None:
    text = "Once upon a time\nthere was a little girl.\nShe was happy."
    pieces = list(cut([text], 20))
    assert len(pieces) >= 3
    ids = stories.encode_batch(pieces, [index > 0 for index in range(len(pieces))])
    assert [id for row in ids for id in row] == stories.encode(text)


def test_gpt2(gpt2: Tokenizer) -> None:
    # Published ids: the examples of OpenAI's and Hugging Face's documentation.
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]
    assert (gpt2.vocab_size, gpt2.end_of_text_id, gpt2.end_ids, gpt2.bos_id) == (50257, 50256, (50256,), None)
    for text in STRANGE:
        ids = gpt2.encode(text)
        assert "".join(streamed(gpt2, ids)) == text
        assert b"".join(map(gpt2.token_bytes, ids)) == text.encode()
    assert 50256 not in gpt2.encode(END_OF_TEXT)


def test_metaspace_tokenizers(tmp_path: Path) -> None:
    """The newer form of SentencePiece's alphabet, which puts the space in the pre-tokeniser."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "▁a": 4, "b": 5}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a b") == [4, 2, 5]
    assert tokenizer.decode([4, 2, 5]) == "a b"
    assert tokenizer.encode_batch(["a", "a"], [False, True]) == [[4], [3]]


def changed(tokenizer: Tokenizer, folder: Path, **files: Any) -> Path:
    tokenizer.save(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("eos", [IM_END, {"content": IM_END, "special": True}])
def test_end_ids_from_the_config(tokenizer: Tokenizer, tmp_path: Path, eos: Any) -> None:
    loaded = Tokenizer.load(changed(tokenizer, tmp_path, tokenizer_config={"eos_token": eos}))
    assert loaded.end_ids == (2, 0)
    assert loaded.end_of_text_id == 0, "what stands between documents stays"


def test_end_ids_from_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    changed(
        tokenizer, tmp_path, generation_config={"eos_token_id": [7, 2]}, config={"eos_token_id": 9}, tokenizer_config={}
    )
    assert Tokenizer.load(tmp_path).end_ids == (7, 2, 9, 0)
    changed(tokenizer, tmp_path, generation_config={"eos_token_id": [10**9, -1, "x", None, True]}, config={})
    assert Tokenizer.load(tmp_path).end_ids == (0, 2), "ids that are none are passed over"


def test_begin_token_by_the_config(tokenizer: Tokenizer, tmp_path: Path, stories: Tokenizer) -> None:
    changed(tokenizer, tmp_path, tokenizer_config={"bos_token": IM_START, "add_bos_token": True})
    assert Tokenizer.load(tmp_path).encode_prompt("") == [1]
    changed(stories, tmp_path, tokenizer_config={"bos_token": "<s>", "add_bos_token": False})
    assert Tokenizer.load(tmp_path).bos_id is None


def test_truncation_and_padding_in_a_file_are_ignored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8, pad_id=3, pad_token=PAD)
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode_batch(["x", TEXT]) == [tokenizer.encode("x"), tokenizer.encode(TEXT)]
    assert loaded.fingerprint() == tokenizer.fingerprint()


def test_no_code_leaves_with_a_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "eos_token": END_OF_TEXT}
    Tokenizer.load(changed(tokenizer, tmp_path, tokenizer_config=config)).save(tmp_path / "out")
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8")


# Hostile and damaged files


def load_error(path: Path) -> str:
    with pytest.raises(ModelFolderError) as raised:
        Tokenizer.load(path)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    assert ".json: " in message
    return message


def test_missing_tokenizer(tmp_path: Path) -> None:
    assert "tokenizer.json: no such file" in load_error(tmp_path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"\x80\x04pickle", b"[" * 10**6, b"{}", b'{"model": 1}', b"\0" * 99],
)
def test_what_is_no_tokenizer(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    load_error(tmp_path)


def test_a_tokenizer_cut_anywhere(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    data = (tmp_path / "tokenizer.json").read_bytes()
    for place in range(1, len(data) - 2, len(data) // 23):
        (tmp_path / "tokenizer.json").write_bytes(data[:place])
        assert re.search("no valid JSON|not UTF-8", load_error(tmp_path))


def test_broken_side_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        tokenizer.save(tmp_path)
        (tmp_path / name).write_bytes(b"{")
        assert f"{name}: no valid JSON" in load_error(tmp_path / "tokenizer.json")
        (tmp_path / name).unlink()


def mutations(source: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    def copy() -> dict[str, Any]:
        return json.loads(json.dumps(source))  # type: ignore[no-any-return]

    for name, id in (("huge id", 4_000_000_000), ("far id", MAX_VOCAB_SIZE), ("negative id", -1), ("no id", None)):
        one = copy()
        one["model"]["vocab"]["zzz"] = id
        yield name, one
    one = copy()
    one["model"]["merges"].append(["not", "there"])
    yield "merge of unknown tokens", one
    one = copy()
    one["model"]["vocab"] = {}
    yield "empty vocabulary", one
    one = copy()
    one["model"] = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1}}  # fmt: skip
    yield "another type", one
    one = copy()
    one["pre_tokenizer"] = one["decoder"] = None
    yield "no alphabet", one
    one = copy()
    one["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "("}
    yield "a broken pattern", one
    one = copy()
    one["added_tokens"] = []
    one["model"]["vocab"] = {token: id for token, id in one["model"]["vocab"].items() if id > 3}
    yield "no end token", one


def test_hostile_tokenizers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    source = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for name, mutated in mutations(source):
        (tmp_path / "tokenizer.json").write_text(json.dumps(mutated), encoding="utf-8")
        assert "tokenizer.json: not a tokenizer that can be used (" in load_error(tmp_path), name


def test_random_damage_gives_an_error_or_a_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Whatever a flipped field does, it is never a traceback of another kind."""
    tokenizer.save(tmp_path)
    source = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    rng = random.Random(7)
    for _ in range(60):
        damaged = json.loads(json.dumps(source))
        node: Any = damaged
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if rng.random() < 0.4 or not isinstance(node[key], dict | list):
                node[key] = rng.choice([None, -1, 2**40, "x", [], {}, True])
                break
            node = node[key]
        (tmp_path / "tokenizer.json").write_text(json.dumps(damaged), encoding="utf-8")
        try:
            loaded = Tokenizer.load(tmp_path)
        except ModelFolderError:
            continue
        loaded.decode(loaded.encode("Alice"))


def test_the_incremental_decoder_is_the_full_one() -> None:
    """What StreamDecoder rests on, checked for broken bytes."""
    rng = random.Random(3)
    for _ in range(300):
        data = bytes(rng.choice(b"a\x80\xbf\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\xed\xa0\xff") for _ in range(8))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(data[place : place + 1]) for place in range(8)]
        assert "".join([*pieces, decoder.decode(b"", final=True)]) == data.decode("utf-8", "replace")


def test_control_tokens_of_a_template_are_found_with_the_blanks_they_swallow(tokenizer: Tokenizer) -> None:
    source = json.loads(tokenizer._backend.to_str())
    for token in source["added_tokens"]:
        token["rstrip"], token["lstrip"] = token["content"] == IM_END, token["content"] == PAD
    changed = Tokenizer(Backend.from_str(json.dumps(source)), {})
    text = f"{IM_START}user\n {IM_END} \n{IM_START} a \n {PAD}{PAD} b"
    found = list(changed.control_tokens(text))
    assert [(text[start:end], id) for start, end, id in found] == [
        (IM_START, 1),
        (f"{IM_END} \n", 2),
        (IM_START, 1),
        (f" \n {PAD}", 3),
        (PAD, 3),
    ]
    recognising = Backend.from_str(json.dumps(source))  # the flag that takes control tokens for text is not in the file
    between = [text[end:start] for (_, end, _), (start, _, _) in pairwise([*found, (len(text), 0, 0)])]
    ids = [id for (*_, own), rest in zip(found, between, strict=True) for id in (own, *changed.encode(rest))]
    assert recognising.encode(text, add_special_tokens=False).ids == ids


def test_a_longer_control_token_goes_before_one_inside_it(tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens(["<|im"])
    other = Tokenizer(backend, {})
    assert [id for *_, id in other.control_tokens(f"<|im {IM_START}<|im")] == [400, 1, 400]


def test_continuing_text_gets_no_space_before_it(stories: Tokenizer) -> None:
    ids = stories.encode("a cat sat")
    assert stories.encode(" sat", continuing=True) == stories.encode("sat")
    assert ids == [*stories.encode("a cat"), *stories.encode(" sat", continuing=True)]
    assert stories.encode("sat", continuing=True) != stories.encode("sat")
    assert stories.encode_batch(["sat"], continues=[True]) == [stories.encode("sat", continuing=True)]
