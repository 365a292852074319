"""`minigpt reward`: preferences and a model in, a model that tells what an answer is worth out."""

from __future__ import annotations

import typer

from minigpt.cli.align import HeldOutOption, LongestOption, PreferenceArgument, RateOption, RowsOption
from minigpt.cli.data import MapOption, SkipBadOption
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
from minigpt.text.bundled import bundled_preferences

BUNDLED = Bundled(named="the bundled preferences", files=bundled_preferences, stem="bundled-reward")


def reward(
    data: PreferenceArgument = None,
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
    template: TemplateOption = None,
    val_fraction: HeldOutOption = None,
    context: LongestOption = None,
    batch_size: RowsOption = None,
    lr: RateOption = None,
    optimizer: OptimizerOption = None,
    dropout: DropoutOption = None,
    device: DeviceOption = None,
    dtype: ComputeOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Train a model that tells what an answer is worth.

    It learns from pairs of a better and a worse one.

    \b
      minigpt reward -m runs/mine-chat
      minigpt reward pairs.jsonl -m runs/mine-chat -o runs/judge
      minigpt eval held-out.jsonl -m runs/judge
      minigpt score -m runs/judge < answers.jsonl

    The reward is a number on top of the model, read at the last token of the answer; only differences mean anything
    (Bradley-Terry). Without DATA the bundled pairs are used. What is not said is chosen from the data and the model,
    and printed.
    """
    typed_in = dict(locals())
    from minigpt.cli.aligning import preference_job

    asked = read_asked(typed_in, BUNDLED)
    raise typer.Exit(preference_job("reward", asked, {"method": "reward"}, resume=resume, overwrite=overwrite))
