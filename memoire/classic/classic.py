"""The seed documents' classes over today's engine, so that a script written from their API page runs.

`ReplayMemory`, `ReplayMemoryServer` and `ReplayMemoryClient` keep that page's names, argument order and return values,
and hold no logic of their own: entries, windows and weights are `memory.Memory`'s, sockets are `server.Server`'s and
`client.Client`'s. What the page leaves open is settled in docs/contract.md, row by row. New programs are shorter with
`Buffer`, `connect` and `Server`.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import secrets
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import whole
from memoire.client.client import Client
from memoire.errors import Closed, ForkedError, MemoireError, ParameterError, SchemaError
from memoire.replay.batch import Gathered
from memoire.replay.guarded import Guarded
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters, Start, reward_size
from memoire.replay.sampling import Annealing, importance
from memoire.replay.schema import Schema
from memoire.server.server import Server

FIELDS = ("state", "action", "reward", "prob", "value", "qvest", "info")
"""The seven fields of an entry in the page's order: a column each, or one per leaf where a template is nested."""

FLAGS = tuple(f"{side}_{field}" for side in ("prev", "next") for field in FIELDS)
"""What the 14 switches of `cache_flags` are called, in their order."""


class Fields(NamedTuple):
    """One side of a batch of transitions, unpacked as s, a, r, p, v, q, i.

    Shapes: B batch_size, L frame_stack, F a field's own shape. state is [B, L, *F], oldest frame first; the others are
    [B, *F]; a field that `cache_flags` leaves out has B = 0. Nested templates give dicts or tuples of such arrays.
    """

    state: Any
    action: Any
    reward: Any
    prob: Any
    value: Any
    qvest: Any
    info: Any


class ReplayBatch(tuple[Fields, Fields, NDArray[np.float32]]):
    """What `get_batch` returns: unpacks as (prev, next, weight), and carries what a learner needs beside them.

    prev and next are `Fields`; weight, float32 [B], is what sampling was proportional to. For a loss take
    `importance`. All arrays belong to the caller.
    """

    importance: NDArray[np.float32]
    """[B] in (0, 1]: (population * probability) ** -importance_exponent over its maximum, what a loss is multiplied
    by.
    """
    ids: NDArray[Any]
    """[B]: which entry each sample is, for ever; hand back to `update_priorities`."""
    reward: NDArray[np.float32]
    """[B, *F]: sum of the discounted rewards from the newest prev state up to the next state."""
    discount: NDArray[np.float32]
    """[B, *F]: discount_factor ** steps, 0 where the episode terminated."""
    steps: NDArray[np.int32]
    """[B]: entries between prev and next; less than multi_step where the episode's final state stands in."""
    model_version: NDArray[np.int64]
    """[B]: version of the model that acted, 0 where nobody said."""
    age: NDArray[np.float32]
    """[B]: seconds since each entry was recorded."""

    @property
    def prev(self) -> Fields:
        """The window that ends at the sampled entry."""
        return self[0]

    @property
    def next(self) -> Fields:
        """`steps` entries later."""
        return self[1]

    @property
    def weight(self) -> NDArray[np.float32]:
        """What sampling was proportional to."""
        return self[2]


class ReplayMemory(Guarded):
    """A local memory of episodes, from which samples are drawn in proportion to their weight.

    Args:
        state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf: Templates: arrays whose dtype and
            shape (without a batch axis) every entry has; a Gymnasium space, a structured dtype's array, or a dict or
            tuple of templates will do too. reward, value and qvest are float32 of one shape, prob has shape ().
        max_step: Entries that fit, exactly; any number.
        input_uuid: What log lines call this memory: a number below 2**32, or an IPv4 address as text. 0 draws one.
        seed: Makes draws repeatable.

    Thread safety is that of `memory.Memory`: any method from any thread; one lane's episode belongs to one thread.

    Raises:
        SchemaError: a template cannot be stored; names the buffer, what was found and what is allowed.
        ParameterError: max_step or input_uuid is out of range.
    """

    __slots__ = ("_annealing", "_client_id", "_is_flat", "_memory", "_schema", "_templates", "_uuid")

    _PARAMETERS = "Write rem.NAME = ... where the page has such a parameter."
    _is_guarded = True  # all that is public is a property

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
        self._settle(schema, uuid_of(input_uuid), secrets.token_bytes(16))
        self._memory = Memory(schema, whole("max_step", max_step, 1), defaults(schema), seed=seed)

    def _settle(self, schema: Schema, uuid: int, client_id: bytes) -> None:
        self._schema, self._uuid, self._client_id = schema, uuid, client_id
        self._annealing = Annealing()
        templates = {name: np.zeros(column.shape, column.dtype) for name, column in schema.items()}
        for each in templates.values():
            each.flags.writeable = False
        self._templates = {field: schema.nest(field, templates) for field in FIELDS}
        self._is_flat = schema.names == FIELDS

    # ------------------------------------------------------------------------------------------ read-only properties

    @property
    def state_buf(self) -> Any:
        """Template for state: zeros of its shape and dtype, read-only, nested as it was declared."""
        return self._templates["state"]

    @property
    def action_buf(self) -> Any:
        """Template for action."""
        return self._templates["action"]

    @property
    def reward_buf(self) -> Any:
        """Template for reward: float32."""
        return self._templates["reward"]

    @property
    def prob_buf(self) -> Any:
        """Template for prob: shape ()."""
        return self._templates["prob"]

    @property
    def value_buf(self) -> Any:
        """Template for value: float32 in the shape of reward."""
        return self._templates["value"]

    @property
    def qvest_buf(self) -> Any:
        """Template for qvest, the return that `close_episode` computes: float32 in the shape of reward."""
        return self._templates["qvest"]

    @property
    def info_buf(self) -> Any:
        """Template for info: any dtype, an axis of 0 is allowed."""
        return self._templates["info"]

    @property
    def entry_size(self) -> int:
        """Bytes of one (s, a, r, p, v, q, i)."""
        return self._schema.entry_bytes

    @property
    def max_step(self) -> int:
        """Entries that fit, exactly."""
        return self.memory.capacity

    @property
    def uuid(self) -> int:
        """The 32 bits that log lines show as '%08x': drawn by chance, or `input_uuid`. Not unique: `client_id` is."""
        return self._uuid

    @property
    def client_id(self) -> bytes:
        """16 random bytes that no other memory has: what counting and ids go by."""
        return self._client_id

    @property
    def schema(self) -> Schema:
        """The seven fields as the columns that the engine stores."""
        return self._schema

    @property
    def memory(self) -> Memory:
        """The engine itself, for whatever the page has no word for."""
        return self._memory

    @property
    def parameters(self) -> Parameters:
        """Every read-write property below in one frozen value."""
        return self.memory.parameters

    # ----------------------------------------------------------------------------------------- read-write properties

    @property
    def priority_exponent(self) -> float:
        """Exponent of priorities, the alpha of Schaul et al. (the page calls it beta). At least 0; default 0.6."""
        return self.parameters.priority_exponent

    @priority_exponent.setter
    def priority_exponent(self, value: float) -> None:
        self._configure(priority_exponent=value)

    @property
    def importance_exponent(self) -> float:
        """Exponent of the correction, the beta of Schaul et al. (not on the page). In [0, 1]; default 0.4."""
        return self.parameters.importance_exponent

    @importance_exponent.setter
    def importance_exponent(self, value: float) -> None:
        self._configure(importance_exponent=value)

    @property
    def mix_lambda(self) -> float:
        """Lambda of the TD(lambda) return. In [0, 1]; default 1."""
        return self.parameters.mix_lambda

    @mix_lambda.setter
    def mix_lambda(self, value: float) -> None:
        self._configure(mix_lambda=value)

    @property
    def frame_stack(self) -> int:
        """States in a sample's window. At least 1; default 1."""
        return self.parameters.frame_stack

    @frame_stack.setter
    def frame_stack(self, value: int) -> None:
        self._configure(frame_stack=value)

    @property
    def multi_step(self) -> int:
        """Entries between prev and next. At least 1; default 1."""
        return self.parameters.multi_step

    @multi_step.setter
    def multi_step(self, value: int) -> None:
        self._configure(multi_step=value)

    @property
    def cache_size(self) -> int:
        """Samples in a cache. At least 1; default 256."""
        return self.parameters.cache_size

    @cache_size.setter
    def cache_size(self, value: int) -> None:
        self._configure(cache_size=value)

    @property
    def max_episode(self) -> int:
        """Most closed episodes kept, beside max_step; 0, the default, is no limit."""
        return self.parameters.max_episode

    @max_episode.setter
    def max_episode(self, value: int) -> None:
        self._configure(max_episode=value)

    @property
    def reuse_cache(self) -> bool:
        """Whether a server draws from its caches with replacement, or each sample once (False, the default)."""
        return self.parameters.reuse_cache

    @reuse_cache.setter
    def reuse_cache(self, value: bool) -> None:
        self._configure(reuse_cache=value)

    @property
    def discount_factor(self) -> tuple[float, ...]:
        """Gamma per reward dimension, flattened; set by one number for all, or by one for each. Default 0.99."""
        return self._per_dimension(self.parameters.discount_factor)

    @discount_factor.setter
    def discount_factor(self, value: Any) -> None:
        self._configure(discount_factor=value)

    @property
    def reward_coeff(self) -> tuple[float, ...]:
        """Share of each reward dimension in the priority; set by one number for all, or by one for each. Default 1."""
        return self._per_dimension(self.parameters.reward_coeff)

    @reward_coeff.setter
    def reward_coeff(self, value: Any) -> None:
        self._configure(reward_coeff=value)

    @property
    def cache_flags(self) -> tuple[bool, ...]:
        """14 switches, prev s, a, r, p, v, q, i and next s, a, r, p, v, q, i: which fields come with samples. Default:
        all.

        Set by 14 booleans (or 0 and 1), or by the names of those that are on, out of `FLAGS`: "prev_state" to
        "next_info".
        """
        return flags_of(self.parameters, self._schema)

    @cache_flags.setter
    def cache_flags(self, value: Iterable[Any]) -> None:
        self._configure(**sides_of(value, self._schema))

    @property
    def start(self) -> Start:
        """Windows that reach before an episode's first entry: "skip" them (the default), "repeat" the first, or
        "zero".
        """
        return self.parameters.start

    @start.setter
    def start(self, value: Start) -> None:
        self._configure(start=value)

    # ------------------------------------------------------------------------------------------------------- methods

    def print_info(self) -> None:
        """Print `info()` to standard output, a line for each."""
        sys.stdout.write("".join(f"{name}: {value}\n" for name, value in self.info().items()))

    def info(self) -> dict[str, Any]:
        """Sizes, counts and every parameter, by name."""
        facts: dict[str, Any] = {"uuid": f"{self._uuid:08x}", "entry_size": self.entry_size, "max_step": self.max_step}
        facts |= {name: str(self._schema[name]) for name in self._schema}
        facts |= {name: getattr(self, name) for name in PROPERTIES}
        return facts | self._counts()

    def num_episode(self) -> int:
        """Closed episodes that are stored now."""
        return self.memory.num_episodes

    def pub_bytes(self, topic: str, message: bytes | str) -> None:
        """Publish `message`, where this memory is a server's `rem`. Raises MemoireError elsewhere."""
        raise MemoireError(
            f"cannot publish on {topic!r}: this memory belongs to no server. Call pub_bytes of a ReplayMemoryServer or "
            f"of its rem."
        )

    def new_episode(self, *, lane: int = 0) -> None:
        """Open an episode; what was added to an unclosed one is discarded, and `num_episode()` stays as it is.

        Args:
            lane: Episodes of different lanes are open side by side: one for each environment of a vector environment.
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
        """Close the open episode: compute its returns and weights, from when on its entries can be drawn.

        The return of the last entry T is r_T + gamma * bootstrap_value, and q_t = r_t + gamma * (lambda * q_{t+1} + (1
        - lambda) * v_{t+1}) before it. weight = init_w * episodic_weight_multiplier * (sum_j reward_coeff_j * |q_j -
        v_j|) ** priority_exponent.

        Args:
            episodic_weight_multiplier: Scales the weight of all entries of the episode. At least 0.
            do_update_value: Off leaves qvest at 0.
            do_update_weight: Off leaves weights at init_w times the multiplier.
            final_state: The state after the last entry. Without it, and without `terminated`, the last multi_step
                entries are never drawn, as in the seed; with it every entry can be, and next.state is this state where
                a window ends.
            terminated: Whether the episode ended for good (discount 0 at its end) or was cut off.
            bootstrap_value: Value of the final state, in the shape of the reward; 0 where it is not given.
            lane: Which open episode.

        Raises:
            EpisodeClosedError: there is no open episode.
            EmptyEpisodeError: it has no entries; it stays open.
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
        """Add an entry to the open episode; the oldest episodes are evicted where there is no room for it.

        Args:
            s, a, r, p, v, i: State, action, reward, prob, value, info, as their templates.
            init_w: Factor of the entry's weight, normally 1; 0 is never drawn.
            lane: Which open episode.

        Raises:
            EntryError: a value does not match its template; names the field. Nothing was added.
            EpisodeClosedError: there is no open episode.
            EpisodeTooLong: the episode alone fills the memory; it stays as it was.
        """
        values = (s, a, r, p, v, i) if self._is_flat else self._leaves(s, a, r, p, v, i)
        self.memory.add(lane, values, init_w)

    def add_entries(self, s: Any, a: Any, r: Any, p: Any, v: Any, i: Any, init_w: Any = 1.0, *, lane: int = 0) -> None:
        """Add T entries at once: every value [T, *F], init_w [T] or a number. Errors as `add_entry`; all or none are
        added.
        """
        values = (s, a, r, p, v, i) if self._is_flat else self._leaves(s, a, r, p, v, i)
        self.memory.extend(lane, values, init_w)

    def get_batch(self, batch_size: int, *, out: ReplayBatch | Sequence[Any] | None = None) -> ReplayBatch:
        """Draw a batch from this memory, with replacement, in proportion to weight: what a program of one process
        needs.

        Args:
            batch_size: Samples, at least 1.
            out: An earlier batch, or (prev, next, weight), whose arrays are filled and returned.

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
        """Set priorities of what was drawn to abs(td_errors): [B]. Returns how many were applied, and how many are
        gone.
        """
        return self.memory.update_priorities(ids, td_errors)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._uuid:08x}: {self._schema!r}>"

    def _configure(self, **changes: Any) -> None:
        """Set parameters, checked against the schema; nothing is half done."""
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
        """The columns of nested values, in the schema's order."""
        given = zip((field for field in FIELDS if field != "qvest"), values, strict=True)
        return tuple(leaf for field, value in given for leaf in self._schema.flatten(field, value))

    def _per_dimension(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values * reward_size(self._schema) if len(values) == 1 else values


PROPERTIES = tuple(name for name, each in vars(ReplayMemory).items() if isinstance(each, property) and each.fset)
"""The read-write properties of `ReplayMemory`."""


# ------------------------------------------------------------------------------------------------- server and client


class Mode(enum.Enum):
    """Whether a worker binds its endpoint or connects to one that somebody else binds."""

    Bind = "Bind"
    Conn = "Conn"


Bind, Conn = Mode.Bind, Mode.Conn


class ServerMemory(ReplayMemory):
    """A server's `rem`: templates and parameters for it and all its clients. Entries are its clients'."""

    __slots__ = ("_max_step", "_server")

    def __init__(self, server: Server, schema: Schema, max_step: int) -> None:
        self._settle(schema, uuid_of(0), secrets.token_bytes(16))
        self._server, self._max_step = server, max_step

    @property
    def max_step(self) -> int:
        """Entries that a client's memory has room for unless `sync_sizes` says otherwise; 0: what fits."""
        return self._max_step

    @property
    def memory(self) -> Memory:
        """None: raises MemoireError, since what a server holds are its clients' caches."""
        raise MemoireError(
            "a server's rem holds templates and parameters, no entries: add entries to a ReplayMemoryClient's rem, and "
            "draw with the server's get_batch()."
        )

    @property
    def parameters(self) -> Parameters:
        """What the server draws by, and what clients take over."""
        return self._server.parameters

    def num_episode(self) -> int:
        """0: episodes are stored by clients; `total_episodes` counts them."""
        return 0

    def pub_bytes(self, topic: str, message: bytes | str) -> None:
        """As the server's `pub_bytes`."""
        self._server.publish(topic, message)

    def _configure(self, **changes: Any) -> None:
        self._server.configure(**changes)

    def _counts(self) -> dict[str, Any]:
        return {"num_episode": 0, "num_entries": 0}


class ClientMemory(ReplayMemory):
    """A client's `rem`: its memory of the moment, which `sync_sizes` replaces, with every closed episode counted."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._settle(client.schema, client.uuid, client.client_id)
        self._client = client

    @property
    def memory(self) -> Memory:
        """The engine that the client holds now."""
        return self._client.memory

    def close_episode(self, *flags: Any, lane: int = 0, **ending: Any) -> None:
        """As of `ReplayMemory`; the client counts the episode."""
        length, earned = self.memory.open_length(lane), self.memory.open_return(lane)
        super().close_episode(*flags, lane=lane, **ending)
        self._client.on_entries(length)
        self._client.on_episode(lane, length, earned)


class ReplayMemoryServer(Guarded):
    """The learner's side: takes caches, counters and log lines of many clients, and hands out batches.

    Args:
        state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf: As of `ReplayMemory`.
        max_step: Entries that a client's memory has room for unless `sync_sizes` says otherwise; 0: as fit 256 MiB.
        pub_endpoint: Where messages are published; bound at once.
        n_caches: Caches held; the oldest of the largest holder is overwritten. With storage="episodes", episodes.
        run: Name of the experiment that totals and log lines belong to.
        context: ZeroMQ context; None is the process's own. inproc:// addresses do not cross contexts.
        seed: Makes draws repeatable.
        options: Whatever else `server.Server` takes.

    The `*_main` loops block; call each in a thread of its own. They end when `close` is called, from any thread. All
    methods are safe to call from several threads.

    Raises:
        SchemaError, ParameterError: a template or number is wrong.
        EndpointError: pub_endpoint cannot be bound.
    """

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
        pub_endpoint: str,
        n_caches: int,
        *,
        run: str | None = None,
        context: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        buffers = (state_buf, action_buf, reward_buf, prob_buf, value_buf, qvest_buf, info_buf)
        schema, most = seven_fields(buffers), whole("n_caches", n_caches, 1)
        stores_episodes = options.get("storage") == "episodes"
        self._server = Server(
            None,
            schema,
            parameters=defaults(schema).replace(max_episode=most if stores_episodes else 0),
            max_step=whole("max_step", max_step, 0),
            pub_endpoint=pub_endpoint,
            cache_limit=0 if stores_episodes else most,
            run=run,
            context=context,
            seed=seed,
            **options,
        )
        self._rem = ServerMemory(self._server, schema, int(max_step))
        self._guard()

    @property
    def rem(self) -> ReplayMemory:
        """Templates and parameters; setting one reaches every client with its next `update_counter` or `sync_sizes`."""
        return self._rem

    @property
    def server(self) -> Server:
        """The server itself, for whatever the page has no word for."""
        return self._server

    @property
    def logfile(self) -> str | None:
        """Path of the log file; None before `set_logfile`."""
        return self._server.logfile

    @property
    def total_episodes(self) -> int:
        """Episodes that clients of this run have closed."""
        return self._server.total_episodes

    @property
    def total_caches(self) -> int:
        """Caches accepted."""
        return self._server.total_caches

    @property
    def total_steps(self) -> int:
        """Entries of those episodes."""
        return self._server.total_steps

    def set_logfile(self, logfile_path: str | os.PathLike[str], mode: str) -> None:
        r"""Write clients' log lines to a file from now on: '%s,%08x,%s\n' % (time received, uuid, message).

        The time is ISO 8601 with offset; line breaks in messages are escaped. Lines are buffered, and flushed on a
        timer and at close.

        Args:
            logfile_path: Its folder must exist.
            mode: "w" begins a new file, "a" goes on with it; as in `man fopen`.

        Raises:
            ParameterError: another mode.
            OSError: the file cannot be opened; the one before stays.
        """
        self._server.set_logfile(Path(logfile_path), mode)

    def rep_worker_main(self, endpoint: str, mode: Mode | str) -> None:
        """Answer clients' requests (sizes, counters, log lines) on an endpoint; returns when the server is closed.

        Raises:
            ParameterError: mode is not 'Bind' or 'Conn'.
            EndpointError: the endpoint cannot be bound or connected to.
        """
        bind = binds(mode)
        with contextlib.suppress(Closed):  # a thread may be late: the loop is over before it began
            self._server.add_request_worker(endpoint, bind=bind)
            self._server.wait_closed()

    def pull_worker_main(self, endpoint: str, mode: Mode | str) -> None:
        """Take clients' caches on an endpoint; returns when the server is closed. Any number of these may run at once.

        Raises:
            ParameterError: mode is not 'Bind' or 'Conn'.
            EndpointError: the endpoint cannot be bound or connected to.
        """
        bind = binds(mode)
        with contextlib.suppress(Closed):  # a thread may be late: the loop is over before it began
            self._server.add_pull_worker(endpoint, bind=bind)
            self._server.wait_closed()

    def rep_proxy_main(self, front_ep: str, back_ep: str) -> None:
        """Share requests that come to `front_ep` among workers connected to `back_ep`. Binds both; ends on close."""
        with contextlib.suppress(Closed):
            self._server.run_request_proxy(front_ep, back_ep)

    def pull_proxy_main(self, front_ep: str, back_ep: str) -> None:
        """Hand caches that come to `front_ep` on to workers connected to `back_ep`. Binds both; ends on close."""
        with contextlib.suppress(Closed):
            self._server.run_pull_proxy(front_ep, back_ep)

    def get_batch(
        self, batch_size: int, *, timeout: float | None = None, out: ReplayBatch | Sequence[Any] | None = None
    ) -> ReplayBatch:
        """Draw a batch from the held caches, as if from all clients' memories at once. All or nothing.

        Args:
            batch_size: Samples, at least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: An earlier batch, or (prev, next, weight), whose arrays are filled and returned.

        Returns:
            (prev, next, weight), with attributes: see `ReplayBatch`.

        Raises:
            NotEnoughSamples: (a RuntimeError) says how many are there; none was taken.
            Closed: the server was closed, perhaps while this call waited.
        """
        drawn = self._server.get_batch(whole("batch_size", batch_size, 1), timeout=timeout)
        return batch_of(self._rem.schema, self._server.parameters, drawn.gathered, drawn.importance, out)

    def pub_bytes(self, topic: str, message: bytes | str) -> None:
        """Publish a message of any size; `sub_bytes(topic)` gets it as the type that it is, late comers the newest."""
        self._server.publish(topic, message)

    def close(self, timeout: float | None = None) -> None:
        """End all loops, flush the log, give the addresses back, within `timeout` seconds. Further calls do nothing."""
        self._server.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


class ReplayMemoryClient(Guarded):
    """The actor's side: a local memory, from which caches are drawn and pushed to the server.

    Args:
        sub_endpoint: Where the server publishes.
        req_endpoint: Where a request worker, or a proxy in front of several, answers.
        push_endpoint: Where a pull worker, or a proxy in front of several, takes caches.
        input_uuid: What log lines call this client: a number below 2**32, or an IPv4 address as text. 0 draws one.
        timeout: Seconds that this and each later call may wait for the server, unless it is told otherwise.
        context: ZeroMQ context; None is the process's own. inproc:// addresses do not cross contexts.
        seed: Makes draws repeatable.
        options: Whatever else `client.Client` takes.

    Sizes and every parameter come from the server. Methods are safe to call from several threads; a client does not
    survive a fork.

    Raises:
        MemoireTimeout: (a TimeoutError) nobody answered at req_endpoint.
        SchemaError: the server stores other columns than the seven fields.
    """

    def __init__(
        self,
        sub_endpoint: str,
        req_endpoint: str,
        push_endpoint: str,
        input_uuid: int | str = 0,
        *,
        timeout: float = 10.0,
        context: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self._client = Client(
            req_endpoint,
            push=push_endpoint,
            subscribe=sub_endpoint,
            input_uuid=uuid_of(input_uuid),
            live=False,
            timeout=timeout,
            context=context,
            seed=seed,
            **options,
        )
        try:
            seven_roots(self._client.schema, req_endpoint)
            self._rem = ClientMemory(self._client)
        except BaseException:
            self._client.close(timeout=0)
            raise
        self._subscriptions: dict[str, Any] = {}
        self._lock = threading.Lock()  # of _subscriptions
        self.push_failure = ""
        """Why the last `push_cache` returned -1; "" after one that returned 0."""
        self._guard()

    @property
    def rem(self) -> ReplayMemory:
        """The local memory."""
        return self._rem

    @property
    def client(self) -> Client:
        """The client itself, for whatever the page has no word for."""
        return self._client

    def sync_sizes(self, max_step: int, *, timeout: float | None = None) -> None:
        """Fetch sizes and every parameter again, and start a new local memory of `max_step` entries.

        What the old one held is gone; totals go on. Returns when the server has answered.

        Raises:
            MemoireTimeout: nobody answered; the memory stays as it was.
        """
        self._client.sync(whole("max_step", max_step, 1), timeout=timeout)

    def update_counter(self, *, timeout: float | None = None) -> None:
        """Bring the server's totals up to date: to be called after each episode. Returns when the server has them.

        Raises:
            MemoireTimeout: nobody answered. The totals are cumulative, so that the next call makes up for it.
        """
        self._client.update(timeout=timeout)

    def push_cache(self, *, timeout: float | None = None) -> int:
        """Draw cache_size samples of the local memory, with replacement, in proportion to weight, and push them.

        Args:
            timeout: Seconds to wait for room where too many bytes are on their way.

        Returns:
            0, or -1 when nothing was pushed; `push_failure` says why. Never an exception for the state of the memory,
            the network or the server.
        """
        try:
            pushed = self._client.push_cache(timeout)
            self.push_failure = "" if pushed else self._client.push_reason
        except ForkedError:
            raise
        except MemoireError as problem:
            self.push_failure = str(problem)
        return -1 if self.push_failure else 0

    def write_log(self, log_message: str, *, timeout: float | None = None) -> None:
        """Have a line written to the server's log file. Lines are kept until the server has them.

        Waits only where very many are kept (the server is away for long), at most `timeout` seconds (None:
        `limits.log_timeout`); then the line is dropped, counted and warned of.
        """
        self._client.log(log_message, timeout)

    def sub_bytes(self, topic: str, *, timeout: float | None = None) -> bytes | str:
        """The next message of a topic, of any size, as the type it was published as.

        The first call subscribes and gets the newest message, if there was one; later ones get every further message in
        order, except where this client was too slow.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            MemoireTimeout: nothing came.
            Closed: the client was closed while this call waited.
        """
        self._client._check_open()  # before the lock: in a forked process nobody would give it back
        with self._lock:
            subscription = self._subscriptions.get(topic)
            if subscription is None:
                subscription = self._subscriptions[topic] = self._client.subscribe(topic)
        return subscription.receive(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Send what is still to be sent, for as long as `timeout` allows, and leave. Further calls do nothing."""
        self._client.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def binds(mode: Mode | str) -> bool:
    """Whether a mode is Bind. Raises ParameterError."""
    try:
        return Mode(mode) is Mode.Bind
    except ValueError as error:
        raise ParameterError(
            "mode", mode, "'Bind' or 'Conn', in this spelling (or memoire.Bind, memoire.Conn)"
        ) from error


# -------------------------------------------------------------------------------------------- fields, flags and batches


def seven_fields(buffers: Sequence[Any]) -> Schema:
    """The schema of seven templates in the page's order. Raises SchemaError: names the buffer and what it was."""
    named = {f"{field}_buf": buffer for field, buffer in zip(FIELDS, buffers, strict=True)}
    found = Schema({"state": named.pop("state_buf"), **named})  # roles go by name: none of these but state has one
    if found.ragged:
        raise SchemaError(
            f"{found.ragged[0]} must be of fixed shape in this class. Use memoire.Buffer for ragged columns."
        )
    reward_shape = _array(found, "reward_buf").shape
    for name, shape in (("reward_buf", reward_shape), ("value_buf", reward_shape), ("qvest_buf", reward_shape)):
        column = _array(found, name)
        if column.dtype != np.float32:
            raise SchemaError(f"{name} must have dtype float32, got {column.dtype}. Make the template np.float32.")
        if column.shape != shape:
            raise SchemaError(f"{name} must have the shape of reward_buf, {shape}, got {column.shape}.")
    if _array(found, "prob_buf").shape != ():
        raise SchemaError(f"prob_buf must have shape (), got {found['prob_buf'].shape}. It is one probability.")
    return Schema(dict(zip(FIELDS, buffers, strict=True)))


def seven_roots(schema: Schema, endpoint: str) -> None:
    """Raises SchemaError where a server stores something else than the seven fields."""
    if schema.roots != FIELDS:
        raise SchemaError(
            f"the server at {endpoint} stores the columns {', '.join(schema.roots)}, not the seven fields of this "
            f"class. Use memoire.connect() with it."
        )


def _array(schema: Schema, name: str) -> Any:
    if name not in schema:
        raise SchemaError(f"{name} must be one array, got a nest of {', '.join(schema.leaves(name))}.")
    return schema[name]


def defaults(schema: Schema) -> Parameters:
    """The page's parameters: those of memoire, with all 14 switches on."""
    return Parameters().replace(**sides_of([True] * len(FLAGS), schema))


def sides_of(flags: Iterable[Any], schema: Schema) -> dict[str, tuple[str, ...]]:
    """`cache_flags` as the parameters prev and next: columns by name. Raises ParameterError."""
    expected = f"{len(FLAGS)} booleans, or different names out of {', '.join(FLAGS)}"
    given = flags.tolist() if isinstance(flags, np.ndarray) else flags
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ParameterError("cache_flags", flags, expected)
    listed = list(given)
    if listed and all(isinstance(each, str) for each in listed):
        on = set(listed)
        if len(on) != len(listed) or not on <= set(FLAGS):
            raise ParameterError("cache_flags", flags, expected)
    elif len(listed) == len(FLAGS) and all(
        isinstance(each, bool | int | np.bool_) and each in (0, 1) for each in listed
    ):
        on = {name for name, each in zip(FLAGS, listed, strict=True) if each}
    else:
        raise ParameterError("cache_flags", flags, expected)
    return {
        side: tuple(leaf for field in FIELDS if f"{side}_{field}" in on for leaf in schema.leaves(field))
        for side in ("prev", "next")
    }


def flags_of(parameters: Parameters, schema: Schema) -> tuple[bool, ...]:
    """The 14 switches that parameters stand for; a nested field is on when any part of it is."""
    prev = schema.names if parameters.prev is None else parameters.prev
    following = schema.states if parameters.next is None else parameters.next
    return tuple(any(leaf in side for leaf in schema.leaves(field)) for side in (prev, following) for field in FIELDS)


def batch_of(
    schema: Schema,
    parameters: Parameters,
    gathered: Gathered,
    factor: NDArray[np.float32],
    out: ReplayBatch | Sequence[Any] | None = None,
) -> ReplayBatch:
    """A batch of the page out of what the engine gathered; `factor` is its importance. Copied into `out` where that is
    given.
    """
    stack = parameters.frame_stack
    batch = ReplayBatch((_side(schema, gathered.prev, stack), _side(schema, gathered.next, stack), gathered.weight))
    batch.importance, batch.ids = factor, gathered.ids
    batch.reward, batch.discount, batch.steps = gathered.reward, gathered.discount, gathered.steps
    batch.model_version, batch.age = gathered.model_version, gathered.age
    return batch if out is None else _fill(out, batch)


def _side(schema: Schema, columns: dict[str, NDArray[Any]], stack: int) -> Fields:
    """One side's seven fields, nested as declared; what was switched off is there with batch dimension 0."""
    arrays = dict(columns)
    for name in schema.keys() - columns.keys():
        column = schema[name]
        window = (stack,) if column.role == "state" else ()
        arrays[name] = np.empty((0, *window, *column.shape), column.dtype)
    return Fields(*(schema.nest(field, arrays) for field in FIELDS))


def _fill(out: ReplayBatch | Sequence[Any], batch: ReplayBatch) -> ReplayBatch:
    """Copy a batch into the caller's (prev, next, weight); every array is compared before one is written."""
    places, arrays = dict(_walk("out", tuple(out))), dict(_walk("out", tuple(batch)))
    if isinstance(out, ReplayBatch):
        places |= vars(out)
        arrays |= vars(batch)
    for name, array in arrays.items():
        place = places.get(name)
        if place is None or place.shape != array.shape or place.dtype != array.dtype:
            found = None if place is None else f"{place.dtype}{list(place.shape)}"
            raise ParameterError(name, found, f"an array {array.dtype}{list(array.shape)}")
    for name, array in arrays.items():
        np.copyto(places[name], array)
    if isinstance(out, ReplayBatch):
        return out
    filled = ReplayBatch((Fields(*out[0]), Fields(*out[1]), out[2]))
    vars(filled).update(vars(batch))
    return filled


def _walk(name: str, value: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every array of a nest under a name that leads there."""
    if isinstance(value, np.ndarray):
        yield name, value
        return
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        yield from _walk(f"{name}[{key!r}]", part)


def uuid_of(value: int | str) -> int:
    """`input_uuid` as 32 bits: a number, or an IPv4 address as text; 0 draws one. Raises ParameterError."""
    if isinstance(value, str):
        try:
            value = int(ipaddress.IPv4Address(value))
        except ValueError as error:
            raise ParameterError(
                "input_uuid", value, "a number below 2**32 or an IPv4 address such as '10.0.0.1'"
            ) from error
    return whole("input_uuid", value, 0, 2**32 - 1) or secrets.randbits(32) or 1
