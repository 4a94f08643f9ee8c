"""The pages: links lead somewhere, commands parse, metrics are those that are logged, numbers are those of the rows."""

import argparse
import gzip
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tyro
import yaml
from conftest import DISCRETE, ROOT, SCRIPTS, read_rows, script

sys.path.insert(0, str(ROOT / "docs"))
import make_diffs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "tests" / "README.md", ROOT / "tests" / "mutants.md", ROOT / "results" / "trained" / "README.md"]
ALGORITHM_PAGES = [ROOT / "docs" / name for name in ("ivdqn.md", "ivsac.md", "baselines.md")]
BASELINES = ("dqn", "bootstrap_dqn", "sunrise_dqn", "sac", "ensemble_sac", "sunrise")

# The tables on a page that plot.py makes from committed rows: suite, folders of rows, tables, page. The tables are
# committed in the last of the folders.
RESULTS = [
    ("table1", ["table1"], ["table1"], "README.md"),
    ("table1", ["table1"], ["table1-improvement"], "docs/reproduction.md"),
    ("ablations-dqn", ["table1", "ablations"], ["ablations-dqn-improvement"], "docs/reproduction.md"),
    ("search", ["search"], ["search-Cartpole-Noise", "search-MountainCar-v0"], "docs/reproduction.md"),
    ("table2-100k", ["table2-100k"], ["table2-100k"], "docs/reproduction.md"),
]


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


on_every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)
on_algorithm_pages = pytest.mark.parametrize("page", ALGORITHM_PAGES, ids=page_id)


# ---------------------------------------------------------------------------- links
def without_code_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What may follow the # in a link to this page, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", without_code_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@on_every_page
def test_links_lead_to_files_and_headings(page: Path):
    text = without_code_blocks(page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name} links to {link}"


@on_every_page
def test_links_to_code_name_what_is_there(page: Path):
    """A link is [`function`](script.py); after a colon, words that are in that function may follow."""
    links = re.findall(r"\[`(\w+)`\]\(([\w./]+\.py)\)(: `[^|\n]*)?", page.read_text())
    for name, path, words in links:
        source = "\n".join(make_diffs.definition(page.parent / path, name))  # fails if there is none
        for word in re.findall(r"`([^`]+)`", words):
            assert re.search(rf"\b{re.escape(word)}\b", source), f"{page.name}: {name} of {path} has no {word}"
    if page in ALGORITHM_PAGES:
        assert len(links) >= 15


# ---------------------------------------------------------------------------- commands
# In a restricted shell that finds no program, each command is printed, with its variables and loops resolved.
PRINT_COMMANDS = """
command_not_found_handle() { printf '%q ' "$@"; echo; }
cd() { :; }
source() { :; }
"""


def resolved(text: str) -> list[str]:
    """The commands that a shell would run."""
    text = text.replace("./benchmark.sh", "benchmark.sh")  # a restricted shell refuses a path
    shell = ["/bin/bash", "-r", "-c", PRINT_COMMANDS + text]
    done = subprocess.run(shell, env={"PATH": "/nonexistent"}, capture_output=True, text=True)
    assert not done.stderr, f"{text}\n{done.stderr}"
    return done.stdout.splitlines()


def commands_on(page: Path) -> set[str]:
    """Those of the code blocks for a shell, and what looks like a command in a sentence or table."""
    text = page.read_text()
    texts = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", without_code_blocks(text)):
        if re.match(r"(python|uv run|\./benchmark.sh) ", code) and "..." not in code:
            texts.append(code.replace(r"\|", "|"))  # as it stands in a table
    return set().union(*(resolved(each) for each in texts))


COPIED = {"my_idea.py": "ivdqn.py"}  # by a command on the page
COMMANDS = sorted(set().union(*(commands_on(page) for page in PAGES)))


class Parsed(BaseException):
    """Ends a program once it has understood its arguments."""


def ends_when_parsed(parser: Callable) -> Callable:
    def parse_and_end(*arguments: Any, **options: Any) -> None:
        parser(*arguments, **options)
        raise Parsed

    return parse_and_end


def parse_with(path: Path, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    """The program takes these arguments; nothing of it runs but its parser."""
    assert path.exists()
    patch.setattr(sys, "argv", [str(path), *arguments])
    patch.setattr(tyro, "cli", ends_when_parsed(tyro.cli))
    patch.setattr(argparse.ArgumentParser, "parse_args", ends_when_parsed(argparse.ArgumentParser.parse_args))
    if not re.search(r"tyro\.cli|parse_args", path.read_text()):
        assert not arguments, f"{path.name} takes no arguments"
        return
    with pytest.raises((Parsed, SystemExit)) as end:
        runpy.run_path(str(path), run_name="__main__")
    if end.type is SystemExit:
        assert end.value.code == 0  # --help


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch):
    words = [COPIED.get(word, word) for word in shlex.split(command)]
    if words[0] in ("git", "cp", "ffmpeg"):
        return
    if words[0] == "benchmark.sh":
        dry = ["./benchmark.sh", words[1], "--dry-run", *words[2:]]
        done = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "python" in done.stdout, "no run matches"
    elif words[0] == "diff":
        assert all((ROOT / name).exists() for name in words[1:])
    elif words[:2] == ["pip", "install"] or words[:3] == ["uv", "pip", "install"]:
        files = [name for option, name in itertools.pairwise(words) if option == "-r"]
        assert all((ROOT / name).exists() for name in files)
    elif words[:2] == ["python", "-c"]:
        compile(words[2], "-c", "exec")
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if word.startswith("tests"))
    else:
        program = words[2:] if words[:2] == ["uv", "run"] else words[1:]
        assert words[0] in ("python", "uv"), f"this test does not know {words[0]}"
        parse_with(ROOT / program[0], program[1:], monkeypatch)


# ---------------------------------------------------------------------------- metrics
SHORT_RUN = {
    "total_timesteps": 200,
    "hidden_size": 8,
    "batch_size": 8,
    "buffer_size": 200,
    "learning_starts": 20,
    "log_every": 20,
    "num_threads": 1,
}
SHORT_DISCRETE_RUN = SHORT_RUN | {"env_id": "CartPole-v1"}
SHORT_CONTINUOUS_RUN = SHORT_RUN | {
    "env_id": "Pendulum-v1",  # an episode has 200 steps
    "rollout_length": 20,
    "eval_every": 100,
    "cuda": False,
}


def logged_metrics(name: str, folder: Path) -> set[str]:
    """What a short run writes."""
    module = script(name)
    short_run = SHORT_DISCRETE_RUN if name in DISCRETE else SHORT_CONTINUOUS_RUN
    run = module.train(module.Args(**short_run, runs_dir=str(folder)))
    return set().union(*read_rows(run))


def metric_rows(page: Path) -> dict[str, str]:
    """The rows of the page's table of metrics, by metric."""
    (section,) = re.findall(r"^## Logged metrics$(.*?)(?=^## )", page.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `([\w/]+)` \|(.*)$", section, re.MULTILINE)
    assert len(dict(rows)) == len(rows), "a metric has two rows"
    return dict(rows)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_explains_the_metrics_that_its_script_logs_and_no_others(name: str, tmp_path: Path):
    if name in BASELINES:
        rows = metric_rows(ROOT / "docs" / "baselines.md")
        explained = {metric for metric, row in rows.items() if row.startswith(" all |") or f" `{name}.py`" in row}
    else:
        explained = set(metric_rows(ROOT / "docs" / f"{name}.md"))
    assert explained == logged_metrics(name, tmp_path)


@on_every_page
def test_metrics_in_sentences_exist(page: Path):
    known = set().union(*(metric_rows(each) for each in ALGORITHM_PAGES))
    named = set(re.findall(r"`((?:charts|losses|uncertainty|exploration)/\w+)`", page.read_text()))
    assert named <= known, named - known


def test_the_effective_batch_size_is_pinned_on_lunarlander():
    """So says docs/ivdqn.md, of the rows of Table 1."""
    folders = sorted((ROOT / "results" / "table1").glob("LunarLander-v3__IV-DQN__*.jsonl.gz"))
    assert len(folders) >= 10
    for path in folders:
        config, *rows = [json.loads(line) for line in gzip.open(path)]
        mebs = config["args"]["mebs_ratio"] * config["args"]["batch_size"]
        sizes = [row[name] for row in rows if (name := "uncertainty/effective_batch_size") in row]
        assert len(sizes) > 50
        assert sizes == pytest.approx([mebs] * len(sizes), rel=1e-5)


# ---------------------------------------------------------------------------- deviations, diffs, formulas
def deviations(page: Path) -> dict[int, str]:
    return {
        int(number): text for number, text in re.findall(r"^- \*\*(\d+)\.\*\* (.*)$", page.read_text(), re.MULTILINE)
    }


def test_a_deviation_has_one_number_and_one_text():
    texts: dict[int, str] = {}
    for page in ALGORITHM_PAGES:
        for number, text in deviations(page).items():
            assert texts.setdefault(number, text) == text, f"deviation {number} on {page.name}"
    assert sorted(texts) == list(range(1, len(texts) + 1))


@on_every_page
def test_deviations_that_are_referred_to_exist(page: Path):
    known = set().union(*(deviations(each) for each in ALGORITHM_PAGES))
    for number in re.findall(r"[Dd]eviation (\d+)", page.read_text()):
        assert int(number) in known


def test_the_diffs_are_those_of_the_scripts():
    """If not, run python docs/make_diffs.py."""
    page = make_diffs.PAGE.read_text()
    assert len(make_diffs.MARKED.findall(page)) >= 10
    assert make_diffs.with_diffs(page) == page


def test_the_core_in_the_readme_is_that_of_the_loss():
    (core,) = re.findall(r"```python\n(mean = .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    source = [line.strip() for line in make_diffs.definition(ROOT / "ivdqn.py", "ivdqn_loss")]
    lines = [line.strip() for line in core.splitlines()]
    assert 15 <= len(lines) <= 20
    places = [source.index(line) for line in lines]  # fails if there is none
    assert places == sorted(places)


@on_every_page
def test_formulas_are_safe_from_markdown(page: Path):
    """GitHub takes }_ for emphasis and a backslash before punctuation for an escape, between two dollars."""
    for formula in re.findall(r"\$\$(.*?)\$\$", page.read_text(), re.DOTALL):
        assert not re.search(r"\}_|\\[^\w]", formula), formula


# ---------------------------------------------------------------------------- results and citation
@pytest.mark.parametrize(("suite", "folders", "tables", "page"), RESULTS)
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


def test_the_citation_is_that_of_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"]
    assert citation["authors"]
    paper = citation["preferred-citation"]
    assert paper["type"] == "conference-paper"
    assert paper["title"] == "Sample Efficient Deep Reinforcement Learning via Uncertainty Estimation"
    names = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert names == ["Vincent Mai", "Kaustubh Mani", "Liam Paull"]
    assert paper["year"] == 2022
    assert "ICLR" in paper["conference"]["name"]
    assert paper["url"] == "https://arxiv.org/abs/2201.01666"
    assert paper["identifiers"][0]["value"] == "arXiv:2201.01666"
