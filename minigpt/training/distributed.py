"""One run in several processes: who takes part, what all agree on, and how torch spreads the model over them.

Processes come from torchrun. Each holds a replica of the model (`DistributedDataParallel`, Li et al. 2020) or a share
of it (`fully_shard`, FSDP2; Zhao et al. 2023), and takes its micro-batches of the one batch that all of them know.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt.checkpoint.weights import assign_weights
from minigpt.errors import ConfigError, MinigptError, TrainingError
from minigpt.model.transformer import GPT
from minigpt.training.batches import AnyBatch

PATIENCE = timedelta(days=7)  # of those that wait for the first rank, which reads, tokenizes, plans and saves

T = TypeVar("T")
Pass = Callable[..., Any]  # calls a function with the model, and what else it is given


def launch() -> str | None:
    """Name the launch of torchrun that started this process, the same after a restart; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{socket.gethostname()}:{os.getppid()}" if name == "none" else name


class Ranks:
    """The processes of a run: here a single one, so that nothing is wrapped and nothing exchanged."""

    rank, count, local_count = 0, 1, 1
    shard = False

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and talks."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        """How many processes a model is cut over."""
        return self.count if self.shard else 1

    def own(self, device: torch.device) -> torch.device:
        """Return the device of this process, where all use that kind."""
        return device

    def announce(self, message: Mapping[str, Any]) -> None:
        """Tell the others what is to be trained; they wait for it."""

    def spread(self, model: GPT, *, compile: bool) -> Pass:
        """Spread a model over the processes; every forward pass goes through what is returned."""
        return lambda work, *arguments: work(model, *arguments)

    def pass_rows(self, batch_rows: int, rows: int) -> int:
        """How many rows a micro-batch has, where it may have `rows` of a step's `batch_rows`."""
        return min(rows, math.ceil(batch_rows / self.count))

    def passes(self, batch: AnyBatch, rows: int) -> Iterator[tuple[AnyBatch, float]]:
        """Yield this process's micro-batches of at most `rows` rows, and how often each counts in the mean over all."""
        for part in batch.split(rows):
            yield part, 1.0

    def quiet(self) -> contextlib.AbstractContextManager[object]:
        """Keep gradients to this process."""
        return contextlib.nullcontext()

    def mean(self, value: Tensor) -> Tensor:
        """Average a number over the processes."""
        return value

    def agree(self, *wishes: bool) -> tuple[bool, ...]:
        """Return for each wish whether any process has it."""
        return wishes

    def from_first(self, value: T) -> T:
        """Return the first rank's value, however long it takes."""
        return value

    def common(self, message: str) -> BaseException:
        """Return what ends a run for a reason that all processes have: the first one says it."""
        return TrainingError(message) if self.first else SystemExit(1)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in full on the first rank, and nothing elsewhere."""
        return tensors

    def whole_model(self, model: GPT) -> GPT | None:
        """Return the model in full on the first rank, and None elsewhere."""
        return model

    def seed(self, seed: int, step: int) -> None:
        """Begin a random stream that only this process has in this step, for dropout."""


ALONE = Ranks()


class Together(nn.Module):
    """A model whose forward pass is any function of it, so that torch wraps the pass, whatever it computes."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(self.model, *arguments)


class Group(Ranks):
    """Several processes that torchrun started; all of them make each of these calls, in the same order."""

    def __init__(self, *, shard: bool) -> None:
        self.rank, self.count, self.shard = dist.get_rank(), dist.get_world_size(), shard
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.announced = False
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._spread: nn.Module | None = None

    def own(self, device: torch.device) -> torch.device:
        if device.type != "cuda":
            return device
        if device.index is not None:
            raise ConfigError(f"--device {device} is one GPU for {self.count} processes; say --device cuda")
        if self.local_rank >= (there := torch.cuda.device_count()):
            raise ConfigError(
                f"process {self.local_rank + 1} of {self.local_count} on this machine finds {there} GPUs; "
                "start one process a GPU, or add --device cpu"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def announce(self, message: Mapping[str, Any]) -> None:
        if self.first:
            self.announced = True
            self.from_first(message)

    def listen(self) -> Mapping[str, Any]:
        """Wait for what the first rank announces; where it gave up, leave with its status and without a word."""
        message = self.from_first(None)
        if not isinstance(message, Mapping):
            raise SystemExit(message)
        return message

    def give_up(self, status: int) -> None:
        """Let the others leave, where they still wait for what the first rank announces."""
        if self.first and not self.announced:
            self.from_first(status)

    def spread(self, model: GPT, *, compile: bool) -> Pass:
        together = Together(model)
        if self.shard:
            self._spread = _sharded(together)
        else:
            if compile:
                import torch._dynamo

                torch._dynamo.config.optimize_ddp = False  # which would cut blocks that are compiled one by one
            self._spread = nn.parallel.DistributedDataParallel(together, gradient_as_bucket_view=True)
        return self._spread

    def passes(self, batch: AnyBatch, rows: int) -> Iterator[tuple[AnyBatch, float]]:
        """Deal micro-batches out in turn; who gets none in the last round repeats one that does not count.

        Replicas add up their gradients in the last pass alone, shares in each, since none has room for all gradients.
        """
        parts = list(batch.split(self.pass_rows(len(batch.tokens), rows)))
        rounds = math.ceil(len(parts) / self.count)
        for number in range(rounds):
            place = number * self.count + self.rank
            with contextlib.nullcontext() if self.shard or number == rounds - 1 else self.quiet():
                yield parts[place % len(parts)], float(self.count if place < len(parts) else 0)

    def quiet(self) -> contextlib.AbstractContextManager[object]:
        assert isinstance(self._spread, nn.parallel.DistributedDataParallel)
        return self._spread.no_sync()

    def mean(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / self.count

    def agree(self, *wishes: bool) -> tuple[bool, ...]:
        told = torch.tensor(wishes, dtype=torch.uint8)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._control)
        return tuple(bool(wish) for wish in told.tolist())

    def from_first(self, value: T) -> T:
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self._control)
        return told[0]

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, tensor in tensors.items():
            gathered = whole_tensor(tensor)  # every rank takes part, one tensor at a time
            if self.first:
                kept[name] = gathered.cpu() if self.shard else gathered
        return kept

    def whole_model(self, model: GPT) -> GPT | None:
        if not self.shard:
            return model if self.first else None
        weights = self.whole({name: weight.detach() for name, weight in model.named_parameters()})
        if not self.first:
            return None
        with torch.device("meta"):
            copy = GPT(model.config)
        assign_weights(copy, weights)
        return copy

    def seed(self, seed: int, step: int) -> None:
        words = np.random.SeedSequence([seed, step, self.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(words[0]) >> 1)


def _sharded(together: Together) -> nn.Module:
    """Cut every parameter over all processes; a block's are gathered while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = together.model.lm_head.weight.device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in together.model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(together, mesh=mesh, reshard_after_forward=True)  # an evaluation leaves nothing uncut either
    return together


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that is cut over the processes; all of them call this. Any other is returned as it is."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def cut_like(whole: Tensor, pattern: Tensor) -> Tensor:
    """Cut a tensor that every process has as `pattern` is cut; nothing is exchanged."""
    if not hasattr(pattern, "placements"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(pattern, DTensor)
    mesh, placements = pattern.device_mesh, pattern.placements
    return distribute_tensor(whole.to(pattern.device), mesh, placements, src_data_rank=None)


@contextlib.contextmanager
def joined(device: str | None, *, shard: bool) -> Iterator[Ranks]:
    """Meet the other processes of this launch; one that was started without torchrun is `ALONE`.

    `device` is the one that was asked for. Where the first rank fails before it has announced anything, the others
    leave quietly; where a process is lost, the first rank's error says so.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"WORLD_SIZE is set but {missing[0]} is not; start several processes with torchrun")
    cuda = torch.cuda.is_available() and device != "cpu"
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        ranks = Group(shard=shard)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise TrainingError(f"the processes of this run could not meet ({reason}); start them anew") from error
    try:
        yield ranks
    except BaseException as error:
        if _lost(error):
            if not ranks.first:
                raise SystemExit(1) from None
            raise TrainingError("lost another process of this run; what it saved last can be continued") from error
        status = error.exit_status if isinstance(error, MinigptError) else 1
        with contextlib.suppress(RuntimeError):  # the others have gone
            ranks.give_up(status)
        raise
    dist.destroy_process_group()


def _lost(error: BaseException) -> bool:
    """Whether an error comes from a connection to a process that is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
