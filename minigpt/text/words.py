"""Byte-level BPE by the word: the ids of most words are looked up, for text repeats them.

The words are found by a regular expression of Python's that says what the tokenizer's own says, for the pre-tokenizers
in wide use (GPT-2, Llama 3, Qwen, and this package's). Compiled C gives their ids (``merges``); where there is none, a
table, and the library's model for words that are new. Text in which the two may disagree goes to the library, line by
line: characters that are new in Unicode, numbers that are no digits, what NFC would change, and the names of tokens
that were added to the vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from minigpt.text.merges import Merges, merges
from minigpt.text.pieces import LINE_BORDER
from minigpt.text.tokenizer_json import byte_alphabet, components

# Classes of characters as the tokenizers' patterns have them, for plain text. Python's \s has U+001C to U+001F too.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LETTERS = r"[^\W\d_]+"
_OTHERS = rf"(?:[^\w{_SPACE}]++|_++)++"
# Alternatives of the patterns in use and what they are here, the first that fits the rest of a pattern.
_ALTERNATIVES = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)": r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])",
    r"'(?i:[sdmt]|ll|ve|re)": r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])",
    r"'s|'t|'re|'ve|'m|'ll|'d": r"'(?:[stmd]|[rv]e|ll)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+": rf"(?:[^\w\r\n]|_)?{_LETTERS}",
    r" ?\p{L}+": f" ?{_LETTERS}",
    r"\p{N}{1,3}": r"\d{1,3}",
    r"\p{N}": r"\d",
    r" ?\p{N}+": r" ?\d+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*": rf" ?{_OTHERS}[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+": f" ?{_OTHERS}",
    r"\s*[\r\n]+": rf"[{_SPACE}]*[\r\n]+",
    r"\s+(?!\S)": rf"[{_SPACE}]+(?![^{_SPACE}])",
    r"\s+(?![^\s\p{N}])": rf"[{_SPACE}]+(?![^{_SPACE}\d])",
    r"\s+": f"[{_SPACE}]+",
}
# Every pattern in use takes such a word so, whatever its first alternatives are: tried first, it is found faster.
_COMMON_WORD = r" ?[A-Za-z]++(?![^\x00-\x7f])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same where digits are set apart before.
_GPT2_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_WORDS = (r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?\p{L}+")

_MOST_WORDS = 1 << 17  # some 30 MB
_LONGEST_WORD = 64
_LONGEST_MEAN_WORD = 16
_BYTE_CHARACTERS = "".join(sorted(byte_alphabet(), key=byte_alphabet().__getitem__))


class WordEncoder:
    """Ids of text, equal to those of the ``tokenizers`` tokenizer that it was made of."""

    def __init__(self, backend: Backend, words: re.Pattern[str], added: list[str], nfc: bool) -> None:
        """Take the pattern of words, the names of added tokens, and whether text is brought to NFC."""
        self._backend = backend
        self._find = words.findall
        self._ids = _Table(backend.model).__getitem__
        self._added = added
        self._nfc = nfc

    def suits(self, text: str) -> bool:
        """Tell whether a text is encoded faster than by the library.

        Without compiled C its words have to repeat: in scripts without spaces they are whole clauses, which do not.
        """
        return bool(self._merges) or text.isascii() or text.count(" ") * _LONGEST_MEAN_WORD > len(text)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a text without lone surrogates, (T,)."""
        if self._is_plain(text):
            return np.frombuffer(self._encode_plain(text), dtype=np.uint32)
        parts = []
        for plain, lines in groupby(LINE_BORDER.split(text), key=self._is_plain):
            part = "".join(lines)
            parts.append(self._encode_plain(part) if plain else self._encode_any(part))
        return np.frombuffer(b"".join(parts), dtype=np.uint32)

    def _encode_plain(self, text: str) -> bytes:
        words = self._find(text)
        return self._merges.encode(text, words).tobytes() if self._merges else b"".join(map(self._ids, words))

    def _encode_any(self, text: str) -> bytes:
        return array("I", self._backend.encode(text, add_special_tokens=False).ids).tobytes()

    def _is_plain(self, text: str) -> bool:
        """Tell whether Python and the library certainly find the same words in a text."""
        if self._apart.search(text):
            return False
        return text.isascii() or not (
            _odd_characters().search(text) or (self._nfc and not unicodedata.is_normalized("NFC", text))
        )

    @cached_property
    def _merges(self) -> Merges | None:
        return merges(self._backend)

    @cached_property
    def _apart(self) -> re.Pattern[str]:
        """A pattern of what is taken whole: names of added tokens, and words that merges do not lead to."""
        names = [*self._added, *(self._merges.unreached if self._merges else ())]
        return re.compile("|".join(map(re.escape, names)) or "(?!)")


class _Table(dict[str, bytes]):
    """Word -> its ids as bytes, worked out by the tokenizer's model where they are asked for the first time.

    A table that is full begins anew, so that memory stays flat.
    """

    def __init__(self, model: Any) -> None:
        self._tokenize = model.tokenize

    def __missing__(self, word: str) -> bytes:
        tokens = self._tokenize(word.encode().decode("latin-1").translate(_BYTE_CHARACTERS))
        ids = array("I", [token.id for token in tokens]).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def word_encoder(backend: Backend, source: dict[str, Any]) -> WordEncoder | None:
    """Make an encoder for a tokenizer, given with its tokenizer.json; None for one of a kind that is not known here."""
    model, normalizer = source["model"], source.get("normalizer")
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    added = [token for token in source.get("added_tokens") or () if not token["special"]]
    if any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in added):
        return None  # what such a token takes may reach across lines
    words = _words(source.get("pre_tokenizer"))
    if words is None:
        return None
    return WordEncoder(
        backend, words, [token["content"] for token in added if token["content"]], normalizer is not None
    )


def _words(pre_tokenizer: Any) -> re.Pattern[str] | None:
    """Return the pattern of the words that a pre-tokenizer finds, or None for one that is not known."""
    steps = [step for step in components(pre_tokenizer) if step.get("type") != "Sequence"]
    kinds = [step.get("type") for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    first, by_regex = steps[0], steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and by_regex:
        return _translated(_GPT2)
    if kinds == ["Digits", "ByteLevel"] and by_regex and first.get("individual_digits"):
        return _translated(_GPT2_DIGITS)
    isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    if kinds == ["Split", "ByteLevel"] and not by_regex and isolated:
        pattern = first.get("pattern")
        return _translated(pattern.get("Regex", "")) if isinstance(pattern, dict) else None
    return None


@lru_cache(maxsize=8)
def _translated(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern of Python's that finds the same words in plain text, or None where a part is not known.

    It has to find letters and all the rest, so that nothing is left out between words.
    """
    found, rest = [], pattern
    while rest:
        known = next((part for part in _ALTERNATIVES if rest == part or rest.startswith(f"{part}|")), None)
        if known is None:
            return None
        found.append(known)
        rest = rest[len(known) + 1 :]
    letters = next((place for place, part in enumerate(found) if part in _WORDS), None)
    if letters is None or any(not part.startswith(("'", "(?i:'")) for part in found[:letters]):
        return None
    if found[-1] != r"\s+" or not any(r"[^\s\p{L}\p{N}]+" in part for part in found):
        return None
    if not any(part.removeprefix(" ?").startswith(r"\p{N}") for part in found):
        return None
    return re.compile("|".join([_COMMON_WORD, *(_ALTERNATIVES[part] for part in found)]))


@lru_cache(maxsize=1)
def _odd_characters() -> re.Pattern[str]:
    """Return a pattern of the characters which libraries may take for different things.

    Those that Unicode had in 2002 are letters, digits, spaces or none of these to all of them; so are pictures. Numbers
    that are no digits are odd, for Python takes some of them for letters, and so is ſ, a small s in "it'ſ".
    """
    old = unicodedata.ucd_3_2_0.category
    plain = [
        code
        for code in range(0x10000)
        if old(chr(code)) != "Cn" and unicodedata.category(chr(code)) not in ("No", "Nl") and code != 0x17F
    ]
    codes = np.array(plain)
    ends = np.flatnonzero(np.diff(codes) > 1)
    ranges = [*zip(codes[[0, *(ends + 1)]], codes[[*ends, -1]], strict=True), (0x1F300, 0x1FAFF), (0x20000, 0x2A6D6)]
    return re.compile("[^" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]")
