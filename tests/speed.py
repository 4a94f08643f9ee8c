"""How fast the scripts are: against one another, stable-baselines3 and this machine's own matrix multiply.

    pip install stable-baselines3 && python tests/speed.py

Every number is a median of alternating repetitions in this one process, and every ratio the median of the ratios within
a repetition. Steps are those of the scripts' own loops, run from their first line to their last; the parts of an update
are timed around the scripts' own functions.
"""

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
DISCRETE, CONTINUOUS = ["dqn", "bootstrap_dqn", "sunrise_dqn", "ivdqn"], ["sac", "ensemble_sac", "sunrise", "ivsac"]
NETWORK = {"dqn": "QNetwork", "ivdqn": "VarEnsembleQNetwork"}
CRITIC = {"sac": "Critic", "ivsac": "VarEnsembleCritic"}
PARTS = ["sampling", "targets and variance", "xi", "forward", "backward and optimiser", "target update"]
SIZES = {"LunarLander-v3": (8, 4), "Walker2d-v4": (17, 6)}  # observations, actions


@dataclass
class Args:
    out: Path = ROOT / "results" / "speed.json"  # where the numbers go
    repetitions: int = 5  # of every measurement, alternating
    profile: Literal[*DISCRETE, *CONTINUOUS] | None = None  # print the operators of this script's update, and leave
    threads: int = 1  # of --profile


# ---------------------------------------------------------------------------- whole steps
def script_step(name: str, env_id: str, steps: int, batch_size: int, threads: int) -> float:
    """Milliseconds a step of the script's own loop, with an update at each step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = [f"{name}.py", "--env-id", env_id, "--total-timesteps", str(steps + batch_size), "--eval-every", "0"]
        sys.argv += ["--learning-starts", str(batch_size), "--batch-size", str(batch_size), "--no-cuda"]
        sys.argv += ["--num-threads", str(threads), "--runs-dir", folder, "--run-name", "x"]
        sys.argv += ["--rollout-length", "1"] if name in CONTINUOUS else []
        sys.argv += ["--mask-prob", "1"] if name not in ("dqn", "sac") else []
        ticks, update = [0.0], tqdm.update
        tqdm.update = lambda *_: ticks.__setitem__(0, time.time())  # at the end of each step
        try:
            run = runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")["run"]
        finally:
            tqdm.update = update
        return 1000 * (ticks[0] - run.start_time) / steps


def baseline_step(family: str, env_id: str, steps: int, batch_size: int, threads: int) -> float:
    """The same with stable-baselines3: same network, batch, schedule and soft updates."""
    import stable_baselines3

    torch.set_num_threads(threads)
    common = {"batch_size": batch_size, "learning_starts": batch_size, "train_freq": 1, "gradient_steps": 1}
    common |= {"tau": 0.005, "gamma": 0.99, "device": "cpu", "seed": 1}
    if family == "dqn":
        common |= {"target_update_interval": 1, "policy_kwargs": {"net_arch": [64, 64]}, "buffer_size": 100_000}
        common |= {"exploration_initial_eps": 1.0, "exploration_final_eps": 0.99}  # our first episodes are random too
    model = getattr(stable_baselines3, family.upper())("MlpPolicy", gym.make(env_id), **common)
    start = time.time()
    model.learn(steps + batch_size)
    return 1000 * (time.time() - start) / steps


# ---------------------------------------------------------------------------- the parts of an update
def make_update(name: str, env_id: str, batch_size: int, num_nets: int = 5):
    """A function that does one update as the script's loop does, and the modules in it."""
    module, (inputs, actions) = importlib.import_module(name), SIZES[env_id]
    args = module.Args(batch_size=batch_size, cuda=False)
    ensemble = {"num_nets": num_nets, "mask_prob": 1.0} if name not in ("dqn", "sac") else {}
    for key, value in ensemble.items():
        setattr(args, key, value)
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    observation, scalar = np.zeros(inputs, np.float32), np.float32(0)
    fields = {"observation": observation, "action": np.int64(0), "next_observation": observation}
    fields |= {"reward": scalar, "terminated": scalar}
    fields |= {"action": np.zeros(actions, np.float32)} if name in CONTINUOUS else {}
    fields |= {"mask": np.ones(num_nets, bool)} if ensemble else {}
    buffer = module.ReplayBuffer(10_000, torch.device("cpu"), **fields)
    for key, array in buffer.data.items():
        if array.dtype == np.float32 and key != "terminated":
            array[:] = rng.uniform(-1, 1, array.shape)
    if "mask" in buffer.data:
        buffer.data["mask"][:] = True
    buffer.size = buffer.capacity
    if name in DISCRETE:
        network = getattr(module, NETWORK.get(name, "EnsembleQNetwork"))(inputs, actions, args)
        target_network = copy.deepcopy(network).requires_grad_(False)
        optimizer = torch.optim.Adam(network.net.parameters(), lr=args.learning_rate, fused=True)
        online, target = ([weight.data for weight in each.net.parameters()] for each in (network, target_network))
        loss_function = getattr(module, f"{name}_loss")

        def update() -> None:
            loss, _ = loss_function(network, target_network, buffer.sample(batch_size, rng), args)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._foreach_lerp_(target, online, args.tau)

        return update, module, [target_network]
    members = num_nets if ensemble else 1
    agent = SimpleNamespace(actor=module.EnsembleMLP(members, inputs, args.hidden_size, 2 * actions))
    agent.critic = getattr(module, CRITIC.get(name, "EnsembleCritic"))(inputs, actions, args)
    agent.target_critic = copy.deepcopy(agent.critic).requires_grad_(False)
    agent.temperature = torch.nn.ParameterDict({"log_alpha": torch.zeros((num_nets, 1) if ensemble else ())})
    parts = {"actor": agent.actor, "critic": agent.critic, "alpha": agent.temperature}
    for part, parameters in parts.items():
        setattr(agent, f"{part}_optimizer", torch.optim.Adam(parameters.parameters(), lr=3e-4, fused=True))
    step = getattr(module, f"{name}_update")
    return lambda: step(agent, buffer.sample(batch_size, rng), args), module, [agent.target_critic]


def update_parts(name: str, env_id: str, batch_size: int, updates: int) -> dict[str, float]:
    """Milliseconds of each part of an update: the time inside these functions, without what is nested in them."""
    update, module, targets = make_update(name, env_id, batch_size)
    spent, stack = defaultdict(float), []

    def timed(function: Any, part: str) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            stack.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                spent[part] += elapsed - stack.pop()
                if stack:
                    stack[-1] += elapsed

        return wrapper

    with contextlib.ExitStack() as patches:

        def patch(owner: Any, attribute: str, part: str) -> None:
            original = getattr(owner, attribute)
            setattr(owner, attribute, timed(original, part))
            patches.callback(setattr, owner, attribute, original)

        patch(module.ReplayBuffer, "sample", "sampling")
        for function in ("predictive_variance", "mixture_variance", "inverse_variance"):
            if hasattr(module, function):
                patch(module, function, "targets and variance")
        if hasattr(module, "newton_xi"):
            patch(module, "newton_xi", "xi")
        for network in targets:
            for net in network.modules():
                if type(net).__name__ in ("EnsembleMLP", "Sequential"):
                    patch(net, "forward", "targets and variance")
        patch(torch.Tensor, "backward", "backward and optimiser")
        patch(torch.optim.Adam, "step", "backward and optimiser")
        patch(torch, "_foreach_lerp_", "target update")
        whole = timed(update, "forward")
        for _ in range(updates):
            whole()
    return {part: 1000 * spent[part] / updates for part in PARTS}


def milliseconds(function: Any, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return 1000 * (time.perf_counter() - start) / calls


def multiply_adds(name: str, env_id: str, batch_size: int, num_nets: int = 5, both_twins: bool = False) -> int:
    """Of the matrix products in an update: forward once; backward twice, once where only inputs need a gradient.

    With `both_twins`, IV-SAC evaluates both twins of all N x N pairs, not only the one whose variance it uses.
    """
    inputs, actions = SIZES[env_id]
    layers = lambda i, h, o: i * h + h * h + h * o
    n = 1 if name in ("dqn", "sac") else num_nets
    heads = 2 if name in ("ivdqn", "ivsac") else 1
    if name in DISCRETE:
        each = layers(inputs, 64, heads * actions)
        backward = 2 * each - inputs * 64  # the observation needs no gradient
        return n * batch_size * (2 * each + backward)
    critic, actor = layers(inputs + actions, 256, heads), layers(inputs, 256, 2 * actions)
    grid = {"sac": 2, "ensemble_sac": 2 * n, "sunrise": 2 * n * n, "ivsac": 2 * n + n * n}[name]  # target critics at a'
    total = (grid + (n * n if name == "ivsac" else 0)) * critic  # and, for the actors' weights, the critics at a
    total += (2 * n * (n - 1) * critic) if both_twins and name == "ivsac" else 0
    total += n * (2 * actor + 2 * actor - inputs * 256)  # the actors at s' and s, and their gradient
    total += 2 * n * 2 * critic  # the critics at a, and the gradient of a
    total += 2 * n * (3 * critic - (inputs + actions) * 256)  # the critics' own step
    return batch_size * total


def limit(name: str, env_id: str, batch_size: int, num_nets: int = 5) -> float:
    """Milliseconds that this machine's matrix multiply, at the hidden layers' size, needs for an update's products."""
    width = 64 if name in DISCRETE else 256
    nets = (1 if name in ("dqn", "sac") else num_nets) * (1 if name in DISCRETE else 2)
    a, b, size = torch.randn(nets, width, width), torch.randn(nets, width, batch_size), nets * batch_size * width**2
    return (
        multiply_adds(name, env_id, batch_size, num_nets)
        * milliseconds(lambda: torch.bmm(a, b), int(2e9 / size) + 2)
        / size
    )


def peak_memory(name: str, env_id: str, batch_size: int, num_nets: int) -> float:
    """Megabytes by which updates raise the peak of a fresh process (Linux)."""
    code = f"""import sys; sys.path[:0] = {sys.path!r}; import speed, torch; torch.set_num_threads(1)
read = lambda key: int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) / 1000
update, _, _ = speed.make_update({name!r}, {env_id!r}, {batch_size}, {num_nets})
before = read("VmRSS"); update(); update(); print(max(read("VmHWM") - before, 0))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


# ---------------------------------------------------------------------------- the tables
def alternate(functions: dict[str, Any], repetitions: int) -> dict[str, list[float]]:
    """The functions' results, one of each in turn, after one of each to warm up."""
    found = defaultdict(list)
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            value = function()
            if repetition:
                found[name].append(value)
    return found


def ratio(found: dict[str, list[float]], name: str, base: str) -> float:
    return median(a / b for a, b in zip(found[name], found[base], strict=True))


def show(title: str, header: list[str], rows: list[list[Any]]) -> list[dict]:
    text = lambda x: "" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x)
    print(f"\n**{title}**\n")
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(map(text, row))} |", flush=True)
    return [dict(zip(header, row, strict=True)) for row in rows]


def step_table(threads: int, repetitions: int) -> list[dict]:
    rows = []
    for family, env_id, batch_size in (("dqn", "LunarLander-v3", 64), ("sac", "Walker2d-v4", 256)):
        base, names = f"stable-baselines3 {family.upper()}", DISCRETE if family == "dqn" else CONTINUOUS
        steps = {"dqn": 500, "sac": 80, "ensemble_sac": 25, "sunrise": 20, "ivsac": 15}
        run = lambda name, env_id=env_id, batch_size=batch_size, steps=steps: script_step(
            name, env_id, steps.get(name, 500), batch_size, threads
        )
        functions = {base: lambda f=family, e=env_id, b=batch_size, s=steps: baseline_step(f, e, s[f], b, threads)}
        found = alternate(functions | {name: lambda n=name, run=run: run(n) for name in names}, repetitions)
        for name, values in found.items():
            rows.append(
                [name, env_id, batch_size, median(values), ratio(found, name, names[0]), ratio(found, name, base)]
            )
    header = ["script", "environment", "batch", "ms a step", "to the plainest", "to stable-baselines3"]
    return show(f"A step with its update, {threads} thread{'s' * (threads > 1)}", header, rows)


def update_table(threads: int, repetitions: int) -> list[dict]:
    torch.set_num_threads(threads)
    rows = []
    cells = [(name, "LunarLander-v3", 64) for name in DISCRETE] + [(name, "Walker2d-v4", 256) for name in CONTINUOUS]
    for name, env_id, batch_size in [*cells, ("ensemble_sac", "Walker2d-v4", 1024), ("ivsac", "Walker2d-v4", 1024)]:
        update, _, _ = make_update(name, env_id, batch_size)
        calls = max(2, int(2e8 / multiply_adds(name, env_id, batch_size)) if name in CONTINUOUS else 60)
        functions = {"update": lambda update=update, calls=calls: milliseconds(update, calls)}
        functions |= {"limit": lambda cell=(name, env_id, batch_size): limit(*cell)}
        found = alternate(functions, repetitions)
        parts = [update_parts(name, env_id, batch_size, calls) for _ in range(3)]
        shares = [median(part[key] for part in parts) for key in PARTS]
        own, saved = ratio(found, "update", "limit"), multiply_adds(name, env_id, batch_size)
        full = own * saved / multiply_adds(name, env_id, batch_size, both_twins=True)
        rows.append([name, batch_size, median(found["update"]), own, full, *shares])
    header = ["script", "batch", "ms an update", "to the arithmetic limit", "with both twins", *PARTS]
    return show(f"An update and its parts in ms, {threads} thread{'s' * (threads > 1)}", header, rows)


def growth_table(repetitions: int) -> list[dict]:
    torch.set_num_threads(1)
    rows = []
    for name, env_id in (("ivdqn", "LunarLander-v3"), ("ivsac", "Walker2d-v4")):
        sizes = [(n, 256 if name == "ivsac" else 64) for n in (1, 2, 5, 10)] + [(5, k) for k in (64, 256, 1024)]
        updates = {size: make_update(name, env_id, size[1], size[0])[0] for size in dict.fromkeys(sizes)}
        calls = 1 if name == "ivsac" else 20
        each = lambda update, calls=calls: lambda: milliseconds(update, calls)
        functions = {size: each(update) for size, update in updates.items()}
        found = alternate(functions, repetitions)
        rows += [[name, n, k, median(found[n, k]), peak_memory(name, env_id, k, n)] for n, k in updates]
    return show("Growth of an update with N and K, 1 thread", ["script", "N", "K", "ms an update", "peak MB"], rows)


def acting_table(repetitions: int) -> list[dict]:
    torch.set_num_threads(1)
    functions = {}
    for name in DISCRETE + CONTINUOUS:
        module, (inputs, actions) = (
            importlib.import_module(name),
            SIZES["LunarLander-v3" if name in DISCRETE else "Walker2d-v4"],
        )
        args, observation = module.Args(cuda=False), np.zeros(inputs, np.float32)
        if name in DISCRETE:
            network = getattr(module, NETWORK.get(name, "EnsembleQNetwork"))(inputs, actions, args)
            act = module.greedy_action if name == "dqn" else module.member_actions
            call = lambda act=act, network=network, o=observation: act(network, o, torch.device("cpu"))
        else:
            members = 1 if name == "sac" else args.num_nets
            actor = module.EnsembleMLP(members, inputs, args.hidden_size, 2 * actions)
            critic = getattr(module, CRITIC.get(name, "EnsembleCritic"))(inputs, actions, args)
            call = lambda m=module, a=actor, c=critic, o=observation, args=args: m.ucb_action(a, c, o, 0, args)
            if name == "sac":
                call = lambda m=module, a=actor, o=observation: m.policy_action(a, o)
        functions[name] = lambda call=call: milliseconds(call, 100)
    found = alternate(functions, repetitions)
    return show(
        "Acting, 1 thread", ["script", "ms an action"], [[name, median(values)] for name, values in found.items()]
    )


def compile_table(repetitions: int) -> list[dict]:
    """What --compile does in the discrete scripts: seconds of the first updates, later ones to the plain."""
    torch.set_num_threads(1)
    rows = []
    for name in DISCRETE:
        module = importlib.import_module(name)
        plain, _, _ = make_update(name, "LunarLander-v3", 64)
        if name == "ivdqn":
            module.inverse_variance = torch.compiler.disable(module.inverse_variance)  # it is numpy's
        original = getattr(module, f"{name}_loss")
        setattr(module, f"{name}_loss", torch.compile(original))
        compiled, _, _ = make_update(name, "LunarLander-v3", 64)
        setattr(module, f"{name}_loss", original)
        seconds = milliseconds(compiled, 3) * 3 / 1000
        each = lambda update: lambda: milliseconds(update, 60)
        found = alternate({"plain": each(plain), "compiled": each(compiled)}, repetitions)
        rows.append([name, seconds, median(found["compiled"]), ratio(found, "compiled", "plain")])
    header = ["script", "seconds of the first updates", "ms an update", "to the plain update"]
    return show("--compile, 1 thread", header, rows)


def start_table() -> list[dict]:
    """Wall time of a script's first step, in a process of its own, and of a checkpoint with 100,000 transitions."""
    rows = []
    for name in ("ivdqn", "ivsac"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(ROOT / f"{name}.py"), "--total-timesteps", "1", "--runs-dir", folder]
            code = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
            code += "sys.exit('wandb was imported' if 'wandb' in sys.modules else 0)"
            elapsed = []
            for _ in range(3):
                start = time.time()
                subprocess.run([command[0], "-c", code, *command[1:]], check=True, capture_output=True)
                elapsed.append(time.time() - start)
        module = importlib.import_module(name)
        observation, scalar = np.zeros(SIZES["Walker2d-v4"][0], np.float32), np.float32(0)
        fields = {"observation": observation, "action": scalar, "next_observation": observation, "reward": scalar}
        buffer = module.ReplayBuffer(100_000, torch.device("cpu"), **fields)
        buffer.size = buffer.capacity
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            run = module.Run(module.Args(runs_dir=folder, run_name="x"), {"buffer": buffer}, np.random.default_rng(0))
            seconds = milliseconds(lambda run=run: run.checkpoint(1, 1, [], final=True), 1) / 1000
        rows.append([name, median(elapsed), seconds])
    return show("Seconds", ["script", "start to the end of the first step", "checkpoint of 100,000 transitions"], rows)


def print_profile(name: str, threads: int) -> None:
    """The operators of an update that take the most time."""
    torch.set_num_threads(threads)
    discrete = name in DISCRETE
    update, _, _ = make_update(name, "LunarLander-v3" if discrete else "Walker2d-v4", 64 if discrete else 256)
    calls = 100 if discrete else 10
    milliseconds(update, calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        milliseconds(update, calls)
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total, counts = sum(row.self_cpu_time_total for row in rows), sum(row.count for row in rows)
    print(f"{name}: {total / calls / 1000:.2f} ms and {counts / calls:.0f} calls an update, profiled")
    table = [
        [row.key, row.count / calls, row.self_cpu_time_total / calls, row.self_cpu_time_total / total] for row in rows
    ]
    show(f"Operators of {name}", ["operator", "calls", "microseconds", "share"], table[:12])


if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.profile:
        sys.exit(print_profile(args.profile, args.threads))
    if importlib.util.find_spec("stable_baselines3") is None:
        sys.exit("speed.py: stable-baselines3 is not installed: pip install stable-baselines3")
    warnings.filterwarnings("ignore")
    start, versions = time.time(), {name: importlib.metadata.version(name) for name in ("torch", "gymnasium", "numpy")}
    versions |= {
        "stable-baselines3": importlib.metadata.version("stable-baselines3"),
        "python": platform.python_version(),
    }
    machine = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    report = {"machine": f"{machine}, {os.cpu_count()} cores", "versions": versions}
    print(f"{report['machine']}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    for threads in (1, 2):
        report[f"steps, {threads} threads"] = step_table(threads, args.repetitions)
        report[f"updates, {threads} threads"] = update_table(threads, args.repetitions)
    report |= {"growth": growth_table(3), "acting": acting_table(args.repetitions), "start": start_table()}
    if shutil.which("g++"):
        report["compile"] = compile_table(args.repetitions)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report | {"seconds": round(time.time() - start)}, indent=1))
    print(f"\n{time.time() - start:.0f} seconds; {args.out}")
