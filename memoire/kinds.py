"""Public names for a kind of table of your own: its pool, its messages and its remote calls.

    Kind, add, PoolPlace               the registration of a kind, and the arguments of its pool in a server
    TablePool and TakesPushes, HasRoom, DeliversOnce, DrawsBatches, SavesRows, ...     capabilities of a pool
    Body, body, PushedBody, Count, ... messages, and bounded types of their fields
    ActorSide, EpisodesSide            the actor's side: recording and pushing
    HandlerContext, Reply, ReplyPage   the server's side: handlers of requests and their replies
    HasCalls, RemoteCalls, CalledServers  calls of the kind, in the process of the server and from other processes
    RecordBody, SavedRecord, RestoreOutcome   records of the kind in a snapshot
    counter, gauge, histogram, shown   metrics of the fields in the stats of a pool
    Channel, Worker, Node              threads with sockets, for remote calls
    NodeService, InferenceThread       further services of an inference node

Each name is imported at its first use.
"""

from typing import TYPE_CHECKING

from memoire.building import lazy_imports

if TYPE_CHECKING:
    from memoire.client.episodes import EpisodesSide as EpisodesSide
    from memoire.client.pushes import ActorSide as ActorSide
    from memoire.figures import adding as adding
    from memoire.figures import catalogue as catalogue
    from memoire.figures import counter as counter
    from memoire.figures import gauge as gauge
    from memoire.figures import histogram as histogram
    from memoire.figures import shown as shown
    from memoire.inference.batching import MAX_LINEAGE as MAX_LINEAGE
    from memoire.inference.batching import InferenceStats as InferenceStats
    from memoire.inference.batching import JobStats as JobStats
    from memoire.inference.batching import StartsStats as StartsStats
    from memoire.inference.io import InferenceThread as InferenceThread
    from memoire.inference.io import NodeService as NodeService
    from memoire.inference.io_asking import Asker as Asker
    from memoire.inference.io_asking import AskingThread as AskingThread
    from memoire.inference.io_asking import checked_urls as checked_urls
    from memoire.net import addresses as addresses
    from memoire.net.channel import Channel as Channel
    from memoire.net.sockets import Context as Context
    from memoire.net.sockets import shared_context as shared_context
    from memoire.net.thread import Node as Node
    from memoire.net.thread import Worker as Worker
    from memoire.net.thread import close_at_exit as close_at_exit
    from memoire.reader.calls import RemoteCalls as RemoteCalls
    from memoire.security.roles import EnvelopedRequest as EnvelopedRequest
    from memoire.tables import registry as registry
    from memoire.tables.base import DEFAULTS as DEFAULTS
    from memoire.tables.base import MAX_INSPECTED as MAX_INSPECTED
    from memoire.tables.base import BelongsToRun as BelongsToRun
    from memoire.tables.base import DeliversOnce as DeliversOnce
    from memoire.tables.base import DrawsAtRandom as DrawsAtRandom
    from memoire.tables.base import DrawsBatches as DrawsBatches
    from memoire.tables.base import DrawsEpisodes as DrawsEpisodes
    from memoire.tables.base import HasCalls as HasCalls
    from memoire.tables.base import HasRoom as HasRoom
    from memoire.tables.base import KeepsLayout as KeepsLayout
    from memoire.tables.base import Number as Number
    from memoire.tables.base import PoolCounts as PoolCounts
    from memoire.tables.base import PoolStats as PoolStats
    from memoire.tables.base import ReceivesSums as ReceivesSums
    from memoire.tables.base import RecordBody as RecordBody
    from memoire.tables.base import RestoreOutcome as RestoreOutcome
    from memoire.tables.base import SavedRecord as SavedRecord
    from memoire.tables.base import SavedRow as SavedRow
    from memoire.tables.base import SavesRows as SavesRows
    from memoire.tables.base import ShowsSamples as ShowsSamples
    from memoire.tables.base import TablePool as TablePool
    from memoire.tables.base import TakesPriorities as TakesPriorities
    from memoire.tables.base import TakesPushes as TakesPushes
    from memoire.tables.calls import DEFAULT_TIMEOUT as DEFAULT_TIMEOUT
    from memoire.tables.calls import CalledServers as CalledServers
    from memoire.tables.calls import CallReply as CallReply
    from memoire.tables.calls import Request as Request
    from memoire.tables.calls import Transport as Transport
    from memoire.tables.calls import Work as Work
    from memoire.tables.inspection import Distribution as Distribution
    from memoire.tables.inspection import Histogram as Histogram
    from memoire.tables.pools import LastingPool as LastingPool
    from memoire.tables.registry import Handler as Handler
    from memoire.tables.registry import HandlerContext as HandlerContext
    from memoire.tables.registry import Kind as Kind
    from memoire.tables.registry import PoolPlace as PoolPlace
    from memoire.tables.registry import PushLimits as PushLimits
    from memoire.tables.registry import Reply as Reply
    from memoire.tables.registry import TableSettings as TableSettings
    from memoire.tables.registry import add as add
    from memoire.tables.rollouts import fragments as fragments
    from memoire.wire import messages as messages
    from memoire.wire import types as types
    from memoire.wire import values as values
    from memoire.wire._bytes import count_values as count_values
    from memoire.wire.byte_budget import ByteBudget as ByteBudget
    from memoire.wire.byte_budget import ByteHolder as ByteHolder
    from memoire.wire.byte_budget import PeerTable as PeerTable
    from memoire.wire.frames import PASSING as PASSING
    from memoire.wire.frames import Answer as Answer
    from memoire.wire.frames import Buffer as Buffer
    from memoire.wire.frames import Message as Message
    from memoire.wire.frames import MessageHeader as MessageHeader
    from memoire.wire.frames import check_payload as check_payload
    from memoire.wire.frames import encoded_bytes as encoded_bytes
    from memoire.wire.frames import reply as reply
    from memoire.wire.messages import Body as Body
    from memoire.wire.messages import Count as Count
    from memoire.wire.messages import Name as Name
    from memoire.wire.messages import PushedBody as PushedBody
    from memoire.wire.messages import Seconds as Seconds
    from memoire.wire.messages import Signed as Signed
    from memoire.wire.messages import Small as Small
    from memoire.wire.messages import StepNumber as StepNumber
    from memoire.wire.messages import TailRow as TailRow
    from memoire.wire.messages import Text as Text
    from memoire.wire.messages import Weight as Weight
    from memoire.wire.messages import Word as Word
    from memoire.wire.messages import body as body
    from memoire.wire.receivers import Receivers as Receivers
    from memoire.wire.receivers import ReplyLimits as ReplyLimits
    from memoire.wire.receivers import ReplyPage as ReplyPage
    from memoire.wire.receivers import too_large as too_large
    from memoire.wire.row_container import exact_rows as exact_rows
    from memoire.wire.row_container import unpack_rows as unpack_rows
    from memoire.wire.values import KINDS as KINDS
    from memoire.wire.values import pack as pack
    from memoire.wire.values import unpack as unpack

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports(__name__)  # type checkers see the imports above, and missing names
