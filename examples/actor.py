"""Actor of a cluster in two scripts: needs one address, and ends when the learner ends the run.

Start `python examples/learner.py 5560` beside it.
"""

import sys

import numpy as np

import memoire


def main(port: str) -> None:
    rng = np.random.default_rng(0)
    with memoire.connect(f"tcp://127.0.0.1:{port}", seed=1, timeout=30.0) as client:
        client.log("an actor begins")
        policy = client.model("policy")
        writer = client.writer()  # for one environment; a vector of environments needs client.writer(envs)
        model = policy.wait(timeout=30.0)
        steps = 0
        while not client.finished and steps < 200_000:
            x = rng.uniform(-1.0, 1.0, size=1).astype(np.float32)
            writer.reset(x)
            for t in range(10):
                model = policy.newest() or model
                weights = np.frombuffer(model.body)
                action = weights @ [1.0, x[0], x[0] ** 2] + rng.normal(0.0, 0.1)
                reward = -((action - x[0] ** 2) ** 2)
                following = rng.uniform(-1.0, 1.0, size=1).astype(np.float32)
                writer.step(x, np.float32(action), reward, t == 9, False, following, {})
                x = following
                steps += 1
        caches = client.stats().accepted_caches
        print(f"the run is over after {steps} steps, {caches} caches and {policy.version} models")


if __name__ == "__main__":
    main(*sys.argv[1:])
