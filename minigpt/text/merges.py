"""What `merges.c` computes: the ids of many words at once, by the merges of byte-level BPE.

Where it cannot be compiled, or merges are not all there is to a model, the ``tokenizers`` library does the work.
"""

from __future__ import annotations

import ctypes
import json
from array import array
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from minigpt.compiler import compiled
from minigpt.text.tokenizer_json import byte_alphabet

SOURCE = Path(__file__).with_name("merges.c")
_KNOWN_BITS, _KNOWN_BYTES = 14, 48  # words that are kept, some 0.8 MB
_SPARE_IDS = 7  # written, but not counted, behind the last
_MOST_UNREACHED = 64


class Merges:
    """Words to ids, equal to those of the model whose vocabulary, byte -> id and merges (pair -> id) are given.

    ``unreached`` are the words of the vocabulary that merges do not lead to.
    """

    def __init__(self, library: ctypes.CDLL, model: dict[str, Any]) -> None:
        """Take what `merges.c` was compiled to, and the model in a tokenizer.json."""
        vocab: dict[str, int] = model["vocab"]
        pairs = np.array([[vocab[left], vocab[right]] for left, right in model["merges"]], dtype=np.uint32)
        joined = np.array([vocab[left + right] for left, right in model["merges"]], dtype=np.uint32)
        self._bits = (2 * len(pairs)).bit_length() + 1
        self._slots = np.empty((1 << self._bits, 4), dtype=np.uint32)
        library.enter(self._slots.ctypes.data, self._bits, pairs.ctypes.data, joined.ctypes.data, len(pairs))
        self._bytes = np.array([vocab[character] for character in _alphabet()], dtype=np.uint32)
        self._known = np.zeros((1 << _KNOWN_BITS, _KNOWN_BYTES), dtype=np.uint8)
        self._library, self._lock = library, Lock()
        self.unreached = self._not_reached(vocab) if model.get("ignore_merges") else []

    def encode(self, text: str, words: list[str]) -> NDArray[np.uint32]:
        """Return the ids, (T,), of a text that is these words, one after another."""
        data = text.encode()
        lengths = array("I", map(len, words))
        ids = np.empty(len(data) + _SPARE_IDS, dtype=np.uint32)
        model = (self._slots.ctypes.data, self._bits, self._bytes.ctypes.data, self._known.ctypes.data, _KNOWN_BITS)
        with self._lock:  # the words that are kept are written
            count = self._library.encode(*model, data, lengths.buffer_info()[0], len(words), ids.ctypes.data)
        if count < 0:
            raise MemoryError
        return ids[:count]

    def _not_reached(self, vocab: dict[str, int]) -> list[str]:
        table = str.maketrans(dict(zip(_alphabet(), map(chr, range(256)), strict=True)))
        found = []
        for token, id in vocab.items():
            try:
                word = token.translate(table).encode("latin-1").decode()
            except UnicodeError:  # a part of a character, or no bytes: no text has it as a word
                continue
            if word and self.encode(word, [word]).tolist() != [id]:
                found.append(word)
        return found


def merges(backend: Backend) -> Merges | None:
    """Return what gives the ids of words as the model of a tokenizer does, or None where it cannot be had.

    The model is one of BPE without dropout, prefixes and suffixes. It must know all bytes, each token by its own id.
    """
    library = _library()
    if library is None:
        return None
    model = json.loads(backend.to_str())["model"]
    vocab = model["vocab"]
    if not all(map(vocab.__contains__, _alphabet())) or len(set(vocab.values())) < len(vocab):
        return None
    found = Merges(library, model)
    return found if len(found.unreached) <= _MOST_UNREACHED else None


def _alphabet() -> list[str]:
    """Return the characters that stand for bytes, in the order of these."""
    alphabet = byte_alphabet()
    return sorted(alphabet, key=alphabet.__getitem__)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    found = compiled(SOURCE)
    if found is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        found.enter.argtypes = [pointer, number, pointer, pointer, ctypes.c_uint32]
        found.enter.restype = None
        found.encode.argtypes = [pointer, number, pointer, pointer, number, pointer, pointer, number, pointer]
        found.encode.restype = ctypes.c_int64
    return found
