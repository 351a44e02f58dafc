"""Constants of a configuration file, read when they are used. An import makes no file and no request.

    import memoire.tmrl.config.config_constants as cfg
    print(cfg.RUN_NAME, cfg.MODEL_PATH_WORKER)

The first of these sources defines a constant; names are in `TABLE`:

1. `use(RUN_NAME="drone-1")` in this process
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
"""Prefix of environment variables; the name of the constant follows."""
FOLDER_VARIABLE: Final = "MEMOIRE_TMRL"
LOCALHOST: Final = "127.0.0.1"


class Constant(NamedTuple):
    """Definition of a constant: its type, its default and its key in the file."""

    kind: type
    default: Any
    """Value of the default, or a function of all constants that returns it."""
    key: str = ""
    """Key in the file; "" is the constant's own name."""


def _in_folder(folder: str) -> Callable[[Mapping[str, Any]], Path]:
    return lambda known: known["TMRL_FOLDER"] / folder


def _path(folder: str, suffix: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda known: str(known[folder] / (known["RUN_NAME"] + suffix))


def _server(is_local: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function for the server's address: this machine, or the file's PUBLIC_IP_SERVER if not `is_local`."""

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
"""All constants. Unknown keys of the file are ignored; TMRL_CONFIG holds the whole file."""
OTHER_NAMES: Final = {"PORT": "PORT_TRAINER"}
"""Alternative names of constants, accepted in every source."""
_DERIVED: Final = ("CONFIG_FILE", "TMRL_CONFIG")
"""Constants that cannot be set."""


class Constants(Mapping[str, Any]):
    """Mapping of all constants by name; each is looked up when it is used.

    Args:
        environment: Environment variables by name.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._used: dict[str, Any] = {}
        self._file: dict[str, Any] | None = None  # the file's content, or None

    def __getitem__(self, name: str) -> Any:
        """Return a constant. Raises KeyError for unknown names, ParameterError or DataError for wrong values."""
        name = OTHER_NAMES.get(name, name)
        constant = TABLE[name]
        if name == "TMRL_CONFIG":
            return self._config()
        if name in self._used:
            return self._used[name]
        for where, value in self._values_of(name, constant):
            return _converted(where, constant.kind, value)
        return constant.default(self) if callable(constant.default) else constant.default

    def __iter__(self) -> Any:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)

    def use(self, values: Mapping[str, Any]) -> None:
        """Set constants, above all other sources. If one is wrong, raise UnknownName or ParameterError, set none."""
        refuse_unknown("use", values, [name for name in TABLE if name not in _DERIVED])
        checked = {name: _converted(name, TABLE[name].kind, value) for name, value in values.items()}
        for name, other in OTHER_NAMES.items():
            _check_equal({each: checked[each] for each in (name, other) if each in checked})
        self._used.update({OTHER_NAMES.get(name, name): value for name, value in checked.items()})
        self.forget()

    def forget(self) -> None:
        """Read the file again at the next use."""
        self._file = None

    def _values_of(self, name: str, constant: Constant) -> list[tuple[str, Any]]:
        """Return (source, value) of a constant in the environment, else in the file. The first one defines it."""
        names = [each for each in TABLE if OTHER_NAMES.get(each, each) == name]
        variables = [FOLDER_VARIABLE] if name == "TMRL_FOLDER" else [PREFIX + each for each in names]
        values = {each: self._environment[each] for each in variables if self._environment.get(each)}
        if not values and name not in ("TMRL_FOLDER", *_DERIVED):
            config, keys = self._config(), [constant.key or each for each in names]
            values = {f"{key} in {self['CONFIG_FILE']}": config[key] for key in keys if key in config}
        _check_equal(values)
        return list(values.items())

    def _config(self) -> dict[str, Any]:
        """Return the content of the file; {} without a file."""
        if self._file is None:
            path: Path = self["CONFIG_FILE"]
            try:
                config = json.loads(path.read_text(encoding="utf-8-sig"))
            except FileNotFoundError:
                config = {}
            except (OSError, ValueError) as error:
                raise DataError(str(path), f"cannot be read as JSON ({error})") from error
            if not isinstance(config, dict):
                raise DataError(str(path), "holds something else than a JSON object of constants")
            self._file = config
        return self._file


def _check_equal(values: Mapping[str, Any]) -> None:
    """Raise ParameterError if two names of one constant have different values."""
    for (name, value), (other, another) in itertools.pairwise(values.items()):
        if value != another:
            raise ParameterError(other, another, f"{value!r}, as {name} says, or left out")


def _converted(where: str, kind: type, value: Any) -> Any:
    """Convert a value to a constant's type; parses text. Raises ParameterError."""
    if kind is bool and str(value).lower() in ("true", "false", "1", "0"):
        return str(value).lower() in ("true", "1")
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value).expanduser()
    if kind is str and isinstance(value, str):
        return value
    if kind in (int, float) and not isinstance(value, dict | list | None):
        try:
            number = kind(value)
        except (TypeError, ValueError):
            number = None
        if number is not None and (isinstance(value, str) or number == value):
            return number
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
    """Set constants for this process; they replace the values of the environment and the file.

    Raises:
        UnknownName, ParameterError: a constant is unknown, or cannot have its value.
    """
    _constants.use(values)


def reload() -> None:
    """Read the file and the environment again at the next use; constants set by `use` stay."""
    _constants.forget()


def _constant(name: str) -> Any:
    """Return a constant of this module by name, as its `__getattr__`."""
    if name not in TABLE:
        raise AttributeError(
            f"module 'memoire.tmrl.config.config_constants' has no constant {name!r}{hint(name, TABLE)}"
        )
    return _constants[name]


if not TYPE_CHECKING:
    __getattr__ = _constant  # type checkers see the names above, and report other names


def __dir__() -> list[str]:
    """Return the names in this module, with all constants."""
    return sorted({*TABLE, *globals()})
