"""How samples are made small before they travel, and whole again at the trainer: both ways in one object.

    codec = Codec(shrink, grow)                                          # functions of (act, obs, rew, done, info)
    codec = Codec({"obs[0]": zlib_pack}, {"obs[0]": zlib_unpack})        # or of single leaves
    codec = Codec(history=ActionHistory(4))                              # no last actions in observations

Both ends have the same object: its name and digest travel, and a trainer refuses samples of another one. So does the
digest of an `obs_preprocessor`, which both ends call, too.

Nested values are taken apart into leaves with paths, and put together again:

    {"image": a, "pose": (b, c)}     leaves a, b, c    paths ['image'], ['pose'][0], ['pose'][1]
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import logging
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from memoire.building import one_of, whole
from memoire.errors import CodecMismatch, ParameterError, WrongType

_log = logging.getLogger(__name__)

When = Literal["append", "sample"]
MARK: Final = "codec"
"""Key in `info` of a reset's sample: [name, digest] of the codec that its worker has."""
WHENS: Final = ("append", "sample")
"""Restore when samples come, which is fast to draw; or when they are drawn, which needs less memory."""
Five = tuple[Any, Any, Any, Any, Any]
_LAYOUT: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


LEAF: Final = None
"""How a leaf stands in a structure."""
Structure = Any
"""Nested tuples that can be compared: LEAF, or (kind, names or None, parts)."""


def structure_of(value: Any) -> Structure:
    """How a value is nested, in tuples, lists and dictionaries."""
    if type(value) is tuple or type(value) is list:
        return type(value).__name__, None, tuple([structure_of(part) for part in value])
    if isinstance(value, dict):
        return "dict", tuple(value), tuple([structure_of(part) for part in value.values()])
    return LEAF


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a value, in order."""
    if type(value) is tuple or type(value) is list:
        return [leaf for part in value for leaf in leaves_of(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    return [value]


def paths_of(structure: Structure, root: str = "") -> list[str]:
    """The path of each leaf, in order: "['image']", "['pose'][0]"."""
    if structure is LEAF:
        return [root]
    _, names, parts = structure
    each = zip(range(len(parts)) if names is None else names, parts, strict=True)
    return [path for name, part in each for path in paths_of(part, f"{root}[{name!r}]")]


def assembled(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The value with these leaves."""
    rest = iter(leaves)
    if structure is LEAF:
        return next(rest)
    kind, names, parts = structure
    made = [assembled(part, rest) for part in parts]
    if kind == "dict":
        return dict(zip(names, made, strict=True))
    return tuple(made) if kind == "tuple" else made


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with a function's results in place of its leaves."""
    return assembled(structure_of(value), map(function, leaves_of(value)))


def copied(value: Any) -> Any:
    """The value with arrays of its own."""
    return mapped(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


@dataclass(frozen=True)
class ActionHistory:
    """The last actions at the end of an observation: left out on the way, and rebuilt of the actions of samples.

    Args:
        length: Actions; the newest one is that which led to the observation.
        start: What the first observations of an episode have. "repeat": the action of the reset, for environments
            that fill their buffer anew. "skip": actions of the episode before, so that the first `length` steps of
            an episode are not drawn.
    """

    length: int
    start: Literal["repeat", "skip"] = "repeat"

    def __post_init__(self) -> None:
        whole("length", self.length, 1)
        if self.start not in ("repeat", "skip"):
            raise ParameterError("start", self.start, one_of(self.start, ("repeat", "skip")))

    def left_out(self, obs: Any) -> Any:
        """An observation without its last actions."""
        if not isinstance(obs, tuple | list) or len(obs) < self.length:
            raise WrongType("obs", f"a tuple with {self.length} actions at its end", type(obs).__name__)
        return obs[: len(obs) - self.length]


class Codec:
    """A compressor and its inverse. Calling it compresses, so that it can be a worker's `sample_compressor`.

    Args:
        compress: Called as f(act, obs, rew, done, info); gives the five parts that travel. Or functions of one leaf by
            its path: "act", "obs" where that is an array, "obs[2]", "obs['image']".
        decompress: The inverse, in the same form.
        when: When a trainer decompresses: "append" or "sample"; or one of them by path, for functions of leaves.
        history: Actions that are left out of observations.
        name: What errors call it; by default the names of its functions.

    Raises:
        ParameterError: one of the two is missing, or they are for other leaves.
    """

    def __init__(
        self,
        compress: Callable[..., Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        decompress: Callable[..., Any] | Mapping[str, Callable[[Any], Any]] | None = None,
        *,
        when: When | Mapping[str, When] = "sample",
        history: ActionHistory | None = None,
        name: str = "",
    ) -> None:
        _check_pair(compress, decompress)
        self._compress, self._decompress, self.history = compress, decompress, history
        self._when = when
        functions = _functions(compress) + _functions(decompress)
        self.name = (
            name or "+".join(dict.fromkeys(_name_of(each) for each in functions)) or ("history" if history else "none")
        )
        """What errors call it."""
        self.digest = digest_of(*functions, facts=repr((sorted(self.leaves), history)))
        """Of the source code of its functions. Comments and layout do not count."""
        for path in self.leaves or ("",):
            if self.when(path) not in WHENS:
                raise ParameterError("when", self.when(path), one_of(self.when(path), WHENS))

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the leaves that it changes; () if it changes samples as a whole, or nothing."""
        return tuple(self._compress) if isinstance(self._compress, Mapping) else ()

    def when(self, path: str = "") -> Any:
        """When a leaf is decompressed: "append" or "sample"."""
        return self._when if isinstance(self._when, str) else self._when.get(path, "sample")

    def __call__(self, act: Any, obs: Any, rew: Any, done: Any, info: Any) -> Five:
        """The five parts as they travel."""
        if self.history is not None:
            obs = self.history.left_out(obs)
        if callable(self._compress):
            made = self._compress(act, obs, rew, done, info)
            if not isinstance(made, tuple) or len(made) != 5:
                raise WrongType(f"{self.name}'s result", "a tuple (act, obs, rew, done, info)", type(made).__name__)
            return made
        if self._compress is None:
            return act, obs, rew, done, info
        return _mapped(self._compress, act), _mapped(self._compress, obs, "obs"), rew, done, info

    def restored(self, sample: Five, when: When) -> Five:
        """The five parts with everything decompressed that is to be so at this time; actions are not added."""
        act, obs, rew, done, info = sample
        if callable(self._decompress):
            return self._decompress(*sample) if self.when() == when else sample
        functions = self.functions(when)
        return (_mapped(functions, act), _mapped(functions, obs, "obs"), rew, done, info) if functions else sample

    def functions(self, when: When) -> dict[str, Callable[[Any], Any]]:
        """The inverse functions of leaves that are applied at this time, by path."""
        found = self._decompress if isinstance(self._decompress, Mapping) else {}
        return {path: function for path, function in found.items() if self.when(path) == when}

    @property
    def restores_whole_samples(self) -> bool:
        """Whether drawing calls a function for each sample."""
        return callable(self._decompress) and self.when() == "sample"

    def marked(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """`info` of a reset's sample with what `check_mark` looks for."""
        return {**info, MARK: [self.name, self.digest]}

    def check_mark(self, info: Mapping[str, Any], sender: str, *, is_reset: bool = False) -> None:
        """Refuse samples of a worker with another codec, or none: a reset's sample tells. Raises CodecMismatch."""
        if MARK in info:
            name, digest = info[MARK]
            self.check(name, digest, sender)
        elif is_reset and self.digest != NONE.digest:
            raise CodecMismatch(sender, "none, as its sample_compressor is no Codec,", f"{self.name} ({self.digest})")

    def check(self, name: str, digest: str, sender: str) -> None:
        """Refuse samples that another codec made.

        Args:
            name, digest: Of the sender's codec.
            sender: What the error calls it.

        Raises:
            CodecMismatch: they are not this one's.
        """
        if name != self.name or (digest != self.digest and _are_comparable(digest, self.digest)):
            raise CodecMismatch(sender, f"{name} ({digest})", f"{self.name} ({self.digest})")


def digest_of(*functions: Callable[..., Any], facts: str = "") -> str:
    """A digest of functions: of their source, or of their byte code if there is none. A changed comment is no change.

    Digests of source begin with "source:". Others begin with "code" and Python's version: only the same version
    makes the same byte code.
    """
    sources = [_tokens(each) for each in functions]
    kind = "source" if all(source is not None for source in sources) else "code-{}.{}".format(*sys.version_info)
    parts = [source if source is not None else _code(each) for source, each in zip(sources, functions, strict=True)]
    return f"{kind}:{hashlib.sha256(repr((parts, facts)).encode()).hexdigest()[:16]}"


def _tokens(function: Callable[..., Any]) -> str | None:
    """Name and source of a function, word by word; None if the source is not there."""
    if isinstance(function, functools.partial):
        inner = _tokens(function.func)
        return None if inner is None else f"{inner} {function.args} {sorted(function.keywords.items())}"
    shown: Any = function if hasattr(function, "__code__") or inspect.isclass(function) else type(function)
    try:
        source = textwrap.dedent(inspect.getsource(shown))
        words = [
            each.string for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type not in _LAYOUT
        ]
    except (OSError, TypeError, tokenize.TokenError, SyntaxError):
        return None
    return " ".join([_name_of(function), *words])


def _code(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return (
        _name_of(function) if code is None else repr((_name_of(function), code.co_code, code.co_names, code.co_consts))
    )


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _functions(given: Any) -> list[Callable[..., Any]]:
    if given is None:
        return []
    return [given[path] for path in sorted(given)] if isinstance(given, Mapping) else [given]


def _check_pair(compress: Any, decompress: Any) -> None:
    """Refuse a compressor without its inverse."""
    for name, each in (("compress", compress), ("decompress", decompress)):
        if each is not None and not isinstance(each, Mapping) and not callable(each):
            raise WrongType(name, "a function, or functions by path", type(each).__name__)
    if isinstance(compress, Mapping) and isinstance(decompress, Mapping) and compress.keys() == decompress.keys():
        return
    if isinstance(compress, Mapping) or isinstance(decompress, Mapping) or (compress is None) != (decompress is None):
        given = (_described(compress), _described(decompress))
        raise ParameterError("compress and decompress", given, "two functions, or functions of the same leaves")


def _described(given: Any) -> str:
    return "None" if given is None else ", ".join(sorted(given)) if isinstance(given, Mapping) else _name_of(given)


def _mapped(functions: Mapping[str, Callable[[Any], Any]], value: Any, root: str = "act") -> Any:
    """The value with functions applied to some of its leaves."""
    if root in functions:
        return functions[root](value)
    structure = structure_of(value)
    paths, leaves = paths_of(structure, root), leaves_of(value)
    unknown = [path for path in functions if path.startswith(root) and path not in paths]
    if unknown:
        raise ParameterError("compress", unknown[0], f"functions of {one_of(unknown[0], paths)}")
    made = [functions[path](leaf) if path in functions else leaf for path, leaf in zip(paths, leaves, strict=True)]
    return assembled(structure, made)


NONE: Final = Codec()
"""Changes nothing: a worker without a codec sends the same."""


PREPROCESSOR: Final = "__memoire_obs_preprocessor"
"""Key in `info` of a reset's sample: digest of the function that its worker calls; without one there is none."""


def digest(function: Callable[..., Any] | None) -> str:
    """Of a function; "" of none."""
    return "" if function is None else digest_of(function)


class PreprocessorCheck:
    """Compares a memory's function with those of workers.

    Args:
        function: The memory's; None is none.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._digest = digest(function)
        self.has_warned = False

    def look(self, infos: Sequence[Mapping[str, Any]], starts: Sequence[bool]) -> None:
        """Look at samples that come. Warns once of functions that cannot be compared.

        Args:
            starts: For each, whether a reset gave it.

        Raises:
            ParameterError: a worker has another function, or only one of both has one.
        """
        for info, is_reset in zip(infos, starts, strict=True):
            told = info.get(PREPROCESSOR, "")
            if not is_reset or told == self._digest:
                continue
            if _are_comparable(told, self._digest):
                expected = f"{told or 'None'}, as a worker has it: give both the same function"
                raise ParameterError("obs_preprocessor", self._digest or None, expected)
            if not self.has_warned:
                self.has_warned = True
                _log.warning("cannot compare a worker's obs_preprocessor %s with %s here", told, self._digest)


def _are_comparable(one: str, other: str) -> bool:
    """Whether digests are of the same kind: of source, of one Python's byte code, or there is none."""
    return not one or not other or one.partition(":")[0] == other.partition(":")[0]
