"""What a run came to, for people: answers before and after side by side, what they win, curves.

`report.md` and `report.svg` lie in the run's folder; the same in short goes to the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minigpt.alignment.held_out import HeldOut, wins
from minigpt.alignment.rewards import Rewards
from minigpt.alignment.rollouts import Drawn, judged
from minigpt.evaluation.shares import Share
from minigpt.model.transformer import GPT

EXAMPLES = 8
CELL_CHARS = 240  # of a prompt or an answer in the table
PANELS = [
    ("reward: of drawn answers (grey), of the likeliest to held-out prompts",
     {"reward": "faint", "held_out_reward": "line"}),
    ("held-out prompts won against the start", {"win_rate": "line"}),
    ("distance from the start, KL in nats a token", {"kl": "faint", "held_out_kl": "line"}),
    ("entropy, nats a token", {"entropy": "line"}),
    ("tokens of an answer", {"answer_tokens": "line"}),
    ("share of answers that end by themselves", {"ended": "line"}),
    ("share of tokens whose ratio is clipped", {"clip_fraction": "line"}),
]  # fmt: skip


@dataclass(frozen=True)
class Win:
    """How often the new answer is worth more than the old one to a judge, and what both are worth on the average."""

    judge: str
    share: Share
    before: float
    after: float


@dataclass(frozen=True)
class Example:
    """A prompt with its answers before and after, and what they are worth."""

    question: str
    before: str
    after: str
    worth: tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """What a run came to on held-out prompts."""

    prompts: int
    wins: list[Win]
    examples: list[Example]


def outcome(model: GPT, held_out: HeldOut, judges: Sequence[Rewards]) -> Outcome:
    """Answer the held-out prompts with the model; compare with the start by the reward and by every other judge."""
    after = held_out.answers(model)
    worth = judged(held_out.judge, held_out.asks, after)
    found = [_win("the reward", held_out.worth_before, worth)]
    for judge in judges:
        before, now = (judged(judge, held_out.asks, answers) for answers in (held_out.before, after))
        found.append(_win(judge.specs[0].name, before, now))
    return Outcome(len(after), found, _examples(held_out, after, worth))


def _win(judge: str, before: Sequence[float], after: Sequence[float]) -> Win:
    return Win(judge, wins(after, before), sum(before) / len(before), sum(after) / len(after))


def _examples(held_out: HeldOut, after: Sequence[Drawn], worth: Sequence[float]) -> list[Example]:
    """Evenly spaced prompts, whatever became of them."""
    count = min(EXAMPLES, len(after))
    return [
        Example(
            held_out.asks[i].prompt.messages[-1].content,
            held_out.before[i].text,
            after[i].text,
            (held_out.worth_before[i], worth[i]),
        )
        for i in (place * len(after) // count for place in range(count))
    ]


def report(title: str, facts: Mapping[str, str], found: Outcome, notes: Sequence[str]) -> str:
    """Write the report as Markdown; `notes` are the warnings of the run."""
    table = "".join(f"| {_cell(name)} | {_cell(text)} |\n" for name, text in facts.items())
    won = "".join(
        f"| {_cell(win.judge)} | {win.before:.3f} | {win.after:.3f} | {win.share.value:.1%} "
        f"| {win.share.interval[0]:.1%} to {win.share.interval[1]:.1%} |\n"
        for win in found.wins
    )
    cells = [(_cell(one.question), _cell(one.before), _cell(one.after), one.worth) for one in found.examples]
    rows = "".join(f"| {ask} | {old} | {new} | {worth[0]:.2f} → {worth[1]:.2f} |\n" for ask, old, new, worth in cells)
    warned = "".join(f"- {note}\n" for note in notes)
    return (
        f"# {title}\n\n| | |\n|---|---|\n{table}\n"
        f"## Against the start\n\nThe likeliest answers to {found.prompts:,} held-out prompts, by who judged them; an "
        "answer that is worth the same counts as half a win. The range is the 95 % interval.\n\n"
        f"| judge | before | after | won | range |\n|---|---|---|---|---|\n{won}\n"
        + (f"## What to look at\n\n{warned}\n" if warned else "")
        + f"## Before and after\n\n| prompt | before | after | worth |\n|---|---|---|---|\n{rows}\n"
        "## Curves\n\n![what the answers were like over the run](report.svg)\n"
    )


def _cell(text: str) -> str:
    """Text for a cell of a table: on one line, cut where it is long, nothing in it taken for Markdown."""
    line = "".join(sign if sign.isprintable() else "\ufffd" for sign in " ".join(text.split()))
    line = f"{line[: CELL_CHARS - 1]}…" if len(line) > CELL_CHARS else line
    return "".join(f"\\{sign}" if sign in "\\`*_<>[]|#~" else sign for sign in line)


def result(found: Outcome) -> dict[str, Any]:
    """The outcome for the record."""
    return {
        "wins": [
            {"judge": win.judge, "before": win.before, "after": win.after, "won": win.share.value,
             "interval": list(win.share.interval)}
            for win in found.wins
        ]
    }  # fmt: skip
