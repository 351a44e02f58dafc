"""What a node is told beside its command line: one file for a whole cluster, and the environment.

    memoire.toml                     MEMOIRE_NAME=server-0     memoire server --settings memoire.toml --run r
      http = "*:8080"                    │                         │
      [server]                           │                         │
      state-dir = "/state"               │                         │
         └───── weakest                  └───── stronger           └───── strongest

The flags of a command are its settings: a section of the file has their names without the dashes, the environment has
them as MEMOIRE_STATE_DIR. So there is one list of settings, one text that explains each, and one check. Keys above the
first section are for every command that has such a flag. What may be repeated on the command line adds up.

Sizes in bytes as people write them: 1GiB, 500MB, 64Ki, 4096. Every option, setting and file takes them alike.

Gymnasium environments by name: made, measured and described. Imports Gymnasium only when one is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from memoire.arguments import NUMBER, Setting, hint
from memoire.errors import ParameterError, SchemaError

if TYPE_CHECKING:
    import gymnasium

    from memoire.replay.schema import Schema

COMMANDS = ("server", "proxy", "relay", "dashboard")
"""Those that read a file of settings and the environment."""
FILE = "settings"
PREFIX = "MEMOIRE_"
ALTERNATIVES = (("schema", "env", "tables"), ("servers", "servers_file"), ("nodes", "open"))
"""Settings of which the strongest source says one, and so none of the others."""
_APART = frozenset({"help", FILE, "show_settings"})
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Command(Protocol):
    """A parser that says what it takes (`cli.options.Parser`)."""

    options: list[argparse.Action]
    lists: set[str]
    alternatives: list[tuple[Any, list[argparse.Action]]]

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """What a line says."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Another option."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What a server, proxy and relay are told alike."""

    beside: Annotated[str | None, Setting(show="PORT,PORT")] = None
    """Ports for caches and for notices, 0 for any free one (default: the next two after that of --endpoint)."""
    insecure: Annotated[bool, Setting()] = False
    """Listen beyond this machine without keys and tokens: anybody who can reach it may push, draw, read, and end the
    process."""
    io_threads: Annotated[int, Setting(low=1)] = 1
    """Threads that move and encrypt bytes, each for connections of its own: more on more cores, where encryption bounds
    what comes in."""
    http: Annotated[str, Setting(show="HOST:PORT")] = "127.0.0.1:0"
    """Where /livez, /readyz, /metrics and /status are answered; port 0 takes a free one, "off" opens none."""
    http_token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that these pages ask for, but for /livez, /readyz and /metrics; read again when it changes,
    and may hold an old and a new one, a line each."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many servers and proxies there are."""

    servers: Annotated[int, NUMBER] = 1
    """Server processes."""
    proxies: Annotated[int, NUMBER] = 1
    """Proxy processes."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """What is told to whatever launches programs."""

    actors: Annotated[int, Setting(low=1)] = 1
    """Actor processes."""
    threads: Annotated[int | None, Setting(low=1)] = None
    """Threads that NumPy and torch of each actor compute with (default: $OMP_NUM_THREADS and its like, or 1)."""
    seed: Annotated[int, Setting(low=-math.inf, show="S")] = 0
    """That $MEMOIRE_SEED follows from."""
    port: Annotated[int, NUMBER] = 5560
    """First of three ports of the cluster's address, or of those of a learner that is the server; 0 takes free ones."""
    logs: Annotated[str | None, Setting(show="FOLDER")] = None
    """Keep what each process prints in FOLDER/NAME.log, too."""
    quiet: Annotated[bool, Setting()] = False
    """Do not show what they print."""
    restarts: Annotated[int, NUMBER] = 10
    """Starts of a program that dies again and again, each time within a minute."""
    finish_timeout: Annotated[float, Setting(unit="s")] = 30.0
    """That actors have to end once the learner has."""


@dataclass(frozen=True)
class GivenSetting:
    """A setting that was said: its value as the command takes it, where, and how strong that is."""

    value: Any
    where: str
    strength: int


def add_to(command: Command) -> None:
    """Give a command the flag for its file."""
    command.add_argument(
        "--settings",
        metavar="FILE",
        help="a TOML or JSON file with these flags, without dashes, in a section for each command (default: what "
        "$MEMOIRE_SETTINGS names). $MEMOIRE_NAME, and so on, says more than the file, the command line more than both",
    )
    command.add_argument(
        "--show-settings", action="store_true", help="print what holds, and where each comes from, and end"
    )


def parse(
    top: Command,
    commands: Mapping[str, Command],
    words: Sequence[str],
    environment: Mapping[str, str],
) -> argparse.Namespace:
    """The whole command line, filled up with what file and environment say where it is one of `COMMANDS`.

    Args:
        top: Of the command line.
        commands: Its commands by name. They are changed: good for one command line only.
        words: After "memoire".

    Raises:
        ParameterError: the file cannot be read, or something says what is no setting, or no value of one.
        SystemExit: the command line is wrong, or asked for help.
    """
    name = next(iter(words), "")
    if name not in COMMANDS:
        return top.parse_args(words)
    command = commands[name]
    path = _path(words, environment)
    content = {} if path is None else read(path)
    if path is not None:
        check(path, content, commands)
    said = dict(_strongest(command, _all(command, name, path, content, environment)))
    defaults = {action.dest: action.default for action in command.options}
    for action in settings_of(command):
        if action.dest in said:
            _fill(command, action, said[action.dest].value)
    given = top.parse_args(words)
    for group in ALTERNATIVES:
        weaker = [each for each in group if each in said]
        if weaker and any(getattr(given, each, None) not in (None, []) for each in group if each not in said):
            for each in weaker:  # the command line says another one
                setattr(given, each, defaults[each])
                del said[each]
    if given.show_settings:
        given.command = _shown(command, said, defaults)
    return given


def read(path: str) -> dict[str, Any]:
    """What a file of settings says. Raises ParameterError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # both parsers say line and column
        raise ParameterError("--settings", path, f"a TOML file (*.toml) or JSON file of settings: {error}") from error
    if not isinstance(content, dict):
        raise ParameterError("--settings", path, f"an object with a section for each of {', '.join(COMMANDS)}")
    return content


def check(path: str, content: Mapping[str, Any], commands: Mapping[str, Command]) -> None:
    """Refuse what no command would read: a name that is mistyped is said by every node. Raises ParameterError."""
    known = {name: {key_of(action) for action in settings_of(commands[name])} for name in COMMANDS}
    for key, value in content.items():
        if key not in COMMANDS:
            if not any(_spelled(key) in keys for keys in known.values()):
                raise ParameterError(f"{path}: {key}", key, f"a section ({', '.join(COMMANDS)}) or a flag of one")
            continue
        if not isinstance(value, dict):
            raise ParameterError(f"{path}: {key}", value, f"a section: an object with flags of memoire {key}")
        for flag in value:
            if _spelled(flag) not in known[key]:
                raise ParameterError(
                    f"{path}: {key}.{flag}", flag, f"one of {', '.join(sorted(known[key]))}{hint(flag, known[key])}"
                )


def _path(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--settings")
    try:
        given = early.parse_known_args(list(words))[0].settings
    except argparse.ArgumentError:  # said when all is parsed
        return None
    return given or environment.get(PREFIX + "SETTINGS") or None


def settings_of(command: Command) -> list[argparse.Action]:
    """What a file or the environment may say of a command."""
    return [action for action in command.options if action.dest not in _APART]


def key_of(action: argparse.Action) -> str:
    """Its name in a file."""
    return _spelled(action.dest)


def _spelled(key: str) -> str:
    return key.replace("_", "-")


def _all(
    command: Command,
    name: str,
    path: str | None,
    content: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Iterator[tuple[argparse.Action, GivenSetting]]:
    """Everything that file and environment say about a command, the weakest first."""
    common = {key: value for key, value in content.items() if key not in COMMANDS}
    own = content.get(name, {})
    for strength, (place, values) in enumerate(((f"{path}: ", common), (f"{path}: {name}.", own))):
        for key, value in values.items():
            action = next((each for each in settings_of(command) if key_of(each) == _spelled(key)), None)
            if action is not None and value is not None:
                yield action, GivenSetting(_taken(command, action, value, place + key), place + key, strength)
    for action in settings_of(command):
        where = f"${PREFIX}{action.dest.upper()}"
        if text := environment.get(where[1:]):
            value = _taken(command, action, _split(command, action, text, where), where)
            yield action, GivenSetting(value, where, 2)


def _strongest(
    command: Command, said: Iterator[tuple[argparse.Action, GivenSetting]]
) -> Iterator[tuple[str, GivenSetting]]:
    """What holds of all that was said."""
    found: dict[str, GivenSetting] = {}
    for action, each in said:
        before = found.get(action.dest)
        if before is not None and action.dest in command.lists and action.nargs is None:
            each = GivenSetting(before.value + each.value, f"{before.where}, {each.where}", each.strength)
        found[action.dest] = each
    for group in ALTERNATIVES:
        rivals = {name: found[name] for name in group if name in found}
        most = max((each.strength for each in rivals.values()), default=0)
        best = [each for each in rivals.values() if each.strength == most]
        if len(best) > 1:
            raise ParameterError(best[1].where, best[1].value, f"absent beside {best[0].where}: it is one of both")
        for name, each in rivals.items():
            if each.strength < most:
                del found[name]
    yield from found.items()


def _fill(command: Command, action: argparse.Action, value: Any) -> None:
    """Have the command take this where its line says nothing."""
    action.default, action.required = value, False
    if action.nargs == "+" and not action.option_strings:
        action.nargs = "*"
    for group, members in command.alternatives:
        if action in members:
            group.required = False


def _split(command: Command, action: argparse.Action, text: str, where: str) -> Any:
    """What an environment variable says, as a file would say it."""
    if action.nargs == 0:
        if text.lower() not in _TRUTH:
            raise ParameterError(where, text, "true or false")
        return _TRUTH[text.lower()]
    if action.dest not in command.lists:
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ParameterError(where, text, f"words with blanks between them: {error}") from error


def _taken(command: Command, action: argparse.Action, value: Any, where: str) -> Any:
    """A value as the command's own parser would have it. Raises ParameterError."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ParameterError(where, value, "true or false")
        return value
    if action.dest not in command.lists:
        return _one(action, value, where)
    if isinstance(value, Mapping) and action.nargs is None:  # names with values
        # A text is taken as on the command line: `helm --set` makes texts of numbers with a point.
        value = [f"{name}={each if isinstance(each, str) else _json(each, where)}" for name, each in value.items()]
    if not isinstance(value, list):
        raise ParameterError(where, value, "a list")
    return [_one(action, each, where) for each in value]


def _json(value: Any, where: str) -> str:
    """The value as a flag says it. Raises ParameterError: TOML has dates, and JSON does not."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(
            where, type(value).__name__, f"text, numbers, lists and objects of them: {error}"
        ) from error


def _one(action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, Mapping) and action.type is None:
        return _json(value, where)  # a schema, where the flag takes one as it is
    if isinstance(value, bool | Mapping | list):
        raise ParameterError(where, value, "a number" if action.type in (int, float) else "text")
    if isinstance(value, float) and value.is_integer() and action.type is int:
        value = int(value)  # as some writers of JSON have whole numbers
    try:
        read: Callable[[str], Any] = action.type if callable(action.type) else str
        taken = read(str(value))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        kinds = {int: "a whole number", float: "a number"}
        kind = getattr(error, "expected", None) or kinds.get(action.type, str(error))  # type: ignore[call-overload]
        raise ParameterError(where, value, kind) from error
    if action.choices is not None and taken not in action.choices:
        raise ParameterError(where, value, f"one of {', '.join(map(str, action.choices))}")
    return taken


def _shown(
    command: Command, said: Mapping[str, GivenSetting], defaults: Mapping[str, Any]
) -> Callable[[argparse.Namespace], int]:
    """What prints the settings that hold, each with its source."""

    def show(given: argparse.Namespace) -> int:
        for action in settings_of(command):
            value = getattr(given, action.dest)
            source = said.get(action.dest)
            if source is not None and value == source.value:
                where = source.where
            else:
                where = "default" if value in (defaults[action.dest], []) else "command line"
            print(f"{key_of(action)} = {json.dumps(value)}  # {where}")
        return 0

    return show


def make_envs(env: str, count: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """`count` environments side by side in this process; they reset themselves within the step that ends an episode.

    Raises:
        SchemaError: Gymnasium does not know such an environment, or lacks what it needs.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode

    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    try:
        return gymnasium.make_vec(env, num_envs=count, vectorization_mode="sync", vector_kwargs=options)
    except gymnasium.error.Error as error:
        raise SchemaError(f"Gymnasium cannot make {env!r}: {error}. Give the id of an environment (--env).") from error


def sizes(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> tuple[int, int]:
    """(inputs, actions) of a network for these environments.

    Raises:
        SchemaError: the environment has no discrete actions, or observations that are no array of numbers.
    """
    import gymnasium

    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(actions, gymnasium.spaces.Discrete) or not isinstance(observations, gymnasium.spaces.Box):
        raise SchemaError(
            f"the demo's network needs discrete actions and observations in a Box, but "
            f"{envs.spec.id if envs.spec else envs} has {actions} and {observations}. "
            f"Choose another --env, such as CartPole-v1 or Acrobot-v1."
        )
    return math.prod(observations.shape), int(actions.n)


def env_schema(env: str) -> Schema:
    """What the steps of an environment are: obs, action, reward."""
    from memoire.replay.schema import Schema

    with contextlib.closing(make_envs(env, 1)) as envs:
        return Schema.from_env(envs)


EXPECTED = "a size in bytes, such as 1GiB, 500MB or 4096"
_PREFIXES: dict[str, int] = {"": 1, **{letter: 1000**power for power, letter in enumerate("kmgt", 1)}}
_PREFIXES |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?(?:e\+?([0-9]{1,2}))? ?([kmgt]?i?)b?", re.IGNORECASE)


class NotASize(argparse.ArgumentTypeError, ValueError):
    """A text is no size."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{EXPECTED}, got {text!r}")
        self.expected = EXPECTED


def size(text: str) -> int:
    """Bytes of a size: Ki, Mi, Gi and Ti are powers of 1024, k, M, G and T of 1000; "B" may follow either.

    Raises:
        NotASize: it is none, or no whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _PREFIXES.get(found[4].lower()) if found else None
    if found is None or factor is None:
        raise NotASize(text)
    whole, part, power = found[1], found[2] or "", int(found[3] or 0)
    bytes_, rest = divmod(int(whole + part) * factor * int(10**power), int(10 ** len(part)))
    if rest and factor == 1:
        raise NotASize(text)
    return bytes_
