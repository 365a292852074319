"""What every training command shares: a run that is ready, its record in the folder, and how it is taken up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from minigpt import __version__
from minigpt.checkpoint.card import write_card
from minigpt.checkpoint.files import read_json, write_json
from minigpt.config import ModelConfig, TrainConfig, from_mapping
from minigpt.errors import ConfigError, ModelFolderError
from minigpt.model.size import parameters
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer
from minigpt.training import distributed, probe
from minigpt.training.distributed import ALONE, Ranks
from minigpt.training.plan import Machine, Plan
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Trainer, Validation
from minigpt.units import byte_size

RECORD = "minigpt.json"
CACHE = Path(".cache") / "corpus"  # of tokenized text, beside the output folder and shared by the runs there
SCORED_AT_LEAST = 1 << 16  # tokens in an evaluation, if the plan has as many
UNCLEARED = "uncleared"  # in the record as long as something of an earlier run may lie in the folder

State = tuple[dict[str, Tensor], dict[str, Any]]


class Reporter(Protocol):
    """Who is told what was read and chosen, before training begins; work is counted in bytes where no unit is given."""

    def fact(self, label: str, text: str) -> None: ...

    def warning(self, message: str) -> None: ...

    def working(self, what: str, done: int, total: int, unit: str = "") -> None: ...


class Watcher(Protocol):
    """Who looks at every step of a run: `see` takes its loss and figures and returns what there is to warn of, `text`
    says in a line how the last steps were.
    """

    def see(self, row: Mapping[str, float]) -> list[str]: ...

    def text(self) -> str: ...


@dataclass(kw_only=True)
class Run:
    """A run that is ready to train; `final_score` scores a model on the held-out part once more, on all of it that can
    be afforded, and is None where nothing is held out.
    """

    trainer: Trainer
    tokenizer: Tokenizer
    plan: Plan
    record: dict[str, Any]
    final_score: Callable[[GPT], Validation] | None
    watch: Watcher | None = None


class Silent:
    """A reporter for processes beside the first, which has said it all."""

    def fact(self, label: str, text: str) -> None: ...

    def warning(self, message: str) -> None: ...

    def working(self, what: str, done: int, total: int, unit: str = "") -> None: ...


def begun_by_this_launch(folder: RunFolder) -> bool:
    """Whether the run in a folder was begun by the launch of torchrun that this process is of: it was started again."""
    launch, path = distributed.launch(), folder.path / RECORD
    return launch is not None and path.is_file() and read_json(path).get("launch") == launch


def announce(ranks: Ranks, made_by: str, folder: RunFolder, model: GPT, *, resumed: bool) -> None:
    """Tell the other processes which run to open, and whether from its saved state."""
    device = model.lm_head.weight.device.type
    ranks.announce({"made_by": made_by, "folder": str(folder.path.absolute()), "device": device, "resumed": resumed})


def shared_machine(machine: Machine, ranks: Ranks) -> Machine:
    """What all processes are together, and what memory one of them may take."""
    memory = machine.free_memory // (ranks.local_count if machine.device_type == "cpu" else 1)
    return replace(machine, flops=machine.flops * ranks.count, free_memory=memory, shards=ranks.shards)


def shared_plan(plan: Plan, ranks: Ranks) -> Plan:
    """Make evaluations as much smaller as more processes make training faster: each of them scores all of the text.

    What a small run scores stays the same on any number of them.
    """
    tokens = plan.validation_tokens
    return replace(plan, validation_tokens=max(min(tokens, SCORED_AT_LEAST), tokens // ranks.count))


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
    launch = distributed.launch()
    return {
        "minigpt": __version__,
        "made_by": made_by,
        **({} if launch is None else {"launch": launch}),
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


def recorded_plan(record: Mapping[str, Any], saved: Mapping[str, Any] | None, folder: RunFolder) -> Plan:
    """Return the plan of a run, with the settings that its state was saved under, if there is one."""
    where = folder.path / RECORD
    try:
        settings = record["plan"]["train"] if saved is None else saved["config"]
        train = from_mapping(TrainConfig, settings, str(where if saved is None else folder.state_path))
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


def describe(plan: Plan, device: torch.device, need: int, report: Reporter, ranks: Ranks = ALONE) -> None:
    """Say what is trained, on what, for how long, and in how much memory.

    To the `need` bytes of training comes, on a CPU, what the program holds already.
    """
    model, train = plan.model, plan.train
    report.fact(
        "model",
        f"{model.architecture}, {model.num_hidden_layers} layers x {model.hidden_size}, "
        f"{parameters(model) / 1e6:.2g}M parameters, context {model.max_position_embeddings} ({plan.why['model']})",
    )
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count != 1 else ''}" if device.type == "cpu" else ""
    report.fact("device", f"{device}{threads}, {train.compute_dtype}")
    if ranks.count > 1:
        held = "the model shared out over them" if ranks.shard else "a copy of the model on each"
        report.fact("processes", f"{ranks.count}, {held}")
    report.fact("plan", plan.why["plan"])
    micro = ranks.pass_rows(train.batch_size, train.micro_batch_size)
    rows = "" if micro == train.batch_size else f", micro-batches of {micro}"
    each = " each" if ranks.count > 1 else ""
    need += probe.used_memory() if device.type == "cpu" else 0
    report.fact("memory", f"about {byte_size(need)}{each} of {byte_size(probe.total_memory(device))}{rows}")


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


def finish(run: Run, folder: RunFolder, score: Validation | None, more: Mapping[str, Any]) -> None:
    """Add the result to the record in the folder, and write the model card."""
    progress = run.trainer.progress
    result = {
        "steps": progress.step,
        "best_step": progress.best_step,
        "seconds": round(progress.elapsed, 1),
        "trained_tokens": progress.step * run.plan.train.batch_size * run.plan.train.context,
    }
    record = run.record | {"result": result | ({} if score is None else score.row()) | dict(more)}
    write_json(folder.path / RECORD, record)
    write_card(folder.path, run.plan.model, record)
