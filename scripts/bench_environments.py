"""Environments of peers that are not in ours: each made once by venv and pip, under .cache/ at the top of the tree."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from bench_peers import say

CACHE = Path(__file__).parents[1] / ".cache"
FOLDER = CACHE / "bench-venv"
PACKAGES = {
    "litgpt": ["litgpt", f"torch=={importlib.metadata.version('torch')}"],
    "tiktoken": ["tiktoken", "numpy"],
    "llama.cpp": ["llama-cpp-python"],
}
BUILD = {"llama.cpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}}  # for this processor; some minutes of compiling

ABOUT = {  # printed after the version
    "llama.cpp": """
import llama_cpp
parts = llama_cpp.llama_print_system_info().decode().split("|")
print("(" + " ".join(part.split("=")[0].split(":")[-1].strip() for part in parts if "= 1" in part) + ")")
"""
}


@cache
def python_of(peer: str) -> str:
    """Return the Python of a peer's environment, making it first where there is none.

    MINIGPT_BENCH_<PEER> may name another one. Where pip fails the path returned does not exist: the peer's row is then
    left out and says so.
    """
    if given := os.environ.get(f"MINIGPT_BENCH_{peer.upper().replace('.', '_')}"):
        return given
    folder = FOLDER / peer
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        say(f"{peer}: installing {' '.join(PACKAGES[peer])} into {folder}")
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, stdout=sys.stderr)
            subprocess.run(
                [python, "-m", "pip", "install", "-qq", *PACKAGES[peer]],
                check=True, stdout=sys.stderr, env=os.environ | BUILD.get(peer, {}),
            )  # fmt: skip
        except (subprocess.CalledProcessError, OSError) as error:
            say(f"{peer}: {error}")
            return str(folder / "could not be installed")
        stamp.touch()
    return str(python)


def versions(peers: list[str]) -> dict[str, str]:
    """What was measured: the version of each package, and what llama.cpp was compiled for.

    A peer that could not be installed has none.
    """
    found = {name: importlib.metadata.version(name) for name in ("torch", "tokenizers")}
    if "transformers" in peers:
        found["transformers"] = importlib.metadata.version("transformers")
    for peer in sorted(set(peers) & set(PACKAGES)):
        package = PACKAGES[peer][0]
        code = f"import importlib.metadata as m; print(m.version({package!r}))" + ABOUT.get(peer, "")
        with suppress(subprocess.CalledProcessError, OSError):
            done = subprocess.run([python_of(peer), "-c", code], capture_output=True, text=True, check=True)
            found[package] = " ".join(done.stdout.split())
    return found
