"""What goes from a worker to a trainer and back, from NumPy alone: packets of samples of a drone, and a model."""

import numpy as np

PACKETS = 16
"""Different ones, which are sent over and over."""
MODEL_BYTES = 1_000_000


def columns(length):
    """Packets of so many samples as columns [T, *F]: the observation is four numbers, the action two."""
    random = np.random.default_rng(0)
    for _ in range(PACKETS):
        yield {
            "obs": random.standard_normal((length, 4), np.float32),
            "action": random.standard_normal((length, 2), np.float32),
            "reward": random.standard_normal(length, np.float32),
            "terminated": np.arange(length) == length - 1,
        }


def packets(length):
    """The same as lists of samples (act, obs, rew, done, info), as TMRL's workers make them."""
    for packet in columns(length):
        obs = [tuple(row.reshape(4, 1)) for row in packet["obs"]]
        rest = packet["action"], obs, packet["reward"].tolist(), packet["terminated"].tolist()
        yield [
            (act.copy(), tuple(x.copy() for x in seen), rew, done, {})
            for act, seen, rew, done in zip(*rest, strict=True)
        ]


def model():
    """Weights of about a megabyte, as a model's file has them."""
    return np.random.default_rng(1).integers(0, 256, MODEL_BYTES, np.uint8).tobytes()
