"""`minigpt data`: what a model would be tuned on, before it is."""

from __future__ import annotations

import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minigpt.cli import console, models
from minigpt.cli.texts import label, typed, visible
from minigpt.errors import ConfigError
from minigpt.text.bundled import bundled_instructions, bundled_preferences

if TYPE_CHECKING:
    from minigpt.text.conversations import ChatCounts, ChatOptions, Conversation
    from minigpt.text.fitting import Encoded, FitCounts
    from minigpt.text.preferences import PreferenceCounts
    from minigpt.text.tokenizer import Tokenizer
    from minigpt.training.packing import PackedRows

COLOUR, PLAIN = "\x1b[97;48;5;22m", "\x1b[0m"  # white on dark green, of a terminal's 256
MARKS = "⟦", "⟧"  # around what is learned, where there is no colour
LABEL_WIDTH = 15
RowsAs = Literal["chats", "pairs", "labels"]
COUNTED = {"chats": "conversations", "pairs": "pairs", "labels": "answers"}
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at data for tuning before it is used.")

DataArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA",
        help="Files, folders or globs of conversations. [default: the bundled instructions or pairs]",
        show_default=False,
    ),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=NAME",
        help="What one of our fields is called in the files, such as messages=chat; may be given again.",
        show_default=False,
    ),
]
SkipBadOption = Annotated[bool, typer.Option("--skip-bad", help="Go on without bad rows, and count them.")]


@app.callback()
def _group() -> None:
    """Keep `preview` a command of its own, though it is the only one."""


@app.command()
def preview(
    sources: DataArgument = None,
    model: models.ModelOption = None,
    limit: Annotated[int, typer.Option("-n", "--limit", help="Conversations to show.", min=0)] = 3,
    rows_as: Annotated[
        RowsAs,
        typer.Option("--as", help="Read rows as conversations, as pairs of answers, or as answers marked good or bad."),
    ] = "chats",
    renamed: MapOption = None,
    skip_bad: SkipBadOption = False,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens a row. [default: by the data, at most the model's]", min=1, show_default=False),
    ] = None,
    template: models.TemplateOption = None,
    as_json: models.JsonOption = False,
) -> None:
    """Show conversations as a model would see them, and what it would learn.

    \b
      minigpt data preview chats.jsonl -m runs/alice
      minigpt data preview chats.jsonl --map messages=conversation --skip-bad
      minigpt data preview a.json b.jsonl -n 0 --json
      minigpt data preview pairs.jsonl --as pairs -m runs/alice-chat
    """
    from minigpt.checkpoint.base import read_tokenizer
    from minigpt.text.chat import chat_template
    from minigpt.text.conversations import ChatOptions, parse_mapping
    from minigpt.text.preferences import PreferenceCounts
    from minigpt.training.packing import Fitter

    mapping = parse_mapping([typed(pair) for pair in renamed or []])
    folder = models.resolve(model)
    writer = chat_template(read_tokenizer(folder), template)
    writer.check_for_training()
    counts = PreferenceCounts()
    rows = _rows(rows_as, sources, ChatOptions(mapping=mapping, skip_bad=skip_bad), counts)
    conversations = [conversation for row in rows for conversation in row]
    fitter = Fitter(conversations, writer, context, _most(folder, context))
    (packed,) = fitter.packed({1.0: conversations}).values()
    figures = _figures(counts, fitter.lengths, packed, fitter.counts)
    count = min(limit, len(rows))
    spread = [rows[number * len(rows) // count] for number in range(count)]
    shown = [(one, fitter.one(one)) for row in spread for one in row]
    if as_json:
        examples = [_example(conversation, one, writer.tokenizer) for conversation, one in shown]
        console.write(json.dumps(figures | {"examples": examples}, ensure_ascii=False) + "\n")
        return
    _tell(counts)
    for conversation, one in shown:
        console.write(_drawn(conversation, one, writer.tokenizer))
    console.write(_summary(figures, counts, COUNTED[rows_as]))


def _rows(
    rows_as: RowsAs, sources: list[str] | None, options: ChatOptions, counts: PreferenceCounts
) -> list[list[Conversation]]:
    """Read each row as its conversations: one, or one for each answer of a pair."""
    from minigpt.text.conversations import Conversation, load_conversations
    from minigpt.text.preferences import load_labelled, load_pairs

    bundled = bundled_instructions if rows_as == "chats" else bundled_preferences
    named = sources or [str(path) for path in bundled()]
    if rows_as == "pairs":
        return [
            [Conversation(f"{one.where} {side}", one.prompt + answer)
             for side, answer in (("chosen", one.chosen), ("rejected", one.rejected))]
            for one in load_pairs(named, options, counts)
        ]  # fmt: skip
    if rows_as == "labels":
        return [
            [Conversation(f"{one.where} {'good' if one.good else 'bad'}", one.prompt + one.answer)]
            for one in load_labelled(named, options, counts)
        ]
    return [[one] for one in load_conversations(named, options, counts)]


def _most(folder: Path, context: int | None) -> int:
    """Return the context of the model, or the one asked for where nothing tells it; no torch is needed for that."""
    from minigpt.checkpoint.base import config_path
    from minigpt.text.tokenizer_json import read_json

    config = read_json(config_path(folder), missing_ok=True)
    most = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(most, int) and most > 0:
        return most
    if context is None:
        raise ConfigError(f"{folder} does not tell its context; name the length of a row with --context")
    return context


def _tell(counts: ChatCounts) -> None:
    """Say on stderr how the files were read."""
    for file, shapes in counts.shapes.items():
        console.fact("read", f"{file}: {', '.join(f'{shape} ({count:,})' for shape, count in shapes.items())}")
    if counts.first_skipped is not None:
        console.warning(f"the first bad row: {counts.first_skipped}")


def _figures(counts: ChatCounts, lengths: list[int], rows: PackedRows, fits: FitCounts) -> dict[str, Any]:
    """Everything that is counted; lengths are those before anything was cut, in tokens."""
    ordered = sorted(lengths)

    def at(share: float) -> int:
        return ordered[round(share * (len(ordered) - 1))]

    return {
        "shapes": counts.shapes,
        "conversations": counts.conversations,
        "messages": counts.turns,
        "duplicates": counts.duplicates,
        "disliked": counts.disliked,
        "unanswered": counts.unanswered,
        "skipped": counts.skipped,
        "first_skipped": counts.first_skipped,
        "bad_bytes": counts.bad_bytes,
        "lengths": {"min": ordered[0], "median": at(0.5), "p95": at(0.95), "max": ordered[-1]},
        "context": rows.row_length,
        "cut": fits.cut,
        "dropped": fits.dropped,
        "tokens": rows.positions,
        "learned": rows.targets,
        "learned_share": rows.targets / rows.positions,
        "rows": len(rows),
        "padding_share": 1 - rows.positions / (len(rows) * rows.row_length),
    }


def _summary(figures: dict[str, Any], counts: ChatCounts, counted: str) -> str:
    length, rows = figures["lengths"], figures["rows"]
    facts = [
        (counted, f"{figures['conversations']:,}, with {figures['messages']:,} messages"),
        ("lengths", "{min:,} to {max:,} tokens, median {median:,}, 95% within {p95:,}".format(**length)),
        ("learned", f"{figures['learned']:,} of {figures['tokens']:,} tokens, {figures['learned_share']:.0%}"),
        ("packed", f"{rows:,} row{'s' if rows != 1 else ''} of {figures['context']:,}, "
         f"{figures['padding_share']:.1%} padding"),
        ("too long", f"{figures['cut']:,} cut, {figures['dropped']:,} dropped since no answer was left"),
        *(("left out" if number == 0 else "", note) for number, note in enumerate(counts.notes())),
    ]  # fmt: skip
    return "".join(f"{name:<{LABEL_WIDTH}}{text}\n" for name, text in facts)


def _example(conversation: Conversation, one: Encoded | None, tokenizer: Tokenizer) -> dict[str, Any]:
    pieces = _pieces(one, tokenizer) if one is not None else []
    return {
        "where": conversation.where,
        "tokens": 0 if one is None else len(one.ids),
        "learned": 0 if one is None else int(one.trained.sum()),
        "text": "".join(text for text, _ in pieces),
        "pieces": [{"text": text, "learned": learned} for text, learned in pieces],
    }


def _pieces(one: Encoded, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the text of neighbouring tokens that are learned, or not, control tokens by their names."""
    pieces = []
    tokens = zip(one.ids.tolist(), one.trained.tolist(), strict=True)
    for learned, run in groupby(tokens, key=lambda token: token[1]):
        text = ""
        for special, group in groupby((id for id, _ in run), key=tokenizer.is_special):
            ids = list(group)
            names = (tokenizer.special_name(id) or label(tokenizer, id) for id in ids)
            text += "".join(names) if special else tokenizer.decode(ids, continuing=True)
        pieces.append((text, learned))
    return pieces


def _drawn(conversation: Conversation, one: Encoded | None, tokenizer: Tokenizer) -> str:
    """Draw a conversation, with what is learned on coloured ground on a terminal and in brackets elsewhere."""
    if one is None:
        return f"{conversation.where}  dropped: no answer is left in a row\n\n"
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    drawn = ""
    for text, learned in _pieces(one, tokenizer):
        lines = [visible(line) for line in text.split("\n")]
        if learned and coloured:  # line by line, so that a pager keeps the colour
            lines = [f"{COLOUR}{line}{PLAIN}" if line else "" for line in lines]
        drawn += f"{MARKS[0]}{chr(10).join(lines)}{MARKS[1]}" if learned and not coloured else "\n".join(lines)
    count = int(one.trained.sum())
    return f"{conversation.where}  {len(one.ids):,} tokens, {count:,} learned\n{drawn}\n\n"
