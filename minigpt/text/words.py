"""Byte-level BPE by the word, for the pre-tokenizers in wide use: GPT-2, Llama 3, Qwen, and this package's.

Compiled C does it all (``compiled``). Where there is no compiler, a regular expression of Python's finds the words that
the tokenizer's own finds; most ids are looked up, since text repeats its words, and those of new words come from the
library's model. Text that libraries may take for different things goes to the library, line by line: characters that
are new in Unicode, what NFC would change, and the names of tokens that were added to the vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from minigpt.text.compiled import DIGIT, LETTER, NEWLINE, ODD, OTHER, SPACE, CompiledEncoder, compiled_encoder
from minigpt.text.pieces import LINE_BORDER
from minigpt.text.tokenizer_json import byte_characters, components

# Classes of characters as the tokenizers' patterns have them, for plain text. Python's \s has U+001C to U+001F too.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LETTERS = r"[^\W\d_]+"
_OTHERS = rf"(?:[^\w{_SPACE}]++|_++)++"
# Alternatives of the patterns in use, in the order in which they have them, and what each is here.
_ALTERNATIVES = (
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)": r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])",
        r"'(?i:[sdmt]|ll|ve|re)": r"'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL])",
        r"'s|'t|'re|'ve|'m|'ll|'d": r"'(?:[stmd]|[rv]e|ll)",
    },
    {r"[^\r\n\p{L}\p{N}]?\p{L}+": rf"(?:[^\w\r\n]|_)?{_LETTERS}", r" ?\p{L}+": f" ?{_LETTERS}"},
    {r"\p{N}{1,3}": r"\d{1,3}", r"\p{N}": r"\d", r" ?\p{N}+": r" ?\d+"},
    {r" ?[^\s\p{L}\p{N}]+[\r\n]*": rf" ?{_OTHERS}[\r\n]*", r" ?[^\s\p{L}\p{N}]+": f" ?{_OTHERS}"},
    {r"\s*[\r\n]+": rf"[{_SPACE}]*[\r\n]+"},
    {
        r"\s+(?!\S)": rf"[{_SPACE}]+(?![^{_SPACE}])",
        r"\s+(?![^\s\p{N}])": rf"[{_SPACE}]+(?![^{_SPACE}\d])",
    },
)
_LEFT_OUT = (0, 4)  # by some patterns
_LAST = r"\s+", f"[{_SPACE}]+"
# Every pattern in use takes such a word so, whatever its first alternatives are: tried first, it is found faster.
_COMMON_WORD = r" ?[A-Za-z]++(?![^\x00-\x7f])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same where digits are set apart before.
_GPT2_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

_MOST_WORDS = 1 << 17  # some 30 MB
_LONGEST_WORD = 64
_LONGEST_MEAN_WORD = 16
_BYTE_CHARACTERS = byte_characters()


class WordEncoder:
    """Ids of text, equal to those of the ``tokenizers`` tokenizer that it was made of."""

    def __init__(
        self, backend: Backend, words: re.Pattern[str], rules: tuple[int, ...], added: list[str], nfc: bool
    ) -> None:
        """Take the pattern of words, its rules, the names of added tokens, and whether text is brought to NFC."""
        self._backend = backend
        self._find, self._rules = words.findall, rules
        self._ids = _Table(backend.model).__getitem__
        self._added = added
        self._nfc = nfc

    def suits(self, text: str) -> bool:
        """Tell whether a text is encoded faster than by the library.

        Without compiled C its words have to repeat: in scripts without spaces they are whole clauses, which do not.
        """
        return bool(self._compiled) or text.isascii() or text.count(" ") * _LONGEST_MEAN_WORD > len(text)

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the ids of a text without lone surrogates, (T,)."""
        ids = self._encode_plain(text)
        return np.concatenate([*map(self._encode_line, LINE_BORDER.split(text))]) if ids is None else ids

    def _encode_line(self, line: str) -> NDArray[np.uint32]:
        ids = self._encode_plain(line)
        if ids is None:
            return np.array(self._backend.encode(line, add_special_tokens=False).ids, dtype=np.uint32)
        return ids

    def _encode_plain(self, text: str) -> NDArray[np.uint32] | None:
        """Return the ids of a text, or None where it is not certain that the library finds the same words."""
        if self._apart is not None and self._apart.search(text):
            return None
        if self._nfc and not unicodedata.is_normalized("NFC", text):
            return None
        if self._compiled is not None:
            return self._compiled.encode(text)
        if not text.isascii() and _odd_characters().search(text):
            return None
        return np.frombuffer(b"".join(map(self._ids, self._find(text))), dtype=np.uint32)

    @cached_property
    def _compiled(self) -> CompiledEncoder | None:
        return compiled_encoder(self._backend, _kinds(), self._rules)

    @cached_property
    def _apart(self) -> re.Pattern[str] | None:
        """A pattern of what is taken whole: names of added tokens, and words that merges do not lead to."""
        names = [*self._added, *(self._compiled.unreached if self._compiled else ())]
        return re.compile("|".join(map(re.escape, names))) if names else None


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
    names = [token["content"] for token in added if token["content"]]
    return WordEncoder(backend, *words, names, normalizer is not None)


def _words(pre_tokenizer: Any) -> tuple[re.Pattern[str], tuple[int, ...]] | None:
    """Return the pattern of the words that a pre-tokenizer finds and its rules, or None for one that is not known."""
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
def _translated(pattern: str) -> tuple[re.Pattern[str], tuple[int, ...]] | None:
    """Return a pattern of Python's that finds the same words in plain text, and the rules; None for one not known.

    The rules say which alternative of each kind a pattern has, from 1, or 0 where it is left out.
    """
    found, rules, rest = [], [], pattern
    for place, alternatives in enumerate(_ALTERNATIVES):
        known = next((part for part in alternatives if rest.startswith(f"{part}|")), None)
        if known is None and place not in _LEFT_OUT:
            return None
        rules.append(0 if known is None else [*alternatives].index(known) + 1)
        if known is not None:
            found.append(alternatives[known])
            rest = rest[len(known) + 1 :]
    if rest != _LAST[0]:
        return None
    return re.compile("|".join([_COMMON_WORD, *found, _LAST[1]])), tuple(rules)


@lru_cache(maxsize=1)
def _kinds() -> NDArray[np.uint8]:
    """Return the kinds of characters, those that libraries may take for different things being odd.

    Those that Unicode had in 2002 are letters, digits, spaces or none of these to all of them; so are pictures, and
    Chinese characters. Odd is ſ too, a small s in "it'ſ".
    """
    kinds = np.zeros(0x2A6D7, dtype=np.uint8)
    names = {"L": LETTER, "N": DIGIT}
    for code in range(0x10000):
        if unicodedata.ucd_3_2_0.category(chr(code)) != "Cn":
            kinds[code] = names.get(unicodedata.category(chr(code))[0], OTHER)
    kinds[[code for code in range(0x10000) if re.match(f"[{_SPACE}]", chr(code))]] = SPACE
    kinds[[10, 13]], kinds[0x17F] = NEWLINE, ODD
    kinds[0x1F300:0x1FB00], kinds[0x20000:] = OTHER, LETTER
    return kinds


@lru_cache(maxsize=1)
def _odd_characters() -> re.Pattern[str]:
    """Return a pattern of odd characters; numbers that are no digits are so, for Python takes some for letters."""
    plain = _kinds() != ODD
    plain[[code for code in np.flatnonzero(_kinds() == DIGIT) if not chr(code).isdecimal()]] = False
    codes = np.flatnonzero(plain)
    ends = np.flatnonzero(np.diff(codes) > 1)
    ranges = zip(codes[[0, *(ends + 1)]], codes[[*ends, -1]], strict=True)
    return re.compile("[^" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges) + "]")
