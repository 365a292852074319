"""The program: its commands in the order of the journey, and how errors reach a person."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Annotated, Any

import typer
import typer.core

from minigpt import __version__
from minigpt.cli import (
    align,
    chat,
    console,
    data,
    evaluate,
    export,
    finetune,
    generate,
    import_,
    info,
    inspect,
    reward,
    score,
    tokenizer,
    train,
)
from minigpt.cli.processes import reports_errors
from minigpt.cli.signals import Stopped, raise_on_signals
from minigpt.errors import MinigptError, UsageError

JOURNEY = (
    "tokenizer", "train", "data", "finetune", "align", "reward", "score", "generate", "chat", "eval", "inspect", "info",
    "export", "import",
)  # fmt: skip


class Journey(typer.core.TyperGroup):
    """The commands in the order in which a person meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names for help and completion."""
        return list(JOURNEY)


app = typer.Typer(
    name="minigpt",
    cls=Journey,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(asked: bool) -> None:
    if asked:
        console.write(f"minigpt {__version__}\n")
        raise typer.Exit


SHARED = ("train", "finetune")  # the commands that several processes run together


@app.callback()
def minigpt(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """From raw text to a small language model of your own, and back to text."""
    if console.processes() > 1 and ctx.invoked_subcommand not in SHARED:
        raise UsageError(f"{ctx.invoked_subcommand} runs in one process; start it without torchrun")


app.add_typer(tokenizer.app, name="tokenizer")
app.command("train")(train.train)
app.add_typer(data.app, name="data")
app.command("finetune")(finetune.finetune)
app.command("align")(align.align)
app.command("reward")(reward.reward)
app.command("score")(score.score)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("eval")(evaluate.evaluate)
app.command("inspect")(inspect.inspect)
app.command("info")(info.info)
app.command("export")(export.export)
app.command("import")(import_.import_)


def main() -> None:
    """Run the command line and leave with its exit status."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; every error that is not our own mistake becomes one line and a status."""
    _speak_utf8()
    # Threads that wait for each other by spinning for long slow a step five times when other programs want the cores.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    raise_on_signals()
    try:
        status = app(arguments, prog_name="minigpt", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except MinigptError as error:
        if reports_errors():
            console.error(str(error))
        return error.exit_status
    except typer.TyperException as error:
        return _usage_error(error)
    except Stopped as stop:
        console.note("stopped")
        return stop.exit_status
    except BrokenPipeError:  # the reader has gone; nothing is wrong
        _drop_output()
        return 141
    except SystemExit as leave:  # Typer's way to end after completion, and when the reader has gone
        _drop_output()
        return 141 if isinstance(leave.__context__, BrokenPipeError) else int(leave.code or 0)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        console.error("out of memory; choose a smaller model, batch or context")
        return 1
    except OSError as error:  # what no command expected, such as a full disk under stdout
        _drop_output()
        console.error(f"{error.filename or 'input or output'}: {error.strerror or error}")
        return 1


def _is_out_of_memory(error: Exception) -> bool:
    """Tell by name and text, since PyTorch's own type is only there once something has imported it."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    signs = ("out of memory", "can't allocate memory", "not enough memory")
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or any(sign in text for sign in signs)


def _drop_output() -> None:
    """Keep Python from complaining at exit about what it could not write."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_error(error: typer.TyperException) -> int:
    """Put a mistyped command, option or value into one line; Typer finds the nearest right one."""
    text = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        console.note(text)
        return 2
    text = re.sub(r"\. Did you mean (.+)\?$", r" (did you mean \1?)", text.replace("Value error, ", "")).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "minigpt"
    if reports_errors():
        console.error(f"{text[:1].lower()}{text[1:]}; see {command} --help")
    return int(getattr(error, "exit_code", 2))


def _speak_utf8() -> None:
    """Read and write UTF-8 whatever the locale says; what goes to a closed stream is lost."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace", newline="\n" if stream is sys.stdout else None)
