"""TRL's GRPO on memoire's prompts: `pip install 'memoire-rl[torch]' 'trl>=1.13,<1.17'`.

    rollouts = memoire.trl.Rollouts(prompts)                # for GRPOTrainer, which calls it for each of its batches
    trainer = GRPOTrainer(model, reward_funcs=memoire.trl.reward, rollout_func=rollouts, callbacks=[rollouts.commits])

    worker = memoire.trl.RolloutWorker(prompts, groups=8)   # for AsyncGRPOTrainer(rollout_worker=worker)

Any number of rollout processes on any machines lease the prompts, answer them, and bring rewards; the trainer draws
whole groups. Both classes follow protocols that TRL calls experimental, and are no subclasses of TRL's.
`check_protocol` says if the installed TRL has others.
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

from .errors import Closed, EpochOver, MemoireTimeout, NotInstalled, ParameterError, ProtocolMoved

with NotInstalled.explained("pip install 'memoire-rl[torch]' 'trl>=1.13,<1.17'"):
    from transformers import TrainerCallback

VERSIONS: Final = ((1, 13), (1, 16))
"""The oldest and the newest TRL that this module was tried with."""
WORKER: Final = frozenset({"rollout_buffer", "metrics_queue", "start", "stop", "update_model_version", "check_health"})
"""Members of TRL's RolloutWorkerProtocol."""
SAMPLE: Final = (
    "prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id",
    "metrics", "enqueued_at",
)  # fmt: skip
"""Fields of TRL's RolloutSample."""
LEAST_SPREAD: Final = 1e-4
"""Added to the deviation of a group's rewards, by which advantages are divided."""
POLL: Final = 0.5
"""Seconds after which a thread that waits looks whether it is to stop."""


def schema() -> RowSchema:
    """Columns of an answer, for `memoire.Table(schema, storage="prompts")`: tokens of prompt and completion, 1 in
    `mask` for each that the model made, their log-probabilities (0 elsewhere), and the reward.
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
    """The columns of an answer but its reward, from what a generator returns.

    Args:
        logprobs: Of the completion's tokens.

    Raises:
        ParameterError: there are not as many log-probabilities as tokens.
    """
    if len(completion_ids) != len(logprobs):
        raise ParameterError("logprobs", len(logprobs), f"{len(completion_ids)} numbers: one for each token")
    behind = len(prompt_ids)
    return {
        "tokens": np.array([*prompt_ids, *completion_ids], np.int32),
        "mask": np.repeat(np.array([0, 1], np.int8), [behind, len(completion_ids)]),
        "logprob": np.array([*(0.0 for _ in prompt_ids), *logprobs], np.float32),
    }


def advantages_of(rewards: NDArray[Any], group: NDArray[Any]) -> NDArray[np.float32]:
    """Each answer's reward less its group's mean, over the group's deviation (with n - 1): float32 [R].

    Args:
        rewards: [R]
        group: [R], group of each answer, from 0.

    Shao et al., DeepSeekMath, 2024, section 4.1.
    """
    made = np.zeros(len(rewards), np.float32)
    for number in np.unique(group):
        mine = rewards[group == number].astype(np.float64)
        spread = mine.std(ddof=1) if len(mine) > 1 else 0.0
        made[group == number] = (mine - mine.mean()) / (spread + LEAST_SPREAD)
    return made


def reward(completions: Sequence[Any], **given: Any) -> list[float]:
    """TRL's reward function: the rewards that came with the groups."""
    return [float(each) for each in given["reward"]]


# --------------------------------------------------------------------------------------------------- GRPOTrainer


class Rollouts:
    """TRL's `rollout_func`: each call draws as many groups as the trainer's batch has prompts.

    The table decides which prompts are trained on. Those that the trainer passes say only how many: give it a data set
    of the right length. All groups are whole: the table's `group` is the trainer's `num_generations`.

    Args:
        generate: Called with the trainer before each draw, where the same process answers prompts. None: other
            processes do.
        replay: Share of a batch that is drawn from committed groups, by score; or a function of the number of groups
            that returns it.
        timeout: Seconds to wait for the groups of a batch.
        evaluate: Called with prompts and trainer while the model is evaluated, in place of a draw.
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
        """The step that is drawn next."""
        self.drawn: Step | None = None
        """What was drawn last."""
        self.commits = CommitWithCheckpoint(self)
        """For the trainer's `callbacks`: commits each checkpoint that was written, and goes on behind the one that
        training resumes from.
        """

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Tokens, log-probabilities and rewards of a batch, as TRL asks for them. See `Prompts.draw` for errors."""
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
            expected = f"{trainer.num_generations}, TRL's num_generations, in each of {groups} groups of a batch"
            raise ParameterError("group", sorted(sizes), expected)
        self.step, self.drawn = self.step + 1, drawn
        return batch_of(drawn)


def batch_of(step: Step) -> dict[str, Any]:
    """A step as TRL's `rollout_func` returns it, with the rewards for `reward`."""
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


class CommitWithCheckpoint(TrainerCallback):  # type: ignore[misc]  # it is Any without transformers
    """Commits what a checkpoint has learned from, when the checkpoint is written."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._first: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on behind the checkpoint: what was drawn after it comes back."""
        rollouts, each = self._rollouts, args.gradient_accumulation_steps * args.num_iterations
        if args.steps_per_generation != args.gradient_accumulation_steps or args.num_iterations != 1:
            raise ParameterError(
                "steps_per_generation", args.steps_per_generation,
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} and num_iterations=1, so that each "
                f"optimizer step trains on one draw, which a commit can name ({each} were asked for)",
            )  # fmt: skip
        rollouts.step = rollouts._prompts.rewind(state.global_step - 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The checkpoint has learned from the steps up to this one."""
        if state.global_step:
            self._rollouts._prompts.commit(state.global_step - 1)


# ---------------------------------------------------------------------------------------------- AsyncGRPOTrainer


class RolloutWorker:
    """TRL's `RolloutWorkerProtocol`: a thread draws groups and puts their answers into the trainer's queue.

    Args:
        groups: Groups that are drawn at once.
        ahead: Answers that wait in the queue at most; by default those of two draws.
        timeout: Seconds to wait for the groups of a draw, before `check_health` raises.

    What the trainer has taken is not yet trained on, and its protocol does not say when it is. So `commit` commits the
    draws that were taken whole before the last model but one: call it when a checkpoint was written.
    """

    def __init__(
        self, prompts: Prompts, groups: int, *, first: int = 0, ahead: int | None = None, timeout: float = 600.0
    ) -> None:
        check_protocol()
        self._prompts, self._groups, self._timeout = prompts, groups, timeout
        self.rollout_buffer: _Buffer = _Buffer(ahead or 0)
        """Queue of TRL's RolloutSamples, of which the trainer gets one after the other."""
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        """Queue of figures for the trainer's log."""
        self._step, self._ahead, self._version = first, ahead, 0
        self._thread: threading.Thread | None = None
        self._is_stopping, self._failed = threading.Event(), list[BaseException]()
        self._taken_before: list[int] = [-1, -1, -1]
        self._moved_at = time.monotonic()

    def start(self) -> None:
        """Begin to draw."""
        self._is_stopping.clear()
        self._moved_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="memoire-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. What is in the queue comes back after `prompts.rewind`."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join(self._timeout)

    def update_model_version(self, model_version: int) -> None:
        """There is a new model: tell the servers, from whose versions staleness counts."""
        self._version = model_version
        self._taken_before = [*self._taken_before[1:], self.rollout_buffer.whole]
        if model_version:
            self._prompts.saw_model(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the thread, or that nothing came for so long.

        Raises:
            MemoireTimeout: nothing was drawn in `stale_after_s` seconds; says what the groups wait for.
            MemoireError: why no groups can be drawn.
        """
        has_ended = self._thread is None or not self._thread.is_alive()
        if self._failed:
            raise self._failed[0]
        if has_ended:
            raise Closed("this rollout worker")
        silence = time.monotonic() - self._moved_at
        if silence > stale_after_s and self.rollout_buffer.empty():
            raise MemoireTimeout("groups", ", ".join(self._prompts.urls), silence, f"{self._prompts.counts()}")

    @property
    def committable(self) -> int:
        """The newest step whose answers were all taken before the last model but one; -1 is none."""
        return self._taken_before[0]

    def commit(self) -> int:
        """Commit what a checkpoint that was just written has surely learned from; returns how many prompts."""
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
                drawn = self._prompts.draw(self._step, self._groups, POLL)
            except MemoireTimeout:
                if time.monotonic() > deadline:
                    raise
            else:
                self._step, self._moved_at = self._step + 1, time.monotonic()
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
        self.rollout_buffer.ends(drawn.step)


class _Buffer(queue.Queue[Any]):
    """A queue of samples that knows which steps were taken whole."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.whole = -1
        """The newest step of which every sample was taken."""
        self._ended: set[int] = set()
        self._left: dict[int, int] = {}

    def _put(self, item: Any) -> None:
        self._left[item[0]] = self._left.get(item[0], 0) + 1
        super()._put(item)

    def _get(self) -> Any:
        step, sample = super()._get()
        self._left[step] -= 1
        self._note(step)
        return sample

    def ends(self, step: int) -> None:
        """All samples of a step were put."""
        with self.mutex:
            self._ended.add(step)
            self._note(step)

    def _note(self, step: int) -> None:
        if step in self._ended and not self._left.get(step):
            self.whole = max(self.whole, step)
            self._left.pop(step, None)


def samples_of(step: Step) -> list[Any]:
    """TRL's RolloutSamples of a step: a row for each answer, with its advantage in its group."""
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


# ------------------------------------------------------------------------------------- whether TRL is as it was


@functools.cache
def _sample_kind() -> Any:
    from trl.experimental.async_grpo import async_rollout_worker

    return async_rollout_worker.RolloutSample


def _takes_arrays() -> bool:
    """Whether rows are arrays, as since 1.16; lists before."""
    return "ndarray" in str(inspect.get_annotations(_sample_kind()).get("input_ids"))


def check_protocol(members: Iterable[str] = WORKER) -> str:
    """The version of the installed TRL.

    Args:
        members: Those that its RolloutWorkerProtocol has to have.

    Raises:
        ProtocolMoved: it is none of those that this module was tried with, or its protocols have other members.
    """
    version = metadata.version("trl")
    found = tuple(int(part) for part in version.split(".")[:2])
    if not VERSIONS[0] <= found <= VERSIONS[1]:
        raise ProtocolMoved("trl", version, f"this was tried with {_said(VERSIONS[0])} to {_said(VERSIONS[1])}")
    _check_members(set(members))
    return version


def _check_members(expected_members: set[str]) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    kind = async_grpo_trainer.RolloutWorkerProtocol
    members = {name for name in {*vars(kind), *inspect.get_annotations(kind)} if not name.startswith("_")}
    fields = tuple(inspect.get_annotations(_sample_kind()))
    for what, there, expected in (
        ("RolloutWorkerProtocol", members, expected_members),
        ("RolloutSample", set(fields), set(SAMPLE)),
    ):
        if there != expected:
            changed = ", ".join(sorted(there ^ expected))
            raise ProtocolMoved("trl", metadata.version("trl"), f"{what} has changed: {changed}")


def _said(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
