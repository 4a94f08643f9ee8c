"""The paper's environments that gymnasium does not have, as gymnasium registrations (paper Sec. 4).

Importing this module registers bsuite's cartpole, with and without reward noise, and the MBBL variants of the
paper's MuJoCo tasks. No script imports it: gymnasium does, when an id names the module.

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

    mass_cart = 1.0
    mass_pole = 0.1
    half_length = 0.5  # of the pole
    force = 10.0
    gravity = 9.8
    dt = 0.01  # seconds of a step
    max_time = 10.0
    max_x = 3.0
    min_cos = 0.8  # of the pole's angle
    start_range = 0.05

    def __init__(self, noise_scale: float = 0.0, render_mode: str | None = None):
        self.noise_scale = noise_scale  # standard deviation of the reward's noise
        self.render_mode = render_mode
        self.action_space = gym.spaces.Discrete(3)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (6,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.state = self.np_random.uniform(-self.start_range, self.start_range, 4)
        self.time = 0.0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        _, x_dot, theta, theta_dot = self.state
        sin = np.sin(theta)
        cos = np.cos(theta)
        mass = self.mass_cart + self.mass_pole
        moment = self.mass_pole * self.half_length
        push = ((action - 1) * self.force + moment * theta_dot**2 * sin) / mass
        inertia = self.half_length * (4 / 3 - self.mass_pole * cos**2 / mass)
        theta_acc = (self.gravity * sin - cos * push) / inertia
        x_acc = push - moment * theta_acc * cos / mass
        # Euler's method on the old state.
        self.state = self.state + self.dt * np.array([x_dot, x_acc, theta_dot, theta_acc])
        self.state[2] %= 2 * np.pi
        self.time += self.dt

        is_upright = np.cos(self.state[2]) > self.min_cos
        is_on_track = abs(self.state[0]) < self.max_x
        is_balanced = bool(is_upright and is_on_track)
        reward = float(is_balanced)
        if self.noise_scale > 0:
            reward += self.noise_scale * self.np_random.standard_normal()
        terminated = not is_balanced or self.time > self.max_time
        return self._observation(), reward, terminated, False, {}

    def _observation(self) -> np.ndarray:
        x, x_dot, theta, theta_dot = self.state
        values = [
            x / self.max_x,
            x_dot / self.max_x,
            np.sin(theta),
            np.cos(theta),
            theta_dot,
            self.time / self.max_time,
        ]
        return np.array(values, np.float32)

    def render(self) -> np.ndarray:
        """A 300 x 600 picture: the track, the cart as a square, the pole as a row of dots."""
        frame = np.full((300, 600, 3), 255, np.uint8)
        frame[230:232] = 0
        column = 300 + self.state[0] / self.max_x * 290
        draw_box(frame, 220, column, half_height=10, half_width=20, colour=(60, 90, 160))
        for along in np.linspace(0, 160, 80):
            row = 210 - along * np.cos(self.state[2])
            place = column + along * np.sin(self.state[2])
            draw_box(frame, row, place, half_height=2, half_width=2, colour=(200, 120, 60))
        return frame


def draw_box(
    frame: np.ndarray, row: float, column: float, half_height: int, half_width: int, colour: tuple[int, int, int]
) -> None:
    """A box around a place, as much of it as is in the picture."""
    top = max(int(row) - half_height, 0)
    bottom = max(int(row) + half_height, 0)
    left = max(int(column) - half_width, 0)
    right = max(int(column) + half_width, 0)
    frame[top:bottom, left:right] = colour


gym.register("Cartpole-v0", Cartpole)
for scale in CARTPOLE_NOISE_SCALES:
    gym.register(f"CartpoleNoise{scale}-v0", Cartpole, kwargs={"noise_scale": float(scale)})


# ---------------------------------------------------------------------------- MBBL's MuJoCo tasks
class MBBL(MujocoEnv):
    """A gymnasium body, rewarded by its state before the step and its action alone (Wang et al., 2019)."""

    metadata = {"render_modes": ["human", "rgb_array", "depth_array"]}  # noqa: RUF012

    def __init__(self, body: str, frame_skip: int, reset_noise: float, has_normal_velocities: bool, **kwargs):
        self.reset_noise = reset_noise
        self.has_normal_velocities = has_normal_velocities
        self.num_hidden = 2 if body in ("ant", "humanoid") else 1  # the root's x, and y where there is one
        super().__init__(f"{body}.xml", frame_skip, None, default_camera_config={"distance": 4.0}, **kwargs)
        self.metadata = self.metadata | {"render_fps": round(1 / self.dt)}
        num_inputs = self.model.nq - self.num_hidden + self.model.nv
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (num_inputs,), np.float64)

    def reward(self, velocity: float, height: float, cost: float) -> float:
        """The reward from the root's forward velocity and height before the step, and the action's |a|^2."""
        raise NotImplementedError

    def has_fallen(self, height: float) -> bool:
        """Whether the episode ends."""
        return False

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        velocity = self.data.qvel[0]
        cost = np.square(action, dtype=float).sum()
        reward = self.reward(velocity, self._height(), cost)
        self.do_simulation(action, self.frame_skip)
        if self.render_mode == "human":
            self.render()
        return self._observation(), float(reward), self.has_fallen(self._height()), False, {}

    def reset_model(self) -> np.ndarray:
        """As gymnasium resets this body."""
        noise = self.reset_noise
        qpos = self.init_qpos + self.np_random.uniform(-noise, noise, self.model.nq)
        if self.has_normal_velocities:
            qvel = self.init_qvel + noise * self.np_random.standard_normal(self.model.nv)
        else:
            qvel = self.init_qvel + self.np_random.uniform(-noise, noise, self.model.nv)
        self.set_state(qpos, qvel)
        return self._observation()

    def _height(self) -> float:
        return self.data.qpos[self.num_hidden]

    def _observation(self) -> np.ndarray:
        return np.concatenate((self.data.qpos[self.num_hidden :], self.data.qvel))


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


class NoStopSlimHumanoid(MBBL):
    """MBBL's table calls this one SlimHumanoid, and the other one SlimHumanoid-ET."""

    def reward(self, velocity: float, height: float, cost: float) -> float:
        is_upright = 1 <= height <= 2
        return 0.25 / 0.015 * velocity - 0.1 * cost + 5 * is_upright


class SlimHumanoid(NoStopSlimHumanoid):
    """The same, with an early end. Which of the two the paper used cannot be told."""

    def has_fallen(self, height: float) -> bool:
        return not 1 <= height <= 2


def register_mbbl(
    task: type[MBBL], body: str, frame_skip: int, reset_noise: float, has_normal_velocities: bool = False
) -> None:
    kwargs = {
        "body": body,
        "frame_skip": frame_skip,
        "reset_noise": reset_noise,
        "has_normal_velocities": has_normal_velocities,
    }
    gym.register(f"MBBL-{task.__name__}-v0", task, max_episode_steps=1000, kwargs=kwargs)


register_mbbl(HalfCheetah, "half_cheetah", frame_skip=5, reset_noise=0.1, has_normal_velocities=True)
register_mbbl(Walker2d, "walker2d", frame_skip=4, reset_noise=0.005)
register_mbbl(Hopper, "hopper", frame_skip=4, reset_noise=0.005)
register_mbbl(Ant, "ant", frame_skip=5, reset_noise=0.1, has_normal_velocities=True)
register_mbbl(SlimHumanoid, "humanoid", frame_skip=5, reset_noise=0.01)
register_mbbl(NoStopSlimHumanoid, "humanoid", frame_skip=5, reset_noise=0.01)
