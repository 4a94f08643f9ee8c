"""Do the tests notice? Breaks ivdqn.py and ivsac.py in one place at a time and runs the tests on each broken copy.

    python tests/mutate.py --results mutants.json                          the mutants made by hand
    python tests/mutate.py --results mutants.json --sample 100 --seed 0    and some of all small changes, at random

A mutant made by hand is a text of a script and what takes its place; a text that is not there ends the run. A function
that both scripts hold in the same words is broken in both, the machinery in all: test_scripts.py compares the words and
would notice any change. The broken scripts are in a temporary folder. Tests run fastest first, by the times of a run on
the whole scripts, in a fork of a process that has imported torch already, up to the first that fails. A results file
that exists is continued. What survived, and why, is told in mutants.md.
"""

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Imported for the forks, which would need seconds each.
import gymnasium  # noqa: F401
import hypothesis  # noqa: F401
import pytest
import scipy.optimize  # noqa: F401
import torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("dqn", "bootstrap_dqn", "sunrise_dqn", "ivdqn", "sac", "ensemble_sac", "sunrise", "ivsac")
RULED_LINE = "# Nothing below is about the algorithm"
ALGORITHM = ("ivdqn", "ivsac", "both")
# For what a mutant breaks: the tests that matter, and of those with a script in their parameters, which ones.
TESTS = {
    "ivdqn": ("test_uncertainty", "test_recorded", "test_discrete"),
    "ivsac": ("test_recorded", "test_continuous"),
    "both": ("test_uncertainty", "test_recorded", "test_discrete", "test_continuous"),
    "machinery": ("test_discrete", "test_continuous", "test_resume", "test_runs"),
}
# Which scripts it is broken in: what is the same in all of them, in all.
BROKEN = {"ivdqn": ["ivdqn"], "ivsac": ["ivsac"], "both": ["ivdqn", "ivsac"], "machinery": list(SCRIPTS)}
PARAMETERS = {
    "ivdqn": {"ivdqn"},
    "ivsac": {"ivsac"},
    "both": {"ivdqn", "ivsac"},
    "machinery": {"ivdqn", "ivsac", "dqn", "sac"},
}
# Slow, or about what is not broken here.
LEFT_OUT_TESTS = "video|tracked|account|mujoco|as_a_command|short_run|small_mdp|one_step_problem|the_bar|on_a_terminal"
LEFT_OUT_TESTS += "|help|killed_at_ten|memory|copy_of_the_buffer|two_processes|full_disk|records_every|same_seed"
LEFT_OUT_TESTS += "|bad_input|arguments_of_the_environment|config_that_is|no_fcntl|stop_is_clean|trusted|a_fork_can"
LEFT_OUT_TESTS += "|evaluate_reports"
LEFT_OUT_LINES = r"re\.sub|rmtree"  # broken, they could write or delete outside of the temporary folder
PATIENCE = 60  # seconds, besides ten times what it took before, after which a test hangs
HANGS = 77  # exit code


@dataclass
class Mutant:
    kind: str
    part: str  # a key of TESTS
    changes: list[tuple[str, str]]  # of texts of the scripts

    def diff(self) -> str:
        lines = []
        for old, new in self.changes:
            lines += list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1))[3:]
        return "\n".join(lines)

    def key(self) -> str:
        return hashlib.sha256(f"{self.part} {self.changes}".encode()).hexdigest()[:8]

    def is_possible(self, texts: dict[str, str]) -> bool:
        """Whether the scripts that it is about hold what it changes, once, and are Python with the change."""
        if any(texts[name].count(old) != 1 for name in BROKEN[self.part] for old, _ in self.changes):
            return False
        try:
            for text in self.broken(texts).values():
                ast.parse(text)
        except SyntaxError:
            return False
        return True

    def broken(self, texts: dict[str, str]) -> dict[str, str]:
        """The scripts, with the changes in those that it is about."""
        texts = dict(texts)
        for name in BROKEN[self.part]:
            for old, new in self.changes:
                texts[name] = texts[name].replace(old, new)
        return texts


# ---------------------------------------------------------------------------- changes of one node of the syntax tree
OPERATORS = {
    **{ast.Lt: ("<", ["<=", ">="]), ast.LtE: ("<=", ["<", ">"]), ast.Gt: (">", [">=", "<="])},
    **{ast.GtE: (">=", [">", "<"]), ast.Eq: ("==", ["!="]), ast.NotEq: ("!=", ["=="])},
    **{ast.Is: ("is", ["is not"]), ast.IsNot: ("is not", ["is"]), ast.In: ("in", ["not in"])},
    **{ast.NotIn: ("not in", ["in"]), ast.And: ("and", ["or"]), ast.Or: ("or", ["and"])},
    **{ast.Add: ("+", ["-"]), ast.Sub: ("-", ["+"]), ast.Mult: ("*", ["/"]), ast.Div: ("/", ["*"])},
    **{ast.Pow: ("**", ["*"]), ast.Mod: ("%", ["//"])},
}
OTHER_FUNCTIONS = {
    **{"no_grad": "enable_grad", "min": "max", "max": "min", "amin": "amax", "argmin": "argmax", "argmax": "argmin"},
    **{"minimum": "maximum", "maximum": "minimum", "all": "any", "any": "all", "mean": "sum", "nanmean": "nansum"},
    **{"median": "mean", "round": "int", "popleft": "pop", "exists": "is_dir"},
}
LEFT_OUT_CALLS = ("clamp", "clamp_min", "clamp_max", "detach", "exp", "sqrt", "tanh", "requires_grad_", "cpu", "copy")


def is_plain(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def is_rebound(name: str, value: ast.AST) -> bool:
    return name in {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    """The changes of a node, not of those within it: kind, first and last node that are replaced, and the new text."""
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "not or minus left out", node, node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, node, str(2 * value or 1.0)
        case ast.Name(id=name) if name in OTHER_FUNCTIONS:
            yield "other function", node, node, OTHER_FUNCTIONS[name]
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in LEFT_OUT_CALLS:
            if ast.unparse(value) not in ("torch", "np"):
                yield "call left out", node, node, f"({ast.unparse(value)})"
        case ast.Call(args=[first, second, *_]) if is_plain(first) and is_plain(second):
            yield "arguments swapped", first, second, f"{ast.unparse(second)}, {ast.unparse(first)}"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Break():
            yield "statement left out", node, node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement left out", node, node, "pass"
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_rebound(name, value):
            yield "statement left out", node, node, "pass"


def operands(node: ast.AST) -> tuple[ast.operator, ast.AST, ast.AST] | None:
    """The first operator of a node, and what stands before and behind it."""
    match node:
        case ast.Compare(ops=[operator, *_], left=left, comparators=[right, *_]):
            return operator, left, right
        case ast.BinOp(op=operator, left=left, right=right):
            return operator, left, right
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            return operator, left, right
    return None


def nodes_to_change(node: ast.AST) -> Iterator[ast.AST]:
    """A function's nodes, without annotations (no behaviour) and f-strings (sentences)."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from nodes_to_change(child)


def replacements(text: str, tree: ast.AST) -> Iterator[tuple[str, int, int, str]]:
    """All changes: kind, the place in the text, and what comes there."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    for node in nodes_to_change(tree):
        for kind, first, last, new in changes_of(node):
            yield kind, begin(first), end(last), new
        found = operands(node)
        if found and type(found[0]) in OPERATORS:
            symbol, others = OPERATORS[type(found[0])]
            between = slice(end(found[1]), begin(found[2]))
            for other in others:
                yield "operator", between.start, between.stop, text[between].replace(symbol, other, 1)
        if isinstance(node, ast.Attribute) and node.attr in OTHER_FUNCTIONS:
            yield "other function", end(node) - len(node.attr), end(node), OTHER_FUNCTIONS[node.attr]
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield "condition", begin(node.test), end(node.test), f"not ({ast.unparse(node.test)})"


def mutants_of(name: str, texts: dict[str, str]) -> Iterator[Mutant]:
    """The mutants of a script, function by function; its arguments and tables are data, and stay as they are."""
    text = texts[name]
    other = texts["ivsac" if name == "ivdqn" else "ivdqn"]
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.endswith("Args"):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        old = "".join(lines[first - 1 : node.end_lineno])
        if text.index(old) > text.index(RULED_LINE):
            part = "machinery"
        else:
            part = "both" if old in other else name
        for kind, begin, end, new in replacements(old, ast.parse(old)):
            line = old[old.rfind("\n", 0, begin) + 1 :].partition("\n")[0]
            if new != old[begin:end] and not re.search(LEFT_OUT_LINES, line):
                yield Mutant(kind, part, [(old, old[:begin] + new + old[end:])])


# ---------------------------------------------------------------------------- changes made by hand
def one_change(kind: str, part: str, old: str, new: str) -> Mutant:
    return Mutant(kind, part, [(old, new)])


def in_each(kind: str, old: str, new: str) -> list[Mutant]:
    """For a text that both scripts hold in functions of their own: a mutant of each."""
    return [one_change(kind, part, old, new) for part in ("ivdqn", "ivsac")]


# Weights by a variance that the policies' gradient can pass through.
SUNRISE_WITH_GRADIENT = """\
    if args.weighting == "sunrise":
        spread = predictive_variance(agent.critic, batch.observation, action, lower_twin).sqrt()
        weight = uniform_weights(mask) * (torch.sigmoid(-spread * args.sunrise_temperature) + 0.5)
    # Line 23.
"""
UWAC_WITH_GRADIENT = """\
    if args.weighting == "uwac":
        spread = predictive_variance(agent.critic, batch.observation, action, lower_twin)
        weight = uniform_weights(mask) * (args.uwac_beta / spread).clamp_max(1.5)
    # Line 23.
"""
# What is changed, in which part (a key of TESTS), the old text, the new one.
MADE_BY_HAND = [
    # The loop of the DQN family.
    one_change("epsilon decays with the step", "ivdqn", "decay**run.episode)", "decay**run.global_step)"),
    one_change("epsilon decays by half of the exponent", "ivdqn", "decay**run.episode)", "decay**(run.episode / 2))"),
    one_change("epsilon falls below its end", "ivdqn", "epsilon = max(args.end_epsilon, ", "epsilon = min(1.0, "),
    one_change(
        "epsilon is the probability of the greedy action", "ivdqn", "rng.random() < epsilon", "rng.random() > epsilon"
    ),
    one_change(
        "the last action is never drawn",
        "ivdqn",
        "rng.integers(env.action_space.n)",
        "rng.integers(env.action_space.n - 1)",
    ),
    one_change("member 0 always acts", "ivdqn", "observation)[member])", "observation)[0])"),
    one_change(
        "the last member never acts",
        "ivdqn",
        "member = rng.integers(args.num_nets)",
        "member = rng.integers(args.num_nets - 1)",
    ),
    one_change(
        "a member is drawn at each step", "ivdqn", "observation)[member])", "observation)[rng.integers(args.num_nets)])"
    ),
    one_change("updates five steps early", "ivdqn", "step > args.learning_starts", "step > args.learning_starts - 5"),
    one_change("an update one step early", "ivdqn", "step > args.learning_starts", "step >= args.learning_starts"),
    one_change(
        "an update at each step", "ivdqn", "learning and run.global_step % args.train_frequency == 0", "learning"
    ),
    one_change(
        "a target update with each update",
        "ivdqn",
        "% args.target_network_frequency == 0",
        "% args.train_frequency == 0",
    ),
    one_change(
        "target updates before learning",
        "ivdqn",
        "if learning and run.global_step % args.target",
        "if run.global_step % args.target",
    ),
    one_change("gradients are summed over updates", "ivdqn", "agent.optimizer.zero_grad()", "pass"),
    one_change(
        "the norm of all members is clipped",
        "ivdqn",
        "clip_each_member(parameters, args.max_grad_norm)",
        "nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)",
    ),
    one_change(
        "gradients are clipped to 1",
        "ivdqn",
        "clip_each_member(parameters, args.max_grad_norm)",
        "clip_each_member(parameters, 1.0)",
    ),
    one_change("small gradients are blown up", "ivdqn", "squares.sqrt()).clamp_max(1)", "squares.sqrt())"),
    one_change(
        "a time limit is stored as terminal",
        "ivdqn",
        "terminated or (truncated and args.truncation_terminates)",
        "done",
    ),
    one_change(
        "no option to store it as terminal",
        "ivdqn",
        "terminated or (truncated and args.truncation_terminates)",
        "terminated",
    ),
    one_change("the first observation stays", "ivdqn", "observation = next_observation  # line 9", "pass"),
    one_change("no test of the loss", "ivdqn", 'require_finite("the loss", loss.item())', "pass"),
    one_change(
        "metrics one step late",
        "ivdqn",
        "run.global_step % args.log_every == 0",
        "run.global_step % args.log_every == 1",
    ),
    one_change(
        "evaluation after each episode",
        "ivdqn",
        "if args.eval_every and run.episode % args.eval_every == 0",
        "if args.eval_every",
    ),
    one_change(
        "one seed for all evaluations", "ivdqn", "evaluation_row(agent, run.episode)", "evaluation_row(agent, 0)"
    ),
    one_change(
        "no threshold but the argument",
        "ivdqn",
        "run.solved_at = run.eval_env.spec.reward_threshold",
        "pass",
    ),
    # The loop of the SAC family.
    one_change(
        "member 0 always acts", "ivsac", "episode_member = int(rng.integers(args.num_nets))", "episode_member = 0"
    ),
    one_change("updates five steps early", "ivsac", "step >= args.learning_starts", "step >= args.learning_starts - 5"),
    one_change("updates five steps late", "ivsac", "step >= args.learning_starts", "step >= args.learning_starts + 5"),
    one_change(
        "policies act one step early",
        "ivsac",
        "run.global_step <= args.learning_starts",
        "run.global_step < args.learning_starts",
    ),
    one_change("random actions are positive", "ivsac", "rng.uniform(-1, 1,", "rng.uniform(0, 1,"),
    one_change(
        "as many updates as steps",
        "ivsac",
        "for update in range(num_updates)",
        "for update in range(args.rollout_length)",
    ),
    one_change(
        "updates are rounded down",
        "ivsac",
        "round(args.rollout_length * args.updates_per_step)",
        "int(args.rollout_length * args.updates_per_step)",
    ),
    one_change("rollouts without an update", "ivsac", "if num_updates == 0:", "if False:"),
    one_change("a time limit is stored as terminal", "ivsac", "terminated=terminated,", "terminated=done,"),
    one_change("no test of the losses", "ivsac", 'require_finite("a loss", sum(losses.values()).item())', "pass"),
    one_change(
        "metrics one step late",
        "ivsac",
        "run.global_step % args.log_every == 0",
        "run.global_step % args.log_every == 1",
    ),
    one_change(
        "one seed for all evaluations", "ivsac", "evaluation_row(agent, run.global_step)", "evaluation_row(agent, 0)"
    ),
    one_change("UCB is a lower bound", "ivsac", "mean + args.ucb * std", "mean - args.ucb * std"),
    one_change("UCB by the spread alone", "ivsac", "(mean + args.ucb * std).argmax()", "std.argmax()"),
    one_change("UCB with --ucb 0", "ivsac", "if args.ucb > 0:", "if args.ucb >= 0:"),
    one_change("UCB's spread is unbiased", "ivsac", "(0, 1), unbiased=False)", "(0, 1), unbiased=True)"),
    one_change(
        "UCB over the first twins",
        "ivsac",
        "torch.std_mean(q_values, (0, 1),",
        "torch.std_mean(q_values[:, :1], (0, 1),",
    ),
    one_change("the first policy is evaluated", "ivsac", "return actions.mean(0)", "return actions[0]"),
    one_change("actions are scaled from 0", "ivsac", "np.float32(-1), np.float32(1)", "np.float32(0), np.float32(1)"),
    # Both loops.
    *in_each("no mask", "mask=rng.random(args.num_nets) < args.mask_prob,", "mask=True,"),
    *in_each(
        "one mask for all members",
        "mask=rng.random(args.num_nets) < args.mask_prob,",
        "mask=rng.random() < args.mask_prob,",
    ),
    *in_each("a mask for a single network", "self.mask_prob = 1.0", "pass"),
    *in_each("no larger minibatch", "round(args.batch_size / args.mask_prob)", "args.batch_size"),
    *in_each(
        "one minibatch for all updates",
        "buffer.sample(sample_size, rng)",
        "buffer.sample(sample_size, np.random.default_rng(0))",
    ),
    one_change("a target copied", "both", "target.lerp_(online, tau)", "target.copy_(online)"),
    one_change("a target that moves by 1 - tau", "both", "target.lerp_(online, tau)", "target.lerp_(online, 1 - tau)"),
    *in_each(
        "the return is the last reward",
        "                episodic_return += reward\n",
        "                episodic_return = reward\n",
    ),
    one_change(
        "evaluations are the last reward",
        "both",
        "        episodic_return += reward\n        done",
        "        episodic_return = reward\n        done",
    ),
    one_change("evaluations have no seed", "both", "env.reset(seed=seed)", "env.reset()"),
    *in_each("episodes are not counted", "run.episode += 1", "pass"),
    # Networks and agents.
    one_change("another scale of the first weights", "ivdqn", "bound = num_inputs**-0.5", "bound = num_outputs**-0.5"),
    one_change("the prior is not scaled", "ivdqn", "mean + self.prior_scale * self.prior(x)", "mean + self.prior(x)"),
    one_change("priors learn", "ivdqn", "num_actions).requires_grad_(False)\n\n", "num_actions)\n\n"),
    one_change(
        "means and variances swapped",
        "ivdqn",
        "mean, log_variance = output.chunk(2, -1)",
        "log_variance, mean = output.chunk(2, -1)",
    ),
    one_change(
        "means and variances swapped",
        "ivsac",
        "mean, log_variance = output.unbind(-1)",
        "log_variance, mean = output.unbind(-1)",
    ),
    one_change("a clamp of 6", "both", "MAX_LOG_VARIANCE = 60", "MAX_LOG_VARIANCE = 6"),
    *in_each("a clamp from above only", "clamp(-MAX_LOG_VARIANCE, MAX_LOG_VARIANCE)", "clamp_max(MAX_LOG_VARIANCE)"),
    *in_each("an ensemble's own variance is 1", "torch.full_like(mean, -torch.inf)", "torch.full_like(mean, 0)"),
    one_change(
        "the target starts anew", "ivdqn", "self.target_network.load_state_dict(self.network.state_dict())", "pass"
    ),
    one_change(
        "the target starts anew", "ivsac", "self.target_critic.load_state_dict(self.critic.state_dict())", "pass"
    ),
    one_change("Adam's own learning rate", "ivdqn", "lr=args.learning_rate, fused=True", "fused=True"),
    Mutant(
        "learning rates swapped",
        "ivsac",
        [
            ("self.actor.parameters(), lr=args.policy_lr", "self.actor.parameters(), lr=args.alpha_lr"),
            ("self.temperature.parameters(), lr=args.alpha_lr", "self.temperature.parameters(), lr=args.policy_lr"),
        ],
    ),
    Mutant(
        "actor's and critics' learning rates swapped",
        "ivsac",
        [
            ("self.actor.parameters(), lr=args.policy_lr", "self.actor.parameters(), lr=args.q_lr"),
            ("self.critic.parameters(), lr=args.q_lr", "self.critic.parameters(), lr=args.policy_lr"),
        ],
    ),
    one_change("alpha starts at 1", "ivsac", "0.0 if args.autotune else math.log(args.alpha)", "0.0"),
    one_change("wider policies", "ivsac", "log_std.clamp(-20, 2)", "log_std.clamp(-20, 20)"),
    one_change("log-probability before the tanh", "ivsac", "(log_normal - log_slope).sum(-1)", "log_normal.sum(-1)"),
    one_change("half of the slope of tanh", "ivsac", "log_slope = 2 * (math", "log_slope = (math"),
    one_change(
        "ties go to the first action", "ivdqn", "rng.choice(np.flatnonzero(votes == votes.max()))", "votes.argmax()"
    ),
    one_change(
        "the first member is evaluated",
        "ivdqn",
        "majority_vote(member_actions(self, observation), rng)",
        "int(member_actions(self, observation)[0])",
    ),
    # The buffer.
    one_change(
        "a ring begun anew", "both", 'self.position = state["position"]', "self.position = self.size % self.capacity"
    ),
    one_change("an empty ring after a resume", "both", 'self.size = state["size"]', "pass"),
    one_change(
        "the oldest transitions stay",
        "both",
        "(self.position + 1) % self.capacity",
        "min(self.position + 1, self.capacity - 1)",
    ),
    one_change("the ring has no size", "both", "min(self.size + 1, self.capacity)", "self.size + 1"),
    one_change("empty places are sampled", "both", "rng.integers(self.size, size", "rng.integers(self.capacity, size"),
    one_change(
        "the last place is not sampled",
        "both",
        "rng.integers(self.size, size",
        "rng.integers(max(self.size - 1, 1), size",
    ),
    one_change("rewards are not discounted", "ivdqn", "args.gamma**i * reward", "reward"),
    one_change("the oldest reward counts least", "ivdqn", "in enumerate(rewards)", "in enumerate(reversed(rewards))"),
    one_change("one discount for all returns", "ivdqn", "args.gamma ** len(rewards)", "args.gamma"),
    one_change("the last steps are lost", "ivdqn", " or (done and pending):", ":"),
    # Uncertainty.
    one_change("no spread of the means", "both", "(variance + (mean - mean.mean(0)) ** 2).mean(0)", "variance.mean(0)"),
    one_change(
        "no variances of the members",
        "both",
        "(variance + (mean - mean.mean(0)) ** 2).mean(0)",
        "((mean - mean.mean(0)) ** 2).mean(0)",
    ),
    one_change(
        "the unstable formula",
        "both",
        "(variance + (mean - mean.mean(0)) ** 2).mean(0)",
        "(variance + mean**2).mean(0) - mean.mean(0) ** 2",
    ),
    one_change("another number for 0", "both", "TINY = 1e-60", "TINY = 1e-20"),
    one_change("masked samples count in MEBS", "both", "np.maximum(mask.sum(-1, keepdims=True), 1)", "mask.shape[-1]"),
    one_change("MEBS without its limit", "both", "np.minimum(mebs_ratio * n, n - 1)", "mebs_ratio * n"),
    one_change("xi a little too small", "both", "* (1 + 1e-6), xi)", "* (1 - 1e-6), xi)"),
    one_change("xi where none is needed", "both", "np.where(is_short, (xi + step)", "np.where(True, abs(xi + step)"),
    one_change(
        "masked samples count in xi",
        "both",
        "weight = mask / np.maximum(variance + xi, TINY)\n        weight_sum",
        "weight = 1 / np.maximum(variance + xi, TINY)\n        weight_sum",
    ),
    one_change("three steps of Newton's", "both", "for _ in range(100)", "for _ in range(3)"),
    one_change(
        "Newton's steps end with the first member's", "both", "if not is_short.any():", "if not is_short.all():"
    ),
    one_change("another slope", "both", "weight - square_sum / weight_sum", "weight - weight_sum / n"),
    one_change(
        "the sign of the goal", "both", "(goal - weight_sum / n_deviations)", "(goal + weight_sum / n_deviations)"
    ),
    one_change(
        "BIV without xi",
        "both",
        "mask / np.maximum(variance + xi, TINY)\n    weight_sum",
        "mask / np.maximum(variance, TINY)\n    weight_sum",
    ),
    one_change(
        "BIV of masked samples",
        "both",
        "mask / np.maximum(variance + xi, TINY)\n    weight_sum",
        "1 / np.maximum(variance + xi, TINY)\n    weight_sum",
    ),
    one_change(
        "BIV without normalisation",
        "both",
        "return weight / np.where(weight_sum > 0, weight_sum, 1)",
        "return weight",
    ),
    one_change(
        "BIV normalised over all members",
        "both",
        "np.where(weight_sum > 0, weight_sum, 1)",
        "weight.sum()",
    ),
    one_change("BIV over no sample", "both", "np.where(weight_sum > 0, weight_sum, 1)", "weight_sum"),
    Mutant(
        "xi in single precision",
        "both",
        [
            ("variance.double().cpu()", "variance.cpu()"),
            ("mask.double().cpu()", "mask.cpu()"),
            ("xi = np.zeros((len(variance), 1))", "xi = np.zeros((len(variance), 1), np.float32)"),
        ],
    ),
    one_change("a constant xi is ignored", "both", "if args.xi is None:", "if True:"),
    one_change("SUNRISE by the variance", "both", "torch.sigmoid(-variance.sqrt()", "torch.sigmoid(-variance"),
    one_change(
        "SUNRISE the other way around", "both", "torch.sigmoid(-variance.sqrt()", "torch.sigmoid(variance.sqrt()"
    ),
    one_change("SUNRISE between 0 and 1/2", "both", "* temperature) + 0.5\n", "* temperature)\n"),
    one_change("another cap of UWAC", "both", "clamp_max(1.5)", "clamp_max(1.0)"),
    one_change("UWAC by the deviation", "both", "args.uwac_beta / variance", "args.uwac_beta / variance.sqrt()"),
    one_change("no test of the variances", "both", 'require_finite("a variance", variance.cpu())', "pass"),
    one_change(
        "a mean over all samples", "both", "mask / mask.sum(-1, keepdim=True).clamp_min(1)", "mask / mask.shape[-1]"
    ),
    one_change(
        "a mean over no sample", "both", "mask.sum(-1, keepdim=True).clamp_min(1)", "mask.sum(-1, keepdim=True)"
    ),
    one_change(
        "EBS without a square",
        "both",
        "weight.sum(-1) ** 2 / (weight**2).sum(-1)",
        "weight.sum(-1) / (weight**2).sum(-1)",
    ),
    # Losses.
    *in_each("lambda is 1", "args.loss_attenuation_weight * attenuation", "attenuation"),
    one_change("half of the log-variance", "both", "+ log_variance\n", "+ 0.5 * log_variance\n"),
    one_change("errors times the variance", "both", "torch.exp(-log_variance)", "torch.exp(log_variance)"),
    one_change(
        "attenuation of masked samples",
        "both",
        "(uniform_weights(mask) * negative",
        "(uniform_weights(torch.ones_like(mask)) * negative",
    ),
    one_change(
        "a gradient through targets and weights",
        "ivdqn",
        "no_grad():\n        # Lines 14",
        "enable_grad():\n        # Lines 14",
    ),
    one_change(
        "terminal states bootstrap",
        "ivdqn",
        "batch.discount * (1 - batch.terminated) * next_mean",
        "batch.discount * next_mean",
    ),
    one_change("the network is its own target", "ivdqn", "= target_network.mean_and", "= network.mean_and"),
    one_change(
        "double Q-learning",
        "ivdqn",
        "    # Lines 16-21",
        "    next_action = network(batch.next_observation).argmax(-1)\n        # Lines 16-21",
    ),
    one_change(
        "one target for all members",
        "ivdqn",
        "next_mean, next_action = all_next_means.max(-1)",
        "next_mean, next_action = all_next_means.mean(0, keepdim=True).expand_as(all_next_means).max(-1)",
    ),
    one_change(
        "the variance of the first member's action",
        "ivdqn",
        "at_action(mixture.expand_as(all_next_means), next_action)",
        "at_action(mixture.expand_as(all_next_means), next_action[:1].expand_as(next_action))",
    ),
    one_change(
        "gamma in place of its square", "ivdqn", "batch.discount**2 * next_variance", "batch.discount * next_variance"
    ),
    one_change("no gamma squared", "ivdqn", "batch.discount**2 * next_variance", "next_variance"),
    one_change("no gamma squared", "ivsac", "args.gamma**2 * next_variance", "next_variance"),
    *in_each("terminal variance the other way around", "if not args.terminal_variance:", "if args.terminal_variance:"),
    *in_each(
        "SUNRISE and UWAC by the target's variance",
        'next_variance if args.weighting in ("sunrise", "uwac") else target_variance',
        "target_variance",
    ),
    *in_each(
        "BIV by the prediction's variance",
        'next_variance if args.weighting in ("sunrise", "uwac") else target_variance',
        "next_variance",
    ),
    one_change("absolute errors", "ivdqn", "(mean - target) ** 2", "(mean - target).abs()"),
    one_change(
        "uniform weights", "ivdqn", "(weight * squared_error).sum()", "(uniform_weights(mask) * squared_error).sum()"
    ),
    *in_each("metrics of members without samples", ".nanmean()", ".mean()"),
    one_change("the higher twin in targets", "ivsac", "next_q_values.amin(-2)", "next_q_values.amax(-2)"),
    one_change("no entropy in targets", "ivsac", " - alpha * next_log_prob", ""),
    one_change(
        "terminal states bootstrap",
        "ivsac",
        "args.gamma * (1 - batch.terminated) * next_value",
        "args.gamma * next_value",
    ),
    one_change("the critics are their own targets", "ivsac", "= agent.target_critic(batch", "= agent.critic(batch"),
    one_change(
        "the target's variance by the critics",
        "ivsac",
        "predictive_variance(agent.target_critic,",
        "predictive_variance(agent.critic,",
    ),
    one_change("the variance of the higher twin", "ivsac", "next_q_values.argmin(-2)", "next_q_values.argmax(-2)"),
    one_change(
        "the variance of the higher twin, for actors", "ivsac", "= q_values.argmin(-2)", "= q_values.argmax(-2)"
    ),
    one_change(
        "actors' weights are uniform",
        "ivsac",
        "(weight * (alpha * log_prob",
        "(uniform_weights(mask) * (alpha * log_prob",
    ),
    one_change("actors without entropy", "ivsac", "(alpha * log_prob - q_values.amin(-2))", "(-q_values.amin(-2))"),
    one_change(
        "actors by the mean of the twins", "ivsac", "log_prob - q_values.amin(-2)", "log_prob - q_values.mean(-2)"
    ),
    one_change("a gradient through SUNRISE weights", "ivsac", "    # Line 23.\n", SUNRISE_WITH_GRADIENT),
    one_change("a gradient through UWAC weights", "ivsac", "    # Line 23.\n", UWAC_WITH_GRADIENT),
    one_change(
        "a gradient through the actors' variance",
        "ivsac",
        "no_grad():\n        # Lines 18",
        "enable_grad():\n        # Lines 18",
    ),
    one_change(
        "only the first twin learns",
        "ivsac",
        "(weight.unsqueeze(1) * squared_error).sum()",
        "(weight * squared_error[:, 0]).sum()",
    ),
    one_change("the target entropy is |A|", "ivsac", "log_prob - action_size", "log_prob + action_size"),
    one_change("alpha the other way around", "ivsac", "return -(temperature", "return (temperature"),
    one_change(
        "alpha by masked samples", "ivsac", "* uniform_weights(mask) * shortfall", "* shortfall / mask.shape[-1]"
    ),
    one_change("alpha is always tuned", "ivsac", "if args.autotune:", "if True:"),
    one_change("critics do not learn", "ivsac", "minimize(agent.critic_optimizer, critic_loss)", "pass"),
    one_change(
        "critics get gradients from the actors", "ivsac", 'inputs=optimizer.param_groups[0]["params"]', "inputs=None"
    ),
    one_change("gradients are summed over updates", "ivsac", "    optimizer.zero_grad()\n    loss", "    loss"),
    one_change("a gradient of alpha from the actors", "ivsac", "log_alpha.detach().exp()", "log_alpha.exp()"),
    # Machinery.
    one_change("one seed for all episodes", "machinery", "((self.env_seed, self.episode))", "((self.env_seed, 0))"),
    one_change(
        "training's seeds for evaluations", "machinery", "((self.env_seed, number, 1))", "((self.env_seed, number))"
    ),
    one_change(
        "the environment's seed is ignored",
        "machinery",
        "args.seed if args.env_seed is None else args.env_seed",
        "args.seed",
    ),
    one_change("torch has no seed", "machinery", "torch.manual_seed(args.seed)", "pass"),
    one_change("no fsync of a file", "machinery", "os.fsync(file.fileno())", "pass"),
    one_change("no flush before fsync", "machinery", "file.flush()", "pass"),
    one_change("no fsync of the rows", "machinery", "os.fsync(self.metrics.fileno())", "pass"),
    one_change(
        "a checkpoint written in place",
        "machinery",
        'temporary = path.with_name(path.name + ".tmp")',
        "temporary = path",
    ),
    one_change(
        "numpy's generator starts anew", "machinery", 'self.rng.bit_generator.state = state["numpy_rng"]', "pass"
    ),
    one_change("torch's generator starts anew", "machinery", 'torch.set_rng_state(state["torch_rng"])', "pass"),
    one_change("episodes are counted anew", "machinery", 'self.episode = state["episode"]', "pass"),
    one_change("evaluations are forgotten", "machinery", '"eval_returns": self.eval_returns,', '"eval_returns": [],'),
    one_change(
        "optimisers are not restored",
        "machinery",
        "if isinstance(part, kind):",
        "if isinstance(part, kind) and not isinstance(part, torch.optim.Optimizer):",
    ),
    one_change("rows after the checkpoint stay", "machinery", "self.metrics.truncate(rows_size)", "pass"),
    one_change("a run of another script is resumed", "machinery", 'if saved.get("script") != SCRIPT:', "if False:"),
    one_change(
        "a run of other arguments is resumed",
        "machinery",
        "if name not in MAY_CHANGE and before != value:",
        "if False:",
    ),
    one_change("a run is overwritten", "machinery", "if not self.args.resume:", "if False:"),
    one_change(
        "episodes do not end the run",
        "machinery",
        "return out_of_steps or out_of_episodes or self.is_solved()",
        "return out_of_steps or self.is_solved()",
    ),
    one_change(
        "solved by fewer than 100 evaluations",
        "machinery",
        "len(self.eval_returns) < 100",
        "len(self.eval_returns) < 10",
    ),
    one_change(
        "solved by the last evaluation",
        "machinery",
        "bool(np.mean(self.eval_returns) >= self.solved_at)",
        "bool(self.eval_returns[-1] >= self.solved_at)",
    ),
    one_change("the mean of all evaluations", "machinery", "seed)][-100:]", "seed)]"),
    one_change("checkpoints at each episode", "machinery", "steps >= self.args.checkpoint_every or", "steps >= 1 or"),
    one_change(
        "the steps between checkpoints start at 0",
        "machinery",
        "        self.saved_step = self.global_step\n        self.saved_time = time",
        "        self.saved_time = time",
    ),
    one_change(
        "nothing is refused as not finite", "machinery", "if not np.isfinite(np.asarray(value)).all():", "if False:"
    ),
    one_change("no range of an argument", "machinery", "if not low <= value <= high:", "if False:"),
]


# ---------------------------------------------------------------------------- tests
class Plugin:
    """Chooses and sorts the tests, ends one that hangs, and remembers how long they took and which one failed."""

    def __init__(self, part: str, seconds: dict[str, float]):
        self.part = part
        self.seconds = seconds
        self.found = {}
        self.failed = []

    def is_wanted(self, item: pytest.Item) -> bool:
        if self.seconds:
            return item.nodeid in self.seconds  # it passes on the whole scripts
        if re.search(LEFT_OUT_TESTS, item.nodeid):
            return False
        parameters = item.nodeid.partition("[")[2]
        scripts = {word for word in re.split(r"\W", parameters) if word in SCRIPTS}
        return not scripts or bool(scripts & PARAMETERS[self.part])

    def duration(self, item: pytest.Item) -> float:
        return self.seconds.get(item.nodeid, 0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(filter(self.is_wanted, items), key=self.duration)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        def give_up(*_: Any) -> None:
            self.failed.append(f"{nodeid} hangs")
            self.leave(HANGS)

        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(PATIENCE + int(10 * self.seconds.get(nodeid, 30)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found[report.nodeid] = self.found.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} cannot be imported")

    def leave(self, code: int) -> None:
        Path("report.json").write_text(json.dumps({"seconds": self.found, "failed": self.failed}))
        os._exit(code)


def run_tests(folder: Path, part: str, seconds: dict[str, float], *options: str) -> tuple[int, dict[str, Any]]:
    """Runs the tests of a part in a fork, in the folder; pytest's exit code, and what the plugin remembers."""
    (folder / "report.json").unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        plugin = Plugin(part, seconds)
        files = [f"tests/{name}.py" for name in TESTS[part] if Path(f"tests/{name}.py").exists()]
        plain = ["-o", "addopts=", "-p", "no:cacheprovider", "--basetemp", "temporary", "--hypothesis-seed", "0"]
        plugin.leave(pytest.main([*plain, *options, *files], [plugin]))
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it may have left behind
    report = json.loads((folder / "report.json").read_text()) if (folder / "report.json").exists() else {"failed": []}
    return os.waitstatus_to_exitcode(status), report


def scratch_copy(folder: Path) -> None:
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))


def time_tests(folder: Path, part: str) -> dict[str, float]:
    """How long the tests take that pass on the whole scripts."""
    _, report = run_tests(folder, part, {})
    if not report.get("seconds"):
        sys.exit((folder / "output").read_text())
    for test in report["failed"]:
        print(f"left out, for it fails on the whole scripts: {test}")
        report["seconds"].pop(test, None)
    print(f"{part}: {len(report['seconds'])} tests in {sum(report['seconds'].values()):.0f} s", flush=True)
    return report["seconds"]


def try_mutant(mutant: Mutant, folder: Path, texts: dict[str, str], seconds: dict[str, float]) -> dict[str, Any]:
    for name, text in mutant.broken(texts).items():
        (folder / f"{name}.py").write_text(text)
    begin = time.monotonic()
    code, report = run_tests(folder, mutant.part, seconds, "-x")
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or code == pytest.ExitCode.USAGE_ERROR:
        sys.exit((folder / "output").read_text())
    return {
        "kind": mutant.kind,
        "part": mutant.part,
        "scripts": BROKEN[mutant.part],
        "caught": code != 0,
        "by": report["failed"][0] if report["failed"] else f"exit code {code}",
        "seconds": round(time.monotonic() - begin, 1),
        "diff": mutant.diff(),
    }


def stop(*_: Any) -> None:
    sys.exit("stopped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["algorithm", "machinery", "all"], default="all")
    parser.add_argument("--sample", type=int, default=0, help="how many, besides those made by hand")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--results", type=Path, default=Path("mutants.json"), help="where they are kept")
    parser.add_argument("--again", action="store_true", help="try those again that survived")
    args = parser.parse_args()
    sys.dont_write_bytecode = True  # two mutants of one size and second would share it
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, stop)  # as Ctrl-C does, it ends the tests that run
    results = {"seconds": {}, "mutants": {}}
    if args.results.exists():
        results = json.loads(args.results.read_text())

    parts = {"algorithm": ALGORITHM, "machinery": ("machinery",), "all": tuple(TESTS)}[args.part]
    texts = {name: (ROOT / f"{name}.py").read_text() for name in SCRIPTS}
    every = {mutant.key(): mutant for name in ("ivdqn", "ivsac") for mutant in mutants_of(name, texts)}
    every = {key: mutant for key, mutant in every.items() if mutant.part in parts}
    chosen = random.Random(args.seed).sample(sorted(every), min(args.sample, len(every)))
    mutants = {mutant.key(): mutant for mutant in MADE_BY_HAND if mutant.part in parts}
    mutants |= {key: every[key] for key in chosen}
    gone = [mutant.kind for mutant in mutants.values() if not mutant.is_possible(texts)]
    if gone:
        sys.exit(f"the scripts do not hold once, or not at all, what these change: {gone}")
    print(f"{len(mutants)} mutants, {len(chosen)} of them out of {len(every)} small changes", flush=True)
    begin = time.monotonic()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scratch_copy(folder)
        for part in parts:
            if part not in results["seconds"]:
                results["seconds"][part] = time_tests(folder, part)
                args.results.write_text(json.dumps(results, indent=1))
        for key, mutant in mutants.items():
            known = results["mutants"].get(key)
            if known is None or (args.again and not known["caught"]):
                known = try_mutant(mutant, folder, texts, results["seconds"][mutant.part])
                results["mutants"][key] = known
                args.results.write_text(json.dumps(results, indent=1))
                how = "caught by " + known["by"] if known["caught"] else "SURVIVED"
                print(f"{mutant.part}, {mutant.kind}: {how}, {known['seconds']} s", flush=True)

    survivors = {key: results["mutants"][key] for key in mutants if not results["mutants"][key]["caught"]}
    for key, mutant in survivors.items():
        print(f"\n{key}: {mutant['kind']} in {', '.join(mutant['scripts'])}\n{mutant['diff']}")
    caught = len(mutants) - len(survivors)
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{caught} of {len(mutants)} caught ({caught / len(mutants):.1%}), in {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
