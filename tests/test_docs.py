"""The README: its links lead to what they name, its commands parse, its tables are those of the committed rows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, script

README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"python ((?:iv)?(?:\w*dqn|\w*sac|sunrise)\.py[^`|\n]*)", README)))


def test_links_to_code_lead_to_files_that_define_what_they_name():
    links = re.findall(r"\[`(\w+)`\]\((\w+\.py)\)", README)
    assert len(links) >= 12
    for name, file in links:
        assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE), f"{name} is not in {file}"


def test_every_metric_that_a_script_logs_is_explained():
    explained = {
        name.rstrip("*") for name in re.findall(r"`((?:charts|losses|uncertainty|exploration)/[\w*]+)`", README)
    }
    explained |= {"uncertainty/target_variance_median"}  # shown as `_median`
    for path in ROOT.glob("*.py"):
        if path.stem in ("plot", "paper_envs"):
            continue
        for name in re.findall(r"\"((?:charts|losses|uncertainty|exploration)/\w+)\"", path.read_text()):
            assert name in explained or re.match(r"uncertainty/(critic|actor)_", name), f"{name} in {path.name}"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch):
    name, *arguments = shlex.split(command.replace("--seed S", "--seed 1"))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    args = script(name.removesuffix(".py")).parse_command_line()
    assert args.exp_name == name.removesuffix(".py")


@pytest.mark.parametrize(
    ("suite", "folders", "tables", "page"),
    [
        ("table1", ["table1"], ["table1", "table1-improvement"], "README.md"),
        ("ablations-dqn", ["table1", "ablations"], ["ablations-dqn-improvement"], "docs/results.md"),
    ],
)
def test_the_results_are_what_the_committed_rows_give(
    suite: str, folders: list[str], tables: list[str], page: str, tmp_path: Path
):
    """Drawn anew, the committed tables and those on the page are the same, to the letter."""
    rows = [ROOT / "results" / folder for folder in folders]
    command = [sys.executable, ROOT / "plot.py", *rows, "--out", tmp_path, "--suite", suite]
    subprocess.run(command, check=True, capture_output=True)
    for name in (*(f"{table}.md" for table in tables), f"{suite}-runs.csv"):
        assert (tmp_path / name).read_text() == (rows[-1] / name).read_text(), name
        if name.endswith(".md"):
            table = (rows[-1] / name).read_text().split("\n\n")[0]
            assert table in (ROOT / page).read_text(), f"{page} does not hold {name}"
