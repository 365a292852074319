"""The text that a command works on, and tokens as a person can read them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, overload

from minigpt.cli import stdin
from minigpt.errors import UsageError
from minigpt.text.decoding import ReadCounts, decode_utf8, spool

if TYPE_CHECKING:
    from minigpt.text.tokenizer import Tokenizer


@overload
def typed(text: str) -> str: ...
@overload
def typed(text: str | None) -> str | None: ...
def typed(text: str | None) -> str | None:
    """Read an argument as UTF-8 whatever the locale; what is none becomes U+FFFD."""
    return None if text is None else decode_utf8(os.fsencode(text), ReadCounts())


def given_text(argument: str | None, command: str) -> str | None:
    """Return piped text, a newline and the argument, or the one there is; piped text alone stays as it is.

    Nothing at all is None where `command` is empty, else a UsageError with an example of it.
    """
    argument = typed(argument)
    if stdin.is_piped():
        piped = stdin.read_text()
        if argument is None:
            return piped
        return "\n".join(text for text in (piped.removesuffix("\n"), argument) if text)
    if argument is None and command:
        raise UsageError(f'no text; give some, or pipe it: echo "Once upon a time" | {command}')
    return argument


@contextmanager
def stdin_file(what: str) -> Iterator[Path]:
    """Put all of standard input into a file, for as long as it is needed; no input at all is a DataError."""
    with TemporaryDirectory(prefix="minigpt-") as folder:
        path = Path(folder) / "stdin.txt"
        with stdin.piped(what) as stream:
            spool(stream, path)
        yield path


def label(tokenizer: Tokenizer, id: int) -> str:
    """Return a token's text; <E7> for a byte that is no text by itself, <7> for control token 7."""
    data = tokenizer.token_bytes(id)
    if not data:
        return f"<{id}>"
    text = data.decode("utf-8", "surrogateescape")  # one lone surrogate for each such byte
    return "".join(
        f"<{ord(character) - 0xDC00:02X}>" if "\udc80" <= character <= "\udcff" else character for character in text
    )


def visible(text: str) -> str:
    """Return text on one line: signs for line ends and tabs, and for what a terminal might take for a command."""
    signs = {"\n": "↵", "\t": "→"}
    return "".join(signs.get(character, character if character.isprintable() else "�") for character in text)
