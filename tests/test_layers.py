"""The dependency direction: nothing imports a higher layer or a sibling, and no imports go in circles."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minigpt"

LAYERS = {
    "__init__": 0,  # the version alone
    "errors": 0,
    "config": 0,
    "units": 0,
    "compiler": 0,
    "text": 1,
    "model": 1,
    "checkpoint": 2,
    "inference": 2,
    "evaluation": 3,
    "training": 4,
    "alignment": 5,
    "cli": 6,
    "__main__": 7,
}
MAY_IMPORT_BESIDE = {("config", "errors"), ("cli", "__init__")}
TORCH_FREE = {"__init__", "__main__", "errors", "config", "compiler", "text", "cli"}
MOST_LINES = 420


def modules(package: Path) -> dict[str, Path]:
    """Dotted module name -> file, for every module of a package."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(name: str, path: Path, known: set[str], nodes: Iterator[ast.AST]) -> set[str]:
    """The modules that import statements among `nodes` name; `from a import b` is `a.b` where that is a module."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                parts = parts[: len(parts) - node.level + (path.name == "__init__.py")]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in known else base)
    return found


def all_imports(package: Path) -> dict[str, set[str]]:
    """Module -> everything it imports anywhere, inside functions and for type checkers too."""
    files = modules(package)
    return {
        name: imported(name, path, set(files), ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for name, path in files.items()
    }


def runs_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under `node` that run when the module is imported: no function bodies, no TYPE_CHECKING blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from (inner for other in child.orelse for inner in (other, *runs_at_import(other)))
            continue
        yield child
        yield from runs_at_import(child)


def part(module: str) -> str:
    """The piece of the layout a module belongs to: `minigpt.text.chat` -> `text`."""
    return module.split(".")[1] if "." in module else "__init__"


def wrong_directions(imports: dict[str, set[str]], package: str = "minigpt") -> list[str]:
    wrong = []
    for name, targets in imports.items():
        for target in targets:
            if target.split(".")[0] != package or part(target) == part(name):
                continue
            beside = (part(name), part(target)) in MAY_IMPORT_BESIDE
            if not (part(target) == "__init__" or beside or LAYERS[part(target)] < LAYERS[part(name)]):
                wrong.append(f"{name} imports {target}")
    return sorted(wrong)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one import circle, or an empty list."""
    sorter = graphlib.TopologicalSorter({name: targets & set(imports) - {name} for name, targets in imports.items()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def torch_at_import(package: Path) -> list[str]:
    files = modules(package)
    return [
        name
        for name, path in files.items()
        if part(name) in TORCH_FREE
        for target in imported(name, path, set(files), runs_at_import(ast.parse(path.read_text(encoding="utf-8"))))
        if target.split(".")[0] == "torch"
    ]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return all_imports(PACKAGE)


def test_every_part_of_the_package_has_a_layer(imports: dict[str, set[str]]) -> None:
    assert {part(name) for name in imports} <= set(LAYERS)


def test_imports_go_down_only(imports: dict[str, set[str]]) -> None:
    assert wrong_directions(imports) == []


def test_imports_make_no_circle(imports: dict[str, set[str]]) -> None:
    assert circle(imports) == []


def test_only_the_console_imports_rich(imports: dict[str, set[str]]) -> None:
    importers = {name for name, targets in imports.items() if any(target.split(".")[0] == "rich" for target in targets)}
    assert importers <= {"minigpt.cli.console"}


def test_text_configuration_and_commands_import_no_torch() -> None:
    assert torch_at_import(PACKAGE) == []


def test_files_stay_short() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(PACKAGE).values()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from minigpt.cli.app import main\n"
        "sys.argv = ['minigpt', '--help']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'numpy', 'safetensors', 'tokenizers', 'torch', 'transformers'}\n"
        "    print(*sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0
    assert "train" in result.stdout
    assert result.stderr.split() == []


def write_package(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "minigpt"
    for name, source in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("model/gpt.py", "from minigpt.training import trainer"),
        ("model/gpt.py", "from minigpt.text.tokenizer import Tokenizer"),
        ("model/gpt.py", "from ..training.trainer import run"),
        ("model/gpt.py", "from .. import cli"),
        ("inference/engine.py", "def load():\n    import minigpt.checkpoint.folder"),
        ("errors.py", "import minigpt.config"),
    ],
)
def test_a_wrong_direction_is_seen(tmp_path: Path, where: str, source: str) -> None:
    others = {f"{name}/__init__.py": "" for name in ("cli", "training", "text", "checkpoint")}
    found = wrong_directions(all_imports(write_package(tmp_path, {**others, where: source})))
    assert len(found) == 1
    assert found[0].startswith(f"minigpt.{where[:-3].replace('/', '.')} imports minigpt.")


def test_a_circle_is_seen_through_relative_and_inner_imports(tmp_path: Path) -> None:
    files = {
        "text/__init__.py": "",
        "text/a.py": "from . import b",
        "text/b.py": "def f():\n    from minigpt.text.c import x",
        "text/c.py": "from .a import y",
    }
    assert {"minigpt.text.a", "minigpt.text.b", "minigpt.text.c"} == set(
        circle(all_imports(write_package(tmp_path, files)))
    )


def test_torch_at_import_is_seen_and_inside_functions_it_is_not(tmp_path: Path) -> None:
    files = {
        "text/a.py": "try:\n    import torch.nn\nexcept ImportError:\n    pass",
        "text/b.py": "def f():\n    import torch",
        "text/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        "cli/d.py": "class A:\n    from torch import nn",
    }
    assert torch_at_import(write_package(tmp_path, files)) == ["minigpt.cli.d", "minigpt.text.a"]
