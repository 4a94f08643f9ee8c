"""benchmark.sh: its cells against the paper's, its runs for real, on this machine and on a one-node Slurm cluster."""

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, VARIABLES, read_rows, run_script, script

PAPER = ["table1", "table2", "ablations-dqn", "ablations-sac", "lambda", "weighting"]
SYSTEMS_1, SYSTEMS_2 = ["DQN", "BootstrapDQN", "SunriseDQN", "IV-DQN"], ["SAC", "EnsembleSAC", "SunriseSAC", "IV-SAC"]
NOISES = [f"CartpoleNoise{scale}-v0" for scale in ("0.1", "0.3", "1", "3", "10")]
# Suite -> folder of its archives below results/.
ARCHIVES = {"table1": "table1", "search": "search", "ablations-dqn": "ablations", "table2-100k": "table2-100k"}
# What the authors published, in the paper's convention, but where the search found better: LunarLander's
# variance of terminal targets, MountainCar's mask, Cartpole-Noise's tau.
PUBLISHED = {
    "LunarLander-v3__DQN": "batch_size 128 learning_rate 5e-4 gamma .99 tau .005 epsilon_decay .99",
    "LunarLander-v3__BootstrapDQN": "batch_size 64 learning_rate 5e-4 tau .005 mask_prob .9 prior_scale 10",
    "LunarLander-v3__IV-DQN": "batch_size 64 learning_rate 1e-3 tau .005 mask_prob 1 prior_scale 0 "
    "loss_attenuation_weight 1.5 epsilon_decay .99 mebs_ratio .9 terminal_variance 1",
    "LunarLander-v3__BIV+BootstrapDQN": "batch_size 64 learning_rate 5e-4 mask_prob .5 prior_scale .1 mebs_ratio .75",
    "LunarLander-v3__BIV+VarNetworkDQN": "batch_size 256 learning_rate 5e-4 tau .001 epsilon_decay .991 "
    "loss_attenuation_weight 1 mebs_ratio .8125 num_nets 1",
    "MountainCar-v0__DQN": "batch_size 256 learning_rate 1e-3 tau .01 epsilon_decay .98",
    "MountainCar-v0__BootstrapDQN": "batch_size 256 learning_rate 1e-3 tau .05 mask_prob .9 prior_scale 10",
    "MountainCar-v0__SunriseDQN": "batch_size 256 tau .05 mask_prob .9 prior_scale 10 sunrise_temperature 50",
    "MountainCar-v0__IV-DQN": "batch_size 256 tau .05 mask_prob .9 prior_scale 10 loss_attenuation_weight .5 xi 1000",
    "CartpoleNoise1-v0__BootstrapDQN": "batch_size 128 learning_rate 1e-3 tau .05 mask_prob .5 start_epsilon .05",
    "CartpoleNoise1-v0__IV-DQN": "batch_size 128 mask_prob .5 loss_attenuation_weight 5 mebs_ratio .99 end_epsilon .05",
    "MBBL-HalfCheetah-v0__EnsembleSAC": "batch_size 1024 mask_prob .9 ucb 0",
    "MBBL-HalfCheetah-v0__IV-SAC": "batch_size 1024 mask_prob 1 ucb 0 loss_attenuation_weight 1 mebs_ratio .99",
    "MBBL-Walker2d-v0__EnsembleSAC": "batch_size 512 mask_prob 1 ucb 1",
    "MBBL-Walker2d-v0__IV-SAC": "batch_size 1024 mask_prob .9 ucb 10 loss_attenuation_weight 2.5 mebs_ratio .8",
    "MBBL-Hopper-v0__EnsembleSAC": "batch_size 512 mask_prob 1 ucb 10",
    "MBBL-Hopper-v0__IV-SAC": "batch_size 1024 mask_prob .7 ucb 10 loss_attenuation_weight 5 mebs_ratio .8",
    "MBBL-Ant-v0__EnsembleSAC": "batch_size 512 mask_prob .9 ucb 10",
    "MBBL-Ant-v0__IV-SAC": "batch_size 1024 mask_prob 1 ucb 1 loss_attenuation_weight 2.5 mebs_ratio .9",
}


def benchmark(*arguments: str, runs: Path, **environment: str) -> subprocess.CompletedProcess:
    variables = os.environ | VARIABLES | {"RUNS_DIR": str(runs), "PYTHON": sys.executable} | environment
    command = [str(ROOT / "benchmark.sh"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)


def planned(*arguments: str, runs: Path) -> dict[str, list[str]]:
    """Run name -> command, of a dry run."""
    result = benchmark(*arguments, "--dry-run", runs=runs)
    assert (result.returncode, result.stderr) == (0, "")
    commands = [shlex.split(line) for line in result.stdout.splitlines()]
    found = {command[command.index("--run-name") + 1]: command for command in commands}
    assert len(found) == len(commands)
    return found


def status(runs: Path, name: str) -> str:
    return json.loads((runs / name / "config.json").read_text())["status"]


def test_bash_is_clean():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "benchmark.sh", ".ci/run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("suite", ["smoke", "search", "search-100k", "table2-100k", "all"])
def test_every_command_parses(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, command in planned(suite, "--seeds", "1", runs=tmp_path).items():
        at = next(i for i, word in enumerate(command) if word.endswith(".py"))
        monkeypatch.setattr(sys, "argv", command[at:])
        args = script(command[at].removesuffix(".py")).parse_command_line()
        assert args.run_name == name
        assert name == f"{args.env_id.removeprefix('paper_envs:')}__{name.split('__')[1]}__{args.seed}"


def test_every_cell_of_the_papers_tables_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    suites = {suite: planned(suite, "--seeds", "1", runs=tmp_path) for suite in PAPER}
    for env_id in ["LunarLander-v3", "MountainCar-v0", *NOISES]:
        assert {f"{env_id}__{system}__1" for system in SYSTEMS_1} <= set(suites["table1"])
    for body in ("Walker2d", "HalfCheetah", "Hopper", "Ant", "SlimHumanoid"):
        assert {f"MBBL-{body}-v0__{system}__1" for system in SYSTEMS_2} <= set(suites["table2"])
    assert (len(suites["table1"]), len(suites["table2"])) == (28, 20)
    for system in ("BIV+BootstrapDQN", "L2+VarEnsembleDQN", "BIV+VarNetworkDQN", "L2+VarNetworkDQN"):
        assert f"LunarLander-v3__{system}__1" in suites["ablations-dqn"]
    for system in ("BIV+EnsembleSAC", "L2+VarEnsembleSAC", "BIV+VarNetworkSAC", "L2+VarNetworkSAC"):
        assert f"MBBL-Walker2d-v0__{system}__1" in suites["ablations-sac"]
    for system in ("UWAC+VarEnsembleSAC", "Sunrise+VarEnsembleSAC", "IV-SAC"):
        assert f"MBBL-HalfCheetah-v0__{system}__1" in suites["weighting"]
    everything = planned("all", "--seeds", "1", runs=tmp_path)
    assert set(everything) == set().union(*suites.values())
    for cell, published in PUBLISHED.items():
        command = everything[f"{cell}__1"]
        at = next(i for i, word in enumerate(command) if word.endswith(".py"))
        monkeypatch.setattr(sys, "argv", command[at:])
        args, words = script(command[at].removesuffix(".py")).parse_command_line(), published.split()
        for name, value in zip(words[::2], words[1::2], strict=True):
            assert getattr(args, name) == float(value), (cell, name)


def test_the_committed_rows_were_made_by_these_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every archive of a planned run holds the arguments that the command of its cell gives today."""
    plans = {suite: planned(suite, "--seeds", "1", runs=tmp_path) for suite in ARCHIVES}
    free = {"exp_name", "run_name", "runs_dir", "num_threads", "seed", "resume"}
    checked = 0
    for suite, plan in plans.items():
        for name, command in plan.items():
            at = next(i for i, word in enumerate(command) if word.endswith(".py"))
            monkeypatch.setattr(sys, "argv", command[at:])
            module = script(command[at].removesuffix(".py"))
            args = vars(module.parse_command_line())
            for path in (ROOT / "results" / ARCHIVES[suite]).glob(f"{name.rpartition('__')[0]}__*.jsonl.gz"):
                with gzip.open(path, "rt") as file:
                    config = json.loads(file.readline())
                # What an archive does not know counts as its default; that of the terminal variance has changed.
                saved = vars(module.Args()) | {"terminal_variance": False} | config["args"]
                saved["env_kwargs"] = tuple(saved["env_kwargs"])  # JSON has no tuples
                assert {k: v for k, v in args.items() if saved[k] != v and k not in free} == {}, path.name
                checked += 1
    assert checked >= 200


def test_no_short_run_can_pass_for_one_of_the_papers(tmp_path: Path):
    names = [set(planned(suite, "--seeds", "5", runs=tmp_path)) for suite in ("smoke", "search", "all")]
    assert sum(map(len, names)) == len(set().union(*names))


def test_folders_with_spaces(tmp_path: Path):
    command = next(iter(planned("smoke", runs=tmp_path / "my runs").values()))
    assert command[command.index("--runs-dir") + 1] == str(tmp_path / "my runs")


def test_the_readme_counts_the_runs(tmp_path: Path):
    rows = re.findall(r"^\| `([\w-]+)` \| .* \| (\d+) \| [\d.]+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {suite for suite, _ in rows} == {*PAPER, "table2-100k", "smoke", "all"}
    for suite, runs in rows:
        assert len(planned(suite, "--seeds", "1", runs=tmp_path)) == int(runs), suite


def test_the_matrix_of_seeds(tmp_path: Path):
    runs = planned("table1", "--seeds", "3", "--env-seeds", "2", "--only", "^MountainCar.*__IV", runs=tmp_path)
    seeds = [(c[c.index("--seed") + 1], c[c.index("--env-seed") + 1]) for c in runs.values()]
    assert sorted(seeds) == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2"), ("3", "1"), ("3", "2")]
    one = planned("table1", "--workers", "9999", "--only", "^MountainCar.*__IV", runs=tmp_path)
    assert [c[c.index("--seed") + 1] for c in one.values()] == ["1", "2", "3", "4", "5"]
    assert all("--env-seed" not in c and c[c.index("--num-threads") + 1] == "1" for c in one.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "suite"),
        (["table3"], "table3"),
        (["table1", "--only", "no-such-run"], "no-such-run"),
        (["table1", "--seeds", "0"], "--seeds"),
        (["table1", "--workers"], "--workers"),
        (["table1", "--fast"], "--fast"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str, tmp_path: Path):
    result = benchmark(*arguments, runs=tmp_path / "runs")
    assert result.returncode == 2
    assert result.stderr.startswith("benchmark.sh: ")
    assert (said in result.stderr, result.stderr.count("\n")) == (True, 1)
    assert not (tmp_path / "runs").exists()


def test_stop_resume_skip_and_failure(tmp_path: Path):
    slow, quick = "Pendulum-v1__IV-SAC__1", "CartPole-v1__DQN__1"
    only = f"({re.escape(slow)}|{quick})"
    variables = os.environ | VARIABLES | {"RUNS_DIR": str(tmp_path), "PYTHON": sys.executable}
    command = [str(ROOT / "benchmark.sh"), "smoke", "--only", only, "--workers", "2"]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / slow / "checkpoint.pt").exists() or not (tmp_path / quick / "config.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"{slow} stopped, to be resumed" in out
    assert status(tmp_path, slow) == "running"
    assert "stopped: " in (tmp_path / "logs" / f"{slow}.log").read_text()

    planned_now = planned("smoke", "--only", only, runs=tmp_path)
    assert planned_now[slow][-1] == "--resume"
    result = benchmark("smoke", "--only", only, runs=tmp_path)
    assert result.returncode == 0, result.stdout
    assert (status(tmp_path, slow), status(tmp_path, quick)) == ("finished", "finished")
    assert "0 failed" in result.stdout
    assert re.search(r"\[\d/\d\] \S+ finished, 0:00:\d\d elapsed, 0:0\d:\d\d remaining", result.stdout)

    before = (tmp_path / slow / "metrics.jsonl").read_bytes()
    (tmp_path / quick / "config.json").write_text((tmp_path / quick / "config.json").read_text().replace("ished", "al"))
    (tmp_path / quick / "checkpoint.pt").write_bytes(b"not a checkpoint")
    result = benchmark("smoke", "--only", only, runs=tmp_path)
    assert result.returncode == 1
    assert "0 finished, 1 failed, 1 skipped" in result.stdout
    assert re.search(rf"failed: {quick}: dqn.py: .*checkpoint.pt cannot be loaded", result.stdout)
    assert (tmp_path / slow / "metrics.jsonl").read_bytes() == before


def test_a_stop_before_the_scripts_are_ready(tmp_path: Path):
    """Children that die of the signal itself, all at once, are not waited for in vain."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/bash\nexec sleep 100\n")
    sleeper.chmod(0o755)
    variables = os.environ | {"RUNS_DIR": str(tmp_path / "runs"), "PYTHON": str(sleeper)}
    command = [str(ROOT / "benchmark.sh"), "smoke", "--workers", "4"]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.count("stopped, to be resumed") == 4


def wandb_records(path: Path) -> Iterator:
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


def test_what_is_tracked_can_be_read_back(tmp_path: Path):
    name = "CartPole-v1__IV-DQN__1"
    result = benchmark("smoke", "--seeds", "1", "--only", re.escape(name), "--track", runs=tmp_path)
    assert result.returncode == 0, result.stdout
    (logged,) = (tmp_path / name).rglob("*.wandb")
    records, rows = list(wandb_records(logged)), read_rows(tmp_path / name)
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    assert (run.display_name, run.project, run.job_type) == (name, "iv-rl", "train")
    assert run.run_group == "smoke/CartPole-v1/IV-DQN"
    assert list(run.tags) == ["smoke", commit.strip() or "unknown"]
    expected: dict[int, dict[str, float]] = {}
    for row in rows:
        expected.setdefault(row["global_step"], {}).update(row)
    history = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history[items["_step"]] = {key: value for key, value in items.items() if not key.startswith("_")}
    assert list(history) == sorted(expected)
    for step, row in expected.items():
        assert history[step] == pytest.approx(row), step
    assert (logged.parent / "files" / "code" / "ivdqn.py").exists()

    # Resumed, the run goes on under its own id, from where it was.
    arguments = ("--resume", "--run-name", name, "--runs-dir", str(tmp_path), "--total-timesteps", "800", "--track")
    assert run_script("ivdqn", *arguments, cwd=tmp_path).code == 0
    (second,) = set((tmp_path / name).rglob("*.wandb")) - {logged}
    records = list(wandb_records(second))
    assert [record.run.run_id for record in records if record.WhichOneof("record_type") == "run"] == [run.run_id]
    items = [item for record in records for item in record.history.item if "_step" in (item.key, *item.nested_key)]
    steps = [int(item.value_json) for item in items]
    assert steps
    assert steps == sorted({row["global_step"] for row in read_rows(tmp_path / name)[len(rows) :]})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm cluster of one node: munged, slurmctld and slurmd. What its commands need in their environment."""
    missing = [name for name in ("munged", "mungekey", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm cluster needs root and Debian's slurm-wlm and munge; missing: {missing or 'root'}")
    folder, host = tmp_path / "cluster", socket.gethostname().split(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    config = f"""
        ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root
        AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket,cred_expire=5
        SlurmctldPort={ports[0]}\nSlurmdPort={ports[1]}\nMpiDefault=none\nKillWait=10\nReturnToService=2
        ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none
        SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU
        StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool
        SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid
        SlurmdParameters=config_overrides
        NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
        PartitionName=main Nodes=ALL Default=YES
    """
    (folder / "slurm.conf").write_text(config)
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True)
    files = [f"--{name}={folder}/munge.{name}" for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")]
    files[0] = f"--key-file={folder}/munge.key"
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons = []
    with open(folder / "log", "w") as log:
        for command in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], ["slurmd", "-D"]):
            options = {"env": os.environ | environment, "stdout": log, "stderr": log, "start_new_session": True}
            daemons.append(subprocess.Popen(command, **options))
            time.sleep(1)
        try:
            deadline = time.time() + 30
            while "idle" not in slurm("sinfo", "--noheader", **environment):
                assert time.time() < deadline, (folder / "log").read_text()
                time.sleep(0.5)
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(timeout=30)


def slurm(*command: str, **environment: str) -> str:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True).stdout


def test_slurm_finishes_every_run_exactly_once(cluster: dict[str, str], tmp_path: Path):
    """The smoke suite as a job array, of which one task is requeued while it runs and another is cancelled."""
    runs = tmp_path / "runs"
    commands = planned("smoke", "--seeds", "1", runs=runs)
    names = list(commands)
    result = benchmark("smoke", "--seeds", "1", "--slurm", "--time=30", runs=runs, **cluster)
    assert result.returncode == 0, result.stderr
    job = re.search(r"submitted 20 runs as job (\d+)", result.stdout)[1]

    requeued, cancelled = names.index("Pendulum-v1__IV-SAC__1"), names.index("Pendulum-v1__L2+VarEnsembleSAC__1")
    running = set()
    for task in (requeued, cancelled):
        deadline = time.time() + 240
        while not (runs / names[task] / "checkpoint.pt").exists():
            assert time.time() < deadline, slurm("squeue", **cluster)
            running.add(slurm("squeue", "--noheader", "--states=R", **cluster).count("\n"))
            time.sleep(0.05)
        command = ["scontrol", "requeue"] if task == requeued else ["scancel"]
        slurm(*command, f"{job}_{task}", **cluster)
    assert max(running) == 2  # the throttle of the array: --workers

    deadline = time.time() + 240
    while slurm("squeue", "--noheader", **cluster):
        assert time.time() < deadline, slurm("squeue", **cluster)
        time.sleep(0.5)
    logs = {task: (runs / "slurm" / f"{job}_{task}.log").read_text() for task in range(len(names))}
    assert "stopped: " in logs[requeued]
    assert "stopped: " in logs[cancelled]
    assert [name for name in names if status(runs, name) != "finished"] == [names[cancelled]]

    # Submitted again, only what is missing runs.
    result = benchmark("smoke", "--seeds", "1", "--slurm", "--time=30", runs=runs, **cluster)
    second = re.search(r"submitted 1 runs as job (\d+)", result.stdout)[1]
    deadline = time.time() + 120
    while slurm("squeue", "--noheader", **cluster):
        assert time.time() < deadline, slurm("squeue", **cluster)
        time.sleep(0.5)
    (log,) = (runs / "slurm").glob(f"{second}_*.log")
    logs[cancelled] += log.read_text()
    for task, name in enumerate(names):
        assert logs[task].count("finished: ") == 1, logs[task]
        assert status(runs, name) == "finished"
        steps = [row["global_step"] for row in read_rows(runs / name)]
        assert steps == sorted(steps)
        total = int(commands[name][len(commands[name]) - commands[name][::-1].index("--total-timesteps")])
        assert f"finished: {total} steps" in logs[task]
    assert benchmark("smoke", "--seeds", "1", runs=runs).stdout.startswith("smoke: 0 finished, 0 failed, 20 skipped")
