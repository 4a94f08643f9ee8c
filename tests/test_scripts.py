"""The shape of the scripts: twins, ladders, sizes, anatomy."""

import ast
import difflib
import re
from collections import defaultdict

import pytest
from conftest import CONTINUOUS, DISCRETE, ROOT

SCRIPTS = [*DISCRETE, *CONTINUOUS]
LADDERS = {
    ("dqn", "bootstrap_dqn"): 120,
    ("bootstrap_dqn", "sunrise_dqn"): 40,
    ("bootstrap_dqn", "ivdqn"): 180,
    ("sac", "ensemble_sac"): 150,
    ("ensemble_sac", "sunrise"): 50,
    ("ensemble_sac", "ivsac"): 190,
}
SIZES = {"ivdqn": 520, "ivsac": 580}
SECTIONS = ["networks", "replay buffer", "losses", "acting and evaluation", "logging and checkpoints"]


def source(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


def definitions(name: str) -> dict[str, str]:
    text = source(name)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    lines = text.splitlines()
    starts = {node.name: min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in nodes}
    return {node.name: "\n".join(lines[starts[node.name] - 1 : node.end_lineno]) for node in nodes}


def test_a_function_or_class_of_one_name_has_one_text_in_all_scripts():
    texts = defaultdict(lambda: defaultdict(list))
    for name in [*SCRIPTS, "plot", "paper_envs"]:
        for definition, text in definitions(name).items():
            if definition != "Args":
                texts[definition][text].append(name)
    drifted = {definition: list(found.values()) for definition, found in texts.items() if len(found) > 1}
    assert not drifted
    assert len(texts["Run"]) == 1


@pytest.mark.parametrize(("first", "second"), LADDERS)
def test_the_step_from_one_script_to_the_next_is_small(first: str, second: str):
    lines = difflib.unified_diff(source(first).splitlines(), source(second).splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= LADDERS[first, second]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_plumbing_is_one_small_block(name: str):
    """The plumbing stays out of the reader's way."""
    text = source(name)
    plumbing = text[re.search(r"# -+ logging and checkpoints", text).start() : text.index('if __name__ == "__main__"')]
    assert len(plumbing.strip().splitlines()) <= 120


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short(name: str):
    assert len(source(name).splitlines()) <= SIZES["ivdqn" if name in DISCRETE else "ivsac"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_anatomy(name: str):
    text = source(name)
    places = [re.search(rf"^# -+ {section}$", text, re.MULTILINE).start() for section in SECTIONS]
    places = [0, text.index("class Args"), *places, text.index('if __name__ == "__main__"')]
    assert places == sorted(places)
    docstring = ast.get_docstring(ast.parse(text))
    assert f"python {name}.py" in docstring
    assert "(paper" in docstring


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_no_other_file_of_the_repository(name: str):
    ours = {path.stem for path in ROOT.glob("*.py")}
    for node in ast.walk(ast.parse(source(name))):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert not {module.split(".")[0] for module in modules} & ours


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_argument_is_explained_and_used(name: str):
    text = source(name)
    for node in next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Args").body:
        field, line = node.target.id, text.splitlines()[node.lineno - 1]
        assert re.search(r"  # \S.{5,}", line), f"{field} is not explained"
        assert re.search(rf"args\.{field}\b", text.replace(line, "")), f"{field} is never read"
