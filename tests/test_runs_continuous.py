"""The continuous scripts as commands: what they write, how they repeat, what they refuse."""

import json
import re
from ctypes.util import find_library
from pathlib import Path

import numpy as np
import pytest
from conftest import CONTINUOUS, CONTINUOUS_ABLATIONS, call_script, read_checkpoint, read_rows, refusal, run_script

TINY = ("--hidden-size", "16", "--batch-size", "16", "--num-threads", "1", "--log-every", "100", "--eval-every", "200")
SHORT = (
    "--env-id",
    "Pendulum-v1",
    "--total-timesteps",
    "450",
    "--learning-starts",
    "100",
    "--rollout-length",
    "50",
    *TINY,
)
LOSSES = ["critic", "actor", "alpha", "alpha_loss", "q_values"]
STATISTICS = ["variance_mean", "variance_median", "weight_max", "effective_batch_size", "xi"]
COMMANDS = [(name, []) for name in CONTINUOUS] + [("ivsac", flags) for flags in CONTINUOUS_ABLATIONS.values()]
WRONG = [
    (["--env-id", "CartPole-v1"], "dqn.py"),
    (["--env-id", "NoSuchThing-v0"], "NoSuchThing"),
    (["--eval-env-id", "CartPole-v1"], "dqn.py"),
    (["--env-id", "CarRacing-v3"], "27648 numbers"),  # pictures
    (["--env-id", "OddUnbounded-v0"], "bounded"),
    (["--total-timesteps", "0"], "--total-timesteps must be between 1 and 1e+12, not 0"),
    (["--policy-lr", "-1"], "--policy-lr must be between 0 and 1e+12, not -1.0"),
    (["--q-lr", "inf"], "--q-lr must be between 0 and 1e+12, not inf"),
    (["--alpha-lr", "nan"], "--alpha-lr must be between 0 and 1e+12, not nan"),
    (["--alpha", "0"], "--alpha must be between 1e-12 and 1e+12, not 0.0"),
    (["--rollout-length", "0"], "--rollout-length must be between 1 and 1e+12, not 0"),
    (["--updates-per-step", "-1"], "--updates-per-step must be between 0 and 1e+12, not -1.0"),
    (["--resume"], "--resume needs the --run-name of the run"),
]
WRONG_ENSEMBLE = [
    (["--num-nets", "0"], "--num-nets must be between 1 and 1000, not 0"),
    (["--mask-prob", "1.5"], "--mask-prob must be between 0.001 and 1, not 1.5"),
    (["--ucb", "-1"], "--ucb must be between 0 and 1e+12, not -1.0"),
]


@pytest.mark.parametrize(("name", "flags"), COMMANDS)
def test_a_short_run_writes_its_files(name: str, flags: list[str], tmp_path: Path):
    result = call_script(name, *SHORT, "--seed", "4", "--run-name", "x", *flags, cwd=tmp_path)
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / "x"
    config = json.loads((folder / "config.json").read_text())
    assert (config["script"], config["status"]) == (f"{name}.py", "finished")
    rows = read_rows(folder)
    episodes = [row for row in rows if "charts/episode" in row]
    assert [row["global_step"] for row in episodes] == [200, 400]
    evaluations = [row for row in rows if "charts/eval_return" in row]
    assert [row["global_step"] for row in evaluations] == [200, 400]
    updates = [row for row in rows if "losses/critic" in row]
    assert [row["global_step"] for row in updates] == [100, 200, 300, 400]
    expected = [f"losses/{key}" for key in LOSSES]
    for key in ("exploration/ucb_std", "exploration/acting_member"):  # nobody chose the random actions of the first 100
        assert [row["global_step"] for row in updates if key in row] == ([] if name == "sac" else [200, 300, 400])
    if name == "sunrise":
        expected += [f"uncertainty/critic_{key}" for key in STATISTICS[:3]]
    if name == "ivsac":
        expected += ["losses/critic_biv", "losses/critic_attenuation", "uncertainty/predicted_variance_mean"]
        expected += [f"uncertainty/{part}_{key}" for part in ("critic", "actor") for key in STATISTICS]
    assert all(key in row and np.isfinite(row[key]) for row in updates for key in expected)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_same_seed_gives_the_same_run(name: str, tmp_path: Path):
    """To the byte, but for the speed."""
    for run_name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        assert call_script(name, *SHORT, "--seed", seed, "--run-name", run_name, cwd=tmp_path).code == 0
    written = {path.parent.name: path.read_bytes() for path in tmp_path.rglob("metrics.jsonl")}
    first, again, other = (re.sub(rb'"charts/SPS": \d+', b"", written[name]) for name in ("first", "again", "other"))
    assert first == again
    assert first != other


def test_without_ucb_one_member_acts_through_an_episode(tmp_path: Path):
    arguments = (
        *SHORT,
        "--total-timesteps",
        "1600",
        "--log-every",
        "50",
        "--updates-per-step",
        "0.02",
        "--eval-every",
        "0",
    )
    members = {}
    for ucb in ("0", "10"):
        assert call_script("ivsac", *arguments, "--ucb", ucb, "--run-name", f"ucb{ucb}", cwd=tmp_path).code == 0
        rows = [row for row in read_rows(tmp_path / "runs" / f"ucb{ucb}") if "exploration/acting_member" in row]
        members[ucb] = [
            {row["exploration/acting_member"] for row in rows if (row["global_step"] - 1) // 200 == e} for e in range(8)
        ]
    assert all(len(acting) == 1 for acting in members["0"])
    assert len(set.union(*members["0"])) > 1
    assert any(len(acting) > 1 for acting in members["10"])


def test_step_by_step_sac(tmp_path: Path):
    assert call_script("sac", *SHORT, "--rollout-length", "1", "--run-name", "x", cwd=tmp_path).code == 0
    updates = [row for row in read_rows(tmp_path / "runs" / "x") if "losses/critic" in row]
    assert [row["global_step"] for row in updates] == [100, 200, 300, 400]


def test_a_fixed_temperature_stays(tmp_path: Path):
    assert call_script("ivsac", *SHORT, "--no-autotune", "--alpha", "0.3", "--run-name", "x", cwd=tmp_path).code == 0
    rows = [row for row in read_rows(tmp_path / "runs" / "x") if "losses/alpha" in row]
    assert [row["losses/alpha"] for row in rows] == pytest.approx([0.3] * 4)


@pytest.mark.parametrize("env_id", ["Walker2d-v4", "Walker2d-v5", "Ant-v4", "Humanoid-v4", "paper_envs:MBBL-Hopper-v0"])
def test_mujoco(env_id: str, tmp_path: Path):
    arguments = (
        "--total-timesteps",
        "260",
        "--learning-starts",
        "200",
        "--rollout-length",
        "20",
        "--updates-per-step",
        "0.1",
    )
    result = call_script("ivsac", "--env-id", env_id, "--seed", "3", *arguments, *TINY, "--run-name", "x", cwd=tmp_path)
    assert result.code == 0, result.err
    assert any("charts/eval_return" in row for row in read_rows(tmp_path / "runs" / "x"))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_walker2d_as_a_command(name: str, tmp_path: Path):
    arguments = ("--total-timesteps", "230", "--learning-starts", "200", "--rollout-length", "10", "--eval-every", "0")
    arguments += ("--batch-size", "32", "--num-threads", "1")
    result = run_script(name, "--env-id", "Walker2d-v4", "--seed", "3", *arguments, cwd=tmp_path, MUJOCO_GL="")
    assert result.code == 0, result.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"Walker2d-v4__{name}__3__")


@pytest.mark.parametrize("name", CONTINUOUS)
def test_bad_input_is_refused_in_one_sentence_before_anything_is_written(name: str, tmp_path: Path):
    wrong = WRONG if name in ("sac", "ivsac") else WRONG[:2]  # the rest is the same text in all scripts
    for arguments, said in [*wrong, *(WRONG_ENSEMBLE if name != "sac" else [])]:
        sentence = refusal(call_script(name, *arguments, "--num-threads", "1", cwd=tmp_path), name)
        assert said in sentence, (arguments, sentence)
        if said.startswith("--"):
            assert sentence == said
        assert list(tmp_path.iterdir()) == [], arguments


def test_a_dictionary_is_flattened(tmp_path: Path):
    kwargs = ("--env-kwargs", "as_dict=true")
    result = call_script("sac", *SHORT, "--env-id", "OddContinuous-v0", *kwargs, "--run-name", "x", cwd=tmp_path)
    assert result.code == 0, result.err
    arrays = read_checkpoint(tmp_path / "runs" / "x")["agent"]["buffer"]["arrays"]
    assert arrays["observation"].shape == (450, 5)
    assert abs(arrays["action"]).max() <= 1  # though the environment's go from -2 to 2


@pytest.mark.skipif(
    find_library("OSMesa") is None, reason="without OSMesa (Debian's libosmesa6), MuJoCo needs a display to render"
)
def test_video_of_a_mujoco_evaluation(tmp_path: Path):
    arguments = (
        "--env-id",
        "Hopper-v5",
        "--total-timesteps",
        "120",
        "--learning-starts",
        "100",
        "--rollout-length",
        "20",
    )
    result = run_script(
        "sac", *arguments, *TINY, "--eval-every", "60", "--capture-video", "--run-name", "x", cwd=tmp_path
    )
    assert result.code == 0, result.err
    assert len(list((tmp_path / "runs" / "x" / "videos").rglob("*.mp4"))) == 2


@pytest.mark.parametrize("name", ["sac", "ivsac"])
def test_evaluation_does_not_disturb_training(name: str, tmp_path: Path):
    arguments = ("--env-id", "Pendulum-v1", "--total-timesteps", "400", "--learning-starts", "100", *TINY)
    returns = {}
    for every in ("0", "50"):
        options = ("--rollout-length", "20", "--eval-every", every, "--run-name", every)
        result = call_script(name, *arguments, *options, cwd=tmp_path)
        assert result.code == 0, result.err
        rows = read_rows(tmp_path / "runs" / every)
        returns[every] = [row["charts/episodic_return"] for row in rows if "charts/episodic_return" in row]
    assert returns["0"] == returns["50"]
