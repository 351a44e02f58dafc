"""Adapter of memoire's prompts to TRL's GRPO trainers: `pip install 'memoire-rl[torch]' 'trl>=1.13,<1.17'`.

    rollouts = memoire.trl.PromptRollouts(prompts)                # for GRPOTrainer, which calls it for each batch
    trainer = GRPOTrainer(model, reward_funcs=memoire.trl.reward, rollout_func=rollouts, callbacks=[rollouts.commits])

    worker = memoire.trl.PromptRolloutWorker(prompts, groups=8)   # for AsyncGRPOTrainer(rollout_worker=worker)

Rollout processes on any number of machines lease prompts, and return answers with rewards; the trainer draws whole
groups. `PromptRollouts` and `PromptRolloutWorker` implement protocols that TRL calls experimental, without being
subclasses of TRL's classes. `check_protocol` raises an error if the installed TRL has other protocols.
"""

from __future__ import annotations

import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import Column, Prompts, Ragged
from memoire.building import RowSchema
from memoire.limits import wall_clock
from memoire.prompts.trainer import Step

from .errors import Closed, EpochOver, IncompatibleLibrary, MemoireTimeout, NotInstalled, ParameterError

with NotInstalled.explained("pip install 'memoire-rl[torch]' 'trl>=1.13,<1.17'"):
    from transformers import TrainerCallback

VERSIONS: Final = ((1, 13), (1, 16))
"""Oldest and newest version of TRL that this module was tested with."""
MEMBERS: Final = frozenset({"rollout_buffer", "metrics_queue", "start", "stop", "update_model_version", "check_health"})
"""Expected members of TRL's RolloutWorkerProtocol."""
SAMPLE_FIELDS: Final = (
    "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id",
    "metrics", "enqueued_at",
)  # fmt: skip
"""Expected fields of TRL's RolloutSample."""
ADVANTAGE_EPSILON: Final = 1e-4
"""Added to the standard deviation of a group's rewards, by which advantages are divided."""
POLL_INTERVAL: Final = 0.5
"""Seconds between two checks whether a waiting thread has to stop."""


def schema() -> RowSchema:
    """Return the columns of an answer, for `memoire.Table(schema, storage="prompts")`.

    `tokens` are those of prompt and completion; `mask` is 1 for tokens of the completion; `logprob` has their
    log-probabilities, and 0 for tokens of the prompt.
    """
    return RowSchema(
        {
            "tokens": Column(np.int32, (None,)),
            "mask": Column(np.int8, (None,)),
            "logprob": Column(np.float32, (None,)),
            "reward": Column(np.float32),
        }
    )


def answer_of(prompt_ids: Sequence[int], completion_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the columns of an answer without its reward.

    Args:
        logprobs: Log-probabilities of the completion's tokens.

    Raises:
        ParameterError: tokens of the completion and log-probabilities differ in number.
    """
    if len(completion_ids) != len(logprobs):
        expected = f"{len(completion_ids)} numbers, one for each token of the completion"
        raise ParameterError("logprobs", len(logprobs), expected)
    prompt_length = len(prompt_ids)
    return {
        "tokens": np.array([*prompt_ids, *completion_ids], np.int32),
        "mask": np.repeat(np.array([0, 1], np.int8), [prompt_length, len(completion_ids)]),
        "logprob": np.array([*(0.0 for _ in prompt_ids), *logprobs], np.float32),
    }


def advantages_of(rewards: NDArray[Any], group: NDArray[Any]) -> NDArray[np.float32]:
    """Return advantages float32 [R]: rewards minus their group's mean, divided by its standard deviation (with n - 1).

    Args:
        group: [R] group of each answer, from 0.

    Shao et al., DeepSeekMath, 2024, section 4.1.
    """
    advantages = np.zeros(len(rewards), np.float32)
    for number in np.unique(group):
        members = rewards[group == number].astype(np.float64)
        deviation = members.std(ddof=1) if len(members) > 1 else 0.0
        advantages[group == number] = (members - members.mean()) / (deviation + ADVANTAGE_EPSILON)
    return advantages


def reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return the rewards of drawn answers; a reward function for TRL."""
    return [float(each) for each in columns["reward"]]


# --------------------------------------------------------------------------------------------------- GRPOTrainer


class PromptRollouts:
    """TRL's `rollout_func`: each call draws whole groups for one batch of the trainer.

    The table chooses the prompts to train on. The prompts of the trainer only determine the number of groups: give the
    trainer a data set of the right length. The table's `group` has to be the trainer's `num_generations`.

    Args:
        prompts: Client of the table of prompts.
        generate: Called with the trainer before each draw, if this process answers prompts; None if other processes do.
        replay: Share of a batch that is drawn from committed groups, by score; or a function of the number of groups
            that returns the share.
        timeout: Seconds to wait for the groups of a batch.
        evaluate: Called with prompts and trainer instead of a draw while the model is evaluated.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        generate: Callable[[Any], None] | None = None,
        replay: float | Callable[[int], float] = 0.0,
        timeout: float = 600.0,
        evaluate: Callable[[list[Any], Any], dict[str, Any]] | None = None,
    ) -> None:
        check_protocol()
        self._prompts, self._generate, self._replay, self._timeout = prompts, generate, replay, timeout
        self._evaluate = evaluate
        self.step = 0
        """Number of the next step to draw."""
        self.drawn: Step | None = None
        """Last drawn step; None before the first draw."""
        self.commits = CommitWithCheckpoint(self)
        """Callback for the trainer's `callbacks`: commits the steps of each checkpoint, and rewinds to the checkpoint
        that training resumes from.
        """

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return tokens, log-probabilities and rewards of a batch in TRL's form. Raises as `Prompts.draw`."""
        if not trainer.model.training and self._evaluate is not None:
            return self._evaluate(prompts, trainer)
        if self._generate is not None:
            self._generate(trainer)
        groups = len(prompts) // trainer.num_generations
        share = self._replay(groups) if callable(self._replay) else self._replay
        ranks = self._prompts.rank[1]
        drawn = self._prompts.draw(self.step, groups * ranks, self._timeout, replay=share)
        sizes = set(np.bincount(drawn.group).tolist())
        if len(drawn.group) != len(prompts) or sizes != {trainer.num_generations}:
            expected = f"{trainer.num_generations} (TRL's num_generations) in each of the {groups} groups of a batch"
            raise ParameterError("group", sorted(sizes), expected)
        self.step, self.drawn = self.step + 1, drawn
        return batch_of(drawn)


def batch_of(step: Step) -> dict[str, Any]:
    """Return a step in the form of TRL's `rollout_func`, with the rewards for `reward`."""
    tokens, masks, logprobs = _lists(step["tokens"]), _lists(step["mask"]), _lists(step["logprob"])
    begins = [int(mask.argmax()) for mask in masks]
    return {
        "prompt_ids": [row[:begin].tolist() for row, begin in zip(tokens, begins, strict=True)],
        "completion_ids": [row[begin:].tolist() for row, begin in zip(tokens, begins, strict=True)],
        "logprobs": [row[begin:].tolist() for row, begin in zip(logprobs, begins, strict=True)],
        "reward": step["reward"].tolist(),
        "version": step.version.tolist(),
    }


def _lists(column: Ragged) -> list[NDArray[Any]]:
    ends = np.cumsum(column.lengths)
    return np.split(column.values, ends[:-1])


class CommitWithCheckpoint(TrainerCallback):  # type: ignore[misc]  # Any without transformers
    """Callback of a trainer that commits the steps of each written checkpoint."""

    def __init__(self, rollouts: PromptRollouts) -> None:
        self._rollouts = rollouts
        self._first: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Rewind to the checkpoint, so that later steps are drawn again; raise ParameterError for unsuitable `args`."""
        rollouts, steps = self._rollouts, args.gradient_accumulation_steps * args.num_iterations
        if args.steps_per_generation != args.gradient_accumulation_steps or args.num_iterations != 1:
            raise ParameterError(
                "steps_per_generation", args.steps_per_generation,
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, with num_iterations=1, so that each "
                f"optimizer step trains on one draw and can be committed (a draw would be used for {steps} steps)",
            )  # fmt: skip
        rollouts.step = rollouts._prompts.rewind(state.global_step - 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the steps up to this checkpoint's."""
        if state.global_step:
            self._rollouts._prompts.commit(state.global_step - 1)


# ---------------------------------------------------------------------------------------------- AsyncGRPOTrainer


class PromptRolloutWorker:
    """TRL's `RolloutWorkerProtocol`: a thread draws groups and puts their answers into the trainer's queue.

    TRL's protocol does not tell when the trainer has trained on the answers that it took. `commit` therefore commits
    only draws that the trainer had taken completely before the last model but one. Call it after writing a checkpoint.

    Args:
        prompts: Client of the table of prompts.
        groups: Number of groups in a draw.
        first: Number of the first step.
        ahead: Maximum number of answers in the queue; by default those of two draws.
        timeout: Seconds to wait for the groups of a draw, before `check_health` raises an error.
    """

    def __init__(
        self, prompts: Prompts, groups: int, *, first: int = 0, ahead: int | None = None, timeout: float = 600.0
    ) -> None:
        check_protocol()
        self._prompts, self._groups, self._timeout = prompts, groups, timeout
        self.rollout_buffer: _Buffer = _Buffer(ahead or 0)
        """Queue of TRL's RolloutSamples, which the trainer takes one by one."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """Queue of figures for the trainer's log."""
        self._step, self._ahead, self._version = first, ahead, 0
        self._thread: threading.Thread | None = None
        self._is_stopping, self._failed = threading.Event(), list[BaseException]()
        self._steps_taken: list[int] = [-1, -1, -1]  # steps taken at the last models, oldest first
        self._drawn_at = time.monotonic()

    def start(self) -> None:
        """Start the thread that draws."""
        self._is_stopping.clear()
        self._drawn_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="memoire-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. After `prompts.rewind`, the answers in the queue are drawn again."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join(self._timeout)

    def update_model_version(self, model_version: int) -> None:
        """Report a new model's version to the servers, which compute staleness from it."""
        self._version = model_version
        self._steps_taken = [*self._steps_taken[1:], self.rollout_buffer.whole]
        if model_version:
            self._prompts.saw_model(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the thread, or MemoireTimeout if no group came for `stale_after_s` seconds.

        Raises:
            MemoireTimeout: no group was drawn in `stale_after_s` seconds; the text has the counts of the prompts.
            MemoireError: the error that ended the thread.
            Closed: the thread was not started, or was stopped.
        """
        has_ended = self._thread is None or not self._thread.is_alive()
        if self._failed:
            raise self._failed[0]
        if has_ended:
            raise Closed("this rollout worker")
        silence = time.monotonic() - self._drawn_at
        if silence > stale_after_s and self.rollout_buffer.empty():
            raise MemoireTimeout("groups", ", ".join(self._prompts.urls), silence, f"{self._prompts.counts()}")

    @property
    def committable(self) -> int:
        """Newest step whose answers were all taken before the last model but one; -1 at the beginning."""
        return self._steps_taken[0]

    def commit(self) -> int:
        """Commit the steps up to `committable`, and return the number of committed prompts."""
        return self._prompts.commit(self.committable) if self.committable >= 0 else 0

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._put(self._draw())
        except EpochOver:
            return
        except BaseException as error:
            self._failed.append(error)

    def _draw(self) -> Step | None:
        deadline = time.monotonic() + self._timeout
        while not self._is_stopping.is_set():
            try:
                drawn = self._prompts.draw(self._step, self._groups, POLL_INTERVAL)
            except MemoireTimeout:
                if time.monotonic() > deadline:
                    raise
            else:
                self._step, self._drawn_at = self._step + 1, time.monotonic()
                return drawn
        return None

    def _put(self, drawn: Step | None) -> None:
        if drawn is None:
            return
        samples = samples_of(drawn)
        self.metrics_queue.put(
            {
                "rollout/reward_mean": float(drawn["reward"].mean()),
                "rollout/tokens": float(drawn.tokens),
                "rollout/model_lag": float(max(0, self._version - int(drawn.version.min(initial=self._version)))),
            }
        )
        room = self._ahead or 2 * len(samples)
        for sample in samples:
            while self.rollout_buffer.qsize() >= room:
                if self._is_stopping.wait(0.01):
                    return
            sample.enqueued_at = wall_clock()
            self.rollout_buffer.put((drawn.step, sample))
        self.rollout_buffer.end_step(drawn.step)


class _Buffer(queue.Queue[Any]):
    """Queue of samples that tracks the steps whose samples were all taken."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.whole = -1
        """Newest step whose samples were all taken; -1 before the first one."""
        self._ended: set[int] = set()
        self._counts: dict[int, int] = {}  # samples in the queue, by step

    def _put(self, item: Any) -> None:
        self._counts[item[0]] = self._counts.get(item[0], 0) + 1
        super()._put(item)

    def _get(self) -> Any:
        step, sample = super()._get()
        self._counts[step] -= 1
        self._check_step(step)
        return sample

    def end_step(self, step: int) -> None:
        """Record that all samples of a step were put into the queue."""
        with self.mutex:
            self._ended.add(step)
            self._check_step(step)

    def _check_step(self, step: int) -> None:
        if step in self._ended and not self._counts.get(step):
            self.whole = max(self.whole, step)
            self._counts.pop(step, None)


def samples_of(step: Step) -> list[Any]:
    """Return TRL's RolloutSamples of a step: one for each answer, with its advantage in its group."""
    kind, as_arrays = _sample_kind(), _takes_arrays()
    advantages = advantages_of(step["reward"], step.group) * step.weights[step.group].astype(np.float32)
    rows = zip(_lists(step["tokens"]), _lists(step["mask"]), _lists(step["logprob"]), strict=True)
    return [
        kind(
            prompt=[],
            completion=[],
            **{
                name: value if as_arrays else value.tolist()
                for name, value in (("input_ids", tokens), ("completion_mask", mask), ("old_log_probs", logprob))
            },
            advantage=float(advantages[place]),
            model_version=int(step.version[place]),
            group_id=step.step * step.total_groups + int(step.group[place]),
            metrics={"reward": float(step["reward"][place])},
        )
        for place, (tokens, mask, logprob) in enumerate(rows)
    ]


# ------------------------------------------------------------------------------------------ compatibility check


@functools.cache
def _sample_kind() -> Any:
    from trl.experimental.async_grpo import async_rollout_worker

    return async_rollout_worker.RolloutSample


def _takes_arrays() -> bool:
    return "ndarray" in str(inspect.get_annotations(_sample_kind()).get("input_ids"))


def check_protocol(members: Iterable[str] = MEMBERS) -> str:
    """Check the installed TRL, and return its version.

    Args:
        members: Members that TRL's RolloutWorkerProtocol has to have.

    Raises:
        IncompatibleLibrary: the version is outside of `VERSIONS`, or TRL's protocols have other members.
    """
    version = metadata.version("trl")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not VERSIONS[0] <= numbers <= VERSIONS[1]:
        raise IncompatibleLibrary(
            "trl", version, f"memoire was tested with {_text(VERSIONS[0])} to {_text(VERSIONS[1])}"
        )
    _check_members(set(members))
    return version


def _check_members(expected_members: set[str]) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    kind = async_grpo_trainer.RolloutWorkerProtocol
    members = {name for name in {*vars(kind), *inspect.get_annotations(kind)} if not name.startswith("_")}
    fields = tuple(inspect.get_annotations(_sample_kind()))
    for class_name, names, expected in (
        ("RolloutWorkerProtocol", members, expected_members),
        ("RolloutSample", set(fields), set(SAMPLE_FIELDS)),
    ):
        if names != expected:
            changed = ", ".join(sorted(names ^ expected))
            raise IncompatibleLibrary("trl", metadata.version("trl"), f"{class_name} has changed: {changed}")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
