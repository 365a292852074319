"""The one training loop. It prints nothing: it yields events, and saves itself so that resuming is exact."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minigpt.checkpoint.folder import save_weights
from minigpt.config import TrainConfig
from minigpt.errors import TrainingError
from minigpt.evaluation.bits import Score
from minigpt.model.kernels import Kernels, compiled_kernels
from minigpt.model.transformer import GPT
from minigpt.training.batches import Batch
from minigpt.training.objectives import Objective
from minigpt.training.optim import (
    learning_rate_factor,
    make_optimizers,
    optimizer_tensors,
    restore_optimizers,
    trained_parameters,
)
from minigpt.training.probe import TOO_LARGE
from minigpt.training.run_folder import RunFolder

SAVE_SECONDS = 60.0  # at least this long between two saves that no evaluation asks for
SAVE_SHARE = 20.0  # and this many times what the last save took


class BatchSource(Protocol):
    """Batches as a pure function of the step, so that a position in the data is a number."""

    def at(self, step: int) -> Batch: ...


@dataclass(frozen=True)
class StepDone:
    """One optimizer step; the loss is per token, in nats."""

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    elapsed: float


@dataclass(frozen=True)
class Evaluated:
    """Held-out text was scored after a step."""

    step: int
    score: Score


@dataclass(frozen=True)
class Warned:
    """Something a person should know, in one line."""

    message: str


Event = StepDone | Evaluated | Warned


@dataclass
class Progress:
    """Where a run stands: everything about it that is no tensor."""

    step: int = 0
    total_steps: int = 0
    micro_batch_size: int = 0
    elapsed: float = 0.0
    best_step: int | None = None
    best_bits_per_byte: float | None = None
    worse: int = 0  # evaluations since the best one


class Trainer:
    """Train `model` on `batches` by `objective`, evaluating with `validate` and saving into `folder`.

    With `seconds` the plan is a time: the number of steps is corrected by the clock at every evaluation. Without, a run
    stopped anywhere and resumed equals the uninterrupted one bit for bit on a CPU.

    Only parameters that require a gradient are trained and saved as state. `save` writes the best model at the top of
    the folder; with `score_first` the model is scored before the first step too, and may stay the best.
    """

    def __init__(
        self,
        model: GPT,
        objective: Objective,
        batches: BatchSource,
        config: TrainConfig,
        folder: RunFolder,
        *,
        validate: Callable[[GPT], Score] | None,
        seconds: float | None = None,
        save: Callable[[Path, GPT], None] = save_weights,
        score_first: bool = False,
    ) -> None:
        self.model, self.objective, self.batches = model, objective, batches
        self.config, self.folder, self.validate, self.seconds = config, folder, validate, seconds
        self.save, self.score_first = save, score_first
        self.device = model.lm_head.weight.device
        self.optimizers = make_optimizers(model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.compute_dtype == "float16")
        self.progress = Progress(total_steps=config.total_steps, micro_batch_size=config.micro_batch_size)
        self.ended_early = False
        self._began = 0.0
        self._saved_at, self._save_took = 0.0, 0.0
        self._ahead: tuple[int, Batch] | None = None  # the next step's batch, made while a GPU works on this one's
        if config.compile:
            model.model.kernels = compiled_kernels()
        torch.manual_seed(config.seed)  # for dropout

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Train to the end of the plan, or until `stop()` is true after a step; save at the end either way."""
        progress = self.progress
        self.model.train()
        self._began = time.monotonic() - progress.elapsed
        self._first_step = progress.step
        if self.score_first and progress.step == 0 and progress.best_step is None:
            yield from self._evaluate()
        self._save_state()
        while progress.step < progress.total_steps:
            yield from self._step()
            last = progress.step == progress.total_steps
            if last or progress.step % self.config.eval_every == 0:
                yield from self._evaluate()
                self._correct_plan()
                if self.out_of_patience and not last:
                    progress.total_steps, self.ended_early = progress.step, True
                self._save_state()
            elif time.monotonic() - self._saved_at > max(SAVE_SECONDS, SAVE_SHARE * self._save_took):
                self._save_state()
            if stop() and progress.step < progress.total_steps:
                self._save_state()
                break
        if progress.best_step is None:
            self.save(self.folder.path, self.model)

    @property
    def out_of_patience(self) -> bool:
        """Whether so many evaluations in a row were no better than the best that the run ends here."""
        return 0 < self.config.patience <= self.progress.worse

    def _step(self) -> Iterator[Event]:
        """Take one optimizer step and move on; the step's loss is summed over micro-batches and divided once."""
        progress, config, started = self.progress, self.config, time.monotonic()
        factor = learning_rate_factor(
            progress.step,
            warmup=config.warmup_steps,
            total=progress.total_steps,
            schedule=config.schedule,
            final=config.final_learning_rate_ratio,
        )
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * factor * group.get("rate", 1.0)
        batch = self._batch()
        total = yield from self._gradients(batch)
        loss, norm = self._clip(total)
        self._update(loss, norm)
        progress.step += 1
        now = time.monotonic()
        progress.elapsed = now - self._began
        if not math.isfinite(norm):
            yield Warned(f"step {progress.step}: the gradient overflowed float16; skipped")
        rate = batch.tokens.numel() / max(now - started, 1e-9)
        event = StepDone(
            progress.step, progress.total_steps, loss, config.learning_rate * factor, norm, rate, progress.elapsed
        )
        row = {key: value for key, value in asdict(event).items() if key != "total_steps"}
        self.folder.append_metrics(row if math.isfinite(norm) else row | {"grad_norm": None})  # JSON has no infinity
        yield event

    def _batch(self) -> Batch:
        step = self.progress.step
        return self._ahead[1] if self._ahead is not None and self._ahead[0] == step else self.batches.at(step)

    def _gradients(self, batch: Batch) -> Generator[Event, None, Tensor]:
        """Accumulate the step's gradients and return its loss.

        Out of memory on a GPU halves the micro-batch and begins the step again; so does a compiler that fails,
        without it.
        """
        while True:
            try:
                return self._accumulate(batch)
            except torch.OutOfMemoryError:
                small = self.progress.micro_batch_size // 2
                if small < 1:
                    raise TrainingError(TOO_LARGE) from None
                problem = (
                    f"out of memory at a micro-batch of {self.progress.micro_batch_size}; went on with {small} "
                    "(same effective batch)"
                )
                self.progress.micro_batch_size = small
            except (RuntimeError, ImportError, OSError) as error:  # a compiler that is missing shows in any of these
                if self.model.model.kernels == Kernels() or self.progress.step > self._first_step:
                    raise
                problem = f"torch.compile failed ({str(error).splitlines()[0][:100]}); went on without it"
                self.model.model.kernels = Kernels()
            # Outside the except clause, so that the failed step's tensors are free before the next try.
            yield Warned(problem)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _accumulate(self, batch: Batch) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        weight, total = self.objective.weight(batch), torch.zeros((), device=self.device)
        for micro in batch.split(self.progress.micro_batch_size):
            with self._autocast():
                loss = self.objective.loss_sum(self.model, micro.to(self.device)) / weight
            torch.autograd.backward(self.scaler.scale(loss))
            total += loss.detach()
        return total

    def _clip(self, total: Tensor) -> tuple[float, float]:
        """Clip the gradients as a whole; return the step's loss, and the gradient's norm before that.

        The next batch is made while a GPU is still at work, which must be done before these two numbers can be read.
        """
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        following = self.progress.step + 1
        if following < self.progress.total_steps:
            self._ahead = (following, self.batches.at(following))
        both: list[float] = torch.stack((total, norm.to(total))).tolist()
        return both[0], both[1]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.compute_dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.config.compute_dtype))

    def _update(self, loss: float, norm: float) -> None:
        """Apply the gradients; one that is no number ends the run before it spoils the weights.

        Under float16 it may only mean that the scale is too large: no optimizer takes the step, and the scale shrinks.
        """
        broken = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(norm) else None
        if broken == "loss" or (broken and not (self.scaler.is_enabled() and self.scaler.get_scale() >= 1.0)):
            value = "NaN" if math.isnan(loss if broken == "loss" else norm) else "infinite"
            raise TrainingError(
                f"the {broken} became {value} at step {self.progress.step + 1}; the last good state is in "
                f"{self.folder.state_path.parent} (step {self._saved_step}); try a lower --lr"
            )
        if not broken:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        self.scaler.update()

    def _evaluate(self) -> Iterator[Event]:
        """Score held-out text and keep the model at the top of the folder if it is the best so far."""
        progress = self.progress
        if self.validate is None:
            self.save(self.folder.path, self.model)
            progress.best_step = progress.step
            return
        with self._autocast():  # the plan counts on the speed of training
            score = self.validate(self.model)
        finite, best = math.isfinite(score.nats), progress.best_bits_per_byte
        better = finite and (best is None or score.bits_per_byte < best)
        progress.worse = 0 if better else progress.worse + 1
        if better:
            progress.best_step, progress.best_bits_per_byte = progress.step, score.bits_per_byte
            self.save(self.folder.path, self.model)
        row = {"held_out_loss": score.loss, "bits_per_byte": score.bits_per_byte}
        self.folder.append_metrics({"step": progress.step} | (row if finite else dict.fromkeys(row)))
        yield Evaluated(progress.step, score)

    def _correct_plan(self) -> None:
        """Fit the number of steps to the time that is left, for a plan made in minutes."""
        progress = self.progress
        if self.seconds is None or progress.step >= progress.total_steps:
            return
        progress.elapsed = time.monotonic() - self._began
        left = max(0.0, self.seconds - progress.elapsed)
        progress.total_steps = progress.step + int(left / (progress.elapsed / progress.step))

    def _save_state(self) -> None:
        started = time.monotonic()
        self.progress.elapsed = started - self._began
        tensors: dict[str, Tensor] = {**self._weights()}
        tensors |= optimizer_tensors(self.model, self.optimizers)
        tensors |= _random_states(self.device)
        record = {
            "progress": asdict(self.progress),
            "config": asdict(self.config),
            "seconds": self.seconds,
            "scaler": self.scaler.state_dict(),
            "environment": environment(self.device),
        }
        self.folder.flush_metrics()
        self.folder.save_state(tensors, record)
        self._saved_step, self._saved_at = self.progress.step, time.monotonic()
        self._save_took = self._saved_at - started

    def _weights(self) -> dict[str, nn.Parameter]:
        return {f"model.{name}": weight for name, weight in trained_parameters(self.model).items()}

    def restore(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> list[str]:
        """Take up a saved state; returns what differs from the machine that saved it.

        A state of another model, or one that lacks something, is a TrainingError.
        """
        weights = self._weights()
        if any(name not in tensors or tensors[name].shape != weight.shape for name, weight in weights.items()):
            raise TrainingError(f"{self.folder.state_path} does not fit this run's model; start again with --overwrite")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[name])
        try:
            self._restore_rest(tensors, record)
            now, then = environment(self.device), dict(record["environment"])
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(
                f"{self.folder.state_path} does not fit this run's state; start again with --overwrite"
            ) from error
        self.folder.rewind_metrics(self.progress.step)
        return [
            f"{name} was {then.get(name)} when this run was saved and is {value} now; it will not be bit-equal"
            for name, value in now.items()
            if then.get(name) != value
        ]

    def _restore_rest(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Take up all but the weights: progress, optimizers, random states and the scale of float16."""
        self.progress = replace(Progress(), **record["progress"])
        restore_optimizers(self.model, self.optimizers, tensors)
        begun = any(optimizer.state for optimizer in self.optimizers)
        if self.progress.step > 0 and not begun and not self.scaler.is_enabled():  # which may have skipped every step
            raise ValueError("no state of an optimizer after the first step")
        self.scaler.load_state_dict(record["scaler"])
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)
        if self.device.type == "mps" and "random.mps" in tensors:
            torch.mps.set_rng_state(tensors["random.mps"])


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random streams that dropout draws from."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        states["random.mps"] = torch.mps.get_rng_state()
    return states


def environment(device: torch.device) -> dict[str, Any]:
    """What bit-equality depends on."""
    return {
        "device": device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
