"""`minigpt align` and `minigpt reward` on the screen, for methods that learn from preferences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.alignment import preference_run
from minigpt.alignment.preference_plan import PreferenceRequest
from minigpt.alignment.preference_run import PreferenceRun
from minigpt.alignment.reward_model import load_reward_model
from minigpt.checkpoint.folder import load
from minigpt.cli import console
from minigpt.cli.training import (
    Screen,
    device_of_run,
    quoted,
    refuse_to_write_over,
    short,
    show_result,
    train_to_end,
)
from minigpt.cli.tuning import Asked
from minigpt.errors import ConfigError
from minigpt.model.transformer import GPT
from minigpt.training import runs
from minigpt.training.finetune import answers_to
from minigpt.training.run_folder import RunFolder

if TYPE_CHECKING:
    import torch


def preference_job(command: str, asked: Asked, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> int:
    """Train to the end or to Ctrl-C; return the exit status. `settings` are those of the method that were said."""
    folder = RunFolder(asked.out)
    record = preference_run.recorded(folder, command) if resume else None
    device = device_of_run(asked.device, record)
    request = None
    if record is not None:
        preference_run.check_same(record, folder, asked.data, asked.said | settings)
    else:
        if not overwrite:
            refuse_to_write_over(folder, resume=resume)
        if asked.data is None or asked.base is None:
            raise ConfigError(f"{asked.out} holds no run of {command} to continue; start one with DATA and -m MODEL")
        request = PreferenceRequest(**asked.request, preference={"method": "dpo"} | settings)
        folder.check_sources(asked.data.files())  # before there is a folder
    folder.lock()
    try:
        run, status = train_to_end(
            lambda screen: _begin(asked, request, folder, record, device, screen),
            lambda run: run.watch.health(),
            f"minigpt {command} -o {quoted(asked.out)}",
            label="health",
        )
        if status is None:
            _conclude(run, folder)
        return status or 0
    finally:
        folder.unlock()


def _begin(
    asked: Asked,
    request: PreferenceRequest | None,
    folder: RunFolder,
    record: dict[str, Any] | None,
    device: torch.device,
    screen: Screen,
) -> PreferenceRun:
    """Resume the recorded run where it was saved, or from its beginning; or prepare a new one."""
    data, dtype = asked.data, asked.dtype
    if record is not None:
        state = runs.saved_state(folder, record)
        if state is not None:
            return preference_run.resume(folder, record, state, device, screen)
        data, request = preference_run.asked(record, folder)
        dtype = record["plan"]["train"]["compute_dtype"]
    assert data is not None
    assert request is not None
    return preference_run.prepare(data, request, folder, device, dtype, screen)


def _conclude(run: PreferenceRun, folder: RunFolder) -> None:
    """Score the best model on all that is held out, and show what it says to a few questions, before and after."""
    device = run.trainer.device
    judge = run.config.method == "reward"
    best = load_reward_model(folder.path, device).model if judge else _load(folder.path, device)
    score = None if run.final_score is None else run.final_score(best)
    answers = [] if judge else answers_to(best, run.data.template, run.questions)
    runs.finish(run, folder, score, {"answers": answers, "warnings": list(run.watch.said.values())})
    show_result(run, folder, score)
    if run.trainer.ended_early:
        console.note(f"ended early: the held-out loss was no lower in the last {run.plan.train.patience} evaluations")
    for prompt, before, after in zip(run.questions, run.before, answers, strict=False):
        console.fact("question" if run.data.held_out else "trained on", short(prompt[-1].content))
        console.fact("  before", short(before))
        console.fact("  after", short(after))
    follow = (
        f"minigpt score -m {quoted(folder.path)} < answers.jsonl" if judge else f"minigpt chat -m {quoted(folder.path)}"
    )
    console.fact("next", follow, wrapped=False)


def _load(folder: Path, device: torch.device) -> GPT:
    import torch

    return load(folder, device=device, dtype=torch.float32).model  # as it was trained, whatever its base is stored as
