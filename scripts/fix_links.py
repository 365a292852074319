"""Put right the line numbers in links such as [`Attention.forward`](../minigpt/model/transformer.py#L60-L69).

The link's text names a class, function, method or module-level name of the file; its lines are looked up there.

Usage: python scripts/fix_links.py [PAGE]...
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(```+)[^\n]*\n.*?^\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
LINES = re.compile(r"L(\d+)(?:-L(\d+))?")


@dataclass(frozen=True)
class Link:
    """One link of a page: where it stands, its text without backticks, file (empty: this page) and fragment."""

    line: int
    start: int  # of the target in the page
    text: str
    path: str
    fragment: str

    @property
    def external(self) -> bool:
        return re.match(r"[a-z][a-z0-9+.-]*:", self.path) is not None


def pages() -> list[Path]:
    """The pages that are checked: the READMEs and everything in docs/."""
    return [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def links(text: str) -> list[Link]:
    """Return the links of a page, leaving out what stands in code blocks."""
    prose = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return [
        Link(prose.count("\n", 0, match.start()) + 1, match.start("target"), match["text"].strip("`"), path, fragment)
        for match in LINK.finditer(prose)
        for path, _, fragment in [match["target"].partition("#")]
    ]


def definitions(path: Path) -> dict[str, tuple[int, int]]:
    """Return the first and last line of every definition in a Python file, methods as `Class.method`."""
    found: dict[str, tuple[int, int]] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            names: list[str] = []
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                found[prefix + name] = (node.lineno, node.end_lineno or node.lineno)
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def right_fragment(page: Path, link: Link) -> str:
    """Return the fragment a line link should have; one that names nothing in its file is a ValueError."""
    path = page.parent / link.path
    known = definitions(path) if path.suffix == ".py" and path.is_file() else {}
    if link.text not in known:
        raise ValueError(f"{page.name}:{link.line}: {link.path} has no definition named {link.text!r}")
    first, last = known[link.text]
    return f"L{first}" if first == last else f"L{first}-L{last}"


def mended(page: Path, text: str) -> str:
    """Return a page's text with every line link put right."""
    for link in reversed(links(text)):
        if link.external or not LINES.fullmatch(link.fragment):
            continue
        old = f"{link.path}#{link.fragment}"
        new = f"{link.path}#{right_fragment(page, link)}"
        text = text[: link.start] + new + text[link.start + len(old) :]
    return text


def main() -> None:
    """Rewrite the pages named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="pages to mend (default: README and docs/)")
    for page in parser.parse_args().pages or pages():
        before = page.read_text(encoding="utf-8")
        try:
            after = mended(page, before)
        except ValueError as error:
            sys.exit(f"error: {error}; change the link's text or its file")
        if after != before:
            page.write_text(after, encoding="utf-8", newline="")
            print(f"{page.name}: line numbers put right")


if __name__ == "__main__":
    main()
