"""Constants out of a file, read when they are used: nothing is made and nothing is asked at import.

    import memoire.tmrl.config.config_constants as cfg
    print(cfg.RUN_NAME, cfg.MODEL_PATH_WORKER)

A constant is looked up in this order; names are in `TABLE`:

1. what `use(RUN_NAME="drone-1")` said in this process, such as the flags of `python -m memoire.tmrl`
2. the environment: MEMOIRE_TMRL_RUN_NAME=drone-1
3. the file config/config.json in the folder that the variable MEMOIRE_TMRL names, else in ~/TmrlData
4. the default
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memoire.building import hint, refuse_unknown
from memoire.errors import DataError, ParameterError

PREFIX: Final = "MEMOIRE_TMRL_"
"""What variables of the environment begin with; the name of the constant follows."""
FOLDER_VARIABLE: Final = "MEMOIRE_TMRL"
LOCALHOST: Final = "127.0.0.1"


class Constant(NamedTuple):
    """A constant: by its kind and key in the file, or computed of others."""

    kind: type
    default: Any
    """A value, or a function of all constants."""
    key: str = ""
    """In the file; "" is the constant's own name."""


def _in_folder(folder: str) -> Callable[[Mapping[str, Any]], Path]:
    return lambda known: known["TMRL_FOLDER"] / folder


def _path(folder: str, suffix: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda known: str(known[folder] / (known["RUN_NAME"] + suffix))


def _server(is_local: str) -> Callable[[Mapping[str, Any]], str]:
    """The address of the server: this machine unless the file says where the server is."""

    def address(known: Mapping[str, Any]) -> str:
        config = known["TMRL_CONFIG"]
        return str(LOCALHOST if config.get(is_local, True) else config.get("PUBLIC_IP_SERVER", LOCALHOST))

    return address


TABLE: Final[dict[str, Constant]] = {
    "TMRL_FOLDER": Constant(Path, lambda known: Path.home() / "TmrlData"),
    "CONFIG_FILE": Constant(Path, lambda known: known["TMRL_FOLDER"] / "config" / "config.json"),
    "TMRL_CONFIG": Constant(dict, {}),
    "WEIGHTS_FOLDER": Constant(Path, _in_folder("weights")),
    "CHECKPOINTS_FOLDER": Constant(Path, _in_folder("checkpoints")),
    "DATASET_FOLDER": Constant(Path, _in_folder("dataset")),
    "RUN_NAME": Constant(str, "run"),
    "RESET_TRAINING": Constant(bool, False),
    "MODEL_PATH_WORKER": Constant(str, _path("WEIGHTS_FOLDER", ".pth")),
    "MODEL_PATH_SAVE_HISTORY": Constant(str, _path("WEIGHTS_FOLDER", "_")),
    "MODEL_PATH_TRAINER": Constant(str, _path("WEIGHTS_FOLDER", "_t.pth")),
    "CHECKPOINT_PATH": Constant(str, _path("CHECKPOINTS_FOLDER", "_t.cpt")),
    "MODEL_HISTORY": Constant(int, 0, "SAVE_MODEL_EVERY"),
    "SERVER_IP_FOR_WORKER": Constant(str, _server("LOCALHOST_WORKER")),
    "SERVER_IP_FOR_TRAINER": Constant(str, _server("LOCALHOST_TRAINER")),
    "PORT": Constant(int, 55555),
    "PORT_TRAINER": Constant(int, 55555),
    "PORT_ROLLOUT": Constant(int, lambda known: known["PORT_TRAINER"] + 1),
    "BUFFERS_MAXLEN": Constant(int, 500_000),
    "RW_MAX_SAMPLES_PER_EPISODE": Constant(float, math.inf),
    "CRC_DEBUG": Constant(int, 0),
    "DEBUG_MODE": Constant(bool, False),
    "PASSWORD": Constant(str, ""),
    "SECURITY": Constant(str, lambda known: "TLS" if known["TMRL_CONFIG"].get("TLS") else None),
    "WANDB_PROJECT": Constant(str, "tmrl"),
    "WANDB_ENTITY": Constant(str, ""),
    "WANDB_KEY": Constant(str, ""),
    "WANDB_RUN_ID": Constant(str, lambda known: known["RUN_NAME"]),
}
"""Every constant. Keys of the file that are not here are in TMRL_CONFIG, and count for nothing else."""
OTHER_NAMES: Final = {"PORT": "PORT_TRAINER"}
"""Other names of constants, wherever they are said or read."""
_MADE: Final = ("CONFIG_FILE", "TMRL_CONFIG")
"""Constants that nobody sets."""


class Constants(Mapping[str, Any]):
    """All constants by name; each is looked up when it is used.

    Args:
        environment: Variables by name.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._used: dict[str, Any] = {}
        self._file: dict[str, Any] | None = None  # what the file said; None before it was read

    def __getitem__(self, name: str) -> Any:
        """A constant. Raises KeyError, ParameterError, DataError: none has this name, or its value cannot be."""
        name = OTHER_NAMES.get(name, name)
        constant = TABLE[name]
        if name == "TMRL_CONFIG":
            return self._config()
        if name in self._used:
            return self._used[name]
        for where, value in self._said(name, constant):
            return _checked(where, constant.kind, value)
        return constant.default(self) if callable(constant.default) else constant.default

    def __iter__(self) -> Any:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)

    def use(self, values: Mapping[str, Any]) -> None:
        """Have constants be these, whatever else is said. Raises UnknownName, ParameterError; then nothing changes."""
        refuse_unknown("use", values, [name for name in TABLE if name not in _MADE])
        made = {name: _checked(name, TABLE[name].kind, value) for name, value in values.items()}
        for name, other in OTHER_NAMES.items():
            _refuse_two({each: made[each] for each in (name, other) if each in made})
        self._used.update({OTHER_NAMES.get(name, name): value for name, value in made.items()})
        self.forget()

    def forget(self) -> None:
        """Read the file again at the next use."""
        self._file = None

    def _said(self, name: str, constant: Constant) -> list[tuple[str, Any]]:
        """(where, value) of what environment and file say of a constant, the first of which counts."""
        names = [each for each in TABLE if OTHER_NAMES.get(each, each) == name]
        variables = [FOLDER_VARIABLE] if name == "TMRL_FOLDER" else [PREFIX + each for each in names]
        found = {each: self._environment[each] for each in variables if self._environment.get(each)}
        if not found and name not in ("TMRL_FOLDER", *_MADE):
            config, keys = self._config(), [constant.key or each for each in names]
            found = {f"{key} in {self['CONFIG_FILE']}": config[key] for key in keys if key in config}
        _refuse_two(found)
        return list(found.items())

    def _config(self) -> dict[str, Any]:
        """What the file holds; {} if there is none."""
        if self._file is None:
            path: Path = self["CONFIG_FILE"]
            try:
                found = json.loads(path.read_text(encoding="utf-8-sig"))
            except FileNotFoundError:
                found = {}
            except (OSError, ValueError) as error:
                raise DataError(str(path), f"cannot be read as JSON ({error})") from error
            if not isinstance(found, dict):
                raise DataError(str(path), "holds something else than constants by name")
            self._file = found
        return self._file


def _refuse_two(said: Mapping[str, Any]) -> None:
    """Raise ParameterError if two names of one constant say different values."""
    for (name, value), (other, another) in itertools.pairwise(said.items()):
        if value != another:
            raise ParameterError(other, another, f"{value!r}, as {name} says, or left out")


def _checked(where: str, kind: type, value: Any) -> Any:
    """The value as a constant has it; text is read as what it says."""
    if kind is bool and str(value).lower() in ("true", "false", "1", "0"):
        return str(value).lower() in ("true", "1")
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value).expanduser()
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and not isinstance(value, dict | list | None):
        try:
            made = kind(value)
        except (TypeError, ValueError):
            made = None
        if made is not None and (isinstance(value, str) or made == value):
            return made
    words = {bool: "true or false", Path: "a path", str: "text", int: "a whole number", float: "a number"}
    raise ParameterError(where, value, words[kind])


if TYPE_CHECKING:
    TMRL_FOLDER: Path
    WEIGHTS_FOLDER: Path
    CHECKPOINTS_FOLDER: Path
    DATASET_FOLDER: Path
    CONFIG_FILE: Path
    TMRL_CONFIG: dict[str, Any]
    RUN_NAME: str
    RESET_TRAINING: bool
    MODEL_PATH_WORKER: str
    MODEL_PATH_SAVE_HISTORY: str
    MODEL_PATH_TRAINER: str
    CHECKPOINT_PATH: str
    MODEL_HISTORY: int
    SERVER_IP_FOR_WORKER: str
    SERVER_IP_FOR_TRAINER: str
    PORT: int
    PORT_TRAINER: int
    PORT_ROLLOUT: int
    BUFFERS_MAXLEN: int
    RW_MAX_SAMPLES_PER_EPISODE: float
    CRC_DEBUG: int
    DEBUG_MODE: bool
    PASSWORD: str
    SECURITY: str | None
    WANDB_PROJECT: str
    WANDB_ENTITY: str
    WANDB_KEY: str
    WANDB_RUN_ID: str

_constants = Constants()


def use(**values: Any) -> None:
    """Set constants for this process; what the file and the environment say of them counts no more.

    Raises:
        UnknownName, ParameterError: there is no such constant, or it cannot have this value.
    """
    _constants.use(values)


def reload() -> None:
    """Read the file and the environment again at the next use; what `use` set stays."""
    _constants.forget()


def _constant(name: str) -> Any:
    """Called as `__getattr__`."""
    if name not in TABLE:
        raise AttributeError(
            f"module 'memoire.tmrl.config.config_constants' has no constant {name!r}{hint(name, TABLE)}"
        )
    return _constants[name]


if not TYPE_CHECKING:
    __getattr__ = _constant  # type checkers see the names above, and what is missing


def __dir__() -> list[str]:
    """What can be read from here."""
    return sorted({*TABLE, *globals()})
