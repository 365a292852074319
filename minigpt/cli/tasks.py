"""`minigpt eval --task`: what share of a task's rows a model gets right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from minigpt.cli import console
from minigpt.cli.texts import visible

if TYPE_CHECKING:
    from minigpt.checkpoint.folder import LoadedModel
    from minigpt.evaluation.instructions import Answer, KindResult
    from minigpt.evaluation.shares import Share
    from minigpt.evaluation.tasks import Result

TaskName = Literal["lambada", "blimp", "arc", "piqa", "instructions"]
TABLE_WIDTH = 80


@dataclass(frozen=True)
class Column:
    """One column of a table; where a table is too wide, those with the highest `spare` go first, never those with 0."""

    title: str
    cells: list[str]
    spare: int = 0


def likelihood_task(loaded: LoadedModel, task: str, file: Path, limit: int | None, *, as_json: bool) -> None:
    """Score the choices of every row and print what is right."""
    from minigpt.evaluation.tasks import overall, run_task

    with console.progress() as progress:

        def tell(name: str, share: float) -> None:
            progress.show(f"{'scoring':<{console.LABEL_WIDTH}}{name} ({share:.0%})", share)

        results = run_task(loaded.model, loaded.tokenizer, task, file, limit=limit, progress=tell)
    total = overall(results)
    _warn_of_cuts(total.cut, total.rows, loaded, "are longer than the context", "the end of each is kept")
    if as_json:
        found = {"model": str(loaded.folder), "task": task, "file": str(file), **_fields(total)}
        found["files"] = [{"name": result.name, **_fields(result)} for result in results]
        console.write(json.dumps(found, ensure_ascii=False) + "\n")
        return
    rows = results if len(results) == 1 else [*results, total]
    console.write(table([row.name for row in rows], _columns(rows)))


def instructions_task(loaded: LoadedModel, file: Path, limit: int | None, show: int, *, as_json: bool) -> None:
    """Let the model answer every row and print what is right."""
    from minigpt.evaluation.instructions import answer_rows, read_rows, tally

    rows = read_rows(file, limit)
    with console.progress() as progress:

        def tell(share: float) -> None:
            progress.show(f"{'answering':<{console.LABEL_WIDTH}}{file.name} ({share:.0%})", share)

        answers = answer_rows(loaded.model, loaded.tokenizer, rows, tell)
    results = tally(answers)
    cut = sum(answer.cut for answer in answers)
    _warn_of_cuts(cut, len(answers), loaded, "leave too little room in the context", "the end of each question is kept")
    shown = [answers[i * len(answers) // show] for i in range(show)] if show < len(answers) else answers
    if as_json:
        found = {"model": str(loaded.folder), "task": "instructions", "file": str(file), **_kind_fields(results[-1])}
        found["kinds"] = [{"kind": result.kind, **_kind_fields(result)} for result in results[:-1]]
        if show:
            found["examples"] = [_example_fields(answer) for answer in shown]
        console.write(json.dumps(found, ensure_ascii=False) + "\n")
        return
    console.write(table([result.kind for result in results], _kind_columns(results)))
    console.write("".join(map(_example, shown)))


def _warn_of_cuts(cut: int, rows: int, loaded: LoadedModel, fault: str, done: str) -> None:
    if cut:
        context = loaded.model.config.max_position_embeddings
        console.warning(f"{cut:,} of {rows:,} rows {fault} of {context:,} tokens; {done}")


def _fields(result: Result) -> dict[str, Any]:
    found = {"rows": result.rows, "accuracy": result.right.value, "interval": result.right.interval}
    if result.right_per_byte is not None:
        found["accuracy_per_byte"] = result.right_per_byte.value
        found["interval_per_byte"] = result.right_per_byte.interval
        found["chance"] = result.chance
    else:
        found["perplexity"] = result.perplexity
    return found


def _kind_fields(result: KindResult) -> dict[str, Any]:
    return {
        "rows": result.rows,
        "accuracy": result.right.value,
        "interval": result.right.interval,
        "ended": result.ended,
        "constant": result.constant,
        "constant_answer": result.constant_answer,
    }


def _example_fields(answer: Answer) -> dict[str, Any]:
    return {**answer.row, "answer": answer.text, "right": answer.right, "ended": answer.ended}


def _columns(results: Sequence[Result]) -> list[Column]:
    columns = [Column("rows", [f"{result.rows:,}" for result in results], 1)]
    columns += _share_columns("right", [result.right for result in results])
    per_byte = [result.right_per_byte for result in results if result.right_per_byte is not None]
    if not per_byte:
        return [*columns, Column("perplexity", [perplexity(result.perplexity or 0.0) for result in results])]
    share, interval = _share_columns("per byte", per_byte)
    chance = Column("chance", [_percent(result.chance or 0.0) for result in results], 3)
    return [*columns, share, Column(interval.title, interval.cells, 2), chance]


def _kind_columns(results: Sequence[KindResult]) -> list[Column]:
    return [
        Column("rows", [f"{result.rows:,}" for result in results], 1),
        *_share_columns("right", [result.right for result in results]),
        Column("ended", [_percent(result.ended) for result in results]),
        Column("best constant", [_percent(result.constant) for result in results]),
    ]


def _share_columns(title: str, shares: Sequence[Share]) -> list[Column]:
    intervals = ["–".join(map(_percent, share.interval)) for share in shares]
    return [Column(title, [_percent(share.value) for share in shares]), Column("95 % range", intervals)]


def perplexity(value: float) -> str:
    """Write a perplexity in a few characters, however large: that of a model which knows nothing has no end."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def table(names: Sequence[str], columns: list[Column]) -> str:
    """Lay out rows by name, with as many columns on the right as a narrow terminal has room for."""
    names = [visible(name) for name in names]
    first = max(map(len, names))
    while columns and first + sum(2 + _width(column) for column in columns) > TABLE_WIDTH:
        spare = max(columns, key=lambda column: column.spare)
        if not spare.spare:
            break
        columns = [column for column in columns if column is not spare]
    rows = [("", *(column.title for column in columns)), *zip(names, *(c.cells for c in columns), strict=True)]
    widths = [_width(column) for column in columns]
    return "".join(
        f"{name:{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True)) + "\n"
        for name, *cells in rows
    )


def _width(column: Column) -> int:
    return max(len(column.title), *map(len, column.cells))


def _example(answer: Answer) -> str:
    """An answer under what was asked, each on one line."""
    from minigpt.text.instructions import joined

    row = answer.row
    verdict = ("right" if answer.right else "wrong") + ("" if answer.ended else ", did not end")
    told = {
        "asked": joined(row["instruction"], row["input"]),
        "answered": answer.text,
        "expected": row["output"],
    }
    lines = "".join(f"  {label:<{console.LABEL_WIDTH}}{visible(text)}\n" for label, text in told.items())
    return f"\n{visible(row['kind']) or 'row'}: {verdict}\n{lines}"
