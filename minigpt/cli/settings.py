"""Settings by file and by `--set section.key=value`; the command line beats the file, the file beats the preset."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.errors import ConfigError, UsageError

BUDGETS = ("minutes", "steps", "epochs", "tokens")  # a run has one of them

Sections = dict[str, dict[str, Any]]


def read_settings(file: Path | None, assignments: list[str], sections: tuple[str, ...]) -> Sections:
    """Merge a TOML file and `--set` assignments; an unknown section is a ConfigError that names those there are."""
    settings: Sections = {section: {} for section in sections}
    if file is not None:
        for section, values in _read_toml(file).items():
            if section not in settings or not isinstance(values, dict):
                raise ConfigError(f"{file}: unknown section {section!r} (known: {', '.join(sections)})")
            settings[section].update(values)
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise UsageError(f"--set {assignment}: write it as section.key=value, such as train.weight_decay=0.1")
        if section not in settings:
            raise UsageError(f"--set {assignment}: unknown section {section!r} (known: {', '.join(sections)})")
        settings[section][key] = _value(text)
    return settings


def move_settings(
    options: dict[str, Any], settings: Sections, also_options: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    """Move settings that are options too where these are, and leave out what was not said.

    `also_options` has the option's name for a section and key.
    """
    for (section, key), name in also_options.items():
        value = settings[section].pop(key, None)
        rivals = BUDGETS if name in BUDGETS else (name,)
        if all(options[rival] is None for rival in rivals):
            options[name] = value
    return {name: value for name, value in options.items() if value is not None}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or 'cannot be read'}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: no valid TOML ({error})") from error


def _value(text: str) -> Any:
    """Read a value as TOML would; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
