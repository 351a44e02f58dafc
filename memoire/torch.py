"""Batches as torch tensors: without a copy on the CPU, prefetched onto a GPU. `pip install 'memoire-rl[torch]'`.

for batch in memoire.torch.batches(server, 256, device="cuda"):
td_errors = ...                       # of batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs
(batch.importance * td_errors**2).mean().backward()
batch.update_priorities(td_errors)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from memoire.replay.batch import Batch
from memoire.replay.mixing import MixedBatch

from .errors import ParameterError
from .suggestions import no_field


class Source(Protocol):
    """Whatever draws batches until a run is over: a `Server`, a `Reader`, a client."""

    def batches(self, batch_size: Any, timeout: float = ..., /) -> Iterator[Any]:
        """One batch after the other."""
        ...


class TorchBatch(Mapping[str, torch.Tensor]):
    """A batch whose arrays are tensors, under the same names; also as attributes, nested as a `Batch` nests them.

    On the CPU tensors share their memory with the batch's arrays. ids stay as they are: `batch.ids`.
    """

    def __init__(self, batch: Batch, device: torch.device | str | None = None) -> None:
        self.source = batch
        """The batch as it was drawn."""
        self.device = torch.device("cpu" if device is None else device)
        self._tensors = {name: self._moved(array) for name, array in batch.items() if name != "ids"}

    def _moved(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = as_tensor(array)
        if self.device.type == "cpu":
            return tensor
        if self.device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # from there the copy goes on beside everything else
        return tensor.to(self.device, non_blocking=True)

    @property
    def ids(self) -> NDArray[Any]:
        """[B] which entries these are: an array, as the batch has it."""
        ids: NDArray[Any] = self.source.ids
        return ids

    def update_priorities(self, td_errors: torch.Tensor | NDArray[Any]) -> Any:
        """Tell the memory how surprising these samples were: [B], or [B, T] of sequences, on any device."""
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().to("cpu", torch.float32).numpy()
        return self.source.update_priorities(td_errors)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._tensors[name]
        except KeyError:
            return _mapped(self.source[name], self._nested(name))

    def _nested(self, name: str) -> Callable[[NDArray[Any]], torch.Tensor]:
        if name == "ids":
            raise no_field("this batch of tensors", name, self._tensors)
        found = {id(array): self._tensors[key] for key, array in self.source.items() if key != "ids"}
        return lambda array: found[id(array)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """How many tensors there are; the number of samples is `len(batch.ids)`."""
        return len(self._tensors)

    def __repr__(self) -> str:
        rows = (f"{name}: {str(each.dtype)[6:]}{list(each.shape)}" for name, each in self.items())
        return f"TorchBatch({', '.join(rows)}, device={self.device})"


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
    place = torch.device("cpu" if device is None else device)
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
