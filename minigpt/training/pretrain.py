"""The road from text to a trained model: read, split, tokenize, plan, train. It prints nothing: it tells a reporter."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minigpt.checkpoint.folder import save_description
from minigpt.config import DTypeName
from minigpt.errors import ConfigError, DataError, ModelFolderError
from minigpt.evaluation.bits import Score, score_tokens
from minigpt.model.size import training_bytes
from minigpt.model.transformer import GPT
from minigpt.text.corpus import Corpus, build
from minigpt.text.sources import SourceOptions, find_files
from minigpt.text.split import Scan, scan, training_sample
from minigpt.text.tokenizer import Tokenizer
from minigpt.training import probe, runs
from minigpt.training.batches import CorpusBatches
from minigpt.training.distributed import ALONE, Ranks
from minigpt.training.objectives import NextToken
from minigpt.training.plan import EVALUATIONS, Plan, Request, choose_model, make_plan, vocabulary_size
from minigpt.training.run_folder import RunFolder
from minigpt.training.runs import CACHE, UNCLEARED, Reporter, Run, understanding
from minigpt.training.trainer import Trainer
from minigpt.units import byte_size

FINAL_TOKENS = 1 << 16  # held-out tokens that are scored at the end, however short the run
MADE_BY = "train"
MAX_SAMPLE_MEGABYTES = 100_000.0


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """The text to train on and how to read it; `named` is what the person typed, for messages.

    Without sources the text came through stdin and lies in the run's folder.
    """

    sources: tuple[str, ...]
    named: str
    field: str = "text"
    separator: str | None = None
    min_chars: int = 0
    val_fraction: float = 0.1
    sample_megabytes: float = 16.0
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        self.options()
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction is {self.val_fraction}; it must be 0 for none, or a share below 1")
        if not 0 < self.sample_megabytes <= MAX_SAMPLE_MEGABYTES:
            raise ConfigError(
                f"tokenizer_sample_mb is {self.sample_megabytes}; it must be above 0, at most {MAX_SAMPLE_MEGABYTES:,}"
            )

    def options(self) -> SourceOptions:
        """How the text is read."""
        return SourceOptions(field=self.field, separator=self.separator, min_chars=self.min_chars)


@dataclass(kw_only=True)
class TextRun(Run):
    """A run on text."""

    corpus: Corpus


def prepare(
    data: DataRequest,
    request: Request,
    folder: RunFolder,
    device: torch.device,
    dtype: DTypeName | None,
    report: Reporter,
    ranks: Ranks = ALONE,
) -> TextRun:
    """Read the text, make tokenizer, corpus and plan, and begin the run's folder; nothing old is lost before that."""
    found = _read(data, folder, report)
    tokenizer = _tokenizer(data, request, found, device.type, report)
    corpus = _corpus(found, tokenizer, folder, report)
    compute = dtype or probe.fast_dtype(device)
    timed = request.steps is None and request.tokens is None and request.epochs is None
    machine = runs.shared_machine(probe.look_at(device, compute, timed=timed), ranks)
    model, why = choose_model(request, tokenizer.vocab_size, len(corpus.train), machine)
    plan = make_plan(
        request,
        model=model,
        model_why=why,
        train_tokens=len(corpus.train),
        machine=machine,
        measure=lambda shape, rows, context: (
            ranks.count
            * probe.training_speed(
                shape, rows, device, compute, context=context, optimizer=request.train.get("optimizer", "muon")
            )
        ),
    )
    plan = runs.shared_plan(plan, ranks)
    _describe(plan, device, report, ranks)
    record = runs.new_record(MADE_BY, plan, device, _origin(data, request, found, corpus))
    runs.claim(
        folder,
        record,
        lambda: save_description(folder.path, model, tokenizer, record),
        keep_text=not data.sources or folder.taken() is None,  # what an old run did not leave is not ours to remove
    )
    gpt = _fresh(plan).to(device)
    runs.announce(ranks, MADE_BY, folder, gpt, resumed=False)
    return _run(gpt, tokenizer, corpus, plan, folder, record, ranks)


def resume(
    folder: RunFolder,
    record: dict[str, Any],
    state: runs.State | None,
    device: torch.device,
    report: Reporter,
    ranks: Ranks = ALONE,
) -> TextRun:
    """Take a run up where it was saved, with the corpus, split and plan recorded in its folder.

    Without a state it is at its beginning, as another process has just prepared it.
    """
    tokenizer = Tokenizer.load(folder.path)
    corpus = _recorded_corpus(record, tokenizer, folder, report)
    plan = runs.recorded_plan(record, None if state is None else state[1], folder)
    model = (_fresh(plan) if state is None else GPT(plan.model)).to(device)
    runs.announce(ranks, MADE_BY, folder, model, resumed=state is not None)
    run = _run(model, tokenizer, corpus, plan, folder, record, ranks)
    if state is not None:
        runs.take_up(run, folder, state, report)
    _describe(plan, device, report, ranks)
    return run


def _fresh(plan: Plan) -> GPT:
    model = GPT(plan.model)
    model.initialize(torch.Generator().manual_seed(plan.train.seed))
    return model


def check_sources(data: DataRequest, folder: RunFolder) -> None:
    """Refuse sources that are not there, or that a run in this folder would write over: a DataError."""
    folder.check_sources(find_files(data.sources))


def drop_unused_text(folder: RunFolder) -> None:
    """Remove piped text that came to nothing, where the folder is still an old run's; else --resume begins with it."""
    with suppress(ModelFolderError):
        if folder.taken() is None or UNCLEARED in (recorded(folder) or {}):
            return
    folder.incoming_path.unlink(missing_ok=True)


def recorded(folder: RunFolder) -> dict[str, Any] | None:
    """Return the record of the training run in a folder, or None where there is none."""
    return runs.recorded(folder, MADE_BY)


def asked(record: dict[str, Any], folder: RunFolder) -> tuple[DataRequest, Request]:
    """Return what a recorded run was begun with."""
    with understanding(folder):
        data = DataRequest(**record["data"] | {"sources": tuple(record["data"]["sources"])})
        return data, Request(**record["request"])


def check_same(
    record: dict[str, Any],
    folder: RunFolder,
    data: DataRequest,
    said: dict[str, Any],
    *,
    sourced: bool,
) -> None:
    """Refuse to resume with another source, if one was named, or other settings, if said, than the run began with."""
    begun_data, begun = asked(record, folder)
    runs.check_source(not sourced or data.sources == begun_data.sources, data.named, begun_data.named)
    with understanding(folder):
        before = record["plan"]["model"] | record["plan"]["train"] | asdict(begun_data)
        before |= {name: value for name, value in asdict(begun).items() if value is not None}
    runs.check_said(before, said)


def _run(
    model: GPT,
    tokenizer: Tokenizer,
    corpus: Corpus,
    plan: Plan,
    folder: RunFolder,
    record: dict[str, Any],
    ranks: Ranks,
) -> TextRun:
    train = plan.train
    batches = CorpusBatches(
        corpus.train,
        context=train.context,
        batch_size=train.batch_size,
        seed=train.seed,
        short_steps=train.short_steps,
    )
    score = partial(_score, corpus, tokenizer) if _holds_out(corpus) else None
    validate = None if score is None else partial(score, limit=plan.validation_tokens)
    # At the end all of the held-out text, or where it is large, as much as in all evaluations together.
    limit = max(FINAL_TOKENS, EVALUATIONS * plan.validation_tokens)
    return TextRun(
        trainer=Trainer(
            model, NextToken(), batches, train, folder, validate=validate, seconds=plan.seconds, ranks=ranks
        ),
        tokenizer=tokenizer,
        plan=plan,
        record=record,
        final_score=None if score is None else partial(score, limit=limit),
        corpus=corpus,
    )


def _holds_out(corpus: Corpus) -> bool:
    """Tell whether held-out text can be scored: more than a first token, which is context only, and an end."""
    return len(corpus.val) > 2


def _score(corpus: Corpus, tokenizer: Tokenizer, model: GPT, limit: int | None) -> Score:
    return score_tokens(model, corpus.val.read, len(corpus.val), tokenizer.byte_lengths(), limit=limit)


def _read(data: DataRequest, folder: RunFolder, report: Reporter) -> Scan:
    files = find_files(data.sources or [folder.incoming_path if folder.incoming_path.exists() else folder.text_path])
    total = sum(file.stat().st_size for file in files)
    found = scan(
        files,
        data.options(),
        val_fraction=data.val_fraction,
        progress=lambda done: report.working("reading", done, total),
    )
    parts = [data.named, byte_size(found.bytes), f"{found.documents:,} document{'s' if found.documents != 1 else ''}"]
    if found.duplicates:
        parts.append(f"{found.duplicates:,} duplicates dropped")
    if found.too_short:
        parts.append(f"{found.too_short:,} short ones dropped")
    share = f"{data.val_fraction:.0%}"
    held = {
        "none": "nothing held out",
        "documents": f"{share} of the documents held out",
        "ends": f"last {share} held out" if found.documents == 1 else f"last {share} of each held out",
    }
    report.fact("corpus", ", ".join([*parts, held[found.split]]))
    if found.bad_bytes:
        report.warning(f"{found.bad_bytes:,} bytes were no UTF-8 and were replaced by U+FFFD")
    return found


def _tokenizer(data: DataRequest, request: Request, found: Scan, device_type: str, report: Reporter) -> Tokenizer:
    started = time.monotonic()
    sample = training_sample(found, int(1e6 * data.sample_megabytes))
    if data.tokenizer is not None:
        tokenizer = Tokenizer.load(Path(data.tokenizer))
        text = f"from {data.tokenizer}, {tokenizer.vocab_size:,} tokens"
    else:
        wanted = request.vocab_size or vocabulary_size(request, found.train_bytes, device_type)
        tokenizer = Tokenizer.train(sample, wanted)
        text = f"byte-level BPE, {tokenizer.vocab_size:,} tokens ({time.monotonic() - started:.1f} s)"
        if request.vocab_size is not None and tokenizer.vocab_size < wanted:
            text += f"; the text has no more than these of the {wanted:,} asked for"
    report.fact("tokenizer", text)
    return tokenizer


def _corpus(found: Scan, tokenizer: Tokenizer, folder: RunFolder, report: Reporter) -> Corpus:
    corpus = build(
        found,
        tokenizer,
        folder.path.parent / CACHE,
        progress=lambda done: report.working("tokenizing", done, found.bytes),
    )
    tokens = len(corpus.train) + len(corpus.val)
    rate = (corpus.train_bytes + corpus.val_bytes) / max(1, tokens)
    report.fact("tokens", f"{tokens:,}, {rate:.2f} bytes a token")
    return corpus


def _recorded_corpus(record: dict[str, Any], tokenizer: Tokenizer, folder: RunFolder, report: Reporter) -> Corpus:
    """Open the run's corpus; where its cache is gone, make it again from the same text."""
    with understanding(folder):
        name, digest = record["corpus"]["cache"], record["corpus"]["digest"]
    with suppress(DataError):  # gone or damaged: made again
        return Corpus.load(folder.path.parent / CACHE / name)
    data = asked(record, folder)[0]
    found = _read(data, folder, report)
    if found.digest != digest:
        raise DataError(f"{data.named} has changed since this run began; put the old text back, or start again")
    return _corpus(found, tokenizer, folder, report)


def _describe(plan: Plan, device: torch.device, report: Reporter, ranks: Ranks) -> None:
    train = plan.train
    need = training_bytes(
        plan.model,
        ranks.pass_rows(train.batch_size, train.micro_batch_size),
        train.context,
        train.compute_dtype,
        train.optimizer,
        device=device.type,
        shards=ranks.shards,
    )
    runs.describe(plan, device, need, report, ranks)


def _origin(data: DataRequest, request: Request, found: Scan, corpus: Corpus) -> dict[str, Any]:
    """What a run on text was begun with."""
    return {
        "data": asdict(data),
        "request": asdict(request),
        "corpus": {
            "digest": found.digest,
            "cache": corpus.folder.name,
            "documents": found.documents,
            "train_tokens": len(corpus.train),
            "train_bytes": corpus.train_bytes,
            "held_out_tokens": len(corpus.val),
            "held_out_bytes": corpus.val_bytes,
        },
    }
