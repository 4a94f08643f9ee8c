"""The uncertainty maths of SPEC section 2, against Monte Carlo, brute force, scipy and torch.distributions."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ivdqn

torch.manual_seed(0)
CLEAN = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]


def exact_ebs(variance: np.ndarray, xi: float) -> float:
    """EBS by Eq. 2 in double precision; at xi = 0 its limit from above."""
    noise = variance + xi
    if noise.min() == 0:
        return float((noise == 0).sum())
    weight = noise.min() / noise
    return weight.sum() ** 2 / (weight**2).sum()


def minimal_ebs(count: int, ratio: float) -> float:
    return min(ratio * count, count - 1)


def test_mixture_variance_is_that_of_samples_from_the_mixture():
    mean, variance = torch.randn(5, 3) * 2, torch.rand(5, 3) * 4
    member = torch.randint(5, (400_000,))
    samples = mean[member] + variance[member].sqrt() * torch.randn(400_000, 3)
    assert torch.allclose(ivdqn.mixture_variance(mean, variance), samples.var(0), rtol=0.02)


def test_mixture_variance_is_the_papers_formula():
    mean, variance = torch.randn(5, 7, dtype=torch.double), torch.rand(5, 7, dtype=torch.double)
    paper = (variance + mean**2).mean(0) - mean.mean(0) ** 2  # Alg. 2, lines 20-21
    assert torch.allclose(ivdqn.mixture_variance(mean, variance), paper)


def test_mixture_variance_is_stable_for_large_means():
    mean = 1e6 + torch.tensor([[0.0], [1.0], [2.0]])
    assert ivdqn.mixture_variance(mean, torch.zeros(3, 1)).item() == pytest.approx(2 / 3, rel=1e-5)


def test_effective_batch_size_by_hand():
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.0]])
    assert ivdqn.effective_batch_size(weight).tolist() == pytest.approx([4, 1, 1 / (0.25 + 0.0625 * 2)])


def test_biv_weights_by_hand():
    variance, xi = np.array([[1.0, 3.0, 0.0, 7.0]]), np.array([[1.0]])
    mask = np.array([[True, True, False, True]])
    weight = ivdqn.biv_weights(variance, mask, xi)
    raw = [1 / 2, 1 / 4, 0, 1 / 8]
    assert weight[0].tolist() == pytest.approx([x / sum(raw) for x in raw])


def test_biv_weights_without_variance_are_uniform_and_without_samples_zero():
    mask = np.array([[True, True, False], [False, False, False]])
    weight = ivdqn.biv_weights(np.zeros((2, 3)), mask, np.zeros((2, 1)))
    assert weight.tolist() == [[0.5, 0.5, 0], [0, 0, 0]]


def test_constant_xi_is_used_as_it_is():
    args = ivdqn.Args(xi=10.0)
    variance = torch.rand(5, 8)
    weight, xi = ivdqn.biv_weights_and_xi(variance, torch.ones(5, 8, dtype=torch.bool), args)
    assert xi.tolist() == [[10.0]] * 5
    raw = 1 / (variance + 10)
    assert torch.allclose(weight, raw / raw.sum(-1, keepdim=True))


hostile = st.one_of(
    st.just(0.0),
    st.floats(-12, 12).map(lambda power: 10.0**power),
    st.sampled_from([1e-12, 1.0, 1e12]),
)
hostile_batch = st.one_of(
    st.lists(hostile, min_size=1, max_size=40),
    st.builds(lambda value, size: [value] * size, hostile, st.integers(1, 40)),  # all equal
)


@pytest.mark.filterwarnings("error")
@settings(max_examples=400, deadline=None)
@given(variance=hostile_batch, ratio=st.floats(0.01, 1), data=st.data())
def test_xi_guarantees_the_minimal_effective_batch_size(variance: list[float], ratio: float, data: st.DataObject):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(variance), max_size=len(variance))))
    variance = np.array(variance)
    xi = ivdqn.smallest_xi(variance[None], mask[None], ratio)[0, 0]
    unmasked = variance[mask]
    if len(unmasked) == 0:
        assert xi == 0
        return
    goal = minimal_ebs(len(unmasked), ratio)
    # EBS >= MEBS, but that two ways to compute EBS round differently; and xi is no larger than it must be.
    assert exact_ebs(unmasked, xi) >= goal * (1 - 1e-12)
    assert xi == 0 or exact_ebs(unmasked, xi) <= goal * (1 + 2e-6)
    # The single-precision weights of the loss keep the promise.
    single = torch.tensor(variance[None]).float()
    weight, found = ivdqn.biv_weights_and_xi(single, torch.tensor(mask[None]), ivdqn.Args(mebs_ratio=ratio))
    assert found.item() == ivdqn.smallest_xi(single.double().numpy(), mask[None], ratio).item()
    assert weight.dtype == torch.float32
    assert weight.isfinite().all()
    assert weight.sum().item() == pytest.approx(1, abs=1e-5)
    assert (weight[0, ~torch.tensor(mask)] == 0).all()
    assert ivdqn.effective_batch_size(weight).item() >= goal * (1 - 1e-5)


def test_newtons_function_is_concave_so_that_it_converges_from_below():
    """The weights' mean over their deviation: h'' has the sign of -S1 det(H), H the Hankel matrix of power sums S_i."""
    rng = np.random.default_rng(2)
    for spread in (0.1, 1.0, 4.0):
        variance = np.exp(spread * rng.standard_normal(20))
        xi = np.geomspace(1e-2, 1e2, 400) * np.median(variance)
        weight = 1 / (variance + xi[:, None])
        height = weight.mean(-1) / weight.std(-1)
        slope = np.diff(height) / np.diff(xi)
        assert (np.diff(slope) < 1e-9 * slope[1:]).all()
        s = [(weight[200] ** power).sum() for power in range(5)]
        bend = (s[0] * s[2] - s[1] ** 2) * (s[1] * s[4] - s[2] * s[3])
        bend -= (s[1] * s[3] - s[2] ** 2) * (s[0] * s[3] - s[1] * s[2])
        hankel = np.array([s[0:3], s[1:4], s[2:5]])
        assert bend == pytest.approx(s[1] * np.linalg.det(hankel), rel=1e-4)
        assert bend > 0


def test_all_members_are_solved_at_once_as_each_alone():
    rng = np.random.default_rng(0)
    variance, mask = np.exp(3 * rng.standard_normal((7, 64))), rng.random((7, 64)) < 0.7
    together = ivdqn.smallest_xi(variance, mask, 0.9)[:, 0]
    alone = [ivdqn.smallest_xi(variance[[j]], mask[[j]], 0.9)[0, 0] for j in range(7)]
    assert together.tolist() == pytest.approx(alone, rel=1e-5)


def nelder_mead_xi(variance: np.ndarray, ratio: float) -> float:
    """The paper's method (App. A.2): minimise |EBS - MEBS| over xi with Nelder-Mead, to a small tolerance.

    The search is over ln xi, from the batch's mean variance: over xi itself it would leave the domain xi >= 0.
    """
    mebs = minimal_ebs(len(variance), ratio)

    def distance(log_xi: np.ndarray) -> float:
        return abs(exact_ebs(variance, math.exp(log_xi[0])) - mebs)

    start = [math.log(variance.mean())]
    found = scipy.optimize.minimize(distance, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-9})
    assert found.success
    assert found.fun < 1e-6
    return math.exp(found.x[0])


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9, 0.99])
def test_xi_is_the_minimum_that_the_papers_nelder_mead_finds(ratio: float):
    rng = np.random.default_rng(3)
    variance = np.exp(2 * rng.standard_normal((4, 64)))
    mask = rng.random((4, 64)) < 0.7
    xi = ivdqn.smallest_xi(variance, mask, ratio)[:, 0]
    assert (xi > 0).all()
    for member in range(4):
        assert xi[member] == pytest.approx(nelder_mead_xi(variance[member, mask[member]], ratio), rel=1e-4)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9, 0.99])
def test_xi_is_the_root_that_scipy_finds(ratio: float):
    rng = np.random.default_rng(1)
    variance = np.exp(2 * rng.standard_normal((4, 64)))
    variance[:, :3] = 0
    xi = ivdqn.smallest_xi(variance, np.ones((4, 64), bool), ratio)[:, 0]
    for member in range(4):

        def gap(log_xi: float, noise: np.ndarray = variance[member]) -> float:
            return exact_ebs(noise, math.exp(log_xi)) - minimal_ebs(64, ratio)

        assert xi[member] == pytest.approx(math.exp(scipy.optimize.brentq(gap, -60, 60)), rel=1e-4)


@pytest.mark.parametrize("scale", [math.exp(-60), 1e-20, 1.0, 1e20, math.exp(60)])
def test_xi_and_weights_scale_with_variances_as_small_and_large_as_a_network_predicts(scale: float):
    rng = np.random.default_rng(4)
    variance = np.exp(rng.standard_normal((3, 32)))
    mask = rng.random((3, 32)) < 0.7
    xi = ivdqn.smallest_xi(variance, mask, 0.9)
    assert (xi > 0).all()
    assert ivdqn.smallest_xi(scale * variance, mask, 0.9) == pytest.approx(scale * xi, rel=1e-5, abs=0)
    for added in (xi, 0 * xi):
        expected = ivdqn.biv_weights(variance, mask, added)
        assert ivdqn.biv_weights(scale * variance, mask, scale * added) == pytest.approx(expected, rel=1e-9)


def test_xi_is_zero_where_none_is_needed():
    variance = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]])
    assert ivdqn.smallest_xi(variance, np.ones((3, 4), bool), 0.75).tolist() == [[0.0]] * 3
    assert ivdqn.smallest_xi(np.array([[3.0]]), np.array([[True]]), 0.9).tolist() == [[0.0]]
    assert ivdqn.smallest_xi(variance, np.zeros((3, 4), bool), 0.9).tolist() == [[0.0]] * 3  # no sample


@pytest.mark.parametrize("unmasked", [True, False])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("weighting", ["biv", "l2", "sunrise", "uwac"])
def test_a_variance_that_is_not_finite_raises(value: float, unmasked: bool, weighting: str):
    args = ivdqn.Args(weighting=weighting)
    variance, mask = torch.tensor(CLEAN), torch.ones(2, 4, dtype=torch.bool)
    mask[1, 2] = unmasked
    ivdqn.sample_weights(variance, mask, args)
    variance[1, 2] = value
    with pytest.raises(FloatingPointError, match="a variance is not finite"):
        ivdqn.sample_weights(variance, mask, args)


@pytest.mark.parametrize("unmasked", [True, False])
@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])  # the square of the first is infinite
def test_a_prediction_whose_variance_is_not_finite_raises_out_of_the_loss(value: float, unmasked: bool):
    args = ivdqn.Args(num_nets=2, hidden_size=8)
    agent = ivdqn.Agent(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), args)
    batch = SimpleNamespace(
        observation=torch.randn(4, 3),
        action=torch.tensor([0, 1, 1, 0]),
        next_observation=torch.randn(4, 3),
        reward=torch.randn(4),
        discount=torch.full((4,), 0.99),
        terminated=torch.zeros(4),
        mask=torch.ones(4, 2, dtype=torch.bool),
    )
    batch.mask[2] = unmasked
    loss, _ = ivdqn.ivdqn_loss(agent.network, agent.target_network, batch, args)
    assert loss.isfinite()
    batch.next_observation[2] = value
    with pytest.raises(FloatingPointError, match="a variance is not finite"):
        ivdqn.ivdqn_loss(agent.network, agent.target_network, batch, args)


def test_loss_attenuation_is_twice_the_normal_negative_log_likelihood():
    mean, log_variance, target = torch.randn(3, 5, 40).double()
    mask = torch.rand(5, 40) < 0.6
    normal = torch.distributions.Normal(mean, torch.exp(log_variance / 2))
    expected = -2 * normal.log_prob(target) - math.log(2 * math.pi)
    per_member = (expected * mask).sum(-1) / mask.sum(-1)
    found = ivdqn.loss_attenuation((mean - target) ** 2, log_variance, mask)
    assert found.item() == pytest.approx(per_member.sum().item())
