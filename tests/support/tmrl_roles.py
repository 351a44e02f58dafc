"""Process with a role of a pipeline without torch: python tmrl_roles.py server|worker|trainer URL FILE [KEYS]

The trainer writes each observation into FILE as it arrives.
"""

import logging
import sys
from collections.abc import Iterator
from typing import Any

from memoire.tmrl.networking import Buffer, RolloutWorker, Server, Trainer
from memoire.tmrl.training_offline import TrainingOffline
from memoire.tmrl.util import partial
from rlkit import ACTIONS, SPACE, Actor, Counter, Numbered


class Written:
    """Memory that writes each sample into a file."""

    def __init__(self, nb_steps: int, device: Any, path: str) -> None:
        self.nb_steps, self.path, self.count = nb_steps, path, 0

    def append_buffer(self, buffer: Buffer) -> None:
        with open(self.path, "a") as file:
            file.write("".join(f"{int(obs[0])} {int(obs[1])}\n" for _, obs, *_ in buffer.memory))
        self.count += len(buffer)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.nb_steps))


def main(role: str, url: str, path: str, keys: str | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if role == "server":
        with Server(port=int(url.rpartition(":")[2]), keys=keys, state_dir=path) as server:
            server.wait()
    elif role == "worker":
        with RolloutWorker(Numbered, Actor, server_ip=url, keys=keys, model_path=None) as worker:
            worker.run()
    else:
        cls = partial(
            TrainingOffline, env_cls=(SPACE, ACTIONS), memory_cls=partial(Written, path=path), epochs=3, rounds=1,
            training_agent_cls=Counter, steps=20, update_buffer_interval=5, device="cpu",
        )  # fmt: skip
        options: dict[str, Any] = {"checkpoint_path": f"{path}.cpt", "model_path": None, "flush_every": 0.1}
        with Trainer(cls, server_ip=url, keys=keys, **options) as trainer:
            trainer.run()
        print(f"trained {trainer.agent.count}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
