"""The discrete scripts as commands: what they write, how they repeat, what they refuse."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import DISCRETE, DISCRETE_ABLATIONS, call_script, read_rows, run_script, timeless

SHORT = ("--env-id", "CartPole-v1", "--total-timesteps", "500", "--learning-starts", "64", "--log-every", "100")
CHARTS = ["episode", "episodic_return", "episodic_length", "eval_return", "eval_return_mean100", "SPS"]
UNCERTAINTY = ["target_variance_mean", "target_variance_median", "weight_max", "effective_batch_size", "xi"]
HAS_UNCERTAINTY = {"sunrise_dqn": UNCERTAINTY[:3], "ivdqn": [*UNCERTAINTY, "predicted_variance_mean"]}
COMMANDS = [(name, []) for name in DISCRETE] + [("ivdqn", flags) for flags in DISCRETE_ABLATIONS.values()]
WRONG = [
    (["--env-id", "Pendulum-v1"], "sac.py"),
    (["--env-id", "NoSuchThing-v0"], "NoSuchThing"),
    (["--env-id", "no_such_module:Thing-v0"], "no_such_module"),
    (["--env-id", "FrozenLake-v1"], "flat Box"),
    (["--eval-env-id", "Pendulum-v1"], "sac.py"),
    (["--total-timesteps", "0"], "total_timesteps >= 1"),
    (["--total-episodes", "0"], "dqn.py: --total-episodes 0 was given, but total_episodes is None or total_episodes"),
    (["--seed", "-1"], "seed >= 0"),
    (["--env-seed", "-1"], "env_seed >= 0"),
    (["--learning-rate", "-0.1"], "learning_rate > 0"),
    (["--learning-rate", "nan"], "learning_rate > 0"),
    (["--tau", "1.5"], "0 < tau <= 1"),
    (["--gamma", "-0.5"], "0 <= gamma <= 1"),
    (["--epsilon-decay", "0"], "0 < epsilon_decay <= 1"),
    (["--start-epsilon", "2"], "start_epsilon"),
    (["--batch-size", "0"], "batch_size >= 1"),
    (["--batch-size", "200", "--buffer-size", "100"], "buffer_size"),
    (["--eval-every", "-1"], "eval_every >= 0"),
    (["--hidden-size", "0"], "hidden_size >= 1"),
    (["--resume", "--run-name", "never-started"], "never-started"),
    (["--no-such-flag"], "no-such-flag"),
]
WRONG_ENSEMBLE = [
    (["--num-nets", "0"], "num_nets >= 1"),
    (["--mask-prob", "0"], "0 < mask_prob <= 1"),
    (["--mask-prob", "1.1"], "0 < mask_prob <= 1"),
    (["--prior-scale", "-1"], "prior_scale >= 0"),
    (["--batch-size", "60", "--mask-prob", "0.5", "--buffer-size", "100"], "buffer_size"),
]
WRONG_IV = [
    (["--mebs-ratio", "0"], "0 < mebs_ratio <= 1"),
    (["--mebs-ratio", "1.01"], "0 < mebs_ratio <= 1"),
    (["--xi", "-1"], "0 <= xi"),
    (["--xi", "inf"], "xi < 1e30"),
    (["--loss-attenuation-weight", "-1"], "loss_attenuation_weight >= 0"),
    (["--uwac-beta", "0"], "uwac_beta > 0"),
    (["--weighting", "best"], "best"),
]


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
    assert len(result.out.splitlines()) == len(episodes) + 1  # no terminal: a line per episode


@pytest.mark.parametrize("name", DISCRETE)
def test_the_same_seed_gives_the_same_run(name: str, tmp_path: Path):
    for run_name, seed in (("first", "1"), ("again", "1"), ("other", "2")):
        run = run_script if run_name == "again" and name == "ivdqn" else call_script
        assert run(name, *SHORT, "--seed", seed, "--run-name", run_name, cwd=tmp_path).code == 0
    first, again, other = (timeless(tmp_path / "runs" / run_name) for run_name in ("first", "again", "other"))
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
    assert (
        call_script("dqn", *SHORT, "--env-id", "paper_envs:Cartpole-v0", "--total-episodes", "2", cwd=tmp_path).code
        == 0
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("paper_envs_Cartpole-v0__dqn__1__1")
    assert len([row for row in read_rows(folder) if "charts/episode" in row]) == 2


@pytest.mark.parametrize("name", DISCRETE)
def test_bad_input_is_refused_in_one_sentence_before_anything_is_written(name: str, tmp_path: Path):
    wrong = [*WRONG, *(WRONG_ENSEMBLE if name != "dqn" else []), *(WRONG_IV if name == "ivdqn" else [])]
    if name not in ("dqn", "ivdqn"):
        wrong = [*WRONG[:2], *WRONG_ENSEMBLE]  # the rest is the same text in all scripts
    for arguments, said in wrong:
        result = call_script(name, *arguments, cwd=tmp_path)
        assert result.code == 2, (arguments, result.err)
        assert said in result.err, (arguments, result.err)
        assert "Traceback" not in result.err
        if said != "best" and "no-such-flag" not in said:
            assert len([line for line in result.err.splitlines() if line.startswith(f"{name}.py: ")]) == 1, result.err
        assert list(tmp_path.iterdir()) == [], arguments


def test_an_unwritable_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = call_script("dqn", *SHORT, "--runs-dir", "file/runs", cwd=tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert "cannot be made" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


def test_a_compiled_loss_is_the_loss(tmp_path: Path):
    """The same first losses, up to rounding, from an environment and a buffer that the loss does not touch."""
    if not shutil.which("g++"):
        pytest.skip("--compile needs a C++ compiler")
    arguments = ("--env-id", "CartPole-v1", "--total-timesteps", "130", "--learning-starts", "100", "--log-every", "5")
    losses = {}
    for flag in ("--no-compile", "--compile"):
        name = flag.strip("-")
        result = run_script("ivdqn", *arguments, "--epsilon-decay", "1", flag, "--run-name", name, cwd=tmp_path)
        assert result.code == 0, result.err
        losses[flag] = [row["losses/loss"] for row in read_rows(tmp_path / "runs" / name) if "losses/loss" in row]
    assert len(losses["--compile"]) == 6
    assert losses["--compile"] == pytest.approx(losses["--no-compile"], rel=1e-3)


def test_tracking_without_an_account_is_refused(tmp_path: Path):
    environment = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path / "home"), "NETRC": "none"}
    result = run_script("dqn", *SHORT, "--track", "--run-name", "x", cwd=tmp_path, **environment)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("dqn.py: --track finds no API key")
    assert "WANDB_MODE=offline" in result.err
    assert not (tmp_path / "runs").exists()


BROKEN_ENV = """
import gymnasium as gym, numpy as np
class Broken(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def __init__(self, what, value): self.what, self.value, self.count = what, value, 0
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.count += 1
        value = self.value if self.count == 37 else 0.5
        observation = np.full(2, value if self.what == "observation" else 0.5, np.float32)
        return observation, value if self.what == "reward" else 0.5, False, self.count % 20 == 0, {}
for what in ("observation", "reward"):
    for name, value in (("nan", float("nan")), ("inf", float("inf"))):
        gym.register(f"{what}-{name}-v0", Broken, kwargs={"what": what, "value": value})
gym.register("huge-v0", Broken, kwargs={"what": "reward", "value": 1e30})
"""


@pytest.mark.parametrize(
    ("env_id", "what", "step"),
    [
        ("observation-nan", "observation", 37),
        ("observation-inf", "observation", 37),
        ("reward-nan", "reward", 37),
        ("reward-inf", "reward", 37),
        ("huge", "loss", None),  # its square overflows
    ],
)
def test_what_is_not_finite_ends_the_run_with_a_sentence(env_id: str, what: str, step: int | None, tmp_path: Path):
    (tmp_path / "broken_envs.py").write_text(BROKEN_ENV)
    arguments = (*SHORT, "--env-id", f"broken_envs:{env_id}-v0", "--run-name", "x", "--eval-every", "0")
    result = run_script("ivdqn", *arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith(f"ivdqn.py: the {what} at step {step or ''}")
    assert "Traceback" not in result.err


def test_evaluation_may_use_another_environment(tmp_path: Path):
    arguments = ("--env-id", "paper_envs:CartpoleNoise10-v0", "--eval-env-id", "paper_envs:Cartpole-v0")
    arguments += ("--total-timesteps", "300", "--run-name", "x")
    assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    rows = [row for row in read_rows(tmp_path / "runs" / "x") if "charts/episode" in row]
    assert all(row["charts/eval_return"] == int(row["charts/eval_return"]) for row in rows)
    assert any(row["charts/episodic_return"] != int(row["charts/episodic_return"]) for row in rows)


def test_video_of_evaluation_episodes(tmp_path: Path):
    result = run_script("ivdqn", *SHORT, "--run-name", "x", "--capture-video", cwd=tmp_path)
    assert result.code == 0, result.err
    videos = list((tmp_path / "runs" / "x" / "videos").rglob("*.mp4"))
    assert len(videos) >= 2
    import imageio.v3

    frames = imageio.v3.imread(videos[0])
    assert frames.ndim == 4
    assert frames.std() > 0


def test_tracking_offline_needs_no_account(tmp_path: Path):
    result = run_script("ivdqn", *SHORT, "--run-name", "x", "--track", cwd=tmp_path)
    assert result.code == 0, result.err
    (logged,) = (tmp_path / "runs" / "x").rglob("*.wandb")
    content = logged.read_bytes()
    for key in {key for row in read_rows(tmp_path / "runs" / "x") for key in row}:
        assert key.encode() in content, key


def test_help_explains_every_argument(tmp_path: Path):
    result = run_script("ivdqn", "--help", cwd=tmp_path, COLUMNS="200")
    assert result.code == 0
    for flag, symbol in {"--num-nets": "N:", "--mebs-ratio": "MEBS", "--xi ": "xi:", "--mask-prob": "p_m:"}.items():
        assert flag in result.out
        assert symbol in result.out
