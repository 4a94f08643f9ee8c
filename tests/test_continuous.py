"""The learning steps of the continuous family, against plain loops, torch.distributions and one another."""

import copy
import math
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ensemble_sac
import ivsac
import sac
import sunrise

INPUTS, ACTIONS, SIZE = 5, 2, 24
CRITIC = {"sac": "Critic", "ivsac": "VarEnsembleCritic"}
FAMILY = [sac, ensemble_sac, sunrise, ivsac]
ENSEMBLES = [
    (ensemble_sac, {}),
    (sunrise, {}),
    (ivsac, {}),
    (ivsac, {"variance_heads": False}),
    (ivsac, {"weighting": "l2"}),
    (ivsac, {"weighting": "uwac"}),
    (ivsac, {"weighting": "sunrise"}),
]


def make_args(module: ModuleType, **settings):
    return module.Args(hidden_size=16, num_threads=1, cuda=False, **settings)


def make_agent(module: ModuleType, args, seed: int = 0, optimizer=torch.optim.SGD, lr: float = 0.01) -> SimpleNamespace:
    """As the scripts build it; plain gradient steps, since Adam blows up rounding where gradients vanish."""
    torch.manual_seed(seed)
    actor = module.EnsembleMLP(1 if module is sac else args.num_nets, INPUTS, args.hidden_size, 2 * ACTIONS)
    agent = SimpleNamespace(actor=actor)
    agent.critic = getattr(module, CRITIC.get(module.__name__, "EnsembleCritic"))(INPUTS, ACTIONS, args)
    agent.target_critic = copy.deepcopy(agent.critic).requires_grad_(False)
    with torch.no_grad():
        for parameter in agent.target_critic.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    shape = () if module is sac else (args.num_nets, 1)
    agent.temperature = torch.nn.ParameterDict({"log_alpha": torch.zeros(shape)})
    for name, part in (("actor", agent.actor), ("critic", agent.critic), ("alpha", agent.temperature)):
        setattr(agent, f"{name}_optimizer", optimizer(part.parameters(), lr=lr))
    return agent


def make_batch(num_nets: int = 5, mask_prob: float = 0.7, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=generator)
    return SimpleNamespace(
        observation=2 * rand(SIZE, INPUTS) - 1,
        action=2 * rand(SIZE, ACTIONS) - 1,
        next_observation=2 * rand(SIZE, INPUTS) - 1,
        reward=rand(SIZE),
        terminated=(rand(SIZE) < 0.2).float(),
        mask=rand(SIZE, num_nets) < mask_prob,
    )


def update(module: ModuleType, agent: SimpleNamespace, batch: SimpleNamespace, args, noise: torch.Tensor) -> dict:
    """One update in which the policies draw the given noise: for a' first, then for a."""
    draws = iter(noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", lambda x: next(draws)[: len(x)] if x.dim() == 3 else next(draws)[0])
        return {
            name: value() for name, value in getattr(module, f"{module.__name__}_update")(agent, batch, args).items()
        }


def make_noise(num_nets: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, num_nets, SIZE, ACTIONS, generator=torch.Generator().manual_seed(seed))


def stacked(critic: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of all members' pairs of critics: (N, 2, ...)."""
    if isinstance(critic, ivsac.VarEnsembleCritic):  # its nets are singles, first twins first
        pairs = [[net.state_dict() for net in pair] for pair in zip(*critic.nets, strict=True)]
        nets = [{name: torch.cat([twin[name] for twin in pair]) for name in pair[0]} for pair in pairs]
    else:
        nets = [net.state_dict() for net in getattr(critic, "nets", [getattr(critic, "net", None)])]
    return {name: torch.stack([net[name] for net in nets]) for name in nets[0]}


def lower_twins(critic: torch.nn.Module, observation: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each member's lower twin at its own action, and the predictive variance of those twins there."""
    with torch.no_grad():
        mean, lower = critic(observation, action).min(1)
        return mean, ivsac.predictive_variance(critic, observation, action, lower)


def state(agent: SimpleNamespace) -> dict[str, torch.Tensor]:
    """All parameters, members first."""
    parts = {"actor": agent.actor.state_dict(), "alpha": agent.temperature.state_dict()}
    parts |= {"critic": stacked(agent.critic), "target": stacked(agent.target_critic)}
    return {f"{part}.{name}": value.clone() for part, values in parts.items() for name, value in values.items()}


def test_log_probability_is_that_of_the_transformed_normal():
    output = 0.5 * torch.randn(4, 30, 2 * ACTIONS).double()
    action, log_prob = ivsac.tanh_gaussian(output)
    mean, log_std = output.chunk(2, -1)
    base = torch.distributions.Normal(mean, log_std.exp())
    policy = torch.distributions.TransformedDistribution(
        base, torch.distributions.transforms.TanhTransform(cache_size=1)
    )
    assert torch.allclose(log_prob, policy.log_prob(action).sum(-1), atol=1e-8)


def test_log_std_is_clamped_and_saturated_actions_stay_finite():
    output = torch.tensor([[50.0, -50.0, 9.0, -99.0]])
    torch.manual_seed(0)
    action, log_prob = ivsac.tanh_gaussian(output.expand(1000, 4))
    assert log_prob.isfinite().all()
    assert action.abs().max() <= 1
    raw = ivsac.tanh_gaussian(torch.tensor([[0.0, 0.0, 9.0, -99.0]]).expand(20_000, 4))[0][:, 0]
    inside = raw[raw.abs() < 0.999].atanh()  # log std 9 counts as 2
    assert (raw.abs() < math.tanh(math.exp(2))).float().mean() == pytest.approx(0.683, abs=0.02)
    assert len(inside) > 100


def test_the_grid_is_a_plain_double_loop_over_critics_and_actions():
    args = make_args(ivsac)
    agent, batch = make_agent(ivsac, args), make_batch()
    action = ivsac.tanh_gaussian(agent.actor(batch.observation))[0].detach()  # (N, K, A)
    mean, variance = lower_twins(agent.critic, batch.observation, action)
    for j in range(5):
        x = torch.cat((batch.observation, action[j]), -1)
        mu, s2 = torch.zeros(5, 2, SIZE), torch.zeros(5, 2, SIZE)
        for n in range(5):  # Algorithm 4, for both twins
            for twin in range(2):
                net = agent.critic.nets[twin][n]
                hidden = torch.relu(x @ net.weight1[0].T + net.bias1[0].T)
                hidden = torch.relu(hidden @ net.weight2[0].T + net.bias2[0].T)
                output = hidden @ net.weight3[0].T + net.bias3[0].T
                mu[n, twin], s2[n, twin] = output[:, 0], output[:, 1].exp()
        mixture = (s2 + mu**2).mean(0) - mu.mean(0) ** 2
        for k in range(SIZE):
            lower = mu[j, :, k].argmin()  # member j's own twins decide
            assert mean[j, k].item() == pytest.approx(mu[j, lower, k].item(), abs=1e-5)
            assert variance[j, k].item() == pytest.approx(mixture[lower, k].item(), abs=1e-4)
    assert torch.allclose(agent.critic(batch.observation, action).amin(1), mean, atol=1e-5)


def test_a_sampled_ensembles_variance_is_that_of_its_means():
    args = make_args(ivsac, variance_heads=False)
    agent, batch = make_agent(ivsac, args), make_batch()
    action = ivsac.tanh_gaussian(agent.actor(batch.observation))[0].detach()
    _, variance = lower_twins(agent.critic, batch.observation, action)
    all_mean = torch.stack([agent.critic(batch.observation, a) for a in action])  # (J, N, 2, K)
    own = torch.stack([all_mean[j, j] for j in range(5)])
    expected = all_mean.var(1, unbiased=False).gather(1, own.argmin(1, keepdim=True)).squeeze(1)
    assert torch.allclose(variance, expected, atol=1e-6)


def test_ucb_chooses_by_mean_and_spread_over_all_critics():
    for ucb in (0.5, 20.0):
        args = make_args(ivsac, ucb=ucb)
        agent = make_agent(ivsac, args)
        observation = np.linspace(-1, 1, INPUTS)
        chosen = set()
        for seed in range(30):
            torch.manual_seed(seed)
            action, member, std = ivsac.ucb_action(agent.actor, agent.critic, observation, 0, args)
            torch.manual_seed(seed)
            x = torch.tensor(observation, dtype=torch.float32)[None]
            actions = ivsac.tanh_gaussian(agent.actor(x))[0][:, 0].detach()
            scores, spreads = [], []
            for a in actions:
                values = agent.critic(x, a[None]).flatten().detach().numpy()
                assert len(values) == 10
                scores.append(values.mean() + ucb * values.std())
                spreads.append(values.std())
            assert member == int(np.argmax(scores))
            assert std == pytest.approx(spreads[member], rel=1e-3)
            assert action.tolist() == pytest.approx(actions[member].tolist())
            chosen.add(member)
        assert len(chosen) > 1


def test_without_ucb_the_given_member_acts():
    args = make_args(ivsac, ucb=0.0)
    agent = make_agent(ivsac, args)
    for member in range(5):
        torch.manual_seed(member)
        action, acting, _ = ivsac.ucb_action(agent.actor, agent.critic, np.ones(INPUTS), member, args)
        torch.manual_seed(member)
        assert acting == member
        assert action.tolist() == pytest.approx(
            ivsac.tanh_gaussian(agent.actor(torch.ones(1, INPUTS)))[0][member, 0].tolist()
        )


def test_evaluation_averages_the_deterministic_actions():
    agent = make_agent(ivsac, make_args(ivsac))
    expected = agent.actor(torch.ones(1, INPUTS)).chunk(2, -1)[0].tanh().mean(0)[0]
    assert ivsac.average_action(agent.actor, np.ones(INPUTS)).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize(("module", "settings"), ENSEMBLES)
def test_a_members_step_depends_on_its_own_networks_and_mask_only(module: ModuleType, settings: dict):
    """Others enter through the variance alone: with the critics held, move the other policies and masks."""
    args = make_args(module, **settings)
    batch, noise = make_batch(), make_noise()
    agent = make_agent(module, args)
    before = state(agent)
    update(module, agent, batch, args, noise)
    alone = {name: value[0] for name, value in state(agent).items()}
    agent = make_agent(module, args)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter[1:] += torch.randn_like(parameter[1:])
        agent.temperature["log_alpha"][1:] += 1
    batch.mask[:, 1:] = ~batch.mask[:, 1:]
    update(module, agent, batch, args, noise)
    for name, value in state(agent).items():
        assert torch.allclose(value[0], alone[name], atol=1e-6), name
        assert not torch.allclose(before[name][0], alone[name], atol=1e-9), name


@pytest.mark.parametrize(("num_nets", "member"), [(1, 0), *((5, member) for member in range(5))])
def test_each_ensemble_members_step_is_that_of_sac_trained_alone(num_nets: int, member: int):
    args, single_args = make_args(ensemble_sac, num_nets=num_nets), make_args(sac)
    agent, single = make_agent(ensemble_sac, args), make_agent(sac, single_args)
    single.actor.load_state_dict({name: value[[member]] for name, value in agent.actor.state_dict().items()})
    single.critic.net.load_state_dict(agent.critic.nets[member].state_dict())
    single.target_critic.net.load_state_dict(agent.target_critic.nets[member].state_dict())
    batch, noise = make_batch(num_nets), make_noise(num_nets)
    kept = batch.mask[:, member]
    update(ensemble_sac, agent, batch, args, noise)
    alone = SimpleNamespace(**{name: value[kept] for name, value in vars(batch).items()})
    update(sac, single, alone, single_args, noise[:, member : member + 1, kept])
    together = {name: value[member] for name, value in state(agent).items()}
    for name, value in state(single).items():
        assert torch.allclose(together[name].flatten(), value.flatten(), atol=1e-6), name


@pytest.mark.parametrize("settings", [{"xi": 1e12}, {"weighting": "l2"}])
def test_with_huge_xi_and_no_attenuation_iv_sac_is_ensemble_sac(settings: dict):
    plain_args, args = make_args(ensemble_sac), make_args(ivsac, loss_attenuation_weight=0.0, **settings)
    plain, agent = make_agent(ensemble_sac, plain_args), make_agent(ivsac, args)
    with torch.no_grad():
        for mine, theirs in ((agent.critic, plain.critic), (agent.target_critic, plain.target_critic)):
            for member, pair in enumerate(theirs.nets):
                for name, value in pair.named_parameters():
                    for twin in (0, 1):
                        mine.nets[twin][member].get_parameter(name)[0, : value.shape[1]] = value[twin]
        agent.actor.load_state_dict(plain.actor.state_dict())
    for step in range(3):
        for module, learner, its in ((ensemble_sac, plain, plain_args), (ivsac, agent, args)):
            update(module, learner, make_batch(seed=step), its, make_noise(seed=step))
    ours = state(agent)
    for name, value in state(plain).items():
        mine = ours[name][..., : value.shape[-2], :] if value.dim() > 2 else ours[name]
        assert torch.allclose(mine, value, atol=1e-5), name


def test_the_actor_loss_is_equation_15_and_its_weights_carry_no_gradient():
    """The policy's gradient with the weights held constant by hand is the one that the update takes."""
    args = make_args(ivsac, mebs_ratio=0.6)
    agent, batch, noise = make_agent(ivsac, args), make_batch(), make_noise()
    before = copy.deepcopy(agent.actor.state_dict())
    reference = copy.deepcopy(agent)
    metrics = update(ivsac, agent, batch, args, noise)
    mean, log_std = reference.actor(batch.observation).chunk(2, -1)
    raw = mean + log_std.clamp(-20, 2).exp() * noise[1]
    normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
    log_prob = (normal.log_prob(raw) - torch.log(1 - raw.tanh() ** 2)).sum(-1)
    loss = 0.0
    for j in range(5):
        kept = batch.mask[:, j]
        q = reference.critic(batch.observation, raw.tanh())[j].amin(0)
        variance = lower_twins(reference.critic, batch.observation, raw.tanh())[1][j][kept]
        xi = ivsac.newton_xi(variance.double().numpy()[None], np.ones((1, kept.sum()), bool), 0.6)[0, 0]
        weight = 1 / (variance + xi)
        loss = loss + (weight * (log_prob[j] - q)[kept]).sum() / weight.sum()
    assert metrics["losses/actor"].item() == pytest.approx(loss.item(), rel=1e-4)
    gradient = torch.autograd.grad(loss, list(reference.actor.parameters()))
    for (name, value), grad in zip(agent.actor.named_parameters(), gradient, strict=True):
        assert torch.allclose(before[name] - 0.01 * grad, value, atol=1e-5), name


def test_the_actors_step_leaves_the_critics_as_they_are():
    for module in FAMILY:
        args = make_args(module)
        agent = make_agent(module, args)
        agent.critic_optimizer = torch.optim.SGD(agent.critic.parameters(), lr=0.0)
        before = state(agent)
        update(module, agent, make_batch(), args, make_noise())
        after = state(agent)
        for name in before:
            moved = not torch.equal(before[name], after[name])
            assert moved == (not name.startswith("critic")), (module.__name__, name)
        assert all(parameter.requires_grad for parameter in agent.critic.parameters())


@pytest.mark.parametrize("module", FAMILY)
def test_the_temperature_moves_towards_the_target_entropy(module: ModuleType):
    """Policies with more entropy than -|A| cool down, policies with less warm up; a fixed temperature stays."""
    for log_std, direction in ((0.5, -1), (-6.0, 1)):
        for autotune in (True, False):
            args = make_args(module, autotune=autotune)
            agent = make_agent(module, args)
            with torch.no_grad():
                agent.actor.weight3.zero_()
                agent.actor.bias3[:, ACTIONS:] = log_std
            update(module, agent, make_batch(), args, make_noise())
            moved = agent.temperature["log_alpha"].detach().sign()
            assert (moved == (direction if autotune else 0)).all()


def test_truncation_bootstraps_and_termination_does_not():
    for terminated in (0.0, 1.0):
        args = make_args(sac)
        agent, batch, noise = make_agent(sac, args), make_batch(), make_noise()
        batch.terminated[:] = terminated
        with torch.no_grad():
            mean, log_std = agent.actor(batch.next_observation)[0].chunk(2, -1)
            raw = mean + log_std.exp() * noise[0, 0]
            log_prob = (
                torch.distributions.Normal(mean, log_std.exp()).log_prob(raw) - torch.log(1 - raw.tanh() ** 2)
            ).sum(-1)
            future = agent.target_critic(batch.next_observation, raw.tanh()).amin(0) - log_prob
            target = batch.reward + args.gamma * (1 - terminated) * future
            loss = sum(((q - target) ** 2).mean() for q in agent.critic(batch.observation, batch.action))
        metrics = update(sac, agent, batch, args, noise)
        assert metrics["losses/critic"].item() == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("terminal", [False, True])
def test_iv_sacs_critic_loss_is_equation_10_written_naively(terminal: bool):
    args = make_args(ivsac, mebs_ratio=0.7, loss_attenuation_weight=0.3, terminal_variance=terminal)
    agent, batch, noise = make_agent(ivsac, args), make_batch(), make_noise()
    total = 0.0
    with torch.no_grad():
        mean, log_std = agent.actor(batch.next_observation).chunk(2, -1)
        raw = mean + log_std.exp() * noise[0]
        log_prob = (torch.distributions.Normal(mean, log_std.exp()).log_prob(raw) - torch.log(1 - raw.tanh() ** 2)).sum(
            -1
        )
        next_mean, next_variance = lower_twins(agent.target_critic, batch.next_observation, raw.tanh())
        q, log_variance = agent.critic.heads(batch.observation, batch.action)
        for j in range(5):
            kept = batch.mask[:, j]
            alive = (1 - batch.terminated)[kept]
            target = batch.reward[kept] + args.gamma * alive * (next_mean[j] - log_prob[j])[kept]
            variance = args.gamma**2 * (1.0 if terminal else alive) * next_variance[j][kept]
            xi = ivsac.newton_xi(variance.double().numpy()[None], np.ones((1, len(variance)), bool), 0.7)[0, 0]
            weight = 1 / (variance + xi)
            for twin in range(2):
                error, s2 = (q[j, twin][kept] - target) ** 2, log_variance[j, twin][kept].exp()
                total += (weight * error).sum() / weight.sum() + 0.3 * (error / s2 + s2.log()).mean()
    metrics = update(ivsac, agent, batch, args, noise)
    assert metrics["losses/critic"].item() == pytest.approx(total.item(), rel=1e-4)


@pytest.mark.parametrize("module", FAMILY)
def test_a_one_step_problem_with_a_known_optimum(module: ModuleType):
    """Reward -(a - 0.4)^2 in one step: each policy's mode goes to 0.4, each critic to the reward."""
    args = make_args(module, autotune=False)
    agent = make_agent(module, args, optimizer=torch.optim.Adam, lr=3e-3)
    with torch.no_grad():
        agent.temperature["log_alpha"].fill_(math.log(0.01))
    rng = np.random.default_rng(0)
    for _ in range(1400):
        batch = make_batch(mask_prob=1.0, seed=int(rng.integers(10**6)))
        batch.reward, batch.terminated = -((batch.action - 0.4) ** 2).sum(-1), torch.ones(SIZE)
        getattr(module, f"{module.__name__}_update")(agent, batch, args)
    batch = make_batch(seed=123)
    with torch.no_grad():
        mode = agent.actor(batch.observation).chunk(2, -1)[0].tanh()
        values = agent.critic(batch.observation, batch.action)
    assert (mode - 0.4).abs().mean() < 0.1
    assert (values + ((batch.action - 0.4) ** 2).sum(-1)).abs().mean() < 0.1


def test_actions_of_any_bounds_are_scaled():
    class Wide(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)
        action_space = gym.spaces.Box(np.array([-3, 10], np.float32), np.array([5, 20], np.float32))

        def step(self, action):
            return np.zeros(2), float(action[0] * 1000 + action[1]), False, False, {}

    gym.register("Wide-v0", Wide, disable_env_checker=True, order_enforce=False)
    env = ivsac.make_continuous_env("Wide-v0")
    assert env.step(np.array([-1, 1], np.float32))[1] == pytest.approx(-3000 + 20)
    assert env.step(np.array([0, 0], np.float32))[1] == pytest.approx(1000 + 15)
