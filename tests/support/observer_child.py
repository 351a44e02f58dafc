"""A process with an observer, or with an agent: python observer_child.py WHAT URL...

run      runs episodes of as many steps as their option says, and prints "began" and "done COUNT"
idle     waits for jobs for three seconds, and prints the processor time that this took
agent    listens at URL, prints its address, and hands out jobs until it is killed
"""

import sys
import time

import numpy as np

from memoire.rl import Agent, Observer

INPUTS = {"obs": (np.float32, (2,))}
OUTPUTS = {"action": np.int64, "value": np.float32}
ENTRIES = {"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32}
IDLE = 3.0


def act(columns, weights=1):
    """Answer like an agent: action 7, and as value the sum of the observation times the weights."""
    return {"action": np.full(len(columns["obs"]), 7), "value": columns["obs"].sum(1) * np.float32(weights)}


def steps(start, ask, options):
    """Yield the entries of an episode of options["steps"] steps."""
    for step in range(options.get("steps", 3)):
        obs = np.float32([step, options.get("mark", 0)])
        outputs = ask({"obs": obs})
        if step == 0:
            print("began", flush=True)
        yield {"obs": obs, "action": outputs["action"], "reward": outputs["value"]}
        time.sleep(options.get("pause", 0.0))


def main(what, *urls):
    if what == "agent":
        with Agent(urls[0], INPUTS, OUTPUTS, act, ENTRIES) as agent:
            print(agent.endpoint, flush=True)
            while True:
                agent.collect(1, steps=1000, pause=0.01)
    with Observer(list(urls), steps) as observer:
        if what == "idle":
            observer.run(timeout=0.5)
            before = time.process_time()
            observer.run(timeout=IDLE)
            print(time.process_time() - before, flush=True)
            return
        while True:
            observer.run(episodes=1)
            print(f"done {observer.done}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
