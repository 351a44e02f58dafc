"""The name that was meant: for an argument, setting, column or table that is called like none there is.

A name is compared with those that are known by its spelling, and with what other libraries and papers call the same.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from .errors import NoSuchField, UnknownName

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_SUGGESTIONS = 2
ALIKE = 0.6
"""Share of characters from which on two names are alike."""
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "act": ("action",),
    "add_batch_size": ("num_envs",),
    "address": ("url", "endpoint"),
    "alpha": ("exponent", "sampler"),
    "beta": ("importance_exponent", "sampler"),
    "bootstrap": ("bootstrap_value",),
    "buffer_num": ("num_envs",),
    "buffer_size": ("capacity", "client_capacity"),
    "cache_size": ("parameters",),
    "discount_factor": ("discount",),
    "done": ("terminated", "discount"),
    "dones": ("terminated", "discount"),
    "endpoint": ("url", "front"),
    "env_dict": ("schema",),
    "eps": ("priority_epsilon",),
    "epsilon": ("priority_epsilon",),
    "error_buffer": ("samples_per_insert_tolerance",),
    "gae_lambda": ("mix_lambda",),
    "gamma": ("discount", "discount_factor"),
    "host": ("url", "endpoint"),
    "idxes": ("ids",),
    "importance_exponent": ("beta", "sampler"),
    "index": ("ids",),
    "indexes": ("ids",),
    "indices": ("ids",),
    "keys": ("ids",),
    "lam": ("mix_lambda",),
    "lambda_": ("mix_lambda",),
    "learning_starts": ("min_size",),
    "lmbda": ("mix_lambda",),
    "max_length": ("capacity",),
    "max_size": ("capacity", "client_capacity"),
    "max_step": ("client_capacity", "capacity"),
    "min_length": ("min_size",),
    "min_size_to_sample": ("min_size",),
    "n": ("batch_size",),
    "n_envs": ("num_envs",),
    "next_observation": ("next_obs", "next_state"),
    "next_observations": ("next_obs", "next_state"),
    "n_step": ("multi_step",),
    "n_steps": ("multi_step",),
    "nstep": ("multi_step",),
    "num_samples": ("batch_size",),
    "num_stack": ("frame_stack",),
    "observation": ("obs", "state"),
    "observations": ("obs", "state"),
    "port": ("endpoint", "url"),
    "prefetch": ("ahead",),
    "prefetch_size": ("ahead",),
    "priorities": ("td_errors",),
    "priority": ("td_errors",),
    "priority_exponent": ("exponent", "sampler"),
    "replay_burn_in": ("burn_in",),
    "replay_sequence_length": ("sequence_length",),
    "reuse_cache": ("parameters",),
    "rew": ("reward",),
    "sample_batch_size": ("batch_size",),
    "sample_sequence_length": ("sequence_length",),
    "samples_per_insert": ("parameters",),
    "seq_len": ("sequence_length",),
    "sequence_len": ("sequence_length",),
    "server_address": ("url",),
    "signature": ("schema",),
    "size": ("capacity", "batch_size"),
    "slice_len": ("sequence_length",),
    "stack_num": ("frame_stack",),
    "states": ("obs", "state"),
    "td_error": ("td_errors",),
    "terminal": ("terminated", "discount"),
    "total_size": ("capacity",),
    "training_intensity": ("samples_per_insert",),
    "weight": ("importance",),
    "weight_norm": ("normalize",),
    "weights": ("importance",),
}
"""What others call it: the name here, the likeliest first."""

_ALWAYS = "That is always on: each observation is stored once, also the last one of an episode."
_DRAW = "Give it to each draw: sample(batch_size) of a buffer, get_batch(batch_size) of a server."
_RATE = "Write samples_per_insert=, samples_per_insert_tolerance= and min_size= (docs/rate.md)."
_TORCH = "Write batch.to(device) for tensors, or memoire.torch.batches(source, batch_size, device=...)."
INSTEAD: dict[str, tuple[str, str]] = {
    "alpha": ("sampler", "Write sampler=memoire.Prioritized(alpha)."),
    "batch_size": ("schema", _DRAW),
    "beta": ("sampler", "Write sampler=memoire.Prioritized(0.6, beta=...)."),
    "device": ("schema", _TORCH),
    "handle_timeout_termination": ("schema", _ALWAYS),
    "mmap_prefix": ("capacity", "Write buffer.save(path), and later Buffer.load(path)."),
    "next_of": ("schema", _ALWAYS),
    "optimize_memory_usage": ("schema", _ALWAYS),
    "pin_memory": ("schema", _TORCH),
    "rate_limiter": ("schema", _RATE),
    "remover": ("schema", "There is no choice: the oldest entries leave."),
    "save_only_last_obs": ("schema", _ALWAYS),
    "stack_compress": ("schema", _ALWAYS),
}
"""What others call it: a parameter that whatever takes the advice has, and what to write instead."""
_INSTEAD_OF_DRAWS = {
    "alpha": "The sampler has it: configure(sampler=memoire.Prioritized(alpha)).",
    "beta": "The sampler has it: memoire.Prioritized(0.6, beta=...), and memoire.Linear where it grows.",
    "gamma": "The memory has it: give it as discount=, or change it with configure(discount=...).",
    "multi_step": "The memory has it: change it with configure(multi_step=...).",
    "n_step": "The memory has it: change it with configure(multi_step=...).",
}
"""The same for a draw, which is given a batch_size."""


def meant(name: object, known: Iterable[str]) -> tuple[str, ...]:
    """Those of the known names that somebody who wrote this one may have meant, the likeliest first."""
    if not isinstance(name, str):
        return ()
    names = list(known)
    usual = [each for each in ELSEWHERE.get(name.lower(), ()) if each in names][:1]
    by_lower = {each.lower(): each for each in names}
    alike = difflib.get_close_matches(name.lower(), by_lower, MAX_SUGGESTIONS, ALIKE)
    return tuple(dict.fromkeys([*usual, *(by_lower[each] for each in alike)]))[:MAX_SUGGESTIONS]


def instead(name: str, known: Collection[str]) -> str:
    """What to write in place of an argument that there is none of here; "" where a name says it, or nobody can tell."""
    if "batch_size" in known and name in _INSTEAD_OF_DRAWS:
        return _INSTEAD_OF_DRAWS[name]
    if list(known) == ["columns"]:
        return f"Give a mapping: Schema({{{name!r}: ...}})."
    needs, advice = INSTEAD.get(name.lower(), ("", ""))
    return advice if needs in known else ""


def hint(name: object, known: Iterable[str]) -> str:
    """What to put behind a list of allowed names: which one was meant; "" where nobody can tell."""
    found = meant(name, known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def one_of(name: object, known: Iterable[str]) -> str:
    """What a name had to be: "one of 'skip', 'block' (did you mean 'skip'?)"."""
    names = list(known)
    return f"one of {', '.join(map(repr, names))}{hint(name, names)}"


def refuse_unknown(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise UnknownName for the first given name that is not known to `what`; nothing where all are."""
    names = tuple(sorted(known))
    for name in given:
        if name not in names:
            raise UnknownName(what, name, meant(name, names), names, instead(name, names))


def no_field(what: str, name: object, known: Iterable[str]) -> NoSuchField:
    """What to raise where `what` has nothing of this name."""
    names = tuple(known)
    return NoSuchField(what, repr(name)[:80], meant(name, names), names)


def checked_names(also: Collection[str] = (), called: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function refuse an argument by a name that it does not have, and say which one was meant.

    Args:
        also: Names that it takes beside those in its signature.
        called: What the error calls it; by default its own name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = frozenset(each.name for each in signature.parameters.values() if each.kind in usual) - {"self", "cls"}
        known |= frozenset(also)
        what = called or function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            if options and not options.keys() <= known:
                refuse_unknown(what, options, known)
            return function(*arguments, **options)

        return call

    return decorate


def checked_fields(kind: type[T]) -> type[T]:
    """The same for a dataclass."""
    setattr(kind, "__init__", checked_names(called=kind.__name__)(kind.__init__))  # noqa: B010  (not a plain method)
    return kind
