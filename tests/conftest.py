"""Shared by all tests: the scripts as modules and as commands."""

import gc
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
SIGNALS = (signal.SIGINT, signal.SIGTERM)

DISCRETE = ("dqn", "bootstrap_dqn", "sunrise_dqn", "ivdqn")
# SPEC's ablations of the discrete family: the flags that turn ivdqn.py into each of them.
DISCRETE_ABLATIONS = {
    "BIV + BootstrapDQN": ["--no-variance-heads"],
    "L2 + VarEnsembleDQN": ["--weighting", "l2"],
    "BIV + VarNetworkDQN": ["--num-nets", "1"],
    "L2 + VarNetworkDQN": ["--num-nets", "1", "--weighting", "l2"],
    "UWAC + VarEnsemble": ["--weighting", "uwac"],
    "Sunrise + VarEnsemble": ["--weighting", "sunrise"],
    "constant xi": ["--xi", "10"],
    "terminal variance": ["--terminal-variance"],
    "Nelder-Mead": ["--xi-solver", "nelder-mead"],
    "masks and priors": ["--mask-prob", "0.5", "--prior-scale", "10"],
}
CONTINUOUS = ("sac", "ensemble_sac", "sunrise", "ivsac")
CONTINUOUS_ABLATIONS = {
    "BIV + EnsembleSAC": ["--no-variance-heads"],
    "L2 + VarEnsembleSAC": ["--weighting", "l2"],
    "BIV + VarNetworkSAC": ["--num-nets", "1"],
    "L2 + VarNetworkSAC": ["--num-nets", "1", "--weighting", "l2"],
    "UWAC + VarEnsemble": ["--weighting", "uwac"],
    "Sunrise + VarEnsemble": ["--weighting", "sunrise"],
    "constant xi": ["--xi", "10"],
    "Nelder-Mead": ["--xi-solver", "nelder-mead", "--updates-per-step", "0.2"],
}


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


VARIABLES = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MUJOCO_GL": "osmesa", "SDL_VIDEODRIVER": "dummy"}


def run_script(name: str, *arguments: str, cwd: Path, **environment: str) -> SimpleNamespace:
    """Run a script as a person would, in a process of its own."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, arguments)]
    variables = os.environ | VARIABLES | environment
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def call_script(name: str, *arguments: str, cwd: Path) -> SimpleNamespace:
    """The same in this process, from the first line to the last, without the seconds that a new one needs to start."""
    out, err, code, handlers = io.StringIO(), io.StringIO(), 0, [signal.getsignal(s) for s in SIGNALS]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        patch.chdir(cwd)
        try:
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    for number, handler in zip(SIGNALS, handlers, strict=True):
        signal.signal(number, handler)
    gc.collect()  # the run's files, and with them its lock
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict]:
    """The rows of a run without what depends on the clock."""
    return [{key: value for key, value in row.items() if key != "charts/SPS"} for row in read_rows(folder)]


@pytest.fixture(params=DISCRETE)
def discrete(request: pytest.FixtureRequest) -> ModuleType:
    return script(request.param)
