"""`minigpt finetune`: conversations and a model in, a model that answers out."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from minigpt.cli.data import DataArgument, MapOption, SkipBadOption
from minigpt.cli.models import DeviceOption, ModelOption, TemplateOption
from minigpt.cli.tuning import (
    Bundled,
    ComputeOption,
    ConfigOption,
    DropoutOption,
    EpochsOption,
    LoraAlphaOption,
    LoraDropoutOption,
    LoraOption,
    LoraRankOption,
    LoraTargetsOption,
    MinutesOption,
    OptimizerOption,
    OutOption,
    OverwriteOption,
    ResumeOption,
    SeedOption,
    SetOption,
    StepsOption,
    TokensOption,
    read_asked,
)
from minigpt.errors import UsageError
from minigpt.text.bundled import bundled_instructions

BUNDLED = Bundled(named="the bundled instructions", files=bundled_instructions, stem="bundled-chat")


def finetune(
    data: DataArgument = None,
    model: ModelOption = None,
    out: OutOption = None,
    epochs: EpochsOption = None,
    minutes: MinutesOption = None,
    steps: StepsOption = None,
    tokens: TokensOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    seed: SeedOption = None,
    lora: LoraOption = False,
    lora_rank: LoraRankOption = None,
    lora_alpha: LoraAlphaOption = None,
    lora_targets: LoraTargetsOption = None,
    lora_dropout: LoraDropoutOption = None,
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
    optimizer: OptimizerOption = None,
    dropout: DropoutOption = None,
    neftune_alpha: Annotated[
        float | None,
        typer.Option(help="Noise on embeddings, 5 to 15 where it is wanted. [default: 0]", show_default=False),
    ] = None,
    device: DeviceOption = None,
    dtype: ComputeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Teach a model to follow instructions and to converse.

    \b
      minigpt finetune chats.jsonl -m runs/mine -o runs/mine-chat
      minigpt finetune a.json b.jsonl --weight a.json=2 -m runs/mine --lora
      minigpt finetune qa.jsonl --map prompt=ask --map response=reply -m runs/mine

    The fields of the data tell its shape: messages, conversations, instruction and output, prompt and response,
    question and answer. Only what the assistant says is learned. Without DATA the bundled instructions are used. What
    is not said is chosen from the data and the model, and printed.
    """
    typed_in = dict(locals())
    if mix_share is not None and not mix and not resume:
        raise UsageError("--mix-share needs text to mix in; name it with --mix FILE")
    from minigpt.cli.finetuning import Job, finetune_job
    from minigpt.training.tuning_plan import TuningRequest

    mixed = tuple(os.path.abspath(file) for file in mix) if mix else None
    asked = read_asked(
        typed_in,
        BUNDLED,
        read={"weights": _weights(weight) if weight else None, "mix": mixed, "mix_share": mix_share},
        options={"neftune_alpha": neftune_alpha},
    )
    request = None if asked.base is None else TuningRequest(**asked.request)
    job = Job(data=asked.data, request=request, said=asked.said, out=asked.out, device=asked.device, dtype=asked.dtype)
    raise typer.Exit(finetune_job(job, resume=resume, overwrite=overwrite))


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
