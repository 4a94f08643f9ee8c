"""The learning steps and the loop of the continuous family, against closed forms, plain loops and one another."""

import copy
import functools
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import timeless
from torch import Tensor, nn

import ensemble_sac
import ivsac
import sac
import sunrise

INPUTS, ACTIONS, SIZE = 5, 2, 24
LEARNING_RATE = 0.01  # of the plain gradient steps
OBSERVATION_SPACE = gym.spaces.Box(-1, 1, (INPUTS,))
ACTION_SPACE = gym.spaces.Box(-1, 1, (ACTIONS,))
FAMILY = [sac, ensemble_sac, sunrise, ivsac]
ENSEMBLES = [
    (ensemble_sac, {}),
    (sunrise, {}),
    (ivsac, {}),
    (ivsac, {"variance_heads": False}),
    (ivsac, {"weighting": "l2"}),
    (ivsac, {"weighting": "uwac"}),
    (ivsac, {"weighting": "sunrise", "sunrise_temperature": 1.0}),
]
WEIGHTINGS = [
    {"mebs_ratio": 0.6},
    {"xi": 0.05},
    {"weighting": "l2"},
    {"weighting": "sunrise", "sunrise_temperature": 1.0},  # with a higher one, all weights would be 1/2
    {"weighting": "uwac", "uwac_beta": 1.58},  # about half of the weights are at their cap
]


def make_args(module: ModuleType, **settings: Any) -> Any:
    return module.Args(**{"hidden_size": 16, "buffer_size": 1000, "num_threads": 1, "cuda": False} | settings)


def num_members(args: Any) -> int:
    return getattr(args, "num_nets", 1)


def make_agent(module: ModuleType, args: Any, optimizer: type = torch.optim.SGD, lr: float = LEARNING_RATE) -> Any:
    """The script's agent, with plain gradient steps (Adam blows up rounding where gradients vanish), with a target
    critic of its own and a temperature for each member.
    """
    torch.manual_seed(0)
    agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, args)
    agent.actor_optimizer = optimizer(agent.actor.parameters(), lr=lr)
    agent.critic_optimizer = optimizer(agent.critic.parameters(), lr=lr)
    agent.alpha_optimizer = optimizer(agent.temperature.parameters(), lr=lr)
    with torch.no_grad():
        for parameter in agent.target_critic.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        agent.temperature.log_alpha += torch.linspace(-1.0, 0.5, num_members(args)).unsqueeze(1)
    return agent


def make_batch(num_nets: int = 5, mask_prob: float = 0.7, seed: int = 0) -> SimpleNamespace:
    rng = np.random.default_rng(seed)
    arrays = {
        "observation": rng.uniform(-1, 1, (SIZE, INPUTS)),
        "action": rng.uniform(-1, 1, (SIZE, ACTIONS)),
        "next_observation": rng.uniform(-1, 1, (SIZE, INPUTS)),
        "reward": rng.uniform(0, 1, SIZE),
        "terminated": rng.uniform(0, 1, SIZE) < 0.2,
    }
    batch = SimpleNamespace(**{name: torch.tensor(array).float() for name, array in arrays.items()})
    batch.mask = torch.tensor(rng.uniform(0, 1, (SIZE, num_nets)) < mask_prob).float()
    return batch


def make_noise(num_nets: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(2, num_nets, SIZE, ACTIONS, generator=torch.Generator().manual_seed(seed))


def update(module: ModuleType, agent: Any, batch: SimpleNamespace, args: Any, noise: Tensor) -> dict[str, float]:
    """One update in which the policies draw the given noise, for a' first, then for a; and its metrics."""
    draws = iter(noise)

    def given_noise(like: Tensor) -> Tensor:
        return next(draws).reshape(like.shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", given_noise)
        results = getattr(module, f"{module.__name__}_update")(agent, batch, args)
    assert next(draws, None) is None
    return getattr(module, f"{module.__name__}_metrics")(*results)


def squashed(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The action that a policy takes with this noise, and its log-probability, by the change of variables."""
    std = log_std.double().exp()
    raw = mean.double() + std * noise
    log_prob = torch.distributions.Normal(mean.double(), std).log_prob(raw) - torch.log(1 - raw.tanh() ** 2)
    return raw.tanh().float(), log_prob.sum(-1).float()


def member_networks(agent: Any, member: int) -> dict[str, nn.Module]:
    if isinstance(agent, sac.SAC):
        networks = {"actor": agent.actor.net}
        for twin in (0, 1):
            networks[f"critic{twin}"] = agent.critic.twins[twin]
            networks[f"target{twin}"] = agent.target_critic.twins[twin]
        return networks
    networks = {"actor": agent.actor.nets[member]}
    for twin in (0, 1):
        networks[f"critic{twin}"] = agent.critic.twins[twin][member]
        networks[f"target{twin}"] = agent.target_critic.twins[twin][member]
    return networks


def member_state(agent: Any, member: int = 0) -> dict[str, Tensor]:
    """A copy of all that a member learns, by name."""
    found = {"log_alpha": agent.temperature.log_alpha[member].detach().clone()}
    for name, net in member_networks(agent, member).items():
        for key, value in net.state_dict().items():
            found[f"{name}.{key}"] = value.clone()
    return found


@torch.no_grad()
def lower_twins(critic: nn.Module, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Each member's lower twin at its own action, and the predictive variance of those twins there."""
    mean, lower = critic(observation, action).min(1)
    return mean, ivsac.predictive_variance(critic, observation, action, lower)


def naive_weights(variance: Tensor, args: Any) -> Tensor:
    """The weights of one member's unmasked samples."""
    if args.weighting == "l2":
        return torch.ones_like(variance) / len(variance)
    if args.weighting == "sunrise":
        return (torch.sigmoid(-variance.sqrt() * args.sunrise_temperature) + 0.5) / len(variance)
    if args.weighting == "uwac":
        return (args.uwac_beta / variance).clamp(max=1.5) / len(variance)
    xi = args.xi
    if xi is None:
        xi = ivsac.smallest_xi(variance.double().numpy()[None], np.ones((1, len(variance)), bool), args.mebs_ratio)
        xi = float(xi[0, 0])
    weight = 1 / (variance + xi)
    return weight / weight.sum()


# ---------------------------------------------------------------------------- agents
@pytest.mark.parametrize("module", FAMILY)
def test_each_optimiser_has_its_own_parameters_and_learning_rate(module: ModuleType):
    args = make_args(module, policy_lr=0.1, q_lr=0.2, alpha_lr=0.3)
    agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, args)
    parts = [
        (agent.actor_optimizer, agent.actor, 0.1),
        (agent.critic_optimizer, agent.critic, 0.2),
        (agent.alpha_optimizer, agent.temperature, 0.3),
    ]
    for optimizer, network, lr in parts:
        (group,) = optimizer.param_groups
        assert isinstance(optimizer, torch.optim.Adam)
        assert group["lr"] == lr
        assert {id(parameter) for parameter in group["params"]} == {id(p) for p in network.parameters()}


@pytest.mark.parametrize("module", FAMILY)
def test_the_target_critic_starts_as_a_copy_that_has_no_gradient(module: ModuleType):
    agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, make_args(module))
    for target, online in zip(agent.target_critic.parameters(), agent.critic.parameters(), strict=True):
        assert torch.equal(target, online)
        assert target.data_ptr() != online.data_ptr()
        assert online.requires_grad
        assert not target.requires_grad


@pytest.mark.parametrize("module", FAMILY)
def test_all_networks_of_an_agent_start_different(module: ModuleType):
    args = make_args(module)
    agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, args)
    critics = []
    actors = []
    for member in range(num_members(args)):
        networks = member_networks(agent, member)
        actors.append(networks["actor"][0].weight)
        critics += [networks["critic0"][0].weight, networks["critic1"][0].weight]
    for weights in (actors, critics):
        assert len({weight.sum().item() for weight in weights}) == len(weights)


@pytest.mark.parametrize("module", FAMILY)
def test_the_temperature_starts_at_1_if_tuned_and_at_alpha_otherwise(module: ModuleType):
    for autotune, alpha in ((True, 1.0), (False, 0.3)):
        args = make_args(module, autotune=autotune, alpha=0.3)
        agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, args)
        assert agent.temperature.log_alpha.shape == (num_members(args), 1)
        assert agent.temperature.log_alpha.exp().flatten().tolist() == pytest.approx([alpha] * num_members(args))


@pytest.mark.parametrize("module", FAMILY)
def test_the_buffer_holds_these_fields(module: ModuleType):
    agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, make_args(module, buffer_size=7))
    fields = {
        "observation": ((7, INPUTS), np.float32),
        "action": ((7, ACTIONS), np.float32),
        "next_observation": ((7, INPUTS), np.float32),
        "reward": ((7,), np.float32),
        "terminated": ((7,), np.float32),
    }
    if module is not sac:
        fields["mask"] = ((7, 5), np.float32)
    assert {name: (array.shape, array.dtype.type) for name, array in agent.buffer.arrays.items()} == fields


@pytest.mark.parametrize("module", FAMILY[1:])
def test_a_single_member_has_no_mask(module: ModuleType):
    assert module.Args(num_nets=1, mask_prob=0.5).mask_prob == 1
    assert module.Args(num_nets=2, mask_prob=0.5).mask_prob == 0.5


# ---------------------------------------------------------------------------- policies and critics
def test_log_probability_is_that_of_the_transformed_normal():
    torch.manual_seed(0)
    mean, log_std = 0.5 * torch.randn(2, 4, 30, ACTIONS).double()
    action, log_prob = ivsac.tanh_gaussian(mean, log_std)
    policy = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean, log_std.exp()),
        torch.distributions.transforms.TanhTransform(cache_size=1),
    )
    assert torch.allclose(log_prob, policy.log_prob(action).sum(-1), atol=1e-8)


def test_a_policys_samples_have_its_mean_and_standard_deviation():
    torch.manual_seed(0)
    mean = torch.tensor([0.3, -0.2]).expand(20_000, 2)
    log_std = torch.tensor([-1.0, -2.0]).expand(20_000, 2)
    raw = ivsac.tanh_gaussian(mean, log_std)[0].atanh()
    assert raw.mean(0).tolist() == pytest.approx([0.3, -0.2], abs=0.01)
    assert raw.std(0).tolist() == pytest.approx([math.exp(-1), math.exp(-2)], rel=0.03)


@pytest.mark.parametrize("module", [sac, ivsac])
def test_log_std_is_clamped_at_minus_20_and_2_and_saturated_actions_stay_finite(module: ModuleType):
    agent = make_agent(module, make_args(module))
    for low, high, expected in ((-99.0, 99.0, (-20.0, 2.0)), (-19.5, 1.5, (-19.5, 1.5))):
        with torch.no_grad():
            for net in (net for net in agent.actor.modules() if isinstance(net, nn.Sequential)):
                net[4].weight.zero_()
                net[4].bias[:] = torch.tensor([50.0, -50.0, low, high])
        mean, log_std = agent.actor.mean_and_log_std(torch.ones(100, INPUTS))
        assert torch.equal(log_std, torch.tensor(expected).expand_as(log_std))
        assert torch.equal(mean, torch.tensor([50.0, -50.0]).expand_as(mean))
        action, log_prob = agent.actor.sample(torch.ones(100, INPUTS))
        assert log_prob.isfinite().all()
        assert action.abs().max() <= 1


def test_log_variances_are_clamped_at_minus_60_and_60_and_means_are_not():
    agent = make_agent(ivsac, make_args(ivsac))
    batch = make_batch()
    for log_variance, expected in ((100.0, 60.0), (59.5, 59.5), (-59.5, -59.5), (-100.0, -60.0)):
        with torch.no_grad():
            for twins in agent.critic.twins:
                for net in twins:
                    net[4].weight.zero_()
                    net[4].bias[:] = torch.tensor([1000.0, log_variance])
        mean, found = agent.critic.mean_and_log_variance(batch.observation, batch.action)
        assert torch.equal(found, torch.full((5, 2, SIZE), expected))
        assert torch.equal(mean, torch.full((5, 2, SIZE), 1000.0))


@pytest.mark.parametrize("module", [ensemble_sac, ivsac])
def test_the_members_critics_take_one_action_or_each_its_own(module: ModuleType):
    agent = make_agent(module, make_args(module))
    batch = make_batch()
    actions = torch.rand(5, SIZE, ACTIONS)
    found = agent.critic(batch.observation, actions)
    shared = agent.critic(batch.observation, batch.action)
    assert found.shape == shared.shape == (5, 2, SIZE)
    for twin in (0, 1):
        for member in range(5):
            net = agent.critic.twins[twin][member]
            own = net(torch.cat((batch.observation, actions[member]), -1))[:, 0]
            assert torch.allclose(found[member, twin], own, atol=1e-6)
            at_shared = net(torch.cat((batch.observation, batch.action), -1))[:, 0]
            assert torch.allclose(shared[member, twin], at_shared, atol=1e-6)


def test_the_grid_is_a_plain_double_loop_over_critics_and_actions():
    agent = make_agent(ivsac, make_args(ivsac))
    batch = make_batch()
    action = agent.actor.sample(batch.observation)[0].detach()  # (N, K, A)
    mean, variance = lower_twins(agent.critic, batch.observation, action)
    twins_used = set()
    for j in range(5):
        x = torch.cat((batch.observation, action[j]), -1)
        mu = torch.zeros(5, 2, SIZE)
        s2 = torch.zeros(5, 2, SIZE)
        for n in range(5):  # Algorithm 4, for both twins
            for twin in (0, 1):
                net = agent.critic.twins[twin][n]
                hidden = torch.relu(x @ net[0].weight.T + net[0].bias)
                hidden = torch.relu(hidden @ net[2].weight.T + net[2].bias)
                output = hidden @ net[4].weight.T + net[4].bias
                mu[n, twin] = output[:, 0]
                s2[n, twin] = output[:, 1].exp()
        mixture = (s2 + mu**2).mean(0) - mu.mean(0) ** 2
        for k in range(SIZE):
            lower = int(mu[j, :, k].argmin())  # member j's own twins decide
            twins_used.add(lower)
            assert mean[j, k].item() == pytest.approx(mu[j, lower, k].item(), abs=1e-5)
            assert variance[j, k].item() == pytest.approx(mixture[lower, k].item(), abs=1e-4)
    assert twins_used == {0, 1}


def test_a_sampled_ensembles_variance_is_that_of_its_means():
    agent = make_agent(ivsac, make_args(ivsac, variance_heads=False))
    batch = make_batch()
    action = agent.actor.sample(batch.observation)[0].detach()
    _, variance = lower_twins(agent.critic, batch.observation, action)
    all_mean = torch.stack([agent.critic(batch.observation, a) for a in action])  # (J, N, 2, K)
    own = torch.stack([all_mean[j, j] for j in range(5)])
    expected = all_mean.var(1, unbiased=False).gather(1, own.argmin(1, keepdim=True)).squeeze(1)
    assert torch.allclose(variance, expected, atol=1e-6)


@pytest.mark.parametrize("module", FAMILY)
def test_a_gradient_step_is_of_the_optimisers_own_parameters(module: ModuleType):
    agent = make_agent(module, make_args(module))
    batch = make_batch()
    actors = flat(agent.actor)
    critics = flat(agent.critic)
    action, _ = agent.actor.sample(batch.observation)
    module.minimize(agent.actor_optimizer, agent.critic(batch.observation, action).sum())
    assert not torch.equal(flat(agent.actor), actors)
    assert torch.equal(flat(agent.critic), critics)
    assert all(parameter.grad is None for parameter in agent.critic.parameters())


# ---------------------------------------------------------------------------- acting
@pytest.mark.parametrize("module", FAMILY[1:])
def test_ucb_chooses_by_mean_and_spread_over_all_critics(module: ModuleType):
    observation = np.linspace(-1, 1, INPUTS)
    x = torch.tensor(observation, dtype=torch.float32)[None]
    for ucb in (0.5, 20.0):
        args = make_args(module, ucb=ucb)
        agent = make_agent(module, args)
        chosen = set()
        for seed in range(30):
            torch.manual_seed(seed)
            action, choice = module.ucb_action(agent, observation, 0, args)
            member = choice["exploration/acting_member"]
            torch.manual_seed(seed)
            actions = agent.actor.sample(x)[0][:, 0].detach()
            scores = []
            spreads = []
            for a in actions:
                values = agent.critic(x, a[None]).flatten().detach().numpy()
                assert len(values) == 10
                scores.append(values.mean() + ucb * values.std())
                spreads.append(values.std())
            assert member == int(np.argmax(scores))
            assert choice["exploration/ucb_std"] == pytest.approx(spreads[member], rel=1e-3)
            assert action.tolist() == pytest.approx(actions[member].tolist())
            chosen.add(member)
        assert len(chosen) > 1


@pytest.mark.parametrize("module", FAMILY[1:])
def test_without_ucb_the_given_member_acts(module: ModuleType):
    args = make_args(module, ucb=0.0)
    agent = make_agent(module, args)
    for member in range(5):
        torch.manual_seed(member)
        action, choice = module.ucb_action(agent, np.ones(INPUTS), member, args)
        torch.manual_seed(member)
        expected = agent.actor.sample(torch.ones(1, INPUTS))[0][member, 0]
        assert choice["exploration/acting_member"] == member
        assert action.tolist() == pytest.approx(expected.tolist())


def test_sac_acts_by_a_sample_of_its_policy():
    agent = make_agent(sac, make_args(sac))
    torch.manual_seed(0)
    action = sac.policy_action(agent, np.ones(INPUTS))
    torch.manual_seed(0)
    expected = agent.actor.sample(torch.ones(1, INPUTS))[0][0]
    assert action.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("module", FAMILY)
def test_evaluation_averages_the_deterministic_actions(module: ModuleType):
    args = make_args(module)
    agent = make_agent(module, args)
    modes = []
    for member in range(num_members(args)):
        output = member_networks(agent, member)["actor"](torch.ones(INPUTS))
        modes.append(output[:ACTIONS].tanh().detach().numpy())
    action = agent.evaluation_action(np.ones(INPUTS), np.random.default_rng(0))
    assert action.tolist() == pytest.approx(np.mean(modes, 0).tolist(), abs=1e-6)


# ---------------------------------------------------------------------------- updates
@pytest.mark.parametrize(("module", "settings"), ENSEMBLES)
def test_a_members_step_depends_on_its_own_networks_and_mask_only(module: ModuleType, settings: dict):
    """Others enter through the variance alone: with the critics held, move the other policies and masks."""
    args = make_args(module, **settings)
    batch = make_batch()
    noise = make_noise()
    agent = make_agent(module, args)
    before = member_state(agent)
    update(module, agent, batch, args, noise)
    alone = member_state(agent)
    agent = make_agent(module, args)
    with torch.no_grad():
        for parameter in agent.actor.nets[1:].parameters():
            parameter += torch.randn_like(parameter)
        agent.temperature.log_alpha[1:] += 1
    batch.mask[:, 1:] = 1 - batch.mask[:, 1:]
    update(module, agent, batch, args, noise)
    for name, value in member_state(agent).items():
        assert torch.allclose(value, alone[name], atol=1e-6), name
        assert not torch.allclose(before[name], alone[name], atol=1e-9), name


@pytest.mark.parametrize(("num_nets", "member"), [(1, 0), *((5, member) for member in range(5))])
def test_each_ensemble_members_step_is_that_of_sac_trained_alone(num_nets: int, member: int):
    args = make_args(ensemble_sac, num_nets=num_nets)
    single_args = make_args(sac)
    agent = make_agent(ensemble_sac, args)
    single = make_agent(sac, single_args)
    for name, net in member_networks(single, 0).items():
        net.load_state_dict(member_networks(agent, member)[name].state_dict())
    with torch.no_grad():
        single.temperature.log_alpha[0] = agent.temperature.log_alpha[member]
    batch = make_batch(num_nets)
    noise = make_noise(num_nets)
    kept = batch.mask[:, member].bool()
    update(ensemble_sac, agent, batch, args, noise)
    alone = SimpleNamespace(**{name: value[kept] for name, value in vars(batch).items()})
    update(sac, single, alone, single_args, noise[:, member, kept])
    together = member_state(agent, member)
    for name, value in member_state(single).items():
        assert torch.allclose(together[name], value, atol=1e-6), name


@pytest.mark.parametrize("settings", [{"xi": 1e12}, {"weighting": "l2"}])
def test_with_huge_xi_and_no_attenuation_iv_sac_is_ensemble_sac(settings: dict):
    plain_args = make_args(ensemble_sac)
    args = make_args(ivsac, loss_attenuation_weight=0.0, **settings)
    plain = make_agent(ensemble_sac, plain_args)
    agent = make_agent(ivsac, args)
    with torch.no_grad():
        for member in range(5):
            networks = member_networks(agent, member)
            for part, net in member_networks(plain, member).items():
                for name, value in net.named_parameters():
                    networks[part].get_parameter(name)[: len(value)] = value  # critics: their means
    for step in range(3):
        update(ensemble_sac, plain, make_batch(seed=step), plain_args, make_noise(seed=step))
        update(ivsac, agent, make_batch(seed=step), args, make_noise(seed=step))
    for member in range(5):
        ours = member_state(agent, member)
        for name, value in member_state(plain, member).items():
            assert torch.allclose(ours[name][: len(value)], value, atol=1e-5), name


def test_an_iv_sac_member_alone_is_a_variance_network():
    """A mixture of one has no spread: its variance is what the lower twin predicts."""
    args = make_args(ivsac, num_nets=1)
    agent = make_agent(ivsac, args)
    batch = make_batch(1)
    action = agent.actor.sample(batch.observation)[0].detach()
    mean, log_variance = agent.critic.mean_and_log_variance(batch.observation, action)
    lower = mean.argmin(1, keepdim=True)
    expected = log_variance.exp().gather(1, lower).squeeze(1)
    assert torch.allclose(lower_twins(agent.critic, batch.observation, action)[1], expected, rtol=1e-5)


@pytest.mark.parametrize("settings", WEIGHTINGS)
def test_the_actor_loss_is_equation_15_and_its_weights_carry_no_gradient(settings: dict):
    """The policies' gradient with the weights held constant by hand is the one that the update takes."""
    args = make_args(ivsac, **settings)
    agent = make_agent(ivsac, args)
    batch = make_batch()
    noise = make_noise()
    reference = copy.deepcopy(agent)
    metrics = update(ivsac, agent, batch, args, noise)
    action, log_prob = squashed(*reference.actor.mean_and_log_std(batch.observation), noise[1])
    alpha = reference.temperature.log_alpha.detach().exp()
    q = reference.critic(batch.observation, action).amin(1)
    variance = lower_twins(reference.critic, batch.observation, action)[1]
    loss = 0.0
    for j in range(5):
        kept = batch.mask[:, j].bool()
        weight = naive_weights(variance[j][kept], args)
        assert (len(weight.unique()) > 1) == (args.weighting != "l2")  # else no gradient could pass through them
        loss = loss + (weight * (alpha[j] * log_prob[j] - q[j])[kept]).sum()
    assert metrics["losses/actor"] == pytest.approx(loss.item(), rel=1e-4)
    gradient = torch.autograd.grad(loss, list(reference.actor.parameters()))
    for old, new, grad in zip(reference.actor.parameters(), agent.actor.parameters(), gradient, strict=True):
        assert torch.allclose(old - LEARNING_RATE * grad, new, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("module", FAMILY)
def test_the_actors_step_leaves_the_critics_as_they_are(module: ModuleType):
    args = make_args(module)
    agent = make_agent(module, args)
    agent.critic_optimizer = torch.optim.SGD(agent.critic.parameters(), lr=0.0)
    before = member_state(agent)
    update(module, agent, make_batch(), args, make_noise(num_members(args)))
    for name, value in member_state(agent).items():
        moved = not torch.equal(before[name], value)
        assert moved == (not name.startswith("critic")), name
    assert all(parameter.requires_grad for parameter in agent.critic.parameters())


@pytest.mark.parametrize("module", FAMILY)
def test_the_temperature_moves_towards_the_target_entropy(module: ModuleType):
    """By the surplus of entropy over -|A|: with more, policies cool down, with less, they warm up; a fixed
    temperature stays.
    """
    batch = make_batch()
    for log_std, direction in ((0.5, -1), (-6.0, 1)):
        for autotune in (True, False):
            args = make_args(module, autotune=autotune)
            agent = make_agent(module, args)
            noise = make_noise(num_members(args))
            before = agent.temperature.log_alpha.detach().clone()
            mean = torch.zeros(SIZE, ACTIONS)
            with torch.no_grad():
                for member in range(num_members(args)):
                    last = member_networks(agent, member)["actor"][4]
                    last.weight.zero_()
                    last.bias[:] = torch.tensor([0.0] * ACTIONS + [log_std] * ACTIONS)
            update(module, agent, batch, args, noise)
            moved = (agent.temperature.log_alpha.detach() - before).flatten()
            for member in range(num_members(args)):
                kept = slice(None) if module is sac else batch.mask[:, member].bool()
                log_prob = squashed(mean, torch.full_like(mean, log_std), noise[1, member])[1][kept]
                surplus = (-log_prob).mean() - (-ACTIONS)  # of entropy
                assert surplus.sign() == -direction
                expected = -LEARNING_RATE * surplus.item() if autotune else 0.0
                assert moved[member].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("module", FAMILY)
def test_a_step_is_taken_with_the_temperature_before_it(module: ModuleType):
    """A huge step of the temperature changes neither the actors' nor the critics' step beside it."""
    args = make_args(module)
    states = []
    for lr in (0.0, 1.0):
        agent = make_agent(module, args)
        agent.alpha_optimizer = torch.optim.SGD(agent.temperature.parameters(), lr=lr)
        metrics = update(module, agent, make_batch(), args, make_noise(num_members(args)))
        start = torch.linspace(-1.0, 0.5, num_members(args)).exp().mean().item()
        assert metrics["losses/alpha"] == pytest.approx(start)
        states.append(member_state(agent))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) == (name != "log_alpha"), name


def test_sacs_target_has_the_entropy_and_truncation_bootstraps_where_termination_does_not():
    for terminated in (0.0, 1.0):
        args = make_args(sac, gamma=0.8)
        agent = make_agent(sac, args)
        batch = make_batch()
        noise = make_noise(1)
        batch.terminated[:] = terminated
        with torch.no_grad():
            alpha = agent.temperature.log_alpha.exp().item()
            action, log_prob = squashed(*agent.actor.mean_and_log_std(batch.next_observation), noise[0, 0])
            future = agent.target_critic(batch.next_observation, action).amin(0) - alpha * log_prob
            target = batch.reward + 0.8 * (1 - terminated) * future
            loss = sum(((q - target) ** 2).mean() for q in agent.critic(batch.observation, batch.action))
        metrics = update(sac, agent, batch, args, noise)
        assert metrics["losses/critic"] == pytest.approx(loss.item(), rel=1e-5)


def test_sunrises_critic_loss_is_equation_18_written_naively():
    args = make_args(sunrise, gamma=0.8, sunrise_temperature=1.5)
    agent = make_agent(sunrise, args)
    batch = make_batch()
    noise = make_noise()
    total = 0.0
    with torch.no_grad():
        alpha = agent.temperature.log_alpha.exp()
        action, log_prob = squashed(*agent.actor.mean_and_log_std(batch.next_observation), noise[0])
        q = agent.critic(batch.observation, batch.action)
        for j in range(5):
            all_next = agent.target_critic(batch.next_observation, action[j])  # (N, 2, K)
            future = all_next[j].amin(0) - alpha[j] * log_prob[j]
            target = batch.reward + 0.8 * (1 - batch.terminated) * future
            std = all_next.flatten(0, 1).std(0, unbiased=False)
            weight = torch.sigmoid(-1.5 * std) + 0.5
            for twin in (0, 1):
                total += (weight * (q[j, twin] - target) ** 2)[batch.mask[:, j].bool()].mean()
    metrics = update(sunrise, agent, batch, args, noise)
    assert metrics["losses/critic"] == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize("terminal_variance", [True, False])
@pytest.mark.parametrize("variance_heads", [True, False])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_iv_sacs_critic_loss_is_equation_10_written_naively(
    weighting: dict, variance_heads: bool, terminal_variance: bool
):
    settings = {"variance_heads": variance_heads, "terminal_variance": terminal_variance}
    args = make_args(ivsac, gamma=0.5, loss_attenuation_weight=0.3, **settings, **weighting)
    agent = make_agent(ivsac, args)
    batch = make_batch()
    noise = make_noise()
    total = 0.0
    with torch.no_grad():
        alpha = agent.temperature.log_alpha.exp()
        action, log_prob = squashed(*agent.actor.mean_and_log_std(batch.next_observation), noise[0])
        next_mean, next_variance = lower_twins(agent.target_critic, batch.next_observation, action)
        q, log_variance = agent.critic.mean_and_log_variance(batch.observation, batch.action)
        for j in range(5):
            kept = batch.mask[:, j].bool()
            alive = (1 - batch.terminated)[kept]
            target = batch.reward[kept] + 0.5 * alive * (next_mean[j] - alpha[j] * log_prob[j])[kept]
            variance = next_variance[j][kept]
            if args.weighting == "biv":
                variance = variance * (0.25 if terminal_variance else 0.25 * alive)
            weight = naive_weights(variance, args)
            for twin in (0, 1):
                error = (q[j, twin][kept] - target) ** 2
                total += (weight * error).sum()
                if variance_heads:
                    s2 = log_variance[j, twin][kept].exp()
                    total += 0.3 * (error / s2 + s2.log()).mean()
    metrics = update(ivsac, agent, batch, args, noise)
    assert metrics["losses/critic"] == pytest.approx(total.item(), rel=1e-5)


@pytest.mark.parametrize("terminal_variance", [True, False])
def test_the_targets_variance_is_gamma_squared_times_the_predictions(terminal_variance: bool):
    """Equation 9. A xi by effective batch size would hide the factor, since it scales with the variances."""
    args = make_args(ivsac, gamma=0.5, xi=0.1, terminal_variance=terminal_variance)
    agent = make_agent(ivsac, args)
    batch = make_batch(mask_prob=1.0)
    target = torch.zeros(5, SIZE)
    next_variance = torch.rand(5, SIZE) + 0.1
    _, tensors = ivsac.ivsac_critic_loss(agent, batch, batch.mask.T, target, next_variance, args)
    expected = 0.25 * next_variance
    if not terminal_variance:
        expected = expected * (1 - batch.terminated)
    assert torch.allclose(tensors["variance"], expected)
    weight = 1 / (expected + 0.1)
    assert torch.allclose(tensors["weight"], weight / weight.sum(-1, keepdim=True))


def test_the_metrics_are_these_statistics():
    args = make_args(ivsac, loss_attenuation_weight=0.3)
    agent = make_agent(ivsac, args)
    batch = make_batch()
    losses, critic, actor = ivsac.ivsac_update(agent, batch, args)
    metrics = ivsac.ivsac_metrics(losses, critic, actor)
    total = metrics["losses/critic_biv"] + 0.3 * metrics["losses/critic_attenuation"]
    assert metrics["losses/critic"] == pytest.approx(total, rel=1e-5)
    assert metrics["losses/q_values"] == pytest.approx(critic["mean"].mean().item())
    variance = critic["log_variance"].exp().mean().item()
    assert metrics["uncertainty/predicted_variance_mean"] == pytest.approx(variance)
    for name, tensors in (("critic", critic), ("actor", actor)):
        weight = tensors["weight"].double().numpy()
        sizes = weight.sum(-1) ** 2 / (weight**2).sum(-1)
        expected = {
            "variance_mean": tensors["variance"].mean().item(),
            "variance_median": tensors["variance"].median().item(),
            "weight_max": weight.max(),
            "effective_batch_size": sizes.mean(),
            "xi": tensors["xi"].mean().item(),
        }
        for key, value in expected.items():
            assert metrics[f"uncertainty/{name}_{key}"] == pytest.approx(value, rel=1e-5), key


def test_a_member_without_samples_is_left_out_of_the_mean_effective_batch_size():
    args = make_args(ivsac)
    batch = make_batch()
    batch.mask[:] = 1
    batch.mask[:, 1] = 0
    metrics = ivsac.ivsac_metrics(*ivsac.ivsac_update(make_agent(ivsac, args), batch, args))
    for name in ("critic", "actor"):
        assert args.mebs_ratio * SIZE * 0.99 <= metrics[f"uncertainty/{name}_effective_batch_size"] <= SIZE


@pytest.mark.parametrize("module", FAMILY)
def test_a_one_step_problem_with_a_known_optimum(module: ModuleType):
    """Reward -(a - 0.4)^2 in one step: each policy's mode goes to 0.4, each critic to the reward."""
    settings = {} if module is sac else {"num_nets": 2}
    args = make_args(module, autotune=False, alpha=0.01, **settings)
    agent = make_agent(module, args, torch.optim.Adam, lr=5e-3)
    with torch.no_grad():
        agent.temperature.log_alpha.fill_(math.log(0.01))
    for seed in range(600):
        batch = make_batch(2, mask_prob=1.0, seed=seed)
        batch.reward = -((batch.action - 0.4) ** 2).sum(-1)
        batch.terminated = torch.ones(SIZE)
        getattr(module, f"{module.__name__}_update")(agent, batch, args)
    batch = make_batch(2, seed=10_000)
    with torch.no_grad():
        mode = agent.actor.mode(batch.observation)
        values = agent.critic(batch.observation, batch.action)
    assert (mode - 0.4).abs().mean() < 0.1
    assert (values + ((batch.action - 0.4) ** 2).sum(-1)).abs().mean() < 0.1


# ---------------------------------------------------------------------------- the loop
class Recorder(gym.Env):
    """Writes down what it is told and says. Its observations tell episode and time, even episodes terminate after 5
    or more steps, odd ones are truncated.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-2, 6, (ACTIONS,), np.float32)

    def __init__(self) -> None:
        self.forget()

    def forget(self, episodes_before: int = 0) -> None:
        self.episode = episodes_before - 1
        self.seeds = []
        self.steps = []

    def observe(self) -> np.ndarray:
        return np.array([self.episode / 8, self.time / 8])  # exact in single precision

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seeds.append(seed)
        self.episode += 1
        self.time = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        step = SimpleNamespace(episode=self.episode, observation=self.observe(), action=action, reward=self.time / 4)
        self.time += 1
        ends = self.time == 5 + self.episode % 3
        step.next_observation = self.observe()
        step.terminated = ends and self.episode % 2 == 0
        step.truncated = ends and self.episode % 2 == 1
        self.steps.append(step)
        return step.next_observation, step.reward, step.terminated, step.truncated, {}


gym.register("Recorder-v0", Recorder, disable_env_checker=True)


def recorded_train(module: ModuleType, folder: Path, **settings: Any) -> SimpleNamespace:
    """What happened in train: the environments' records, actions by policies, updates, and the rows of metrics."""
    tiny = {"env_id": "Recorder-v0", "hidden_size": 8, "batch_size": 8, "eval_every": 0, "runs_dir": str(folder)}
    args = make_args(module, **tiny | settings)
    act_name = "policy_action" if module is sac else "ucb_action"
    update_name = f"{module.__name__}_update"
    original_start = module.Run.start
    original_act = getattr(module, act_name)
    original_update = getattr(module, update_name)
    original_log = module.Run.log
    found = SimpleNamespace(acts=[], updates=[], rows=[], learning_rates={"actor": [], "critic": [], "alpha": []})

    def on_step(name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        found.learning_rates[name].append(group["lr"])

    def start(run: Any, agent: Any, rng: np.random.Generator) -> None:
        original_start(run, agent, rng)
        for env in (found.training, found.evaluation):
            env.forget(run.episode)  # that it was tried out
        found.run = run
        found.agent = agent
        found.first_critic = flat(agent.critic)
        for name in found.learning_rates:
            getattr(agent, f"{name}_optimizer").register_step_pre_hook(functools.partial(on_step, name))

    def act(agent: Any, observation: np.ndarray, *rest: Any) -> Any:
        result = original_act(agent, observation, *rest)
        action, choice = (result, {"exploration/acting_member": 0}) if module is sac else result
        member = choice["exploration/acting_member"]
        episode = found.training.episode
        found.acts.append(SimpleNamespace(step=found.run.global_step, episode=episode, action=action, member=member))
        return result

    def update(agent: Any, batch: SimpleNamespace, args: Any) -> Any:
        result = original_update(agent, batch, args)
        found.updates.append(
            SimpleNamespace(
                step=found.run.global_step,
                size=len(batch.reward),
                observation=batch.observation,
                actor=flat(agent.actor),
                critic=flat(agent.critic),
                target=flat(agent.target_critic),
            )
        )
        return result

    def log(run: Any, row: dict[str, float]) -> None:
        found.rows.append({"step": run.global_step} | row)
        original_log(run, row)

    class RecordedRun(module.Run):
        def __enter__(self) -> Any:
            super().__enter__()
            found.training = self.env.unwrapped
            found.evaluation = self.eval_env.unwrapped
            return self

    RecordedRun.start = start
    RecordedRun.log = log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Run", RecordedRun)
        patch.setattr(module, act_name, act)
        patch.setattr(module, update_name, update)
        found.folder = module.train(args)
    return found


def flat(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach().clone()


def scaled(action: np.ndarray) -> list[float]:
    """As the environment gets it: from [-1, 1] to [-2, 6]."""
    return (4 * np.asarray(action, np.float64) + 2).tolist()


@pytest.mark.parametrize("module", FAMILY)
def test_actions_are_random_in_the_first_steps_and_the_policys_from_then_on(module: ModuleType, tmp_path: Path):
    found = recorded_train(module, tmp_path, total_timesteps=420, learning_starts=400, rollout_length=10**6)
    assert [act.step for act in found.acts] == list(range(401, 421))
    steps = found.training.steps
    assert len(steps) == 420
    for act in found.acts:
        assert steps[act.step - 1].action.tolist() == pytest.approx(scaled(act.action), abs=1e-5)
    random = np.sort([step.action for step in steps[:400]], axis=0)
    uniform = np.linspace(-2, 6, 400)[:, None]
    assert abs(random - uniform).max() < 8 * 0.1  # the distance of Kolmogorov and Smirnov: 0.068 at 95%
    first, second = np.array([step.action for step in steps[:400]]).T
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


@pytest.mark.parametrize("module", FAMILY)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rollout_length": 1, "learning_starts": 18}, dict.fromkeys(range(18, 24), 1)),
        ({"rollout_length": 5, "learning_starts": 10}, {10: 5, 15: 5, 20: 5}),
        ({"rollout_length": 5, "learning_starts": 11}, {15: 5, 20: 5}),
        ({"rollout_length": 5, "learning_starts": 10, "updates_per_step": 0.5}, {10: 2, 15: 2, 20: 2}),
        ({"rollout_length": 5, "learning_starts": 10, "updates_per_step": 0.7}, {10: 4, 15: 4, 20: 4}),
        ({"rollout_length": 10, "learning_starts": 0, "updates_per_step": 0.2}, {10: 2, 20: 2}),
        ({"rollout_length": 24, "learning_starts": 0}, {}),
    ],
)
def test_updates_come_after_each_rollout_as_many_as_its_steps_times_updates_per_step(
    module: ModuleType, settings: dict, expected: dict[int, int], tmp_path: Path
):
    found = recorded_train(module, tmp_path, total_timesteps=23, **settings)
    steps = [update.step for update in found.updates]
    assert {step: steps.count(step) for step in steps} == expected


@pytest.mark.parametrize("module", FAMILY)
def test_a_rollout_without_an_update_is_refused(module: ModuleType, tmp_path: Path):
    with pytest.raises(module.RunError, match="--updates-per-step must be at least 1") as refusal:
        recorded_train(module, tmp_path, rollout_length=5, updates_per_step=0.01, total_timesteps=23)
    assert refusal.value.code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", FAMILY[1:])
def test_the_minibatch_is_as_much_larger_as_the_mask_is_small(module: ModuleType, tmp_path: Path):
    for mask_prob, size in ((1.0, 8), (0.75, 11), (0.6, 13), (0.25, 32)):
        run = {"total_timesteps": 10, "learning_starts": 10, "rollout_length": 10, "updates_per_step": 0.2}
        found = recorded_train(module, tmp_path / str(size), mask_prob=mask_prob, **run)
        assert [update.size for update in found.updates] == [size, size]


def test_sacs_minibatch_is_the_batch_size(tmp_path: Path):
    found = recorded_train(sac, tmp_path, total_timesteps=10, learning_starts=10, rollout_length=10)
    assert [update.size for update in found.updates] == [8] * 10


@pytest.mark.parametrize("module", FAMILY)
def test_each_minibatch_is_drawn_anew_from_all_that_is_stored(module: ModuleType, tmp_path: Path):
    found = recorded_train(module, tmp_path, total_timesteps=30, learning_starts=30, rollout_length=30)
    drawn = [[tuple(row) for row in update.observation.tolist()] for update in found.updates]  # none comes twice
    assert len({tuple(rows) for rows in drawn}) == 30
    assert len(set().union(*drawn)) == 30


@pytest.mark.parametrize("module", FAMILY)
def test_each_episode_has_its_own_seed_that_depends_on_env_seed_alone(module: ModuleType, tmp_path: Path):
    common = {"total_timesteps": 40, "rollout_length": 10**6, "eval_every": 20}
    first = recorded_train(module, tmp_path / "a", seed=1, env_seed=7, **common)
    other = recorded_train(module, tmp_path / "b", seed=2, env_seed=7, **common)
    default = recorded_train(module, tmp_path / "c", seed=7, **common)
    episodes = len(first.training.seeds)
    expected = [int(np.random.SeedSequence((7, episode)).generate_state(1)[0]) for episode in range(episodes)]
    assert episodes == 7
    assert first.training.seeds == other.training.seeds == default.training.seeds == expected
    evaluations = [int(np.random.SeedSequence((7, step, 1)).generate_state(1)[0]) for step in (20, 40)]
    assert first.evaluation.seeds == other.evaluation.seeds == default.evaluation.seeds == evaluations
    assert len({*expected, *evaluations}) == 9
    assert first.training.steps[0].action.tolist() != other.training.steps[0].action.tolist()


@pytest.mark.parametrize("module", FAMILY[1:])
def test_with_ucb_0_one_member_acts_in_an_episode_and_with_ucb_many(module: ModuleType, tmp_path: Path):
    run = {"total_timesteps": 240, "learning_starts": 0, "rollout_length": 10**6}
    members = {}
    for ucb in (0.0, 1.0):
        found = recorded_train(module, tmp_path / str(ucb), ucb=ucb, **run)
        assert len(found.acts) == 240
        members[ucb] = [set() for _ in found.training.seeds]
        for act in found.acts:
            members[ucb][act.episode].add(act.member)
    assert all(len(acting) == 1 for acting in members[0.0])
    assert set.union(*members[0.0]) == set(range(5))
    assert any(len(acting) > 1 for acting in members[1.0])


@pytest.mark.parametrize("module", FAMILY)
def test_transitions_are_stored_as_they_were_and_truncation_is_not_termination(module: ModuleType, tmp_path: Path):
    found = recorded_train(module, tmp_path, total_timesteps=60, learning_starts=30, rollout_length=20)
    steps = found.training.steps
    stored = found.agent.buffer.arrays
    assert found.agent.buffer.size == found.agent.buffer.position == len(steps) == 60
    for index, step in enumerate(steps):
        assert stored["observation"][index].tolist() == step.observation.tolist()
        assert stored["next_observation"][index].tolist() == step.next_observation.tolist()
        assert scaled(stored["action"][index]) == pytest.approx(step.action.tolist(), abs=1e-5)
        assert stored["reward"][index] == step.reward
        assert stored["terminated"][index] == step.terminated
    assert sum(step.terminated for step in steps) == 5
    assert sum(step.truncated for step in steps) == 5


@pytest.mark.parametrize("module", FAMILY[1:])
def test_members_draw_their_masks_independently_with_mask_prob(module: ModuleType, tmp_path: Path):
    run = {"total_timesteps": 600, "learning_starts": 600, "rollout_length": 10**6}
    mask = recorded_train(module, tmp_path / "some", mask_prob=0.3, **run).agent.buffer.arrays["mask"][:600]
    together = (mask[:, :, None] * mask[:, None, :]).mean(0)  # (N, N)
    assert np.diag(together).tolist() == pytest.approx([0.3] * 5, abs=0.08)  # four standard deviations
    assert together[~np.eye(5, dtype=bool)].tolist() == pytest.approx([0.09] * 20, abs=0.05)
    mask = recorded_train(module, tmp_path / "all", mask_prob=1.0, **run).agent.buffer.arrays["mask"]
    assert mask[:600].all()


@pytest.mark.parametrize("module", FAMILY)
def test_an_episode_of_evaluation_every_so_many_steps_acts_deterministically(module: ModuleType, tmp_path: Path):
    found = recorded_train(module, tmp_path, total_timesteps=35, rollout_length=10**6, eval_every=10)
    rows = [row for row in found.rows if "charts/eval_return" in row]
    assert [row["step"] for row in rows] == [10, 20, 30]
    steps = found.evaluation.steps
    assert len(steps) == 5 + 6 + 7
    returns = [sum(step.reward for step in steps if step.episode == episode) for episode in range(3)]
    assert [row["charts/eval_return"] for row in rows] == pytest.approx(returns)
    means = [np.mean(returns[: n + 1]) for n in range(3)]
    assert [row["charts/eval_return_mean100"] for row in rows] == pytest.approx(means)
    for step in steps:
        action = found.agent.evaluation_action(step.observation, np.random.default_rng(0))
        assert step.action.tolist() == pytest.approx(scaled(action), abs=1e-5)


@pytest.mark.parametrize("module", FAMILY)
def test_episodes_are_logged_with_their_returns_and_lengths(module: ModuleType, tmp_path: Path):
    found = recorded_train(module, tmp_path, total_timesteps=20, rollout_length=10**6)
    rows = [row for row in found.rows if "charts/episode" in row]
    assert [row["step"] for row in rows] == [5, 11, 18]
    assert [row["charts/episode"] for row in rows] == [1, 2, 3]  # the fourth was cut off by the end of the run
    assert [row["charts/episodic_length"] for row in rows] == [5, 6, 7]
    assert [row["charts/episodic_return"] for row in rows] == [sum(range(n)) / 4 for n in (5, 6, 7)]


@pytest.mark.parametrize("module", FAMILY)
def test_the_target_critic_follows_by_a_share_tau_after_each_update(module: ModuleType, tmp_path: Path):
    learning = {"learning_starts": 12, "rollout_length": 6, "q_lr": 0.01, "tau": 0.1}
    found = recorded_train(module, tmp_path, total_timesteps=18, **learning)
    assert len(found.updates) == 12
    expected = found.first_critic
    for update in found.updates:
        assert not torch.equal(update.critic, expected)
        expected = 0.9 * expected + 0.1 * update.critic
        assert torch.allclose(update.target, expected, atol=1e-6)
    assert torch.equal(flat(found.agent.target_critic), found.updates[-1].target)


@pytest.mark.parametrize("module", FAMILY)
def test_each_optimiser_makes_a_step_in_every_update_with_its_own_learning_rate(module: ModuleType, tmp_path: Path):
    run = {"total_timesteps": 12, "learning_starts": 6, "rollout_length": 3, "policy_lr": 0.1, "q_lr": 0.2}
    for autotune in (True, False):
        found = recorded_train(module, tmp_path / str(autotune), autotune=autotune, alpha_lr=0.3, **run)
        assert len(found.updates) == 9
        tuned = [0.3] * 9 if autotune else []
        assert found.learning_rates == {"actor": [0.1] * 9, "critic": [0.2] * 9, "alpha": tuned}


@pytest.mark.parametrize("module", FAMILY)
def test_adam_has_its_own_constants(module: ModuleType):
    agent = module.Agent(OBSERVATION_SPACE, ACTION_SPACE, make_args(module))
    for optimizer in (agent.actor_optimizer, agent.critic_optimizer, agent.alpha_optimizer):
        (group,) = optimizer.param_groups
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)


@pytest.mark.parametrize("module", FAMILY[1:])
def test_with_ucb_0_every_member_acts_in_as_many_episodes(module: ModuleType, tmp_path: Path):
    run = {"total_timesteps": 1499, "learning_starts": 0, "rollout_length": 10**6}
    found = recorded_train(module, tmp_path, ucb=0.0, buffer_size=10, **run)
    by_episode = {act.episode: act.member for act in found.acts}
    assert len(by_episode) == 250
    counts = np.bincount(list(by_episode.values()), minlength=5)
    assert counts == pytest.approx([50] * 5, abs=25)  # four standard deviations


@pytest.mark.parametrize("module", FAMILY)
def test_metrics_of_the_updates_are_logged_every_so_many_steps(module: ModuleType, tmp_path: Path):
    run = {"total_timesteps": 40, "learning_starts": 12, "rollout_length": 4, "updates_per_step": 0.25}
    found = recorded_train(module, tmp_path, log_every=6, **run)
    rows = [row for row in found.rows if "losses/critic" in row]
    assert [row["step"] for row in rows] == [12, 24, 36]


@pytest.mark.parametrize("module", FAMILY)
def test_a_loss_that_is_not_finite_ends_the_run(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = f"{module.__name__}_update"
    original = getattr(module, name)

    def update_with_an_infinite_loss(agent: Any, batch: SimpleNamespace, args: Any) -> tuple:
        losses, *rest = original(agent, batch, args)
        return losses | {"actor": torch.tensor(torch.inf)}, *rest

    monkeypatch.setattr(module, name, update_with_an_infinite_loss)
    with pytest.raises(module.RunError, match="a loss is not finite at step 12"):
        recorded_train(module, tmp_path, total_timesteps=20, learning_starts=12, rollout_length=4)


@pytest.mark.parametrize("module", FAMILY)
def test_a_run_in_two_parts_is_the_run_in_one(module: ModuleType, tmp_path: Path):
    """Nine episodes, or six and then three, with a ring that has been round."""
    common = {"learning_starts": 10, "rollout_length": 6, "updates_per_step": 0.5, "buffer_size": 25, "eval_every": 6}
    whole = recorded_train(module, tmp_path, run_name="whole", total_episodes=9, **common)
    first = recorded_train(module, tmp_path, run_name="parts", total_episodes=6, **common)
    second = recorded_train(module, tmp_path, run_name="parts", total_episodes=9, resume=True, **common)
    assert whole.run.global_step == 54
    assert whole.agent.buffer.position not in (0, 25)
    assert first.training.seeds + second.training.seeds == whole.training.seeds
    assert first.evaluation.seeds + second.evaluation.seeds == whole.evaluation.seeds
    updates = first.updates + second.updates
    assert len(second.updates) > 3
    for ours, theirs in zip(updates, whole.updates, strict=True):
        for part in ("actor", "critic", "target"):
            assert torch.equal(getattr(ours, part), getattr(theirs, part)), (part, theirs.step)
    for name, array in whole.agent.buffer.arrays.items():
        assert np.array_equal(second.agent.buffer.arrays[name], array), name
    assert torch.equal(second.agent.temperature.log_alpha, whole.agent.temperature.log_alpha)
    assert timeless(second.folder) == timeless(whole.folder)


@pytest.mark.parametrize("module", FAMILY)
def test_actions_of_any_bounds_are_scaled(module: ModuleType):
    class Wide(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)
        action_space = gym.spaces.Box(np.array([-3, 10], np.float32), np.array([5, 20], np.float32))

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
            return np.zeros(2), float(action[0] * 1000 + action[1]), False, False, {}

    gym.register(f"Wide-{module.__name__}-v0", Wide, disable_env_checker=True, order_enforce=False)
    env = module.make_env(f"Wide-{module.__name__}-v0", module.Args())
    assert env.step(np.array([-1, 1], np.float32))[1] == pytest.approx(-3000 + 20)
    assert env.step(np.array([0, 0], np.float32))[1] == pytest.approx(1000 + 15)
