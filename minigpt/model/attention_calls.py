"""How `attention.c` is called. Shapes: B batch, T tokens, H heads, K key/value heads, D head width."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from minigpt.compiler import compiled
from minigpt.model.fused import at

SOURCE = Path(__file__).with_name("attention.c")

Sizes = dict[str, Any]


class _Attention(ctypes.Structure):
    """`struct attention` of `attention.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "query_gain", "key_gain", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("first", "out", "logsum", "dout", "dquery", "dkey", "dvalue")),
        *((name, ctypes.c_void_p) for name in ("dquery_gain", "dkey_gain")),
        *((name, ctypes.c_long) for name in ("B", "T", "H", "K", "D", "angles")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    ]


class Tile(ctypes.Structure):
    """`struct tile` of `attention.c`: the scores of `count` tokens from `start` on with the first `keys` keys."""

    _fields_ = [(name, ctypes.c_long) for name in ("unit", "units", "start", "count", "keys")]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """What `attention.c` was compiled to, or None where that cannot be."""
    found = compiled(SOURCE)
    if found is None:
        return None
    of, tile = ctypes.POINTER(_Attention), ctypes.POINTER(Tile)
    pointer, count, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    kinds = {
        "attention_forward": [of],
        "attention_backward": [of],
        "heads_forward": [of, pointer, count, pointer, number, pointer],
        "heads_backward": [of, pointer, count, pointer, number] + [pointer] * 3,
        "weights_forward": [of, tile] + [pointer] * 2,
        "weights_backward": [of, tile] + [pointer] * 3,
    }
    for name, arguments_of in kinds.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments_of, None
    return found


def call() -> ctypes.CDLL:
    """What `attention.c` was compiled to, where it is known to be there."""
    found = library()
    assert found is not None
    return found


def sizes_of(query: Tensor, key: Tensor, head_dim: int, cosines: Tensor | None, eps: float) -> Sizes:
    """The sizes that belong to queries (B, T, H D), keys (B, T, K D) and the angles of their positions."""
    B, T, width = query.shape
    own = cosines is not None and cosines.dim() == 4  # each row of the batch has angles of its own
    return {
        "B": B, "T": T, "H": width // head_dim, "K": key.shape[-1] // head_dim, "D": head_dim,
        "angles": T * head_dim // 2 if own else 0, "eps": eps, "scale": head_dim**-0.5,
    }  # fmt: skip


def arguments(sizes: Sizes, **tensors: Tensor | None) -> Any:
    """What `attention.c` is told, for as long as the tensors live; one that is not there is a null pointer."""
    return _Attention(**sizes, **{name: at(tensor) for name, tensor in tensors.items()})
