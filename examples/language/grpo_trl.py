"""TRL's GRPOTrainer on memoire: three rollout processes answer `a+b mod 10`, the trainer draws whole groups.

    python examples/language/grpo_trl.py        # needs torch, transformers, datasets and trl 1.13 to 1.16

TRL makes no answers itself: `memoire.trl.PromptRollouts` is its `rollout_func`. Groups without signal are dropped and
replaced. Each checkpoint commits the prompts learned from: a second run with the same folder continues there.
"""

import io
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import TrainerCallback

import memoire
import memoire.trl
from memoire.errors import Closed, MemoireTimeout

sys.path.insert(0, str(Path(__file__).parent))
import sums

GROUP, GROUPS, STEPS, GOAL = 8, 8, 1000, 0.9
TABLES = {
    "sums": memoire.Table(
        memoire.trl.schema(), storage="prompts", group=GROUP, score="variance", drop_dead=True, max_model_lag=20,
        on_stale="pace", lease=10.0, capacity=100_000,
    ),
    "weights": memoire.Table({"obs": "u1"}),  # for clients that only receive weights
}  # fmt: skip


def answer(url: str, seed: int) -> None:
    """Run a rollout process: answer prompts with the newest weights until the server is gone."""
    torch.set_num_threads(1)
    policy, version = sums.model(0), 0
    torch.manual_seed(seed)
    with memoire.Prompts(url, "sums") as prompts, memoire.connect(url, table="weights") as client:
        weights = client.model("policy")
        try:
            while True:
                newest = weights.newest() or weights.wait(30.0)
                if newest.version != version:
                    policy.load_state_dict(torch.load(io.BytesIO(newest.body), weights_only=True))
                    version = newest.version
                for lease in prompts.lease(4, version=version):
                    text = bytes(lease.payload).decode()
                    tokens, logprobs = sums.answers(policy, [text], len(lease.missing))
                    prompts.answers(
                        lease, dict(zip(lease.missing, rows_of(text, tokens[0], logprobs[0]), strict=True)), version
                    )
        except (MemoireTimeout, Closed):
            return


def rows_of(text: str, tokens: torch.Tensor, logprobs: torch.Tensor):
    """Yield the columns of each answer to a prompt."""
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        reward = float(token == sums.right_token(text))
        yield memoire.trl.answer_of(sums.ids_of(text), [token], [logprob]) | {"reward": reward}


class Publish(TrainerCallback):
    """Callback that adds prompts and publishes weights after each step, and stops training at the goal."""

    def __init__(self, server: memoire.Server, prompts: memoire.Prompts, policy) -> None:
        self.server, self.prompts, self.policy, self.epoch = server, prompts, policy, 0

    def on_train_begin(self, args, state, control, **_) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **_) -> None:
        file = io.BytesIO()
        torch.save(self.policy.state_dict(), file)
        self.server.publish("policy", file.getvalue())
        while self.prompts.counts()["waiting"] < 2 * len(sums.PROMPTS):
            self.prompts.add(enumerate(sums.PROMPTS), "sums", self.epoch)
            self.epoch += 1
        if state.global_step % 50 == 0:
            right = sums.accuracy(self.policy)
            print(f"step {state.global_step}: {right:.0%} right", flush=True)
            control.should_training_stop = right >= GOAL


def main(folder: str) -> None:
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    policy = sums.model(0)
    with (
        memoire.Server("tcp://127.0.0.1:*", tables=TABLES) as server,
        memoire.Prompts(server.endpoint, "sums") as prompts,
    ):
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=answer, args=(server.endpoint, seed), daemon=True) for seed in (1, 2, 3)]
        [worker.start() for worker in workers]
        rollouts = memoire.trl.PromptRollouts(prompts, timeout=120.0)
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=GROUP * GROUPS, num_generations=GROUP, max_steps=STEPS,
            max_completion_length=1, learning_rate=3e-4, lr_scheduler_type="constant", beta=0.0, save_steps=100,
            save_total_limit=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=10**6,
            dataloader_pin_memory=False,
        )  # fmt: skip
        # The table decides which prompts are trained on; this data set only gives their number.
        rows = Dataset(InMemoryTable.from_pydict({"prompt": sums.PROMPTS}), fingerprint="sums")
        trainer = GRPOTrainer(
            policy, memoire.trl.reward, args=config, train_dataset=rows, processing_class=sums.tokenizer(),
            rollout_func=rollouts, callbacks=[rollouts.commits, Publish(server, prompts, policy)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")) or None)
        print({state: count for state, count in prompts.counts().items() if count})
        [worker.kill() for worker in workers]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
