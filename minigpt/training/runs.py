"""What every training command shares: a run that is ready, its record in the folder, and how it is taken up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minigpt import __version__
from minigpt.checkpoint.card import write_card
from minigpt.checkpoint.files import read_json, write_json
from minigpt.config import ModelConfig, TrainConfig, from_mapping
from minigpt.errors import ConfigError, ModelFolderError
from minigpt.evaluation.bits import Score
from minigpt.model.size import parameters
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer
from minigpt.training import probe
from minigpt.training.plan import Plan
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Trainer
from minigpt.units import byte_size

RECORD = "minigpt.json"
CACHE = Path(".cache") / "corpus"  # of tokenized text, beside the output folder and shared by the runs there
UNCLEARED = "uncleared"  # in the record as long as something of an earlier run may lie in the folder

State = tuple[dict[str, Tensor], dict[str, Any]]


class Reporter(Protocol):
    """Who is told what was read and chosen, before training begins."""

    def fact(self, label: str, text: str) -> None: ...

    def warning(self, message: str) -> None: ...

    def working(self, what: str, done: int, total: int) -> None: ...


@dataclass(kw_only=True)
class Run:
    """A run that is ready to train; `final_score` scores a model on the held-out part once more, on all of it that can
    be afforded, and is None where nothing is held out.
    """

    trainer: Trainer
    tokenizer: Tokenizer
    plan: Plan
    record: dict[str, Any]
    final_score: Callable[[GPT], Score] | None


def recorded(folder: RunFolder, made_by: str) -> dict[str, Any] | None:
    """Return the record of a command's run in a folder, or None where there is none."""
    path = folder.path / RECORD
    record = read_json(path) if path.is_file() else {}
    return record if record.get("made_by") == made_by else None


@contextmanager
def understanding(folder: RunFolder) -> Iterator[None]:
    """Turn a record that lacks something, or holds something else, into one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(
            f"{folder.path / RECORD} is not the record of a run that can be continued ({error}); "
            "start again with --overwrite"
        ) from error


def new_record(made_by: str, plan: Plan, device: torch.device, more: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that says how a model was made, and that resuming reads."""
    return {
        "minigpt": __version__,
        "made_by": made_by,
        **more,
        "plan": {
            "model": asdict(plan.model),
            "train": asdict(plan.train),
            "seconds": plan.seconds,
            "validation_tokens": plan.validation_tokens,
            "why": plan.why,
        },
        "device": device.type,
    }


def recorded_plan(record: Mapping[str, Any], saved: Mapping[str, Any], folder: RunFolder) -> Plan:
    """Return the plan of a run, with the settings that its state was saved under."""
    where = folder.path / RECORD
    try:
        train = from_mapping(TrainConfig, saved["config"], str(folder.state_path))
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(
            f"{folder.state_path} is not the state of a run that can be continued ({error}); "
            "start again with --overwrite"
        ) from error
    with understanding(folder):
        return Plan(
            model=from_mapping(ModelConfig, record["plan"]["model"], str(where)),
            train=train,
            seconds=record["plan"]["seconds"],
            validation_tokens=record["plan"]["validation_tokens"],
            why=record["plan"]["why"],
        )


def claim(folder: RunFolder, record: dict[str, Any], describe: Callable[[], None], *, keep_text: bool) -> None:
    """Make the folder this run's: remove what an earlier one left, then let `describe` write all but the weights.

    The record comes first: from there on the run can be begun again, whenever it is killed.
    """
    write_json(folder.path / RECORD, record | {UNCLEARED: True})
    folder.clear(keep_text=keep_text)
    describe()


def saved_state(folder: RunFolder, record: Mapping[str, Any]) -> State | None:
    """Return what a recorded run saved, or None when it never got to its first save."""
    return None if UNCLEARED in record else folder.load_state()


def take_up(run: Run, folder: RunFolder, state: State, report: Reporter) -> None:
    """Put a run where it was saved, and say so."""
    for message in run.trainer.restore(*state):
        report.warning(message)
    progress = run.trainer.progress
    report.fact("resume", f"step {progress.step:,} of {progress.total_steps:,}, saved in {folder.state_path.parent}")


def describe(plan: Plan, device: torch.device, need: int, report: Reporter) -> None:
    """Say what is trained, on what, for how long, and in how much memory (`need` bytes)."""
    model, train = plan.model, plan.train
    report.fact(
        "model",
        f"{model.architecture}, {model.num_hidden_layers} layers x {model.hidden_size}, "
        f"{parameters(model) / 1e6:.2g}M parameters, context {model.max_position_embeddings} ({plan.why['model']})",
    )
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count != 1 else ''}" if device.type == "cpu" else ""
    report.fact("device", f"{device}{threads}, {train.compute_dtype}")
    report.fact("plan", plan.why["plan"])
    rows = "" if train.micro_batch_size == train.batch_size else f", micro-batches of {train.micro_batch_size}"
    report.fact("memory", f"about {byte_size(need)} of {byte_size(probe.total_memory(device))}{rows}")


def check_source(same: bool, named: str, begun: str) -> None:
    """Refuse to resume with another source than a run began with."""
    if not same:
        raise ConfigError(
            f"this run was begun with {begun}, not {named}; leave the source out to continue it, "
            "or write elsewhere with -o"
        )


def check_said(before: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Refuse to resume with other settings, if said, than the run began with."""
    for name, value in said.items():
        if before.get(name) != value:
            then = f"{name} {before[name]}" if before.get(name) is not None else f"no {name}"
            raise ConfigError(
                f"this run was begun with {then}, not {value}; leave it out to continue as it was, "
                "or write elsewhere with -o"
            )


def finish(run: Run, folder: RunFolder, score: Score | None, more: Mapping[str, Any]) -> None:
    """Add the result to the record in the folder, and write the model card."""
    progress = run.trainer.progress
    result = {
        "steps": progress.step,
        "best_step": progress.best_step,
        "seconds": round(progress.elapsed, 1),
        "trained_tokens": progress.step * run.plan.train.batch_size * run.plan.train.context,
        "bits_per_byte": None if score is None else score.bits_per_byte,
        "held_out_loss": None if score is None else score.loss,
    }
    record = run.record | {"result": result | dict(more)}
    write_json(folder.path / RECORD, record)
    write_card(folder.path, run.plan.model, record)
