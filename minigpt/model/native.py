"""What `native.c` computes: products of a few rows with a matrix, float32 or quantised, and RMSNorm.

It is compiled when first asked for, where there is a C compiler, and kept; without one PyTorch does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-w")
_INPUTS = {"float32": 32, "int8": 32, "int4": 64}  # of what the inputs must be a multiple
_OUTPUTS, _WIDTH = 4, 16  # and the outputs, and the width of a norm

Kind = Literal["float32", "int8", "int4"]
Product = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor], Tensor]


def product(kind: Kind, numbers: Tensor, scales: Tensor | None = None) -> Product | None:
    """Return the function that takes x (rows, in) float32 to the product (rows, out) with a matrix on the CPU.

    `numbers` are (out, in) float32 or int8, or (out, in / 2) of two halves each, the lower one first. `scales` are
    (out,) float32 for int8, (out, in / 32, 2) bfloat16 scale and zero for int4. None where it cannot be had.
    """
    outs, ins = numbers.shape[0], numbers.shape[1] * (2 if kind == "int4" else 1)
    compiled = library()
    if compiled is None or numbers.device.type != "cpu" or outs % _OUTPUTS or ins % _INPUTS[kind]:
        return None
    assert all(tensor.is_contiguous() for tensor in (numbers, scales) if tensor is not None)
    call = getattr(compiled, f"product_{kind}")
    matrix, factors = numbers.data_ptr(), 0 if scales is None else scales.data_ptr()

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape[0], outs)
        call(x.data_ptr(), matrix, factors, out.data_ptr(), x.shape[0], ins, outs)
        return out

    return run


def rms_norm(gain: Tensor, eps: float) -> Norm | None:
    """Return the function that takes x (…, width) float32 to its RMSNorm with a gain (width,) on the CPU, or None."""
    compiled, width = library(), gain.shape[0]
    if compiled is None or gain.device.type != "cpu" or gain.dtype != torch.float32 or width % _WIDTH:
        return None
    call, place = compiled.rms_norm, gain.data_ptr()

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        call(x.data_ptr(), place, out.data_ptr(), x.numel() // width, width, eps)
        return out

    return run


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Load what was compiled for this machine, or compile it; None where there is no compiler that can.

    OpenMP's symbols are those that torch has loaded: one set of threads does both, so that none wait for each other.
    """
    kept = _cache_folder() / f"native-{_key()}.so"
    try:
        found = ctypes.CDLL(str(kept)) if kept.is_file() else _compiled(kept)
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_long
    for kind in _INPUTS:
        function = getattr(found, f"product_{kind}")
        function.argtypes, function.restype = [pointer] * 4 + [count] * 3, None
    found.rms_norm.argtypes, found.rms_norm.restype = [pointer] * 3 + [count] * 2 + [ctypes.c_float], None
    return found


def _compiled(kept: Path) -> ctypes.CDLL:
    """Compile and load, and keep it where that can be written."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("cc")
    with tempfile.TemporaryDirectory(prefix="minigpt-") as folder:
        unlinked, linked = str(Path(folder, "native.o")), str(Path(folder, "native.so"))
        for command in ([*_FLAGS, "-c", str(SOURCE), "-o", unlinked], ["-shared", unlinked, "-lm", "-o", linked]):
            subprocess.run([compiler, *command], check=True, capture_output=True, timeout=60)
        found = ctypes.CDLL(linked)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(linked, part)
            part.replace(kept)
        return found


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt"


def _key() -> str:
    """Name what the code was compiled from and for: a home folder may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    processor = info.read_text(encoding="utf-8").split("\n\n")[0] if info.is_file() else platform.processor()
    flags = [line for line in processor.splitlines() if line.startswith(("model name", "flags", "Features"))]
    parts = (SOURCE.read_text(encoding="utf-8"), *_FLAGS, torch.__version__, platform.machine(), *flags)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
