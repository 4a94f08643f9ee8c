"""How fast the scripts are: against one another, stable-baselines3 and this machine's own matrix products.

    pip install stable-baselines3 && python tests/speed.py

Every number is a median of alternating repetitions, and every ratio the median of the ratios within a repetition. Steps
are those of the scripts' own loops; the parts of an update are timed around the scripts' own functions. The arithmetic
limit is the time of an update's matrix products at the rate of the fastest single-precision product that torch offers.

    python tests/speed.py --profile ivsac             the operators of an update
    python tests/speed.py --against FOLDER            updates and steps beside those of another checkout
"""

import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import operator
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.nn.functional import linear

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DISCRETE = ("dqn", "bootstrap_dqn", "sunrise_dqn", "ivdqn")
CONTINUOUS = ("sac", "ensemble_sac", "sunrise", "ivsac")
SINGLE = ("dqn", "sac")  # not ensembles
SIZES = {"LunarLander-v3": (8, 4), "Walker2d-v4": (17, 6)}  # observations, actions
CELLS = [(name, "LunarLander-v3", 64) for name in DISCRETE] + [(name, "Walker2d-v4", 256) for name in CONTINUOUS]
LARGE_CELLS = [("ensemble_sac", "Walker2d-v4", 1024), ("ivsac", "Walker2d-v4", 1024)]
STEPS = {"sac": 80, "ensemble_sac": 25, "sunrise": 20, "ivsac": 15}  # of a measurement; 500 in the others
PRECISIONS = ("highest", "medium")  # of torch's single-precision products: the exact and the fastest setting
PARTS = ("sampling", "targets and variance", "xi", "forward", "backward and optimiser", "target update")


@dataclass
class Args:
    out: Path = ROOT / "results" / "speed.json"  # where the numbers go
    repetitions: int = 5  # of every measurement, alternating
    profile: Literal[*DISCRETE, *CONTINUOUS] | None = None  # print the operators of this script's update, and leave
    against: Path | None = None  # folder of another checkout: print its speed beside ours, and leave
    threads: int = 1  # of --profile and --against


# ---------------------------------------------------------------------------- whole steps
def script_step(name: str, env_id: str, batch_size: int, threads: int) -> float:
    """Milliseconds a step of the script's own loop, with an update at each step."""
    module = importlib.import_module(name)
    steps = STEPS.get(name, 500)
    times = {}

    class TimedRun(module.Run):
        def start(self, *args: Any) -> None:
            super().start(*args)
            times["start"] = time.perf_counter()

        def finish(self) -> Path:
            times["end"] = time.perf_counter()
            return super().finish()

    settings = {"rollout_length": 1} if name in CONTINUOUS else {"start_epsilon": 0.01, "end_epsilon": 0.01}
    if name not in SINGLE:
        settings["mask_prob"] = 1.0
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(module, "Run", TimedRun),
    ):
        args = module.Args(
            env_id=env_id,
            total_timesteps=steps + batch_size,
            learning_starts=batch_size,
            batch_size=batch_size,
            eval_every=0,
            cuda=False,
            num_threads=threads,
            runs_dir=folder,
            **settings,
        )
        module.train(args)
    return 1000 * (times["end"] - times["start"]) / steps


def baseline_step(name: str, env_id: str, batch_size: int, threads: int) -> float:
    """The same with stable-baselines3: same network, batch, schedule and soft updates."""
    import stable_baselines3

    torch.set_num_threads(threads)
    steps = STEPS.get(name, 500)
    settings = {}
    if name == "dqn":
        settings = {
            "target_update_interval": 1,
            "policy_kwargs": {"net_arch": [64, 64]},
            "buffer_size": 100_000,
            "exploration_initial_eps": 0.01,
            "exploration_final_eps": 0.01,
        }
    model = getattr(stable_baselines3, name.upper())(
        "MlpPolicy",
        gym.make(env_id),
        batch_size=batch_size,
        learning_starts=batch_size,
        train_freq=1,
        gradient_steps=1,
        tau=0.005,
        gamma=0.99,
        device="cpu",
        seed=1,
        **settings,
    )
    start = time.perf_counter()
    model.learn(steps + batch_size)
    return 1000 * (time.perf_counter() - start) / steps


# ---------------------------------------------------------------------------- updates
def make_agent(name: str, env_id: str, batch_size: int, num_nets: int = 5) -> tuple[ModuleType, Any, Any]:
    """A script, its arguments and its agent, with a buffer full of random transitions."""
    module = importlib.import_module(name)
    num_inputs, num_actions = SIZES[env_id]
    ensemble = {} if name in SINGLE else {"num_nets": num_nets, "mask_prob": 1.0}
    args = module.Args(batch_size=batch_size, buffer_size=10_000, cuda=False, **ensemble)
    observation_space = gym.spaces.Box(-1, 1, (num_inputs,))
    if name in DISCRETE:
        action_space = gym.spaces.Discrete(num_actions)
    else:
        action_space = gym.spaces.Box(-1, 1, (num_actions,))
    torch.manual_seed(1)
    agent = module.Agent(observation_space, action_space, args)
    rng = np.random.default_rng(1)
    for field, array in agent.buffer.arrays.items():
        if field == "discount":
            array[:] = args.gamma
        elif field == "mask":
            array[:] = True
        elif array.dtype == np.int64:
            array[:] = rng.integers(num_actions, size=array.shape)
        elif field != "terminated":
            array[:] = rng.uniform(-1, 1, array.shape)
    agent.buffer.size = agent.buffer.capacity
    return module, args, agent


def discrete_update(
    module: ModuleType, args: Any, agent: Any, rng: np.random.Generator, parameters: list, target_parameters: list
) -> None:
    """An update as the loops of the DQN family do it."""
    batch = agent.buffer.sample(args.batch_size, rng)
    loss_function = getattr(module, f"{module.__name__}_loss")
    loss, _ = loss_function(agent.network, agent.target_network, batch, args)
    module.require_finite("the loss", loss.item())
    agent.optimizer.zero_grad()
    loss.backward()
    agent.optimizer.step()
    module.soft_update(target_parameters, parameters, args.tau)


def continuous_update(module: ModuleType, args: Any, agent: Any, rng: np.random.Generator) -> None:
    """An update as the loops of the SAC family do it."""
    batch = agent.buffer.sample(args.batch_size, rng)
    losses = getattr(module, f"{module.__name__}_update")(agent, batch, args)[0]
    module.require_finite("a loss", sum(losses.values()).item())


def make_update(name: str, env_id: str, batch_size: int, num_nets: int = 5) -> tuple[Callable, ModuleType, Any]:
    """A function that does one update as the script's loop does; the script and the agent in it."""
    module, args, agent = make_agent(name, env_id, batch_size, num_nets)
    rng = np.random.default_rng(1)
    if name in CONTINUOUS:
        return functools.partial(continuous_update, module, args, agent, rng), module, agent
    parameters = list(agent.network.net.parameters())  # once, as in the loop
    target_parameters = list(agent.target_network.net.parameters())
    update = functools.partial(discrete_update, module, args, agent, rng, parameters, target_parameters)
    return update, module, agent


def milliseconds(function: Callable, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return 1000 * (time.perf_counter() - start) / calls


def update_time(update: Callable, calls: int, precision: str) -> float:
    torch.set_float32_matmul_precision(precision)
    return milliseconds(update, calls)


def calls_of(name: str, batch_size: int) -> int:
    """As many updates as a measurement needs to last some tenths of a second."""
    if name in DISCRETE:
        return 200
    return max(2, round(30 * 256 / batch_size)) if name in SINGLE else max(2, round(5 * 256 / batch_size))


# ---------------------------------------------------------------------------- the parts of an update
class Stopwatch:
    """The time inside functions, added up by part, without that of other timed functions in them."""

    def __init__(self) -> None:
        self.spent = defaultdict(float)
        self.nested = []  # for each timed function that is running, the time of those in it

    def timed(self, function: Callable, part: str) -> Callable:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.nested.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - start
                self.spent[part] += elapsed - self.nested.pop()
                if self.nested:
                    self.nested[-1] += elapsed

        return wrapper


def update_parts(name: str, env_id: str, batch_size: int, calls: int) -> dict[str, float]:
    """Milliseconds of each part of an update."""
    update, module, agent = make_update(name, env_id, batch_size)
    functions = [
        (module.ReplayBuffer, "sample", "sampling"),
        (module, "soft_update", "target update"),
        (torch.Tensor, "backward", "backward and optimiser"),
        (torch.optim.Adam, "step", "backward and optimiser"),
        (module, "smallest_xi", "xi"),
        (module, f"{name}_targets", "targets and variance"),
        (module, "predictive_variance", "targets and variance"),
        (module, "mixture_variance", "targets and variance"),
        (module, "sunrise_weights", "targets and variance"),
        (module, "sample_weights", "targets and variance"),
    ]
    if name in DISCRETE:
        method = "mean_and_log_variance" if name == "ivdqn" else "forward"
        functions.append((agent.target_network, method, "targets and variance"))
    watch = Stopwatch()
    with contextlib.ExitStack() as patches:
        for owner, attribute, part in functions:
            if hasattr(owner, attribute):
                timed = watch.timed(getattr(owner, attribute), part)
                patches.enter_context(mock.patch.object(owner, attribute, timed))
        milliseconds(watch.timed(update, "forward"), calls)
    return {part: 1000 * watch.spent[part] / calls for part in PARTS}


# ---------------------------------------------------------------------------- the arithmetic limit
def mlp_products(num_inputs: int, hidden_size: int, num_outputs: int) -> int:
    """Multiply-adds of a network for one sample."""
    return num_inputs * hidden_size + hidden_size * hidden_size + hidden_size * num_outputs


def multiply_adds(name: str, env_id: str, batch_size: int, num_nets: int = 5) -> int:
    """Of the matrix products that an update needs. A backward pass has one product for the gradient of the weights and
    one for that of the inputs, where these are needed.
    """
    num_inputs, num_actions = SIZES[env_id]
    n = 1 if name in SINGLE else num_nets
    heads = 2 if name in ("ivdqn", "ivsac") else 1
    if name in DISCRETE:
        forward = mlp_products(num_inputs, 64, heads * num_actions)
        backward = 2 * forward - num_inputs * 64
        prior = mlp_products(num_inputs, 64, num_actions) if name in ("bootstrap_dqn", "sunrise_dqn") else 0
        return n * batch_size * (2 * forward + 2 * prior + backward)
    critic = mlp_products(num_inputs + num_actions, 256, heads)
    actor = mlp_products(num_inputs, 256, 2 * num_actions)
    critics_at_next_action = {"sac": 2, "ensemble_sac": 2 * n, "sunrise": 2 * n * n, "ivsac": 2 * n + n * n}[name]
    total = critics_at_next_action * critic
    if name == "ivsac":
        total += n * n * critic  # the variance at the actors' actions
    total += n * (2 * actor + 2 * actor - num_inputs * 256)  # the actors at s' and s, and their gradient
    total += 2 * n * 2 * critic  # the critics at the actors' actions, and the gradient of these
    total += 2 * n * (3 * critic - (num_inputs + num_actions) * 256)  # the critics' own step
    return batch_size * total


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """The products of hidden layers, one network after the other."""
    return [linear(own_x, own_weight.T) for own_x, own_weight in zip(x, weight, strict=True)]


def batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Those of all networks at once."""
    return torch.bmm(x, weight)


def layer_inputs(width: int, batch_size: int, nets: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(nets, batch_size, width, generator=generator)
    weight = torch.randn(nets, width, width, generator=generator)
    return x, weight


def product_rates(width: int, batch_size: int, nets: int) -> dict[tuple[str, str], float]:
    """Multiply-adds a millisecond of the products of `nets` hidden layers, by precision and form."""
    x, weight = layer_inputs(width, batch_size, nets)
    weight_of_linear = weight.mT.contiguous().mT  # as nn.Linear stores it
    size = nets * batch_size * width**2
    calls = int(5e8 / size) + 2
    rates = {}
    for precision in PRECISIONS:
        torch.set_float32_matmul_precision(precision)
        separate = milliseconds(functools.partial(one_by_one, x, weight_of_linear), calls)
        together = milliseconds(functools.partial(batched, x, weight), calls)
        rates[precision, "one by one"] = size / separate
        rates[precision, "batched"] = size / together
    return rates


def product_error(width: int, batch_size: int, nets: int, precision: str, form: str) -> float:
    """The relative error of these products, beside those in double precision."""
    x, weight = layer_inputs(width, batch_size, nets)
    exact = torch.bmm(x.double(), weight.double())
    torch.set_float32_matmul_precision(precision)
    found = batched(x, weight) if form == "batched" else torch.stack(one_by_one(x, weight))
    return float((found - exact).norm() / exact.norm())


def limit(name: str, env_id: str, batch_size: int, num_nets: int = 5) -> float:
    """Milliseconds that an update's products need at the rate of the fastest product at the hidden layers' size."""
    width = 64 if name in DISCRETE else 256
    n = 1 if name in SINGLE else num_nets
    nets = n if name in DISCRETE else 2 * n
    fastest = max(product_rates(width, batch_size, nets).values())
    return multiply_adds(name, env_id, batch_size, num_nets) / fastest


# ---------------------------------------------------------------------------- memory
def process_megabytes(key: str) -> float:
    """VmRSS, the memory of this process, or VmHWM, the most that it has had (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s*(\d+)", status)[1]) / 1000


def print_peak_memory(name: str, env_id: str, batch_size: int, num_nets: int) -> None:
    torch.set_num_threads(1)
    update, _, _ = make_update(name, env_id, batch_size, num_nets)
    before = process_megabytes("VmRSS")
    update()
    update()
    print(max(process_megabytes("VmHWM") - before, 0))


def peak_memory(name: str, env_id: str, batch_size: int, num_nets: int) -> float:
    """Megabytes by which updates raise the peak of a fresh process."""
    code = f"import speed; speed.print_peak_memory({name!r}, {env_id!r}, {batch_size}, {num_nets})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


# ---------------------------------------------------------------------------- the tables
def alternate(functions: dict[Any, Callable], repetitions: int) -> dict[Any, list[float]]:
    """The functions' results, one of each in turn, after one of each to warm up."""
    found = defaultdict(list)
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            value = function()
            if repetition > 0:
                found[name].append(value)
    return found


def ratio(found: dict[Any, list[float]], name: Any, base: Any) -> float:
    return median(a / b for a, b in zip(found[name], found[base], strict=True))


def cell_text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show(title: str, header: list[str], rows: list[list[Any]]) -> list[dict]:
    print(f"\n**{title}**\n")
    for row in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cell_text(value) for value in row)} |", flush=True)
    return [dict(zip(header, row, strict=True)) for row in rows]


def count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def step_table(threads: int, repetitions: int) -> list[dict]:
    rows = []
    for names, env_id, batch_size in ((DISCRETE, "LunarLander-v3", 64), (CONTINUOUS, "Walker2d-v4", 256)):
        plainest = names[0]
        base = f"stable-baselines3 {plainest.upper()}"
        functions = {base: functools.partial(baseline_step, plainest, env_id, batch_size, threads)}
        for name in names:
            functions[name] = functools.partial(script_step, name, env_id, batch_size, threads)
        found = alternate(functions, repetitions)
        for name, values in found.items():
            ratios = [ratio(found, name, plainest), ratio(found, name, base)]
            rows.append([name, env_id, batch_size, median(values), *ratios])
    header = ["script", "environment", "batch", "ms a step", "to the plainest", "to stable-baselines3"]
    return show(f"A step with its update, {count(threads)}", header, rows)


def product_table(threads: int, repetitions: int) -> list[dict]:
    """What the products of hidden layers reach: of five Q-networks, of ten critics."""
    torch.set_num_threads(threads)
    rows = []
    for size in ((64, 64, 5), (256, 256, 10), (256, 1024, 10)):
        repeated = [product_rates(*size) for _ in range(repetitions + 1)][1:]
        for precision, form in repeated[0]:
            gigaflops = 2 * median(rates[precision, form] for rates in repeated) / 1e6
            rows.append([*size, precision, form, gigaflops, product_error(*size, precision, form)])
    header = ["width", "batch", "networks", "precision", "form", "GFLOP/s", "relative error"]
    return show(f"Products in single precision, {count(threads)}", header, rows)


def update_table(threads: int, repetitions: int) -> list[dict]:
    torch.set_num_threads(threads)
    rows = []
    for name, env_id, batch_size in [*CELLS, *LARGE_CELLS]:
        calls = calls_of(name, batch_size)
        update, _, _ = make_update(name, env_id, batch_size)
        functions = {"limit": functools.partial(limit, name, env_id, batch_size)}
        precisions = PRECISIONS if name in CONTINUOUS else PRECISIONS[:1]
        for precision in precisions:
            functions[precision] = functools.partial(update_time, update, calls, precision)
        found = alternate(functions, repetitions)
        for precision in precisions:
            torch.set_float32_matmul_precision(precision)
            repeated = [update_parts(name, env_id, batch_size, calls) for _ in range(min(repetitions, 3))]
            parts = [median(each[part] for each in repeated) for part in PARTS]
            to_limit = ratio(found, precision, "limit")
            rows.append([name, batch_size, precision, median(found[precision]), to_limit, *parts])
    header = ["script", "batch", "precision", "ms an update", "to the arithmetic limit", *PARTS]
    return show(f"An update and its parts in ms, {count(threads)}", header, rows)


def growth_table(repetitions: int) -> list[dict]:
    torch.set_num_threads(1)
    rows = []
    for name, env_id, usual in (("ivdqn", "LunarLander-v3", 64), ("ivsac", "Walker2d-v4", 256)):
        torch.set_float32_matmul_precision(importlib.import_module(name).Args().matmul_precision)
        sizes = [(1, usual), (2, usual), (5, usual), (10, usual), (5, 64), (5, 256), (5, 1024)]
        functions = {}
        for num_nets, batch_size in dict.fromkeys(sizes):
            update, _, _ = make_update(name, env_id, batch_size, num_nets)
            functions[num_nets, batch_size] = functools.partial(milliseconds, update, 20 if name == "ivdqn" else 1)
        found = alternate(functions, repetitions)
        for (num_nets, batch_size), values in found.items():
            memory = peak_memory(name, env_id, batch_size, num_nets)
            rows.append([name, num_nets, batch_size, median(values), memory])
    return show("Growth of an update with N and K, 1 thread", ["script", "N", "K", "ms an update", "peak MB"], rows)


def acting_table(repetitions: int) -> list[dict]:
    torch.set_num_threads(1)
    functions = {}
    for name, env_id, batch_size in CELLS:
        module, args, agent = make_agent(name, env_id, batch_size)
        observation = np.zeros(SIZES[env_id][0], np.float32)
        if name == "dqn":
            act = functools.partial(module.greedy_action, agent, observation)
        elif name in DISCRETE:
            act = functools.partial(module.member_actions, agent, observation)
        elif name == "sac":
            act = functools.partial(module.policy_action, agent, observation)
        else:
            act = functools.partial(module.ucb_action, agent, observation, 0, args)
        functions[name] = functools.partial(milliseconds, act, 100)
    found = alternate(functions, repetitions)
    rows = [[name, median(values)] for name, values in found.items()]
    return show("Acting, 1 thread", ["script", "ms an action"], rows)


def start_seconds(name: str) -> float:
    """From the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / f"{name}.py"), "--total-timesteps", "1", "--runs-dir", folder]
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        return time.perf_counter() - start


def checkpoint_seconds(name: str) -> float:
    """Of a checkpoint with 100,000 transitions."""
    module = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = module.Args(buffer_size=100_000, num_threads=1, cuda=False, runs_dir=folder)
        with module.Run(args) as run:
            agent = module.Agent(run.env.observation_space, run.env.action_space, args)
            agent.buffer.size = agent.buffer.capacity
            run.start(agent, np.random.default_rng(0))
            return milliseconds(run.save, 1) / 1000


def start_table(repetitions: int) -> list[dict]:
    rows = []
    for name in ("ivdqn", "ivsac"):
        starts = [start_seconds(name) for _ in range(repetitions)]
        checkpoints = [checkpoint_seconds(name) for _ in range(repetitions)]
        rows.append([name, median(starts), median(checkpoints)])
    return show("Seconds", ["script", "start to the end of the first step", "checkpoint of 100,000 transitions"], rows)


# ---------------------------------------------------------------------------- other reports
def print_profile(name: str, threads: int) -> None:
    """The operators of an update that take the most time."""
    torch.set_num_threads(threads)
    env_id, batch_size = next(cell[1:] for cell in CELLS if cell[0] == name)
    update, module, _ = make_update(name, env_id, batch_size)
    torch.set_float32_matmul_precision(module.Args().matmul_precision)
    calls = 100 if name in DISCRETE else 10
    milliseconds(update, calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        milliseconds(update, calls)
    operators = sorted(found.key_averages(), key=operator.attrgetter("self_cpu_time_total"), reverse=True)
    total = sum(each.self_cpu_time_total for each in operators)
    number = sum(each.count for each in operators)
    print(f"{name}: {total / calls / 1000:.2f} ms and {number / calls:.0f} calls an update, profiled")
    rows = []
    for each in operators[:12]:
        share = each.self_cpu_time_total / total
        rows.append([each.key, each.count / calls, each.self_cpu_time_total / calls, share])
    show(f"Operators of {name}", ["operator", "calls", "microseconds", "share"], rows)


WORKER = """
import sys
import time

folder, name, env_id, batch_size, threads = sys.argv[1:]
sys.path.insert(0, folder + "/tests")
import speed
import torch

torch.set_num_threads(int(threads))
update = speed.make_update(name, env_id, int(batch_size))[0]
precision = getattr(speed.importlib.import_module(name).Args(), "matmul_precision", "highest")
torch.set_float32_matmul_precision(precision)  # as the script itself does
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        update()
    print(1000 * (time.perf_counter() - start) / int(line), flush=True)
"""


class Worker:
    """A process that does the updates of a checkout, with the make_update of its own tests/speed.py, when told to."""

    def __init__(self, folder: Path, name: str, env_id: str, batch_size: int, threads: int):
        command = [sys.executable, "-c", WORKER, str(folder), name, env_id, str(batch_size), str(threads)]
        variables = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def update_time(self, calls: int) -> float:
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def loop_time(folder: Path, name: str, threads: int) -> float:
    """Milliseconds a step of a checkout's script, as a person starts it, with the epsilon of most of the training."""
    steps = {"total-timesteps": 6000, "learning-starts": 1000, "batch-size": 64, "eval-every": 0}
    rest = {"start-epsilon": 0.01, "end-epsilon": 0.01, "num-threads": threads, "run-name": "x"}
    if name not in SINGLE:
        rest["mask-prob"] = 1
    flags = [word for key, value in (steps | rest).items() for word in (f"--{key}", str(value))]
    if name == "ivdqn":
        flags.append("--no-terminal-variance")  # was the default before the redesign
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, folder / f"{name}.py", "--env-id", "LunarLander-v3", "--runs-dir", runs, *flags]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(runs, "x", "metrics.jsonl").read_text().splitlines()]
    return 1000 / [row["charts/SPS"] for row in rows if "charts/SPS" in row][-1]


def print_comparison(folder: Path, threads: int, repetitions: int) -> None:
    """Our updates and the whole steps of the DQN family, beside those of another checkout, each in its precision."""
    rows = []
    for name, env_id, batch_size in CELLS:
        calls = calls_of(name, batch_size)
        workers = {each: Worker(each, name, env_id, batch_size, threads) for each in (folder.resolve(), ROOT)}
        functions = {each: functools.partial(worker.update_time, calls) for each, worker in workers.items()}
        found = alternate(functions, repetitions)
        for worker in workers.values():
            worker.close()
        theirs, ours = (median(values) for values in found.values())
        rows.append([name, batch_size, theirs, ours, ratio(found, ROOT, folder.resolve())])
    show(f"Updates, {count(threads)}", ["script", "batch", f"ms in {folder}", "ms here", "ratio"], rows)
    rows = []
    for name in DISCRETE:
        functions = {each: functools.partial(loop_time, each, name, threads) for each in (folder.resolve(), ROOT)}
        found = alternate(functions, repetitions)
        theirs, ours = (median(values) for values in found.values())
        rows.append([name, theirs, ours, ratio(found, ROOT, folder.resolve())])
    show(f"Whole steps, {count(threads)}", ["script", f"ms in {folder}", "ms here", "ratio"], rows)


def main() -> None:
    args = tyro.cli(Args)
    if args.profile is not None:
        print_profile(args.profile, args.threads)
        return
    if args.against is not None:
        print_comparison(args.against, args.threads, args.repetitions)
        return
    try:
        packages = ("torch", "gymnasium", "numpy", "stable-baselines3")
        versions = {name: importlib.metadata.version(name) for name in packages}
    except importlib.metadata.PackageNotFoundError as error:
        sys.exit(f"speed.py: {error}: pip install stable-baselines3")
    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    versions["python"] = platform.python_version()
    machine = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    report = {"machine": f"{machine}, {os.cpu_count()} cores", "versions": versions}
    print(f"{report['machine']}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    for threads in (1, 2):
        report[f"steps, {count(threads)}"] = step_table(threads, args.repetitions)
        report[f"products, {count(threads)}"] = product_table(threads, args.repetitions)
        report[f"updates, {count(threads)}"] = update_table(threads, args.repetitions)
    report["growth"] = growth_table(min(args.repetitions, 3))
    report["acting"] = acting_table(args.repetitions)
    report["start"] = start_table(min(args.repetitions, 3))
    report["seconds"] = round(time.perf_counter() - start)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1))
    print(f"\n{report['seconds']} seconds; {args.out}")


if __name__ == "__main__":
    main()
