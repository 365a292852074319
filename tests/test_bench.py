"""The scripts that measure: options, the page made from their JSON, how peers are spoken to. Nothing is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

# A peer of arithmetic: what it answers is known.
PEER = """
from protocol import rate, serve

def load(threads, factor):
    if factor == 0:
        raise ValueError("no factor\\nof use")
    print("what a library says goes elsewhere")
    return {"times": lambda value: factor * value, "inverse": lambda value: 1 / value, "half": lambda: factor / 2}

serve(load)
"""


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import bench
        import bench_page
        import bench_peers

    return {"bench": bench, "page": bench_page, "peers": bench_peers}


@pytest.fixture
def peer(tmp_path: Path, bench: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a contestant whose script is the one above."""
    (tmp_path / "arithmetic.py").write_text(PEER, encoding="utf-8")
    (tmp_path / "protocol.py").write_text((SCRIPTS / "peers" / "protocol.py").read_text(encoding="utf-8"), "utf-8")
    monkeypatch.setattr(bench["peers"], "SCRIPTS", tmp_path)

    def make(name: str, factor: float, **more: Any) -> Any:
        return bench["peers"].Contestant(name, "arithmetic", {"threads": 1, "factor": factor}, **more)

    return make


def test_options_of_a_comparison(bench: Any) -> None:
    chosen = bench["bench"].options(["--against", "transformers, llama.cpp", "--only", "training", "--rounds", "1"])
    assert chosen.against == ["transformers", "llama.cpp"]
    assert chosen.only == ["training"]
    assert chosen.threads >= 1


def test_without_options_nothing_is_compared(bench: Any) -> None:
    chosen = bench["bench"].options([])
    assert (chosen.against, chosen.only, chosen.rounds) == ([], None, None)


@pytest.mark.parametrize("arguments", [["--against", "vllm"], ["--only", "training,sleeping"]])
def test_unknown_names_are_usage_errors(bench: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench["bench"].options(arguments)
    assert raised.value.code == 2
    assert "is unknown (choose from" in capsys.readouterr().err


def test_medians_and_ratios_are_taken_over_rounds(bench: Any) -> None:
    table = bench["peers"].Table("speed", "tokens/s", {})
    table.values = {"minigpt": [2.0, 30.0, 4.0], "other": [1.0, 10.0, 4.0]}
    result = table.result(["minigpt"])
    assert result["medians"] == {"minigpt": 4.0, "other": 4.0}
    assert result["ratios"] == {"minigpt": {"other": 2.0}}  # of 2, 3 and 1


def test_peers_measure_in_turns_and_those_that_fail_are_left_out(bench: Any, peer: Callable[..., Any]) -> None:
    tables = [
        bench["peers"].Table("product", "units", {"measure": "times", "value": 3}),
        bench["peers"].Table("quotient", "units", {"measure": "inverse", "value": 0}),
    ]
    rows = [peer("ours", 4, ours=True), peer("theirs", 2), peer("broken", 0), peer("gone", 1, python="/no/python")]
    product, quotient = bench["peers"].compare(rows, tables, 3, fact="half")
    assert product["medians"] == {"ours": 12, "theirs": 6}
    assert product["ratios"] == {"ours": {"theirs": 2.0}}
    assert product["missing"]["broken"] == "ValueError: no factor"
    assert "/no/python" in product["missing"]["gone"]
    assert product["facts"]["half"] == {"ours": 2.0, "theirs": 1.0}
    assert product["facts"]["peak MB"]["ours"] > 1
    assert quotient["medians"] == {}
    assert quotient["missing"]["theirs"] == "ZeroDivisionError: division by zero"


def result(**changes: Any) -> dict[str, Any]:
    table = {
        "title": "one text", "unit": "tokens/s", "medians": {"minigpt int8": 30.0, "llama.cpp q8_0": 60.04},
        "ratios": {"minigpt int8": {"llama.cpp q8_0": 0.5}}, "facts": {"peak MB": {"minigpt int8": 700}},
        "missing": {"litgpt": "the process ended with status 1"},
    }  # fmt: skip
    machine = {
        "processor": "Some CPU", "instructions": ["avx2"], "cores": 2, "memory GB": 8, "system": "Linux",
    }  # fmt: skip
    base = {"command": "scripts/bench.py", "machine": machine, "threads": 2, "rounds": 5, "versions": {"torch": "2"}}
    return base | {"tables": [table]} | changes


def test_the_page_keeps_losing_and_missing_rows(tmp_path: Path, bench: Any) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_page.py", file], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.startswith("# Some CPU, 2 threads\n\n2 cores, 8 GB; avx2; Linux; torch 2.\n")
    assert done.stdout.endswith(
        "## One text\n\n"
        "|  | tokens/s | minigpt int8 is … times as fast | peak MB |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| **minigpt int8** | 30.0 |  | 700 |\n"
        "| llama.cpp q8_0 | 60.0 | 0.50 |  |\n\n"
        "Left out: litgpt (the process ended with status 1).\n"
    )


def test_runs_of_one_machine_make_one_page(bench: Any) -> None:
    both = bench["page"].merged(
        [result(), result(versions={"tiktoken": "1"}, command="scripts/bench.py --json", rounds=3)]
    )
    assert [len(both["tables"]), both["versions"]] == [2, {"torch": "2", "tiktoken": "1"}]
    assert "Made by `scripts/bench.py`, `scripts/bench.py --json`: medians of 3 and 5 int" in bench["page"].page(both)


def test_runs_of_two_machines_do_not(bench: Any) -> None:
    with pytest.raises(ValueError, match="different machines"):
        bench["page"].merged([result(), result(threads=4)])


def test_this_machine_is_named(bench: Any) -> None:
    about = bench["page"].machine()
    assert about["processor"]
    assert about["cores"] >= 1
