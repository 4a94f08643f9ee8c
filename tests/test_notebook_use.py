"""The scripts as modules: `from ivdqn import Args, train` works as often as one likes and leaves no trace."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OddEnv, script, timeless

SETTINGS = {
    "ivdqn": {"env_id": "CartPole-v1", "total_timesteps": 200, "learning_starts": 50, "log_every": 20},
    "ivsac": {
        **{"env_id": "Pendulum-v1", "total_timesteps": 250, "learning_starts": 100, "rollout_length": 50},
        **{"updates_per_step": 0.2, "batch_size": 16, "hidden_size": 16, "log_every": 50, "num_threads": 1},
    },
}


def state_of_the_process() -> dict[str, Any]:
    """What a run changes while it lasts."""
    return {
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().tolist(),
    }


def another_handler(*_: Any) -> None:
    """Not Python's own, to be found again."""


@pytest.fixture
def odd_process():
    """A process in which nothing is as a run would have it."""
    before = state_of_the_process()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, another_handler)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1234)
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before["handlers"], strict=True):
        signal.signal(number, handler)
    torch.set_num_threads(before["threads"])
    torch.set_float32_matmul_precision(before["precision"])


@pytest.mark.parametrize("name", SETTINGS)
def test_training_twice_in_one_process_gives_the_same_rows(name: str, tmp_path: Path):
    module = script(name)
    folders = []
    for run_name in ("first", "second"):
        args = module.Args(**SETTINGS[name], runs_dir=str(tmp_path), run_name=run_name)
        folders.append(module.train(args))
        torch.rand(3)  # what the notebook draws in between does not matter
    assert folders == [tmp_path / "first", tmp_path / "second"]
    rows = timeless(folders[0])
    assert any("losses/" in key for row in rows for key in row)
    assert timeless(folders[1]) == rows


@pytest.mark.parametrize("ends", ["well", "refused", "not finite", "broken"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_leaves_the_process_as_it_was(
    name: str, ends: str, odd_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = script(name)
    seen = []
    step = OddEnv.step

    def step_and_look(env: OddEnv, action: Any) -> tuple:
        seen.append(state_of_the_process())
        return step(env, action)

    monkeypatch.setattr(OddEnv, "step", step_and_look)
    env_id = "Odd-v0" if name == "ivdqn" else "OddContinuous-v0"
    kwargs = {"not finite": ("odd_reward=NaN",), "broken": ("breaks=true",)}.get(ends, ())
    settings = SETTINGS[name] | {"env_id": env_id, "total_timesteps": 100, "env_kwargs": kwargs, "num_threads": 1}
    args = module.Args(**settings, eval_every=0, runs_dir=str(tmp_path), run_name="x")
    before = state_of_the_process()
    if ends == "well":
        module.train(args)
    elif ends == "broken":
        with pytest.raises(RuntimeError, match="the environment broke"):
            module.train(args)
    else:
        if ends == "refused":
            args.eval_env_id = "CartPole-v1" if name == "ivdqn" else "Pendulum-v1"  # other spaces
        with pytest.raises(module.RunError) as raised:
            module.train(args)
        assert raised.value.code == (2 if ends == "refused" else 1)
    assert state_of_the_process() == before
    assert seen
    for during in seen:  # the run had it its way
        assert all(during[key] != before[key] for key in before)


def test_a_run_that_ended_in_an_error_can_be_taken_up_in_the_same_process(tmp_path: Path):
    """Its files and its lock are free again."""
    module = script("dqn")
    settings = {"env_id": "Odd-v0", "env_kwargs": ("breaks=true",), "eval_every": 0, "total_timesteps": 100}
    args = module.Args(**settings, checkpoint_every=1, runs_dir=str(tmp_path), run_name="x")
    with pytest.raises(RuntimeError, match="the environment broke"):
        module.train(args)
    with pytest.raises(module.RunError, match="--resume"):
        module.train(args)
    args.resume = True
    args.total_timesteps = 90  # of which 60 are done, and 30 do not reach what breaks
    assert timeless(module.train(args))[-1]["global_step"] == 80


def test_training_in_a_thread(tmp_path: Path):
    """Where signals cannot be handled."""
    module = script("ivdqn")
    args = module.Args(**SETTINGS["ivdqn"], runs_dir=str(tmp_path), run_name="x")
    thread = threading.Thread(target=module.train, args=(args,))
    thread.start()
    thread.join()
    assert timeless(tmp_path / "x")[-1]["global_step"] > 150
