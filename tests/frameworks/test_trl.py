"""Tests of TRL's trainers, which draw groups from memoire: TRL's own consumers run, and a changed protocol is named."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("trl", reason="trl is not installed: memoire.trl follows its protocols")

import memoire  # noqa: E402
import memoire.trl as adapter  # noqa: E402
from memoire.errors import IncompatibleLibrary, ParameterError  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "language"))
import sums  # noqa: E402

pytestmark = pytest.mark.torch
GROUP = 4


@pytest.fixture
def prompts():
    table = memoire.Table(adapter.schema(), storage="prompts", group=GROUP, capacity=10_000)
    with memoire.Server("tcp://127.0.0.1:*", tables={"sums": table}) as server:
        with memoire.Prompts(server.endpoint, "sums", timeout=20.0) as client:
            yield client


def answer(prompts, count, version=0, rewards=(1.0, 0.0, 0.0, 0.0)):
    """Add and answer `count` prompts, whose index is their first token."""
    known = sum(prompts.counts().values())
    prompts.add({known + place: b"2+2=" for place in range(count)})
    left = count
    while left:
        for lease in prompts.lease(left):
            rows = {}
            for place in range(GROUP):
                length = 1 + place % 2
                rows[place] = adapter.answer_of([lease.key[2], 7], [8, 9][:length], [-0.5, -1.5][:length])
                rows[place]["reward"] = rewards[place]
            prompts.answers(lease, rows, version)
            left -= 1


def test_advantages_are_rewards_beside_those_of_their_group():
    rewards, group = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 5.0]), np.array([0, 0, 1, 1, 2, 2])
    advantages = adapter.advantages_of(rewards, group)
    expected = torch.tensor(rewards).view(3, 2)
    spread = expected.std(1, keepdim=True)
    expected = (expected - expected.mean(1, keepdim=True)) / (spread + 1e-4)
    np.testing.assert_allclose(advantages, expected.reshape(-1).numpy(), rtol=1e-6)


def test_a_protocol_that_has_moved_is_named():
    with pytest.raises(IncompatibleLibrary, match=r"trl .* RolloutWorkerProtocol has changed: pause, stop\. Install"):
        adapter.check_protocol({*adapter.MEMBERS, "pause"} - {"stop"})


def taken(worker, count, version=lambda: 0, health=None):
    """Return `count` samples that the data set of TRL's trainer takes."""
    from collections import defaultdict

    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    rows = RolloutQueueDataset(
        worker.rollout_buffer, version, health or worker.check_health, 20.0, defaultdict(list), poll_interval_s=0.2
    )
    return [sample for _, sample in zip(range(count), rows, strict=False)]


def test_trls_own_consumer_takes_whole_groups_with_advantages(prompts):
    answer(prompts, 6)
    worker = adapter.PromptRolloutWorker(prompts, groups=3)
    worker.start()
    try:
        samples = taken(worker, 6 * GROUP)
    finally:
        worker.stop()
    assert [each["group_id"] for each in samples] == [number for number in range(6) for _ in range(GROUP)]
    assert [each["input_ids"][0] for each in samples[::GROUP]] == list(range(6))
    for place, each in enumerate(samples):
        length = 1 + place % GROUP % 2
        assert list(each["input_ids"])[1:] == [7, 8, 9][: 1 + length]
        assert list(each["completion_mask"]) == [0, 0, 1, 1][: 2 + length]
        assert list(each["old_log_probs"]) == [0.0, 0.0, -0.5, -1.5][: 2 + length]
    assert sum(each["advantage"] for each in samples) == pytest.approx(0.0, abs=1e-5)
    assert samples[0]["advantage"] > 0 > samples[1]["advantage"]
    assert worker.metrics_queue.get_nowait()["rollout/reward_mean"] == 0.25


def test_what_a_trainer_may_not_have_learned_from_is_not_committed(prompts):
    answer(prompts, 8)
    worker = adapter.PromptRolloutWorker(prompts, groups=2)
    worker.start()
    try:
        taken(worker, 4 * GROUP + 1)  # steps 0 and 1, and one answer of step 2
        assert (worker.commit(), worker.committable) == (0, -1)
        worker.update_model_version(1)
        worker.update_model_version(2)
        assert worker.committable == -1
        worker.update_model_version(3)
        assert worker.committable == 1 and worker.commit() == 4
    finally:
        worker.stop()
    assert prompts.rewind(1) == 2
    step = prompts.draw(2, 2)
    assert [key[2] for key in step.keys] == [4, 5], "what was not committed comes back"


def test_a_rollout_func_gives_trls_batch_from_the_table(prompts):
    answer(prompts, 3)
    rollouts = adapter.PromptRollouts(prompts)
    trainer = type("Trainer", (), {"num_generations": GROUP, "model": torch.nn.Linear(1, 1).train()})()
    batch = rollouts(["any"] * (2 * GROUP), trainer)
    assert batch["prompt_ids"][::GROUP] == [[0, 7], [1, 7]]
    assert batch["completion_ids"][:2] == [[8], [8, 9]] and batch["logprobs"][1] == [-0.5, -1.5]
    assert adapter.reward([None] * 8, reward=batch["reward"]) == [1.0, 0.0, 0.0, 0.0] * 2
    trainer.num_generations = 2
    with pytest.raises(ParameterError, match=r"^group must be 2 \(TRL's num_generations\) .* 1 groups .* got \[4\]"):
        rollouts(["any"] * 2, trainer)
    assert rollouts.step == 1


def test_grpo_trainer_learns_and_its_checkpoint_commits(prompts, tmp_path):
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    answer(prompts, 12)
    rollouts = adapter.PromptRollouts(prompts)
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=2 * GROUP, num_generations=GROUP, max_steps=5,
        max_completion_length=2, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows = Dataset(InMemoryTable.from_pydict({"prompt": sums.PROMPTS}), fingerprint="sums")
    GRPOTrainer(
        sums.model(0), adapter.reward, args=config, train_dataset=rows, processing_class=sums.tokenizer(),
        rollout_func=rollouts, callbacks=[rollouts.commits],
    ).train()  # fmt: skip
    counts = prompts.counts()
    assert counts["committed"] == 10 and counts["ready"] == 2, "the last checkpoint is that of step 5"
