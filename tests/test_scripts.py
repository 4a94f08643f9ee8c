"""The shape of the scripts: twins, ladders, anatomy, voice."""

import ast
import difflib
import io
import re
import tokenize
import tomllib
from collections import defaultdict

import pytest
from conftest import CONTINUOUS, DISCRETE, ROOT, script

SCRIPTS = [*DISCRETE, *CONTINUOUS]
LADDERS = {  # with a little room
    ("dqn", "bootstrap_dqn"): 180,
    ("bootstrap_dqn", "sunrise_dqn"): 75,
    ("bootstrap_dqn", "ivdqn"): 245,
    ("sac", "ensemble_sac"): 200,
    ("ensemble_sac", "sunrise"): 95,
    ("ensemble_sac", "ivsac"): 295,
}
SECTIONS = ["networks", "replay buffer", "the agent", "losses", "acting and evaluation", "the loop"]
MACHINERY = "# Nothing below is about the algorithm"


def source(name: str) -> str:
    return (ROOT / f"{name}.py").read_text()


def definitions(name: str) -> dict[str, str]:
    text = source(name)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    lines = text.splitlines()
    starts = {node.name: min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in nodes}
    return {node.name: "\n".join(lines[starts[node.name] - 1 : node.end_lineno]) for node in nodes}


def arguments(name: str) -> list[ast.AnnAssign]:
    """The fields of all classes of arguments."""
    classes = [node for node in ast.parse(source(name)).body if isinstance(node, ast.ClassDef)]
    found = [cls for cls in classes if cls.name.endswith("Args")]
    return [node for cls in found for node in cls.body if isinstance(node, ast.AnnAssign)]


def test_a_function_or_class_of_one_name_has_one_text_in_all_scripts():
    texts = defaultdict(lambda: defaultdict(list))
    for name in [*SCRIPTS, "plot", "paper_envs"]:
        for definition, text in definitions(name).items():
            if definition not in ("Args", "train", "main"):
                texts[definition][text].append(name)
    drifted = {definition: list(found.values()) for definition, found in texts.items() if len(found) > 1}
    assert not drifted
    assert len(texts["Run"]) == 1


def test_what_is_below_the_ruled_line_is_the_same_in_all_scripts():
    assert len({source(name).partition(MACHINERY)[2] for name in SCRIPTS}) == 1


@pytest.mark.parametrize(("first", "second"), LADDERS)
def test_the_step_from_one_script_to_the_next_is_small(first: str, second: str):
    lines = difflib.unified_diff(source(first).splitlines(), source(second).splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= LADDERS[first, second]


@pytest.mark.parametrize("name", SCRIPTS)
def test_anatomy(name: str):
    """A header for uv, a docstring, arguments, the algorithm, and then the machinery."""
    text = source(name)
    places = [re.search(rf"^# -+ {section}$", text, re.MULTILINE).start() for section in SECTIONS]
    places = [
        re.search(r"^class \w+Args:", text, re.MULTILINE).start(),
        *places,
        text.index("def train(args: Args)"),
        text.index(MACHINERY),
    ]
    assert places == sorted(places)
    assert text.startswith("# /// script\n")
    docstring = ast.get_docstring(ast.parse(text))
    assert f"python {name}.py" in docstring
    assert "paper" in docstring


def test_the_header_for_uv_is_toml_and_pins_what_the_requirements_pin():
    pinned = set(re.findall(r"^[\w\[\],-]+==[\w.]+$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    for name in SCRIPTS:
        header = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", source(name))[1]
        found = tomllib.loads("".join(line[2:] for line in header.splitlines(keepends=True)))
        assert found["requires-python"] == ">=3.11"
        assert len(found["dependencies"]) == 8
        assert set(found["dependencies"]) <= pinned


@pytest.mark.parametrize("name", SCRIPTS)
def test_voice(name: str):
    """One thought a line: no lambdas, no code in strings, as many tokens a line as others have."""
    text = source(name)
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"eval", "exec"}
    assert "torch._" not in text
    algorithm = text.partition(MACHINERY)[0]
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(algorithm).readline) if t.type not in ignored]
    lines = [line for line in algorithm.splitlines() if line.strip()]
    assert len(tokens) / len(lines) < 10


@pytest.mark.parametrize("name", SCRIPTS)
def test_functions_are_typed(name: str):
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is not None or node.name == "__init__", node.name
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                assert argument.annotation is not None or argument.arg == "self", (node.name, argument.arg)


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
    fields = arguments(name)
    assert len(fields) == len(vars(script(name).Args()))
    for node in fields:
        field, line = node.target.id, text.splitlines()[node.lineno - 1]
        assert re.search(r"  # \S.{5,}", line), f"{field} is not explained"
        assert re.search(rf"args\.{field}\b", text.replace(line, "")), f"{field} is never read"
