"""docs/weights.md: its tables are those of the committed rows, and the rows are computed as by hand."""

import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, read_checkpoint

import ivdqn

spec = importlib.util.spec_from_file_location("weights_study", ROOT / "docs" / "weights.py")
study = importlib.util.module_from_spec(spec)
spec.loader.exec_module(study)

PAGE = (ROOT / "docs" / "weights.md").read_text()
ROWS = [json.loads(line) for line in (ROOT / "results" / "weights" / "weights.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------- the page
def number(value: float) -> str:
    """Two significant digits, without an exponent."""
    return f"{float(f'{value:.2g}'):.10g}"


def spread(values: list[float]) -> str:
    return f"{number(np.median(values))} ({number(min(values))} to {number(max(values))})"


def column(name: str, reading: str, run: str = "") -> list[float]:
    """A value of the rows of a reading, for the runs whose name matches."""
    return [row[name] for row in ROWS if row["reading"] == reading and re.search(run, row["run"])]


def shares_table() -> list[str]:
    lines = []
    for reading in study.READINGS:
        sample_share = column("sample_share", reading)
        weight_share = column("weight_share", reading)
        relative = [weight / sample for weight, sample in zip(weight_share, sample_share, strict=True)]
        percents = [
            spread([100 * share for share in column(name, reading)])
            for name in ("biv_gradient_share", "gradient_share")
        ]
        cells = [reading, spread(relative), *percents, spread(column("xi", reading)), spread(column("ebs", reading))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def groups_table() -> list[str]:
    lines = []
    for name, group in {"terminal": "terminal", "one step before": "before", "all but terminal": "other"}.items():
        values = [column(f"{group}_{value}", "terminal variance") for value in ("target_variance", "squared_error")]
        values += [column(f"{group}_weight", reading) for reading in ("terminal variance", "variance 0")]
        values += [column(f"{group}_spearman", "terminal variance")]
        lines.append(f"| {' | '.join([name, *map(spread, values)])} |")
    return lines


def training_table() -> list[str]:
    lines = []
    for flag, reading in {"terminal-variance": "terminal variance", "no-terminal-variance": "variance 0"}.items():
        for episodes in (100, 150):
            run = f"^{flag}-[0-9]+-{episodes}$"
            ends = [", ".join(str(count) for count in column(name, reading, run)) for name in ("crashes", "landings")]
            errors = [spread(column(f"{group}_squared_error", reading, run)) for group in ("terminal", "other")]
            share = spread([100 * share for share in column("gradient_share", reading, run)])
            lines.append(f"| {' | '.join([f'`--{flag}`', str(episodes), *ends, *errors, share])} |")
    return lines


def test_the_tables_are_those_of_the_committed_rows():
    wanted = [*shares_table(), *groups_table(), *training_table()]
    on_page = [line for line in PAGE.splitlines() if line.startswith("| ") and re.search(r"\d to -?\d", line)]
    assert on_page == wanted


def test_the_rows_are_of_each_run_in_each_reading():
    runs = sorted(f"{no}terminal-variance-{seed}-{n}" for no in ("", "no-") for seed in (1, 2, 3) for n in (100, 150))
    assert [(row["run"], row["reading"]) for row in ROWS] == [(run, name) for run in runs for name in study.READINGS]


def test_what_the_page_concludes_holds_in_every_checkpoint():
    relative = {}
    for reading in study.READINGS:
        pairs = zip(column("weight_share", reading), column("sample_share", reading), strict=True)
        relative[reading] = [weight / sample for weight, sample in pairs]
    assert max(relative["terminal variance"]) < 1 < min(relative["variance 0"])
    for name in ("biv_gradient_share", "gradient_share"):
        terminal_variance = np.array(column(name, "terminal variance"))
        uniform = np.array(column(name, "uniform weights"))
        variance_zero = np.array(column(name, "variance 0"))
        assert (terminal_variance < uniform).all()
        assert (uniform < variance_zero).all()
    before = np.array(column("before_weight", "variance 0"))
    terminal = np.array(column("terminal_weight", "variance 0"))
    assert (terminal > 10 * before).all()
    terminal_errors = np.array(column("terminal_squared_error", "variance 0"))
    assert (terminal_errors > np.array(column("before_squared_error", "variance 0"))).sum() == 10  # of twelve
    assert (
        max(column("terminal_spearman", "terminal variance")) < 0 < min(column("other_spearman", "terminal variance"))
    )
    xi = np.array(column("xi", "terminal variance")) / np.array(column("xi", "variance 0"))
    assert f"by {100 * xi.min() - 100:.0f}% to {100 * xi.max() - 100:.0f}%" in PAGE
    gap = np.array(column("gradient_share", "variance 0")) / np.array(column("gradient_share", "terminal variance"))
    zero_at_10 = np.array(column("gradient_share", "variance 0, xi = 10"))
    assert (zero_at_10 / np.array(column("gradient_share", "terminal variance, xi = 10")) > gap).all()


def test_what_the_page_concludes_of_the_runs():
    """Trained with terminal variance ("with") or with variance 0 ("without")."""
    reading = "uniform weights"
    for episodes in (100, 150):
        with_errors = column("terminal_squared_error", reading, f"^terminal.*-{episodes}$")
        without_errors = column("terminal_squared_error", reading, f"^no-terminal.*-{episodes}$")
        assert max(without_errors) < min(with_errors)
    with_errors = column("other_squared_error", reading, "^terminal.*-150$")
    without_errors = column("other_squared_error", reading, "^no-terminal.*-150$")
    assert max(with_errors) < min(without_errors)
    assert min(column("landings", reading, "^terminal.*-150$")) > 0
    assert column("landings", reading, "^no-terminal.*-150$") == [0, 0, 0]
    between_runs = np.median(column("gradient_share", "variance 0", "^no-terminal"))
    between_runs /= np.median(column("gradient_share", "terminal variance", "^terminal"))
    shares = [np.array(column("gradient_share", reading)) for reading in ("variance 0", "terminal variance")]
    assert between_runs < (shares[0] / shares[1]).min()


# ---------------------------------------------------------------------------- what computes the rows
def make_buffer(episodes: list[tuple[int, bool]], capacity: int) -> ivdqn.ReplayBuffer:
    """Episodes of the given lengths and kinds of end, whose observations are all different."""
    example = {"observation": np.zeros(1), "next_observation": np.zeros(1), "terminated": np.float32(0)}
    buffer = ivdqn.ReplayBuffer(capacity, torch.device("cpu"), **example)
    observation = 0
    for length, terminates in episodes:
        for step in range(length):
            terminated = terminates and step == length - 1
            buffer.add(observation=observation, next_observation=observation + 1, terminated=terminated)
            observation += 1
        observation += 1  # a reset
    return buffer


def test_steps_to_end_count_to_the_terminal_transition_and_know_time_limits():
    buffer = make_buffer([(3, True), (2, False), (4, True)], capacity=20)
    assert study.steps_to_end(buffer).tolist() == [2, 1, 0, -1, -1, 3, 2, 1, 0]


def test_steps_to_end_in_a_full_ring():
    """The third episode ends at indices 0 and 1; index 2 is what is left of the first."""
    buffer = make_buffer([(3, True), (4, True), (4, True)], capacity=9)
    assert study.steps_to_end(buffer).tolist() == [1, 0, 0, 3, 2, 1, 0, 3, 2]


@pytest.mark.parametrize("terminal_variance", [True, False])
def test_weigh_agrees_with_the_loss_written_as_loops(terminal_variance: bool):
    args = ivdqn.Args(num_nets=3, batch_size=4, xi=0.1, terminal_variance=terminal_variance)
    torch.manual_seed(0)
    agent = ivdqn.Agent(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2), args)
    agent.target_network.load_state_dict(ivdqn.VarEnsembleQNetwork(2, 2, args).state_dict())
    batch = SimpleNamespace(
        observation=torch.randn(4, 2),
        action=torch.tensor([0, 1, 1, 0]),
        next_observation=torch.randn(4, 2),
        reward=torch.tensor([1.0, -100, 0.5, 2]),
        discount=torch.full((4,), 0.9),
        terminated=torch.tensor([0.0, 1, 0, 0]),
        mask=torch.ones(4, 3, dtype=torch.bool),
        steps_to_end=torch.tensor([7, 0, 1, -1]),
    )
    found = study.weigh(agent, batch, args)
    with torch.no_grad():
        mean, log_variance = (part.numpy() for part in agent.network.mean_and_log_variance(batch.observation))
        target_parts = agent.target_network.mean_and_log_variance(batch.next_observation)
        next_mean, next_log_variance = (part.numpy() for part in target_parts)
    for j in range(3):
        variances = []
        errors = []
        for k in range(4):
            alive = 1 - batch.terminated[k].item()
            best = next_mean[j, k].argmax()
            second_moment = np.mean(np.exp(next_log_variance[:, k, best]) + next_mean[:, k, best] ** 2)
            variance = 0.81 * (second_moment - next_mean[:, k, best].mean() ** 2)
            variances.append(variance if terminal_variance else variance * alive)
            target = batch.reward[k].item() + 0.9 * alive * next_mean[j, k, best]
            errors.append(mean[j, k, batch.action[k]] - target)
        total = sum(1 / (variance + 0.1) for variance in variances)
        for k in range(4):
            weight = 1 / (variances[k] + 0.1) / total
            biv_gradient = 2 * weight * abs(errors[k])
            attenuation = 2 * abs(errors[k]) / np.exp(log_variance[j, k, batch.action[k]]) / 4
            wanted = {
                "target_variance": variances[k],
                "squared_error": errors[k] ** 2,
                "weight": 4 * weight,
                "biv_gradient": biv_gradient,
                "gradient": biv_gradient + 1.5 * attenuation,
                "xi": 0.1,
                "steps_to_end": batch.steps_to_end[k].item(),
            }
            for name, value in wanted.items():
                assert found[name][j, k] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, j, k)


def test_statistics_by_hand():
    """Two minibatches of four samples and one member; only the first has a terminal sample."""
    samples = {
        "steps_to_end": [[[0, 1, 5, -1]], [[1, 2, 3, -1]]],
        "target_variance": [[[8.0, 4, 2, 1]], [[5, 6, 7, 3]]],
        "squared_error": [[[9.0, 4, 3, 1]], [[2, 8, 6, 5]]],
        "weight": [[[0.4, 0.8, 1.2, 1.6]], [[1, 1, 1, 1]]],
        "biv_gradient": [[[6.0, 1, 1, 1]], [[1, 0, 1, 1]]],
        "gradient": [[[5.0, 3, 2, 2]], [[2, 2, 2, 2]]],
        "xi": [[[3.0] * 4], [[9.0] * 4]],
    }
    row = study.statistics({name: np.array(values) for name, values in samples.items()})
    wanted = {
        "sample_share": 1 / 8,
        "weight_share": 0.4 / 8,
        "biv_gradient_share": 6 / 12,
        "gradient_share": 5 / 20,
        "xi": 3,
        "ebs": 4**2 / (0.16 + 0.64 + 1.44 + 2.56) / 4,
        "terminal_target_variance": 8,
        "terminal_squared_error": 9,
        "terminal_weight": 0.4,
        "before_target_variance": 4.5,
        "before_squared_error": 3,
        "before_weight": 0.9,
        "before_spearman": -1,
        "other_target_variance": 4,
        "other_squared_error": 4,
        "other_weight": 1,
    }
    for name, value in wanted.items():
        assert row[name] == pytest.approx(value), name
    # Ranks of the seven other variances 4 2 1 5 6 7 3 and squared errors 4 3 1 2 7 6 5, in their order.
    differences = np.array([4, 2, 1, 5, 6, 7, 3]) - np.array([4, 3, 1, 2, 7, 6, 5])
    assert row["other_spearman"] == pytest.approx(1 - 6 * (differences**2).sum() / (7 * 48))
    samples["target_variance"] = [[[0.0, 4, 2, 1]], [[5, 6, 7, 3]]]
    assert "terminal_spearman" not in study.statistics({name: np.array(values) for name, values in samples.items()})


def test_rows_and_figures_of_a_short_run(tmp_path: Path):
    run = ivdqn.train(ivdqn.Args(total_timesteps=1200, eval_every=0, runs_dir=str(tmp_path), run_name="run"))
    (tmp_path / "results/weights").mkdir(parents=True)
    (tmp_path / "docs/figures").mkdir(parents=True)
    study.main([run], tmp_path, num_batches=30)
    rows = [json.loads(line) for line in (tmp_path / "results/weights/weights.jsonl").read_text().splitlines()]
    assert [row["reading"] for row in rows] == list(study.READINGS)
    assert rows[0].keys() == ROWS[0].keys()
    terminated = read_checkpoint(run)["agent"]["buffer"]["arrays"]["terminated"]
    assert rows[0]["crashes"] + rows[0]["landings"] == terminated.sum()
    assert len(list(tmp_path.glob("docs/figures/weights-*.png"))) == 2
