"""How a peer of the bench is spoken to: a JSON line a request and one an answer, so that several can measure in turns.

A peer is a script of its own process, and perhaps of its own environment: this file needs the standard library alone.
It loads once, then measures on command.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Measure = Callable[..., Any]  # called with the fields of one request


def serve(load: Callable[..., dict[str, Measure]]) -> None:
    """Call `load` with the setup given as the first argument, then answer requests by the measure each one names.

    Whatever libraries print goes to stderr. What fails is answered as `{"error": …}`.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(work: Callable[[], Any]) -> None:
        try:
            reply = {"value": work()}
        except Exception as error:
            lines = str(error).splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
        print(json.dumps(reply), file=answers, flush=True)

    measures: dict[str, Measure] = {}
    answer(lambda: measures.update(load(**json.loads(sys.argv[1]))))
    for line in sys.stdin:
        request = json.loads(line)
        answer(lambda request=request: measures[request.pop("measure")](**request))


def rate(work: Callable[[], int], seconds: float) -> float:
    """Repeat `work`, which returns how many units it did, for about `seconds`; return units a second."""
    units, started = 0, time.perf_counter()
    while True:
        units += work()
        taken = time.perf_counter() - started
        if taken >= seconds:
            return units / taken


def digest(ids: Any) -> str:
    """What an array of ids comes to, so that peers can be compared without sending all of them."""
    return f"{len(ids)} ids, {hashlib.sha256(ids.tobytes()).hexdigest()[:16]}"
