"""`minigpt eval`: how well a model predicts a text, or answers the rows of a task."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, stdin
from minigpt.cli.judging import judge_pairs
from minigpt.cli.tasks import Column, TaskName, instructions_task, likelihood_task, perplexity, table
from minigpt.cli.texts import stdin_file, typed
from minigpt.errors import DataError, UsageError
from minigpt.text.bundled import bundled_questions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from minigpt.checkpoint.folder import LoadedModel
    from minigpt.config import DTypeName, QuantizeName
    from minigpt.evaluation.bits import Score
    from minigpt.model.transformer import GPT
    from minigpt.text.pieces import Piece
    from minigpt.text.sources import SourceOptions
    from minigpt.text.tokenizer import Tokenizer

STDIN = "stdin"
FIELD = "text"
BATCH_PIECES = 64


@dataclass
class Text:
    """A text's ids, with a token that is context only before each document, and the bytes they stand for."""

    name: str
    ids: array[int] = field(default_factory=lambda: array("i"))
    borders: list[int] = field(default_factory=list)  # where the context-only tokens stand
    bytes: int = 0


def evaluate(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Files, folders or globs; - is standard input.", show_default=False),
    ] = None,
    model: models.ModelOption = None,
    task: Annotated[
        TaskName | None,
        typer.Option(help="Ask what FILE asks, instead: share right, with a 95 % range.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="With --task: the first N rows (of each file).", min=1, show_default=False)
    ] = None,
    show: Annotated[
        int | None,
        typer.Option(help="With --task instructions: print N answers too.", min=1, show_default=False),
    ] = None,
    as_json: models.JsonOption = False,
    limit_tokens: Annotated[
        int | None,
        typer.Option(help="Score about this many tokens of each file, evenly spread.", min=1, show_default=False),
    ] = None,
    field_: Annotated[
        str, typer.Option("--field", help="Field of a JSON line or parquet row that holds the text.")
    ] = FIELD,
    separator: Annotated[
        str | None, typer.Option(help=r"Text between documents of a file, such as '\n\n'.", show_default=False)
    ] = None,
    quantize: models.QuantizeOption = None,
    device: models.DeviceOption = None,
    dtype: models.DTypeOption = None,
) -> None:
    """Score a text in bits per byte, or answers by a task.

    Bits per byte can be compared across tokenizers; loss and perplexity are told beside them.

    \b
      minigpt eval alice.txt -m runs/alice
      cat *.txt | minigpt eval - --json
      minigpt eval books/ --limit-tokens 100000
      minigpt eval --task blimp BLiMP.zip --limit 200
      minigpt eval --task instructions --show 5

    Every token counts once and sees at least half a context before it (2,048 tokens are enough), where the text has so
    many. Each document follows an end-of-text token (or the model's begin token), which is context only.

    A task is a file of JSON lines, a folder or a zip of them. lambada {context, continuation}: right when each token of
    the continuation is the likeliest; perplexity a word. blimp {sentence_good, sentence_bad}, arc and piqa {query,
    choices, gold}: right when the right one has the highest summed log-probability; "per byte", the highest divided by
    its length in UTF-8 bytes.
    instructions {instruction, input, output, kind}, by default the bundled ones: right when the model's own answer, in
    its chat template, is the output but for spaces; "best constant" is what one answer to all would get.

    With a reward model FILE holds pairs of answers, by default the bundled ones: for what share of them the chosen
    answer has the higher reward.
    """
    if task is None and (limit is not None or show is not None):
        raise UsageError("--limit and --show are for --task; a text is cut with --limit-tokens")
    if task is not None:
        if limit_tokens is not None or field_ != FIELD or separator is not None:
            raise UsageError("--limit-tokens, --field and --separator are for text; with --task there is --limit")
        file = _task_file(task, files or [], show)
        loaded = _load(model, device, dtype, quantize)
        if task == "instructions":
            instructions_task(loaded, file, limit, show or 0, as_json=as_json)
        else:
            likelihood_task(loaded, task, file, limit, as_json=as_json)
        return
    if models.is_judge(model):
        judge_pairs(models.resolve(model), files or [], limit_tokens, device, as_json=as_json)
        return
    if not files and not stdin.is_piped():
        raise UsageError("no text; name files or folders, or pipe text: cat alice.txt | minigpt eval")
    from minigpt.text.sources import SourceOptions

    options = SourceOptions(field=typed(field_), separator=typed(separator))
    paths = _paths(files or ["-"])
    loaded = _load(model, device, dtype, quantize)
    from minigpt.evaluation.bits import Score

    scores: dict[str, Score] = {}
    for path in paths:
        if path is None:
            with stdin_file("text to score") as spooled:
                text = _read(spooled, STDIN, options, loaded.tokenizer)
        else:
            text = _read(path, str(path), options, loaded.tokenizer)
        scores[text.name] = _score(loaded.model, loaded.tokenizer, text, limit_tokens)
    found = list(scores.values())
    total = Score(sum(s.nats for s in found), sum(s.tokens for s in found), sum(s.bytes for s in found))
    _print_json(loaded.folder, total, scores) if as_json else _print_table(total, scores)


def _load(
    model: Path | None, device: str | None, dtype: DTypeName | None, quantize: QuantizeName | None
) -> LoadedModel:
    folder, device_ = models.resolve(model), models.pick_device(device)
    from minigpt.checkpoint.folder import load

    loaded = load(folder, device=device_, dtype=models.pick_dtype(dtype, device_))
    if quantize is not None:
        from minigpt.model.decoding import prepare

        prepare(loaded.model, quantize)
    return loaded


def _task_file(task: TaskName, files: list[str], show: int | None) -> Path:
    """The one file, folder or archive that a task is read from; instructions come with the program."""
    if task == "instructions" and not files:
        return bundled_questions()[0]
    if len(files) != 1 or files == ["-"]:
        raise UsageError(f"--task {task} takes one file, folder or zip; name it: minigpt eval --task {task} FILE")
    if show is not None and task != "instructions":
        raise UsageError(f"--show is for --task instructions; {task} has no answers to show")
    return Path(files[0])


def _paths(files: list[str]) -> list[Path | None]:
    """The files to read, in order; None is standard input."""
    from minigpt.text.sources import find_files

    if files.count("-") > 1:
        raise UsageError("- (standard input) can be read only once; name it once")
    paths: list[Path | None] = []
    for file in files:
        paths += [None] if file == "-" else find_files([file])
    return list(dict.fromkeys(paths))


def _read(path: Path, name: str, options: SourceOptions, tokenizer: Tokenizer) -> Text:
    """Read and tokenise one file, which messages call by a name."""
    from minigpt.text.decoding import ReadCounts
    from minigpt.text.sources import read_pieces

    counts, text = ReadCounts(), Text(name)
    pieces = read_pieces([path], options, counts=counts)
    while batch := list(islice(pieces, BATCH_PIECES)):
        _append(text, batch, tokenizer)
    if not text.bytes:
        raise DataError(f"{name}: no text in it; give files that hold text")
    if counts.bad_bytes:
        console.warning(f"{name}: {counts.bad_bytes:,} bytes were no UTF-8 and were replaced by U+FFFD")
    return text


def _append(text: Text, pieces: list[Piece], tokenizer: Tokenizer) -> None:
    before = tokenizer.end_of_text_id if tokenizer.bos_id is None else tokenizer.bos_id
    encoded = tokenizer.encode_batch([p.text for p in pieces], [not p.starts_document for p in pieces])
    for piece, ids in zip(pieces, encoded, strict=True):
        if piece.starts_document:
            text.borders.append(len(text.ids))
            text.ids.append(before)
        text.ids.extend(ids)
        text.bytes += len(piece.text.encode("utf-8"))


def _score(model: GPT, tokenizer: Tokenizer, text: Text, limit: int | None) -> Score:
    """Sum the loss over all tokens but those between documents, or over evenly spread spans of about `limit` tokens."""
    import numpy as np

    from minigpt.evaluation.bits import Score, spans
    from minigpt.inference.scoring import score

    ids = np.frombuffer(text.ids, dtype=np.int32)
    counted = np.ones(len(ids), dtype=bool)
    counted[text.borders] = False
    lengths = tokenizer.byte_lengths()
    # At least two spans, and in each a token that counts, however short the documents are.
    span = min(4 * model.config.max_position_embeddings, max(4, (limit or len(ids)) // 2))
    chosen = spans(len(ids), limit, span)
    nats, tokens, size = 0.0, 0, 0
    for start, stop in chosen:
        part = ids[start:stop].astype(np.int64)
        losses = score(model, partial(_slice, part), len(part))
        count = counted[start + 1 : stop]
        nats += float(losses[count].astype(np.float64).sum())
        tokens += int(count.sum())
        size += int(lengths[part[1:]][count].sum())
    # A tokenizer may put a space before a text that is not in it, so a whole text is measured by itself.
    return Score(nats, tokens, text.bytes if chosen == [(0, len(ids))] else size)


def _slice(ids: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    return ids[start:stop]


def _fields(score: Score) -> dict[str, Any]:
    names = ("bits_per_byte", "loss", "perplexity", "tokens", "bytes")
    return {name: getattr(score, name) for name in names}


def _print_json(folder: Path, total: Score, scores: dict[str, Score]) -> None:
    files = [{"file": name, **_fields(score)} for name, score in scores.items()]
    console.write(json.dumps({"model": str(folder), **_fields(total), "files": files}, ensure_ascii=False) + "\n")


def _print_table(total: Score, scores: dict[str, Score]) -> None:
    rows = dict(scores) if len(scores) == 1 else {**scores, "all": total}
    found = list(rows.values())
    columns = [
        Column("bits/byte", [f"{score.bits_per_byte:.4f}" for score in found]),
        Column("nats/token", [f"{score.loss:.4f}" for score in found]),
        Column("perplexity", [perplexity(score.perplexity) for score in found]),
        Column("tokens", [f"{score.tokens:,}" for score in found]),
        Column("bytes", [f"{score.bytes:,}" for score in found]),
    ]
    console.write(table(list(rows), columns))
