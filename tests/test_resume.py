"""Runs that survive: exact resume after a kill, clean stops, safe files."""

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, call_script, read_rows, run_script, script, timeless

DISCRETE_RUN = ("ivdqn", "--env-id", "CartPole-v1", "--total-timesteps", "900", "--learning-starts", "100")
DISCRETE_RUN += ("--mask-prob", "0.8", "--prior-scale", "1", "--log-every", "50", "--checkpoint-every", "1")
CONTINUOUS_RUN = ("ivsac", "--env-id", "Pendulum-v1", "--total-timesteps", "1300", "--learning-starts", "150")
CONTINUOUS_RUN += ("--rollout-length", "50", "--updates-per-step", "0.2", "--batch-size", "16", "--hidden-size", "16")
CONTINUOUS_RUN += ("--log-every", "50", "--eval-every", "250", "--checkpoint-every", "1", "--num-threads", "1")
FAMILIES = {"discrete": DISCRETE_RUN, "continuous": CONTINUOUS_RUN}


def fork_script(name: str, *arguments: str, cwd: Path) -> int:
    """Start a script in a copy of this process, so that it needs no time to import; the caller may kill it."""
    pid = os.fork()
    if pid == 0:
        os._exit(call_script(name, *arguments, cwd=cwd).code)
    return pid


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by path."""
    found = {}

    def collect(value, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        for key, item in value.items() if isinstance(value, dict) else ():
            collect(item, f"{path}/{key}")

    collect(torch.load(folder / "checkpoint.pt", weights_only=True), "")
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


def test_a_run_killed_at_ten_random_moments_ends_as_if_nothing_had_happened(uninterrupted, tmp_path: Path):
    name, arguments, whole, seconds = uninterrupted
    draw, kills, starts = random.Random(0), 0, 0
    folder = tmp_path / "runs" / "killed"
    config = folder / "config.json"
    while not config.exists() or json.loads(config.read_text())["status"] == "running":
        again = ["--resume"] if config.exists() else []
        pid = fork_script(name, *arguments, "--run-name", "killed", *again, cwd=tmp_path)
        starts += 1
        if kills < 10:
            time.sleep(draw.uniform(0.02, seconds / 14))
            os.kill(pid, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        assert starts < 40
    assert kills == 10
    assert_same_run(whole, folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_is_clean_says_how_to_go_on_and_resumes(uninterrupted, number: int, code: int, tmp_path: Path):
    name, arguments, whole, _ = uninterrupted
    command = [sys.executable, str(ROOT / f"{name}.py"), *arguments, "--run-name", "stopped"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    checkpoint = tmp_path / "runs" / "stopped" / "checkpoint.pt"
    while not checkpoint.exists():
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    said = re.fullmatch(rf"{name}\.py: stopped at step \d+, saved at \d+: go on with python (.*)\n", err)
    assert said, err
    torch.load(checkpoint, weights_only=True)
    script_name, *rest = said[1].split()
    assert call_script(script_name.removesuffix(".py"), *rest, cwd=tmp_path).code == 0
    assert_same_run(whole, checkpoint.parent)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    arguments = (*DISCRETE_RUN[1:], "--total-timesteps", "200", "--run-name", "done")
    assert call_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    return tmp_path / "runs" / "done"


def test_resuming_a_finished_run_says_so_and_changes_nothing(finished: Path, tmp_path: Path):
    before = (finished / "metrics.jsonl").read_text()
    result = call_script("ivdqn", "--resume", "--run-name", "done", cwd=tmp_path)
    assert result.code == 0
    assert "finished: 200 steps" in result.out
    assert (finished / "metrics.jsonl").read_text() == before


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
    before = (finished / "metrics.jsonl").read_text()
    result = call_script("ivdqn", *DISCRETE_RUN[1:], "--run-name", "done", cwd=tmp_path)
    assert result.code == 2
    assert "--resume" in result.err
    assert (finished / "metrics.jsonl").read_text() == before


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_files_that_cannot_be_trusted_are_refused(finished: Path, tmp_path: Path):
    checkpoint = finished / "checkpoint.pt"
    content, state = checkpoint.read_bytes(), torch.load(checkpoint, weights_only=True)

    def refused(said: str) -> None:
        for arguments in (["--resume", "--run-name", "done"], ["--evaluate", "runs/done"]):
            result = call_script("ivdqn", *arguments, cwd=tmp_path)
            assert result.code == 2
            assert result.err.count("\n") == 1, result.err
            assert "checkpoint.pt cannot be loaded" in result.err
            assert said in result.err, result.err

    checkpoint.write_bytes(content[: len(content) // 2])
    refused("")
    torch.save(state | {"script": "sac.py"}, checkpoint)
    refused("it is of sac.py")
    torch.save(state | {"env_id": "Acrobot-v1"}, checkpoint)
    refused("Acrobot-v1")
    torch.save(state | {"network": {}}, checkpoint)
    refused("Missing key")
    torch.save({"script": Harm()}, checkpoint)
    refused("")
    checkpoint.write_bytes(pickle.dumps(Harm()))
    refused("")
    assert not (tmp_path / "harmed").exists()
    config = json.loads((finished / "config.json").read_text())
    (finished / "config.json").write_text(json.dumps(config | {"script": "dqn.py"}))
    result = call_script("ivdqn", "--resume", "--run-name", "done", cwd=tmp_path)
    assert (result.code, "dqn.py" in result.err) == (2, True)


def test_two_processes_cannot_write_one_run(tmp_path: Path):
    name, *arguments = DISCRETE_RUN
    pid = fork_script(name, *arguments, "--total-timesteps", "100000", "--run-name", "x", cwd=tmp_path)
    try:
        while not (tmp_path / "runs" / "x" / "checkpoint.pt").exists():
            time.sleep(0.02)
        result = call_script(name, "--resume", "--run-name", "x", cwd=tmp_path)
        assert result.code == 2
        assert "another process" in result.err
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
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
        result = call_script("ivdqn", *arguments, "--runs-dir", str(disk), "--run-name", "x", cwd=tmp_path)
        assert result.code == 1
        assert "cannot be written" in result.err
        assert "No space left" in result.err or "PytorchStreamWriter" in result.err
        assert result.err.count("\n") == 1
        state = torch.load(disk / "x" / "checkpoint.pt", weights_only=True)
        assert state["progress"][0] > 100
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


def test_evaluate_can_record_videos(tmp_path: Path):
    name, *arguments = DISCRETE_RUN
    assert call_script(name, *arguments, "--total-timesteps", "150", "--run-name", "x", cwd=tmp_path).code == 0
    result = run_script(name, "--evaluate", "runs/x", "--eval-episodes", "2", "--capture-video", cwd=tmp_path)
    assert result.code == 0, result.err
    assert len(list((tmp_path / "runs" / "x" / "videos").rglob("*.mp4"))) == 2


def resident(pid: int) -> int:
    """Resident memory in KiB; 0 once the process has ended."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_once_the_buffer_is_full(tmp_path: Path):
    arguments = ("--env-id", "CartPole-v1", "--total-timesteps", "24000", "--buffer-size", "500", "--batch-size", "16")
    arguments += ("--hidden-size", "8", "--eval-every", "0", "--checkpoint-every", "2000", "--run-name", "x")
    pid = fork_script("dqn", *arguments, cwd=tmp_path)
    metrics, sizes = tmp_path / "runs" / "x" / "metrics.jsonl", {}
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) > 1:
            sizes[json.loads(lines[-2])["global_step"]] = resident(pid)
        time.sleep(0.05)
    early = [size for step, size in sizes.items() if 3000 < step < 5000]
    late = [size for step, size in sizes.items() if step > 22000 and size]
    assert len(early) > 2
    assert len(late) > 2
    assert np.median(late) < np.median(early) + 4096


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_checkpoint_needs_at_most_one_copy_of_the_buffer(tmp_path: Path):
    module = script("dqn")
    observation, scalar = np.zeros(100, np.float32), np.float32(0)
    fields = {"observation": observation, "next_observation": observation, "reward": scalar}
    buffer = module.ReplayBuffer(100_000, torch.device("cpu"), **fields)
    buffer.data["observation"][:], buffer.data["next_observation"][:], buffer.size = 1.0, 1.0, 100_000
    size = sum(array.nbytes for array in buffer.data.values())
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
    state = torch.load(tmp_path / "runs" / "x" / "checkpoint.pt", weights_only=True)
    assert state["buffer"]["terminated"].sum().item() == (len(episodes) if terminates else 0)


def test_a_checkpoint_takes_no_second_copy_of_the_buffer(tmp_path: Path):
    module = script("ivdqn")
    observation, scalar = np.ones(100, np.float32), np.float32(1)
    fields = {"observation": observation, "next_observation": observation, "reward": scalar}
    buffer = module.ReplayBuffer(100_000, torch.device("cpu"), **fields)
    for array in buffer.data.values():
        array[:] = 1
    buffer.size = 100_000
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = module.Run(module.Args(runs_dir=str(tmp_path), run_name="x"), {"buffer": buffer}, np.random.default_rng(0))
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(number, handler)
    read = lambda name: int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    except OSError as error:
        pytest.skip(f"the peak of this process's memory cannot be reset: {error}")
    before = read("VmRSS")
    run.checkpoint(1, 1, [], final=True)
    size = (tmp_path / "x" / "checkpoint.pt").stat().st_size / 1e6
    assert size > 80
    assert read("VmHWM") - before < 1.1 * size


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
