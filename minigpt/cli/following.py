"""The part of every process but the first in a run: to train along, in silence."""

from __future__ import annotations

from pathlib import Path

from minigpt.cli.signals import stop_request
from minigpt.training import finetune, pretrain, runs
from minigpt.training.distributed import Group
from minigpt.training.run_folder import RunFolder


def follow(ranks: Group) -> int:
    """Open the run that the first rank announces and train to its end; return the exit status."""
    import torch

    message = ranks.listen()
    folder = RunFolder(Path(message["folder"]), writes=False)
    command = {pretrain.MADE_BY: pretrain, finetune.MADE_BY: finetune}[message["made_by"]]
    record = command.recorded(folder)
    assert record is not None
    state = folder.load_state() if message["resumed"] else None
    run = command.resume(folder, record, state, ranks.own(torch.device(message["device"])), runs.Silent(), ranks)
    with stop_request() as stop:
        for _ in run.trainer.run(stop):
            pass
    return stop.exit_status if run.trainer.stopped else 0
