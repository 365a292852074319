"""The one training loop. It prints nothing: it yields events, and saves itself so that resuming is exact."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.checkpoint.folder import save_weights
from minigpt.config import TrainConfig
from minigpt.errors import MinigptError, TrainingError
from minigpt.model.kernels import Kernels, compiled_kernels
from minigpt.model.transformer import GPT
from minigpt.training.allocator import join_freed_memory, keep_freed_memory
from minigpt.training.batches import Ahead, AnyBatch, BatchSource, LiveSource, StepBatch
from minigpt.training.distributed import ALONE, Ranks, cut_like, whole_tensor
from minigpt.training.events import Evaluated as Evaluated
from minigpt.training.events import Event as Event
from minigpt.training.events import Progress as Progress
from minigpt.training.events import StepDone as StepDone
from minigpt.training.events import Validation as Validation
from minigpt.training.events import Warned as Warned
from minigpt.training.objectives import Objective
from minigpt.training.optim import (
    clear_gradients,
    learning_rate_factor,
    make_optimizers,
    optimizer_tensors,
    restore_optimizers,
    trained_parameters,
)
from minigpt.training.probe import TOO_LARGE
from minigpt.training.run_folder import RunFolder
from minigpt.training.state import changes, environment, random_states, restore_random_states

BATCHES = "batches."  # what names in the state begin with that belong to a source of batches
SAVE_SECONDS = 60.0  # at least this long between two saves that no evaluation asks for
SAVE_SHARE = 20.0  # and this many times what the last save took


class Trainer:
    """Train `model` on `batches` by `objective`, evaluating with `validate` and saving into `folder`.

    With `seconds` the plan is a time: the number of steps is corrected by the clock at every evaluation. Without, a run
    stopped anywhere and resumed equals the uninterrupted one bit for bit on a CPU.

    Only parameters that require a gradient are trained and saved as state. `save` writes the best model at the top of
    the folder; with `score_first` the model is scored before the first step too, and may stay the best.

    With `ranks` all of them run the same loop on the same global batches: the first decides, writes and is listened to.
    """

    def __init__(
        self,
        model: GPT,
        objective: Objective[AnyBatch],
        batches: BatchSource[AnyBatch],
        config: TrainConfig,
        folder: RunFolder,
        *,
        validate: Callable[[GPT], Validation] | None,
        seconds: float | None = None,
        save: Callable[[Path, GPT], None] = save_weights,
        score_first: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model: GPT = model
        self.objective: Objective[Any] = objective
        self.batches: BatchSource[Any] = batches
        self.config, self.folder, self.validate, self.seconds = config, folder, validate, seconds
        self.save, self.score_first, self.ranks = save, score_first, ranks
        self.device = model.lm_head.weight.device
        self.compute = ranks.spread(model, compile=config.compile)  # may put other parameters into the model
        self.optimizers = make_optimizers(model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.compute_dtype == "float16")
        self.progress = Progress(total_steps=config.total_steps, micro_batch_size=config.micro_batch_size)
        self.ended_early = self.stopped = False
        self._began = 0.0
        self._saved_at, self._save_took = 0.0, 0.0
        if config.compile:
            model.model.kernels = compiled_kernels()
        torch.manual_seed(config.seed)  # for dropout

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Train to the end of the plan, or until `stop()` is true after a step; save at the end either way."""
        progress = self.progress
        self.model.train()
        self._began = time.monotonic() - progress.elapsed
        self._first_step = progress.step
        if self.device.type == "cpu":
            keep_freed_memory()
        with Ahead(self.batches) as self._ahead:
            if self.score_first and progress.step == 0 and progress.best_step is None:
                yield from self._evaluate()
            self._save_state()
            while progress.step < progress.total_steps and not self.stopped:
                yield from self._step()
                last = progress.step == progress.total_steps
                if last or progress.step % self.config.eval_every == 0:
                    yield from self._evaluate()
                    self._correct_plan()
                    if self.out_of_patience and not last:
                        progress.total_steps, self.ended_early = progress.step, True
                    self._save_state()
                due, stopped = self.ranks.agree(self._save_is_due(), stop())
                self.stopped = stopped and progress.step < progress.total_steps
                if due or self.stopped:
                    self._save_state()
        if progress.best_step is None:
            self._keep_model()

    def _save_is_due(self) -> bool:
        pause = max(SAVE_SECONDS, SAVE_SHARE * self._save_took)
        return self.ranks.first and time.monotonic() - self._saved_at > pause

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
        waited = time.monotonic() - started
        total = yield from self._gradients(batch)
        loss, norm, figures = self._clip(total)
        self._update(loss, norm)
        progress.step += 1
        now = time.monotonic()
        progress.elapsed = now - self._began
        if not math.isfinite(norm):
            yield Warned(f"step {progress.step}: the gradient overflowed float16; skipped")
        seconds = max(now - started, 1e-9)
        event = StepDone(
            step=progress.step,
            total_steps=progress.total_steps,
            loss=loss,
            learning_rate=config.learning_rate * factor,
            grad_norm=norm,
            tokens_per_second=batch.tokens.numel() / seconds,
            elapsed=progress.elapsed,
            waited=waited / seconds,
            figures=figures,
        )
        row = {key: value for key, value in asdict(event).items() if key not in ("total_steps", "figures")} | figures
        self.folder.append_metrics(_finite(row))
        yield event

    def _batch(self) -> StepBatch:
        step = self.progress.step
        try:
            batch: StepBatch = self._ahead.at(step, more=step + 1 < self.progress.total_steps)
        except MinigptError:
            if self.ranks is ALONE:
                self._save_state()  # whatever keeps the next batch from being made, the steps before it are kept
            raise
        return batch

    def _gradients(self, batch: StepBatch) -> Generator[Event, None, Tensor]:
        """Accumulate the step's gradients and return its loss.

        Out of memory on a GPU halves the micro-batch and begins the step again; so does a compiler that fails,
        without it. Several ranks can only do so where none waits for another: before their first step.
        """
        if self.ranks.count > 1 and not self.ranks.shard and self.progress.step == self._first_step:
            yield from self._rehearse(batch)
        while True:
            try:
                return self._accumulate(batch)
            except (RuntimeError, ImportError, OSError) as error:
                if self.ranks.count > 1 or not self._can_give_way(error):
                    raise
                memory, reason = isinstance(error, torch.OutOfMemoryError), _first_words(error)
            # Outside the except clause, so that the failed step's tensors are free before the next try.
            yield Warned(self._give_way(memory, reason))

    def _rehearse(self, batch: StepBatch) -> Iterator[Event]:
        """Try one micro-batch on each rank by itself, until all of them can compute it."""
        progress = self.progress
        progress.micro_batch_size = self.ranks.pass_rows(len(batch.tokens), progress.micro_batch_size)
        while True:
            memory = broken = False
            reason = "on another rank"
            try:
                with self.ranks.quiet():
                    self._backward(next(batch.split(progress.micro_batch_size)), self.objective.weight(batch), 1.0)
            except (RuntimeError, ImportError, OSError) as error:
                memory, reason = isinstance(error, torch.OutOfMemoryError), _first_words(error)
                broken = not memory and self._can_give_way(error)
                if not (memory or broken):
                    raise
            memory, broken = self.ranks.agree(memory, broken)
            if not (memory or broken):
                return
            yield Warned(self._give_way(memory, reason))

    def _can_give_way(self, error: Exception) -> bool:
        """Whether a step can be tried in another way: a compiler that is missing shows in any kind of error."""
        compiled = self.model.model.kernels != Kernels() and self.progress.step == self._first_step
        return isinstance(error, torch.OutOfMemoryError) or compiled

    def _give_way(self, memory: bool, reason: str) -> str:
        """Take a smaller micro-batch, or do without the compiler, and say so."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if not memory:
            self.model.model.kernels = Kernels()
            return f"torch.compile failed ({reason}); went on without it"
        rows = self.progress.micro_batch_size
        if rows < 2:
            raise self.ranks.common(TOO_LARGE)
        self.progress.micro_batch_size = rows // 2
        return f"out of memory at a micro-batch of {rows}; went on with {rows // 2} (same effective batch)"

    def _accumulate(self, batch: StepBatch) -> Tensor:
        on_cpu = self.device.type == "cpu"
        clear_gradients(self.optimizers, in_place=on_cpu and self.ranks is ALONE)
        self.ranks.seed(self.config.seed, self.progress.step)
        weight, total = self.objective.weight(batch), torch.zeros((), device=self.device)
        for micro, times in self.ranks.passes(batch, self.progress.micro_batch_size):
            if on_cpu:
                join_freed_memory()
            total += self._backward(micro, weight, times)
        return self.ranks.mean(total)

    def _backward(self, micro: StepBatch, weight: float, times: float) -> Tensor:
        """Add `times` the gradient of a micro-batch's share of the step's loss, and return as much of that share."""
        with self._autocast():
            loss: Tensor = self.compute(self.objective.loss_sum, micro.to(self.device)) / weight * times
        torch.autograd.backward(self.scaler.scale(loss))
        return loss.detach()

    def _clip(self, total: Tensor) -> tuple[float, float, dict[str, float]]:
        """Clip the gradients as a whole; return the step's loss, the gradient's norm before that, and figures."""
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        figures = self.objective.figures()
        told = torch.stack([total, *(value.detach().to(total) for value in (whole_tensor(norm), *figures.values()))])
        loss, norm_before, *values = told.tolist()
        return loss, norm_before, dict(zip(figures, values, strict=True))

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
            raise self.ranks.common(
                f"the {broken} became {value} at step {self.progress.step + 1}; the last good state is in "
                f"{self.folder.state_path.parent} (step {self._saved_step}); try a lower --lr"
            )
        if not broken:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        self.scaler.update()

    def _keep_model(self) -> None:
        whole = self.ranks.whole_model(self.model)
        if whole is not None:
            self.save(self.folder.path, whole)

    def _evaluate(self) -> Iterator[Event]:
        """Score held-out text and keep the model at the top of the folder if it is the best so far."""
        progress = self.progress
        if self.validate is None:
            self._keep_model()
            progress.best_step = progress.step
            return
        with self._autocast(), torch.no_grad():  # the plan counts on the speed of training
            score = self.ranks.from_first(self.compute(self.validate))
        value, best = score.value, progress.best_value
        better = math.isfinite(value) and (best is None or value < best)
        progress.worse = 0 if better else progress.worse + 1
        if better:
            progress.best_step, progress.best_value = progress.step, value
            self._keep_model()
        self.folder.append_metrics({"step": progress.step} | _finite(score.row()))
        yield Evaluated(progress.step, score)

    def _correct_plan(self) -> None:
        """Fit the number of steps to the time that is left, for a plan made in minutes."""
        progress = self.progress
        if self.seconds is None or progress.step >= progress.total_steps:
            return
        progress.elapsed = time.monotonic() - self._began
        left = max(0.0, self.seconds - progress.elapsed)
        total = progress.step + int(left / (progress.elapsed / progress.step))
        progress.total_steps = self.ranks.from_first(total)

    def _save_state(self) -> None:
        started = time.monotonic()
        self.progress.elapsed = started - self._began
        tensors: dict[str, Tensor] = {**self._weights()}
        tensors |= optimizer_tensors(self.model, self.optimizers)
        tensors = self.ranks.whole(tensors) | random_states(self.device)
        if isinstance(self.batches, LiveSource):
            tensors |= {f"{BATCHES}{name}": tensor for name, tensor in self.batches.tensors().items()}
        record = {
            "progress": asdict(self.progress),
            "config": asdict(self.config),
            "seconds": self.seconds,
            "scaler": self.scaler.state_dict(),
            "environment": environment(self.device, self.ranks.count),
        }
        self.folder.flush_metrics()
        self.folder.save_state(tensors, record)
        self.ranks.from_first(None)  # nobody goes on before the state is on the disk
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
                weight.copy_(cut_like(tensors[name], weight))
        try:
            self._restore_rest(tensors, record)
            told = changes(dict(record["environment"]), environment(self.device, self.ranks.count))
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(
                f"{self.folder.state_path} does not fit this run's state; start again with --overwrite"
            ) from error
        self.folder.rewind_metrics(self.progress.step)
        return told

    def _restore_rest(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Take up all but the weights: progress, optimizers, random states and the scale of float16."""
        self.progress = replace(Progress(), **record["progress"])
        restore_optimizers(self.model, self.optimizers, tensors)
        begun = any(optimizer.state for optimizer in self.optimizers)
        if self.progress.step > 0 and not begun and not self.scaler.is_enabled():  # which may have skipped every step
            raise ValueError("no state of an optimizer after the first step")
        if isinstance(self.batches, LiveSource):
            kept = {name.removeprefix(BATCHES): tensors[name] for name in tensors if name.startswith(BATCHES)}
            self.batches.restore(kept, self.progress.step)
        self.scaler.load_state_dict(record["scaler"])
        restore_random_states(tensors, self.device)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row that JSON can hold: it has no infinity and no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _first_words(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
