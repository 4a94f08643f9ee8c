"""IV-DQN: deep Q-learning that weighs each target by its inverse variance (paper Sec. 3, Algorithm 2).

Each of N variance networks learns the mean and the variance of Q from its masked share of one replay buffer. The
target ensemble, as a mixture of Gaussians, tells how uncertain each TD target is, and Batch Inverse-Variance (BIV)
weights let uncertain targets count less; loss attenuation absorbs the noise of rewards, dynamics and policy.

    python ivdqn.py --env-id LunarLander-v3 --seed 1
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
from typing import Any, Literal, NoReturn

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
    batch_size: int = 64  # K: minibatch size, as many as survive the mask on average
    learning_rate: float = 1e-3  # lr: learning rate of Adam
    gamma: float = 0.99  # gamma: discount rate
    tau: float = 0.005  # tau: rate of the soft target update
    hidden_size: int = 64  # width of the two hidden layers
    start_epsilon: float = 1.0  # epsilon in the first episode: probability of a random action
    end_epsilon: float = 0.01  # epsilon never falls below this
    epsilon_decay: float = 0.99  # e-decay: factor on epsilon from episode to episode
    num_nets: int = 5  # N: members of the ensemble (1: without mask and prior)
    mask_prob: float = 1.0  # p_m: probability that a member learns from a transition
    prior_scale: float = 0.0  # delta_RPF: scale of the randomized prior functions
    variance_heads: bool = True  # sigma^2: networks predict variances (no: sampled ensemble, no L_LA)
    terminal_variance: bool = False  # count gamma^2 sigma^2 for terminal targets as well (no: they have variance 0)
    weighting: Literal["biv", "l2", "sunrise", "uwac"] = "biv"  # w_k: weights of the squared errors
    mebs_ratio: float = 0.9  # MEBS/K: minimal effective batch size, as a share of the unmasked minibatch
    xi: float | None = None  # xi: constant xi in place of a minimal effective batch size
    xi_solver: Literal["newton", "nelder-mead"] = "newton"  # xi: how it is found (nelder-mead: the paper's, slow)
    loss_attenuation_weight: float = 1.5  # lambda: weight of loss attenuation L_LA
    sunrise_temperature: float = 50.0  # T: temperature of the SUNRISE weights
    uwac_beta: float = 0.8  # beta: scale of the UWAC weights


# What must hold, or the run is refused before anything is written.
RULES = """
num_threads >= 1; total_timesteps >= 1; total_episodes is None or total_episodes >= 1; checkpoint_every >= 1
eval_episodes >= 1; eval_every >= 0; log_every >= 1; learning_starts >= 0; batch_size >= 1; hidden_size >= 1
seed >= 0; env_seed is None or env_seed >= 0; learning_rate > 0; 0 <= gamma <= 1; 0 < tau <= 1
0 <= end_epsilon <= start_epsilon <= 1; 0 < epsilon_decay <= 1
num_nets >= 1; 0 < mask_prob <= 1; prior_scale >= 0; batch_size / mask_prob <= buffer_size
0 < mebs_ratio <= 1; xi is None or 0 <= xi < 1e30; loss_attenuation_weight >= 0; sunrise_temperature >= 0; uwac_beta > 0
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
class EnsembleMLP(nn.Module):
    """N independent MLPs with two hidden ReLU layers along a leading ensemble axis; features come before samples."""

    def __init__(self, num_nets: int, inputs: int, hidden: int, outputs: int):
        super().__init__()
        for layer, (fan_in, fan_out) in enumerate(((inputs, hidden), (hidden, hidden), (hidden, outputs)), start=1):
            for name, columns in ((f"weight{layer}", fan_in), (f"bias{layer}", 1)):
                value = torch.empty(num_nets, fan_out, columns).uniform_(-(fan_in**-0.5), fan_in**-0.5)  # as nn.Linear
                self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, inputs) -> (N, K, outputs)
        x = x.expand(len(self.weight1), *x.shape[-2:]).mT  # thin last layers multiply faster so
        x = torch.baddbmm(self.bias1, self.weight1, x).relu_()
        x = torch.baddbmm(self.bias2, self.weight2, x).relu_()
        return torch.baddbmm(self.bias3, self.weight3, x).mT


class VarEnsembleQNetwork(nn.Module):
    """N variance networks, each with a fixed, untrained prior on its means (App. A.2; Sec. 2.2.1)."""

    def __init__(self, num_inputs: int, num_actions: int, args: Args):
        super().__init__()
        self.num_actions, self.prior_scale = num_actions, args.prior_scale * (args.num_nets > 1)
        self.net = EnsembleMLP(args.num_nets, num_inputs, args.hidden_size, (1 + args.variance_heads) * num_actions)
        self.prior = EnsembleMLP(args.num_nets, num_inputs, args.hidden_size, num_actions).requires_grad_(False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.heads(observation)[0]

    def heads(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, *heads = self.net(observation).split(self.num_actions, -1)  # each (N, K, A)
        log_variance = heads[0].clamp(-60, 60) if heads else torch.full_like(mean, -math.inf)  # exp() stays finite
        return mean + self.prior_scale * self.prior(observation) if self.prior_scale else mean, log_variance


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


# ---------------------------------------------------------------------------- uncertainty
def mixture_variance(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Variance of an equal-weight mixture of Gaussians over the leading axis (Eq. 14; Alg. 2, line 21; Alg. 4)."""
    return (variance + (mean - mean.mean(0)) ** 2).mean(0)


def effective_batch_size(weight: torch.Tensor) -> torch.Tensor:
    """EBS of each member's weights (Eq. 2)."""
    return weight.sum(-1) ** 2 / (weight**2).sum(-1)


def newton_xi(variance: np.ndarray, mask: np.ndarray, mebs_ratio: float) -> np.ndarray:
    """The smallest xi >= 0 with EBS >= MEBS, for all members at once (Eq. 2): (N, K) -> (N, 1).

    Newton's method on the weights' mean over their deviation, (n / EBS - 1)^-1/2: concave in xi, and almost a line.
    """
    zero, tolerance = 1e-60, 1e-6  # `zero` stands for xi = 0 and keeps every weight finite
    noise, xi = np.sort(np.where(mask, variance, np.inf)), np.full(len(mask), zero)  # a masked sample gets no weight
    count = np.maximum(mask.sum(-1), 1)
    mebs = np.minimum(mebs_ratio * count, count - 1)
    unsettled = list(zip(range(len(mask)), count.tolist(), np.sqrt(mebs / (count - mebs)).tolist(), strict=True))
    for attempt in range(200):
        weight = 1 / (noise + xi[:, None])
        square = weight * weight
        sums = [x.sum(-1).tolist() for x in (weight, square, square * weight)]
        members, unsettled = unsettled, []
        for j, n, goal in members:
            total, squares, cubes = (x[j] for x in sums)
            deviation, slope = math.sqrt(max(n * squares - total**2, 0)), n * (total * cubes - squares**2)
            excess = total - goal * deviation
            if excess >= 0 and (attempt == 0 or excess <= tolerance * total):  # EBS >= MEBS, and no more than it
                continue
            unsettled.append((j, n, goal))
            step = deviation**2 * (tolerance / 2 * total - excess) / slope if slope > 0 else -xi[j]
            xi[j] = max(xi[j] + step, xi[j] / 8) if attempt else 0.3 * noise[j, int(mebs[j])]  # at first, a guess
        if not unsettled:
            break
    return np.where(xi > zero, xi, 0)[:, None]


def nelder_mead_xi(variance: np.ndarray, mask: np.ndarray, mebs_ratio: float) -> np.ndarray:
    """The same xi by the paper's method, member by member: minimise |EBS - MEBS| with Nelder-Mead (App. A.2)."""
    import scipy.optimize  # only here: it would slow every start

    def solve(noise: np.ndarray) -> float:
        mebs, scale = min(mebs_ratio * len(noise), len(noise) - 1), noise.max(initial=0) + 1e-90
        gap = lambda log_xi: mebs - effective_batch_size(1 / (noise / scale + np.exp(log_xi)))
        if mebs <= 0 or gap(-200) <= 0:  # EBS >= MEBS without xi
            return 0.0
        return scale * np.exp(scipy.optimize.minimize(lambda x: abs(gap(x)), 0, method="Nelder-Mead", tol=1e-9).x[0])

    return np.array([[solve(noise[unmasked])] for noise, unmasked in zip(variance, mask, strict=True)])


def uniform_weights(mask: torch.Tensor) -> torch.Tensor:
    """The weights of a mean over each member's unmasked samples."""
    return mask / mask.sum(-1, keepdim=True).clamp_min(1)


def biv_weights(variance: np.ndarray, mask: np.ndarray, xi: np.ndarray) -> np.ndarray:
    """Batch inverse-variance weights 1 / (variance + xi), normalised over each member's unmasked samples (Eq. 1)."""
    weight = mask / np.maximum(variance + xi, 1e-60)
    return weight / np.maximum(weight.sum(-1, keepdims=True), 1e-60)


def inverse_variance(variance: torch.Tensor, mask: torch.Tensor, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """BIV weights by a constant xi or each member's smallest with EBS >= MEBS (Alg. 2, lines 23-24), and that xi."""
    noise, unmasked, xi = variance.double().cpu().numpy(), mask.cpu().numpy(), np.full((len(variance), 1), args.xi)
    if args.xi is None:
        solve = {"newton": newton_xi, "nelder-mead": nelder_mead_xi}[args.xi_solver]
        xi = solve(noise, unmasked, args.mebs_ratio)
    return torch.from_numpy(biv_weights(noise, unmasked, xi)).to(variance), torch.from_numpy(xi)


# ---------------------------------------------------------------------------- losses
def loss_attenuation(error: torch.Tensor, log_variance: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """L_LA: Gaussian negative log-likelihood of the squared errors, by uniform weights (Eq. 3)."""
    return (weight * (error * torch.exp(-log_variance) + log_variance)).sum()


def ivdqn_loss(network: nn.Module, target_network: nn.Module, batch: SimpleNamespace, args: Args):
    """L_IVRL of a minibatch, summed over the members, which share no parameters (Alg. 2, lines 11-25; Eq. 10)."""
    mask = batch.mask.T.contiguous()  # (N, K)
    uniform = uniform_weights(mask)
    # Line 13: each member's prediction at (s, a).
    action = batch.action.expand_as(mask).unsqueeze(-1)
    mean, log_variance = (head.gather(-1, action).squeeze(-1) for head in network.heads(batch.observation))  # (N, K)
    with torch.no_grad():
        # Lines 14-15: each member's own greedy action a' and its target.
        next_mean, next_log_variance = target_network.heads(batch.next_observation)
        target_mean, next_action = next_mean.max(-1)  # (N, K)
        discount = args.gamma * (1 - batch.terminated)
        target = batch.reward + discount * target_mean
        # Lines 16-21: the mixture of all members' predictions at (s', a').
        next_variance = mixture_variance(next_mean, next_log_variance.exp()).gather(-1, next_action.T).T  # (N, K)
        # Sec. 3.1.2: a terminal target contains no prediction, so it carries no prediction noise.
        target_variance = (args.gamma if args.terminal_variance else discount) ** 2 * next_variance
        # The weights of the unmasked samples: lines 23-24, or those of App. F.
        xi, weight = torch.zeros(()), uniform
        if args.weighting == "biv":
            weight, xi = inverse_variance(target_variance, mask, args)
        elif args.weighting == "sunrise":
            weight = weight * (torch.sigmoid(-next_variance.sqrt() * args.sunrise_temperature) + 0.5)
        elif args.weighting == "uwac":
            weight = weight * (args.uwac_beta / next_variance).clamp_max(1.5)
    error = nn.functional.mse_loss(mean, target, reduction="none")
    biv = (weight * error).sum()
    attenuation = loss_attenuation(error, log_variance, uniform) if args.variance_heads else torch.zeros(())
    loss = biv + args.loss_attenuation_weight * attenuation  # line 25: L_BIV + lambda L_LA
    metrics = {"losses/q_values": mean.mean, "losses/biv": biv.mean, "losses/attenuation": attenuation.mean}
    metrics |= {"uncertainty/target_variance_mean": target_variance.mean, "uncertainty/weight_max": weight.max}
    metrics |= {"uncertainty/target_variance_median": target_variance.median, "uncertainty/xi": xi.mean}
    metrics |= {"uncertainty/predicted_variance_mean": lambda: log_variance.exp().mean()}
    return loss, metrics | {"uncertainty/effective_batch_size": lambda: effective_batch_size(weight).nanmean()}


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
def member_actions(network: nn.Module, observation: np.ndarray, device: torch.device) -> np.ndarray:
    """The greedy action of each member (Alg. 1 and 2, line 5): (N,)."""
    mean = network(torch.as_tensor(observation, dtype=torch.float32, device=device).unsqueeze(0))  # (N, 1, A)
    return mean.argmax(-1).squeeze(-1).cpu().numpy()


def majority_vote(actions: np.ndarray, rng: np.random.Generator) -> int:
    """The action that most members choose, ties broken at random (App. A.1)."""
    votes = np.bincount(actions)
    return int(rng.choice(np.flatnonzero(votes == votes.max())))


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
    mask_prob = args.mask_prob if args.num_nets > 1 else 1.0  # a single network has no mask and no prior
    env_seed = args.seed if args.env_seed is None else args.env_seed
    episode_seed = lambda *numbers: int(np.random.SeedSequence((env_seed, *numbers)).generate_state(1)[0])
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(args.torch_deterministic and device.type == "cuda", warn_only=True)
    env, video = make_discrete_env(args.env_id), {"render_mode": "rgb_array"} if args.capture_video else {}
    eval_env = make_discrete_env(args.eval_env_id or args.env_id, **video)
    network = VarEnsembleQNetwork(env.observation_space.shape[0], int(env.action_space.n), args).to(device)
    target_network = copy.deepcopy(network).requires_grad_(False)
    if args.compile:
        inverse_variance = torch.compiler.disable(inverse_variance)  # it is numpy's
    loss_function = torch.compile(ivdqn_loss) if args.compile else ivdqn_loss
    optimizer = torch.optim.Adam(network.net.parameters(), lr=args.learning_rate, fused=True)
    online, target = ([weight.data for weight in each.net.parameters()] for each in (network, target_network))
    observation, scalar = np.zeros(env.observation_space.shape, np.float32), np.float32(0)
    transition = {"observation": observation, "action": np.int64(0), "next_observation": observation}
    transition |= {"reward": scalar, "terminated": scalar, "mask": np.zeros(args.num_nets, bool)}
    buffer = ReplayBuffer(args.buffer_size, device, **transition)
    parts = {"network": network, "target_network": target_network, "optimizer": optimizer, "buffer": buffer}

    def evaluation_return(episode: int) -> float:
        vote_rng = np.random.default_rng([args.seed, episode])
        policy = lambda observation: majority_vote(member_actions(network, observation, device), vote_rng)
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
        member = rng.integers(args.num_nets)  # line 3: one member acts for the whole episode
        epsilon = max(args.end_epsilon, args.start_epsilon * args.epsilon_decay**episode)
        episodic_return, episodic_length, done = 0.0, 0, False
        while not done and global_step < args.total_timesteps:
            action = int(rng.integers(env.action_space.n))  # lines 5-6: act
            if rng.random() >= epsilon:
                action = int(member_actions(network, observation, device)[member])
            next_observation, reward, terminated, truncated, _ = env.step(action)
            global_step += 1
            require_finite(global_step, observation=next_observation, reward=reward)
            # Lines 7-9: store with a Bernoulli mask. A truncated episode did not terminate: its last target bootstraps.
            mask = rng.random(args.num_nets) < mask_prob
            buffer.add(observation, action, next_observation, reward, terminated, mask)
            observation, done = next_observation, terminated or truncated
            episodic_return, episodic_length = episodic_return + float(reward), episodic_length + 1
            # From line 10: a gradient step for each network, and the soft update of its target.
            if global_step > args.learning_starts:
                batch = buffer.sample(round(args.batch_size / mask_prob), rng)
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
