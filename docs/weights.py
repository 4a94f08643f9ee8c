"""The rows and figures of docs/weights.md, from the checkpoints in runs/weights: python docs/weights.py"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import spearmanr

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import ivdqn  # noqa: E402

READINGS = {"terminal variance": {"terminal_variance": True}, "variance 0": {"terminal_variance": False}}
READINGS |= {f"{reading}, xi = 10": flags | {"xi": 10.0} for reading, flags in READINGS.items()}
READINGS |= {"uniform weights": {"terminal_variance": True, "weighting": "l2"}}
LINES = [("terminal", "terminal variance", "C1"), ("terminal", "variance 0", "C0"), ("other", "variance 0", "grey")]
BINS = {"steps_to_end": [0, 1, 2, 5, 10, 20, 50, 100, 200], "squared_error": [0, 0.01, 0.1, 1, 10, 100, 1000, 10_000]}


def steps_to_end(buffer: ivdqn.ReplayBuffer) -> np.ndarray:
    """Steps from each stored transition to the terminal one of its episode (0); -1 if a time limit ended it."""
    following = np.roll(buffer.arrays["observation"][: buffer.size], -1, axis=0)
    ends = np.flatnonzero((buffer.arrays["next_observation"][: buffer.size] != following).any(-1))
    index = np.arange(buffer.size)
    end = ends[np.searchsorted(ends, index) % len(ends)]  # in a full ring, an episode may end at its beginning
    return np.where(buffer.arrays["terminated"][end] > 0, (end - index) % buffer.size, -1)


def weigh(agent: ivdqn.Agent, batch: ivdqn.SimpleNamespace, args: ivdqn.Args) -> dict[str, np.ndarray]:
    """What the script's own loss makes of each sample, for each member, if nothing is masked."""
    loss, found = ivdqn.ivdqn_loss(agent.network, agent.target_network, batch, args)
    (biv_gradient,) = torch.autograd.grad(found["biv"], found["mean"], retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, found["mean"])  # with that of lambda L_LA
    error = biv_gradient / (2 * found["weight"])  # L_BIV is the sum of weight * error^2
    found |= {"biv_gradient": biv_gradient.abs(), "gradient": gradient.abs(), "squared_error": error**2}
    found |= {"weight": found["weight"] * args.batch_size, "steps_to_end": batch.steps_to_end}
    return {name: tensor.detach().expand_as(error).numpy() for name, tensor in found.items()}


def statistics(samples: dict[str, np.ndarray]) -> dict[str, float]:
    terminal = samples["steps_to_end"] == 0
    ebs = ivdqn.effective_batch_size(torch.from_numpy(samples["weight"])).numpy() / terminal.shape[-1]
    batches = terminal.any(-1)  # those with a terminal sample: only in them the variance of terminal targets counts
    row = {"sample_share": terminal.mean(), "xi": np.median(samples["xi"][batches]), "ebs": np.median(ebs[batches])}
    for name in ("weight", "biv_gradient", "gradient"):
        row[f"{name}_share"] = samples[name][terminal].sum() / samples[name].sum()
    for group, members in {"terminal": terminal, "before": samples["steps_to_end"] == 1, "other": ~terminal}.items():
        chosen = {name: samples[name][members] for name in ("target_variance", "squared_error", "weight")}
        row |= {f"{group}_{name}": np.median(values) for name, values in chosen.items()}
        if chosen["target_variance"].any():  # constants have no correlation
            row[f"{group}_spearman"] = spearmanr(chosen["target_variance"], chosen["squared_error"])[0]
    return {name: float(value) for name, value in row.items()}


def draw(x: str, pooled: dict[str, list], path: Path) -> None:
    """Medians and quartiles of variance and weight in each bin of x that has 20 samples or more."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for kind, reading, colour in LINES:
        samples = {name: np.concatenate([part[name] for part in pooled[reading]]) for name in pooled[reading][0]}
        members = (samples["steps_to_end"] == 0) == (kind == "terminal")
        bins = np.where(members, np.digitize(samples[x], BINS[x]) - 1, -1)
        places = [place for place in range(len(BINS[x])) if (bins == place).sum() >= 20]
        for axis, y in zip(axes, ("target_variance", "weight"), strict=True):
            low, mid, high = np.transpose([np.quantile(samples[y][bins == p], (0.25, 0.5, 0.75)) for p in places])
            axis.errorbar(places, mid, (mid - low, high - mid), fmt="o-", color=colour, label=f"{kind}, {reading}")
            axis.set_xticks(range(len(BINS[x])), BINS[x])
            axis.set(xlabel=f"{x.replace('_', ' ')}, at least", ylabel=y.replace("_", " "), yscale="log")
    axes[0].set(yscale="symlog", ylim=(-0.5, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def main(folders: list[Path], out: Path = ROOT, num_batches: int = 1000) -> None:
    pooled = {reading: [] for reading in READINGS}
    rows = []
    for folder in folders:
        args = ivdqn.Args(**ivdqn.read_config(folder)["args"])
        env = ivdqn.make_env(args.env_id, args)
        agent = ivdqn.Agent(env.observation_space, env.action_space, args)
        ivdqn.load_agent(agent, folder)
        agent.buffer.arrays["steps_to_end"] = steps_to_end(agent.buffer)
        rewards = agent.buffer.arrays["reward"][agent.buffer.arrays["terminated"] > 0]  # LunarLander's: -100 or 100
        ends = {"crashes": int((rewards < 0).sum()), "landings": int((rewards > 0).sum())}
        batches = [agent.buffer.sample(args.batch_size, np.random.default_rng(seed)) for seed in range(num_batches)]
        for reading, flags in READINGS.items():  # of the same networks and minibatches
            parts = [weigh(agent, batch, ivdqn.Args(**vars(args) | flags)) for batch in batches]
            samples = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
            rows.append({"run": folder.name, "reading": reading} | ends | statistics(samples))
            pooled[reading].append(samples)
    (out / "results/weights/weights.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for x in BINS:
        draw(x, pooled, out / f"docs/figures/weights-{x.replace('_', '-')}.png")


if __name__ == "__main__":
    main(sorted((ROOT / "runs/weights").iterdir()))
