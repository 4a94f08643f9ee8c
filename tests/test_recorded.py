"""The losses and gradients of all systems are those of commit 607811e, before networks and losses were rewritten.

The same weights, in the one form that record.py describes, are put into the networks of today, and the same minibatch
and noise go through the losses of today. That loss and gradients are then the recorded ones, to the rounding of single
precision, proves that the rewriting did not move the maths. That the maths is right is for the other tests to say.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import script
from record import ARRAYS, SIZES, all_settings, inputs
from torch import Tensor, nn

RECORDED = np.load(Path(__file__).with_name("recorded.npz"))
DISCRETE = [system for system in all_settings() if "dqn" in system]
CONTINUOUS = [system for system in all_settings() if "sac" in system or system == "sunrise"]
GONE = {"xi_solver"}  # settings that the scripts have no more


def test_all_systems_are_recorded_and_compared():
    settings = {key.removesuffix("/settings") for key in RECORDED if key.endswith("/settings")}
    assert settings == {*DISCRETE, *CONTINUOUS}
    assert len(DISCRETE) == len(CONTINUOUS) == 13


def read_system(system: str) -> tuple[ModuleType, Any, dict[str, np.ndarray]]:
    """Its script, its arguments, and the arrays that it starts from."""
    module = script(system.split("-")[0])
    settings = json.loads(str(RECORDED[f"{system}/settings"]))
    args = module.Args(**{name: value for name, value in settings.items() if name not in GONE})
    return module, args, inputs(RECORDED, system)


def make_agent(module: ModuleType, family: str, args: Any) -> Any:
    num_inputs, num_actions = SIZES[family]
    args.buffer_size = 1
    if family == "discrete":
        actions = gym.spaces.Discrete(num_actions)
    else:
        actions = gym.spaces.Box(-1, 1, (num_actions,))
    return module.Agent(gym.spaces.Box(-np.inf, np.inf, (num_inputs,)), actions, args)


def make_batch(own: dict[str, np.ndarray]) -> SimpleNamespace:
    fields = {name.removeprefix("batch."): array for name, array in own.items() if name.startswith("batch.")}
    return SimpleNamespace(**{name: torch.tensor(array) for name, array in fields.items()})


def single_networks(network: nn.Module) -> Iterator[tuple[tuple[int, ...], nn.Sequential]]:
    """The nn.Sequentials of a network, each with its place in the leading axes of the record."""
    match type(network).__name__:
        case "QNetwork" | "Policy":
            yield (0,), network.net
        case "Critic":
            for twin, net in enumerate(network.twins):
                yield (0, twin), net
        case "EnsemblePolicy":
            for member, net in enumerate(network.nets):
                yield (member,), net
        case "EnsembleCritic" | "VarEnsembleCritic":
            for twin, nets in enumerate(network.twins):
                for member, net in enumerate(nets):
                    yield (member, twin), net
        case "Sequential":  # of EnsembleLinear: all members in one
            yield (), network


def in_record(parameter: Tensor) -> Tensor:
    """A view as in the record, where a bias of EnsembleLinear, (N, outputs, 1), has no last axis."""
    return parameter.squeeze(-1) if parameter.dim() == 3 and parameter.shape[-1] == 1 else parameter


def put(network: nn.Module, own: dict[str, np.ndarray], part: str) -> None:
    for place, net in single_networks(network):
        for name, parameter in zip(ARRAYS, net.parameters(), strict=True):
            in_record(parameter.data).copy_(torch.tensor(own[f"{part}.{name}"][place]))


def gradients(network: nn.Module, own: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    found = {name: np.full_like(own[f"{part}.{name}"], np.nan) for name in ARRAYS}
    for place, net in single_networks(network):
        for name, parameter in zip(ARRAYS, net.parameters(), strict=True):
            found[name][place] = in_record(parameter.grad)
    return found


def compare(system: str, found: dict[str, np.ndarray]) -> None:
    """All that is recorded of a system, and nothing else, has been found, to the rounding of single precision."""
    recorded = {key.removeprefix(f"{system}/") for key in RECORDED if key.startswith(f"{system}/")} - {"settings"}
    assert found.keys() == recorded
    for name in sorted(recorded):
        expected = RECORDED[f"{system}/{name}"]
        assert found[name].shape == expected.shape, name
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5 * abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("system", DISCRETE)
def test_discrete_losses_and_gradients_have_not_moved(system: str):
    module, args, own = read_system(system)
    agent = make_agent(module, "discrete", args)
    for network, part in ((agent.network, "network"), (agent.target_network, "target_network")):
        put(network if system == "dqn" else network.net, own, part)
        if system != "dqn":
            put(network.prior, own, "prior")
    batch = make_batch(own)
    batch.discount = torch.full_like(batch.reward, args.gamma)  # one-step returns, which is what there was
    loss, _ = getattr(module, f"{module.__name__}_loss")(agent.network, agent.target_network, batch, args)
    loss.backward()
    found = gradients(agent.network if system == "dqn" else agent.network.net, own, "network")
    compare(system, {"loss": loss.detach().numpy()} | {f"gradient.{name}": array for name, array in found.items()})


@pytest.mark.parametrize("system", CONTINUOUS)
def test_continuous_losses_and_gradients_have_not_moved(system: str, monkeypatch: pytest.MonkeyPatch):
    """The gradients at the three optimizers' steps, with the recorded noise: for a' first, then for a."""
    module, args, own = read_system(system)
    agent = make_agent(module, "continuous", args)
    put(agent.actor, own, "actor")
    put(agent.critic, own, "critic")
    put(agent.target_critic, own, "target_critic")
    agent.temperature.log_alpha.data = torch.tensor(own["log_alpha"]).unsqueeze(1)  # (N, 1)
    noise = iter(torch.tensor(own["noise"]))
    found = {}

    def recorded_noise(like: Tensor) -> Tensor:
        return next(noise).reshape(like.shape)

    def take_actor(*_: Any) -> None:
        found.update({f"gradient.actor.{name}": x for name, x in gradients(agent.actor, own, "actor").items()})

    def take_critic(*_: Any) -> None:
        found.update({f"gradient.critic.{name}": x for name, x in gradients(agent.critic, own, "critic").items()})

    def take_alpha(*_: Any) -> None:
        found["gradient.log_alpha"] = agent.temperature.log_alpha.grad.squeeze(1).numpy().copy()

    agent.actor_optimizer.register_step_pre_hook(take_actor)
    agent.critic_optimizer.register_step_pre_hook(take_critic)
    agent.alpha_optimizer.register_step_pre_hook(take_alpha)
    monkeypatch.setattr(torch, "randn_like", recorded_noise)
    losses, *_ = getattr(module, f"{module.__name__}_update")(agent, make_batch(own), args)
    assert next(noise, None) is None  # all of it has been asked for
    for name, loss in {"critic": "critic", "actor": "actor", "alpha": "alpha_loss"}.items():
        found[f"loss.{name}"] = losses[loss].detach().numpy()
    compare(system, found)
