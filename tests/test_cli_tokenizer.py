"""`minigpt tokenizer`: train, encode, decode and show, as a shell sees them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from commands import contents, error_of, minigpt
from tiny_folder import TEXT

from minigpt.cli import tokenizer as command
from minigpt.text.tokenizer import Tokenizer

PLAIN = TEXT * 3 + "猫 and café, x != y;\t  \n\n end"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    Tokenizer.train([PLAIN], 320).save(folder)
    return folder


def test_a_file_a_folder_and_a_pipe_give_the_same_tokenizer(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    (books / "one.txt").write_text(PLAIN, encoding="utf-8")
    sources = ([books / "one.txt"], [books], ["-"], [])
    folders = []
    for number, named in enumerate(sources):
        out = tmp_path / str(number)
        piped = None if number < 2 else PLAIN.encode()
        result = minigpt("tokenizer", "train", *named, "-o", out, "--vocab-size", 300, stdin=piped)
        assert (result.status, result.out) == (0, "")
        assert "300 tokens" in result.err
        folders.append(contents(out))
    assert folders[0] == folders[1] == folders[2] == folders[3]
    assert set(folders[0]) == {"tokenizer.json", "tokenizer_config.json"}


def test_train_takes_fields_separators_and_lengths(tmp_path: Path) -> None:
    rows = [{"body": TEXT}, {"body": "short"}]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    result = minigpt("tokenizer", "train", path, "-o", tmp_path / "a", "--field", "body", "--min-chars", 10)
    assert result.status == 0
    assert f"{len(TEXT.encode())} bytes, 1 document\n" in result.err
    assert "warning: the text holds pairs for" in result.err  # 4,096 were asked for
    text = tmp_path / "text.txt"
    text.write_text(TEXT + "\n===\n" + TEXT[::-1], encoding="utf-8")
    result = minigpt("tokenizer", "train", text, "-o", tmp_path / "b", "--separator", r"\n===\n", "--vocab-size", 270)
    assert "2 documents" in result.err


def test_train_writes_over_nothing_unasked(tmp_path: Path, words: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PLAIN, encoding="utf-8")
    before = contents(words)
    command = ("tokenizer", "train", text, "-o", words, "--vocab-size", 300)
    assert "holds a tokenizer already" in error_of(minigpt(*command))
    assert contents(words) == before
    copy = tmp_path / "copy"
    Tokenizer.load(words).save(copy)
    result = minigpt("tokenizer", "train", text, "-o", copy, "--vocab-size", 300, "--overwrite")
    assert result.status == 0
    assert Tokenizer.load(copy).vocab_size == 300
    (copy / "model.safetensors").touch()
    message = error_of(minigpt("tokenizer", "train", text, "-o", copy, "--overwrite"))
    assert "holds a model, which its tokenizer belongs to" in message


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "no text; name files or folders, or pipe text"),
        (("-", "x.txt"), 2, "standard input"),
        (("nothere.txt",), 1, "nothere.txt: no such file"),
        (("{text}", "--vocab-size", "50"), 1, "50"),
        (("{text}", "--sample-mb", "0"), 1, "--sample-mb 0"),
        (("{text}", "--sample-mb", "nan"), 1, "--sample-mb nan"),
        (("{text}", "--separator", ""), 1, "separator"),
    ],
)
def test_train_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(PLAIN, encoding="utf-8")
    out = tmp_path / "out"
    named = [argument.format(text=text) for argument in arguments]
    assert message in error_of(minigpt("tokenizer", "train", *named, "-o", out), status)
    assert not out.exists()


@pytest.mark.parametrize("text", [PLAIN, "", "\n", " a ", "<|endoftext|>", "\x1b[31mred", "e\u0301"])
def test_encode_and_decode_are_exact(words: Path, text: str) -> None:
    encoded = minigpt("tokenizer", "encode", "-m", words, stdin=text.encode())
    assert encoded.err == ""
    assert [int(word) for word in encoded.out.split()] == Tokenizer.load(words).encode(text)
    decoded = minigpt("tokenizer", "decode", "-m", words, stdin=encoded.out.encode())
    assert (decoded.status, decoded.out) == (0, text)


def test_text_comes_as_argument_and_through_the_pipe(words: Path) -> None:
    tokenizer = Tokenizer.load(words)
    for stdin, arguments, whole in (
        (None, ["the bank"], "the bank"),
        (b"Alice\n", ["the bank"], "Alice\nthe bank"),
        (b"Alice\n", [], "Alice\n"),
        (b"caf\xe9", [], "caf\ufffd"),
    ):
        result = minigpt("tokenizer", "encode", *arguments, "-m", words, stdin=stdin)
        assert result.out.split() == [str(id) for id in tokenizer.encode(whole)]
    ids = tokenizer.encode("the bank")
    for stdin, arguments in ((None, ids), (str(ids).encode(), []), (str(ids[:1]).encode(), ids[1:])):
        assert minigpt("tokenizer", "decode", *arguments, "-m", words, stdin=stdin).out == "the bank"


def test_json_has_ids_and_what_they_stand_for(words: Path) -> None:
    (found,) = minigpt("tokenizer", "encode", "the 猫鬼", "-m", words, "--json").objects
    assert found["ids"] == Tokenizer.load(words).encode("the 猫鬼")
    assert "".join(found["tokens"]).replace("<E9><AC><BC>", "鬼") == "the 猫鬼".replace("猫", "<E7><8C><AB>")


@pytest.mark.parametrize("word", ["cat", "1.5", "320", "999999999999999999999999", "²", "٣"])
def test_what_is_no_id_is_named(words: Path, word: str) -> None:
    message = error_of(minigpt("tokenizer", "decode", "5", word, "-m", words))
    assert word in message
    assert "0 to 319" in message


def test_show_counts_and_cuts(words: Path) -> None:
    tokenizer = Tokenizer.load(words)
    text = "Alice had\n\tpeeped \x1b[31m"
    ids = tokenizer.encode(text)
    (found,) = minigpt("tokenizer", "show", text, "-m", words, "--json").objects
    assert (found["vocab_size"], found["bytes"], found["tokens"], found["ids"]) == (320, len(text), len(ids), ids)
    assert found["bytes_per_token"] == pytest.approx(len(text) / len(ids))
    assert "".join(found["pieces"]) == text
    longest = max(len(tokenizer.token_bytes(id)) for id in range(320))
    assert len(found["longest"][0].encode()) == longest
    plain = minigpt("tokenizer", "show", text, "-m", words)
    assert plain.err == ""
    assert "\x1b" not in plain.out
    cut = plain.out.split("\n\n", 1)[1]
    assert cut.count("│") == len(ids) - 1
    assert cut.replace("│", "").replace("↵", "").replace("→", "\t").replace("�", "\x1b") == text + "\n"


def test_show_alone_tells_of_the_vocabulary(words: Path) -> None:
    result = minigpt("tokenizer", "show", "-m", words)
    assert result.out.startswith("vocabulary  320 tokens\nlongest ")
    assert len(result.out.splitlines()) == 2


def test_show_has_colour_on_a_terminal_only(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    loaded = Tokenizer.load(words)
    with patch.object(sys, "stdout") as stream:
        stream.isatty.return_value = True
        drawn = command._segmented(loaded, loaded.encode("the bank"))
        monkeypatch.setenv("NO_COLOR", "1")
        plain = command._segmented(loaded, loaded.encode("the bank"))
    assert drawn.count("\x1b[97;48;5;") == len(loaded.encode("the bank"))
    assert "\x1b" not in plain


def test_a_folder_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    for name in ("encode", "decode", "show"):
        assert "no such file" in error_of(minigpt("tokenizer", name, "7", "-m", tmp_path / "nothing"))


def test_programs_in_a_pipe_hand_text_on(words: Path) -> None:
    """Real processes, a locale without UTF-8, and no PyTorch to wait for."""
    program = "import sys; from minigpt.cli.app import main; sys.argv[0] = 'minigpt'; main()"
    command = [sys.executable, "-c", program, "tokenizer"]
    environment = {"LC_ALL": "C", "PYTHONPATH": str(Path(__file__).parents[1]), "MINIGPT_MODEL": str(words)}
    with subprocess.Popen(
        [*command, "encode"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as encode:
        assert encode.stdin is not None
        encode.stdin.write(PLAIN.encode())
        encode.stdin.close()
        result = subprocess.run(
            [*command, "decode"], stdin=encode.stdout, capture_output=True, env=environment, check=False
        )
    assert (result.returncode, result.stdout, result.stderr) == (0, PLAIN.encode(), b"")


def test_an_argument_is_utf8_in_any_locale(words: Path) -> None:
    code = "import sys; from minigpt.cli.app import main; sys.argv[0] = 'minigpt'; main()"
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", code, "tokenizer", "encode", "é猫".encode(), "-m", str(words)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, check=False)
    assert result.stderr == b""
    ids = [int(word) for word in result.stdout.split()]
    assert Tokenizer.load(words).decode(ids) == "é猫"
