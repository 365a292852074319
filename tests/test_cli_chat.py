"""`minigpt chat`: on a terminal, and as a script through a pipe with answers alone on stdout."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from commands import CPU, Result, error_of, minigpt
from parrot import make_parrot_folder

from minigpt.checkpoint.folder import load
from minigpt.cli import chat as command
from minigpt.config import SamplingConfig
from minigpt.inference.chat import Chat
from minigpt.inference.sampling import row_seed
from minigpt.text.chat import Message, chat_template

pty = pytest.importorskip("pty", reason="needs pseudo-terminals")

ANSWER = "Alice get the bank"


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers everything with the same words, and ends by itself."""
    return make_parrot_folder(tmp_path_factory.mktemp("parrot") / "model", ANSWER, context=128)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that never ends."""
    return make_parrot_folder(tmp_path_factory.mktemp("endless") / "model", ANSWER, endless=True, context=4096)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINIGPT_MODEL", raising=False)


@pytest.fixture
def script(parrot: Path) -> Any:
    def call(text: str, *arguments: object) -> Result:
        return minigpt("chat", "-m", parrot, "-t", "0", "-n", "20", *CPU, *arguments, stdin=text.encode())

    return call


def saved(name: str) -> list[str]:
    """The messages of a conversation that was saved, as role and content."""
    talk = json.loads(Path(name).read_text(encoding="utf-8"))
    return [f"{message['role']}: {message['content']}" for message in talk["messages"]]


# On a terminal


def test_a_person_talks_interrupts_takes_back_and_leaves(endless: Path) -> None:
    """Two turns, the history of the keys, Ctrl-C in an answer, undo, a history past the context, end of input."""
    from terminal import on_terminal

    turns = [{"role": role, "content": "the bank"} for _ in range(200) for role in ("user", "assistant")]
    Path("long.json").write_text(json.dumps(turns), encoding="utf-8")
    said = f"{ANSWER}Alice get t\nnote: cut after 12 tokens; /set max_new_tokens=24 allows more\n> "
    with on_terminal("chat", "-m", endless, "-t", "0", "-n", "12", *CPU) as terminal:
        assert "/help lists the commands" in " ".join(terminal.wait_for("\n> ").split())  # the path may be long
        terminal.type("Hi")
        assert terminal.wait_for("\n> ") == f"Hi\n{said}"
        terminal.type("the bank")
        assert terminal.wait_for("\n> ") == f"the bank\n{said}"
        terminal.press("\x1b[A\x1b[A\r")  # two up: the first question again
        assert terminal.wait_for("\n> ").endswith(f"Hi\n{said}")
        terminal.type("/undo")
        assert "back at: the bank\n" in terminal.wait_for("\n> ")
        terminal.type("/set max_new_tokens=100000")
        terminal.wait_for("\n> ")
        terminal.type("one \\")
        terminal.wait_for("\n. ")
        terminal.type("two")
        terminal.wait_for(ANSWER)
        terminal.press("\x03")
        assert "stopped; what was said stays" in terminal.wait_for("\n> ")
        terminal.type("/save talk.json")
        assert "saved 6 messages" in terminal.wait_for("\n> ")
        terminal.type("/load long.json")
        assert "loaded 400 messages" in terminal.wait_for("\n> ")
        terminal.type("Hi")
        came = terminal.wait_for(ANSWER)
        assert "past the context of 4,096 tokens" in came
        assert "oldest turns are left out" in came
        terminal.press("\x03")
        terminal.wait_for("\n> ")
        terminal.type("/rety")
        assert "error: /rety: no such command (did you mean /retry?)" in terminal.wait_for("\n> ")
        terminal.press("\x04")
        assert terminal.leave() == 0
    messages = saved("talk.json")
    assert messages[:4] == ["user: Hi", f"assistant: {ANSWER}Alice get t", "user: the bank", messages[1]]
    assert messages[4] == "user: one \ntwo"
    assert messages[5].startswith(f"assistant: {ANSWER}")


def test_answers_may_go_elsewhere_and_ctrl_c_twice_leaves(parrot: Path) -> None:
    from terminal import on_terminal

    reader, writer = os.pipe()
    with on_terminal("chat", "-m", parrot, "-t", "0", *CPU, stdout=writer) as terminal:
        os.close(writer)
        terminal.wait_for("\n> ")
        terminal.type("Hi")
        assert terminal.wait_for("\n> ") == "Hi\n> "
        terminal.press("half")
        terminal.wait_for("half")
        time.sleep(0.2)  # until it waits for keys: readline misses a signal that comes just before
        terminal.press("\x03")
        assert "Ctrl-C again leaves" in terminal.wait_for("\n> ")
        time.sleep(0.2)  # until it waits for keys
        terminal.press("\x03")
        assert terminal.leave() == 130
        assert terminal.seen.endswith("stopped\n")
    with os.fdopen(reader, encoding="utf-8") as answers:
        assert answers.read() == f"{ANSWER}\n"


# Through a pipe


def test_a_script_of_questions_has_answers_alone_on_stdout(script: Any) -> None:
    result = script("Hi\n\nthe bank\n")
    assert (result.status, result.out, result.err) == (0, f"{ANSWER}\n" * 2, "")
    assert (script("").status, script("").out) == (0, "")
    without = script("Hi")  # no line end
    assert without.out == f"{ANSWER}\n"


def test_an_answer_is_that_of_the_conversation_so_far(parrot: Path) -> None:
    """Drawn at a high temperature, so that every token before counts."""
    arguments = ("chat", "-m", parrot, "-t", "2", "-n", "20", "--seed", "5", "--system", "Be kind.", *CPU)
    result = minigpt(*arguments, stdin=b"Hi\nthe bank\n/retry\n")
    loaded = load(parrot)
    chat = Chat(loaded.model, chat_template(loaded.tokenizer), "Be kind.")
    settings = SamplingConfig(max_new_tokens=20, temperature=2.0)
    texts = []
    for turn, ask in enumerate((lambda *a: chat.ask("Hi", *a), lambda *a: chat.ask("the bank", *a), chat.retry)):
        events = list(ask(settings, row_seed(5, turn)))
        text = "".join(getattr(event, "text", "") for event in events).lstrip()
        texts.append(text if text.endswith("\n") else f"{text}\n")
    assert result.out == "".join(texts)
    assert minigpt(*arguments, stdin=b"Hi\nthe bank\n/retry\n").out == result.out
    again = minigpt(*arguments, stdin=b"Hi\n/set seed=5\n/undo\nHi\n")
    assert again.out == texts[0] * 2


def test_lines_that_go_on(script: Any) -> None:
    result = script('one \\\ntwo\n"""three\n  four\n"""\n"""five"""\n//six\n/save t.json\nseven\\')
    assert result.status == 0
    assert [line for line in saved("t.json") if line.startswith("user")] == [
        "user: one \ntwo",
        "user: three\n  four",
        "user: five",
        "user: /six",
    ]
    assert result.out == f"{ANSWER}\n" * 5


def test_the_commands(script: Any) -> None:
    result = script(
        "/system Be kind.\n/system\nHi\nthe bank\n/undo\n/save a.json\n/save a.json\n/reset\nHi\n/save b.json\n"
        "/load a.json\n/retry\n/save a.json\n/set temperature=0.5\n/set top_k=3\n/set stop= get\n/set\nHi\n/help\n"
        "/quit\nnot reached\n"
    )
    assert result.status == 0, result.err
    assert result.out == f"{ANSWER}\n" * 4 + "Alice\n"
    assert saved("a.json") == ["system: Be kind.", "user: Hi", f"assistant: {ANSWER}"]
    assert saved("b.json") == saved("a.json")
    for words in ("system: Be kind.", "back at: Hi", "saved 3 messages", "loaded 3 messages", "a new conversation",
                  "temperature=0.5\n", "top_k=3\n", "stop= get\n", "/retry   answer"):  # fmt: skip
        assert words in result.err


def test_a_saved_conversation_is_read_by_generate(script: Any, parrot: Path) -> None:
    turns = [{"role": "user", "content": "Hi 猫"}]
    Path("t.json").write_text(json.dumps(turns), encoding="utf-8")
    result = script("/load t.json\n/retry\nthe bank\n/save u.json\n")
    assert "loaded 1 message from t.json; the last has no answer yet, /retry gives one" in result.err
    Path("s.json").write_text('[{"role": "system", "content": "Be kind."}]', encoding="utf-8")
    assert "answer" not in script("/load s.json\n").err, "there is no question to answer"
    talk = json.loads(Path("u.json").read_text(encoding="utf-8"))
    assert Path("u.json").read_text(encoding="utf-8").count("\n") == 1, "one line of a file of conversations"
    assert talk["messages"][0] == turns[0]
    talk["messages"].pop()
    Path("v.json").write_text(json.dumps(talk), encoding="utf-8")
    out = minigpt("generate", "--messages", "v.json", "-m", parrot, "-t", "0", *CPU).out
    assert out == f"{ANSWER}\n"


def test_past_the_context_the_oldest_turns_go_and_it_is_said(script: Any) -> None:
    """The same paste twice, longer than the context, and many short turns after it."""
    paste = "Alice " * 130
    result = script(f"{paste}\n{paste}\n" + "Hi\n" * 12, "--system", "Be kind.")
    assert result.status == 0
    assert result.out == f"{ANSWER}\n" * 14
    lines = result.err.splitlines()
    assert "past the context of 128 tokens; the first " in lines[0]
    assert "the oldest turn is and the first " in lines[1]
    assert 3 <= len(lines) <= 8
    result = script("Hi\nHi\nHi\n", "--context", "60")
    assert "past the context of 60 tokens" in result.err


def test_an_answer_without_end_says_why_it_stops(endless: Path) -> None:
    arguments = ("chat", "-m", endless, "-t", "0", *CPU)
    result = minigpt(*arguments, "-n", "8", stdin=b"Hi\n")
    assert "cut after 8 tokens; /set max_new_tokens=16 allows more" in result.err
    result = minigpt(*arguments, "-n", "1000", "--context", "64", stdin=b"Hi\n")
    assert "the context of 64 tokens is full" in result.err


def test_a_model_not_tuned_for_chat_says_so(tmp_path: Path) -> None:
    folder = make_parrot_folder(tmp_path / "base", ANSWER, record={"made_by": "train"})
    result = minigpt("chat", "-m", folder, "-t", "0", *CPU, stdin=b"Hi\n")
    assert result.out == f"{ANSWER}\n"
    assert "not tuned for chat" in result.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/nonsense\n", "/nonsense: no such command"),
        ("/rety x\n", "did you mean /retry?"),
        ("/undo\n", "nothing to take back"),
        ("/retry\n", "nothing was asked"),
        ("/save a.json\n", "nothing was said"),
        ("Hi\n/save\n", "no file named"),
        ("Hi\n/save gone/a.json\n", "gone/a.json"),
        ("Hi\n/save there.txt\n", "there.txt is there already"),
        ("/load gone.json\n", "gone.json: No such file"),
        ("/load there.txt\n", "there.txt: no valid JSON"),
        ("/set temperature=hot\n", "temperature"),
        ("/set temperature=-1\n", "temperature"),
        ("/set warmth=1\n", "NAME is one of max_new_tokens, temperature"),
        ("/set top_k\n", "write NAME=VALUE"),
        ("/set seed=x\n", "seed is x"),
        ("/set seed=²\n", "seed is ²"),
        (f"/set seed={'9' * 5000}\n", "seed is 9999"),
        ("/load ~nobody-of-this-name/a.json\n", "~nobody-of-this-name/a.json: No such file"),
        ("/load a\0b\n", "a\ufffdb: No such file"),
        ("Hi\n/save gone\0/a.json\n", "gone\ufffd/a.json"),
        ("/save\tthere.txt\n", "nothing was said"),
        ("/set top_p=none\n/set max_new_tokens=none\n", "max_new_tokens"),
        ("/system " + "Alice " * 130 + "\nHi\n", "shorten the system message"),
    ],
)
def test_a_mistake_ends_a_script_with_one_line(text: str, words: str, script: Any) -> None:
    Path("there.txt").write_text("mine", encoding="utf-8")
    assert words in error_of(script(text))
    assert Path("there.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.skipif(os.name != "posix", reason="other names are bad elsewhere")
def test_a_bad_name_of_a_file_is_one_line_and_the_chat_goes_on(parrot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a person, that is: in a script the first mistake is the last."""
    Path("folder").mkdir()
    Path("file").touch()
    Path("gone.json").symlink_to("nowhere")
    bad = ["folder", "folder/", ".", "..", "/", "file/x.json", "x" * 5000, f"{'x' * 5000}/y", "a\0/b", "~nobody\0/b",
           "/proc/x.json", "gone.json"]  # fmt: skip
    lines = ["Hi", *(f"/{verb} {name}" for name in bad for verb in ("save", "load")), "/save ok.json", "/quit"]

    class Person:
        interactive = True

        def message(self) -> str:
            return lines.pop(0)

    monkeypatch.setattr(command, "Keyboard", Person)
    result = minigpt("chat", "-m", parrot, "-t", "0", *CPU)
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.status == 0
    assert len(errors) == 2 * len(bad)
    assert "Traceback" not in result.err
    assert saved("ok.json") == ["user: Hi", f"assistant: {ANSWER}"]


def test_options_that_are_wrong(parrot: Path) -> None:
    for arguments, status, words in (
        (["-m", "gone"], 1, "no such model folder"),
        (["-m", parrot, "--template", "alpaca"], 1, "--template alpaca"),
        (["-m", parrot, "-t", "-1"], 1, "temperature"),
        (["-m", parrot, "--context", "1"], 2, "context"),
        (["-m", parrot, "hello"], 2, "unexpected extra argument"),
    ):
        assert words in error_of(minigpt("chat", *arguments, *CPU, stdin=b"Hi\n"), status)


def test_what_a_user_types_is_never_a_control_token(script: Any, parrot: Path) -> None:
    assert script("<|im_end|>\n/save a.json\n").out == f"{ANSWER}\n"
    template = chat_template(load(parrot).tokenizer)
    ids = template.encode([Message("user", "<|im_end|>")])
    assert ids.count(template.turn_end or -1) == 1
    assert saved("a.json")[0] == "user: <|im_end|>"
