"""A corpus far larger than memory: tokenised and trained on within 2 GB for the whole process tree.

MINIGPT_TEST_CORPUS_MB sets its size; a tenth of it already shows whether memory is flat.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import CPU

MEGABYTES = int(os.environ.get("MINIGPT_TEST_CORPUS_MB", "2000"))
FILES = 8
LIMIT = 2e9


def memory_of_tree(root: psutil.Process) -> int:
    """Anonymous plus shared memory of a process and all below it, in bytes; mapped files do not count."""
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines())
        total += sum(1024 * int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem"))
    return total


def watch(child: subprocess.Popen[bytes]) -> Iterator[int]:
    """Yield what a run takes, until it ends."""
    root = psutil.Process(child.pid)
    while child.poll() is None:
        try:
            yield memory_of_tree(root)
        except psutil.NoSuchProcess:
            return
        threading.Event().wait(0.1)


def write_corpus(folder: Path, texts: Path, megabytes: int) -> None:
    """Real lines, English and Chinese, in a new order each time and each with a number: no text is there twice."""
    lines = [
        line
        for path in sorted(texts.rglob("*.txt"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    draw, number = random.Random(0), 0
    for index in range(FILES):
        written = 0
        with open(folder / f"text-{index}.txt", "w", encoding="utf-8") as file:
            while written < megabytes * 1_000_000 // FILES:
                number += 1
                block = f"{number}\n" + "\n".join(draw.sample(lines, 1000)) + "\n\n"
                file.write(block)
                written += len(block.encode("utf-8"))


@pytest.mark.slow
def test_a_large_corpus_needs_little_memory(shared: Path, tmp_path: Path) -> None:
    texts = shared / "data" / "pretrain"
    if not texts.is_dir():
        pytest.skip("the texts to make a large corpus of are not there")
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says how much memory is anonymous")
    if shutil.disk_usage(tmp_path).free < 3 * MEGABYTES * 1_000_000:
        pytest.skip(f"no room for a corpus of {MEGABYTES} MB and its tokens")
    source = tmp_path / "texts"
    source.mkdir()
    write_corpus(source, texts, MEGABYTES)
    command = [sys.executable, "-m", "minigpt", "train", str(source), "-o", str(tmp_path / "run"), *CPU]
    command += ["--preset", "nano", "--steps", "3", "--vocab-size", "32768"]
    with open(tmp_path / "errors", "wb") as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        peak = max(watch(child))
    assert child.returncode == 0, (tmp_path / "errors").read_text(encoding="utf-8")
    print(f"{MEGABYTES} MB of text: at most {peak / 1e6:,.0f} MB of memory")
    assert peak < LIMIT
    corpus = json.loads((tmp_path / "run" / "minigpt.json").read_text(encoding="utf-8"))["corpus"]
    assert corpus["documents"] == FILES, "nothing was taken for a duplicate"
    assert corpus["train_bytes"] + corpus["held_out_bytes"] >= MEGABYTES * 1_000_000
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / ".cache")
