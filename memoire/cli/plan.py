"""How large a cluster has to be for a load, on paper: what `memoire plan` prints.

Bytes follow from schema and parameters; processor time from what things cost where benchmarks/scaling.py was run
(docs/scaling.md says what the arithmetic leaves out).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import numpy as np

from memoire.errors import ParameterError
from memoire.limits import GiB, Limits, MiB
from memoire.nodes import roles
from memoire.replay.columns import Column
from memoire.replay.conversion import ENTRY_OVERHEAD
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables import registry
from memoire.tables.base import DrawsBatches, HearsSums
from memoire.wire.layout import frames_of, layout_of
from memoire.wire.parts import EPISODE_FACTS, ContainerKind, RowCount

PROCESS_MEMORY = 100 * MiB
"""That a node has at its start."""
CACHES_HELD = 4
"""Caches of each actor that wait at a server: enough that every batch can be drawn from all of them."""
EPISODE_STEPS = 1000
"""Entries of a message where whole episodes are pushed."""
USED = 0.6
"""Share of a core, or of a network, that is planned with: the rest is for bursts and for what the model leaves out."""


@dataclass(frozen=True)
class NodeCosts:
    """What things cost a node, on the machine where that was measured."""

    server_cache: float
    """Processor seconds of a server for each cache that comes in, beside its bytes."""
    server_byte: float
    """For each byte of it."""
    proxy_cache: float
    """Of a proxy, for each cache that passes."""
    proxy_byte: float
    draw: float
    """Of a server, for each batch that is drawn far away, beside its bytes."""
    draw_byte: float
    server_client: float
    """Of a server, in each second, for each actor that has news."""
    proxy_client: float
    client_memory: float
    """Bytes of memory of a server for each actor."""

    UNITS: ClassVar[dict[str, tuple[str, str, float]]] = {
        "server_cache": ("server: a cache or episode that comes in", "µs", 1e6),
        "server_byte": ("server: its bytes", "s/GB", 1e9),
        "proxy_cache": ("proxy: a cache that passes", "µs", 1e6),
        "proxy_byte": ("proxy: its bytes", "s/GB", 1e9),
        "draw": ("server: a batch for a learner far away", "µs", 1e6),
        "draw_byte": ("server: its bytes", "s/GB", 1e9),
        "server_client": ("server: an actor that has news", "ms each second", 1e3),
        "proxy_client": ("proxy: an actor that has news", "ms each second", 1e3),
        "client_memory": ("server: memory for an actor", "KiB", 1 / 1024),
    }
    """By field: what it is, its unit in print, and what it is multiplied with for that."""

    def values(self) -> tuple[float, ...]:
        """In the order of UNITS."""
        return astuple(self)


COSTS = NodeCosts(
    server_cache=45e-6,
    server_byte=0.35e-9,
    proxy_cache=95e-6,
    proxy_byte=0.18e-9,
    draw=32e-6,
    draw_byte=0.35e-9,
    server_client=0.21e-3,
    proxy_client=0.28e-3,
    client_memory=4 * 1024,
)
"""As measured on two cores of an AMD EPYC: docs/benchmarks/scaling.md."""


@dataclass(frozen=True)
class Workload:
    """What actors and learners do."""

    schema: Schema
    parameters: Parameters
    actors: int = 300
    steps: float = 50.0
    """Environment steps of an actor in a second."""
    learners: int = 10
    batches: float = 10.0
    """Batches of a learner in a second."""
    batch_size: int = 256
    storage: str = "caches"
    capacity: int = 1_000_000
    """Entries that are stored: at each actor with caches, at all servers together with episodes."""
    compressed: float = 1.0
    """What compression leaves of the states' bytes."""
    embedded: bool = False
    """Whether each learner has a server in its own process, so that batches cross no network."""
    network: float = 1.25e9
    """Bytes that a node can receive in a second, and send."""
    model_bytes: float = 0.0
    model_every: float = 10.0
    """Seconds between two models."""

    def __post_init__(self) -> None:
        if not registry.offers(self.storage, DrawsBatches):
            expected = f"{' or '.join(map(repr, registry.names_of(DrawsBatches)))}, of which batches are drawn"
            raise ParameterError("storage", self.storage, expected)
        for name in ("actors", "steps", "learners", "batches", "batch_size", "capacity", "network", "model_every"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ParameterError(name, value, "a number above 0")
        if not 0 < self.compressed <= 1:
            raise ParameterError("compressed", self.compressed, "above 0, at most 1: what is left of the states' bytes")
        if self.compressed < 1 and self.parameters.compression == "none":
            raise ParameterError("compressed", self.compressed, "1 where nothing compresses (--set compression=lz4)")
        if not (math.isfinite(self.model_bytes) and self.model_bytes >= 0):
            raise ParameterError("model_bytes", self.model_bytes, "bytes, at least 0")

    @property
    def samples(self) -> float:
        """That all learners draw in a second."""
        return self.learners * self.batches * self.batch_size

    @property
    def samples_per_insert(self) -> float:
        """For each environment step."""
        return self.samples / (self.actors * self.steps)


def schema_of_state(state: str) -> Schema:
    """A schema with a state such as "84x84" (bytes) or "64:float32", an int32 action and a reward.

    Raises:
        ParameterError: that is no shape, or no dtype.
    """
    shape, _, dtype = state.partition(":")
    try:
        sizes = tuple(int(size) for size in shape.split("x"))
        column = Column(str(np.dtype(dtype or "uint8")), sizes, "state")
    except (TypeError, ValueError) as error:
        expected = "a shape and a dtype, such as 84x84 (uint8) or 64:float32"
        raise ParameterError("--state", state, expected) from error
    return Schema({"state": column, "action": Column("int32"), "reward": Column("float32", (), "reward")})


def sample_bytes(
    schema: Schema, parameters: Parameters, kind: ContainerKind = ContainerKind.CACHE, *, compressed: float = 1.0
) -> float:
    """Bytes of one sample of a cache, or of a batch for a learner far away (`ContainerKind.DRAWN`), where no other
    sample has the same frames.

    Raises:
        ParameterError: a column has no fixed shape, so that nobody can say how many bytes it has.
    """
    _refuse_ragged(schema)
    layout = layout_of(schema, parameters, kind)
    frames = frames_of(layout, parameters.multi_step)
    rows = {RowCount.PER_SAMPLE: 1.0, RowCount.PER_FRAME: frames * compressed, RowCount.PER_ENTRY: float(layout.length)}
    return sum(form.row_bytes * rows.get(form.extent, 0.0) for form in layout.blocks)


def entry_bytes(schema: Schema, *, compressed: float = 1.0) -> float:
    """Bytes of one step in an episode on the wire. Raises ParameterError as `sample_bytes`."""
    _refuse_ragged(schema)
    state = sum(schema[name].nbytes for name in schema.states)
    rest = sum(schema[name].nbytes for name in schema.entry_names) - state
    return state * compressed + rest + EPISODE_FACTS


def _refuse_ragged(schema: Schema) -> None:
    for name in schema.ragged:
        raise ParameterError(f"column {name!r}", "a ragged one", "a shape of its usual length, to plan with")


@dataclass(frozen=True)
class LoadPlan:
    """What a load takes; bytes, seconds, processor seconds in each second (cores)."""

    load: Workload
    sample: float
    """Bytes of a sample, or of a step of an episode, on the way to a server."""
    messages: float
    """Caches or episodes in a second, of all actors."""
    inward: float
    """Bytes that all servers receive in a second."""
    drawn: float
    """Bytes of the batches of all learners in a second, wherever their servers are."""
    outward: float
    """Bytes that all servers send in a second: batches for learners, and models."""
    servers: int
    server_cores: float
    """Of all servers together."""
    server_memory: float
    """Of each."""
    bound: str
    """Why there are as many servers."""
    proxies: int
    passes: float
    """Bytes that all proxies pass on in a second: caches or episodes, batches for learners far away, models."""
    proxy_cores: float
    """Of all proxies together."""
    actor_memory: float
    """Of each actor's replay memory."""
    held_bytes: float
    """For each server's setting of that name."""


def plan(load: Workload, costs: NodeCosts = COSTS) -> LoadPlan:
    """The cluster for a load, if `costs` are what things cost on its machines."""
    schema, p, by_caches = load.schema, load.parameters, registry.offers(load.storage, HearsSums)
    if by_caches:
        sample, whole = (sample_bytes(schema, p, compressed=share) for share in (load.compressed, 1.0))
        number, message = load.samples, p.cache_size
        held = load.actors * CACHES_HELD * p.cache_size * whole
    else:
        sample, whole = (entry_bytes(schema, compressed=share) for share in (load.compressed, 1.0))
        number, message = load.actors * load.steps, EPISODE_STEPS
        held = load.capacity * (entry_bytes(schema) - EPISODE_FACTS + ENTRY_OVERHEAD)
    messages, inward = number / message, number * sample
    whole_batches = load.samples * sample_bytes(schema, p, ContainerKind.DRAWN)
    share = load.compressed if p.compression in ("lz4", "auto") else 1.0
    drawn = load.samples * sample_bytes(schema, p, ContainerKind.DRAWN, compressed=share)
    models = load.model_bytes / load.model_every
    core = messages * costs.server_cache + number * whole * costs.server_byte + load.actors * costs.server_client
    core += whole_batches * costs.draw_byte
    answers, far = (0.0, 0.0) if load.embedded else (load.learners * load.batches, drawn)
    carried = inward + far  # learners far away read through proxies, too
    through = (messages + answers) * costs.proxy_cache + carried * costs.proxy_byte + load.actors * costs.proxy_client
    passes = carried + load.actors * models
    proxies = max(2, math.ceil(through / USED), math.ceil(passes / (USED * load.network)))
    core, outward = core + answers * costs.draw, far + proxies * models
    servers, bound = _servers(load, core, inward, outward)
    memory = PROCESS_MEMORY + Limits().on_way_bytes + (held + load.actors * costs.client_memory) / servers
    actor = load.capacity * (entry_bytes(schema) - EPISODE_FACTS + ENTRY_OVERHEAD) if by_caches else 0.0
    return LoadPlan(
        load, sample, messages, inward, drawn, outward, servers, core, memory + 2 * load.model_bytes, bound,
        proxies, passes, through, actor, held / servers,
    )  # fmt: skip


def _servers(load: Workload, core: float, inward: float, outward: float) -> tuple[int, str]:
    """How many, and why."""
    wanted = {
        "processor time": math.ceil(core / USED),
        "bytes that come in": math.ceil(inward / (USED * load.network)),
        "bytes that go out": math.ceil(outward / (USED * load.network)),
    }
    if load.embedded:
        return load.learners, "one in each learner"
    bound = max(wanted, key=lambda each: wanted[each])
    return max(1, wanted[bound]), bound if wanted[bound] > 1 else "one is enough"


def lines(made: LoadPlan) -> Iterator[str]:
    """The plan as text: what is needed, and from what it follows."""
    load, p = made.load, made.load.parameters
    by_caches = registry.offers(load.storage, HearsSums)
    unit = "sample" if by_caches else "step"
    size = p.cache_size if by_caches else EPISODE_STEPS
    embedded = ", in the learners' processes" if load.embedded else ""
    yield f"load     {load.actors} actors, {load.steps:g} steps a second each; {load.learners} learners, " + (
        f"{load.batches:g} batches of {load.batch_size} a second each"
    )
    yield f"         {load.samples:,.0f} samples a second, {load.samples_per_insert:.3g} for each step"
    yield f"message  {made.sample:,.0f} bytes for each {unit}, {_bytes(made.sample * size)} for {size}; " + (
        f"{made.messages:,.1f} a second"
    )
    yield f"actor    sends {_rate(made.inward / load.actors)}" + (
        f"; replay memory {_bytes(made.actor_memory)} for {load.capacity:,} steps" if by_caches else ""
    )
    into = made.inward if load.embedded else made.drawn
    yield f"learner  receives {_rate(into / load.learners)}" + (", as its server" if load.embedded else "")
    yield f"servers  {made.servers} ({made.bound}){embedded}: together {made.server_cores:.2f} cores, " + (
        f"{_rate(made.inward)} in, {_rate(made.outward)} out"
    )
    yield f"         each {made.server_cores / made.servers:.2f} cores, {_bytes(made.server_memory)}, of which " + (
        f"heldBytes {_bytes(made.held_bytes)}"
    )
    yield f"proxies  {made.proxies}: together {made.proxy_cores:.2f} cores, {_rate(made.passes)}" + (
        f", of which models {_rate(load.actors * load.model_bytes / load.model_every)}" if load.model_bytes else ""
    )


def show(state: str, schema: str | None, env: str | None, set: Sequence[str], network: float, **load: Any) -> int:
    """Print the plan for a load: what `memoire plan` does. `network` is in Gbit/s."""
    stored = schema_of_state(state) if schema is None and env is None else roles.schema_of(schema, env)
    for line in lines(plan(Workload(stored, roles.read_parameters(set), network=network * 1e9 / 8, **load))):
        print(line)
    return 0


def _bytes(number: float) -> str:
    """256 MiB -> "256 MiB", as limits of Pods are written."""
    for size, name in ((GiB, "GiB"), (MiB, "MiB")):
        if number >= size:
            return f"{number / size:.3g} {name}" if number < 1000 * size else f"{number / size:,.0f} {name}"
    return f"{number / 1024:.3g} KiB"


def _rate(number: float) -> str:
    """Bytes in a second as networks are sold: bits."""
    bits = 8 * number
    for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"
