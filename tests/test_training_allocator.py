"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

MEASURE = """
import psutil, torch
from minigpt.training.allocator import keep_freed_memory

held = lambda: psutil.Process().memory_info().rss
{call}
before = held()
torch.ones({mebibytes} << 18)  # freed at once
print((held() - before) >> 20)
"""


def kept(call: str, mebibytes: int) -> int:
    command = [sys.executable, "-c", MEASURE.format(call=call, mebibytes=mebibytes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_freed_blocks_stay_with_the_process_but_for_the_largest() -> None:
    assert kept("pass", 16) < 4
    assert kept("keep_freed_memory()", 16) > 12
    assert kept("keep_freed_memory()", 64) < 16, "they would leave holes that nothing else fills"
