"""The pages: links that lead somewhere, twins that agree, commands that exist and examples that print what they say."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
HEREDOC = re.compile(r"python - <<'EOF'\n(.*)\nEOF\n?", re.DOTALL)
BLOCK = re.compile(
    r"^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n)+)(?=\n)",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
SHELL = ("bash", "sh", "console", "indented")


def _fix_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fix_links", ROOT / "scripts" / "fix_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fix_links = _fix_links()
PAGES: list[Path] = fix_links.pages()
TWINS = [(page.with_name(page.name.replace(".zh-CN.md", ".md")), page) for page in PAGES if ".zh-CN." in page.name]
TUTORIAL = ROOT / "docs" / "from-attention-to-chat.md"


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The code blocks of a page: language and text."""
    return [
        ("indented", match["indented"]) if match["indented"] else (match["language"].strip(), match["body"])
        for match in BLOCK.finditer(read(page))
    ]


def headings(page: Path) -> list[str]:
    """The headings of a page with their marks, leaving out what looks like one in code."""
    return re.findall(r"^#{1,6} .+$", fix_links.FENCE.sub("", read(page)), re.MULTILINE)


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    words = re.sub(r"[`*]", "", heading.lstrip("#").strip()).lower().replace(" ", "-")
    return "".join(c for c in words if c in "-_" or unicodedata.category(c)[0] in "LNM")


def bare(code: str) -> str:
    """Code without comments, shell prompts and the text that models are asked to continue."""
    code = re.sub(r"(^|\s)#(?!\d).*$", "", code, flags=re.MULTILINE)
    code = re.sub(r"^[$>] ", "", code, flags=re.MULTILINE)
    code = re.sub(r'\b(echo|generate) "[^"\n]*"', r'\1 "…"', code)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    wrong = []
    for link in fix_links.links(read(page)):
        if link.external:
            continue
        target = (page.parent / link.path).resolve() if link.path else page
        if not target.exists():
            wrong.append(f"{page.name}:{link.line}: {link.path} is not there")
        elif (
            link.fragment
            and not fix_links.LINES.fullmatch(link.fragment)
            and link.fragment not in map(anchor, headings(target))
        ):
            wrong.append(f"{page.name}:{link.line}: {link.path} has no heading #{link.fragment}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_line_links_give_the_exact_lines_of_what_they_name(page: Path) -> None:
    wrong = []
    for link in fix_links.links(read(page)):
        if link.external or not fix_links.LINES.fullmatch(link.fragment):
            continue
        try:
            right = fix_links.right_fragment(page, link)
        except ValueError as error:
            wrong.append(str(error))
            continue
        if link.fragment != right:
            wrong.append(f"{page.name}:{link.line}: {link.text} is at {link.path}#{right}, not #{link.fragment}")
    assert wrong == [], "python scripts/fix_links.py puts line numbers right"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_formula_stands_where_github_sees_it(page: Path) -> None:
    """GitHub wants a space before a formula (a full-width comma is none), and no letter or digit right after it."""
    prose = re.sub(r"`[^`\n]*`", "", fix_links.FENCE.sub("", read(page)))
    formulas = list(re.finditer(r"(^|.)(\$\$?)[^$\n]+\2(.|$)", prose, re.MULTILINE))
    assert [match[0] for match in formulas if match[1].strip() or match[3].isalnum()] == []
    assert 2 * len(formulas) == len(re.findall(r"\$\$?", prose)), "a dollar sign without its other half"


def test_the_fixer_rewrites_a_stale_link_and_refuses_an_unknown_name(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("X = 1\n\n\nclass A:\n    def f(self):\n        return X\n", encoding="utf-8")
    page = tmp_path / "page.md"
    stale = "[`A.f`](code.py#L1-L2), [`X`](code.py#L9)\n```text\n[`A.f`](code.py#L1)\n```\n"
    right = "[`A.f`](code.py#L5-L6), [`X`](code.py#L1)\n```text\n[`A.f`](code.py#L1)\n```\n"
    assert fix_links.mended(page, stale) == right
    with pytest.raises(ValueError, match=r"page\.md:1: code\.py has no definition named 'A\.g'"):
        fix_links.mended(page, "[`A.g`](code.py#L1)")


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin[0].name)
def test_both_languages_have_the_same_headings_code_and_links(twin: tuple[Path, Path]) -> None:
    english, chinese = twin
    levels = [[len(heading.split()[0]) for heading in headings(page)] for page in twin]
    assert levels[0] == levels[1], "headings"
    languages = [[language for language, _ in blocks(page)] for page in twin]
    assert languages[0] == languages[1], "code blocks"
    commands = [[bare(body) for language, body in blocks(page) if language in (*SHELL, "python")] for page in twin]
    assert commands[0] == commands[1], "commands"
    targets = [
        Counter(
            f"{link.path}#{link.fragment}".replace(".zh-CN.md", ".md")
            for link in fix_links.links(read(page))
            if link.path and not (link.fragment and link.path.endswith(".md"))  # headings differ by language
        )
        for page in (english, chinese)
    ]
    assert targets[0] == targets[1], "links"


def test_the_tutorial_has_a_twin_with_the_same_outputs() -> None:
    chinese = TUTORIAL.with_name("from-attention-to-chat.zh-CN.md")
    assert (TUTORIAL, chinese) in TWINS
    assert [body for language, body in blocks(TUTORIAL) if language == "text"] == [
        body for language, body in blocks(chinese) if language == "text"
    ]


def command_lines(page: Path) -> list[list[str]]:
    """Every `minigpt …` in the page's shell blocks, without what pipes and redirections bring."""
    found = []
    for language, body in blocks(page):
        if language not in SHELL or HEREDOC.search(body):
            continue
        text = bare(body.replace("\\\n", " "))
        for line in text.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>;&")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, "|"]:
                if set(word) <= set("|<>;&"):
                    found += [words] if words[:1] == ["minigpt"] else []
                    words = []
                else:
                    words.append(word)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    import typer

    from minigpt.cli.app import app

    for words in command_lines(page):
        command: Any = typer.main.get_command(app)
        rest = words[1:]
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"{page.name}: {shlex.join(words)}"
            command, rest = command.commands[rest[0]], rest[1:]
        known = {name for parameter in command.params for name in parameter.opts} | {"--help", "-h", "--version"}
        for word in rest:
            if re.match(r"--?[a-z]", word):
                assert word.split("=")[0] in known, f"{page.name}: {shlex.join(words)}"


def self_contained() -> list[Any]:
    """The tutorial's Python examples that need no trained model, each with the output printed under it."""
    found = []
    parts = blocks(TUTORIAL) if TUTORIAL.is_file() else []
    for (language, body), (after, output) in pairwise(parts):
        script = HEREDOC.fullmatch(body)
        if language == "bash" and script and "runs/" not in body and after == "text":
            found.append(pytest.param(script[1], output, id=f"example{len(found)}"))
    return found


@pytest.mark.parametrize(("script", "printed"), self_contained())
def test_examples_print_what_the_page_says(script: str, printed: str) -> None:
    output = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(output):
        exec(compile(script, "example", "exec"), {"__name__": "__main__"})
    texts = output.getvalue(), printed
    words = [NUMBER.sub("0", text).split() for text in texts]
    assert words[0] == words[1]
    numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in texts]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=0.011)  # other machines round otherwise


@pytest.mark.slow
def test_the_whole_tutorial_can_be_pasted(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, body in blocks(TUTORIAL):
        if language == "bash":
            quick = re.sub(r"--(steps|minutes|epochs) \d+", "--steps 20", body)
            done = subprocess.run(
                ["bash", "-eo", "pipefail", "-c", quick],
                cwd=tmp_path, env=environment, capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8",
            )  # fmt: skip
            assert done.returncode == 0, f"{quick}\n{done.stderr}"
