"""C for the user's own processor: compiled when first asked for, where there is a compiler, and kept.

It is an addition, never a need: whoever asks must do without where the answer is None.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-w")


def found() -> str | None:
    """The path of a C compiler, or None."""
    return shutil.which("cc")


def compiled(source: Path) -> ctypes.CDLL | None:
    """Load what a file of C was compiled to for this machine, or compile it; None where there is no compiler that can.

    OpenMP's symbols are those that torch has loaded: one set of threads does both, so that none wait for each other.
    So what uses OpenMP can be loaded after torch only.
    """
    kept = _cache_folder() / f"{source.stem}-{_key(source)}.so"
    try:
        return ctypes.CDLL(str(kept)) if kept.is_file() else _compile(source, kept)
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(source: Path, kept: Path) -> ctypes.CDLL:
    """Compile and load, and keep it where that can be written."""
    compiler = found()
    if compiler is None:
        raise FileNotFoundError("cc")
    with tempfile.TemporaryDirectory(prefix="minigpt-") as folder:
        unlinked, linked = str(Path(folder, "code.o")), str(Path(folder, "code.so"))
        for command in ([*_FLAGS, "-c", str(source), "-o", unlinked], ["-shared", unlinked, "-lm", "-o", linked]):
            subprocess.run([compiler, *command], check=True, capture_output=True, timeout=60)
        library = ctypes.CDLL(linked)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(linked, part)
            part.replace(kept)
        return library


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minigpt"


def _key(source: Path) -> str:
    """Name what the code was compiled from and for: a home folder may be shared by machines that differ."""
    info = Path("/proc/cpuinfo")
    processor = info.read_text(encoding="utf-8").split("\n\n")[0] if info.is_file() else platform.processor()
    flags = [line for line in processor.splitlines() if line.startswith(("model name", "flags", "Features"))]
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*texts, *_FLAGS, platform.machine(), *flags)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
