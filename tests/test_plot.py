"""plot.py on synthetic runs whose answers are known by hand."""

import csv
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from conftest import ROOT

import plot


def write_run(folder: Path, env_id: str, system: str, seed: int, rows: list[dict], status: str = "finished") -> Path:
    path = folder / f"{env_id.split(':')[-1]}__{system}__{seed}"
    path.mkdir(parents=True)
    args = {"env_id": env_id, "seed": seed, "exp_name": system}
    (path / "config.json").write_text(json.dumps({"status": status, "args": args}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def discrete_rows(solved: int | None, episodes: int, score: float = 200.0, variance: bool = False) -> list[dict]:
    """A mean of 100 evaluations that reaches the score at the given episode."""
    rows = []
    for episode in range(1, episodes + 1):
        value = score if solved is not None and episode >= solved else score - 50
        row = {"global_step": 10 * episode, "charts/episode": episode, "charts/eval_return": value}
        rows.append(row | {"charts/eval_return_mean100": value})
        if variance:
            spread = {"uncertainty/target_variance_mean": 4.0, "uncertainty/target_variance_median": 2.0}
            rows.append({"global_step": 10 * episode} | spread)
    return rows


def continuous_rows(last: float, steps: int = 200_000) -> list[dict]:
    return [{"global_step": step, "charts/eval_return": last * step / steps} for step in range(1000, steps + 1, 1000)]


def run_plot(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "plot.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def table(path: Path) -> dict[str, dict[str, str]]:
    with open(path, newline="") as file:
        return {next(iter(row.values())): row for row in csv.DictReader(file)}


def test_tables_of_known_runs(tmp_path: Path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    for seed, solved in enumerate([100, 200, 300, 400, None], start=1):
        write_run(runs, "LunarLander-v3", "DQN", seed, discrete_rows(solved, 500))
        write_run(
            runs, "LunarLander-v3", "IV-DQN", seed, discrete_rows(100 + 10 * seed, 100 + 10 * seed, variance=True)
        )
    for scale, solved in (("0.1", 100), ("10", 120)):
        env_id = f"paper_envs:CartpoleNoise{scale}-v0"
        write_run(runs, env_id, "IV-DQN", 1, discrete_rows(solved, 300, 750.0))
    for seed in (1, 2, 3):
        write_run(runs, "paper_envs:MBBL-Hopper-v0", "SAC", seed, continuous_rows(1000.0 * seed))
        write_run(runs, "paper_envs:MBBL-Hopper-v0", "IV-SAC", seed, continuous_rows(2500.0))
    result = run_plot(runs, "--out", out)
    assert result.returncode == 0, result.stderr
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
    names = {path.name for path in out.iterdir()}
    for name in ("LunarLander-v3", "Cartpole-Noise", "MBBL-Hopper-v0", "LunarLander-v3-variance"):
        assert {f"{name}.png", f"{name}.svg"} <= names
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_a_suite_draws_its_own_systems_only(tmp_path: Path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    for system in ("DQN", "IV-DQN", "L2+VarEnsembleDQN", "IV-DQN-lambda=5"):
        write_run(runs, "LunarLander-v3", system, 1, discrete_rows(150, 300))
    write_run(runs, "CartPole-v1", "DQN", 1, discrete_rows(150, 300))
    for suite, systems in (("ablations-dqn", "DQN, IV-DQN, L2+VarEnsembleDQN"), ("lambda", "IV-DQN, IV-DQN-lambda=5")):
        result = run_plot(runs, "--out", out, "--suite", suite)
        assert result.returncode == 0, result.stderr
        text = (out / f"{suite}-LunarLander-v3.svg").read_text()
        for system in ("DQN (1 run)", "IV-DQN (1 run)", "L2+VarEnsembleDQN", "IV-DQN-lambda=5"):
            assert (f"<!-- {system}" in text) == (system.removesuffix(" (1 run)") in systems.split(", ")), (
                suite,
                system,
            )
    assert not list(out.glob("table*"))
    result = run_plot(runs, "--out", out, "--suite", "table1")
    assert (out / "table1.md").exists()
    assert not list(out.glob("*CartPole*"))
    for system in ("BootstrapDQN", "SunriseDQN"):
        assert f"missing: LunarLander-v3, {system}, seeds 1" in result.stderr
    for env_id in ("MountainCar-v0", "CartpoleNoise3-v0"):
        assert f"missing: {env_id}, all systems" in result.stderr


def test_what_cannot_be_used_is_named_and_left_out(tmp_path: Path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    for seed in (1, 2):
        write_run(runs, "LunarLander-v3", "IV-DQN", seed, discrete_rows(150, 300))
        write_run(runs, "LunarLander-v3", "DQN", seed, discrete_rows(200, 300))
    bad = {
        "unfinished": write_run(runs, "LunarLander-v3", "DQN", 3, discrete_rows(100, 120), status="running"),
        "cut": write_run(runs, "LunarLander-v3", "DQN", 4, discrete_rows(100, 300)),
        "empty": write_run(runs, "LunarLander-v3", "DQN", 5, []),
        "short": write_run(runs, "LunarLander-v3", "DQN", 6, discrete_rows(None, 120)),
        "configless": write_run(runs, "LunarLander-v3", "DQN", 7, discrete_rows(100, 300)),
    }
    text = (bad["cut"] / "metrics.jsonl").read_text()
    (bad["cut"] / "metrics.jsonl").write_text(text[:-20])
    (bad["configless"] / "config.json").unlink()
    (runs / "notes.jsonl.gz").write_bytes(b"not gzip")
    damaged = bytearray(gzip.compress(b"{}" * 1000))
    damaged[15:20] = b"\xff" * 5
    (runs / "damaged.jsonl.gz").write_bytes(damaged)
    result = run_plot(runs, "--out", out)
    assert result.returncode == 0, result.stderr
    for path in (*bad.values(), runs / "notes.jsonl.gz", runs / "damaged.jsonl.gz"):
        assert result.stderr.count(f"left out {path}: ") == 1, path
    assert "(2 runs)" in (out / "LunarLander-v3.svg").read_text()
    assert "(3 runs)" not in (out / "LunarLander-v3.svg").read_text()
    assert table(out / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "200-200-200 (2)"
    empty = run_plot(tmp_path / "nothing")
    assert (empty.returncode, empty.stderr.count("\n")) == (2, 1)
    (tmp_path / "nothing").mkdir()
    assert run_plot(tmp_path / "nothing").returncode == 1
    assert run_plot("--out", out).returncode == 2


def test_several_folders_are_read_as_one_and_the_first_wins(tmp_path: Path):
    one, two, out = tmp_path / "one", tmp_path / "two", tmp_path / "out"
    write_run(one, "LunarLander-v3", "DQN", 1, discrete_rows(200, 200))
    write_run(two, "LunarLander-v3", "DQN", 1, discrete_rows(300, 300))
    write_run(two, "LunarLander-v3", "DQN", 2, discrete_rows(400, 400))
    result = run_plot(one, two, "--out", out)
    assert result.returncode == 0, result.stderr
    assert table(out / "table1.csv")["DQN"]["LunarLander-v3: ours"] == "250-300-350 (2)"


def test_an_archive_redraws_the_same(tmp_path: Path):
    for seed in (1, 2, 3):
        write_run(
            tmp_path / "runs", "LunarLander-v3", "IV-DQN", seed, discrete_rows(90 + 20 * seed, 300, variance=True)
        )
    assert run_plot(tmp_path / "runs", "--out", tmp_path / "a", "--archive", tmp_path / "archive").returncode == 0
    shutil.rmtree(tmp_path / "runs")
    assert len(list((tmp_path / "archive").iterdir())) == 3
    assert run_plot(tmp_path / "archive", "--out", tmp_path / "b").returncode == 0
    write_run(tmp_path / "archive", "LunarLander-v3", "IV-DQN", 1, discrete_rows(110, 300))
    assert (
        "(3 runs)"
        in run_plot(tmp_path / "archive", "--out", tmp_path / "c").stdout
        + (tmp_path / "c" / "LunarLander-v3.svg").read_text()
    )
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_statistics_by_hand():
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 100.0])
    assert plot.interquartile_mean(values) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert plot.standard_error(np.array([2.0, 4.0, 9.0])) == pytest.approx(13**0.5 / 3**0.5)
    for share in (0.25, 0.5, 0.75):
        assert plot.percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))
    assert plot.percentile(np.array([1.0, np.inf, np.inf]), 0.25) == np.inf
    assert plot.percentile(np.array([1.0, 3.0, np.inf]), 0.25) == 2.0
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
