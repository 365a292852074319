"""`minigpt train`: raw text in, a model folder out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from minigpt.cli import stdin
from minigpt.cli.models import RUNS, DeviceOption
from minigpt.cli.processes import GpusOption, ShardOption, check_shared, start
from minigpt.cli.settings import move_settings, read_settings
from minigpt.cli.texts import typed
from minigpt.config import ArchitectureName, DTypeName, OptimizerName, PresetName, check_choice
from minigpt.errors import UsageError
from minigpt.text.bundled import bundled_corpus

BUNDLED = "the bundled corpus"
ALSO_OPTIONS = {
    ("train", "total_steps"): "steps",
    ("train", "seed"): "seed",
    ("train", "compute_dtype"): "dtype",
    ("model", "architecture"): "architecture",
    ("model", "vocab_size"): "vocab_size",
    ("model", "max_position_embeddings"): "context",
}


def train(
    ctx: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Files, folders or globs; - is standard input.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Model folder to write. [default: runs/<source>]", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Train this long. [default: 3 on a CPU, 10 on a GPU]", show_default=False),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Train this many steps.", show_default=False)] = None,
    epochs: Annotated[float | None, typer.Option(help="Pass this often over the text.", show_default=False)] = None,
    tokens: Annotated[int | None, typer.Option(help="Train on this many tokens.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder, exactly.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the output folder.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, order of the text, and dropout. [default: 0]", show_default=False),
    ] = None,
    preset: Annotated[
        PresetName | None, typer.Option(help="Size of the model. [default: by text and budget]", show_default=False)
    ] = None,
    arch: Annotated[
        ArchitectureName | None, typer.Option(help="Architecture. [default: qwen3]", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens a window. [default: by preset]", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens of the vocabulary. [default: by text]", show_default=False)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows a step. [default: by budget]", show_default=False)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate. [default: by width]", show_default=False)
    ] = None,
    optimizer: Annotated[OptimizerName | None, typer.Option(help="[default: muon]", show_default=False)] = None,
    device: DeviceOption = None,
    gpus: GpusOption = None,
    shard: ShardOption = False,
    dtype: Annotated[
        DTypeName | None,
        typer.Option(help="Type to compute in; weights stay float32. [default: the fastest]", show_default=False),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="Field of a JSON line or parquet row that holds text. [default: text]", show_default=False),
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help=r"Text between documents of a file, such as '\n\n'.", show_default=False)
    ] = None,
    min_chars: Annotated[
        int | None, typer.Option(help="Drop documents shorter than this. [default: 0]", show_default=False)
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of the text that is held out. [default: 0.1]", show_default=False)
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Use the tokenizer of this folder; train none.", show_default=False)
    ] = None,
    tokenizer_sample_mb: Annotated[
        float | None,
        typer.Option(help="Megabytes of text the tokenizer is trained on. [default: 16]", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with sections [model] and [train].", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="model.KEY=VALUE or train.KEY=VALUE.", show_default=False)
    ] = None,
) -> None:
    """Train a tokenizer and a model on your own text.

    \b
      minigpt train alice.txt
      cat *.txt | minigpt train - -o runs/mine --minutes 10
      minigpt train books/ notes.jsonl --field body --preset small

    Without SOURCE and without a pipe, the bundled corpus is used. What is not said is chosen from the corpus, the
    device and the budget, and printed with the reason.
    """
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it; choose one")
    check_shared(gpus=gpus, shard=shard)
    if tokenizer is not None and vocab_size is not None:
        raise UsageError("--tokenizer has a vocabulary of its own; leave out --vocab-size")
    settings = read_settings(config, set_ or [], ("model", "train"))
    said = {"batch_size": batch_size, "learning_rate": lr, "optimizer": optimizer}
    settings["train"] |= {key: value for key, value in said.items() if value is not None}
    options: dict[str, Any] = {"preset": preset, "minutes": minutes, "steps": steps, "epochs": epochs, "tokens": tokens}
    options |= {"architecture": arch, "context": context, "vocab_size": vocab_size, "seed": seed, "dtype": dtype}
    options = move_settings(options, settings, ALSO_OPTIONS)
    compute = options.pop("dtype", None)
    if compute is not None:
        check_choice("compute_dtype", compute, get_args(DTypeName))
    from minigpt.cli.pretraining import Job, train_job
    from minigpt.training.plan import Request
    from minigpt.training.pretrain import DataRequest

    request = Request(**options, model=settings["model"], train=settings["train"])
    named, paths = _sources(sources or [], resume)
    read: dict[str, Any] = {"field": typed(field), "separator": typed(separator), "min_chars": min_chars}
    read |= {"val_fraction": val_fraction, "sample_megabytes": tokenizer_sample_mb}
    read["tokenizer"] = None if tokenizer is None else os.path.abspath(tokenizer)
    read = {name: value for name, value in read.items() if value is not None}
    data = DataRequest(sources=paths, named=named, **read)
    folder = out if out is not None else RUNS / _stem(named)
    asked = read | options | settings["model"] | settings["train"]
    job = Job(
        data=data, request=request, said=asked if compute is None else asked | {"compute_dtype": compute}, out=folder,
        named_out=out is not None, device=device, dtype=compute, sourced=bool(sources) or named == stdin.NAME,
        shard=shard,
    )  # fmt: skip
    if gpus is not None and gpus > 1:
        raise typer.Exit(start(ctx.obj, gpus, device))
    raise typer.Exit(train_job(job, resume=resume, overwrite=overwrite))


def _sources(sources: list[str], resume: bool) -> tuple[str, tuple[str, ...]]:
    """Return how the text is named and its absolute paths; what comes through stdin has no path yet."""
    if sources == ["-"] or (not sources and not resume and stdin.is_piped()):
        return stdin.NAME, ()
    if "-" in sources:
        raise UsageError("- (standard input) stands alone; name files without it, or pipe everything")
    if not sources:
        return BUNDLED, tuple(str(path) for path in bundled_corpus())
    named = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    return named, tuple(os.path.abspath(source) for source in sources)


def _stem(named: str) -> str:
    """Name the output folder after the first source."""
    if named in (stdin.NAME, BUNDLED):
        return "stdin" if named == stdin.NAME else "bundled"
    first = Path(re.sub(r" and \d+ more$", "", named))
    name = first.resolve().name.split(".")[0]
    return re.sub(r"[*?\[\]]+", "", name) or "text"
