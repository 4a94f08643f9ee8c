"""plot.py on synthetic runs whose answers are known by hand, and on damaged ones."""

import csv
import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.stats
from conftest import ROOT

import plot

SCRIPT_OF = {system: script for script, system in plot.SYSTEM_OF_SCRIPT.items()}


# ---------------------------------------------------------------------------- runs
def write_run(
    folder: Path,
    env_id: str,
    label: str,
    seed: int,
    rows: list[dict[str, Any]],
    status: str = "finished",
    script: str | None = None,
    **settings: Any,
) -> Path:
    """A run's folder. Its script is that of the system in its label, if none is given."""
    path = folder / f"{env_id.split(':')[-1].replace('/', '_')}__{label}__{seed}"
    path.mkdir(parents=True)
    script = script or SCRIPT_OF[label]
    args = {"env_id": env_id, "seed": seed, "exp_name": script, "runs_dir": "/somewhere/runs"} | settings
    config = {"script": f"{script}.py", "status": status, "args": args}
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def discrete_rows(solved: int | None, episodes: int, score: float = 200.0) -> list[dict[str, Any]]:
    """A mean of 100 evaluations that reaches the score at the given episode, 50 below it before."""
    rows = []
    for episode in range(1, episodes + 1):
        is_solved = solved is not None and episode >= solved
        value = score if is_solved else score - 50
        row = {"global_step": 10 * episode, "charts/episode": episode}
        rows.append(row | {"charts/eval_return": value, "charts/eval_return_mean100": value})
    return rows


def continuous_rows(last: float, steps: int = 200_000) -> list[dict[str, Any]]:
    return [{"global_step": step, "charts/eval_return": last * step / steps} for step in range(1000, steps + 1, 1000)]


def with_uncertainty(rows: list[dict[str, Any]], **values: float) -> list[dict[str, Any]]:
    """After each row, one of uncertainty metrics."""
    metrics = {f"uncertainty/{name}": value for name, value in values.items()}
    return [each for row in rows for each in (row, {"global_step": row["global_step"]} | metrics)]


# ---------------------------------------------------------------------------- looking at what is drawn
@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, plt.Figure]:
    """The figures by name, in place of files, which take long."""
    drawn = {}

    def keep(figure: plt.Figure, out: Path, name: str) -> None:
        drawn[name] = figure

    monkeypatch.setattr(plot, "save_figure", keep)
    yield drawn
    plt.close("all")


def draw(*folders: Path, out: Path, **options: Any) -> int:
    return plot.main(plot.Args(runs=folders, out=out, **options))


def table(path: Path) -> dict[str, dict[str, str]]:
    with open(path, newline="") as file:
        return {next(iter(row.values())): row for row in csv.DictReader(file)}


def legend(figure: plt.Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def panel_titles(figure: plt.Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


# ---------------------------------------------------------------------------- tables
def test_tables_of_known_runs(tmp_path: Path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    for seed, solved in enumerate([100, 200, 300, 400, None], start=1):
        write_run(runs, "LunarLander-v3", "DQN", seed, discrete_rows(solved, 500))
        rows = with_uncertainty(discrete_rows(100 + 10 * seed, 100 + 10 * seed), target_variance_mean=4.0)
        write_run(runs, "LunarLander-v3", "IV-DQN", seed, rows)
    for scale, solved in (("0.1", 100), ("10", 120)):
        env_id = f"paper_envs:CartpoleNoise{scale}-v0"
        write_run(runs, env_id, "IV-DQN", 1, discrete_rows(solved, 300, 750.0))
    for seed in (1, 2, 3):
        write_run(runs, "paper_envs:MBBL-Hopper-v0", "SAC", seed, continuous_rows(1000.0 * seed))
        write_run(runs, "paper_envs:MBBL-Hopper-v0", "IV-SAC", seed, continuous_rows(2500.0))
    assert draw(runs, out=out) == 0
    each = table(out / "runs.csv")
    assert each["LunarLander-v3__DQN__2"] == {
        "run": "LunarLander-v3__DQN__2",
        "solved at episode": "200",
        "last mean evaluation return": "200.0",
    }
    assert each["LunarLander-v3__DQN__5"]["solved at episode"] == "max"
    assert each["MBBL-Hopper-v0__SAC__2"]["last mean evaluation return"] == "1955.0"
    first = table(out / "table1.csv")
    assert first["DQN"]["LunarLander-v3: ours"] == "200-300-400 (5)"
    assert first["DQN"]["LunarLander-v3: paper"] == "296-316-349"
    assert first["IV-DQN"]["LunarLander-v3: ours"] == "120-130-140 (5)"
    assert first["IV-DQN"]["Cartpole-Noise: ours"] == "105-110-115 (2)"
    assert first["SunriseDQN"]["Cartpole-Noise: ours"] == "-"
    second = table(out / "table2.csv")
    # At 200k the last ten evaluations average 97.75% of the last; at 100k 47.75%.
    assert second["200k SAC"]["Hopper: ours"] == f"{1955:.0f} ± {977.5 / 3**0.5:.0f} (3)"
    assert second["100k SAC"]["Hopper: ours"] == f"{955:.0f} ± {477.5 / 3**0.5:.0f} (3)"
    assert second["200k IV-SAC"]["Hopper: ours"] == "2444 ± 0 (3)"
    assert second["200k IV-SAC"]["Hopper: paper"] == "2889 ± 50"
    with open(out / "improvement.csv", newline="") as file:
        better = {(row["environment"], row["systems"]): row["probability"] for row in csv.DictReader(file)}
    # 110..150 against 100, 200, 300, 400, never: all but one of five are slower. 2500 against 1000, 2000, 3000: 2 of 3.
    assert better["LunarLander-v3", "IV-DQN over DQN"].startswith("0.80 (")
    assert better["MBBL-Hopper-v0, 200k", "IV-SAC over SAC"].startswith("0.67 (")
    markdown = (out / "table1.md").read_text()
    assert "| IV-DQN | 120-130-140 (5) | 220-227-239 |" in markdown
    for name in ("LunarLander-v3", "Cartpole-Noise", "MBBL-Hopper-v0", "LunarLander-v3-variance"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (out / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"


def test_the_committed_lander_of_table_1(tmp_path: Path, figures: dict):
    """Twelve seeds, solved as results/table1 says."""
    runs = tmp_path / "runs"
    runs.mkdir()
    for path in (ROOT / "results" / "table1").glob("LunarLander-v3__IV-DQN__*.jsonl.gz"):
        (runs / path.name).write_bytes(path.read_bytes())
    assert draw(runs, out=tmp_path / "out", suite="table1") == 0
    assert table(tmp_path / "out" / "table1.csv")["IV-DQN"]["LunarLander-v3: ours"] == "220-229-240 (12)"
    assert legend(figures["table1-LunarLander-v3"]) == ["IV-DQN (12 runs)"]


def test_table_2_at_half_its_steps(tmp_path: Path, figures: dict):
    """Runs of table2-100k stand in a folder of their own below runs, which is read instead."""
    runs = tmp_path / "runs"
    write_run(runs, "paper_envs:MBBL-Ant-v0", "SAC", 1, continuous_rows(7.0), batch_size=512)
    own = runs / "table2-100k"
    write_run(own, "paper_envs:MBBL-Ant-v0", "SAC", 1, continuous_rows(1000.0, 100_000), batch_size=256)
    assert draw(runs, out=tmp_path / "out", suite="table2-100k") == 0
    found = table(tmp_path / "out" / "table2-100k.csv")
    assert found["100k SAC"]["Ant: ours"] == "955 (1)"
    assert not [name for name in found if name.startswith("200k")]


@pytest.mark.parametrize("suite", ["lambda", "search"])
def test_the_settings_of_a_suite_are_compared(tmp_path: Path, figures: dict, suite: str):
    runs, out = tmp_path / "runs", tmp_path / "out"
    labels = {"lambda": ["IV-DQN", "IV-DQN-lambda=5"], "search": ["IV-DQN-a", "IV-DQN-b"]}[suite]
    for label, value, episodes in zip(labels, (1.5, 5.0), ([110, 130], [None, 150]), strict=True):
        for seed, solved in enumerate(episodes, start=1):
            rows = discrete_rows(solved, 500)
            write_run(runs, "LunarLander-v3", label, seed, rows, script="ivdqn", loss_attenuation_weight=value)
    write_run(runs, "LunarLander-v3", "DQN", 1, discrete_rows(200, 200))  # of another suite
    assert draw(runs, out=out, suite=suite) == 0
    found = list(table(out / f"{suite}-LunarLander-v3.csv").values())
    names = {"lambda": ["IV-DQN (lambda=1.5)", "IV-DQN (lambda=5)"], "search": labels}[suite]
    expected = [
        {"system": names[0], "arguments": "lambda=1.5", "seed 1": "110", "seed 2": "130", "median": "120"},
        {"system": names[1], "arguments": "lambda=5", "seed 1": "max", "seed 2": "150", "median": "max"},
    ]
    assert found == expected
    assert not list(out.glob("table*"))


# ---------------------------------------------------------------------------- suites
def dry_run(suite: str) -> list[list[str]]:
    command = ["bash", "benchmark.sh", suite, "--seeds", "1", "--dry-run"]
    environment = os.environ | {"PYTHON": sys.executable, "RUNS_DIR": "no such folder"}
    text = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in text.splitlines()]


def told(command: list[str]) -> dict[str, Any]:
    """The arguments of a command, as config.json holds them."""
    args = {}
    name = ""
    for word in command[2:]:
        if word.startswith("--"):
            is_off = word.startswith("--no-")
            name = word.removeprefix("--no-" if is_off else "--").replace("-", "_")
            args[name] = not is_off
        else:
            try:
                args[name] = json.loads(word)
            except ValueError:
                args[name] = word
    return args


@pytest.mark.parametrize("suite", list(plot.SUITES))
def test_a_suite_takes_all_runs_of_benchmark_sh(
    suite: str, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture
):
    """Each cell is a system of its own, called as there but for what follows from its arguments."""
    names = []
    cells: dict[str, set[str]] = {}
    for command in dry_run(suite):
        args = told(command)
        env_id, label, _ = args["run_name"].split("__")
        rows = continuous_rows(1.0, 200_000) if "sac" in command[1] or "sunrise.py" in command[1] else []
        rows = rows or discrete_rows(120, 120, 1000.0)
        seed = args.pop("seed")
        write_run(tmp_path, args.pop("env_id"), label, seed, rows, script=command[1].removesuffix(".py"), **args)
        names.append(args["run_name"])
        group = "Cartpole-Noise" if env_id.startswith("CartpoleNoise") else env_id
        cells.setdefault(group, set()).add(label)
    assert draw(tmp_path, out=tmp_path / "out", suite=suite) == 0
    assert sorted(table(tmp_path / "out" / f"{suite}-runs.csv")) == sorted(names)
    assert "left out" not in capsys.readouterr().err
    for group, labels in cells.items():
        figure = figures[f"{suite}-{group}"]
        titles = legend(figure) if figure.legends else [title.replace("\n", " ") for title in panel_titles(figure)]
        drawn = {title.rpartition(" (")[0] for title in titles}
        if suite == "lambda":
            assert len(drawn) == len(labels)
            assert all("(lambda=" in name for name in drawn)
        else:
            assert drawn == labels


def test_a_suite_leaves_other_runs_out_and_names_what_is_missing(
    tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture
):
    for label in ("DQN", "IV-DQN"):
        write_run(tmp_path, "LunarLander-v3", label, 1, discrete_rows(150, 300))
    write_run(tmp_path, "LunarLander-v3", "DQN", 2, discrete_rows(150, 300))
    write_run(tmp_path, "LunarLander-v3", "IV-DQN-lambda=5", 1, discrete_rows(150, 300), script="ivdqn")
    write_run(tmp_path, "CartPole-v1", "DQN", 1, discrete_rows(150, 300))
    misnamed = write_run(tmp_path, "LunarLander-v3", "IV-DQN", 2, discrete_rows(150, 300), weighting="l2")
    assert draw(tmp_path, out=tmp_path / "out", suite="table1") == 0
    assert legend(figures["table1-LunarLander-v3"]) == ["DQN (2 runs)", "IV-DQN (1 run)"]
    assert list(figures) == ["table1-LunarLander-v3"]
    stderr = capsys.readouterr().err
    assert f"left out {misnamed}: by its arguments it is L2+VarEnsembleDQN" in stderr
    assert "missing: LunarLander-v3, IV-DQN, seeds 2\n" in stderr
    assert "missing: LunarLander-v3, SunriseDQN, seeds 1, 2\n" in stderr
    assert "missing: LunarLander-v3, DQN" not in stderr
    assert "missing: CartpoleNoise3-v0, all systems\n" in stderr


# ---------------------------------------------------------------------------- what cannot be read
DEEP = "[" * 100_000 + "]" * 100_000
BAD_ROWS = {
    "a string": '{"global_step": 1, "charts/eval_return": "1"}',
    "null": '{"global_step": 1, "charts/eval_return": null}',
    "true": '{"global_step": 1, "charts/episode": true}',
    "a list": '{"global_step": [1], "charts/eval_return": 1}',
    "not a number": '{"global_step": 1, "charts/eval_return": NaN}',
    "infinite": '{"global_step": 1, "charts/eval_return_mean100": -Infinity}',
    "as large as 10**400": '{"global_step": 1, "charts/eval_return": 1' + 400 * "0" + "}",
    "as long as 10**5000": '{"global_step": 1, "charts/eval_return": 1' + 5000 * "0" + "}",
    "a float of 1e400": '{"global_step": 1e400, "charts/eval_return": 1}',
    "without a step": '{"charts/eval_return": 1}',
    "no object": "[1, 2]",
    "a bare string": '"rows"',
    "no JSON": "{'global_step': 1}",
    "an empty line": "",
    "bytes": "\x00\x01",
    "deep": '{"global_step": 1, "charts/eval_return": ' + DEEP + "}",
    "deep beside": '{"global_step": 1, "more": ' + DEEP + "}",
    "very long": '{"global_step": 1, "more": "' + 2 * plot.MAX_LINE * "x" + '"}',
    "ahead of its time": '{"global_step": 100000, "charts/episode": 1}',
    "ahead by episodes": '{"global_step": 1, "charts/episode": 9999}',
}
NAMES = {
    "a line feed": "a\nb",
    "a formula": "$\\frac{$",
    "a surrogate": "\ud800",
    "a bar": "|",
    "none": "",
    "long": "x" * 300,
}
BAD_CONFIGS = {
    "no JSON": "{",
    "empty": "",
    "a list": "[]",
    "deep": DEEP,
    "without args": '{"status": "finished"}',
    "args in a list": '{"status": "finished", "args": ["env_id"]}',
    "no environment": '{"status": "finished", "args": {"seed": 1}}',
    "a number as environment": '{"status": "finished", "args": {"seed": 1, "env_id": 5}}',
    "no seed": '{"status": "finished", "args": {"env_id": "LunarLander-v3"}}',
    "a string as seed": '{"status": "finished", "args": {"env_id": "LunarLander-v3", "seed": "1"}}',
    "a list as seed": '{"status": "finished", "args": {"env_id": "LunarLander-v3", "seed": [1]}}',
    "a list as status": '{"status": ["finished"], "args": {"env_id": "LunarLander-v3", "seed": 1}}',
    "very long": '{"status": "' + 2 * plot.MAX_LINE * "x" + '"}',
}


def good_runs(folder: Path) -> None:
    for seed, solved in ((1, 200), (2, 300)):
        write_run(folder, "LunarLander-v3", "DQN", seed, discrete_rows(solved, 300))


def assert_left_out(bad: Path, folder: Path, figures: dict, capsys: pytest.CaptureFixture) -> str:
    """It is named once, in one line, which is returned, and the good runs are drawn."""
    assert draw(folder, out=folder / "out") == 0
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"left out {bad}: ")
    assert stderr.count("\n") == 1
    assert len(stderr) < 400
    assert table(folder / "out" / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "225-250-275 (2)"
    assert legend(figures["LunarLander-v3"]) == ["DQN (2 runs)"]
    assert list(figures) == ["LunarLander-v3"]
    return stderr


@pytest.mark.parametrize("kind", list(BAD_ROWS))
def test_a_run_with_a_bad_row_is_left_out(kind: str, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    good_runs(tmp_path)
    bad = write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(100, 300))
    text = (bad / "metrics.jsonl").read_text()
    (bad / "metrics.jsonl").write_text(f"{BAD_ROWS[kind]}\n{text}")
    warning = assert_left_out(bad, tmp_path, figures, capsys)
    assert ("a line is longer than" in warning) == (kind == "very long")


@pytest.mark.parametrize("kind", list(BAD_CONFIGS))
def test_a_run_with_a_bad_configuration_is_left_out(
    kind: str, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture
):
    good_runs(tmp_path)
    bad = write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(100, 300))
    (bad / "config.json").write_text(BAD_CONFIGS[kind])
    assert_left_out(bad, tmp_path, figures, capsys)


@pytest.mark.parametrize("kind", list(NAMES))
def test_a_run_in_an_environment_that_has_no_name_is_left_out(
    kind: str, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture
):
    good_runs(tmp_path)
    bad = write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(100, 300))
    config = json.loads((bad / "config.json").read_text())
    config["args"]["env_id"] = NAMES[kind]
    (bad / "config.json").write_text(json.dumps(config))
    assert_left_out(bad, tmp_path, figures, capsys)


@pytest.mark.parametrize("kind", list(NAMES))
def test_odd_arguments_are_drawn_as_text(kind: str, tmp_path: Path):
    runs = tmp_path / "runs"
    for seed, value in ((1, "a"), (2, NAMES[kind])):
        write_run(runs, "Any-v0", "IV-DQN", seed, discrete_rows(100, 100), tau=value)
        write_run(runs, "Any-v0", f"w{seed}", seed, discrete_rows(100, 100), script="ivdqn", weighting=value)
        write_run(runs, "Any-v0", f"s{seed}", seed, discrete_rows(100, 100), script=value or "_")
    assert draw(runs, out=tmp_path / "out") == 0
    assert len(table(tmp_path / "out" / "runs.csv")) == 6
    assert (tmp_path / "out" / "Any-v0.png").exists()


@pytest.mark.parametrize("kind", ["no rows", "no file", "cut", "no evaluation", "a folder", "a pipe"])
def test_a_run_with_bad_files_is_left_out(kind: str, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    good_runs(tmp_path)
    bad = write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(100, 300))
    metrics = bad / "metrics.jsonl"
    text = metrics.read_text()
    metrics.unlink()
    if kind == "no rows":
        metrics.touch()
    elif kind == "cut":
        metrics.write_text(text[:-20])
    elif kind == "no evaluation":
        metrics.write_text('{"global_step": 1, "charts/episode": 1}\n')
    elif kind == "a folder":
        metrics.mkdir()
    elif kind == "a pipe":
        os.mkfifo(metrics)
    assert_left_out(bad, tmp_path, figures, capsys)


@pytest.mark.parametrize("kind", ["no gzip", "empty", "damaged", "truncated", "a bomb", "a bomb of one line"])
def test_a_bad_archive_is_left_out(
    kind: str, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    assert plot.MAX_BYTES <= 2**26
    monkeypatch.setattr(plot, "MAX_BYTES", 2**22)
    good_runs(tmp_path)
    source = write_run(tmp_path / "source", "LunarLander-v3", "DQN", 3, discrete_rows(100, 300))
    plain = (source / "config.json").read_bytes() + b"\n" + (source / "metrics.jsonl").read_bytes()
    data = bytearray(gzip.compress(plain))
    if kind == "no gzip":
        data = plain
    elif kind == "empty":
        data = b""
    elif kind == "damaged":
        data[40:60] = b"\xff" * 20
    elif kind == "truncated":
        data = data[:-100]
    elif kind == "a bomb":
        row = b'{"global_step": 1000000, "uncertainty/xi": 1}\n'
        data = gzip.compress(plain + row * (plot.MAX_BYTES // len(row) + 1), compresslevel=1)
    elif kind == "a bomb of one line":
        data = gzip.compress(plain + bytes(4 * plot.MAX_BYTES), compresslevel=1)
    bad = tmp_path / "LunarLander-v3__DQN__3.jsonl.gz"
    bad.write_bytes(data)
    assert_left_out(bad, tmp_path, figures, capsys)


def test_the_good_archive_that_the_bad_ones_are_made_of_is_read(tmp_path: Path, figures: dict):
    good_runs(tmp_path)
    source = write_run(tmp_path / "source", "LunarLander-v3", "DQN", 3, discrete_rows(100, 300))
    text = (source / "config.json").read_bytes() + b"\n" + (source / "metrics.jsonl").read_bytes()
    (tmp_path / "LunarLander-v3__DQN__3.jsonl.gz").write_bytes(gzip.compress(text))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    assert legend(figures["LunarLander-v3"]) == ["DQN (3 runs)"]


@pytest.mark.parametrize("value", ["text", None, [1], {"a": 1}, True, 10**400, float("nan")])
def test_a_bad_value_that_no_table_counts_costs_only_itself(
    value: object, tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture
):
    rows = with_uncertainty(discrete_rows(150, 300), target_variance_mean=3.0, effective_batch_size=5.0)
    rows[1]["uncertainty/target_variance_mean"] = value
    path = write_run(tmp_path, "LunarLander-v3", "IV-DQN", 1, rows)
    assert draw(tmp_path, out=tmp_path / "out") == 0
    stderr = capsys.readouterr().err
    text = f"left out 1 values of {path} that are not numbers, the first is uncertainty/target_variance_mean of row 2"
    assert stderr == f"{text}\n"
    assert table(tmp_path / "out" / "table1.csv")["IV-DQN"]["LunarLander-v3: ours"] == "150-150-150 (1)"
    mean, ebs = figures["LunarLander-v3-variance"].axes
    assert (mean.lines[0].get_ydata() == 3).all()
    assert mean.lines[0].get_xdata()[0] == 2
    assert ebs.lines[0].get_xdata()[0] == 1


def test_the_largest_numbers_are_drawn(tmp_path: Path):
    rows = discrete_rows(150, 300)
    for row, value in zip(rows, (0.99e100, -0.99e100, 1e-300), strict=False):
        row["charts/eval_return_mean100"] = value
    rows = with_uncertainty(rows, target_variance_mean=-1.0, target_variance_median=0.0)
    write_run(tmp_path / "runs", "Any-v0", "IV-DQN", 1, rows)
    write_run(tmp_path / "runs", "Any-v0", "IV-DQN", 2, rows)
    assert draw(tmp_path / "runs", out=tmp_path / "out") == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"Any-v0.png", "Any-v0-variance.png"}


def test_a_run_that_ended_too_early_for_the_table_is_named(
    tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture
):
    good_runs(tmp_path)
    short = write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(None, 120))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    text = f"left out {short} of the table: it ended after 120 of 500 episodes without being solved\n"
    assert capsys.readouterr().err.count(text) == 1
    assert table(tmp_path / "out" / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "225-250-275 (2)"


# ---------------------------------------------------------------------------- where it writes
def test_nothing_is_written_outside_of_out(tmp_path: Path):
    """Whatever names the runs have, and whatever links lie in --out."""
    runs, out = tmp_path / "a" / "runs", tmp_path / "a" / "b" / "out"
    good_runs(runs)
    rows = discrete_rows(150, 300)
    names = ["../../evil", "/evil", "..", ".", "a/b", "a:/b", "a_b"]
    for number, name in enumerate(names, start=10):
        path = write_run(runs, "LunarLander-v3", "DQN", number, rows, script=name)
        config = json.loads((path / "config.json").read_text())
        config["args"]["env_id"] = name
        (path / "config.json").write_text(json.dumps(config))
    out.mkdir(parents=True)
    outside = tmp_path / "outside.txt"
    outside.write_text("as it was")
    (out / "table1.csv").symlink_to(outside)
    (out / "LunarLander-v3.png").symlink_to(outside)
    (out / f".{os.getpid()}.part").symlink_to(outside)
    before = {path for path in tmp_path.rglob("*") if out not in path.parents}
    assert draw(runs, out=out) == 0
    assert {path for path in tmp_path.rglob("*") if out not in path.parents} == before
    assert outside.read_text() == "as it was"
    assert not any(path.is_symlink() for path in out.iterdir())
    assert table(out / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "225-250-275 (2)"
    assert len(list(out.glob("*.png"))) == 1 + len(names)


@pytest.mark.parametrize("option", ["out", "archive"])
@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_in_place_of_a_folder_is_refused(option: str, below: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    good_runs(tmp_path / "runs")
    file = tmp_path / "file"
    file.write_text("mine")
    places = {"out": tmp_path / "out"} | {option: file / below}
    assert draw(tmp_path / "runs", **places) == 2
    assert capsys.readouterr().err == f"plot.py: --{option} takes a folder, and '{file}' is a file\n"
    assert file.read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_the_command_line(tmp_path: Path):
    def run_plot(*arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "plot.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=250)

    helped = run_plot("--help")
    assert helped.returncode == 0
    assert "python plot.py runs --suite table1 --out results/table1 --archive results/table1" in helped.stdout
    assert "--unfinished" in helped.stdout
    missing = run_plot(tmp_path / "nothing")
    assert missing.returncode == 2
    assert missing.stderr == f"plot.py takes folders of runs, not '{tmp_path / 'nothing'}'\n"
    assert run_plot("--out", tmp_path / "out").returncode == 2
    (tmp_path / "nothing").mkdir()
    empty = run_plot(tmp_path / "nothing", "--out", tmp_path / "out", "--suite", "table1")
    assert empty.returncode == 1
    assert empty.stderr == f"plot.py: {tmp_path / 'nothing'} holds no finished run of table1\n"
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    good_runs(tmp_path / "runs")
    (tmp_path / "out" / "LunarLander-v3.png" / "in the way").mkdir(parents=True)
    assert draw(tmp_path / "runs", out=tmp_path / "out") == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("plot.py cannot write: ")
    assert stderr.count("\n") == 1


# ---------------------------------------------------------------------------- archives
def test_an_archive_redraws_the_same(tmp_path: Path):
    runs, archive = tmp_path / "runs", tmp_path / "archive"
    for seed in (1, 2, 3):
        rows = discrete_rows(90 + 20 * seed, 300)
        rows = with_uncertainty(rows, target_variance_mean=4.0, effective_batch_size=9.0)
        rows[1]["losses/td"] = 1.0
        rows.append({"global_step": 10**6, "losses/td": 1.0})
        write_run(runs, "LunarLander-v3", "IV-DQN", seed, rows)
    write_run(runs, "LunarLander-v3", "IV-DQN", 4, discrete_rows(100, 200), status="running")
    assert draw(runs, out=tmp_path / "a", archive=archive, unfinished=False) == 0
    names = sorted(path.name for path in archive.iterdir())
    assert names == [f"LunarLander-v3__IV-DQN__{seed}.jsonl.gz" for seed in (1, 2, 3)]
    lines = gzip.decompress((archive / names[0]).read_bytes()).decode().splitlines()
    config = json.loads(lines[0])
    assert config["args"]["runs_dir"] == "runs"
    assert config["script"] == "ivdqn.py"
    assert len(lines) == 601
    assert "losses" not in lines[2]
    assert json.loads(lines[2])["uncertainty/effective_batch_size"] == 9.0
    assert draw(archive, out=tmp_path / "b", archive=tmp_path / "again") == 0
    for one, other in (("a", "b"), ("archive", "again")):
        files = sorted((tmp_path / one).iterdir())
        assert len(files) == len(list((tmp_path / other).iterdir())) > 2
        for path in files:
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes(), path.name


def test_unfinished_runs_are_not_archived(tmp_path: Path, figures: dict):
    good_runs(tmp_path / "runs")
    write_run(tmp_path / "runs", "LunarLander-v3", "IV-DQN", 4, discrete_rows(100, 200), status="running")
    draw(tmp_path / "runs", out=tmp_path / "out", archive=tmp_path / "archive", unfinished=True)
    assert len(list((tmp_path / "archive").iterdir())) == 2


# ---------------------------------------------------------------------------- nothing is pooled that differs
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"weighting": "l2"}, ["IV-DQN (1 run)", "L2+VarEnsembleDQN (1 run)"]),
        ({"num_nets": 1}, ["IV-DQN (1 run)", "BIV+VarNetworkDQN (1 run)"]),
        ({"variance_heads": False}, ["IV-DQN (1 run)", "BIV+BootstrapDQN (1 run)"]),
        ({"tau": 0.5}, ["IV-DQN (tau=0.005) (1 run)", "IV-DQN (tau=0.5) (1 run)"]),
        ({"n_step": 3}, ["IV-DQN (n_step=1) (1 run)", "IV-DQN (n_step=3) (1 run)"]),
        ({"eval_env_id": "Other-v0"}, ["IV-DQN (eval_env_id=Other-v0) (1 run)", "IV-DQN (eval_env_id=null) (1 run)"]),
        ({"new": [1]}, ["IV-DQN (new=[1]) (1 run)", "IV-DQN (new=unknown) (1 run)"]),
        ({"tau": 0.0050, "n_step": 1.0, "eval_env_id": "LunarLander-v3", "num_threads": 7}, ["IV-DQN (2 runs)"]),
        ({"script": "my_ivdqn"}, ["IV-DQN (1 run)", "my_ivdqn (1 run)"]),
    ],
)
def test_runs_of_one_name_are_one_system_only_if_their_arguments_agree(
    settings: dict, names: list[str], tmp_path: Path, figures: dict
):
    base = {"weighting": "biv", "num_nets": 5, "tau": 0.005}
    write_run(tmp_path, "LunarLander-v3", "IV-DQN", 1, discrete_rows(110, 110), **base)
    write_run(tmp_path, "LunarLander-v3", "IV-DQN", 2, discrete_rows(150, 150), **base | settings)
    assert draw(tmp_path, out=tmp_path / "out") == 0
    assert legend(figures["LunarLander-v3"]) == names


def test_a_table_has_a_row_for_each_setting(tmp_path: Path, figures: dict):
    for seed, tau in ((1, 0.1), (2, 0.1), (3, 0.2)):
        write_run(tmp_path, "LunarLander-v3", "IV-DQN", seed, discrete_rows(100 * seed, 300), tau=tau)
    write_run(tmp_path, "MountainCar-v0", "IV-DQN", 1, discrete_rows(123, 300, -150.0), tau=0.3)
    assert draw(tmp_path, out=tmp_path / "out") == 0
    found = table(tmp_path / "out" / "table1.csv")
    ours = {name: [row["LunarLander-v3: ours"], row["MountainCar-v0: ours"]] for name, row in found.items()}
    assert ours["IV-DQN (tau=0.1)"] == ["125-150-175 (2)", "-"]
    assert ours["IV-DQN (tau=0.2)"] == ["300-300-300 (1)", "-"]
    assert ours["IV-DQN"] == ["-", "123-123-123 (1)"]


def test_two_runs_of_one_seed_are_not_two_seeds(tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, "LunarLander-v3", "DQN", 1, discrete_rows(200, 200))
    again = write_run(two, "LunarLander-v3", "DQN", 1, discrete_rows(300, 300))
    write_run(two, "LunarLander-v3", "DQN", 2, discrete_rows(400, 400))
    same = write_run(two, "LunarLander-v3", "DQN~again", 2, discrete_rows(100, 100), script="dqn", env_seed=2)
    write_run(two, "LunarLander-v3", "DQN-e7", 2, discrete_rows(450, 450), script="dqn", env_seed=7)
    assert draw(one, two, out=tmp_path / "out") == 0
    assert table(tmp_path / "out" / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "300-400-425 (3)"
    stderr = capsys.readouterr().err
    assert f"left out {again}: it repeats the seed 1 of {one}" in stderr
    assert f"left out {same}: it repeats the seed 2 of {two}" in stderr


def test_a_folder_that_is_given_twice_counts_once(tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    good_runs(tmp_path)
    assert draw(tmp_path, tmp_path, out=tmp_path / "out") == 0
    assert legend(figures["LunarLander-v3"]) == ["DQN (2 runs)"]
    assert "left out" not in capsys.readouterr().err


def test_a_shorter_run_is_named_and_ends_the_curve(tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    write_run(tmp_path, "Any-v0", "SAC", 1, continuous_rows(100.0, 20_000))
    short = write_run(tmp_path, "Any-v0", "SAC", 2, continuous_rows(100.0, 15_000))
    write_run(tmp_path, "Any-v0", "IV-SAC", 1, continuous_rows(100.0, 10_000))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    stderr = capsys.readouterr().err
    assert f"shorter: {short} ends at step 15000, another run of SAC at step 20000" in stderr
    assert stderr.count("shorter: ") == 1
    ends = [line.get_xdata()[-1] for line in figures["Any-v0"].axes[0].lines]
    assert ends == [15_000, 10_000]


def test_a_run_that_ended_solved_is_not_short(tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    good_runs(tmp_path)
    write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(None, 500))
    write_run(tmp_path, "LunarLander-v3", "DQN", 4, discrete_rows(120, 120))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    assert "shorter: " not in capsys.readouterr().err
    mean, _, solved = figures["LunarLander-v3"].axes
    line = mean.lines[0]
    # At the end, three runs hold their score of 200 and one is at 150.
    assert line.get_xdata()[-1] == 500
    assert line.get_ydata()[-1] == pytest.approx(187.5)
    assert line.get_ydata()[0] == pytest.approx(150)
    assert list(solved.lines[0].get_xdata()) == [0, 120, 200, 300, 500]
    assert list(solved.lines[0].get_ydata()) == [0, 0.25, 0.5, 0.75, 0.75]


# ---------------------------------------------------------------------------- unfinished runs
def test_unfinished_runs_are_drawn_on_demand(tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    good_runs(tmp_path)
    path = write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(None, 50), status="running")
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"global_step": 510, "charts/ep')
    assert draw(tmp_path, out=tmp_path / "a") == 0
    assert legend(figures["LunarLander-v3"]) == ["DQN (2 runs)"]
    assert f"left out {path}: it is not finished (status: running)\n" in capsys.readouterr().err
    assert draw(tmp_path, out=tmp_path / "b", unfinished=True) == 0
    figure = figures["LunarLander-v3"]
    assert legend(figure) == ["DQN (2 runs)", "DQN, unfinished (1 run)"]
    lines = figure.axes[0].lines
    assert lines[0].get_xdata()[-1] == 300
    assert lines[1].get_xdata()[-1] == 50
    assert [line.get_linestyle() for line in lines[:2]] == ["-", "--"]
    assert "left out" not in capsys.readouterr().err
    for name in ("table1.md", "runs.csv"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_only_unfinished_runs(tmp_path: Path, figures: dict):
    write_run(tmp_path, "LunarLander-v3", "DQN", 3, discrete_rows(None, 50), status="running")
    assert draw(tmp_path, out=tmp_path / "out") == 1
    assert not figures
    assert draw(tmp_path, out=tmp_path / "out", unfinished=True) == 0
    assert legend(figures["LunarLander-v3"]) == ["DQN, unfinished (1 run)"]
    assert not (tmp_path / "out").exists()


def test_of_one_seed_the_finished_run_counts(tmp_path: Path, figures: dict, capsys: pytest.CaptureFixture):
    running = write_run(tmp_path / "a", "LunarLander-v3", "DQN", 1, discrete_rows(None, 50), status="running")
    write_run(tmp_path / "b", "LunarLander-v3", "DQN", 1, discrete_rows(200, 300))
    assert draw(tmp_path / "a", tmp_path / "b", out=tmp_path / "out", unfinished=True) == 0
    assert legend(figures["LunarLander-v3"]) == ["DQN (1 run)"]
    assert f"left out {running}: it repeats the seed 1" in capsys.readouterr().err


# ---------------------------------------------------------------------------- figures
def test_axes_say_what_the_runs_count(tmp_path: Path, figures: dict):
    """By the rows, not by the environment; rows of both kinds are not drawn in one figure."""
    write_run(tmp_path, "Unheard-v0", "DQN", 1, discrete_rows(150, 300), solved_at=200)
    write_run(tmp_path, "Unheard-v1", "DQN", 1, discrete_rows(150, 300))
    write_run(tmp_path, "Unheard-v0", "SAC", 1, continuous_rows(5.0, 20_000))
    write_run(tmp_path, "LunarLander-v3", "SAC", 1, continuous_rows(5.0, 20_000))
    write_run(tmp_path, "LunarLander-v3", "DQN", 1, discrete_rows(150, 300))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    labels = {}
    for figure in figures.values():
        first = figure.axes[0]
        key = (figure.get_suptitle().split(" ")[0], *legend(figure))
        labels[key] = (first.get_xlabel(), first.get_ylabel(), len(figure.axes))
    by_episode = ("training episode", "evaluation return\n(mean of 100)")
    by_step = ("step", "evaluation return\n(mean of 10)")
    assert labels == {
        ("Unheard-v0", "DQN (1 run)"): (*by_episode, 3),  # its score is known: how many are solved
        ("Unheard-v1", "DQN (1 run)"): (*by_episode, 2),
        ("Unheard-v0", "SAC (1 run)"): (*by_step, 2),
        ("LunarLander-v3", "SAC (1 run)"): (*by_step, 2),
        ("LunarLander-v3", "DQN (1 run)"): (*by_episode, 3),
    }
    assert table(tmp_path / "out" / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "150-150-150 (1)"


def test_a_continuous_curve_is_the_mean_of_ten_evaluations(tmp_path: Path, figures: dict):
    write_run(tmp_path, "Any-v0", "SAC", 1, continuous_rows(20.0, 20_000))
    write_run(tmp_path, "Any-v0", "SAC", 2, continuous_rows(60.0, 20_000))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    line = figures["Any-v0"].axes[0].lines[0]
    # Of the runs' returns 1, 2, ... 20 and three times as much: the mean of 11 to 20 in the end, of one at first.
    assert line.get_ydata()[-1] == pytest.approx(2 * 15.5)
    assert line.get_ydata()[0] == pytest.approx(2 * 1)
    band = figures["Any-v0"].axes[0].collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(31 + 15.5)  # standard error of 15.5 and 46.5


def test_uncertainties_are_medians_over_runs_on_axes_of_their_own(tmp_path: Path, figures: dict):
    for seed, factor in ((1, 1.0), (2, 2.0), (3, 1000.0)):
        rows = with_uncertainty(
            discrete_rows(150, 300),
            target_variance_mean=4.0 * factor,
            target_variance_median=2.0 * factor,
            effective_batch_size=30.0 * factor,
            predicted_variance_mean=7.0,
        )
        write_run(tmp_path, "LunarLander-v3", "IV-DQN", seed, rows)
    write_run(tmp_path, "LunarLander-v3", "DQN", 1, discrete_rows(150, 300))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    figure = figures["LunarLander-v3-variance"]
    panels = {axes.get_title(): axes for axes in figure.axes}
    values = {title: {float(value) for value in axes.lines[0].get_ydata()} for title, axes in panels.items()}
    assert values == {"mean variance": {8.0}, "median variance": {4.0}, "effective batch size": {60.0}}
    assert [axes.get_yscale() for axes in panels.values()] == ["log", "log", "linear"]
    for axes in figure.axes:
        assert len(axes.get_shared_y_axes().get_siblings(axes)) == 1
        assert axes.get_xlabel() == "training episode"
        assert axes.lines[0].get_xdata()[-1] == 300  # of row 300, at step 3000
    assert legend(figure) == ["IV-DQN (3 runs)"]
    assert "median over runs" in figure.get_suptitle()


def test_uncertainties_of_critics_and_actors(tmp_path: Path, figures: dict):
    rows = continuous_rows(1.0, 20_000)
    both = with_uncertainty(rows, critic_effective_batch_size=20.0, actor_effective_batch_size=10.0)
    write_run(tmp_path, "Any-v0", "IV-SAC", 1, both)
    write_run(tmp_path, "Any-v0", "SunriseSAC", 1, with_uncertainty(rows, critic_variance_mean=5.0))
    assert draw(tmp_path, out=tmp_path / "out") == 0
    figure = figures["Any-v0-variance"]
    found = []
    for axes in figure.axes:
        ends = [float(line.get_ydata()[-1]) for line in axes.lines if len(line.get_ydata())]
        found.append((axes.get_title(), axes.get_xlabel(), ends))
    assert found == [
        ("mean variance", "step", [5.0]),
        ("effective batch size", "step", [20.0]),
        ("mean variance", "step", []),
        ("effective batch size", "step", [10.0]),
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["targets", "", "actors", ""]


def test_many_systems_get_a_panel_each(tmp_path: Path, figures: dict):
    systems = ["DQN", "BootstrapDQN", "SunriseDQN", "IV-DQN"]
    for number, system in enumerate(systems):
        rows = with_uncertainty(discrete_rows(None, 500, 10.0 * number), target_variance_mean=1.0 + number)
        write_run(tmp_path, "LunarLander-v3", system, 1, rows)
    for number, weighting in enumerate(("l2", "uwac", "sunrise"), start=4):
        rows = with_uncertainty(discrete_rows(None, 500, 10.0 * number), target_variance_mean=1.0 + number)
        write_run(tmp_path, "LunarLander-v3", weighting, 1, rows, script="ivdqn", weighting=weighting)
    assert draw(tmp_path, out=tmp_path / "out") == 0
    order = [*systems, "L2+VarEnsembleDQN", "Sunrise+VarEnsembleDQN", "UWAC+VarEnsembleDQN"]
    figure = figures["LunarLander-v3"]
    assert [title.replace("\n", " ") for title in panel_titles(figure)] == [f"{name} (1 run)" for name in order]
    heights = [-50, -40, -30, -20, -10, 10, 0]
    for axes, height in zip(figure.axes, heights, strict=True):
        coloured = [line for line in axes.lines if line.get_color() not in (plot.PALE, "grey")]
        assert [line.get_ydata()[-1] for line in coloured] == [height]
        assert len([line for line in axes.lines if line.get_color() == plot.PALE]) == 7
    variances = figures["LunarLander-v3-variance"].axes
    assert len(variances) == 7
    for axes, value in zip(variances, (1, 2, 3, 4, 5, 7, 6), strict=True):
        coloured = [line for line in axes.lines if line.get_color() != plot.PALE]
        assert [line.get_ydata()[-1] for line in coloured] == [value]


# ---------------------------------------------------------------------------- statistics
def test_statistics_by_hand():
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 100.0])
    assert plot.interquartile_mean(values) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert plot.standard_error(np.array([2.0, 4.0, 9.0])) == pytest.approx(13**0.5 / 3**0.5)
    for share in (0.25, 0.5, 0.75):
        assert plot.percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))
    assert plot.percentile(np.array([1.0, np.inf, np.inf]), 0.25) == np.inf
    assert plot.percentile(np.array([1.0, 3.0, np.inf]), 0.25) == 2.0
    assert list(plot.moving_mean(np.array([1.0, 2.0, 6.0, 10.0]), 2)) == [1.0, 1.5, 4.0, 8.0]
    x, y = np.array([3.0, 5.0]), np.array([1.0, 5.0, 7.0])
    assert plot.probability_of_improvement(x, y) == pytest.approx((1 + 0 + 0 + 1 + 0.5 + 0) / 6)
    assert plot.probability_of_improvement(x, y, np.array([9.0]), np.array([1.0])) == pytest.approx((2.5 / 6 + 1) / 2)
    assert plot.probability_of_improvement(np.array([-np.inf]), np.array([-np.inf])) == 0.5


def test_the_interval_resamples_within_each_stratum():
    """Two strata far apart: the mean of a stratified sample hardly moves, that of a plain one moves widely."""
    rng = np.random.default_rng(1)
    strata = [rng.normal(0, 1, 20), rng.normal(1000, 1, 20)]

    def mean(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.concatenate(strata, axis).mean(axis)

    low, high = plot.interval(mean, strata)
    half = 1.96 * np.sqrt(np.var(strata[0]) + np.var(strata[1])) / np.sqrt(20) / 2
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    low, high = plot.interval(mean, [np.concatenate(strata)])
    assert high - low > 100
    assert np.isnan(plot.interval(mean, [np.array([1.0])])).all()
    sample = rng.normal(0, 1, 200)
    low, high = plot.interval(mean, [sample])
    assert (low, high) == pytest.approx(
        scipy.stats.norm.interval(0.95, sample.mean(), sample.std() / 200**0.5), abs=0.03
    )
