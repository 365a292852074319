"""What a person downloads: metadata, pinned versions, shell scripts, and the wheel on its own."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import minigpt

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHELL_SCRIPTS = ["scripts/check", "scripts/demo", "scripts/environment", ".ci/run"]

# Patterns that do not match their own source text.
FORBIDDEN = {
    "a path of somebody's home": r"(?<![\w.~*/])/(?:root|home)/",
    "another project's name in an install command": r"pip3?\s+install\s+(?:-\S+\s+)*[\"'`]?minigpt(?![\w-])",
}
BASHISMS = r"\[\[|<<<|&>|\$'|^\s*(?:source|function|local|declare)\s|\becho\s+-[en]|\[ [^]]* == |\w+=\(|\bpipefail\b"


def tracked_texts() -> dict[str, str]:
    """Every text file that is, or is about to be, under version control."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("no git checkout")
    texts = {}
    for name in listing.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and b"\0" not in (raw := path.read_bytes()):
            texts[name] = raw.decode("utf-8", "replace")
    return texts


def run(command: list[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def test_installed_version_is_the_package_version() -> None:
    assert importlib.metadata.version(PROJECT["name"]) == minigpt.__version__


def test_changelog_knows_the_version() -> None:
    assert f"## {minigpt.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    assert [f"{name}: {hit[0]}" for name, text in tracked_texts().items() for hit in pattern.finditer(text)] == []


def test_forbidden_patterns_match_what_they_are_for() -> None:
    install = "pip " + "install"
    for what, sample in {
        "a path of somebody's home": "see /" + "root/.cache",
        "another project's name in an install command": f"{install} -U minigpt\n",
    }.items():
        assert re.search(FORBIDDEN[what], sample)
    assert not re.search(FORBIDDEN["another project's name in an install command"], f"{install} minigpt-toolkit")


def test_constraints_pin_every_requirement_inside_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert not [version for version in pins.values() if "+" in version]  # a local build is no version of the index
    extras = PROJECT["optional-dependencies"]
    requirements = [
        Requirement(text) for text in PROJECT["dependencies"] + [r for extra in extras.values() for r in extra]
    ]
    for requirement in requirements:
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_script_is_plain_posix_shell(script: str) -> None:
    path = ROOT / script
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/sh\n")
    assert os.access(path, os.X_OK)
    assert re.findall(BASHISMS, text, re.MULTILINE) == []
    for shell in filter(shutil.which, ("sh", "dash")):
        assert run([shell, "-n", path], ROOT).stderr == ""


def test_every_script_in_scripts_is_executable() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and path.read_bytes().startswith(b"#!")]
    assert scripts
    assert [path.name for path in scripts if not os.access(path, os.X_OK)] == []


def test_check_refuses_an_unknown_option() -> None:
    result = run([ROOT / "scripts/check", "--fast"], ROOT)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "usage: scripts/check [--slow]\n"


# A stand-in for Python: it makes a "virtual environment" that holds a copy of itself, and logs what it is asked for.
FAKE_PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in
"-m venv --clear .venv") rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip install "*) exit "${PIP_STATUS-0}" ;;
-V) echo Python 3.12.1 ;;
esac
"""
BROKEN_PYTHON = "#!/bin/sh\necho 'python: command not found' >&2\nexit 127\n"


class Clone:
    """A copy of the repository's environment script in a folder whose name has a space, with stand-ins on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"
        self.programs = folder / "bin"
        self.log = folder / "log"
        self.programs.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "minigpt/__init__.py", "scripts/environment"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
        for name in ("basename", "cat", "chmod", "cksum", "cp", "dirname", "mkdir", "rm", "sh"):
            (self.programs / name).symlink_to(str(shutil.which(name)))

    def add_python(self, name: str, source: str) -> None:
        path = self.programs / name
        path.write_text(source, encoding="utf-8")
        path.chmod(0o755)

    def environment(self, *extra: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Runs the script from another folder; returns its result and the log lines that install or make something."""
        self.log.write_text("", encoding="utf-8")
        variables |= {"PATH": str(self.programs), "LOG": str(self.log)}
        result = run([self.folder / "scripts/environment", *extra], self.programs, **variables)
        asked = self.log.read_text(encoding="utf-8").splitlines()
        return result, [line for line in asked if "-m venv" in line or "-m pip install" in line]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


MAKE = "python3.12 -m venv --clear .venv"
INSTALL = "python -m pip install -c constraints.txt -e ."


def test_environment_passes_over_a_python_that_only_fails(clone: Clone) -> None:
    clone.add_python("python3.13", BROKEN_PYTHON)
    clone.add_python("python3.12", FAKE_PYTHON)
    result, asked = clone.environment("test")
    assert (result.returncode, result.stdout) == (0, "")
    assert asked == [MAKE, f"{INSTALL}[test]"]


def test_environment_takes_a_python_that_is_only_called_python3(clone: Clone) -> None:
    clone.add_python("python3", FAKE_PYTHON)
    assert clone.environment()[1] == ["python3 -m venv --clear .venv", INSTALL]


@pytest.mark.parametrize("source", [None, BROKEN_PYTHON, FAKE_PYTHON.replace("cp ", "true ")])
def test_environment_without_a_usable_python_says_what_to_install(clone: Clone, source: str | None) -> None:
    if source:
        clone.add_python("python3.11", source)
    result, _ = clone.environment()
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("environment: no Python 3.11 to 3.13 that can make")


def test_environment_installs_again_only_after_a_change(clone: Clone) -> None:
    clone.add_python("python3.12", FAKE_PYTHON)
    assert clone.environment("test")[1] == [MAKE, f"{INSTALL}[test]"]
    assert clone.environment("test")[1] == []
    assert clone.environment()[1] == []  # the demo needs less than is there
    (clone.folder / "constraints.txt").write_text("torch==2.12.0\n", encoding="utf-8")
    assert clone.environment()[1] == [INSTALL]
    assert clone.environment("test")[1] == [f"{INSTALL}[test]"]  # the demo's environment lacks the tests' packages


def test_environment_mends_a_failed_install_in_place_and_starts_anew_after_a_killed_one(clone: Clone) -> None:
    clone.add_python("python3.12", FAKE_PYTHON)
    assert clone.environment("test", PIP_STATUS="7")[0].returncode == 7
    assert clone.environment("test")[1] == [f"{INSTALL}[test]"]
    (clone.folder / ".venv/installed").write_text("unfinished\n", encoding="utf-8")
    assert clone.environment("test")[1] == [MAKE, f"{INSTALL}[test]"]
    (clone.folder / ".venv/bin/python").unlink()
    assert clone.environment("test")[1] == [MAKE, f"{INSTALL}[test]"]


@pytest.mark.slow
def test_the_wheel_alone_trains_and_generates(tmp_path: Path) -> None:
    built = run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT], tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    texts = sorted((ROOT / "data").glob("*.txt"))
    assert texts
    assert {path.name: inside.get(f"minigpt/data/{path.name}") for path in texts} == {
        path.name: path.read_bytes() for path in texts
    }

    # The dependencies come from this environment by a path line: its own .pth files, and so the clone, stay out.
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv/bin"
    installed = run([programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel], tmp_path)
    assert installed.returncode == 0, installed.stderr
    site = sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    where = run([programs / "python", "-c", "import minigpt; print(minigpt.__file__)"], tmp_path)
    assert where.stdout.strip() == str(Path(site, "minigpt/__init__.py")), where.stderr

    empty = tmp_path / "empty"
    empty.mkdir()
    trained = run([programs / "minigpt", "train", "--steps", "2", "-o", "runs/first"], empty)
    assert trained.returncode == 0, trained.stderr
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert expected | {"minigpt.json", "metrics.jsonl", "last"} <= {
        path.name for path in (empty / "runs/first").iterdir()
    }
    made = run([programs / "minigpt", "generate", "Once", "-m", "runs/first", "--max-new-tokens", "5"], empty)
    assert made.returncode == 0, made.stderr
