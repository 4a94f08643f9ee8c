"""The scripts as commands, most of them discrete: what they write, how they repeat, what they refuse."""

import dataclasses
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
from fcntl import ioctl
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from conftest import (
    DISCRETE,
    DISCRETE_ABLATIONS,
    DQN_OPTIONS,
    ROOT,
    SCRIPTS,
    OddEnv,
    call_script,
    execute,
    read_checkpoint,
    read_rows,
    refusal,
    run_script,
    script,
    timeless,
    wandb_records,
)

SHORT = ("--env-id", "CartPole-v1", "--total-timesteps", "500", "--learning-starts", "64", "--log-every", "100")
CHARTS = ["episode", "episodic_return", "episodic_length", "epsilon", "eval_return", "eval_return_mean100", "SPS"]
UNCERTAINTY = ["target_variance_mean", "target_variance_median", "weight_max", "effective_batch_size", "xi"]
HAS_UNCERTAINTY = {"sunrise_dqn": UNCERTAINTY[:3], "ivdqn": [*UNCERTAINTY, "predicted_variance_mean"]}
COMMANDS = [(name, []) for name in DISCRETE] + [("ivdqn", flags) for flags in DISCRETE_ABLATIONS.values()]
COMMANDS += [(name, flags) for name in ("dqn", "ivdqn") for flags in DQN_OPTIONS.values()]


# ---------------------------------------------------------------------------- what a run writes
@pytest.mark.parametrize(("name", "flags"), COMMANDS)
def test_a_short_run_writes_its_files(name: str, flags: list[str], tmp_path: Path):
    result = call_script(name, *SHORT, "--seed", "4", "--run-name", "a/b:c", *flags, cwd=tmp_path)
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / "a_b_c"
    config = json.loads((folder / "config.json").read_text())
    assert config["script"] == f"{name}.py"
    assert config["status"] == "finished"
    assert config["args"]["seed"] == 4
    assert {"python", "torch", "gymnasium", "numpy"} <= set(config["versions"])
    assert "git_commit" in config
    rows = read_rows(folder)
    assert all(next(iter(row)) == "global_step" for row in rows)
    episodes = [row for row in rows if "charts/episode" in row]
    assert [row["charts/episode"] for row in episodes] == list(range(1, len(episodes) + 1))
    assert len(episodes) >= 5
    assert all(f"charts/{key}" in row for row in episodes for key in CHARTS)
    assert [row["charts/episodic_return"] for row in episodes] == [row["charts/episodic_length"] for row in episodes]
    evaluations = [row["charts/eval_return"] for row in episodes]
    assert episodes[-1]["charts/eval_return_mean100"] == pytest.approx(sum(evaluations) / len(evaluations))
    updates = [row for row in rows if "losses/loss" in row]
    assert [row["global_step"] for row in updates] == [100, 200, 300, 400, 500]
    assert all(f"uncertainty/{key}" in row for row in updates for key in HAS_UNCERTAINTY.get(name, []))
    assert len(result.out.splitlines()) == len(episodes) + 2  # no terminal: the folder, a line an episode, the end


@pytest.mark.parametrize("name", DISCRETE)
def test_the_same_seed_gives_the_same_run(name: str, tmp_path: Path):
    """To the byte, but for the speed."""
    for run_name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        run = run_script if run_name == "again" and name == "ivdqn" else call_script
        assert run(name, *SHORT, "--seed", seed, "--run-name", run_name, cwd=tmp_path).code == 0
    written = {path.parent.name: path.read_bytes() for path in tmp_path.rglob("metrics.jsonl")}
    first, again, other = (re.sub(rb'"charts/SPS": \d+', b"", written[name]) for name in ("first", "again", "other"))
    assert first == again
    assert first != other


def test_evaluation_does_not_disturb_training_and_can_be_off(tmp_path: Path):
    for run_name, every in (("each", "1"), ("third", "3"), ("never", "0")):
        arguments = (*SHORT, "--run-name", run_name, "--eval-every", every)
        assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    runs = {
        name: [r for r in read_rows(tmp_path / "runs" / name) if "charts/episode" in r]
        for name in ("each", "third", "never")
    }
    returns = {name: [row["charts/episodic_return"] for row in rows] for name, rows in runs.items()}
    assert returns["each"] == returns["third"] == returns["never"]
    evaluated = {
        name: [row["charts/episode"] for row in rows if "charts/eval_return" in row] for name, rows in runs.items()
    }
    assert evaluated["never"] == []
    assert evaluated["third"] == [episode for episode in evaluated["each"] if episode % 3 == 0]


def test_env_seed_changes_the_environment_only(tmp_path: Path):
    lengths = {}
    for run_name, env_seed in (("same", "1"), ("other", "2")):
        arguments = (*SHORT, "--seed", "1", "--env-seed", env_seed, "--run-name", run_name)
        assert call_script("dqn", *arguments, cwd=tmp_path).code == 0
        lengths[run_name] = [r.get("charts/episodic_length") for r in read_rows(tmp_path / "runs" / run_name)]
    assert call_script("dqn", *SHORT, "--seed", "1", "--run-name", "default", cwd=tmp_path).code == 0
    default = [r.get("charts/episodic_length") for r in read_rows(tmp_path / "runs" / "default")]
    assert default == lengths["same"] != lengths["other"]


def test_the_default_run_name(tmp_path: Path):
    arguments = (*SHORT, "--env-id", "paper_envs:Cartpole-v0", "--total-episodes", "2")
    assert call_script("dqn", *arguments, cwd=tmp_path).code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("paper_envs_Cartpole-v0__dqn__1__1")
    assert len([row for row in read_rows(folder) if "charts/episode" in row]) == 2


def test_a_solved_run_ends(tmp_path: Path):
    """At the hundredth evaluation and not before, however high the first returns are."""
    arguments = ("--env-id", "CartPole-v1", "--learning-starts", "100000", "--total-episodes", "120")
    for solved_at, episodes in (("5", 100), ("1000", 120)):
        result = call_script("dqn", *arguments, "--solved-at", solved_at, "--run-name", solved_at, cwd=tmp_path)
        assert f", {episodes} episodes" in result.out
    again = call_script("dqn", "--resume", "--run-name", "5", cwd=tmp_path)
    assert (again.code, ", 100 episodes" in again.out) == (0, True)
    longer = call_script("dqn", "--resume", "--run-name", "5", "--solved-at", "400", cwd=tmp_path)
    assert ", 120 episodes" in longer.out


def test_evaluation_may_use_another_environment(tmp_path: Path):
    arguments = ("--env-id", "paper_envs:CartpoleNoise10-v0", "--eval-env-id", "paper_envs:Cartpole-v0")
    arguments += ("--total-timesteps", "300", "--run-name", "x")
    assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    rows = [row for row in read_rows(tmp_path / "runs" / "x") if "charts/episode" in row]
    assert all(row["charts/eval_return"] == int(row["charts/eval_return"]) for row in rows)
    assert any(row["charts/episodic_return"] != int(row["charts/episodic_return"]) for row in rows)


def test_the_evaluation_environment_must_have_the_same_spaces(tmp_path: Path):
    result = call_script("dqn", *SHORT, "--eval-env-id", "Acrobot-v1", cwd=tmp_path)
    assert refusal(result, "dqn") == "--eval-env-id Acrobot-v1 has other spaces than --env-id CartPole-v1"
    assert list(tmp_path.iterdir()) == []


def test_an_n_step_target_waits_for_its_first_transition(tmp_path: Path):
    arguments = ("--env-id", "CartPole-v1", "--learning-starts", "0", "--n-step", "5", "--total-timesteps", "40")
    result = call_script("dqn", *arguments, "--log-every", "1", "--run-name", "x", cwd=tmp_path)
    assert result.code == 0, result.err
    updates = [row["global_step"] for row in read_rows(tmp_path / "runs" / "x") if "losses/loss" in row]
    assert updates == list(range(5, 41))


# ---------------------------------------------------------------------------- what is refused
WRONG = [
    (["--env-id", "Pendulum-v1"], "sac.py"),
    (["--env-id", "NoSuchThing-v0"], "NoSuchThing"),
    (["--env-id", "no_such_module:Thing-v0"], "no_such_module"),
    (["--env-id", "CarRacing-v3", "--env-kwargs", "continuous=false"], "27648 numbers"),  # pictures
    (["--eval-env-id", "Pendulum-v1"], "sac.py"),
    (["--total-timesteps", "0"], "--total-timesteps must be between 1 and 1e+12, not 0"),
    (["--total-episodes", "0"], "--total-episodes must be between 1 and 1e+12, not 0"),
    (["--seed", "-1"], "--seed must be between 0 and 1e+12, not -1"),
    (["--learning-rate", "nan"], "--learning-rate must be between 0 and 1e+12, not nan"),
    (["--tau", "1.5"], "--tau must be between 0 and 1, not 1.5"),
    (["--gamma", "2"], "--gamma must be between 0 and 1, not 2.0"),
    (["--batch-size", "0"], "--batch-size must be between 1 and 1e+06, not 0"),
    (["--n-step", "0"], "--n-step must be between 1 and 1e+12, not 0"),
    (["--resume"], "--resume needs the --run-name of the run"),
    (["--evaluate", "runs/none"], "runs/none holds no run"),
    (["--warm-start", "runs/none"], "runs/none/checkpoint.pt cannot be loaded"),
    (["--env-kwargs", "length"], "--env-kwargs takes a JSON object or key=value, not length"),
    (["--env-kwargs", '{"length": '], '--env-kwargs {"length":  is no JSON object'),
    (["--env-id", "CartPole-v1", "--env-kwargs", "no_such_argument=1"], "no_such_argument"),
    (["--env-id", "FrozenLake-v1", "--env-kwargs", "map_name=none"], "FrozenLake-v1 cannot be made"),
]
WRONG_ENSEMBLE = [
    (["--num-nets", "0"], "--num-nets must be between 1 and 1000, not 0"),
    (["--mask-prob", "0"], "--mask-prob must be between 0.001 and 1, not 0.0"),
    (["--prior-scale", "-1"], "--prior-scale must be between 0 and 1e+12, not -1.0"),
]
WRONG_IV = [
    (["--mebs-ratio", "1.01"], "--mebs-ratio must be between 0 and 1, not 1.01"),
    (["--xi", "inf"], "--xi must be between 0 and 1e+12, not inf"),
    (["--loss-attenuation-weight", "-1"], "--loss-attenuation-weight must be between 0 and 1e+12, not -1.0"),
]


@pytest.mark.parametrize("name", DISCRETE)
def test_bad_input_is_refused_in_one_sentence_before_anything_is_written(name: str, tmp_path: Path):
    wrong = [*WRONG, *(WRONG_ENSEMBLE if name != "dqn" else []), *(WRONG_IV if name == "ivdqn" else [])]
    if name not in ("dqn", "ivdqn"):
        wrong = [*WRONG[:2], *WRONG_ENSEMBLE]  # the rest is the same text in all scripts
    for arguments, said in wrong:
        sentence = refusal(call_script(name, *arguments, cwd=tmp_path), name)
        assert said in sentence, (arguments, sentence)
        if said.startswith("--"):
            assert sentence.startswith(said)
        assert list(tmp_path.iterdir()) == [], arguments


@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["--weighting", "best"], ["--gamma", "high"]])
def test_what_is_no_argument_is_refused(arguments: list[str], tmp_path: Path):
    result = call_script("ivdqn", *arguments, cwd=tmp_path)
    assert result.code == 2
    assert arguments[-1].strip("-") in result.out + result.err
    assert list(tmp_path.iterdir()) == []


def kinds_of_arguments(name: str) -> dict[str, tuple]:
    """Each argument of a script, and the types that it may have, among which a Literal is its own."""
    hints = get_type_hints(script(name).Args)
    kinds = {}
    for field, kind in hints.items():
        is_union = get_args(kind) and get_origin(kind) not in (Literal, tuple)
        kinds[field] = get_args(kind) if is_union else (kind,)
    return kinds


NUMBERS = [
    (name, field) for name in SCRIPTS for field, kinds in kinds_of_arguments(name).items() if {int, float} & set(kinds)
]
OTHERS = [(name, field) for name in SCRIPTS for field in kinds_of_arguments(name) if (name, field) not in NUMBERS]


def check(name: str, field: str, value: Any) -> str | None:
    """What a script says of an argument's value, if anything."""
    module = script(name)
    args = dataclasses.replace(module.Args())
    setattr(args, field, value)
    try:
        module.check_args(args)
    except module.RunError as error:
        return f"{error}" if error.code == 2 else f"code {error.code}: {error}"
    return None


@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_every_number_has_a_range_and_nothing_outside_it_is_taken(name: str, field: str):
    kinds = kinds_of_arguments(name)[field]
    flag = "--" + field.replace("_", "-")
    refused = check(name, field, -(10**15) if int in kinds else -math.inf)
    low, high = map(float, re.match(rf"{flag} must be between (.*) and (.*), not -", refused).groups())
    if int in kinds:
        low, high = int(low), int(high)
    assert check(name, field, low) is None
    assert check(name, field, high) is None
    if int in kinds:
        outside = [low - 1, high + 1]
    else:
        outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]
    for value in outside:
        said = check(name, field, value)
        assert said == f"{flag} must be between {low:g} and {high:g}, not {value}"
    for value in (math.nan, math.inf, -math.inf, str(low), True, [low], *([1.5] if int in kinds else [])):
        assert (check(name, field, value) or "").startswith(f"{flag} must be "), value
    assert (check(name, field, None) is None) == (type(None) in kinds)


@pytest.mark.parametrize(("name", "field"), OTHERS)
def test_what_is_no_number_has_its_type(name: str, field: str):
    kinds = kinds_of_arguments(name)[field]
    assert check(name, field, getattr(script(name).Args(), field)) is None
    wrong = [7, 0.5, ["text"], (1,)]
    if str not in kinds:
        wrong.append("no such text")
    if bool not in kinds:
        wrong.append(True)
    if type(None) not in kinds:
        wrong.append(None)
    for value in wrong:
        said = check(name, field, value)
        assert said is not None, value
        assert said.startswith("--" + field.replace("_", "-") + " must be ")


def test_a_closed_pipe_ends_the_run_with_a_sentence(tmp_path: Path):
    """As by `python dqn.py | head -n 1`."""
    command = [sys.executable, str(ROOT / "dqn.py"), "--env-id", "CartPole-v1", "--runs-dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 1
    assert process.stderr.read().splitlines() == ["dqn.py: nobody reads the output any more"]


def test_an_unwritable_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = call_script("dqn", *SHORT, "--runs-dir", "file/runs", cwd=tmp_path)
    assert "cannot be made" in refusal(result, "dqn")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_too_long_for_a_folder_is_refused(tmp_path: Path):
    refusal(call_script("dqn", *SHORT, "--run-name", "x" * 300, cwd=tmp_path), "dqn")


def test_tracking_without_an_account_is_refused(tmp_path: Path):
    environment = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path / "home"), "NETRC": "none"}
    try:
        command = [sys.executable, str(ROOT / "dqn.py"), *SHORT, "--track", "--run-name", "x"]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        pytest.skip("without a network, wandb does not say that there is no account")
    assert done.returncode == 2, done.stderr
    assert re.search(r"^dqn\.py: --track .*WANDB_MODE=offline", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "x").exists()


# ---------------------------------------------------------------------------- environments
@pytest.mark.parametrize("name", ["ivdqn", "ivsac"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_what_is_not_finite_ends_the_run_with_a_sentence(name: str, what: str, value: str, tmp_path: Path):
    env_id = "Odd-v0" if name == "ivdqn" else "OddContinuous-v0"
    arguments = ("--env-id", env_id, "--env-kwargs", f"odd_{what}={value}", "--run-name", "x", "--eval-every", "0")
    result = call_script(name, *arguments, "--num-threads", "1", cwd=tmp_path)
    assert result.code == 1
    assert result.err == f"{name}.py: the {what} is not finite at step 77: the run ends here\n"
    assert [row["global_step"] for row in read_rows(tmp_path / "runs" / "x")] == [20, 40, 60]


@pytest.mark.parametrize("name", ["dqn", "ivdqn"])
def test_a_loss_that_overflows_ends_the_run_with_a_sentence(name: str, tmp_path: Path):
    arguments = (*SHORT, "--env-id", "Odd-v0", "--env-kwargs", "odd_reward=1e30", "--eval-every", "0")
    result = call_script(name, *arguments, "--run-name", "x", cwd=tmp_path)
    assert result.code == 1
    assert re.fullmatch(rf"{name}\.py: the loss is not finite at step \d+: the run ends here\n", result.err)


def test_what_is_not_finite_in_the_evaluation_only_ends_the_run_with_a_sentence(tmp_path: Path):
    arguments = ("--env-id", "Odd-v0", "--eval-env-id", "OddNan-v0", "--run-name", "x")
    result = call_script("dqn", *arguments, cwd=tmp_path)
    assert result.code == 1
    assert result.err == "dqn.py: the reward is not finite at step 80: the run ends here\n"


@pytest.mark.parametrize("name", ["dqn", "sac"])
@pytest.mark.parametrize(
    "given",
    [
        ['{"reward": -2.5, "length": 10}'],
        ["reward=-2.5", "length=10"],
        ["reward=7", '{"reward": -2.5, "length": 10}'],  # the last counts
    ],
)
def test_arguments_of_the_environment(name: str, given: list[str], tmp_path: Path):
    """Both environments get them, they are saved, and the resumed and the evaluated run know them."""
    env_id = "Odd-v0" if name == "dqn" else "OddContinuous-v0"
    OddEnv.made_with.clear()
    arguments = ("--env-id", env_id, "--run-name", "x", "--total-timesteps", "30", "--eval-every", "10")
    arguments += ("--learning-starts", "1000", "--num-threads", "1")
    assert call_script(name, *arguments, "--env-kwargs", *given, cwd=tmp_path).code == 0
    config = json.loads((tmp_path / "runs" / "x" / "config.json").read_text())
    assert config["args"]["env_kwargs"] == given
    more = ("--resume", "--run-name", "x", "--total-timesteps", "60")
    assert call_script(name, *more, cwd=tmp_path).code == 0
    evaluated = call_script(name, "--evaluate", "runs/x", "--eval-episodes", "1", cwd=tmp_path)
    assert evaluated.out == "mean -25.00, standard deviation 0.00, returns [-25.0]\n"
    assert [(made["reward"], made["length"]) for made in OddEnv.made_with] == [(-2.5, 10)] * 9
    returns = [row["charts/episodic_return"] for row in read_rows(tmp_path / "runs" / "x") if "charts/episode" in row]
    assert returns == [-25.0] * 6
    other = call_script(name, "--resume", "--run-name", "x", "--env-kwargs", "reward=1", cwd=tmp_path)
    assert "env_kwargs" in refusal(other, name)


def test_a_value_that_is_no_json_is_a_string():
    module = script("dqn")
    args = module.Args(env_kwargs=("a=1", "b=4x4", "c=null", "d=[1, 2]", "e=x=y", 'f="1"', "g="))
    expected = {"a": 1, "b": "4x4", "c": None, "d": [1, 2], "e": "x=y", "f": "1", "g": ""}
    assert module.read_env_kwargs(args) == expected


@pytest.mark.parametrize(
    ("env_id", "kwargs", "num_inputs"),
    [("FrozenLake-v1", ["map_name=4x4", "is_slippery=false"], 16), ("OddDict-v0", [], 5)],
)
def test_observations_of_any_shape_are_flattened(env_id: str, kwargs: list[str], num_inputs: int, tmp_path: Path):
    arguments = (*SHORT, "--total-timesteps", "200", "--env-id", env_id, "--env-kwargs", *kwargs)
    result = call_script("dqn", *arguments, "--run-name", "x", cwd=tmp_path)
    assert result.code == 0, result.err
    arrays = read_checkpoint(tmp_path / "runs" / "x")["agent"]["buffer"]["arrays"]
    assert arrays["observation"].shape == (200, num_inputs)
    categories = arrays["observation"] if env_id == "FrozenLake-v1" else arrays["observation"][:, :3]
    assert (categories.sum(1) == 1).all()  # one-hot
    assert len(categories.unique(dim=0)) > 2


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_a_script_runs_where_there_is_no_fcntl(name: str, tmp_path: Path):
    env_id = "CartPole-v1" if name == "dqn" else "Pendulum-v1"
    arguments = ["--env-id", env_id, "--total-timesteps", "250", "--learning-starts", "1000", "--run-name", "x"]
    words = [f"{name}.py", *arguments, "--num-threads", "1"]
    code = "import runpy, sys; sys.modules['fcntl'] = None; sys.argv = sys.argv[1:]"
    code += f"; runpy.run_path({str(ROOT / f'{name}.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished: 250 steps" in done.stdout


# ---------------------------------------------------------------------------- videos and Weights & Biases
def test_video_of_evaluation_episodes(tmp_path: Path):
    result = call_script(
        "ivdqn", *SHORT, "--total-timesteps", "200", "--run-name", "x", "--capture-video", cwd=tmp_path
    )
    assert result.code == 0, result.err
    videos = list((tmp_path / "runs" / "x" / "videos").rglob("*.mp4"))
    assert len(videos) >= 2
    import imageio.v3

    frames = imageio.v3.imread(videos[0])
    assert frames.ndim == 4
    assert frames.std() > 0


def test_videos_do_not_disturb_the_run(tmp_path: Path):
    for flag in ("--capture-video", "--no-capture-video"):
        arguments = (*SHORT, "--total-timesteps", "200", "--run-name", flag.strip("-"), flag)
        assert call_script("dqn", *arguments, cwd=tmp_path).code == 0
    assert timeless(tmp_path / "runs" / "capture-video") == timeless(tmp_path / "runs" / "no-capture-video")


def test_a_video_that_cannot_be_recorded_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = call_script("dqn", *SHORT, "--env-id", "Odd-v0", "--capture-video", cwd=tmp_path)
    assert "Odd-v0 cannot be" in refusal(result, "dqn")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(sys.modules, "moviepy", None)  # as if it were not installed
    result = call_script("dqn", *SHORT, "--capture-video", cwd=tmp_path)
    sentence = refusal(result, "dqn")
    assert sentence.startswith("the environment CartPole-v1 cannot be run with --capture-video: ")
    assert "moviepy" in sentence
    assert list(tmp_path.iterdir()) == []


def tracked(folder: Path) -> tuple[str, str, dict[int, dict[str, Any]]]:
    """The id, the name and the history by step of the newest W&B log in a run's folder."""
    log = max(folder.rglob("*.wandb"), key=os.path.getmtime)
    history: dict[int, dict[str, Any]] = {}
    for record in wandb_records(log):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        if record.WhichOneof("record_type") == "history":
            items: dict[str, Any] = {}
            for item in record.history.item:
                key, *rest = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                if rest:  # of an object: a part of it
                    items.setdefault(key, {})["/".join(rest)] = value
                else:
                    items[key] = value
            history.setdefault(items["_step"], {}).update(items)
    return run.run_id, run.display_name, history


def test_what_is_tracked_can_be_read_back(tmp_path: Path):
    arguments = (*SHORT, "--total-timesteps", "150", "--run-name", "x", "--track")
    for runs_dir, flags in (("one", ["--capture-video"]), ("two", [])):
        result = run_script("ivdqn", *arguments, "--runs-dir", runs_dir, *flags, cwd=tmp_path)
        assert result.code == 0, result.err
    first_id, first_name, history = tracked(tmp_path / "one" / "x")
    second_id, second_name, _ = tracked(tmp_path / "two" / "x")
    assert (first_name, second_name) == ("x", "x")
    assert first_id != second_id
    rows = read_rows(tmp_path / "one" / "x")
    for row in rows:
        logged = history[row["global_step"]]
        assert {key: logged[key] for key in row} == pytest.approx(row)
    expected = {(row["global_step"], key) for row in rows for key in row}
    found = {(step, key) for step, row in history.items() for key in row if not key.startswith(("_", "videos/"))}
    assert found == expected
    videos = [value for row in history.values() for key, value in row.items() if key.startswith("videos/")]
    assert len(videos) == len(list((tmp_path / "one" / "x" / "videos").rglob("*.mp4"))) >= 2
    assert {video["_type"] for video in videos} == {"video-file"}

    # Resumed, the run goes on under its own id.
    more = ("--resume", "--run-name", "x", "--runs-dir", "one", "--total-timesteps", "250", "--no-capture-video")
    assert run_script("ivdqn", *more, cwd=tmp_path).code == 0
    resumed_id, resumed_name, history = tracked(tmp_path / "one" / "x")
    assert (resumed_id, resumed_name) == (first_id, "x")
    assert set(history) == {row["global_step"] for row in read_rows(tmp_path / "one" / "x")[len(rows) :]}
    assert not any(key.startswith("videos/") for row in history.values() for key in row)  # they were there already


# ---------------------------------------------------------------------------- terminals
def on_a_terminal(
    name: str, *arguments: str, cwd: Path, interrupt_at: str | None = None, seconds: float = 120
) -> tuple[str, int]:
    """What a script writes to a terminal of 80 columns, and its exit code; Ctrl-C when it has written some text."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 99
        try:
            sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
            ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            code = execute(ROOT / f"{name}.py", arguments, cwd)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    written = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                data = os.read(terminal, 4096)
            except OSError:  # so a terminal ends on Linux
                data = b""
            if not data:
                break
            written += data
        if interrupt_at is not None and interrupt_at.encode() in written:
            os.write(terminal, b"\x03")
            interrupt_at = None
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    return written.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def bars(written: str) -> list[str]:
    """The states of the progress bar on a terminal, oldest first."""
    lines = re.sub(r"\x1b\[\w", "", written).replace("\n", "\r").split("\r")
    return [line.rstrip() for line in lines if re.match(r" *\d+/\d+, ", line)]


def test_the_bar_fits_into_eighty_columns(tmp_path: Path):
    arguments = (*SHORT, "--env-id", "Odd-v0", "--env-kwargs", "reward=-61.725", "pause=0.002", "--run-name", "x")
    written, code = on_a_terminal("dqn", *arguments, "--total-timesteps", "400", cwd=tmp_path)
    assert code == 0, written
    shown = bars(written)
    assert len(shown) > 3
    assert max(map(len, shown)) <= 80, max(shown, key=len)
    step = r" *\d+/\d+\D"
    texts = r".*\bep(isode)? \d+ return -1234(\.5)? eval -1234(\.5)? mean(100)? -1234(\.5)?"
    rate_and_time_left = r" +[\d.]+/s .*\d\d:\d\d"
    assert re.match(step + texts + rate_and_time_left, shown[-2]), shown[-2]
    assert "finished: 400 steps, 20 episodes" in written


@pytest.mark.parametrize("rate", [10, 100, 1000])
@pytest.mark.parametrize(
    ("total", "episode", "value"),
    [(500_000, 499, -123.4), (200_000, 999, -1234.5), (1_000_000, 9999, 5678.9)],
)
def test_the_bar_of_a_long_run_fits_into_eighty_columns(
    total: int, episode: int, value: float, rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With as many digits as long runs have. tqdm cuts what is too long for the terminal: nothing may be missing."""
    module = script("ivdqn")
    args = module.Args(env_id="Odd-v0", runs_dir=str(tmp_path), total_timesteps=total, total_episodes=None)
    _, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    monkeypatch.setattr(sys, "stderr", open(terminal, "w"))
    with module.Run(args) as run:
        agent = module.Agent(run.env.observation_space, run.env.action_space, args)
        run.start(agent, np.random.default_rng(0))
        run.global_step = total // 10 * 9
        run.show_progress()
        run.bar.start_t -= run.global_step / rate
        run.log({name: value for name in module.SHOWN} | {"charts/episode": episode})
        line = str(run.bar)
    assert len(line) <= 80, line
    texts = (
        rf"{total // 10 * 9}/{total}, ep(isode)? {episode} return {value:.4g} eval {value:.4g} mean(100)? {value:.4g}"
    )
    rate_and_time_left = r" \d+(\.\d\d)?/s (\d+:)?\d\d:\d\d( left)?$"
    assert re.match(texts + rate_and_time_left, line), line


@pytest.mark.parametrize("name", ["sac", "ivsac"])
def test_the_bar_moves_while_the_updates_of_a_rollout_are_made(name: str, tmp_path: Path):
    arguments = ("--env-id", "Pendulum-v1", "--total-timesteps", "400", "--learning-starts", "100", "--eval-every", "0")
    arguments += ("--rollout-length", "200", "--batch-size", "64", "--hidden-size", "64", "--num-threads", "1")
    arguments += ("--updates-per-step", "1" if name == "ivsac" else "2")
    written, code = on_a_terminal(name, *arguments, "--run-name", "x", cwd=tmp_path)
    assert code == 0, written
    positions = [int(line.split("/")[0]) for line in bars(written)]
    assert len({position for position in positions if 200 < position < 400}) >= 2, positions
    assert positions == sorted(positions)
    assert positions[-1] == 400


def test_control_c_on_a_terminal(tmp_path: Path):
    arguments = ("--env-id", "Odd-v0", "--env-kwargs", "pause=0.002", "--run-name", "x")
    written, code = on_a_terminal("dqn", *arguments, cwd=tmp_path, interrupt_at="eval ")
    assert code == 130, written
    assert "finishing the episode, then saving; once more to quit at once" in written
    assert re.search(r"dqn\.py: stopped: \d+ steps, \d+ episodes in runs/x; go on with python dqn\.py", written)
    assert "Traceback" not in written


def test_help_explains_every_argument(tmp_path: Path):
    result = run_script("ivdqn", "--help", cwd=tmp_path, COLUMNS="200")
    assert result.code == 0
    for flag, symbol in {
        "--num-nets": "N:",
        "--mebs-ratio": "MEBS",
        "--xi ": "constant xi",
        "--mask-prob": "p_m:",
    }.items():
        assert flag in result.out
        assert symbol in result.out
    for field in dataclasses.fields(script("ivdqn").Args):
        assert "--" + field.name.replace("_", "-") in result.out
