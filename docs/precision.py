"""Does SAC learn with products of less than single precision? The table of docs/speed.md: python docs/precision.py

`bfloat16` does what a CPU with AMX makes of --matmul-precision medium: factors are rounded to bfloat16 (8 bits), sums
are in single precision, forward and backward alike.
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import sac  # noqa: E402

SEEDS = (1, 2, 3)
SETTINGS = {
    "env_id": "Pendulum-v1",
    "total_timesteps": 15_000,
    "rollout_length": 200,
    "eval_every": 200,
    "batch_size": 128,
    "hidden_size": 64,
    "policy_lr": 1e-3,
    "q_lr": 1e-3,
    "alpha_lr": 1e-3,
    "num_threads": 1,
    "cuda": False,
}


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


class RoundedLinear(torch.autograd.Function):
    """nn.functional.linear with rounded factors."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).T + bias

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradients = rounded(gradient)
        return gradients @ rounded(weight), gradients.T @ rounded(x), gradient.sum(0)


def last_return(run: Path) -> float:
    """The mean of the last ten evaluations."""
    rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
    return float(np.mean([row["charts/eval_return"] for row in rows if "charts/eval_return" in row][-10:]))


def main() -> None:
    lines = [f"| products | {' | '.join(f'seed {seed}' for seed in SEEDS)} |", "| --- " * (len(SEEDS) + 1) + "|"]
    for products in ("highest", "medium", "bfloat16"):
        linear = RoundedLinear.apply if products == "bfloat16" else torch.nn.functional.linear
        precision = "highest" if products == "bfloat16" else products
        with tempfile.TemporaryDirectory() as folder, mock.patch("torch.nn.functional.linear", linear):
            runs = [sac.train(sac.Args(**SETTINGS, seed=s, matmul_precision=precision, runs_dir=folder)) for s in SEEDS]
            lines.append(f"| {products} | {' | '.join(f'{last_return(run):.0f}' for run in runs)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
