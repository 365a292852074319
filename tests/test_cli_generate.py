"""`minigpt generate`: text and nothing else on stdout, whatever goes in."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from commands import CPU, Result, contents, error_of, minigpt
from parrot import make_parrot_folder
from variants import VARIANTS, make_model

from minigpt.checkpoint.folder import save_description, save_weights
from minigpt.cli import console
from minigpt.cli.prompts import Source, batches
from minigpt.config import ModelConfig
from minigpt.inference.sampling import row_seed
from minigpt.text.chat import Message, chat_template
from minigpt.text.tokenizer import Tokenizer

TEXTS = ["The cat sat on the mat, and the rat saw it.\n" * 4, "鸟儿在树上唱歌。猫在树下听。\n" * 4, "a 😀 b\n" * 3]


def make_folder(folder: Path, **changes: Any) -> Path:
    tokenizer = Tokenizer.train(TEXTS, 320)
    shape = VARIANTS[changes.pop("variant", "qwen3")]
    config = ModelConfig(
        **{**vars(shape), "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 32, **changes}
    )
    save_description(folder, config, tokenizer, {})
    save_weights(folder, make_model(config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights: it says anything, half characters and control tokens too."""
    return make_folder(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)


@pytest.fixture
def generate(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*arguments: object, stdin: bytes | None = None) -> Result:
        return minigpt("generate", "-m", model, "-n", "12", "-t", "1", *CPU, *arguments, stdin=stdin)

    return call


def good(result: Result) -> str:
    assert result.status == 0, result.err
    assert "\x1b" not in result.err
    return result.out


# One text


def test_only_text_on_stdout_and_the_same_each_time(generate: Any) -> None:
    first = generate("The cat", "--seed", "3")
    assert good(first).endswith("\n")
    assert first.err == ""
    assert good(generate("The cat", "--seed", "3")) == first.out
    assert good(generate("--seed", "3", stdin=b"The cat\n")) == first.out
    assert good(generate("The cat", "--seed", "4")) != first.out


def test_no_seed_varies(generate: Any) -> None:
    assert len({good(generate("The cat")) for _ in range(4)}) > 1
    assert len({generate("The cat", "--json").objects[0]["seed"] for _ in range(4)}) == 4


def test_the_stream_equals_the_json_text(generate: Any) -> None:
    for seed in range(6):
        (record,) = generate("鸟儿", "--seed", seed, "--json").objects
        streamed = good(generate("鸟儿", "--seed", seed))
        assert streamed == record["text"] + ("" if record["text"].endswith("\n") else "\n")


@pytest.mark.parametrize(
    ("argument", "piped", "prompt"),
    [
        ("the rat", b"The cat\n", "The cat\nthe rat"),
        ("the rat", b"The cat", "The cat\nthe rat"),
        ("the rat", b"", "the rat"),
        ("the rat", None, "the rat"),
        ("", b"The cat\n", "The cat"),
        (None, b"The cat\n\n", "The cat\n"),
        (None, b"\n", ""),
        ("", None, ""),
        (None, "鸟儿\r\n".encode(), "鸟儿\r"),
        (None, b"hello \xff\xfe", "hello \ufffd\ufffd"),
        ("lone \udcff", None, "lone \ufffd"),
        ("[red]x[/red] <b> \x1b[31m", None, "[red]x[/red] <b> \x1b[31m"),
    ],
)
def test_argument_and_pipe_combine(generate: Any, argument: str | None, piped: bytes | None, prompt: str) -> None:
    arguments = [] if argument is None else [argument]
    (record,) = generate(*arguments, "--json", "--seed", "1", stdin=piped).objects
    assert record["prompt"] == prompt


def test_the_fields_of_the_object(generate: Any, model: Path) -> None:
    (record,) = generate("The cat", "--json", "--seed", "5").objects
    assert list(record) == ["prompt", "text", "finish_reason", "prompt_tokens", "new_tokens", "seed"]
    assert record["prompt_tokens"] == len(Tokenizer.load(model).encode("The cat"))
    assert (record["prompt"], record["new_tokens"], record["seed"]) == ("The cat", 12, 5)
    assert record["finish_reason"] == "length"


def test_an_empty_prompt_begins_like_a_document(generate: Any) -> None:
    (record,) = generate("", "--json").objects
    assert (record["prompt"], record["prompt_tokens"]) == ("", 1)
    assert good(generate("", "--seed", "1")).strip()


def test_echo_repeats_the_prompt(generate: Any) -> None:
    plain = good(generate("The cat", "--seed", "3"))
    assert good(generate("The cat", "--seed", "3", "--echo")) == "The cat" + plain
    (record,) = generate("The cat", "--seed", "3", "--echo", "--json").objects
    assert (record["text"] + "\n").startswith("The cat" + plain[:-1])


def test_prompts_are_text_and_never_markup_or_control_tokens(generate: Any, model: Path) -> None:
    assert good(generate("[red]x[/red]", "--echo", "--seed", "1")).startswith("[red]x[/red]")
    (record,) = generate("a<|endoftext|>b", "--json", "--seed", "1").objects
    assert record["prompt"] == "a<|endoftext|>b"
    tokenizer = Tokenizer.load(model)
    assert record["prompt_tokens"] > 5
    assert tokenizer.end_of_text_id not in tokenizer.encode("a<|endoftext|>b")


def test_stop_strings_end_the_text_before_themselves(generate: Any) -> None:
    (whole,) = generate("The cat", "--seed", "2", "--json").objects
    sign = next(sign for sign in whole["text"][2:] if sign.isalnum())
    (record,) = generate("The cat", "--seed", "2", "--json", "--stop", sign, "--stop", "never there").objects
    assert record["finish_reason"] == "stop"
    assert record["text"] == whole["text"][: whole["text"].index(sign)]
    assert good(generate("The cat", "--seed", "2", "--stop", sign)).rstrip("\n") == record["text"].rstrip("\n")


def test_greedy_needs_no_seed(generate: Any) -> None:
    texts = {
        good(generate("The cat", "-t", "0", *more))
        for more in ([], ["--seed", "1"], ["--top-k", "1"], ["--top-p", "0.1"])
    }
    assert len(texts) == 1
    assert good(generate("The cat", "-t", "3", "--top-k", "1", "--seed", "8")) in texts


def test_logprobs_come_with_json(generate: Any, model: Path) -> None:
    (record,) = generate("The cat", "--json", "--logprobs", "3", "--seed", "1").objects
    assert len(record["tokens"]) == record["new_tokens"] == 12
    for token in record["tokens"]:
        assert list(token) == ["id", "text", "logprob", "top"]
        assert [list(best) for best in token["top"]] == [["id", "text", "logprob"]] * 3
        logprobs = [best["logprob"] for best in token["top"]]
        assert logprobs == sorted(logprobs, reverse=True)
        assert token["logprob"] <= logprobs[0] <= 0
    (bare,) = generate("The cat", "--json", "--logprobs", "0", "--seed", "1").objects
    assert [token["top"] for token in bare["tokens"]] == [[]] * 12
    assert [token["id"] for token in bare["tokens"]] == [token["id"] for token in record["tokens"]]
    assert "tokens" not in generate("The cat", "--json").objects[0]


# Several texts


def test_every_sample_can_be_had_alone(generate: Any) -> None:
    records = generate("The cat", "--num-samples", "5", "--json", "--seed", "9").objects
    assert records[0]["seed"] == 9
    assert len({record["seed"] for record in records}) == 5
    assert len({record["text"] for record in records}) > 1
    for record in records:
        (alone,) = generate("The cat", "--json", "--seed", record["seed"]).objects
        assert alone == record
    for size in ("1", "2", "16"):
        again = generate("The cat", "--num-samples", "5", "--json", "--seed", "9", "--batch-size", size)
        assert again.objects == records
    plain = good(generate("The cat", "--num-samples", "5", "--seed", "9"))
    assert plain == "".join(record["text"] + "\n" for record in records)


def test_samples_past_any_memory_are_begun_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.cli.stdin.is_piped", lambda: False)
    (first, second) = islice(batches(Source("The cat").asks(9, 10**15), 2), 2)
    assert [seed for _, seed in first + second] == [row_seed(9, row) for row in range(4)]


PROMPTS = ["The cat", "", "鸟儿在树上", "a rat saw it on the mat and the cat sat", "[b]"]


def test_lines_are_prompts(generate: Any) -> None:
    piped = "\n".join(PROMPTS).encode()
    records = generate("--lines", "--json", "--seed", "4", stdin=piped).objects
    assert [record["prompt"] for record in records] == PROMPTS
    assert all("id" not in record for record in records)
    assert generate("--lines", "--json", "--seed", "4", stdin=piped + b"\n").objects == records
    assert generate("--lines", "--json", "--seed", "4", stdin=piped.replace(b"\n", b"\r\n")).objects == records
    assert generate("--lines", "--json", "--seed", "4", "--batch-size", "2", stdin=piped).objects == records
    plain = good(generate("--lines", "--seed", "4", stdin=piped))
    assert plain == "".join(record["text"] + "\n" for record in records)
    (third,) = generate(PROMPTS[2], "--json", "--seed", records[2]["seed"]).objects
    assert third == records[2]


def test_jsonl_keeps_ids_and_order(generate: Any) -> None:
    ids: list[Any] = [7, "x", None, {"page": 1}]
    lines = [json.dumps({"id": id, "prompt": prompt, "more": 1}) for id, prompt in zip(ids, PROMPTS, strict=False)]
    piped = "\n\n".join([*lines, json.dumps({"prompt": "no id\u2028here \ud83d"})]).encode()
    result = generate("--jsonl", "--seed", "4", "--batch-size", "3", stdin=piped)
    records = result.objects
    assert [record.get("id", "none") for record in records] == [*ids, "none"]
    assert [record["prompt"] for record in records] == [*PROMPTS[:4], "no id\u2028here \ufffd"]
    assert list(records[0]) == ["id", "prompt", "text", "finish_reason", "prompt_tokens", "new_tokens", "seed"]
    assert {record["finish_reason"] for record in records} <= {"length", "end"}
    assert len(result.out.split("\n")) == 6, "one line each, whatever is in the text"
    two = generate("--jsonl", "--seed", "4", "--num-samples", "2", stdin=piped).objects
    assert [record.get("id", "none") for record in two] == [id for id in [*ids, "none"] for _ in range(2)]
    assert len({record["seed"] for record in two}) == 10


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "x"', "stdin:3: no valid JSON ("),
        (b"hello", "stdin:3: no valid JSON ("),
        (b"[" * 100_000, "stdin:3: no valid JSON ("),
        (b'["x"]', "stdin:3: a list where an object is expected"),
        (b"{}", 'stdin:3: no field "prompt" (found: none)'),
        (b'{"text": "x", "id": 3}', 'stdin:3: no field "prompt" (found: "text", "id")'),
        (b'{"prompt": 3}', 'stdin:3: field "prompt" holds a number, not text'),
    ],
)
def test_a_bad_json_line_is_named(generate: Any, line: bytes, words: str) -> None:
    piped = b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "later"}\n'
    for size in ("1", "16"):
        result = generate("--jsonl", "--batch-size", size, stdin=piped)
        assert error_of(result).startswith(words)
        assert [record["prompt"] for record in result.objects] == ["good"], "what came before it is answered"


def test_an_empty_list_of_prompts_gives_nothing(generate: Any) -> None:
    for kind in ("--lines", "--jsonl"):
        assert good(generate(kind, stdin=b"")) == ""
    assert good(generate("--jsonl", stdin=b"\n \n")) == ""


# Long texts


def test_long_prompts_keep_their_end_and_it_is_said(generate: Any) -> None:
    result = generate("The cat sat. " * 20, "--seed", "1", "--json")
    assert result.objects[0]["new_tokens"] == 12
    assert re.fullmatch(r"note: a prompt has \d+ tokens, more than the context of 32; its end is kept\n", result.err)


def test_a_note_does_not_break_into_the_text(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(console, "write", shown.append)
    monkeypatch.setattr(console, "note", shown.append)
    generate("The cat", "-n", "60", "--seed", "1", "--stop", "never there")
    *text, note = shown
    assert "past the context" in note
    assert "".join(text).endswith("\n")


def test_going_past_the_context_is_said_once(generate: Any) -> None:
    result = generate("The cat", "-n", "60", "--seed", "1", "--stop", "never there")
    good(result)
    assert result.err == "note: the text is past the context of 32 tokens; what lies further back is forgotten\n"
    result = generate("The cat", "-n", "60", "--num-samples", "3", "--seed", "1")
    assert len(result.err.splitlines()) == 1


def test_learned_positions_end_with_the_context(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", variant="gpt2")
    result = minigpt("generate", "The cat", "-m", folder, "-n", "60", "--json", "--seed", "3", *CPU)
    (record,) = result.objects
    assert record["finish_reason"] in ("context", "end")
    assert record["prompt_tokens"] + record["new_tokens"] <= 33
    assert result.err == ""


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["x", "-t", "nan"], 1, "temperature is nan; it must be in [0, inf)"),
        (["x", "-t", "-1"], 1, "temperature is -1.0; it must be in [0, inf)"),
        (["x", "-t", "inf"], 1, "temperature is inf"),
        (["x", "--top-p", "0"], 1, "top_p is 0.0; it must be in (0, 1]"),
        (["x", "--top-p", "1.5"], 1, "top_p is 1.5"),
        (["x", "--top-k", "0"], 1, "top_k is 0; it must be a whole number of at least 1"),
        (["x", "--min-p", "-0.1"], 1, "min_p is -0.1"),
        (["x", "--repetition-penalty", "0"], 1, "repetition_penalty is 0.0"),
        (["x", "-n", "0"], 1, "max_new_tokens is 0"),
        (["x", "--stop", ""], 1, "stop: an empty stop string"),
        (["x", "--json", "--logprobs", "-1"], 1, "logprobs is -1"),
        (["x", "--logprobs", "1"], 2, "--logprobs needs --json or --jsonl"),
        (["x", "--num-samples", "0"], 2, "--num-samples"),
        (["x", "--batch-size", "0"], 2, "--batch-size"),
        (["x", "--seed", "-1"], 2, "--seed"),
        (["x", "--lines"], 2, "a prompt as argument does not go with --lines or --jsonl"),
        (["--lines", "--jsonl"], 2, "--lines and --jsonl are two ways"),
        (["x", "y"], 2, "argument"),
        (["x", "--tempreture", "1"], 2, "--temperature"),
        ([], 2, 'no prompt; give one ("" for none) or pipe text'),
        (["x", "-m", "nowhere"], 1, "nowhere: no such model folder; train one with minigpt train, or name one with -m"),
        (["x", "-m", "."], 1, "holds no model (no config.json in it)"),
        (["x", "--device", "tpu"], 1, "--device tpu: no such kind of device"),
        (["x", "--dtype", "int8"], 2, "'int8' is not one of"),
    ],
)
def test_mistakes_are_one_line_each(generate: Any, arguments: list[str], status: int, words: str) -> None:
    result = generate(*arguments)
    assert words in error_of(result, status)
    assert (result.out, len(result.err.splitlines())) == ("", 1)


def test_zero_bytes_from_a_pipe_are_an_error(generate: Any) -> None:
    assert error_of(generate(stdin=b"")).startswith("stdin: no text came through the pipe; ")


def test_prompts_from_a_closed_stdin(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.cli.stdin.sys", type("Closed", (), {"stdin": None}))
    assert error_of(generate("--lines")) == "no prompts: standard input is closed; pipe something into it"
    assert error_of(generate(), 2).startswith("no prompt; ")


def test_the_model_is_the_one_named_or_the_newest_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = error_of(minigpt("generate", "x", *CPU))
    assert message == "no model under runs/; train one with minigpt train FILE, or name one with -m FOLDER"
    for n, name in enumerate(("old", "new", "half")):
        shutil.copytree(model, Path("runs") / name)
        os.utime(Path("runs") / name / "model.safetensors", (n, n))
    Path("runs/half/config.json").unlink()
    shutil.rmtree("runs/old/tokenizer.json", ignore_errors=True)
    Path("runs/old/tokenizer.json").unlink()
    good(minigpt("generate", "x", *CPU, "-n", "2"))
    monkeypatch.setenv("MINIGPT_MODEL", "runs/old")
    assert "runs/old" in error_of(minigpt("generate", "x", *CPU))
    good(minigpt("generate", "x", *CPU, "-n", "2", "-m", "runs/new"))


def test_damaged_and_hostile_folders_are_one_line(model: Path) -> None:
    shutil.copytree(model, "m")
    weights = Path("m/model.safetensors")
    data = weights.read_bytes()
    for broken in (b"", data[:1000], data[:-5], b"\xff" * 8 + data[8:], b"\x80\x04K\x01."):
        weights.write_bytes(broken)
        assert "m/model.safetensors" in error_of(minigpt("generate", "x", "-m", "m", *CPU))
    weights.write_bytes(data)
    for name in ("config.json", "tokenizer.json"):
        text = Path("m", name).read_bytes()
        for broken in (b"", b"[]", text[:100], b"\xff\xfe", b"{}"):
            Path("m", name).write_bytes(broken)
            error_of(minigpt("generate", "x", "-m", "m", *CPU))
        Path("m", name).write_bytes(text)
    before = contents(Path("m"))
    good(minigpt("generate", "x", "-m", "m", *CPU, "-n", "2"))
    assert contents(Path("m")) == before, "a model folder is only read"


# Chat

ANSWER = "Alice get the bank"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers everything with the same words, and ends by itself."""
    return make_parrot_folder(tmp_path_factory.mktemp("parrot") / "model", ANSWER, context=64)


@pytest.fixture
def ask(parrot: Path) -> Any:
    def call(*arguments: object, stdin: bytes | None = None) -> Result:
        return minigpt("generate", "-m", parrot, "-n", "20", "-t", "0", *CPU, *arguments, stdin=stdin)

    return call


def test_an_instruction_is_answered_and_the_answer_ends_by_itself(ask: Any, parrot: Path) -> None:
    result = ask("--chat", "Who is it?")
    assert (good(result), result.err) == (f"{ANSWER}\n", "")
    assert good(ask("--chat", stdin=b"Who is it?\n")) == result.out
    (record,) = ask("--chat", "Who?", "--json", "--system", "Be kind.", "--seed", "1").objects
    assert list(record) == ["prompt", "text", "finish_reason", "prompt_tokens", "new_tokens", "seed"]
    assert (record["prompt"], record["text"], record["finish_reason"]) == ("Who?", ANSWER, "end")
    template = chat_template(Tokenizer.load(parrot))
    expected = template.encode([Message("system", "Be kind."), Message("user", "Who?")])
    assert record["prompt_tokens"] == len(expected)


def test_lines_and_json_lines_are_conversations_too(ask: Any, parrot: Path) -> None:
    assert good(ask("--chat", "--lines", stdin=b"a\nb\n")) == f"{ANSWER}\n" * 2
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    rows = [{"id": 7, "messages": turns}, {"prompt": "a"}]
    records = ask("--chat", "--jsonl", stdin="".join(json.dumps(row) + "\n" for row in rows).encode()).objects
    assert [record["text"] for record in records] == [ANSWER] * 2
    assert records[0]["id"] == 7
    assert records[0]["messages"] == turns
    assert records[1]["prompt"] == "a"
    template = chat_template(Tokenizer.load(parrot))
    assert records[0]["prompt_tokens"] == len(template.encode([Message(**turn) for turn in turns]))


def test_a_conversation_from_a_file_or_from_stdin(ask: Any) -> None:
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    Path("talk.json").write_text(json.dumps({"messages": turns}), encoding="utf-8")
    (record,) = ask("--messages", "talk.json", "--json").objects
    assert (record["messages"], record["text"]) == (turns, ANSWER)
    assert good(ask("--messages", "-", stdin=json.dumps(turns).encode())) == f"{ANSWER}\n"
    (other,) = ask("--messages", "talk.json", "--json", "--system", "not this").objects
    assert other["prompt_tokens"] == record["prompt_tokens"], "a conversation keeps its own system message"


def test_a_conversation_past_the_context_loses_its_oldest_turns_and_it_is_said(ask: Any) -> None:
    turns = [{"role": "user", "content": "the bank"}, {"role": "assistant", "content": "sister"}] * 9
    Path("talk.json").write_text(json.dumps([*turns, turns[0]]), encoding="utf-8")
    result = ask("--messages", "talk.json", "--json")
    assert "past the context of 64 tokens" in result.err
    assert result.err.count("\n") == 1
    assert result.objects[0]["text"] == ANSWER
    assert result.objects[0]["prompt_tokens"] <= 44
    result = ask("--chat", "Alice " * 65)
    assert good(result) == f"{ANSWER}\n"
    assert "past the context" in result.err


def test_what_a_user_types_is_never_a_control_token(ask: Any, parrot: Path) -> None:
    (record,) = ask("--chat", "<|im_end|>", "--json").objects
    tokenizer = Tokenizer.load(parrot)
    empty = len(chat_template(tokenizer).encode([Message("user", "")]))
    assert record["prompt_tokens"] == empty + len(tokenizer.encode("<|im_end|>")) > empty + 5


def test_a_model_not_tuned_for_chat_says_so_and_one_without_a_template_is_refused(parrot: Path) -> None:
    shutil.copytree(parrot, "base")
    Path("base/minigpt.json").write_text('{"made_by": "train"}', encoding="utf-8")
    result = minigpt("generate", "--chat", "x", "-m", "base", "-t", "0", *CPU)
    assert good(result) == f"{ANSWER}\n"
    assert "not tuned for chat" in result.err
    config = json.loads(Path("base/tokenizer_config.json").read_text(encoding="utf-8"))
    for template, words in (("{% if %}", "chat template, line 1"), ("{{ raise_exception('no') }}", "does not take")):
        changed = json.dumps(config | {"chat_template": template})
        Path("base/tokenizer_config.json").write_text(changed, encoding="utf-8")
        assert words in error_of(minigpt("generate", "--chat", "x", "-m", "base", *CPU))
    assert good(minigpt("generate", "--chat", "x", "-m", "base", "-t", "0", "--template", "chatml", *CPU))
    text = Path("base/tokenizer.json").read_text(encoding="utf-8").replace("<|im_end|>", "<|other|>")
    Path("base/tokenizer.json").write_text(text, encoding="utf-8")
    Path("base/tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert "no chat template" in error_of(minigpt("generate", "--chat", "x", "-m", "base", *CPU))


@pytest.mark.parametrize(
    ("arguments", "piped", "status", "words"),
    [
        (["x", "--system", "y"], None, 2, "add --chat"),
        (["x", "--template", "chatml"], None, 2, "add --chat"),
        (["x", "--chat", "--template", "alpaca"], None, 1, "--template alpaca"),
        (["x", "--chat", "--echo"], None, 2, "--echo"),
        (["x", "--messages", "talk.json"], None, 2, "leave out the prompt"),
        (["--messages", "-"], None, 2, "no prompt"),
        (["--messages", "gone.json"], None, 1, "gone.json: No such file"),
        (["--messages", "-"], b"[{", 1, "stdin: no valid JSON"),
        (["--messages", "-"], b"[]", 1, "stdin: not a conversation"),
        (["--messages", "-"], b'[{"role": "poet", "content": "x"}]', 1, "stdin: message 1 has the role 'poet'"),
        (["--messages", "-"], b'[{"role": "assistant", "content": "x"}]', 1, "end with one to answer"),
        (["--chat", "--jsonl"], b'{"messages": 7}\n', 1, "stdin:1: not a conversation"),
        (["--chat", "--jsonl"], b'{"text": "x"}\n', 1, 'stdin:1: no field "prompt" (found: "text"); '),
        (["--jsonl"], b'{"messages": []}\n', 1, 'conversations in "messages" need --chat'),
        (["x", "--chat", "--system", "the bank " * 40], None, 1, "shorten the system message"),
    ],
)
def test_mistakes_with_conversations(
    ask: Any, arguments: list[str], piped: bytes | None, status: int, words: str
) -> None:
    assert words in error_of(ask(*arguments, stdin=piped), status)


def test_the_makers_of_a_model_choose_the_defaults(parrot: Path) -> None:
    shutil.copytree(parrot, "m")
    path = Path("m/generation_config.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"temperature": 1e-6}), encoding="utf-8")
    assert good(minigpt("generate", "--chat", "x", "-m", "m", *CPU)) == f"{ANSWER}\n"
    assert good(minigpt("generate", "--chat", "x", "-m", "m", "-t", "100", "--seed", "1", *CPU)) != f"{ANSWER}\n"


# What only a process of its own can show


@contextmanager
def spawn(model: Path, *arguments: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "minigpt", "generate", "-m", str(model), *CPU, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more.pop("env", {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **more) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_closed_pipe_is_quiet_and_any_locale_is_utf8(model: Path) -> None:
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    arguments = ("鸟儿", "--echo", "-n", "1000000", "-t", "1", "--seed", "1")
    with spawn(model, *arguments, stdin=subprocess.DEVNULL, env=locale) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.read(6).decode("utf-8") == "鸟儿"
        child.stdout.close()
        errors = child.stderr.read().decode("utf-8")
        assert child.wait(timeout=60) == 141
        assert [line for line in errors.splitlines() if not line.startswith("note: ")] == []


def test_ctrl_c_ends_a_text_with_130_and_a_slow_pipe_is_named(model: Path) -> None:
    with spawn(model, "-n", "1000000", "-t", "1", "--stop", "never there", stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stderr.readline() == b"waiting for a prompt on standard input (Ctrl-D ends it, Ctrl-C leaves)\n"
        child.stdin.write(b"The cat")
        child.stdin.close()
        child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        child.stdout.read()
        assert child.wait(timeout=60) == 130
        errors = child.stderr.read().decode()
        assert "Traceback" not in errors
        assert errors.splitlines()[-1] == "stopped"


class _Timer:
    """A timer that runs out when it is told to."""

    made: list[_Timer]

    def __init__(self, seconds: float, call: Any, arguments: list[Any]) -> None:
        self.seconds, self.call, self.arguments, self.live = seconds, call, arguments, False
        self.made.append(self)

    def start(self) -> None:
        self.live = True

    def cancel(self) -> None:
        self.live = False

    def run_out(self) -> None:
        if self.live:
            self.call(*self.arguments)


def test_the_waiting_note_is_for_slow_pipes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from minigpt.cli import stdin

    notes: list[str] = []
    _Timer.made = []
    monkeypatch.setattr("minigpt.cli.console.note", notes.append)
    monkeypatch.setattr(stdin.threading, "Timer", _Timer)
    read, write = os.pipe()
    with os.fdopen(read, "r") as source, patch.object(sys, "stdin", source):
        assert stdin.is_piped()
        with stdin.piped("a prompt") as stream:
            os.write(write, b"quick\n")
            assert stream.readline() == b"quick\n"
            _Timer.made[0].run_out()
        assert notes == []
        with stdin.piped("a prompt") as stream:
            _Timer.made[1].run_out()
            os.write(write, b"slow\n")
            assert stream.readline() == b"slow\n"
        assert notes == ["waiting for a prompt on standard input (Ctrl-D ends it, Ctrl-C leaves)"]
        assert [timer.seconds for timer in _Timer.made] == [2.0, 2.0]
        os.close(write)


def test_a_full_disk_under_stdout_is_one_line(model: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "minigpt", "generate", "x", "-m", str(model), *CPU, "-n", "3"]
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr.decode()) == (1, "error: standard output: No space left on device\n")
