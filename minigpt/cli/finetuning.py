"""`minigpt finetune` on the screen: how the answers change, and that a run goes on where an earlier one stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.checkpoint.folder import load
from minigpt.cli import console
from minigpt.cli.following import follow
from minigpt.cli.training import (
    Screen,
    device_of_run,
    quoted,
    refuse_to_write_over,
    short,
    show_result,
    train_to_end,
)
from minigpt.config import DTypeName
from minigpt.errors import ConfigError
from minigpt.model.transformer import GPT
from minigpt.training import finetune, runs
from minigpt.training.chat_data import ChatRequest
from minigpt.training.distributed import Group, Ranks, joined
from minigpt.training.finetune import ChatRun
from minigpt.training.run_folder import RunFolder
from minigpt.training.tuning_plan import TuningRequest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Job:
    """One `minigpt finetune` as it was typed; no data and no request are needed to resume."""

    data: ChatRequest | None
    request: TuningRequest | None
    said: dict[str, Any]  # what was asked for in so many words, under the names of records
    out: Path
    device: str | None
    dtype: DTypeName | None


def finetune_job(job: Job, *, resume: bool, overwrite: bool) -> int:
    """Train to the end or to Ctrl-C; return the exit status."""
    with joined(job.device, shard=False) as ranks:
        if isinstance(ranks, Group) and not ranks.first:
            return follow(ranks)
        return _lead(job, ranks, resume=resume, overwrite=overwrite)


def _lead(job: Job, ranks: Ranks, *, resume: bool, overwrite: bool) -> int:
    folder = RunFolder(job.out)
    if runs.begun_by_this_launch(folder):
        resume, overwrite = True, False
    record = finetune.recorded(folder) if resume else None
    device = ranks.own(device_of_run(job.device, record))
    if record is not None:
        finetune.check_same(record, folder, job.data, job.said)
    elif not overwrite:
        refuse_to_write_over(folder, resume=resume)
    if record is None:
        if job.data is None or job.request is None:
            raise ConfigError(f"{job.out} holds no tuning run to continue; start one with DATA and -m MODEL")
        folder.check_sources(job.data.files())  # before there is a folder
    folder.lock()
    try:
        run, status = train_to_end(
            lambda screen: _begin(job, folder, record, device, screen, ranks),
            _sample,
            f"minigpt finetune -o {quoted(job.out)}",
        )
        if status is None:
            _conclude(run, folder)
        return status or 0
    finally:
        folder.unlock()


def _begin(
    job: Job,
    folder: RunFolder,
    record: dict[str, Any] | None,
    device: torch.device,
    screen: Screen,
    ranks: Ranks,
) -> ChatRun:
    """Resume the recorded run where it was saved, or from its beginning; or prepare a new one."""
    data, request, dtype = job.data, job.request, job.dtype
    if record is not None:
        state = runs.saved_state(folder, record)
        if state is not None:
            return finetune.resume(folder, record, state, device, screen, ranks)
        data, request = finetune.asked(record, folder)
        dtype = record["plan"]["train"]["compute_dtype"]
    assert data is not None
    assert request is not None
    return finetune.prepare(data, request, folder, device, dtype, screen, ranks)


def _sample(run: ChatRun) -> str:
    """Answer one held-out question with the model as it is."""
    return f"{short(run.examples[0].question)} → {short(_answers(run, run.trainer.model, 1)[0])}"


def _answers(run: ChatRun, model: GPT, count: int) -> list[str]:
    return finetune.answer(model, run.chat, run.questions[:count])


def _conclude(run: ChatRun, folder: RunFolder) -> None:
    """Score the best model on all held-out answers, and show what it says to a few questions, before and after."""
    weight = run.trainer.model.lm_head.weight
    best = load(
        folder.path, device=weight.device, dtype=weight.dtype
    )  # as it was trained, whatever its base is stored as
    score = None if run.final_score is None else run.final_score(best.model)
    answers = _answers(run, best.model, len(run.questions))
    runs.finish(run, folder, score, {"answers": answers})
    show_result(run, folder, score)
    if run.trainer.ended_early:
        console.note(f"ended early: the held-out score was no better in the last {run.plan.train.patience} evaluations")
    for example, after in zip(run.examples, answers, strict=True):
        console.fact("question" if run.chat.held_out else "trained on", short(example.question))
        console.fact("  before", short(example.before))
        console.fact("  after", short(after))
    console.fact("next", f"minigpt chat -m {quoted(folder.path)}", wrapped=False)
