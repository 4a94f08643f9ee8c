"""The learning steps of the discrete family: what each member learns from, and what it converges to."""

import copy
from types import ModuleType, SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import script

import bootstrap_dqn
import dqn
import ivdqn
import sunrise_dqn

INPUTS, ACTIONS = 6, 3
NETWORK = {"dqn": "QNetwork", "bootstrap_dqn": "EnsembleQNetwork", "sunrise_dqn": "EnsembleQNetwork"}
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


def make_network(module: ModuleType, args) -> torch.nn.Module:
    name = NETWORK.get(module.__name__, "VarEnsembleQNetwork")
    return getattr(module, name)(INPUTS, ACTIONS, args)


def loss_of(module: ModuleType):
    return getattr(module, f"{module.__name__}_loss")


def make_batch(size: int = 32, num_nets: int = 5, mask_prob: float = 0.6, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        observation=torch.randn(size, INPUTS, generator=generator),
        action=torch.randint(ACTIONS, (size,), generator=generator),
        next_observation=torch.randn(size, INPUTS, generator=generator),
        reward=torch.randn(size, generator=generator),
        terminated=(torch.rand(size, generator=generator) < 0.2).float(),
        mask=torch.rand(size, num_nets, generator=generator) < mask_prob,
    )


def gradients(module: ModuleType, network, target_network, batch, args) -> dict[str, torch.Tensor]:
    network.zero_grad()
    loss_of(module)(network, target_network, batch, args)[0].backward()
    return {name: parameter.grad.clone() for name, parameter in network.net.named_parameters()}


def twin_networks(module: ModuleType, args, seed: int = 0):
    torch.manual_seed(seed)
    network, target_network = make_network(module, args), make_network(module, args)
    target_network.load_state_dict(network.state_dict())
    with torch.no_grad():
        for parameter in target_network.net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network, target_network


@pytest.mark.parametrize(("module", "settings"), PAIRED)
def test_a_members_gradient_depends_on_its_own_parameters_mask_and_target_only(module: ModuleType, settings: dict):
    """Move every other network and turn every other mask around: member 0 must not notice."""
    args = module.Args(**settings)
    network, target_network = twin_networks(module, args)
    batch = make_batch()
    before = gradients(module, network, target_network, batch, args)
    with torch.no_grad():
        for parameter in network.net.parameters():
            parameter[1:] += torch.randn_like(parameter[1:])
    batch.mask[:, 1:] = ~batch.mask[:, 1:]
    after = gradients(module, network, target_network, batch, args)
    for name in before:
        assert torch.allclose(before[name][0], after[name][0], atol=1e-6), name
        assert not torch.allclose(before[name][1:], after[name][1:]), name


@pytest.mark.parametrize("member", range(5))
def test_each_bootstrap_member_learns_as_a_dqn_trained_alone(member: int):
    args = bootstrap_dqn.Args(prior_scale=0.0)
    network, target_network = twin_networks(bootstrap_dqn, args)
    batch = make_batch()
    together = gradients(bootstrap_dqn, network, target_network, batch, args)
    single, single_target = dqn.QNetwork(INPUTS, ACTIONS, dqn.Args()), dqn.QNetwork(INPUTS, ACTIONS, dqn.Args())
    for alone, ensemble in ((single, network), (single_target, target_network)):
        with torch.no_grad():
            for layer, linear in enumerate((alone.net[0], alone.net[2], alone.net[4]), start=1):
                linear.weight.copy_(getattr(ensemble.net, f"weight{layer}")[member])
                linear.bias.copy_(getattr(ensemble.net, f"bias{layer}")[member, :, 0])
    kept = batch.mask[:, member]
    unmasked = SimpleNamespace(**{name: value[kept] for name, value in vars(batch).items()})
    dqn.dqn_loss(single, single_target, unmasked, dqn.Args())[0].backward()
    for layer, linear in enumerate((single.net[0], single.net[2], single.net[4]), start=1):
        assert torch.allclose(together[f"weight{layer}"][member], linear.weight.grad, atol=1e-6)
        assert torch.allclose(together[f"bias{layer}"][member, :, 0], linear.bias.grad, atol=1e-6)


@pytest.mark.parametrize(("module", "settings"), PAIRED)
def test_a_masked_sample_changes_nothing_for_its_member(module: ModuleType, settings: dict):
    args = module.Args(**settings)
    network, target_network = twin_networks(module, args)
    batch = make_batch()
    batch.mask[:] = True
    batch.mask[7, 2] = False
    before = gradients(module, network, target_network, batch, args)
    batch.reward[7] += 100
    batch.next_observation[7] *= 5
    after = gradients(module, network, target_network, batch, args)
    for name in before:
        assert torch.allclose(before[name][2], after[name][2], atol=1e-6), name
        assert not torch.allclose(before[name][1], after[name][1]), name


@pytest.mark.parametrize("module", [bootstrap_dqn, sunrise_dqn, ivdqn])
def test_priors_get_no_gradient_and_never_change(module: ModuleType):
    args = module.Args(prior_scale=10.0)
    network, target_network = twin_networks(module, args)
    fixed = copy.deepcopy(network.prior.state_dict())
    optimizer = torch.optim.Adam(network.net.parameters(), lr=0.01, fused=True)
    q_values = network(make_batch().observation)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(module)(network, target_network, make_batch(), args)[0].backward()
        optimizer.step()
    assert not torch.allclose(q_values, network(make_batch().observation))
    for name, value in network.prior.named_parameters():
        assert value.grad is None
        assert torch.equal(value, fixed[name])
        assert torch.equal(value, target_network.prior.state_dict()[name])


def test_the_prior_adds_to_the_means_and_not_to_the_variances():
    args = ivdqn.Args(prior_scale=10.0)
    network = make_network(ivdqn, args)
    observation = make_batch().observation
    mean, log_variance = network.heads(observation)
    raw = network.net(observation)
    assert torch.allclose(mean, raw[..., :ACTIONS] + 10 * network.prior(observation))
    assert torch.equal(log_variance, raw[..., ACTIONS:])
    assert torch.equal(mean, network(observation))


def test_one_network_has_no_prior():
    for module in (bootstrap_dqn, ivdqn):
        network = make_network(module, module.Args(num_nets=1, prior_scale=10.0))
        observation = make_batch().observation
        assert torch.equal(network(observation), network.net(observation)[..., :ACTIONS])


def test_an_outlying_state_leaves_the_loss_finite():
    """Far from the data the log-variance is linear in the state, and its exponential overflows single precision."""
    args = ivdqn.Args()
    network, target_network = twin_networks(ivdqn, args)
    batch = make_batch()
    batch.next_observation[3] *= 1e4
    batch.observation[5] *= 1e4
    batch.terminated[3] = 1
    with torch.no_grad():
        assert target_network.net(batch.next_observation)[..., ACTIONS:].exp().isinf().any()
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
    network = make_network(ivdqn, ivdqn.Args(prior_scale=5.0))
    observation = np.random.default_rng(0).standard_normal(INPUTS)
    actions = ivdqn.member_actions(network, observation, torch.device("cpu"))
    expected = network(torch.tensor(observation, dtype=torch.float32)[None])[:, 0].argmax(-1)
    assert actions.tolist() == expected.tolist()


@pytest.mark.parametrize("terminal", [False, True])
def test_target_variance_is_algorithm_2_written_naively(terminal: bool):
    """Lines 11-26 as nested loops over members and samples, in plain Python."""
    args = ivdqn.Args(prior_scale=2.0, mebs_ratio=0.8, loss_attenuation_weight=0.7, terminal_variance=terminal)
    network, target_network = twin_networks(ivdqn, args)
    batch = make_batch(size=16)
    loss, metrics = ivdqn.ivdqn_loss(network, target_network, batch, args)
    total, variances = 0.0, []
    for j in range(args.num_nets):
        errors, log_variances, sigma = [], [], []
        for k in range(16):
            with torch.no_grad():
                mean, log_variance = (x[:, 0] for x in network.heads(batch.observation[k : k + 1]))
                next_mean, next_log_variance = (
                    x[:, 0] for x in target_network.heads(batch.next_observation[k : k + 1])
                )
            best = next_mean[j].argmax()
            alive = 1 - batch.terminated[k]
            target = batch.reward[k] + args.gamma * alive * next_mean[j, best]
            mu = [next_mean[n, best].item() for n in range(5)]
            s2 = [next_log_variance[n, best].exp().item() for n in range(5)]
            mu_all = sum(mu) / 5
            mixture = sum(s + m**2 for s, m in zip(s2, mu, strict=True)) / 5 - mu_all**2
            variances.append(args.gamma**2 * mixture if alive or terminal else 0.0)
            if batch.mask[k, j]:
                errors.append((mean[j, batch.action[k]] - target).item() ** 2)
                log_variances.append(log_variance[j, batch.action[k]].item())
                sigma.append(variances[-1])
        errors, log_variances, sigma = map(np.array, (errors, log_variances, sigma))
        xi = ivdqn.newton_xi(sigma[None], np.ones((1, len(sigma)), bool), args.mebs_ratio)[0, 0]
        weight = 1 / (sigma + xi)
        biv = (weight * errors).sum() / weight.sum()
        attenuation = (errors / np.exp(log_variances) + log_variances).mean()
        total += biv + args.loss_attenuation_weight * attenuation
    assert metrics["uncertainty/target_variance_mean"]().item() == pytest.approx(np.mean(variances), rel=1e-4)
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
    network, target_network = twin_networks(ivdqn, args)
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
        target = batch.reward.numpy() + args.gamma * (1 - batch.terminated.numpy()) * next_mean[j, range(32), best]
        squares = (mean[j, range(32), batch.action.numpy()] - target) ** 2
        kept = batch.mask[:, j].numpy()
        seen.extend(by_hand(variance))
        total += (by_hand(variance) * squares)[kept].mean()
    assert np.std(seen) > 0.05  # the weights do differ here
    assert loss.item() == pytest.approx(total, rel=1e-4)


def test_truncation_bootstraps_and_termination_does_not(discrete: ModuleType):
    """With the same transition stored once as truncated and once as terminated, only the first has a future."""
    args = discrete.Args()
    network, target_network = twin_networks(discrete, args)
    batch = make_batch()
    batch.mask[:] = True
    losses = {}
    for terminated in (0.0, 1.0):
        batch.terminated[:] = terminated
        q = network(batch.observation)
        q = q.unsqueeze(0) if discrete is dqn else q
        q = q.gather(-1, batch.action.expand(len(q), -1).unsqueeze(-1)).squeeze(-1)
        future = target_network(batch.next_observation).amax(-1) * args.gamma * (1 - terminated)
        losses[terminated] = ((q - batch.reward - future) ** 2).mean(-1).sum().item()
    plain = {"ivdqn": {"weighting": "l2", "loss_attenuation_weight": 0.0}, "sunrise_dqn": {"sunrise_temperature": 0.0}}
    args = discrete.Args(**plain.get(discrete.__name__, {}))  # whatever weighs the squared errors is off
    for terminated in (0.0, 1.0):
        batch.terminated[:] = terminated
        loss = loss_of(discrete)(network, target_network, batch, args)[0].item()
        assert loss == pytest.approx(losses[terminated], rel=1e-4)


def shared_step(module: ModuleType, args, steps: int = 5) -> torch.nn.Module:
    """A few gradient steps from the same weights (plain ones: Adam would blow up rounding where gradients vanish)."""
    torch.manual_seed(3)
    reference = make_network(bootstrap_dqn, bootstrap_dqn.Args(prior_scale=4.0))
    network = make_network(module, args)
    with torch.no_grad():
        for name, value in reference.net.named_parameters():
            own = getattr(network.net, name)
            own[:, : value.shape[1]] = value
        network.prior.load_state_dict(reference.prior.state_dict())
    target_network = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.SGD(network.net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module)(network, target_network, make_batch(seed=step), args)[0].backward()
        optimizer.step()
        torch._foreach_lerp_(list(target_network.net.parameters()), list(network.net.parameters()), 0.05)
    return network


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
    ],
)
def test_q_converges_to_the_optimal_values_of_a_small_mdp(name: str, settings: dict):
    """Uniformly random behaviour, the script's own buffer, loss and updates; the optimal Q is known exactly."""
    module = script(name)
    args = module.Args(gamma=GAMMA, **settings)
    rng, env = np.random.default_rng(0), Chain()
    torch.manual_seed(0)
    network = getattr(module, NETWORK.get(name, "VarEnsembleQNetwork"))(3, 2, args)
    target_network = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.Adam(network.net.parameters(), lr=3e-3, fused=True)
    zeros, scalar = np.zeros(3, np.float32), np.float32(0)
    fields = {"observation": zeros, "action": np.int64(0), "next_observation": zeros}
    fields |= {"reward": scalar, "terminated": scalar}
    num_nets = settings.get("num_nets", 5)
    if name != "dqn":
        fields["mask"] = np.zeros(num_nets, bool)
    buffer = module.ReplayBuffer(2000, torch.device("cpu"), **fields)
    for _ in range(600):
        observation, done = env.reset()[0], False
        while not done:
            action = rng.integers(2)
            next_observation, reward, terminated, _, _ = env.step(action)
            mask = () if name == "dqn" else (rng.random(num_nets) < settings.get("mask_prob", 1.0),)
            buffer.add(observation, action, next_observation, reward, terminated, *mask)
            observation, done = next_observation, terminated
    for step in range(2000):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 2000)
        optimizer.zero_grad()
        getattr(module, f"{name}_loss")(network, target_network, buffer.sample(64, rng), args)[0].backward()
        optimizer.step()
        torch._foreach_lerp_(list(target_network.net.parameters()), list(network.net.parameters()), 0.02)
    with torch.no_grad():
        q_values = network(torch.eye(3)).reshape(-1, 3, 2).numpy()
    assert np.abs(q_values - OPTIMAL).max() < 0.08


def test_the_replay_buffer_is_a_ring_and_samples_what_it_holds(discrete: ModuleType):
    buffer = discrete.ReplayBuffer(4, torch.device("cpu"), observation=np.zeros(2, np.float32), action=np.int64(0))
    for i in range(6):
        buffer.add(np.full(2, i), i)
    batch = buffer.sample(500, np.random.default_rng(0))
    assert set(batch.action.tolist()) == {2, 3, 4, 5}
    assert torch.equal(batch.observation[:, 0], batch.action.float())
    other = discrete.ReplayBuffer(4, torch.device("cpu"), observation=np.zeros(2, np.float32), action=np.int64(0))
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(
        other.sample(9, np.random.default_rng(1)).action, buffer.sample(9, np.random.default_rng(1)).action
    )
