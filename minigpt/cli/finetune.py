"""`minigpt finetune`: conversations and a model in, a model that answers out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from minigpt.cli.data import DataArgument, MapOption, SkipBadOption
from minigpt.cli.models import RUNS, DeviceOption, ModelOption, TemplateOption, resolve
from minigpt.cli.settings import Sections, move_settings, read_settings
from minigpt.cli.texts import typed
from minigpt.config import LORA_TARGETS, DTypeName, LoraConfig, OptimizerName, check_choice, from_mapping
from minigpt.errors import UsageError
from minigpt.text.bundled import bundled_instructions

BUNDLED = "the bundled instructions"
ALSO_OPTIONS = {
    ("train", "total_steps"): "steps",
    ("train", "seed"): "seed",
    ("train", "compute_dtype"): "dtype",
    ("train", "context"): "context",
}


def finetune(
    data: DataArgument = None,
    model: ModelOption = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Model folder to write. [default: runs/<data>]", show_default=False),
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Pass this often over the data. [default: 1 to 3, by its size]", show_default=False),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Train this long.", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Train this many steps.", show_default=False)] = None,
    tokens: Annotated[int | None, typer.Option(help="Train on this many tokens.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder, exactly.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model in the output folder.")] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of order, adapters, noise and dropout. [default: 0]", show_default=False),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Leave the model as it is and train an adapter of a few matrices.")
    ] = False,
    lora_rank: Annotated[
        int | None, typer.Option(help="Rank of the adapter, and --lora. [default: 16]", show_default=False)
    ] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(help="The update counts alpha / rank times. [default: twice the rank]", show_default=False),
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help=f"Matrices, by commas: {', '.join(LORA_TARGETS)}. [default: all there are]", show_default=False
        ),
    ] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(help="Dropout on what an adapter reads. [default: 0]", show_default=False)
    ] = None,
    renamed: MapOption = None,
    skip_bad: SkipBadOption = False,
    weight: Annotated[
        list[str] | None,
        typer.Option(help="FILE=2 takes a file's conversations twice an epoch, 0.5 half of them.", show_default=False),
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(help="Ordinary text to train on as well, against forgetting.", show_default=False),
    ] = None,
    mix_share: Annotated[
        float | None, typer.Option(help="Share of the rows that --mix has. [default: 0.1]", show_default=False)
    ] = None,
    template: TemplateOption = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(help="Share of the conversations that is held out. [default: 0.1]", show_default=False),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens a row. [default: by the conversations]", show_default=False)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step. [default: by data]", show_default=False)] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate. [default: by width]", show_default=False)
    ] = None,
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="[default: the model's own, else adamw]", show_default=False)
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout. [default: 0]", show_default=False)] = None,
    neftune_alpha: Annotated[
        float | None,
        typer.Option(help="Noise on embeddings, 5 to 15 where it is wanted. [default: 0]", show_default=False),
    ] = None,
    device: DeviceOption = None,
    dtype: Annotated[
        DTypeName | None,
        typer.Option(help="Type to compute in; weights stay float32. [default: the fastest]", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with sections [train] and [lora].", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="train.KEY=VALUE or lora.KEY=VALUE.", show_default=False)
    ] = None,
) -> None:
    """Teach a model to follow instructions and to hold a conversation.

    \b
      minigpt finetune chats.jsonl -m runs/mine -o runs/mine-chat
      minigpt finetune a.json b.jsonl --weight a.json=2 -m runs/mine --lora
      minigpt finetune qa.jsonl --map prompt=ask --map response=reply -m runs/mine

    The fields of the data tell its shape: messages, conversations, instruction and output, prompt and response,
    question and answer. Only what the assistant says is learned. Without DATA the bundled instructions are used. What
    is not said is chosen from the data and the model, and printed.
    """
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it; choose one")
    if mix_share is not None and not mix and not resume:
        raise UsageError("--mix-share needs text to mix in; name it with --mix FILE")
    settings = read_settings(config, set_ or [], ("train", "lora"))
    said = {"batch_size": batch_size, "learning_rate": lr, "optimizer": optimizer}
    settings["train"] |= {key: value for key, value in said.items() if value is not None}
    adapter = _lora(settings, lora, {"rank": lora_rank, "alpha": lora_alpha, "dropout": lora_dropout}, lora_targets)
    options: dict[str, Any] = {"minutes": minutes, "steps": steps, "epochs": epochs, "tokens": tokens, "seed": seed}
    options |= {"context": context, "dtype": dtype, "dropout": dropout, "neftune_alpha": neftune_alpha}
    options = move_settings(options, settings, ALSO_OPTIONS)
    compute = options.pop("dtype", None)
    if compute is not None:
        check_choice("compute_dtype", compute, get_args(DTypeName))
    from minigpt.cli.finetuning import Job, finetune_job
    from minigpt.text.conversations import parse_mapping
    from minigpt.training.chat_data import ChatRequest
    from minigpt.training.tuning_plan import TuningRequest

    read: dict[str, Any] = {"template": template, "val_fraction": val_fraction, "mix_share": mix_share}
    read = {name: value for name, value in read.items() if value is not None}
    read |= {"skip_bad": True} if skip_bad else {}
    read |= {"mapping": parse_mapping([typed(pair) for pair in renamed])} if renamed else {}
    read |= {"weights": _weights(weight)} if weight else {}
    read |= {"mix": tuple(os.path.abspath(file) for file in mix)} if mix else {}
    base = None if model is None and resume else os.path.abspath(resolve(model))
    asked = read | options | settings["train"] | _said_of_adapter(adapter)
    asked |= {} if compute is None else {"compute_dtype": compute}
    asked |= {} if base is None else {"base": base}
    chat, named = None, BUNDLED
    if data or not resume:
        named, paths = _sources(data or [])
        chat = ChatRequest(sources=paths, named=named, **read)
    tuned = None if adapter is None else _adapter(adapter)
    request = None if base is None else TuningRequest(base=base, lora=tuned, **options, train=settings["train"])
    folder = out if out is not None else RUNS / _stem(named)
    job = Job(data=chat, request=request, said=asked, out=folder, device=device, dtype=compute)
    raise typer.Exit(finetune_job(job, resume=resume, overwrite=overwrite))


def _lora(settings: Sections, asked: bool, options: dict[str, Any], targets: str | None) -> dict[str, Any] | None:
    """Return the settings of an adapter, or None where every weight is to be trained."""
    values = settings["lora"] | {name: value for name, value in options.items() if value is not None}
    if targets is not None:
        values["targets"] = tuple(target.strip() for target in targets.split(","))
    elif isinstance(values.get("targets"), list):
        values["targets"] = tuple(values["targets"])
    return values if asked or values else None


def _adapter(values: dict[str, Any]) -> LoraConfig:
    """Spell an adapter out; where only its rank was given, alpha is twice that."""
    derived = {"alpha": 2.0 * values["rank"]} if isinstance(values.get("rank"), int) else {}
    return from_mapping(LoraConfig, derived | values, "lora")


def _said_of_adapter(values: dict[str, Any] | None) -> dict[str, Any]:
    """What was asked of an adapter, under names that nothing else has."""
    return {} if values is None else {"lora": True} | {f"lora_{name}": value for name, value in values.items()}


def _weights(texts: list[str]) -> dict[str, float]:
    """Read --weight FILE=NUMBER options."""
    weights = {}
    for text in texts:
        file, equals, number = text.rpartition("=")
        try:
            value = float(number) if equals and file else None
        except ValueError:
            value = None
        if value is None:
            raise UsageError(f"--weight {text}: give a file, an equals sign and a number: chats.jsonl=2")
        weights[os.path.abspath(file)] = value
    return weights


def _sources(sources: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return how the data is named, and absolute paths."""
    if "-" in sources:
        raise UsageError("- (standard input) is not read here, since a run may read its data again; name a file")
    if not sources:
        return BUNDLED, tuple(str(path) for path in bundled_instructions())
    named = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    return named, tuple(os.path.abspath(source) for source in sources)


def _stem(named: str) -> str:
    """Name the output folder after the first source."""
    if named == BUNDLED:
        return "bundled-chat"
    first = Path(re.sub(r" and \d+ more$", "", named))
    name = first.resolve().name.split(".")[0]
    return re.sub(r"[*?\[\]]+", "", name) or "chat"
