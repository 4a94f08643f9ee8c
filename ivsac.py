# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "gymnasium[box2d,classic-control,mujoco]==1.4.0", "mujoco==3.17.0", "numpy==2.4.6",
#   "tyro==1.0.16", "tqdm==4.70.1", "wandb==0.31.0", "moviepy==2.2.1"]
# ///
"""IV-SAC: soft actor-critic that weighs its samples by inverse variance (paper Sec. 3, Algorithms 3 and 4).

Each of N members is a policy with twin critics that predict the mean and the variance of Q. The ensemble is a mixture
of Gaussians, whose variance tells how uncertain the critics are: at (s', a') for their own loss, at the policy's (s, a)
for the actors'. Batch Inverse-Variance (BIV) weights let uncertain samples count less in both. Loss attenuation
absorbs the other noise of the targets.

    python ivsac.py --env-id Walker2d-v5 --seed 3
"""

from __future__ import annotations

import json
import math
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
class IVSACArgs:
    """The algorithm. A comment begins with the paper's symbol, where that is not the name itself."""

    env_id: str = "Walker2d-v5"  # gymnasium id of the environment: continuous actions
    total_timesteps: int = 200_000  # environment steps after which the run ends
    total_episodes: int | None = None  # training episodes after which the run ends, if it has not before
    eval_every: int = 1000  # environment steps between two evaluation episodes (0: never)
    num_nets: int = 5  # N: members of the ensemble (1: without mask)
    hidden_size: int = 256  # width of the two hidden layers
    buffer_size: int = 1_000_000  # B: capacity of the replay buffer
    learning_starts: int = 1000  # environment steps, with random actions, before the first update
    rollout_length: int = 1000  # environment steps collected between two rounds of updates
    updates_per_step: float = 1.0  # gradient steps for each step collected
    batch_size: int = 1024  # samples that survive a member's mask, on average: K = batch_size / p_m are drawn
    policy_lr: float = 3e-4  # learning rate of the actor
    q_lr: float = 3e-4  # learning rate of the critics
    alpha_lr: float = 3e-4  # learning rate of alpha
    autotune: bool = True  # tune alpha to the target entropy -|A|
    alpha: float = 0.2  # the temperature, if it is not tuned
    gamma: float = 0.99  # discount rate
    tau: float = 0.005  # rate of the soft target update
    mask_prob: float = 0.9  # p_m: probability that a member learns from a transition
    ucb: float = 10.0  # Lambda_UCB: weight of the critics' spread in acting (0: one member acts for each episode)
    variance_heads: bool = True  # sigma^2: networks predict variances (--no-...: sampled ensemble, no L_LA)
    terminal_variance: bool = True  # terminal targets have a variance like any other (--no-...: BIV takes it for 0)
    weighting: Literal["biv", "l2", "sunrise", "uwac"] = "biv"  # w_k (Eq. 16 to 18), of the actors' loss and L_BIV
    mebs_ratio: float = 0.8  # minimal EBS ratio (App. B): MEBS as a share of the unmasked samples
    xi: float | None = None  # constant xi_a and xi_c in place of a minimal effective batch size
    loss_attenuation_weight: float = 2.5  # lambda: weight of loss attenuation L_LA
    sunrise_temperature: float = 20.0  # T: temperature of the SUNRISE weights
    uwac_beta: float = 0.8  # beta: scale of the UWAC weights
    cuda: bool = True  # use a GPU if there is one
    num_threads: int = torch.get_num_threads()  # CPU threads of torch
    matmul_precision: Literal["highest", "high", "medium"] = "medium"  # of float32 matrix products (docs/speed.md)

    def __post_init__(self) -> None:
        if self.num_nets == 1:  # App. A.3, said there of IV-DQN: a mask makes no sense for a single network
            self.mask_prob = 1.0


AlgorithmArgs = IVSACArgs  # for the machinery below, which adds the run's arguments and calls all of them Args


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


def tanh_gaussian(mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor]:
    """The tanh of a Gaussian sample, and its log-probability."""
    noise = torch.randn_like(mean)
    raw = mean + log_std.exp() * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # ln(1 - tanh(raw)^2), stable
    return raw.tanh(), (log_normal - log_slope).sum(-1)


class EnsemblePolicy(nn.Module):
    """N policies, each the tanh of a Gaussian."""

    def __init__(self, num_inputs: int, action_size: int, args: Args):
        super().__init__()
        self.nets = nn.ModuleList(mlp(num_inputs, args.hidden_size, 2 * action_size) for _ in range(args.num_nets))

    def mean_and_log_std(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before the tanh: (K, inputs) -> two of (N, K, A)."""
        mean, log_std = torch.stack([net(observation) for net in self.nets]).chunk(2, -1)
        return mean, log_std.clamp(-20, 2)  # rlkit's bounds

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """An action of each policy (N, K, A), and its log-probability (N, K)."""
        return tanh_gaussian(*self.mean_and_log_std(observation))

    def mode(self, observation: Tensor) -> Tensor:
        """The deterministic action of each policy: (N, K, A)."""
        return self.mean_and_log_std(observation)[0].tanh()


def critic_inputs(observation: Tensor, action: Tensor) -> Tensor:
    """Observations (K, inputs), or one (1, inputs), beside each of the actions (..., K, A): (..., K, inputs + A)."""
    return torch.cat((observation.expand(*action.shape[:-1], -1), action), -1)


MAX_LOG_VARIANCE = 60  # e^60 = 1e26: in single precision, a squared error over or under it is still finite


class VarEnsembleCritic(nn.Module):
    """N pairs of variance networks (App. A.4): the first twin of each member, then the second."""

    def __init__(self, num_inputs: int, action_size: int, args: Args):
        super().__init__()
        num_outputs = 2 if args.variance_heads else 1
        sizes = (num_inputs + action_size, args.hidden_size, num_outputs)
        self.variance_heads = args.variance_heads
        self.num_nets = args.num_nets
        self.twins = nn.ModuleList(nn.ModuleList(mlp(*sizes) for _ in range(args.num_nets)) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q by both twins of each member, at its own actions (N, K, A) or at shared ones (K, A): (N, 2, K)."""
        return self.mean_and_log_variance(observation, action)[0]

    def mean_and_log_variance(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and ln sigma^2 of Q by both twins of each member, at actions as in forward: two of (N, 2, K)."""
        x = critic_inputs(observation, action).expand(self.num_nets, -1, -1)  # (N, K, inputs + A)
        first_mean, first_log_variance = self.twin(0, x)  # each (N, K)
        second_mean, second_log_variance = self.twin(1, x)
        mean = torch.stack((first_mean, second_mean), 1)
        log_variance = torch.stack((first_log_variance, second_log_variance), 1)
        return mean, log_variance

    def twin(self, number: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and ln sigma^2 by one twin of each member: (N, K, inputs + A) -> two of (N, K)."""
        output = torch.stack([net(member_x) for net, member_x in zip(self.twins[number], x, strict=True)])
        if self.variance_heads:
            mean, log_variance = output.unbind(-1)
            log_variance = log_variance.clamp(-MAX_LOG_VARIANCE, MAX_LOG_VARIANCE)
        else:  # a sampled ensemble: its members have no variance of their own
            mean = output.squeeze(-1)
            log_variance = torch.full_like(mean, -torch.inf)  # ln 0
        return mean, log_variance


class Temperature(nn.Module):
    """SAC's temperature alpha, one for each member."""

    def __init__(self, num_nets: int, args: Args):
        super().__init__()
        start = 0.0 if args.autotune else math.log(args.alpha)  # tuning begins with alpha = 1, as in rlkit
        self.log_alpha = nn.Parameter(torch.full((num_nets, 1), start))


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


# ---------------------------------------------------------------------------- the agent
class IVSAC:
    """What learns: networks, optimisers, replay buffer. Every attribute is saved, by its state_dict."""

    def __init__(self, observation_space: gym.spaces.Box, action_space: gym.spaces.Box, args: Args):
        num_inputs = observation_space.shape[0]
        action_size = action_space.shape[0]
        device = choose_device(args)
        self.actor = EnsemblePolicy(num_inputs, action_size, args).to(device)
        self.critic = VarEnsembleCritic(num_inputs, action_size, args).to(device)
        self.target_critic = VarEnsembleCritic(num_inputs, action_size, args).to(device).requires_grad_(False)
        self.target_critic.load_state_dict(self.critic.state_dict())
        self.temperature = Temperature(args.num_nets, args).to(device)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=args.q_lr, fused=True)
        self.alpha_optimizer = torch.optim.Adam(self.temperature.parameters(), lr=args.alpha_lr, fused=True)
        self.buffer = ReplayBuffer(
            args.buffer_size,
            device,
            observation=np.zeros(num_inputs, np.float32),
            action=np.zeros(action_size, np.float32),
            next_observation=np.zeros(num_inputs, np.float32),
            reward=np.float32(0),
            terminated=np.float32(0),
            mask=np.zeros(args.num_nets, np.float32),  # M: 1 for the members that learn from it
        )

    @torch.no_grad()
    def evaluation_action(self, observation: np.ndarray, _: np.random.Generator) -> np.ndarray:  # DQN breaks ties by it
        """The average of the members' deterministic actions (App. A.4)."""
        actions = self.actor.mode(to_batch(observation, self.buffer.device))  # (N, 1, A)
        return actions.mean(0).squeeze(0).cpu().numpy()


Agent = IVSAC  # for the machinery below


# ---------------------------------------------------------------------------- uncertainty
def mixture_variance(mean: Tensor, variance: Tensor) -> Tensor:
    """Variance of an equal-weight mixture of Gaussians over the leading axis (Alg. 2, lines 20-21; Alg. 4; Eq. 14).

    The last term of Eq. 14 is the square of the average mu, as in Alg. 2, not the average square, as its text says.
    """
    return (variance + (mean - mean.mean(0)) ** 2).mean(0)  # mean(sigma^2 + mu^2) - mean(mu)^2, but stable


def effective_batch_size(weight: Tensor) -> Tensor:
    """EBS of each member's weights (Eq. 2): (N, K) -> (N,)."""
    return weight.sum(-1) ** 2 / (weight**2).sum(-1)


TINY = 1e-60  # in place of a variance of 0: the fourth power of its inverse, as in the slope below, is finite


def smallest_xi(variance: np.ndarray, mask: np.ndarray, mebs_ratio: float) -> np.ndarray:
    """The smallest xi >= 0 with EBS >= MEBS over each member's unmasked samples (Eq. 2): (N, K) -> (N, 1).

    With n weights, EBS >= MEBS says that their mean is at least `goal` standard deviations. The ratio of the two is
    concave in xi, so that Newton's method, begun at xi = 0, comes to the solution from below.
    """
    n = np.maximum(mask.sum(-1, keepdims=True), 1)
    mebs = np.minimum(mebs_ratio * n, n - 1)  # EBS is n for an infinite xi only
    goal = np.sqrt(mebs / (n - mebs))
    xi = np.zeros((len(variance), 1))
    for _ in range(100):  # 7 in most cases, up to 50 if the variances span many powers of ten
        weight = mask / np.maximum(variance + xi, TINY)
        weight_sum = weight.sum(-1, keepdims=True)
        square_sum = (weight**2).sum(-1, keepdims=True)
        is_short = weight_sum**2 < mebs * square_sum  # EBS < MEBS
        if not is_short.any():
            break
        with np.errstate(divide="ignore", invalid="ignore"):  # a member that is not short may get nan, and ignores it
            n_deviations = np.sqrt(n * square_sum - weight_sum**2)
            spread = (weight * (weight - square_sum / weight_sum) ** 2).sum(-1, keepdims=True)
            slope = n * weight_sum * spread / n_deviations**3  # the derivative of weight_sum / n_deviations
            step = (goal - weight_sum / n_deviations) / slope
        xi = np.where(is_short, (xi + step) * (1 + 1e-6), xi)  # a little further, so that the last step arrives
    return xi


def biv_weights(variance: np.ndarray, mask: np.ndarray, xi: np.ndarray) -> np.ndarray:
    """Batch inverse-variance weights 1 / (variance + xi), normalised over each member's unmasked samples (Eq. 16)."""
    weight = mask / np.maximum(variance + xi, TINY)
    weight_sum = weight.sum(-1, keepdims=True)
    return weight / np.where(weight_sum > 0, weight_sum, 1)  # all 0 if every sample is masked


def biv_weights_and_xi(variance: Tensor, mask: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """BIV weights (N, K) by a constant xi or by the smallest with EBS >= MEBS, and that xi (N, 1).

    Alg. 2 estimates xi before it masks the minibatch (lines 23-24); we mask first, as Alg. 3 does (lines 21-24).
    """
    # Double precision, for EBS to reach MEBS exactly; numpy, which is two to three times as fast as torch here.
    variance_array = variance.double().cpu().numpy()
    mask_array = mask.double().cpu().numpy()
    if args.xi is None:
        xi = smallest_xi(variance_array, mask_array, args.mebs_ratio)
    else:
        xi = np.full((len(variance_array), 1), args.xi)
    weight = biv_weights(variance_array, mask_array, xi)
    return torch.from_numpy(weight).to(variance.device, variance.dtype), torch.from_numpy(xi)


def sunrise_weights(variance: Tensor, temperature: float) -> Tensor:
    """sigmoid(-std T) + 0.5 (Eq. 18, whose 1/K is for both terms): lower where the values spread more."""
    return torch.sigmoid(-variance.sqrt() * temperature) + 0.5


def sample_weights(variance: Tensor, mask: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """The weights of each member's unmasked samples (N, K), and xi (N, 1), which only BIV has."""
    require_finite("a variance", variance.cpu())  # its weight would be 0, and nobody would notice
    if args.weighting == "biv":
        return biv_weights_and_xi(variance, mask, args)
    if args.weighting == "sunrise":
        factor = sunrise_weights(variance, args.sunrise_temperature)
    elif args.weighting == "uwac":  # Eq. 17
        factor = (args.uwac_beta / variance).clamp_max(1.5)
    elif args.weighting == "l2":  # Eq. 5
        factor = 1
    return uniform_weights(mask) * factor, torch.zeros(len(mask), 1)


def predictive_variance(critic: nn.Module, observation: Tensor, action: Tensor, lower_twin: Tensor) -> Tensor:
    """Alg. 4 at each member's own action: (N, K).

    lower_twin (N, K) is 0 or 1: which of a member's twins has the lower value at its own action. All members judge the
    action by their twin of that number. To ask both takes 20% longer, and 50% with 1024 samples (docs/speed.md).
    """
    x = critic_inputs(observation, action)  # (N, K, inputs + A)
    variance = torch.empty_like(action[..., 0])  # (N, K)
    for number in (0, 1):
        chosen = lower_twin == number  # (N, K): P pairs of a member and a sample
        pairs = x[chosen].expand(len(x), -1, -1)  # the same for every member: (N, P, inputs + A)
        mean, log_variance = critic.twin(number, pairs)  # lines 3-6: each (N, P)
        variance[chosen] = mixture_variance(mean, log_variance.exp())  # lines 7-8: (P,)
    return variance


# ---------------------------------------------------------------------------- losses
def uniform_weights(mask: Tensor) -> Tensor:
    """The weights of a mean over each member's unmasked samples."""
    return mask / mask.sum(-1, keepdim=True).clamp_min(1)


def loss_attenuation(squared_error: Tensor, log_variance: Tensor, mask: Tensor) -> Tensor:
    """L_LA: Gaussian negative log-likelihood, averaged over each member's unmasked samples (Eq. 3)."""
    negative_log_likelihood = squared_error * torch.exp(-log_variance) + log_variance
    return (uniform_weights(mask) * negative_log_likelihood).sum()


@torch.no_grad()
def ivsac_targets(agent: Agent, batch: SimpleNamespace, alpha: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """Each member's targets, and the variance of the prediction in them (Alg. 3, lines 15, 17, 19): two of (N, K)."""
    # Lines 15 and 17: each member's own a'. The lower twin and the entropy are SAC's (App. A.4).
    next_action, next_log_prob = agent.actor.sample(batch.next_observation)
    next_q_values = agent.target_critic(batch.next_observation, next_action)  # (N, 2, K)
    next_value = next_q_values.amin(-2) - alpha * next_log_prob
    target = batch.reward + args.gamma * (1 - batch.terminated) * next_value
    # Line 19: the variance of all target critics at each member's a'.
    lower_twin = next_q_values.argmin(-2)
    next_variance = predictive_variance(agent.target_critic, batch.next_observation, next_action, lower_twin)
    return target, next_variance


def ivsac_actor_loss(
    agent: Agent, batch: SimpleNamespace, mask: Tensor, alpha: Tensor, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """L_actor, summed over the members (Alg. 3, lines 18 and 21-23; Eq. 15)."""
    # The a_kj of line 18, which no line of the box draws: each member's own action at s, as in Eq. 11 and SAC.
    action, log_prob = agent.actor.sample(batch.observation)
    q_values = agent.critic(batch.observation, action)  # (N, 2, K)
    with torch.no_grad():
        # Lines 18 and 22: the weights, by the variance of all critics at each member's own a.
        lower_twin = q_values.argmin(-2)
        variance = predictive_variance(agent.critic, batch.observation, action, lower_twin)  # (N, K)
        weight, xi = sample_weights(variance, mask, args)
    # Line 23.
    loss = (weight * (alpha * log_prob - q_values.amin(-2))).sum()
    return loss, {"log_prob": log_prob.detach(), "variance": variance, "weight": weight, "xi": xi}


def ivsac_critic_loss(
    agent: Agent, batch: SimpleNamespace, mask: Tensor, target: Tensor, next_variance: Tensor, args: Args
) -> tuple[Tensor, dict[str, Tensor]]:
    """L_IVRL of both twins, summed over the members (Alg. 3, lines 16, 21 and 24-25; Eq. 10)."""
    # Line 24: the weights, by the variance of the targets.
    target_variance = args.gamma**2 * next_variance  # the first term of Eq. 9
    if not args.terminal_variance:
        target_variance = target_variance * (1 - batch.terminated)
    # SUNRISE and UWAC weigh by the variance at (s', a') itself.
    variance = next_variance if args.weighting in ("sunrise", "uwac") else target_variance
    weight, xi = sample_weights(variance, mask, args)  # (N, K), (N, 1)
    # Lines 16 and 25: both twins' predictions at (s, a), and the loss.
    mean, log_variance = agent.critic.mean_and_log_variance(batch.observation, batch.action)  # each (N, 2, K)
    squared_error = (mean - target.unsqueeze(-2)) ** 2
    biv = (weight.unsqueeze(1) * squared_error).sum()  # Eq. 1
    if args.variance_heads:
        attenuation = loss_attenuation(squared_error, log_variance, mask.unsqueeze(1))  # Eq. 3
    else:
        attenuation = torch.zeros(())
    loss = biv + args.loss_attenuation_weight * attenuation  # Eq. 10
    return loss, {
        "mean": mean,
        "log_variance": log_variance,
        "variance": variance,
        "weight": weight,
        "xi": xi,
        "biv": biv,
        "attenuation": attenuation,
    }


def temperature_loss(temperature: Temperature, log_prob: Tensor, mask: Tensor, action_size: int) -> Tensor:
    """Raises alpha where a policy's entropy is below the target entropy -|A|, and lowers it where it is above."""
    shortfall = log_prob - action_size  # the target entropy -|A| minus the entropy, estimated by -log_prob
    return -(temperature.log_alpha * uniform_weights(mask) * shortfall).sum()


def minimize(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A gradient step of the optimiser's own parameters. No others get gradients: an actor's loss holds critics."""
    optimizer.zero_grad()
    loss.backward(inputs=optimizer.param_groups[0]["params"])
    optimizer.step()


@torch.no_grad()
def soft_update(target_parameters: Iterable[Tensor], parameters: Iterable[Tensor], tau: float) -> None:
    """Moves each target parameter by a share tau towards the online one."""
    for target, online in zip(target_parameters, parameters, strict=True):
        target.lerp_(online, tau)


def ivsac_update(agent: Agent, batch: SimpleNamespace, args: Args) -> tuple[dict, dict, dict]:
    """A gradient step for every member; they share no parameters (Alg. 3, lines 13-27)."""
    mask = batch.mask.T  # line 21: (N, K), stored as (K, N)
    alpha = agent.temperature.log_alpha.detach().exp()  # (N, 1)
    target, next_variance = ivsac_targets(agent, batch, alpha, args)
    actor_loss, actor_tensors = ivsac_actor_loss(agent, batch, mask, alpha, args)
    minimize(agent.actor_optimizer, actor_loss)  # line 23
    # Not in the box: SAC's temperature.
    alpha_loss = temperature_loss(agent.temperature, actor_tensors["log_prob"], mask, batch.action.shape[-1])
    if args.autotune:
        minimize(agent.alpha_optimizer, alpha_loss)
    critic_loss, critic_tensors = ivsac_critic_loss(agent, batch, mask, target, next_variance, args)
    minimize(agent.critic_optimizer, critic_loss)  # line 25
    soft_update(agent.target_critic.parameters(), agent.critic.parameters(), args.tau)  # line 26
    losses = {"critic": critic_loss, "actor": actor_loss, "alpha_loss": alpha_loss, "alpha": alpha.mean()}
    return losses, critic_tensors, actor_tensors


def ivsac_metrics(losses: dict, critic_tensors: dict, actor_tensors: dict) -> dict[str, float]:
    """What is logged of an update."""
    metrics = {f"losses/{name}": loss.item() for name, loss in losses.items()}
    metrics["losses/q_values"] = critic_tensors["mean"].mean().item()
    metrics["losses/critic_biv"] = critic_tensors["biv"].item()
    metrics["losses/critic_attenuation"] = critic_tensors["attenuation"].item()
    metrics["uncertainty/predicted_variance_mean"] = critic_tensors["log_variance"].exp().mean().item()
    for name, tensors in (("critic", critic_tensors), ("actor", actor_tensors)):
        ebs = effective_batch_size(tensors["weight"])  # nan for a member whose samples are all masked
        metrics[f"uncertainty/{name}_effective_batch_size"] = ebs.nanmean().nan_to_num().item()
        metrics[f"uncertainty/{name}_variance_mean"] = tensors["variance"].mean().item()
        metrics[f"uncertainty/{name}_variance_median"] = tensors["variance"].median().item()
        metrics[f"uncertainty/{name}_weight_max"] = tensors["weight"].max().item()
        metrics[f"uncertainty/{name}_xi"] = tensors["xi"].mean().item()
    return metrics


# ---------------------------------------------------------------------------- acting and evaluation
def to_batch(observation: np.ndarray, device: torch.device) -> Tensor:
    """One observation as a batch: (1, inputs)."""
    return torch.as_tensor(observation, dtype=torch.float32, device=device).unsqueeze(0)


@torch.no_grad()
def ucb_action(
    agent: Agent, observation: np.ndarray, episode_member: int, args: Args
) -> tuple[np.ndarray, dict[str, float]]:
    """The action of the member with the highest UCB, and what is logged of the choice (Alg. 3, lines 4-5).

    With --ucb 0 it is the member drawn for the episode (App. B).
    """
    state = to_batch(observation, agent.buffer.device)  # (1, inputs)
    actions = agent.actor.sample(state)[0].squeeze(1)  # (N, A)
    q_values = agent.critic(state, actions)  # the N actions in the place of K samples: (N, 2, N)
    std, mean = torch.std_mean(q_values, (0, 1), unbiased=False)  # over the means of all 2N critics (App. A.4): (N,)
    if args.ucb > 0:
        member = int((mean + args.ucb * std).argmax())
    else:
        member = episode_member
    choice = {"exploration/ucb_std": std[member].item(), "exploration/acting_member": member}
    return actions[member].cpu().numpy(), choice


MAX_ACTION = 1e18  # environments may punish its square, which is to be finite in single precision


def scaled_actions(env: gym.Env) -> gym.Env:
    """Actions between -1 and 1, whatever their bounds; refuses an environment whose actions this family cannot take."""
    space = env.action_space
    is_box = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and len(space.shape) == 1
    has_range = is_box and space.shape != (0,) and (space.low < space.high).all()
    if not has_range or np.abs([space.low, space.high]).max() > MAX_ACTION:
        raise RunError(f"{env.spec.id} has actions {space}, not a flat, bounded Box: try dqn.py and its like")
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))


adapt_actions = scaled_actions  # for the machinery below


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
    """Algorithm 3, line by line; returns the folder of the run."""
    with Run(args) as run:
        env = run.env
        agent = IVSAC(env.observation_space, env.action_space, args)
        rng = np.random.default_rng(args.seed)
        sample_size = round(args.batch_size / args.mask_prob)  # K: about batch_size of them survive a member's mask
        num_updates = round(args.rollout_length * args.updates_per_step)
        if num_updates == 0:
            raise RunError("--rollout-length times --updates-per-step must be at least 1")
        run.start(agent, rng)
        while not run.is_over():  # line 2
            observation, _ = env.reset(seed=run.episode_seed())
            episode_member = int(rng.integers(args.num_nets))  # acts for the whole episode if --ucb 0
            episodic_return = 0.0
            episodic_length = 0
            done = False
            while not done and run.global_step < args.total_timesteps:  # line 3
                run.global_step += 1
                # Lines 4-6: act.
                if run.global_step <= args.learning_starts:
                    action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
                    choice = {}
                else:
                    action, choice = ucb_action(agent, observation, episode_member, args)
                next_observation, reward, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
                episodic_return += reward
                episodic_length += 1
                # Lines 7-9: store with a Bernoulli mask. A truncated episode did not terminate: its target bootstraps.
                agent.buffer.add(
                    observation=observation,
                    action=action,
                    next_observation=next_observation,
                    reward=reward,
                    terminated=terminated,
                    mask=rng.random(args.num_nets) < args.mask_prob,
                )
                observation = next_observation
                # Line 11. The optimization steps follow an episode there, and every --rollout-length steps here.
                rollout_is_complete = run.global_step % args.rollout_length == 0
                if rollout_is_complete and run.global_step >= args.learning_starts:
                    for update in range(num_updates):
                        batch = agent.buffer.sample(sample_size, rng)  # line 12
                        losses, critic_tensors, actor_tensors = ivsac_update(agent, batch, args)  # lines 13-27
                        require_finite("a loss", sum(losses.values()).item())  # what is not finite survives a sum
                        steps_to_learn = args.rollout_length * (num_updates - update - 1) / num_updates
                        run.show_progress(steps_to_learn)
                    if run.global_step % args.log_every == 0:
                        run.log(ivsac_metrics(losses, critic_tensors, actor_tensors) | choice)
                if args.eval_every and run.global_step % args.eval_every == 0:
                    run.log(run.evaluation_row(agent, run.global_step))
                run.show_progress(run.global_step % args.rollout_length)
            if done:
                run.episode += 1
                row = {
                    "charts/episode": run.episode,
                    "charts/episodic_return": episodic_return,
                    "charts/episodic_length": episodic_length,
                }
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
