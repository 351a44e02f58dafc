"""Classic API of the seed documents over today's engine; a script written from its API page runs unchanged.

`ReplayMemory`, `ReplayMemoryServer` and `ReplayMemoryClient` keep that page's names, argument order and return values.
The three classes hold no logic of their own: `replay.memory.Memory` stores entries, `server.server.Server` and
`client.client.Client` own the sockets. docs/development/contract.md settles, row by row, the cases that the page leaves
open. New programs are shorter with `Buffer`, `connect` and `Server`.
"""

from .fields import FLAGS as FLAGS
