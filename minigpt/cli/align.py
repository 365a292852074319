"""`minigpt align`: preferences and a tuned model in, a model that people prefer out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

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
from minigpt.errors import UsageError
from minigpt.text.bundled import bundled_preferences

MethodName = Literal["dpo", "ipo", "simpo", "kto", "grpo", "ppo"]
AdvantageName = Literal["standardised", "centred"]
NormalisationName = Literal["token", "sequence", "constant"]
PREFERENCE_SETTINGS = ("beta", "label_smoothing", "margin", "desirable_weight", "undesirable_weight")
OWN_ANSWERS = ("grpo", "ppo")  # methods that learn from what the model answers itself
OWN_SETTINGS = (
    "group_size", "updates", "max_new_tokens", "temperature", "kl", "max_kl", "clip", "clip_high", "advantages",
    "normalisation",
)  # fmt: skip
BUNDLED = Bundled(named="the bundled preferences", files=bundled_preferences, stem="bundled-aligned")
BUNDLED_REWARD = "rule:asked"  # whether an answer does what its prompt asks for

PreferenceArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA",
        help="Files, folders or globs of preferences. [default: the bundled pairs]",
        show_default=False,
    ),
]
HeldOutOption = Annotated[
    float | None, typer.Option(help="Share of the data that is held out. [default: 0.1]", show_default=False)
]
LongestOption = Annotated[
    int | None,
    typer.Option(help="Tokens of an answer and its prompt at most. [default: the model's]", show_default=False),
]
RowsOption = Annotated[
    int | None,
    typer.Option("--batch-size", help="Pairs, or answers of its own, a step. [default: by data]", show_default=False),
]
RateOption = Annotated[
    float | None, typer.Option("--lr", help="Peak learning rate. [default: by size]", show_default=False)
]


def align(
    data: PreferenceArgument = None,
    model: ModelOption = None,
    out: OutOption = None,
    method: Annotated[
        MethodName | None, typer.Option(help="How preferences are learned. [default: dpo]", show_default=False)
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(help="How much a nat of difference counts. [default: 0.1; simpo: 2]", show_default=False),
    ] = None,
    label_smoothing: Annotated[
        float | None,
        typer.Option(help="Share of the pairs taken to be the wrong way round. [default: 0]", show_default=False),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="SimPO's margin. [default: half of beta]", show_default=False)
    ] = None,
    desirable_weight: Annotated[
        float | None, typer.Option(help="Weight of KTO's good answers. [default: 1]", show_default=False)
    ] = None,
    undesirable_weight: Annotated[
        float | None, typer.Option(help="Weight of KTO's bad answers. [default: 1]", show_default=False)
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="What an answer is worth, for grpo and ppo: rule:NAME, regex:PATTERN, model:FOLDER, FILE.py:FUNCTION "
            "or cmd:COMMAND; 0.5* before it is its weight. Several add up.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="A reward that is not trained on: it says at the end what was won.", show_default=False),
    ] = None,
    reward_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds a command or function has for an answer. [default: 60]", show_default=False),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Answers to each prompt. [default: 8; ppo: 1]", show_default=False)
    ] = None,
    updates: Annotated[
        int | None, typer.Option(help="Steps on the same answers. [default: 1]", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer at most. [default: 64]", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="At which answers are drawn. [default: 1]", show_default=False)
    ] = None,
    kl: Annotated[
        float | None,
        typer.Option(help="Weight of the distance to the model as it was. [default: 0; ppo: 0.05]", show_default=False),
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Keep no model further away, in nats a token.", show_default=False)
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="How far a step may go from its answers. [default: 0.2]", show_default=False)
    ] = None,
    clip_high: Annotated[
        float | None, typer.Option(help="The same upwards. [default: as --clip]", show_default=False)
    ] = None,
    advantages: Annotated[
        AdvantageName | None,
        typer.Option(help="Whether a group's spread divides them. [default: standardised]", show_default=False),
    ] = None,
    normalisation: Annotated[
        NormalisationName | None,
        typer.Option(help="What counts the same in a step. [default: token]", show_default=False),
    ] = None,
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
    """Teach a tuned model what people prefer.

    It is kept near to what it was.

    \b
      minigpt align pairs.jsonl -m runs/mine-chat -o runs/mine-aligned
      minigpt align pairs.jsonl -m runs/mine-chat --lora --beta 0.05
      minigpt align marked.jsonl -m runs/mine-chat --method kto
      minigpt align prompts.jsonl -m runs/mine-chat --method grpo --reward judge.py:score
      minigpt align prompts.jsonl -m runs/mine-chat --method ppo --reward model:runs/judge

    Data: pairs of a chosen and a rejected answer, and for kto answers with a label, true or false. dpo, ipo and kto
    compare with what the model said before, simpo does not. grpo and ppo take prompts: the model answers them itself
    and learns from what its answers are worth. Without DATA the bundled pairs are used, for grpo by what their prompts
    ask for. What is not said is chosen from the data and the model, and printed.
    """
    typed_in = dict(locals())
    own = {name: typed_in[name] for name in OWN_SETTINGS if typed_in[name] is not None}
    if _learns_from_own_answers(typed_in):
        raise typer.Exit(_own_answers(typed_in, own))
    if own or reward or judge or reward_timeout is not None:
        name = next(iter(own), "reward").replace("_", "-")
        raise UsageError(f"--{name} is for the model's own answers; give --method grpo or ppo too")
    from minigpt.cli.aligning import preference_job

    settings = {"beta": beta, "label_smoothing": label_smoothing, "margin": margin}
    settings |= {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    said: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    said |= {} if method is None and resume else {"method": method or "dpo"}
    raise typer.Exit(preference_job("align", read_asked(typed_in, BUNDLED), said, resume=resume, overwrite=overwrite))


def _learns_from_own_answers(typed_in: dict[str, Any]) -> bool:
    """Whether the method is one of those, or the run to resume was."""
    if typed_in["method"] is not None or not typed_in["resume"]:
        return typed_in["method"] in OWN_ANSWERS
    from minigpt.alignment.online import recorded
    from minigpt.training.run_folder import RunFolder

    folder = read_asked(typed_in, BUNDLED).out
    return recorded(RunFolder(folder)) is not None


def _own_answers(typed_in: dict[str, Any], settings: dict[str, Any]) -> int:
    """Learn from the model's own answers; return the exit status."""
    wrong = [name for name in PREFERENCE_SETTINGS if typed_in[name] is not None]
    if wrong:
        raise UsageError(f"--{wrong[0].replace('_', '-')} is for preferences; grpo and ppo have --kl and --reward")
    from minigpt.cli.reinforcing import policy_job

    if "advantages" in settings:
        settings["standardise"] = settings.pop("advantages") == "standardised"
    settings |= {} if typed_in["method"] is None else {"method": typed_in["method"]}
    rewards = tuple(typed_in["reward"] or ())
    if not rewards and typed_in["method"] == "grpo" and not typed_in["data"] and not typed_in["resume"]:
        rewards = (BUNDLED_REWARD,)
    more = {"rewards": rewards or None, "judges": tuple(typed_in["judge"] or ()) or None}
    more |= {"timeout": typed_in["reward_timeout"]}
    asked = read_asked(typed_in, BUNDLED)
    more = {name: value for name, value in more.items() if value is not None}
    return policy_job(asked, settings, more, resume=typed_in["resume"], overwrite=typed_in["overwrite"])
