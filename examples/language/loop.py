"""GRPO in plain torch on `a+b mod 10`: three rollout processes, one trainer, and checkpoints that lose no prompt.

    python examples/language/loop.py            # needs torch and transformers; a minute on two cores

The trainer adds prompts, draws whole groups of answers, and publishes its weights. The rollout processes lease prompts
and answer them; if a process is killed, its prompts go to the other processes. Each checkpoint comes with a commit.
"""

import io
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import torch

import memoire
from memoire.errors import Closed, MemoireTimeout

sys.path.insert(0, str(Path(__file__).parent))
import sums

GROUP, GROUPS, STEPS, GOAL = 8, 8, 2000, 0.9
COLUMNS = {
    "tokens": memoire.Column(np.int32, (None,)),
    "logprob": memoire.Column(np.float32, (None,)),
    "reward": memoire.Column(np.float32),
}
TABLES = {
    "sums": memoire.Table(
        COLUMNS, storage="prompts", group=GROUP, score="variance", drop_dead=True, max_model_lag=20, on_stale="pace",
        lease=10.0, capacity=100_000,
    ),
    "weights": memoire.Table({"obs": "u1"}),  # for clients that only receive weights
}  # fmt: skip


def answer(url: str, seed: int) -> None:
    """Run a rollout process: answer prompts with the newest weights until the server is gone."""
    torch.set_num_threads(1)
    policy = sums.model(0)
    torch.manual_seed(seed)
    with memoire.Prompts(url, "sums") as prompts, memoire.connect(url, table="weights") as client:
        weights, version = client.model("policy"), 0
        try:
            while True:
                newest = weights.wait(timeout=30.0) if not version else weights.newest()
                if newest.version != version:
                    policy.load_state_dict(torch.load(io.BytesIO(newest.body), weights_only=True))
                    version = newest.version
                for lease in prompts.lease(4, version=version):
                    answer_one(prompts, lease, policy, version)
        except (MemoireTimeout, Closed):
            return


def answer_one(prompts: memoire.Prompts, lease, policy, version: int) -> None:
    text = bytes(lease.payload).decode()
    tokens, logprobs = sums.answers(policy, [text], GROUP)
    right = sums.right_token(text)
    rows = {
        index: {
            "tokens": np.array([*sums.ids_of(text), token], np.int32),
            "logprob": np.array([logprob], np.float32),
            "reward": np.float32(token == right),
        }
        for index, (token, logprob) in enumerate(zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True))
    }
    prompts.answers(lease, {index: rows[index] for index in lease.missing}, version=version)


def train(policy, optimizer, step) -> None:
    """Take one optimizer step on the clipped ratio to the probabilities at which the answers were drawn."""
    columns = step.padded()
    tokens = torch.from_numpy(columns["tokens"]).long()
    reward = torch.from_numpy(columns["reward"]).reshape(-1, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    known = torch.log_softmax(policy(tokens[:, :-1]).logits[:, -1], -1).gather(1, tokens[:, -1:]).squeeze(1)
    ratio = (known - torch.from_numpy(step["logprob"].values)).exp()
    gain = advantage.reshape(-1)
    loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def packed(policy) -> bytes:
    """Return the policy's weights as bytes of `torch.save`."""
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    return file.getvalue()


def main() -> None:
    torch.set_num_threads(1)
    policy = sums.model(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-4)
    context = multiprocessing.get_context("spawn")
    with memoire.Server("tcp://127.0.0.1:*", tables=TABLES) as server:
        workers = [context.Process(target=answer, args=(server.endpoint, seed), daemon=True) for seed in (1, 2, 3)]
        [worker.start() for worker in workers]
        server.publish("policy", packed(policy))
        prompts, epoch = server.table("sums").calls(), 0
        for step in range(STEPS):
            while prompts.counts()["waiting"] < 2 * len(sums.PROMPTS):
                prompts.add(enumerate(sums.PROMPTS), "sums", epoch)
                epoch += 1
            train(policy, optimizer, prompts.draw(step, GROUPS, 120.0))
            server.publish("policy", packed(policy))
            if step == 20:
                workers[0].kill()  # the other workers answer the prompts of the killed worker
            if step % 50 == 49:
                # A trainer writes a checkpoint here with the number of the step. After a restart the trainer calls
                # prompts.rewind(step of the checkpoint): the groups drawn since the checkpoint come back, once.
                prompts.commit(step)
                right = sums.accuracy(policy)
                counts = prompts.counts()
                shown = ", ".join(f"{counts[state]} {state}" for state in ("waiting", "committed", "dropped"))
                print(f"step {step + 1}: {right:.0%} right; prompts: {shown} without signal", flush=True)
                if right >= GOAL:
                    break
        [worker.kill() for worker in workers]


if __name__ == "__main__":
    main()
