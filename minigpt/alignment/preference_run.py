"""The road from preferences and a model to one that prefers, or to one that judges. It tells a reporter."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.alignment.pairs import PairBatch, PairBatches, in_order, with_reference
from minigpt.alignment.preference import PreferenceConfig, PreferenceLoss, answer_log_probs, evaluating, score_pairs
from minigpt.alignment.preference_data import PreferenceData, read_preferences
from minigpt.alignment.preference_health import PreferenceWatch
from minigpt.alignment.preference_plan import PairRows, PreferenceRequest, make_preference_plan
from minigpt.alignment.reward_model import add_reward_head, saving_head
from minigpt.checkpoint.adapter import save_adapter
from minigpt.checkpoint.files import read_tensors, write_tensors
from minigpt.checkpoint.folder import save_weights
from minigpt.config import DTypeName
from minigpt.errors import ModelFolderError
from minigpt.model.size import training_bytes
from minigpt.model.transformer import GPT
from minigpt.text.chat import Message
from minigpt.text.tokenizer import Tokenizer
from minigpt.training import probe, runs, tuning
from minigpt.training.chat_data import ChatRequest, pad_id
from minigpt.training.finetune import EXAMPLE_CHARS, EXAMPLES, answers_to
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
from minigpt.training.tuning_plan import tuning_optimizer

REFERENCES = Path(".cache") / "reference"  # beside the output folder, shared by the runs there
SCORED_TOKENS = 8192  # a forward pass


@dataclass(kw_only=True)
class PreferenceRun(Run):
    """A run on preferences."""

    config: PreferenceConfig
    data: PreferenceData
    watch: PreferenceWatch
    questions: list[Sequence[Message]]  # that are answered before and after
    before: list[str]


def made_by(request: PreferenceRequest) -> str:
    """The command that a run belongs to."""
    return "reward" if request.config().method == "reward" else "align"


def prepare(
    data: ChatRequest,
    request: PreferenceRequest,
    folder: RunFolder,
    device: torch.device,
    dtype: DTypeName | None,
    report: Reporter,
) -> PreferenceRun:
    """Read model and preferences, make the plan, and begin the run's folder; nothing old is lost before that."""
    base = load_base(request, folder)
    config = request.config()
    found = read_preferences(data, config.method, base.tokenizer, base.model.config, request.context, report)
    compute = dtype or probe.fast_dtype(device)
    plan = make_preference_plan(
        request,
        model=base.model.config,
        base_record=base.record,
        adapter=adapter_size(base.model, request),
        rows=_rows(found),
        machine=probe.look_at(device, compute, timed=False),
        measure=lambda: probe.training_speed(
            base.model.config,
            2,
            device,
            compute,
            context=min(base.model.config.max_position_embeddings, max(1, found.mean_length // 2)),
            lora=request.lora,
            optimizer=tuning_optimizer(request, base.record),
        ),
    )
    _describe(plan, request, base.model, found, device, report)
    base.model.to(device)
    questions = [] if config.method == "reward" else _questions(found)
    origin = {
        "data": asdict(data),
        "request": asdict(request),
        "preferences": found.facts,
        "base": base_facts(request, base),
        "before": answers_to(base.model, found.template, questions),
    }
    record = runs.new_record(made_by(request), plan, device, origin)
    batches = _Batches(found, plan, config, folder, record)
    if config.needs_reference:
        batches.refer_to(base.model, report)
    model = _headed(adapted(base.model, request), config)
    runs.claim(
        folder,
        record,
        partial(save_all_but_weights, folder, model, base, found.template.tokenizer, request, record),
        keep_text=folder.taken() is None,
    )
    return _run(model.to(device), request, found, batches, plan, folder, record)


def resume(
    folder: RunFolder, record: dict[str, Any], state: runs.State, device: torch.device, report: Reporter
) -> PreferenceRun:
    """Take a run up where it was saved, with the preferences and the plan recorded in its folder."""
    data, request = asked(record, folder)
    plan, config = runs.recorded_plan(record, state[1], folder), request.config()
    tokenizer = Tokenizer.load(folder.path)
    found = read_preferences(data, config.method, tokenizer, plan.model, request.context, report)
    with understanding(folder):
        tuning.check_same_data(found.facts, record["preferences"], data.named)
    batches = _Batches(found, plan, config, folder, record)
    known = not config.needs_reference or batches.known()
    if request.lora is None and known:
        model = GPT(plan.model)
    else:
        model = load_same_base(request, record, folder).model
        if not known:
            batches.refer_to(model.to(device), report)
        model = adapted(model, request)
    run = _run(_headed(model, config).to(device), request, found, batches, plan, folder, record)
    runs.take_up(run, folder, state, report)
    _describe(plan, request, run.trainer.model, found, device, report)
    return run


def recorded(folder: RunFolder, command: str) -> dict[str, Any] | None:
    """Return the record of a run of a command on preferences in a folder, or None where there is none."""
    record = runs.recorded(folder, command)
    return record if record is not None and "preferences" in record else None


def asked(record: dict[str, Any], folder: RunFolder) -> tuple[ChatRequest, PreferenceRequest]:
    """Return what a recorded run was begun with."""
    return tuning.asked(record, folder, PreferenceRequest)


def check_same(record: dict[str, Any], folder: RunFolder, data: ChatRequest | None, said: dict[str, Any]) -> None:
    """Refuse to resume with other data, if some was named, or other settings, if said, than the run began with."""
    begun = asked(record, folder)
    tuning.check_same(record, folder, begun, data, said, asdict(begun[1].config()))


class _Batches:
    """The rows of a run, and what the model it begins with says of them, kept in a file beside the run's folder."""

    def __init__(
        self, data: PreferenceData, plan: Plan, config: PreferenceConfig, folder: RunFolder, record: dict[str, Any]
    ) -> None:
        train, pad = plan.train, pad_id(data.template.tokenizer)
        self.train = PairBatches(data.train, batch_size=train.batch_size, seed=train.seed, pad_id=pad)
        self.held_out = in_order(data.held_out, max(1, SCORED_TOKENS // (2 * data.context)), pad)
        self._plan, self._config = plan, config
        facts = [record["preferences"]["digest"], record["base"]["fingerprint"], data.template.source, data.context]
        facts += [config.method == "kto", record["device"], record["plan"]["train"]]
        key = hashlib.sha256(json.dumps(facts).encode("utf-8")).hexdigest()[:24]
        self._file = folder.path.parent / REFERENCES / f"{key}.safetensors"

    def some(self, tokens: int) -> list[PairBatch]:
        """Choose evenly spaced held-out batches that hold about so many tokens; all of them when they fit."""
        total = sum(batch.tokens.numel() for batch in self.held_out)
        count = len(self.held_out) if total <= tokens else max(1, len(self.held_out) * tokens // total)
        return [self.held_out[i * len(self.held_out) // count] for i in range(count)]

    def known(self) -> bool:
        """Take up what was kept of the reference, and tell whether it was there, whole."""
        if not self._file.is_file():
            return False
        try:
            tensors, _ = read_tensors(self._file)
        except ModelFolderError:
            return False
        train, held_out = tensors.get("train"), tensors.get("held_out")
        count = sum(len(batch.tokens) for batch in self.held_out)
        if train is None or held_out is None or (len(train), len(held_out)) != (len(self.train.pairs), count):
            return False
        self._take(train.clone(), held_out.clone())
        return True

    def refer_to(self, model: GPT, report: Reporter) -> None:
        """Take the log-probabilities of all answers under the model that the run begins with, kept or computed.

        Training rows are read in the batches of the first epoch, as the policy will: what it says of them before its
        first step is then the same to the last bit, and the first loss of DPO ln 2.
        """
        if self.known():
            report.fact("reference", f"log-probabilities of all answers, from {self._file}")
            return
        started, config = time.monotonic(), self._plan.train
        steps = self.train.steps_an_epoch
        if self._plan.seconds is None:
            steps = min(steps, config.total_steps)  # a plan in minutes may grow
        rows = {place for step in range(steps) for place in self.train.places(step)}
        total = len(rows) + sum(len(batch.tokens) for batch in self.held_out)
        done = 0

        def said(batches: Iterable[PairBatch]) -> Tensor:
            nonlocal done
            parts = []
            for batch in batches:
                parts.append(_log_probs(model, batch, config.compute_dtype))
                done += len(batch.tokens)
                report.working("reference", min(done, total), total, "rows")
            return torch.cat(parts) if parts else torch.zeros(0, 2)

        train = torch.zeros(len(self.train.pairs), 2)
        for step in reversed(range(steps)):  # of a row that comes twice the first time counts
            train[self.train.places(step)] = said(self.train.at(step).split(config.micro_batch_size))
        held_out = said(self.held_out)
        write_tensors(self._file, {"train": train, "held_out": held_out}, {})
        self._take(train, held_out)
        report.fact("reference", f"log-probabilities of {total:,} rows, {time.monotonic() - started:.0f} s")

    def _take(self, train: Tensor, held_out: Tensor) -> None:
        self.train.reference = train
        parts = torch.split(held_out, [len(batch.tokens) for batch in self.held_out])
        self.held_out = [with_reference(batch, part) for batch, part in zip(self.held_out, parts, strict=True)]


@torch.no_grad()
def _log_probs(model: GPT, batch: PairBatch, dtype: DTypeName) -> Tensor:
    """What a model says of the answers of a batch (B, 2), computed as in training."""
    device = model.lm_head.weight.device
    moved = batch.to(device)
    computing: Any = contextlib.nullcontext()
    if dtype != "float32":
        computing = torch.autocast(device.type, dtype=getattr(torch, dtype))
    with evaluating(model), computing:
        return answer_log_probs(model, moved.tokens, moved.targets).cpu()


def _rows(data: PreferenceData) -> PairRows:
    longest = 2 * max(pair.length for pair in data.train)
    return PairRows(count=len(data.train), mean=data.mean_length, longest=longest, held_out=bool(data.held_out))


def _questions(data: PreferenceData) -> list[Sequence[Message]]:
    """Choose a few evenly spaced prompts, the short ones first."""
    prompts = [row.prompt for row in data.examples]
    short = [prompt for prompt in prompts if len(prompt[-1].content) <= EXAMPLE_CHARS] or prompts
    count = min(EXAMPLES, len(short))
    return [short[i * len(short) // count] for i in range(count)]


def _headed(model: GPT, config: PreferenceConfig) -> GPT:
    if config.method == "reward":
        add_reward_head(model)
        model.lm_head.weight.requires_grad_(model.config.tie_word_embeddings and model.lm_head.weight.requires_grad)
    return model


def _run(
    model: GPT,
    request: PreferenceRequest,
    data: PreferenceData,
    batches: _Batches,
    plan: Plan,
    folder: RunFolder,
    record: dict[str, Any],
) -> PreferenceRun:
    config = request.config()
    save = save_weights if request.lora is None else save_adapter
    some = batches.some(plan.validation_tokens) if batches.held_out else []
    trainer = Trainer(
        model,
        PreferenceLoss(config),
        batches.train,
        plan.train,
        folder,
        validate=partial(score_pairs, batches=some, config=config) if some else None,
        seconds=plan.seconds,
        save=saving_head(save) if config.method == "reward" else save,
        score_first=True,
    )
    scored: Sequence[PairBatch] = batches.held_out
    return PreferenceRun(
        trainer=trainer,
        tokenizer=data.template.tokenizer,
        plan=plan,
        record=record,
        final_score=partial(score_pairs, batches=scored, config=config) if scored else None,
        config=config,
        data=data,
        watch=PreferenceWatch(config),
        questions=[] if config.method == "reward" else _questions(data),
        before=record["before"],
    )


def _describe(
    plan: Plan, request: PreferenceRequest, model: GPT, data: PreferenceData, device: torch.device, report: Reporter
) -> None:
    train = plan.train
    need = training_bytes(
        plan.model,
        2 * train.micro_batch_size,
        max(pair.length for pair in data.train),
        train.compute_dtype,
        train.optimizer,
        device=device.type,
        adapter=adapter_size(model, request),
    )
    runs.describe(plan, device, need, report)
