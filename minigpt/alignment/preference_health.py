"""Watch a run on preferences for what goes wrong with it, and say it in words: each once, with what helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from minigpt.alignment.preference import PreferenceConfig

WINDOW = 10  # steps that are looked at together
DRIFT = 0.5  # nats a token by which the data's answers may become less likely
LOW_LOSS = 0.02
UNDECIDED_STEPS, UNDECIDED = 100, 0.55


class PreferenceWatch:
    """What the last steps were like; `see` takes the row of a step."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._steps = 0
        self.said: dict[str, str] = {}

    def see(self, row: Mapping[str, float]) -> list[str]:
        """Take the loss and the figures of a step; return what is to be said now."""
        self._last.append(row)
        self._steps += 1
        if len(self._last) < WINDOW:
            return []
        problems = {"both": self._both(), "drift": self._drift(), "over": self._over(), "undecided": self._undecided()}
        found = {name: text for name, text in problems.items() if text and name not in self.said}
        self.said |= found
        return list(found.values())

    def text(self) -> str:
        """Say in a few words how the last steps were."""
        return f"loss {self._now('loss'):.3f}, accuracy {self._now('accuracy'):.0%}"

    def health(self) -> str:
        """Say in a line how far the last steps have moved the model."""
        now = {name: self._now(name) for name in self._last[-1]}
        parts = [f"margin {now['margin']:.2f}"] if "margin" in now else []
        if "chosen_change" in now:
            parts.append(f"chosen {now['chosen_change']:+.1f}, rejected {now['rejected_change']:+.1f} nats")
        parts += [f"drift {now['drift']:.3f} nats/token"] if "drift" in now else []
        parts += [f"KL {now['kl']:.2f}"] if "kl" in now else []
        return ", ".join(parts)

    def _both(self) -> str:
        if "chosen_change" not in self._last[-1] or self.config.method == "kto":
            return ""
        chosen, rejected = self._now("chosen_change"), self._now("rejected_change")
        if not (chosen < -1.0 and rejected < chosen and self._now("drift") > DRIFT / 5):
            return ""
        return (
            f"the chosen answers become less likely too ({chosen:+.1f} nats, the rejected {rejected:+.1f}): the model "
            "moves away from both, and what it says instead nobody chose; lower --lr, raise --beta, or tune on the "
            "chosen answers first"
        )

    def _drift(self) -> str:
        drift = self._now("drift") if "drift" in self._last[-1] else 0.0
        if drift <= DRIFT:
            return ""
        return (
            f"the answers of the data are {drift:.2f} nats a token less likely than before: the model forgets how to "
            "write; lower --lr, raise --beta, or stop sooner"
        )

    def _over(self) -> str:
        if self.config.method in ("ipo", "kto") or self._now("loss") >= LOW_LOSS:
            return ""
        return (
            f"the loss is {self._now('loss'):.3f}: every pair of the training data is told apart, and more steps only "
            "move the model further away; stop sooner, or give more pairs"
        )

    def _undecided(self) -> str:
        if self._steps < UNDECIDED_STEPS or self._now("accuracy") >= UNDECIDED:
            return ""
        return (
            f"after {self._steps:,} steps {self._now('accuracy'):.0%} of the pairs are told apart, as by chance; "
            "raise --lr, or look whether chosen and rejected differ in something that can be learned"
        )

    def _now(self, name: str) -> float:
        return sum(row[name] for row in self._last) / len(self._last)
