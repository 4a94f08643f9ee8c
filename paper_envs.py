"""The paper's environments that gymnasium does not have, as gymnasium registrations (paper Sec. 4).

Importing this module registers bsuite's cartpole, with and without reward noise, and the MBBL variants of five MuJoCo
tasks. No script imports it: gymnasium does, when an id names the module.

    python ivdqn.py --env-id paper_envs:CartpoleNoise1-v0 --eval-env-id paper_envs:Cartpole-v0
"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv

# ---------------------------------------------------------------------------- bsuite's cartpole
CARTPOLE_NOISE_SCALES = ("0.1", "0.3", "1", "3", "10")


class Cartpole(gym.Env):
    """bsuite's cartpole: keep the pole up and the cart on the track for ten seconds; time is observed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 100}  # noqa: RUF012

    mass_cart, mass_pole, half_length, force, gravity = 1.0, 0.1, 0.5, 10.0, 9.8
    dt, max_time, max_x, min_cos, start_range = 0.01, 10.0, 3.0, 0.8, 0.05

    def __init__(self, noise_scale: float = 0.0, render_mode: str | None = None):
        self.noise_scale, self.render_mode = noise_scale, render_mode
        self.action_space = gym.spaces.Discrete(3)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.state, self.time = self.np_random.uniform(-self.start_range, self.start_range, 4), 0.0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        _, x_dot, theta, theta_dot = self.state
        mass, sin, cos = self.mass_cart + self.mass_pole, np.sin(theta), np.cos(theta)
        moment = self.mass_pole * self.half_length
        push = ((action - 1) * self.force + moment * theta_dot**2 * sin) / mass
        theta_acc = (self.gravity * sin - cos * push) / (self.half_length * (4 / 3 - self.mass_pole * cos**2 / mass))
        x_acc = push - moment * theta_acc * cos / mass
        # Euler's method on the old state.
        self.state = self.state + self.dt * np.array([x_dot, x_acc, theta_dot, theta_acc])
        self.state[2] %= 2 * np.pi
        self.time += self.dt

        balanced = bool(np.cos(self.state[2]) > self.min_cos and abs(self.state[0]) < self.max_x)
        reward = float(balanced)
        if self.noise_scale > 0:
            reward += self.noise_scale * self.np_random.standard_normal()
        return self._observation(), reward, not balanced or self.time > self.max_time, False, {}

    def _observation(self) -> np.ndarray:
        x, x_dot, theta, theta_dot = self.state
        values = (
            x / self.max_x,
            x_dot / self.max_x,
            np.sin(theta),
            np.cos(theta),
            theta_dot,
            self.time / self.max_time,
        )
        return np.array(values, np.float32)

    def render(self) -> np.ndarray:
        """A 300 x 600 picture: the track, the cart as a square, the pole as a row of dots."""
        frame = np.full((300, 600, 3), 255, np.uint8)
        frame[230:232] = 0
        column = 300 + self.state[0] / self.max_x * 290
        frame[210:230, max(int(column) - 20, 0) : max(int(column) + 20, 0)] = (60, 90, 160)
        for along in np.linspace(0, 160, 80):
            row = int(210 - along * np.cos(self.state[2]))
            place = int(column + along * np.sin(self.state[2]))
            frame[max(row - 2, 0) : max(row + 2, 0), max(place - 2, 0) : max(place + 2, 0)] = (200, 120, 60)
        return frame


gym.register("Cartpole-v0", Cartpole)
for scale in CARTPOLE_NOISE_SCALES:
    gym.register(f"CartpoleNoise{scale}-v0", Cartpole, kwargs={"noise_scale": float(scale)})


# ---------------------------------------------------------------------------- MBBL's MuJoCo tasks
class MBBL(MujocoEnv):
    """A gymnasium body, rewarded by its state before the step and its action alone (Wang et al., 2019)."""

    metadata = {"render_modes": ["human", "rgb_array", "depth_array"]}  # noqa: RUF012

    def __init__(self, body: str, frame_skip: int, reset_noise: float, normal_velocity: bool, **kwargs):
        self.reset_noise, self.normal_velocity = reset_noise, normal_velocity
        self.hidden = 2 if body in ("ant", "humanoid") else 1  # the root's x, and y where there is one
        camera = {"distance": 4.0}
        super().__init__(f"{body}.xml", frame_skip, None, default_camera_config=camera, **kwargs)
        self.metadata = self.metadata | {"render_fps": round(1 / self.dt)}
        size = self.model.nq - self.hidden + self.model.nv
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float64)

    def reward(self, velocity: float, height: float, cost: float) -> float:
        """The reward from the root's forward velocity and height before the step, and the action's |a|^2."""
        raise NotImplementedError

    def fallen(self, height: float) -> bool:
        return False

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = self.reward(self.data.qvel[0], self._height(), np.square(action, dtype=float).sum())
        self.do_simulation(action, self.frame_skip)
        if self.render_mode == "human":
            self.render()
        return self._observation(), float(reward), self.fallen(self._height()), False, {}

    def reset_model(self) -> np.ndarray:
        """As gymnasium resets this body."""
        noise = self.reset_noise
        qpos = self.init_qpos + self.np_random.uniform(-noise, noise, self.model.nq)
        if self.normal_velocity:
            qvel = self.init_qvel + noise * self.np_random.standard_normal(self.model.nv)
        else:
            qvel = self.init_qvel + self.np_random.uniform(-noise, noise, self.model.nv)
        self.set_state(qpos, qvel)
        return self._observation()

    def _height(self) -> float:
        return self.data.qpos[self.hidden]

    def _observation(self) -> np.ndarray:
        return np.concatenate((self.data.qpos[self.hidden :], self.data.qvel))


class HalfCheetah(MBBL):
    def reward(self, velocity: float, height: float, cost: float) -> float:
        return velocity - 0.1 * cost


class Walker2d(MBBL):
    def reward(self, velocity: float, height: float, cost: float) -> float:
        return velocity - 3 * (height - 1.3) ** 2 - 0.1 * cost + 1


class Hopper(Walker2d):
    pass


class Ant(MBBL):
    def reward(self, velocity: float, height: float, cost: float) -> float:
        return velocity - 3 * (height - 0.57) ** 2 - 0.1 * cost + 1


class SlimHumanoid(MBBL):
    def reward(self, velocity: float, height: float, cost: float) -> float:
        return 0.25 / 0.015 * velocity - 0.1 * cost + 5 * (not self.fallen(height))

    def fallen(self, height: float) -> bool:
        return not 1 <= height <= 2


# body, simulator steps per environment step, scale and shape of the reset noise
for task, settings in {
    HalfCheetah: ("half_cheetah", 5, 0.1, True),
    Walker2d: ("walker2d", 4, 0.005, False),
    Hopper: ("hopper", 4, 0.005, False),
    Ant: ("ant", 5, 0.1, True),
    SlimHumanoid: ("humanoid", 5, 0.01, False),
}.items():
    arguments = dict(zip(("body", "frame_skip", "reset_noise", "normal_velocity"), settings, strict=True))
    gym.register(f"MBBL-{task.__name__}-v0", task, max_episode_steps=1000, kwargs=arguments)
