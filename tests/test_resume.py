"""Runs that survive: exact resume after a kill, clean stops, safe files, checkpoints that others can use."""

import json
import os
import pickle
import random
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ENDLESS,
    ROOT,
    call_script,
    contents,
    fork_script,
    read_checkpoint,
    read_rows,
    refusal,
    script,
    timeless,
    wait_for,
    wait_until_there,
)

DISCRETE_RUN = ("ivdqn", "--env-id", "CartPole-v1", "--total-timesteps", "700", "--learning-starts", "100")
DISCRETE_RUN += ("--mask-prob", "0.8", "--prior-scale", "1", "--log-every", "50", "--checkpoint-every", "1")
CONTINUOUS_RUN = ("ivsac", "--env-id", "Pendulum-v1", "--total-timesteps", "1000", "--learning-starts", "150")
CONTINUOUS_RUN += ("--env-kwargs", "max_episode_steps=50", "--rollout-length", "50", "--updates-per-step", "0.2")
CONTINUOUS_RUN += ("--batch-size", "16", "--hidden-size", "16", "--log-every", "50", "--eval-every", "250")
CONTINUOUS_RUN += ("--checkpoint-every", "1", "--num-threads", "1")
FAMILIES = {"discrete": DISCRETE_RUN, "continuous": CONTINUOUS_RUN}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by path."""
    found = {}

    def collect(value: object, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        for key, item in value.items() if isinstance(value, dict) else ():
            collect(item, f"{path}/{key}")

    collect(read_checkpoint(folder), "")
    return found


def assert_same_run(first: Path, second: Path) -> None:
    assert timeless(first) == timeless(second)
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module", params=FAMILIES)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    name, *arguments = FAMILIES[request.param]
    cwd = tmp_path_factory.mktemp("uninterrupted")
    start = time.monotonic()
    assert call_script(name, *arguments, "--run-name", "whole", cwd=cwd).code == 0
    return name, arguments, cwd / "runs" / "whole", time.monotonic() - start


def saved_at(checkpoint: Path) -> int:
    """When a checkpoint was written; 0 if it was not."""
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


def test_a_run_killed_at_ten_random_moments_ends_as_if_nothing_had_happened(uninterrupted, tmp_path: Path):
    """Every other kill may come at any moment, the others come soon after a new checkpoint."""
    name, arguments, whole, seconds = uninterrupted
    draw = random.Random(0)
    folder = tmp_path / "runs" / "killed"
    checkpoint = folder / "checkpoint.pt"
    begun = []  # the steps at which the process started
    for kill in range(10):
        begun.append(read_checkpoint(folder)["global_step"] if checkpoint.exists() else 0)
        before = saved_at(checkpoint)
        pid = fork_script(name, *arguments, "--run-name", "killed", "--resume", cwd=tmp_path)
        if kill % 2:
            while saved_at(checkpoint) == before and os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
            time.sleep(draw.uniform(0, seconds / 40))
        else:
            time.sleep(draw.uniform(0, seconds / 10))
        os.kill(pid, signal.SIGKILL)
        assert wait_for(pid) == -signal.SIGKILL, (tmp_path / "err").read_text()
    assert len(set(begun)) >= 5, begun
    assert begun == sorted(begun)
    result = call_script(name, *arguments, "--run-name", "killed", "--resume", cwd=tmp_path)
    assert result.code == 0, result.err
    assert_same_run(whole, folder)
    assert json.loads((folder / "config.json").read_text())["status"] == "finished"


def test_a_stop_is_clean_says_how_to_go_on_and_resumes(uninterrupted, tmp_path: Path):
    name, arguments, whole, _ = uninterrupted
    number, code = (signal.SIGTERM, 143) if name == "ivdqn" else (signal.SIGINT, 130)
    pid = fork_script(name, *arguments, "--runs-dir", "my runs", "--run-name", "stopped", cwd=tmp_path)
    folder = tmp_path / "my runs" / "stopped"
    wait_until_there(folder / "checkpoint.pt", pid)
    os.kill(pid, number)
    assert wait_for(pid) == code
    *notice, last = (tmp_path / "err").read_text().strip().splitlines()
    assert notice in ([], ["finishing the episode, then saving; once more to quit at once"])  # none between episodes
    pattern = rf"{name}\.py: stopped: (\d+) steps, (\d+) episodes in my runs/stopped; go on with (.*)"
    steps, episodes, command = re.fullmatch(pattern, last).groups()
    state = read_checkpoint(folder)
    assert (state["global_step"], state["episode"]) == (int(steps), int(episodes))
    assert 0 < int(steps) < 700
    rows = [row for row in read_rows(folder) if "charts/episode" in row]
    assert (rows[-1]["global_step"], rows[-1]["charts/episode"]) == (int(steps), int(episodes))  # it was finished
    assert json.loads((folder / "config.json").read_text())["status"] == "running"
    python, script_name, *rest = shlex.split(command)
    assert (python, script_name) == ("python", f"{name}.py")
    assert call_script(name, *rest, cwd=tmp_path).code == 0
    assert_same_run(whole, folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(number: int, tmp_path: Path):
    pid = fork_script("dqn", *ENDLESS, "--run-name", "x", cwd=tmp_path)
    wait_until_there(tmp_path / "runs" / "x" / "config.json", pid)
    time.sleep(0.2)
    os.kill(pid, number)
    deadline = time.monotonic() + 30
    while "once more to quit" not in (tmp_path / "err").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # the episode goes on
    os.kill(pid, number)
    assert wait_for(pid, seconds=10) == 130
    assert "Traceback" not in (tmp_path / "err").read_text()


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    arguments = (*DISCRETE_RUN[1:], "--total-timesteps", "200", "--run-name", "done")
    assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    return tmp_path / "runs" / "done"


def test_resume_starts_what_does_not_exist(finished: Path, tmp_path: Path):
    arguments = (*DISCRETE_RUN[1:], "--total-timesteps", "200", "--run-name", "new", "--resume")
    assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    assert_same_run(finished, tmp_path / "runs" / "new")


def test_resuming_a_finished_run_says_so_and_changes_nothing(finished: Path, tmp_path: Path):
    """Not even the commit and the versions that made it."""
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config | {"git_commit": "older", "versions": {}}))
    before = contents(finished)
    for _ in range(2):
        result = call_script("ivdqn", "--resume", "--run-name", "done", cwd=tmp_path)
        assert result.code == 0
        assert re.fullmatch(r"finished: 200 steps, \d+ episodes in runs/done", result.out.splitlines()[-1])
        assert contents(finished) == before


def test_a_larger_total_continues_the_run(finished: Path, tmp_path: Path):
    before = read_rows(finished)
    assert call_script("ivdqn", "--resume", "--run-name", "done", "--total-timesteps", "400", cwd=tmp_path).code == 0
    after = read_rows(finished)
    assert after[: len(before)] == before
    assert after[-1]["global_step"] > 300
    config = json.loads((finished / "config.json").read_text())
    assert (config["status"], config["args"]["total_timesteps"]) == ("finished", 400)


@pytest.mark.parametrize(
    "change",
    [["--gamma", "0.5"], ["--seed", "9"], ["--env-id", "Acrobot-v1"], ["--num-nets", "3"], ["--no-variance-heads"]],
)
def test_another_algorithm_cannot_resume_a_run(change: list[str], finished: Path, tmp_path: Path):
    before = (finished / "metrics.jsonl").read_text()
    result = call_script("ivdqn", "--resume", "--run-name", "done", *change, cwd=tmp_path)
    assert result.code == 2
    assert change[0].strip("-").replace("no-", "").replace("-", "_") in result.err
    assert result.err.count("\n") == 1
    assert (finished / "metrics.jsonl").read_text() == before


def test_a_run_is_not_overwritten(finished: Path, tmp_path: Path):
    before = contents(finished)
    result = call_script("ivdqn", *DISCRETE_RUN[1:], "--run-name", "done", cwd=tmp_path)
    said = refusal(result, "ivdqn")
    assert said == "runs/done exists: continue it with --resume, or choose another --run-name"
    assert contents(finished) == before


@pytest.mark.parametrize("state", ["killed", "finished"])
@pytest.mark.parametrize(("owner", "other"), [("dqn", "ivdqn"), ("ivdqn", "dqn"), ("dqn", "bootstrap_dqn")])
def test_a_run_belongs_to_its_script(owner: str, other: str, state: str, tmp_path: Path):
    arguments = ("--env-id", "CartPole-v1", "--learning-starts", "9999", "--checkpoint-every", "1", "--run-name", "x")
    folder = tmp_path / "runs" / "x"
    if state == "killed":
        pid = fork_script(owner, *arguments, cwd=tmp_path)
        wait_until_there(folder / "checkpoint.pt", pid)
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
    else:
        assert call_script(owner, *arguments, "--total-timesteps", "50", cwd=tmp_path).code == 0
    before = contents(folder)
    result = call_script(other, "--resume", "--run-name", "x", cwd=tmp_path)
    assert refusal(result, other) == f"runs/x is a run of {owner}.py, not of {other}.py"
    assert contents(folder) == before


def test_a_checkpoint_without_its_config_is_refused(finished: Path, tmp_path: Path):
    (finished / "config.json").unlink()
    before = contents(finished)
    for arguments in (["--resume"], []):
        result = call_script("ivdqn", *DISCRETE_RUN[1:], "--run-name", "done", *arguments, cwd=tmp_path)
        assert "runs/done" in refusal(result, "ivdqn")
        assert contents(finished) == before


def test_the_order_of_the_keys_in_a_config_does_not_matter(finished: Path, tmp_path: Path):
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config, sort_keys=True))
    assert list(config["args"]) != sorted(config["args"])
    longer = ("--run-name", "done", "--total-timesteps", "400")
    assert call_script("ivdqn", "--resume", *longer, cwd=tmp_path).code == 0
    assert read_rows(finished)[-1]["global_step"] > 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", "0.99"),
        ("gamma", True),
        ("gamma", 2.0),
        ("gamma", float("nan")),
        ("batch_size", "64"),
        ("batch_size", 6.5),
        ("weighting", "best"),
        ("variance_heads", 1),
        ("seed", None),
        ("env_id", 3),
        ("env_kwargs", [1]),
    ],
)
def test_a_config_that_was_edited_is_checked_like_the_command_line(
    field: str, value: object, finished: Path, tmp_path: Path
):
    config = json.loads((finished / "config.json").read_text())
    config["args"][field] = value
    (finished / "config.json").write_text(json.dumps(config))
    before = contents(finished)
    for arguments in (["--resume", "--run-name", "done"], ["--evaluate", "runs/done"]):
        said = refusal(call_script("ivdqn", *arguments, cwd=tmp_path), "ivdqn")
        assert said.startswith("--" + field.replace("_", "-") + " must be "), said
        assert contents(finished) == before


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"script": "ivdqn.py"}', '{"script": "ivdqn.py", "args": 3}', "\xff"]
)
def test_a_config_that_is_none_is_refused(text: str, finished: Path, tmp_path: Path):
    (finished / "config.json").write_text(text, encoding="latin-1")
    for arguments in (["--resume", "--run-name", "done"], ["--evaluate", "runs/done"]):
        assert "runs/done holds no run" in refusal(call_script("ivdqn", *arguments, cwd=tmp_path), "ivdqn")


def test_metrics_shorter_than_the_checkpoint_says_are_refused(finished: Path, tmp_path: Path):
    metrics = finished / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-1])
    before = contents(finished)
    result = call_script("ivdqn", "--resume", "--run-name", "done", "--total-timesteps", "400", cwd=tmp_path)
    assert "metrics.jsonl is not what it was at the checkpoint" in refusal(result, "ivdqn")
    assert contents(finished) == before


def test_a_link_in_the_place_of_a_new_file_is_not_followed(finished: Path, tmp_path: Path):
    for name in ("checkpoint.pt", "config.json"):
        (tmp_path / name).write_text("precious")
        (finished / f"{name}.tmp").symlink_to(tmp_path / name)
    longer = ("--run-name", "done", "--total-timesteps", "300")
    assert call_script("ivdqn", "--resume", *longer, cwd=tmp_path).code == 0
    for name in ("checkpoint.pt", "config.json"):
        assert (tmp_path / name).read_text() == "precious"
        assert not (finished / name).is_symlink()
        assert not (finished / f"{name}.tmp").exists()
    assert read_checkpoint(finished)["global_step"] == 300


def test_a_run_is_resumed_without_what_it_was_warm_started_from(finished: Path, tmp_path: Path):
    arguments = (*DISCRETE_RUN[1:], "--total-timesteps", "200", "--warm-start", "runs/done", "--run-name", "warm")
    assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    finished.rename(tmp_path / "runs" / "moved")
    result = call_script("ivdqn", "--resume", "--run-name", "warm", "--total-timesteps", "300", cwd=tmp_path)
    assert result.code == 0, result.err


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_files_that_cannot_be_trusted_are_refused(finished: Path, tmp_path: Path):
    checkpoint = finished / "checkpoint.pt"
    content, state = checkpoint.read_bytes(), read_checkpoint(finished)
    without_network = state["agent"] | {"network": {}}

    def refused(said: str) -> None:
        for arguments in (["--resume", "--run-name", "done"], ["--evaluate", "runs/done"]):
            sentence = refusal(call_script("ivdqn", *arguments, cwd=tmp_path), "ivdqn")
            assert sentence.startswith("runs/done/checkpoint.pt "), sentence
            assert said in sentence, sentence

    checkpoint.write_bytes(content[: len(content) // 2])
    refused("cannot be loaded")
    torch.save(state | {"agent": without_network}, checkpoint)
    refused("does not fit: ")
    torch.save({}, checkpoint)
    refused("does not fit: ")
    torch.save([1, 2], checkpoint)
    refused("does not fit: ")
    torch.save(state | {"episode": Harm()}, checkpoint)
    refused("cannot be loaded")
    checkpoint.write_bytes(pickle.dumps(Harm()))
    refused("cannot be loaded")
    assert not (tmp_path / "harmed").exists()


def test_two_processes_cannot_write_one_run(tmp_path: Path):
    name, *arguments = DISCRETE_RUN
    pid = fork_script(name, *arguments, "--total-timesteps", "100000", "--run-name", "x", cwd=tmp_path)
    try:
        wait_until_there(tmp_path / "runs" / "x" / "checkpoint.pt", pid)
        result = call_script(name, "--resume", "--run-name", "x", cwd=tmp_path)
        assert "another process" in refusal(result, name)
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for(pid)
    arguments = ("--resume", "--run-name", "x", "--total-timesteps", "1")  # the lock died with its process
    assert call_script(name, *arguments, cwd=tmp_path).code == 0


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode().strip()}")
    try:
        arguments = (*DISCRETE_RUN[1:], "--total-timesteps", "50000", "--learning-starts", "40000", "--eval-every", "0")
        arguments += ("--total-episodes", "50000")
        result = call_script("ivdqn", *arguments, "--runs-dir", str(disk), "--run-name", "x", cwd=tmp_path)
        assert result.code == 1
        assert "cannot be written" in result.err
        assert "No space left" in result.err or "PytorchStreamWriter" in result.err
        assert result.err.count("\n") == 1
        assert read_checkpoint(disk / "x")["global_step"] > 100
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["../out", "..", "/etc/x", "a/../../b", ".hidden", "a:b"])
def test_a_run_name_cannot_leave_the_runs_folder(name: str, tmp_path: Path):
    arguments = ("--env-id", "CartPole-v1", "--total-timesteps", "30", "--runs-dir", str(tmp_path / "here" / "runs"))
    assert call_script("dqn", *arguments, f"--run-name={name}", cwd=tmp_path).code == 0
    (folder,) = (tmp_path / "here" / "runs").iterdir()
    assert (folder / "metrics.jsonl").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluate_reports_the_returns_of_a_run(family: str, tmp_path: Path):
    name, *arguments = FAMILIES[family]
    assert call_script(name, *arguments, "--total-timesteps", "250", "--run-name", "x", cwd=tmp_path).code == 0
    before = sorted(path.name for path in (tmp_path / "runs" / "x").iterdir())
    result = call_script(name, "--evaluate", "runs/x", "--eval-episodes", "3", cwd=tmp_path)
    assert result.code == 0, result.err
    mean, std, returns = re.fullmatch(r"mean (.*), standard deviation (.*), returns \[(.*)\]\n", result.out).groups()
    returns = [float(value) for value in returns.split(", ")]
    assert len(returns) == 3
    assert (float(mean), float(std)) == pytest.approx((np.mean(returns), np.std(returns)), abs=0.01)
    assert sorted(path.name for path in (tmp_path / "runs" / "x").iterdir()) == before
    again = call_script(name, "--evaluate", "runs/x", "--eval-episodes", "3", cwd=tmp_path)
    assert again.out == result.out


def test_evaluate_records_every_episode(tmp_path: Path):
    name, *arguments = DISCRETE_RUN
    assert call_script(name, *arguments, "--total-timesteps", "150", "--run-name", "x", cwd=tmp_path).code == 0
    before = contents(tmp_path / "runs" / "x")
    result = call_script(name, "--evaluate", "runs/x", "--eval-episodes", "3", "--capture-video", cwd=tmp_path)
    assert result.code == 0, result.err
    assert len(list((tmp_path / "runs" / "x" / "videos").rglob("*.mp4"))) == 3
    after = contents(tmp_path / "runs" / "x")
    assert {path: after[path] for path in before} == before


def resident(pid: int) -> int:
    """Resident memory in KiB; 0 once the process has ended."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_once_the_buffer_is_full(tmp_path: Path):
    arguments = ("--env-id", "CartPole-v1", "--total-timesteps", "12000", "--buffer-size", "500", "--batch-size", "16")
    arguments += ("--hidden-size", "8", "--eval-every", "0", "--checkpoint-every", "2000", "--run-name", "x")
    arguments += ("--total-episodes", "100000")
    pid = fork_script("dqn", *arguments, cwd=tmp_path)
    metrics, sizes = tmp_path / "runs" / "x" / "metrics.jsonl", {}
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) > 1:
            sizes[json.loads(lines[-2])["global_step"]] = resident(pid)
        time.sleep(0.05)
    early = [size for step, size in sizes.items() if 2000 < step < 4000]
    late = [size for step, size in sizes.items() if step > 10500 and size]
    assert len(early) > 2
    assert len(late) > 2
    assert np.median(late) < np.median(early) + 4096


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_checkpoint_needs_at_most_one_copy_of_the_buffer(tmp_path: Path):
    module = script("dqn")
    observation, scalar = np.zeros(100, np.float32), np.float32(0)
    fields = {"observation": observation, "next_observation": observation, "reward": scalar}
    buffer = module.ReplayBuffer(100_000, torch.device("cpu"), **fields)
    buffer.arrays["observation"][:], buffer.arrays["next_observation"][:], buffer.size = 1.0, 1.0, 100_000
    size = sum(array.nbytes for array in buffer.arrays.values())
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = resident(os.getpid())
        torch.save(buffer.state_dict(), tmp_path / "checkpoint.pt")
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
        os.write(write, str((peak - before) * 1024).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(os.read(read, 100)) < 1.1 * size
    assert (tmp_path / "checkpoint.pt").stat().st_size == pytest.approx(size, rel=0.01)
    buffer.size = 1000  # only the filled part is written
    torch.save(buffer.state_dict(), tmp_path / "part.pt")
    assert (tmp_path / "part.pt").stat().st_size < 0.02 * size


@pytest.mark.parametrize(
    ("name", "env_id", "terminates"),
    [("ivdqn", "MountainCar-v0", False), ("ivdqn", "CartPole-v1", True), ("sac", "Pendulum-v1", False)],
)
def test_only_termination_is_stored_as_terminal(name: str, env_id: str, terminates: bool, tmp_path: Path):
    arguments = ("--env-id", env_id, "--total-timesteps", "450", "--learning-starts", "10000", "--eval-every", "0")
    assert call_script(name, *arguments, "--run-name", "x", cwd=tmp_path).code == 0
    episodes = [row for row in read_rows(tmp_path / "runs" / "x") if "charts/episode" in row]
    assert len(episodes) >= 2
    terminated = read_checkpoint(tmp_path / "runs" / "x")["agent"]["buffer"]["arrays"]["terminated"]
    assert terminated.sum().item() == (len(episodes) if terminates else 0)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_checkpoint_takes_no_second_copy_of_the_buffer(tmp_path: Path):
    module = script("ivdqn")
    observation, scalar = np.ones(100, np.float32), np.float32(1)
    fields = {"observation": observation, "next_observation": observation, "reward": scalar}
    buffer = module.ReplayBuffer(100_000, torch.device("cpu"), **fields)
    for array in buffer.arrays.values():
        array[:] = 1
    buffer.size = 100_000
    args = module.Args(env_id="CartPole-v1", runs_dir=str(tmp_path), run_name="x")
    with module.Run(args) as run:
        run.start(SimpleNamespace(buffer=buffer), np.random.default_rng(0))
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is now
        except OSError as error:
            pytest.skip(f"the peak of this process's memory cannot be reset: {error}")
        before = resident(os.getpid())
        run.save()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    size = (tmp_path / "x" / "checkpoint.pt").stat().st_size / 1024
    assert size > 75_000
    assert peak - before < 1.1 * size


def test_a_resume_that_ends_at_once_leaves_no_hole_in_the_metrics(tmp_path: Path):
    arguments = ("--env-id", "CartPole-v1", "--learning-starts", "1000", "--runs-dir", "runs", "--run-name", "x")
    assert call_script("dqn", *arguments, "--total-timesteps", "200", cwd=tmp_path).code == 0
    before = read_rows(tmp_path / "runs" / "x")
    with open(tmp_path / "runs" / "x" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"global_step": 999, "charts/episode": 99}) + "\n")  # after the last checkpoint
    assert call_script("dqn", "--resume", "--run-name", "x", cwd=tmp_path).code == 0
    assert read_rows(tmp_path / "runs" / "x") == before
    assert call_script("dqn", "--resume", "--run-name", "x", "--total-timesteps", "400", cwd=tmp_path).code == 0
    assert read_rows(tmp_path / "runs" / "x")[: len(before)] == before
    assert len(read_rows(tmp_path / "runs" / "x")) > len(before)
    # Once resumed, a run is evaluated like any other: with another seed, too.
    result = call_script("dqn", "--evaluate", "runs/x", "--seed", "5", "--eval-episodes", "2", cwd=tmp_path)
    assert (result.code, result.out[:5]) == (0, "mean ")


def test_a_resume_of_a_few_steps_can_be_resumed_again(tmp_path: Path):
    """Rows that were written after the checkpoint are gone when the next checkpoint says how many there are."""
    arguments = ("--env-id", "CartPole-v1", "--learning-starts", "1000", "--run-name", "x")
    assert call_script("dqn", *arguments, "--total-timesteps", "200", cwd=tmp_path).code == 0
    with open(tmp_path / "runs" / "x" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"global_step": 999, "charts/episode": 99}) + "\n")
    for total in ("203", "400"):
        result = call_script("dqn", "--resume", "--run-name", "x", "--total-timesteps", total, cwd=tmp_path)
        assert result.code == 0, result.err


@pytest.mark.parametrize(("flags", "each"), [(["--checkpoint-minutes", "0"], True), ([], False)])
def test_checkpoints_by_the_clock(flags: list[str], each: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = script("dqn")
    minutes = {"checkpoint_minutes": float(flags[1])} if flags else {}
    saved = []
    save = module.Run.save

    def save_and_tell(run: object) -> None:
        save(run)
        saved.append(read_checkpoint(run.folder)["global_step"])

    monkeypatch.setattr(module.Run, "save", save_and_tell)
    args = module.Args(env_id="CartPole-v1", total_timesteps=200, runs_dir=str(tmp_path), run_name="x", **minutes)
    rows = read_rows(module.train(args))
    ends = [row["global_step"] for row in rows if "charts/episode" in row]
    assert len(ends) > 3
    assert saved == ([*ends, *([200] if ends[-1] < 200 else [])] if each else [200])


# ---------------------------------------------------------------------------- checkpoints for other scripts
def edited_copy(folder: Path) -> Path:
    """A fork of ivdqn.py under another name, with an argument more and an argument less."""
    source = (ROOT / "ivdqn.py").read_text()
    added = source.replace("    num_nets: int", "    my_argument: int = 3  # of the fork only\n    num_nets: int", 1)
    removed = re.sub(r"    wandb_entity: .*\n|                entity=self.args.wandb_entity,\n", "", added)
    assert len(added) > len(source)
    assert removed.count("self.args.wandb_entity") == 0
    copy = folder / "my_fork.py"
    copy.write_text(removed)
    return copy


def test_a_fork_can_evaluate_and_warm_start_from_a_run_of_the_original(finished: Path, tmp_path: Path):
    fork = edited_copy(tmp_path)
    evaluate = ("--evaluate", "runs/done", "--eval-episodes", "3")
    original = call_script("ivdqn", *evaluate, cwd=tmp_path)
    copied = call_script(fork, *evaluate, cwd=tmp_path)
    assert copied.code == 0, copied.err
    assert copied.out == original.out
    arguments = ("--env-id", "CartPole-v1", "--prior-scale", "1", "--total-timesteps", "30", "--run-name", "warm")
    result = call_script(fork, *arguments, "--seed", "7", "--warm-start", "runs/done", cwd=tmp_path)
    assert result.code == 0, result.err
    warm, first = (read_checkpoint(tmp_path / "runs" / name)["agent"] for name in ("warm", "done"))
    for network in ("network", "target_network"):
        assert warm[network].keys() == first[network].keys()
        for name, value in first[network].items():
            assert torch.equal(warm[network][name], value), (network, name)
    assert warm["buffer"]["size"] == 30
    config = json.loads((tmp_path / "runs" / "warm" / "config.json").read_text())
    assert (config["script"], config["args"]["my_argument"]) == ("my_fork.py", 3)
    other = call_script(fork, "--resume", "--run-name", "done", cwd=tmp_path)
    assert refusal(other, "my_fork") == "runs/done is a run of ivdqn.py, not of my_fork.py"


def test_networks_that_do_not_fit_are_refused(finished: Path, tmp_path: Path):
    before = contents(tmp_path)
    fresh = ("--env-id", "CartPole-v1", "--run-name", "new", "--warm-start", "runs/done")
    for name, arguments in (
        ("ivdqn", (*fresh, "--hidden-size", "32")),
        ("ivdqn", (*fresh, "--no-variance-heads")),
        ("ivdqn", (*fresh, "--env-id", "Acrobot-v1")),
        ("dqn", fresh),
        ("dqn", ("--evaluate", "runs/done")),
        ("ivdqn", ("--evaluate", "runs/done", "--num-nets", "3")),
    ):
        said = refusal(call_script(name, *arguments, cwd=tmp_path), name)
        assert said.startswith("runs/done/checkpoint.pt does not fit: "), said
        assert contents(tmp_path) == before
