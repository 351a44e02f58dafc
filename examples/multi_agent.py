"""Table for each agent in one server: a speaker sees a number and sends a word, and a listener guesses the number."""

import numpy as np

import memoire

NUMBERS, WORDS, ADDRESS = 2, 3, "inproc://memoire"
REWARD = memoire.Column(np.float32, (), "reward")


def table(size):
    schema = {"obs": memoire.Column(np.float32, (size,), "state"), "action": np.int64, "reward": REWARD}
    return memoire.Table(schema, parameters=memoire.Parameters(cache_size=16))


class Agent:
    """Agent with a client of its own table, and the value of each answer to each input."""

    def __init__(self, name, inputs, answers, rng):
        self.client = memoire.connect(ADDRESS, table=name, seed=int(rng.integers(1000)))
        self.writer, self.rng = self.client.writer(), rng
        self.values, self.shown = np.full((inputs, answers), 0.5), np.eye(inputs, dtype=np.float32)

    def act(self, what, curiosity):
        values = self.rng.random(self.values.shape[1]) if self.rng.random() < curiosity else self.values[what]
        return int(values.argmax())

    def record(self, what, action, reward):
        self.writer.reset(obs := self.shown[what])
        self.writer.step(obs, action, reward, True, False, np.zeros_like(obs), {})

    def learn(self, batch):
        place = batch.obs.argmax(axis=1), batch.action
        error = batch.reward - self.values[place]
        np.add.at(self.values, place, 0.1 * batch.importance * error)
        batch.update_priorities(error)


def talk(speaker, listener, number, curiosity):
    guess = listener.act(word := speaker.act(number, curiosity), curiosity)
    for agent, heard, answer in ((speaker, number, word), (listener, word, guess)):
        agent.record(heard, answer, float(guess == number))
    return guess == number


rng, tables = np.random.default_rng(0), {"speaker": table(NUMBERS), "listener": table(WORDS)}
with memoire.Server(ADDRESS, tables=tables, seed=0) as server:
    agents = {"speaker": Agent("speaker", NUMBERS, WORDS, rng), "listener": Agent("listener", WORDS, NUMBERS, rng)}
    batches = server.batches(dict.fromkeys(agents, 16), timeout=30.0)
    for turn in range(100):
        for number in rng.integers(NUMBERS, size=20).tolist():
            talk(*agents.values(), number, curiosity=max(0.05, 0.4 - turn / 150))
        for name, part in next(batches).items():
            agents[name].learn(part)
    right = np.mean([talk(*agents.values(), number, curiosity=0.0) for number in range(NUMBERS)])
    for agent in agents.values():  # sends the last counts to the server
        agent.client.close()
    print(f"{right:.0%} of the numbers are understood after {server.stats().samples} samples")
