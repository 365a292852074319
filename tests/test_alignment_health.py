"""Warnings in words: each collapse is said once, when it happens, and a healthy run says nothing."""

from __future__ import annotations

import pytest

from minigpt.alignment.health import WINDOW, Watch

HEALTHY = {
    "reward": 0.4, "reward_spread": 0.5, "kl": 0.01, "entropy": 0.8, "answer_tokens": 10.0, "ended": 1.0,
    "equal_groups": 0.3,
}  # fmt: skip


def see(watch: Watch, steps: int, **changed: float) -> list[str]:
    return [text for _ in range(steps) for text in watch.see(HEALTHY | changed)]


def test_a_healthy_run_says_nothing() -> None:
    watch = Watch(max_kl=0.1)
    assert see(watch, 50) == []
    assert see(watch, 50, reward=0.9, answer_tokens=19.0, entropy=0.3, kl=0.09) == []
    assert watch.text() == "reward 0.900 ± 0.50, KL 0.090, entropy 0.30, 19 tokens, 100% end"


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        (
            "length",
            {"answer_tokens": 40.0, "ended": 0.2},
            "answers grow: 10 tokens at first, 31 now, and only 44% end by themselves",
        ),
        ("entropy", {"entropy": 0.05}, "entropy fell from 0.80 to 0.13 nats a token"),
        (
            "equal",
            {"equal_groups": 0.95, "reward": 0.0},
            "in 82% of the groups all answers are worth the same (0.08 on",
        ),
        ("kl", {"kl": 0.2}, "0.105 nats a token away from where it began, above --max-kl 0.1"),
    ],
)
def test_a_collapse_is_said_once(name: str, changed: dict[str, float], words: str) -> None:
    watch = Watch(max_kl=0.1)
    see(watch, WINDOW)
    (text,) = see(watch, 3 * WINDOW, **changed)
    assert words in text
    assert "\n" not in text
    assert watch.said == {name: text}


def test_long_answers_that_end_by_themselves_are_none_of_its_business() -> None:
    watch = Watch()
    see(watch, WINDOW)
    assert see(watch, 3 * WINDOW, answer_tokens=50.0) == []


def test_without_a_bound_no_distance_is_too_far() -> None:
    assert see(Watch(), 3 * WINDOW, kl=9.0) == []


def test_rewards_that_are_all_the_same_from_the_beginning_are_said_after_a_window() -> None:
    watch = Watch()
    assert see(watch, WINDOW - 1, equal_groups=1.0) == []
    assert len(see(watch, 1, equal_groups=1.0)) == 1
