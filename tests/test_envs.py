"""The paper's environments against their originals."""

import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT
from gymnasium.utils.env_checker import check_env

import paper_envs

CARTPOLES = ["Cartpole", *(f"CartpoleNoise{scale}" for scale in ("0.1", "0.3", "1", "3", "10"))]
# The rewards of SPEC section 3, from root velocity, height and action before the step.
MBBL_REWARD = {
    "HalfCheetah": lambda vx, z, a: vx - 0.1 * a @ a,
    "Walker2d": lambda vx, z, a: vx - 3 * (z - 1.3) ** 2 - 0.1 * a @ a + 1,
    "Hopper": lambda vx, z, a: vx - 3 * (z - 1.3) ** 2 - 0.1 * a @ a + 1,
    "Ant": lambda vx, z, a: vx - 3 * (z - 0.57) ** 2 - 0.1 * a @ a + 1,
    "SlimHumanoid": lambda vx, z, a: 0.25 / 0.015 * vx - 0.1 * a @ a + 5 * (1 <= z <= 2),
    "NoStopSlimHumanoid": lambda vx, z, a: 0.25 / 0.015 * vx - 0.1 * a @ a + 5 * (1 <= z <= 2),
}
# gymnasium's own environment on the same body, the index of the torso's height in qpos, and the positions left out.
MBBL_BODY = {
    "HalfCheetah": ("HalfCheetah-v4", 1),
    "Walker2d": ("Walker2d-v4", 1),
    "Hopper": ("Hopper-v4", 1),
    "Ant": ("Ant-v4", 2),
    "SlimHumanoid": ("Humanoid-v4", 2),
    "NoStopSlimHumanoid": ("Humanoid-v4", 2),
}


@pytest.mark.parametrize("name", [*(f"{name}-v0" for name in CARTPOLES), *(f"MBBL-{name}-v0" for name in MBBL_REWARD)])
def test_the_environment_passes_gymnasiums_checks(name: str):
    check_env(gym.make(f"paper_envs:{name}").unwrapped, skip_render_check=True)


def test_cartpole_is_bsuites_step_for_step():
    cartpole = pytest.importorskip("bsuite.environments.cartpole", reason="bsuite is not installed")
    rng = np.random.default_rng(0)
    for episode in range(30):
        ours, theirs = gym.make("paper_envs:Cartpole-v0").unwrapped, cartpole.Cartpole(seed=0)
        ours.reset(seed=episode)
        theirs.reset()
        theirs._state = cartpole.CartpoleState(*ours.state, 0.0)
        # Every third episode balances the pole by hand, so that the time limit is reached too.
        for step in range(1100):  # noqa: B007
            angle = (ours.state[2] + np.pi) % (2 * np.pi) - np.pi
            balance = 1 + int(np.sign(angle + 0.3 * ours.state[3] + 0.05 * ours.state[0] + 0.1 * ours.state[1]))
            action = balance if episode % 3 == 0 else int(rng.integers(3))
            observation, reward, terminated, truncated, _ = ours.step(action)
            expected = theirs.step(action)
            assert observation.tolist() == expected.observation[0].tolist()
            assert (reward, terminated, truncated) == (expected.reward, expected.last(), False)
            if terminated:
                break
        assert terminated
        assert step > 990 or episode % 3


def test_cartpole_starts_uniformly_within_a_twentieth():
    env = gym.make("paper_envs:Cartpole-v0").unwrapped
    states = np.array([env.reset(seed=seed) and env.state for seed in range(2000)])
    assert np.abs(states).max() <= 0.05
    assert states.std(0) == pytest.approx(np.full(4, 0.05 / np.sqrt(3)), rel=0.05)


@pytest.mark.parametrize("scale", ["0.1", "1", "10"])
def test_noise_is_on_the_reward_only_and_of_the_scale_in_the_id(scale: str):
    noisy, clean = gym.make(f"paper_envs:CartpoleNoise{scale}-v0"), gym.make("paper_envs:Cartpole-v0")
    rng, noise = np.random.default_rng(0), []
    for seed in range(60):
        assert noisy.reset(seed=seed)[0].tolist() == clean.reset(seed=seed)[0].tolist()
        done = False
        while not done:
            action = int(rng.integers(3))
            observation, reward, terminated, _, _ = noisy.step(action)
            expected, clean_reward, done, _, _ = clean.step(action)
            assert observation.tolist() == expected.tolist()
            assert terminated == done
            noise.append(reward - clean_reward)
    assert np.std(noise) == pytest.approx(float(scale), rel=0.06)
    assert abs(np.mean(noise)) < 4 * float(scale) / np.sqrt(len(noise))


@pytest.mark.parametrize("name", MBBL_REWARD)
def test_mbbl_rewards_observations_and_physics(name: str):
    original, height = MBBL_BODY[name]
    env, body = gym.make(f"paper_envs:MBBL-{name}-v0"), gym.make(original)
    assert env.spec.max_episode_steps == 1000
    env.reset(seed=0)
    body.reset(seed=0)
    ours, theirs = env.unwrapped, body.unwrapped
    theirs.set_state(ours.data.qpos.copy(), ours.data.qvel.copy())
    env.action_space.seed(0)
    lowest = np.inf
    for step in range(1000):  # noqa: B007
        action = env.action_space.sample()
        velocity, z = ours.data.qvel[0].item(), ours.data.qpos[height].item()
        observation, reward, terminated, truncated, _ = env.step(action)
        body.step(action)
        assert reward == pytest.approx(MBBL_REWARD[name](velocity, z, action.astype(float)), rel=1e-6)
        assert observation.tolist() == [*ours.data.qpos[height:], *ours.data.qvel]
        # The same body under the same actions: the physics are gymnasium's own, to the last bit.
        assert ours.data.qpos.tolist() == theirs.data.qpos.tolist()
        assert ours.data.qvel.tolist() == theirs.data.qvel.tolist()
        assert terminated == (name == "SlimHumanoid" and not 1 <= ours.data.qpos[2] <= 2)
        lowest = min(lowest, z)
        if terminated or truncated:
            break
    assert truncated == (step == 999)
    assert lowest < 1 or name != "NoStopSlimHumanoid"  # it has fallen, and went on
    assert (name == "SlimHumanoid") == bool(terminated)


@pytest.mark.parametrize("name", MBBL_REWARD)
def test_mbbl_starts_where_gymnasium_starts_the_body(name: str):
    original, _ = MBBL_BODY[name]
    env, body = gym.make(f"paper_envs:MBBL-{name}-v0"), gym.make(original)
    env.reset(seed=7)
    body.reset(seed=7)
    assert env.unwrapped.data.qpos.tolist() == body.unwrapped.data.qpos.tolist()
    assert env.unwrapped.data.qvel.tolist() == body.unwrapped.data.qvel.tolist()


RENDER = """
import gymnasium as gym
for name in ("HalfCheetah", "Walker2d", "Hopper", "Ant", "SlimHumanoid", "NoStopSlimHumanoid"):
    env = gym.make(f"paper_envs:MBBL-{name}-v0", render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    for _ in range(15):
        env.step(env.action_space.sample())
    print(name, first.shape, (first != env.render()).any())
    env.close()
"""


def test_mbbl_renders_without_a_display():
    variables = os.environ | {"MUJOCO_GL": "osmesa", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RENDER], env=variables, capture_output=True, text=True, timeout=200)
    if done.returncode and "osmesa" in done.stderr.lower():
        pytest.skip("OSMesa (Debian's libosmesa6) is not installed, so MuJoCo cannot render without a display")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} (480, 480, 3) True" for name in MBBL_REWARD]


def test_cartpole_renders():
    env = gym.make("paper_envs:Cartpole-v0", render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    for _ in range(25):
        env.step(2)
    assert first.shape == (300, 600, 3)
    assert (first != env.render()).any()
    assert env.metadata["render_fps"] == round(1 / paper_envs.Cartpole.dt)
