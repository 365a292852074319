"""`minigpt tokenizer`: train one, and see what it makes of a text."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, stdin
from minigpt.cli.texts import given_text, label, stdin_file, typed, visible
from minigpt.errors import ConfigError, DataError, UsageError
from minigpt.units import byte_size

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer

LONGEST = 10  # tokens shown as the longest ones
COLOURS = (24, 58, 53, 22)  # of a terminal's 256, dark enough for white text
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train a tokenizer alone, or look into one.")

FolderOption = Annotated[
    Path | None,
    typer.Option(
        "-m",
        "--model",
        help="Folder with a tokenizer, or a tokenizer.json. [default: as for generate]",
        autocompletion=models.complete_model,
        show_default=False,
    ),
]
TextArgument = Annotated[
    str | None, typer.Argument(metavar="TEXT", help="Text; joined to piped text, if any.", show_default=False)
]


@app.command()
def train(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Files, folders or globs; - is standard input.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")] = Path("tokenizer"),
    vocab_size: Annotated[int, typer.Option(help="Tokens, control tokens and the 256 bytes among them.")] = 4096,
    field: Annotated[str, typer.Option(help="Field of a JSON line or parquet row that holds the text.")] = "text",
    separator: Annotated[
        str | None, typer.Option(help=r"Text between documents of a file, such as '\n\n'.", show_default=False)
    ] = None,
    min_chars: Annotated[int, typer.Option(help="Drop documents shorter than this.")] = 0,
    sample_mb: Annotated[float, typer.Option(help="Megabytes of text to learn from.")] = 16.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the tokenizer in the folder.")] = False,
) -> None:
    """Learn a byte-level BPE vocabulary from text.

    \b
      minigpt tokenizer train alice.txt -o runs/words --vocab-size 1024
      cat *.txt | minigpt tokenizer train -o runs/words
      minigpt tokenizer train notes.jsonl --field body -o runs/words
    """
    from minigpt.text.sources import SourceOptions, find_files
    from minigpt.text.split import scan, training_sample
    from minigpt.text.tokenizer import Tokenizer

    options = SourceOptions(field=typed(field), separator=typed(separator), min_chars=min_chars)
    if not sample_mb > 0:
        raise ConfigError(f"--sample-mb {sample_mb:g}: nothing to learn from; give more than 0")
    held = next((name for name in ("model.safetensors", "tokenizer.json") if (out / name).exists()), None)
    if held == "model.safetensors" or (held and not overwrite):
        what = "a model, which its tokenizer belongs to" if held != "tokenizer.json" else "a tokenizer already"
        raise ConfigError(f"{out} holds {what}; write elsewhere with -o{'' if overwrite else ', or use --overwrite'}")
    with _paths(sources or []) as paths:
        found = scan(find_files(paths), options, val_fraction=0.0)
        tokenizer = Tokenizer.train(training_sample(found, int(sample_mb * 1e6)), vocab_size)
    tokenizer.save(out)
    if found.bad_bytes:
        console.warning(f"{found.bad_bytes:,} bytes were no UTF-8 and were replaced by U+FFFD")
    if tokenizer.vocab_size < vocab_size:
        console.warning(f"the text holds pairs for {tokenizer.vocab_size:,} tokens only, not for {vocab_size:,}")
    console.fact(
        "corpus", f"{byte_size(found.bytes)}, {found.documents:,} document{'s' if found.documents != 1 else ''}"
    )
    console.fact("tokenizer", f"{out}: byte-level BPE, {tokenizer.vocab_size:,} tokens")
    console.fact("next", f'minigpt tokenizer show "some text" -m {shlex.quote(str(out))}', wrapped=False)


@contextmanager
def _paths(sources: list[str]) -> Iterator[list[str]]:
    """Give the sources as paths; standard input becomes a file for as long as it is needed."""
    if sources and "-" not in sources:
        yield sources
        return
    if sources not in ([], ["-"]):
        raise UsageError("- (standard input) stands alone; name files without it, or pipe everything")
    if not sources and not stdin.is_piped():
        raise UsageError("no text; name files or folders, or pipe text: cat *.txt | minigpt tokenizer train")
    with stdin_file("text to learn from") as path:
        yield [str(path)]


@app.command()
def encode(text: TextArgument = None, model: FolderOption = None, as_json: models.JsonOption = False) -> None:
    """Turn text into token ids.

    \b
      minigpt tokenizer encode "Once upon a time" -m runs/alice
      minigpt tokenizer encode < alice.txt | minigpt tokenizer decode
    """
    whole = given_text(text, "minigpt tokenizer encode")
    tokenizer = _load(model)
    ids = tokenizer.encode(whole or "")
    if as_json:
        console.write(_json({"ids": ids, "tokens": [label(tokenizer, id) for id in ids]}))
    else:
        console.write(" ".join(map(str, ids)) + "\n")


@app.command()
def decode(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Token ids.", show_default=False)] = None,
    model: FolderOption = None,
) -> None:
    """Turn token ids back into text, exactly; control tokens have none.

    \b
      minigpt tokenizer decode 357 298 72 -m runs/alice
      echo "[357, 298, 72]" | minigpt tokenizer decode
    """
    text = given_text(" ".join(ids) if ids else None, "minigpt tokenizer decode")
    tokenizer = _load(model)
    numbers = [_id(word, tokenizer.vocab_size) for word in re.split(r"[\s,\[\]]+", text or "") if word]
    console.write(tokenizer.decode(numbers) + ("\n" if sys.stdout.isatty() else ""))


def _id(word: str, vocab_size: int) -> int:
    if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < vocab_size):
        raise DataError(f"{word[:40]!r} is no token id; give whole numbers from 0 to {vocab_size - 1:,}")
    return int(word)


@app.command()
def show(text: TextArgument = None, model: FolderOption = None, as_json: models.JsonOption = False) -> None:
    """Show a vocabulary, and how it cuts a text.

    \b
      minigpt tokenizer show -m runs/alice
      minigpt tokenizer show "Once upon a time" -m runs/alice
      minigpt tokenizer show < alice.txt | less
    """
    whole = given_text(text, "")
    tokenizer = _load(model)
    longest = sorted(range(tokenizer.vocab_size), key=lambda id: (-len(tokenizer.token_bytes(id)), id))[:LONGEST]
    found: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "longest": [label(tokenizer, id) for id in longest]}
    ids = tokenizer.encode(whole) if whole else []
    if whole:
        count = len(whole.encode("utf-8"))
        found |= {"bytes": count, "tokens": len(ids), "bytes_per_token": count / len(ids), "ids": ids}
    if as_json:
        console.write(_json(found | ({"pieces": [label(tokenizer, id) for id in ids]} if whole else {})))
        return
    console.write(f"vocabulary  {tokenizer.vocab_size:,} tokens\n")
    console.write(f"longest     {' '.join(repr(name) for name in found['longest'])}\n")
    if whole:
        console.write(f"text        {found['bytes']:,} bytes, {len(ids):,} tokens, ")
        console.write(f"{found['bytes_per_token']:.2f} bytes a token\n\n{_segmented(tokenizer, ids)}\n")


def _segmented(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text with its tokens on coloured ground on a terminal, and with bars between them elsewhere."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    parts = []
    for place, id in enumerate(ids):
        name = label(tokenizer, id)
        shown = visible(name)
        if coloured:
            shown = f"\x1b[97;48;5;{COLOURS[place % len(COLOURS)]}m{shown}\x1b[0m"
        elif place + 1 < len(ids):
            shown += "│"
        parts.append(shown + "\n" * name.count("\n"))
    return "".join(parts).rstrip("\n")


def _load(model: Path | None) -> Tokenizer:
    from minigpt.checkpoint.base import read_tokenizer

    return read_tokenizer(models.resolve(model))


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
