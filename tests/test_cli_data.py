"""`minigpt data preview`: conversations with what is learned marked, and figures that can be counted by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from commands import Result, error_of, minigpt
from tiny_folder import TEXT

from minigpt.cli import data as command
from minigpt.text.chat import Message, chat_template
from minigpt.text.conversations import Conversation
from minigpt.text.fitting import FitCounts, fit
from minigpt.text.tokenizer import Tokenizer

QUESTION, ANSWER = "What was Alice tired of?\n\tSay <b>it</b>: 猫 <|im_end|>", "Sitting by her sister.\nAnd of nothing."


def folder_of(folder: Path, context: int | None = 96) -> Path:
    """A tokenizer with a config.json that tells a context: all that a preview reads of a model."""
    Tokenizer.train([TEXT], 300).save(folder)
    if context is not None:
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("model"))


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def preview(*arguments: object) -> Result:
    result = minigpt("data", "preview", *arguments)
    assert result.status == 0, result.err
    return result


def test_what_is_learned_is_marked(tmp_path: Path, model: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", {"prompt": QUESTION, "completion": ANSWER})
    result = preview(chats, "-m", model)
    shown = "What was Alice tired of?\n→Say <b>it</b>: 猫 <|im_end|>"
    assert result.out.startswith(f"{chats}:1  ")
    assert f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n⟦{ANSWER}<|im_end|>⟧\n\n" in result.out
    assert "\x1b" not in result.out
    assert result.err == f"read       {chats}: prompt/completion (1)\n"


def test_colour_is_for_terminals(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    template = chat_template(Tokenizer.load(model))
    chat = Conversation("x:1", (Message("user", "Who\x1b[31m?"), Message("assistant", ANSWER)))
    one = fit(chat.messages, template, 96, FitCounts())
    with patch.object(sys, "stdout") as stream:
        stream.isatty.return_value = True
        drawn = command._drawn(chat, one, template.tokenizer)
        monkeypatch.setenv("NO_COLOR", "1")
        plain = command._drawn(chat, one, template.tokenizer)
    green = "".join(f"\x1b[97;48;5;22m{line}\x1b[0m\n" for line in f"{ANSWER}<|im_end|>".split("\n"))
    assert drawn.endswith(f"<|im_start|>assistant\n{green}\n")
    assert "Who�[31m?" in drawn, "a terminal takes no command from data"
    assert "\x1b" not in plain
    assert plain.endswith(f"⟦{ANSWER}<|im_end|>⟧\n\n")


def test_figures_can_be_counted_by_hand(tmp_path: Path, model: Path) -> None:
    answers = ["one", "two " * 3, "three " * 3, "four " * 40]
    rows = [{"prompt": f"Q{n}", "completion": text} for n, text in enumerate(answers)]
    bad = [{"prompt": "x", "completion": ""}, {"prompt": "x", "completion": " "}, {"q": 1}]
    liked = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "label": False}]
    chats = write(tmp_path / "chats.jsonl", *rows, rows[0], *bad, *liked)
    (found,) = preview(chats, "-m", model, "--skip-bad", "--json", "-n", 9).objects
    template = chat_template(Tokenizer.load(model))
    ids, learned = zip(*(
        template.encode_for_training([Message("user", row["prompt"]), Message("assistant", row["completion"])])
        for row in rows
    ), strict=True)  # fmt: skip
    lengths = [max(place for place, flag in enumerate(flags) if flag) + 1 for flags in learned]
    assert sorted(lengths) == lengths
    assert lengths[3] > 97 > lengths[2], "the last one is cut to the context and the token after it"
    assert found["lengths"] == {"min": lengths[0], "median": lengths[2], "p95": lengths[3], "max": lengths[3]}
    positions = [length - 1 for length in lengths[:3]] + [96]
    cut_answer = 97 - (lengths[3] - sum(learned[3]))
    assert found["tokens"] == sum(positions)
    assert found["learned"] == sum(map(sum, learned[:3])) + cut_answer
    assert found["learned_share"] == pytest.approx(found["learned"] / found["tokens"])
    assert (found["context"], found["rows"]) == (96, 2)
    assert found["padding_share"] == pytest.approx(1 - sum(positions) / 192)
    assert (found["cut"], found["dropped"], found["duplicates"], found["disliked"]) == (1, 0, 1, 1)
    assert (found["conversations"], found["messages"]) == (4, 8)
    assert found["skipped"] == {"empty answer": 2, "missing field": 1}
    assert found["first_skipped"].startswith(f'{chats}:6: field "completion" is empty; ')
    assert found["shapes"] == {str(chats): {"prompt/completion": 5, "messages": 1}}
    assert [example["where"] for example in found["examples"]] == [f"{chats}:{n}" for n in (1, 2, 3, 4)]
    for example, tokens, flags in zip(found["examples"][:3], ids, learned, strict=False):
        assert example["tokens"] == max(place for place, flag in enumerate(flags) if flag) + 1 <= len(tokens)
        assert example["learned"] == sum(flags)
    first = found["examples"][0]
    assert first["pieces"] == [
        {"text": "<|im_start|>user\nQ0<|im_end|>\n<|im_start|>assistant\n", "learned": False},
        {"text": "one<|im_end|>", "learned": True},
    ]
    assert first["text"] == "".join(piece["text"] for piece in first["pieces"])
    assert found["examples"][3]["text"].rstrip().endswith("four four")


def test_what_is_left_out_is_said(tmp_path: Path, model: Path) -> None:
    rows = [{"question": "a", "answer": "b"}, {"question": "a", "answer": "b"}, {"question": "c"}]
    chats = write(tmp_path / "chats.jsonl", *rows, {"question": "d", "answer": "x " * 300})
    result = preview(chats, "-m", model, "--skip-bad", "-n", 1)
    assert result.out.split("\n\n")[-1].splitlines() == [
        "conversations  2, with 4 messages",
        f"lengths        {result.out.split('lengths        ')[1].splitlines()[0]}",
        f"learned        {result.out.split('learned        ')[1].splitlines()[0]}",
        f"packed         {result.out.split('packed         ')[1].splitlines()[0]}",
        "too long       1 cut, 0 dropped since no answer was left",
        "left out       1 exact duplicate dropped",
        "               1 bad row skipped (1 missing field)",
    ]
    assert f'warning: the first bad row: {chats}:3: no field "answer" (found: "question"); ' in result.err


def test_conversations_shown_are_spread_over_the_files(tmp_path: Path, model: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", *({"prompt": f"Q{n}", "completion": "A"} for n in range(9)))
    for limit, lines in ((0, []), (1, [1]), (3, [1, 4, 7]), (50, range(1, 10))):
        (found,) = preview(chats, "-m", model, "-n", limit, "--json").objects
        assert [example["where"] for example in found["examples"]] == [f"{chats}:{line}" for line in lines]
    long = write(tmp_path / "long.jsonl", {"system": TEXT * 2, "prompt": "a", "response": "b"},
                 {"prompt": "a", "response": "b"})  # fmt: skip
    assert f"{long}:1  dropped: no answer is left in a row\n" in preview(long, "-m", model).out


def test_fields_of_other_names(tmp_path: Path, model: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", {"q": "Who?", "a": "Alice", "id": 7})
    message = error_of(minigpt("data", "preview", chats, "-m", model))
    assert message == (
        f'{chats}:1: no field "messages" (found: "q", "a", "id"); '
        "name what holds the conversation with --map prompt=q --map response=a"
    )
    result = preview(chats, "-m", model, *message.split(" with ")[1].split())
    assert "⟦Alice<|im_end|>⟧" in result.out
    assert error_of(minigpt("data", "preview", chats, "-m", model, "--map", "q"), 2).startswith("--map q: give the ")
    assert "no field 'q' is read" in error_of(minigpt("data", "preview", chats, "-m", model, "--map", "q=prompt"))


def test_rows_are_as_long_as_asked_or_as_the_model_can(tmp_path: Path, model: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", {"prompt": "a", "completion": "b " * 20})
    (found,) = preview(chats, "-m", model, "--context", 50, "--json").objects
    assert found["context"] == 50
    message = error_of(minigpt("data", "preview", chats, "-m", model, "--context", 97))
    assert message == "context is 97, more than the model's 96; give a smaller --context"
    wide = folder_of(tmp_path / "wide", 10_000)
    (found,) = preview(chats, "-m", wide, "--json").objects
    assert found["context"] % 64 == 0
    assert found["lengths"]["max"] <= found["context"] < 1_000, "by the data"
    bare = folder_of(tmp_path / "bare", None)
    assert "name the length of a row with --context" in error_of(minigpt("data", "preview", chats, "-m", bare))
    assert preview(chats, "-m", bare, "--context", 64, "--json").objects[0]["context"] == 64
    (bare / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}), encoding="utf-8")
    message = error_of(minigpt("data", "preview", chats, "-m", bare, "--context", 97))
    assert message.startswith("context is 97, more than the model's 96; "), "an adapter has its base's"


def test_an_adapter_without_a_tokenizer_has_its_bases(tmp_path: Path, model: Path) -> None:
    chats = write(tmp_path / "chats.jsonl", {"prompt": QUESTION, "completion": ANSWER})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}), encoding="utf-8")
    assert preview(chats, "-m", adapter).out == preview(chats, "-m", model).out
    ids = [minigpt("tokenizer", "encode", ANSWER, "--json", "-m", folder) for folder in (adapter, model)]
    assert ids[0].status == 0, ids[0].err
    assert ids[0].out == ids[1].out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x", "completion": 4}', ':2: field "completion" holds a number, not'),
        ('{"prompt": "x", ', ":2: broken JSON ("),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ":2: message 1 has the role assistant at the start"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, model: Path, content: str, message: str) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "x", "completion": "y"}\n' + content + "\n", encoding="utf-8")
    assert error_of(minigpt("data", "preview", chats, "-m", model)).startswith(f"{chats}{message}")


def test_without_data_the_bundled_instructions_are_shown(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = write(tmp_path / "chats.jsonl", {"instruction": "Say it.", "input": "", "output": "It."})
    monkeypatch.setattr("minigpt.cli.data.bundled_instructions", lambda: [chats])
    done = minigpt("data", "preview", "-m", model)
    assert (done.status, "Say it." in done.out) == (0, True)


def test_both_answers_of_a_pair_are_shown(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": f"Q{n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(4)]
    pairs = write(tmp_path / "pairs.jsonl", *rows, {"prompt": "x", "chosen": "y", "rejected": "y"})
    result = preview(pairs, "--as", "pairs", "-m", model, "-n", 2)
    shown = [line for line in result.out.splitlines() if line.startswith(str(pairs))]
    assert [line.split("  ")[0] for line in shown] == [
        f"{pairs}:{n} {side}" for n in (1, 3) for side in ("chosen", "rejected")
    ]
    assert "⟦yes 2<|im_end|>⟧" in result.out
    assert "⟦no 2<|im_end|>⟧" in result.out
    assert "\npairs          4, with 12 messages\n" in result.out
    assert "\nleft out       1 pair of equal answers left out\n" in result.out
    assert result.err == f"read       {pairs}: prompt/chosen/rejected (5)\n"
    message = error_of(minigpt("data", "preview", write(tmp_path / "x.jsonl", {"q": 1}), "--as", "pairs", "-m", model))
    assert message.startswith(f'{tmp_path}/x.jsonl:1: no field "chosen" (found: "q"); a pair needs it; ')


def test_labelled_answers_are_shown_with_their_labels(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": "Q", "completion": "A", "label": True}, {"prompt": "Q", "completion": "B", "label": False}]
    (found,) = preview(write(tmp_path / "x.jsonl", *rows), "--as", "labels", "-m", model, "--json").objects
    assert [example["where"] for example in found["examples"]] == [
        f"{tmp_path}/x.jsonl:1 good",
        f"{tmp_path}/x.jsonl:2 bad",
    ]
    assert (found["conversations"], found["disliked"]) == (2, 0)


def test_no_file_and_no_answer_are_said(tmp_path: Path, model: Path) -> None:
    assert "no such file" in error_of(minigpt("data", "preview", tmp_path / "x.jsonl", "-m", model))
    chats = write(tmp_path / "chats.jsonl", {"prompt": "a", "completion": "b"})
    assert "no answer is left" in error_of(minigpt("data", "preview", chats, "-m", model, "--context", 2))


def test_a_template_that_cannot_be_trained_with_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "{% for m in messages %}{{ m['content'] | upper }}<|im_end|>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    chats = write(tmp_path / "chats.jsonl", {"prompt": "a", "completion": "b"})
    assert "--template chatml" in error_of(minigpt("data", "preview", chats, "-m", folder))
    assert "⟦b<|im_end|>⟧" in preview(chats, "-m", folder, "--template", "chatml").out


def test_real_data_of_several_shapes_together(shared: Path, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", 512)
    files = [shared / "data" / "instruct" / name for name in ("seed_tasks.jsonl", "instruction-data.json")]
    (found,) = preview(*files, "-m", folder, "--json").objects
    assert found["conversations"] == 175 + 1_100
    assert found["padding_share"] < 0.05
    assert 0.2 < found["learned_share"] < 0.8
