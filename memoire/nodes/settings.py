"""Settings of nodes from one file for a whole cluster, from the environment and from the command line.

    memoire.toml                     MEMOIRE_NAME=server-0     memoire server --settings memoire.toml --run r
      http = "*:8080"                    │                         │
      [server]                           │                         │
      state-dir = "/state"               │                         │
         └───── weakest                  └───── stronger           └───── strongest

The flags of a command are its settings: a section of the file names them without dashes, and the environment names them
like MEMOIRE_STATE_DIR. Each setting is declared, explained and checked once. Keys above the first section apply to
every command that has the key as a flag. Flags that may be repeated add up over all sources.

`size` reads sizes in bytes as people write them: 1GiB, 500MB, 64Ki, 4096. All options, settings and files use `size`.

`make_envs` and `env_schema` make Gymnasium environments by name; only these functions and `sizes` import Gymnasium.
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
"""Commands that read a settings file and the environment."""
FILE = "settings"
PREFIX = "MEMOIRE_"
ALTERNATIVES = (("schema", "env", "tables"), ("servers", "servers_file"), ("nodes", "open"))
"""Groups of settings that exclude each other: the strongest source decides, and the other settings are dropped."""
_APART = frozenset({"help", FILE, "show_settings"})
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Command(Protocol):
    """Parser that lists its options (`cli.options.Parser`)."""

    options: list[argparse.Action]
    lists: set[str]
    alternatives: list[tuple[Any, list[argparse.Action]]]

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the parsed command line."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an option to the command."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """Settings that a server, proxy and relay share."""

    beside: Annotated[str | None, Setting(show="PORT,PORT")] = None
    """Ports for caches and notices, 0 for any free one (default: the next two ports after that of --endpoint)."""
    insecure: Annotated[bool, Setting()] = False
    """Listen beyond this machine without keys or tokens: every client may push, draw, read, and end the process."""
    io_threads: Annotated[int, Setting(low=1)] = 1
    """Threads that move and encrypt bytes, each for its own connections. More use more cores, if encryption limits the
    incoming bytes."""
    http: Annotated[str, Setting(show="HOST:PORT")] = "127.0.0.1:0"
    """Address of the pages /livez, /readyz, /metrics, /status and so on; port 0 takes a free one, "off" opens none."""
    http_token_file: Annotated[str | None, Setting(show="FILE")] = None
    """File with the token of these pages; /livez, /readyz and /metrics need no token. The file is read again when it
    changes, and may hold an old and a new token, each on its own line."""


@dataclass(frozen=True, kw_only=True)
class ClusterCounts:
    """Numbers of servers and proxies of a cluster."""

    servers: Annotated[int, NUMBER] = 1
    """Number of server processes to start."""
    proxies: Annotated[int, NUMBER] = 1
    """Number of proxy processes to start."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Settings of every command that launches programs."""

    actors: Annotated[int, Setting(low=1)] = 1
    """Number of actor processes to start."""
    threads: Annotated[int | None, Setting(low=1)] = None
    """Threads of NumPy and torch in each actor (default: $OMP_NUM_THREADS and similar variables, or 1)."""
    seed: Annotated[int, Setting(low=-math.inf, show="S")] = 0
    """Seed of the run, from which $MEMOIRE_SEED of each process is derived."""
    port: Annotated[int, NUMBER] = 5560
    """First of three consecutive ports of the cluster, or of a learner that is the server; 0 takes free ports."""
    logs: Annotated[str | None, Setting(show="FOLDER")] = None
    """Folder to which the output of each process is also written, as FOLDER/NAME.log."""
    quiet: Annotated[bool, Setting()] = False
    """Do not show the output of the programs."""
    restarts: Annotated[int, NUMBER] = 10
    """Restarts of a program that dies again and again, each time within a minute."""
    finish_timeout: Annotated[float, Setting(unit="s")] = 30.0
    """Time that actors have to end after the learner's end."""


@dataclass(frozen=True)
class SourcedSetting:
    """Value of a setting in the type of its flag, the place that sets it, and the strength of that source."""

    value: Any
    where: str
    strength: int


def add_to(command: Command) -> None:
    """Add the flags --settings and --show-settings to a command."""
    command.add_argument(
        "--settings",
        metavar="FILE",
        help="TOML or JSON file with these flags, without dashes, in a section for each command (default: the file in "
        "$MEMOIRE_SETTINGS). Variables such as $MEMOIRE_NAME override the file; the command line overrides both",
    )
    command.add_argument("--show-settings", action="store_true", help="print all settings with their sources, and end")


def parse(
    top: Command,
    commands: Mapping[str, Command],
    words: Sequence[str],
    environment: Mapping[str, str],
) -> argparse.Namespace:
    """Parse the command line; for one of `COMMANDS`, take missing settings from the file and the environment.

    Args:
        top: Parser of the whole command line.
        commands: Parsers of its commands by name. The parsers are changed, and can parse only one command line.
        words: Words after "memoire".

    Raises:
        ParameterError: the file cannot be read, or a setting is unknown or has a wrong value.
        SystemExit: the command line is wrong, or asks for help.
    """
    name = next(iter(words), "")
    if name not in COMMANDS:
        return top.parse_args(words)
    command = commands[name]
    path = _path(words, environment)
    content = {} if path is None else read(path)
    if path is not None:
        check(path, content, commands)
    sourced = dict(_resolve(command, _sourced_settings(command, name, path, content, environment)))
    defaults = {action.dest: action.default for action in command.options}
    for action in settings_of(command):
        if action.dest in sourced:
            _fill(command, action, sourced[action.dest].value)
    args = top.parse_args(words)
    for group in ALTERNATIVES:
        weaker = [each for each in group if each in sourced]
        if weaker and any(getattr(args, each, None) not in (None, []) for each in group if each not in sourced):
            for each in weaker:  # the command line sets another option of the group
                setattr(args, each, defaults[each])
                del sourced[each]
    if args.show_settings:
        args.command = _printer(command, sourced, defaults)
    return args


def read(path: str) -> dict[str, Any]:
    """Return the content of a settings file. Raise ParameterError if it cannot be read or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        content = tomllib.loads(text) if path.endswith(".toml") else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # both parsers name line and column
        raise ParameterError.with_text(
            f"--settings {path!r} is not a readable TOML (*.toml) or JSON file: {error}."
        ) from error
    if not isinstance(content, dict):
        raise ParameterError("--settings", path, f"an object with a section for each of {', '.join(COMMANDS)}")
    return content


def check(path: str, content: Mapping[str, Any], commands: Mapping[str, Command]) -> None:
    """Raise ParameterError for a name that no command reads, so that every node reports a mistyped name."""
    known = {name: {key_of(action) for action in settings_of(commands[name])} for name in COMMANDS}
    for key, value in content.items():
        if key not in COMMANDS:
            if not any(_spelled(key) in keys for keys in known.values()):
                raise ParameterError(f"{path}: {key}", key, f"a section ({', '.join(COMMANDS)}) or a flag")
            continue
        if not isinstance(value, dict):
            raise ParameterError(f"{path}: {key}", value, f"a section: an object with flags of memoire {key}")
        for flag in value:
            if _spelled(flag) not in known[key]:
                raise ParameterError(
                    f"{path}: {key}.{flag}", flag, f"one of {', '.join(sorted(known[key]))}{hint(flag, known[key])}"
                )


def _path(words: Sequence[str], environment: Mapping[str, str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--settings")
    try:
        path = parser.parse_known_args(list(words))[0].settings
    except argparse.ArgumentError:  # reported by the parser of the whole command line
        return None
    return path or environment.get(PREFIX + "SETTINGS") or None


def settings_of(command: Command) -> list[argparse.Action]:
    """Return the options of a command that a file or the environment may set."""
    return [action for action in command.options if action.dest not in _APART]


def key_of(action: argparse.Action) -> str:
    """Return the name of an option in a settings file."""
    return _spelled(action.dest)


def _spelled(key: str) -> str:
    return key.replace("_", "-")


def _sourced_settings(
    command: Command,
    name: str,
    path: str | None,
    content: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Iterator[tuple[argparse.Action, SourcedSetting]]:
    """Yield all settings of a command in the file and the environment, the weakest first."""
    common = {key: value for key, value in content.items() if key not in COMMANDS}
    section = content.get(name, {})
    for strength, (place, values) in enumerate(((f"{path}: ", common), (f"{path}: {name}.", section))):
        for key, value in values.items():
            action = next((each for each in settings_of(command) if key_of(each) == _spelled(key)), None)
            if action is not None and value is not None:
                yield action, SourcedSetting(_checked(command, action, value, place + key), place + key, strength)
    for action in settings_of(command):
        where = f"${PREFIX}{action.dest.upper()}"
        if text := environment.get(where[1:]):
            value = _checked(command, action, _split(command, action, text, where), where)
            yield action, SourcedSetting(value, where, 2)


def _resolve(
    command: Command, sourced: Iterator[tuple[argparse.Action, SourcedSetting]]
) -> Iterator[tuple[str, SourcedSetting]]:
    """Yield the strongest setting of each name. Raise ParameterError if equally strong ones exclude each other."""
    settings: dict[str, SourcedSetting] = {}
    for action, each in sourced:
        before = settings.get(action.dest)
        if before is not None and action.dest in command.lists and action.nargs is None:
            each = SourcedSetting(before.value + each.value, f"{before.where}, {each.where}", each.strength)
        settings[action.dest] = each
    for group in ALTERNATIVES:
        rivals = {name: settings[name] for name in group if name in settings}
        strongest = max((each.strength for each in rivals.values()), default=0)
        best = [each for each in rivals.values() if each.strength == strongest]
        if len(best) > 1:
            raise ParameterError.with_text(f"{best[0].where} and {best[1].where} exclude each other: set one of them.")
        for name, each in rivals.items():
            if each.strength < strongest:
                del settings[name]
    yield from settings.items()


def _fill(command: Command, action: argparse.Action, value: Any) -> None:
    """Make the value the option's default, so that the command line need not set the option."""
    action.default, action.required = value, False
    for group, members in command.alternatives:
        if action in members:
            group.required = False


def _split(command: Command, action: argparse.Action, text: str, where: str) -> Any:
    """Return the value of an environment variable in the type that a file would have."""
    if action.nargs == 0:
        if text.lower() not in _TRUTH:
            raise ParameterError(where, text, "true or false")
        return _TRUTH[text.lower()]
    if action.dest not in command.lists:
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ParameterError(where, text, f"words separated by blanks: {error}") from error


def _checked(command: Command, action: argparse.Action, value: Any, where: str) -> Any:
    """Return a value as the command's own parser would return it. Raise ParameterError if the parser would refuse."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ParameterError(where, value, "true or false")
        return value
    if action.dest not in command.lists:
        return _one(action, value, where)
    if isinstance(value, Mapping) and action.nargs is None:  # a table of names and values
        # Text means the same as on the command line: `helm --set` turns numbers with a point into text.
        value = [f"{name}={each if isinstance(each, str) else _json(each, where)}" for name, each in value.items()]
    if not isinstance(value, list):
        raise ParameterError(where, value, "a list")
    return [_one(action, each, where) for each in value]


def _json(value: Any, where: str) -> str:
    """Return the value as JSON, for a flag. Raise ParameterError for types that JSON lacks, such as dates of TOML."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(
            where, type(value).__name__, f"text, a number, or a list or object of these: {error}"
        ) from error


def _one(action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, Mapping) and action.type is None:
        return _json(value, where)  # the flag takes JSON, such as a schema
    if isinstance(value, bool | Mapping | list):
        raise ParameterError(where, value, "a number" if action.type in (int, float) else "text")
    if isinstance(value, float) and value.is_integer() and action.type is int:
        value = int(value)  # some writers of JSON write whole numbers with a point
    try:
        read: Callable[[str], Any] = action.type if callable(action.type) else str
        checked = read(str(value))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        kinds = {int: "a whole number", float: "a number"}
        kind = getattr(error, "expected", None) or kinds.get(action.type, str(error))  # type: ignore[call-overload]
        raise ParameterError(where, value, kind) from error
    if action.choices is not None and checked not in action.choices:
        raise ParameterError(where, value, f"one of {', '.join(map(str, action.choices))}")
    return checked


def _printer(
    command: Command, sourced: Mapping[str, SourcedSetting], defaults: Mapping[str, Any]
) -> Callable[[argparse.Namespace], int]:
    """Return a command that prints all settings, each with its source."""

    def show(args: argparse.Namespace) -> int:
        for action in settings_of(command):
            value = getattr(args, action.dest)
            source = sourced.get(action.dest)
            if source is not None and value == source.value:
                where = source.where
            else:
                where = "default" if value in (defaults[action.dest], []) else "command line"
            print(f"{key_of(action)} = {json.dumps(value)}  # {where}")
        return 0

    return show


def make_envs(env: str, count: int) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    """Make `count` environments that step together and reset themselves in the step that ends an episode.

    Raises:
        SchemaError: Gymnasium does not know the environment, or a package that it needs is missing.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode

    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    try:
        return gymnasium.make_vec(env, num_envs=count, vectorization_mode="sync", vector_kwargs=options)
    except gymnasium.error.Error as error:
        raise SchemaError(f"Gymnasium cannot make {env!r}: {error}. Name another environment (--env).") from error


def sizes(envs: gymnasium.vector.VectorEnv[Any, Any, Any]) -> tuple[int, int]:
    """Return (inputs, actions): the sizes of a network for these environments.

    Raises:
        SchemaError: the actions are not discrete, or the observations are not one array of numbers.
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
    """Return the schema of an environment's steps: obs, action, reward."""
    from memoire.replay.schema import Schema

    with contextlib.closing(make_envs(env, 1)) as envs:
        return Schema.from_env(envs)


EXPECTED = "a size in bytes, such as 1GiB, 500MB or 4096"
_PREFIXES: dict[str, int] = {"": 1, **{letter: 1000**power for power, letter in enumerate("kmgt", 1)}}
_PREFIXES |= {f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?(?:e\+?([0-9]{1,2}))? ?([kmgt]?i?)b?", re.IGNORECASE)


class NotASize(argparse.ArgumentTypeError, ValueError):
    """Error of a text that is not a size in bytes."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{EXPECTED}, got {text!r}")
        self.expected = EXPECTED


def size(text: str) -> int:
    """Return the bytes of a size: Ki, Mi, Gi and Ti are powers of 1024, k, M, G and T of 1000; "B" may follow either.

    Raises:
        NotASize: the text is malformed, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _PREFIXES.get(match[4].lower()) if match else None
    if match is None or factor is None:
        raise NotASize(text)
    whole, part, power = match[1], match[2] or "", int(match[3] or 0)
    bytes_, rest = divmod(int(whole + part) * factor * int(10**power), int(10 ** len(part)))
    if rest and factor == 1:
        raise NotASize(text)
    return bytes_
