"""The program as a whole: its commands and options, mistyped ones, completion, and what starts it.

`tests/cli_surface.txt` holds every command and option. Where one is changed on purpose, write it again with

    python tests/test_cli_app.py > tests/cli_surface.txt
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from commands import error_of, minigpt

import minigpt as package
from minigpt.cli import app as program
from minigpt.cli import console
from minigpt.cli.app import app, run
from minigpt.units import byte_size

SURFACE = Path(__file__).with_name("cli_surface.txt")


def surface(command: Any, name: str = "minigpt") -> Iterator[str]:
    """One line for each command, and for each of its arguments and options with its default."""
    yield name
    for parameter in command.params:
        names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else f"[{parameter.name}]"
        flag = " (flag)" if getattr(parameter, "is_flag", False) else ""
        many = " ..." if getattr(parameter, "multiple", False) or parameter.nargs != 1 else ""
        yield f"  {names}{flag}{many}  {str(parameter.default)!r}"
    for child_name, child in getattr(command, "commands", {}).items():
        yield from surface(child, f"{name} {child_name}")


def test_commands_and_options_are_those_that_people_know() -> None:
    found = list(surface(typer.main.get_command(app)))
    assert found == SURFACE.read_text(encoding="utf-8").splitlines(), "see the top of this file"


def commands() -> list[str]:
    return list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_help_lists_every_command_in_one_line_each() -> None:
    result = minigpt("--help")
    assert result.status == 0
    assert result.err == ""
    assert "\x1b" not in result.out
    lines = result.out.splitlines()
    listed = [line for line in lines[lines.index("Commands:") + 1 :] if line.strip()]
    assert sorted(line.split()[0] for line in listed) == sorted(commands())
    assert [line for line in listed if line.endswith("...")] == [], "cut"


@pytest.mark.parametrize("name", commands())
def test_every_command_has_help_that_begins_with_examples(name: str) -> None:
    result = minigpt(name, "-h")
    assert result.status == 0
    assert f"minigpt {name}" in result.out
    if not hasattr(typer.main.get_command(app).commands[name], "commands"):  # type: ignore[attr-defined]
        before_options = result.out.partition("Options:")[0]
        assert before_options.count(f"minigpt {name}") >= 3, "usage, and two examples to paste"


def test_no_help_shows_its_own_marks() -> None:
    lines = surface(typer.main.get_command(app))
    paths = {line.removeprefix("minigpt").split("  ")[0] for line in lines if line[0] != " "}
    for path in sorted(paths):
        assert "\\b" not in minigpt(*path.split(), "--help").out, path


def test_version() -> None:
    result = minigpt("--version")
    assert (result.status, result.out, result.err) == (0, f"minigpt {package.__version__}\n", "")


def test_no_arguments_show_the_help() -> None:
    result = minigpt()
    assert (result.status, result.out) == (2, "")
    assert "Commands:" in result.err


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["trian"], "train"),
        (["genrate"], "generate"),
        (["tokeniser", "train"], "tokenizer"),
        (["tokenizer", "encoed"], "encode"),
        (["train", "--setps", "3"], "--steps"),
        (["train", "--optimiser", "adamw"], "--optimizer"),
        (["generate", "--temprature", "1"], "--temperature"),
        (["--verison"], "--version"),
    ],
)
def test_a_mistyped_name_names_the_nearest(arguments: list[str], nearest: str) -> None:
    result = minigpt(*arguments)
    message = error_of(result, 2)
    assert nearest in message
    assert arguments[0] in message or arguments[1] in message
    assert "--help" in message
    assert (result.out, len(result.err.splitlines())) == ("", 1)


def test_an_option_without_its_value_is_one_line() -> None:
    assert "--steps" in error_of(minigpt("train", "--steps"), 2)
    assert "--steps" in error_of(minigpt("train", "--steps", "many"), 2)
    assert "xyzzy" in error_of(minigpt("xyzzy"), 2)


@pytest.mark.parametrize(("shell", "variable"), [("bash", "COMP_WORDS"), ("zsh", "_TYPER_COMPLETE_ARGS")])
def test_completion_knows_commands_options_and_presets(shell: str, variable: str) -> None:
    def complete(words: str) -> str:
        environment = {
            **os.environ, "_MINIGPT_COMPLETE": f"complete_{shell}", variable: words,
            "COMP_CWORD": str(len(words.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": words,
        }  # fmt: skip
        code = "import sys; sys.argv[0] = 'minigpt'; from minigpt.cli.app import main; main()"
        command = [sys.executable, "-c", f"{code}"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.stderr == ""
        return result.stdout

    found = complete("minigpt ")
    assert all(name in found for name in commands())
    assert "--epochs" in complete("minigpt train --ep")
    assert "nano" in complete("minigpt train --preset ")


def test_completion_knows_model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minigpt.cli.models import complete_model

    monkeypatch.chdir(tmp_path)
    for name in ("alice", "bob"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
        (tmp_path / "runs" / name / "model.safetensors").touch()
    assert sorted(complete_model("")) == [str(Path("runs/alice")), str(Path("runs/bob"))]
    assert complete_model("runs/b") == [str(Path("runs/bob"))]


def test_the_package_can_be_run_and_help_is_light() -> None:
    """One process for both: `python -m minigpt`, which must not import torch for its help."""
    code = (
        "import runpy, sys, io, contextlib\n"
        "sys.argv = ['minigpt', '--help']\n"
        "try:\n    runpy.run_module('minigpt', run_name='__main__')\n"
        "except SystemExit as leave:\n    assert not leave.code, leave.code\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'transformers', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Commands:" in result.stdout


def test_an_error_is_one_line_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    console.error("two\nlines\r\n and [red]markup[/red] \x85 end")
    assert capsys.readouterr().err == "error: two lines and [red]markup[/red] end\n"


def test_a_terminal_breaks_lines_but_no_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command = "minigpt train alice-in-wonderland.txt -o runs/alice-in-wonderland --resume"
    console.note("stopped at step 4; continue with: ", command=command)
    console.fact("next", command, wrapped=False)
    assert capsys.readouterr().err == f"stopped at step 4; continue with: {command}\nnext       {command}\n"
    console.fact("plan", command)
    assert len(capsys.readouterr().err.splitlines()) > 2


def test_output_to_nowhere_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert run(["--version"]) == 0
    assert run(["trian"]) == 2
    for stream in (sys.stdout, sys.stderr):
        stream.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0:00"), (0, "0:00"), (85.4, "1:25"), (3600, "1:00:00"), (3700, "1:01:40")]
)
def test_durations(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_amounts_and_sizes() -> None:
    amounts = [console.amount(number) for number in (0, 999, 9_123, 12_345, 5_200_000, 3.2e9)]
    assert amounts == ["0", "999", "9,123", "12.3k", "5.2M", "3.2B"]
    sizes = [byte_size(count) for count in (0, 999, 150_000, 1_100_000, 2.4e9)]
    assert sizes == ["0 bytes", "999 bytes", "150 kB", "1.1 MB", "2.4 GB"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        MemoryError(),
    ],
    ids=["cuda", "linux", "windows", "mac", "python"],
)
def test_out_of_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: object, **more: object) -> None:
        raise error

    monkeypatch.setattr(program, "app", full)
    assert run(["train"]) == 1
    assert capsys.readouterr().err.splitlines() == ["error: out of memory; choose a smaller model, batch or context"]


def test_other_faults_of_ours_are_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(program, "app", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run(["train"])


if __name__ == "__main__":
    print("\n".join(surface(typer.main.get_command(app))))
