"""`minigpt eval` with a reward model: which of two answers it takes for the better one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.cli import console, models
from minigpt.cli.tasks import Column, table
from minigpt.errors import UsageError
from minigpt.text.bundled import bundled_held_preferences

if TYPE_CHECKING:
    from minigpt.alignment.reward_model import RewardModel
    from minigpt.text.preferences import Pair

AT_ONCE = 64  # pairs, between two words on how far it is


def judge_pairs(
    folder: Path, files: Sequence[str], limit_tokens: int | None, device: str | None, *, as_json: bool
) -> None:
    """Print for what share of the pairs in files the chosen answer has the higher reward; a tie is half."""
    if limit_tokens is not None or "-" in files:
        raise UsageError(f"{folder} is a reward model, which judges pairs of answers; name files of pairs alone")
    from minigpt.evaluation.shares import Share
    from minigpt.text.conversations import ChatOptions
    from minigpt.text.preferences import load_pairs

    pairs = load_pairs(list(files) or bundled_held_preferences(), ChatOptions())
    from minigpt.alignment.reward_model import load_reward_model

    judge = load_reward_model(folder, models.pick_device(device))
    margins = _margins(judge, pairs)
    right = sum(1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins)
    share, mean = Share(right / len(margins), len(margins)), sum(margins) / len(margins)
    low, high = share.interval
    if as_json:
        found = {"model": str(folder), "pairs": len(pairs), "pair_accuracy": share.value, "low": low, "high": high}
        console.write(json.dumps(found | {"margin": mean}, ensure_ascii=False) + "\n")
        return
    columns = [
        Column("pair accuracy", [f"{share.value:.1%}"]),
        Column("95 % range", [f"{low:.1%} - {high:.1%}"]),
        Column("margin", [f"{mean:.3f}"]),
        Column("pairs", [f"{len(pairs):,}"]),
    ]
    console.write(table(["chosen or rejected"], columns))


def _margins(judge: RewardModel, pairs: Sequence[Pair]) -> list[float]:
    """By how much the reward of the chosen answer is higher, for each pair."""
    margins: list[float] = []
    with console.progress() as progress:
        for start in range(0, len(pairs), AT_ONCE):
            part = pairs[start : start + AT_ONCE]
            rewards = judge.score([(*pair.prompt, *answer) for pair in part for answer in (pair.chosen, pair.rejected)])
            margins += [a - b for a, b in zip(rewards[::2], rewards[1::2], strict=True)]
            share = len(margins) / len(pairs)
            progress.show(f"{'judging':<{console.LABEL_WIDTH}}{len(margins):,} pairs ({share:.0%})", share)
    return margins
