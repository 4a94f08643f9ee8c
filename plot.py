"""The paper's tables and figures from a folder of runs, ours beside theirs.

A run is a folder (config.json and metrics.jsonl) or its archive (NAME.jsonl.gz), named {environment}__{system}__{seed}.
Only finished runs count; unfinished, unreadable and missing ones are named on stderr and left out.

    python plot.py runs --out results --suite table1
"""

import csv
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import numpy as np
import scipy.stats
import tyro

mpl.use("Agg")
import matplotlib.pyplot as plt

Cell = dict[str, list["FinishedRun"]]  # environment (several noise scales can be one cell) -> runs

SYSTEMS = {"dqn": "DQN", "bootstrap_dqn": "BootstrapDQN", "sunrise_dqn": "SunriseDQN", "ivdqn": "IV-DQN"}
SYSTEMS |= {"sac": "SAC", "ensemble_sac": "EnsembleSAC", "sunrise": "SunriseSAC", "ivsac": "IV-SAC"}
NOISES = [f"CartpoleNoise{scale}-v0" for scale in ("0.1", "0.3", "1", "3", "10")]
MBBL = [f"MBBL-{body}-v0" for body in ("Walker2d", "HalfCheetah", "Hopper", "Ant", "SlimHumanoid")]
SUITES = {  # environments and systems of each suite, the latter as regular expressions
    "table1": (["LunarLander-v3", "MountainCar-v0", *NOISES], "DQN|BootstrapDQN|SunriseDQN|IV-DQN"),
    "table2": (MBBL, "SAC|EnsembleSAC|SunriseSAC|IV-SAC"),
    "ablations-dqn": (
        ["LunarLander-v3", *NOISES],
        r"DQN|BootstrapDQN|IV-DQN|BIV\+BootstrapDQN|L2\+VarEnsembleDQN|(BIV|L2)\+VarNetworkDQN",
    ),
    "ablations-sac": (MBBL[:2], r"EnsembleSAC|IV-SAC|BIV\+EnsembleSAC|L2\+VarEnsembleSAC|(BIV|L2)\+VarNetworkSAC"),
    "lambda": (["LunarLander-v3", *MBBL], "IV-(DQN|SAC)(-lambda=.*)?"),
    "weighting": (["LunarLander-v3", *MBBL[:2]], r"IV-(DQN|SAC)|(UWAC|Sunrise)\+VarEnsemble(DQN|SAC)"),
}
# Table 1: environment -> score at which it is solved, cap of episodes; system -> the paper's percentiles.
SOLVED = {"LunarLander-v3": (200, 500), "Cartpole-Noise": (750, 300), "MountainCar-v0": (-150, 500)}
PAPER_1 = {
    "DQN": ("296-316-349", "171-193-max", "304-333-403"),
    "BootstrapDQN": ("287-305-317", "160-174-196", "134-149-206"),
    "SunriseDQN": ("291-309-368", "155-165-175", "152-197-257"),
    "IV-DQN": ("220-227-239", "105-112-117", "142-163-200"),
}
# Table 2: the paper's mean and standard error after 100k and 200k steps.
PAPER_2 = {
    (100_000, "SAC"): ("-392 ± 187", "3211 ± 136", "322 ± 177", "724 ± 29", "815 ± 74"),
    (100_000, "EnsembleSAC"): ("-389 ± 209", "3938 ± 112", "1597 ± 152", "852 ± 27", "1043 ± 31"),
    (100_000, "SunriseSAC"): ("46 ± 213", "3879 ± 204", "1618 ± 195", "834 ± 130", "1077 ± 41"),
    (100_000, "IV-SAC"): ("857 ± 231", "4260 ± 118", "2237 ± 116", "948 ± 46", "1122 ± 34"),
    (200_000, "SAC"): ("371 ± 189", "3978 ± 148", "1635 ± 162", "985 ± 82", "1020 ± 52"),
    (200_000, "EnsembleSAC"): ("1337 ± 278", "4757 ± 92", "2652 ± 91", "981 ± 65", "1294 ± 39"),
    (200_000, "SunriseSAC"): ("1423 ± 295", "4785 ± 228", "2572 ± 119", "1462 ± 154", "1383 ± 56"),
    (200_000, "IV-SAC"): ("3009 ± 193", "5451 ± 151", "2889 ± 50", "1281 ± 101", "2023 ± 114"),
}
# Okabe and Ito's colours, told apart by every kind of colour vision; the systems of the tables keep theirs everywhere.
COLOURS = {"DQN": "#000000", "BootstrapDQN": "#0072B2", "SunriseDQN": "#E69F00", "IV-DQN": "#D55E00"}
COLOURS |= {"SAC": "#000000", "EnsembleSAC": "#0072B2", "SunriseSAC": "#E69F00", "IV-SAC": "#D55E00"}
OTHERS = ["#009E73", "#CC79A7", "#56B4E9", "#999999", "#8B6508", "#6A3D9A"]
STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
STYLE |= {"lines.linewidth": 1.2, "legend.frameon": False, "svg.hashsalt": "iv-rl", "axes.titlesize": 8}


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs or of their archives
    out: Path = Path("results")  # folder for figures and tables
    suite: Literal[*SUITES] | None = None  # only the systems of this suite of benchmark.sh
    archive: Path | None = None  # also write each finished run into this folder, as one small file


@dataclass
class FinishedRun:
    name: str
    env_id: str
    system: str
    seed: str
    config: dict
    rows: list[dict]

    @property
    def group(self) -> str:
        """The environment as the paper's tables call it: all noise scales of Cartpole-Noise are one."""
        return "Cartpole-Noise" if self.env_id.startswith("CartpoleNoise") else self.env_id

    def column(self, *names: str) -> np.ndarray:
        """The values of these metrics, of the rows that hold them all: (metrics, rows)."""
        return np.array([[row[name] for name in names] for row in self.rows if all(name in row for name in names)]).T

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Episodes and the mean of 100 evaluations (discrete), or steps and the mean of 10 (continuous)."""
        if len(found := self.column("charts/episode", "charts/eval_return_mean100")):
            return found[0], found[1]
        step, value = self.column("global_step", "charts/eval_return")
        total = np.concatenate(([0], np.cumsum(value)))
        start = np.maximum(np.arange(len(value)) - 9, 0)
        return step, (total[1:] - total[start]) / (np.arange(len(value)) + 1 - start)


def read_run(path: Path) -> FinishedRun:
    if path.is_dir():
        config, text = json.loads((path / "config.json").read_text()), (path / "metrics.jsonl").read_text()
    else:
        first, _, text = gzip.decompress(path.read_bytes()).decode().partition("\n")
        config = json.loads(first)
    if config["status"] != "finished":
        raise ValueError(f"it is not finished (status: {config['status']})")
    name = path.name.removesuffix(".jsonl.gz")
    env_id = config["args"]["env_id"].split(":")[-1]
    system, seed = (*name.split("__")[1:], config["args"]["exp_name"], str(config["args"]["seed"]))[:2]
    rows = [json.loads(line) for line in text.splitlines()]
    if not any("charts/eval_return" in row for row in rows):
        raise ValueError("it holds no evaluation")
    return FinishedRun(name, env_id, SYSTEMS.get(system, system), seed, config, rows)


def complain(what: object) -> None:
    print(what, file=sys.stderr)


def read_runs(folders: tuple[Path, ...], suite: str | None) -> list[FinishedRun]:
    """All finished runs of a suite; of several with one name, that of the first folder."""
    runs, paths = {}, []
    for folder in folders:
        found = {path.parent for name in ("config.json", "metrics.jsonl") for path in folder.glob(f"*/{name}")}
        paths += sorted(found | {*folder.glob("*.jsonl.gz")})
    for path in paths:
        try:
            run = read_run(path)
            environments, systems = SUITES.get(suite, ([run.env_id], ".*"))
            if run.env_id in environments and re.fullmatch(systems, run.system) and run.name not in runs:
                if run.group in SOLVED:
                    solved_episode(run)  # refuses a run that ended too early
                runs[run.name] = run
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            complain(f"left out {path}: {type(error).__name__}: {error}")
    return list(runs.values())


def archive(run: FinishedRun, folder: Path) -> None:
    """One file a run: the configuration, then the rows without the losses. The same run gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{k: v for k, v in row.items() if not k.startswith(("losses/", "exploration/"))} for row in run.rows]
    config = run.config | {"args": run.config["args"] | {"runs_dir": "runs"}}  # no paths of the machine it ran on
    text = "\n".join(json.dumps(row) for row in (config, *(row for row in rows if len(row) > 1)))
    (folder / f"{run.name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


# ---------------------------------------------------------------------------- statistics
def solved_episode(run: FinishedRun) -> float:
    """The first episode from the hundredth on whose last 100 evaluations average the score, or infinity."""
    score, cap = SOLVED[run.group]
    episode, mean = run.column("charts/episode", "charts/eval_return_mean100")
    solved = episode[(mean >= score) & (episode >= 100) & (episode <= cap)]
    if not len(solved) and episode[-1] < cap:
        raise ValueError(f"it ended after {episode[-1]:.0f} of {cap} episodes without being solved")
    return solved[0] if len(solved) else np.inf


def return_at(run: FinishedRun, step: int) -> float:
    """The mean of the ten evaluations up to a step."""
    steps, value = run.curve()
    if steps[-1] < step:
        raise ValueError(f"it ended at step {steps[-1]:.0f}, before {step}")
    return value[steps <= step][-1]


def percentile(values: np.ndarray, share: float) -> float:
    """By linear interpolation, as numpy's, but for infinite values too."""
    values, at = np.sort(values), share * (len(values) - 1)
    low, high = values[int(at)], values[int(np.ceil(at))]
    return low if low == high or at == int(at) else low + (high - low) * (at - int(at))


def standard_error(values: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    return values.std(-1, ddof=1) / np.sqrt(values.shape[-1]) if values.shape[-1] > 1 else 0 * values[..., 0]


def interquartile_mean(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half of all runs."""
    return scipy.stats.trim_mean(np.concatenate(strata, axis), 0.25, axis)


def probability_of_improvement(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """P(x > y) + P(x = y) / 2, for strata x1, y1, x2, y2, ..., averaged over the pairs."""
    x, y = [np.expand_dims(s, -1) for s in strata[::2]], [np.expand_dims(s, -2) for s in strata[1::2]]
    return np.mean([((a > b) + 0.5 * (a == b)).mean((-1, -2)) for a, b in zip(x, y, strict=True)], 0)


def interval(statistic, strata: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile interval of a statistic by bootstrap within each stratum; nan if one holds a single run."""
    if min(s.shape[-1] for s in strata) < 2:
        nothing = np.full(np.shape(statistic(*strata)), np.nan)
        return nothing, nothing
    options = {"vectorized": True, "axis": -1, "method": "percentile", "n_resamples": 2000, "batch": 200}
    found = scipy.stats.bootstrap(strata, statistic, **options, rng=np.random.default_rng(0))
    return found.confidence_interval


def stack(cell: Cell, measure) -> list[np.ndarray]:
    """One array of a measure's values for each environment of the cell; runs without a value are named and left out."""
    strata = []
    for runs in cell.values():
        values = []
        for run in runs:
            try:
                values.append(measure(run))
            except ValueError as error:
                complain(f"left out {run.name}: {error}")
        strata += [np.array(values)] if values else []
    return strata


# ---------------------------------------------------------------------------- figures
def line_style(system: str, systems: list[str]) -> dict:
    others = [name for name in systems if name not in COLOURS]
    return {"color": COLOURS.get(system) or OTHERS[others.index(system) % len(OTHERS)]}


def save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=200)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(f"{path}.png, .svg")


def legend(figure: plt.Figure, axes: plt.Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = 4 if max(map(len, labels)) < 24 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))


def plot_curves(group: str, cells: dict[str, Cell], path: Path) -> None:
    """Mean with standard error, interquartile mean with its interval, and how many runs are solved."""
    discrete = group in SOLVED
    figure, panels = plt.subplots(1, 2 + discrete, figsize=(6.8, 2.5), layout="constrained")
    for system, cell in cells.items():
        runs = [run for runs in cell.values() for run in runs]
        # A run that ended solved keeps its last value; otherwise a curve ends with its shortest run.
        ends = [run.curve()[0][-1] for run in runs]
        held = discrete and all(np.isfinite(solved_episode(run)) or run.curve()[0][-1] == max(ends) for run in runs)
        grid = np.linspace(max(run.curve()[0][0] for run in runs), max(ends) if held else min(ends), 100)
        strata = [np.array([np.interp(grid, *run.curve()) for run in each]).T for each in cell.values()]  # (100, runs)
        values, style = np.concatenate(strata, -1), line_style(system, list(cells))
        mean, error = values.mean(-1), standard_error(values)
        label = f"{system} ({len(runs)} run{'s' * (len(runs) > 1)})"
        panels[0].plot(grid, mean, **style, label=label)
        panels[0].fill_between(grid, mean - error, mean + error, alpha=0.2, linewidth=0, **style)
        panels[1].plot(grid, interquartile_mean(*strata), **style)
        panels[1].fill_between(grid, *interval(interquartile_mean, strata), alpha=0.2, linewidth=0, **style)
        if discrete:
            episodes = np.sort(np.concatenate([[np.inf], *stack(cell, solved_episode)]))[:-1]
            cap = SOLVED[group][1]
            steps = np.concatenate(([0], episodes[episodes <= cap], [cap]))
            share = np.arange(np.isfinite(episodes).sum() + 1) / max(len(episodes), 1)
            panels[2].step(steps, [*share, share[-1]], where="post", **style)
    panels[1].sharey(panels[0])
    panels[0].set(title="mean ± standard error")
    panels[1].set(title="interquartile mean, 95% interval")
    x, y = (
        ("training episode", "evaluation return\n(mean of 100)")
        if discrete
        else ("step", "evaluation return\n(mean of 10)")
    )
    panels[0].set_ylabel(y)
    for axes in panels:
        axes.set_xlabel(x)
    if discrete:
        panels[2].set(title="share of runs solved", ylim=(-0.02, 1.02))
        for axes in panels[:2]:
            axes.axhline(SOLVED[group][0], color="grey", linewidth=0.6, linestyle=":")
    figure.suptitle(f"{group}{discrete * ' (a run that ended solved keeps its last value)'}", fontsize=9)
    legend(figure, panels[0])
    save(figure, path)


def plot_variance(group: str, cells: dict[str, Cell], path: Path) -> None:
    """Appendix E: mean and median of the targets' variance in a minibatch, as the mean over runs."""
    figure, panels = plt.subplots(1, 2, figsize=(6.8, 2.5), layout="constrained", sharey=True)
    drawn = False
    for system, cell in cells.items():
        for axes, kind in zip(panels, ("mean", "median"), strict=True):
            curves = []
            for run in (run for runs in cell.values() for run in runs):
                found = run.column("global_step", f"uncertainty/target_variance_{kind}")
                found = found if len(found) else run.column("global_step", f"uncertainty/critic_variance_{kind}")
                if len(found):
                    ends = run.column("charts/episode", "global_step") if group in SOLVED else None
                    x = found[0] if ends is None else np.interp(found[0], ends[1], ends[0])
                    curves.append((x, found[1]))
            if curves:
                drawn = True
                grid = np.linspace(max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves), 100)
                values = np.array([np.interp(grid, x, y) for x, y in curves])
                axes.plot(grid, values.mean(0), label=system, **line_style(system, list(cells)))
            axes.set(title=f"{kind} of a minibatch", xlabel="training episode" if group in SOLVED else "step")
    panels[0].set(ylabel="target variance", yscale="log")
    figure.suptitle(group, fontsize=9)
    if drawn:
        legend(figure, panels[0])
        save(figure, path)
    plt.close(figure)


# ---------------------------------------------------------------------------- tables
def report_missing(groups: dict[str, dict[str, Cell]], seeds: dict[str, set[str]], suite: str | None) -> None:
    """Name the environments of a suite without any run, and the seeds that a system lacks and another one has."""
    for env_id in SUITES.get(suite, ((), ""))[0]:
        if env_id not in seeds:
            complain(f"missing: {env_id}, all systems")
    for cells in groups.values():
        expected = {"table1": [*PAPER_1], "table2": [name for _, name in PAPER_2]}.get(suite, [])
        for system in dict.fromkeys([*expected, *cells]):
            for env_id in sorted({env_id for each in cells.values() for env_id in each}):
                missing = seeds[env_id] - {run.seed for run in cells.get(system, {}).get(env_id, [])}
                if missing:
                    numbers = ", ".join(sorted(missing, key=lambda seed: (len(seed), seed)))
                    complain(f"missing: {env_id}, {system}, seeds {numbers}")


def cell_1(cell: Cell) -> str:
    """25th-50th-75th percentile of the episodes to solve, and the number of runs."""
    values = np.concatenate([np.zeros(0), *stack(cell, solved_episode)])
    if not len(values):
        return "-"
    found = (percentile(values, share) for share in (0.25, 0.5, 0.75))
    return "-".join("max" if np.isinf(value) else f"{value:.0f}" for value in found) + f" ({len(values)})"


def cell_2(cell: Cell, step: int) -> str:
    """Mean and standard error of the return after so many steps, and the number of runs."""
    values = np.concatenate([np.zeros(0), *stack(cell, lambda run: return_at(run, step))])
    return f"{values.mean():.0f} ± {standard_error(values):.0f} ({len(values)})" if len(values) else "-"


def improvement(cells: dict[str, Cell], ours: str, measure) -> list[list[str]]:
    """Probability that a run of our system is better than one of each baseline, with its 95% interval."""
    rows = []
    for system in [name for name in cells if name != ours and ours in cells]:
        shared = [env_id for env_id in cells[ours] if env_id in cells[system]]
        pairs = [stack({env_id: cells[each][env_id]}, measure) for env_id in shared for each in (ours, system)]
        if pairs and all(pairs):
            strata = [values for (values,) in pairs]
            low, high = interval(probability_of_improvement, strata)
            spread = "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"
            rows.append([f"{ours} over {system}", f"{probability_of_improvement(*strata):.2f}{spread}"])
    return rows


def write_table(path: Path, header: list[str], rows: list[list[str]], note: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    text = "\n".join([*lines, "", note, ""])
    path.with_suffix(".md").write_text(text)
    print(text)


def write_runs(groups: dict[str, dict[str, Cell]], path: Path) -> None:
    """What each run came to: the episode at which it was solved, and the last point of its curve."""
    rows = [["run", "solved at episode", "last mean evaluation return"]]
    for run in [run for cells in groups.values() for cell in cells.values() for runs in cell.values() for run in runs]:
        solved = solved_episode(run) if run.group in SOLVED else None
        text = "" if solved is None else "max" if np.isinf(solved) else f"{solved:.0f}"
        rows.append([run.name, text, f"{run.curve()[1][-1]:.1f}"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def write_tables(groups: dict[str, dict[str, Cell]], out: Path, suite: str | None) -> None:
    """Tables 1 and 2 in the paper's form, as far as there are runs for them, and the probabilities of improvement."""
    better = []
    if suite in (None, "table1") and any(system in PAPER_1 for g in SOLVED for system in groups.get(g, ())):
        header = ["episodes to solve", *(f"{g}: {who}" for g in SOLVED for who in ("ours", "paper"))]
        rows = []
        for system, paper in PAPER_1.items():
            cells = [cell_1(groups.get(group, {}).get(system, {})) for group in SOLVED]
            rows.append([system, *(text for pair in zip(cells, paper, strict=True) for text in pair)])
        note = "25th-50th-75th percentile; in brackets, runs. An unsolved run counts as max."
        write_table(out / "table1", header, rows, note)
    for group in [group for group in SOLVED if group in groups]:
        found = improvement(groups[group], "IV-DQN", lambda run: -solved_episode(run))
        better += [[group, *row] for row in found]
    if suite in (None, "table2") and any(group in MBBL for group in groups):
        header = ["return", *(f"{g.split('-')[1]}: {who}" for g in MBBL for who in ("ours", "paper"))]
        rows = []
        for (step, system), paper in PAPER_2.items():
            cells = [cell_2(groups.get(group, {}).get(system, {}), step) for group in MBBL]
            rows.append([f"{step // 1000}k {system}", *(x for pair in zip(cells, paper, strict=True) for x in pair)])
        note = "Mean ± standard error of the last ten evaluations; in brackets, runs. The paper: 25 runs a cell."
        write_table(out / "table2", header, rows, note)
    for group in [group for group in MBBL if group in groups]:
        for step in (100_000, 200_000):
            found = improvement(groups[group], "IV-SAC", lambda run, step=step: return_at(run, step))
            better += [[f"{group}, {step // 1000}k", *row] for row in found]
    if better:
        note = "Probability that one run is better than another; in brackets, 95% interval by stratified bootstrap."
        path = out / "-".join(filter(None, (suite, "improvement")))
        write_table(path, ["environment", "systems", "probability"], better, note)


if __name__ == "__main__":
    args = tyro.cli(Args)
    where = " ".join(map(str, args.runs))
    if not args.runs or not all(folder.is_dir() for folder in args.runs):
        complain(f"plot.py takes folders of runs, not '{where}'")
        sys.exit(2)
    plt.rcParams.update(STYLE)
    groups: dict[str, dict[str, Cell]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    seeds: dict[str, set] = defaultdict(set)
    for run in read_runs(args.runs, args.suite):
        groups[run.group][run.system][run.env_id].append(run)
        seeds[run.env_id].add(run.seed)
        if args.archive:
            archive(run, args.archive)
    if not groups:
        complain(f"plot.py: {where} holds no finished run" + (f" of {args.suite}" if args.suite else ""))
        sys.exit(1)
    order = [*COLOURS, *sorted({system for cells in groups.values() for system in cells} - set(COLOURS))]
    groups = {group: {system: cells[system] for system in order if system in cells} for group, cells in groups.items()}
    report_missing(groups, seeds, args.suite)
    for group, cells in groups.items():
        name = f"{args.suite}-{group}" if args.suite else group
        plot_curves(group, cells, args.out / name)
        plot_variance(group, cells, args.out / f"{name}-variance")
    write_runs(groups, args.out / "-".join(filter(None, (args.suite, "runs.csv"))))
    write_tables(groups, args.out, args.suite)
