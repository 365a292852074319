"""What an answer is worth: rewards from rules, patterns, models, commands and functions, summed by their weights.

Whatever goes wrong in a reward ends the step before anything is trained on it, with one line that names the reward.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from minigpt.alignment.reward_command import Command
from minigpt.alignment.reward_model import load_reward_model
from minigpt.errors import ConfigError, MinigptError, TrainingError
from minigpt.evaluation.rules import RULES
from minigpt.text.chat import Message

KINDS = "rule:NAME, regex:PATTERN, model:FOLDER, FILE.py:FUNCTION or cmd:COMMAND, with a weight such as 0.5* before it"
_SPEC = re.compile(r"(?:([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*\*\s*)?(.+)", re.DOTALL)
_FUNCTION = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class RewardRow:
    """An answer to judge: the messages before it, why it ended, and the record that its prompt stands in."""

    prompt: tuple[Message, ...]
    answer: str
    finish_reason: str
    record: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """The row as JSON has it: `prompt` (messages), `answer`, `finish_reason`, `record`."""
        messages = [asdict(message) for message in self.prompt]
        return {"prompt": messages, "answer": self.answer, "finish_reason": self.finish_reason, "record": self.record}


class Judge(Protocol):
    """Gives each answer a number; whatever it raises is told under the name of its reward."""

    def __call__(self, rows: Sequence[RewardRow]) -> Sequence[float]: ...


@dataclass(frozen=True)
class RewardSpec:
    """A reward as it was asked for: its weight, its kind, and what it is made of."""

    weight: float
    kind: str
    argument: str
    name: str


def parse_reward(text: str) -> RewardSpec:
    """Read what --reward says; a ConfigError for what is no reward, or has a weight that is no number other than 0."""
    match = _SPEC.fullmatch(text.strip())
    weight = _number(match[1]) if match else None
    if match is None or weight is None or not math.isfinite(weight) or weight == 0:
        raise ConfigError(f"reward {text!r}: its weight must be a number other than 0; give {KINDS}")
    named = match[2].strip()
    if function := _FUNCTION.fullmatch(named):
        if not Path(function[1]).is_file():
            raise ConfigError(f"reward {named}: no file {function[1]} here; give the path of a Python file")
        return RewardSpec(weight, "function", named, named)
    kind, colon, argument = named.partition(":")
    if not colon or kind not in _MAKERS or not argument:
        raise ConfigError(f"reward {text!r} is of no kind that is known; give {KINDS}")
    return RewardSpec(weight, kind, argument, named)


class Rewards:
    """Several rewards, each with its weight; `close` ends the commands among them.

    `timeout` is how many seconds a command or a function may be without an answer. Errors: ConfigError for a rule or a
    pattern that is none, ModelFolderError for a folder that holds no reward model.
    """

    def __init__(self, specs: Sequence[RewardSpec], *, timeout: float, device: torch.device) -> None:
        self.specs = list(specs)
        self._judges = [_MAKERS[spec.kind](spec, timeout, device) for spec in specs]

    def __call__(self, rows: Sequence[RewardRow]) -> list[float]:
        """Return what each answer is worth in all; a TrainingError that names the reward where one fails."""
        parts = [_judged(spec, judge, rows) for spec, judge in zip(self.specs, self._judges, strict=True)]
        weights = [spec.weight for spec in self.specs]
        return [
            sum(weight * value for weight, value in zip(weights, row, strict=True)) for row in zip(*parts, strict=True)
        ]

    def close(self) -> None:
        """End the commands."""
        for judge in self._judges:
            if isinstance(judge, Command):
                judge.close()


def _judged(spec: RewardSpec, judge: Judge, rows: Sequence[RewardRow]) -> list[float]:
    """Let one reward judge, and believe it only where it gives every answer a number."""
    try:
        values = [float(value) for value in judge(rows)]
    except MinigptError as error:
        raise _failed(spec, str(error)) from error
    except Exception as error:
        raise _failed(spec, f"{type(error).__name__}: {error}") from error
    if len(values) != len(rows):
        raise _failed(spec, f"it gave {len(values)} numbers for {len(rows)} answers")
    for number, value in enumerate(values, start=1):
        if not math.isfinite(value):
            raise _failed(spec, f"it gave {value} for answer {number} of {len(rows)}")
    return values


def _failed(spec: RewardSpec, what: str) -> TrainingError:
    line = " ".join(what.split())
    return TrainingError(f"reward {spec.name}: {line}; nothing was trained on that: mend it and go on with --resume")


def _number(text: str | None) -> float | None:
    try:
        return 1.0 if text is None else float(text)
    except ValueError:
        return None


def _rule(spec: RewardSpec, timeout: float, device: torch.device) -> Judge:
    if spec.argument not in RULES:
        raise ConfigError(f"reward {spec.name}: no such rule (choose from {', '.join(sorted(RULES))})")
    rule = RULES[spec.argument]
    return lambda rows: [rule(row.answer, dict(row.record)) for row in rows]


def _pattern(spec: RewardSpec, timeout: float, device: torch.device) -> Judge:
    try:
        pattern = re.compile(spec.argument, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward {spec.name}: no regular expression ({error}); mend the pattern") from error
    return lambda rows: [float(pattern.search(row.answer) is not None) for row in rows]


def _model(spec: RewardSpec, timeout: float, device: torch.device) -> Judge:
    model = load_reward_model(Path(spec.argument), device)
    return lambda rows: model.score([[*row.prompt, Message("assistant", row.answer)] for row in rows])


def _command(spec: RewardSpec, timeout: float, device: torch.device) -> Judge:
    return Command(spec.argument, timeout)


def _function(spec: RewardSpec, timeout: float, device: torch.device) -> Judge:
    """A function runs in a process of its own, so that nothing it does can hang or end the run."""
    file, _, function = spec.argument.rpartition(":")
    return Command([sys.executable, "-m", "minigpt.alignment.reward_worker", file, function], timeout)


_MAKERS: dict[str, Callable[[RewardSpec, float, torch.device], Judge]] = {
    "rule": _rule,
    "regex": _pattern,
    "model": _model,
    "cmd": _command,
    "function": _function,
}
