"""A role of a pipeline without torch, as a process: python tmrl_roles.py server|worker|trainer URL FILE [KEYS]

Observations say which process, and which observation of it. The trainer writes each into FILE as it arrives, and into a
file of its own process with where it came from: "Buffer" is from workers, "KeptBuffer" from its journal. With TMRL_STEPS,
a worker writes a byte there for each step.
"""

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from memoire.rl import weights
from memoire.tmrl.networking import Buffer, RolloutWorker, Server, Trainer
from memoire.tmrl.training import TrainingAgent
from memoire.tmrl.training_offline import TrainingOffline
from memoire.tmrl.util import partial

SPACE = gymnasium.spaces.Box(-1e18, 1e18, (2,), np.float64)
ACTIONS = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class Numbered(gymnasium.Env[Any, Any]):
    observation_space, action_space = SPACE, ACTIONS

    def __init__(self, length: int = 10) -> None:
        self.number, self.length, self.count, self.made = os.getpid(), length, 0, 0

    def _obs(self) -> Any:
        self.made += 1
        return np.array([self.number, self.made], np.float64)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        if "TMRL_STEPS" in os.environ:
            with open(f"{os.environ['TMRL_STEPS']}.{self.number}", "ab") as file:
                file.write(b".")
        if int(os.environ.get("TMRL_SLEEP_US", "0")):
            import time

            time.sleep(int(os.environ["TMRL_SLEEP_US"]) / 1e6)
        return self._obs(), 1.0, self.count == self.length, False, {}


class Actor:
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.value = 0.0

    def act(self, obs: Any, test: bool = False) -> Any:
        return np.array([self.value], np.float32)

    def load(self, body: bytes, version: int) -> None:
        self.value = float(weights.unpack(body)["value"][0])


class Written:
    """A memory that writes each sample into a file."""

    def __init__(self, nb_steps: int, device: Any, path: str) -> None:
        self.nb_steps, self.path, self.count = nb_steps, path, 0

    def append_buffer(self, buffer: Buffer) -> None:
        rows = [f"{int(obs[0])} {int(obs[1])}\n" for _, obs, *_ in buffer.memory]
        with open(self.path, "a") as file:
            file.write("".join(rows))
        with open(f"{self.path}.{os.getpid()}", "a") as file:
            file.write("".join(f"{type(buffer).__name__} {row}" for row in rows))
        self.count += len(buffer)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.nb_steps))


class Agent(TrainingAgent):
    def __init__(self, observation_space: Any, action_space: Any, device: Any) -> None:
        super().__init__(observation_space, action_space, None)
        self.count = 0

    def train(self, batch: Any) -> dict[str, Any]:
        self.count += 1
        return {"loss": 0.0}

    def get_actor(self) -> Any:
        return {"value": np.array([self.count], np.float32)}


def main(role: str, url: str, path: str, keys: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if role == "server":
        with Server(port=int(url.rpartition(":")[2]), keys=keys, state_dir=path) as server:
            print("serving", flush=True)
            server.wait()
    elif role == "worker":
        with RolloutWorker(Numbered, Actor, server_ip=url, keys=keys, model_path=None) as worker:
            worker.run()
    else:
        epochs = float(os.environ.get("TMRL_EPOCHS", "inf"))
        cls = partial(
            TrainingOffline, env_cls=(SPACE, ACTIONS), memory_cls=partial(Written, path=path), training_agent_cls=Agent,
            epochs=epochs, rounds=1, steps=20, update_buffer_interval=5, device="cpu",
        )  # fmt: skip
        options: dict[str, Any] = {"resume": os.environ.get("TMRL_RESUME", "all"), "server_ip": url, "keys": keys}
        with Trainer(cls, model_path=None, checkpoint_path=f"{path}.cpt", flush_every=0.1, **options) as trainer:
            trainer.run()
        print(f"trained {trainer.agent.count}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
