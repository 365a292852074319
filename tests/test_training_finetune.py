"""Instruction tuning: what is learned and what is not, what is chosen, and that the run is what its parts say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_chat import CONTEXT, PAIRS, make_base, write_chats
from tiny_run import TRAIN, assert_same, make_trainer, resumed, run, state, steps_of, validate
from torch import Tensor
from variants import VARIANTS, make_model

from minigpt.checkpoint.adapter import ADAPTER_WEIGHTS
from minigpt.checkpoint.files import read_tensors
from minigpt.checkpoint.folder import load
from minigpt.config import LoraConfig, preset_config
from minigpt.errors import ConfigError, DataError, ModelFolderError
from minigpt.evaluation.bits import Score
from minigpt.model.lora import adapters
from minigpt.model.loss import IGNORED
from minigpt.model.size import parameters
from minigpt.model.transformer import GPT
from minigpt.text.tokenizer import IM_END, IM_START, Tokenizer
from minigpt.training import finetune
from minigpt.training.batches import Batch
from minigpt.training.chat_data import ChatRequest
from minigpt.training.finetune import ChatRun
from minigpt.training.objectives import NextToken, NoisyNextToken, document_lengths
from minigpt.training.plan import Machine, Plan, learning_rate
from minigpt.training.run_folder import RunFolder
from minigpt.training.trainer import Evaluated, StepDone
from minigpt.training.tuning_plan import Rows, TuningRequest, make_tuning_plan, tuning_rate

CPU = torch.device("cpu")


class Facts:
    """What a person would have read."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.warnings: list[str] = []

    def fact(self, label: str, text: str) -> None:
        self.facts[label] = text

    def warning(self, message: str) -> None:
        self.warnings.append(message)

    def working(self, what: str, done: int, total: int) -> None:
        assert done <= max(total, done)


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "ANSWER_TOKENS", 12)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "animals.jsonl")


def prepare(
    folder: Path, base: Path, chats: Path, *, train: dict[str, Any] | None = None, data: dict[str, Any] | None = None,
    **request: Any,
) -> tuple[ChatRun, Facts]:  # fmt: skip
    facts = Facts()
    chat = ChatRequest(sources=(str(chats),), named=chats.name, **(data or {}))
    tuning = TuningRequest(base=str(base), **{"steps": 4, **request}, train=train or {})
    return finetune.prepare(chat, tuning, RunFolder(folder), CPU, "float32", facts), facts


# What is learned


def hand_made(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[bool]]:
    """ChatML written down by hand, and the one stretch of it that the model has to say."""
    start, end = tokenizer.special_id(IM_START), tokenizer.special_id(IM_END)
    assert start is not None
    assert end is not None
    before = [start, *tokenizer.encode(f"user\n{question}"), end, *tokenizer.encode("\n")]
    before += [start, *tokenizer.encode("assistant\n")]
    after = [*tokenizer.encode(answer), end]
    return before + after, [False] * len(before) + [True] * len(after)


def hand_loss(model: GPT, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> tuple[float, int]:
    """The loss of the answers, each conversation read by itself, token by token."""
    total, count = 0.0, 0
    for question, answer in pairs:
        ids, said = hand_made(tokenizer, question, answer)
        with torch.no_grad():
            log_probs = F.log_softmax(model(torch.tensor([ids]))[0].double(), dim=-1)
        for place in range(1, len(ids)):
            if said[place]:
                total -= float(log_probs[place - 1, ids[place]])
                count += 1
    return total, count


@pytest.mark.parametrize(("variant", "micro"), [("qwen3", 2), ("qwen3", 3), ("gpt2", 2), ("transformer-2017", 2)])
def test_a_step_is_the_mean_over_the_tokens_of_the_answers(tmp_path: Path, variant: str, micro: int) -> None:
    base, pairs = make_base(tmp_path / "base", variant), PAIRS[:7]
    chats = write_chats(tmp_path / "few.jsonl", pairs)
    rows = {"batch_size": 3, "micro_batch_size": micro}
    tuned, _ = prepare(tmp_path / "run", base, chats, train=rows, data={"val_fraction": 0.0}, context=40, steps=1)
    assert tuned.chat.sources[0].rows_an_epoch == 3, "seven conversations in three rows: packed"
    nats, count = hand_loss(load(base).model, load(base).tokenizer, pairs)
    assert tuned.trainer.objective.weight(tuned.trainer.batches.at(0)) == count
    assert steps_of(run(tuned.trainer), StepDone)[0].loss == pytest.approx(nats / count, rel=1e-5)


def test_held_out_answers_are_scored_by_the_same_rule(tmp_path: Path, base: Path, chats: Path) -> None:
    tuned, _ = prepare(tmp_path / "run", base, chats, data={"val_fraction": 0.3})
    assert tuned.final_score is not None
    model, tokenizer = load(base).model, tuned.tokenizer
    held = [(one.messages[0].content, one.messages[1].content) for one in tuned.chat.examples]
    assert len(held) == round(0.3 * len(PAIRS)) == tuned.chat.facts["held_out"]
    nats, count = hand_loss(model, tokenizer, held)
    score = tuned.final_score(model.train())
    assert model.training, "training mode comes back"
    assert (score.nats, score.tokens) == (pytest.approx(nats, rel=1e-5), count)
    assert score.bytes == sum(len(answer.encode()) for _, answer in held)


def test_no_held_out_question_is_trained_on(tmp_path: Path, base: Path, chats: Path) -> None:
    tuned, facts = prepare(tmp_path / "run", base, chats, data={"val_fraction": 0.3}, epochs=1, steps=None)
    seen = set()
    for step in range(tuned.plan.train.total_steps):
        batch = tuned.trainer.batches.at(step)
        seen |= {tuned.tokenizer.decode(row[row >= 4].tolist()) for row in batch.tokens}
    text = " ".join(seen)
    for conversation in tuned.chat.examples:
        assert conversation.messages[0].content not in text
    trained = [pair for pair in PAIRS if pair[0] not in {one.messages[0].content for one in tuned.chat.examples}]
    assert all(question in text for question, _ in trained)
    assert "7 held out" in facts.facts["data"]


def test_a_model_learns_three_conversations_and_answers_them(tmp_path: Path, base: Path) -> None:
    pairs = [("Say hi", "hello"), ("What is 1+1?", "2"), ("Name a bird", "an owl!")]
    chats = write_chats(tmp_path / "three.jsonl", pairs)
    rate = {"learning_rate": 0.02, "optimizer": "adamw", "batch_size": 2}
    lora = LoraConfig(rank=8, alpha=16.0)
    tuned, facts = prepare(tmp_path / "run", base, chats, train=rate, steps=90, lora=lora)
    assert "too few to hold any out" in facts.facts["data"]
    assert tuned.final_score is None
    run(tuned.trainer)
    best = load(tmp_path / "run")
    said = finetune.answer(best.model, tuned.chat, tuned.questions)
    assert sorted(said) == sorted(answer for _, answer in pairs)
    assert [one.before for one in tuned.examples] != said


def test_dropout_is_off_whatever_the_base_model_was_trained_with(tmp_path: Path, chats: Path) -> None:
    base = make_base(tmp_path / "base", "gpt2", dropout=0.3)
    assert load(base).model.config.dropout == 0.3
    tuned, _ = prepare(tmp_path / "run", base, chats)
    batch = tuned.trainer.batches.at(0)

    def loss(one: ChatRun) -> float:
        return one.trainer.objective.loss_sum(one.trainer.model.train(), batch).item()

    assert loss(tuned) == loss(tuned)
    run(tuned.trainer)
    assert load(tmp_path / "run").model.config.dropout == 0.0
    noisy, _ = prepare(tmp_path / "noisy", base, chats, dropout=0.3)
    assert loss(noisy) != loss(noisy)


# Adapters


def test_only_the_adapter_is_trained_and_in_the_state(tmp_path: Path, base: Path, chats: Path) -> None:
    tuned, _ = prepare(tmp_path / "run", base, chats, lora=LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    before = {name: weight.clone() for name, weight in tuned.trainer.model.named_parameters()}
    run(tuned.trainer)
    names = {f"{name}.lora_{letter}" for name in adapters(tuned.trainer.model) for letter in "AB"}
    moved = {name for name, weight in tuned.trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == names
    tensors, _ = state(tmp_path / "run")
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in names}
    assert {name.split(".lora_")[0] for name in tensors if name.startswith("optimizer.")} == {
        f"optimizer.{name}" for name in adapters(tuned.trainer.model)
    }
    tokens = torch.arange(4, 36).view(2, 16)
    with torch.no_grad():
        assert torch.allclose(load(tmp_path / "run").model(tokens), tuned.trainer.model.eval()(tokens), atol=1e-5)
    assert not (tmp_path / "run" / "config.json").exists(), "what transformers would take for a whole model"


def test_an_adapter_begins_as_its_base_model(tmp_path: Path, base: Path, chats: Path) -> None:
    tuned, _ = prepare(tmp_path / "run", base, chats, lora=LoraConfig())
    events = tuned.trainer.run(lambda: True)
    first = next(events)
    assert isinstance(first, Evaluated)
    assert first.step == 0
    stored = read_tensors(tmp_path / "run" / ADAPTER_WEIGHTS)[0]
    assert all(bool((tensor == 0).all()) for name, tensor in stored.items() if "lora_B" in name)
    assert tuned.final_score is not None
    assert first.score.loss == pytest.approx(tuned.final_score(load(base).model).loss, rel=1e-5)


# Best, and enough


def test_where_tuning_makes_it_worse_the_base_model_is_kept(tmp_path: Path, base: Path, chats: Path) -> None:
    harm = {"learning_rate": 3.0, "warmup_steps": 0, "optimizer": "adamw", "eval_every": 1, "patience": 2}
    tuned, _ = prepare(tmp_path / "run", base, chats, train=harm, steps=9, data={"val_fraction": 0.3})
    events = run(tuned.trainer)
    assert [event.step for event in steps_of(events, Evaluated)] == [0, 1, 2]
    assert tuned.trainer.out_of_patience
    assert tuned.trainer.progress.best_step == 0
    kept, first = load(tmp_path / "run").model.state_dict(), load(base).model.state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in first.items())


@pytest.mark.parametrize(
    ("patience", "scores", "last"),
    [
        (1, [3, 2, 2.5], 12),
        (2, [3, 4, 4, 1], 12),
        (2, [3, 1, 2, 1.5, 0], 16),
        (0, [1, 2, 3, 4, 5, 6], 24),
        (2, [5, 4, 3, 2, 4, 3], 24),  # the plan's end and the patience's are one: nothing ended early
    ],
)
def test_patience_counts_evaluations_since_the_best(
    tmp_path: Path, patience: int, scores: list[float], last: int
) -> None:
    given = iter(scores)
    trainer = make_trainer(
        tmp_path,
        replace(TRAIN, total_steps=24, patience=patience),
        validate=lambda model: replace(validate(model), nats=next(given)),
    )
    run(trainer)
    assert (trainer.progress.step, trainer.ended_early) == (last, last < 24)
    assert run(trainer) == [], "it does not go on when it is resumed"


@pytest.mark.parametrize("stop_at", [2, 4, 6, 9])
def test_a_run_that_ends_early_is_exactly_resumed(tmp_path: Path, stop_at: int) -> None:
    def from_weights(model: GPT) -> Score:  # better twice, then worse
        score = validate(model)
        return replace(
            score, nats=score.nats + 100.0 * float(model.model.norm.weight.detach().double().sum() - 32.0) ** 2
        )

    config = replace(TRAIN, total_steps=40, learning_rate=0.05, eval_every=2, patience=2)
    more: dict[str, Any] = {"validate": from_weights, "score_first": True}
    whole = make_trainer(tmp_path / "whole", config, **more)
    run(whole)
    assert 4 < whole.progress.step < 40
    run(make_trainer(tmp_path / "parts", config, **more), stop_at=stop_at)
    run(resumed(tmp_path / "parts", config, **more))
    assert_same(tmp_path / "whole", tmp_path / "parts")


# Noise on embeddings


def test_no_noise_is_no_change(tmp_path: Path, base: Path, chats: Path) -> None:
    plain, _ = prepare(tmp_path / "plain", base, chats)
    assert type(plain.trainer.objective) is NextToken
    noisy, _ = prepare(tmp_path / "noisy", base, chats, neftune_alpha=5.0)
    assert isinstance(noisy.trainer.objective, NoisyNextToken)
    model, batch = make_model(VARIANTS["qwen3"]), Batch(torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8).long())
    exact = NextToken().loss_sum(model, batch)
    assert torch.equal(NoisyNextToken(0.0).loss_sum(model, batch), exact)
    assert not torch.equal(NoisyNextToken(5.0).loss_sum(model, batch), exact)
    assert torch.equal(NextToken().loss_sum(model, batch), exact), "the hook is gone"
    run(plain.trainer)
    run(noisy.trainer)
    one, other = (json.loads((tmp_path / n / "metrics.jsonl").read_text().splitlines()[0]) for n in ("plain", "noisy"))
    assert one == other, "no noise when held-out answers are scored"


def test_noise_is_as_large_as_the_paper_says() -> None:
    model = make_model(VARIANTS["qwen3"])
    documents = torch.tensor([[0] * 4 + [1] * 12, [0] * 16])
    batch = Batch(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long), documents)
    seen: list[Tensor] = []
    watch = model.model.layers[0].register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0].detach())
    )
    torch.manual_seed(2)
    for _ in range(50):
        NoisyNextToken(8.0).loss_sum(model, batch)
    watch.remove()
    noise = torch.stack(seen) - model.state_dict()["model.embed_tokens.weight"][0]
    for rows, length in ((noise[:, 0, :4], 4), (noise[:, 0, 4:], 12), (noise[:, 1], 16)):
        bound = 8.0 / math.sqrt(length * 32)
        assert 0.95 * bound < float(rows.abs().max()) <= bound * 1.0001
        assert float(rows.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert abs(float(rows.mean())) < 0.05 * bound
    assert document_lengths(replace(batch, documents=None)).tolist() == [[16.0] * 16] * 2


# The plan

SMALL = VARIANTS["qwen3"]
MACHINE = Machine(flops=1e9, free_memory=10**10, compute_dtype="float32", default_minutes=3.0)


def plan(
    request: TuningRequest, rows: Rows, *, record: dict[str, Any] | None = None, adapter: int | None = None
) -> Plan:
    return make_tuning_plan(
        request, model=SMALL, base_record=record or {}, adapter=adapter, rows=rows, machine=MACHINE,
        measure=lambda count: 1000.0 * count,
    )  # fmt: skip


def rows_of(conversations: int, *, length: int = 128, held_out: bool = True) -> Rows:
    return Rows(an_epoch=max(1, conversations // 4), length=length, conversations=conversations, held_out=held_out)


@pytest.mark.parametrize(("conversations", "epochs"), [(3, 3), (1_100, 3), (10_000, 2), (52_000, 1)])
def test_more_data_takes_fewer_passes(conversations: int, epochs: int) -> None:
    chosen = plan(TuningRequest(base="b"), rows_of(conversations))
    train = chosen.train
    passes = train.total_steps * train.batch_size / max(1, conversations // 4)
    assert passes == pytest.approx(epochs, rel=0.1)
    assert f"{epochs} epoch" in chosen.why["plan"]
    assert "change it with --epochs or --minutes" in chosen.why["plan"]
    assert 512 <= train.batch_size * 128 <= 16_384 or conversations == 3
    assert train.total_steps >= min(900, 3 * conversations // 16)


@pytest.mark.parametrize(
    ("budget", "steps"),
    [({"steps": 7}, 7), ({"tokens": 128 * 4 * 10}, 10), ({"epochs": 2.0}, 125), ({"minutes": 1.0}, 408)],
)
def test_a_budget_is_kept(budget: dict[str, Any], steps: int) -> None:
    chosen = plan(TuningRequest(base="b", train={"batch_size": 4}, **budget), rows_of(1000))
    assert chosen.train.total_steps == steps
    assert chosen.seconds == (60.0 if "minutes" in budget else None)
    assert "change it with" not in chosen.why["plan"]


def test_the_optimizer_is_that_of_the_base_model() -> None:
    muon, adamw = ({"plan": {"train": {"optimizer": name}}} for name in ("muon", "adamw"))
    request, adapted = TuningRequest(base="b"), TuningRequest(base="b", lora=LoraConfig())
    assert plan(request, rows_of(100), record=muon).train.optimizer == "muon"
    assert plan(request, rows_of(100), record=adamw).train.optimizer == "adamw"
    for record in ({}, {"plan": 3}, {"plan": {"train": []}}):
        assert plan(request, rows_of(100), record=record).train.optimizer == "adamw", "made elsewhere"
    assert plan(adapted, rows_of(100), record=muon, adapter=10).train.optimizer == "adamw"
    asked = replace(request, train={"optimizer": "adamw"})
    assert plan(asked, rows_of(100), record=muon).train.optimizer == "adamw"


def test_large_models_take_small_steps_and_adapters_larger_ones() -> None:
    presets = [preset_config(name, vocab_size=49_152) for name in ("nano", "small", "base", "xl")]
    for lora in (False, True):
        rates = [tuning_rate(config, lora=lora) for config in presets]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] < 0.6 * rates[0]
    assert tuning_rate(SMALL, lora=False) == learning_rate(SMALL), "a tiny model learns as in pretraining"
    base, xl = presets[2:]
    assert parameters(base) > 1e8
    assert 0.05 < tuning_rate(base, lora=False) / learning_rate(base) < 0.2
    assert 2e-5 < tuning_rate(xl, lora=False) < 1e-4
    assert all(tuning_rate(config, lora=True) > 2 * tuning_rate(config, lora=False) for config in (base, xl))
    assert all(2e-4 <= tuning_rate(config, lora=True) <= 1e-3 for config in presets)


def test_without_held_out_answers_nothing_ends_early() -> None:
    assert plan(TuningRequest(base="b"), rows_of(100)).train.patience == 3
    chosen = plan(TuningRequest(base="b"), rows_of(100, held_out=False))
    assert chosen.train.patience == 0
    assert "early" not in chosen.why["plan"]


def test_an_adapter_needs_less_memory() -> None:
    tight = replace(MACHINE, free_memory=700_000)
    request = TuningRequest(base="b", train={"batch_size": 32})
    choose = {"model": SMALL, "base_record": {}, "rows": rows_of(1000, length=16), "machine": tight}
    whole = make_tuning_plan(request, adapter=None, measure=float, **choose)  # type: ignore[arg-type]
    small = make_tuning_plan(request, adapter=100, measure=float, **choose)  # type: ignore[arg-type]
    assert whole.train.micro_batch_size < small.train.micro_batch_size <= 32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 3, "epochs": 1.0}, "--steps and --epochs are both given; a run has one budget"),
        ({"neftune_alpha": -1.0}, "neftune_alpha is -1.0; it must be from 0, for none, to 100"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be from 0, for none, to below 1"),
        ({"context": 0}, "context is 0; it must be a whole number of at least 1"),
        ({"train": {"patience": -1}}, "train: patience is -1; it must be a whole number of at least 0"),
        ({"train": {"patients": 1}}, "train: unknown setting 'patients'"),
        ({"train": {"context": 9}}, "train.context is set; give --context instead"),
        ({"train": {"short_steps": 9}}, "train.short_steps is set; conversations are never read in halves"),
    ],
)
def test_requests_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TuningRequest(base="b", **values)
    assert str(raised.value).startswith(message)


# Data


def test_weights_and_text_are_mixed_as_asked(tmp_path: Path, base: Path) -> None:
    often, rare = write_chats(tmp_path / "often.jsonl", PAIRS[:12]), write_chats(tmp_path / "rare.jsonl", PAIRS[12:])
    novel = tmp_path / "novel.txt"
    novel.write_text("".join(f"In the year {n} nothing of note took place in the town.\n" for n in range(60)))
    data: dict[str, Any] = {"sources": (str(tmp_path / "*.jsonl"),), "named": "both", "val_fraction": 0.0}
    data |= {"weights": {str(often): 3.0}, "mix": (str(novel),), "mix_share": 0.25}
    facts = Facts()
    tuned = finetune.prepare(
        ChatRequest(**data), TuningRequest(base=str(base), epochs=1.0, context=32, train={"batch_size": 4}),
        RunFolder(tmp_path / "run"), CPU, "float32", facts,
    )  # fmt: skip
    texts: list[str] = []
    for step in range(tuned.plan.train.total_steps):
        batch = tuned.trainer.batches.at(step)
        texts += [tuned.tokenizer.decode(row.tolist()) for row in batch.tokens]
        ordinary = [tuned.tokenizer.special_id(IM_START) not in row for row in batch.tokens]
        assert sum(ordinary) == 1, "one row of four"
        of_text = batch.targets[ordinary.index(True)]
        assert bool((of_text != IGNORED).all()), "all of the text is learned"
    said = " ".join(texts)
    assert said.count("Say owl") == 3 * said.count("Two owls") > 0
    assert "novel.txt" in facts.facts["mixed in"]
    assert rare.exists()


def test_what_does_not_fit_is_cut_and_said(tmp_path: Path, base: Path) -> None:
    pairs = [*PAIRS, ("long " * 60, "short"), ("Tell me", "a tale of the cat and the dog and the owl " * 9)]
    _, facts = prepare(tmp_path / "run", base, write_chats(tmp_path / "x.jsonl", pairs), data={"val_fraction": 0.0})
    assert "2 conversations cut to fit" in facts.facts["rows"]
    with pytest.raises(ConfigError, match=r"^context is 65, more than the model's 64; give a smaller --context$"):
        prepare(tmp_path / "run", base, tmp_path / "x.jsonl", context=CONTEXT + 1)
    with pytest.raises(DataError, match=r"^no answer is left in a context of 3 tokens: "):
        prepare(tmp_path / "run", base, tmp_path / "x.jsonl", context=3)


def test_a_base_that_cannot_be_tuned_is_one_line(tmp_path: Path, base: Path, chats: Path) -> None:
    prepare(tmp_path / "adapter", base, chats, lora=LoraConfig())
    with pytest.raises(ModelFolderError, match=r"is an adapter; make it a model of its own with minigpt export"):
        prepare(tmp_path / "other", tmp_path / "adapter", chats)
    with pytest.raises(ModelFolderError, match=r"is the model to begin with; write the tuned one elsewhere with -o$"):
        prepare(base, base, chats)


LORA = LoraConfig(rank=2, alpha=8.0)


@pytest.mark.parametrize(
    ("variant", "lora"),
    [("qwen3-untied", None), ("gpt2", None), ("llama", LORA), ("gpt2", LORA), ("transformer-2017", LORA)],
)
def test_every_architecture_is_tuned(tmp_path: Path, chats: Path, variant: str, lora: LoraConfig | None) -> None:
    base = make_base(tmp_path / "base", variant)
    rate = {"learning_rate": 0.01, "batch_size": 4, "optimizer": "adamw"}
    tuned, _ = prepare(tmp_path / "run", base, chats, train=rate, data={"val_fraction": 0.3}, steps=12, lora=lora)
    assert tuned.final_score is not None
    before = tuned.final_score(load(base).model).loss
    run(tuned.trainer)
    assert tuned.final_score(load(tmp_path / "run").model).loss < before - 0.05


def test_the_tokens_of_padding_are_never_seen(tmp_path: Path, base: Path, chats: Path) -> None:
    tuned, _ = prepare(tmp_path / "run", base, chats)
    batch = tuned.trainer.batches.at(0)
    assert batch.documents is not None
    last = batch.documents.amax(dim=1, keepdim=True)
    padding = (batch.tokens == tuned.tokenizer.pad_id) & (batch.documents == last)
    changed = replace(batch, tokens=torch.where(padding, 7, batch.tokens))
    assert bool(padding.any())
    model = tuned.trainer.model
    assert NextToken().loss_sum(model, batch).item() == pytest.approx(
        NextToken().loss_sum(model, changed).item(), rel=1e-6
    )
