"""`minigpt train` on the screen: the text may come through a pipe, and the run goes on where an earlier one stopped."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.checkpoint.folder import load
from minigpt.cli import console, stdin
from minigpt.cli.following import follow
from minigpt.cli.training import (
    Screen,
    device_of_run,
    on_one_line,
    quoted,
    refuse_to_write_over,
    show_result,
    train_to_end,
)
from minigpt.config import DTypeName, SamplingConfig
from minigpt.errors import ConfigError
from minigpt.inference.engine import collect, stream
from minigpt.text.decoding import spool
from minigpt.training import pretrain, runs
from minigpt.training.distributed import Group, Ranks, joined
from minigpt.training.plan import Request
from minigpt.training.pretrain import DataRequest, TextRun
from minigpt.training.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

SAMPLE_TOKENS = 40
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
    shard: bool = False


def train_job(job: Job, *, resume: bool, overwrite: bool) -> int:
    """Train to the end or to Ctrl-C; return the exit status."""
    with joined(job.device, shard=job.shard) as ranks:
        if isinstance(ranks, Group) and not ranks.first:
            return follow(ranks)
        return _lead(job, ranks, resume=resume, overwrite=overwrite)


def _lead(job: Job, ranks: Ranks, *, resume: bool, overwrite: bool) -> int:
    folder = RunFolder(job.out)
    if runs.begun_by_this_launch(folder):
        resume, overwrite = True, False
    record = pretrain.recorded(folder) if resume else None
    device = ranks.own(device_of_run(job.device, record))
    if not overwrite:
        _check_folder(job, folder, record, resume=resume)
    if resume and record is None:
        job = _begun_again(job, folder)
    if record is None and job.data.sources:
        pretrain.check_sources(job.data, folder)  # before there is a folder
    unread = resume and (runs.UNCLEARED in record if record is not None else not job.data.sources)
    folder.lock(keep_incoming=unread)
    try:
        run, status = train_to_end(
            lambda screen: _begin(job, folder, record, device, screen, ranks, spooled=unread), _sample, _command(job)
        )
        if status is None:
            _conclude(run, folder)
        return status or 0
    finally:
        pretrain.drop_unused_text(folder)
        folder.unlock()


def _check_folder(job: Job, folder: RunFolder, record: dict[str, Any] | None, *, resume: bool) -> None:
    """Refuse to write over anything, and to continue what is no run."""
    if record is not None:
        pretrain.check_same(record, folder, job.data, job.said, sourced=job.sourced)
    elif resume and not (job.sourced or job.named_out or job.out.is_dir()):
        raise ConfigError(f"{job.out} holds no run to continue; start one without --resume")
    else:
        refuse_to_write_over(folder, resume=resume)


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


def _begin(
    job: Job,
    folder: RunFolder,
    record: dict[str, Any] | None,
    device: torch.device,
    screen: Screen,
    ranks: Ranks,
    *,
    spooled: bool,
) -> TextRun:
    """Resume the recorded run where it was saved, or from its beginning; or prepare a new one.

    With `spooled`, piped text that is in the folder is not piped again.
    """
    data, request, dtype = job.data, job.request, job.dtype
    if record is not None:
        state = runs.saved_state(folder, record)
        if state is not None:
            return pretrain.resume(folder, record, state, device, screen, ranks)
        data, request = pretrain.asked(record, folder)
        dtype = record["plan"]["train"]["compute_dtype"]
    elif not data.sources and not (spooled and folder.holds_text()):
        with stdin.piped("text to train on") as source:
            spool(source, folder.incoming_path)
    return pretrain.prepare(data, request, folder, device, dtype, screen, ranks)


def _sample(run: TextRun) -> str:
    """Write a little text with the model as it is; its own random stream leaves the run's alone."""
    model = run.trainer.model
    model.eval()
    prompt = [run.tokenizer.end_of_text_id]
    sampling = SamplingConfig(max_new_tokens=SAMPLE_TOKENS, temperature=0.8)
    text = collect(stream(model, run.tokenizer, [prompt], sampling, [run.trainer.progress.step]), 1)[0].text
    model.train()
    return on_one_line(text)


def _conclude(run: TextRun, folder: RunFolder) -> None:
    """Score the best model on all held-out text, and say what came out and what to do next."""
    best = load(folder.path, device=run.trainer.device)
    score = None if run.final_score is None else run.final_score(best.model)
    runs.finish(run, folder, score, {})
    show_result(run, folder, score)
    console.fact("next", f'echo "{_opening(run)}" | minigpt generate -m {quoted(folder.path)}', wrapped=False)


def _opening(run: TextRun) -> str:
    """The first words of the training text, as a prompt to try; nothing in it that a shell would take for its own."""
    ids = run.corpus.train.read(0, min(24, len(run.corpus.train))).tolist()
    words = re.sub(r'["\\$`!\ufffd]', "", run.tokenizer.decode(ids)).split()[:3]
    while len(words) > 1 and len(" ".join(words)) > OPENING_CHARS:
        words.pop()
    return " ".join(words)[:OPENING_CHARS] or "Once"


def _command(job: Job) -> str:
    """The command line that this run began with, without what --resume knows."""
    named = f" {shlex.quote(job.data.named)}" if job.sourced and len(job.data.sources) == 1 else ""
    return f"minigpt train{named} -o {quoted(job.out)}"
