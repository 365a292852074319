"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Before torch is imported: threads that spin take a second core from whatever else runs here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ctrl-C is ignored in what a shell starts in the background, and in all that this starts; the tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models beside the checkout; tests that need it skip where it is missing."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"real data and models are not there ({folder.name}/ beside the checkout)")
    return folder
