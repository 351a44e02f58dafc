"""The tree of exceptions that memoire raises on purpose.

Each class derives from `MemoireError` and from the builtin exception that a caller would guess. The arguments of an
error are its facts, so that it survives pickling. The text of an error names the value, the sender, the expected value
and the next step.
"""

import contextlib
import dataclasses
import errno
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Self, dataclass_transform


@dataclass_transform(eq_default=False)
class MemoireError(Exception):
    """Base class of all errors that memoire raises on purpose.

    A subclass declares its facts like the fields of a dataclass. `TEXT` formats them; a subclass whose sentence depends
    on the facts overrides `__str__` instead.

    Gymnasium and other libraries raise an error again as `type(error)(text)`. Each class therefore also accepts one
    text: the new error keeps class and text, and loses the facts.

    Example:
        try:
            buffer.sample(0)
        except memoire.MemoireError as error:
            print(error)
    """

    TEXT = ""
    """Text of the error, with {NAME} for a fact."""
    sentence: str | None = None
    """Text of an error that was created from a text alone; None if the error has facts."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__annotations__:
            dataclasses.dataclass(eq=False, repr=False, match_args=False)(cls)
        for name, also_text in (("__init__", _facts_or_text), ("__str__", _sentence_or_facts)):
            if name in vars(cls):
                setattr(cls, name, also_text(vars(cls)[name]))

    @classmethod
    def with_text(cls, text: str) -> Self:
        """Return an error with this text and no facts, of a class with several facts (else pickling takes the text as
        one).
        """
        error = cls.__new__(cls, text)
        Exception.__init__(error, text)
        error.sentence = text
        return error

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())  # pickling calls the class with args in the order of the fields

    def __str__(self) -> str:
        if self.sentence is not None:
            return self.sentence
        return self.TEXT.format_map(vars(self)) if self.TEXT else super().__str__()


def _facts_or_text(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `__init__` so that it also accepts the text of an error in place of the facts."""

    @functools.wraps(init)
    def build(self: MemoireError, *facts: Any, **named: Any) -> None:
        is_outermost = type(self).__init__ is build
        if is_outermost and not named and len(facts) == 1 and _is_text(type(self), init, facts[0]):
            Exception.__init__(self, *facts)
            self.sentence = facts[0]
        else:
            init(self, *facts, **named)

    return build


def _sentence_or_facts(text_of: Callable[[MemoireError], str]) -> Callable[[MemoireError], str]:
    @functools.wraps(text_of)
    def text(self: MemoireError) -> str:
        return text_of(self) if self.sentence is None else self.sentence

    return text


_PROBE = "a fact of an error"


def _is_text(kind: type[MemoireError], init: Callable[..., None], value: object) -> bool:
    """Return True if the only argument of an error class is the text of an error, and not a fact.

    One text cannot be the facts of a class that has several facts, or whose fact is a number. For a class whose only
    fact is a text, `value` has to contain the words that the class writes around its fact.
    """
    if not isinstance(value, str):
        return False
    if next((taken for taken in init.__annotations__.values() if taken is not None), str) in (int, float, bool):
        return True
    probe = kind.__new__(kind, _PROBE)
    try:
        init(probe, _PROBE)
        words = [part.strip() for part in str(probe).split(_PROBE)]
    except (TypeError, ValueError):  # more facts are needed
        return True
    return any(words) and all(part in value for part in words)


class InsecureWarning(UserWarning):
    """Warning: other machines can reach an address that asks for neither a key nor a token.

    Example:
        warnings.simplefilter("error", memoire.InsecureWarning)  # refuse to listen without a key or token
    """


# Characters that start a new line, move a terminal's cursor, or change the direction in which the rest of the line is
# read (Boucher and Anderson, Trojan Source, 2021). A tab is allowed.
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff" + "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_SHORT = {"\n": "\\n", "\r": "\\r"}


def escape(text: str) -> str:
    r"""Return `text` on one line: escape line breaks, control characters and marks of direction (``\n``, ``\x1b``,
    ``\u202e``).
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class NotBuilt(MemoireError, ImportError):
    """Python imported memoire's source folder, and its extension modules are not compiled."""

    folder: str
    installed: str | None

    def __str__(self) -> str:
        if self.installed:
            return (
                f"memoire is installed in {self.installed}, but Python found its source code in {self.folder} first, "
                f"and that is not built. Start Python from another folder."
            )
        return (
            f"memoire in {self.folder} is not built: its compiled part is missing. Build it there with `make setup`. "
            f"`pip install .` installs it for Python that is started from another folder."
        )


class NotInstalled(MemoireError, ModuleNotFoundError):
    """A module that only some users need is not installed."""

    module: str
    command: str
    TEXT = "this needs {module}, which is not installed: {command}"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = self.module.partition(".")[0]

    @classmethod
    @contextlib.contextmanager
    def explained(cls, command: str) -> Iterator[None]:
        """Raise this error if an import inside the `with` block lacks a package that `command` installs."""
        try:
            yield
        except ModuleNotFoundError as error:
            if isinstance(error, cls) or error.name is None or error.name.partition(".")[0] == "memoire":
                raise
            raise cls(error.name, command) from None


class IncompatibleLibrary(MemoireError, ImportError):
    """Another library is installed in a version whose interface differs from the one that an adapter uses."""

    module: str
    version: str
    problem: str
    TEXT = (
        "this adapter does not support {module} {version}: {problem}. Install a supported version of {module}, "
        "or a newer memoire."
    )


class SchemaError(MemoireError, ValueError):
    """A schema was declared with a column, role, dtype or shape that memoire does not support."""


class ParameterError(MemoireError, ValueError):
    """The value of an argument or setting is not allowed."""

    name: str
    value: object
    expected: str
    TEXT = "{name} must be {expected}, got {value!r}. Nothing was changed."


class ModelUnknown(ParameterError):
    """An entry was written without the version of the model that acted."""

    TEXT = (
        "model_version is 0, which is unknown, but {reason}. Pass model_version=. A client's writer "
        "does it if the actor takes its models by newest() or wait() of client.model(topic). Nothing was changed."
    )

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)
        self.reason = reason
        self.name, self.value, self.expected = "model_version", 0, "the version of the model that acted"


class UnknownName(ParameterError, TypeError):
    """A call or a configuration has an unknown argument or setting."""

    def __init__(self, what: str, name: str, meant: tuple[str, ...], known: tuple[str, ...], advice: str = "") -> None:
        Exception.__init__(self, what, name, meant, known, advice)
        self.what, self.name, self.meant, self.known, self.advice = what, name, meant, known, advice

    def __str__(self) -> str:
        if self.advice:
            advice = self.advice
        elif self.meant:
            advice = _guess(self.meant)
        else:
            advice = f"It takes {', '.join(self.known) or 'no arguments'}."
        return f"{self.what} takes no {self.name!r}. {advice} Nothing was changed."


class NoSuchField(MemoireError, KeyError):
    """A batch, a schema or a similar object has no field or column of the requested name."""

    what: str
    name: str
    meant: tuple[str, ...]
    known: tuple[str, ...]

    def __str__(self) -> str:
        guess = f"{_guess(self.meant)} " if self.meant else ""
        return f"{self.what} has no {self.name}. {guess}It has {', '.join(self.known) or 'nothing'}."


def _guess(meant: tuple[str, ...]) -> str:
    return f"Did you mean {' or '.join(map(repr, meant))}?"


class WrongType(MemoireError, TypeError):
    """The type of a value is not allowed."""

    name: str
    expected: str
    received: str
    advice: str = "Nothing was changed."
    TEXT = "{name} must be {expected}, got {received}. {advice}"


class WrongModel(MemoireError, ValueError):
    """A published model does not fit the network that loads it, or does not consist of named arrays."""

    what: str
    problem: str
    advice: str
    TEXT = "{what} {problem}. Nothing was loaded. {advice}"


class NotCopied(MemoireError, TypeError):
    """An object with threads, sockets or shared memory was copied or pickled."""

    kind: str
    instead: str
    TEXT = "a {kind} can neither be copied nor pickled. {instead}"


class NotPlain(MemoireError, TypeError):
    """A value cannot be stored, because another process could only read it by running code of the writer."""

    kind: str
    TEXT = (
        "a value of type {kind} cannot be stored, because memoire does not pickle. Convert it to tensors, arrays, "
        "numbers, texts, bytes or None, or to lists, tuples, sets and dicts of them."
    )


class NotSettable(MemoireError, AttributeError):
    """An attribute was assigned, but that would have no effect: another call changes the value."""

    kind: str
    attribute: str
    instead: str
    TEXT = "{attribute} of a {kind} cannot be set as an attribute. Nothing was changed. {instead}"


class EntryError(MemoireError, ValueError):
    """A value of an entry does not have the dtype or shape of its column."""

    column: str
    expected: str
    received: str
    advice: str = "Convert the value, or change the column's declaration."

    def __str__(self) -> str:
        mistake = f"column {self.column!r} stores {self.expected}, but got {self.received}"
        return f"{mistake}. The entry was not added. {self.advice}"


class NotFinite(EntryError):
    """A reward, value or observation of an entry is NaN or infinite."""

    def __init__(self, column: str, expected: str, received: str, is_state: bool) -> None:
        Exception.__init__(self, column, expected, received, is_state)
        self.column, self.expected, self.received, self.is_state = column, expected, received, is_state

    def __str__(self) -> str:
        allow = " If it has a meaning, declare the column with Column(..., nan='allow')." if self.is_state else ""
        return (
            f"column {self.column!r} stores {self.expected}, but got {self.received}. The entry was not added: one "
            f"number that is not finite makes all weights of a network NaN. Find out where it comes from.{allow}"
        )


class EpisodeError(MemoireError, RuntimeError):
    """A call is not allowed in the current state of an episode, such as open, closed or empty."""


class EpisodeClosedError(EpisodeError):
    """An entry was added to an episode that is not open, or the caller closed such an episode."""

    action: str
    lane: int
    TEXT = "cannot {action}: episode {lane} is not open. Call new_episode() first."


class EmptyEpisodeError(EpisodeError):
    """An episode without entries cannot be closed."""

    lane: int
    TEXT = "cannot close episode {lane}: it has no entries. Add at least one entry before closing it."


class EpisodeTooLong(EpisodeError):
    """An open episode fills the whole memory. The memory refused the entry that did not fit."""

    lane: int
    length: int
    capacity: int
    ragged_limit: int = 0

    def __str__(self) -> str:
        if self.ragged_limit:
            return (
                f"episode {self.lane} has {self.length} entries. With one more entry, the values of ragged columns in "
                f"open episodes would take over {self.ragged_limit} bytes (ragged_limit): the entry was refused and "
                f"the episode stays as it was. Close it (truncated), or raise ragged_limit."
            )
        return (
            f"episode {self.lane} has {self.length} entries and the memory has room for {self.capacity} in all: the "
            f"entry was refused and the episode stays as it was. Close it (truncated), or make the memory larger."
        )


class EmptyMemory(MemoireError, RuntimeError):
    """A memory or table holds no entry with a positive weight, so that no sample can be drawn."""

    entries: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"nothing to draw: {self.reason}."
        return (
            f"nothing to draw: {self.entries} entries are stored and none has a positive weight. Close an episode "
            f"that is longer than frame_stack - 1 + multi_step, or give its last state (final_state=...). If limits "
            f"are set (max_times_sampled, max_age, max_model_lag), wait for entries that are within them."
        )


class NoDrawsLeft(EmptyMemory):
    """A batch is larger than the number of draws that `max_times_sampled` still allows; no sample was taken."""

    def __init__(self, wanted: int, left: int, times: int) -> None:
        Exception.__init__(self, wanted, left, times)
        self.entries, self.wanted, self.left, self.times = 0, wanted, left, times

    def __str__(self) -> str:
        return (
            f"a draw of {self.wanted} samples is not possible: each entry is drawn at most {self.times} times "
            f"(max_times_sampled), and {self.left} draws are left for all entries together. No sample was taken. "
            f"Add entries first, or draw fewer."
        )


class StaleEntry(MemoireError, LookupError):
    """A requested entry has left the memory."""

    number: int
    position: int
    TEXT = (
        "entry {number} (position {position} of the request) is not in this memory: it was overwritten or "
        "evicted, or never existed. Gather right after drawing (sample() does both at once), or enlarge the memory."
    )


class NoSuchRow(MemoireError, IndexError):
    """A requested row or frame number does not exist in the memory."""

    what: str
    number: int
    position: int
    where: str
    TEXT = (
        "{what} {number} at position {position} {where}. "
        "Take rows and frames from the same `last_report()` in which they are used: they change as the memory goes on."
    )


class NotEnoughSamples(MemoireError, RuntimeError):
    """A batch cannot be filled, or has to wait for entries (`reason`); no sample was taken."""

    wanted: int
    unused: int
    caches: int
    clients: int
    waited: float = 0.0
    reason: str = ""
    advice: str = "Wait for actors to push (timeout=)."

    def __str__(self) -> str:
        after = f" after waiting {self.waited:.1f} s" if self.waited else ""
        if self.reason:
            return f"a batch of {self.wanted} has to wait: {self.reason}{after}. No sample was taken. {self.advice}"
        return (
            f"a batch of {self.wanted} needs {self.wanted} unused samples, but {self.unused} are held in "
            f"{self.caches} caches of {self.clients} clients{after}. No sample was taken. "
            f"Wait for actors to push (timeout=), or set reuse_cache."
        )


class ProtocolError(MemoireError, ValueError):
    """A message does not follow memoire's protocol, or is incomplete."""

    code: str
    detail: str
    TEXT = "message refused ({code}): {detail}"


class SchemaMismatch(MemoireError, ValueError):
    """A client sent a field in a shape or dtype that the server does not store."""

    client: str
    field: str
    expected: str
    received: str
    TEXT = (
        "client {client} sent field {field!r} as {received}, but this server stores {expected}. Restart the client to "
        "fetch the schema, or declare {field!r} as {received} on the server."
    )


class MemoireTimeout(MemoireError, TimeoutError):
    """A call received no answer within its timeout."""

    waited_for: str
    endpoint: str
    seconds: float
    advice: str
    TEXT = "no {waited_for} from {endpoint} within {seconds:.1f} s. {advice}"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errno = errno.ETIMEDOUT


class Refused(MemoireError, RuntimeError):
    """The other side understood a request and declined it."""

    endpoint: str
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.endpoint} refused the request ({self.code}): {escape(self.text)}"


class Closed(MemoireError, RuntimeError):
    """The object of a call was closed, perhaps by another thread while the call was waiting."""

    what: str
    TEXT = "{what} is closed. Create a new one to go on."


class TwoThreads(MemoireError, RuntimeError):
    """Two threads called one writer at the same time; the writer refused the step of the second thread."""

    what: str
    call: str
    TEXT = (
        "{call}() was called while another thread was inside of {what}: nothing of this call was "
        "stored. Only one thread may use it at a time. Create one for each thread, with separate environments "
        "(writer() may be called any number of times), or protect it with a lock."
    )


class ForkedError(MemoireError, RuntimeError):
    """A forked process used a client, or a file open for writing, that belongs to its parent process."""

    what: str
    owner: int
    here: int
    TEXT = (
        "{what} belongs to process {owner} and cannot be used in process {here}, forked from it: a fork has no "
        "threads, sockets or locks of its own. Create it after the fork, or start processes with the 'spawn' method."
    )


class EndpointError(MemoireError, ValueError):
    """The address of a socket cannot be bound, or a client cannot connect to it."""

    endpoint: str
    action: str
    reason: str
    instead: str = ""

    def __str__(self) -> str:
        usual = "a free address" if self.action == "bind" else "the address of a memoire server or proxy"
        instead = self.instead or f"{usual}, such as 'tcp://127.0.0.1:5560'"
        return f"cannot {self.action} {self.endpoint!r}: {self.reason}. Give {instead}."


class EpisodeTorn(EpisodeError):
    """The observation of a step differs from the next observation of the step before."""

    environment: int
    length: int
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return (
                f"the step before, step {self.length + 1} of the episode of environment {self.environment}, was "
                f"refused, so that this step does not follow the last stored one. Nothing was added. That step was "
                f"refused because: {self.refused} Correct that. Then call env.reset() and writer.reset(), which "
                f"stores the steps before it as a truncated episode; or repeat the refused step."
            )
        return (
            f"environment {self.environment} is {self.length} steps into an episode, but obs is not the next_obs that "
            f"the step before returned. Nothing was added. If it was reset, call writer.reset() after env.reset(); if "
            f"you change observations between steps, pass both obs and next_obs to step() in the changed form, or "
            f"create the writer with check=False."
        )


class EpisodeOver(EpisodeError):
    """A step was recorded after the end of an episode, because the program did not call `env.reset()`."""

    environment: int
    length: int
    TEXT = (
        "environment {environment} was stepped again after its episode had ended, not for the first time: obs is "
        "the next_obs that ended the episode after step {length}, and no earlier episode began there. Nothing was "
        "added. Call env.reset() after each end (terminated or truncated), and continue from the observation that it "
        "returns. If the environment resets itself, pass its autoreset mode to the writer. If episodes do begin where "
        "the last one ended, call writer.reset() between them."
    )


class ObservationReused(EpisodeError):
    """`obs` and `next_obs` are the same array, so that the observation before the step is lost."""

    column: str
    TEXT = (
        "obs and next_obs are the same array (column {column!r}): the environment overwrites the observation "
        "before the step, which is lost. Nothing was added. Create vector environments with "
        "copy=True, or copy obs before each env.step()."
    )


class FinalObservationMissing(EpisodeError):
    """An episode ended in autoreset mode same_step, and `info` lacks the last observation of the episode."""

    environment: int
    TEXT = (
        "environment {environment} ended an episode and was reset in the same step, so info['final_obs'] should hold "
        "the last observation of the episode, but does not. Nothing was added. Pass the info that envs.step() "
        "returned to step(), or pass the environments' autoreset mode ('next_step' or 'disabled') to the writer."
    )


class ChildDied(MemoireError, RuntimeError):
    """A process of a local cluster ended by itself or was killed."""

    name: str
    status: int
    last_words: tuple[str, ...]

    @property
    def end_text(self) -> str:
        """The end of the process in words: its exit status, or the signal that killed it."""
        return f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"

    def __str__(self) -> str:
        words = "\n    ".join(map(escape, self.last_words)) or "(it printed nothing)"
        return f"{self.name} {self.end_text}, so the cluster on this machine was stopped. Its last output:\n    {words}"


class KeyFileError(MemoireError, ValueError):
    """A folder or file of keys is missing, malformed or readable by other users."""

    path: str
    problem: str
    advice: str
    TEXT = "{path} {problem}. {advice}"


class AuthError(MemoireError, PermissionError):
    """A node does not accept the key of this process, or does not have the expected key itself."""

    endpoint: str
    reason: str
    advice: str
    TEXT = "{endpoint} denied access: {reason}. {advice}"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errno = errno.EACCES


class DataError(MemoireError, ValueError):
    """A file that memoire saves, such as a file of episodes, is damaged, or the path holds another kind of file."""

    path: str
    problem: str
    TEXT = "{path} {problem}. Nothing was loaded. Use another copy of the file, or save it again."


class BufferLocked(MemoireError, RuntimeError):
    """Another process, or another buffer of this process, has resumed the buffer that is saved in a file."""

    path: str
    pid: int
    host: str
    holder: str
    TEXT = (
        "{path} holds a buffer that {holder} has resumed: only one buffer may resume it. Nothing was "
        "changed. Close that buffer or end its process, save to another path, or load the file without resume=True, "
        "which creates another buffer from it."
    )


class BufferSaveConflict(MemoireError, RuntimeError):
    """A saved file holds steps that the buffer which would overwrite the file does not have."""

    path: str
    TEXT = (
        "{path} was saved by another process that resumed the same buffer: the file has steps that this buffer does "
        "not have. Nothing was written. Save to another path, or delete that file first if it is not needed."
    )


class SnapshotMismatch(MemoireError, ValueError):
    """A snapshot does not fit the server that restores it: tables, schemas or sample shapes differ."""

    path: str
    problem: str
    advice: str
    TEXT = "{path} {problem}. Nothing was restored. {advice}"


class HistoryError(MemoireError, OSError):
    """The dashboard cannot use the file in which it keeps its curves."""

    path: str
    reason: str
    TEXT = (
        "the dashboard cannot use its history file {path!r}: {reason}. Give another file (--history), or move this "
        "one away: it holds only curves; the servers keep everything else."
    )


class RunFileError(MemoireError, ValueError):
    """A file is not a run that a dashboard exported, or is damaged."""

    path: str
    reason: str
    TEXT = (
        "the file {path!r} is not a run that a dashboard exported: {reason}. Export the run again (page "
        'Runs, "one file", or GET /api/export.run) and open that file.'
    )


class StateError(MemoireError, RuntimeError):
    """A server cannot use its state folder, and has not changed it."""


class StateLocked(StateError):
    """Another process has opened the folder, such as the state folder of a server."""

    folder: str
    pid: int
    host: str
    what: str = "the state folder"
    user: str = "server"

    def __str__(self) -> str:
        holder = f"process {self.pid} on host {self.host!r}" if self.pid else "another process"
        return (
            f"{self.what} {self.folder} is in use by {holder}: only one {self.user} may write it. Stop that one first, "
            f"or give this {self.user} a folder of its own."
        )


class StateForeign(StateError):
    """The files in a state folder belong to another server, to another program or to a newer version of memoire."""

    path: str
    reason: str
    advice: str
    TEXT = "{path} {reason}. Nothing was changed. {advice}"


class StateCorrupt(StateError):
    """A state folder is damaged. The server refuses to start from it, and never resets it without being asked."""

    path: str
    damage: str
    advice: str
    TEXT = "{path} is damaged: {damage}. It was left as it is. {advice}"


class StateUnusable(StateError):
    """A state folder cannot be written safely: it is read-only, not a folder, or on a network file system."""

    folder: str
    reason: str
    advice: str
    TEXT = "the state folder {folder} cannot be used: {reason}. {advice}"


class StateLost(StateError):
    """The disk failed during a write. The server acknowledges nothing until it is restarted."""

    folder: str
    reason: str
    TEXT = (
        "the state in {folder} could not be saved: {reason}. Nothing is acknowledged any more. Check "
        "the disk and start the server again: its clients then repeat all messages that were not acknowledged."
    )


class RanksDiffer(MemoireError, RuntimeError):
    """The ranks of a distributed learner differ in a count that must be equal, such as their updates."""

    what: str
    least: int
    most: int
    rank: int
    own: int
    TEXT = (
        "the ranks have {least} to {most} {what}, and rank {rank} has {own}; they "
        "must be equal. Give all ranks the same settings, and start them again together."
    )


class CodecMismatch(MemoireError, ValueError):
    """A sender compresses samples with another codec than the one with which the trainer restores them."""

    sender: str
    received: str
    expected: str
    TEXT = (
        "{sender} compresses samples with the codec {received}, but this trainer restores them with "
        "{expected}. No sample was taken. Give both the same version of the codec."
    )


class CrcFailed(MemoireError, ValueError):
    """A transition that a trainer restored differs from the transition that the worker recorded."""

    where: str
    item: int
    sender: str
    path: str
    expected: str
    received: str
    TEXT = (
        "transition {item} of {where} differs from the one that {sender} recorded. The first "
        "difference is at {path}: recorded as {expected}, restored as {received}. Compare the fields that the "
        "compressor leaves out with the fields that the memory adds."
    )


class CrcDebugMismatch(MemoireError, ValueError):
    """Only the worker or only the memory has `crc_debug`, so that transitions cannot be compared."""

    has_it: str
    lacks_it: str
    TEXT = (
        "crc_debug is set for {has_it}, but not for {lacks_it}: nothing can be compared. Set it to the "
        "same value for both, or for neither."
    )


class PathHeld(MemoireError, RuntimeError):
    """Another process, or another role in this process, keeps its model at this path."""

    path: str
    role: str
    pid: int
    host: str

    def __str__(self) -> str:
        holder = f"a {self.role}, process {self.pid} on host {self.host!r}" if self.pid else "another process"
        return (
            f"{self.path} is in use by {holder}: only one role may keep its model at a path. Set another "
            f"model_path, or end that process."
        )


class ObserverLost(MemoireError, RuntimeError):
    """The worker of a job stopped answering, and the job has no attempts left."""

    job: int
    worker: str
    seconds: float
    TEXT = "job {job} is lost: {worker} sent nothing for {seconds:.1f} s. Submit it again, or allow more attempts."


class JobFailed(MemoireError, RuntimeError):
    """The worker of a job reported that the job failed."""

    job: int
    worker: str
    text: str

    def __str__(self) -> str:
        return f"job {self.job} failed at {self.worker}: {escape(self.text)}. The worker's log has the details."


class JobCancelled(MemoireError, RuntimeError):
    """The job of an observer was cancelled, or another observer has taken it over."""

    job: int
    TEXT = "job {job} was cancelled. Do not catch this error: the observer then asks for another job."


class NoActionAllowed(MemoireError, ValueError):
    """A mask of actions allows no action in one of its rows."""

    row: str
    actions: int
    TEXT = (
        "the mask of {row} allows none of its {actions} actions. End the episode in such a state, or "
        "allow an action that changes nothing."
    )


class EpochOver(MemoireError, RuntimeError):
    """All prompts of the finished epochs are drawn or dropped, so that a trainer's next step has no group."""

    step: int
    TEXT = (
        "there is no group for step {step}: every prompt of the finished epochs is drawn or dropped. Add the "
        "prompts of the next epoch, or end the training."
    )
