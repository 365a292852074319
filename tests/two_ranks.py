"""What two processes do together, for test_training_distributed.py: torchrun --nproc-per-node=2 two_ranks.py FOLDER."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from commands import TINY
from tiny_run import MODEL, TRAIN, make_trainer, resumed, run, steps_of
from torch import Tensor

from minigpt.config import ModelConfig, TrainConfig
from minigpt.model.kernels import Kernels
from minigpt.model.transformer import GPT
from minigpt.training import trainer as loop
from minigpt.training.batches import Batch
from minigpt.training.distributed import Group, Ranks, joined
from minigpt.training.objectives import NextToken
from minigpt.training.trainer import Evaluated, StepDone, Warned


@dataclass(frozen=True)
class Case:
    """One run, and how its micro-batches may be cut."""

    config: TrainConfig
    model: ModelConfig = MODEL
    shard: bool = False
    more: dict[str, Any] = field(default_factory=dict)


OPTIONS = (*TINY, "--steps", "6", "--set", "train.eval_every=3")  # of a run from the command line
STEPS = replace(TRAIN, total_steps=6, eval_every=3)
CASES = {
    "replicas": Case(STEPS),
    "shares": Case(STEPS, shard=True),
    "replicas, adamw, uneven": Case(replace(STEPS, optimizer="adamw", batch_size=5, micro_batch_size=2)),
    "shares, adamw, uneven": Case(replace(STEPS, optimizer="adamw", batch_size=5, micro_batch_size=1), shard=True),
    "more ranks than rows": Case(replace(STEPS, batch_size=1, micro_batch_size=1)),
    "shares, float16, untied": Case(
        replace(STEPS, compute_dtype="float16"), replace(MODEL, tie_word_embeddings=False), shard=True
    ),
}


class Scarce(NextToken):
    """An objective for which the second rank has less memory."""

    def __init__(self, ranks: Ranks) -> None:
        self.most = 4 if ranks.first else 1

    def loss_sum(self, model: GPT, batch: Batch) -> Tensor:
        if len(batch.tokens) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().loss_sum(model, batch)


def tell(trainer: loop.Trainer, stop_at: int | None = None) -> dict[str, Any]:
    events = run(trainer, stop_at)
    return {
        "losses": [event.loss for event in steps_of(events, StepDone)],
        "scores": [event.score.value for event in steps_of(events, Evaluated)],
        "warnings": [event.message for event in steps_of(events, Warned)],
        "step": trainer.progress.step,
    }


def shared_cases(folder: Path, groups: dict[bool, Group]) -> dict[str, Any]:
    told = {}
    for name, case in CASES.items():
        ranks = groups[case.shard]
        told[name] = tell(make_trainer(folder / name, case.config, case.model, ranks=ranks))
    return told


def handed_over(folder: Path, groups: dict[bool, Group]) -> dict[str, Any]:
    """Runs that are begun by one number of ranks and continued by another."""
    told = {}
    for shard, ranks in groups.items():
        place = folder / f"begun by two, {shard}"
        # Only the second rank has seen the signal.
        told[place.name] = tell(make_trainer(place, STEPS, ranks=ranks), stop_at=None if ranks.first else 4)
        place = folder / f"begun by one, {shard}"
        if ranks.first:
            run(make_trainer(place, STEPS), stop_at=4)
        ranks.from_first(None)
        told[place.name] = tell(resumed(place, STEPS, ranks=ranks, moved=True))
    return told


def troubles(folder: Path, ranks: Group) -> dict[str, Any]:
    """Memory that is short on one rank, and a compiler that one rank lacks."""
    trainer = make_trainer(folder / "memory", STEPS, ranks=ranks)
    trainer.objective = Scarce(ranks)
    told = {"memory": tell(trainer)}
    real, broken = loop.compiled_kernels, lambda *arguments: (_ for _ in ()).throw(RuntimeError("no C compiler"))
    loop.compiled_kernels = lambda: Kernels(flex=True) if ranks.first else Kernels(block=broken)
    told["compiler"] = tell(make_trainer(folder / "compiler", replace(STEPS, compile=True), ranks=ranks))
    loop.compiled_kernels = real
    return told


def alike(ranks: Group, folder: Path) -> dict[str, Any]:
    """Dropout that differs between ranks, and is the same again after a restart."""
    model, told = replace(MODEL, dropout=0.2), {}
    drawn = []
    for _ in range(2):
        ranks.seed(5, 3)
        drawn.append(torch.rand(3).tolist())
    told["own"] = {"losses": drawn[0], "again": drawn[1], "others": ranks.from_first(drawn[0])}
    told["whole"] = tell(make_trainer(folder / "dropout whole", STEPS, model, ranks=ranks))
    run(make_trainer(folder / "dropout parts", STEPS, model, ranks=ranks), stop_at=2)
    told["parts"] = tell(resumed(folder / "dropout parts", STEPS, model, ranks=ranks))
    return told


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with joined("cpu", shard=False) as ranks:
        assert isinstance(ranks, Group)
        groups = {False: ranks, True: Group(shard=True)}
        told = {"cases": shared_cases(folder, groups), "handed": handed_over(folder, groups)}
        told |= {"troubles": troubles(folder, ranks), "dropout": alike(ranks, folder)}
        (folder / f"rank{ranks.rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
