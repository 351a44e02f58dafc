"""One table for each agent: one sees a number and says a word, the other hears the word and guesses the number.

Their observations differ, so each has a schema of its own; both live in one server, and a learner draws from both.

    python examples/multi_agent.py
"""

import numpy as np

import memoire

NUMBERS, WORDS = 2, 3


def seen(size):
    return memoire.Schema(
        {
            "obs": memoire.Column(np.float32, (size,), "state"),
            "action": memoire.Column(np.int64),
            "reward": memoire.Column(np.float32, (), "reward"),
        }
    )


SETTINGS = memoire.Parameters(cache_size=16)
TABLES = {
    "speaker": memoire.Table(seen(NUMBERS), parameters=SETTINGS),
    "listener": memoire.Table(seen(WORDS), parameters=SETTINGS),
}


class Agent:
    """One of the two: a client of its own table, and the value of each answer to what it may see."""

    def __init__(self, name, sees, says, rng):
        self.client = memoire.connect("inproc://memoire", table=name, seed=int(rng.integers(1000)))
        self.writer = self.client.writer()
        self.values, self.rng = np.full((sees, says), 0.5), rng
        self.shown = np.eye(sees, dtype=np.float32)

    def act(self, what, curiosity):
        if self.rng.random() < curiosity:
            return int(self.rng.integers(self.values.shape[1]))
        return int(self.values[what].argmax())

    def record(self, what, action, reward):
        self.writer.reset(self.shown[what])
        self.writer.step(self.shown[what], action, reward, True, False, np.zeros_like(self.shown[what]), {})

    def learn(self, batch):
        what = batch.obs.argmax(axis=1)
        error = batch.reward - self.values[what, batch.action]
        np.add.at(self.values, (what, batch.action), 0.1 * batch.importance * error)
        batch.update_priorities(error)


def talk(speaker, listener, rng, curiosity):
    """One round; returns whether the number was guessed."""
    number = int(rng.integers(NUMBERS))
    word = speaker.act(number, curiosity)
    guess = listener.act(word, curiosity)
    reward = float(guess == number)
    speaker.record(number, word, reward)
    listener.record(word, guess, reward)
    return reward


def main() -> None:
    rng = np.random.default_rng(0)
    with memoire.Server("inproc://memoire", tables=TABLES, seed=0) as server:
        agents = {"speaker": Agent("speaker", NUMBERS, WORDS, rng), "listener": Agent("listener", WORDS, NUMBERS, rng)}
        batches = server.batches(dict.fromkeys(agents, 16), timeout=30.0)
        for turn in range(100):
            for _ in range(20):
                talk(*agents.values(), rng, curiosity=max(0.05, 0.4 - turn / 150))
            for name, part in next(batches).items():
                agents[name].learn(part)
        right = np.mean([talk(*agents.values(), rng, curiosity=0.0) for _ in range(100)])
        for agent in agents.values():
            agent.client.close()  # which tells the server all that it has counted
        tables = server.stats().tables
        counted = ", ".join(f"{name} {table.steps} steps" for name, table in tables.items())
        print(f"{right:.0%} of the numbers are understood after {counted}")


if __name__ == "__main__":
    main()
