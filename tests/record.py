"""Record the losses and gradients of the scripts as they were at commit 607811e, before the networks' redesign.

    python tests/record.py FOLDER OUT      (FOLDER: the scripts of 607811e; OUT: tests/recorded.npz)

With the file, test_recorded.py puts the same weights into networks of another layout and compares. What one system
starts from is given by `inputs(data, system)`; all that is said of shapes below holds for it.

Sizes: K = 24 samples, H = 16 hidden units, N = 5 members, or N = 1 in dqn, sac, ivdqn-d, ivdqn-e, ivsac-d and ivsac-e.
Discrete: I = 6 inputs, A = 3 actions; a network has O outputs, 2A if it predicts variances (variance_heads), else A.
Continuous: I = 5, A = 2; a critic has I + A inputs, the observation before the action, and O = 2 outputs if it predicts
variances, otherwise O = 1. The means come before the log-variances. An actor has 2A outputs, its means before its log
standard deviations. All is float32, but for actions of the discrete batch (int64), masks (bool) and settings (text).

`NET` below stands for the six arrays w1, b1, w2, b2, w3, b3 of MLPs w3 relu(w2 relu(w1 x + b1) + b2) + b3, as in
discrete/network.w1. With leading axes L = (N,), also where N is 1, or L = (N, 2), members before twins, for critics:
w1 (*L, H, inputs), w2 (*L, H, H), w3 (*L, outputs, H), b1 (*L, H), b2 (*L, H), b3 (*L, outputs).

Systems: dqn, bootstrap_dqn, sunrise_dqn, ivdqn-a to ivdqn-j; sac, ensemble_sac, sunrise, ivsac-a to ivsac-j. What comes
before a dash is the script. For what the letters stand for, see VARIANTS. Each system has the keys

    {system}/settings           JSON of a dict: with it, Args(**settings) has all that a loss of the script depends on
    {system}/loss               (), discrete: what the script's loss function returns, a sum over the members
    {system}/gradient.NET       discrete: its gradient in `network`, shaped as that; the prior has none
    {system}/loss.critic        (), continuous: losses/critic of the script's update, a sum over members and twins
    {system}/loss.actor         (), losses/actor
    {system}/loss.alpha         (), losses/alpha_loss
    {system}/gradient.actor.NET, {system}/gradient.critic.NET, {system}/gradient.log_alpha (N,)
                                continuous: the gradients at the three optimizers' steps, each of its own loss

and the systems of a family, `discrete` or `continuous`, share the arrays that they start from:

    discrete/network.NET, discrete/target_network.NET       I inputs, O outputs; without the prior
    discrete/prior.NET                                      I inputs, A outputs: network and target network have the
                                                            same; unused by dqn and where N is 1
    continuous/actor.NET                                    I inputs, 2A outputs
    continuous/critic.NET, continuous/target_critic.NET     I + A inputs, O outputs, leading axes (N, 2)
    continuous/log_alpha                                    (N,)
    continuous/noise                                        (2, N, K, A): of the policies, for a' (at s') and for a
                                                            (at s); raw action = mean + standard deviation * noise
    {family}/batch.observation, {family}/batch.next_observation     (K, I)
    {family}/batch.action                                   discrete (K,), continuous (K, A)
    {family}/batch.reward, {family}/batch.terminated        (K,)
    {family}/batch.mask                                     (K, N): member 0, so a single network, learns from every
                                                            sample; unused by dqn and sac, which take the mean over all

In the file these have N = 5 and the O of variance networks. A system has the first N members of them, and if without
variances, the first half of the outputs of its networks or critics: `inputs` cuts them out.
"""

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

MEMBERS, SAMPLES, HIDDEN = 5, 24, 16
SIZES = {"discrete": (6, 3), "continuous": (5, 2)}  # inputs, actions
ARRAYS = ("w1", "b1", "w2", "b2", "w3", "b3")
VARIANTS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"variance_heads": False},
    "c": {"weighting": "l2"},
    "d": {"num_nets": 1},
    "e": {"num_nets": 1, "weighting": "l2"},
    "f": {"weighting": "uwac", "uwac_beta": 2.0},
    "g": {"weighting": "sunrise", "sunrise_temperature": 1.0},
    "h": {"xi": 10.0},
    "i": {"terminal_variance": True},
    "j": {"variance_heads": False, "weighting": "l2"},
}
COMMON = {"hidden_size": HIDDEN, "gamma": 0.99, "tau": 0.005}
ENSEMBLE = {"num_nets": MEMBERS, "mask_prob": 0.6}
WEIGHTED = {"variance_heads": True, "terminal_variance": False, "weighting": "biv", "xi": None, "xi_solver": "newton"}
WEIGHTED |= {"sunrise_temperature": 5.0, "uwac_beta": 0.8}
NETWORK = {"dqn": "QNetwork", "ivdqn": "VarEnsembleQNetwork"}  # EnsembleQNetwork in the others
CRITIC = {"sac": "Critic", "ivsac": "VarEnsembleCritic"}  # EnsembleCritic in the others


def all_settings() -> dict[str, dict[str, Any]]:
    """The settings of each system, the discrete ones first."""
    prior, tuned = COMMON | ENSEMBLE | {"prior_scale": 3.0}, COMMON | {"autotune": True, "alpha": 0.2}
    systems = {"dqn": COMMON, "bootstrap_dqn": prior, "sunrise_dqn": prior | {"sunrise_temperature": 5.0}}
    ivdqn = prior | WEIGHTED | {"prior_scale": 2.0, "mebs_ratio": 0.8, "loss_attenuation_weight": 0.7}
    systems |= {f"ivdqn-{letter}": ivdqn | variant for letter, variant in VARIANTS.items()}
    systems |= {"sac": tuned, "ensemble_sac": tuned | ENSEMBLE}
    systems |= {"sunrise": tuned | ENSEMBLE | {"sunrise_temperature": 5.0}}
    ivsac = tuned | ENSEMBLE | WEIGHTED | {"mebs_ratio": 0.7, "loss_attenuation_weight": 0.3}
    return systems | {f"ivsac-{letter}": ivsac | variant for letter, variant in VARIANTS.items()}


def inputs(data: Mapping[str, np.ndarray], system: str) -> dict[str, np.ndarray]:
    """What a system starts from, by name without the family: its members and outputs of its family's arrays."""
    family, settings = "discrete" if "dqn" in system else "continuous", json.loads(str(data[f"{system}/settings"]))
    members, own = settings.get("num_nets", 1), {}
    for key in data:
        name = key.removeprefix(f"{family}/")
        part, _, last = name.partition(".")
        if name == key:  # it is not of this family
            continue
        if name == "batch.mask" or name == "noise":
            own[name] = data[key][:, :members]
        else:
            own[name] = data[key] if part == "batch" else data[key][:members]
        if part.endswith(("network", "critic")) and last in ("w3", "b3") and not settings.get("variance_heads", False):
            axis = -2 if last == "w3" else -1
            own[name] = np.split(own[name], 2, axis)[0]
    return own


# ---------------------------------------------------------------------------- what the systems start from
def random_mlp(rng: np.random.Generator, leading: tuple[int, ...], num_inputs: int, outputs: int) -> list[np.ndarray]:
    sizes = ((num_inputs, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, outputs))
    shapes = [(fan_in, shape) for fan_in, fan_out in sizes for shape in ((fan_out, fan_in), (fan_out,))]
    return [rng.standard_normal((*leading, *shape)) * fan_in**-0.5 for fan_in, shape in shapes]


def make_inputs(family: str, seed: int) -> dict[str, np.ndarray]:
    rng, data = np.random.default_rng(seed), {}
    num_inputs, num_actions = SIZES[family]
    each, twins = (MEMBERS,), (MEMBERS, 2)
    if family == "discrete":
        shapes = {"network": (each, num_inputs, 2 * num_actions), "prior": (each, num_inputs, num_actions)}
        action = rng.integers(num_actions, size=SAMPLES)
    else:
        shapes = {"actor": (each, num_inputs, 2 * num_actions), "critic": (twins, num_inputs + num_actions, 2)}
        action = rng.uniform(-1, 1, (SAMPLES, num_actions))
        data |= {"log_alpha": rng.uniform(-1.5, 0.5, MEMBERS)}
        data |= {"noise": rng.standard_normal((2, MEMBERS, SAMPLES, num_actions))}
    for part, shape in shapes.items():
        weights = random_mlp(rng, *shape)
        if part == "prior":
            weights[4] *= 0.5  # lest all variances be so high that no UWAC weight is at its cap
        data |= {f"{part}.{name}": array for name, array in zip(ARRAYS, weights, strict=True)}
        if part in ("network", "critic"):
            moved = [x + 0.5 * step for x, step in zip(weights, random_mlp(rng, *shape), strict=True)]
            data |= {f"target_{part}.{name}": array for name, array in zip(ARRAYS, moved, strict=True)}
    observation, next_observation = rng.standard_normal((2, SAMPLES, num_inputs))
    mask = rng.random((SAMPLES, MEMBERS)) < 0.6
    mask[:, 0] = True
    data |= {"batch.observation": observation, "batch.action": action, "batch.next_observation": next_observation}
    data |= {"batch.reward": rng.standard_normal(SAMPLES), "batch.mask": mask}
    data |= {"batch.terminated": (rng.permutation(SAMPLES) < round(0.2 * SAMPLES)).astype(np.float32)}
    return {f"{family}/{name}": x.astype(np.float32) if x.dtype == float else x for name, x in data.items()}


# ---------------------------------------------------------------------------- the old networks
def parameters(network: nn.Module) -> Iterator[tuple[str, Any, nn.Parameter]]:
    """A network's parameters, each with the name of its array and its place in the leading axes."""
    match type(network).__name__:
        case "QNetwork" | "Critic":  # one, or one pair
            nets = [(0, network.net)]
        case "EnsembleCritic":  # pairs
            nets = list(enumerate(network.nets))
        case "VarEnsembleCritic":  # all first twins, then all second ones, each with a leading axis of its own
            nets = [((n, [t]), net) for t, twins in enumerate(network.nets) for n, net in enumerate(twins)]
        case "EnsembleMLP":
            nets = [(..., network)]
    for place, net in nets:
        for name, parameter in zip(ARRAYS, net.parameters(), strict=True):
            yield name, place, parameter


def put(network: nn.Module, own: dict[str, np.ndarray], part: str) -> None:
    for name, place, parameter in parameters(network):
        parameter.data = torch.tensor(own[f"{part}.{name}"][place]).reshape(parameter.shape)  # old biases are columns


def gradients(network: nn.Module, own: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    found = {name: np.full_like(own[f"{part}.{name}"], np.nan) for name in ARRAYS}
    for name, place, parameter in parameters(network):
        found[name][place] = parameter.grad.numpy().reshape(found[name][place].shape)
    return found


def make_batch(own: dict[str, np.ndarray]) -> SimpleNamespace:
    fields = {name.removeprefix("batch."): x for name, x in own.items() if name.startswith("batch.")}
    return SimpleNamespace(**{name: torch.tensor(x) for name, x in fields.items()})


def record_discrete(module: ModuleType, args: Any, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    script = module.__name__
    network, target_network = (
        getattr(module, NETWORK.get(script, "EnsembleQNetwork"))(*SIZES["discrete"], args) for _ in range(2)
    )
    for each, part in ((network, "network"), (target_network, "target_network")):
        put(each if script == "dqn" else each.net, own, part)
        if script != "dqn":
            put(each.prior, own, "prior")
    loss, _ = getattr(module, f"{script}_loss")(network, target_network, make_batch(own), args)
    loss.backward()
    found = gradients(network if script == "dqn" else network.net, own, "network")
    return {"loss": loss.detach().numpy()} | {f"gradient.{name}": x for name, x in found.items()}


def record_continuous(module: ModuleType, args: Any, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    script, (num_inputs, num_actions) = module.__name__, SIZES["continuous"]
    make_critic = getattr(module, CRITIC.get(script, "EnsembleCritic"))
    actor = module.EnsembleMLP(len(own["log_alpha"]), num_inputs, args.hidden_size, 2 * num_actions)
    critic, target_critic = (make_critic(num_inputs, num_actions, args) for _ in range(2))
    put(actor, own, "actor")
    put(critic, own, "critic")
    put(target_critic.requires_grad_(False), own, "target_critic")
    log_alpha = torch.tensor(own["log_alpha"]).reshape(() if script == "sac" else (-1, 1))
    agent = SimpleNamespace(actor=actor, critic=critic, target_critic=target_critic)
    agent.temperature = nn.ParameterDict({"log_alpha": log_alpha})
    agent.actor_optimizer, agent.critic_optimizer, agent.alpha_optimizer = (
        torch.optim.SGD(part.parameters(), lr=0.01) for part in (actor, critic, agent.temperature)
    )
    found = {}  # the gradients, taken when an optimizer is about to make its step

    def hook(part: str, optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
        def take(*_: Any) -> None:
            found.update({f"{part}.{name}": x for name, x in gradients(network, own, part).items()})

        optimizer.register_step_pre_hook(take)

    def take_alpha(*_: Any) -> None:
        found["log_alpha"] = agent.temperature["log_alpha"].grad.reshape(-1).numpy().copy()

    hook("actor", agent.actor_optimizer, actor)
    hook("critic", agent.critic_optimizer, critic)
    agent.alpha_optimizer.register_step_pre_hook(take_alpha)
    draws = iter(torch.tensor(own["noise"]))  # for a' first, then for a
    with mock.patch.object(torch, "randn_like", lambda x: next(draws).reshape(x.shape)):
        metrics = getattr(module, f"{script}_update")(agent, make_batch(own), args)
    assert next(draws, None) is None
    losses = {"critic": "critic", "actor": "actor", "alpha": "alpha_loss"}
    losses = {f"loss.{name}": metrics[f"losses/{metric}"]().detach().numpy() for name, metric in losses.items()}
    return losses | {f"gradient.{name}": x for name, x in found.items()}


def main(folder: str, out: str) -> None:
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    data = make_inputs("discrete", seed=0) | make_inputs("continuous", seed=1)
    for system, settings in all_settings().items():
        module = importlib.import_module(system.split("-")[0])
        assert Path(module.__file__).parent == Path(folder).resolve(), f"{module.__file__} is not of {folder}"
        data[f"{system}/settings"] = np.array(json.dumps(settings))
        record = record_discrete if "dqn" in system else record_continuous
        found = record(module, module.Args(**settings), inputs(data, system))
        assert all(np.isfinite(x).all() for x in found.values()), system
        data |= {f"{system}/{name}": x for name, x in found.items()}
    np.savez_compressed(out, **data)


if __name__ == "__main__":
    main(*sys.argv[1:])
