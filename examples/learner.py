"""Learner of a cluster in two scripts: runs the server, learns the square of a number, and publishes its coefficients.

python examples/learner.py 5560 &
python examples/actor.py 5560
"""

import sys

import numpy as np

import memoire

schema = memoire.Schema(
    {
        "obs": memoire.Column(np.float32, (1,), "state"),
        "action": memoire.Column(np.float32),
        "reward": memoire.Column(np.float32, (), "reward"),
    }
)
parameters = memoire.Parameters(cache_size=64)


def main(port: str) -> None:
    with memoire.Server(f"tcp://127.0.0.1:{port}", schema, parameters=parameters, run="example", seed=0) as server:
        weights = np.zeros(3)  # action = weights . (1, x, x * x)
        server.publish("policy", weights.tobytes())
        for step, batch in enumerate(server.batches(64, timeout=30.0)):
            x, action = batch["obs"][:, 0], batch["action"]
            features = np.stack([np.ones_like(x), x, x * x], axis=1)
            # The reward is the squared distance of an action from the square, negated: move towards the square.
            error = np.sqrt(-batch["reward"]) * np.where(x * x > action, 1.0, -1.0)
            target = action + error
            residual = target - features @ weights
            weights += 0.3 * (batch["importance"][:, None] * residual[:, None] * features).mean(axis=0)
            batch.update_priorities(np.abs(residual))
            if step % 20 == 0:
                server.publish("policy", weights.tobytes())
            if np.abs(residual).mean() < 0.02:
                break
        server.finish()
        print(f"learned {np.abs(weights.round(1))} from {step} batches")
        server.wait_closed(2.0)  # lets the actor learn that the run is over


if __name__ == "__main__":
    main(*sys.argv[1:])
