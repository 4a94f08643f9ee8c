"""DQN: deep Q-learning with a replay buffer and a soft-updated target network (paper Sec. 3.1; Mnih et al., 2013).

One network learns Q by regression on its own TD targets, which a slowly following copy of it predicts. In training the
actions are epsilon-greedy; in evaluation they are greedy. Line numbers refer to Algorithm 1, whose case N = 1 this is.

    python dqn.py --env-id LunarLander-v3 --seed 1
"""

import copy
import fcntl
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from tqdm import tqdm


@dataclass
class Args:
    # Free to change when a run is resumed:
    exp_name: str = Path(__file__).stem  # name of the experiment
    run_name: str | None = None  # name of the run's folder (default: {env}__{exp}__{seed}__{unix time})
    runs_dir: str = "runs"  # folder of all runs
    track: bool = False  # log to Weights & Biases as well
    wandb_project_name: str = "iv-rl"  # project at Weights & Biases
    wandb_entity: str | None = None  # entity (team) at Weights & Biases
    capture_video: bool = False  # record evaluation episodes into the run's folder
    cuda: bool = False  # use a GPU if there is one (networks this small run faster on the CPU)
    num_threads: int = 1  # CPU threads of torch
    total_timesteps: int = 500_000  # environment steps after which the run ends
    total_episodes: int | None = None  # training episodes after which the run ends, if it has not before
    solved_at: float | None = None  # end the run once the last 100 evaluation returns average this
    checkpoint_every: int = 10_000  # steps between checkpoints, each taken at the next episode end
    resume: bool = False  # continue the run --run-name from its last checkpoint
    evaluate: str | None = None  # folder of a run: report the returns of its checkpoint and leave
    eval_episodes: int = 10  # number of episodes of --evaluate
    # Fixed once a run has started:
    seed: int = 1  # seed of networks, exploration and minibatches
    env_seed: int | None = None  # seed of the environment (default: --seed)
    torch_deterministic: bool = True  # let torch use deterministic algorithms only
    compile: bool = False  # compile the loss: faster updates, but a slow start, and a C++ compiler is needed
    env_id: str = "LunarLander-v3"  # gymnasium id of the environment: discrete actions, flat observations
    eval_env_id: str | None = None  # gymnasium id of the evaluation environment (default: --env-id)
    eval_every: int = 1  # training episodes between two evaluation episodes (0: never)
    log_every: int = 500  # steps between two rows of losses/ and uncertainty/ metrics
    buffer_size: int = 100_000  # capacity of the replay buffer B
    learning_starts: int = 1000  # environment steps before the first update
    batch_size: int = 128  # K: minibatch size
    learning_rate: float = 5e-4  # lr: learning rate of Adam
    gamma: float = 0.99  # gamma: discount rate
    tau: float = 0.005  # tau: rate of the soft target update
    hidden_size: int = 64  # width of the two hidden layers
    start_epsilon: float = 1.0  # epsilon in the first episode: probability of a random action
    end_epsilon: float = 0.01  # epsilon never falls below this
    epsilon_decay: float = 0.99  # e-decay: factor on epsilon from episode to episode


# What must hold, or the run is refused before anything is written.
RULES = """
num_threads >= 1; total_timesteps >= 1; total_episodes is None or total_episodes >= 1; checkpoint_every >= 1
eval_episodes >= 1; eval_every >= 0; log_every >= 1; learning_starts >= 0; batch_size >= 1; hidden_size >= 1
seed >= 0; env_seed is None or env_seed >= 0; learning_rate > 0; 0 <= gamma <= 1; 0 < tau <= 1
0 <= end_epsilon <= start_epsilon <= 1; 0 < epsilon_decay <= 1
batch_size <= buffer_size
"""
SCRIPT = Path(__file__).name


def refuse(sentence: str, code: int = 2) -> NoReturn:
    print(f"{SCRIPT}: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


def parse_args() -> Args:
    """The command line, checked. What --resume and --evaluate are not told comes from the run's own config.json."""
    args = tyro.cli(Args)
    name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    args.run_name = re.sub(r"[^\w.=+-]|^\.+", "_", name)  # no separators, no leading dots: it stays in runs_dir
    if args.resume or args.evaluate:
        folder = Path(args.evaluate or Path(args.runs_dir, args.run_name))
        try:
            config = json.loads((folder / "config.json").read_text())
            saved = config["args"] | {"run_name": args.run_name, "runs_dir": args.runs_dir, "resume": args.resume}
            args = tyro.cli(Args, default=Args(**saved))
        except (OSError, ValueError, TypeError, KeyError) as error:
            refuse(f"{folder} holds no run of {SCRIPT}: {error}")
        for name in list(saved)[list(saved).index("seed") :] if args.resume else ():
            if getattr(args, name) != saved[name]:
                refuse(f"{folder} has {name} {saved[name]}, and cannot be resumed with {getattr(args, name)}")
    for rule in re.split(r"[;\n] *", RULES.strip()):
        if not eval(rule, {}, vars(args)):
            given = [f"--{k.replace('_', '-')} {v}" for k, v in vars(args).items() if re.search(rf"\b{k}\b", rule)]
            refuse(f"{' '.join(given)} was given, but {rule} must hold")
    return args


# ---------------------------------------------------------------------------- networks
class QNetwork(nn.Module):
    """An MLP with two hidden ReLU layers."""

    def __init__(self, num_inputs: int, num_actions: int, args: Args):
        super().__init__()
        first, second = nn.Linear(num_inputs, args.hidden_size), nn.Linear(args.hidden_size, args.hidden_size)
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(args.hidden_size, num_actions))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation)  # (K, A)


# ---------------------------------------------------------------------------- replay buffer
class ReplayBuffer:
    """A ring of transitions, one preallocated array per field, sampled uniformly with replacement."""

    def __init__(self, capacity: int, device: torch.device, **example: Any):
        self.data = {name: np.zeros((capacity, *np.shape(x)), np.asarray(x).dtype) for name, x in example.items()}
        self.capacity, self.device, self.size, self.next = capacity, device, 0, 0

    def add(self, *transition: Any) -> None:
        for array, value in zip(self.data.values(), transition, strict=True):
            array[self.next] = value
        self.next, self.size = (self.next + 1) % self.capacity, min(self.size + 1, self.capacity)

    def sample(self, batch_size: int, rng: np.random.Generator) -> SimpleNamespace:
        index = rng.integers(self.size, size=batch_size)
        return SimpleNamespace(**{k: torch.from_numpy(v.take(index, 0)).to(self.device) for k, v in self.data.items()})

    def state_dict(self) -> dict[str, Any]:
        return {k: torch.as_tensor(v[: self.size]) for k, v in self.data.items()} | dict(size=self.size, next=self.next)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.size, self.next = state["size"], state["next"]
        for name, array in self.data.items():
            array[: self.size] = state[name].numpy()


# ---------------------------------------------------------------------------- losses
def dqn_loss(network: nn.Module, target_network: nn.Module, batch: SimpleNamespace, args: Args):
    """L2 loss of a minibatch (Eq. 5)."""
    # The prediction at (s, a).
    mean = network(batch.observation).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)  # (K,)
    with torch.no_grad():
        # Eq. 4: the target, at the greedy action a' of the target network.
        target_mean = target_network(batch.next_observation).amax(-1)  # (K,)
        target = batch.reward + args.gamma * (1 - batch.terminated) * target_mean
    loss = ((mean - target) ** 2).mean()
    return loss, {"losses/q_values": mean.mean}


# ---------------------------------------------------------------------------- acting and evaluation
def make_discrete_env(env_id: str, **kwargs: Any) -> gym.Env:
    try:
        env = gym.make(env_id, **kwargs)
    except (gym.error.Error, ImportError) as error:
        refuse(f"the environment {env_id} cannot be made: {error}")
    discrete = isinstance(env.action_space, gym.spaces.Discrete) and env.action_space.start == 0
    if not discrete or len(env.observation_space.shape or ()) != 1:
        spaces = f"{env.action_space} and {env.observation_space}"
        refuse(f"{env_id} has {spaces}, not Discrete(n) and a flat Box; sac.py and its like take continuous actions")
    return env


@torch.no_grad()
def greedy_action(network: nn.Module, observation: np.ndarray, device: torch.device) -> int:
    """The action of the highest Q-value."""
    return int(network(torch.as_tensor(observation, dtype=torch.float32, device=device)).argmax(-1))


def evaluate(env: gym.Env, policy: Callable[[np.ndarray], Any], seed: int) -> float:
    """The return of one episode."""
    observation, _ = env.reset(seed=seed)
    episodic_return, done = 0.0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(policy(observation))
        episodic_return, done = episodic_return + float(reward), terminated or truncated
    return episodic_return


# ---------------------------------------------------------------------------- logging and checkpoints
def require_finite(global_step: int, **values: Any) -> None:
    for name, value in values.items():
        if not np.isfinite(value).all():
            refuse(f"the {name} at step {global_step} is not finite ({value}): the run ends here", code=1)


def load_checkpoint(folder: Path, args: Args, parts: dict[str, Any]) -> dict[str, Any]:
    try:
        state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)  # runs no code of the file
        if (state["script"], state["env_id"]) != (SCRIPT, args.env_id):
            raise ValueError(f"it is of {state['script']} on {state['env_id']}")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return state
    except Exception as error:
        refuse(f"{folder / 'checkpoint.pt'} cannot be loaded: {error}")


class Run:
    """The run's folder (config.json, metrics.jsonl, checkpoint.pt), the progress bar and W&B."""

    def __init__(self, args: Args, parts: dict[str, Any], rng: np.random.Generator):
        self.args, self.parts, self.rng, self.folder = args, parts, rng, Path(args.runs_dir, args.run_name)
        if args.track:
            import wandb

            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
                refuse("--track finds no API key of Weights & Biases: run `wandb login`, or set WANDB_MODE=offline")
        try:
            self.folder.mkdir(parents=True, exist_ok=args.resume or not (self.folder / "config.json").exists())
            self.metrics = open(self.folder / "metrics.jsonl", "a", buffering=1)
            fcntl.flock(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed when this process dies
        except OSError as error:
            refuse(f"{self.folder} exists (try --resume), is in use by another process, or cannot be made: {error}")
        self.progress, size = (0, 0, []), 0  # global step, episode, evaluation returns
        if (self.folder / "checkpoint.pt").exists():
            state = load_checkpoint(self.folder, args, parts)
            self.progress, size, rng.bit_generator.state = state["progress"], state["size"], state["numpy_rng"]
            torch.set_rng_state(state["torch_rng"])
            torch.cuda.set_rng_state_all(state["cuda_rng"][: torch.cuda.device_count()])
        self.metrics.seek(self.metrics.truncate(size))  # what came after the checkpoint will come again
        self.save_config("running")
        self.signal, self.start_step, self.start_time = 0, self.progress[0], time.time()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: setattr(self, "signal", number))
        self.bar = tqdm(total=args.total_timesteps, initial=self.start_step, disable=not sys.stderr.isatty())
        if args.track:
            where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "dir": self.folder}
            self.wandb = wandb.init(**where, id=args.run_name, resume="allow", config=asdict(args), save_code=True)

    def log(self, global_step: int, row: dict[str, float]) -> None:
        row = {"global_step": global_step} | row
        if any(name.startswith("charts/") for name in row):
            row["charts/SPS"] = int((global_step - self.start_step) / (time.time() - self.start_time))
            text = re.sub("charts/(episodic_|eval_return_)?", "", " ".join(f"{k}={v:.6g}" for k, v in row.items()))
            print(text, flush=True) if self.bar.disable else self.bar.set_postfix_str(text)
        try:
            self.metrics.write(json.dumps(row) + "\n")
        except OSError as error:
            refuse(f"{self.folder} cannot be written at step {global_step}: {error}", code=1)
        if self.args.track:
            self.wandb.log(row, step=global_step)

    def tick(self, global_step: int, steps: int = 1) -> None:
        self.bar.update(steps)
        if self.signal:  # SIGTERM or Ctrl-C
            how = f"python {SCRIPT} --resume --runs-dir {self.args.runs_dir} --run-name {self.args.run_name}"
            refuse(f"stopped at step {global_step}, saved at {self.progress[0]}: go on with {how}", 128 + self.signal)

    def checkpoint(self, *progress: Any, final: bool = False) -> None:
        if final or progress[0] - self.progress[0] >= self.args.checkpoint_every:
            state = {name: part.state_dict() for name, part in self.parts.items()}
            state |= {"script": SCRIPT, "env_id": self.args.env_id, "progress": progress, "size": self.metrics.tell()}
            state |= {"numpy_rng": self.rng.bit_generator.state, "torch_rng": torch.get_rng_state()}
            state |= {"cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}
            self.replace("checkpoint.pt", lambda file: torch.save(state, file))
            self.progress = progress
        if final:
            self.bar.close()
            self.save_config("finished")
            print(f"finished: {progress[0]} steps, {progress[1]} episodes in {self.folder}", flush=True)

    def save_config(self, status: str) -> None:
        commit = os.popen(f"git -C '{Path(__file__).resolve().parent}' rev-parse HEAD 2>/dev/null").read().strip()
        versions = {"versions": {"python": sys.version} | {m.__name__: m.__version__ for m in (torch, gym, np, tyro)}}
        config = {"script": SCRIPT, "status": status, "args": asdict(self.args), "git_commit": commit}
        self.replace("config.json", lambda file: file.write(json.dumps(config | versions, indent=2).encode()))

    def replace(self, name: str, write: Callable) -> None:
        """Write a file anew: should the process die, the old one or the new one is there, whole."""
        try:
            with open(self.folder / f"{name}.tmp", "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, self.folder / name)
        except (OSError, RuntimeError) as error:
            refuse(f"{self.folder / name} cannot be written: {error}", code=1)


if __name__ == "__main__":
    args = parse_args()
    env_seed = args.seed if args.env_seed is None else args.env_seed
    episode_seed = lambda *numbers: int(np.random.SeedSequence((env_seed, *numbers)).generate_state(1)[0])
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(args.torch_deterministic and device.type == "cuda", warn_only=True)
    env, video = make_discrete_env(args.env_id), {"render_mode": "rgb_array"} if args.capture_video else {}
    eval_env = make_discrete_env(args.eval_env_id or args.env_id, **video)
    network = QNetwork(env.observation_space.shape[0], int(env.action_space.n), args).to(device)
    target_network = copy.deepcopy(network).requires_grad_(False)
    loss_function = torch.compile(dqn_loss) if args.compile else dqn_loss
    optimizer = torch.optim.Adam(network.net.parameters(), lr=args.learning_rate, fused=True)
    online, target = ([weight.data for weight in each.net.parameters()] for each in (network, target_network))
    observation, scalar = np.zeros(env.observation_space.shape, np.float32), np.float32(0)
    transition = {"observation": observation, "action": np.int64(0), "next_observation": observation}
    transition |= {"reward": scalar, "terminated": scalar}
    buffer = ReplayBuffer(args.buffer_size, device, **transition)
    parts = {"network": network, "target_network": target_network, "optimizer": optimizer, "buffer": buffer}

    def evaluation_return(episode: int) -> float:
        policy = lambda observation: greedy_action(network, observation, device)
        return evaluate(eval_env, policy, episode_seed(episode, 1))

    run = None if args.evaluate else Run(args, parts, rng)
    if args.capture_video:
        eval_env = gym.wrappers.RecordVideo(eval_env, f"{args.evaluate or run.folder}/videos/{int(time.time())}")
    if args.evaluate:
        load_checkpoint(Path(args.evaluate), args, {"network": network})
        returns = [evaluation_return(i) for i in range(args.eval_episodes)]
        print(f"mean {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}, returns {returns}")
        sys.exit(eval_env.close())
    global_step, episode, eval_returns = run.progress
    solved = lambda: args.solved_at is not None and len(eval_returns) == 100 and np.mean(eval_returns) >= args.solved_at
    while global_step < args.total_timesteps and episode < (args.total_episodes or math.inf) and not solved():  # line 2
        observation, _ = env.reset(seed=episode_seed(episode))  # so an episode's end is a complete state
        require_finite(global_step, observation=observation)
        epsilon = max(args.end_epsilon, args.start_epsilon * args.epsilon_decay**episode)
        episodic_return, episodic_length, done = 0.0, 0, False
        while not done and global_step < args.total_timesteps:
            action = int(rng.integers(env.action_space.n))  # lines 5-6: act
            if rng.random() >= epsilon:
                action = greedy_action(network, observation, device)
            next_observation, reward, terminated, truncated, _ = env.step(action)
            global_step += 1
            require_finite(global_step, observation=next_observation, reward=reward)
            # Lines 8-9: store. A truncated episode did not terminate: its last target bootstraps.
            buffer.add(observation, action, next_observation, reward, terminated)
            observation, done = next_observation, terminated or truncated
            episodic_return, episodic_length = episodic_return + float(reward), episodic_length + 1
            # From line 10: a gradient step for each network, and the soft update of its target.
            if global_step > args.learning_starts:
                batch = buffer.sample(args.batch_size, rng)
                loss, metrics = loss_function(network, target_network, batch, args)
                require_finite(global_step, loss=loss.item())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                torch._foreach_lerp_(target, online, args.tau)
                if global_step % args.log_every == 0:
                    run.log(global_step, {"losses/loss": loss.item()} | {k: v().item() for k, v in metrics.items()})
            run.tick(global_step)
        if done:
            episode += 1
            row = {"charts/episode": episode, "charts/episodic_return": episodic_return}
            row |= {"charts/episodic_length": episodic_length, "charts/epsilon": epsilon}
            if args.eval_every and episode % args.eval_every == 0:
                eval_returns = [*eval_returns, evaluation_return(episode)][-100:]
                row |= {"charts/eval_return": eval_returns[-1], "charts/eval_return_mean100": np.mean(eval_returns)}
            run.log(global_step, row)
            run.checkpoint(global_step, episode, eval_returns)
    run.checkpoint(global_step, episode, eval_returns, final=True)
    eval_env.close()
