"""The paper's tables and figures from folders of runs, ours beside theirs.

A run is a folder (config.json and metrics.jsonl) or its archive (NAME.jsonl.gz). Runs are one system if their script
and all arguments that change what is learned agree. What cannot be read is named on stderr and left out.

    python plot.py runs --suite table1 --out results/table1 --archive results/table1
    python plot.py results/table1 --suite table1 --out results/table1

The first line draws the runs of ./benchmark.sh table1 and archives them, the second one draws the archives anew.
"""

import csv
import functools
import gzip
import io
import json
import math
import operator
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import matplotlib as mpl
import numpy as np
import scipy.stats
import tyro

mpl.use("Agg")
import matplotlib.pyplot as plt

# ---------------------------------------------------------------------------- the paper
DQN_SYSTEMS = ["DQN", "BootstrapDQN", "SunriseDQN", "IV-DQN"]
SAC_SYSTEMS = ["SAC", "EnsembleSAC", "SunriseSAC", "IV-SAC"]
DQN_SCRIPTS = ["dqn", "bootstrap_dqn", "sunrise_dqn", "ivdqn"]
SAC_SCRIPTS = ["sac", "ensemble_sac", "sunrise", "ivsac"]
SYSTEM_OF_SCRIPT = dict(zip(DQN_SCRIPTS + SAC_SCRIPTS, DQN_SYSTEMS + SAC_SYSTEMS, strict=True))
WEIGHTINGS = {"biv": "BIV", "l2": "L2", "sunrise": "Sunrise", "uwac": "UWAC"}
DQN_ABLATIONS = ["BIV+BootstrapDQN", "L2+VarEnsembleDQN", "BIV+VarNetworkDQN", "L2+VarNetworkDQN"]
SAC_ABLATIONS = ["BIV+EnsembleSAC", "L2+VarEnsembleSAC", "BIV+VarNetworkSAC", "L2+VarNetworkSAC"]
OTHER_WEIGHTS = [f"{weighting}+VarEnsemble{family}" for weighting in ("UWAC", "Sunrise") for family in ("DQN", "SAC")]
NOISES = [f"CartpoleNoise{scale}-v0" for scale in ("0.1", "0.3", "1", "3", "10")]
MBBL = [f"MBBL-{body}-v0" for body in ("Walker2d", "HalfCheetah", "Hopper", "Ant", "SlimHumanoid")]


@dataclass
class Suite:
    """What a suite of benchmark.sh runs."""

    environments: list[str]
    systems: list[str]
    labels: str = ""  # a regular expression: what stands for the system in a run's name, if it is not the system's name


SUITES = {
    "table1": Suite(["LunarLander-v3", "MountainCar-v0", *NOISES], DQN_SYSTEMS),
    "table2": Suite(MBBL, SAC_SYSTEMS),
    "table2-100k": Suite(MBBL, SAC_SYSTEMS),
    "ablations-dqn": Suite(["LunarLander-v3", *NOISES], ["DQN", "BootstrapDQN", "IV-DQN", *DQN_ABLATIONS]),
    "ablations-sac": Suite(MBBL[:2], ["EnsembleSAC", "IV-SAC", *SAC_ABLATIONS]),
    "weighting": Suite(["LunarLander-v3", *MBBL[:2]], ["IV-DQN", "IV-SAC", *OTHER_WEIGHTS]),
    "lambda": Suite(["LunarLander-v3", *MBBL], ["IV-DQN", "IV-SAC"], r"IV-(DQN|SAC)(-lambda=.+)?"),
    "search": Suite(["LunarLander-v3", "MountainCar-v0", "CartpoleNoise1-v0"], DQN_SYSTEMS, r".+-[a-z]"),
    "search-100k": Suite(MBBL[:3], ["EnsembleSAC", "IV-SAC"], r".+-ucb=.+"),
}
COMPARES_SETTINGS = ("lambda", "search", "search-100k")  # these suites get a table of settings

# Table 1: the score at which an environment is solved, and the cap of episodes.
SOLVED = {"LunarLander-v3": (200, 500), "Cartpole-Noise": (750, 300), "MountainCar-v0": (-150, 500)}
# The paper's 25th-50th-75th percentiles, in the order of SOLVED.
PAPER_1 = {
    "DQN": ["296-316-349", "171-193-max", "304-333-403"],
    "BootstrapDQN": ["287-305-317", "160-174-196", "134-149-206"],
    "SunriseDQN": ["291-309-368", "155-165-175", "152-197-257"],
    "IV-DQN": ["220-227-239", "105-112-117", "142-163-200"],
}
# Table 2: the paper's mean and standard error after so many steps, in the order of MBBL.
PAPER_2 = {
    100_000: {
        "SAC": ["-392 ± 187", "3211 ± 136", "322 ± 177", "724 ± 29", "815 ± 74"],
        "EnsembleSAC": ["-389 ± 209", "3938 ± 112", "1597 ± 152", "852 ± 27", "1043 ± 31"],
        "SunriseSAC": ["46 ± 213", "3879 ± 204", "1618 ± 195", "834 ± 130", "1077 ± 41"],
        "IV-SAC": ["857 ± 231", "4260 ± 118", "2237 ± 116", "948 ± 46", "1122 ± 34"],
    },
    200_000: {
        "SAC": ["371 ± 189", "3978 ± 148", "1635 ± 162", "985 ± 82", "1020 ± 52"],
        "EnsembleSAC": ["1337 ± 278", "4757 ± 92", "2652 ± 91", "981 ± 65", "1294 ± 39"],
        "SunriseSAC": ["1423 ± 295", "4785 ± 228", "2572 ± 119", "1462 ± 154", "1383 ± 56"],
        "IV-SAC": ["3009 ± 193", "5451 ± 151", "2889 ± 50", "1281 ± 101", "2023 ± 114"],
    },
}

# ---------------------------------------------------------------------------- what counts
# Arguments that do not change what is learned, or that tell runs of one system apart.
NOT_SETTINGS = {
    *("env_id", "seed", "env_seed", "total_timesteps", "total_episodes", "solved_at"),
    *("exp_name", "run_name", "runs_dir", "checkpoint_every", "checkpoint_minutes", "resume", "log_every"),
    *("cuda", "compile", "num_threads", "torch_deterministic", "evaluate", "eval_episodes"),
    *("capture_video", "track", "wandb_project_name", "wandb_entity"),
}
# Arguments that the scripts got or lost over time, and what runs that do not know them did.
UNKNOWN_ARGUMENTS = {
    "train_frequency": 1,
    "target_network_frequency": 1,
    "n_step": 1,
    "truncation_terminates": False,
    "max_grad_norm": None,
    "terminal_variance": False,
    "xi_solver": "newton",
    "matmul_precision": "highest",
    "env_kwargs": [],
    "eval_env_id": None,
    "warm_start": None,
}
COUNTED = ("global_step", "charts/episode", "charts/eval_return", "charts/eval_return_mean100")
STEPS_WINDOW = 10  # evaluations in a mean of a continuous script's curve; those of the discrete scripts log theirs
EPISODES_WINDOW = 100
MAX_BYTES = 32 * 2**20  # of a run, decompressed
MAX_LINE = 2**20  # of one row, and of the configuration
MAX_NUMBER = 1e100  # so that sums of squares are finite

# ---------------------------------------------------------------------------- how it looks
# Okabe and Ito's colours, told apart by every kind of colour vision; the systems of the tables keep theirs everywhere.
COLOURS = dict(zip(DQN_SYSTEMS + SAC_SYSTEMS, 2 * ["#000000", "#0072B2", "#E69F00", "#D55E00"], strict=True))
OTHER_COLOURS = ["#009E73", "#CC79A7", "#56B4E9", "#8B6508", "#6A3D9A", "#777777"]
PALE = "#CCCCCC"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "figure.titlesize": 9,
    "pdf.fonttype": 42,
}
WIDTH = 6.8  # inches
MAX_LINES = 5  # more systems than that get a panel each
POINTS = 100  # of a curve


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs or of archives; with a suite, or of its folder
    out: Path = Path("results")  # folder of the figures and tables
    suite: Literal[*SUITES] | None = None  # only the runs of this suite of benchmark.sh
    unfinished: bool = False  # draw unfinished runs as well, as systems of their own; the tables hold finished ones
    archive: Path | None = None  # also write each finished run into this folder, as one small file


class Unusable(Exception):
    """Why a run, or a value of it, is left out."""


# ---------------------------------------------------------------------------- words
def one_line(text: object, limit: int = 300) -> str:
    """Without what would break a line or confuse a terminal."""
    printable = "".join(character if character.isprintable() else " " for character in str(text)[: 2 * limit])
    return " ".join(printable.split())[:limit]


def plain(text: object, limit: int = 60) -> str:
    """For figures and tables: a dollar sign would begin a formula, a bar end a cell."""
    return one_line(text, limit).translate({ord("$"): "_", ord("|"): "/"})


@functools.cache
def complain(text: str) -> None:
    """On stderr, each sentence once."""
    print(one_line(text), file=sys.stderr)


def safe_name(text: str, limit: int = 150) -> str:
    """A file's name, whatever the text holds: no separators, no leading dots."""
    return re.sub(r"[^\w.=+-]|^\.+", "_", text, flags=re.ASCII)[:limit] or "_"


def unique_name(name: str, taken: set[str]) -> str:
    number = 1
    found = name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.add(found)
    return found


# ---------------------------------------------------------------------------- reading
@dataclass
class ArchivedRun:
    path: Path
    name: str
    script: str
    env_id: str  # without its module
    seed: str
    args: dict[str, Any]
    settings: dict[str, str]  # the arguments that change what is learned, as texts
    config: dict[str, Any]
    rows: list[dict[str, float]]
    is_finished: bool

    def column(self, *names: str) -> np.ndarray:
        """The values of these metrics, of the rows that hold them all: (metrics, rows)."""
        values = [[float(row[name]) for name in names] for row in self.rows if all(name in row for name in names)]
        return np.array(values).reshape(-1, len(names)).T

    @functools.cached_property
    def is_by_episode(self) -> bool:
        """Whether evaluations follow training episodes (the discrete scripts) or steps (the continuous ones)."""
        evaluations = [row for row in self.rows if "charts/eval_return" in row]
        return all("charts/episode" in row and "charts/eval_return_mean100" in row for row in evaluations)

    @functools.cached_property
    def curve(self) -> np.ndarray:
        """Episodes or steps, and the mean of the last evaluations: (2, evaluations)."""
        if self.is_by_episode:
            return self.column("charts/episode", "charts/eval_return_mean100")
        step, value = self.column("global_step", "charts/eval_return")
        return np.array([step, moving_mean(value, STEPS_WINDOW)])

    @property
    def last_return(self) -> float:
        return self.curve[1][-1]

    @property
    def last_step(self) -> float:
        return self.column("global_step")[0][-1]

    @property
    def group_name(self) -> str:
        """The environment as the paper's tables call it: all noise scales of Cartpole-Noise are one."""
        return "Cartpole-Noise" if self.env_id in NOISES else self.env_id

    @property
    def system_name(self) -> str:
        """As the paper calls it, by its script and arguments."""
        if self.script not in ("ivdqn", "ivsac"):
            return SYSTEM_OF_SCRIPT.get(self.script, plain(self.script))
        family = "DQN" if self.script == "ivdqn" else "SAC"
        weighting = self.settings.get("weighting", "biv")
        has_heads = self.settings.get("variance_heads") != "false"
        is_ensemble = self.settings.get("num_nets") != "1"
        if weighting == "biv" and has_heads and is_ensemble:
            return f"IV-{family}"
        if has_heads:
            network = "VarEnsemble" if is_ensemble else "VarNetwork"
        elif is_ensemble:
            network = "Bootstrap" if family == "DQN" else "Ensemble"
        else:
            network = ""
        return f"{WEIGHTINGS.get(weighting, plain(weighting))}+{network}{family}"

    @property
    def label(self) -> str:
        """What stands for the system in the name of the run: {environment}__{label}__{seed}."""
        parts = self.name.split("__")
        names_script = len(parts) < 3 or parts[1] in (self.script, self.args.get("exp_name"))
        return self.system_name if names_script else parts[1]


def is_number(value: object) -> bool:
    """Finite, and not so large that its square is not."""
    return type(value) in (int, float) and -MAX_NUMBER < value < MAX_NUMBER


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the last values, of fewer in the beginning."""
    total = np.concatenate(([0], np.cumsum(values)))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return (total[end] - total[start]) / (end - start)


def open_file(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():
        raise Unusable(f"{path.name} is no file")
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, decompressed; never more than the limits at a time."""
    total = 0
    with open_file(path) as file:
        while line := file.readline(MAX_LINE + 1):
            total += len(line)
            if len(line) > MAX_LINE:
                raise Unusable(f"a line is longer than {MAX_LINE} bytes")
            if total > MAX_BYTES:
                raise Unusable(f"it holds more than {MAX_BYTES} bytes")
            yield line


def parse_object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise Unusable(f"'{one_line(found, 40)}' is no JSON object")
    return found


def read_rows(path: Path, lines: Iterator[bytes], may_be_cut: bool) -> list[dict[str, float]]:
    """The numbers of the rows, without losses."""
    rows = []
    left_out = []
    for line_number, line in enumerate(lines, start=1):
        if may_be_cut and not line.endswith(b"\n"):
            break  # the run is writing it
        kept = {}
        for name, value in parse_object(line).items():
            if name.startswith(("losses/", "exploration/")):
                continue
            if is_number(value):
                kept[name] = value
            elif name in COUNTED:
                raise Unusable(f"row {line_number}: {name} is '{one_line(value, 40)}', not a number")
            else:
                left_out.append(f"{one_line(name, 60)} of row {line_number}")
        if "global_step" not in kept:
            raise Unusable(f"row {line_number} has no global_step")
        if len(kept) > 1:
            rows.append(kept)
    if left_out:
        complain(f"left out {len(left_out)} values of {path} that are not numbers, the first is {left_out[0]}")
    return rows


def value_text(value: object) -> str:
    """One text for one value: 1 and 1.0 are the same, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def read_settings(args: dict[str, Any]) -> dict[str, str]:
    settings = UNKNOWN_ARGUMENTS | {name: value for name, value in args.items() if name not in NOT_SETTINGS}
    if settings.get("eval_env_id") == args["env_id"]:
        settings["eval_env_id"] = None
    settings["env_module"] = args["env_id"].rpartition(":")[0]
    return {name: value_text(value) for name, value in settings.items()}


def read_seed(args: dict[str, Any]) -> str:
    """As benchmark.sh writes it; env_seed is seed if it is not given."""
    seed = args.get("seed")
    env_seed = seed if args.get("env_seed") is None else args["env_seed"]
    if type(seed) is not int or type(env_seed) is not int:
        raise Unusable("its configuration has no whole number as seed")
    return str(seed) if seed == env_seed else f"e{env_seed}-{seed}"


def read_run(path: Path, with_unfinished: bool) -> ArchivedRun:
    if path.is_dir():
        config = parse_object(b"".join(read_lines(path / "config.json")))
        lines = read_lines(path / "metrics.jsonl")
    else:
        lines = read_lines(path)
        config = parse_object(next(lines, b""))
    is_finished = config.get("status") == "finished"
    if not is_finished and not with_unfinished:
        raise Unusable(f"it is not finished (status: {one_line(config.get('status'), 40)})")
    args = config.get("args")
    if not isinstance(args, dict) or not isinstance(args.get("env_id"), str):
        raise Unusable("its configuration has no args with an env_id")
    if not re.fullmatch(r"[\w:./-]{1,100}", args["env_id"]):
        raise Unusable(f"'{one_line(args['env_id'], 40)}' is no name of an environment")
    run = ArchivedRun(
        path=path,
        name=safe_name(path.name.removesuffix(".jsonl.gz"), 240),
        script=str(config.get("script", args.get("exp_name"))).removesuffix(".py"),
        env_id=args["env_id"].rpartition(":")[2],
        seed=read_seed(args),
        args=args,
        settings=read_settings(args),
        config=config,
        rows=read_rows(path, lines, may_be_cut=not is_finished),
        is_finished=is_finished,
    )
    if not run.curve.size:
        raise Unusable("it holds no evaluation")
    for name in ("global_step", "charts/episode"):
        if (np.diff(run.column(name)[0]) < 0).any():
            raise Unusable(f"its {name} goes backwards")
    return run


def belongs(run: ArchivedRun, suite: Suite) -> bool:
    labels = suite.labels or "|".join(map(re.escape, suite.systems))
    if run.env_id not in suite.environments or not re.fullmatch(labels, run.label):
        return False
    if run.system_name not in suite.systems:
        complain(f"left out {run.path}: by its arguments it is {run.system_name}")
        return False
    return True


def find_paths(folder: Path, suite: str | None) -> list[Path]:
    """The runs and archives in a folder, or in the suite's own folder in it."""
    if suite and (folder / suite).is_dir():
        folder = folder / suite
    found = set(folder.glob("*.jsonl.gz"))
    for name in ("config.json", "metrics.jsonl"):
        found.update(path.parent for path in folder.glob(f"*/{name}"))
    return sorted(found)


def read_runs(folders: tuple[Path, ...], suite: str | None, with_unfinished: bool) -> list[ArchivedRun]:
    """All runs of a suite. What cannot be read is named."""
    runs = []
    for path in [path for folder in folders for path in find_paths(folder, suite)]:
        try:
            run = read_run(path, with_unfinished)
            if suite is None or belongs(run, SUITES[suite]):
                runs.append(run)
        except Unusable as reason:
            complain(f"left out {path}: {reason}")
        except Exception as error:  # whatever else a damaged file leads to: the others are drawn
            complain(f"left out {path}: {type(error).__name__}: {error}")
    return without_repeated_seeds(runs)


def without_repeated_seeds(runs: list[ArchivedRun]) -> list[ArchivedRun]:
    """Of two runs of one seed the finished one counts, or else the first."""
    counted = {}
    for run in sorted(runs, key=operator.attrgetter("is_finished"), reverse=True):
        identity = (run.env_id, run.script, *sorted(run.settings.items()), run.seed)
        first = counted.setdefault(identity, run)
        if first is not run and first.path != run.path:
            complain(f"left out {run.path}: it repeats the seed {one_line(run.seed, 40)} of {first.path}")
    return list(counted.values())


# ---------------------------------------------------------------------------- systems
@dataclass
class System:
    """The runs of one script with one setting in one group, either finished or unfinished."""

    base_name: str  # as the paper calls it, or in a search the label of its runs
    is_finished: bool
    settings: dict[str, str]
    cells: dict[str, list[ArchivedRun]] = field(default_factory=dict)  # environment -> runs
    name: str = ""
    colour: str = PALE

    @property
    def runs(self) -> list[ArchivedRun]:
        return [run for runs in self.cells.values() for run in runs]

    @property
    def system_name(self) -> str:
        return self.runs[0].system_name

    @property
    def title(self) -> str:
        count = len(self.runs)
        return f"{self.name} ({count} run{'s' if count > 1 else ''})"

    @property
    def line_style(self) -> str:
        return "-" if self.is_finished else "--"


@dataclass
class Group:
    """An environment, or those that the paper draws as one; its runs all count episodes, or all count steps."""

    name: str
    file_name: str
    is_by_episode: bool
    systems: list[System] = field(default_factory=list)

    def __post_init__(self) -> None:
        window = EPISODES_WINDOW if self.is_by_episode else STEPS_WINDOW
        self.x_label = "training episode" if self.is_by_episode else "step"
        self.y_label = f"evaluation return\n(mean of {window})"
        # The episode by which Table 1 wants it solved.
        self.cap = SOLVED[self.name][1] if self.name in SOLVED else None

    @property
    def runs(self) -> list[ArchivedRun]:
        return [run for system in self.systems for run in system.runs]

    @property
    def finished(self) -> list[System]:
        return [system for system in self.systems if system.is_finished]

    @functools.cached_property
    def score(self) -> float | None:
        """The mean return at which it is solved: the paper's, or what all runs were told."""
        if not self.is_by_episode:
            return None
        if self.name in SOLVED:
            return SOLVED[self.name][0]
        scores = {run.args.get("solved_at") for run in self.runs if is_number(run.args.get("solved_at"))}
        return scores.pop() if len(scores) == 1 else None

    @property
    def title(self) -> str:
        is_held = any(ends_solved(run, self) for run in self.runs)
        return f"{self.name} (a run that ended solved keeps its last value)" if is_held else self.name


def differing_arguments(systems: list[System]) -> list[str]:
    names = sorted({name for system in systems for name in system.settings})
    return [name for name in names if len({system.settings.get(name) for system in systems}) > 1]


def setting_text(system: System, names: list[str]) -> str:
    parts = []
    for name in names:
        short = "lambda" if name == "loss_attenuation_weight" else name
        parts.append(f"{short}={system.settings.get(name, 'unknown')}")
    return plain(", ".join(parts), 200)


def name_systems(systems: list[System]) -> None:
    """Of several with one name, each also bears the arguments in which they differ."""
    taken = set()
    for system in systems:
        name = system.base_name
        rivals = [other for other in systems if other.base_name == name]
        arguments = setting_text(system, differing_arguments(rivals))
        if arguments:
            name = f"{name} ({arguments})"
        if not system.is_finished:
            name = f"{name}, unfinished"
        system.name = unique_name(name, taken)


def colour_systems(systems: list[System]) -> None:
    others = [system for system in systems if system.name not in COLOURS]
    for system in systems:
        system.colour = COLOURS.get(system.name, system.colour)
    for number, system in enumerate(others):
        system.colour = OTHER_COLOURS[number % len(OTHER_COLOURS)]


def table_order(system: System) -> tuple[int, str]:
    """The systems of the tables come first, in their order."""
    known = [*COLOURS, system.system_name]
    return known.index(system.system_name), system.name


def group_runs(runs: list[ArchivedRun], is_search: bool) -> list[Group]:
    groups = {}
    systems = {}
    file_names = set()
    for run in runs:
        group_key = (run.group_name, run.is_by_episode)
        if group_key not in groups:
            file_name = unique_name(safe_name(run.group_name), file_names)
            groups[group_key] = Group(run.group_name, file_name, run.is_by_episode)
        key = (*group_key, run.script, run.is_finished, *sorted(run.settings.items()))
        if key not in systems:
            base_name = run.label if is_search else run.system_name
            systems[key] = System(base_name, run.is_finished, run.settings)
            groups[group_key].systems.append(systems[key])
        systems[key].cells.setdefault(run.env_id, []).append(run)
    for group in groups.values():
        name_systems(group.systems)
        group.systems.sort(key=table_order)
        colour_systems(group.systems)
    return list(groups.values())


def report_short_runs(group: Group) -> None:
    """Names the runs that end before others of their system, unless they end solved."""
    for system in group.systems:
        most_steps = max(run.last_step for run in system.runs)
        longest = max(run.curve[0][-1] for run in system.runs)
        for run in system.runs:
            # A run ends after so many steps or so many episodes: a short one has fewer of both.
            is_short = run.last_step < 0.99 * most_steps and run.curve[0][-1] < 0.99 * longest
            if is_short and not ends_solved(run, group):
                complain(
                    f"shorter: {run.path} ends at step {run.last_step:.0f}, another run of {system.name} at step "
                    f"{most_steps:.0f}: the curve ends with the shortest run"
                )


def report_missing(groups: list[Group], suite_name: str) -> None:
    """Names the environments of a suite without any run, and the seeds that a system lacks and another one has."""
    runs = [run for group in groups for run in group.runs]
    for env_id in SUITES[suite_name].environments:
        here = [run for run in runs if run.env_id == env_id]
        if not here:
            complain(f"missing: {env_id}, all systems")
            continue
        found = [run.system_name for run in here]
        for system_name in SUITES[suite_name].systems:
            if system_name not in found and not suite_name.startswith("table"):
                continue  # not each suite has each system in each environment
            missing = {run.seed for run in here} - {run.seed for run in here if run.system_name == system_name}
            if missing:
                complain(f"missing: {env_id}, {system_name}, seeds {', '.join(sorted(missing, key=seed_order))}")


def seed_order(seed: str) -> tuple[int, str]:
    return len(seed), seed


# ---------------------------------------------------------------------------- statistics
Measure = Callable[[ArchivedRun], float]


def solved_episode(run: ArchivedRun, group: Group) -> float:
    """The episode of the first evaluation, from the hundredth on, whose last 100 average the score, or infinity."""
    episode, mean = run.curve
    has_hundred = np.arange(1, len(mean) + 1) >= EPISODES_WINDOW
    solved = episode[(mean >= group.score) & has_hundred]
    if group.cap is not None:
        solved = solved[solved <= group.cap]
    if len(solved):
        return solved[0]
    if group.cap is not None and episode[-1] < group.cap:
        raise Unusable(f"it ended after {episode[-1]:.0f} of {group.cap} episodes without being solved")
    return np.inf


def ends_solved(run: ArchivedRun, group: Group) -> bool:
    try:
        return group.score is not None and run.is_finished and bool(np.isfinite(solved_episode(run, group)))
    except Unusable:
        return False


def return_at(run: ArchivedRun, group: Group, step: int) -> float:
    """The mean of the ten evaluations up to a step."""
    steps, value = run.curve
    if steps[-1] < step:
        raise Unusable(f"it ended at step {steps[-1]:.0f}, before {step}")
    reached = value[steps <= step]
    if not len(reached):
        raise Unusable(f"its first evaluation is after step {step}")
    return reached[-1]


def measured(runs: list[ArchivedRun], measure: Measure) -> np.ndarray:
    """The values of a measure; runs without one are named and left out."""
    values = []
    for run in runs:
        try:
            values.append(measure(run))
        except Unusable as reason:
            complain(f"left out {run.path} of the table: {reason}")
    return np.array(values)


def percentile(values: np.ndarray, share: float) -> float:
    """By linear interpolation, as numpy's, but for infinite values too."""
    ordered = np.sort(values)
    place = share * (len(ordered) - 1)
    low = ordered[math.floor(place)]
    high = ordered[math.ceil(place)]
    if low == high:
        return low
    return low + (high - low) * (place - math.floor(place))


def standard_error(values: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    count = values.shape[-1]
    if count < 2:
        return np.zeros(values.shape[:-1])
    return values.std(-1, ddof=1) / np.sqrt(count)


def interquartile_mean(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half of all runs."""
    return scipy.stats.trim_mean(np.concatenate(strata, axis), 0.25, axis)


def probability_of_improvement(*strata: np.ndarray, axis: int = -1) -> np.ndarray:
    """P(x > y) + P(x = y) / 2, for strata x1, y1, x2, y2, ..., averaged over the pairs."""
    found = []
    for ours, theirs in zip(strata[::2], strata[1::2], strict=True):
        x = np.expand_dims(ours, -1)
        y = np.expand_dims(theirs, -2)
        wins = (x > y) + 0.5 * (x == y)
        found.append(wins.mean((-1, -2)))
    return np.mean(found, 0)


def interval(statistic: Callable[..., np.ndarray], strata: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile interval of a statistic by bootstrap within each stratum; nan if one holds a single run."""
    if min(values.shape[-1] for values in strata) < 2:
        nothing = np.full(np.shape(statistic(*strata)), np.nan)
        return nothing, nothing
    rng = np.random.default_rng(0)
    options = {"vectorized": True, "axis": -1, "method": "percentile", "n_resamples": 2000, "batch": 200}
    return scipy.stats.bootstrap(strata, statistic, rng=rng, **options).confidence_interval


# ---------------------------------------------------------------------------- figures
def common_curve(system: System, group: Group) -> tuple[np.ndarray, list[np.ndarray]] | None:
    """Places (points,), and for each environment the values of its runs (points, runs).

    From the latest start to the earliest end. A run that ended solved keeps its last value.
    """
    start = max(run.curve[0][0] for run in system.runs)
    open_ends = [run.curve[0][-1] for run in system.runs if not ends_solved(run, group)]
    end = min(open_ends) if open_ends else max(run.curve[0][-1] for run in system.runs)
    if end < start:
        complain(f"no curve of {system.name} on {group.name}: its runs have no {group.x_label} in common")
        return None
    x = np.linspace(start, end, POINTS)
    strata = []
    for runs in system.cells.values():
        values = [np.interp(x, *run.curve) for run in runs]
        strata.append(np.array(values).T)
    return x, strata


def draw_mean(axes: plt.Axes, x: np.ndarray, strata: list[np.ndarray], system: System) -> None:
    values = np.concatenate(strata, -1)
    mean = values.mean(-1)
    error = standard_error(values)
    axes.plot(x, mean, color=system.colour, linestyle=system.line_style)
    axes.fill_between(x, mean - error, mean + error, color=system.colour, alpha=0.2, linewidth=0)


def draw_interquartile_mean(axes: plt.Axes, x: np.ndarray, strata: list[np.ndarray], system: System) -> None:
    axes.plot(x, interquartile_mean(*strata), color=system.colour, linestyle=system.line_style)
    low, high = interval(interquartile_mean, strata)
    axes.fill_between(x, low, high, color=system.colour, alpha=0.2, linewidth=0)


def draw_share_solved(axes: plt.Axes, system: System, group: Group) -> None:
    """The share of runs that are solved by an episode: a staircase."""
    values = measured(system.runs, functools.partial(solved_episode, group=group))
    if not len(values):
        return
    solved = np.sort(values[np.isfinite(values)])
    end = group.cap or max(run.curve[0][-1] for run in group.runs)
    share = np.arange(len(solved) + 1) / len(values)
    axes.step([0, *solved, end], [*share, share[-1]], where="post", color=system.colour)


def draw_score(axes: plt.Axes, group: Group) -> None:
    if group.score is not None:
        axes.axhline(group.score, color="grey", linewidth=0.7, linestyle=":", zorder=0)


def new_figure(rows: int, columns: int, row_height: float, share: bool = False) -> tuple[plt.Figure, np.ndarray]:
    size = (WIDTH, row_height * rows + 0.6)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=share, sharey=share)


def add_legend(figure: plt.Figure, systems: list[System]) -> None:
    """Below the panels."""
    titles = [textwrap.fill(system.title, 100) for system in systems]
    handles = [plt.Line2D([], [], color=system.colour, linestyle=system.line_style) for system in systems]
    columns = max(1, 110 // (max(map(len, titles)) + 6))
    figure.legend(handles, titles, loc="outside lower center", ncols=min(columns, len(titles)))


def save_figure(figure: plt.Figure, out: Path, name: str) -> None:
    resolution = min(200, 2**15 / figure.get_figheight())  # a PNG has at most 2**16 lines
    for kind, options in (("png", {"dpi": resolution}), ("pdf", {"metadata": {"CreationDate": None}})):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, **options)
        write(out, f"{name}.{kind}", picture.getvalue())
    plt.close(figure)
    print(out / f"{name}.png")


def plot_curves(group: Group, out: Path, name: str) -> None:
    """Learning curves: a few systems in the same panels, many in a panel each."""
    curves = {}
    for system in group.systems:
        curve = common_curve(system, group)
        if curve is not None:
            curves[system.name] = curve
    drawn = [system for system in group.systems if system.name in curves]
    if not drawn:
        return
    if len(drawn) > MAX_LINES:
        figure = plot_small_multiples(group, drawn, curves)
    else:
        figure = plot_together(group, drawn, curves)
    save_figure(figure, out, name)


def plot_together(group: Group, systems: list[System], curves: dict[str, Any]) -> plt.Figure:
    """Mean with standard error, interquartile mean with its interval, and the share of runs that are solved."""
    has_score = group.score is not None
    figure, grid = new_figure(1, 3 if has_score else 2, row_height=2.1)
    panels = grid[0]
    for system in systems:
        draw_mean(panels[0], *curves[system.name], system)
        draw_interquartile_mean(panels[1], *curves[system.name], system)
        if has_score and system.is_finished:
            draw_share_solved(panels[2], system, group)
    panels[1].sharey(panels[0])
    panels[0].set_title("mean ± standard error")
    panels[1].set_title("interquartile mean, 95% interval")
    panels[0].set_ylabel(group.y_label)
    for axes in panels[:2]:
        draw_score(axes, group)
    for axes in panels:
        axes.set_xlabel(group.x_label)
    if has_score:
        panels[2].set_title("share of runs solved")
        panels[2].set_ylim(-0.02, 1.02)
    figure.suptitle(group.title)
    add_legend(figure, systems)
    return figure


def plot_small_multiples(group: Group, systems: list[System], curves: dict[str, Any]) -> plt.Figure:
    """A panel for each system: its mean with standard error, before the means of all others."""
    columns = 4
    figure, grid = new_figure(math.ceil(len(systems) / columns), columns, row_height=1.6, share=True)
    for axes in grid.flat[len(systems) :]:
        axes.remove()
    for number, (axes, system) in enumerate(zip(grid.flat, systems, strict=False)):
        for x, strata in curves.values():
            axes.plot(x, np.concatenate(strata, -1).mean(-1), color=PALE, linewidth=0.7, zorder=1)
        draw_mean(axes, *curves[system.name], system)
        draw_score(axes, group)
        axes.set_title(textwrap.fill(system.title, 28), color=system.colour, fontsize=7)
        if number + columns >= len(systems):  # nothing is below it
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(group.x_label)
    for axes in grid[:, 0]:
        axes.set_ylabel(group.y_label, fontsize=7)
    figure.suptitle(f"{group.title}\nmean ± standard error, the other systems in grey")
    return figure


# Appendix E. A script logs a quantity of its targets under one of these names, and IV-SAC one of its actors as well.
PARTS = {"targets": ["", "target_", "critic_"], "actors": ["actor_"]}
QUANTITIES = {
    "variance_mean": "mean variance",
    "variance_median": "median variance",
    "effective_batch_size": "effective batch size",
}


def logged_uncertainty(run: ArchivedRun, part: str, quantity: str) -> np.ndarray:
    """Episodes or steps, and values: (2, rows)."""
    found = np.zeros((2, 0))
    for prefix in PARTS[part]:
        values = run.column("global_step", f"uncertainty/{prefix}{quantity}")
        if values.shape[1] > found.shape[1]:
            found = values
    if run.is_by_episode and found.size:
        episode, end = run.column("charts/episode", "global_step")
        found[0] = np.interp(found[0], end, episode)
    return found


def uncertainty_curve(system: System, part: str, quantity: str) -> np.ndarray | None:
    """The median over runs, where all of them have values: (2, points)."""
    curves = [logged_uncertainty(run, part, quantity) for run in system.runs]
    curves = [curve for curve in curves if curve.size]
    if not curves:
        return None
    x = np.linspace(max(curve[0][0] for curve in curves), min(curve[0][-1] for curve in curves), POINTS)
    if x[-1] < x[0]:
        return None
    return np.array([x, np.median([np.interp(x, *curve) for curve in curves], 0)])


def plot_uncertainty(group: Group, out: Path, name: str) -> None:
    """The variances and the effective batch size, each on axes of its own; many systems get a row each."""
    curves = {}
    for system in group.systems:
        for part in PARTS:
            for quantity in QUANTITIES:
                curve = uncertainty_curve(system, part, quantity)
                if curve is not None:
                    curves[system.name, part, quantity] = curve
    if not curves:
        return
    systems = [system for system in group.systems if any(key[0] == system.name for key in curves)]
    parts = [part for part in PARTS if any(key[1] == part for key in curves)]
    quantities = [quantity for quantity in QUANTITIES if any(key[2] == quantity for key in curves)]
    rows = [(part, systems) for part in parts]
    if len(systems) > MAX_LINES:
        rows = [(part, [system]) for part in parts for system in systems]
    figure, grid = new_figure(len(rows), len(quantities), row_height=1.9)
    for panels, (part, coloured) in zip(grid, rows, strict=True):
        for axes, quantity in zip(panels, quantities, strict=True):
            for system in systems:
                curve = curves.get((system.name, part, quantity), np.zeros((2, 0)))
                is_coloured = system in coloured
                colour = system.colour if is_coloured else PALE
                axes.plot(*curve, color=colour, linestyle=system.line_style, zorder=3 if is_coloured else 1)
            has_positive = any((line.get_ydata() > 0).any() for line in axes.lines)
            if quantity != "effective_batch_size" and has_positive:
                axes.set_yscale("log")
            axes.set_title(QUANTITIES[quantity])
            axes.set_xlabel(group.x_label)
        panels[0].set_ylabel(part if coloured == systems else f"{part}\n{textwrap.fill(coloured[0].title, 24)}")
    figure.suptitle(f"{group.name}: uncertainties of a minibatch, the median over runs")
    if len(systems) <= MAX_LINES:
        add_legend(figure, systems)
    save_figure(figure, out, name)


# ---------------------------------------------------------------------------- tables
def write(folder: Path, name: str, data: bytes) -> None:
    """Into this folder, whatever the name holds. What had the name, be it a link, is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{os.getpid()}.part"
    part.unlink(missing_ok=True)
    with open(part, "xb") as file:
        file.write(data)
    part.replace(folder / safe_name(name, 250))


def write_csv(out: Path, name: str, rows: list[list[str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write(out, f"{name}.csv", text.getvalue().encode())


def write_table(out: Path, name: str, header: list[str], rows: list[list[str]], note: str) -> None:
    """As CSV and as Markdown."""
    write_csv(out, name, [header, *rows])
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    text = "\n".join([*lines, "", note, ""])
    write(out, f"{name}.md", text.encode())
    print(text)


def episode_text(episode: float) -> str:
    return "max" if np.isinf(episode) else f"{episode:.0f}"


def percentiles_text(values: np.ndarray) -> str:
    return "-".join(episode_text(percentile(values, share)) for share in (0.25, 0.5, 0.75))


def mean_text(values: np.ndarray) -> str:
    if len(values) == 1:
        return f"{values[0]:.0f}"
    return f"{values.mean():.0f} ± {standard_error(values):.0f}"


def table_header(corner: str, environments: list[str]) -> list[str]:
    header = [corner]
    for environment in environments:
        header += [f"{environment}: ours", f"{environment}: paper"]
    return header


def table_rows(
    groups: list[Group | None],
    paper: dict[str, list[str]],
    measure: Callable[[ArchivedRun, Group], float],
    text_of: Callable[[np.ndarray], str],
) -> list[list[str]]:
    """A row for each system of the paper; several, if its runs differ in their arguments."""
    found = [system for group in groups if group for system in group.finished]
    rows = []
    for system_name, published in paper.items():
        names = [system.name for system in found if system.system_name == system_name]
        for name in dict.fromkeys(names or [system_name]):
            row = [name]
            for group, paper_text in zip(groups, published, strict=True):
                systems = [system for system in group.finished if system.name == name] if group else []
                runs = [run for system in systems for run in system.runs]
                values = measured(runs, functools.partial(measure, group=group))
                row += [f"{text_of(values)} ({len(values)})" if len(values) else "-", paper_text]
            rows.append(row)
    return rows


def write_table_1(groups: dict[str, Group], out: Path) -> None:
    """25th-50th-75th percentile of the episodes to solve, and the number of runs."""
    columns = [groups.get(environment) for environment in SOLVED]
    rows = table_rows(columns, PAPER_1, solved_episode, percentiles_text)
    note = "25th-50th-75th percentile; in brackets, runs. An unsolved run counts as max."
    write_table(out, "table1", table_header("episodes to solve", list(SOLVED)), rows, note)


def write_table_2(groups: dict[str, Group], out: Path, name: str, all_steps: list[int]) -> None:
    """Mean and standard error of the return after so many steps, and the number of runs."""
    columns = [groups.get(environment) for environment in MBBL]
    rows = []
    for step in all_steps:
        found = table_rows(columns, PAPER_2[step], functools.partial(return_at, step=step), mean_text)
        rows += [[f"{step // 1000}k {row[0]}", *row[1:]] for row in found]
    bodies = [environment.split("-")[1] for environment in MBBL]
    note = "Mean ± standard error of the last ten evaluations; in brackets, runs. The paper: 25 runs a cell."
    write_table(out, name, table_header("return", bodies), rows, note)


def improvement(group: Group, ours: str, measure: Measure) -> list[list[str]]:
    """Probability that a run of our system is better than one of each other system, with its 95% interval."""
    rows = []
    for system in group.finished:
        for other in group.finished:
            if system.system_name != ours or other.system_name == ours:
                continue
            strata = []
            for env_id, runs in system.cells.items():
                pair = [measured(runs, measure), measured(other.cells.get(env_id, []), measure)]
                if len(pair[0]) and len(pair[1]):
                    strata += pair
            if not strata:
                continue
            probability = probability_of_improvement(*strata)
            low, high = interval(probability_of_improvement, strata)
            spread = "" if np.isnan(low) else f" ({low:.2f} to {high:.2f})"
            rows.append([f"{system.name} over {other.name}", f"{probability:.2f}{spread}"])
    return rows


def fewer_episodes(run: ArchivedRun, group: Group) -> float:
    return -solved_episode(run, group)


def write_improvement(
    table_1: dict[str, Group], table_2: dict[str, Group], out: Path, name: str, all_steps: list[int]
) -> None:
    rows = []
    for environment, group in table_1.items():
        found = improvement(group, "IV-DQN", functools.partial(fewer_episodes, group=group))
        rows += [[environment, *row] for row in found]
    for environment, group in table_2.items():
        for step in all_steps:
            found = improvement(group, "IV-SAC", functools.partial(return_at, group=group, step=step))
            rows += [[f"{environment}, {step // 1000}k", *row] for row in found]
    if rows:
        note = "Probability that one run is better than another; in brackets, 95% interval by stratified bootstrap."
        write_table(out, name, ["environment", "systems", "probability"], rows, note)


def write_runs(groups: list[Group], out: Path, name: str) -> None:
    """What each run came to: the episode at which it was solved, and the last point of its curve."""
    rows = [["run", "solved at episode", "last mean evaluation return"]]
    for group in groups:
        for run in [run for system in group.finished for run in system.runs]:
            solved = ""
            if group.score is not None:
                values = measured([run], functools.partial(solved_episode, group=group))
                solved = "".join(map(episode_text, values))
            rows.append([run.name, solved, f"{run.last_return:.1f}"])
    if len(rows) > 1:
        write_csv(out, name, rows)


def write_settings(group: Group, out: Path, name: str) -> None:
    """What each setting of each system came to, seed by seed."""
    has_score = group.score is not None
    measure = functools.partial(solved_episode, group=group) if has_score else operator.attrgetter("last_return")
    seeds = sorted({run.seed for system in group.finished for run in system.runs}, key=seed_order)
    rows = []
    for system in group.finished:
        rivals = [other for other in group.finished if other.system_name == system.system_name]
        texts = {}
        for run in system.runs:
            values = measured([run], measure)
            texts[run.seed] = "".join(map(episode_text, values))
        values = measured(system.runs, measure)
        middle = episode_text(percentile(values, 0.5)) if len(values) else "-"
        cells = [texts.get(seed) or "-" for seed in seeds]
        rows.append([system.name, setting_text(system, differing_arguments(rivals)), *cells, middle])
    if rows:
        header = ["system", "arguments", *(f"seed {seed}" for seed in seeds), "median"]
        note = "Episodes to solve." if has_score else f"Return at the end: the mean of {STEPS_WINDOW} evaluations."
        write_table(out, name, header, rows, note)


# ---------------------------------------------------------------------------- the command line
def archive_runs(runs: list[ArchivedRun], folder: Path) -> None:
    """One file a run: the configuration, then the rows without the losses. The same run gives the same bytes."""
    taken = {}
    for run in [run for run in runs if run.is_finished]:
        first = taken.setdefault(run.name, run)
        if first is not run:
            complain(f"not archived: {run.path}, which has the name of {first.path}")
            continue
        args = run.args | {"runs_dir": "runs"}  # no paths of the machine it ran on
        lines = [run.config | {"args": args}, *run.rows]
        text = "\n".join(map(json.dumps, lines))
        write(folder, f"{run.name}.jsonl.gz", gzip.compress(text.encode(), mtime=0))


def refusal(args: Args) -> str | None:
    """What is wrong with the folders, in a sentence."""
    if not args.runs:
        return "plot.py takes folders of runs: python plot.py runs"
    for folder in args.runs:
        if not folder.is_dir():
            return f"plot.py takes folders of runs, not '{folder}'"
    for flag, folder in (("--out", args.out), ("--archive", args.archive)):
        for place in (folder, *folder.parents) if folder else ():
            if place.exists() and not place.is_dir():
                return f"plot.py: {flag} takes a folder, and '{place}' is a file"
    return None


def draw(args: Args, runs: list[ArchivedRun]) -> None:
    groups = group_runs(runs, is_search=args.suite in ("search", "search-100k"))
    prefix = f"{args.suite}-" if args.suite else ""
    for group in groups:
        report_short_runs(group)
        plot_curves(group, args.out, prefix + group.file_name)
        if args.suite in COMPARES_SETTINGS:
            write_settings(group, args.out, prefix + group.file_name)
        else:
            plot_uncertainty(group, args.out, f"{prefix}{group.file_name}-variance")
    write_runs(groups, args.out, f"{prefix}runs")
    if args.suite in COMPARES_SETTINGS:
        return
    if args.suite:
        report_missing(groups, args.suite)
    finished = {
        group.name: group for group in groups if group.finished and group.is_by_episode == (group.name in SOLVED)
    }
    table_1 = {name: finished[name] for name in SOLVED if name in finished}
    table_2 = {name: finished[name] for name in MBBL if name in finished}
    all_steps = [100_000] if args.suite == "table2-100k" else [100_000, 200_000]
    if table_1 and args.suite in (None, "table1"):
        write_table_1(table_1, args.out)
    if table_2 and args.suite in (None, "table2", "table2-100k"):
        write_table_2(table_2, args.out, args.suite or "table2", all_steps)
    write_improvement(table_1, table_2, args.out, f"{prefix}improvement", all_steps)


def main(args: Args) -> int:
    """Returns the exit code."""
    complain.cache_clear()
    plt.rcParams.update(STYLE)
    wrong = refusal(args)
    if wrong:
        complain(wrong)
        return 2
    runs = read_runs(args.runs, args.suite, args.unfinished)
    if not runs:
        kind = "run" if args.unfinished else "finished run"
        of_suite = f" of {args.suite}" if args.suite else ""
        complain(f"plot.py: {' '.join(map(str, args.runs))} holds no {kind}{of_suite}")
        return 1
    try:
        if args.archive:
            archive_runs(runs, args.archive)
        draw(args, runs)
    except OSError as error:
        complain(f"plot.py cannot write: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
