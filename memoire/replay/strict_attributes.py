"""Attributes that nobody reads are refused: whoever sets one means a setting, which is changed in another way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from memoire import _core
from memoire.errors import NotCopied, NotSettable
from memoire.suggestions import meant

from .parameters import Parameters


class StrictAttributes(_core.Guarded):
    """Takes no public attributes but its own, once its constructor has called `_guard`.

    Attributes whose names begin with "_" are not looked at.
    """

    _PARAMETERS: ClassVar[str] = ""
    """How parameters of sampling are changed, where `configure` is not the way: a sentence."""
    _COPY: ClassVar[str] = ""
    """What to do in place of copying or pickling one, where that is not possible: a sentence."""
    _is_guarded = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._COPY:
            raise NotCopied(type(self).__name__, self._COPY)
        return super().__reduce_ex__(protocol)

    def _guard(self) -> None:
        """From now on unknown attributes are refused, but those of a user's own subclass."""
        self._is_guarded = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def _check_public(self, name: str) -> None:
        known = getattr(type(self), name, None)
        is_taken = not self._is_guarded or known is not None or name in getattr(self, "__dict__", ())
        if not is_taken or (isinstance(known, property) and known.fset is None):
            raise NotSettable(type(self).__name__, name, advice(type(self), name))


def never_copied(kind: str, instead: str) -> Callable[[Any], Any]:
    """The `__reduce__` of a class that has reasons of its own."""

    def refuse(self: Any) -> Any:
        raise NotCopied(kind, instead)

    return refuse


def advice(kind: type[StrictAttributes], name: str) -> str:
    """What to write instead of setting an attribute."""
    ways = _ways(kind)
    if name in ways:
        return ways[name]
    found = meant(name, ways)
    return f"Did you mean {found[0]}? {ways[found[0]]}" if found else "There is no such setting."


def _ways(kind: type[StrictAttributes]) -> dict[str, str]:
    """How each setting of a class is changed."""
    made = {name: f"It is given when one is made: {kind.__name__}({name}=...)." for name in _named(kind)}
    has_configure = hasattr(kind, "configure")
    usual = "Write configure(NAME=...)." if has_configure else kind._PARAMETERS
    ways = made | ({name: usual.replace("NAME", name) for name in _named(Parameters)} if usual else {})
    for call in ("configure", "configure_limits"):
        found = _named(getattr(kind, call)) if hasattr(kind, call) else []
        ways |= {name: f"Write {call}({name}=...)." for name in found if name not in ("self", "timeout")}
    return ways


def _named(call: Any) -> list[str]:
    """Names of what a call may be given."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in inspect.signature(call).parameters.values() if each.kind in kinds]
