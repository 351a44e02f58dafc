"""What a server finds again of its former life: the run, models, and parameters unless others are given now. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from memoire.accounting.runs import SavedState
from memoire.errors import ParameterError, SnapshotMismatch
from memoire.pool.tables import OpenTable
from memoire.replay.parameters import Parameters

from .durability import Committer
from .state import ServerState

DEFAULT_RUN = "default"
"""Name of the run of a server that was never given one."""


_LIVES: Final = "lives"


def lives_of(past: SavedState) -> int:
    """Return the number of former starts of a server in this folder."""
    lives = past.settings().get(_LIVES, "0")
    return int(lives) if lives.isdecimal() else 0


class _FormerStart(msgspec.Struct, frozen=True):
    """What a former life was given, and with what it ended."""

    given: dict[str, Any]
    now: dict[str, Any]
    version: int
    making: dict[str, Any] = {}
    """Settings beside the parameters: `OpenTable.making`."""


def run_to_count(past: SavedState | None, given: str | None, committer: Committer) -> str:
    """The run that was counted last, unless another one is given now than was given then."""
    if past is None:
        return DEFAULT_RUN if given is None else given
    counted = next((facts.name for facts in past.runs() if not facts.ended), None)
    if given is None:
        return counted or DEFAULT_RUN
    if counted is not None and past.settings().get("run") == given:
        return counted
    committer.add_setting("run", given)
    return given


def recover(state: ServerState, past: SavedState) -> None:
    """Take over models and parameters of the former life; what is new in this one is to be saved.

    Raises:
        ParameterError: what was saved for a table are no parameters, or none that fit it.
    """
    for model in past.models(state.run.name):
        state.models.put(model)
    state.models.go_on_from(past.versions())  # clients may hold a model of another run: versions never go back
    settings = past.settings()
    state.committer.add_setting(_LIVES, str(lives_of(past) + 1))
    for table in state.tables:
        _recover_parameters(table, settings.get(table.key))
        save_parameters(table, state.committer)
    state.report_models()
    for facts in state.runs.facts():
        state.committer.add_run(facts)


def _recover_parameters(table: OpenTable, saved: str | None) -> None:
    given = table.settings.parameters.to_wire()
    chosen = _FormerStart(given, given, 1) if saved is None else _chosen(table.key, saved)
    former = [Parameters.from_wire(fields) for fields in (chosen.given, chosen.now)]  # refuses unknown settings
    if former[0] == table.settings.parameters:
        table.take_parameters(former[1], chosen.version)
    else:
        table.take_parameters(table.parameters, chosen.version + 1)


def save_parameters(table: OpenTable, committer: Committer) -> None:
    """Have a table's parameters saved as they are now, beside those that it was given."""
    if committer.is_durable:
        given = table.settings.parameters.to_wire()
        chosen = _FormerStart(given, table.parameters.to_wire(), table.parameters_version, table.making)
        committer.add_setting(table.key, msgspec.json.encode(chosen).decode())


def check_making(table: OpenTable, past: SavedState, folder: str) -> None:
    """Refuse what a table holds again, if that was made with other settings than the table has.

    Raises:
        SnapshotMismatch: names both values.
    """
    saved = past.settings().get(table.key)
    making = {} if saved is None else _chosen(table.key, saved).making
    for name, made in making.items():
        if made != (mine := table.making.get(name)):
            problem = f"holds table {table.name!r} of {name}={made!r}, where this server has {name}={mine!r}"
            advice = f"Start it with {name}={made!r}, or give the server another state folder."
            raise SnapshotMismatch(folder, problem, advice)


def _chosen(key: str, saved: str) -> _FormerStart:
    try:
        return msgspec.json.decode(saved, type=_FormerStart)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ParameterError(key, saved[:80], f"what a server saves of a table: {error}") from error
