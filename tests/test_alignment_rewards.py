"""Rewards: what each kind gives, and that whatever goes wrong in one is one line that names it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minigpt.alignment.rewards import RewardRow, Rewards, parse_reward
from minigpt.errors import ConfigError, MinigptError, TrainingError
from minigpt.text.chat import Message

ROWS = [
    RewardRow((Message("user", f"Question {i}"),), answer, "end", {"output": "four", "n": i})
    for i, answer in enumerate(["four", "three", "five four", "四"])
]


@pytest.fixture
def opened() -> Iterator[list[Rewards]]:
    """Rewards that were opened; their commands are ended."""
    found: list[Rewards] = []
    yield found
    for rewards in found:
        rewards.close()


def give(opened: list[Rewards], *texts: str, timeout: float = 20.0) -> list[float]:
    rewards = Rewards([parse_reward(text) for text in texts], timeout=timeout, device=torch.device("cpu"))
    opened.append(rewards)
    return rewards(ROWS)


def script(path: Path, body: str) -> str:
    """A reward command that runs a Python program."""
    path.write_text("import json, sys, time, os\n" + body, encoding="utf-8")
    return f"cmd:{sys.executable} {path}"


ANSWER_LENGTHS = "for line in sys.stdin:\n    print(len(json.loads(line)['answer']), flush=True)\n"


@pytest.mark.parametrize(
    ("text", "weight", "kind", "argument"),
    [
        ("rule:correct", 1.0, "rule", "correct"),
        ("0.5*regex:a|b", 0.5, "regex", "a|b"),
        ("-1e-2 * rule:correct", -0.01, "rule", "correct"),
        ("regex:2*3", 1.0, "regex", "2*3"),
        ("cmd:jq --unbuffered '.answer | length'", 1.0, "cmd", "jq --unbuffered '.answer | length'"),
        ("model:runs/reward", 1.0, "model", "runs/reward"),
    ],
)
def test_a_reward_is_a_weight_a_kind_and_what_it_is_made_of(text: str, weight: float, kind: str, argument: str) -> None:
    spec = parse_reward(text)
    assert (spec.weight, spec.kind, spec.argument) == (weight, kind, argument)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "reward"),
        ("good", "of no kind that is known"),
        ("rule:", "of no kind"),
        ("0*rule:correct", "other than 0"),
        ("1.2.3*rule:correct", "other than 0"),
        ("1e999*rule:correct", "other than 0"),
        ("nowhere.py:score", "no file nowhere.py here"),
        ("https://example.org", "of no kind"),
    ],
)
def test_what_is_no_reward_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        parse_reward(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("rule:beautiful", "no such rule .*correct"), ("regex:(", "no regular expression"), ("model:nowhere", "nowhere")],
)
def test_a_reward_that_cannot_be_opened_is_refused_before_the_run(text: str, problem: str) -> None:
    with pytest.raises(MinigptError, match=problem):
        Rewards([parse_reward(text)], timeout=1.0, device=torch.device("cpu"))


def test_rules_patterns_and_weights(opened: list[Rewards]) -> None:
    assert give(opened, "rule:correct") == [1.0, 0.0, 0.0, 0.0]
    assert give(opened, "regex:f.*r") == [1.0, 0.0, 1.0, 0.0]
    assert give(opened, "2*rule:correct", "-0.5*regex:four") == [1.5, 0.0, -0.5, 0.0]


def test_a_command_reads_rows_as_json_lines_and_keeps_running(tmp_path: Path, opened: list[Rewards]) -> None:
    log = tmp_path / "seen.jsonl"
    body = (
        f"log = open({str(log)!r}, 'a', encoding='utf-8')\n"
        "for number, line in enumerate(sys.stdin):\n"
        "    log.write(line); log.flush(); print(number, flush=True)\n"
    )
    rewards = Rewards([parse_reward(script(tmp_path / "count.py", body))], timeout=20, device=torch.device("cpu"))
    opened.append(rewards)
    assert rewards(ROWS) == [0.0, 1.0, 2.0, 3.0]
    assert rewards(ROWS) == [4.0, 5.0, 6.0, 7.0], "the same process"
    seen = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert seen[3] == {
        "prompt": [{"role": "user", "content": "Question 3"}],
        "answer": "四",
        "finish_reason": "end",
        "record": {"output": "four", "n": 3},
        "left": 0,
    }
    assert [row["left"] for row in seen] == [3, 2, 1, 0] * 2


def test_a_command_that_judges_a_step_at_once(tmp_path: Path, opened: list[Rewards]) -> None:
    body = (
        "rows = []\n"
        "for line in sys.stdin:\n"
        "    rows.append(json.loads(line))\n"
        "    if rows[-1]['left'] == 0:\n"
        "        print(*[len(row['answer']) for row in rows], sep='\\n', flush=True); rows = []\n"
    )
    assert give(opened, script(tmp_path / "all.py", body)) == [4.0, 5.0, 9.0, 1.0]


def test_more_answers_than_a_pipe_holds(tmp_path: Path, opened: list[Rewards]) -> None:
    rewards = Rewards([parse_reward(script(tmp_path / "r.py", ANSWER_LENGTHS))], timeout=20, device=torch.device("cpu"))
    opened.append(rewards)
    rows = [RewardRow((), "x" * 3000, "length", {})] * 200
    assert rewards(rows) == [3000.0] * 200


HOSTILE = {
    "fails": ("print('bad weather', file=sys.stderr); sys.exit(3)", "it ended with status 3: bad weather"),
    "dies": ("sys.stdin.readline(); os.kill(os.getpid(), 9)", "it was ended by signal 9|it ended with status 137"),
    "ends in the middle": ("print(sys.stdin.readline() and 1, flush=True)", "it ended with status 0"),
    "hangs": ("time.sleep(60)", "no answer in 0.5 seconds"),
    "hangs in the middle": ("sys.stdin.readline(); print(1, flush=True); time.sleep(60)", "no answer in 0.5 seconds"),
    "junk": ("for line in sys.stdin: print('très bien', flush=True)", "it printed 'très bien' where a number belongs"),
    "empty lines": ("for line in sys.stdin: print(flush=True)", "it printed '' where a number belongs"),
    "NaN": ("for line in sys.stdin: print('nan', flush=True)", "it gave nan for answer 1 of 4"),
    "infinity": ("for line in sys.stdin: print('-1e999', flush=True)", "it gave -inf for answer 1 of 4"),
    "too many": ("for line in sys.stdin: print('1\\n2', flush=True)", "more lines than there were answers"),
    "no end of line": (
        "sys.stdout.write('1' * 10_000_000); sys.stdout.flush(); time.sleep(60)",
        "a number|it gave inf|more lines",
    ),
    "no UTF-8": ("for line in sys.stdin: os.write(1, b'\\xff\\xfe\\n')", "where a number belongs"),
    "closes its output": ("os.close(1); time.sleep(60)", "it closed its output|no answer in"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_goes_wrong_in_a_command_is_one_line_that_names_it(
    name: str, tmp_path: Path, opened: list[Rewards]
) -> None:
    body, problem = HOSTILE[name]
    command = script(tmp_path / "judge.py", body + "\n")
    started = time.monotonic()
    with pytest.raises(TrainingError, match=problem) as error:
        give(opened, "rule:correct", f"0.5*{command}", timeout=0.5 if "hangs" in name or "close" in name else 10.0)
    line = str(error.value)
    assert line.startswith(f"reward {command}: ")
    assert "\n" not in line
    assert "nothing was trained on that" in line
    assert time.monotonic() - started < 9


def test_a_command_that_does_not_exist(opened: list[Rewards]) -> None:
    with pytest.raises(TrainingError, match=r"it ended with status 127: .*no-such-judge"):
        give(opened, "cmd:no-such-judge --now")


def test_a_command_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    numbers = tmp_path / "pids"
    body = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(numbers)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n" + ANSWER_LENGTHS
    )
    rewards = Rewards([parse_reward(script(tmp_path / "r.py", body))], timeout=20, device=torch.device("cpu"))
    rewards(ROWS)
    pids = [int(text) for text in numbers.read_text().split()]
    assert all(map(alive, pids))
    rewards.close()
    rewards.close()  # twice is once
    for _ in range(100):
        if not any(map(alive, pids)):
            return
        time.sleep(0.05)
    raise AssertionError("a process is left")


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has asked about does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Functions


def function(path: Path, body: str, name: str = "score") -> str:
    path.write_text(body, encoding="utf-8")
    return f"{path}:{name}"


def test_a_function_gets_the_rows_of_a_step(tmp_path: Path, opened: list[Rewards]) -> None:
    (tmp_path / "helper.py").write_text("def worth(row):\n    return row['record']['n'] + len(row['answer'])\n")
    body = (
        "from helper import worth\n"
        "print('loading')\n"
        "def score(rows):\n"
        "    print('what it prints is no answer')\n"
        "    return [worth(row) for row in rows]\n"
    )
    assert give(opened, function(tmp_path / "judge.py", body)) == [4.0, 6.0, 11.0, 4.0]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def score(rows):\n    return rows[0]['prize']\n", r"KeyError: 'prize' \(line 2 of judge.py\)"),
        ("def score(rows):\n    return [1.0]\n", "it gave 1 numbers for 4 answers"),
        ("def score(rows):\n    return [float('nan')] * len(rows)\n", "it gave nan for answer 1 of 4"),
        ("def score(rows):\n    return ['good'] * len(rows)\n", "ValueError"),
        ("def score(rows):\n    return None\n", "TypeError"),
        ("def score(rows):\n    raise RuntimeError('one\\ntwo')\n", "RuntimeError: one two"),
        ("import os\ndef score(rows):\n    os._exit(7)\n", "it ended with status 7"),
        ("import sys\ndef score(rows):\n    sys.exit(0)\n", "it ended with status 0"),
        ("import time\ndef score(rows):\n    time.sleep(60)\n", "no answer in 2 seconds"),
        ("def other(rows):\n    return []\n", "AttributeError"),
        ("def score(rows:\n", "SyntaxError"),
        ("import no_such_module_here\n", "ModuleNotFoundError"),
    ],
)
def test_whatever_goes_wrong_in_a_function_is_one_line_that_names_it(
    body: str, problem: str, tmp_path: Path, opened: list[Rewards]
) -> None:
    named = function(tmp_path / "judge.py", body)
    with pytest.raises(TrainingError, match=problem) as error:
        give(opened, named, timeout=2.0)
    assert str(error.value).startswith(f"reward {named}: ")
    assert "\n" not in str(error.value)


def test_a_rule_that_does_not_fit_the_prompts_is_named(opened: list[Rewards]) -> None:
    rewards = Rewards([parse_reward("rule:correct")], timeout=1.0, device=torch.device("cpu"))
    with pytest.raises(TrainingError, match="reward rule:correct: "):
        rewards([RewardRow((), "four", "end", {})])
