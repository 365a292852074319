"""How fast a model answers many prompts at once against one at a time, and what of a GRPO step that takes.

    python scripts/bench_rollouts.py -m runs/mine-chat         # a table on stdout

The prompts are those of the bundled instructions. Both ways draw the same answers; their speeds are measured by turns,
and the ratio is the median over rounds. Absolute figures mean nothing on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minigpt.alignment.policy import PolicyConfig, PolicyLoss, Rollouts
from minigpt.alignment.reference import frozen
from minigpt.alignment.rewards import RewardRow
from minigpt.alignment.rollouts import Ask, RolloutBatches, draw
from minigpt.checkpoint.folder import load
from minigpt.config import SamplingConfig
from minigpt.evaluation.rules import RULES
from minigpt.inference.sampling import row_seed
from minigpt.text.bundled import bundled_instructions
from minigpt.text.chat import chat_template
from minigpt.text.conversations import ChatOptions
from minigpt.text.preferences import load_prompts

SIZES = (4, 16, 64)
GROUP = 8
NEW_TOKENS = 40


def judge(rows: Sequence[RewardRow]) -> list[float]:
    return [RULES["correct"](row.answer, row.record) for row in rows]


def make(folder: Path, batch_size: int) -> RolloutBatches:
    loaded = load(folder, dtype=torch.float32)
    template = chat_template(loaded.tokenizer)
    prompts = load_prompts(bundled_instructions(), ChatOptions())[: 16 * batch_size]
    asks = [Ask(prompt, template.encode(prompt.messages)) for prompt in prompts]
    config = PolicyConfig(method="grpo", group_size=GROUP, max_new_tokens=NEW_TOKENS)
    return RolloutBatches(
        loaded.model, frozen(loaded.model), template.tokenizer, asks, judge, config,
        batch_size=batch_size, seed=0, dtype="float32",
    )  # fmt: skip


def speed(batches: RolloutBatches, rows: int, at_once: int, number: int) -> float:
    """Tokens a second of so many answers, drawn `at_once` at a time."""
    prompts = [ask.ids for ask in batches.asks[number * rows : (number + 1) * rows]]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=1.0)
    seeds = [row_seed(number, row) for row in range(rows)]
    started, tokens = time.perf_counter(), 0
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        drawn = draw(batches.model, batches.tokenizer, prompts[part], sampling, seeds[part])
        tokens += sum(len(one.ids) for one in drawn)
    return tokens / (time.perf_counter() - started)


def step(batches: RolloutBatches, number: int) -> tuple[float, float]:
    """Seconds of a GRPO step without the optimizer: drawing and judging, then log-probabilities and gradients."""
    asks = [ask for ask in batches._chosen(number) for _ in range(GROUP)]
    sampling = SamplingConfig(max_new_tokens=NEW_TOKENS, temperature=1.0)
    started = time.perf_counter()
    draw(batches.model, batches.tokenizer, [ask.ids for ask in asks], sampling, list(range(len(asks))))
    drawn = time.perf_counter() - started
    started = time.perf_counter()
    made: Rollouts = batches.make(number)
    loss = PolicyLoss(batches.config)
    weight = loss.weight(made)
    for part in made.split(64):
        torch.autograd.backward(loss.loss_sum(batches.model, part) / weight)
    return drawn, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, required=True, help="folder of a model tuned for chat")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128, help="answers of a GRPO step")
    chosen = parser.parse_args()
    batches = make(chosen.model, chosen.batch_size)
    speed(batches, 4, 4, 0)  # the first run allocates
    print(f"{'at once':>8} {'tokens/s':>10} {'one by one':>11} {'ratio':>6}")
    for size in SIZES:
        pairs = [(speed(batches, size, size, i), speed(batches, size, 1, i)) for i in range(chosen.rounds)]
        ratio = statistics.median(many / one for many, one in pairs)
        many, one = (statistics.median(side) for side in zip(*pairs, strict=True))
        print(f"{size:>8} {many:>10,.0f} {one:>11,.0f} {ratio:>6.1f}")
    shares = [drawn / whole for drawn, whole in (step(batches, i) for i in range(chosen.rounds))]
    print(f"drawing is {statistics.median(shares):.0%} of a GRPO step of {chosen.batch_size} answers")


if __name__ == "__main__":
    main()
