"""Classic `ReplayMemory`: one memory of episodes in this process, over `replay.memory.Memory`."""

from __future__ import annotations

import ipaddress
import secrets
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire import Memory, Parameters, Schema
from memoire.building import Annealing, Start, StrictAttributes, importance, renamed, reward_size, whole
from memoire.errors import MemoireError, ParameterError

from .fields import FIELDS, OWN_NAMES, ReplayBatch, batch_of, defaults, flags_of, seven_fields, sides_of


def _template(field: str, doc: str) -> Any:
    """Return a read-only property for the template of a field."""
    return property(lambda memory: memory._templates[field], doc=doc)


def _parameter(name: str, doc: str) -> Any:
    """Return a property for a parameter of the memory; setting it checks the value against the schema."""
    return property(
        lambda memory: getattr(memory.parameters, name),
        lambda memory, value: memory._configure(**{name: value}),
        doc=doc,
    )


class ReplayMemory(StrictAttributes):
    """Local memory of episodes, from which samples are drawn in proportion to their weight.

    Example:
        state, action, number = np.zeros(4, np.float32), np.zeros((), np.int64), np.zeros((), np.float32)
        memory = memoire.ReplayMemory(state, action, number, number, number, number, np.zeros(()), 1000)

    Args:
        state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf: Templates: arrays with the dtype
            and shape (without a batch axis) of every entry. A Gymnasium space, a structured dtype's array, or a dict or
            tuple of templates is accepted, too. reward, value and qvest are float32 of one shape, prob has shape ().
        max_step: Number of entries that fit; any number.
        input_uuid: Label of this memory in log lines: a number below 2**32, or an IPv4 address as text. 0 draws one.
        seed: Makes draws repeatable.

    Every method may be called from any thread, as in `memory.Memory`; the episode of a lane belongs to one thread.

    Raises:
        SchemaError: a template cannot be stored; names the template, its dtype or shape, and the expected one.
        ParameterError: max_step or input_uuid is out of range.
    """

    __slots__ = ("_annealing", "_client_id", "_is_flat", "_memory", "_schema", "_templates", "_uuid")

    _PARAMETERS = "Write rem.NAME = ... where the page has such a parameter."
    _OWN_NAMES = OWN_NAMES
    _is_guarded = True  # all public attributes are properties

    def __init__(
        self,
        state_buf: Any,
        action_buf: Any,
        reward_buf: Any,
        prob_buf: Any,
        value_buf: Any,
        qvest_buf: Any,
        info_buf: Any,
        max_step: int,
        *,
        input_uuid: int | str = 0,
        seed: int | None = None,
    ) -> None:
        buffers = (state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf)
        schema = seven_fields(buffers)
        self._set_up(schema, uuid_of(input_uuid), secrets.token_bytes(16))
        self._memory = Memory(schema, whole("max_step", max_step, 1), defaults(schema), seed=seed)

    def _set_up(self, schema: Schema, uuid: int, client_id: bytes) -> None:
        self._schema, self._uuid, self._client_id = schema, uuid, client_id
        self._annealing = Annealing()
        templates = {name: np.zeros(column.shape, column.dtype) for name, column in schema.items()}
        for each in templates.values():
            each.flags.writeable = False
        self._templates = {field: schema.nest(field, templates) for field in FIELDS}
        self._is_flat = schema.names == FIELDS

    # ------------------------------------------------------------------------------------------ read-only properties

    state_buf: Any = _template(
        "state", "Template for state: zeros of its shape and dtype, read-only, nested as it was declared."
    )

    action_buf: Any = _template("action", "Template for action.")

    reward_buf: Any = _template("reward", "Template for reward: float32.")

    prob_buf: Any = _template("prob", "Template for prob: shape ().")

    value_buf: Any = _template("value", "Template for value: float32 in the shape of reward.")

    qvest_buf: Any = _template(
        "qvest", "Template for qvest, the return that `close_episode` computes: float32 in the shape of reward."
    )

    info_buf: Any = _template("info", "Template for info: any dtype, an axis of 0 is allowed.")

    @property
    def entry_size(self) -> int:
        """Size of one entry (s, a, r, p, v, q, i) in bytes."""
        return self._schema.entry_bytes

    @property
    def max_step(self) -> int:
        """Number of entries that fit."""
        return self.memory.capacity

    @property
    def uuid(self) -> int:
        """Label of 32 bits that log lines show as '%08x': random, or `input_uuid`. Not unique, unlike `client_id`."""
        return self._uuid

    @property
    def client_id(self) -> bytes:
        """Unique id of this memory, 16 random bytes; counts and ids of entries refer to it."""
        return self._client_id

    @property
    def schema(self) -> Schema:
        """Schema of the seven fields, as the engine stores them."""
        return self._schema

    @property
    def memory(self) -> Memory:
        """Underlying memory of the engine, for functions that the classic API lacks."""
        return self._memory

    @property
    def parameters(self) -> Parameters:
        """All read-write properties below, as one frozen value."""
        return self.memory.parameters

    # ----------------------------------------------------------------------------------------- read-write properties

    priority_exponent: float = _parameter(
        "priority_exponent",
        "Exponent of priorities, the alpha of Schaul et al. (beta in the seed documents). At least 0; default 0.6.",
    )

    importance_exponent: float = _parameter(
        "importance_exponent",
        "Exponent of the correction, the beta of Schaul et al. (not in the seed documents). In [0, 1]; default 0.4.",
    )

    mix_lambda: float = _parameter("mix_lambda", "Lambda of the TD(lambda) return. In [0, 1]; default 1.")

    frame_stack: int = _parameter("frame_stack", "States in a sample's window. At least 1; default 1.")

    multi_step: int = _parameter("multi_step", "Entries between prev and next. At least 1; default 1.")

    cache_size: int = _parameter("cache_size", "Samples in a cache. At least 1; default 256.")

    max_episode: int = _parameter(
        "max_episode", "Most closed episodes kept, beside max_step; 0, the default, is no limit."
    )

    reuse_cache: bool = _parameter(
        "reuse_cache",
        "True draws from a server's caches with replacement; False (the default) draws each sample once.",
    )

    @property
    def discount_factor(self) -> tuple[float, ...]:
        """Gamma per reward dimension, flattened; set by one number for all, or by one for each. Default 0.99."""
        return self._per_dimension(self.parameters.discount)

    @discount_factor.setter
    def discount_factor(self, value: Any) -> None:
        self._configure(discount=value)

    @property
    def reward_coeff(self) -> tuple[float, ...]:
        """Share of each reward dimension in the priority; set by one number for all, or by one for each. Default 1."""
        return self._per_dimension(self.parameters.reward_coeff)

    @reward_coeff.setter
    def reward_coeff(self, value: Any) -> None:
        self._configure(reward_coeff=value)

    @property
    def cache_flags(self) -> tuple[bool, ...]:
        """14 switches of the fields that samples hold: prev s, a, r, p, v, q, i and next s, a, r, p, v, q, i. Default:
        all.

        Set by 14 booleans (or 0 and 1), or by the names of the fields that are on, out of `FLAGS`: "prev_state" to
        "next_info".
        """
        return flags_of(self.parameters, self._schema)

    @cache_flags.setter
    def cache_flags(self, value: Iterable[Any]) -> None:
        self._configure(**sides_of(value, self._schema))

    start: Start = _parameter(
        "start",
        'Rule for windows that reach before an episode: "skip" them (the default), "repeat" the first '
        'entry, or fill with "zero".',
    )

    # ------------------------------------------------------------------------------------------------------- methods

    def print_info(self) -> None:
        """Print `info()` to standard output, one line for each value."""
        sys.stdout.write("".join(f"{name}: {value}\n" for name, value in self.info().items()))

    def info(self) -> dict[str, Any]:
        """Return sizes, counts and all parameters by name."""
        facts: dict[str, Any] = {"uuid": f"{self._uuid:08x}", "entry_size": self.entry_size, "max_step": self.max_step}
        facts |= {name: str(self._schema[name]) for name in self._schema}
        facts |= {name: getattr(self, name) for name in PROPERTIES}
        return facts | self._counts()

    def num_episode(self) -> int:
        """Return the number of closed episodes that are stored."""
        return self.memory.num_episodes

    def pub_bytes(self, topic: str, message: bytes | str) -> None:
        """Publish `message`, if this memory is a server's `rem`. Raises MemoireError for other memories."""
        raise MemoireError(
            f"cannot publish on {topic!r}: this memory belongs to no server. Call pub_bytes of a ReplayMemoryServer or "
            f"of its rem."
        )

    def new_episode(self, *, lane: int = 0) -> None:
        """Open an episode. Entries of an unclosed episode are discarded; `num_episode()` does not change.

        Args:
            lane: Number of the open episode; a vector environment has one lane for each environment.
        """
        self.memory.open(lane)

    def close_episode(
        self,
        episodic_weight_multiplier: float = 1.0,
        do_update_value: bool = True,
        do_update_weight: bool = True,
        *,
        final_state: Any = None,
        terminated: bool | None = None,
        bootstrap_value: Any = None,
        lane: int = 0,
    ) -> None:
        """Close the open episode: compute its returns and weights. From now on its entries can be drawn.

        The return of the last entry T is r_T + gamma * bootstrap_value, and q_t = r_t + gamma * (lambda * q_{t+1} + (1
        - lambda) * v_{t+1}) before it. weight = init_w * episodic_weight_multiplier * (sum_j reward_coeff_j * |q_j -
        v_j|) ** priority_exponent.

        Args:
            episodic_weight_multiplier: Scales the weight of all entries of the episode. At least 0.
            do_update_value: False leaves qvest at 0.
            do_update_weight: False leaves weights at init_w times the multiplier.
            final_state: The state after the last entry. Without it, and without `terminated`, the last multi_step
                entries are never drawn, as in the seed. With it every entry can be drawn, and next.state is this state
                if a window reaches the end.
            terminated: True if the episode terminated (discount 0 at its end), False if it was truncated.
            bootstrap_value: Value of the final state, in the shape of the reward; None is 0.
            lane: Number of the open episode.

        Raises:
            EpisodeClosedError: there is no open episode.
            EmptyEpisodeError: the episode has no entries; it stays open.
            ParameterError: the multiplier is negative or not finite; the episode stays open.
        """
        state = None if final_state is None else tuple(map(np.asarray, self._schema.flatten("state", final_state)))
        self.memory.close(
            lane,
            multiplier=episodic_weight_multiplier,
            update_value=do_update_value,
            update_weight=do_update_weight,
            final_state=state,
            terminated=terminated,
            bootstrap_value=bootstrap_value,
        )

    def add_entry(self, s: Any, a: Any, r: Any, p: Any, v: Any, i: Any, init_w: float = 1.0, *, lane: int = 0) -> None:
        """Add an entry to the open episode; if there is no room, the oldest episodes are evicted.

        Args:
            s, a, r, p, v, i: State, action, reward, prob, value, info, in the form of their templates.
            init_w: Factor of the entry's weight, normally 1. An entry with 0 is never drawn.
            lane: Number of the open episode.

        Raises:
            EntryError: a value does not match its template; names the field. Nothing was added.
            EpisodeClosedError: there is no open episode.
            EpisodeTooLong: the episode alone fills the memory; the episode is not changed.
        """
        values = (s, a, r, p, v, i) if self._is_flat else self._leaves(s, a, r, p, v, i)
        self.memory.add(lane, values, init_w)

    def add_entries(self, s: Any, a: Any, r: Any, p: Any, v: Any, i: Any, init_w: Any = 1.0, *, lane: int = 0) -> None:
        """Add T entries at once: values [T, *F], init_w [T] or a number. On an error of `add_entry`, none is added."""
        values = (s, a, r, p, v, i) if self._is_flat else self._leaves(s, a, r, p, v, i)
        self.memory.extend(lane, values, init_w)

    def get_batch(self, batch_size: int, *, out: ReplayBatch | Sequence[Any] | None = None) -> ReplayBatch:
        """Draw a batch from this memory, with replacement and in proportion to weight, for programs of one process.

        Args:
            batch_size: Number of samples, at least 1.
            out: An earlier batch, or (prev, next, weight); its arrays are filled and returned.

        Raises:
            EmptyMemory: (a RuntimeError) no entry has a positive weight.
        """
        memory = self.memory
        with memory.held():
            parameters = memory.parameters
            sample = memory.sample(whole("batch_size", batch_size, 1))
            chance = sample.weights / sample.total_weight
            beta = self._annealing.next(parameters)
        factor, _ = importance(chance, sample.num_positive, beta)
        return batch_of(self._schema, parameters, sample.gathered, factor, out)

    def update_priorities(self, ids: NDArray[np.int64], td_errors: Any) -> tuple[int, int]:
        """Set drawn entries' priorities to abs(td_errors), [B]. Return the counts of updated and of evicted entries."""
        return self.memory.update_priorities(ids, td_errors)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._uuid:08x}: {self._schema!r}>"

    def _configure(self, **changes: Any) -> None:
        """Set parameters, checked against the schema; an error changes nothing."""
        with renamed(**OWN_NAMES):
            self.memory.configure(**changes)

    def _counts(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "num_episode": memory.num_episodes,
            "num_entries": memory.num_entries,
            "total_weight": memory.total_weight,
            "num_positive": memory.num_positive,
        }

    def _leaves(self, *values: Any) -> tuple[Any, ...]:
        """Return the leaves of nested values in the schema's order."""
        named = zip((field for field in FIELDS if field != "qvest"), values, strict=True)
        return tuple(leaf for field, value in named for leaf in self._schema.flatten(field, value))

    def _per_dimension(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values * reward_size(self._schema) if len(values) == 1 else values


PROPERTIES = tuple(name for name, each in vars(ReplayMemory).items() if isinstance(each, property) and each.fset)
"""Names of the read-write properties of `ReplayMemory`."""


def uuid_of(value: int | str) -> int:
    """Convert `input_uuid` to 32 bits: a number, or an IPv4 address as text; 0 draws one. Raises ParameterError."""
    if isinstance(value, str):
        try:
            value = int(ipaddress.IPv4Address(value))
        except ValueError as error:
            raise ParameterError(
                "input_uuid", value, "a number below 2**32 or an IPv4 address such as '10.0.0.1'"
            ) from error
    return whole("input_uuid", value, 0, 2**32 - 1) or secrets.randbits(32) or 1
