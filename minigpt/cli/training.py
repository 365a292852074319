"""Follow a run on the screen: facts before it, a progress line during it, what came out after it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minigpt.checkpoint.files import write_text
from minigpt.checkpoint.folder import holds_model
from minigpt.cli import console
from minigpt.cli.models import pick_device
from minigpt.cli.signals import StopRequest, stop_request
from minigpt.errors import ConfigError
from minigpt.evaluation.curves import loss_svg, terminal_curve
from minigpt.training.probe import peak_memory
from minigpt.training.run_folder import RunFolder
from minigpt.training.runs import RECORD, Run
from minigpt.training.trainer import Evaluated, StepDone, Validation, Warned
from minigpt.units import byte_size

if TYPE_CHECKING:
    import torch

SAMPLES = 4  # texts shown while a run trains
SHOWN_CHARS = 160  # of a question or an answer

R = TypeVar("R", bound=Run)


class Screen:
    """Where the facts of a run go."""

    def __init__(self, progress: console.Progress) -> None:
        self.progress = progress

    def fact(self, label: str, text: str) -> None:
        console.fact(label, text)

    def warning(self, message: str) -> None:
        console.warning(message)

    def working(self, what: str, done: int, total: int, unit: str = "") -> None:
        share, amount = min(1.0, done / max(1, total)), f"{done:,} {unit}" if unit else byte_size(done)
        self.progress.show(f"{what:<{console.LABEL_WIDTH}}{amount} ({share:.0%})", share)


def refuse_to_write_over(folder: RunFolder, *, resume: bool) -> None:
    """Refuse a folder that holds anything which a new run would replace."""
    if taken := folder.taken():
        model = holds_model(folder.path) or taken == RECORD
        raise ConfigError(
            f"{folder.path} holds {'a model' if model else taken} already; "
            f"{'' if resume or not model else 'continue it with --resume, or '}write elsewhere with -o, "
            "or replace it with --overwrite"
        )


def device_of_run(named: str | None, record: dict[str, Any] | None) -> torch.device:
    """The device that was asked for, or that a run to resume was begun on, or the fastest."""
    begun = None if record is None else record.get("device")
    if named is not None or not isinstance(begun, str):
        return pick_device(named)
    try:
        return pick_device(begun)
    except ConfigError as error:
        raise ConfigError(f"this run was begun on {begun}, which is not here; name another with --device") from error


def train_to_end(
    begin: Callable[[Screen], R],
    sample: Callable[[R], str],
    command: str,
    *,
    label: str = "sample",
) -> tuple[R, int | None]:
    """Begin a run and train it to the end or to Ctrl-C; return it, and the exit status where it was stopped.

    `sample` shows how far the model is, under a label; `command` is the line the run began with, without what --resume
    knows.
    """
    with console.progress() as progress:
        run = begin(Screen(progress))
    with stop_request() as stop:
        _follow(run, sample, stop, label)
    if not stop() and not run.trainer.stopped:
        return run, None
    console.note(f"stopped at step {run.trainer.progress.step:,}; continue with: ", command=f"{command} --resume")
    return run, stop.exit_status


def _follow(run: R, sample: Callable[[R], str], stop: StopRequest, label: str) -> None:
    """Train, keeping the progress line up to date."""
    held_out, rate, samples = "", 0.0, 0
    if not stop():
        console.note("")
    with console.progress() as progress:
        for event in run.trainer.run(stop):
            if isinstance(event, StepDone):
                rate = event.tokens_per_second if rate == 0 else 0.9 * rate + 0.1 * event.tokens_per_second
                left = event.elapsed / event.step * (event.total_steps - event.step)
                for message in [] if run.watch is None else run.watch.see({"loss": event.loss, **event.figures}):
                    console.warning(message)
                now = f"loss {event.loss:.2f}" if run.watch is None else run.watch.text()
                line = (
                    f"step {event.step:,}/{event.total_steps:,}  {now}{held_out}  "
                    f"{console.amount(rate)} tokens/s  {console.duration(left)} left"
                )
                progress.show(line, event.step / event.total_steps, force=event.step == event.total_steps)
            elif isinstance(event, Evaluated):
                held_out = f"  held-out {event.score.text}"
                due = (samples + 1) * run.trainer.progress.total_steps / (SAMPLES + 1)
                if event.step >= due and not run.trainer.ranks.shard:  # of which no process has a whole model
                    samples += 1
                    console.fact(label, sample(run))
            elif isinstance(event, Warned):
                console.warning(event.message)


def on_one_line(text: str) -> str:
    """Return what a model wrote without line ends, and without what a terminal might take for a command."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))


def short(text: str) -> str:
    """One line of a question or an answer, cut where it is long."""
    line = on_one_line(text)
    return f"{line[: SHOWN_CHARS - 1]}…" if len(line) > SHOWN_CHARS else line


def show_result(run: Run, folder: RunFolder, score: Validation | None) -> None:
    """Draw the loss curve and say what came out."""
    rows = folder.read_metrics()
    write_text(folder.path / "loss.svg", loss_svg(rows))
    progress = run.trainer.progress
    console.note("")
    if sys.stderr.isatty():
        console.note(terminal_curve(rows, 72, 10))
    held_out = "" if score is None else f"{score.text} at step {progress.best_step:,} (best), "
    memory = byte_size(peak_memory(run.trainer.device))
    console.fact(
        "done",
        f"{folder.path}: {held_out}{console.duration(progress.elapsed)}, {memory} of memory, "
        f"loss curve in {folder.path / 'loss.svg'}",
    )


def quoted(path: Path) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(str(path))
