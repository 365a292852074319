"""Follow a run on the screen: facts before it, a progress line during it, what to do next after it."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.checkpoint.files import write_text
from minigpt.checkpoint.folder import holds_model
from minigpt.cli import console, stdin
from minigpt.cli.models import pick_device
from minigpt.cli.signals import StopRequest, stop_request
from minigpt.config import DTypeName, SamplingConfig
from minigpt.errors import ConfigError
from minigpt.evaluation.curves import loss_svg, terminal_curve
from minigpt.inference.engine import collect, stream
from minigpt.text.decoding import spool
from minigpt.training import pretrain
from minigpt.training.plan import Request
from minigpt.training.pretrain import DataRequest, Run
from minigpt.training.probe import used_memory
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Evaluated, Finished, StepDone, Warned
from minigpt.units import byte_size

if TYPE_CHECKING:
    import torch

SAMPLE_TOKENS = 40
SAMPLES = 4  # texts shown while a run trains
OPENING_CHARS = 20  # of the prompt that is offered at the end


@dataclass(frozen=True, kw_only=True)
class Job:
    """One `minigpt train` as it was typed."""

    data: DataRequest
    request: Request
    said: dict[str, Any]  # what was asked for in so many words, under the names of records
    out: Path
    named_out: bool
    device: str | None
    dtype: DTypeName | None
    sourced: bool  # a source was named, or piped


def train_job(job: Job, *, resume: bool, overwrite: bool) -> int:
    """Train to the end or to Ctrl-C; return the exit status."""
    folder = RunFolder(job.out)
    record = pretrain.recorded(folder) if resume else None
    device = _device(job, record)
    if not overwrite:
        _check_folder(job, folder, record, resume=resume)
    if resume and record is None:
        job = _begun_again(job, folder)
    if record is None and job.data.sources:
        pretrain.check_sources(job.data, folder)  # before there is a folder
    unread = resume and (pretrain.UNCLEARED in record if record is not None else not job.data.sources)
    folder.lock(keep_incoming=unread)
    try:
        with console.progress() as progress:
            run = _begin(job, folder, record, device, _Screen(progress), spooled=unread)
        with stop_request() as stop:
            _follow(run, stop)
        if stop():
            done = f"stopped at step {run.trainer.progress.step:,}; continue with: "
            console.note(done, command=f"{_command(job)} --resume")
            return stop.exit_status
        _conclude(run, folder)
        return 0
    finally:
        pretrain.drop_unused_text(folder)
        folder.unlock()


def _check_folder(job: Job, folder: RunFolder, record: dict[str, Any] | None, *, resume: bool) -> None:
    """Refuse to write over anything, and to continue what is no run."""
    if record is not None:
        pretrain.check_same(record, folder, job.data, job.said, sourced=job.sourced)
    elif resume and not (job.sourced or job.named_out or job.out.is_dir()):
        raise ConfigError(f"{job.out} holds no run to continue; start one without --resume")
    elif taken := folder.taken():
        model = holds_model(job.out) or taken == pretrain.RECORD
        raise ConfigError(
            f"{job.out} holds {'a model' if model else taken} already; "
            f"{'' if resume or not model else 'continue it with --resume, or '}write elsewhere with -o, "
            "or replace it with --overwrite"
        )


def _device(job: Job, record: dict[str, Any] | None) -> torch.device:
    """The device that was asked for, or that a run to resume was begun on, or the fastest."""
    begun = None if record is None else record.get("device")
    if job.device is not None or not isinstance(begun, str):
        return pick_device(job.device)
    try:
        return pick_device(begun)
    except ConfigError as error:
        raise ConfigError(f"this run was begun on {begun}, which is not here; name another with --device") from error


def _begun_again(job: Job, folder: RunFolder) -> Job:
    """The job of a run that was killed before its record: from the text that had come through the pipe, if any."""
    if not job.sourced:
        if folder.half_read():
            raise ConfigError(
                f"{job.out} holds no run to continue: its text came through the pipe in part; pipe it again"
            )
        if folder.holds_text():
            job = replace(job, data=replace(job.data, sources=(), named=stdin.NAME))
    console.note(f"{job.out} holds no run to continue yet; it begins at the beginning")
    return job


class _Screen:
    """Where the facts of a run go."""

    def __init__(self, progress: console.Progress) -> None:
        self.progress = progress

    def fact(self, label: str, text: str) -> None:
        console.fact(label, text)

    def warning(self, message: str) -> None:
        console.warning(message)

    def working(self, what: str, done: int, total: int) -> None:
        share = min(1.0, done / max(1, total))
        self.progress.show(f"{what:<{console.LABEL_WIDTH}}{byte_size(done)} ({share:.0%})", share)


def _begin(
    job: Job, folder: RunFolder, record: dict[str, Any] | None, device: torch.device, screen: _Screen, *, spooled: bool
) -> Run:
    """Resume the recorded run where it was saved, or from its beginning; or prepare a new one.

    With `spooled`, piped text that is in the folder is not piped again.
    """
    data, request, dtype = job.data, job.request, job.dtype
    if record is not None:
        state = pretrain.saved_state(folder, record)
        if state is not None:
            return pretrain.resume(folder, record, state, device, screen)
        data, request = pretrain.asked(record, folder)
        dtype = record["plan"]["train"]["compute_dtype"]
    elif not data.sources and not (spooled and folder.holds_text()):
        with stdin.piped("text to train on") as source:
            spool(source, folder.incoming_path)
    return pretrain.prepare(data, request, folder, device, dtype, screen)


def _follow(run: Run, stop: StopRequest) -> None:
    """Train, keeping the progress line up to date."""
    held_out, rate, samples = "", 0.0, 0
    if not stop():
        console.note("")
    with console.progress() as progress:
        for event in run.trainer.run(stop):
            if isinstance(event, StepDone):
                rate = event.tokens_per_second if rate == 0 else 0.9 * rate + 0.1 * event.tokens_per_second
                left = event.elapsed / event.step * (event.total_steps - event.step)
                line = (
                    f"step {event.step:,}/{event.total_steps:,}  loss {event.loss:.2f}{held_out}  "
                    f"{console.amount(rate)} tokens/s  {console.duration(left)} left"
                )
                progress.show(line, event.step / event.total_steps, force=event.step == event.total_steps)
            elif isinstance(event, Evaluated):
                held_out = f"  held-out {event.score.bits_per_byte:.2f} bits/byte"
                if event.step >= (samples + 1) * run.trainer.progress.total_steps / (SAMPLES + 1):
                    samples += 1
                    console.fact("sample", _sample(run))
            elif isinstance(event, Warned):
                console.warning(event.message)
            elif isinstance(event, Finished):
                break


def _sample(run: Run) -> str:
    """Write a little text with the model as it is; its own random stream leaves the run's alone."""
    model = run.trainer.model
    model.eval()
    prompt = [run.tokenizer.end_of_text_id]
    sampling = SamplingConfig(max_new_tokens=SAMPLE_TOKENS, temperature=0.8)
    text = collect(stream(model, run.tokenizer, [prompt], sampling, [run.trainer.progress.step]), 1)[0].text
    model.train()
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))


def _conclude(run: Run, folder: RunFolder) -> None:
    """Score the best model on all held-out text, draw the loss curve, and say what to do next."""
    from minigpt.checkpoint.folder import load

    best = load(folder.path, device=run.trainer.device)
    score = run.final_score(best.model)
    pretrain.finish(run, folder, score)
    rows = folder.read_metrics()
    write_text(folder.path / "loss.svg", loss_svg(rows))
    progress = run.trainer.progress
    console.note("")
    if sys.stderr.isatty():
        console.note(terminal_curve(rows, 72, 10))
    bits = "" if score is None else f"{score.bits_per_byte:.3f} bits/byte at step {progress.best_step:,} (best), "
    memory = byte_size(used_memory(run.trainer.device))
    console.fact(
        "done",
        f"{folder.path}: {bits}{console.duration(progress.elapsed)}, {memory} of memory, "
        f"loss curve in {folder.path / 'loss.svg'}",
    )
    console.fact("next", f'echo "{_opening(run)}" | minigpt generate -m {shlex.quote(str(folder.path))}', wrapped=False)


def _opening(run: Run) -> str:
    """The first words of the training text, as a prompt to try; nothing in it that a shell would take for its own."""
    ids = run.corpus.train.read(0, min(24, len(run.corpus.train))).tolist()
    words = re.sub(r'["\\$`!\ufffd]', "", run.tokenizer.decode(ids)).split()[:3]
    while len(words) > 1 and len(" ".join(words)) > OPENING_CHARS:
        words.pop()
    return " ".join(words)[:OPENING_CHARS] or "Once"


def _command(job: Job) -> str:
    """The command line that this run began with, without what --resume knows."""
    named = f" {shlex.quote(job.data.named)}" if job.sourced and len(job.data.sources) == 1 else ""
    return f"minigpt train{named} -o {shlex.quote(str(job.out))}"
