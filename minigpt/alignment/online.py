"""The road from prompts, rewards and a model to a model that is worth more. It prints nothing: it tells a reporter."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minigpt.alignment.health import Watch
from minigpt.alignment.held_out import HeldOut
from minigpt.alignment.policy import PolicyConfig, PolicyLoss
from minigpt.alignment.policy_plan import PolicyRequest, answers_a_step, make_policy_plan
from minigpt.alignment.prompts import PromptData, read_prompt_data
from minigpt.alignment.reference import frozen, without_adapter
from minigpt.alignment.rewards import Rewards, parse_reward
from minigpt.alignment.rollouts import RolloutBatches
from minigpt.alignment.value_head import add_value_head, without_head
from minigpt.checkpoint.adapter import save_adapter
from minigpt.checkpoint.folder import save_weights
from minigpt.config import DTypeName, ModelConfig
from minigpt.model.size import training_bytes
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import Tokenizer
from minigpt.training import probe, runs, tuning
from minigpt.training.chat_data import ChatRequest
from minigpt.training.plan import Plan
from minigpt.training.run_folder import RunFolder
from minigpt.training.runs import Reporter, Run, understanding
from minigpt.training.trainer import Trainer
from minigpt.training.tuning import (
    adapted,
    adapter_size,
    base_facts,
    load_base,
    load_same_base,
    save_all_but_weights,
)

MADE_BY = "align"
SCORED, SCORED_AT_LAST = 128, 512  # held-out prompts that are answered at an evaluation, and at the end
UPDATE_SHARE = 1.5  # how much longer a step takes than drawing its answers, roughly; the clock corrects it


@dataclass(kw_only=True)
class PolicyRun(Run):
    """A run on a model's own answers; `held_out` is what it is compared on at the end."""

    request: PolicyRequest
    config: PolicyConfig
    rewards: Rewards
    judges: list[Rewards]
    held_out: HeldOut
    watch: Watch

    def close(self) -> None:
        """End the commands among the rewards."""
        for judge in (self.rewards, *self.judges):
            judge.close()


def prepare(
    data: ChatRequest, request: PolicyRequest, folder: RunFolder, device: torch.device, dtype: DTypeName | None,
    report: Reporter,
) -> PolicyRun:  # fmt: skip
    """Read model and prompts, make the plan, and begin the run's folder; nothing old is lost before that."""
    base = load_base(request, folder)
    config = request.config()
    prompts = read_prompt_data(
        data, base.tokenizer, _context(request, base.model.config), config.max_new_tokens, report
    )
    compute = dtype or probe.fast_dtype(device)
    parts = _Parts(base.model.to(device), request, prompts, device, compute)
    try:
        plan = make_policy_plan(
            request,
            model=base.model.config,
            adapter=parts.adapter,
            prompts=len(prompts.train),
            length=prompts.longest + config.max_new_tokens,
            machine=probe.look_at(device, compute, timed=False),
            measure=parts.measure,
            named=_named(request, parts.adapter),
        )
        _describe(plan, request, parts.adapter, device, report)
        origin = {
            "data": asdict(data),
            "request": asdict(request),
            "prompts": prompts.facts,
            "base": base_facts(request, base),
        }
        record = runs.new_record(MADE_BY, plan, device, origin)
        tokenizer = prompts.template.tokenizer
        describe = partial(save_all_but_weights, folder, parts.model, base, tokenizer, request, record)
        runs.claim(folder, record, describe, keep_text=folder.taken() is None)
        return parts.run(plan, folder, record)
    except BaseException:
        parts.close()
        raise


def resume(
    folder: RunFolder, record: dict[str, Any], state: runs.State, device: torch.device, report: Reporter
) -> PolicyRun:
    """Take a run up where it was saved, with the prompts and the plan recorded in its folder."""
    data, request = asked(record, folder)
    plan = runs.recorded_plan(record, state[1], folder)
    base = load_same_base(request, record, folder)
    context, new = _context(request, plan.model), request.config().max_new_tokens
    prompts = read_prompt_data(data, Tokenizer.load(folder.path), context, new, report)
    with understanding(folder):
        tuning.check_same_data(prompts.facts, record["prompts"], data.named)
    parts = _Parts(base.model.to(device), request, prompts, device, plan.train.compute_dtype)
    try:
        run = parts.run(plan, folder, record)
        runs.take_up(run, folder, state, report)
    except BaseException:
        parts.close()
        raise
    for row in folder.read_metrics():
        if "answer_tokens" in row:
            run.watch.see(row)
    _describe(plan, request, parts.adapter, device, report)
    return run


def recorded(folder: RunFolder) -> dict[str, Any] | None:
    """Return the record of a run on a model's own answers in a folder, or None where there is none."""
    record = runs.recorded(folder, MADE_BY)
    return record if record is not None and "prompts" in record else None


def asked(record: dict[str, Any], folder: RunFolder) -> tuple[ChatRequest, PolicyRequest]:
    """Return what a recorded run was begun with."""
    return tuning.asked(record, folder, PolicyRequest)


def check_same(record: dict[str, Any], folder: RunFolder, data: ChatRequest | None, said: dict[str, Any]) -> None:
    """Refuse to resume with other prompts, if some were named, or other settings, if said, than the run began with."""
    begun = asked(record, folder)
    tuning.check_same(record, folder, begun, data, said, asdict(begun[1].config()))


class _Parts:
    """What a run is put together from: the model with what is trained of it, the start model, rewards, batches."""

    def __init__(
        self, model: GPT, request: PolicyRequest, prompts: PromptData, device: torch.device, dtype: DTypeName
    ) -> None:
        self.request, self.config, self.prompts, self.model = request, request.config(), prompts, model
        self.adapter = adapter_size(model, request)
        reference = frozen(model) if request.lora is None else without_adapter(adapted(model, request))
        if self.config.method == "ppo":
            add_value_head(model)
        self.rewards = Rewards(request.specs(), timeout=request.timeout, device=device)
        self.judges = [Rewards([parse_reward(text)], timeout=request.timeout, device=device) for text in request.judges]
        tokenizer = prompts.template.tokenizer
        self.batches = RolloutBatches(
            model, reference, tokenizer, prompts.train, self.rewards, self.config,
            batch_size=answers_a_step(request, len(prompts.train)), seed=request.seed, dtype=dtype,
        )  # fmt: skip
        self.held_out = HeldOut(
            reference, tokenizer, prompts.held_out or prompts.train, self.rewards, self.config, request.seed
        )

    def measure(self) -> float:
        """Draw the answers of a step, and tell about how many seconds a step takes."""
        started = time.monotonic()
        self.batches.make(0)
        taken = time.monotonic() - started
        return taken * (1 / self.config.updates + UPDATE_SHARE - 1)

    def run(self, plan: Plan, folder: RunFolder, record: dict[str, Any]) -> PolicyRun:
        """Put the run together."""
        save = save_weights if self.request.lora is None else save_adapter
        trainer = Trainer(
            self.model,
            PolicyLoss(self.config),
            self.batches,
            plan.train,
            folder,
            validate=self.held_out.some(SCORED),
            seconds=plan.seconds,
            save=without_head(save) if self.config.method == "ppo" else save,
            score_first=True,
        )
        return PolicyRun(
            trainer=trainer,
            tokenizer=self.prompts.template.tokenizer,
            plan=plan,
            record=record,
            final_score=self.held_out.some(SCORED_AT_LAST),
            request=self.request,
            config=self.config,
            rewards=self.rewards,
            judges=self.judges,
            held_out=self.held_out.some(SCORED_AT_LAST),
            watch=Watch(self.config.max_kl),
        )

    def close(self) -> None:
        for judge in (self.rewards, *self.judges):
            judge.close()


def _context(request: PolicyRequest, model: ModelConfig) -> int:
    """The tokens of a prompt and its answer at most."""
    return min(request.context or sys.maxsize, model.max_position_embeddings)


def _named(request: PolicyRequest, adapter: int | None) -> str:
    name = Path(request.base).name
    if adapter is None or request.lora is None:
        return f"all of {name} is trained, and kept beside as it was"
    return f"{name} stays; an adapter of rank {request.lora.rank} with {adapter:,} parameters is trained"


def _describe(plan: Plan, request: PolicyRequest, adapter: int | None, device: torch.device, report: Reporter) -> None:
    train = plan.train
    report.fact("reward", " + ".join(request.rewards))
    need = training_bytes(
        plan.model, train.micro_batch_size, train.context, train.compute_dtype, train.optimizer, device=device.type,
        adapter=adapter,
    )  # fmt: skip
    runs.describe(plan, device, need, report)
