"""Every exception that memoire raises on purpose, in one tree.

Each derives from `MemoireError` and from the builtin that a caller would guess; its arguments are the facts, so that it
survives pickling, and its text says which value, from whom, what was expected and what to do now.
"""

import contextlib
import dataclasses
import errno
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, dataclass_transform


@dataclass_transform(eq_default=False)
class MemoireError(Exception):
    """Whatever memoire raises on purpose.

    A class declares its facts as a dataclass does, and says them in `TEXT`, or in `__str__` if that depends on them.

    Gymnasium and others raise an error again as `type(error)(text)`. So each class can also be made of one text, which
    is then what the error says: class and sentence stay, and its facts are gone.
    """

    TEXT = ""
    """What it says, with {NAME} for a fact."""
    sentence: str | None = None
    """What an error says that was made of its text alone; None if it has facts."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__annotations__:
            dataclasses.dataclass(eq=False, repr=False, match_args=False)(cls)
        for name, also_text in (("__init__", _facts_or_text), ("__str__", _sentence_or_facts)):
            if name in vars(cls):
                setattr(cls, name, also_text(vars(cls)[name]))

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())  # its facts, in their order: so it survives pickling

    def __str__(self) -> str:
        if self.sentence is not None:
            return self.sentence
        return self.TEXT.format_map(vars(self)) if self.TEXT else super().__str__()


def _facts_or_text(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that also takes the text of an error in place of its facts."""

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
    """Whether the only argument of a class is the text of such an error, with or without words after it.

    A class of several facts, or of a number, has no other use for one text. That of a class of one text is known by
    the words around it.
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
    """Something listens for everybody: other machines can reach it, and nothing asks who they are."""


# Whatever could start a new line, move a terminal's cursor, or change the direction in which the rest of the line is
# read (Boucher and Anderson, Trojan Source, 2021); a tab may stay.
_UNSAFE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff" + "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_SHORT = {"\n": "\\n", "\r": "\\r"}


def escape(text: str) -> str:
    r"""`text` on one line: line breaks, control characters and marks of direction become escapes: ``\n``, ``\x1b``,
    ``\u202e``.
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class NotBuilt(MemoireError, ImportError):
    """What Python found is memoire's source code, without the part of it that has to be compiled."""

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
        """Raise this error if an import in the block does not find a package that `command` installs."""
        try:
            yield
        except ModuleNotFoundError as error:
            if isinstance(error, cls) or error.name is None or error.name.partition(".")[0] == "memoire":
                raise
            raise cls(error.name, command) from None


class ProtocolMoved(MemoireError, ImportError):
    """Another library is installed in a version whose interface is not the one that an adapter was written for."""

    module: str
    version: str
    problem: str
    TEXT = (
        "{module} {version} is not what this adapter was written for: {problem}. Install a version "
        "that it was tried with, or a newer memoire."
    )


class SchemaError(MemoireError, ValueError):
    """A column, role, dtype or shape that a schema cannot have."""


class ParameterError(MemoireError, ValueError):
    """A parameter was set to something that it cannot be."""

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
    """An argument or setting was given by a name that there is none of."""

    def __init__(self, what: str, name: str, meant: tuple[str, ...], known: tuple[str, ...], advice: str = "") -> None:
        Exception.__init__(self, what, name, meant, known, advice)
        self.what, self.name, self.meant, self.known, self.advice = what, name, meant, known, advice

    def __str__(self) -> str:
        if self.advice:
            advice = self.advice
        elif self.meant:
            advice = _guess(self.meant)
        else:
            advice = f"It takes {', '.join(self.known) or 'none'}."
        return f"{self.what} takes no {self.name!r}. {advice} Nothing was changed."


class NoSuchField(MemoireError, KeyError):
    """A batch, schema or the like was asked for something by a name that it does not have."""

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
    """A value is of a type that cannot be taken."""

    name: str
    expected: str
    received: str
    advice: str = "Nothing was changed."
    TEXT = "{name} must be {expected}, got {received}. {advice}"


class WrongModel(MemoireError, ValueError):
    """A published model does not fit the network that it is loaded into, or is none of named arrays."""

    what: str
    problem: str
    advice: str
    TEXT = "{what} {problem}. Nothing was loaded. {advice}"


class NotCopied(MemoireError, TypeError):
    """Something was to be copied or pickled that has threads, sockets or a memory which others share."""

    kind: str
    instead: str
    TEXT = "a {kind} can neither be copied nor pickled. {instead}"


class NotPlain(MemoireError, TypeError):
    """A value was to be stored that no other process could read without running code of whoever wrote it."""

    kind: str
    TEXT = (
        "a value of type {kind} cannot be stored: tensors, arrays, numbers, texts, bytes, None, and lists, "
        "tuples, sets and dicts of them can. Nothing is pickled: turn it into these."
    )


class NotSettable(MemoireError, AttributeError):
    """An attribute was set that nobody would read: what was meant is changed in another way."""

    kind: str
    attribute: str
    instead: str
    TEXT = "{attribute} of a {kind} cannot be set as an attribute. Nothing was changed. {instead}"


class EntryError(MemoireError, ValueError):
    """A value of an entry does not match its column."""

    column: str
    expected: str
    received: str
    advice: str = "Convert the value, or declare the column so."

    def __str__(self) -> str:
        mistake = f"column {self.column!r} stores {self.expected}, but got {self.received}"
        return f"{mistake}. The entry was not added. {self.advice}"


class NotFinite(EntryError):
    """A reward, value or observation of an entry is NaN or infinite."""

    def __init__(self, column: str, expected: str, received: str, is_state: bool) -> None:
        Exception.__init__(self, column, expected, received, is_state)
        self.column, self.expected, self.received, self.is_state = column, expected, received, is_state

    def __str__(self) -> str:
        allow = " If it means something, declare the column so: Column(..., nan='allow')." if self.is_state else ""
        return (
            f"column {self.column!r} stores {self.expected}, but got {self.received}. The entry was not added: one "
            f"number that is not finite makes all weights of a network NaN. Look for where it comes from.{allow}"
        )


class EpisodeError(MemoireError, RuntimeError):
    """An episode was used in a way its state does not allow."""


class EpisodeClosedError(EpisodeError):
    """There is no open episode to add to or to close."""

    action: str
    lane: int
    TEXT = "cannot {action}: episode {lane} is not open. Call new_episode() first."


class EmptyEpisodeError(EpisodeError):
    """An episode without entries cannot be closed."""

    lane: int
    TEXT = "cannot close episode {lane}: it has no entries. Add at least one entry before closing it."


class EpisodeTooLong(EpisodeError):
    """An episode that is still open fills the whole memory. The entry that did not fit was refused."""

    lane: int
    length: int
    capacity: int
    ragged_limit: int = 0

    def __str__(self) -> str:
        if self.ragged_limit:
            return (
                f"episode {self.lane} has {self.length} entries, and with one more values of ragged columns in open "
                f"episodes would take over {self.ragged_limit} bytes (ragged_limit): the entry was refused and the "
                f"episode stays as it was. Close it (truncated), or allow more."
            )
        return (
            f"episode {self.lane} has {self.length} entries and the memory has room for {self.capacity} in all: the "
            f"entry was refused and the episode stays as it was. Close it (truncated), or make the memory larger."
        )


class EmptyMemory(MemoireError, RuntimeError):
    """There is nothing with a positive weight to draw from."""

    entries: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"nothing to draw: {self.reason}."
        return (
            f"nothing to draw: {self.entries} entries are stored and none has a positive weight. Close an episode "
            f"that is longer than frame_stack - 1 + multi_step, or say how it ended (final_state=...). Where there are "
            f"limits (max_times_sampled, max_age, max_model_lag), wait for entries that are within them."
        )


class UsedUp(EmptyMemory):
    """More samples were asked for than entries may be drawn yet; none was taken."""

    def __init__(self, wanted: int, left: int, times: int) -> None:
        Exception.__init__(self, wanted, left, times)
        self.entries, self.wanted, self.left, self.times = 0, wanted, left, times

    def __str__(self) -> str:
        return (
            f"a draw of {self.wanted} samples is not possible: an entry is drawn {self.times} times at most "
            f"(max_times_sampled), and all together {self.left} times yet. None was taken. "
            f"Add entries first, or draw fewer."
        )


class StaleEntry(MemoireError, LookupError):
    """An entry was asked for by number after it had left the memory."""

    number: int
    position: int
    TEXT = (
        "entry {number} (position {position} of those asked for) is not in this memory: overwritten, "
        "evicted or never there. Gather right after drawing (sample() does both at once), or enlarge the memory."
    )


class NoSuchRow(MemoireError, IndexError):
    """A row or frame of the memory was asked for by a number that none has."""

    what: str
    number: int
    position: int
    where: str
    TEXT = (
        "{what} {number} at position {position} {where}. "
        "Take rows and frames from the same `held()` in which they are used: they change as the memory goes on."
    )


class NotEnoughSamples(MemoireError, RuntimeError):
    """A batch cannot be filled, or has to wait for entries (`reason` says so); no sample was taken."""

    wanted: int
    unused: int
    caches: int
    clients: int
    waited: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        after = f" after waiting {self.waited:.1f} s" if self.waited else ""
        if self.reason:
            return (
                f"a batch of {self.wanted} has to wait: {self.reason}{after}. None was taken. "
                f"Wait for actors to push (timeout=)."
            )
        return (
            f"a batch of {self.wanted} needs {self.wanted} unused samples, but {self.unused} are held in "
            f"{self.caches} caches of {self.clients} clients{after}. None was taken. "
            f"Wait for actors to push (timeout=), or set reuse_cache."
        )


class ProtocolError(MemoireError, ValueError):
    """A message that is not of this protocol, or not whole."""

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
    """A call waited as long as it may and got no answer."""

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
    """The object was closed, perhaps from another thread while this call was waiting."""

    what: str
    TEXT = "{what} is closed. Make a new one to go on."


class TwoThreads(MemoireError, RuntimeError):
    """Two threads were in one writer at the same time; the second one's step was refused."""

    what: str
    call: str
    TEXT = (
        "{call}() was called while another thread was inside of {what}: nothing of this call was "
        "stored. It belongs to one thread at a time: make one for each thread, with environments of its own "
        "(writer() may be called any number of times), or take turns by a lock."
    )


class ForkedError(MemoireError, RuntimeError):
    """A client, or a file that is being written, was used in a process forked from its own."""

    what: str
    owner: int
    here: int
    TEXT = (
        "{what} belongs to process {owner} and cannot be used in process {here}, forked from it: a fork has no "
        "threads, sockets or locks of its own. Make it after the fork, or start processes with the 'spawn' method."
    )


class EndpointError(MemoireError, ValueError):
    """An address that nobody can bind or connect to."""

    endpoint: str
    action: str
    reason: str
    instead: str = ""

    def __str__(self) -> str:
        usual = "a free address" if self.action == "bind" else "the address of a memoire server or proxy"
        instead = self.instead or f"{usual}, such as 'tcp://127.0.0.1:5560'"
        return f"cannot {self.action} {self.endpoint!r}: {self.reason}. Give {instead}."


class EpisodeTorn(EpisodeError):
    """An environment went on from another observation than the one that its last step ended in."""

    environment: int
    length: int
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return (
                f"the step before, step {self.length + 1} of the episode of environment {self.environment}, was "
                f"refused, so that this one does not go on where the last stored one ended. Nothing was added. That "
                f"step was refused because: {self.refused} Mend that. Then call env.reset() and writer.reset(), which "
                f"stores the steps before it as a truncated episode; or give the refused step again."
            )
        return (
            f"environment {self.environment} is {self.length} steps into an episode, but obs is not the next_obs that "
            f"the step before returned. Nothing was added. If it was reset, call writer.reset() after env.reset(); if "
            f"you change observations on the way, give step() obs and next_obs both changed, or make the writer with "
            f"check=False."
        )


class EpisodeOver(EpisodeError):
    """An environment was stepped on after its episode had ended: `env.reset()` was forgotten."""

    environment: int
    length: int
    TEXT = (
        "environment {environment} is stepped on after its episode has ended, not for the first time: obs is "
        "the next_obs that ended it after step {length}, and no episode began there before. Nothing was "
        "added. Call env.reset() after each end (terminated or truncated), and step on from what it returns. If "
        "the environment resets itself, give the writer its autoreset mode; if episodes do begin where the last "
        "one ended, call writer.reset() between them."
    )


class ObservationReused(EpisodeError):
    """`obs` and `next_obs` are the same array, so that the observation before the step is gone."""

    column: str
    TEXT = (
        "obs and next_obs are one and the same array (column {column!r}): the environment writes each "
        "observation over the one before, which is lost. Nothing was added. Make vector environments with "
        "copy=True, or copy obs before each env.step()."
    )


class FinalObservationMissing(EpisodeError):
    """An episode ended in autoreset mode same_step, and `info` does not hold the observation it ended in."""

    environment: int
    TEXT = (
        "environment {environment} ended an episode and was reset in the same step, so info['final_obs'] "
        "should hold the observation it ended in, but does not. Nothing was added. Give step() the info that "
        "envs.step() returned, or the autoreset mode that the environments have ('next_step' or 'disabled')."
    )


class ChildDied(MemoireError, RuntimeError):
    """A process of a local cluster ended although nobody told it to."""

    name: str
    status: int
    last_words: tuple[str, ...]

    @property
    def how(self) -> str:
        """What became of it: its exit status, or the signal."""
        return f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"

    def __str__(self) -> str:
        words = "\n    ".join(map(escape, self.last_words)) or "(it printed nothing)"
        return f"{self.name} {self.how}, and with it the cluster on this machine. Its last words:\n    {words}"


class KeyFileError(MemoireError, ValueError):
    """A folder or file of keys that cannot be used as it is."""

    path: str
    problem: str
    advice: str
    TEXT = "{path} {problem}. {advice}"


class AuthError(MemoireError, PermissionError):
    """The other side does not let this process in, or is not who it should be."""

    endpoint: str
    reason: str
    advice: str
    TEXT = "not let in at {endpoint}: {reason}. {advice}"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errno = errno.EACCES


class DataError(MemoireError, ValueError):
    """A file that memoire saves, such as one of episodes, is damaged; or the path has another file."""

    path: str
    problem: str
    TEXT = "{path} {problem}. Nothing of it is used. Take another copy, or save it anew."


class BufferLocked(MemoireError, RuntimeError):
    """Another process, or another buffer of this one, goes on as the buffer that is saved in a file."""

    path: str
    pid: int
    host: str
    holder: str
    TEXT = (
        "{path} holds a buffer that {holder} has resumed: only one may go on as it. Nothing was "
        "changed. End that one (or call its close()), save to another path, or load the file without resume=True, "
        "which makes another buffer of it."
    )


class NotItsPast(MemoireError, RuntimeError):
    """A file holds a later state of a buffer than the one that is to take its place has seen."""

    path: str
    TEXT = (
        "{path} was saved by another one that went on as the same buffer: it has steps that this buffer does "
        "not have. Nothing was written. Save to another path, or delete that file first if it is not needed."
    )


class SnapshotMismatch(MemoireError, ValueError):
    """A snapshot of a server that does not fit another one: of other tables, schemas or forms of samples."""

    path: str
    problem: str
    advice: str
    TEXT = "{path} {problem}. Nothing was restored. {advice}"


class HistoryError(MemoireError, OSError):
    """The file in which a dashboard keeps its curves cannot be used."""

    path: str
    reason: str
    TEXT = (
        "the history in {path!r} cannot be used: {reason}. Give another file (--history), or move this "
        "one out of the way: only curves are in it, and the servers have everything else."
    )


class RunFileError(MemoireError, ValueError):
    """A file that should hold an exported run of a dashboard holds something else, or is damaged."""

    path: str
    reason: str
    TEXT = (
        "the file {path!r} holds no run that a dashboard exported: {reason}. Export the run again (page "
        'Runs, "one file", or GET /api/export.run) and open that file.'
    )


class StateError(MemoireError, RuntimeError):
    """A state folder that cannot be used as it is; it was left as it was found."""


class StateLocked(StateError):
    """Another process has this folder open, such as another server its state folder."""

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
    """The files in a state folder belong to something else: another server, program or a newer version."""

    path: str
    reason: str
    advice: str
    TEXT = "{path} {reason}. Nothing was changed. {advice}"


class StateCorrupt(StateError):
    """A state folder is damaged: what it holds cannot be trusted, and it is never reset without being asked."""

    path: str
    damage: str
    advice: str
    TEXT = "{path} is damaged: {damage}. It was left as it is. {advice}"


class StateUnusable(StateError):
    """A state folder that cannot be written safely: read-only, no folder, or on a network file system."""

    folder: str
    reason: str
    advice: str
    TEXT = "the state folder {folder} cannot be used: {reason}. {advice}"


class StateLost(StateError):
    """The disk failed while something was being saved: nothing is acknowledged any more until a restart."""

    folder: str
    reason: str
    TEXT = (
        "the state in {folder} could not be saved: {reason}. Nothing is acknowledged any more. Check "
        "the disk and start the server again: its clients send once more what it has not confirmed."
    )


class RanksDiffer(MemoireError, RuntimeError):
    """Learners that learn as one do not have the same of something."""

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
    """A sender compresses samples in another way than a trainer restores them."""

    sender: str
    received: str
    expected: str
    TEXT = (
        "{sender} compresses samples by the codec {received}, but this trainer restores them by "
        "{expected}. No sample was taken. Give both the same version of the codec."
    )


class CrcFailed(MemoireError, ValueError):
    """A transition that a trainer rebuilt is not the one that a worker recorded."""

    where: str
    item: int
    sender: str
    path: str
    expected: str
    received: str
    TEXT = (
        "transition {item} of {where} differs from the one that {sender} recorded. The first "
        "difference is at {path}: recorded as {expected}, rebuilt as {received}. Compare what the "
        "compressor leaves out with what the memory adds."
    )


class CrcOneSided(MemoireError, ValueError):
    """Transitions were to be compared, but only the worker or only the memory has crc_debug."""

    has_it: str
    lacks_it: str
    TEXT = (
        "crc_debug is set for {has_it}, but not for {lacks_it}: nothing can be compared. Set it to the "
        "same value for both, or for neither."
    )


class PathHeld(MemoireError, RuntimeError):
    """Another process, or another part of this one, keeps its model at this path."""

    path: str
    role: str
    pid: int
    host: str

    def __str__(self) -> str:
        holder = f"a {self.role}, process {self.pid} on host {self.host!r}" if self.pid else "another process"
        return (
            f"{self.path} is in use by {holder}: each keeps its model at a path of its own. Give this one another "
            f"model_path, or end that process."
        )


class ObserverLost(MemoireError, RuntimeError):
    """Whoever had a job fell silent, and nobody else was to have it."""

    job: int
    worker: str
    seconds: float
    TEXT = "job {job} is lost: {worker} said nothing for {seconds:.1f} s. Give it again, or allow more attempts."


class JobFailed(MemoireError, RuntimeError):
    """Whoever had a job tells that it could not be done."""

    job: int
    worker: str
    text: str

    def __str__(self) -> str:
        return f"job {self.job} failed at {self.worker}: {escape(self.text)}. The log there has all of it."


class JobCancelled(MemoireError, RuntimeError):
    """The job is not wanted any more, or somebody else has it."""

    job: int
    TEXT = "job {job} was cancelled. Let this error pass: the observer asks for another job."


class NothingAllowed(MemoireError, ValueError):
    """A mask allows no action in some row."""

    row: str
    actions: int
    TEXT = (
        "the mask of {row} allows none of its {actions} actions. End the episode in such a state, or "
        "allow an action that changes nothing."
    )


class EpochOver(MemoireError, RuntimeError):
    """All prompts of the epochs that were finished are drawn: there is no group for a further step."""

    step: int
    TEXT = (
        "there is no group for step {step}: every prompt of the finished epochs is drawn or dropped. Add the "
        "prompts of the next epoch, or end the training."
    )
