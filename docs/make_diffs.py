"""Writes the diffs on docs/from-dqn-to-ivdqn.md, from the scripts as they are now.

    python docs/make_diffs.py

Above each diff, a comment on the page says what is compared: a function or class of one script with one of another.
Two texts, if given, are the beginnings of the first and the last line that are shown. Without a line for the old
script, all is new.

    <!-- diff
    - dqn.py QNetwork | self.net = | self.net =
    + bootstrap_dqn.py EnsembleQNetwork | self.net = | self.prior =
    -->
"""

import ast
import difflib
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "from-dqn-to-ivdqn.md"
# The comment, what it says, and the diff that an earlier run left below it.
MARKED = re.compile(r"(<!-- diff\n(.*?)-->\n)(?:```diff\n.*?```\n)?", re.DOTALL)


@cache
def definitions(script: Path) -> dict[str, list[str]]:
    """The lines of each function and class, by name."""
    text = script.read_text()
    lines = text.splitlines()
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: lines[node.lineno - 1 : node.end_lineno] for node in nodes}


def definition(script: Path, name: str) -> list[str]:
    if name not in definitions(script):
        raise LookupError(f"{script.name} defines no {name}")
    return definitions(script)[name]


def position(lines: list[str], beginning: str) -> int:
    """Where the first line with this beginning is."""
    for number, line in enumerate(lines):
        if line.strip().startswith(beginning):
            return number
    raise LookupError(f"no line after {lines[0].strip()!r} begins with {beginning!r}")


def without_indentation(lines: list[str]) -> list[str]:
    indentation = min(len(line) - len(line.lstrip()) for line in lines if line)
    return [line[indentation:] for line in lines]


def shown_lines(place: str) -> list[str]:
    """The lines of 'script name' or of 'script name | first | last'."""
    where, *ends = place.split(" | ")
    script, name = where.split()
    lines = definition(ROOT / script, name)
    if ends:
        first, last = ends
        lines = lines[position(lines, first) :]
        lines = lines[: position(lines, last) + 1]
    return without_indentation(lines)


def diff(request: str) -> str:
    """The diff that a comment asks for."""
    old = []
    new = []
    title = []
    for line in request.splitlines():
        sign, place = line.split(" ", 1)
        title.append(sign * 3 + " " + place.split(" | ")[0])
        if sign == "-":
            old = shown_lines(place)
        else:
            new = shown_lines(place)
    whole = len(old) + len(new)  # lines of context: all
    changes = list(difflib.unified_diff(old, new, n=whole, lineterm=""))[3:]  # without difflib's own title
    return "\n".join(line.rstrip() for line in title + changes)


def with_diff(match: re.Match) -> str:
    comment, request = match.groups()
    return f"{comment}```diff\n{diff(request)}\n```\n"


def with_diffs(page: str) -> str:
    """The page, its diffs made anew."""
    return MARKED.sub(with_diff, page)


if __name__ == "__main__":
    PAGE.write_text(with_diffs(PAGE.read_text()))
