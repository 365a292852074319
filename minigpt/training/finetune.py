"""The road from conversations and a model to a model that answers. It prints nothing: it tells a reporter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minigpt.checkpoint.adapter import save_adapter
from minigpt.checkpoint.folder import LoadedModel, save_weights
from minigpt.config import DTypeName, SamplingConfig
from minigpt.evaluation.bits import Score
from minigpt.inference.engine import collect, stream
from minigpt.model.loss import IGNORED, token_losses
from minigpt.model.size import training_bytes
from minigpt.model.transformer import GPT
from minigpt.text.chat import ChatTemplate, Message
from minigpt.text.conversations import Conversation
from minigpt.text.fitting import Encoded
from minigpt.text.tokenizer import Tokenizer
from minigpt.training import probe, runs, tuning
from minigpt.training.chat_batches import ChatBatches, batches_of
from minigpt.training.chat_data import ChatData, ChatRequest, read_chat
from minigpt.training.distributed import ALONE, Ranks
from minigpt.training.objectives import NextToken, NoisyNextToken
from minigpt.training.packing import PackedRows
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
from minigpt.training.tuning_plan import Rows, TuningRequest, make_tuning_plan, tuning_optimizer

MADE_BY = "finetune"
EXAMPLES = 3  # held-out questions that are answered before and after
ANSWER_TOKENS = 64
EXAMPLE_CHARS = 160  # of a question that is shown
SCORED_TOKENS = 8192  # a forward pass


@dataclass(frozen=True)
class Example:
    """A question, the answer that the data gives, and what the model said before it was tuned."""

    question: str
    expected: str
    before: str


@dataclass(kw_only=True)
class ChatRun(Run):
    """A run on conversations."""

    chat: ChatData
    questions: list[Conversation]  # those that the examples are about
    examples: list[Example]


def prepare(
    data: ChatRequest,
    request: TuningRequest,
    folder: RunFolder,
    device: torch.device,
    dtype: DTypeName | None,
    report: Reporter,
    ranks: Ranks = ALONE,
) -> ChatRun:
    """Read model and conversations, make the plan, and begin the run's folder; nothing old is lost before that."""
    base = load_base(request, folder)
    chat = read_chat(data, base.tokenizer, base.model.config, request.context, folder, report)
    batches = _batches(data, chat, batch_size=1, seed=request.seed)
    compute = dtype or probe.fast_dtype(device)
    plan = make_tuning_plan(
        request,
        model=base.model.config,
        base_record=base.record,
        adapter=adapter_size(base.model, request),
        rows=Rows(
            an_epoch=batches.rows_an_epoch,
            length=chat.row_length,
            conversations=chat.facts["conversations"],
            held_out=bool(chat.held_out),
        ),
        machine=runs.shared_machine(probe.look_at(device, compute, timed=False), ranks),
        measure=lambda rows: (
            ranks.count
            * probe.training_speed(
                base.model.config,
                rows,
                device,
                compute,
                context=chat.row_length,
                lora=request.lora,
                optimizer=tuning_optimizer(request, base.record),
            )
        ),
    )
    plan = runs.shared_plan(plan, ranks)
    _describe(plan, request, base.model, device, report, ranks)
    base.model.to(device)
    record = runs.new_record(MADE_BY, plan, device, _origin(data, request, base, chat))
    model = adapted(base.model, request)
    runs.claim(
        folder,
        record,
        partial(save_all_but_weights, folder, model, base, chat.template.tokenizer, request, record),
        keep_text=folder.taken() is None,  # what an old run did not leave is not ours to remove
    )
    runs.announce(ranks, MADE_BY, folder, model.to(device), resumed=False)
    return _run(model, data, request, chat, plan, folder, record, ranks)


def resume(
    folder: RunFolder,
    record: dict[str, Any],
    state: runs.State | None,
    device: torch.device,
    report: Reporter,
    ranks: Ranks = ALONE,
) -> ChatRun:
    """Take a run up where it was saved, with the conversations and the plan recorded in its folder.

    Without a state it is at its beginning, as another process has just prepared it.
    """
    data, request = asked(record, folder)
    plan = runs.recorded_plan(record, None if state is None else state[1], folder)
    chat = read_chat(data, Tokenizer.load(folder.path), plan.model, plan.train.context, folder, report)
    with understanding(folder):
        tuning.check_same_data(chat.facts, record["chat"], data.named)
    if request.lora is None and state is not None:
        model = GPT(plan.model)
    else:
        base = load_same_base(request, record, folder)
        model = adapted(base.model, request)
    runs.announce(ranks, MADE_BY, folder, model.to(device), resumed=state is not None)
    run = _run(model, data, request, chat, plan, folder, record, ranks)
    if state is not None:
        runs.take_up(run, folder, state, report)
    _describe(plan, request, model, device, report, ranks)
    return run


def recorded(folder: RunFolder) -> dict[str, Any] | None:
    """Return the record of the tuning run in a folder, or None where there is none."""
    return runs.recorded(folder, MADE_BY)


def asked(record: dict[str, Any], folder: RunFolder) -> tuple[ChatRequest, TuningRequest]:
    """Return what a recorded run was begun with."""
    return tuning.asked(record, folder, TuningRequest)


def check_same(record: dict[str, Any], folder: RunFolder, data: ChatRequest | None, said: dict[str, Any]) -> None:
    """Refuse to resume with other data, if some was named, or other settings, if said, than the run began with."""
    begun = asked(record, folder)
    tuning.check_same(record, folder, begun, data, said)


def answer(model: GPT, chat: ChatData, conversations: Sequence[Conversation]) -> list[str]:
    """Answer the first question of each conversation with the most likely tokens; training mode comes back."""
    return answers_to(model, chat.template, [one.messages[: _first_answer(one)] for one in conversations])


def answers_to(model: GPT, template: ChatTemplate, prompts: Sequence[Sequence[Message]]) -> list[str]:
    """Answer prompts with the most likely tokens, a few dozen at most; training mode comes back."""
    training = model.training
    model.eval()
    ids = [template.encode(prompt) for prompt in prompts]
    sampling = SamplingConfig(max_new_tokens=ANSWER_TOKENS, temperature=0.0)
    events = stream(model, template.tokenizer, ids, sampling, [0] * len(ids)) if ids else ()
    texts = [completion.text for completion in collect(events, len(ids))]
    model.train(training)
    return texts


@torch.no_grad()
def score_answers(model: GPT, rows: PackedRows, byte_lengths: NDArray[np.int64]) -> Score:
    """Score the learned tokens of packed conversations, each once; training mode comes back as it was.

    Bytes are those of the answers' text.
    """
    training, device = model.training, model.lm_head.weight.device
    model.eval()
    nats, tokens, count = 0.0, 0, 0
    try:
        for batch in batches_of(rows, max(1, SCORED_TOKENS // rows.row_length)):
            moved = batch.to(device)
            hidden = model.model(moved.tokens, documents=moved.documents)
            losses = token_losses(hidden, model.lm_head.weight, moved.targets)
            nats += float(losses.cpu().double().sum())
            learned = batch.targets[batch.targets != IGNORED].numpy()
            tokens += len(learned)
            count += int(byte_lengths[learned].sum())
    finally:
        model.train(training)
    return Score(nats, tokens, max(1, count))


def _batches(data: ChatRequest, chat: ChatData, *, batch_size: int, seed: int) -> ChatBatches:
    text = None if chat.text is None else chat.text.train
    return ChatBatches(chat.sources, batch_size=batch_size, seed=seed, text=text, text_share=data.mix_share)


def _run(
    model: GPT,
    data: ChatRequest,
    request: TuningRequest,
    chat: ChatData,
    plan: Plan,
    folder: RunFolder,
    record: dict[str, Any],
    ranks: Ranks,
) -> ChatRun:
    train, tokenizer = plan.train, chat.template.tokenizer
    lengths = np.zeros(model.config.vocab_size, dtype=np.int64)  # a model may have ids that its tokenizer lacks
    lengths[: tokenizer.vocab_size] = tokenizer.byte_lengths()
    score = partial(score_answers, byte_lengths=lengths)
    some = _evenly(chat.held_out, plan.validation_tokens)
    trainer = Trainer(
        model,
        NoisyNextToken(request.neftune_alpha) if request.neftune_alpha else NextToken(),
        _batches(data, chat, batch_size=train.batch_size, seed=train.seed),
        train,
        folder,
        validate=partial(score, rows=chat.packed(some)) if some else None,
        seconds=plan.seconds,
        save=save_weights if request.lora is None else save_adapter,
        score_first=True,
        ranks=ranks,
    )
    with understanding(folder):
        examples = [Example(**one) for one in record["examples"]]
    return ChatRun(
        trainer=trainer,
        tokenizer=tokenizer,
        plan=plan,
        record=record,
        final_score=partial(score, rows=chat.packed(chat.held_out)) if chat.held_out else None,
        chat=chat,
        questions=_questions(chat.examples),
        examples=examples,
    )


def _evenly(conversations: Sequence[Encoded], tokens: int) -> list[Encoded]:
    """Choose evenly spaced conversations that hold about so many tokens; all of them when they fit."""
    total = sum(map(len, conversations))
    if total <= tokens:
        return list(conversations)
    count = max(1, len(conversations) * tokens // total)
    return [conversations[i * len(conversations) // count] for i in range(count)]


def _questions(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Choose a few evenly spaced conversations, the short questions first."""
    short = [one for one in conversations if len(_question(one)) <= EXAMPLE_CHARS] or list(conversations)
    count = min(EXAMPLES, len(short))
    return [short[i * len(short) // count] for i in range(count)]


def _first_answer(conversation: Conversation) -> int:
    return next(i for i, message in enumerate(conversation.messages) if message.role == "assistant")


def _question(conversation: Conversation) -> str:
    return conversation.messages[_first_answer(conversation) - 1].content


def _describe(
    plan: Plan, request: TuningRequest, model: GPT, device: torch.device, report: Reporter, ranks: Ranks
) -> None:
    train = plan.train
    need = training_bytes(
        plan.model,
        ranks.pass_rows(train.batch_size, train.micro_batch_size),
        train.context,
        train.compute_dtype,
        train.optimizer,
        device=device.type,
        adapter=adapter_size(model, request),
        packed=True,
    )
    runs.describe(plan, device, need, report, ranks)


def _origin(data: ChatRequest, request: TuningRequest, base: LoadedModel, chat: ChatData) -> dict[str, Any]:
    """What a tuning run was begun with."""
    questions = _questions(chat.examples)
    examples = [
        Example(_question(one), one.messages[_first_answer(one)].content, said)
        for one, said in zip(questions, answer(base.model, chat, questions), strict=True)
    ]
    return {
        "data": asdict(data),
        "request": asdict(request),
        "chat": chat.facts,
        "base": base_facts(request, base),
        "examples": [asdict(example) for example in examples],
    }
