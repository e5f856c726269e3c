"""The page of all files, made from the first line of each: ``--write`` updates docs/files.md, else prints."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("k3_sglang", "agent_runtime", "examples", "benchmarks", "clients", "configs", "deploy", "scripts", "docs")
"""Folders shown file by file; tests are shown folder by folder."""
BEGIN, END = "<!-- tree: made by scripts/file_tree.py -->\n```\n", "```\n<!-- end of tree -->"


def describe(path: Path) -> str | None:
    """What a file says about itself in its first line; None for a kind of file the tree leaves out."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text))
        return docstring.splitlines()[0].rstrip(".") if docstring else ""
    if path.suffix in (".md", ".yaml", ".mjs"):
        lines = text.splitlines()
        return lines[0].lstrip("#/ ").rstrip(".") if lines else ""
    return None


def folder_lines(folder: Path, depth: int) -> list[tuple[str, str]]:
    """(indented name, description) of a folder and what is in it; a package's own line is its ``__init__``'s."""
    package = folder / "__init__.py"
    lines = [("  " * depth + f"{folder.name}/", describe(package) or "" if package.exists() else "")]
    for path in sorted(folder.iterdir(), key=lambda entry: (entry.is_dir(), entry.name)):
        if path.is_dir():
            if any(child.suffix in (".py", ".md", ".yaml", ".mjs") for child in path.rglob("*")):
                lines += folder_lines(path, depth + 1)
        elif path.name != "__init__.py" and (text := describe(path)) is not None:
            lines.append(("  " * (depth + 1) + path.name, text))
    return lines


def tests_lines(tests: Path) -> list[tuple[str, str]]:
    """The test folders with the number of files in each."""
    lines = [("tests/", "one folder per part")]
    for folder in sorted(path for path in tests.iterdir() if path.is_dir() and any(path.glob("test_*.py"))):
        lines.append((f"  {folder.name}/", f"{len(list(folder.glob('test_*.py')))} files"))
    return lines


def tree(repository: Path) -> str:
    """The whole tree, names padded to one column."""
    lines: list[tuple[str, str]] = []
    for name in ROOTS:
        if (repository / name).is_dir():
            lines += folder_lines(repository / name, 0)
    lines += tests_lines(repository / "tests")
    width = max(len(name) for name, _ in lines) + 2
    return "".join(f"{name:<{width}}{text}".rstrip() + "\n" for name, text in lines)


def with_tree(page: str, text: str) -> str:
    """The page with its tree replaced.

    Raises:
        ValueError: the page has no place for a tree.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/files.md has no tree block; it must contain {BEGIN!r} and {END!r}")
    return before + begin + text + end + after


def main(arguments: list[str]) -> int:
    """Print the tree, or write it into the page with ``--write``."""
    text = tree(REPOSITORY)
    if arguments == ["--write"]:
        page = REPOSITORY / "docs" / "files.md"
        page.write_text(with_tree(page.read_text(encoding="utf-8"), text), encoding="utf-8")
    elif arguments:
        print(f"unknown arguments {arguments}; allowed: --write, or none", file=sys.stderr)
        return 2
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
