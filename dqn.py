# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[box2d,classic-control,mujoco]==1.4.0", "mujoco==3.17.0", "numpy==2.4.6",
#   "tyro==1.0.16", "tqdm==4.70.1", "wandb==0.31.0", "moviepy==2.2.1"]
# ///
"""DQN: deep Q-learning with a target network (paper Sec. 3.1; Mnih et al. 2015).

One network learns Q from a replay buffer. Its targets contain the prediction of a slowly following copy. It explores
by random actions, fewer and fewer. This is the plainest of the discrete scripts; the others are built upon it.

    python dqn.py --env-id LunarLander-v3 --seed 1
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, BinaryIO, Literal, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from tqdm import tqdm


@dataclass
class DQNArgs:
    """The algorithm. A comment begins with the paper's symbol, where that is not the name itself."""

    env_id: str = "LunarLander-v3"  # gymnasium id of the environment: discrete actions
    total_timesteps: int = 500_000  # environment steps after which the run ends
    total_episodes: int | None = 500  # training episodes after which the run ends, if it has not before
    solved_at: float | None = None  # mean of 100 evaluation returns that ends the run (default: gymnasium's threshold)
    eval_every: int = 1  # training episodes between two evaluation episodes (0: never)
    hidden_size: int = 64  # width of the two hidden layers
    buffer_size: int = 100_000  # B: capacity of the replay buffer
    learning_starts: int = 1000  # environment steps before the first update
    train_frequency: int = 1  # environment steps between two updates
    batch_size: int = 128  # K: minibatch size
    learning_rate: float = 5e-4  # learning rate of Adam
    max_grad_norm: float | None = None  # clip the gradient to this norm
    gamma: float = 0.99  # discount rate
    n_step: int = 1  # n: rewards summed in a target before it bootstraps
    truncation_terminates: bool = False  # take a time limit for a terminal state, as the published code does
    tau: float = 0.005  # rate of the target update (1: a copy)
    target_network_frequency: int = 1  # environment steps between two target updates
    start_epsilon: float = 1.0  # epsilon in the first episode: probability of a random action
    end_epsilon: float = 0.01  # epsilon never falls below this
    epsilon_decay: float = 0.99  # e-decay: factor on epsilon from episode to episode
    cuda: bool = False  # use a GPU if there is one (networks this small run faster on the CPU)
    num_threads: int = 1  # CPU threads of torch
    matmul_precision: Literal["highest", "high", "medium"] = "highest"  # of float32 matrix products (docs/speed.md)


AlgorithmArgs = DQNArgs  # for the machinery below, which adds the run's arguments and calls all of them Args


# ---------------------------------------------------------------------------- networks
def mlp(num_inputs: int, hidden_size: int, num_outputs: int) -> nn.Sequential:
    """A network with two hidden ReLU layers."""
    return nn.Sequential(
        nn.Linear(num_inputs, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, num_outputs),
    )


class QNetwork(nn.Module):
    """Q for each action: (K, inputs) -> (K, A)."""

    def __init__(self, num_inputs: int, num_actions: int, args: Args):
        super().__init__()
        self.net = mlp(num_inputs, args.hidden_size, num_actions)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(observation)


# ---------------------------------------------------------------------------- replay buffer
class ReplayBuffer:
    """A ring of transitions, with one array for each field, sampled uniformly with replacement."""

    def __init__(self, capacity: int, device: torch.device, **example: np.ndarray | np.generic):
        """The example is a transition whose values do not matter, only their names, shapes and types."""
        self.arrays = {name: np.zeros((capacity, *value.shape), value.dtype) for name, value in example.items()}
        self.capacity = capacity
        self.device = device
        self.size = 0
        self.position = 0

    def add(self, **transition: Any) -> None:
        for name, value in transition.items():
            self.arrays[name][self.position] = value
        self.position = (self.position + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def sample(self, batch_size: int, rng: np.random.Generator) -> SimpleNamespace:
        index = rng.integers(self.size, size=batch_size)
        batch = SimpleNamespace()
        for name, array in self.arrays.items():
            setattr(batch, name, torch.from_numpy(array.take(index, axis=0)).to(self.device))
        return batch

    def state_dict(self) -> dict[str, Any]:
        filled = {name: torch.from_numpy(array[: self.size]) for name, array in self.arrays.items()}
        return {"arrays": filled, "size": self.size, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size = state["size"]
        self.position = state["position"]
        if not 0 <= self.position < self.capacity:
            raise ValueError(f"position is {self.position}")
        for name, array in self.arrays.items():
            saved = state["arrays"][name].numpy()
            if saved.shape != array[: self.size].shape:
                raise ValueError(f"{name} is {saved.shape}")
            array[: self.size] = saved


def n_step_transitions(pending: deque, done: bool, args: Args) -> Iterator[dict[str, Any]]:
    """Takes out each step whose n rewards are known, with their discounted sum; at an episode's end, all the others.

    The caller adds the state that follows the last of these rewards, where the target bootstraps.
    """
    while len(pending) == args.n_step or (done and pending):
        rewards = [reward for _, _, reward in pending]
        observation, action, _ = pending.popleft()
        yield {
            "observation": observation,
            "action": action,
            "reward": sum(args.gamma**i * reward for i, reward in enumerate(rewards)),
            "discount": args.gamma ** len(rewards),  # gamma^n: factor of the prediction that follows
        }


# ---------------------------------------------------------------------------- the agent
class DQN:
    """What learns: networks, optimiser, replay buffer. Every attribute is saved, by its state_dict."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        num_inputs = observation_space.shape[0]
        num_actions = int(action_space.n)
        device = choose_device(args)
        self.network = QNetwork(num_inputs, num_actions, args).to(device)
        self.target_network = QNetwork(num_inputs, num_actions, args).to(device).requires_grad_(False)
        self.target_network.load_state_dict(self.network.state_dict())
        self.optimizer = torch.optim.Adam(self.network.net.parameters(), lr=args.learning_rate, fused=True)
        self.buffer = ReplayBuffer(
            args.buffer_size,
            device,
            observation=np.zeros(num_inputs, np.float32),
            action=np.int64(0),
            next_observation=np.zeros(num_inputs, np.float32),
            reward=np.float32(0),  # r, or the n-step return
            discount=np.float32(0),  # gamma, or gamma^n
            terminated=np.float32(0),
        )

    def evaluation_action(self, observation: np.ndarray, rng: np.random.Generator) -> int:
        return greedy_action(self, observation)


Agent = DQN  # for the machinery below


# ---------------------------------------------------------------------------- losses
def at_action(values: Tensor, action: Tensor) -> Tensor:
    """The value of each sample's action, which may differ between members: (..., K, A) -> (..., K)."""
    index = action.expand(values.shape[:-1]).unsqueeze(-1)
    return values.gather(-1, index).squeeze(-1)


def dqn_loss(
    network: nn.Module, target_network: nn.Module, batch: SimpleNamespace, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean squared error (Eq. 5)."""
    # The prediction at (s, a).
    all_means = network(batch.observation)  # (K, A)
    mean = at_action(all_means, batch.action)  # (K,)
    with torch.no_grad():
        # Eq. 4: the target, at the target network's greedy a'.
        all_next_means = target_network(batch.next_observation)
        next_mean = all_next_means.amax(-1)  # (K,)
        target = batch.reward + batch.discount * (1 - batch.terminated) * next_mean
    loss = nn.functional.mse_loss(mean, target)
    return loss, {"mean": mean}


def dqn_metrics(loss: Tensor, tensors: dict[str, Tensor]) -> dict[str, float]:
    """What is logged of an update."""
    return {
        "losses/loss": loss.item(),
        "losses/q_values": tensors["mean"].mean().item(),
    }


@torch.no_grad()
def soft_update(target_parameters: Iterable[Tensor], parameters: Iterable[Tensor], tau: float) -> None:
    """Moves each target parameter by a share tau towards the online one."""
    for target, online in zip(target_parameters, parameters, strict=True):
        target.lerp_(online, tau)


# ---------------------------------------------------------------------------- acting and evaluation
def to_batch(observation: np.ndarray, device: torch.device) -> Tensor:
    """One observation as a batch: (1, inputs)."""
    return torch.as_tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)


@torch.no_grad()
def greedy_action(agent: Agent, observation: np.ndarray) -> int:
    """The action of the highest Q."""
    q_values = agent.network(to_batch(observation, agent.buffer.device))  # (1, A)
    return int(q_values.argmax(-1))


def require_discrete_actions(env: gym.Env) -> gym.Env:
    """Refuses an environment whose actions this family cannot take."""
    if not isinstance(env.action_space, gym.spaces.Discrete) or env.action_space.start != 0:
        raise RunError(
            f"{env.spec.id} has actions {env.action_space}, not Discrete(n); for a Box, try sac.py and its like"
        )
    return env


adapt_actions = require_discrete_actions  # for the machinery below


def evaluation_return(agent: Agent, env: gym.Env, seed: int) -> float:
    """The return of one evaluation episode."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    episodic_return = 0.0
    done = False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(agent.evaluation_action(observation, rng))
        episodic_return += reward
        done = terminated or truncated
    return episodic_return


# ---------------------------------------------------------------------------- the loop
def train(args: Args) -> Path:
    """Deep Q-learning, in the order of Algorithm 1; returns the folder of the run."""
    with Run(args) as run:
        env = run.env
        agent = DQN(env.observation_space, env.action_space, args)
        rng = np.random.default_rng(args.seed)
        run.solved_at = args.solved_at
        if run.solved_at is None:
            run.solved_at = run.eval_env.spec.reward_threshold
        run.start(agent, rng)
        parameters = list(agent.network.net.parameters())
        target_parameters = list(agent.target_network.net.parameters())
        while not run.is_over():  # line 2
            observation, _ = env.reset(seed=run.episode_seed())
            epsilon = max(args.end_epsilon, args.start_epsilon * args.epsilon_decay**run.episode)
            pending = deque()  # (observation, action, reward) of the steps that wait for their n-step return
            episodic_return = 0.0
            episodic_length = 0
            done = False
            while not done and run.global_step < args.total_timesteps:  # line 4
                run.global_step += 1
                # Line 5: explore or exploit.
                if rng.random() < epsilon:
                    action = int(rng.integers(env.action_space.n))
                else:
                    action = greedy_action(agent, observation)
                next_observation, reward, terminated, truncated, _ = env.step(action)  # line 6
                done = terminated or truncated
                episodic_return += reward
                episodic_length += 1
                # Line 8: store. A truncated episode did not terminate: its targets bootstrap.
                pending.append((observation, action, reward))
                for transition in n_step_transitions(pending, done, args):
                    agent.buffer.add(
                        **transition,
                        next_observation=next_observation,
                        terminated=terminated or (truncated and args.truncation_terminates),
                    )
                observation = next_observation  # line 9
                # The buffer may still be empty: n-step returns may all be pending.
                learning = run.global_step > args.learning_starts and agent.buffer.size > 0
                if learning and run.global_step % args.train_frequency == 0:
                    batch = agent.buffer.sample(args.batch_size, rng)  # line 10
                    # Lines 11-18: the loss, and a gradient step.
                    loss, tensors = dqn_loss(agent.network, agent.target_network, batch, args)
                    require_finite("the loss", loss.item())
                    agent.optimizer.zero_grad()
                    loss.backward()
                    if args.max_grad_norm is not None:
                        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                    agent.optimizer.step()
                    if run.global_step % args.log_every == 0:
                        run.log(dqn_metrics(loss, tensors))
                if learning and run.global_step % args.target_network_frequency == 0:
                    soft_update(target_parameters, parameters, args.tau)  # line 19
                run.show_progress()
            if done:
                run.episode += 1
                row = {
                    "charts/episode": run.episode,
                    "charts/episodic_return": episodic_return,
                    "charts/episodic_length": episodic_length,
                    "charts/epsilon": epsilon,
                }
                if args.eval_every and run.episode % args.eval_every == 0:
                    row |= run.evaluation_row(agent, run.episode)
                run.log(row)
                run.checkpoint_if_due()
        return run.finish()


# ============================================================================
# Nothing below is about the algorithm: arguments, environments, the run's folder, metrics, checkpoints, command line.
# ============================================================================
SCRIPT = Path(__file__).name
# The arguments that may change when a run is resumed; all others belong to it for good.
MAY_CHANGE = {
    *("total_timesteps", "total_episodes", "solved_at", "cuda", "num_threads"),
    *("exp_name", "run_name", "runs_dir", "checkpoint_every", "checkpoint_minutes", "resume"),
    *("evaluate", "eval_episodes", "capture_video", "track", "wandb_project_name", "wandb_entity"),
}
# The smallest and the largest value of arguments, some of them of other scripts. Those that are not listed begin at 1,
# if they are whole numbers, or else at 0, and end at 1e12.
RANGES = {
    **dict.fromkeys(("gamma", "tau", "start_epsilon", "end_epsilon", "epsilon_decay", "mebs_ratio"), (0, 1)),
    **dict.fromkeys(("seed", "env_seed", "learning_starts", "eval_every"), (0, 10**12)),
    **dict.fromkeys(("alpha", "max_grad_norm"), (1e-12, 1e12)),
    "mask_prob": (1e-3, 1),
    "num_nets": (1, 1000),
    "batch_size": (1, 10**6),
    "solved_at": (-1e12, 1e12),
    "num_threads": (1, 1024),
}
# What the progress bar shows beside steps, speed and time left.
SHOWN = {
    "charts/episode": "ep",
    "charts/episodic_return": "return",
    "charts/eval_return": "eval",
    "charts/eval_return_mean100": "mean",
}


class RunError(Exception):
    """Ends a run with one sentence and an exit code: 2 for what was asked, 1 for what went wrong."""

    def __init__(self, sentence: str, code: int = 2):
        super().__init__(" ".join(sentence.splitlines()))
        self.code = code


@contextmanager
def refusing(beginning: str, code: int = 2) -> Iterator[None]:
    """Whatever goes wrong in here ends the run with a sentence that begins so."""
    try:
        yield
    except RunError:
        raise
    except (Exception, SystemExit) as error:  # an environment's module may do anything
        raise RunError(f"{beginning}: {type(error).__name__}: {error}", code) from error


def require_finite(name: str, value: Any) -> Any:
    if not np.isfinite(np.asarray(value)).all():
        raise FloatingPointError(f"{name} is not finite")
    return value


# ---------------------------------------------------------------------------- arguments
@dataclass
class RunArgs:
    """Seeds, files and what is logged."""

    seed: int = 1  # seed of networks, exploration and minibatches
    env_seed: int | None = None  # seed of the environment (default: --seed)
    env_kwargs: tuple[str, ...] = ()  # arguments of the environment: JSON objects or key=value
    eval_env_id: str | None = None  # gymnasium id of the evaluation environment (default: --env-id)
    log_every: int = 500  # steps between two rows of losses/ and uncertainty/ metrics, where there are updates
    exp_name: str = Path(__file__).stem  # name of the experiment
    run_name: str | None = None  # name of the run's folder (default: {env}__{exp}__{seed}__{unix time})
    runs_dir: str = "runs"  # folder of all runs
    checkpoint_every: int = 10_000  # steps between checkpoints, each taken at the next episode end
    checkpoint_minutes: float = 5.0  # minutes between checkpoints, if that is sooner
    resume: bool = False  # continue the run --run-name from its last checkpoint, if it has one
    warm_start: str | None = None  # folder of a run: start with the networks of its checkpoint
    evaluate: str | None = None  # folder of a run: report the returns of its checkpoint and leave
    eval_episodes: int = 10  # number of episodes of --evaluate
    capture_video: bool = False  # record evaluation episodes into the run's folder
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "iv-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # entity (team) at Weights & Biases


@dataclass
class Args(RunArgs, AlgorithmArgs):
    """All arguments."""


def is_of_type(value: Any, kind: Any) -> bool:
    """Whether a value is what the annotation of an argument says."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_of_type(item, get_args(kind)[0]) for item in value)
    if float in (kind, *get_args(kind)):
        kind = kind | int
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def check_args(args: Args) -> None:
    """Refuses a value of another type, a number out of range, a text that cannot be shown."""
    for name, kind in get_type_hints(Args).items():
        flag = "--" + name.replace("_", "-")
        value = getattr(args, name)
        if not is_of_type(value, kind):
            raise RunError(f"{flag} must be {getattr(kind, '__name__', kind)}, not {value!r}")
        if isinstance(value, int | float):
            smallest = 1 if int in (kind, *get_args(kind)) else 0
            low, high = RANGES.get(name, (smallest, 10**12))
            if not low <= value <= high:
                raise RunError(f"{flag} must be between {low:g} and {high:g}, not {value}")
        for text in value if isinstance(value, tuple) else [str(value)]:
            if not text or not text.isprintable():
                raise RunError(f"{flag} must be printable and not empty, not {value!r}")


def read_env_kwargs(args: Args) -> dict[str, Any]:
    """Arguments of the environment from JSON objects and key=value, where a value that is no JSON is a string."""
    kwargs = {}
    for word in args.env_kwargs:
        key, equals, value = word.partition("=")
        if word.startswith("{"):
            with refusing(f"--env-kwargs {word} is no JSON object"):
                kwargs |= json.loads(word)
        elif equals:
            kwargs[key] = value
            with suppress(ValueError, RecursionError):
                kwargs[key] = json.loads(value)
        else:
            raise RunError(f"--env-kwargs takes a JSON object or key=value, not {word}")
    return kwargs


def run_folder(args: Args) -> Path:
    name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    # No separators and no leading dots: the folder stays in --runs-dir.
    return Path(args.runs_dir, re.sub(r"[^\w.=+-]|^\.+", "_", name))


def read_config(folder: Path) -> dict[str, Any]:
    """A run's config.json; arguments that it does not know have their defaults."""
    with refusing(f"{folder} holds no run"):
        config = json.loads((folder / "config.json").read_text())
        args = asdict(Args())
        for name, value in config["args"].items():
            if name in args:
                args[name] = tuple(value) if isinstance(args[name], tuple) else value  # JSON has it as a list
        return config | {"args": args}


@dataclass
class CommandLine:
    """The arguments as --help groups them."""

    algorithm: AlgorithmArgs
    run: RunArgs


def parse(default: Args) -> Args:
    algorithm = AlgorithmArgs(**{field.name: getattr(default, field.name) for field in fields(AlgorithmArgs)})
    run = RunArgs(**{field.name: getattr(default, field.name) for field in fields(RunArgs)})
    groups = CommandLine(algorithm, run)
    given = tyro.cli(CommandLine, default=groups, description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
    return Args(**vars(given.algorithm), **vars(given.run))


def parse_command_line() -> Args:
    """The command line. What --resume and --evaluate are not told comes from the run's own config.json."""
    args = parse(Args())
    if args.resume and not args.run_name:
        raise RunError("--resume needs the --run-name of the run")
    folder = Path(args.evaluate or run_folder(args))
    if args.evaluate or (args.resume and (folder / "config.json").exists()):
        saved = Args(**read_config(folder)["args"])
        check_args(saved)
        for name in ("run_name", "runs_dir", "resume", "evaluate"):
            setattr(saved, name, getattr(args, name))
        if args.evaluate:
            saved.capture_video = False
        args = parse(saved)
    return args


# ---------------------------------------------------------------------------- environments
def make_env(env_id: str, args: Args, with_video: bool = False) -> gym.Env:
    """The environment, with flat observations, actions of the script's kind, and an error at what is not finite."""
    kwargs = read_env_kwargs(args)
    if with_video:
        kwargs["render_mode"] = "rgb_array"
    with refusing(f"the environment {env_id} cannot be made"):
        env = gym.make(env_id, **kwargs)
        num_inputs = gym.spaces.flatdim(env.observation_space)
        if not 1 <= num_inputs <= 10_000:  # an MLP is not made for pictures
            raise ValueError(f"its observations are {num_inputs} numbers, and an MLP takes 1 to 10,000")
        if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        check_observation = partial(require_finite, "the observation")
        env = gym.wrappers.TransformObservation(env, check_observation, env.observation_space)
        env = gym.wrappers.TransformReward(env, float)
        env = gym.wrappers.TransformReward(env, partial(require_finite, "the reward"))
        return adapt_actions(env)


def try_out(env_id: str, args: Args, with_video: bool = False) -> None:
    """Refuses an environment that cannot be stepped, and warns of one that an exact --resume cannot be had in."""
    beginnings = []
    asked = "run with --capture-video" if with_video else "run"
    with refusing(f"the environment {env_id} cannot be {asked}"):
        env = make_env(env_id, args, with_video)
        for _ in range(3):  # with one seed and the same actions they should be alike; BipedalWalker's third is not
            env.action_space.seed(0)
            observations = [env.reset(seed=0)[0]]
            for _ in range(20):
                observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
                observations.append(observation)
                if terminated or truncated:
                    break
            beginnings.append(np.array(observations))
        if with_video:
            import moviepy  # noqa: F401

            if np.ndim(env.render()) != 3:
                raise ValueError("it gives no picture")
        env.close()
    if not all(np.array_equal(beginning, beginnings[0]) for beginning in beginnings):
        text = f"{env_id} keeps a state at reset: a run that was killed may go on otherwise than it would have"
        print(f"warning: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------- device and files
def choose_device(args: Args) -> torch.device:
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def load_agent(agent: Agent, folder: Path, kind: type = object) -> dict[str, Any]:
    """Loads the agent's parts of a kind (all, or only networks) from a run's checkpoint, and returns the checkpoint."""
    path = folder / "checkpoint.pt"
    with refusing(f"{path} cannot be loaded"):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the file
    for name, part in vars(agent).items():
        if isinstance(part, kind):
            with refusing(f"{path} does not fit: {name}"):
                saved = checkpoint["agent"][name]
                if isinstance(part, torch.optim.Optimizer):
                    check_optimizer(part, saved)
                part.load_state_dict(saved)
    return checkpoint


def check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Of itself, Adam would take any settings, and begin anew where its moments are missing."""
    if saved["param_groups"] != optimizer.state_dict()["param_groups"]:
        raise ValueError("it has other settings")
    expected = [((), p.shape, p.shape) for p in optimizer.param_groups[0]["params"] if p.requires_grad]
    states = saved["state"].values()  # none before the first update
    found = [(state["step"].shape, state["exp_avg"].shape, state["exp_avg_sq"].shape) for state in states]
    if found not in ([], expected):
        raise ValueError("its moments are not those of the networks")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to be written anew: should the process die, the old one or the new one is there, whole."""
    temporary = path.with_name(path.name + ".tmp")
    with refusing(f"{path} cannot be written", code=1):
        temporary.unlink(missing_ok=True)
        try:
            with open(temporary, "xb") as file:  # a new file, never through somebody's link
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # of a disk that is full


def lock(file: BinaryIO) -> None:
    """Keeps a second process from the same run, where the system can. The lock dies with this process."""
    with suppress(ImportError):  # on Windows
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def every_episode(_: int) -> bool:
    return True


class Run:
    """The run's environments, folder (config.json, metrics.jsonl, checkpoint.pt), progress bar and W&B."""

    def __init__(self, args: Args):
        check_args(args)
        self.args = args
        self.folder = run_folder(args)
        self.env_seed = args.seed if args.env_seed is None else args.env_seed
        self.global_step = 0
        self.start_step = 0
        self.episode = 0
        self.eval_returns = []
        self.solved_at = None  # mean of the last 100 evaluation returns that ends the run
        self.stop_signal = 0  # the first that came
        self.notice = ""
        self.bar_texts = {}
        self.new_folders = []  # those that were not there, the innermost first
        self.owns_folder = False  # whether all that is in the run's folder is of this process
        self.was_finished = False
        self.wandb = None
        self.wandb_id = uuid.uuid4().hex

    def __enter__(self) -> Run:
        """Sets up torch, signals and environments; __exit__ puts everything back as it was."""
        args = self.args
        with ExitStack() as stack:
            gpus = [0] if choose_device(args).type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(gpus))
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.manual_seed(args.seed)
            torch.set_num_threads(args.num_threads)
            torch.set_float32_matmul_precision(args.matmul_precision)
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):
                    stack.callback(signal.signal, number, signal.signal(number, self.on_signal))
            if not args.evaluate:
                self.check_same_run()
            eval_env_id = args.eval_env_id or args.env_id
            if eval_env_id != args.env_id:
                try_out(args.env_id, args)
            try_out(eval_env_id, args, args.capture_video)
            self.env = stack.enter_context(make_env(args.env_id, args))
            self.eval_env = stack.enter_context(make_env(eval_env_id, args, args.capture_video))
            spaces = (self.env.observation_space.shape, self.env.action_space)
            if (self.eval_env.observation_space.shape, self.eval_env.action_space) != spaces:
                raise RunError(f"--eval-env-id {eval_env_id} has other spaces than --env-id {args.env_id}")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self.stack.close()
        if self.wandb is not None:
            if videos := self.new_videos():  # the last one is written as its environment closes
                self.wandb.log(videos, step=self.global_step)
            self.wandb.finish(exit_code=0 if error is None else 1)
        has_begun = self.global_step > self.start_step
        if error is not None and not has_begun:
            if self.owns_folder:
                shutil.rmtree(self.folder, ignore_errors=True)
            for folder in self.new_folders:
                with suppress(OSError):  # another run is in it
                    folder.rmdir()
        if isinstance(error, FloatingPointError):
            raise RunError(f"{error} at step {self.global_step}: the run ends here", code=1) from None
        is_out_of_memory = isinstance(error, MemoryError) or "allocate" in str(error)
        is_told = isinstance(error, RunError | BrokenPipeError)
        # A mistake in the algorithm, found while it runs, keeps its traceback. An exit would look like a good end.
        needs_telling = not has_begun or is_out_of_memory or isinstance(error, SystemExit)
        if isinstance(error, Exception | SystemExit) and needs_telling and not is_told:
            place = [frame for frame in traceback.extract_tb(frames) if Path(frame.filename).name == SCRIPT][-1]
            hint = "--buffer-size, --batch-size, --hidden-size, --num-nets: too large? " if is_out_of_memory else ""
            text = f"{hint}{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
            raise RunError(text, code=1 if has_begun else 2) from error

    def on_signal(self, number: int, _: Any) -> None:
        """Ctrl-C or SIGTERM: the first lets the episode finish, the same once more ends the process."""
        signal.signal(number, signal.default_int_handler)
        self.stop_signal = self.stop_signal or number  # a launcher may add SIGTERM to the terminal's Ctrl-C
        # To be shown at the next step: another print may be under way now.
        self.notice = "finishing the episode, then saving; once more to quit at once"

    def check_same_run(self) -> None:
        """A run belongs to its script and its arguments."""
        rows = self.folder / "metrics.jsonl"
        self.has_checkpoint = os.path.exists(self.folder / "checkpoint.pt")
        has_rows = os.path.exists(rows) and os.path.getsize(rows) > 0
        self.is_new = not (self.has_checkpoint or has_rows or os.path.exists(self.folder / "config.json"))
        if self.is_new:
            return
        if not self.args.resume:
            raise RunError(f"{self.folder} exists: continue it with --resume, or choose another --run-name")
        config = read_config(self.folder)
        self.check_same_settings("config.json", config)
        self.was_finished = config.get("status") == "finished"
        if self.was_finished and not self.has_checkpoint:
            raise RunError(f"{self.folder} is finished, and has no checkpoint to go on from")
        self.wandb_id = config.get("wandb_id")

    def check_same_settings(self, file: str, saved: dict[str, Any]) -> None:
        if saved.get("script") != SCRIPT:
            raise RunError(f"{self.folder} is a run of {saved.get('script')}, not of {SCRIPT}")
        for name, value in asdict(self.args).items():
            before = saved["args"].get(name, getattr(Args(), name))
            if name not in MAY_CHANGE and before != value:
                raise RunError(f"{self.folder / file} has {name} {before}, and cannot be resumed with {value}")

    def start(self, agent: Agent, rng: np.random.Generator) -> None:
        """Opens the run's folder, and takes up where its checkpoint left off."""
        args = self.args
        self.agent = agent
        self.rng = rng
        if args.warm_start is not None and not self.has_checkpoint:
            load_agent(agent, Path(args.warm_start), nn.Module)
        self.open_folder()
        rows_size = self.load() if self.has_checkpoint else 0
        if args.track:
            self.start_wandb()
        self.metrics.truncate(rows_size)  # what came after the checkpoint will come again
        self.metrics.seek(rows_size)
        if args.capture_video:
            self.record_videos(self.folder / "videos")
        if not self.is_over():
            self.save_config("running")
            print(f"{self.folder}: {args.env_id}, {choose_device(args)}, threads: {args.num_threads}", flush=True)
        self.saved_step = self.global_step
        self.start_time = self.saved_time = time.time()
        bar = tqdm(
            total=args.total_timesteps,
            initial=self.global_step,
            bar_format="{n_fmt}/{total_fmt}{postfix} {rate_noinv_fmt} {remaining}",
            unit="",
            smoothing=0,
            disable=not sys.stderr.isatty(),
        )
        self.bar = self.stack.enter_context(bar)

    def open_folder(self) -> None:
        """Makes the run's folder if it is not there, and keeps other processes from it."""
        folders = (self.folder, *self.folder.parents)
        self.new_folders = [folder for folder in folders if not os.path.exists(folder)]
        path = self.folder / "metrics.jsonl"
        with refusing(f"{self.folder} cannot be made, or is in use by another process"):
            if path.is_symlink():
                raise ValueError("its metrics.jsonl is a link")
            self.folder.mkdir(parents=True, exist_ok=True)
            mode = "r+b" if self.has_checkpoint else "ab"  # a checkpoint's rows must be there
            self.metrics = self.stack.enter_context(open(path, mode, buffering=0))
            lock(self.metrics)
        self.check_same_run()  # once more, since another process may have been faster
        self.owns_folder = self.is_new and self.folder in self.new_folders

    def start_wandb(self) -> None:
        self.wandb_videos = set(self.folder.glob("videos/*/*.mp4"))
        with refusing("--track does not work (WANDB_MODE=offline needs no account)"):
            import wandb

            self.wandb = wandb.init(
                project=self.args.wandb_project_name,
                entity=self.args.wandb_entity,
                name=self.folder.name,
                id=self.wandb_id,
                resume="allow",
                dir=self.folder,
                config=asdict(self.args),
                save_code=True,
            )

    def record_videos(self, folder: Path) -> None:
        """All evaluation episodes of --evaluate, and while training the first and ever fewer."""
        trigger = every_episode if self.args.evaluate else None
        env = gym.wrappers.RecordVideo(self.eval_env, str(folder / str(int(time.time()))), trigger, disable_logger=True)
        self.eval_env = self.stack.enter_context(env)

    def is_solved(self) -> bool:
        if self.solved_at is None or len(self.eval_returns) < 100:
            return False
        return bool(np.mean(self.eval_returns) >= self.solved_at)

    def is_complete(self) -> bool:
        out_of_steps = self.global_step >= self.args.total_timesteps
        out_of_episodes = self.args.total_episodes is not None and self.episode >= self.args.total_episodes
        return out_of_steps or out_of_episodes or self.is_solved()

    def is_over(self) -> bool:
        return self.is_complete() or self.stop_signal != 0

    def episode_seed(self) -> int:
        """With its own seed for each episode, the end of an episode is a complete state of the run."""
        return int(np.random.SeedSequence((self.env_seed, self.episode)).generate_state(1)[0])

    def evaluation_row(self, agent: Agent, number: int) -> dict[str, float]:
        """One evaluation episode, as a row of metrics."""
        # The 1 makes other seeds than those of the training episodes.
        seed = int(np.random.SeedSequence((self.env_seed, number, 1)).generate_state(1)[0])
        self.eval_returns = [*self.eval_returns, evaluation_return(agent, self.eval_env, seed)][-100:]
        mean = float(np.mean(self.eval_returns))
        return {"charts/eval_return": self.eval_returns[-1], "charts/eval_return_mean100": mean}

    def log(self, row: dict[str, float]) -> None:
        """Writes a row of metrics, and shows it if it is one of charts."""
        row = {"global_step": self.global_step} | row
        if any(name.startswith("charts/") for name in row):
            seconds = max(time.time() - self.start_time, 1e-3)  # a coarse clock may not have moved yet
            row["charts/SPS"] = int((self.global_step - self.start_step) / seconds)
            self.show(row)
        for name, value in row.items():
            require_finite(name, value)
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with refusing(f"{self.folder} cannot be written at step {self.global_step}", code=1):
            if self.metrics.write(line) < len(line):
                raise OSError("No space left on device")
        if self.wandb is not None:
            self.wandb.log(row | self.new_videos(), step=self.global_step)

    def new_videos(self) -> dict[str, Any]:
        import wandb

        paths = set(self.folder.glob("videos/*/*.mp4")) - self.wandb_videos
        self.wandb_videos |= paths
        return {f"videos/{path.stem}": wandb.Video(str(path), format="mp4") for path in paths}

    def show(self, row: dict[str, float]) -> None:
        """On a terminal, the latest of each kind beside the bar; elsewhere a line for each row."""
        if self.bar.disable:
            print(" ".join(f"{name.removeprefix('charts/')}={value:.6g}" for name, value in row.items()), flush=True)
            return
        for name, label in SHOWN.items():
            if name in row:
                value = row[name]
                self.bar_texts[label] = f"{label} {value:.0f}" if abs(value) >= 1000 else f"{label} {value:.4g}"
        self.bar.set_postfix_str(" ".join(self.bar_texts.values()), refresh=False)
        if self.args.total_episodes is not None and self.episode > 0:
            expected_steps = int(self.global_step / self.episode * self.args.total_episodes)
            self.bar.total = min(self.args.total_timesteps, expected_steps)

    def show_progress(self, steps_to_learn: float = 0) -> None:
        """Moves the bar to the last step that has been learned from: of a rollout, SAC learns when it is complete."""
        self.bar.update(self.global_step - int(steps_to_learn) - self.bar.n)
        if self.notice:
            tqdm.write(self.notice, file=sys.stderr)
            self.notice = ""

    def checkpoint_if_due(self) -> None:
        minutes = (time.time() - self.saved_time) / 60
        steps = self.global_step - self.saved_step
        if steps >= self.args.checkpoint_every or minutes >= self.args.checkpoint_minutes:
            self.save()

    def finish(self) -> Path:
        """Saves, and says how the run ended."""
        self.bar.close()
        if self.stop_signal and self.global_step == 0:
            raise RunError("stopped before the first step: nothing is kept", code=128 + self.stop_signal)
        if not self.was_finished or self.global_step > self.start_step:
            self.save()
            self.save_config("finished" if self.is_complete() else "running")
        ended = f"{self.global_step} steps, {self.episode} episodes in {self.folder}"
        if not self.is_complete():
            place = [f"--runs-dir={self.args.runs_dir}", f"--run-name={self.folder.name}"]
            command = shlex.join(["python", SCRIPT, "--resume", *place])
            raise RunError(f"stopped: {ended}; go on with {command}", code=128 + self.stop_signal)
        print(f"finished: {ended}", flush=True)
        return self.folder

    def save(self) -> None:
        """Writes a checkpoint, from which the run goes on as if nothing had happened."""
        state = {
            "script": SCRIPT,
            "args": asdict(self.args),
            "agent": {name: part.state_dict() for name, part in vars(self.agent).items()},
            "global_step": self.global_step,
            "episode": self.episode,
            "eval_returns": self.eval_returns,
            "metrics_size": os.fstat(self.metrics.fileno()).st_size,
            "numpy_rng": self.rng.bit_generator.state,
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }
        with replacing(self.folder / "checkpoint.pt") as file:
            os.fsync(self.metrics.fileno())  # the checkpoint counts on these rows
            torch.save(state, file)
        self.saved_step = self.global_step
        self.saved_time = time.time()

    def load(self) -> int:
        """Takes up the checkpoint, and returns the size of its rows in bytes."""
        state = load_agent(self.agent, self.folder)
        with refusing(f"{self.folder / 'checkpoint.pt'} does not fit"):
            self.check_same_settings("checkpoint.pt", state)
            for name in ("global_step", "episode", "metrics_size"):
                if not is_of_type(state[name], int) or not 0 <= state[name] <= 10**12:
                    raise ValueError(f"{name} is {state[name]}")
            self.global_step = state["global_step"]
            self.start_step = self.global_step
            self.episode = state["episode"]
            self.eval_returns = [float(value) for value in state["eval_returns"]]
            require_finite("an evaluation return", self.eval_returns)
            self.rng.bit_generator.state = state["numpy_rng"]
            torch.set_rng_state(state["torch_rng"])
            torch.cuda.set_rng_state_all(state["cuda_rng"][: torch.cuda.device_count()])
        size = state["metrics_size"]
        rows = (self.folder / "metrics.jsonl").read_bytes()[:size]
        if len(rows) < size or rows[-1:] not in (b"", b"\n"):
            raise RunError(f"{self.folder / 'metrics.jsonl'} is not what it was at the checkpoint")
        return size

    def save_config(self, status: str) -> None:
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
        has_git = shutil.which("git") is not None
        config = {
            "script": SCRIPT,
            "status": status,
            "args": asdict(self.args),
            "git_commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() if has_git else "",
            "wandb_id": self.wandb_id,
            "versions": {"python": sys.version} | {m.__name__: m.__version__ for m in (torch, gym, np, tyro)},
        }
        with replacing(self.folder / "config.json") as file:
            file.write(json.dumps(config, indent=2).encode())


# ---------------------------------------------------------------------------- the command line
def evaluate_checkpoint(args: Args) -> None:
    """Prints the returns of the agent in a checkpoint."""
    folder = Path(args.evaluate)
    with Run(args) as run:
        agent = Agent(run.env.observation_space, run.env.action_space, args)
        load_agent(agent, folder, nn.Module)
        if args.capture_video:
            run.record_videos(folder / "videos")
        returns = []
        for number in range(args.eval_episodes):
            returns.append(run.evaluation_row(agent, number)["charts/eval_return"])
            if run.stop_signal:
                break
    print(f"mean {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}, returns {returns}")


def main() -> None:
    try:
        args = parse_command_line()
        if args.evaluate:
            evaluate_checkpoint(args)
        else:
            train(args)
    except RunError as error:
        print(f"{SCRIPT}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still has to write
        print(f"{SCRIPT}: nobody reads the output any more", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
