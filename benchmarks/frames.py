"""Bytes of an Atari sample on the wire, with the frames of real games.

Games are played with random, sticky actions, as agents see them: every fourth frame, the brighter of the last two,
gray, 84 x 84. A sample is the stacks of four frames of both its states, n-step 1; its bytes are compared with
the uncompressed bytes of both stacks. Bytes are counted on TCP between an actor and its server, both directions,
requests and replies included.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from aims import read
from ale_py import ALEInterface, LoggerMode, roms
from measure import Spread, arguments, cells, head, machine, plot, record, write_page
from peers.tasks import BATCH, distinct
from storage import Metered, far_away

import memoire

GAMES = ("pong", "breakout", "qbert", "ms_pacman", "seaquest", "battle_zone")
STEPS = 8000
"""Steps that are played of each game."""
REPEAT = 4
"""Frames for which an action is held."""
STICKY = 0.25
"""Probability that the game repeats the previous action instead."""
SIDE = 84
STACK = 4
UNCOMPRESSED = 2 * STACK * SIDE * SIDE
CACHES = 4
CODECS = ("none", "zlib", "lz4")
SCHEMA = memoire.Schema(
    {
        "state": memoire.Column("uint8", (SIDE, SIDE), "state"),
        "action": memoire.Column("int32"),
        "reward": memoire.Column("float32", (), "reward"),
    }
)
Episode = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Frames [T + 1, 84, 84], actions [T], rewards [T]."""


def area_weights(pixels: int, fewer: int) -> np.ndarray:
    """Return weights [fewer, pixels] that make each new pixel the mean of the old pixels that it covers."""
    edges = np.arange(fewer + 1) * pixels / fewer
    covered = np.minimum(np.arange(1, pixels + 1), edges[1:, None]) - np.maximum(np.arange(pixels), edges[:-1, None])
    return (covered.clip(0) * fewer / pixels).astype(np.float32)


class Player:
    """Game that is played with random actions."""

    def __init__(self, game: str, seed: int) -> None:
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self.ale, self.random = ALEInterface(), np.random.default_rng(seed)
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", STICKY)
        self.ale.loadROM(roms.get_rom_path(game))
        self.actions = self.ale.getMinimalActionSet()
        height, width = self.ale.getScreenDims()
        self.rows, self.columns = area_weights(height, SIDE), area_weights(width, SIDE).T

    def step(self, action: int) -> tuple[np.ndarray, float]:
        """Hold an action for REPEAT frames; return the frame that an agent sees then, and the summed reward."""
        reward, before = 0.0, self.ale.getScreenGrayscale()
        for _ in range(REPEAT):
            before = self.ale.getScreenGrayscale()
            reward += self.ale.act(self.actions[action])
        return self.shrunk(np.maximum(before, self.ale.getScreenGrayscale())), reward

    def shrunk(self, screen: np.ndarray) -> np.ndarray:
        return np.rint(self.rows @ screen.astype(np.float32) @ self.columns).astype(np.uint8)

    def episode(self, most: int) -> Episode:
        """Play until the game is over, or for `most` steps."""
        self.ale.reset_game()
        frames, actions, rewards = [self.shrunk(self.ale.getScreenGrayscale())], [], []
        while not self.ale.game_over() and len(actions) < most:
            actions.append(int(self.random.integers(len(self.actions))))
            frame, reward = self.step(actions[-1])
            frames.append(frame)
            rewards.append(reward)
        return np.array(frames), np.array(actions, np.int32), np.array(rewards, np.float32)


def played(game: str, steps: int) -> Iterator[Episode]:
    """Yield episodes that have `steps` steps together."""
    if game == "noise":
        frames = distinct(np.random.default_rng(0), (steps + 1, SIDE, SIDE), "uint8")
        yield frames, np.zeros(steps, np.int32), np.zeros(steps, np.float32)
        return
    player = Player(game, seed=0)
    while steps > 0:
        episode = player.episode(steps)
        steps -= len(episode[1])
        yield episode


@dataclass
class Row:
    """Bytes of the frames of one game."""

    game: str
    samples: dict[str, float]
    """Bytes on the wire for each sample of a cache, by codec."""
    far: float
    """Bytes on the wire for each sample of a remote learner, with lz4."""

    @property
    def ratio(self) -> float:
        return self.samples["lz4"] / UNCOMPRESSED

    def __str__(self) -> str:
        shares = [f"{self.samples[codec] / UNCOMPRESSED:.3f}" for codec in CODECS]
        return cells(self.game, f"{self.samples['lz4']:,.0f}", *shares, f"{self.far:,.0f}")


HEAD = head("game", "bytes, lz4", "plain", "zlib", "lz4", "to a learner")


def recorded(cluster: Metered, episodes: list[Episode]) -> None:
    """Put the episodes into the actor's memory, with varied priorities."""
    random, memory = np.random.default_rng(1), cluster.client.memory
    for frames, actions, rewards in episodes:
        memory.open(0)
        memory.extend(0, (frames[:-1], actions, rewards), random.uniform(0.1, 2.0, len(actions)).astype(np.float32))
        memory.close(0, terminated=True, final_state=frames[-1])


def measured(game: str, steps: int, caches: int) -> Row:
    """Play a game, send its frames with each codec, and return the bytes."""
    episodes, samples, far = list(played(game, steps)), {}, 0.0
    for codec in CODECS:
        parameters = memoire.Parameters(frame_stack=STACK, cache_size=BATCH, compression=codec)
        with closing(Metered(SCHEMA, parameters, "caches", steps)) as cluster:
            recorded(cluster, episodes)
            cluster.client.update(timeout=60.0)
            before = cluster.bytes
            for _ in range(caches):
                assert cluster.client.push_cache(timeout=60.0), cluster.client.push_reason
            cluster.settle()
            samples[codec] = (cluster.bytes - before) / (caches * BATCH)
            far = far_away(cluster, caches) if codec == "lz4" else far
    return Row(game, samples, far)


def draw(rows: list[Row], path: Path, aim: float) -> None:
    """Draw bars: the bytes with each codec as a share of the uncompressed bytes."""
    with plot(path, 9, 3.6) as axes:
        for place, codec in enumerate(CODECS):
            shares = [row.samples[codec] / UNCOMPRESSED for row in rows]
            label = "plain" if codec == "none" else codec
            axes.bar(np.arange(len(rows)) + 0.27 * (place - 1), shares, 0.25, label=label)
        axes.axhline(aim, color="black", linewidth=0.8, linestyle="--", label="aim")
        axes.set_xticks(range(len(rows)), [row.game.replace("_", " ") for row in rows])
        axes.set(yscale="log", ylabel="of both stacks, uncompressed")
        axes.legend(ncols=4)


def main() -> None:
    """Print the table; with --write, also write the page, the plot and the figures."""
    args = arguments(__doc__)
    steps, caches = (400, 1) if args.quick else (STEPS, CACHES)
    games = [game for game in (*(GAMES[:1] if args.quick else GAMES), "noise") if args.only in game]
    print(f"{__doc__}\n{machine()}\n\n{HEAD}", flush=True)
    rows = []
    for game in games:
        rows.append(measured(game, steps, caches))
        print(rows[-1], flush=True)
    ratios = Spread.of([row.ratio for row in rows if row.game != "noise"] or [row.ratio for row in rows])
    print(f"\nof the uncompressed stacks, with lz4: {ratios.middle:.3f} ({ratios.low:.3f} to {ratios.high:.3f})")
    if args.write:
        table = "\n".join([HEAD, *map(str, rows)])
        facts = FACTS.format(ratios=ratios, steps=steps)
        write_page(args.write, "frames", __doc__, table, facts, "![shares](frames.svg)")
        draw(rows, Path(args.write, "frames.svg"), read()["atari-bytes"].most)
        record(args.write, "frames", {"atari-bytes": ratios})


FACTS = """\
With lz4, over the games: {ratios.middle:.3f} of the 56,448 bytes of both stacks (quartiles {ratios.low:.3f} to
{ratios.high:.3f}).

* *bytes, lz4*: of a sample on the wire; *plain*, *zlib*, *lz4*: as a share of both stacks. The memory that is drawn
  from holds {steps} steps of a game, priorities are random, and a cache has 256 samples. Plain is below 1 since a frame
  crosses once for all samples of a cache that have it.
* *noise* is random bytes, which no codec compresses: its share shows the saving of unique frames alone. Pictures of
  cameras lie in between.
* *to a learner*: bytes on the wire for each sample of a batch that a remote learner draws, with lz4: the server packs
  frames again."""


if __name__ == "__main__":
    main()
