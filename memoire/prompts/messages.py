"""What messages about prompts say: a giver adds prompts, workers answer them, trainers draw groups of answers."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from memoire.kinds import (
    Body,
    Count,
    Name,
    Seconds,
    Signed,
    Small,
    StepNumber,
    TailRow,
    Text,
    Weight,
    Word,
    body,
    types,
)


class PromptKey(TailRow, frozen=True, array_like=True):
    """What names a prompt."""

    dataset: Name
    epoch: Small
    index: Count


class NewPrompt(TailRow, frozen=True, array_like=True):
    """A prompt that is given. Its payload lies behind that of the row before."""

    index: Count
    bytes: Count


class AnswerPiece(TailRow, frozen=True, array_like=True):
    """A piece of an answer: the values of some columns, one after the other in the schema's order, as raw bytes."""

    dataset: Name
    epoch: Small
    index: Count
    lease: Word  # under which it comes; 0: none, to amend
    answer: Small  # its place in the group
    piece: Small
    is_last: bool
    version: Count  # of the model that made it
    columns: Word  # a bit for each column of the schema
    lengths: Annotated[list[Count], Meta(max_length=64)]  # elements of each ragged one of them
    bytes: Count
    failed: Annotated[str, Meta(max_length=1024)]  # why it does not come; "": it does
    is_again: bool  # another lease may give it


class LeasedPrompt(TailRow, frozen=True, array_like=True):
    """A prompt that a worker has to answer. Its payload lies behind that of the row before."""

    dataset: Name
    epoch: Small
    index: Count
    lease: Word
    seconds: Seconds  # that the lease lasts
    missing: Annotated[list[Small], Meta(max_length=65536)]  # answers that are wanted
    is_evaluation: bool
    tags: Annotated[dict[Name, Name], Meta(max_length=32)]
    bytes: Count


class PromptFacts(TailRow, frozen=True, array_like=True):
    """Where a prompt stands, without its payload and columns."""

    dataset: Name
    epoch: Small
    index: Count
    state: Small
    reason: Name
    step: StepNumber  # -1: it is drawn by none
    priority: Signed
    score: Signed
    version: Count  # of the model that made its oldest token
    tokens: Count
    attempts: Small
    is_evaluation: bool
    tags: Annotated[dict[Name, Name], Meta(max_length=32)]
    columns: Annotated[list[Word], Meta(max_length=65536)]  # that each answer has, a bit each


class GroupFacts(TailRow, frozen=True, array_like=True):
    """One group of a step."""

    dataset: Name
    epoch: Small
    index: Count
    answers: Annotated[list[Small], Meta(max_length=65536)]  # places of those that are handed out
    tokens: Count
    version: Count
    score: Signed
    importance: Weight  # 1, unless it is replayed
    is_replayed: bool


class StepPlan(TailRow, frozen=True, array_like=True):
    """How many groups of a step each server gives. A later version replaces an earlier one."""

    version: Small
    groups: Annotated[dict[Name, Small], Meta(max_length=4096)]
    wanted: Small = 0  # groups that the step was asked for; 0: an older trainer does not say it


class AnswerColumns(TailRow, frozen=True, array_like=True):
    """Columns of one answer that were asked for, in the schema's order. They lie behind those of the row before."""

    key: Small  # place of its prompt in the request
    answer: Small
    version: Count
    columns: Word
    lengths: Annotated[list[Count], Meta(max_length=64)]
    bytes: Count


@body(types.PROMPTS)
class Prompts(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for prompts of a table that stores them; only cursors of consumers are changed. Answered by PROMPTED."""

    changes: ClassVar = True
    call: Literal["counts", "list", "fetch", "payloads", "forget"]
    states: Annotated[list[Small], Meta(max_length=16)] = []  # none: any
    tags: Annotated[dict[Name, Name], Meta(max_length=32)] = {}  # that a prompt has to have
    since: Word = 0  # number of a change: those after it
    consumer: Name = ""  # whose cursor `since` becomes, "": nobody's; or that is to be forgotten
    is_going_on: bool = False  # from the consumer's cursor on
    most: Small = 1000
    keys: Annotated[list[PromptKey], Meta(max_length=65536)] = []
    columns: Word = 0  # a bit each
    after: Small | None = None  # fetch: answers to the first key that came already; null: no answer comes in parts
    offset: Count = 0  # bytes of the next one that came already
    changed: Word = 0  # number of the newest change of the first key when these came
    rank: Small = 0  # of the trainer that fetches its part of a step
    ranks: Small = 0  # of how many; 0: these are no groups of a step


@body(types.ANSWERS)
class Answers(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A worker leases prompts, answers them or gives them back; anybody amends answers. Answered by PROMPTED."""

    changes: ClassVar = True
    call: Literal["lease", "renew", "answer", "amend", "fail", "release"]
    count: Small = 1  # leases
    seconds: Seconds = 0.0  # that a lease lasts; 0: as the table says
    version: Count | None = None  # of the worker's model
    leases: Annotated[list[Word], Meta(max_length=65536)] = []  # that the worker has; or that it renews or releases
    pieces: Annotated[list[AnswerPiece], Meta(max_length=65536)] = []

    @property
    def is_saved_first(self) -> bool:
        """Leases save nothing."""
        return self.call not in {"lease", "renew"}


@body(types.GROUPS)
class Groups(Body, frozen=True, kw_only=True, omit_defaults=True):
    """A giver adds prompts and orders them; a trainer draws groups, commits and rewinds. Answered by PROMPTED."""

    changes: ClassVar = True
    call: Literal[
        "add",
        "known",
        "cancel",
        "prioritise",
        "finish",
        "forget",
        "shares",
        "model",
        "draw",
        "commit",
        "rewind",
        "score",
    ]
    dataset: Name = ""
    epoch: Small = 0
    new: Annotated[list[NewPrompt], Meta(max_length=65536)] = []
    priority: Signed = 0.0
    is_evaluation: bool = False
    tags: Annotated[dict[Name, Name], Meta(max_length=32)] = {}
    keys: Annotated[list[PromptKey], Meta(max_length=65536)] = []
    values: Annotated[list[Signed], Meta(max_length=65536)] = []  # scores of these
    shares: Annotated[dict[Name, Weight], Meta(max_length=1024)] = {}
    session: Name = ""  # of the trainer
    step: Count = 0
    is_before_first: bool = False  # rewind to before the first step
    count: Small = 0  # groups of this server; 0 only asks
    wanted: Small = 0  # groups that the whole step is to have
    replay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    is_last: bool = False  # take what is ready, also if it is less
    after: Small | None = None  # draw: groups of the step that came already; null: all of them come in one reply
    plan: StepPlan | None = None  # to be kept here
    version: Count | None = None  # of the newest model

    @property
    def is_saved_first(self) -> bool:
        """All but "known", which only asks."""
        return self.call != "known"


@body(types.PROMPTED)
class Prompted(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answers PROMPTS, ANSWERS and GROUPS."""

    epoch: Word = 0
    counts: Annotated[dict[Name, Count], Meta(max_length=64)] = {}  # prompts in each state, and other figures
    done: Count = 0  # prompts, leases or groups that the call has changed
    flags: Annotated[bytes, Meta(max_length=65536)] = b""  # of each prompt or piece that was named
    wait: Text = ""  # why there is not what was asked for
    leases: Annotated[list[LeasedPrompt], Meta(max_length=4096)] = []
    prompts: Annotated[list[PromptFacts], Meta(max_length=65536)] = []
    cursor: Word = 0  # after the last one of these
    sizes: Annotated[list[Count], Meta(max_length=65536)] = []  # of the payloads that were asked for
    columns: Annotated[list[AnswerColumns], Meta(max_length=65536)] = []
    rest: Count = 0  # bytes of the last one of `columns` that are left
    answered: Small = 0  # keys of the request that `columns` and `sizes` are complete for
    changed: Word = 0  # number of the newest change of the next key; another one than before: it begins again
    groups: Annotated[list[GroupFacts], Meta(max_length=65536)] | None = None  # of the step here, if they are fixed
    is_closed: bool = False  # the step gets no more here
    plan: StepPlan | None = None
    committed: Count | None = None  # the newest step that is committed
    is_over: bool = False  # no more prompts come, and none is on its way
    is_empty: bool = False  # no prompt was ever given here
    is_whole: bool = True  # whether there are no further prompts or groups to ask for
