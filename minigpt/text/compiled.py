"""What `words.c` computes: the ids of a text by byte-level BPE, on one core and without Python's lock.

Where it cannot be compiled, or merges are not all there is to a model, there is none.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from minigpt.compiler import compiled
from minigpt.text.tokenizer_json import byte_characters

SOURCE = Path(__file__).with_name("words.c")
# Kinds of characters, as `words.c` has them.
ODD, LETTER, DIGIT, SPACE, NEWLINE, OTHER = range(6)
RULES = 6

_KNOWN_BITS, _KNOWN_BYTES = 14, 48  # words that are kept, some 0.8 MB
_SPARE_IDS = 7  # written, but not counted, behind the last
_NONE = 0xFFFFFFFF  # for an id
_MOST_UNREACHED = 64


class _Model(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("slot_bits", ctypes.c_uint64),
        ("bytes", ctypes.c_void_p),
        ("known", ctypes.c_void_p),
        ("known_bits", ctypes.c_uint64),
        ("kinds", ctypes.c_void_p),
        ("characters", ctypes.c_uint64),
        ("rules", ctypes.c_uint8 * RULES),
    )


class CompiledEncoder:
    """Text to ids, equal to those of a ``tokenizers`` model behind a pre-tokenizer.

    ``unreached`` are the words of the vocabulary that the model takes whole though merges do not lead to them.
    """

    def __init__(
        self, library: ctypes.CDLL, model: dict[str, Any], kinds: NDArray[np.uint8], rules: Sequence[int]
    ) -> None:
        """Take the model of a tokenizer.json, the kinds of Unicode's first characters, (N,), and a pattern's rules.

        The rules are the numbers of its contraction, letters, digits, others, newline and blanks (`words.c`).
        """
        vocab: dict[str, int] = model["vocab"]
        pairs = np.array([(vocab[left], vocab[right]) for left, right in model["merges"]], dtype=np.uint32)
        joined = np.array([vocab[left + right] for left, right in model["merges"]], dtype=np.uint32)
        bits = (2 * len(joined) + 1).bit_length()
        slots = np.empty((1 << bits, 4), dtype=np.uint32)
        bytes = np.array([vocab.get(character, _NONE) for character in byte_characters()], dtype=np.uint32)
        known = np.zeros((1 << _KNOWN_BITS, _KNOWN_BYTES), dtype=np.uint8)
        self._arrays = (slots, bytes, known, kinds)  # what the model points to
        places = [array.ctypes.data for array in self._arrays]
        self._model = _Model(places[0], bits, *places[1:3], _KNOWN_BITS, places[3], len(kinds), tuple(rules))
        self._lock = Lock()  # for the words that are kept
        self._encode = library.encode
        library.enter(ctypes.byref(self._model), pairs.ctypes.data, joined.ctypes.data, len(joined))
        self.unreached = self._not_reached(vocab) if model.get("ignore_merges") else []

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Return the ids of a text without lone surrogates, (T,), or None where it has an odd character."""
        data = text.encode()
        kinds = np.empty(len(data) + 1, dtype=np.uint8)
        ids = np.empty(len(data) + _SPARE_IDS, dtype=np.uint32)
        with self._lock:
            count = self._encode(ctypes.byref(self._model), data, len(data), kinds.ctypes.data, ids.ctypes.data)
        return None if count < 0 else ids[:count].copy()

    def _not_reached(self, vocab: dict[str, int]) -> list[str]:
        table = str.maketrans(dict(zip(byte_characters(), map(chr, range(256)), strict=True)))
        found = []
        for token, id in vocab.items():
            try:
                word = token.translate(table).encode("latin-1").decode()
            except UnicodeError:  # a part of a character, or no bytes: no text has it as a word
                continue
            ids = self.encode(word)
            if word and ids is not None and ids.tolist() != [id]:
                found.append(word)
        return found


def compiled_encoder(backend: Backend, kinds: NDArray[np.uint8], rules: Sequence[int]) -> CompiledEncoder | None:
    """Return what gives the ids of a tokenizer with these kinds and rules, or None where it cannot be had.

    The model is one of BPE without dropout, prefixes and suffixes. Each token has an id of its own.
    """
    library = _library()
    if library is None:
        return None
    model = json.loads(backend.to_str())["model"]
    if len(model["vocab"]) < backend.get_vocab_size(with_added_tokens=False):
        return None  # some tokens share an id
    found = CompiledEncoder(library, model, kinds, rules)
    return found if len(found.unreached) <= _MOST_UNREACHED else None


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    found = compiled(SOURCE)
    if found is not None:
        pointer = ctypes.c_void_p
        found.enter.argtypes, found.enter.restype = [pointer, pointer, pointer, ctypes.c_uint32], None
        found.encode.argtypes = [pointer, pointer, ctypes.c_uint64, pointer, pointer]
        found.encode.restype = ctypes.c_int64
    return found
