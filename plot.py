"""Learning curves and solved episodes of the runs in a folder.

A run is a folder with config.json and metrics.jsonl (or metrics.jsonl.gz). Runs whose names differ only in their last
number, the seed, are one system. Unreadable and unfinished runs are named and left out.

    python plot.py runs --out results --solved 200
"""

import gzip
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import tyro

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]  # folder of runs
    out: Path = Path("results")  # folder for the figures
    solved: float | None = None  # mean of the last 100 evaluation returns at which the environment counts as solved


def read_runs(folder: Path) -> dict[str, dict[str, dict[int, list[dict]]]]:
    """Environment -> system -> seed -> rows that hold an evaluation return."""
    found: dict = defaultdict(lambda: defaultdict(dict))
    for path in sorted(folder.glob("*/metrics.jsonl*")):
        try:
            config = json.loads((path.parent / "config.json").read_text())
            text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
            rows = [json.loads(line) for line in text.splitlines()]
            if config["status"] != "finished":
                raise ValueError(f"its status is {config['status']}")
        except (OSError, ValueError, KeyError) as error:
            print(f"left out {path.parent}: {error}", file=sys.stderr)
            continue
        system = re.sub(r"[-_]+\d+(__\d+)?$", "", path.parent.name).removeprefix(f"{config['args']['env_id']}__")
        rows = [row for row in rows if "charts/eval_return_mean100" in row]
        found[config["args"]["env_id"]][system][config["args"]["seed"]] = rows
    return found


def solved_episode(rows: list[dict], score: float) -> int | None:
    """The first episode whose last 100 evaluation returns average at least the score (paper, Table 1)."""
    full = (row for row in rows if row["charts/episode"] >= 100)
    return next((row["charts/episode"] for row in full if row["charts/eval_return_mean100"] >= score), None)


def plot_curves(env_id: str, systems: dict[str, dict[int, list[dict]]], args: Args) -> Path:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for colour, (system, seeds) in zip(COLOURS, systems.items(), strict=False):
        length = min(len(rows) for rows in seeds.values())
        curves = np.array([[row["charts/eval_return_mean100"] for row in rows[:length]] for rows in seeds.values()])
        mean, error = curves.mean(0), curves.std(0, ddof=min(1, len(curves) - 1)) / np.sqrt(len(curves))
        axes.plot(
            np.arange(1, length + 1),
            mean,
            color=colour,
            label=f"{system} ({len(curves)} seed{'s' * (len(curves) > 1)})",
        )
        axes.fill_between(np.arange(1, length + 1), mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
    if args.solved is not None:
        axes.axhline(args.solved, color="grey", linewidth=0.8, linestyle="--")
    axes.set(title=env_id, xlabel="training episode", ylabel="evaluation return, mean of last 100")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / (re.sub(r"[^\w.-]", "_", env_id) + ".png")
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    args = tyro.cli(Args)
    for env_id, systems in read_runs(args.runs).items():
        print(f"{env_id}: {plot_curves(env_id, systems, args)}")
        for system, seeds in systems.items() if args.solved is not None else ():
            episodes = {seed: solved_episode(rows, args.solved) for seed, rows in sorted(seeds.items())}
            print(f"  {system}: solved at episode", ", ".join(f"{e or 'max'} (seed {s})" for s, e in episodes.items()))
