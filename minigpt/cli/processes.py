"""One command in several processes: which of them this is, as torchrun says it, and how `--gpus` starts them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from minigpt.cli import console
from minigpt.errors import ConfigError, UsageError

SECONDS_TO_SAVE = 600  # after Ctrl-C; torchrun's own patience is 30

GpusOption = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="Train on so many GPUs of this machine, a process on each.", show_default=False),
]
ShardOption = Annotated[
    bool,
    typer.Option("--shard", help="Share weights and optimizer out over the processes instead of a copy on each."),
]


def check_shared(*, gpus: int | None, shard: bool) -> None:
    """Refuse options for several processes where there is one, or where there are several already: a UsageError."""
    if gpus is not None and "WORLD_SIZE" in os.environ:
        raise UsageError("--gpus starts the processes that torchrun has started already; leave it out")
    if shard and (gpus or console.processes()) == 1:
        raise UsageError("--shard shares a model out over several processes; start them with --gpus N or torchrun")


def start(arguments: Sequence[str], count: int, device: str | None) -> int:
    """Run this command line in `count` processes by torchrun's own launcher; return the exit status."""
    _check_devices(count, device)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    logging.disable(logging.ERROR)  # of the launcher: what failed is said by the process it failed in
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = run  # has no types
    options = ["--standalone", f"--nproc-per-node={count}", f"--shutdown-timeout={SECONDS_TO_SAVE}"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "minigpt", *_without_gpus(arguments)]))
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        console.error(f"process {rank} was ended by {name}; continue what was saved with the same line and --resume")
        return 1
    return 0


def _check_devices(count: int, device: str | None) -> None:
    import torch

    there = torch.cuda.device_count()
    if device is not None and device.startswith("cuda:"):
        raise ConfigError(f"--device {device} is one GPU, for --gpus {count}; say --device cuda or leave it out")
    if device in (None, "cuda") and there < count:
        found = f"{there} GPUs" if there != 1 else "one GPU"
        raise ConfigError(f"--gpus {count}: this machine has {found if there else 'none'}; give fewer, or --device cpu")


def _without_gpus(arguments: Sequence[str]) -> list[str]:
    """Leave --gpus N out of a command line."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--gpus":
            next(words, None)
        elif not word.startswith("--gpus="):
            kept.append(word)
    return kept


def reports_errors() -> bool:
    """Whether an error of this process is to be shown.

    Before the processes have met, all of a machine make the same mistake, and one says so; after that each has its own.
    """
    torch = sys.modules.get("torch")
    met = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return met or os.environ.get("LOCAL_RANK", "0") == "0"
