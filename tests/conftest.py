"""Shared by all tests: the scripts as modules and as commands, and an environment that is odd on demand."""

import gc
import importlib
import io
import json
import os
import runpy
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
SIGNALS = (signal.SIGINT, signal.SIGTERM)

DISCRETE = ("dqn", "bootstrap_dqn", "sunrise_dqn", "ivdqn")
# The ablations of the discrete family: the flags that turn ivdqn.py into each of them.
DISCRETE_ABLATIONS = {
    "BIV + BootstrapDQN": ["--no-variance-heads"],
    "L2 + VarEnsembleDQN": ["--weighting", "l2"],
    "BIV + VarNetworkDQN": ["--num-nets", "1"],
    "L2 + VarNetworkDQN": ["--num-nets", "1", "--weighting", "l2"],
    "UWAC + VarEnsemble": ["--weighting", "uwac"],
    "Sunrise + VarEnsemble": ["--weighting", "sunrise"],
    "constant xi": ["--xi", "10"],
    "no terminal variance": ["--no-terminal-variance"],
    "masks and priors": ["--mask-prob", "0.5", "--prior-scale", "10"],
}
# What deep Q-learning is often told to do besides.
DQN_OPTIONS = {
    "three-step targets": ["--n-step", "3"],
    "hard targets": ["--tau", "1", "--target-network-frequency", "50"],
    "fewer updates": ["--train-frequency", "4"],
    "clipped gradients": ["--max-grad-norm", "0.5"],
    "time limits as ends": ["--truncation-terminates"],
    "growing epsilon": ["--start-epsilon", "0.1", "--end-epsilon", "0.2"],
    "a buffer smaller than a batch": ["--buffer-size", "20"],
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
    "no terminal variance": ["--no-terminal-variance"],
    "a buffer smaller than a batch": ["--buffer-size", "10"],
}
SCRIPTS = (*DISCRETE, *CONTINUOUS)

VARIABLES = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MUJOCO_GL": "osmesa", "SDL_VIDEODRIVER": "dummy"}
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", SDL_VIDEODRIVER="dummy")  # for what runs in this process


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


# ---------------------------------------------------------------------------- environments
class OddEnv(gym.Env):
    """Two numbers are observed, an episode has 20 steps; each argument makes it odd in one way. It cannot be drawn."""

    made_with: ClassVar[list[dict[str, Any]]] = []

    def __init__(
        self,
        reward: float = 0.5,
        odd_reward: float | None = None,
        odd_observation: float | None = None,
        odd_step: int = 77,
        length: float = 20,
        pause: float = 0.0,
        continuous: bool = False,
        unbounded: bool = False,
        as_dict: bool = False,
        breaks: bool = False,
    ):
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.made_with.append(self.arguments)
        self.observation_space = gym.spaces.Box(-1, 1, (2,))
        if as_dict:
            goal = gym.spaces.Discrete(3)
            self.observation_space = gym.spaces.Dict({"position": self.observation_space, "goal": goal})
        self.action_space = gym.spaces.Discrete(2)
        if continuous:
            limit = np.inf if unbounded else 2.0
            self.action_space = gym.spaces.Box(-limit, limit, (2,))
        self.count = 0
        self.episode_count = 0

    def observe(self, value: float) -> Any:
        position = np.full(2, value, np.float32)
        return {"position": position, "goal": self.episode_count % 3} if self.arguments["as_dict"] else position

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.episode_count = 0
        return self.observe(0.0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        self.episode_count += 1
        time.sleep(self.arguments["pause"])
        observation, reward = 0.5, self.arguments["reward"]
        if self.count == self.arguments["odd_step"]:
            if self.arguments["breaks"]:
                raise RuntimeError("the environment broke")
            if self.arguments["odd_observation"] is not None:
                observation = self.arguments["odd_observation"]
            if self.arguments["odd_reward"] is not None:
                reward = self.arguments["odd_reward"]
        return self.observe(observation), reward, False, self.episode_count == self.arguments["length"], {}


gym.register("Odd-v0", OddEnv)
gym.register("OddNan-v0", OddEnv, kwargs={"odd_reward": float("nan")})
gym.register("OddDict-v0", OddEnv, kwargs={"as_dict": True})
gym.register("OddContinuous-v0", OddEnv, kwargs={"continuous": True})
gym.register("OddUnbounded-v0", OddEnv, kwargs={"continuous": True, "unbounded": True})
ENDLESS = ("--env-id", "Odd-v0", "--env-kwargs", "length=Infinity", "pause=0.002")


# ---------------------------------------------------------------------------- the scripts as commands
def run_script(name: str, *arguments: str, cwd: Path, **environment: str) -> SimpleNamespace:
    """Run a script as a person would, in a process of its own."""
    command = [sys.executable, str(ROOT / f"{name}.py"), *map(str, arguments)]
    variables = os.environ | VARIABLES | environment
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280)
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def execute(path: Path, arguments: tuple[str, ...], cwd: Path) -> int:
    """A script in this process, from its first line to its last; its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        patch.chdir(cwd)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def call_script(name: str | Path, *arguments: str, cwd: Path) -> SimpleNamespace:
    """As run_script, without the seconds that a new process needs to start. A Path is a script of another folder."""
    path = name if isinstance(name, Path) else ROOT / f"{name}.py"
    out, err = io.StringIO(), io.StringIO()
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with redirect_stdout(out), redirect_stderr(err):
        code = execute(path, arguments, cwd)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    gc.collect()
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def fork_script(name: str, *arguments: str, cwd: Path) -> int:
    """Start a script in a copy of this process; the caller may kill it. What it says is in cwd/out and cwd/err."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            out = open(cwd / "out", "w", buffering=1)
            err = open(cwd / "err", "w", buffering=1)
            with out, err, redirect_stdout(out), redirect_stderr(err):
                code = execute(ROOT / f"{name}.py", arguments, cwd)
        finally:
            os._exit(code)
    return pid


def wait_for(pid: int, seconds: float = 120) -> int:
    """The exit code of a fork, or minus the number of the signal that killed it."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the script has not ended in {seconds} seconds")
        time.sleep(0.01)


def wait_until_there(path: Path, pid: int, seconds: float = 120) -> None:
    """Waits for a file that a fork is to write."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), f"the script ended without {path.name}"
        assert time.monotonic() < deadline, f"no {path.name} in {seconds} seconds"
        time.sleep(0.01)


# ---------------------------------------------------------------------------- what a run leaves
def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict]:
    """The rows of a run without what depends on the clock."""
    return [{key: value for key, value in row.items() if key != "charts/SPS"} for row in read_rows(folder)]


def read_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder, by path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refusal(result: SimpleNamespace, name: str) -> str:
    """The one sentence with which a script refused what it was asked."""
    assert result.code == 2, (result.code, result.out, result.err)
    assert "Traceback" not in result.err
    (sentence,) = [line for line in result.err.splitlines() if line.startswith(f"{name}.py: ")]
    assert result.err.endswith(sentence + "\n"), result.err
    return sentence.removeprefix(f"{name}.py: ")


def wandb_records(path: Path) -> Iterator[Any]:
    """The protobuf records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or last of several
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Networks that a test makes are the same each time."""
    torch.manual_seed(0)


@pytest.fixture(params=DISCRETE)
def discrete(request: pytest.FixtureRequest) -> ModuleType:
    return script(request.param)
