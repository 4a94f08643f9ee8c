"""EnsembleSAC: an ensemble of soft actor-critics that explores by their disagreement (paper App. A.4 and A.5).

Each of N members is a policy with twin critics, trained as SAC on its masked share of one replay buffer. In training
the members' actions compete by an upper confidence bound over all critics; in evaluation the actions are averaged.

    python ensemble_sac.py --env-id Walker2d-v4 --seed 3
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
    cuda: bool = True  # use a GPU if there is one
    num_threads: int = torch.get_num_threads()  # CPU threads of torch
    total_timesteps: int = 200_000  # environment steps after which the run ends
    total_episodes: int | None = None  # training episodes after which the run ends, if it has not before
    checkpoint_every: int = 10_000  # steps between checkpoints, each taken at the next episode end
    resume: bool = False  # continue the run --run-name from its last checkpoint
    evaluate: str | None = None  # folder of a run: report the returns of its checkpoint and leave
    eval_episodes: int = 10  # number of episodes of --evaluate
    # Fixed once a run has started:
    seed: int = 1  # seed of networks, exploration and minibatches
    env_seed: int | None = None  # seed of the environment (default: --seed)
    torch_deterministic: bool = True  # let torch use deterministic algorithms only
    matmul_precision: Literal["highest", "high", "medium"] = "medium"  # of float32 products: see torch's documentation
    env_id: str = "Walker2d-v5"  # gymnasium id of the environment: continuous actions, flat observations
    eval_env_id: str | None = None  # gymnasium id of the evaluation environment (default: --env-id)
    eval_every: int = 1000  # environment steps between two evaluation episodes (0: never)
    log_every: int = 500  # steps between two rows of losses/ and uncertainty/ metrics
    buffer_size: int = 1_000_000  # capacity of the replay buffer B
    learning_starts: int = 1000  # environment steps, with random actions, before the first update
    rollout_length: int = 1000  # environment steps collected between two rounds of updates
    updates_per_step: float = 1.0  # gradient steps for each step collected
    batch_size: int = 256  # K: minibatch size, as many as survive the mask on average
    policy_lr: float = 3e-4  # actor lr: learning rate of the policies
    q_lr: float = 3e-4  # critic lr: learning rate of the critics
    alpha_lr: float = 3e-4  # learning rate of the temperatures
    autotune: bool = True  # tune the temperatures to the target entropy -|A|
    alpha: float = 0.2  # alpha: the temperature, if it is not tuned
    gamma: float = 0.99  # gamma: discount rate
    tau: float = 0.005  # tau: rate of the soft target update
    hidden_size: int = 256  # width of the two hidden layers
    num_nets: int = 5  # N: members of the ensemble (1: without mask)
    mask_prob: float = 1.0  # p_m: probability that a member learns from a transition
    ucb: float = 1.0  # Lambda_UCB: weight of the critics' spread in acting (0: one member acts for each episode)


# What must hold, or the run is refused before anything is written.
RULES = """
num_threads >= 1; total_timesteps >= 1; total_episodes is None or total_episodes >= 1; checkpoint_every >= 1
eval_episodes >= 1; eval_every >= 0; log_every >= 1; learning_starts >= 0; batch_size >= 1; hidden_size >= 1
seed >= 0; env_seed is None or env_seed >= 0; rollout_length >= 1; rollout_length * updates_per_step >= 1
policy_lr > 0; q_lr > 0; alpha_lr > 0; alpha > 0; 0 <= gamma <= 1; 0 < tau <= 1
num_nets >= 1; 0 < mask_prob <= 1; ucb >= 0; batch_size / mask_prob <= buffer_size
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


def tanh_gaussian(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample of a tanh-Gaussian policy and its log-probability."""
    mean, log_std = output.chunk(2, -1)
    log_std = log_std.clamp(-20, 2)
    noise = torch.randn_like(mean)
    raw = mean + log_std.exp() * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # ln(1 - tanh(raw)^2)
    return raw.tanh(), (log_normal - log_slope).sum(-1)


class EnsembleCritic(nn.Module):
    """N pairs of critics (App. A.4)."""

    def __init__(self, num_inputs: int, num_actions: int, args: Args):
        super().__init__()
        sizes = (num_inputs + num_actions, args.hidden_size, 1)
        self.nets = nn.ModuleList(EnsembleMLP(2, *sizes) for _ in range(args.num_nets))

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """All critics at one action (K, A), or each member's pair at its own action (N, K, A)."""
        x = torch.cat((observation.expand(*action.shape[:-1], -1), action), -1).expand(len(self.nets), -1, -1)
        return torch.stack([net(each) for net, each in zip(self.nets, x, strict=True)]).squeeze(-1)  # (N, 2, K)


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
def uniform_weights(mask: torch.Tensor) -> torch.Tensor:
    """The weights of a mean over each member's unmasked samples."""
    return mask / mask.sum(-1, keepdim=True).clamp_min(1)


# ---------------------------------------------------------------------------- losses
def minimize(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def ensemble_sac_update(agent: SimpleNamespace, batch: SimpleNamespace, args: Args) -> dict[str, Callable]:
    """A gradient step for every member; they share no parameters (Alg. 3, lines 13-27)."""
    mask, alpha = batch.mask.T, agent.temperature["log_alpha"].detach().exp()  # (N, K), (N, 1)
    with torch.no_grad():
        # Lines 15 and 17: each member's own a', and its target.
        next_action, log_prob = tanh_gaussian(agent.actor(batch.next_observation))
        target_mean = agent.target_critic(batch.next_observation, next_action).amin(1)  # (N, K)
        target = batch.reward + args.gamma * (1 - batch.terminated) * (target_mean - alpha * log_prob)
        weight = uniform_weights(mask)
    # Lines 21-23: SAC's actor loss, with the critics held fixed.
    agent.critic.requires_grad_(False)
    action, log_prob = tanh_gaussian(agent.actor(batch.observation))
    mean = agent.critic(batch.observation, action).amin(1)  # (N, K)
    actor_loss = (uniform_weights(mask) * (alpha * log_prob - mean)).sum()
    minimize(agent.actor_optimizer, actor_loss)
    agent.critic.requires_grad_(True)
    # The temperatures, towards an entropy of -|A|.
    surplus = uniform_weights(mask) * (log_prob.detach() - action.shape[-1])
    alpha_loss = -(agent.temperature["log_alpha"] * surplus).sum()
    if args.autotune:
        minimize(agent.alpha_optimizer, alpha_loss)
    # Lines 16 and 25: L2 of both twins.
    mean = agent.critic(batch.observation, batch.action)  # (N, 2, K)
    critic_loss = (weight.unsqueeze(1) * (mean - target.unsqueeze(1)) ** 2).sum()
    minimize(agent.critic_optimizer, critic_loss)
    # Line 26: the soft update of the targets.
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.target_critic.parameters()), list(agent.critic.parameters()), args.tau)
    metrics = {"losses/critic": critic_loss.mean, "losses/actor": actor_loss.mean, "losses/q_values": mean.mean}
    metrics |= {"losses/alpha": alpha.mean, "losses/alpha_loss": alpha_loss.mean}
    return metrics


# ---------------------------------------------------------------------------- acting and evaluation
def make_continuous_env(env_id: str, **kwargs: Any) -> gym.Env:
    try:
        env = gym.make(env_id, **kwargs)
    except (gym.error.Error, ImportError) as error:
        refuse(f"the environment {env_id} cannot be made: {error}")
    bounded = isinstance(env.action_space, gym.spaces.Box) and env.action_space.is_bounded()
    if not bounded or len(env.action_space.shape) != 1 or len(env.observation_space.shape or ()) != 1:
        spaces = f"{env.action_space} and {env.observation_space}"
        refuse(f"{env_id} has {spaces}, not two flat Boxes, the first bounded; dqn.py and its like take Discrete(n)")
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))


@torch.no_grad()
def ucb_action(actor: nn.Module, critic: nn.Module, observation: np.ndarray, member: int, args: Args):
    """The action of the member with the highest UCB, or of the given one if --ucb 0 (Alg. 3, lines 4-5)."""
    observation = torch.as_tensor(observation, dtype=torch.float32, device=next(actor.parameters()).device).unsqueeze(0)
    action = tanh_gaussian(actor(observation))[0].squeeze(1)  # (N, A)
    std, mean = torch.std_mean(critic(observation, action), (0, 1), unbiased=False)  # over all 2N critics: (N,)
    if args.ucb > 0:
        member = int((mean + args.ucb * std).argmax())
    return action[member].cpu().numpy(), member, std[member].item()


@torch.no_grad()
def average_action(actor: nn.Module, observation: np.ndarray) -> np.ndarray:
    """The average of the members' deterministic actions (App. A.4)."""
    observation = torch.as_tensor(observation, dtype=torch.float32, device=next(actor.parameters()).device).unsqueeze(0)
    mean, _ = actor(observation).chunk(2, -1)
    return mean.tanh().mean(0).squeeze(0).cpu().numpy()


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
    mask_prob = args.mask_prob if args.num_nets > 1 else 1.0  # a single member has no mask
    env_seed = args.seed if args.env_seed is None else args.env_seed
    episode_seed = lambda *numbers: int(np.random.SeedSequence((env_seed, *numbers)).generate_state(1)[0])
    rng = np.random.default_rng(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.num_threads)
    torch.set_float32_matmul_precision(args.matmul_precision)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(args.torch_deterministic and device.type == "cuda", warn_only=True)
    env, video = make_continuous_env(args.env_id), {"render_mode": "rgb_array"} if args.capture_video else {}
    eval_env = make_continuous_env(args.eval_env_id or args.env_id, **video)
    num_inputs, num_actions = env.observation_space.shape[0], env.action_space.shape[0]
    agent = SimpleNamespace(actor=EnsembleMLP(args.num_nets, num_inputs, args.hidden_size, 2 * num_actions).to(device))
    agent.critic = EnsembleCritic(num_inputs, num_actions, args).to(device)
    agent.target_critic = copy.deepcopy(agent.critic).requires_grad_(False)
    log_alpha = torch.full((args.num_nets, 1), 0.0 if args.autotune else math.log(args.alpha), device=device)
    agent.temperature = nn.ParameterDict({"log_alpha": log_alpha})
    agent.actor_optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.policy_lr, fused=True)
    agent.critic_optimizer = torch.optim.Adam(agent.critic.parameters(), lr=args.q_lr, fused=True)
    agent.alpha_optimizer = torch.optim.Adam(agent.temperature.parameters(), lr=args.alpha_lr, fused=True)
    zeros = lambda size: np.zeros(size, np.float32)
    transition = {"observation": zeros(num_inputs), "action": zeros(num_actions), "next_observation": zeros(num_inputs)}
    transition |= {"reward": zeros(()), "terminated": zeros(()), "mask": np.zeros(args.num_nets, bool)}
    buffer = ReplayBuffer(args.buffer_size, device, **transition)

    def evaluation_return(number: int) -> float:
        policy = lambda observation: average_action(agent.actor, observation)
        return evaluate(eval_env, policy, episode_seed(number, 1))

    run = None if args.evaluate else Run(args, vars(agent) | {"buffer": buffer}, rng)
    if args.capture_video:
        eval_env = gym.wrappers.RecordVideo(eval_env, f"{args.evaluate or run.folder}/videos/{int(time.time())}")
    if args.evaluate:
        load_checkpoint(Path(args.evaluate), args, {"actor": agent.actor})
        returns = [evaluation_return(i) for i in range(args.eval_episodes)]
        print(f"mean {np.mean(returns):.2f}, standard deviation {np.std(returns):.2f}, returns {returns}")
        sys.exit(eval_env.close())
    global_step, episode, eval_returns = run.progress
    while global_step < args.total_timesteps and episode < (args.total_episodes or math.inf):  # line 2
        observation, _ = env.reset(seed=episode_seed(episode))  # so an episode's end is a complete state
        require_finite(global_step, observation=observation)
        member = int(rng.integers(args.num_nets))
        episodic_return, episodic_length, done = 0.0, 0, False
        while not done and global_step < args.total_timesteps:
            # Lines 4-6: act.
            action, ucb_std = rng.uniform(-1, 1, num_actions).astype(np.float32), 0.0
            if global_step >= args.learning_starts:
                action, member, ucb_std = ucb_action(agent.actor, agent.critic, observation, member, args)
            next_observation, reward, terminated, truncated, _ = env.step(action)
            global_step += 1
            require_finite(global_step, observation=next_observation, reward=reward)
            # Lines 7-9: store with a Bernoulli mask. A truncated episode did not terminate: its last target bootstraps.
            mask = rng.random(args.num_nets) < mask_prob
            buffer.add(observation, action, next_observation, reward, terminated, mask)
            observation, done = next_observation, terminated or truncated
            episodic_return, episodic_length = episodic_return + float(reward), episodic_length + 1
            # Line 11: after each rollout, as many gradient steps.
            ready = global_step >= args.learning_starts and global_step % args.rollout_length == 0
            for _ in range(round(args.rollout_length * args.updates_per_step) if ready else 0):
                metrics = ensemble_sac_update(agent, buffer.sample(round(args.batch_size / mask_prob), rng), args)
                losses = {f"{name} loss": metrics[f"losses/{name}"]().item() for name in ("critic", "actor")}
                require_finite(global_step, **losses)
                run.tick(global_step, 0)
            if ready and global_step % args.log_every == 0:
                row = {"exploration/ucb_std": ucb_std, "exploration/acting_member": member}
                run.log(global_step, {name: value().item() for name, value in metrics.items()} | row)
            if args.eval_every and global_step % args.eval_every == 0:
                eval_returns = [*eval_returns, evaluation_return(global_step)][-100:]
                row = {"charts/eval_return": eval_returns[-1], "charts/eval_return_mean100": np.mean(eval_returns)}
                run.log(global_step, row)
            run.tick(global_step)
        if done:
            episode += 1
            row = {"charts/episode": episode, "charts/episodic_return": episodic_return}
            run.log(global_step, row | {"charts/episodic_length": episodic_length})
            run.checkpoint(global_step, episode, eval_returns)
    run.checkpoint(global_step, episode, eval_returns, final=True)
    eval_env.close()
