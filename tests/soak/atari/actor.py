"""An actor that plays an Atari game at random by ale-py, and records frames of 84 by 84 pixels."""

import json
import os
import signal
import threading

import numpy as np
from ale_py import ALEInterface, LoggerMode, roms

import memoire

SIDE = 84
REPEATED = 4
"""Frames for which an action is held."""
LONGEST = 1000
"""Steps of an episode at most."""
STEPS_PER_SECOND = 60.0


def shrunk(frame: np.ndarray) -> np.ndarray:
    """[SIDE, SIDE] uint8: the pixels nearest to those of a smaller frame."""
    rows, columns = (np.linspace(0, size - 1, SIDE).round().astype(int) for size in frame.shape)
    return np.ascontiguousarray(frame[np.ix_(rows, columns)])


def play(client: memoire.Client, ending: threading.Event) -> None:
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale, random, writer = ALEInterface(), np.random.default_rng(), client.writer()
    ale.loadROM(roms.get_rom_path(os.environ.get("GAME", "pong")))
    actions = ale.getMinimalActionSet()
    while not ending.is_set():
        ale.reset_game()
        frame = shrunk(ale.getScreenGrayscale())
        for step in range(1, LONGEST + 1):
            action = int(random.integers(len(actions)))
            reward = float(sum(ale.act(actions[action]) for _ in range(REPEATED)))
            after, is_over = shrunk(ale.getScreenGrayscale()), bool(ale.game_over())
            is_cut = not is_over and (step == LONGEST or ending.wait(1.0 / STEPS_PER_SECOND))
            writer.step(frame, action, reward, is_over, is_cut, after)
            frame = after
            if is_over or is_cut:
                break


def main() -> None:
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    with memoire.connect(os.environ["MEMOIRE_ENDPOINT"], timeout=300.0, capacity=20_000) as client:
        play(client, ending)
        client.update(15.0)
        stats = client.stats()
        counts = {"episodes": stats.episodes, "steps": stats.steps, "caches": stats.pushed_caches}
        print(json.dumps({"client": stats.client} | counts), flush=True)


if __name__ == "__main__":
    main()
