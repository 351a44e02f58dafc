"""The calls of those who give prompts, and order them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from memoire import arguments
from memoire.arguments import finite, text, whole
from memoire.errors import ParameterError, WrongType
from memoire.suggestions import checked_names

from . import messages
from .rows import Key
from .servers import PromptRequest, keys_of
from .users import TableCalls, checked_dataset, checked_keys, checked_tags

Order = Literal["cancel", "prioritise", "finish", "forget", "shares", "model"]


class GiverCalls(TableCalls):
    """Adds prompts and changes their order."""

    @checked_names()
    def add(
        self,
        prompts: Mapping[int, Any] | Iterable[tuple[int, Any]],
        dataset: str = "",
        epoch: int = 0,
        *,
        priority: float = 0.0,
        evaluation: bool = False,
        tags: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Give prompts; returns how many are new. Those that are known change nothing.

        Args:
            prompts: Payload (bytes or str) of each, by its index in the data set.
            dataset, epoch: With the index, what names a prompt.
            priority: Prompts of a higher one are leased and drawn first.
            evaluation: They are answered, and never drawn: see `list` and `fetch`.
            tags: Words that listeners can select by.

        Raises:
            Refused: there is no room for them, also at the deadline (code "busy"); their epoch is finished ("value").
            MemoireTimeout: a server does not answer.
        """
        deadline = self._transport.now() + self._patience(timeout)
        given = _payloads(prompts)
        epoch, dataset = whole("epoch", epoch, 0, 2**32 - 1), checked_dataset(dataset)
        facts: dict[str, Any] = {
            "dataset": dataset, "epoch": epoch, "priority": finite("priority", priority), "is_evaluation": evaluation,
            "tags": checked_tags(tags),
        }  # fmt: skip
        new, chunk = 0, dict[int, bytes]()
        limit, size = self._transport.limits.request_bytes // 2, 0
        for index, payload in given.items():
            if len(payload) > limit:
                raise ParameterError("prompts", f"{len(payload)} bytes at {index}", f"at most {limit} bytes each")
            if chunk and (size + len(payload) > limit or len(chunk) >= 4096):
                new, chunk, size = new + self._add(chunk, facts, deadline), {}, 0
            chunk[index], size = payload, size + len(payload)
        return new + (self._add(chunk, facts, deadline) if chunk else 0)

    def _add(self, chunk: Mapping[int, bytes], facts: Mapping[str, Any], deadline: float) -> int:
        """Give some prompts to the servers that are to have them: those that no server knows."""
        dataset, epoch = facts["dataset"], facts["epoch"]
        keys = [(dataset, epoch, index) for index in chunk]
        unknown = set(chunk)
        self._servers.complete(deadline)
        if len(self._servers.names) > 1:
            told = self._servers.every(messages.Groups(call="known", keys=keys_of(keys)), deadline)
            for reply in told.values():
                unknown -= {index for index, is_known in zip(chunk, reply.body.flags, strict=True) if is_known}
        shares: dict[str, list[int]] = {}
        for index in chunk:
            if index in unknown:
                shares.setdefault(self._servers.home_of(f"{dataset}/{index}".encode()), []).append(index)
        requests = {}
        for name, mine in shares.items():
            new = [messages.NewPrompt(index, len(chunk[index])) for index in mine]
            data = b"".join(chunk[index] for index in mine)
            requests[name] = PromptRequest(messages.Groups(call="add", new=new, **facts), data)
        return sum(reply.body.done for reply in self._servers.all(requests, deadline).values())

    def cancel(self, keys: Iterable[Key], timeout: float | None = None) -> int:
        """Prompts are not wanted any more; returns how many are dropped by that. Those that are drawn go on."""
        return self._order("cancel", timeout, keys=checked_keys(keys))

    def prioritise(self, keys: Iterable[Key], priority: float, timeout: float | None = None) -> int:
        """Give prompts another priority; returns how many are known."""
        return self._order("prioritise", timeout, keys=checked_keys(keys), priority=finite("priority", priority))

    def finish(self, dataset: str = "", epoch: int = 0, timeout: float | None = None) -> None:
        """No more prompts of this epoch come: its last step may be shorter, and `groups` ends after it."""
        self._order("finish", timeout, dataset=checked_dataset(dataset), epoch=whole("epoch", epoch, 0))

    def forget(self, dataset: str = "", epoch: int = 0, timeout: float | None = None) -> int:
        """Let the prompts of an epoch leave, which must be committed or dropped; returns how many. They are counted on.

        Raises:
            Refused: some of them are not over yet; at servers where all are, they have left.
        """
        return self._order("forget", timeout, dataset=checked_dataset(dataset), epoch=whole("epoch", epoch, 0))

    def shares(self, shares: Mapping[str, float], timeout: float | None = None) -> None:
        """Lease and draw data sets in these shares from now on, such as {"math": 0.7, "code": 0.3}; {} by age alone."""
        given = {checked_dataset(name): float(share) for name, share in arguments.mapping("shares", shares).items()}
        if any(not 0.0 < share < float("inf") for share in given.values()):
            raise ParameterError("shares", shares, "numbers above 0")
        self._order("shares", timeout, shares=given)

    def saw_model(self, version: int, timeout: float | None = None) -> None:
        """There is a model of this version, from which `max_model_lag` counts: for those who publish it elsewhere."""
        self._order("model", timeout, version=arguments.model_version(version, "version"))

    def _order(self, call: Order, timeout: float | None, **facts: Any) -> int:
        deadline = self._transport.now() + self._patience(timeout)
        keys = facts.pop("keys", None)
        if keys is None:
            return sum(
                each.body.done for each in self._servers.every(messages.Groups(call=call, **facts), deadline).values()
            )
        done = 0
        for begin in range(0, len(keys), 4096):
            body = messages.Groups(call=call, keys=keys_of(keys[begin : begin + 4096]), **facts)
            done += sum(each.body.done for each in self._servers.every(body, deadline).values())
        return done


def _payloads(prompts: Any) -> dict[int, bytes]:
    try:
        given = dict(prompts)
    except (TypeError, ValueError):
        expected = "a mapping from index to payload, or pairs of them"
        raise WrongType("prompts", expected, type(prompts).__name__) from None
    found = {}
    for index, payload in given.items():
        if not isinstance(payload, str | bytes | bytearray | memoryview):
            raise WrongType(f"prompts[{index!r}]", "bytes or str", type(payload).__name__)
        if isinstance(payload, str):
            payload = text(f"prompts[{index!r}]", payload).encode()
        found[whole("index", index, 0)] = bytes(payload)
    return found
