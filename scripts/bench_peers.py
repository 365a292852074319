"""Peers that measure in turns: each a process of its own, asked over pipes; medians and ratios over the rounds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

SCRIPTS = Path(__file__).parent / "peers"
WATCH_SECONDS = 0.02


class PeerError(Exception):
    """A peer that is missing or failed, in one line."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def resident_bytes(pid: int) -> int:
    """What a process and its descendants hold; pages that they share count for each."""
    total = 0
    with suppress(psutil.Error):  # one that has just ended
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    return total


class Peer:
    """One process of `scripts/peers/<script>.py`, loaded with `setup`; a context manager, so that it always ends."""

    def __init__(self, script: str, setup: dict[str, Any], python: str = sys.executable) -> None:
        threads = str(setup["threads"])
        environment = os.environ | {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads}
        # As the program's command line has it (minigpt/cli/app.py), and the same for all.
        environment.setdefault("GOMP_SPINCOUNT", "10000")
        self._process = subprocess.Popen(
            [python, SCRIPTS / f"{script}.py", json.dumps(setup)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment,
        )  # fmt: skip
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError("the process ended") from None
        return self._answer()

    def ask_watched(self, **request: Any) -> tuple[Any, int]:
        """The answer, and the most memory (MB) that the process and those it started held meanwhile, in all."""
        with ThreadPoolExecutor(1) as thread:
            answer, peak = thread.submit(self.ask, **request), 0
            while True:  # looks at least once, however soon the answer comes
                peak = max(peak, resident_bytes(self._process.pid))
                if answer.done():
                    return answer.result(), round(peak / 1e6)
                time.sleep(WATCH_SECONDS)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class Contestant:
    """One row: what it is called, and the peer that measures it. Rows of the program itself are `ours`."""

    name: str
    script: str
    setup: dict[str, Any]
    ours: bool = False
    python: str = sys.executable


@dataclass
class Table:
    """One comparison: what is asked of every contestant, and the rates that they answer, in `unit`."""

    title: str
    unit: str
    request: dict[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def result(self, ours: Sequence[str]) -> dict[str, Any]:
        """Medians of all rows, and of the ratios in each round, ours over theirs."""
        others = [name for name in self.values if name not in ours]
        return {
            "title": self.title,
            "unit": self.unit,
            "medians": {name: round(statistics.median(values), 3) for name, values in self.values.items()},
            "ratios": {
                name: {other: self._ratio(name, other) for other in others} for name in ours if name in self.values
            },
            "facts": self.facts,
            "missing": self.missing,
        }

    def _ratio(self, ours: str, other: str) -> float:
        pairs = zip(self.values[ours], self.values[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    def leave_out(self, name: str, reason: str) -> None:
        self.values.pop(name, None)
        self.missing[name] = reason
        say(f"{self.title}: {name} is left out: {reason}")


def compare(
    contestants: Sequence[Contestant], tables: Sequence[Table], rounds: int, fact: str | None = None
) -> list[dict[str, Any]]:
    """Load all contestants, then let each answer every table once a round; one that fails says why and is left out.

    `fact` is asked of each one once, after the rounds, and its memory watched.
    """
    peers: dict[str, Peer] = {}
    try:
        for one in contestants:
            try:
                peers[one.name] = Peer(one.script, one.setup, one.python)
            except (PeerError, OSError) as error:
                for table in tables:
                    table.leave_out(one.name, str(error))
        for turn in range(rounds):
            for table in tables:
                for name, peer in peers.items():
                    if name not in table.missing:
                        measure(table, name, peer, f"round {turn + 1}/{rounds}")
        if fact is not None:
            look_up(fact, tables, peers)
    finally:
        for peer in peers.values():
            peer.close()
    return [table.result([one.name for one in contestants if one.ours]) for table in tables]


def measure(table: Table, name: str, peer: Peer, turn: str) -> None:
    try:
        value = peer.ask(**table.request)
    except PeerError as error:
        table.leave_out(name, str(error))
        return
    table.values.setdefault(name, []).append(value)
    say(f"{turn}  {table.title:<24}{name:<44}{value:>12,.1f} {table.unit}")


def look_up(fact: str, tables: Sequence[Table], peers: dict[str, Peer]) -> None:
    """Ask each peer for a fact about what it measured, and watch the memory that it takes."""
    for table in tables:
        for name in table.values:
            value, peak = peers[name].ask_watched(measure=fact)
            table.facts.setdefault(fact, {})[name] = value
            table.facts.setdefault("peak MB", {})[name] = peak
