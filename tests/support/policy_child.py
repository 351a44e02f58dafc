"""A process that asks inference nodes, and prints one line for each answer: `python policy_child.py ROWS URL...`."""

import sys

import numpy as np

import memoire
from memoire.errors import MemoireError

INPUTS, OUTPUTS = {"obs": (np.float32, (2,))}, {"value": np.float32}


def main(rows: int, urls: list[str]) -> None:
    """Ask until somebody ends this process."""
    obs = {"obs": np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)}
    expected = obs["obs"].sum(1)
    with memoire.RemotePolicy(urls, INPUTS, OUTPUTS, 10.0) as policy:
        while True:
            try:
                is_right = (policy.act(obs)["value"] == expected).all()
            except MemoireError as error:
                print(f"error {error}", flush=True)
            else:
                print("answer" if is_right else "wrong", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
