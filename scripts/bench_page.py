"""A page of Markdown from the JSON of the bench: every row, the losing ones too.

python scripts/bench_page.py result.json > docs/benchmarks/some-machine.md
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve")  # what decides a CPU's speed


def machine() -> dict[str, Any]:
    """What this machine is: the processor, the instructions that matter, how many cores."""
    import psutil

    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = known.get("flags", known.get("Features", "")).split()
    return {
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "instructions": [flag for flag in FLAGS if flag in flags],
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory GB": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several runs on the same machine; what they do not share is a ValueError."""
    first = dict(results[0])
    for other in results[1:]:
        if any(first[name] != other[name] for name in ("machine", "threads")):
            raise ValueError("the results are of different machines or threads")
        first["versions"] = first["versions"] | other["versions"]
        first["tables"] = first["tables"] + other["tables"]
        first["command"] += f"`, `{other['command']}"
    first["rounds"] = " and ".join(map(str, sorted({result["rounds"] for result in results})))
    return first


def page(result: dict[str, Any]) -> str:
    """Say which machine, then one section a table."""
    about = result["machine"]
    instructions = ", ".join(about["instructions"]) or "not known"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = [
        f"# {about['processor']}, {result['threads']} threads",
        f"{about['cores']} cores, {about['memory GB']} GB; {instructions}; {about['system']}; {versions}.",
        f"Made by `{result['command']}`: medians of {result['rounds']} interleaved rounds, every contestant in a "
        "process of its own. A ratio is the median over the rounds of ours divided by theirs: above 1 ours is faster. "
        "Absolute figures of shared machines mean little; compare what stands in one table.",
    ]
    return "\n\n".join([*head, *map(section, result["tables"])]) + "\n"


def section(table: dict[str, Any]) -> str:
    """The rows of one comparison, ours over each of theirs, what is known of them besides, and which are missing."""
    ours, facts = list(table["ratios"]), table["facts"]
    header = ["", table["unit"], *(f"{name} is … times as fast" for name in ours), *facts]
    rows = []
    for name, value in table["medians"].items():
        ratios = [f"{table['ratios'][one][name]:.2f}" if name not in ours else "" for one in ours]
        known = [str(facts[fact].get(name, "")) for fact in facts]
        rows.append([f"**{name}**" if name in ours else name, f"{value:,.1f}", *ratios, *known])
    missing = [f"Left out: {name} ({reason})." for name, reason in table["missing"].items()]
    return "\n\n".join([f"## {table['title'][0].upper()}{table['title'][1:]}", markdown(header, rows), *missing])


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    print(page(merged([json.loads(file.read_text(encoding="utf-8")) for file in parser.parse_args().files])), end="")
