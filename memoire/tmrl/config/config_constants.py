"""Constants out of a file, read when they are used: nothing is made and nothing is asked at import.

    import memoire.tmrl.config.config_constants as cfg
    print(cfg.RUN_NAME, cfg.MODEL_PATH_WORKER)

A constant is looked up in this order; names are in `constants.TABLE`:

1. what `use(RUN_NAME="drone-1")` said in this process, such as the flags of `python -m memoire.tmrl`
2. the environment: MEMOIRE_TMRL_RUN_NAME=drone-1
3. the file config/config.json in the folder that the variable MEMOIRE_TMRL names, else in ~/TmrlData
4. the default
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memoire.arguments import hint

from .constants import TABLE, Constants

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
