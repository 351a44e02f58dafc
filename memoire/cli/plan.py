"""Capacity planning: calculates the size of a cluster for a load, as `memoire plan` prints it.

Bytes follow from schema and parameters, processor time from costs measured by benchmarks/scaling.py. docs/operations.md
lists the simplifications.
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
from memoire.tables.base import DrawsBatches, ReceivesSums
from memoire.wire.layout import layout_of, max_frames_per_sample
from memoire.wire.parts import EPISODE_FACTS, ContainerKind, RowCount

PROCESS_MEMORY = 100 * MiB
"""Bytes of memory that a node uses right after its start."""
CACHES_HELD = 4
"""Caches that a server holds for each actor: enough to draw every batch from all actors."""
EPISODE_STEPS = 1000
"""Entries of one message if actors push whole episodes."""
UTILIZATION = 0.6
"""Planned share of a core or a network; the rest is for bursts and for costs that the model leaves out."""


@dataclass(frozen=True)
class NodeCosts:
    """Measured costs of a server's and a proxy's work, on one kind of machine."""

    server_cache: float
    """Processor seconds of a server for each received cache, without the cost of its bytes."""
    server_byte: float
    """Processor seconds of a server for each byte of a received cache."""
    proxy_cache: float
    """Processor seconds of a proxy for each forwarded cache or batch, without the cost of its bytes."""
    proxy_byte: float
    draw: float
    """Processor seconds of a server for each batch of a remote learner, without the cost of its bytes."""
    draw_byte: float
    server_client: float
    """Processor seconds of a server, per second, for each actor that reports counts."""
    proxy_client: float
    client_memory: float
    """Bytes of a server's memory for each actor."""

    UNITS: ClassVar[dict[str, tuple[str, str, float]]] = {
        "server_cache": ("server: receiving a cache or episode", "µs", 1e6),
        "server_byte": ("server: bytes of caches and episodes", "s/GB", 1e9),
        "proxy_cache": ("proxy: forwarding a cache", "µs", 1e6),
        "proxy_byte": ("proxy: forwarded bytes", "s/GB", 1e9),
        "draw": ("server: a batch for a remote learner", "µs", 1e6),
        "draw_byte": ("server: bytes of such batches", "s/GB", 1e9),
        "server_client": ("server: an actor that reports counts", "ms each second", 1e3),
        "proxy_client": ("proxy: an actor that reports counts", "ms each second", 1e3),
        "client_memory": ("server: memory for an actor", "KiB", 1 / 1024),
    }
    """Description, printed unit and factor from seconds or bytes to this unit, by field."""

    def values(self) -> tuple[float, ...]:
        """Return all costs in the order of UNITS."""
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
"""Costs measured on two cores of an AMD EPYC: docs/development/records/scaling.md."""


@dataclass(frozen=True)
class Workload:
    """Load of a cluster: the numbers and rates of its actors and learners, and their data."""

    schema: Schema
    parameters: Parameters
    actors: int = 300
    steps: float = 50.0
    """Environment steps of an actor per second."""
    learners: int = 10
    batches: float = 10.0
    """Batches of a learner per second."""
    batch_size: int = 256
    storage: str = "caches"
    capacity: int = 1_000_000
    """Stored entries: at each actor with caches, at all servers together with episodes."""
    compressed: float = 1.0
    """Share of the states' bytes that remains after compression."""
    embedded: bool = False
    """True if each learner has a server in its own process, so that batches cross no network."""
    network: float = 1.25e9
    """Bytes that a node can receive per second, and as many that it can send."""
    model_bytes: float = 0.0
    model_every: float = 10.0
    """Seconds between two published models."""

    def __post_init__(self) -> None:
        if not registry.has_capability(self.storage, DrawsBatches):
            expected = f"{' or '.join(map(repr, registry.names_of(DrawsBatches)))}, kinds of table that draw batches"
            raise ParameterError("storage", self.storage, expected)
        for name in ("actors", "steps", "learners", "batches", "batch_size", "capacity", "network", "model_every"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ParameterError(name, value, "a number above 0")
        if not 0 < self.compressed <= 1:
            expected = "a share of the states' bytes, above 0 and at most 1"
            raise ParameterError("compressed", self.compressed, expected)
        if self.compressed < 1 and self.parameters.compression == "none":
            raise ParameterError.with_text(
                f"compressed={self.compressed:g} needs a table with compression: --set compression=lz4."
            )
        if not (math.isfinite(self.model_bytes) and self.model_bytes >= 0):
            raise ParameterError("model_bytes", self.model_bytes, "a number of bytes, at least 0")

    @property
    def samples(self) -> float:
        """Samples that all learners together draw per second."""
        return self.learners * self.batches * self.batch_size

    @property
    def samples_per_insert(self) -> float:
        """Drawn samples for each environment step."""
        return self.samples / (self.actors * self.steps)


def schema_of_state(state: str) -> Schema:
    """Return a schema with a state such as "84x84" (uint8) or "64:float32", an int32 action and a float32 reward.

    Raises:
        ParameterError: the shape or the dtype is not valid.
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
    """Return the bytes of one sample that shares no frame with other samples, on the wire.

    `kind` is a cache, or a batch for a remote learner (`ContainerKind.DRAWN`).

    Raises:
        ParameterError: a column is ragged, so that its size is not known.
    """
    _reject_ragged(schema)
    layout = layout_of(schema, parameters, kind)
    frames = max_frames_per_sample(layout, parameters.multi_step)
    rows = {RowCount.PER_SAMPLE: 1.0, RowCount.PER_FRAME: frames * compressed, RowCount.PER_ENTRY: float(layout.length)}
    return sum(form.row_bytes * rows.get(form.extent, 0.0) for form in layout.blocks)


def entry_bytes(schema: Schema, *, compressed: float = 1.0) -> float:
    """Return the bytes of one step in an episode on the wire. Raises ParameterError as `sample_bytes`."""
    _reject_ragged(schema)
    state = sum(schema[name].nbytes for name in schema.states)
    other_bytes = sum(schema[name].nbytes for name in schema.entry_names) - state
    return state * compressed + other_bytes + EPISODE_FACTS


def _reject_ragged(schema: Schema) -> None:
    for name in schema.ragged:
        raise ParameterError(f"column {name!r}", "ragged", "of a fixed shape to plan with, such as its usual length")


@dataclass(frozen=True)
class LoadPlan:
    """Resources of a cluster for a load, in bytes, seconds, and processor seconds per second (cores)."""

    load: Workload
    sample: float
    """Bytes of a sample, or of a step of an episode, on the way to a server."""
    messages: float
    """Caches or episodes of all actors per second."""
    inward: float
    """Bytes that all servers receive per second."""
    drawn: float
    """Bytes of the batches of all learners per second, from embedded and remote servers."""
    outward: float
    """Bytes that all servers send per second: batches for learners, and models."""
    servers: int
    server_cores: float
    """Cores of all servers together."""
    server_memory: float
    """Bytes of memory of each server."""
    bound: str
    """Resource that determines the number of servers."""
    proxies: int
    passes: float
    """Bytes that all proxies forward per second: caches or episodes, batches for remote learners, models."""
    proxy_cores: float
    """Cores of all proxies together."""
    actor_memory: float
    """Bytes of each actor's replay memory."""
    held_bytes: float
    """Bytes for each server's setting `held_bytes`."""


def plan(load: Workload, costs: NodeCosts = COSTS) -> LoadPlan:
    """Return the plan of a cluster for a load, with `costs` measured on its kind of machine."""
    schema, p, by_caches = load.schema, load.parameters, registry.has_capability(load.storage, ReceivesSums)
    if by_caches:
        sample, whole = (sample_bytes(schema, p, compressed=share) for share in (load.compressed, 1.0))
        number, message = load.samples, p.cache_size
        held_bytes = load.actors * CACHES_HELD * p.cache_size * whole
    else:
        sample, whole = (entry_bytes(schema, compressed=share) for share in (load.compressed, 1.0))
        number, message = load.actors * load.steps, EPISODE_STEPS
        held_bytes = load.capacity * (entry_bytes(schema) - EPISODE_FACTS + ENTRY_OVERHEAD)
    messages, inward = number / message, number * sample
    whole_batches = load.samples * sample_bytes(schema, p, ContainerKind.DRAWN)
    share = load.compressed if p.compression in ("lz4", "auto") else 1.0
    drawn = load.samples * sample_bytes(schema, p, ContainerKind.DRAWN, compressed=share)
    models = load.model_bytes / load.model_every
    core = messages * costs.server_cache + number * whole * costs.server_byte + load.actors * costs.server_client
    core += whole_batches * costs.draw_byte
    answers, far = (0.0, 0.0) if load.embedded else (load.learners * load.batches, drawn)
    carried = inward + far  # remote learners read through proxies
    through = (messages + answers) * costs.proxy_cache + carried * costs.proxy_byte + load.actors * costs.proxy_client
    passes = carried + load.actors * models
    proxies = max(2, math.ceil(through / UTILIZATION), math.ceil(passes / (UTILIZATION * load.network)))
    core, outward = core + answers * costs.draw, far + proxies * models
    servers, bound = _servers(load, core, inward, outward)
    memory = PROCESS_MEMORY + Limits().on_way_bytes + (held_bytes + load.actors * costs.client_memory) / servers
    actor = load.capacity * (entry_bytes(schema) - EPISODE_FACTS + ENTRY_OVERHEAD) if by_caches else 0.0
    return LoadPlan(
        load, sample, messages, inward, drawn, outward, servers, core, memory + 2 * load.model_bytes, bound,
        proxies, passes, through, actor, held_bytes / servers,
    )  # fmt: skip


def _servers(load: Workload, core: float, inward: float, outward: float) -> tuple[int, str]:
    needed = {
        "processor time": math.ceil(core / UTILIZATION),
        "received bytes": math.ceil(inward / (UTILIZATION * load.network)),
        "sent bytes": math.ceil(outward / (UTILIZATION * load.network)),
    }
    if load.embedded:
        return load.learners, "one in each learner"
    bound = max(needed, key=lambda each: needed[each])
    return max(1, needed[bound]), bound if needed[bound] > 1 else "one is enough"


def lines(plan: LoadPlan) -> Iterator[str]:
    """Yield the plan as lines of text: the load, its messages, and the resources of each role."""
    load, p = plan.load, plan.load.parameters
    by_caches = registry.has_capability(load.storage, ReceivesSums)
    unit = "sample" if by_caches else "step"
    size = p.cache_size if by_caches else EPISODE_STEPS
    embedded = ", in the learners' processes" if load.embedded else ""
    yield f"load     {load.actors} actors, {load.steps:g} steps a second each; {load.learners} learners, " + (
        f"{load.batches:g} batches of {load.batch_size} a second each"
    )
    yield f"         {load.samples:,.0f} samples a second, {load.samples_per_insert:.3g} for each step"
    yield f"message  {plan.sample:,.0f} bytes for each {unit}, {_bytes(plan.sample * size)} for {size}; " + (
        f"{plan.messages:,.1f} a second"
    )
    yield f"actor    sends {_rate(plan.inward / load.actors)}" + (
        f"; replay memory {_bytes(plan.actor_memory)} for {load.capacity:,} steps" if by_caches else ""
    )
    into = plan.inward if load.embedded else plan.drawn
    yield f"learner  receives {_rate(into / load.learners)}" + (", as its server" if load.embedded else "")
    yield f"servers  {plan.servers} ({plan.bound}){embedded}: together {plan.server_cores:.2f} cores, " + (
        f"{_rate(plan.inward)} in, {_rate(plan.outward)} out"
    )
    yield f"         each {plan.server_cores / plan.servers:.2f} cores, {_bytes(plan.server_memory)}, of which " + (
        f"heldBytes {_bytes(plan.held_bytes)}"
    )
    yield f"proxies  {plan.proxies}: together {plan.proxy_cores:.2f} cores, {_rate(plan.passes)}" + (
        f", of which models {_rate(load.actors * load.model_bytes / load.model_every)}" if load.model_bytes else ""
    )


def show(state: str, schema: str | None, env: str | None, set: Sequence[str], network: float, **load: Any) -> int:
    """Print the plan for a load, as `memoire plan` does, and return 0. `network` is in Gbit/s."""
    stored = schema_of_state(state) if schema is None and env is None else roles.schema_of(schema, env)
    for line in lines(plan(Workload(stored, roles.read_parameters(set), network=network * 1e9 / 8, **load))):
        print(line)
    return 0


def _bytes(number: float) -> str:
    """Return bytes as text in KiB, MiB or GiB, the units of Pods' limits."""
    for size, name in ((GiB, "GiB"), (MiB, "MiB")):
        if number >= size:
            return f"{number / size:.3g} {name}" if number < 1000 * size else f"{number / size:,.0f} {name}"
    return f"{number / 1024:.3g} KiB"


def _rate(number: float) -> str:
    bits = 8 * number
    for size, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"
