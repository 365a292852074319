"""`minigpt import`: a GGUF file in, a model folder out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli import console, models, outputs
from minigpt.config import DTypeName
from minigpt.units import byte_size

if TYPE_CHECKING:
    import torch

    from minigpt.checkpoint.gguf import GGUFModel


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .gguf file.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Model folder to write. [default: runs/<file>]", show_default=False),
    ] = None,
    dtype: Annotated[
        DTypeName | None,
        typer.Option(
            help="Type to store: float32, bfloat16 or float16. [default: what keeps every value: the file's own, "
            "float32 where it is quantised]",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the output folder.")] = False,
    as_json: models.JsonOption = False,
) -> None:
    """Turn a GGUF file into a model folder.

    Tokenizer and chat template come along.

    \b
      minigpt import SmolLM2-135M-Instruct.Q4_1.gguf -o runs/smollm2
      minigpt import qwen3-0.6b-q8_0.gguf --dtype bfloat16
    """
    place = models.RUNS / file.name.removesuffix(".gguf") if out is None else out
    outputs.check_free(place, overwrite=overwrite)
    import torch

    from minigpt.checkpoint.card import write_card
    from minigpt.checkpoint.folder import save_description, save_weights
    from minigpt.checkpoint.gguf import read_gguf

    read = read_gguf(file)
    stored: torch.dtype = read.exact_dtype() if dtype is None else getattr(torch, dtype)
    _describe(read, file)
    with outputs.staged_folder(place) as stage:
        with console.progress() as progress:
            model = read.build(stored, lambda share: progress.show(f"import     {share:.0%}", share))
        record = _record(read, file)
        save_description(stage, read.config, read.tokenizer, record, read.generation())
        save_weights(stage, model)
        write_card(stage, read.config, record, name=place.resolve().name)
    size, parameters = sum(path.stat().st_size for path in place.glob("model*.safetensors")), model.num_parameters()
    name = str(stored).removeprefix("torch.")
    console.fact("model", f"{place}: {console.amount(parameters)} parameters as {name}, {byte_size(size)}")
    console.fact("next", f'echo "Once upon a time" | minigpt generate -m {shlex.quote(str(place))}', wrapped=False)
    if as_json:
        found = {"model": str(place), "architecture": read.config.architecture, "parameters": parameters}
        found |= {"dtype": name, "types": read.type_counts(), "vocab_size": read.config.vocab_size}
        console.write(json.dumps(found, ensure_ascii=False) + "\n")


def _describe(read: GGUFModel, file: Path) -> None:
    """Say what the file holds."""
    config, tokenizer = read.config, read.tokenizer
    types = ", ".join(f"{count} {kind}" for kind, count in read.type_counts().items())
    console.fact(
        "file",
        f"{file}: {config.architecture}, {config.num_hidden_layers} layers x {config.hidden_size}, "
        f"context {config.max_position_embeddings:,}, {byte_size(file.stat().st_size)} ({types})",
    )
    pre = read.file.metadata.get("tokenizer.ggml.pre")
    kind = "SentencePiece-style" if read.file.metadata.get("tokenizer.ggml.model") == "llama" else f"byte-level ({pre})"
    chat = "with a chat template" if tokenizer.chat_template else "no chat template"
    console.fact("tokenizer", f"{kind} BPE, {tokenizer.vocab_size:,} tokens, {chat}")


def _record(read: GGUFModel, file: Path) -> dict[str, Any]:
    """What minigpt.json says of where the model came from."""
    told = {key: read.file.metadata.get(f"general.{key}") for key in ("name", "license", "organization")}
    texts = {key: value for key, value in told.items() if isinstance(value, str)}
    return {"imported": {"file": file.name, "types": read.type_counts(), **texts}}
