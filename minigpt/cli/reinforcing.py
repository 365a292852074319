"""`minigpt align --method grpo` and `ppo` on the screen: how answers change, what they win, and the report."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.alignment import online
from minigpt.alignment.online import PolicyRun
from minigpt.alignment.policy_plan import PolicyRequest
from minigpt.alignment.report import PANELS, Outcome, outcome, report, result
from minigpt.checkpoint.files import write_text
from minigpt.checkpoint.folder import load
from minigpt.cli import console
from minigpt.cli.training import (
    Screen,
    device_of_run,
    quoted,
    refuse_to_write_over,
    short,
    train_to_end,
)
from minigpt.cli.tuning import Asked
from minigpt.errors import ConfigError
from minigpt.evaluation.panels import panels_svg
from minigpt.training import runs
from minigpt.training.probe import peak_memory
from minigpt.training.run_folder import RunFolder
from minigpt.units import byte_size

if TYPE_CHECKING:
    import torch

SHOWN = 3  # prompts with their answers, on the terminal


def policy_job(asked: Asked, settings: dict[str, Any], more: dict[str, Any], *, resume: bool, overwrite: bool) -> int:
    """Train to the end or to Ctrl-C; return the exit status.

    `settings` are those of the method, `more` those of the request, as far as they were said.
    """
    folder = RunFolder(asked.out)
    record = online.recorded(folder) if resume else None
    device = device_of_run(asked.device, record)
    request: PolicyRequest | None = None
    if record is not None:
        online.check_same(record, folder, asked.data, asked.said | settings | more)
    else:
        if not overwrite:
            refuse_to_write_over(folder, resume=resume)
        if asked.data is None or asked.base is None:
            raise ConfigError(f"{asked.out} holds no run of align to continue; start one with DATA and -m MODEL")
        request = PolicyRequest(**asked.request, policy=settings, **{"rewards": (), **more})
        folder.check_sources(asked.data.files())  # before there is a folder
    folder.lock()
    with contextlib.ExitStack() as ending:
        ending.callback(folder.unlock)

        def begin(screen: Screen) -> PolicyRun:
            run = _begin(asked, request, folder, record, device, screen)
            ending.callback(run.close)
            return run

        done, status = train_to_end(begin, _sample, f"minigpt align -o {quoted(asked.out)}")
        if status is None:
            _conclude(done, folder)
        return status or 0


def _begin(
    asked: Asked,
    request: PolicyRequest | None,
    folder: RunFolder,
    record: dict[str, Any] | None,
    device: torch.device,
    screen: Screen,
) -> PolicyRun:
    """Resume the recorded run where it was saved, or from its beginning; or prepare a new one."""
    data, dtype = asked.data, asked.dtype
    if record is not None:
        state = runs.saved_state(folder, record)
        if state is not None:
            return online.resume(folder, record, state, device, screen)
        data, request = online.asked(record, folder)
        dtype = record["plan"]["train"]["compute_dtype"]
    assert data is not None
    assert request is not None
    return online.prepare(data, request, folder, device, dtype, screen)


def _sample(run: PolicyRun) -> str:
    """Answer one held-out prompt with the model as it is."""
    one = run.held_out.some(1)
    return f"{short(one.asks[0].prompt.messages[-1].content)} → {short(one.answers(run.trainer.model)[0].text)}"


def _conclude(run: PolicyRun, folder: RunFolder) -> None:
    """Compare the best model with the one it began with, and write the report."""
    weight = run.trainer.model.lm_head.weight
    best = load(folder.path, device=weight.device, dtype=weight.dtype).model
    score = None if run.final_score is None else run.final_score(best)
    found = outcome(best, run.held_out, run.judges)
    runs.finish(run, folder, score, result(found))
    write_text(folder.path / "report.svg", panels_svg(folder.read_metrics(), PANELS))
    notes = list(run.watch.said.values())
    write_text(folder.path / "report.md", report(f"{folder.path.name}: what changed", _facts(run), found, notes))
    progress = run.trainer.progress
    console.note("")
    held_out = "" if score is None else f"{score.text} at step {progress.best_step:,} (best), "
    memory = byte_size(peak_memory(run.trainer.device))
    console.fact("done", f"{folder.path}: {held_out}{console.duration(progress.elapsed)}, {memory} of memory")
    _show(folder, found)


def _facts(run: PolicyRun) -> dict[str, str]:
    train, progress = run.plan.train, run.trainer.progress
    return {
        "method": run.config.method,
        "began with": Path(run.request.base).name,
        "reward": " + ".join(run.request.rewards),
        "prompts": f"{run.record['prompts']['prompts']:,}, {run.record['prompts']['held_out']:,} of them held out",
        "steps": f"{progress.step:,} of {train.batch_size} answers; the model of step {progress.best_step} is kept",
        "time": console.duration(progress.elapsed),
        "KL weight": f"{run.config.kl:g}",
        "learning rate": f"{train.learning_rate:g}, {train.optimizer}",
    }


def _show(folder: RunFolder, found: Outcome) -> None:
    """Say the report in short."""
    for win in found.wins:
        low, high = win.share.interval
        console.fact(
            "wins",
            f"{win.share.value:.1%} ({low:.1%} to {high:.1%}) against the start by {win.judge}, "
            f"{win.before:.3f} before, {win.after:.3f} after",
        )
    for example in found.examples[:SHOWN]:
        console.fact("prompt", short(example.question))
        console.fact("  before", short(example.before))
        console.fact("  after", short(example.after))
    console.fact("report", f"{folder.path / 'report.md'}")
    console.fact("next", f"minigpt chat -m {quoted(folder.path)}", wrapped=False)
