"""benchmark.sh: its cells against the paper's, its runs for real, on this machine and on a one-node Slurm cluster."""

import contextlib
import fcntl
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, VARIABLES, read_rows, run_script, script, wandb_records

SUITES = ["smoke", "search", "search-100k", "table2-100k", "all"]  # together, every cell
PAPER = ["table1", "table2", "ablations-dqn", "ablations-sac", "lambda", "weighting"]
SYSTEMS_1, SYSTEMS_2 = ["DQN", "BootstrapDQN", "SunriseDQN", "IV-DQN"], ["SAC", "EnsembleSAC", "SunriseSAC", "IV-SAC"]
NOISES = [f"CartpoleNoise{scale}-v0" for scale in ("0.1", "0.3", "1", "3", "10")]
# Suite -> folder of its archives below results/.
ARCHIVES = {"table1": "table1", "search": "search", "ablations-dqn": "ablations", "table2-100k": "table2-100k"}
# What the authors published, in the paper's convention, but where the search found better: LunarLander's
# variance of terminal targets, MountainCar's masks of SunriseDQN and IV-DQN, Cartpole-Noise's gamma.
PUBLISHED = {
    "LunarLander-v3__DQN": "batch_size 128 learning_rate 5e-4 gamma .99 tau .005 epsilon_decay .99",
    "LunarLander-v3__BootstrapDQN": "batch_size 64 learning_rate 5e-4 tau .005 mask_prob .9 prior_scale 10",
    "LunarLander-v3__IV-DQN": "batch_size 64 learning_rate 1e-3 tau .005 mask_prob 1 prior_scale 0 "
    "loss_attenuation_weight 1.5 epsilon_decay .99 mebs_ratio .9 terminal_variance 1",
    "LunarLander-v3__BIV+BootstrapDQN": "batch_size 64 learning_rate 5e-4 mask_prob .5 prior_scale .1 mebs_ratio .75",
    "LunarLander-v3__BIV+VarNetworkDQN": "batch_size 256 learning_rate 5e-4 tau .001 epsilon_decay .991 "
    "loss_attenuation_weight 1 mebs_ratio .8125 num_nets 1",
    "MountainCar-v0__DQN": "batch_size 256 learning_rate 1e-3 tau .01 epsilon_decay .98 truncation_terminates 1",
    "MountainCar-v0__BootstrapDQN": "batch_size 256 learning_rate 1e-3 tau .05 mask_prob .5 prior_scale 10",
    "MountainCar-v0__SunriseDQN": "batch_size 256 tau .05 mask_prob .9 prior_scale 10 sunrise_temperature 50",
    "MountainCar-v0__IV-DQN": "batch_size 256 tau .05 mask_prob .9 prior_scale 10 loss_attenuation_weight .5 xi 1000",
    "CartpoleNoise1-v0__BootstrapDQN": "batch_size 128 learning_rate 1e-3 mask_prob .5 start_epsilon .05 "
    "n_step 4 train_frequency 2 target_network_frequency 50 tau 1 max_grad_norm 5 hidden_size 50 learning_starts 64",
    "CartpoleNoise1-v0__IV-DQN": "batch_size 128 mask_prob .5 loss_attenuation_weight 5 mebs_ratio .99 end_epsilon .05",
    "MBBL-HalfCheetah-v0__EnsembleSAC": "batch_size 1024 mask_prob .9 ucb 0",
    "MBBL-HalfCheetah-v0__IV-SAC": "batch_size 1024 mask_prob 1 ucb 0 loss_attenuation_weight 1 mebs_ratio .99",
    "MBBL-HalfCheetah-v0__BIV+EnsembleSAC": "batch_size 1024 mask_prob .9 ucb 10 variance_heads 0",
    "MBBL-HalfCheetah-v0__BIV+VarNetworkSAC": "num_nets 1 loss_attenuation_weight 2.5 mebs_ratio .5",
    "MBBL-Walker2d-v0__EnsembleSAC": "batch_size 512 mask_prob 1 ucb 1",
    "MBBL-Walker2d-v0__IV-SAC": "batch_size 1024 mask_prob .9 ucb 10 loss_attenuation_weight 2.5 mebs_ratio .8",
    "MBBL-Hopper-v0__EnsembleSAC": "batch_size 512 mask_prob 1 ucb 10",
    "MBBL-Hopper-v0__IV-SAC": "batch_size 1024 mask_prob .7 ucb 10 loss_attenuation_weight 5 mebs_ratio .8",
    "MBBL-Ant-v0__EnsembleSAC": "batch_size 512 mask_prob .9 ucb 10",
    "MBBL-Ant-v0__IV-SAC": "batch_size 1024 mask_prob 1 ucb 1 loss_attenuation_weight 2.5 mebs_ratio .9",
}

STARTED: list[subprocess.Popen] = []


def benchmark(*arguments: str, runs: Path, **environment: str) -> subprocess.CompletedProcess:
    variables = os.environ | VARIABLES | {"RUNS_DIR": str(runs), "PYTHON": sys.executable} | environment
    command = [str(ROOT / "benchmark.sh"), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)


def start_benchmark(*arguments: str, runs: Path, **environment: str) -> subprocess.Popen:
    """As above, to go on while the test does something, in a process group of its own as in a terminal."""
    process = subprocess.Popen(
        [str(ROOT / "benchmark.sh"), *arguments],
        env=os.environ | VARIABLES | {"RUNS_DIR": str(runs), "PYTHON": sys.executable} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )
    STARTED.append(process)
    return process


def heed_ctrl_c() -> None:
    """Tests that a shell starts in the background ignore it, and bash cannot trap what it is started to ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A test that fails leaves neither a launcher nor its runs behind."""
    yield
    while STARTED:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(STARTED.pop().pid, signal.SIGKILL)


def wait_until_there(path: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"benchmark.sh ended without {path.name}"
        assert time.monotonic() < deadline, f"no {path.name} in {seconds} seconds"
        time.sleep(0.02)


def fake_python(folder: Path, script_line: str, state_line: str = "") -> str:
    """A PYTHON that runs one line of bash in place of each script, and another before it looks up the runs' states."""
    path = folder / "python"
    lines = ["#!/bin/bash", "if [[ $1 == *.py ]]; then", script_line, "exit", "fi"]
    lines += [state_line, f'exec {shlex.quote(sys.executable)} "$@"', ""]
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return str(path)


def option(command: list[str], name: str) -> str:
    """The last value of an option."""
    return command[len(command) - command[::-1].index(name)]


def planned(*arguments: str, runs: Path) -> dict[str, list[str]]:
    """Run name -> command, of a dry run."""
    result = benchmark(*arguments, "--dry-run", runs=runs)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
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


@pytest.mark.parametrize("suite", SUITES)
def test_every_command_parses(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, command in planned(suite, "--seeds", "1", runs=tmp_path).items():
        at = next(i for i, word in enumerate(command) if word.endswith(".py"))
        monkeypatch.setattr(sys, "argv", command[at:])
        args = script(command[at].removesuffix(".py")).parse_command_line()
        assert args.run_name == name
        assert name == f"{args.env_id.removeprefix('paper_envs:')}__{name.split('__')[1]}__{args.seed}"


def test_every_row_is_in_a_suite(tmp_path: Path):
    """No typing error hides a cell."""
    rows = re.findall(r"^([\w,-]+) +\| .*\| \w+\.py +\| ", (ROOT / "benchmark.sh").read_text(), re.MULTILINE)
    assert len(rows) > 100
    named = set(",".join(rows).split(","))
    assert named == {*PAPER, *SUITES} - {"all"}
    help_text = benchmark("--help", runs=tmp_path).stdout
    assert all(re.search(rf"[ ,]{suite}[ ,\n]", help_text) for suite in [*named, "all"])


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


def test_the_first_seed(tmp_path: Path):
    for arguments, expected in (
        (["table1"], ["1", "2"]),
        (["table1", "--first-seed", "11"], ["11", "12"]),
        (["search"], ["101", "102"]),
        (["search-100k"], ["101", "102"]),
        (["search", "--first-seed", "103"], ["103", "104"]),
    ):
        runs = planned(*arguments, "--seeds", "2", "--only", "LunarLander-v3__DQN|Hopper-v0__IV", runs=tmp_path)
        assert sorted({option(command, "--seed") for command in runs.values()}) == expected
        assert sorted({name.split("__")[2] for name in runs}) == expected


def test_threads(tmp_path: Path):
    """The runs of the continuous scripts share the cores; the discrete ones have one thread in any case."""
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    for workers, expected in ((1, cores), (2, max(cores // 2, 1)), (cores, 1), (9999, 1)):
        for command in planned("smoke", "--seeds", "1", "--workers", str(workers), runs=tmp_path).values():
            is_discrete = any(word.endswith("dqn.py") for word in command)
            assert option(command, "--num-threads") == str(1 if is_discrete else expected)


def test_other_settings_have_a_folder_of_their_own(tmp_path: Path):
    for suite, folder in (("table2", tmp_path), ("table2-100k", tmp_path / "table2-100k"), ("search", tmp_path)):
        commands = planned(suite, "--seeds", "1", runs=tmp_path).values()
        assert {option(command, "--runs-dir") for command in commands} == {str(folder)}


def test_the_matrix_of_seeds(tmp_path: Path):
    runs = planned("table1", "--seeds", "3", "--env-seeds", "2", "--only", "^MountainCar.*__IV", runs=tmp_path)
    seeds = [(c[c.index("--seed") + 1], c[c.index("--env-seed") + 1]) for c in runs.values()]
    assert sorted(seeds) == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2"), ("3", "1"), ("3", "2")]
    one = planned("table1", "--workers", "9999", "--only", "^MountainCar.*__IV", runs=tmp_path)
    assert [c[c.index("--seed") + 1] for c in one.values()] == ["1", "2", "3", "4", "5"]
    assert all("--env-seed" not in c and c[c.index("--num-threads") + 1] == "1" for c in one.values())


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["table1", "--seeds", "2", "--help"]])
def test_help(arguments: list[str], tmp_path: Path):
    result = benchmark(*arguments, runs=tmp_path / "runs")
    assert (result.returncode, result.stderr) == (0, "")
    assert "./benchmark.sh SUITE" in result.stdout
    code = (ROOT / "benchmark.sh").read_text()
    options = re.findall(r"^ +(--[a-z-]+[a-z| -]*)\)", code, re.MULTILINE)
    for name in re.findall(r"--[a-z-]+", " ".join(options)):
        assert name in result.stdout or name == "--help", name
    for variable in re.findall(r"\$\{([A-Z_]+):-", code):
        assert variable in result.stdout or variable == "SLURM_CPUS_PER_TASK", variable
    assert "set -e" not in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "suite"),
        (["table3"], "table3"),
        (["table1|table2"], "table1|table2"),
        (["table1", "table2"], "one suite"),
        (["table1", "--only", "no-such-run"], "no-such-run"),
        (["table1", "--only", "["], "'['"),
        (["table1", "--only", ""], "--only"),
        (["table1", "--seeds", "0"], "--seeds"),
        (["table1", "--seeds", "010"], "--seeds"),
        (["table1", "--seeds", "2.5"], "--seeds"),
        (["table1", "--seeds", "1000000000"], "--seeds"),
        (["table1", "--seeds", "10**9"], "--seeds"),
        (["table1", "--seeds", "1001"], "1000"),
        (["table1", "--seeds", "9999", "--env-seeds", "9999"], "1000"),
        (["table1", "--first-seed", "-1"], "--first-seed"),
        (["table1", "--workers"], "--workers"),
        (["table1", "--workers", "0"], "--workers"),
        (["table1", "--workers", "-1"], "--workers"),
        (["table1", "--workers", "many"], "--workers"),
        (["table1", "--env-seeds", "0"], "--env-seeds"),
        (["table1", "--workers", "99999999999999999999"], "--workers"),
        (["table1", "--workers", "18446744073709551617"], "--workers"),  # 2^64 + 1: to bash, 1
        (["table1", "--fast"], "--fast"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str, tmp_path: Path):
    python = fake_python(tmp_path, "exit 1")  # what is not refused trains nothing
    is_refused(benchmark(*arguments, runs=tmp_path / "runs", PYTHON=python), said, tmp_path / "runs")


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"STOP_SECONDS": "soon"}, "STOP_SECONDS"), ({"PYTHON": "no-such-python"}, "no-such-python")],
)
def test_bad_variables_are_refused(variables: dict[str, str], said: str, tmp_path: Path):
    variables = {"PYTHON": fake_python(tmp_path, "exit 1")} | variables
    is_refused(benchmark("smoke", runs=tmp_path / "runs", **variables), said, tmp_path / "runs")


def test_slurm_without_slurm_is_refused(tmp_path: Path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "getconf", "git"):
        (tools / tool).symlink_to(shutil.which(tool))
    result = benchmark("smoke", "--slurm", runs=tmp_path / "runs", PATH=str(tools))
    is_refused(result, "sbatch", tmp_path / "runs")


def is_refused(result: subprocess.CompletedProcess, said: str, runs: Path) -> None:
    """One sentence, and nothing written."""
    assert result.returncode == 2
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("benchmark.sh: ")
    assert said in sentence
    assert result.stdout == ""
    assert not runs.exists()


@pytest.mark.parametrize(
    ("config", "is_finished"),
    [
        ('{\n  "script": "dqn.py",\n  "args": ARGS,\n  "status": "finished"\n}', True),
        ('{"status":"finished","args":ARGS,"script":"dqn.py"}', True),
        ('{"args": ARGS, "status"\n:\n"\\u0066inished"}', True),
        ('{"status": "running", "args": ARGS, "exp_name": "\\"status\\": \\"finished\\""}', False),
        ('{"status": "running", "args": ARGS, "run": {"status": "finished"}}', False),
        ('{"args": ARGS}', False),
        ('{"args": ARGS, "status": "finished"', False),
        ('{"status": "finished"}', False),
        ('{"status": "finished", "args": null}', False),
        ('{"status": "finished", "args": {}}', False),
        ('["status", "finished"]', False),
        ("", False),
        (None, False),
    ],
)
def test_what_counts_as_finished(
    config: str | None, is_finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    commands = planned("smoke", "--seeds", "1", runs=tmp_path)
    names = ["CartPole-v1__DQN__1", "CartPole-v1__BootstrapDQN__1"]
    for name, text in zip(names, ['{"status": "finished", "args": ARGS}', config], strict=True):
        monkeypatch.setattr(sys, "argv", commands[name][1:])
        saved = asdict(script(commands[name][1].removesuffix(".py")).parse_command_line())
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(text.replace("ARGS", json.dumps(saved)))
    left = planned("smoke", "--seeds", "1", runs=tmp_path)
    assert len(left) == (18 if is_finished else 19)
    assert names[0] not in left
    assert (names[1] not in left) == is_finished


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_stop_and_resume(how: str, tmp_path: Path):
    slow, quick = "Pendulum-v1__IV-SAC__1", "CartPole-v1__DQN__1"
    arguments = ("smoke", "--seeds", "1", "--only", f"({slow}|{quick})", "--workers", "2")
    process = start_benchmark(*arguments, runs=tmp_path)
    wait_until_there(tmp_path / slow / "checkpoint.pt", process)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()  # the launcher alone
    out, _ = process.communicate(timeout=120)
    assert process.returncode == (130 if how == "Ctrl-C" else 143)
    assert f"{slow} stopped, to be resumed" in out
    assert "0 failed" in out
    assert status(tmp_path, slow) == "running"
    assert "stopped: " in (tmp_path / "logs" / f"{slow}.log").read_text()

    assert planned(*arguments, runs=tmp_path)[slow][-1] == "--resume"
    rows = read_rows(tmp_path / slow)
    result = benchmark(*arguments, runs=tmp_path)
    assert result.returncode == 0, result.stdout
    assert (status(tmp_path, slow), status(tmp_path, quick)) == ("finished", "finished")
    assert read_rows(tmp_path / slow)[: len(rows)] == rows
    assert re.search(r"^smoke: \d finished, 0 failed, \d skipped, 0 in use, 0 left$", result.stdout, re.MULTILINE)
    assert re.search(r"\[\d/\d\] \S+ finished, 0:0\d:\d\d elapsed, 0:0\d:\d\d remaining", result.stdout)


def test_skip_and_failure(tmp_path: Path):
    """A finished run is left alone, and a run that fails does not stop the next."""
    broken, good, done = "CartPole-v1__DQN__1", "CartPole-v1__BootstrapDQN__1", "CartPole-v1__IV-DQN__1"
    assert benchmark("smoke", "--seeds", "1", "--only", f"({broken}|{done})", runs=tmp_path).returncode == 0
    before = (tmp_path / done / "metrics.jsonl").read_bytes()
    config = json.loads((tmp_path / broken / "config.json").read_text())
    (tmp_path / broken / "config.json").write_text(json.dumps(config | {"status": "running"}))
    (tmp_path / broken / "checkpoint.pt").write_bytes(b"not a checkpoint")
    only = f"({broken}|{good}|{done})"
    result = benchmark("smoke", "--seeds", "1", "--only", only, "--workers", "1", runs=tmp_path)
    assert result.returncode == 1
    assert f"[1/2] {broken} failed with code 2, " in result.stdout
    assert f"[2/2] {good} finished, " in result.stdout
    assert "smoke: 1 finished, 1 failed, 1 skipped, 0 in use, 0 left" in result.stdout
    assert re.search(rf"failed: {broken}: dqn.py: .*checkpoint.pt cannot be loaded", result.stdout)
    assert (tmp_path / done / "metrics.jsonl").read_bytes() == before


def change_saved(folder: Path, **arguments: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["args"] |= arguments
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changed",
    [{"batch_size": 64}, {"env_id": "Acrobot-v1"}, {"variance_heads": True}, {"seed": 2}, {"total_timesteps": "many"}],
)
def test_a_finished_run_of_other_settings_is_not_skipped(changed: dict[str, Any], tmp_path: Path):
    name = "CartPole-v1__BIV+BootstrapDQN__1"
    suite = ("smoke", "--seeds", "1", "--only", re.escape(name))
    assert benchmark(*suite, runs=tmp_path).returncode == 0
    assert "1 skipped" in benchmark(*suite, runs=tmp_path).stdout
    change_saved(tmp_path / name, **changed)
    assert name in benchmark(*suite, "--dry-run", runs=tmp_path).stdout
    result = benchmark(*suite, runs=tmp_path)
    assert result.returncode == 1
    assert f"[1/1] {name} failed with code 2" in result.stdout
    argument = next(iter(changed)).replace("_", "[-_]")
    assert re.search(rf"failed: {re.escape(name)}: ivdqn.py: .*{argument}", result.stdout)


def test_a_finished_run_that_shall_be_longer_goes_on(tmp_path: Path):
    """The total may change: what was finished at 500 steps is continued to the cell's 600."""
    name = "CartPole-v1__DQN__1"
    suite = ("smoke", "--seeds", "1", "--only", re.escape(name))
    (command,) = planned(*suite, runs=tmp_path).values()
    subprocess.run([*command, "--total-timesteps", "500"], cwd=ROOT, check=True, capture_output=True)
    result = benchmark(*suite, runs=tmp_path)
    assert result.returncode == 0
    assert "1 finished, 0 failed, 0 skipped" in result.stdout
    assert json.loads((tmp_path / name / "config.json").read_text())["args"]["total_timesteps"] == 600


def test_a_stop_before_the_scripts_are_ready(tmp_path: Path):
    """Children that die of the signal itself, all at once, are not waited for in vain."""
    python = fake_python(tmp_path, "touch $$.started; exec sleep 100".replace("$$", shlex.quote(f"{tmp_path}/") + "$$"))
    process = start_benchmark("smoke", "--workers", "4", runs=tmp_path / "runs", PYTHON=python)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.started"))) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)  # the children sleep for longer
    assert process.returncode == 130
    assert out.count("stopped, to be resumed") == 4
    assert "smoke: 0 finished, 0 failed, 0 skipped, 0 in use, 100 left" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_before_anything_is_started(number: signal.Signals, code: int, tmp_path: Path):
    """While the states of the runs are looked up: nothing is started any more."""
    begun = tmp_path / "begun"
    python = fake_python(tmp_path, "exit 1", f"touch {shlex.quote(str(begun))}; sleep 1")
    process = start_benchmark("smoke", runs=tmp_path / "runs", PYTHON=python)
    wait_until_there(begun, process)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, "")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_does_not_stop_is_killed(tmp_path: Path):
    ready = tmp_path / "ready"
    line = f"trap '' INT TERM; touch {shlex.quote(str(ready))}; while true; do sleep 0.1; done"
    arguments = ("smoke", "--seeds", "1", "--workers", "1")
    process = start_benchmark(*arguments, runs=tmp_path / "runs", PYTHON=fake_python(tmp_path, line), STOP_SECONDS="3")
    wait_until_there(ready, process)
    process.terminate()
    stopped_at = time.monotonic()
    out, _ = process.communicate(timeout=60)
    assert time.monotonic() - stopped_at > 1.5  # bash counts whole seconds
    assert process.returncode == 143
    assert out.count("stopped, to be resumed") == 1


def test_the_same_signal_once_more_is_passed_on(tmp_path: Path):
    """The scripts quit at the second; here, a child that needs two."""
    signals = tmp_path / "signals"
    count = f"echo TERM >>{shlex.quote(str(signals))}"
    line = f"trap '{count}' TERM; touch {shlex.quote(str(signals))}; "
    line += f"until [[ $(wc -l <{shlex.quote(str(signals))}) == 2 ]]; do sleep 0.1; done; exit 130"
    arguments = ("smoke", "--seeds", "1", "--workers", "1")
    process = start_benchmark(*arguments, runs=tmp_path / "runs", PYTHON=fake_python(tmp_path, line))
    wait_until_there(signals, process)
    for number in (1, 2):
        time.sleep(0.5)
        process.terminate()
        deadline = time.monotonic() + 60
        while signals.read_text().count("TERM") < number:
            assert time.monotonic() < deadline, f"signal {number} was not passed on"
            time.sleep(0.02)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert out.count("stopped, to be resumed") == 1
    assert out.count("once more") == 1


def test_a_killed_launcher_leaves_runs_that_the_next_start_names(tmp_path: Path):
    name, other = "Pendulum-v1__IV-SAC__1", "CartPole-v1__DQN__1"
    process = start_benchmark("smoke", "--only", name, runs=tmp_path)
    wait_until_there(tmp_path / name / "checkpoint.pt", process)
    (orphan,) = children(process.pid)
    os.kill(orphan, signal.SIGSTOP)  # so that it outlives the test's next steps
    try:
        process.kill()
        process.wait()
        assert name in planned("smoke", "--only", name, runs=tmp_path)
        result = benchmark("smoke", "--only", f"({name}|{other})", runs=tmp_path)
    finally:
        os.kill(orphan, signal.SIGCONT)
    assert result.returncode == 1
    assert f"{name} is in use by another process" in result.stdout
    assert "smoke: 1 finished, 0 failed, 0 skipped, 1 in use, 0 left" in result.stdout
    deadline = time.monotonic() + 120
    while status(tmp_path, name) != "finished":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    result = benchmark("smoke", "--only", f"({name}|{other})", runs=tmp_path)
    assert (result.returncode, result.stdout) == (0, "smoke: 0 finished, 0 failed, 2 skipped, 0 in use, 0 left\n")


def children(process: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process)], capture_output=True, text=True
    ).stdout
    return [int(line.split()[0]) for line in found.splitlines() if ".py" in line]


def test_a_run_that_another_process_takes_in_the_meantime(tmp_path: Path):
    """Started, the script finds it locked: it is in use, and has not failed."""
    first, second = "CartPole-v1__DQN__1", "CartPole-v1__BootstrapDQN__1"
    process = start_benchmark("smoke", "--only", f"({first}|{second})", "--workers", "1", runs=tmp_path)
    wait_until_there(tmp_path / "logs" / f"{first}.log", process)
    (tmp_path / second).mkdir()
    with open(tmp_path / second / "metrics.jsonl", "w") as metrics:
        fcntl.flock(metrics, fcntl.LOCK_EX)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"[2/2] {second} in use by another process, " in out
    assert "smoke: 1 finished, 0 failed, 0 skipped, 1 in use, 0 left" in out
    assert "in use by another process" in (tmp_path / "logs" / f"{second}.log").read_text()


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
        SlurmctldPort={ports[0]}\nSlurmdPort={ports[1]}\nMpiDefault=none\nKillWait=120\nReturnToService=2
        MessageTimeout=90
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
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(folder / "log", "w"))
        for command in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], ["slurmd", "-D"]):
            options = {"env": os.environ | environment, "stdout": log, "stderr": log, "start_new_session": True}
            stack.callback(end, subprocess.Popen(command, **options))
            time.sleep(1)
        deadline = time.monotonic() + 120
        while "idle" not in slurm("sinfo", "--noheader", **environment):
            assert time.monotonic() < deadline, cluster_log(environment)
            time.sleep(0.5)
        stack.callback(wait_until_the_queue_is_empty, environment)
        stack.callback(slurm, "scancel", "--user=root", **environment)  # what a test that failed has left
        yield environment


def end(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=60)
    except subprocess.TimeoutExpired:
        daemon.kill()


def slurm(*command: str, **environment: str) -> str:
    """What a command of Slurm says. A failure is no empty answer: a busy controller is asked again."""
    deadline = time.monotonic() + 120
    while True:
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.5)


def wait_until_the_queue_is_empty(cluster: dict[str, str]) -> None:
    deadline = time.monotonic() + 280
    while queue := slurm("squeue", "--noheader", **cluster):
        assert time.monotonic() < deadline, queue + cluster_log(cluster)
        time.sleep(0.5)


def cluster_log(cluster: dict[str, str]) -> str:
    return Path(cluster["SLURM_CONF"]).with_name("log").read_text()


def freeze_at_its_checkpoint(runs: Path, name: str, cluster: dict[str, str]) -> None:
    """However slow Slurm is from here on, the run is under way. Slurm wakes it when it is to stop."""
    deadline = time.monotonic() + 280
    while not (runs / name / "checkpoint.pt").exists():
        assert time.monotonic() < deadline, cluster_log(cluster)
        time.sleep(0.01)
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True).stdout
    (process,) = [line.split()[0] for line in listed.splitlines() if f"--runs-dir {runs} --run-name {name} " in line]
    os.kill(int(process), signal.SIGSTOP)


def test_slurm_finishes_every_run_exactly_once(cluster: dict[str, str], tmp_path: Path):
    """A job array, of which the first task is requeued while it runs and the second is cancelled."""
    runs = tmp_path / "my runs"
    arguments = ("smoke", "--seeds", "1", "--only", "(IV-|BIV|L2).*SAC")
    commands = planned(*arguments, runs=runs)
    names = list(commands)
    requeued, cancelled = 0, 1
    result = benchmark(*arguments, "--slurm", "--time=30", runs=runs, **cluster)
    assert result.returncode == 0, result.stderr
    job = re.search(r"submitted 6 runs as job (\d+)", result.stdout)[1]

    for task in (requeued, cancelled):
        freeze_at_its_checkpoint(runs, names[task], cluster)
    # The throttle of the array, --workers: the others wait, though two of the four cores are free.
    running = slurm("squeue", "--noheader", "--states=R", "--format=%K", **cluster)
    assert sorted(running.split()) == ["1", "2"]
    slurm("scontrol", "requeue", f"{job}_{requeued + 1}", **cluster)
    slurm("scancel", f"{job}_{cancelled + 1}", **cluster)
    wait_until_the_queue_is_empty(cluster)
    assert [name for name in names if status(runs, name) != "finished"] == [names[cancelled]], cluster_log(cluster)
    logs = [(runs / "slurm" / f"{job}_{task + 1}.log").read_text() for task in range(len(names))]
    assert ["stopped: " in log for log in logs] == [True, True, False, False, False, False]

    # Submitted again, only what is missing runs, with a thread for each of its cores.
    result = benchmark(*arguments, "--slurm", "--time=30", "--cpus-per-task=2", runs=runs, **cluster)
    second = re.search(r"submitted 1 runs as job (\d+)", result.stdout)[1]
    wait_until_the_queue_is_empty(cluster)
    assert json.loads((runs / names[cancelled] / "config.json").read_text())["args"]["num_threads"] == 2
    logs[cancelled] += (runs / "slurm" / f"{second}_1.log").read_text()
    for name, log in zip(names, logs, strict=True):
        assert status(runs, name) == "finished"
        assert log.count("finished: ") == 1, log
        assert f"finished: {option(commands[name], '--total-timesteps')} steps" in log
        steps = [row["global_step"] for row in read_rows(runs / name)]
        assert steps == sorted(steps)
    again = benchmark(*arguments, runs=runs)
    assert (again.returncode, again.stdout) == (0, "smoke: 0 finished, 0 failed, 6 skipped, 0 in use, 0 left\n")
    again = benchmark(*arguments, "--slurm", runs=runs, **cluster)
    assert (again.returncode, again.stdout) == (0, "smoke: no run is left to submit\n")
