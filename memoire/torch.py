"""Batches as torch tensors, and networks as models: `pip install 'memoire-rl[torch]'`.

    for batch in memoire.torch.batches(server, 256, device="cuda"):     # or server.get_batch(256).to("cuda")
        td_errors = ...               # of batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs
        (batch.importance * td_errors**2).mean().backward()
        batch.update_priorities(td_errors)
        memoire.torch.publish(server, "policy", net)

    memoire.torch.load(client.model("policy").wait(timeout=30), net)    # at an actor

On the CPU tensors are the batch's own memory. A network travels as named arrays, in the format of safetensors: nothing
in it is pickled, and a body that does not fit is refused before anything is changed.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memoire.models import tensors as bodies
from memoire.models.model import Model
from memoire.replay.batch import Attributes, Batch, PriorityUpdate
from memoire.replay.mixing import MixedBatch

from .errors import NotInstalled, ParameterError, WrongType
from .suggestions import no_field

with NotInstalled.explained("pip install 'memoire-rl[torch]'"):
    import torch


class Source(Protocol):
    """Whatever draws batches until a run is over: a `Server`, a `Reader`, a client."""

    def batches(self, batch_size: Any, timeout: float = ..., /) -> Iterator[Any]:
        """One batch after the other."""
        ...


class TorchBatch(Attributes[torch.Tensor]):
    """A batch whose arrays are tensors, under the same names; also as attributes, nested as a `Batch` nests them.

    On the CPU tensors share their memory with the batch's arrays. ids stay as they are: `batch.ids`. `Batch.to` makes
    one.

    Args:
        device, pin_memory, non_blocking: See `Batch.to`.

    Raises:
        ParameterError: torch has no dtype like an array's, or no such device.
    """

    def __init__(
        self,
        batch: Batch,
        device: torch.device | str | None = None,
        *,
        pin_memory: bool = True,
        non_blocking: bool = True,
    ) -> None:
        self.source = batch
        """The batch as it was drawn."""
        self.device = device_of(device)
        move = functools.partial(_moved, device=self.device, pin_memory=pin_memory, non_blocking=non_blocking)
        self._arrays = {name: move(as_tensor(array)) for name, array in batch.items() if name != "ids"}

    def to(
        self, device: torch.device | str | None = None, *, pin_memory: bool = True, non_blocking: bool = True
    ) -> TorchBatch:
        """The same batch on another device; itself where it is there already."""
        if device_of(device) == self.device:
            return self
        made = copy.copy(self)
        made.device = device_of(device)
        move = functools.partial(_moved, device=made.device, pin_memory=pin_memory, non_blocking=non_blocking)
        made._arrays = {name: move(tensor) for name, tensor in self._arrays.items()}
        return made

    @property
    def ids(self) -> NDArray[Any]:
        """[B] which entries these are: an array, as the batch has it."""
        ids: NDArray[Any] = self.source.ids
        return ids

    def update_priorities(self, td_errors: torch.Tensor | NDArray[Any]) -> PriorityUpdate:
        """Tell the memory how surprising these samples were: [B], or [B, T] of sequences, on any device."""
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().to("cpu", torch.float32).numpy()
        return self.source.update_priorities(td_errors)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            return _mapped(self.source[name], self._nested(name))

    def _nested(self, name: str) -> Callable[[NDArray[Any]], torch.Tensor]:
        if name == "ids":
            raise no_field("this batch of tensors", name, self._arrays)
        found = {id(array): self._arrays[key] for key, array in self.source.items() if key != "ids"}
        return lambda array: found[id(array)]

    def __repr__(self) -> str:
        rows = (f"{name}: {str(each.dtype)[6:]}{list(each.shape)}" for name, each in self.items())
        return f"TorchBatch({', '.join(rows)}, device={self.device})"


def device_of(device: torch.device | str | None) -> torch.device:
    """A device by its name, "cuda" being the current one; None is the CPU.

    Raises:
        ParameterError: torch knows no such device, or has it not here.
    """
    try:
        found = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ParameterError("device", device, f"one that torch knows ({str(error).splitlines()[0]})") from error
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ParameterError("device", str(device), "one that is here: this torch finds no GPU that it can use")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _moved(tensor: torch.Tensor, *, device: torch.device, pin_memory: bool, non_blocking: bool) -> torch.Tensor:
    if device == tensor.device:
        return tensor
    if device.type == "cuda" and pin_memory and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # from there the copy goes on beside everything else
    # Onto the CPU a copy that is not waited for could be read before it is there.
    return tensor.to(device, non_blocking=non_blocking and device.type != "cpu")


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A tensor of the array's memory, shape and dtype: who writes to one writes to the other.

    Raises:
        ParameterError: torch has no such dtype.
    """
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ParameterError("dtype", str(array.dtype), f"one that torch has ({error})") from error


def _mapped(value: Any, change: Callable[[NDArray[Any]], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(part, change) for part in value)
    return change(value)


def pinned(batch: Batch) -> dict[str, NDArray[Any]]:
    """Arrays like a batch's in memory that a GPU reads by itself, for `sample(..., out=)` and `get_batch(..., out=)`.

    They have the shapes [B, ...] and dtypes of the batch's. Without a GPU they are ordinary ones. Ragged columns are
    left out: they are as wide as the longest value of a batch.
    """
    is_there = torch.cuda.is_available()
    ragged = {*batch.gathered.prev_lengths, *batch.gathered.next_lengths}
    made = {}
    for name, array in batch.items():
        if name == "ids" or name.removeprefix("next_").removesuffix("_length") in ragged:
            continue
        room = torch.empty(max(1, array.nbytes), dtype=torch.uint8, pin_memory=is_there).numpy()
        made[name] = room[: array.nbytes].view(array.dtype).reshape(array.shape)
    return made


def batches(
    source: Source,
    batch_size: int | Mapping[str, int],
    timeout: float = 30.0,
    *,
    device: torch.device | str | None = None,
    ahead: int = 1,
) -> Iterator[TorchBatch]:
    """Batches of a server, reader or client as tensors, until the run is over.

    Args:
        source: Who draws.
        batch_size, timeout: As its `batches` takes them; of a batch mixed of several tables the joined rows come.
        device: Where to; None is the CPU, without a copy.
        ahead: Batches that are on their way to the device while the learner works on one. At least 0. Their
            priorities are those of the moment of the draw.

    Raises:
        MemoireTimeout: not enough samples came in time.
    """
    if type(ahead) is not int or ahead < 0:
        raise ParameterError("ahead", ahead, "a whole number of at least 0")
    place = device_of(device)
    drawn = (batch.joined if isinstance(batch, MixedBatch) else batch for batch in source.batches(batch_size, timeout))
    if place.type != "cuda":
        return (TorchBatch(batch, place) for batch in drawn)
    return _prefetched(drawn, place, ahead)


def _prefetched(drawn: Iterator[Batch], place: torch.device, ahead: int) -> Iterator[TorchBatch]:
    """Copies go on a stream of their own; the learner's waits for the one batch that it gets."""
    stream = torch.cuda.Stream(place)
    waiting: deque[tuple[TorchBatch, torch.cuda.Event]] = deque()
    for batch in drawn:
        with torch.cuda.stream(stream):
            moved = TorchBatch(batch, place)
            waiting.append((moved, stream.record_event()))
        if len(waiting) > ahead:
            yield _ready(*waiting.popleft())
    while waiting:
        yield _ready(*waiting.popleft())


def _ready(batch: TorchBatch, copied: torch.cuda.Event) -> TorchBatch:
    current = torch.cuda.current_stream(batch.device)
    current.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(current)  # or its memory could be given to the next copy too early
    return batch


# Networks

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by what bodies call them."""
NAMES = {dtype: name for name, dtype in TYPES.items()}


class Publisher(Protocol):
    """Whatever publishes models: a `Server` or a `Reader`."""

    def publish(self, topic: str, content: bytes, /) -> int:
        """Returns the version."""
        ...


def publish(
    where: Publisher,
    topic: str,
    net: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """Publish a network's parameters and buffers as the newest model of a topic; returns its version.

    Tensors are copied from wherever they are, so that training may go on at once. The wrappers of `torch.compile` and
    DistributedDataParallel are looked through.

    Args:
        where: A `Server`, or a `Reader` of several.
        net: A module, or a state_dict.
        dtype: What floating-point tensors are sent as, such as torch.bfloat16 for half of the bytes; None keeps them.

    Raises:
        WrongType, ParameterError: something in it is no tensor, or one that has no place in a body.
    """
    return where.publish(topic, body_of(net, dtype))


def load(model: Model | bytes, net: torch.nn.Module | dict[str, torch.Tensor], *, cast: bool = False) -> int:
    """Put a published model's tensors into a network, on whatever device each of them is; returns its version.

    All or nothing: names, shapes and dtypes are compared before anything is changed.

    Args:
        model: What `client.model(topic)` gave: `newest()` or `wait()`. Or the body alone, whose version is 0.
        net: A module of the same form, or the state_dict of one.
        cast: Whether floating-point tensors may have another width, as those that were sent as torch.bfloat16.

    Raises:
        WrongModel: the body is damaged, or holds no tensors, or others than the network has.
    """
    plain = _unwrapped(net)
    state = plain.state_dict() if isinstance(plain, torch.nn.Module) else plain
    what = _called(model)
    found = bodies.unpack(_body(model), what)
    bodies.check_fit(what, found, {name: _form(name, tensor) for name, tensor in state.items()}, free_dtypes=cast)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(_tensor(found[name]))
    return model.version if isinstance(model, Model) else 0


def tensors(model: Model | bytes) -> dict[str, torch.Tensor]:
    """The tensors of a published model, by name, on the CPU: for a network that is made after them.

    Raises:
        WrongModel: the body is damaged, or holds no tensors.
    """
    return {name: _tensor(array) for name, array in bodies.unpack(_body(model), _called(model)).items()}


def body_of(net: torch.nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> bytes:
    """What `publish` publishes: for a file, or a channel of your own."""
    if dtype is not None and (dtype not in NAMES or not dtype.is_floating_point):
        raise ParameterError("dtype", str(dtype), "a floating-point dtype, such as torch.bfloat16")
    plain = _unwrapped(net)
    state = plain.state_dict() if isinstance(plain, torch.nn.Module) else plain
    if not isinstance(state, Mapping):
        raise WrongType("net", "a torch.nn.Module or a state_dict", f"{type(net).__name__}")
    return bodies.pack({name: _array(name, tensor, dtype) for name, tensor in state.items()})


def _unwrapped(net: Any) -> Any:
    net = getattr(net, "_orig_mod", net)  # torch.compile
    return net.module if isinstance(net, torch.nn.parallel.DistributedDataParallel) else net


def _called(model: Any) -> str:
    return f"model {model.topic!r} version {model.version}" if isinstance(model, Model) else "this model"


def _body(model: Any) -> bytes:
    if isinstance(model, Model):
        return model.body
    if not isinstance(model, bytes | bytearray | memoryview):
        expected = "what client.model(topic).newest() or .wait() gave, or its body"
        raise WrongType("model", expected, type(model).__name__)
    return bytes(model)


def _form(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a tensor as bodies say them."""
    if not isinstance(tensor, torch.Tensor):
        raise WrongType(f"net[{name!r}]", "a tensor", type(tensor).__name__)
    if tensor.dtype not in NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
        expected = f"a dense tensor with values, of type {', '.join(NAMES.values())}"
        raise ParameterError(f"net[{name!r}]", f"{tensor.dtype}, {tensor.layout}, on {tensor.device}", expected)
    return NAMES[tensor.dtype], tuple(tensor.shape)


def _array(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> bodies.Array:
    _form(name, tensor)
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    row = tensor.detach().to("cpu", wanted).contiguous().reshape(-1)
    return bodies.Array(NAMES[wanted], tuple(tensor.shape), memoryview(row.view(torch.uint8).numpy()))


def _tensor(array: bodies.Array) -> torch.Tensor:
    if not array.data.nbytes:
        return torch.empty(array.shape, dtype=TYPES[array.dtype])
    return torch.from_numpy(np.array(array.data)).view(TYPES[array.dtype]).reshape(array.shape)
