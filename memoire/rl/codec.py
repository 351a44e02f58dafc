"""Compression of samples at workers and decompression at the trainer: both functions in one `Codec`.

    codec = Codec(shrink, grow)                                          # functions of (act, obs, rew, done, info)
    codec = Codec({"obs[0]": zlib_pack}, {"obs[0]": zlib_unpack})        # or of single leaves
    codec = Codec(history=ActionHistory(4))                              # leaves out last actions in observations

Worker and trainer have the same codec: samples carry its name and digest, and a trainer rejects samples of another
codec. Samples also carry the digest of an `obs_preprocessor`, which worker and trainer both call.

Nested values are split into leaves with paths, and reassembled:

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
"""Key in `info` of a reset's sample: [name, digest] of its worker's codec."""
WHENS: Final = ("append", "sample")
"""Times of decompression: when samples arrive, so that draws are fast; or at draws, which needs less memory."""
Five = tuple[Any, Any, Any, Any, Any]
_LAYOUT: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)


LEAF: Final = None
"""Symbol of a leaf in a structure."""
Structure = Any
"""Nested tuples that can be compared: LEAF, or (kind, names or None, parts)."""


def structure_of(value: Any) -> Structure:
    """Return the nesting of tuples, lists and dictionaries in a value."""
    if type(value) is tuple or type(value) is list:
        return type(value).__name__, None, tuple([structure_of(part) for part in value])
    if isinstance(value, dict):
        return "dict", tuple(value), tuple([structure_of(part) for part in value.values()])
    return LEAF


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value, in order."""
    if type(value) is tuple or type(value) is list:
        return [leaf for part in value for leaf in leaves_of(part)]
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves_of(part)]
    return [value]


def paths_of(structure: Structure, root: str = "") -> list[str]:
    """Return the path of each leaf, in order: "['image']", "['pose'][0]"."""
    if structure is LEAF:
        return [root]
    _, names, parts = structure
    each = zip(range(len(parts)) if names is None else names, parts, strict=True)
    return [path for name, part in each for path in paths_of(part, f"{root}[{name!r}]")]


def assembled(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return the value with this structure and these leaves."""
    remaining = iter(leaves)
    if structure is LEAF:
        return next(remaining)
    kind, names, parts = structure
    values = [assembled(part, remaining) for part in parts]
    if kind == "dict":
        return dict(zip(names, values, strict=True))
    return tuple(values) if kind == "tuple" else values


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with a function applied to each leaf."""
    return assembled(structure_of(value), map(function, leaves_of(value)))


def copied(value: Any) -> Any:
    """Return the value with copies of its arrays."""
    return mapped(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, value)


@dataclass(frozen=True)
class ActionHistory:
    """Last actions at the end of an observation: a codec leaves them out, and a memory rebuilds them from samples.

    Args:
        length: Number of actions; the newest one led to the observation.
        start: Actions in the first observations of an episode. "repeat": the action of the reset, for environments
            that refill their buffer at a reset. "skip": actions of the former episode, so that the first `length`
            steps of an episode are not drawn.
    """

    length: int
    start: Literal["repeat", "skip"] = "repeat"

    def __post_init__(self) -> None:
        whole("length", self.length, 1)
        if self.start not in ("repeat", "skip"):
            raise ParameterError("start", self.start, one_of(self.start, ("repeat", "skip")))

    def without_last_actions(self, obs: Any) -> Any:
        """Return an observation without its last actions."""
        if not isinstance(obs, tuple | list) or len(obs) < self.length:
            raise WrongType("obs", f"a tuple with {self.length} actions at its end", type(obs).__name__)
        return obs[: len(obs) - self.length]


class Codec:
    """Compressor of samples and its inverse; callable, so that it can be a worker's `sample_compressor`.

    Args:
        compress: Function (act, obs, rew, done, info) -> the five parts to send. Or functions of single leaves by
            path: "act", "obs" if that is an array, "obs[2]", "obs['image']".
        decompress: Inverse of `compress`, in the same form.
        when: Time of decompression at the trainer: "append" or "sample", or one of these by path of a leaf.
        history: Actions that are left out of observations.
        name: Name in error messages; by default the names of its functions.

    Raises:
        ParameterError: `compress` or `decompress` is missing, or they have different leaves.
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
        """Name of the codec in error messages."""
        self.digest = digest_of(*functions, facts=repr((sorted(self.leaves), history)))
        """Digest of the functions' source code, without comments and layout."""
        for path in self.leaves or ("",):
            if self.decompression_time(path) not in WHENS:
                raise ParameterError(
                    "when", self.decompression_time(path), one_of(self.decompression_time(path), WHENS)
                )

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the compressed leaves; () if the codec changes whole samples, or nothing."""
        return tuple(self._compress) if isinstance(self._compress, Mapping) else ()

    def decompression_time(self, path: str = "") -> Any:
        """Return the time at which a leaf is decompressed: "append" or "sample"."""
        return self._when if isinstance(self._when, str) else self._when.get(path, "sample")

    def __call__(self, act: Any, obs: Any, rew: Any, done: Any, info: Any) -> Five:
        """Return the five parts of a sample as a worker sends them."""
        if self.history is not None:
            obs = self.history.without_last_actions(obs)
        if callable(self._compress):
            parts = self._compress(act, obs, rew, done, info)
            if not isinstance(parts, tuple) or len(parts) != 5:
                raise WrongType(f"{self.name}'s result", "a tuple (act, obs, rew, done, info)", type(parts).__name__)
            return parts
        if self._compress is None:
            return act, obs, rew, done, info
        return _mapped(self._compress, act), _mapped(self._compress, obs, "obs"), rew, done, info

    def restored(self, sample: Five, when: When) -> Five:
        """Return the five parts after the decompression that is due at time `when`; an action history is not added."""
        act, obs, rew, done, info = sample
        if callable(self._decompress):
            return self._decompress(*sample) if self.decompression_time() == when else sample
        functions = self.decompressors(when)
        return (_mapped(functions, act), _mapped(functions, obs, "obs"), rew, done, info) if functions else sample

    def decompressors(self, when: When) -> dict[str, Callable[[Any], Any]]:
        """Return the decompressing functions of leaves that are due at time `when`, by path."""
        functions = self._decompress if isinstance(self._decompress, Mapping) else {}
        return {path: function for path, function in functions.items() if self.decompression_time(path) == when}

    @property
    def restores_whole_samples(self) -> bool:
        """True if each draw calls a function for each sample."""
        return callable(self._decompress) and self.decompression_time() == "sample"

    def marked(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `info` of a reset's sample with the codec's name and digest, for `check_mark`."""
        return {**info, MARK: [self.name, self.digest]}

    def check_mark(self, info: Mapping[str, Any], sender: str, *, is_reset: bool = False) -> None:
        """Raise CodecMismatch if the mark of a reset's sample is missing, or belongs to another codec."""
        if MARK in info:
            name, digest = info[MARK]
            self.check(name, digest, sender)
        elif is_reset and self.digest != NONE.digest:
            raise CodecMismatch(sender, "None (its sample_compressor is not a Codec)", f"{self.name} ({self.digest})")

    def check(self, name: str, digest: str, sender: str) -> None:
        """Raise CodecMismatch if a sender's codec is not this codec.

        Args:
            sender: Name of the sender in the error message.

        Raises:
            CodecMismatch: name or digest differ.
        """
        if name != self.name or (digest != self.digest and _are_comparable(digest, self.digest)):
            raise CodecMismatch(sender, f"{name} ({digest})", f"{self.name} ({self.digest})")


def digest_of(*functions: Callable[..., Any], facts: str = "") -> str:
    """Return a digest of functions: of their source code without comments, or of their byte code if there is no source.

    Digests of source begin with "source:". Digests of byte code begin with "code" and Python's version, because each
    version makes different byte code.
    """
    sources = [_tokens(each) for each in functions]
    kind = "source" if all(source is not None for source in sources) else "code-{}.{}".format(*sys.version_info)
    parts = [source if source is not None else _code(each) for source, each in zip(sources, functions, strict=True)]
    return f"{kind}:{hashlib.sha256(repr((parts, facts)).encode()).hexdigest()[:16]}"


def _tokens(function: Callable[..., Any]) -> str | None:
    """Return name and source of a function as tokens joined by spaces; None without source code."""
    if isinstance(function, functools.partial):
        inner = _tokens(function.func)
        return None if inner is None else f"{inner} {function.args} {sorted(function.keywords.items())}"
    target: Any = function if hasattr(function, "__code__") or inspect.isclass(function) else type(function)
    try:
        source = textwrap.dedent(inspect.getsource(target))
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


def _functions(functions: Any) -> list[Callable[..., Any]]:
    if functions is None:
        return []
    return [functions[path] for path in sorted(functions)] if isinstance(functions, Mapping) else [functions]


def _check_pair(compress: Any, decompress: Any) -> None:
    for name, each in (("compress", compress), ("decompress", decompress)):
        if each is not None and not isinstance(each, Mapping) and not callable(each):
            raise WrongType(name, "a function, or functions by path", type(each).__name__)
    if isinstance(compress, Mapping) and isinstance(decompress, Mapping) and compress.keys() == decompress.keys():
        return
    if isinstance(compress, Mapping) or isinstance(decompress, Mapping) or (compress is None) != (decompress is None):
        value = (_describe(compress), _describe(decompress))
        raise ParameterError("compress and decompress", value, "two functions, or functions of the same leaves")


def _describe(functions: Any) -> str:
    if functions is None:
        return "None"
    return ", ".join(sorted(functions)) if isinstance(functions, Mapping) else _name_of(functions)


def _mapped(functions: Mapping[str, Callable[[Any], Any]], value: Any, root: str = "act") -> Any:
    """Return the value with functions applied to the leaves at their paths; raise ParameterError for unknown paths."""
    if root in functions:
        return functions[root](value)
    structure = structure_of(value)
    paths, leaves = paths_of(structure, root), leaves_of(value)
    unknown = [path for path in functions if path.startswith(root) and path not in paths]
    if unknown:
        raise ParameterError("compress", unknown[0], f"functions of {one_of(unknown[0], paths)}")
    values = [functions[path](leaf) if path in functions else leaf for path, leaf in zip(paths, leaves, strict=True)]
    return assembled(structure, values)


NONE: Final = Codec()
"""Codec that changes nothing: its samples equal those of a worker without a codec."""


PREPROCESSOR: Final = "__memoire_obs_preprocessor"
"""Key in `info` of a reset's sample: digest of its worker's obs_preprocessor; missing if the worker has none."""


def digest(function: Callable[..., Any] | None) -> str:
    """Return the digest of a function; "" for None."""
    return "" if function is None else digest_of(function)


class PreprocessorCheck:
    """Comparison of a memory's obs_preprocessor with those of workers.

    Args:
        function: The memory's obs_preprocessor, or None.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._digest = digest(function)
        self.has_warned = False

    def check_samples(self, infos: Sequence[Mapping[str, Any]], starts: Sequence[bool]) -> None:
        """Check arriving samples. Logs one warning if the digests cannot be compared.

        Args:
            starts: True for each sample of a reset.

        Raises:
            ParameterError: a worker has another function, or only the worker or only the memory has one.
        """
        for info, is_reset in zip(infos, starts, strict=True):
            received = info.get(PREPROCESSOR, "")
            if not is_reset or received == self._digest:
                continue
            if _are_comparable(received, self._digest):
                expected = f"{received or 'None'}, that of a worker (give the memory and workers the same function)"
                raise ParameterError("obs_preprocessor", self._digest or None, expected)
            if not self.has_warned:
                self.has_warned = True
                _log.warning("cannot compare a worker's obs_preprocessor %s with %s here", received, self._digest)


def _are_comparable(one: str, other: str) -> bool:
    return not one or not other or one.partition(":")[0] == other.partition(":")[0]
