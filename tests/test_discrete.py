"""The learning steps and the loop of the discrete family: what each member learns from, and what it converges to."""

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SCRIPTS, read_checkpoint, read_rows, script, timeless
from torch import Tensor, nn

import bootstrap_dqn
import dqn
import ivdqn
import sunrise_dqn

INPUTS, ACTIONS = 6, 3
ENSEMBLES = [bootstrap_dqn, sunrise_dqn, ivdqn]
PAIRED = [
    (bootstrap_dqn, {}),
    (bootstrap_dqn, {"prior_scale": 3.0}),
    (sunrise_dqn, {}),
    (ivdqn, {}),
    (ivdqn, {"prior_scale": 3.0}),
    (ivdqn, {"weighting": "l2"}),
    (ivdqn, {"weighting": "uwac"}),
    (ivdqn, {"weighting": "sunrise"}),
    (ivdqn, {"variance_heads": False}),
]


def make_agent(module: ModuleType, args: Any, num_inputs: int = INPUTS, num_actions: int = ACTIONS) -> Any:
    """As the scripts do."""
    return module.Agent(gym.spaces.Box(-np.inf, np.inf, (num_inputs,)), gym.spaces.Discrete(num_actions), args)


def loss_of(module: ModuleType) -> Callable:
    return getattr(module, f"{module.__name__}_loss")


def make_batch(size: int = 32, num_nets: int = 5, mask_prob: float = 0.6, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        observation=torch.randn(size, INPUTS, generator=generator),
        action=torch.randint(ACTIONS, (size,), generator=generator),
        next_observation=torch.randn(size, INPUTS, generator=generator),
        reward=torch.randn(size, generator=generator),
        discount=0.99 ** torch.randint(1, 5, (size,), generator=generator),  # of n-step returns
        terminated=(torch.rand(size, generator=generator) < 0.2).float(),
        mask=(torch.rand(size, num_nets, generator=generator) < mask_prob).float(),
    )


def gradients(
    module: ModuleType, network: nn.Module, target_network: nn.Module, batch: SimpleNamespace, args: Any
) -> dict[str, Tensor]:
    network.zero_grad()
    loss_of(module)(network, target_network, batch, args)[0].backward()
    return {name: parameter.grad.clone() for name, parameter in network.net.named_parameters()}


def member_slices(by_name: dict[str, Tensor], member: int) -> list[Tensor]:
    return [tensor[member] for tensor in by_name.values()]


def make_networks(module: ModuleType, args: Any) -> tuple[nn.Module, nn.Module]:
    """An agent's network and its target network, which has gone another way."""
    torch.manual_seed(0)
    agent = make_agent(module, args)
    with torch.no_grad():
        for parameter in agent.target_network.net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return agent.network, agent.target_network


# ---------------------------------------------------------------------------- agents
def test_the_optimiser_is_adam_with_the_learning_rate_and_trains_all_but_the_priors(discrete: ModuleType):
    agent = make_agent(discrete, discrete.Args(learning_rate=0.02))
    (group,) = agent.optimizer.param_groups
    assert isinstance(agent.optimizer, torch.optim.Adam)
    assert group["lr"] == 0.02
    assert {id(parameter) for parameter in group["params"]} == {id(p) for p in agent.network.net.parameters()}


def test_the_target_network_starts_as_a_copy_that_has_no_gradient(discrete: ModuleType):
    agent = make_agent(discrete, discrete.Args())
    for target, online in zip(agent.target_network.parameters(), agent.network.parameters(), strict=True):
        assert torch.equal(target, online)
        assert target.data_ptr() != online.data_ptr()
        assert not target.requires_grad
    assert all(parameter.requires_grad for parameter in agent.network.net.parameters())


@pytest.mark.parametrize("module", ENSEMBLES)
def test_each_member_starts_as_a_linear_network_of_torch_would(module: ModuleType):
    """Uniformly between plus and minus the root of 1 / inputs."""
    torch.manual_seed(0)
    layer = module.EnsembleLinear(3, 25, 400)
    alone = nn.Linear(25, 400)
    for ours, torchs in ((layer.weight, alone.weight), (layer.bias, alone.bias)):
        for member in ours:
            assert member.abs().max().item() == pytest.approx(torchs.abs().max().item(), rel=0.02)
            assert member.std().item() == pytest.approx(0.2 / 3**0.5, rel=0.1)
        assert not torch.equal(ours[0], ours[1])


@pytest.mark.parametrize("module", ENSEMBLES)
def test_a_single_network_has_neither_mask_nor_prior(module: ModuleType):
    alone = module.Args(num_nets=1, mask_prob=0.5, prior_scale=3.0)
    assert (alone.mask_prob, alone.prior_scale) == (1, 0)
    pair = module.Args(num_nets=2, mask_prob=0.5, prior_scale=3.0)
    assert (pair.mask_prob, pair.prior_scale) == (0.5, 3)


# ---------------------------------------------------------------------------- losses
def test_no_gradient_passes_through_the_targets_and_their_weights(discrete: ModuleType):
    """A network that is its own target network learns as beside a copy of itself that cannot learn."""
    for weighting in ("biv", "sunrise", "uwac") if discrete is ivdqn else ("",):
        args = discrete.Args(**({"weighting": weighting} if weighting else {}))
        network, _ = make_networks(discrete, args)
        frozen = copy.deepcopy(network).requires_grad_(False)
        expected = gradients(discrete, network, frozen, make_batch(), args)
        found = gradients(discrete, network, network, make_batch(), args)
        assert all(torch.allclose(found[name], expected[name]) for name in expected)


def test_the_metrics_are_these_statistics():
    args = ivdqn.Args(loss_attenuation_weight=0.7)
    network, target_network = make_networks(ivdqn, args)
    loss, tensors = ivdqn.ivdqn_loss(network, target_network, make_batch(), args)
    weight = tensors["weight"].double().numpy()
    expected = {
        "losses/loss": (tensors["biv"] + 0.7 * tensors["attenuation"]).item(),
        "losses/q_values": tensors["mean"].mean().item(),
        "losses/biv": tensors["biv"].item(),
        "losses/attenuation": tensors["attenuation"].item(),
        "uncertainty/target_variance_mean": tensors["target_variance"].mean().item(),
        "uncertainty/target_variance_median": tensors["target_variance"].median().item(),
        "uncertainty/predicted_variance_mean": tensors["log_variance"].exp().mean().item(),
        "uncertainty/weight_max": weight.max(),
        "uncertainty/effective_batch_size": (weight.sum(-1) ** 2 / (weight**2).sum(-1)).mean(),
        "uncertainty/xi": tensors["xi"].mean().item(),
    }
    assert len({round(value, 6) for value in expected.values()}) == len(expected)  # none can stand for another
    assert ivdqn.ivdqn_metrics(loss, tensors) == pytest.approx(expected, rel=1e-5)


def test_a_member_without_samples_is_left_out_of_the_mean_effective_batch_size():
    args = ivdqn.Args()
    network, target_network = make_networks(ivdqn, args)
    batch = make_batch()
    batch.mask[:] = 1
    batch.mask[:, 3] = 0
    loss, tensors = ivdqn.ivdqn_loss(network, target_network, batch, args)
    assert loss.isfinite()
    size = ivdqn.ivdqn_metrics(loss, tensors)["uncertainty/effective_batch_size"]
    assert 0.9 * 32 <= size <= 32


@pytest.mark.parametrize(("module", "settings"), PAIRED)
def test_a_members_gradient_depends_on_its_own_parameters_mask_and_target_only(module: ModuleType, settings: dict):
    """Move every other network and turn every other mask around: member 0 must not notice."""
    args = module.Args(**settings)
    network, target_network = make_networks(module, args)
    batch = make_batch()
    before = gradients(module, network, target_network, batch, args)
    with torch.no_grad():
        for parameter in network.net.parameters():
            parameter[1:] += torch.randn_like(parameter[1:])
    batch.mask[:, 1:] = 1 - batch.mask[:, 1:]
    after = gradients(module, network, target_network, batch, args)
    for name in before:
        assert torch.allclose(before[name][0], after[name][0], atol=1e-6), name
        assert not torch.allclose(before[name][1:], after[name][1:]), name


@pytest.mark.parametrize("member", range(5))
def test_each_bootstrap_member_learns_as_a_dqn_trained_alone(member: int):
    args = bootstrap_dqn.Args(prior_scale=0.0)
    network, target_network = make_networks(bootstrap_dqn, args)
    batch = make_batch()
    together = gradients(bootstrap_dqn, network, target_network, batch, args)
    single, single_target = make_networks(dqn, dqn.Args())
    with torch.no_grad():
        for alone, ensemble in ((single, network), (single_target, target_network)):
            for layer in (0, 2, 4):
                alone.net[layer].weight.copy_(ensemble.net[layer].weight[member])
                alone.net[layer].bias.copy_(ensemble.net[layer].bias[member, :, 0])
    kept = batch.mask[:, member].bool()
    unmasked = SimpleNamespace(**{name: value[kept] for name, value in vars(batch).items()})
    alone = gradients(dqn, single, single_target, unmasked, dqn.Args())
    for layer in (0, 2, 4):
        assert torch.allclose(together[f"{layer}.weight"][member], alone[f"{layer}.weight"], atol=1e-6)
        assert torch.allclose(together[f"{layer}.bias"][member, :, 0], alone[f"{layer}.bias"], atol=1e-6)


@pytest.mark.parametrize(("module", "settings"), PAIRED)
def test_a_masked_sample_changes_nothing_for_its_member(module: ModuleType, settings: dict):
    args = module.Args(**settings)
    network, target_network = make_networks(module, args)
    batch = make_batch()
    batch.mask[:] = 1
    batch.mask[7, 2] = 0
    before = gradients(module, network, target_network, batch, args)
    batch.reward[7] += 100
    batch.next_observation[7] *= 5
    after = gradients(module, network, target_network, batch, args)
    for name in before:
        assert torch.allclose(before[name][2], after[name][2], atol=1e-6), name
        assert not torch.allclose(before[name][1], after[name][1]), name


@pytest.mark.parametrize("module", ENSEMBLES)
def test_priors_get_no_gradient_and_never_change(module: ModuleType):
    args = module.Args(prior_scale=10.0)
    agent = make_agent(module, args)
    fixed = copy.deepcopy(agent.network.prior.state_dict())
    q_values = agent.network(make_batch().observation)
    for _ in range(3):
        agent.optimizer.zero_grad()
        loss_of(module)(agent.network, agent.target_network, make_batch(), args)[0].backward()
        agent.optimizer.step()
        module.soft_update(agent.target_network.net.parameters(), agent.network.net.parameters(), args.tau)
    assert not torch.allclose(q_values, agent.network(make_batch().observation))
    for name, value in agent.network.prior.named_parameters():
        assert value.grad is None
        assert torch.equal(value, fixed[name])
        assert torch.equal(value, agent.target_network.prior.state_dict()[name])


def test_the_prior_adds_to_the_means_and_not_to_the_variances():
    args = ivdqn.Args(prior_scale=10.0)
    network = make_agent(ivdqn, args).network
    observation = make_batch().observation
    mean, log_variance = network.mean_and_log_variance(observation)
    raw = network.net(observation.expand(5, -1, -1))
    assert torch.allclose(mean, raw[..., :ACTIONS] + 10 * network.prior(observation.expand(5, -1, -1)))
    assert torch.equal(log_variance, raw[..., ACTIONS:])
    assert torch.equal(mean, network(observation))


def test_one_network_has_no_prior():
    for module in (bootstrap_dqn, ivdqn):
        network = make_agent(module, module.Args(num_nets=1, prior_scale=10.0)).network
        observation = make_batch().observation
        assert torch.equal(network(observation), network.net(observation[None])[..., :ACTIONS])


def test_an_outlying_state_leaves_the_loss_finite():
    """Far from the data the log-variance is linear in the state, and its exponential overflows single precision."""
    args = ivdqn.Args()
    network, target_network = make_networks(ivdqn, args)
    batch = make_batch()
    batch.next_observation[3] *= 1e4
    batch.observation[5] *= 1e4
    batch.terminated[3] = 1
    with torch.no_grad():
        raw = target_network.net(batch.next_observation.expand(5, -1, -1))
        assert raw[..., ACTIONS:].exp().isinf().any()
    loss, _ = ivdqn.ivdqn_loss(network, target_network, batch, args)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in network.net.parameters())


def test_majority_vote_and_ties():
    rng = np.random.default_rng(0)
    assert {ivdqn.majority_vote(np.array([2, 0, 2, 1, 2]), rng) for _ in range(50)} == {2}
    ties = [ivdqn.majority_vote(np.array([3, 1, 1, 3, 0]), rng) for _ in range(2000)]
    assert set(ties) == {1, 3}
    assert ties.count(1) == pytest.approx(1000, abs=120)


def test_members_act_greedily_on_their_own_means():
    agent = make_agent(ivdqn, ivdqn.Args(prior_scale=5.0))
    for parameter in agent.target_network.net.parameters():
        parameter.neg_()  # whose actions are others
    observation = np.random.default_rng(0).standard_normal(INPUTS)
    actions = ivdqn.member_actions(agent, observation)
    expected = agent.network(torch.tensor(observation, dtype=torch.float32)[None])[:, 0].argmax(-1)
    assert actions.tolist() == expected.tolist()


@pytest.mark.parametrize("terminal", [False, True])
def test_target_variance_is_algorithm_2_written_naively(terminal: bool):
    """Lines 11-26 as nested loops over members and samples, in plain Python."""
    args = ivdqn.Args(prior_scale=2.0, mebs_ratio=0.8, loss_attenuation_weight=0.7, terminal_variance=terminal)
    network, target_network = make_networks(ivdqn, args)
    batch = make_batch(size=16)
    loss, tensors = ivdqn.ivdqn_loss(network, target_network, batch, args)
    total, variances = 0.0, []
    for j in range(args.num_nets):
        errors, log_variances, sigma = [], [], []
        for k in range(16):
            with torch.no_grad():
                mean, log_variance = (x[:, 0] for x in network.mean_and_log_variance(batch.observation[[k]]))
                next_mean, next_log_variance = (
                    x[:, 0] for x in target_network.mean_and_log_variance(batch.next_observation[[k]])
                )
            best = next_mean[j].argmax()
            alive = 1 - batch.terminated[k]
            target = batch.reward[k] + batch.discount[k] * alive * next_mean[j, best]
            mu = [next_mean[n, best].item() for n in range(5)]
            s2 = [next_log_variance[n, best].exp().item() for n in range(5)]
            mu_all = sum(mu) / 5
            mixture = sum(s + m**2 for s, m in zip(s2, mu, strict=True)) / 5 - mu_all**2
            variances.append(batch.discount[k].item() ** 2 * mixture if alive or terminal else 0.0)
            if batch.mask[k, j]:
                errors.append((mean[j, batch.action[k]] - target).item() ** 2)
                log_variances.append(log_variance[j, batch.action[k]].item())
                sigma.append(variances[-1])
        errors, log_variances, sigma = map(np.array, (errors, log_variances, sigma))
        xi = ivdqn.smallest_xi(sigma[None], np.ones((1, len(sigma)), bool), args.mebs_ratio)[0, 0]
        weight = 1 / (sigma + xi)
        biv = (weight * errors).sum() / weight.sum()
        attenuation = (errors / np.exp(log_variances) + log_variances).mean()
        total += biv + args.loss_attenuation_weight * attenuation
    assert tensors["target_variance"].mean().item() == pytest.approx(np.mean(variances), rel=1e-4)
    assert ivdqn.ivdqn_metrics(loss, tensors)["uncertainty/target_variance_mean"] == pytest.approx(np.mean(variances))
    assert loss.item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize(
    ("weighting", "by_hand"),
    [
        ("sunrise", lambda variance: 1 / (1 + np.exp(np.sqrt(variance))) + 0.5),
        ("uwac", lambda variance: np.minimum(2.0 / variance, 1.5)),
    ],
)
def test_sunrise_and_uwac_weights_by_hand(weighting: str, by_hand):
    args = ivdqn.Args(weighting=weighting, sunrise_temperature=1.0, uwac_beta=2.0, variance_heads=False)
    network, target_network = make_networks(ivdqn, args)
    batch = make_batch()
    loss, _ = ivdqn.ivdqn_loss(network, target_network, batch, args)
    with torch.no_grad():
        mean, next_mean = (
            network(batch.observation).double().numpy(),
            target_network(batch.next_observation).double().numpy(),
        )
    total, seen = 0.0, []
    for j in range(5):
        best = next_mean[j].argmax(-1)
        variance = next_mean[:, range(32), best].var(0)  # over all members, at member j's actions
        target = (
            batch.reward.numpy() + (batch.discount * (1 - batch.terminated)).numpy() * next_mean[j, range(32), best]
        )
        squares = (mean[j, range(32), batch.action.numpy()] - target) ** 2
        kept = batch.mask[:, j].bool().numpy()
        seen.extend(by_hand(variance))
        total += (by_hand(variance) * squares)[kept].mean()
    assert np.std(seen) > 0.05  # the weights do differ here
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_truncation_bootstraps_and_termination_does_not(discrete: ModuleType):
    """With the same transition stored once as truncated and once as terminated, only the first has a future."""
    args = discrete.Args()
    network, target_network = make_networks(discrete, args)
    batch = make_batch()
    batch.mask[:] = 1
    losses = {}
    for terminated in (0.0, 1.0):
        batch.terminated[:] = terminated
        q = network(batch.observation)
        q = q.unsqueeze(0) if discrete is dqn else q
        q = q.gather(-1, batch.action.expand(len(q), -1).unsqueeze(-1)).squeeze(-1)
        future = target_network(batch.next_observation).amax(-1) * batch.discount * (1 - terminated)
        losses[terminated] = ((q - batch.reward - future) ** 2).mean(-1).sum().item()
    plain = {"ivdqn": {"weighting": "l2", "loss_attenuation_weight": 0.0}, "sunrise_dqn": {"sunrise_temperature": 0.0}}
    args = discrete.Args(**plain.get(discrete.__name__, {}))  # whatever weighs the squared errors is off
    for terminated in (0.0, 1.0):
        batch.terminated[:] = terminated
        loss = loss_of(discrete)(network, target_network, batch, args)[0].item()
        assert loss == pytest.approx(losses[terminated], rel=1e-4)


def shared_step(module: ModuleType, args: Any, steps: int = 5) -> nn.Module:
    """A few gradient steps from the same weights (plain ones: Adam would blow up rounding where gradients vanish)."""
    torch.manual_seed(3)
    reference = make_agent(bootstrap_dqn, bootstrap_dqn.Args(prior_scale=4.0)).network
    agent = make_agent(module, args)
    with torch.no_grad():
        for own, value in zip(agent.network.net.parameters(), reference.net.parameters(), strict=True):
            own[:, : value.shape[1]] = value
    agent.network.prior.load_state_dict(reference.prior.state_dict())
    agent.target_network.load_state_dict(agent.network.state_dict())
    optimizer = torch.optim.SGD(agent.network.net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module)(agent.network, agent.target_network, make_batch(seed=step), args)[0].backward()
        optimizer.step()
        module.soft_update(agent.target_network.net.parameters(), agent.network.net.parameters(), 0.05)
    return agent.network


def test_with_huge_xi_and_no_attenuation_iv_dqn_is_bootstrap_dqn():
    plain = shared_step(bootstrap_dqn, bootstrap_dqn.Args(prior_scale=4.0))
    args = ivdqn.Args(prior_scale=4.0, xi=1e12, loss_attenuation_weight=0.0)
    observation = make_batch(seed=99).observation
    for settings in (args, ivdqn.Args(prior_scale=4.0, weighting="l2", variance_heads=False)):
        assert torch.allclose(plain(observation), shared_step(ivdqn, settings)(observation), atol=1e-5)
    weighted = shared_step(ivdqn, ivdqn.Args(prior_scale=4.0, xi=0.0, loss_attenuation_weight=0.0))
    assert not torch.allclose(plain(observation), weighted(observation), atol=1e-3)


def test_sunrise_dqn_is_iv_dqn_with_sunrise_weights_on_a_sampled_ensemble():
    settings = {"prior_scale": 4.0, "sunrise_temperature": 10.0}
    sunrise = shared_step(sunrise_dqn, sunrise_dqn.Args(**settings))
    same = shared_step(ivdqn, ivdqn.Args(**settings, weighting="sunrise", variance_heads=False))
    observation = make_batch(seed=99).observation
    assert torch.allclose(sunrise(observation), same(observation), atol=1e-5)
    assert not torch.allclose(
        sunrise(observation), shared_step(bootstrap_dqn, bootstrap_dqn.Args(prior_scale=4.0))(observation), atol=1e-4
    )


# A chain of three states: action 1 moves right, action 0 leaves; the reward is 1 on reaching the end.
GAMMA = 0.9
OPTIMAL = np.array([[0.0, GAMMA**2], [0.0, GAMMA], [0.0, 1.0]])
# With two-step returns the second action is the random behaviour's, which half of the time leaves.
TWO_STEPS = np.array([[0.0, GAMMA**2 / 2], [0.0, GAMMA / 2], [0.0, 1.0]])


class Chain(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (3,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return np.eye(3, dtype=np.float32)[0], {}

    def step(self, action):
        end = action == 0 or self.state == 2
        reward = float(action == 1 and self.state == 2)
        self.state = min(self.state + 1, 2)
        return np.eye(3, dtype=np.float32)[self.state], reward, end, False, {}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dqn", {}),
        ("bootstrap_dqn", {"prior_scale": 3.0, "mask_prob": 0.7}),
        ("sunrise_dqn", {"prior_scale": 3.0, "mask_prob": 0.7}),
        ("ivdqn", {"prior_scale": 3.0, "mask_prob": 0.7}),
        ("ivdqn", {"num_nets": 1}),
        ("ivdqn", {"variance_heads": False, "prior_scale": 3.0}),
        ("ivdqn", {"weighting": "uwac"}),
        ("dqn", {"n_step": 2}),
        ("ivdqn", {"n_step": 2, "mask_prob": 0.7}),
    ],
)
def test_q_converges_to_the_known_values_of_a_small_mdp(name: str, settings: dict):
    """Uniformly random behaviour, the script's own buffer, loss and updates; the optimal Q is known exactly."""
    module = script(name)
    args = module.Args(gamma=GAMMA, learning_rate=3e-3, buffer_size=6000, **settings)
    rng, env = np.random.default_rng(0), Chain()
    torch.manual_seed(0)
    agent = module.Agent(env.observation_space, env.action_space, args)
    for _ in range(2400):
        observation, done, steps = env.reset()[0], False, deque()
        while not done:
            action = rng.integers(2)
            next_observation, reward, done, _, _ = env.step(action)
            steps.append((observation, action, reward))
            for transition in module.n_step_transitions(steps, done, args):
                mask = {} if name == "dqn" else {"mask": rng.random(args.num_nets) < args.mask_prob}
                agent.buffer.add(**transition, next_observation=next_observation, terminated=done, **mask)
            observation = next_observation
    for step in range(600):
        agent.optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / 600)
        batch = agent.buffer.sample(64, rng)
        agent.optimizer.zero_grad()
        loss_of(module)(agent.network, agent.target_network, batch, args)[0].backward()
        agent.optimizer.step()
        module.soft_update(agent.target_network.net.parameters(), agent.network.net.parameters(), 0.02)
    with torch.no_grad():
        q_values = agent.network(torch.eye(3)).reshape(-1, 3, 2).numpy()
    known = OPTIMAL if args.n_step == 1 else TWO_STEPS
    assert np.abs(q_values - known).max() < 0.05


def test_the_replay_buffer_is_a_ring_and_samples_what_it_holds(discrete: ModuleType):
    buffer = discrete.ReplayBuffer(4, torch.device("cpu"), observation=np.zeros(2, np.float32), action=np.int64(0))
    for i in range(6):
        buffer.add(observation=np.full(2, i), action=i)
    batch = buffer.sample(500, np.random.default_rng(0))
    assert set(batch.action.tolist()) == {2, 3, 4, 5}
    assert torch.equal(batch.observation[:, 0], batch.action.float())
    other = discrete.ReplayBuffer(4, torch.device("cpu"), observation=np.zeros(2, np.float32), action=np.int64(0))
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(
        other.sample(9, np.random.default_rng(1)).action, buffer.sample(9, np.random.default_rng(1)).action
    )


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("count", [3, 4, 6])  # not full, just full, and full with the oldest in the middle
def test_a_ring_that_was_saved_goes_on_where_it_was(name: str, count: int):
    """Each new transition takes the place of the oldest."""
    buffers = [script(name).ReplayBuffer(4, torch.device("cpu"), action=np.int64(0)) for _ in range(2)]
    for action in range(count):
        buffers[0].add(action=action)
    buffers[1].load_state_dict(copy.deepcopy(buffers[0].state_dict()))
    for action in (90, 91, 92):
        for buffer in buffers:
            buffer.add(action=action)
        assert buffers[1].arrays["action"].tolist() == buffers[0].arrays["action"].tolist()
        assert buffers[1].size == buffers[0].size == min(count + action - 89, 4)
    assert sorted(buffers[1].arrays["action"].tolist()) == [count - 1, 90, 91, 92]


# ---------------------------------------------------------------------------- the options of the family, on numbers
def test_n_step_returns_by_hand(discrete: ModuleType):
    """Three-step returns over an episode of five: what each step completes, with what reward and what discount."""
    args = discrete.Args(n_step=3, gamma=0.5)
    steps, completed = deque(), []
    for t, reward in enumerate((1.0, 2.0, 4.0, 8.0, 16.0)):
        steps.append((f"s{t}", f"a{t}", reward))
        found = discrete.n_step_transitions(steps, t == 4, args)
        completed.append([(x["observation"], x["action"], x["reward"], x["discount"]) for x in found])
    assert completed == [
        [],
        [],
        [("s0", "a0", 1 + 2 / 2 + 4 / 4, 1 / 8)],  # with next observation s3
        [("s1", "a1", 2 + 4 / 2 + 8 / 4, 1 / 8)],
        # The episode ends: what is left has no more rewards than that, and ends in s5 as well.
        [("s2", "a2", 4 + 8 / 2 + 16 / 4, 1 / 8), ("s3", "a3", 8 + 16 / 2, 1 / 4), ("s4", "a4", 16, 1 / 2)],
    ]
    assert not steps  # nothing is left for the next episode


def test_one_step_returns_are_the_rewards(discrete: ModuleType):
    steps = deque([("s0", "a0", 3.0)])
    found = list(discrete.n_step_transitions(steps, False, discrete.Args(gamma=0.9)))
    assert found == [{"observation": "s0", "action": "a0", "reward": 3.0, "discount": 0.9}]
    assert not steps


def test_an_episode_shorter_than_n_is_stored_whole(discrete: ModuleType):
    args = discrete.Args(n_step=5, gamma=0.5)
    steps = deque([("s0", "a0", 1.0)])
    assert not list(discrete.n_step_transitions(steps, False, args))
    steps.append(("s1", "a1", 4.0))
    found = [(x["reward"], x["discount"]) for x in discrete.n_step_transitions(steps, True, args)]
    assert found == [(1 + 4 / 2, 1 / 4), (4.0, 1 / 2)]


def test_targets_are_discounted_by_what_is_stored_with_the_transition(discrete: ModuleType):
    """The power of gamma comes with the batch: by which gamma the loss is called makes no difference."""
    network, target_network = make_networks(discrete, discrete.Args())
    batch = make_batch()
    losses = []
    for power in (1, 4):
        batch.discount[:] = 0.9**power
        for gamma in (0.9, 0.1):
            losses.append(loss_of(discrete)(network, target_network, batch, discrete.Args(gamma=gamma))[0].item())
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


@pytest.mark.parametrize("n", [1, 4])
def test_the_target_variance_is_discounted_by_gamma_to_the_2n(n: int):
    args = ivdqn.Args()
    network, target_network = make_networks(ivdqn, args)
    batch = make_batch()
    batch.discount[:] = 1.0
    undiscounted = ivdqn.ivdqn_loss(network, target_network, batch, args)[1]["target_variance"]
    batch.discount[:] = 0.9**n
    found = ivdqn.ivdqn_loss(network, target_network, batch, args)[1]["target_variance"]
    assert torch.allclose(found, 0.9 ** (2 * n) * undiscounted)


@pytest.mark.parametrize("module", ENSEMBLES)
def test_each_members_gradient_is_clipped_as_if_it_were_alone(module: ModuleType):
    """Against torch's own function on the slices of each member; the middle norm of five is the limit."""
    args = module.Args()
    network, target_network = make_networks(module, args)
    before = gradients(module, network, target_network, make_batch(), args)
    norms = [nn.utils.get_total_norm(member_slices(before, j)).item() for j in range(5)]
    max_norm = sorted(norms)[2] * 1.001
    module.clip_each_member(list(network.net.parameters()), max_norm)
    after = {name: parameter.grad for name, parameter in network.net.named_parameters()}
    for j, norm in enumerate(norms):
        alone = [nn.Parameter(torch.zeros_like(x)) for x in member_slices(before, j)]
        for parameter, gradient in zip(alone, member_slices(before, j), strict=True):
            parameter.grad = gradient.clone()
        nn.utils.clip_grad_norm_(alone, max_norm)
        clipped = member_slices(after, j)
        assert all(torch.allclose(x, y.grad, rtol=1e-5) for x, y in zip(clipped, alone, strict=True))
        assert nn.utils.get_total_norm(clipped).item() == pytest.approx(min(norm, max_norm), rel=1e-5)
        if norm < max_norm:  # it is untouched, to the last bit
            assert all(torch.equal(x, y) for x, y in zip(clipped, member_slices(before, j), strict=True))
    assert sum(norm < max_norm for norm in norms) == 3


@pytest.mark.parametrize("module", ENSEMBLES)
def test_a_member_without_a_gradient_is_clipped_to_none(module: ModuleType):
    """As when the mask has left it no sample: a norm of 0 must not turn into nan."""
    parameters = list(make_agent(module, module.Args()).network.net.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[1] = 0
    module.clip_each_member(parameters, 0.5)
    assert all((parameter.grad[1] == 0).all() for parameter in parameters)
    assert all((parameter.grad[0] > 0).all() for parameter in parameters)


def test_evaluation_acts_by_the_majority_of_the_members_or_greedily(discrete: ModuleType):
    agent = make_agent(discrete, discrete.Args())
    rng = np.random.default_rng(0)
    seen = set()
    for observation in rng.standard_normal((40, INPUTS)).astype(np.float32):
        q_values = agent.network(torch.tensor(observation)[None]).reshape(-1, ACTIONS)  # (N, A)
        votes = q_values.argmax(-1).bincount(minlength=ACTIONS)
        action = agent.evaluation_action(observation, rng)
        assert votes[action] == votes.max()
        seen.add(action)
    assert len(seen) > 1  # not always the same


# ---------------------------------------------------------------------------- the loop
WALK_ACTIONS = 5


class Walk(gym.Env):
    """Even episodes terminate after 5 steps; odd ones never do, and meet the time limit of 7. It remembers all."""

    observation_space = gym.spaces.Box(-1000, 1000, (3,), np.float32)
    action_space = gym.spaces.Discrete(WALK_ACTIONS)

    def __init__(self):
        self.forget()

    def forget(self, episodes_before: int = 0) -> None:
        self.episodes_before = episodes_before
        self.seeds: list[int] = []
        self.episodes: list[SimpleNamespace] = []

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episodes.append(SimpleNamespace(observations=[self.observe(0)], actions=[], rewards=[]))
        return self.episodes[-1].observations[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        now = self.episodes[-1]
        now.actions.append(action)
        now.rewards.append(float(self.np_random.standard_normal()))
        now.observations.append(self.observe(len(now.actions)))
        terminated = (self.episodes_before + len(self.episodes)) % 2 == 1 and len(now.actions) == 5
        return now.observations[-1], now.rewards[-1], terminated, False, {}

    def observe(self, t: int) -> np.ndarray:
        """The number of the episode, that of the step, and noise: no observation comes twice."""
        return np.array(
            [(self.episodes_before + len(self.seeds)) / 10, t, self.np_random.standard_normal()], np.float32
        )


gym.register("Walk-v0", Walk, max_episode_steps=7)
gym.register("WalkToThreshold-v0", Walk, max_episode_steps=7, reward_threshold=-1.5)


def vector(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(network.net.parameters()).detach().clone()


def watched_train(module: ModuleType, folder: Path, **settings: Any) -> SimpleNamespace:
    """Trains on Walk, and tells what happened, and at which steps."""
    seen = SimpleNamespace(updates=[], samples=[], batches=[], stored=[], online=[], target=[])

    class WatchedBuffer(module.ReplayBuffer):
        def add(self, **transition: Any) -> None:
            seen.stored.append(transition)
            super().add(**transition)

        def sample(self, batch_size: int, rng: np.random.Generator) -> SimpleNamespace:
            seen.samples.append(batch_size)
            seen.batches.append(super().sample(batch_size, rng))
            return seen.batches[-1]

    class WatchedRun(module.Run):
        def start(self, agent: Any, rng: np.random.Generator) -> None:
            super().start(agent, rng)
            seen.run = self
            seen.agent, seen.env, seen.eval_env = agent, self.env.unwrapped, self.eval_env.unwrapped
            for env in (seen.env, seen.eval_env):
                env.forget(self.episode)  # that it was tried out
            seen.online.append(vector(agent.network))
            seen.target.append(vector(agent.target_network))
            agent.optimizer.register_step_pre_hook(self.on_update)

        def on_update(self, *_: Any) -> None:
            gradient = {name: x.grad.clone() for name, x in self.agent.network.net.named_parameters()}
            seen.updates.append((self.global_step, gradient))

        def show_progress(self, steps_to_learn: float = 0) -> None:
            """Is called at the end of each step."""
            super().show_progress(steps_to_learn)
            seen.online.append(vector(self.agent.network))
            seen.target.append(vector(self.agent.target_network))

    small = {"env_id": "Walk-v0", "runs_dir": str(folder), "run_name": f"run{len(list(folder.iterdir()))}"}
    small |= {"hidden_size": 8, "batch_size": 8, "buffer_size": 1000, "learning_starts": 20, "eval_every": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ReplayBuffer", WatchedBuffer)
        patch.setattr(module, "Run", WatchedRun)
        seen.folder = module.train(module.Args(**small | {"total_timesteps": 60} | settings))
    return seen


@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, range(21, 61)),  # the first update is the one after --learning-starts
        ({"train_frequency": 4}, range(24, 61, 4)),
        ({"train_frequency": 7, "learning_starts": 0}, range(7, 61, 7)),
        ({"learning_starts": 60}, []),
        ({"learning_starts": 0, "n_step": 4}, range(4, 61)),  # not before there is a transition
    ],
)
def test_updates_come_after_learning_starts_every_train_frequency_steps(
    discrete: ModuleType, settings: dict, due: Iterable[int], tmp_path: Path
):
    seen = watched_train(discrete, tmp_path, **settings)
    assert [step for step, _ in seen.updates] == list(due)
    assert len(seen.online) == 1 + 60
    for step in range(1, 61):
        assert torch.equal(seen.online[step], seen.online[step - 1]) == (step not in due), step


@pytest.mark.parametrize("train_frequency", [1, 3])
def test_with_tau_1_the_target_is_a_copy_when_due_and_stays_in_between(
    discrete: ModuleType, train_frequency: int, tmp_path: Path
):
    seen = watched_train(discrete, tmp_path, tau=1.0, target_network_frequency=10, train_frequency=train_frequency)
    for step in range(1, 61):
        if step in (30, 40, 50, 60):
            assert torch.equal(seen.target[step], seen.online[step]), step
            assert not torch.equal(seen.target[step], seen.target[step - 1]), step
        else:
            assert torch.equal(seen.target[step], seen.target[step - 1]), step
    assert not torch.equal(seen.target[59], seen.online[59])


def test_the_target_moves_by_tau_towards_the_network_after_each_update(discrete: ModuleType, tmp_path: Path):
    seen = watched_train(discrete, tmp_path, tau=0.2, learning_rate=0.01)
    for step in range(1, 61):
        before = seen.target[step - 1]
        tau = 0.2 if step > 20 else 0
        assert torch.allclose(seen.target[step], before + tau * (seen.online[step] - before), atol=1e-7), step
    assert not torch.allclose(seen.target[60], seen.target[20], atol=1e-3)


@pytest.mark.parametrize("truncation_terminates", [False, True])
@pytest.mark.parametrize("n", [1, 3, 6])
def test_what_is_stored_is_what_happened(discrete: ModuleType, n: int, truncation_terminates: bool, tmp_path: Path):
    """By hand from what the environment remembers: n-step returns, the true s_{t+n}, and how episodes end."""
    gamma = 0.9
    settings = {"n_step": n, "gamma": gamma, "truncation_terminates": truncation_terminates}
    seen = watched_train(discrete, tmp_path, **settings)
    expected = []
    for number, episode in enumerate(seen.env.episodes):
        length = len(episode.actions)
        finished = length == (5 if number % 2 == 0 else 7)
        for t in range(length if finished else length - n + 1):  # of the last episode, what was complete at the end
            end = min(t + n, length)
            reward = sum(gamma**i * episode.rewards[t + i] for i in range(end - t))
            terminal = end == length and finished and (number % 2 == 0 or truncation_terminates)
            observations = episode.observations[t], episode.observations[end]
            expected.append((*observations, episode.actions[t], reward, gamma ** (end - t), terminal))
    assert len(expected) > 50
    size = len(expected)
    fields = ("observation", "next_observation", "action", "reward", "discount", "terminated")
    assert seen.agent.buffer.size == size
    assert seen.agent.buffer.position == size
    for name, values in zip(fields, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(seen.agent.buffer.arrays[name][:size], np.array(values), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("module", ENSEMBLES)
@pytest.mark.parametrize(("mask_prob", "size"), [(1.0, 8), (0.9, 9), (0.5, 16), (0.3, 27)])
def test_the_minibatch_is_inflated_so_that_batch_size_samples_survive_the_mask(
    module: ModuleType, mask_prob: float, size: int, tmp_path: Path
):
    seen = watched_train(module, tmp_path, mask_prob=mask_prob, train_frequency=10)
    assert seen.samples == [size] * 4


def test_dqns_minibatch_is_batch_size(tmp_path: Path):
    assert watched_train(dqn, tmp_path, train_frequency=10).samples == [8] * 4


def test_each_minibatch_is_drawn_anew_from_all_that_is_stored(discrete: ModuleType, tmp_path: Path):
    seen = watched_train(discrete, tmp_path)
    drawn = [batch.reward.tolist() for batch in seen.batches]  # no reward comes twice
    assert len({tuple(rewards) for rewards in drawn}) == 40
    assert len(set().union(*drawn)) > 50  # of 60
    in_full_ring = watched_train(discrete, tmp_path, buffer_size=20).batches
    drawn = np.array([batch.reward.tolist() for batch in in_full_ring])
    assert np.mean(drawn[1:] == drawn[:-1]) < 0.2  # the same place in two minibatches: one in 20 by chance


@pytest.mark.parametrize("module", ENSEMBLES)
def test_masks_are_independent_draws_with_mask_prob(module: ModuleType, tmp_path: Path):
    seen = watched_train(module, tmp_path, mask_prob=0.7, total_timesteps=2000, learning_starts=2000)
    masks = np.array([transition["mask"] for transition in seen.stored])
    assert masks.shape == (2000, 5)
    assert masks.mean(0) == pytest.approx([0.7] * 5, abs=0.04)  # four standard deviations
    covariance = np.cov(masks.T.astype(float))
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 0.02
    assert np.array_equal(seen.agent.buffer.arrays["mask"], masks[-1000:])  # the ring has been round twice


@pytest.mark.parametrize("module", ENSEMBLES)
def test_no_sample_is_masked_with_mask_prob_1_or_a_single_network(module: ModuleType, tmp_path: Path):
    for settings in ({"mask_prob": 1.0}, {"num_nets": 1, "mask_prob": 0.5}):
        seen = watched_train(module, tmp_path, **settings)
        assert all(transition["mask"].all() for transition in seen.stored)
        assert set(seen.samples) == {8}


@pytest.mark.parametrize("module", ENSEMBLES)
def test_one_member_drawn_for_each_episode_acts_throughout_it(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each member has an action of its own here."""

    def own_actions(agent: Any, observation: np.ndarray) -> np.ndarray:
        return np.arange(5)

    monkeypatch.setattr(module, "member_actions", own_actions)
    greedy = {"start_epsilon": 0.0, "end_epsilon": 0.0}
    seen = watched_train(module, tmp_path, **greedy, total_timesteps=1500, learning_starts=1500)
    assert all(len(set(episode.actions)) == 1 for episode in seen.env.episodes)
    acting = [episode.actions[0] for episode in seen.env.episodes]
    assert len(acting) == 250
    assert np.bincount(acting, minlength=5) == pytest.approx([50] * 5, abs=25)  # four standard deviations


def test_without_epsilon_actions_are_greedy_at_the_current_observation(discrete: ModuleType, tmp_path: Path):
    greedy = {"start_epsilon": 0.0, "end_epsilon": 0.0, "learning_starts": 60}
    seen = watched_train(discrete, tmp_path, **greedy)
    for episode in seen.env.episodes:
        observations = torch.tensor(np.array(episode.observations[:-1]))
        best = seen.agent.network(observations).argmax(-1).reshape(-1, len(episode.actions))  # (N, steps)
        assert episode.actions in best.tolist()  # one member's, all along
    assert len({action for episode in seen.env.episodes for action in episode.actions}) > 1


def test_epsilon_decays_from_episode_to_episode_and_never_below_its_end(discrete: ModuleType, tmp_path: Path):
    seen = watched_train(discrete, tmp_path, start_epsilon=0.8, epsilon_decay=0.5, end_epsilon=0.1)
    logged = [row["charts/epsilon"] for row in read_rows(seen.folder) if "charts/epsilon" in row]
    assert len(logged) == 10
    assert logged == pytest.approx([0.8, 0.4, 0.2, *[0.1] * 7])


def test_epsilon_is_the_probability_of_a_uniformly_random_action(
    discrete: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The greedy action is 2 here; first epsilon stays 0.5, then it falls from 1 to 0 after one episode."""

    def always_2(agent: Any, observation: np.ndarray) -> Any:
        return 2 if discrete is dqn else np.full(5, 2)

    monkeypatch.setattr(discrete, "greedy_action" if discrete is dqn else "member_actions", always_2)
    constant = {"start_epsilon": 0.5, "end_epsilon": 0.5}
    no_learning = {"total_timesteps": 2000, "learning_starts": 2000}
    seen = watched_train(discrete, tmp_path, **constant, **no_learning)
    actions = np.concatenate([episode.actions for episode in seen.env.episodes])
    shares = np.bincount(actions, minlength=5) / 2000
    assert shares == pytest.approx([0.1, 0.1, 0.6, 0.1, 0.1], abs=0.04)
    falling = {"start_epsilon": 1.0, "epsilon_decay": 1e-12, "end_epsilon": 0.0}
    seen = watched_train(discrete, tmp_path, **falling)
    assert set(seen.env.episodes[0].actions) != {2}
    assert {action for episode in seen.env.episodes[1:] for action in episode.actions} == {2}


def test_each_reset_has_a_seed_of_its_own_that_depends_on_env_seed_alone(discrete: ModuleType, tmp_path: Path):
    first = watched_train(discrete, tmp_path, seed=1, eval_every=1)
    again = watched_train(discrete, tmp_path, seed=1, eval_every=1)
    same_env = watched_train(discrete, tmp_path, seed=2, env_seed=1, eval_every=1)
    other = watched_train(discrete, tmp_path, seed=2, eval_every=1)
    assert len(first.env.seeds) == 10
    assert len(first.eval_env.seeds) == 10
    seeds = [seed for seen in (first, other) for env in (seen.env, seen.eval_env) for seed in env.seeds]
    assert len(set(seeds)) == 40  # over episodes, training and evaluation, and both seeds
    for seen in (again, same_env):
        assert seen.env.seeds == first.env.seeds
        assert seen.eval_env.seeds == first.eval_env.seeds
    assert torch.equal(again.online[-1], first.online[-1])
    assert not torch.equal(same_env.online[0], first.online[0])  # the networks' seed is another
    assert np.array_equal(same_env.env.episodes[0].observations[0], first.env.episodes[0].observations[0])


def test_the_gradient_of_an_update_is_clipped_to_max_grad_norm(discrete: ModuleType, tmp_path: Path):
    """The first update of two runs that differ in nothing else: in the ensembles each member has its own norm."""
    free = watched_train(discrete, tmp_path, total_timesteps=21).updates[0][1]
    if discrete is dqn:
        groups = [list(free.values())]
    else:
        groups = [member_slices(free, j) for j in range(5)]
    max_norm = float(np.median([nn.utils.get_total_norm(group) for group in groups])) * 0.9
    clipped = watched_train(discrete, tmp_path, total_timesteps=21, max_grad_norm=max_norm).updates[0][1]
    others = [list(clipped.values())] if discrete is dqn else [member_slices(clipped, j) for j in range(5)]
    for group, other in zip(groups, others, strict=True):
        factor = min(1, max_norm / nn.utils.get_total_norm(group).item())
        assert all(torch.allclose(y, factor * x, rtol=1e-4, atol=1e-7) for x, y in zip(group, other, strict=True))
    assert not all(torch.equal(free[name], clipped[name]) for name in free)


def test_the_learning_rate_of_the_loop_is_the_argument(discrete: ModuleType, tmp_path: Path):
    """Adam's first step moves each parameter that has a gradient by the learning rate."""
    seen = watched_train(discrete, tmp_path, total_timesteps=21, learning_rate=0.004)
    moved = (seen.online[21] - seen.online[20]).abs()
    assert moved.max().item() == pytest.approx(0.004, rel=1e-3)


def test_an_evaluation_draws_from_its_seed_alone(discrete: ModuleType):
    """Ties of the vote are broken by these numbers."""
    draws = []

    class Drawer:
        def evaluation_action(self, observation: np.ndarray, rng: np.random.Generator) -> int:
            draws[-1].append(rng.random())
            return 0

    env = gym.make("CartPole-v1")
    for seed in (1, 1, 2):
        draws.append([])
        discrete.evaluation_return(Drawer(), env, seed)
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_adam_has_its_own_constants(discrete: ModuleType):
    (group,) = make_agent(discrete, discrete.Args()).optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)


@pytest.mark.parametrize(
    ("train_frequency", "steps"), [(1, [21, 28, 35, 42, 49, 56]), (2, [28, 42, 56])]
)  # of updates, those at a multiple of --log-every
def test_metrics_of_the_updates_are_logged_every_so_many_steps(
    discrete: ModuleType, train_frequency: int, steps: list[int], tmp_path: Path
):
    seen = watched_train(discrete, tmp_path, log_every=7, train_frequency=train_frequency)
    rows = [row for row in read_rows(seen.folder) if "losses/loss" in row]
    assert [row["global_step"] for row in rows] == steps


def test_episodes_are_logged_with_their_returns_and_lengths(discrete: ModuleType, tmp_path: Path):
    seen = watched_train(discrete, tmp_path)
    rows = [row for row in read_rows(seen.folder) if "charts/episode" in row]
    assert [row["global_step"] for row in rows] == [5, 12, 17, 24, 29, 36, 41, 48, 53, 60]
    assert [row["charts/episode"] for row in rows] == list(range(1, 11))
    assert [row["charts/episodic_length"] for row in rows] == [5, 7] * 5
    returns = [sum(episode.rewards) for episode in seen.env.episodes]
    assert [row["charts/episodic_return"] for row in rows] == pytest.approx(returns)


def test_an_episode_of_evaluation_every_so_many_episodes(discrete: ModuleType, tmp_path: Path):
    seen = watched_train(discrete, tmp_path, eval_every=3, seed=4)
    rows = [row for row in read_rows(seen.folder) if "charts/eval_return" in row]
    assert [row["charts/episode"] for row in rows] == [3, 6, 9]
    returns = [sum(episode.rewards) for episode in seen.eval_env.episodes]
    assert [row["charts/eval_return"] for row in rows] == pytest.approx(returns)
    means = [np.mean(returns[: n + 1]) for n in range(3)]
    assert [row["charts/eval_return_mean100"] for row in rows] == pytest.approx(means)
    seeds = [int(np.random.SeedSequence((4, episode, 1)).generate_state(1)[0]) for episode in (3, 6, 9)]
    assert seen.eval_env.seeds == seeds


def test_the_mean_of_evaluations_is_that_of_the_last_100(tmp_path: Path):
    settings = {"total_timesteps": 630, "learning_starts": 10_000}  # 105 episodes of 5 or 7 steps
    seen = watched_train(dqn, tmp_path, eval_every=1, **settings)
    rows = [row for row in read_rows(seen.folder) if "charts/eval_return" in row]
    returns = [sum(episode.rewards) for episode in seen.eval_env.episodes]
    assert len(rows) == len(returns) == 105
    for number, row in enumerate(rows, start=1):
        assert row["charts/eval_return_mean100"] == pytest.approx(np.mean(returns[:number][-100:]))


def test_evaluation_episodes_are_acted_by_the_evaluation_policy(discrete: ModuleType, tmp_path: Path):
    """Without learning, the network at the end is the one that acted."""
    seen = watched_train(discrete, tmp_path, eval_every=1, learning_starts=60)
    for episode in seen.eval_env.episodes:
        for observation, action in zip(episode.observations[:-1], episode.actions, strict=True):
            q_values = seen.agent.network(torch.tensor(observation)[None]).reshape(-1, WALK_ACTIONS)
            votes = q_values.argmax(-1).bincount(minlength=WALK_ACTIONS)
            assert votes[action] == votes.max()


@pytest.mark.parametrize(("solved_at", "threshold"), [(None, -1.5), (0.5, 0.5)])
def test_a_run_is_solved_at_the_argument_or_the_environments_threshold(
    discrete: ModuleType, solved_at: float | None, threshold: float, tmp_path: Path
):
    seen = watched_train(discrete, tmp_path, env_id="WalkToThreshold-v0", solved_at=solved_at)
    assert seen.run.solved_at == threshold
    seen.run.eval_returns = [threshold] * 99
    assert not seen.run.is_solved()
    seen.run.eval_returns = [threshold + 1, threshold - 1] * 50
    assert seen.run.is_solved()
    seen.run.eval_returns = [threshold + 1, threshold - 1.01] * 50
    assert not seen.run.is_solved()


def test_a_loss_that_is_not_finite_ends_the_run(discrete: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def infinite_loss(network: nn.Module, *_: Any) -> tuple[Tensor, dict]:
        return next(network.parameters()).sum() * torch.inf, {}

    monkeypatch.setattr(discrete, f"{discrete.__name__}_loss", infinite_loss)
    with pytest.raises(discrete.RunError, match="the loss is not finite at step 21"):
        watched_train(discrete, tmp_path)


# ---------------------------------------------------------------------------- checkpoints
def test_a_run_in_two_parts_is_the_run_in_one(discrete: ModuleType, tmp_path: Path):
    """Ten episodes, or six and then four, with a ring that has been round and an odd step between two targets."""
    common = {"total_timesteps": 1000, "buffer_size": 25, "eval_every": 1, "target_network_frequency": 3}
    common |= {} if discrete is dqn else {"mask_prob": 0.7}
    whole = watched_train(discrete, tmp_path, run_name="whole", total_episodes=10, **common)
    first = watched_train(discrete, tmp_path, run_name="parts", total_episodes=6, **common)
    second = watched_train(discrete, tmp_path, run_name="parts", total_episodes=10, resume=True, **common)
    assert whole.agent.buffer.position not in (0, 25)
    assert torch.equal(first.online[-1], whole.online[36])
    assert second.env.seeds == whole.env.seeds[6:]
    assert second.eval_env.seeds == whole.eval_env.seeds[6:]
    for ours, theirs in ((second.online, whole.online), (second.target, whole.target)):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs[36:], strict=True))
    for name, array in whole.agent.buffer.arrays.items():
        assert np.array_equal(second.agent.buffer.arrays[name], array), name
    assert timeless(second.folder) == timeless(whole.folder)


def test_a_warm_start_takes_both_networks_which_stay_until_learning_starts(discrete: ModuleType, tmp_path: Path):
    first = watched_train(discrete, tmp_path, tau=0.01, learning_rate=0.01)
    assert not torch.equal(first.target[-1], first.online[-1])
    second = watched_train(discrete, tmp_path, warm_start=str(first.folder), tau=0.01)
    for step in range(21):
        assert torch.equal(second.online[step], first.online[-1])
        assert torch.equal(second.target[step], first.target[-1])
    assert not torch.equal(second.online[21], first.online[-1])
    assert not torch.equal(second.target[21], first.target[-1])


def test_a_checkpoint_takes_its_place_when_it_and_its_rows_are_on_the_disk(
    discrete: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file that has been flushed and synced has its whole size then; a renamed file stays the same inode."""
    events = []
    fsync = os.fsync
    replace = os.replace

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        events.append((status.st_ino, status.st_size))

    def watched_replace(source: Path, target: Path) -> None:
        replace(source, target)
        synced = set(events)
        events.clear()
        status = os.stat(target)
        assert (status.st_ino, status.st_size) in synced, target
        if Path(target).name == "checkpoint.pt":
            rows = Path(target).with_name("metrics.jsonl").stat()
            assert (rows.st_ino, read_checkpoint(Path(target).parent)["metrics_size"]) in synced
            replaced.append(rows.st_size)

    replaced = []
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    seen = watched_train(discrete, tmp_path, checkpoint_every=20)
    assert len(replaced) == 3
    assert replaced == sorted(set(replaced))
    assert not list(seen.folder.glob("*.tmp"))
