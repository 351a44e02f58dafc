"""Drone that learns to fly to a target under a real clock; commands and positions arrive 20 to 50 ms late.

    python examples/drone.py [SECONDS]        exit status: 0 if the drone flies well, 1 after ten minutes

Three policies are measured in the same run: one that does nothing, a controller that flies straight to the target, and
the learned one. The drone flies well if the learned policy's test return is at least half way between the first two.
The server and the worker are in this process, the trainer in another one, since training would disturb the clock. Needs
torch and gymnasium.
"""

import multiprocessing
import os
import statistics
import sys
import threading
import time

import numpy as np
from gymnasium import spaces

from memoire.rl import DummyDrone, RealTimeEnv, RealTimeInterface, partial
from memoire.rl.codec import ActionHistory, Codec
from memoire.rl.sac import SAC, GaussianPolicy
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.networking import RolloutWorker, Server, Trainer
from memoire.tmrl.training_offline import TrainingOffline

STEP = 0.05
EPISODE = 60
ACTIONS = 4
"""Number of last actions in an observation, which include the commands still on their way to the drone."""


class Flight(RealTimeInterface):
    """Drone and its target: observations are both positions, actions are velocities."""

    def __init__(self) -> None:
        self.drone = DummyDrone()
        self.target = np.zeros(2, np.float32)
        self.random = np.random.default_rng()

    def get_observation_space(self) -> spaces.Tuple:
        return spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-0.5, 0.5, (2,))))

    def get_action_space(self) -> spaces.Box:
        return spaces.Box(-2.0, 2.0, (2,))

    def get_default_action(self) -> np.ndarray:
        return np.zeros(2, np.float32)

    def send_control(self, control: np.ndarray) -> None:
        self.drone.send_control(control[0], control[1])

    def place(self) -> np.ndarray:
        return np.array(self.drone.get_observation(), np.float32)

    def reset(self) -> list[np.ndarray]:
        self.target = self.random.uniform(-0.5, 0.5, 2).astype(np.float32)
        return [self.place(), self.target]

    def get_obs_rew_done_info(self) -> tuple[list[np.ndarray], float, bool, dict]:
        place = self.place()
        return [place, self.target], -float(np.linalg.norm(place - self.target)), False, {}


CONFIG = {
    "interface": Flight, "time_step_duration": STEP, "start_obs_capture": STEP, "ep_max_length": EPISODE,
    "act_buf_len": ACTIONS, "reset_act_buf": False,
}  # fmt: skip
CPUS = sorted(os.sched_getaffinity(0))
"""CPUs of this process. With several, the first CPU runs the environment and the other CPUs run the training."""
make_env = partial(RealTimeEnv, CONFIG, cpus=CPUS[:1] if len(CPUS) > 1 else None)
codec = Codec(history=ActionHistory(ACTIONS, start="skip"))
training = partial(
    TrainingOffline,
    env_cls=make_env,
    memory_cls=partial(GenericMemory, memory_size=100_000, batch_size=128, codec=codec),
    training_agent_cls=partial(SAC, policy=partial(GaussianPolicy, hidden=(64, 64)), hidden=(64, 64), gamma=0.95,
                               rate=1e-3, alpha=0.05),
    epochs=np.inf, rounds=1, steps=500, start_training=300, update_model_interval=50, update_buffer_interval=10,
    max_training_steps_per_env_step=4.0, device="cpu",
)  # fmt: skip


class Idle:
    """Policy that never moves the drone."""

    def act(self, obs: tuple, test: bool = False) -> np.ndarray:
        return np.zeros(2, np.float32)


class Controller:
    """Policy whose velocity is proportional to the distance from the target."""

    def act(self, obs: tuple, test: bool = False) -> np.ndarray:
        return np.clip(4.0 * (obs[1] - obs[0]), -2.0, 2.0)


def measure(policy: object, episodes: int = 8) -> float:
    with RolloutWorker(make_env, lambda **spaces: policy, standalone=True, model_path=None) as worker:
        worker.run_episodes(nb_episodes=episodes)
        worker.env.close()
        return statistics.fmean(each.returned for each in worker.results["test"])


def train(port: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.sched_setaffinity(0, CPUS[1:] or CPUS)
    Trainer(training, port=port, model_path=None, checkpoint_path=None).run()


def fly(seconds: float, goal: float) -> bool:
    with Server(port=0) as server:
        trainer = multiprocessing.get_context("spawn").Process(target=train, args=(server.port,), daemon=True)
        trainer.start()
        actor = partial(GaussianPolicy, hidden=(64, 64))
        worker = RolloutWorker(make_env, actor, codec, port=server.port, model_path=None)
        threading.Thread(target=worker.run, kwargs={"test_episode_interval": 4}, daemon=True).start()
        began, reported, mean = time.monotonic(), 0, -np.inf
        while mean < goal and time.monotonic() - began < seconds:
            time.sleep(0.5)
            newest = [each.returned for each in worker.results["test"]][-5:]
            mean = statistics.fmean(newest) if len(newest) == 5 else -np.inf
            if len(worker.results["test"]) > reported:
                reported = len(worker.results["test"])
                print(
                    f"{time.monotonic() - began:4.0f} s: test return {newest[-1]:.1f}, model {worker.version}",
                    flush=True,
                )
        late = worker.env.times.late_share
        worker.close()
        worker.env.close()
        trainer.terminate()
    print(f"learned: {mean:.1f} over five test episodes, goal {goal:.1f}; late steps {100 * late:.2f} %")
    return mean >= goal


if __name__ == "__main__":
    idle, controlled = measure(Idle()), measure(Controller())
    print(f"mean returns: idle {idle:.1f}, controller {controlled:.1f}", flush=True)
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    sys.exit(0 if fly(limit, (idle + controlled) / 2) else 1)
