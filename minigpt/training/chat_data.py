"""From files of conversations to rows to train on and answers to score; what was found is told to a reporter."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minigpt.config import ModelConfig
from minigpt.errors import ConfigError
from minigpt.text.chat import CHATML, ChatTemplate, chat_template
from minigpt.text.conversations import (
    ChatCounts,
    ChatOptions,
    Conversation,
    Split,
    load_conversations,
    split_conversations,
)
from minigpt.text.corpus import Corpus, build
from minigpt.text.fitting import Encoded, FitCounts
from minigpt.text.sources import SourceOptions, find_files
from minigpt.text.split import scan
from minigpt.text.tokenizer import Tokenizer
from minigpt.training.chat_batches import MAX_WEIGHT, ChatSource
from minigpt.training.packing import Fitter, PackedRows
from minigpt.training.packing import pad_id as pad_id
from minigpt.training.run_folder import RunFolder
from minigpt.training.runs import CACHE, Reporter


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """The conversations to train on and how to read them; `named` is what the person typed, for messages.

    `weights` says of files, or of folders they are in, how often an epoch takes each conversation; `mix` are files of
    ordinary text that `mix_share` of the rows are taken from.
    """

    sources: tuple[str, ...]
    named: str
    weights: dict[str, float] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)
    skip_bad: bool = False
    template: str | None = None
    val_fraction: float = 0.1
    mix: tuple[str, ...] = ()
    mix_share: float = 0.1

    def __post_init__(self) -> None:
        self.options()
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction is {self.val_fraction}; it must be 0 for none, or a share below 1")
        if not 0 < self.mix_share < 1:
            raise ConfigError(f"mix_share is {self.mix_share}; it must be a share between 0 and 1")
        for name, weight in self.weights.items():
            if not 0 < weight <= MAX_WEIGHT:
                raise ConfigError(f"--weight {name}={weight:g}: it must be above 0, at most {MAX_WEIGHT:g}")

    def options(self) -> ChatOptions:
        """How the conversations are read."""
        return ChatOptions(mapping=self.mapping, skip_bad=self.skip_bad)

    def files(self) -> list[Path]:
        """All files that the run reads; one that is not there is a DataError."""
        return [*find_files(self.sources, kinds=("json", "parquet")), *(find_files(self.mix) if self.mix else ())]


@dataclass(frozen=True, kw_only=True)
class ChatData:
    """Rows to train on, packed; rows to score; and the held-out conversations, or trained ones where none is held out.

    `facts` go into the record; their `digest` tells whether the same conversations are read again.
    """

    template: ChatTemplate
    row_length: int
    sources: list[ChatSource]
    held_out: list[Encoded]
    examples: list[Conversation]
    text: Corpus | None
    facts: dict[str, Any]

    def packed(self, conversations: Sequence[Encoded]) -> PackedRows:
        """Put conversations into rows of this length."""
        return PackedRows(conversations, self.row_length, pad_id=pad_id(self.template.tokenizer))


def read_chat(
    request: ChatRequest,
    tokenizer: Tokenizer,
    model: ModelConfig,
    context: int | None,
    folder: RunFolder,
    report: Reporter,
) -> ChatData:
    """Read, split, encode and pack; rows are `context` tokens long, or as long as the conversations need.

    Errors: DataError for bad rows, by file and line, and where nothing is left to train on; ConfigError for a template
    that cannot be trained with, or a context that the model does not have.
    """
    template = chat_template(tokenizer, request.template)
    template.check_for_training()
    counts = ChatCounts()
    conversations = load_conversations(request.sources, request.options(), counts)
    split = split_conversations(conversations, request.val_fraction)
    fitter = Fitter(conversations, template, context, model.max_position_embeddings)
    packing = fitter.packed(_by_weight(split.train, request.weights))
    held_out = fitter.cut(split.held_out)
    _tell_data(request, counts, split, report)
    _tell_template(template, [one for rows in packing.values() for one in rows.conversations] + held_out, report)
    _tell_rows(list(packing.values()), fitter.counts, report)
    text = None if not request.mix else _mixed_text(request, template.tokenizer, folder, report)
    return ChatData(
        template=template,
        row_length=fitter.length,
        sources=[ChatSource(rows, weight) for weight, rows in packing.items()],
        held_out=held_out,
        examples=split.held_out or split.train,
        text=text,
        facts={
            "digest": _digest(conversations, text),
            "conversations": counts.conversations,
            "held_out": len(held_out),
            **asdict(fitter.counts),
            "template": "chatml" if template.source == CHATML else "model",
        },
    )


def _by_weight(conversations: Sequence[Conversation], weights: Mapping[str, float]) -> dict[float, list[Conversation]]:
    """Group conversations by the weight of their files; a weight for no file at all is a ConfigError."""
    groups: dict[float, list[Conversation]] = {}
    used: set[str] = set()
    for conversation in conversations:
        file = Path(os.path.abspath(conversation.file))
        name = next((str(path) for path in (file, *file.parents) if str(path) in weights), None)
        used |= {name} if name is not None else set()
        groups.setdefault(1.0 if name is None else weights[name], []).append(conversation)
    if unused := sorted(weights.keys() - used):
        raise ConfigError(f"--weight {unused[0]}={weights[unused[0]]:g}: no conversation comes from there")
    return groups


def _mixed_text(request: ChatRequest, tokenizer: Tokenizer, folder: RunFolder, report: Reporter) -> Corpus:
    """Tokenize the ordinary text that is mixed in; all of it is trained on."""
    files = find_files(request.mix)
    total = sum(file.stat().st_size for file in files)
    found = scan(files, SourceOptions(), val_fraction=0.0, progress=lambda done: report.working("reading", done, total))
    corpus = build(
        found,
        tokenizer,
        folder.path.parent / CACHE,
        progress=lambda done: report.working("tokenizing", done, found.bytes),
    )
    named = files[0].name if len(files) == 1 else f"{len(files)} files"
    report.fact("mixed in", f"{named}, {len(corpus.train):,} tokens of text: {request.mix_share:.0%} of the rows")
    return corpus


def _digest(conversations: Sequence[Conversation], text: Corpus | None) -> str:
    """Tell one set of conversations and text from another."""
    digest = hashlib.sha256()
    for conversation in conversations:
        turns = [(message.role, message.content) for message in conversation.messages]
        digest.update(json.dumps(turns).encode("utf-8"))
    digest.update(b"" if text is None else text.folder.name.encode("utf-8"))
    return digest.hexdigest()


def _tell_data(request: ChatRequest, counts: ChatCounts, split: Split[Conversation], report: Reporter) -> None:
    shapes: Counter[str] = sum(counts.shapes.values(), Counter())
    parts = [request.named, " and ".join(shape for shape, _ in shapes.most_common())]
    parts += [f"{counts.conversations:,} conversations of {counts.turns:,} messages", *counts.notes()]
    if split.held_out:
        parts.append(f"{len(split.held_out):,} held out")
    elif request.val_fraction:
        parts.append("too few to hold any out")
    if split.leaks:
        parts.append(f"{split.leaks:,} not, since training asks the same")
    report.fact("data", ", ".join(parts))
    if counts.first_skipped is not None:
        report.warning(f"{counts.first_skipped} (the first of {counts.skipped.total():,} bad rows skipped)")


def _tell_template(template: ChatTemplate, encoded: Sequence[Encoded], report: Reporter) -> None:
    positions, targets = sum(map(len, encoded)), sum(int(one.trained[1:].sum()) for one in encoded)
    name = "ChatML" if template.source == CHATML else "the model's own"
    report.fact("template", f"{name}; {targets:,} of {positions:,} tokens ({targets / positions:.0%}) are trained on")


def _tell_rows(packing: Sequence[PackedRows], fitted: FitCounts, report: Reporter) -> None:
    count, length = sum(map(len, packing)), packing[0].row_length
    padding = 1 - sum(rows.positions for rows in packing) / (count * length)
    text = f"{count:,} of {length:,} tokens, {padding:.0%} of them padding"
    if fitted.cut:
        text += f"; {fitted.cut:,} conversations cut to fit, from the oldest turns on"
    if fitted.dropped:
        text += f"; {fitted.dropped:,} dropped, since no answer was left in them"
    report.fact("rows", text)
