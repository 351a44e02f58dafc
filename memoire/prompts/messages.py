"""Messages about prompts: programs add prompts, workers answer them, and trainers draw groups of answers."""

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
    """Name of a prompt: data set, epoch and index."""

    dataset: Name
    epoch: Small
    index: Count


class NewPrompt(TailRow, frozen=True, array_like=True):
    """Row of a prompt to add. The row's payload follows that of the row before."""

    index: Count
    bytes: Count


class AnswerPiece(TailRow, frozen=True, array_like=True):
    """Piece of an answer: the values of some columns as raw bytes, concatenated in the schema's order."""

    dataset: Name
    epoch: Small
    index: Count
    lease: Word  # lease of the answer; 0 to amend without a lease
    answer: Small  # place in the group
    piece: Small
    is_last: bool
    version: Count  # version of the model that made the piece
    columns: Word  # a bit for each column of the schema
    lengths: Annotated[list[Count], Meta(max_length=64)]  # elements of each ragged column
    bytes: Count
    failed: Annotated[str, Meta(max_length=1024)]  # reason why the answer does not come, or ""
    is_again: bool  # True if another lease may give the answer


class LeasedPrompt(TailRow, frozen=True, array_like=True):
    """Prompt that a worker has to answer. The prompt's payload follows that of the row before."""

    dataset: Name
    epoch: Small
    index: Count
    lease: Word
    seconds: Seconds  # remaining seconds of the lease
    missing: Annotated[list[Small], Meta(max_length=65536)]  # places of the missing answers
    is_evaluation: bool
    tags: Annotated[dict[Name, Name], Meta(max_length=32)]
    bytes: Count


class PromptFacts(TailRow, frozen=True, array_like=True):
    """State of a prompt, without its payload and columns."""

    dataset: Name
    epoch: Small
    index: Count
    state: Small
    reason: Name
    step: StepNumber  # step that drew the prompt, or -1
    priority: Signed
    score: Signed
    version: Count  # version of the model that made the oldest token
    tokens: Count
    attempts: Small
    is_evaluation: bool
    tags: Annotated[dict[Name, Name], Meta(max_length=32)]
    columns: Annotated[list[Word], Meta(max_length=65536)]  # mask of each answer's columns


class GroupFacts(TailRow, frozen=True, array_like=True):
    """One group of a step, without its columns."""

    dataset: Name
    epoch: Small
    index: Count
    answers: Annotated[list[Small], Meta(max_length=65536)]  # places of the answers that trainers get
    tokens: Count
    version: Count
    score: Signed
    importance: Weight  # 1 unless the group is replayed
    is_replayed: bool


class StepPlan(TailRow, frozen=True, array_like=True):
    """Number of groups that each server contributes to a step. A later version replaces an earlier one."""

    version: Small
    groups: Annotated[dict[Name, Small], Meta(max_length=4096)]
    wanted: Small = 0  # requested groups of the step; 0 from an older trainer


class AnswerColumns(TailRow, frozen=True, array_like=True):
    """Columns of one fetched answer, in the schema's order. The columns' bytes follow those of the row before."""

    key: Small  # place of the prompt in the request
    answer: Small
    version: Count
    columns: Word
    lengths: Annotated[list[Count], Meta(max_length=64)]
    bytes: Count


@body(types.PROMPTS)
class PromptsRequest(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request for prompts of a table. Changes only cursors of consumers. Answered by PROMPTED."""

    changes: ClassVar = True
    call: Literal["counts", "list", "fetch", "payloads", "forget"]
    states: Annotated[list[Small], Meta(max_length=16)] = []  # wanted states; empty for any
    tags: Annotated[dict[Name, Name], Meta(max_length=32)] = {}  # tags that a prompt must have
    since: Word = 0  # number of a change; the reply lists later ones
    consumer: Name = ""  # consumer to remove, or consumer to move to `since`; or ""
    is_going_on: bool = False  # True to list from the consumer's cursor on
    most: Small = 1000
    keys: Annotated[list[PromptKey], Meta(max_length=65536)] = []
    columns: Word = 0  # mask of the wanted columns
    after: Small | None = None  # fetch: received answers to the first key; null refuses parts
    offset: Count = 0  # received bytes of the next answer
    changed: Word = 0  # the first key's newest change at the last reply
    rank: Small = 0  # rank of the trainer that fetches its part of a step
    ranks: Small = 0  # number of ranks; 0 unless a step is fetched


@body(types.ANSWERS)
class Answers(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request to lease prompts, answer them, give them back or amend answers. Answered by PROMPTED."""

    changes: ClassVar = True
    call: Literal["lease", "renew", "answer", "amend", "fail", "release"]
    count: Small = 1  # leases at most
    seconds: Seconds = 0.0  # seconds of a lease; 0 for the table's setting
    version: Count | None = None  # version of the worker's model
    leases: Annotated[list[Word], Meta(max_length=65536)] = []  # leases that the worker has, renews or releases
    pieces: Annotated[list[AnswerPiece], Meta(max_length=65536)] = []

    @property
    def is_saved_first(self) -> bool:
        """True unless the call is about leases: these save nothing."""
        return self.call not in {"lease", "renew"}


@body(types.GROUPS)
class Groups(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Request to add or change prompts, or of a trainer to draw, commit and rewind steps. Answered by PROMPTED."""

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
    values: Annotated[list[Signed], Meta(max_length=65536)] = []  # scores of the keys
    shares: Annotated[dict[Name, Weight], Meta(max_length=1024)] = {}
    session: Name = ""  # session of the trainer
    step: Count = 0
    is_before_first: bool = False  # rewind to before the first step
    count: Small = 0  # groups to draw from this server; 0 asks for the step's groups
    wanted: Small = 0  # groups of the whole step
    replay: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    is_last: bool = False  # draw ready groups even if few are ready
    after: Small | None = None  # draw: received groups of the step; null wants one reply
    plan: StepPlan | None = None  # plan for the server to keep
    version: Count | None = None  # version of the newest model

    @property
    def is_saved_first(self) -> bool:
        """True for all calls but "known", which changes nothing."""
        return self.call != "known"


@body(types.PROMPTED)
class Prompted(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to PROMPTS, ANSWERS and GROUPS."""

    epoch: Word = 0
    counts: Annotated[dict[Name, Count], Meta(max_length=64)] = {}  # prompts in each state, and other figures
    done: Count = 0  # prompts, leases or groups that the call changed
    flags: Annotated[bytes, Meta(max_length=65536)] = b""  # a code for each prompt or piece of the request
    wait: Text = ""  # reason why nothing was leased or drawn, or ""
    leases: Annotated[list[LeasedPrompt], Meta(max_length=4096)] = []
    prompts: Annotated[list[PromptFacts], Meta(max_length=65536)] = []
    cursor: Word = 0  # cursor after the last of `prompts`
    sizes: Annotated[list[Count], Meta(max_length=65536)] = []  # bytes of each payload
    columns: Annotated[list[AnswerColumns], Meta(max_length=65536)] = []
    rest: Count = 0  # remaining bytes of the last of `columns`
    answered: Small = 0  # keys of the request with complete `columns` or `sizes`
    changed: Word = 0  # newest change of the next key; the client begins again if it differs
    groups: Annotated[list[GroupFacts], Meta(max_length=65536)] | None = None  # fixed groups of the step here
    is_closed: bool = False  # True if this server adds no more groups to the step
    plan: StepPlan | None = None
    committed: Count | None = None  # newest committed step
    is_over: bool = False  # the epoch gets no more prompts, and all prompts are finished
    is_empty: bool = False  # nobody has ever added a prompt
    is_whole: bool = True  # False if more prompts or groups follow
