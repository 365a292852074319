"""Preferences small enough to learn in a moment: short answers are better than long ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_chat import ANIMALS

PAIRS = [(f"Say {animal}", f"{animal}!", f"{animal} {animal}?") for animal in ANIMALS]
PAIRS += [(f"Two {animal}s", f"{animal} {animal}", f"{animal}!") for animal in ANIMALS]


def write_pairs(path: Path, pairs: Sequence[tuple[str, str, str]] = PAIRS, **more: Any) -> Path:
    """Write prompts with a chosen and a rejected answer as JSON lines."""
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected, **more} for prompt, chosen, rejected in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_marked(path: Path, pairs: Sequence[tuple[str, str, str]] = PAIRS) -> Path:
    """Write each answer by itself, with a label."""
    rows = [
        {"prompt": prompt, "response": answer, "label": answer == chosen}
        for prompt, chosen, rejected in pairs
        for answer in (chosen, rejected)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
