"""What a user, a disk or an environment can do wrong: each ends in one sentence, and leaves the files as they were."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import pytest
import torch
import wandb
from conftest import CONTINUOUS, DISCRETE, SCRIPTS, read_checkpoint, read_rows, script
from gymnasium import spaces

ONE_OF_EACH_FAMILY = ("ivdqn", "sac")


def fails(*values: Any, reason: str) -> Any:
    """A case that the scripts do not meet yet."""
    return pytest.param(*values, marks=pytest.mark.xfail(reason=reason, strict=True))


# ---------------------------------------------------------------------------- environments
class Toy(gym.Env):
    """Two numbers are observed, an episode has ten steps; its subclasses are wrong in one way each."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    stop_at: ClassVar[int | None] = None  # the step of an environment at which its process is stopped
    stop_by: ClassVar[str] = "signal"  # or "kill": without a last checkpoint

    def __init__(self, continuous: bool = False, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1, 1, (2,))
        self.action_space = spaces.Box(-2, 2, (2,)) if continuous else spaces.Discrete(2)
        self.total_steps = 0
        self.steps = 0

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.total_steps += 1
        if self.total_steps == self.stop_at:
            if self.stop_by == "kill":
                raise KeyboardInterrupt
            Toy.stop_at = None  # once: another environment may come to the same step
            signal.raise_signal(signal.SIGINT)
        return self.observe(), 0.5, False, self.steps == 10, {}


class RaisesWhenMade(Toy):
    def __init__(self, **kwargs: Any):
        raise LookupError("no such body")


class RaisesAtReset(Toy):
    def reset(self, **kwargs: Any) -> Any:
        raise LookupError("no such body")


class ResetsWithoutInfo(Toy):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class ResetsToThreeNumbers(Toy):
    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return np.zeros(3, np.float32), {}


class ResetsToText(Toy):
    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return "start", {}


class ResetsToNan(Toy):
    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        return np.full(2, np.nan, np.float32), {}


class RaisesAtStep(Toy):
    def step(self, action: Any) -> Any:
        raise LookupError("no such body")


class StepsWithFourValues(Toy):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class StepsToThreeNumbers(Toy):
    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), *super().step(action)[1:]


class StepsWithoutReward(Toy):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, None, *rest


class StepsWithTwoRewards(Toy):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, np.zeros(2), *rest


class KeepsState(Toy):
    """The hidden state of an episode lives on in the next one, as in BipedalWalker-v3."""

    def observe(self) -> Any:
        return super().observe() * np.float32(0.5 + 0.5 / (1 + self.total_steps))


class Wide(Toy):
    """Observations of almost as many numbers as are allowed."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(-1, 1, (9000,))


class Numbers(Toy):
    """Gives one odd number at step 45 of each environment, where an observation may be any number."""

    def __init__(self, reward: float = 0.5, observation: float = 0.5, always: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.odd_reward = reward
        self.odd_observation = observation
        self.always = always

    def observe(self) -> Any:
        return super().observe().astype(np.float64)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if self.always or self.total_steps == 45:
            observation = np.full(2, self.odd_observation)
            reward = self.odd_reward
        return observation, reward, *rest


class NanReward(Numbers):
    def __init__(self, **kwargs: Any):
        super().__init__(reward=math.nan, **kwargs)


class HugeRewards(Numbers):
    def __init__(self, **kwargs: Any):
        super().__init__(reward=1e308, always=True, **kwargs)


class Pictures(Toy):
    """Renders what it is told to."""

    def __init__(self, picture: str = "good", **kwargs: Any):
        super().__init__(**kwargs)
        self.picture = picture

    def render(self) -> Any:
        if self.picture == "raises":
            raise LookupError("no such screen")
        return {"none": None, "text": "a picture", "flat": np.zeros(4, np.uint8)}[self.picture]


OBSERVATION_SPACES = {
    "nothing": spaces.Box(-1, 1, (0,)),
    "empty_dict": spaces.Dict({}),
    "sequence": spaces.Sequence(spaces.Box(-1, 1, (2,))),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    "many": spaces.Discrete(10**9),
    "none": None,
    "text": "Box(2)",
}
ACTION_SPACES = {
    "discrete": spaces.Discrete(2),
    "from_one": spaces.Discrete(2, start=1),
    "multi_discrete": spaces.MultiDiscrete([2, 2]),
    "multi_binary": spaces.MultiBinary(2),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))),
    "dict": spaces.Dict({"a": spaces.Discrete(2)}),
    "box": spaces.Box(-1, 1, (2,)),
    "integers": spaces.Box(-2, 2, (2,), np.int32),
    "one_value": spaces.Box(1, 1, (2,)),
    "one_value_of_two": spaces.Box(np.array([-1, 1], np.float32), np.array([1, 1], np.float32)),
    "infinite": spaces.Box(-np.inf, np.inf, (2,)),
    "half_infinite": spaces.Box(0, np.inf, (2,)),
    "almost_infinite": spaces.Box(-3e38, 3e38, (2,)),
    "nothing": spaces.Box(-1, 1, (0,)),
    "scalar": spaces.Box(-1, 1, ()),
    "matrix": spaces.Box(-1, 1, (2, 2)),
    "none": None,
}


class OddSpaces(Toy):
    def __init__(self, observation: str | None = None, action: str | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        if observation is not None:
            self.observation_space = OBSERVATION_SPACES[observation]
        if action is not None:
            self.action_space = ACTION_SPACES[action]


BROKEN = [RaisesWhenMade, RaisesAtReset, ResetsWithoutInfo, ResetsToThreeNumbers, ResetsToText]
BROKEN += [RaisesAtStep, StepsWithFourValues, StepsToThreeNumbers, StepsWithoutReward, StepsWithTwoRewards]
for kind in [Toy, *BROKEN, ResetsToNan, KeepsState, Wide, Numbers, NanReward, HugeRewards, Pictures, OddSpaces]:
    gym.register(f"{kind.__name__}-v0", kind)
    gym.register(f"{kind.__name__}Continuous-v0", kind, kwargs={"continuous": True})


def env_id_for(name: str, kind: type[Toy]) -> str:
    """The id of an environment with the actions of a script's family."""
    return f"{kind.__name__}-v0" if name in DISCRETE else f"{kind.__name__}Continuous-v0"


# ---------------------------------------------------------------------------- a script, and what it says and leaves
class Hangs(BaseException):
    """A script has not come to an end."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """No case may take longer than some seconds."""

    def on_alarm(*_: Any) -> None:
        raise Hangs

    handler = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)


def settings_of(name: str, **changes: Any) -> dict[str, Any]:
    """The arguments of a run that takes milliseconds."""
    settings = {"env_id": env_id_for(name, Toy), "runs_dir": "runs", "run_name": "x", "total_timesteps": 60}
    settings |= {"learning_starts": 10, "hidden_size": 8, "batch_size": 4, "buffer_size": 100, "log_every": 10}
    settings |= {"checkpoint_every": 1, "num_threads": 1}
    if name in CONTINUOUS:
        settings |= {"rollout_length": 10, "eval_every": 20}
    if name not in ("dqn", "sac"):
        settings |= {"num_nets": 2}
    return settings | changes


def words(settings: dict[str, Any]) -> list[str]:
    """Settings as a person types them."""
    given = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            given += [f"--{flag}", *value]
        else:
            given.append(f"--{flag}={value}")
    return given


def say(main: Callable[[], None]) -> SimpleNamespace:
    """A main function's exit code and output, with the encodings that a terminal has."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
    return SimpleNamespace(code=code, out=out.buffer.getvalue().decode(), err=err.buffer.getvalue().decode())


def command(name: str, *arguments: str, cwd: Path) -> SimpleNamespace:
    """A script with a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.chdir(cwd)
        return say(script(name).main)


def call(name: str, settings: dict[str, Any], cwd: Path) -> SimpleNamespace:
    """The same, without the time that it takes to read a command line."""
    module = script(name)

    def parsed() -> Any:
        return module.Args(**settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "parse_command_line", parsed)
        patch.chdir(cwd)
        return say(module.main)


def tree(folder: Path) -> dict[str, Any]:
    """All that is in a folder: links with where they lead, files with their bytes, folders."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path)] = ("link", os.readlink(path))
        elif path.is_file():
            found[str(path)] = ("file", path.read_bytes())
        else:
            found[str(path)] = ("folder", None)
    return found


def sentence_of(result: SimpleNamespace, name: str, codes: tuple[int, ...] = (2,)) -> str:
    """The one sentence with which a script ended."""
    assert "Traceback" not in result.err, result.err
    assert result.code in codes, (result.code, result.err)
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith(f"{name}.py: "), result.err
    return result.err.removeprefix(f"{name}.py: ").removesuffix("\n")


def assert_refused(name: str, settings: dict[str, Any], cwd: Path, *said: str) -> str:
    """A script says no, and says why; no file or folder is changed, made or removed."""
    before = tree(cwd)
    sentence = sentence_of(call(name, settings, cwd), name)
    assert tree(cwd) == before
    for text in said:
        assert text in sentence, sentence
    return sentence


def assert_command_refused(name: str, arguments: list[str], cwd: Path, *said: str) -> str:
    """The same, with the command line."""
    before = tree(cwd)
    sentence = sentence_of(command(name, *arguments, cwd=cwd), name)
    assert tree(cwd) == before
    for text in said:
        assert text in sentence, sentence
    return sentence


# ---------------------------------------------------------------------------- runs that were stopped
def stop(name: str, stop_by: str, cwd: Path, **changes: Any) -> SimpleNamespace:
    """A run that ends at its 35th step: a signal lets it save, a kill leaves the checkpoint of step 30."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Toy, "stop_at", 35)
        patch.setattr(Toy, "stop_by", stop_by)
        result = call(name, settings_of(name, **changes), cwd)
    assert result.code == 130, result.err
    return result


@pytest.fixture(scope="module")
def stopped_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """One run of each script and each way to stop it, made when it is first asked for."""
    made: dict[tuple[str, str], Path] = {}

    def stopped_run(name: str, stop_by: str) -> Path:
        if (name, stop_by) not in made:
            cwd = tmp_path_factory.mktemp("stopped")
            stop(name, stop_by, cwd)
            made[name, stop_by] = cwd / "runs" / "x"
        return made[name, stop_by]

    return stopped_run


@pytest.fixture
def stopped(stopped_runs: Callable[[str, str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Copies a stopped run to runs/x."""

    def copy(name: str, stop_by: str = "signal") -> Path:
        folder = tmp_path / "runs" / "x"
        shutil.copytree(stopped_runs(name, stop_by), folder)
        return folder

    return copy


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_args(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, args=config["args"] | changes)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("stop_by", ["signal", "kill"])
def test_a_stopped_run_goes_on(name: str, stop_by: str, stopped: Callable[..., Path], tmp_path: Path):
    """What the other tests take for granted."""
    folder = stopped(name, stop_by)
    result = command(name, "--resume", "--run-name=x", cwd=tmp_path)
    assert result.code == 0, result.err
    steps = [row["global_step"] for row in read_rows(folder) if "charts/episodic_return" in row]
    assert steps == [10, 20, 30, 40, 50, 60]


OTHER_SCRIPT = dict(zip(SCRIPTS, [*SCRIPTS[1:], SCRIPTS[0]], strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("stop_by", ["signal", "kill"])
def test_another_script_does_not_take_up_a_run(name: str, stop_by: str, stopped: Callable[..., Path], tmp_path: Path):
    stopped(name, stop_by)
    other = OTHER_SCRIPT[name]
    arguments = ["--resume", "--run-name=x"]
    assert_command_refused(other, arguments, tmp_path, f"runs/x is a run of {name}.py, not of {other}.py")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("resume", [True, False])
def test_a_checkpoint_without_a_config_is_left_alone(
    name: str, resume: bool, stopped: Callable[..., Path], tmp_path: Path
):
    (stopped(name) / "config.json").unlink()
    assert_refused(name, settings_of(name, resume=resume), tmp_path, "runs/x")


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("resume", [True, False])
def test_rows_without_a_config_are_left_alone(name: str, resume: bool, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped(name)
    (folder / "config.json").unlink()
    (folder / "checkpoint.pt").unlink()
    assert_refused(name, settings_of(name, resume=resume), tmp_path, "runs/x")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_sorted_config_means_the_same(name: str, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped(name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, sort_keys=True, indent=4))
    assert_command_refused(name, ["--resume", "--run-name=x", "--gamma=0.5"], tmp_path, "gamma", "0.5")
    result = command(name, "--resume", "--run-name=x", "--total-timesteps=40", cwd=tmp_path)
    assert result.code == 0, result.err
    assert read_rows(folder)[-1]["global_step"] == 40


def fixed_arguments(name: str) -> list[str]:
    """The arguments that belong to a run for good."""
    may_change = {"total_timesteps", "total_episodes", "solved_at", "cuda", "num_threads", "exp_name", "run_name"}
    may_change |= {"runs_dir", "checkpoint_every", "checkpoint_minutes", "resume", "evaluate", "eval_episodes"}
    may_change |= {"capture_video", "track", "wandb_project_name", "wandb_entity", "warm_start"}
    return [field.name for field in dataclasses.fields(script(name).Args) if field.name not in may_change]


def another_value(name: str, field: str) -> Any:
    """A value that is allowed, and not the one of settings_of."""
    special = {"env_id": env_id_for(name, KeepsState), "eval_env_id": env_id_for(name, KeepsState)}
    special |= {"env_kwargs": ("render_mode=rgb_array",)}
    if field in special:
        return special[field]
    kind = get_type_hints(script(name).Args)[field]
    value = getattr(script(name).Args(**settings_of(name)), field)
    if get_origin(kind) is Literal:
        return next(other for other in get_args(kind) if other != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    return 1


FIXED = [(name, field) for name in SCRIPTS for field in fixed_arguments(name)]


@pytest.mark.parametrize(("name", "field"), FIXED)
def test_an_argument_that_belongs_to_the_run_cannot_change(
    name: str, field: str, stopped: Callable[..., Path], tmp_path: Path
):
    stopped(name)
    settings = settings_of(name, resume=True) | {field: another_value(name, field)}
    sentence = assert_refused(name, settings, tmp_path, "runs/x")
    assert re.search(rf"\b{field}\b", sentence.replace("-", "_")), sentence


EDITED_ARGUMENTS = [
    ("gamma", "0.99"),
    ("gamma", -0.5),
    ("gamma", math.inf),
    ("gamma", {"a": 1}),
    ("hidden_size", 8.5),
    ("hidden_size", 10**30),
    ("batch_size", True),
    ("seed", None),
    ("env_id", ["Toy-v0"]),
    ("env_kwargs", ["a=1", 2]),
    ("resume", "yes"),
]


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize(("field", "value"), EDITED_ARGUMENTS)
def test_an_argument_edited_in_the_config_is_checked(
    name: str, field: str, value: Any, stopped: Callable[..., Path], tmp_path: Path
):
    edit_args(stopped(name), **{field: value})
    flag = "--" + field.replace("_", "-")
    assert_command_refused(name, ["--resume", "--run-name=x"], tmp_path, flag)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_value_edited_in_the_config_is_noticed(name: str, stopped: Callable[..., Path], tmp_path: Path):
    """The networks of the checkpoint do not have the size that the config now names."""
    edit_args(stopped(name), hidden_size=9)
    assert_command_refused(name, ["--resume", "--run-name=x"], tmp_path, "runs/x/checkpoint.pt")


CONFIGS = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "no arguments": b'{"script": "ivdqn.py"}',
    "no script": b'{"args": {}}',
    "arguments in a list": b'{"script": "ivdqn.py", "args": []}',
    "kwargs that are a number": b'{"script": "ivdqn.py", "args": {"env_kwargs": 5}}',
    "a script in a list": b'{"script": ["ivdqn.py"], "args": {}}',
    "a number of 5000 digits": b'{"script": "ivdqn.py", "args": {"seed": ' + b"1" * 5000 + b"}}",
    "not UTF-8": b'{"script": "\xff"}',
    "UTF-16": '{"script": "ivdqn.py", "args": {}}'.encode("utf-16"),
    "nul bytes": bytes(100),
    "nested deep": b'{"script": "ivdqn.py", "args": ' + b"[" * 100_000,
    "nested deep and closed": b'{"script": "ivdqn.py", "args": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_that_is_none_is_refused(how: str, config: str, stopped: Callable[..., Path], tmp_path: Path):
    (stopped("ivdqn") / "config.json").write_bytes(CONFIGS[config])
    arguments = ["--resume", "--run-name=x"] if how == "--resume" else ["--evaluate=runs/x"]
    assert_command_refused("ivdqn", arguments, tmp_path, "runs/x")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("share", [0.3, 0.99])
def test_a_config_cut_short_is_refused(name: str, share: float, stopped: Callable[..., Path], tmp_path: Path):
    path = stopped(name) / "config.json"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert_command_refused(name, ["--resume", "--run-name=x"], tmp_path, "runs/x")


@pytest.mark.parametrize("script_name", [None, 7, "", "DQN.PY", "../ivdqn.py", {"name": "ivdqn.py"}])
def test_a_config_of_no_script_is_refused(script_name: Any, stopped: Callable[..., Path], tmp_path: Path):
    edit_config(stopped("ivdqn"), script=script_name)
    assert_refused("ivdqn", settings_of("ivdqn", resume=True), tmp_path, "runs/x")


def test_a_folder_in_the_place_of_the_config_is_refused(stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped("ivdqn")
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert_command_refused("ivdqn", ["--resume", "--run-name=x"], tmp_path, "runs/x")


# ---------------------------------------------------------------------------- checkpoints
class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def put(state: Any, path: str, value: Any) -> None:
    """Changes what is at a path of keys."""
    *parents, last = path.split("/")
    for key in parents:
        state = state[key]
    state[last] = value


CHECKPOINT_VALUES = [
    ("global_step", "abc"),
    ("global_step", -1),
    ("global_step", 1.5),
    ("global_step", None),
    ("global_step", math.nan),
    ("episode", "abc"),
    ("episode", -1),
    ("episode", None),
    ("eval_returns", "abc"),
    ("eval_returns", 7),
    ("eval_returns", None),
    ("eval_returns", ["a"]),
    ("eval_returns", [math.nan]),
    ("metrics_size", "abc"),
    ("metrics_size", None),
    ("metrics_size", -1),
    ("numpy_rng", {}),
    ("numpy_rng", "abc"),
    ("numpy_rng", {"bit_generator": "MT19937"}),
    ("torch_rng", "abc"),
    ("torch_rng", torch.zeros(3, dtype=torch.uint8)),
    ("agent", {}),
    ("agent", 7),
    ("agent/buffer", {}),
    ("agent/buffer/size", "abc"),
    ("agent/buffer/size", -1),
    ("agent/buffer/size", 1000),
    ("agent/buffer/position", "abc"),
    ("agent/buffer/position", -1),
    ("agent/buffer/position", 1000),
    ("agent/buffer/arrays", {}),
    ("agent/buffer/arrays/observation", torch.zeros(30, 3)),
    ("agent/buffer/arrays/reward", "abc"),
]
NETWORKS = {"ivdqn": ("network", "optimizer"), "sac": ("actor", "actor_optimizer")}


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize(("path", "value"), CHECKPOINT_VALUES)
def test_a_wrong_value_in_a_checkpoint_is_refused(
    name: str, path: str, value: Any, stopped: Callable[..., Path], tmp_path: Path
):
    folder = stopped(name)
    state = read_checkpoint(folder)
    put(state, path, value)
    torch.save(state, folder / "checkpoint.pt")
    assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x/checkpoint.pt")


def another_learning_rate(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["lr"] = 7.0


def other_betas(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["betas"] = (0.5, 0.5)


def one_parameter_less(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["params"].pop()


def no_moments_of_one_parameter(optimizer: dict[str, Any]) -> None:
    del optimizer["state"][2]


def no_second_moment(optimizer: dict[str, Any]) -> None:
    del optimizer["state"][0]["exp_avg_sq"]


def no_step(optimizer: dict[str, Any]) -> None:
    del optimizer["state"][0]["step"]


def a_moment_of_another_shape(optimizer: dict[str, Any]) -> None:
    optimizer["state"][1]["exp_avg"] = torch.zeros(3)


OPTIMIZER_DAMAGE = [
    *(another_learning_rate, other_betas, one_parameter_less, no_moments_of_one_parameter),
    *(no_second_moment, no_step, a_moment_of_another_shape),
]


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("damage", OPTIMIZER_DAMAGE)
def test_an_optimizer_that_was_changed_in_a_checkpoint_is_refused(
    name: str, damage: Callable[[dict[str, Any]], None], stopped: Callable[..., Path], tmp_path: Path
):
    folder = stopped(name)
    state = read_checkpoint(folder)
    damage(state["agent"][NETWORKS[name][1]])
    torch.save(state, folder / "checkpoint.pt")
    assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x/checkpoint.pt", "optimizer")


KEYS = ["agent", "global_step", "episode", "eval_returns", "metrics_size", "numpy_rng", "torch_rng"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_missing_from_a_checkpoint_is_named(key: str, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped("ivdqn")
    state = read_checkpoint(folder)
    del state[key]
    torch.save(state, folder / "checkpoint.pt")
    assert_refused("ivdqn", settings_of("ivdqn", resume=True), tmp_path, "runs/x/checkpoint.pt", key)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_part_of_the_agent_must_be_in_a_checkpoint(name: str, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped(name)
    state = read_checkpoint(folder)
    assert len(state["agent"]) >= 4
    for part in state["agent"]:
        kept = {key: value for key, value in state["agent"].items() if key != part}
        for agent in (kept, state["agent"] | {part: {}}):
            torch.save(state | {"agent": agent}, folder / "checkpoint.pt")
            assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x/checkpoint.pt")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_checkpoint_of_other_shapes_is_refused(name: str, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped(name)
    other = tmp_path / "other"
    other.mkdir()
    stop(name, "signal", other, hidden_size=9)
    shutil.copy(other / "runs" / "x" / "checkpoint.pt", folder / "checkpoint.pt")
    assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x/checkpoint.pt")


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def without_its_end(content: bytes) -> bytes:
    return content[:-1]


def nothing(_: bytes) -> bytes:
    return b""


def noise(content: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(content))


def pickled_code(_: bytes) -> bytes:
    return pickle.dumps(Harm())


def saved_code(content: bytes) -> bytes:
    file = io.BytesIO()
    torch.save(torch.load(io.BytesIO(content), weights_only=True) | {"episode": Harm()}, file)
    return file.getvalue()


def a_list(_: bytes) -> bytes:
    file = io.BytesIO()
    torch.save([1, 2], file)
    return file.getvalue()


DAMAGE = [truncated, without_its_end, nothing, noise, pickled_code, saved_code, a_list]


@pytest.mark.parametrize("how", ["--resume", "--evaluate", "--warm-start"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused(
    how: str, damage: Callable[[bytes], bytes], stopped: Callable[..., Path], tmp_path: Path
):
    checkpoint = stopped("ivdqn") / "checkpoint.pt"
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    changes = {
        "--resume": {"resume": True},
        "--evaluate": {"evaluate": "runs/x"},
        "--warm-start": {"run_name": "new", "warm_start": "runs/x"},
    }[how]
    assert_refused("ivdqn", settings_of("ivdqn", **changes), tmp_path, "runs/x/checkpoint.pt")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("field", ["evaluate", "warm_start"])
def test_a_run_that_is_not_there_is_named(name: str, field: str, tmp_path: Path):
    changes = {field: "runs/no such run", "run_name": "new"}
    assert_refused(name, settings_of(name, **changes), tmp_path, "runs/no such run")


# ---------------------------------------------------------------------------- numbers
def numeric_fields(name: str) -> list[str]:
    hints = get_type_hints(script(name).Args)
    found = []
    for field, kind in hints.items():
        kinds = {kind} if get_origin(kind) in (Literal, tuple) else {kind, *get_args(kind)}
        if kinds & {int, float}:
            found.append(field)
    return found


NUMERIC = [(name, field) for name in SCRIPTS for field in numeric_fields(name)]
HOSTILE_NUMBERS = (math.inf, -math.inf, math.nan, -1, 10**15, 1e308, 2**64)
# All others make no sense, or cannot be meant.
SENSIBLE = {("solved_at", -1)}


@pytest.mark.parametrize(("name", "field"), NUMERIC)
def test_a_number_that_cannot_be_meant_is_refused(name: str, field: str):
    module = script(name)
    for value in HOSTILE_NUMBERS:
        args = module.Args()
        setattr(args, field, value)
        if (field, value) in SENSIBLE:
            module.check_args(args)
            continue
        with pytest.raises(module.RunError) as raised:
            module.check_args(args)
        flag = "--" + field.replace("_", "-")
        assert re.match(rf"{flag} must be .*, not ", str(raised.value))
        assert raised.value.code == 2


@pytest.mark.parametrize(("name", "field"), [case for case in NUMERIC if case[0] in ("ivdqn", "ivsac")])
def test_a_number_that_cannot_be_meant_is_refused_on_the_command_line(name: str, field: str, tmp_path: Path):
    kind = get_type_hints(script(name).Args)[field]
    is_float = float in (kind, *get_args(kind))
    flag = "--" + field.replace("_", "-")
    value = "nan" if is_float else str(2**64)
    assert_command_refused(name, [f"{flag}={value}"], tmp_path, f"{flag} must be ", value)


@contextlib.contextmanager
def little_memory(more: int) -> Iterator[None]:
    """This process gets only so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_buffer_that_does_not_fit_into_memory_is_refused(name: str, tmp_path: Path):
    changes = {"buffer_size": 10**9, "env_id": env_id_for(name, Wide)}
    with little_memory(2**31):
        assert_refused(name, settings_of(name, **changes), tmp_path, "--buffer-size")


@needs_proc
@pytest.mark.parametrize("name", SCRIPTS)
def test_networks_that_do_not_fit_into_memory_are_refused(name: str, tmp_path: Path):
    with little_memory(2**31):
        assert_refused(name, settings_of(name, hidden_size=10**5), tmp_path, "--hidden-size")


@needs_proc
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("dqn", "sac")])
def test_members_that_do_not_fit_into_memory_are_refused(name: str, tmp_path: Path):
    with little_memory(2**31):
        assert_refused(name, settings_of(name, num_nets=1000, hidden_size=10**4), tmp_path, "--num-nets")


@needs_proc
@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_a_batch_that_does_not_fit_into_memory_ends_the_run_with_a_sentence(name: str, tmp_path: Path):
    """No script can know it before its first update."""
    settings = settings_of(name, batch_size=10**6, hidden_size=1000)
    with little_memory(2**31):
        result = call(name, settings, tmp_path)
    assert "--batch-size" in sentence_of(result, name, codes=(1, 2))


# ---------------------------------------------------------------------------- environments that cannot be used
ENV_IDS = ["NoSuchThing-v0", "Toy-v99", "nowhere/Toy-v0", ":", ":Toy-v0", "a:b:c", "no_such_module:Toy-v0"]
ENV_IDS += ["json:NoSuchThing-v0", "../Toy-v0", "Toy-v" + "9" * 5000, ".:Toy-v0"]


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_an_environment_that_does_not_exist_is_named(env_id: str, tmp_path: Path):
    sentence = assert_refused("dqn", settings_of("dqn", env_id=env_id), tmp_path, "environment")
    assert " ".join(env_id.split()) in sentence


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("field", ["env_id", "eval_env_id"])
def test_no_script_takes_an_environment_that_does_not_exist(name: str, field: str, tmp_path: Path):
    assert_refused(name, settings_of(name, **{field: "NoSuchThing-v0"}), tmp_path, "NoSuchThing")


MODULES = {
    "import_error": "import no_such_package",
    "syntax_error": "this is no Python",
    "own_exception": "class Trouble(Exception): pass\nraise Trouble('the simulator has no licence')",
    "no_text": "raise KeyError",
    "many_lines": "raise ValueError('one\\ntwo\\nthree')",
    "leaves": "import sys; sys.exit(0)",
    "leaves_with_text": "import sys; sys.exit('goodbye')",
    "recursion": "def f(): f()\nf()",
    "registers_nothing": "",
    "nul_bytes": "\0",
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_cannot_be_imported_is_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"hostile_{module}.py").write_text(MODULES[module])
    (tmp_path / "cwd").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "modules")
    settings = settings_of("ivsac", env_id=f"hostile_{module}:Thing-v0")
    assert_refused("ivsac", settings, tmp_path / "cwd", f"hostile_{module}")


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("field", ["env_id", "eval_env_id"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_environment_is_refused(kind: type[Toy], field: str, name: str, tmp_path: Path):
    env_id = env_id_for(name, kind)
    sentence = assert_refused(name, settings_of(name, **{field: env_id}), tmp_path)
    if kind in (RaisesWhenMade, RaisesAtReset, RaisesAtStep):
        assert "no such body" in sentence


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_an_environment_that_begins_with_nan_is_refused(name: str, tmp_path: Path):
    result = call(name, settings_of(name, env_id=env_id_for(name, ResetsToNan)), tmp_path)
    assert "the observation is not finite" in sentence_of(result, name, codes=(1, 2))


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("space", OBSERVATION_SPACES)
def test_observations_that_no_network_takes_are_refused(space: str, name: str, tmp_path: Path):
    changes = {"env_id": env_id_for(name, OddSpaces), "env_kwargs": (f"observation={space}",)}
    assert_refused(name, settings_of(name, **changes), tmp_path, "OddSpaces")


DISCRETE_ACTIONS = ["from_one", "multi_discrete", "multi_binary", "tuple", "dict", "box", "integers", "none"]
CONTINUOUS_ACTIONS = ["discrete", "multi_discrete", "multi_binary", "tuple", "dict", "integers", "one_value"]
CONTINUOUS_ACTIONS += ["one_value_of_two", "infinite", "half_infinite", "almost_infinite", "nothing", "scalar"]
CONTINUOUS_ACTIONS += ["matrix", "none"]
ACTION_CASES = [("ivdqn", space) for space in DISCRETE_ACTIONS] + [("sac", space) for space in CONTINUOUS_ACTIONS]
ACTION_CASES += [(name, "multi_discrete") for name in SCRIPTS if name not in ONE_OF_EACH_FAMILY]


@pytest.mark.parametrize(("name", "space"), ACTION_CASES)
def test_actions_that_a_script_cannot_take_are_refused(name: str, space: str, tmp_path: Path):
    changes = {"env_id": env_id_for(name, OddSpaces), "env_kwargs": (f"action={space}",)}
    assert_refused(name, settings_of(name, **changes), tmp_path, "OddSpaces")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_evaluation_in_other_spaces_is_refused(name: str, tmp_path: Path):
    env_id, other = ("CartPole-v1", "MountainCar-v0") if name in DISCRETE else ("Pendulum-v1", "OddSpacesContinuous-v0")
    settings = settings_of(name, env_id=env_id, eval_env_id=other)
    assert_refused(name, settings, tmp_path, f"--eval-env-id {other}", f"--env-id {env_id}")


ENV_KWARGS = [
    "steps",
    "{",
    '{"a": ',
    '{"a": 1} x',
    "[1, 2]",
    "no_such_argument=1",
    '{"no_such_argument": 1}',
    "=1",
    "",
    "id=CartPole-v1",
    "max_episode_steps=many",
    "max_episode_steps=0",
    "self=1",
    '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "continuous=" + "[" * 100_000 + "]" * 100_000,
]


@pytest.mark.parametrize("word", ENV_KWARGS)
def test_arguments_that_the_environment_does_not_take_are_refused(word: str, tmp_path: Path):
    assert_refused("dqn", settings_of("dqn", env_kwargs=(word,)), tmp_path)


# ---------------------------------------------------------------------------- videos and Weights & Biases
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("picture", ["raises", "none", "text", "flat"])
def test_what_cannot_be_drawn_is_not_recorded(name: str, picture: str, tmp_path: Path):
    changes = {"env_id": env_id_for(name, Pictures), "env_kwargs": (f"picture={picture}",), "capture_video": True}
    assert_refused(name, settings_of(name, **changes), tmp_path, "--capture-video")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_video_without_moviepy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    env_id = "CartPole-v1" if name in DISCRETE else "Pendulum-v1"
    settings = settings_of(name, env_id=env_id, capture_video=True)
    assert_refused(name, settings, tmp_path, "--capture-video", "moviepy")


WANDB_ERRORS = [
    wandb.errors.UsageError("api_key not configured"),
    wandb.errors.CommError("Connection refused"),
    wandb.errors.AuthenticationError("no such key"),
    OSError("Connection refused"),
    TimeoutError("no answer"),
    ValueError("no such entity"),
    RuntimeError("the service died"),
]


def identity(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Exception) else str(value)


@pytest.mark.parametrize("state", ["new", "stopped", "killed"])
@pytest.mark.parametrize("error", WANDB_ERRORS, ids=identity)
def test_what_weights_and_biases_refuses_is_said_before_anything_is_written(
    error: Exception, state: str, stopped: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def init(**_: Any) -> None:
        raise error

    if state != "new":
        stopped("dqn", "signal" if state == "stopped" else "kill")
    monkeypatch.setattr(wandb, "init", init)
    settings = settings_of("dqn", track=True, resume=state != "new")
    assert_refused("dqn", settings, tmp_path, "--track", str(error))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_tracking_without_wandb(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert_refused(name, settings_of(name, track=True), tmp_path, "--track", "wandb")


# ---------------------------------------------------------------------------- folders
def make_file(path: Path) -> None:
    path.write_text("precious")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("where", ["runs", "runs/x"])
@pytest.mark.parametrize("make", [make_file, make_dangling_link, make_loop])
def test_what_is_no_folder_is_refused(make: Callable[[Path], None], where: str, name: str, tmp_path: Path):
    (tmp_path / where).parent.mkdir(exist_ok=True)
    make(tmp_path / where)
    assert_refused(name, settings_of(name), tmp_path, "runs/x")


RUNS_DIRS = ["file/runs", "file/a/b", "a" * 300, "b/" + "a" * 300, "b/" + "a/" * 3000]
RUNS_DIRS += ["/proc/no/such", "/dev/null"]


@pytest.mark.parametrize("runs_dir", RUNS_DIRS)
def test_a_folder_that_cannot_be_made_is_refused(runs_dir: str, tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    assert_refused("dqn", settings_of("dqn", runs_dir=runs_dir), tmp_path, runs_dir)


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs").mkdir(mode=0o555)
    if os.access(tmp_path / "runs", os.W_OK):  # the superuser may
        mkdir = os.mkdir

        def refuse(path: Any, *rest: Any, **named: Any) -> None:
            if "runs" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            mkdir(path, *rest, **named)

        monkeypatch.setattr(os, "mkdir", refuse)
    assert_refused("dqn", settings_of("dqn"), tmp_path, "runs/x", "Permission denied")


@pytest.mark.parametrize("run_name", ["a" * 300, "é" * 200, "a/" * 200])
def test_a_name_that_is_too_long_leaves_nothing(run_name: str, tmp_path: Path):
    assert_refused("dqn", settings_of("dqn", run_name=run_name), tmp_path, "runs")


RUN_NAMES = [
    "a/b",
    "../../b",
    "..",
    ".",
    "...",
    "/",
    "/etc/b",
    "a\\b",
    "🙂",
    " ",
    "-",
    "~",
    "$(touch b)",
]
RUN_NAMES += ["a'b", 'a"b', "*", "CON", "a" * 200]


@pytest.mark.parametrize("run_name", RUN_NAMES)
def test_an_odd_name_is_one_folder_among_the_runs(run_name: str, tmp_path: Path):
    (tmp_path / "here").mkdir()
    result = call("dqn", settings_of("dqn", run_name=run_name, total_timesteps=5), tmp_path / "here")
    assert result.code == 0, result.err
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["runs"]
    (folder,) = (tmp_path / "here" / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint.pt"}
    assert re.fullmatch(r"[\w.=+-]+", folder.name)


def test_names_that_mean_one_folder_do_not_share_it(tmp_path: Path):
    assert call("dqn", settings_of("dqn", run_name="a/b"), tmp_path).code == 0
    assert_refused("dqn", settings_of("dqn", run_name="a_b"), tmp_path, "runs/a_b")


@pytest.mark.parametrize("exp_name", ["../../b", "$(touch b)"])
def test_an_odd_experiment_is_one_folder_among_the_runs(exp_name: str, tmp_path: Path):
    (tmp_path / "here").mkdir()
    settings = settings_of("sac", exp_name=exp_name, run_name=None, total_timesteps=5)
    assert call("sac", settings, tmp_path / "here").code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["runs"]


# ---------------------------------------------------------------------------- what is logged
def assert_ended(name: str, settings: dict[str, Any], cwd: Path, what: str) -> None:
    """A run ends at a number that is not finite: it says which and when, and its rows are whole and finite."""
    sentence = sentence_of(call(name, settings, cwd), name, codes=(1,))
    assert re.search(what, sentence), sentence
    assert re.search(r"\bstep [1-9]\d*\b", sentence), sentence
    content = (cwd / "runs" / "x" / "metrics.jsonl").read_text()
    assert content == "" or content.endswith("\n")
    for line in content.splitlines():
        row = json.loads(line)
        assert all(math.isfinite(value) for value in row.values()), row


ANY_PART = r"(observation|reward|loss|losses/\w+|variance|return|\w+_return) is not finite"
NUMBER_CASES = [(name, "reward", value) for name in SCRIPTS for value in ("NaN", "1e39")]
NUMBER_CASES += [(name, "observation", value) for name in SCRIPTS for value in ("-Infinity", "1e39")]
NUMBER_CASES += [(name, "reward", "Infinity") for name in ONE_OF_EACH_FAMILY]
NUMBER_CASES += [(name, "reward", "-1e308") for name in ONE_OF_EACH_FAMILY]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("name", "part", "value"), NUMBER_CASES)
def test_a_number_that_a_network_cannot_take_ends_the_run(name: str, part: str, value: str, tmp_path: Path):
    """1e39 is a number, but none of single precision."""
    env_id = env_id_for(name, Numbers)
    changes = {"env_id": env_id, "env_kwargs": (f"{part}={value}",), "eval_every": 0, "total_timesteps": 200}
    what = ANY_PART if value in ("1e39", "-1e308") else f"{part} is not finite"
    assert_ended(name, settings_of(name, **changes), tmp_path, what)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_return_that_overflows_ends_the_run(name: str, tmp_path: Path):
    """Before anything is learned from it."""
    changes = {"env_id": env_id_for(name, HugeRewards), "eval_every": 0, "learning_starts": 1000}
    assert_ended(name, settings_of(name, **changes), tmp_path, ANY_PART)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind", [NanReward, HugeRewards])
def test_an_evaluation_that_is_not_finite_ends_the_run(kind: type[Toy], name: str, tmp_path: Path):
    settings = settings_of(name, env_id=env_id_for(name, Numbers), eval_env_id=env_id_for(name, kind))
    assert_ended(name, settings | {"total_timesteps": 200}, tmp_path, r"(the reward|eval_return\w*) is not finite")


RATES = {"learning_rate": 1e3, "q_lr": 1e3, "policy_lr": 1e3, "alpha_lr": 1e3}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loss_that_overflows_ends_the_run(name: str, tmp_path: Path):
    known = {field.name for field in dataclasses.fields(script(name).Args)}
    rates = {field: value for field, value in RATES.items() if field in known}
    kwargs = ("reward=1e20", "always=true")
    changes = {"env_id": env_id_for(name, Numbers), "env_kwargs": kwargs, "eval_every": 0, "total_timesteps": 400}
    assert_ended(name, settings_of(name, **changes, **rates), tmp_path, r"(loss\w*|losses/\w+|variance) is not finite")


# ---------------------------------------------------------------------------- files that are not what they seem
@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_that_the_checkpoint_counts_on_must_be_there(name: str, stopped: Callable[..., Path], tmp_path: Path):
    metrics = stopped(name) / "metrics.jsonl"
    content = metrics.read_bytes()
    for rest in (content[:-1], b""):
        metrics.write_bytes(rest)
        assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x/metrics.jsonl")
    metrics.unlink()
    assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x/metrics.jsonl")


def test_a_folder_in_the_place_of_the_metrics_is_refused(stopped: Callable[..., Path], tmp_path: Path):
    metrics = stopped("dqn") / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    assert_refused("dqn", settings_of("dqn", resume=True), tmp_path, "runs/x")


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("state", ["new", "stopped"])
def test_rows_are_not_written_through_a_link(name: str, state: str, stopped: Callable[..., Path], tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious\n" * 1000)
    folder = tmp_path / "runs" / "x"
    if state == "stopped":
        stopped(name)
        (folder / "metrics.jsonl").unlink()
    else:
        folder.mkdir(parents=True)
    (folder / "metrics.jsonl").symlink_to(victim)
    call(name, settings_of(name, resume=state == "stopped"), tmp_path)
    assert victim.read_text() == "precious\n" * 1000


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("file", ["checkpoint.pt", "config.json", "checkpoint.pt.tmp", "config.json.tmp"])
def test_nothing_is_written_through_a_link(name: str, file: str, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped(name)
    victim = tmp_path / "victim"
    if file.endswith(".tmp"):
        victim.write_text("precious")
    else:
        (folder / file).rename(victim)
    before = victim.read_bytes()
    (folder / file).symlink_to(victim)
    result = call(name, settings_of(name, resume=True), tmp_path)
    assert result.code == 0, result.err
    assert victim.read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"config.json", "metrics.jsonl", "checkpoint.pt"}
    assert not any(path.is_symlink() for path in folder.iterdir())


@pytest.mark.parametrize("file", ["checkpoint.pt.tmp", "config.json.tmp"])
def test_a_folder_in_the_place_of_a_new_file_ends_in_a_sentence(
    file: str, stopped: Callable[..., Path], tmp_path: Path
):
    folder = stopped("dqn")
    (folder / file).mkdir()
    result = call("dqn", settings_of("dqn", resume=True), tmp_path)
    assert f"runs/x/{file.removesuffix('.tmp')}" in sentence_of(result, "dqn", codes=(1, 2))


ODD_FOLDERS = ["it's here", 'say "hello"', "$(touch x)", "`touch x`", "a;touch x", "a&&touch x", "a|touch x", "a>x"]
ODD_FOLDERS += [
    "two  spaces",
    " ",
    "ends\\",
    "*",
    "~",
    "é🙂",
    "a=b",
    "#x",
    "!x",
    "-dash",
    "--resume",
]
STUB = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"


def shell_words(printed: str, cwd: Path) -> list[str]:
    """What a shell makes of a command that begins with python."""
    stub = cwd.parent / f"{cwd.name}_bin" / "python"
    stub.parent.mkdir()
    stub.write_text(f"#!{sys.executable}\n{STUB}")
    stub.chmod(0o755)
    variables = {"PATH": f"{stub.parent}:/usr/bin:/bin", "HOME": "/"}
    done = subprocess.run(["sh", "-c", printed], cwd=cwd, env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("runs_dir", ODD_FOLDERS)
def test_the_printed_command_goes_on_in_any_folder(runs_dir: str, tmp_path: Path):
    stopped = stop("dqn", "signal", tmp_path, runs_dir=runs_dir)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert before == [runs_dir]
    printed = stopped.err.rpartition("go on with ")[2].removesuffix("\n")
    python, *expected = shlex.split(printed)
    assert python == "python"
    assert shell_words(printed, tmp_path) == expected
    script_name, *arguments = expected
    assert script_name == "dqn.py"
    result = command("dqn", *arguments, cwd=tmp_path)
    assert result.code == 0, result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert read_rows(tmp_path / runs_dir / "x")[-1]["global_step"] == 60


@pytest.mark.parametrize("run_name", ["-dash", "--resume", "a b", "$(touch x)"])
def test_the_printed_command_goes_on_under_any_name(run_name: str, tmp_path: Path):
    stopped = stop("sac", "signal", tmp_path, run_name=run_name)
    _, _, *arguments = shlex.split(stopped.err.rpartition("go on with ")[2])
    result = command("sac", *arguments, cwd=tmp_path)
    assert result.code == 0, result.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_rows(folder)[-1]["global_step"] == 60


@pytest.mark.parametrize("text", ["a\tb", "a\nb", "a\0b", "\0", "a\u202eb", "\udcff", "\x1b[31m"])
@pytest.mark.parametrize("field", ["run_name", "runs_dir", "exp_name", "env_id", "eval_env_id", "env_kwargs"])
def test_what_cannot_be_printed_is_refused(field: str, text: str, tmp_path: Path):
    value = ("a=1", text) if field == "env_kwargs" else text
    flag = "--" + field.replace("_", "-")
    assert_refused("dqn", settings_of("dqn", **{field: value}), tmp_path, f"{flag} must be printable")


# ---------------------------------------------------------------------------- environments that remember
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reset_that_does_not_restore_the_environment_is_told(name: str, tmp_path: Path):
    """From such an environment a run cannot be resumed exactly."""
    result = call(name, settings_of(name, env_id=env_id_for(name, KeepsState)), tmp_path)
    assert result.code == 0, result.err
    assert len([line for line in result.err.splitlines() if "reset" in line]) == 1, result.err


@pytest.mark.parametrize("name", SCRIPTS)
def test_of_a_reset_that_restores_the_environment_nothing_is_told(name: str, tmp_path: Path):
    result = call(name, settings_of(name), tmp_path)
    assert (result.code, result.err) == (0, "")


# ---------------------------------------------------------------------------- found by a later trial
class SignalsOnce(Toy):
    """Somebody presses Ctrl-C while the first environment is made."""

    armed: ClassVar[bool] = True

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        if SignalsOnce.armed:
            SignalsOnce.armed = False
            signal.raise_signal(signal.SIGINT)


class ExitsLater(Toy):
    def step(self, action: Any) -> Any:
        if self.total_steps == 45:
            sys.exit(0)
        return super().step(action)


for kind in [SignalsOnce, ExitsLater]:
    gym.register(f"{kind.__name__}-v0", kind)
    gym.register(f"{kind.__name__}Continuous-v0", kind, kwargs={"continuous": True})


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_finished_run_is_told_in_one_line_and_keeps_its_rows(name: str, tmp_path: Path):
    assert call(name, settings_of(name), tmp_path).code == 0
    again = call(name, settings_of(name, resume=True), tmp_path)
    assert (again.code, again.err, again.out.count("\n")) == (0, "", 1)
    assert again.out.startswith("finished: 60 steps")
    (tmp_path / "runs" / "x" / "checkpoint.pt").unlink()
    assert_refused(name, settings_of(name, resume=True), tmp_path, "runs/x is finished")


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_stopped_before_its_first_step_leaves_nothing_to_go_on_from(
    name: str, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SignalsOnce, "armed", True)
    if is_there:
        (tmp_path / "runs" / "x").mkdir(parents=True)
    result = call(name, settings_of(name, env_id=env_id_for(name, SignalsOnce)), tmp_path)
    assert not SignalsOnce.armed
    assert "before the first step" in sentence_of(result, name, codes=(130,))
    assert not list(tmp_path.rglob("checkpoint.pt"))
    assert (tmp_path / "runs").exists() == is_there


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize(("resume", "said"), [(False, "exists"), (True, "metrics.jsonl is not what it was")])
def test_a_run_that_another_process_made_meanwhile_is_left_alone(
    name: str,
    resume: bool,
    said: str,
    stopped: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = stopped(name)
    aside = folder.rename(tmp_path / "aside")
    module = script(name)
    lock = module.lock

    def late_lock(file: Any) -> None:
        for file_name in ("config.json", "checkpoint.pt"):
            shutil.copy(aside / file_name, folder / file_name)
        lock(file)

    monkeypatch.setattr(module, "lock", late_lock)
    result = call(name, settings_of(name, resume=resume), tmp_path)
    assert said in sentence_of(result, name)
    for file_name in ("config.json", "checkpoint.pt"):
        assert (folder / file_name).read_bytes() == (aside / file_name).read_bytes()


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("edit", ["changed", "deleted"])
def test_an_edited_config_is_not_believed(name: str, edit: str, stopped: Callable[..., Path], tmp_path: Path):
    """The checkpoint knows the settings as well."""
    folder = stopped(name)
    if edit == "changed":
        edit_args(folder, gamma=0.5)
    else:
        config = json.loads((folder / "config.json").read_text())
        del config["args"]["batch_size"]  # not the default here
        edit_config(folder, args=config["args"])
    field = "gamma" if edit == "changed" else "batch_size"
    assert_command_refused(name, ["--resume", "--run-name=x"], tmp_path, "checkpoint.pt", field)


@pytest.mark.parametrize("field", ["run_name", "runs_dir", "env_id", "eval_env_id", "evaluate", "warm_start"])
def test_an_empty_text_is_refused(field: str, tmp_path: Path):
    flag = "--" + field.replace("_", "-")
    assert_refused("dqn", settings_of("dqn", **{field: ""}), tmp_path, f"{flag} must be printable and not empty")


def test_the_second_signal_of_one_kind_quits():
    module = script("dqn")
    for first, second in ((signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)):
        with module.Run(module.Args(**settings_of("dqn", run_name="new"))) as run:
            signal.raise_signal(first)
            signal.raise_signal(second)  # a launcher adds the one to the other
            assert run.stop_signal == first
            for again in (first, second):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(again)


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_rows_that_were_edited_are_noticed(name: str, stopped: Callable[..., Path], tmp_path: Path):
    folder = stopped(name)
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(b" " + metrics.read_bytes())
    assert_refused(name, settings_of(name, resume=True), tmp_path, "not what it was")


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("field", ["reward", "observation"])
def test_a_buffer_of_another_shape_is_refused(name: str, field: str, stopped: Callable[..., Path], tmp_path: Path):
    """It would be repeated to fill the buffer."""
    path = stopped(name) / "checkpoint.pt"
    state = read_checkpoint(path.parent)
    arrays = state["agent"]["buffer"]["arrays"]
    arrays[field] = arrays[field][:1]
    torch.save(state, path)
    assert_refused(name, settings_of(name, resume=True), tmp_path, "does not fit")


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_an_environment_that_exits_does_not_end_a_run_well(name: str, tmp_path: Path):
    result = call(name, settings_of(name, env_id=env_id_for(name, ExitsLater)), tmp_path)
    assert "SystemExit" in sentence_of(result, name, codes=(1,))


@pytest.mark.parametrize(("name", "mask_prob"), [("ivdqn", 0.5), ("ivsac", 0.3)])
def test_a_minibatch_without_a_sample_for_any_member_is_no_error(name: str, mask_prob: float, tmp_path: Path):
    few = {"batch_size": 1, "mask_prob": mask_prob, "log_every": 1, "total_timesteps": 100}
    if name == "ivsac":
        few |= {"rollout_length": 1}
    result = call(name, settings_of(name, **few), tmp_path)
    assert result.code == 0, result.err
    sizes = [
        value
        for row in read_rows(tmp_path / "runs" / "x")
        for metric, value in row.items()
        if metric.endswith("effective_batch_size")
    ]
    assert 0 in sizes


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_a_clock_that_stands_still_is_no_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script(name).time, "time", lambda: 1.0)
    result = call(name, settings_of(name), tmp_path)
    assert result.code == 0, result.err
