"""Compiled draws over held caches: shares of clients, picked samples, and copies of the samples."""

cimport cython
cimport numpy as cnp
from libc.math cimport INFINITY, floor, isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from memoire._core cimport weigh
from memoire._kernels.arrays cimport doubles_of, target_of
from memoire._kernels.native cimport LATEST, copy_row, inside, prefetch, prefetch_row
from memoire.wire._bytes cimport read32, read64, read_double
from memoire.wire._container cimport (
    FIXED, MAX_PARTS, PART_AGE, PART_CHANCE, PART_DISCOUNT, PART_MODEL, PART_NUMBER, PART_OWNER, PART_OWNERS, PART_POPULATION,
    PART_REWARD_SUM, PART_STEPS, PART_WEIGHT, ZERO_FRAME, Field, HeldCache, Layout, View, sample_at,
)

import numpy as np

cnp.import_array()

# The rule of the draw is in docs/sampling.md and pool.py. Each client is a queue of caches:
#
#     HeldClient.queue   [HeldCache used 40 of 256, HeldCache used 0 of 256, HeldCache used 0 of 256]   used-up caches are dropped
#
# A draw first picks samples under the pool's lock (`Picks`: one row for each sample, with references to the caches). Copying the
# samples needs neither lock nor GIL. A cache that is evicted meanwhile stays in memory until the picks are dropped.

cdef uint64_t _pool_random(uint64_t* state) noexcept nogil:
    """Return the next splitmix64 word: a counter through a mixing function. Every seed is as good as any other."""
    cdef uint64_t word
    state[0] += 0x9E3779B97F4A7C15ULL
    word = state[0]
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL
    return word ^ (word >> 31)


cdef inline double _pool_fraction(uint64_t* state) noexcept nogil:
    return <double>(_pool_random(state) >> 11) * (1.0 / 9007199254740992.0)


cdef inline uint32_t _pool_below(uint64_t* state, uint32_t bound) noexcept nogil:
    """Return a random integer in [0, bound). The bias of at most 2**-32 is far below the effect of any draw."""
    return <uint32_t>(((_pool_random(state) >> 32) * <uint64_t>bound) >> 32)


cdef int _rise_together(const double* unused, double* share, const double* cap, Py_ssize_t clients, double batch) noexcept nogil:
    """Compute shares if all caps together are below 1: each cap grows by one factor, up to unused / batch."""
    cdef double factor = 1.0, fixed, loose
    cdef Py_ssize_t i, full, before = -1  # each pass finds more clients at their cap, or is the last
    while True:
        full = 0
        fixed = loose = 0.0
        for i in range(clients):
            if factor * cap[i] >= unused[i] / batch:
                fixed += unused[i] / batch
                full += 1
            else:
                loose += cap[i]
        if full == before or loose <= 0.0 or fixed >= 1.0:
            break
        before = full
        factor = max(factor, (1.0 - fixed) / loose)
    for i in range(clients):
        share[i] = min(factor * cap[i], unused[i] / batch)
    return 0


cdef int _fill_water(const double* weight, double* share, const double* cap, Py_ssize_t clients) noexcept nogil:
    """Compute shares in proportion to the weights, none above its cap. The caps together are at least 1."""
    cdef double level = 0.0, fixed, loose
    cdef Py_ssize_t i, full, before = -1  # each pass finds more clients at their cap, or is the last
    while True:
        full = 0
        fixed = loose = 0.0
        for i in range(clients):
            if cap[i] <= 0.0:
                continue
            if level * weight[i] >= cap[i]:
                fixed += cap[i]
                full += 1
            else:
                loose += weight[i]
        if full == before or loose <= 0.0 or fixed >= 1.0:
            break
        before = full
        level = max(level, (1.0 - fixed) / loose)
    for i in range(clients):
        share[i] = min(level * weight[i], cap[i]) if cap[i] > 0.0 else 0.0
    return 0


cdef int _shares(
    const double* weight, const double* unused, const double* between, Py_ssize_t clients, double batch, double* cap, double* share
) noexcept nogil:
    """Compute pi_c of each client. `unused` is infinite for a client that serves any number, 0 for one that cannot serve. `cap` is scratch."""
    cdef double together = 0.0, total = 0.0
    cdef Py_ssize_t i
    for i in range(clients):
        cap[i] = unused[i] / max(between[i], batch) if unused[i] > 0.0 and weight[i] > 0.0 else 0.0
        together += cap[i]
    if together <= 1.0:
        _rise_together(unused, share, cap, clients, batch)
    else:
        _fill_water(weight, share, cap, clients)
    for i in range(clients):
        total += share[i]
    if total > 0.0:
        for i in range(clients):
            share[i] /= total
    return 0


cdef Py_ssize_t _counts(
    const double* share, const double* unused, Py_ssize_t clients, Py_ssize_t batch, double start, int64_t* count
) noexcept nogil:
    """Draw counts systematically: client c gets the integers in its stretch of [start, start + batch). Return the number of missing samples."""
    cdef double edge = 0.0
    cdef int64_t reached, before = 0, excess = 0, more
    cdef Py_ssize_t i, last = -1
    for i in range(clients):
        if share[i] > 0.0:
            last = i
    for i in range(clients):
        count[i] = 0
        if share[i] <= 0.0:
            continue
        edge += share[i] * batch
        # The running sum is rounded; the last client must end at the batch exactly.
        reached = batch if i == last else min(<int64_t>floor(edge + start), <int64_t>batch)
        count[i] = reached - before
        before = reached
        if <double>count[i] > unused[i]:
            excess += count[i] - <int64_t>unused[i]
            count[i] = <int64_t>unused[i]
    for i in range(clients):
        if excess == 0:
            break
        if share[i] > 0.0 and <double>count[i] < unused[i]:
            more = excess if unused[i] - count[i] > <double>excess else <int64_t>unused[i] - count[i]
            count[i] += more
            excess -= more
    return excess


def shares(weight, unused, between, double batch):
    """Return pi_c for total weights S_c, u_c unused samples (inf: any number) and D_c: float64 [C] each -> [C], summing to 1."""
    cdef Py_ssize_t clients = len(weight)
    cdef const double* weights = doubles_of(weight, clients)
    cdef const double* left = doubles_of(unused, clients)
    cdef const double* apart = doubles_of(between, clients)
    share, cap = np.zeros(clients), np.zeros(clients)
    if not batch >= 1.0:
        raise ValueError("a batch has at least 1 sample")
    if clients:
        _shares(weights, left, apart, clients, batch, <double*>doubles_of(cap, clients), <double*>doubles_of(share, clients))
    return share


def systematic_counts(share, unused, Py_ssize_t batch, double start):
    """Return integers with mean batch * share, none above `unused`, summing to `batch`: float64 [C] -> int64 [C]. start in [0, 1)."""
    cdef Py_ssize_t clients = len(share)
    cdef const double* parts = doubles_of(share, clients)
    cdef const double* left = doubles_of(unused, clients)
    count = np.zeros(clients, np.int64)
    if not 0.0 <= start < 1.0:
        raise ValueError("start must lie in [0, 1)")
    if clients and _counts(parts, left, clients, batch, start, <int64_t*>target_of(count, 8 * clients)):
        raise ValueError("the clients have fewer unused samples than the batch needs")
    return count


# The plan of a reader over several servers: each client once, even if several servers hold its samples, and no Python per client.
#
#     a   c7 20 of 60 kept   c9  4        ──▶  c7: newest sums of both, 35 unused  ──▶  a   c7 11   c9 2
#     b   c7 15                                c9                                       b   c7  3

cdef struct SumsRow:
    # wire.CLIENT_SUMS
    uint64_t low, high, sequence
    double mass
    uint64_t population
    double minimum, between
    uint32_t reserved, flags

cdef struct CountsRow:
    # wire.CLIENT_COUNTS
    uint64_t low, high
    uint32_t count, zero


cdef inline bint _is_one(const void* row, const void* other) noexcept nogil:
    """Return True if two rows are of the same client; each row begins with its id."""
    return memcmp(row, other, 16) == 0


cdef const char* _rows_of(array, size_t row, Py_ssize_t* count) except? NULL:
    """Return the first byte of an array of rows of this many bytes, and write the number of rows into `count`."""
    if not cnp.PyArray_Check(array) or not cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>array):
        raise ValueError("expected a C-contiguous array of rows")
    if <size_t>cnp.PyArray_ITEMSIZE(<cnp.ndarray>array) != row:
        raise ValueError(f"rows of {array.itemsize} bytes, expected {row}")
    count[0] = cnp.PyArray_SIZE(<cnp.ndarray>array)
    return <const char*>cnp.PyArray_DATA(<cnp.ndarray>array)


cdef inline double _able_of(const SumsRow* row) noexcept nogil:
    """Return the number of samples of a client that a server can give, infinity for any number."""
    if row.flags & 1:
        return INFINITY if row.reserved else 0.0
    return row.reserved


@cython.auto_pickle(False)
cdef class Clients:
    """Merged sums of the clients of all servers: C clients, in R rows.

    Args:
        tables: Rows of `wire.CLIENT_SUMS` of each server. A client of two servers counts once, with its newest sums.
        seed: Seed of the hash table of ids, so that no sender can choose colliding ids.
    """

    cdef list tables
    cdef SumsRow* row        # [R]
    cdef uint32_t* of_row    # [R] number of the row's client
    cdef Py_ssize_t rows
    cdef uint32_t* newest    # [C] the row with its newest sums
    cdef double* weight      # [C] as a part of the largest, because a sum of reported weights could overflow
    cdef double* unused      # [C] u_c over all servers; 0 if nothing can be drawn
    cdef double* between     # [C] D_c over all servers
    cdef double* share       # [C] pi_c
    cdef double* cap         # [C] scratch
    cdef int64_t* count      # [C]
    cdef readonly Py_ssize_t size  # C
    cdef readonly double population, left_out, rarest

    def __cinit__(self, list tables not None, uint64_t seed):
        cdef Py_ssize_t rows
        self.tables = tables
        for table in tables:
            _rows_of(table, sizeof(SumsRow), &rows)
            self.rows += rows
        rows = max(1, self.rows)
        if rows >= 1 << 30:
            raise ValueError(f"{rows} rows of clients")
        self.row = <SumsRow*>malloc(rows * sizeof(SumsRow))
        self.of_row = <uint32_t*>malloc(2 * rows * sizeof(uint32_t))
        self.weight = <double*>calloc(6 * rows, sizeof(double))
        if self.row == NULL or self.of_row == NULL or self.weight == NULL:
            raise MemoryError()
        self.newest, self.unused, self.between = self.of_row + rows, self.weight + rows, self.weight + 2 * rows
        self.share, self.cap, self.count = self.weight + 3 * rows, self.weight + 4 * rows, <int64_t*>(self.weight + 5 * rows)
        self._merge(seed)
        self._weigh()

    def __dealloc__(self):
        free(self.row)
        free(self.of_row)
        free(self.weight)

    cdef int _merge(self, uint64_t seed) except -1:
        """Number the clients in the order of the rows, and add up each client's samples over all servers."""
        cdef size_t mask = 15, at
        cdef uint32_t* place
        cdef const char* begin
        cdef Py_ssize_t rows, i = 0, client
        cdef SumsRow* row
        for table in self.tables:
            begin = _rows_of(table, sizeof(SumsRow), &rows)
            memcpy(self.row + i, begin, rows * sizeof(SumsRow))
            i += rows
        while <Py_ssize_t>mask < 2 * self.rows:
            mask = 2 * mask + 1
        place = <uint32_t*>calloc(mask + 1, sizeof(uint32_t))  # client's number + 1
        if place == NULL:
            raise MemoryError()
        for i in range(self.rows):
            row = self.row + i
            at = ((row.low ^ seed) * 0x9E3779B97F4A7C15ULL + (row.high ^ (seed >> 7)) * 0xC2B2AE3D27D4EB4FULL) >> 29 & mask
            while place[at] and not _is_one(row, self.row + self.newest[place[at] - 1]):
                at = (at + 1) & mask
            if not place[at]:
                self.newest[self.size] = <uint32_t>i
                self.size += 1
                place[at] = <uint32_t>self.size
            client = place[at] - 1
            self.of_row[i] = <uint32_t>client
            if row.sequence > self.row[self.newest[client]].sequence:
                self.newest[client] = <uint32_t>i
            self.unused[client] += _able_of(row)
            self.between[client] += row.between
        free(place)
        return 0

    cdef void _weigh(self) noexcept:
        cdef double largest = 0.0, mass = 0.0, serving = 0.0
        cdef const SumsRow* newest
        cdef Py_ssize_t i
        for i in range(self.size):
            largest = max(largest, self.row[self.newest[i]].mass)
        for i in range(self.size):
            newest = self.row + self.newest[i]
            self.weight[i] = newest.mass / largest if largest > 0.0 else 0.0
            if not (newest.mass > 0.0 and newest.population > 0):
                self.unused[i] = 0.0
            mass += self.weight[i]
            if self.unused[i] > 0.0:
                serving += self.weight[i]
                self.population += newest.population
        self.left_out = max(0.0, 1.0 - serving / mass) if mass > 0.0 else 0.0

    def plan(self, Py_ssize_t samples, double start):
        """Distribute a batch over the clients, by systematic sampling from `start` in [0, 1). Return False if there are too few samples."""
        cdef double together = 0.0, chance
        cdef const SumsRow* newest
        cdef Py_ssize_t i
        if samples < 1 or not 0.0 <= start < 1.0:
            raise ValueError("a batch has at least 1 sample, and start lies in [0, 1)")
        for i in range(self.size):
            together += self.unused[i]
        if not together >= samples:
            return False
        _shares(self.weight, self.unused, self.between, self.size, samples, self.cap, self.share)
        if _counts(self.share, self.unused, self.size, samples, start, self.count):
            return False
        self.rarest = INFINITY
        for i in range(self.size):
            newest = self.row + self.newest[i]
            chance = self.share[i] * newest.minimum / newest.mass if newest.mass > 0.0 else 0.0
            if self.unused[i] > 0.0 and newest.minimum > 0.0:
                self.rarest = min(self.rarest, self.population * chance)
        return True

    def asked(self):
        """Return id -> (pi_c, N_c) for each client that samples are requested from."""
        cdef Py_ssize_t i
        cdef const SumsRow* newest
        cdef dict found = {}
        for i in range(self.size):
            if self.count[i] > 0:
                newest = self.row + self.newest[i]
                found[(<const char*>newest)[:16]] = self.share[i], <double>newest.population
        return found

    def counts(self):
        """Return packed rows of `wire.CLIENT_COUNTS` for each server, filled in the servers' order. Call once after `plan`."""
        cdef Py_ssize_t rows, i = 0, end = 0
        cdef int64_t here
        cdef CountsRow wanted
        cdef list found = []
        cdef bytearray packed
        wanted.zero = 0
        for table in self.tables:
            _rows_of(table, sizeof(SumsRow), &rows)
            end += rows
            packed = bytearray()
            while i < end:
                here = self.count[self.of_row[i]]
                if here > 0 and _able_of(self.row + i) < <double>here:
                    here = <int64_t>self.row[i].reserved
                if here > 0:
                    self.count[self.of_row[i]] -= here
                    wanted.low, wanted.high, wanted.count = self.row[i].low, self.row[i].high, <uint32_t>here
                    packed += (<const char*>&wanted)[:sizeof(CountsRow)]
                i += 1
            found.append(bytes(packed))
        return found


def take_counts(table, counts):
    """Subtract requests, [C] rows of `wire.CLIENT_COUNTS`, from a server's samples, [C] rows of `wire.CLIENT_SUMS`, in place. A client that gives
    any number stays unchanged; requests for unknown clients are ignored.
    """
    cdef Py_ssize_t clients, wanted, at = 0, i, _step
    cdef SumsRow* row = <SumsRow*>_rows_of(table, sizeof(SumsRow), &clients)
    cdef const CountsRow* count = <const CountsRow*>_rows_of(counts, sizeof(CountsRow), &wanted)
    if clients:
        target_of(table, clients * <Py_ssize_t>sizeof(SumsRow))
    for i in range(wanted):
        # Both are nearly always in the order of the server's clients, so that the next match is close.
        for _step in range(clients):
            if _is_one(row + at, count + i):
                if not row[at].flags & 1:
                    row[at].reserved -= min(row[at].reserved, count[i].count)
                break
            at = at + 1 if at + 1 < clients else 0


cdef enum:
    MAX_PICKS = 0x7FFFFFFF  # positions are 32 bits wide

cdef struct Pick:
    const View* view
    uint32_t sample      # in its cache
    uint32_t position    # in the batch
    double share         # pi_c
    double newest        # N_c
    uint64_t low, high   # client id


cdef struct Carried:
    char* reward
    char* discount
    char* steps
    char* weight
    char* ids
    char* age
    char* model


@cython.auto_pickle(False)
cdef class HeldClient:
    """Queue of one client's held caches, oldest first, with its newest sums. Every attribute belongs to the pool's lock."""

    cdef list queue               # HeldCache, oldest first
    cdef uint32_t most            # samples of the largest held cache
    cdef Py_ssize_t at_most       # number of caches with `most` samples
    cdef double eldest            # least value over the caches
    cdef int64_t least_model, again  # least model and sum of remaining draws over the caches
    cdef uint64_t low, high
    cdef uint64_t mark            # HeldPool's drawn + elsewhere at the arrival of the newest cache
    cdef double mass, population  # S_c, N_c
    cdef dict reserved_for        # reader -> unused samples reserved for the reader
    cdef Py_ssize_t slot          # in HeldPool.clients, -1: none
    cdef readonly uint64_t number  # number of clients that entered the pool earlier
    cdef readonly bytes id
    cdef readonly Py_ssize_t pushed, caches, nbytes, unused, held, reserved
    cdef readonly double minimum
    cdef public double between    # D_c; restored from a snapshot
    cdef readonly uint64_t sequence  # sequence number of the message with the newest sums
    cdef bint has_sums
    cdef public double heard

    def __cinit__(self, bytes id not None):
        if len(id) != 16:
            raise ValueError(f"a client id has 16 bytes, got {len(id)}")
        cdef const uint8_t* word = <const uint8_t*><const char*>id
        self.id, self.low, self.high = id, read64(word), read64(word + 8)
        self.queue, self.reserved_for = [], {}
        self.slot = -1

    @property
    def total_weight(self):
        """S_c, the newest total weight of the client's memory."""
        return self.mass

    @property
    def positives(self):
        """N_c, the newest number of entries with positive weight."""
        return self.population

    def hear(self, uint64_t sequence, double total_weight, double positives, double minimum, bint is_limited=False):
        """Record newer sums and return True; ignore older ones (of a message that was overtaken) and return False.

        is_limited: Draws of an entry are limited. If the newest sums are 0, because all entries are used up, older sums are accepted: the
        message's cache holds samples of such entries.
        """
        if self.has_sums and sequence <= self.sequence and not (is_limited and self.mass == 0.0):
            return False
        self.has_sums = True
        self.sequence, self.mass, self.population, self.minimum = sequence, total_weight, positives, minimum
        if not (isfinite(total_weight) and total_weight > 0.0 and positives >= 1.0):
            self.mass = self.population = self.minimum = 0.0
        return True

    def queued(self):
        """Return the client's caches, oldest first."""
        return list(self.queue)

    cdef int _append(self, HeldCache cache) except -1:
        self.queue.append(cache)
        self._measure(cache)
        self.eldest, self.least_model = min(self.eldest, cache.eldest), min(self.least_model, cache.least_model)
        self.again += cache.again
        self.caches += 1
        self.nbytes += cache.nbytes
        self.unused += cache.count - cache.used
        self.held += cache.count

    cdef HeldCache _pop(self, Py_ssize_t place=0):
        """Remove and return the oldest cache, or the cache in this place; the caller updates the pool's counts."""
        cdef HeldCache cache = self.queue[place], other
        del self.queue[place]
        self.caches -= 1
        self.nbytes -= cache.nbytes
        self.unused -= cache.count - cache.used
        self.held -= cache.count
        self.again -= cache.again
        self.at_most -= cache.view.samples == self.most
        if not self.at_most:
            self.most = 0
            for other in self.queue:
                self._measure(other)
        return cache

    cdef inline void _measure(self, HeldCache cache) noexcept:
        """Update the largest cache size with a held cache."""
        if cache.view.samples > self.most:
            self.most, self.at_most = cache.view.samples, 0
        self.at_most += cache.view.samples == self.most


@cython.auto_pickle(False)
cdef class Picks:
    """Samples that a draw took: the place of each, and the facts for its importance. Keeps the caches alive."""

    cdef Pick* pick
    cdef list caches
    cdef readonly Layout layout
    cdef readonly Py_ssize_t size
    cdef readonly double population, left_out, rarest

    def __cinit__(self, Layout layout not None, Py_ssize_t size):
        self.layout, self.size, self.caches = layout, 0, []
        self.rarest = INFINITY
        if not 0 <= size <= MAX_PICKS:
            raise ValueError(f"a draw has at most {MAX_PICKS} samples, got {size}")
        self.pick = <Pick*>malloc(max(1, size) * sizeof(Pick))
        if self.pick == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.pick)

    cdef int _add(self, HeldClient client, HeldCache cache, uint32_t first, Py_ssize_t count, double share) except -1:
        """Add `count` consecutive samples of a cache."""
        cdef Py_ssize_t i
        self.caches.append(cache)
        for i in range(count):
            self._one(client, cache, sample_at(cache, <uint32_t>(first + i)), share)
        return 0

    cdef inline void _one(self, HeldClient client, HeldCache cache, uint32_t sample, double share) noexcept:
        self.pick[self.size] = Pick(
            &cache.view, sample, <uint32_t>self.size, share, client.population, client.low, client.high
        )
        self.size += 1

    cdef void _shuffle(self, uint64_t* state) noexcept:
        cdef Py_ssize_t i
        cdef uint32_t j, kept
        for i in range(self.size - 1, 0, -1):
            j = _pool_below(state, <uint32_t>(i + 1))
            kept = self.pick[i].position
            self.pick[i].position = self.pick[j].position
            self.pick[j].position = kept

    @property
    def multi_step(self):
        """Largest multi_step of the caches."""
        cdef HeldCache cache
        return max([cache.multi_step for cache in self.caches], default=1)

    def gather(self, list arrays, reward, discount, steps, weight, ids, age, model):
        """Copy every sample to its position: `arrays` in the order of the layout's fields, then the values of each sample.

        All arrays are C-contiguous and of exactly the right bytes; reward may be None. The GIL is released.
        """
        cdef Py_ssize_t i
        cdef char** target = <char**>malloc((self.layout.fields + 1) * sizeof(char*))
        cdef Carried carried
        if target == NULL:
            raise MemoryError()
        try:
            if len(arrays) != self.layout.fields:
                raise ValueError(f"expected {self.layout.fields} arrays, got {len(arrays)}")
            for i in range(self.layout.fields):
                target[i] = target_of(arrays[i], self.size * self.layout.field[i].frames * self.layout.field[i].size)
            carried.reward = NULL
            if reward is not None:
                carried.reward = target_of(reward, self.size * 4 * self.layout.reward_size)
            carried.discount = target_of(discount, self.size * 4 * self.layout.reward_size)
            carried.steps = target_of(steps, self.size * 4)
            carried.weight = target_of(weight, self.size * 4)
            carried.ids = target_of(ids, self.size * 24)
            carried.age = target_of(age, self.size * 4)
            carried.model = target_of(model, self.size * 8)
            with nogil:
                _gather(self.layout, self.pick, self.size, target, &carried)
        finally:
            free(target)

    def arrivals(self, target, bint in_order):
        """Write the arrival time of each sample's cache, by the pool's clock: float64 [B] into `target`, in the order of the batch or of the
        draw.
        """
        cdef double* to = <double*>target_of(target, self.size * 8)
        cdef Py_ssize_t i
        for i in range(self.size):
            to[i if in_order else self.pick[i].position] = self.pick[i].view.arrived

    def gather_lengths(self, int index, target):
        """Write the lengths of ragged field `index`: int32 [B, rows] into `target`; return the greatest length."""
        cdef const Field* field = self._ragged_field(index)
        cdef int32_t* to = <int32_t*>target_of(target, self.size * field.frames * 4)
        cdef const char* begin
        cdef size_t j
        cdef Py_ssize_t i
        cdef int32_t most = 0, length
        with nogil:
            for i in range(self.size):
                for j in range(field.frames):
                    length = <int32_t>(_value_of(field, &self.pick[i], j, &begin) // field.size)
                    to[self.pick[i].position * field.frames + j] = length
                    most = max(most, length)
        return most

    def gather_padded(self, int index, Py_ssize_t longest, target):
        """Copy the values of ragged field `index` to their samples' positions: [B, rows, longest, ...] into `target`, padded with zeros."""
        cdef const Field* field = self._ragged_field(index)
        cdef size_t row = longest * field.size, j, size
        cdef char* to = target_of(target, self.size * field.frames * row)
        cdef char* place
        cdef const char* begin
        cdef Py_ssize_t i
        with nogil:
            for i in range(self.size):
                for j in range(field.frames):
                    place = to + (<size_t>self.pick[i].position * field.frames + j) * row
                    size = min(_value_of(field, &self.pick[i], j, &begin), row)
                    memcpy(place, begin, size)
                    memset(place + size, 0, row - size)

    cdef const Field* _ragged_field(self, int index) except NULL:
        if not 0 <= index < self.layout.ragged_fields:
            raise IndexError(index)
        return &self.layout.field[self.layout.fields + index]

    def importance(self, double exponent, bint by_largest, target):
        """Write (N P(i) N_k / N_c) ** -exponent of every sample over a divisor: float32 [B] into `target`; return the divisor.

        The divisor is the batch's largest, or with `by_largest` the largest that any entry of the serving clients could have (never below the
        batch's: an old cache may hold a rarer sample than its client has now).
        """
        cdef float* importance = <float*>target_of(target, self.size * 4)
        cdef double* value = <double*>malloc(max(1, self.size) * sizeof(double))
        cdef double rarest = self.rarest if by_largest else INFINITY
        cdef double divisor
        if value == NULL:
            raise MemoryError()
        with nogil:
            divisor = _importance(self.layout, self.pick, self.size, self.population, exponent, rarest, value, importance)
            free(value)
        return divisor

    def distinct(self, dict indices not None):
        """Number the distinct rows that the samples' indices refer to, in order of first use, for a container of these rows.

        Args:
            indices: Bookkeeping part, of parts that index the same rows -> uint32 [B, each], to be filled with the numbers.

        Returns:
            Frames, whose `pack_frames` copies the rows.
        """
        cdef size_t total = sum([array.size for array in indices.values()])
        cdef Frames frames = Frames(self, total)
        cdef int block
        for part, array in indices.items():
            block = self.layout.of_part[inside(part, MAX_PARTS)]
            if block < 0:
                raise IndexError(part)
            frames._number(block, <uint32_t*>target_of(array, self.size * self.layout.block[block].row_bytes))
        return frames

    def pack_rows(self, int block, target):
        """Copy each sample's row of `block` in the order of the draw, ignoring positions in the batch."""
        cdef Py_ssize_t i
        cdef size_t size = self.layout.block[inside(block, self.layout.blocks)].row_bytes
        cdef char* to
        if self.layout.block[block].lengths != FIXED:
            to = target_of(target, self.bytes_of(block))
            for i in range(self.size):
                to = _pack_value(self.pick[i].view, block, self.pick[i].sample, to)
            return
        to = target_of(target, self.size * size)
        with nogil:
            for i in range(self.size):
                copy_row(to + i * size, <const char*>self.pick[i].view.block[block] + <size_t>self.pick[i].sample * size, size)

    def bytes_of(self, int block):
        """Return the total bytes of the samples' values, in a block of a ragged column."""
        cdef Py_ssize_t i
        cdef size_t total = 0
        if self.layout.block[inside(block, self.layout.blocks)].lengths == FIXED:
            raise ValueError("not a block of a ragged column")
        for i in range(self.size):
            total += _value_bytes(self.pick[i].view, block, self.pick[i].sample)
        return total

    def pack_owners(self, owner, chance, population):
        """Write each sample's owner, w_i / S_k and N_k: uint32, float64, float64 [B]. Return the owners' ids, 16 bytes each."""
        cdef uint32_t* to_owner = <uint32_t*>target_of(owner, self.size * 4)
        cdef double* to_chance = <double*>target_of(chance, self.size * 8)
        cdef double* to_population = <double*>target_of(population, self.size * 8)
        cdef int block = self.layout.of_part[PART_WEIGHT]
        cdef Py_ssize_t i
        cdef uint32_t owners = 0
        cdef list ids = []
        for i in range(self.size):
            if i == 0 or self.pick[i].low != self.pick[i - 1].low or self.pick[i].high != self.pick[i - 1].high:
                ids.append((<const uint8_t*>&self.pick[i].low)[:8] + (<const uint8_t*>&self.pick[i].high)[:8])
                owners += 1
            to_owner[i] = owners - 1
            to_chance[i] = min(1.0, read_double(self.pick[i].view.block[block] + 8 * <size_t>self.pick[i].sample) / self.pick[i].view.total_weight)
            to_population[i] = self.pick[i].view.positives
        return b"".join(ids)


cdef struct Source:
    const View* view
    uint32_t frame
    uint32_t number


@cython.auto_pickle(False)
cdef class Frames:
    """Numbered distinct frames of picked samples: an open-addressed table while numbering, a list while copying."""

    cdef Picks picks
    cdef Source* table   # number 0xFFFFFFFF: free
    cdef Source* order   # by number
    cdef size_t mask
    cdef readonly Py_ssize_t size

    def __cinit__(self, Picks picks not None, size_t most):
        cdef size_t places = 16, i
        while places < 2 * most:
            places *= 2
        self.picks, self.mask = picks, places - 1
        self.table = <Source*>malloc(places * sizeof(Source))
        self.order = <Source*>malloc((most + 1) * sizeof(Source))
        if self.table == NULL or self.order == NULL:
            raise MemoryError()
        for i in range(places):
            self.table[i].number = ZERO_FRAME

    def __dealloc__(self):
        free(self.table)
        free(self.order)

    cdef uint32_t _find(self, const View* view, uint32_t frame) noexcept nogil:
        cdef size_t at = (<size_t>view * 0x9E3779B97F4A7C15ULL + <uint64_t>frame * 0xC2B2AE3D27D4EB4FULL) >> 17
        while True:
            at &= self.mask
            if self.table[at].number == ZERO_FRAME:
                self.table[at] = Source(view, frame, <uint32_t>self.size)
                self.order[self.size] = self.table[at]
                self.size += 1
                return <uint32_t>(self.size - 1)
            if self.table[at].view == view and self.table[at].frame == frame:
                return self.table[at].number
            at += 1

    cdef void _number(self, int index, uint32_t* target) noexcept:
        cdef size_t each = self.picks.layout.block[index].row_bytes >> 2, j
        cdef Py_ssize_t i
        cdef uint32_t frame
        cdef const Pick* pick = self.picks.pick
        with nogil:
            for i in range(self.picks.size):
                for j in range(each):
                    frame = read32(pick[i].view.block[index] + 4 * (<size_t>pick[i].sample * each + j))
                    target[i * each + j] = frame if frame == ZERO_FRAME else self._find(pick[i].view, frame)

    def bytes_of(self, int block):
        """Return the total bytes of the rows' values, in a block of a ragged column."""
        cdef Py_ssize_t i
        cdef size_t total = 0
        if self.picks.layout.block[inside(block, self.picks.layout.blocks)].lengths == FIXED:
            raise ValueError("not a block of a ragged column")
        for i in range(self.size):
            total += _value_bytes(self.order[i].view, block, self.order[i].frame)
        return total

    def pack_frames(self, int block, target):
        """Copy the rows of block `block` into `target`, by number."""
        cdef size_t size = self.picks.layout.block[inside(block, self.picks.layout.blocks)].row_bytes
        cdef char* to
        cdef Py_ssize_t i
        if self.picks.layout.block[block].lengths != FIXED:
            to = target_of(target, self.bytes_of(block))
            for i in range(self.size):
                to = _pack_value(self.order[i].view, block, self.order[i].frame, to)
            return
        to = target_of(target, self.size * size)
        with nogil:
            for i in range(self.size):
                copy_row(to + i * size, <const char*>self.order[i].view.block[block] + <size_t>self.order[i].frame * size, size)


# Gathering reads rows cache by cache, where rows lie side by side, and writes them to their places in the shuffled batch. Rows of
# later samples are prefetched, because held caches are far larger than any processor cache.

cdef enum:
    ROWS_AHEAD = 8
    INDICES_AHEAD = 24


cdef void _gather_rows(const Field* field, const Pick* pick, Py_ssize_t size, char* target) noexcept nogil:
    cdef int block = field.block
    cdef size_t row = field.size
    cdef Py_ssize_t i
    cdef const Pick* next_pick
    for i in range(size):
        if i + ROWS_AHEAD < size:
            next_pick = &pick[i + ROWS_AHEAD]
            prefetch_row(<const char*>next_pick.view.block[block] + <size_t>next_pick.sample * row, row)
        copy_row(target + <size_t>pick[i].position * row, <const char*>pick[i].view.block[block] + <size_t>pick[i].sample * row, row)


cdef inline uint32_t _index_of(const Field* field, const Pick* pick, size_t j) noexcept nogil:
    """Return the number of row `j` of a sample, or ZERO_FRAME."""
    cdef size_t at = j if field.stack == field.frames else j // field.stack + j % field.stack
    return read32(pick.view.block[field.index] + 4 * (<size_t>pick.sample * field.each + at))


cdef inline size_t _value_bytes(const View* view, int block, uint32_t row) noexcept nogil:
    """Return the bytes of a value in a block of a ragged column."""
    return view.begins[block][row + 1] - view.begins[block][row]


cdef inline size_t _value_of(const Field* field, const Pick* pick, size_t j, const char** begin) noexcept nogil:
    """Write the address of value `j` of a sample in a ragged column into `begin`; return its bytes."""
    cdef uint32_t row = pick.sample if field.index < 0 else _index_of(field, pick, j)
    begin[0] = <const char*>pick.view.block[field.block]
    if row == ZERO_FRAME:
        return 0
    begin[0] += pick.view.begins[field.block][row]
    return _value_bytes(pick.view, field.block, row)


cdef inline char* _pack_value(const View* view, int block, uint32_t row, char* to) noexcept nogil:
    """Copy a value of a ragged column; return the address behind the copy."""
    cdef size_t size = _value_bytes(view, block, row)
    memcpy(to, view.block[block] + view.begins[block][row], size)
    return to + size


cdef inline const char* _frame_of(const Field* field, const Pick* pick, size_t j) noexcept nogil:
    """Return the address of row `j` of a sample; NULL for a row of zeros."""
    cdef uint32_t frame = _index_of(field, pick, j)
    if frame == ZERO_FRAME:
        return NULL
    return <const char*>pick.view.block[field.block] + <size_t>frame * field.size


cdef void _gather_frames(const Field* field, const Pick* pick, Py_ssize_t size, char* target) noexcept nogil:
    cdef size_t row = field.size, frames = field.frames, j
    cdef Py_ssize_t i
    cdef const char* source
    cdef const Pick* next_pick
    for i in range(size):
        if i + INDICES_AHEAD < size:
            next_pick = &pick[i + INDICES_AHEAD]
            prefetch(next_pick.view.block[field.index] + 4 * <size_t>next_pick.sample * field.each)
        for j in range(frames):
            if i + ROWS_AHEAD < size:
                source = _frame_of(field, &pick[i + ROWS_AHEAD], j)
                if source != NULL:
                    prefetch_row(source, row)
            source = _frame_of(field, &pick[i], j)
            if source != NULL:
                copy_row(target + (<size_t>pick[i].position * frames + j) * row, source, row)
            else:
                memset(target + (<size_t>pick[i].position * frames + j) * row, 0, row)


cdef inline void _prefetch_carried(Layout layout, const Pick* one) noexcept nogil:
    cdef const uint8_t* const* block = <const uint8_t* const*>one.view.block
    cdef int part
    for part in range(PART_NUMBER, PART_MODEL + 1):
        if layout.of_part[part] >= 0:
            prefetch(block[layout.of_part[part]] + one.sample * layout.block[layout.of_part[part]].row_bytes)


cdef void _gather_carried(Layout layout, const Pick* pick, Py_ssize_t size, const Carried* to) noexcept nogil:
    """Copy reward sum, discount, steps, weight, id, age and model version of each sample."""
    cdef size_t reward = 4 * <size_t>layout.reward_size, at, position
    cdef const uint8_t* const* block
    cdef const Pick* one
    cdef float weight
    cdef Py_ssize_t i
    for i in range(size):
        one = &pick[i]
        if i + ROWS_AHEAD < size:
            _prefetch_carried(layout, &pick[i + ROWS_AHEAD])
        block, at, position = <const uint8_t* const*>one.view.block, one.sample, one.position
        if to.reward != NULL:
            copy_row(to.reward + position * reward, <const char*>block[layout.of_part[PART_REWARD_SUM]] + at * reward, reward)
        copy_row(to.discount + position * reward, <const char*>block[layout.of_part[PART_DISCOUNT]] + at * reward, reward)
        memcpy(to.steps + 4 * position, block[layout.of_part[PART_STEPS]] + 4 * at, 4)
        weight = <float>read_double(block[layout.of_part[PART_WEIGHT]] + 8 * at)
        memcpy(to.weight + 4 * position, &weight, 4)
        memcpy(to.age + 4 * position, block[layout.of_part[PART_AGE]] + 4 * at, 4)
        memcpy(to.model + 8 * position, block[layout.of_part[PART_MODEL]] + 8 * at, 8)
        memcpy(to.ids + 24 * position, &one.low, 8)
        memcpy(to.ids + 24 * position + 8, &one.high, 8)
        memcpy(to.ids + 24 * position + 16, block[layout.of_part[PART_NUMBER]] + 8 * at, 8)


cdef void _gather(Layout layout, const Pick* pick, Py_ssize_t size, char** target, const Carried* to) noexcept nogil:
    cdef int i
    for i in range(layout.fields):
        if layout.field[i].index < 0:
            _gather_rows(&layout.field[i], pick, size, target[i])
        else:
            _gather_frames(&layout.field[i], pick, size, target[i])
    _gather_carried(layout, pick, size, to)


cdef double _importance(
    Layout layout, const Pick* pick, Py_ssize_t size, double population, double exponent, double rarest, double* value, float* importance
) noexcept nogil:
    """Compute (N pi_c chance N_k / N_c) ** -exponent over the divisor; return the divisor. See `weigh`."""
    cdef bint drawn = layout.is_drawn
    cdef double chance, positives
    cdef Py_ssize_t i
    cdef const Pick* one
    for i in range(size):
        one = &pick[i]
        if drawn:
            chance = read_double(one.view.block[layout.of_part[PART_CHANCE]] + 8 * <size_t>one.sample)
            positives = read_double(one.view.block[layout.of_part[PART_POPULATION]] + 8 * <size_t>one.sample)
        else:
            chance = read_double(one.view.block[layout.of_part[PART_WEIGHT]] + 8 * <size_t>one.sample) / one.view.total_weight
            positives = one.view.positives
        value[one.position] = population * one.share * chance * positives / one.newest
    return weigh(value, size, exponent, rarest, importance)


@cython.auto_pickle(False)
cdef class HeldPool:
    """All clients' queues of held caches, with draws over them. Not thread-safe: `Pool` in pool.py has the lock."""

    cdef list clients
    cdef double* scratch          # weight, unused, between, cap, share and count of each client
    cdef Py_ssize_t room
    cdef uint64_t random
    cdef readonly Py_ssize_t nbytes, caches, unused, held
    cdef readonly uint64_t drawn  # samples ever drawn from this pool
    cdef uint32_t most_times      # maximum draws of a held sample, with reuse; 0: no limit
    cdef uint64_t entered         # number of clients ever entered
    cdef uint64_t elsewhere       # samples that readers of this pool drew from other pools

    def __cinit__(self, uint64_t seed):
        self.clients, self.random = [], seed

    def __dealloc__(self):
        free(self.scratch)

    def __len__(self):
        return len(self.clients)

    def __iter__(self):
        return iter(list(self.clients))

    def state(self):
        """Return (random, drawn, elsewhere), the state of drawing beside the clients."""
        return self.random, self.drawn, self.elsewhere

    def go_on_from(self, uint64_t random, uint64_t drawn, uint64_t elsewhere):
        """Restore a result of `state`, before any client enters."""
        self.random, self.drawn, self.elsewhere = random, drawn, elsewhere

    def since(self, HeldClient client not None):
        """Return the number of samples drawn since the client's newest cache arrived."""
        return self.drawn + self.elsewhere - client.mark

    def set_since(self, HeldClient client not None, uint64_t samples):
        """Set the number of samples drawn since the client's newest cache arrived, for a client restored from a snapshot."""
        client.mark = self.drawn + self.elsewhere - min(samples, self.drawn + self.elsewhere)

    def enter(self, HeldClient client not None):
        """Add a client to the pool."""
        if client.slot >= 0:
            raise ValueError("the client is already in a pool")
        client.slot, client.mark = len(self.clients), self.drawn + self.elsewhere
        client.number = self.entered
        self.entered += 1
        self.clients.append(client)

    def leave(self, HeldClient client not None):
        """Remove a client with all its caches; return the numbers (caches, unused samples) removed."""
        cdef HeldClient last
        cdef Py_ssize_t caches = client.caches, unused = client.unused
        self._own(client)
        while client.caches:
            self.drop_oldest(client)
        last = self.clients.pop()
        if last is not client:
            self.clients[client.slot] = last
            last.slot = client.slot
        client.slot = -1
        return caches, unused

    cdef _own(self, HeldClient client):
        if not 0 <= client.slot < len(self.clients) or self.clients[client.slot] is not client:
            raise ValueError("the client is not in this pool")

    def push(self, HeldClient client not None, HeldCache cache not None):
        """Append a cache to its client's queue."""
        cdef double between = <double>(self.drawn + self.elsewhere - client.mark)
        self._own(client)
        cache.again = self._again_of(cache)
        # D_c: smoothed by a quarter of each new value, so that bursts of pushes do not make it jump
        if client.pushed == 1:
            client.between = between
        elif client.pushed > 1:
            client.between += 0.25 * (between - client.between)
        client.mark = self.drawn + self.elsewhere
        client.pushed += 1
        client._append(cache)
        self.nbytes += cache.nbytes
        self.unused += cache.count - cache.used
        self.held += cache.count
        self.caches += 1

    def largest(self):
        """Return the client that holds most bytes, or None for an empty pool."""
        cdef HeldClient client, most = None
        for client in self.clients:
            if client.caches and (most is None or client.nbytes > most.nbytes):
                most = client
        return most

    def drop_oldest(self, HeldClient client not None, Py_ssize_t place=0):
        """Drop a client's oldest cache, or the cache in this place. Return its (bytes, unused samples)."""
        cdef HeldCache cache
        self._own(client)
        if not 0 <= place < client.caches:
            raise ValueError("the client holds no such cache")
        cache = client._pop(place)
        self.nbytes -= cache.nbytes
        self.unused -= cache.count - cache.used
        self.held -= cache.count
        self.caches -= 1
        return cache.nbytes, <Py_ssize_t>(cache.count - cache.used)

    def limit(self, uint32_t most_times):
        """Limit the draws of each held sample with reuse; 0 is no limit."""
        cdef HeldClient client
        cdef HeldCache cache
        cdef uint32_t i, kept
        self.most_times = most_times
        for client in self.clients:
            client.again = 0
            for cache in client.queue:
                kept = 0
                cache.again = 0
                if cache.times != NULL and most_times:
                    cache.list_left()
                    for i in range(cache.count):
                        if i < cache.used or cache.times[cache.left[i]] < most_times:
                            cache.again += most_times - cache.times[cache.left[i]] if i >= cache.used else 0
                            cache.left[kept] = cache.left[i]
                            kept += 1
                    self._shrink(client, cache, cache.count - kept)
                else:
                    cache.again = <int64_t>most_times * (cache.count - cache.used)
                client.again += cache.again
            self._drop_empty(client)

    cdef void _shrink(self, HeldClient client, HeldCache cache, Py_ssize_t gone) noexcept:
        """Subtract this many undrawn samples of a cache, which can no longer be drawn, from the counts."""
        cache.count -= <uint32_t>gone
        client.unused -= gone
        client.held -= gone
        self.unused -= gone
        self.held -= gone

    cdef _drop_empty(self, HeldClient client):
        cdef Py_ssize_t place
        for place in range(client.caches - 1, -1, -1):
            if (<HeldCache>client.queue[place]).used == (<HeldCache>client.queue[place]).count:
                self.drop_oldest(client, place)

    def pass_over(self, double oldest, int64_t oldest_model):
        """Discard samples of entries that were recorded before `oldest` by the pool's clock, or by a model before `oldest_model`. Return the
        number of discarded samples that could still be drawn. Cost: a look at each client, and at the samples of caches with old entries.
        """
        cdef HeldClient client
        cdef HeldCache cache
        cdef Py_ssize_t passed = 0, drawn
        cdef uint32_t gone
        for client in self.clients:
            if client.eldest >= oldest and client.least_model >= oldest_model:
                continue
            client.eldest, client.least_model = INFINITY, LATEST
            for cache in client.queue:
                if cache.eldest < oldest or cache.least_model < oldest_model:
                    drawn = cache.used
                    gone = cache.pass_over(oldest, oldest_model)
                    # Drawn samples are in the count of held samples, but not in that of unused samples.
                    client.held -= gone + drawn
                    self.held -= gone + drawn
                    client.unused -= gone
                    self.unused -= gone
                    passed += gone
                    self._count_again(client, cache)
                client.eldest, client.least_model = min(client.eldest, cache.eldest), min(client.least_model, cache.least_model)
            self._drop_empty(client)
        return passed

    cdef void _count_again(self, HeldClient client, HeldCache cache) noexcept:
        """Update the number of remaining draws of a cache."""
        cdef int64_t again = self._again_of(cache)
        client.again += again - cache.again
        cache.again = again

    cdef int64_t _again_of(self, HeldCache cache) noexcept:
        """Return the number of remaining draws of a cache's samples."""
        cdef int64_t again = <int64_t>self.most_times * (cache.count - cache.used)
        cdef uint32_t i
        if cache.times != NULL and self.most_times:
            for i in range(cache.used, cache.count):
                again -= cache.times[sample_at(cache, i)]
        return again

    def entries(self):
        """Return the sum of the clients' N_c."""
        cdef HeldClient client
        cdef double positives = 0.0
        for client in self.clients:
            positives += client.population
        return <int64_t>positives

    def silent(self, double since, bint reuse):
        """Return clients last heard before `since`; without `reuse` only clients whose samples are used up."""
        cdef HeldClient client
        return [client for client in self.clients if client.heard < since and (reuse or client.unused == 0)]

    cdef int _make_room(self) except -1:
        cdef Py_ssize_t clients = len(self.clients)
        cdef double* grown
        if clients > self.room:
            grown = <double*>realloc(self.scratch, 6 * 2 * clients * sizeof(double))
            if grown == NULL:
                raise MemoryError()
            self.scratch, self.room = grown, 2 * clients
        return 0

    def can_serve(self, bint reuse):
        """Return the number of samples that one draw could take without reserved ones; -1 with `reuse` for any number."""
        cdef HeldClient client
        cdef Py_ssize_t free_ = 0
        for client in self.clients:
            if client.mass > 0.0 and client.held > 0:
                if reuse and not self.most_times:
                    return -1
                if reuse:
                    free_ += client.again
                    continue
                free_ += max(0, client.unused - client.reserved)
        return free_

    def draw(self, Layout layout not None, Py_ssize_t size, bint reuse):
        """Draw `size` samples of all clients by the rule of docs/sampling.md, shuffled. Return Picks, or None if there are too few."""
        cdef Py_ssize_t clients = len(self.clients), i
        cdef double *weight
        cdef double *unused
        cdef double *between
        cdef double *cap
        cdef double *share
        cdef int64_t *count
        cdef HeldClient client
        cdef Picks picks
        cdef double together = 0.0, mass = 0.0, mass_serving = 0.0, population = 0.0, rarest = INFINITY, largest = 0.0
        self._make_room()
        weight = self.scratch
        unused, between, cap, share = weight + self.room, weight + 2 * self.room, weight + 3 * self.room, weight + 4 * self.room
        count = <int64_t*>(weight + 5 * self.room)
        for i in range(clients):
            largest = max(largest, (<HeldClient>self.clients[i]).mass)
        for i in range(clients):
            client = <HeldClient>self.clients[i]
            # Only proportions matter; a sum of reported weights could overflow.
            weight[i], between[i] = client.mass / largest if largest > 0.0 else 0.0, client.between
            mass += weight[i]
            unused[i] = 0.0
            if client.mass > 0.0 and client.held > 0:
                unused[i] = self._able(client) if reuse else <double>max(0, client.unused - client.reserved)
            if unused[i] > 0.0:
                together += unused[i]
                mass_serving += weight[i]
                population += client.population
        if together < size:
            return None
        _shares(weight, unused, between, clients, size, cap, share)
        if _counts(share, unused, clients, size, _pool_fraction(&self.random), count):
            return None
        picks = Picks(layout, size)
        for i in range(clients):
            client = <HeldClient>self.clients[i]
            if unused[i] > 0.0 and client.minimum > 0.0:
                rarest = min(rarest, share[i] * client.minimum / client.mass)
            if count[i]:
                if reuse:
                    self._take_again(client, count[i], share[i], picks)
                else:
                    self._take(client, count[i], share[i], picks)
        picks.population, picks.rarest = population, rarest * population
        picks.left_out = max(0.0, 1.0 - mass_serving / mass) if mass > 0.0 else 0.0
        picks._shuffle(&self.random)
        self.drawn += size
        return picks

    cdef inline double _able(self, HeldClient client) noexcept:
        """Return the number of samples of a client that can be drawn with reuse."""
        return <double>client.again if self.most_times else INFINITY

    cdef int _take(self, HeldClient client, int64_t count, double share, Picks picks) except -1:
        """Pick the client's next `count` unused samples, oldest cache first; drop caches that are used up."""
        cdef HeldCache cache
        cdef int64_t here
        while count:
            cache = client.queue[0]
            here = min(count, <int64_t>(cache.count - cache.used))
            picks._add(client, cache, cache.used, here, share)
            cache.used += <uint32_t>here
            client.unused -= here
            self.unused -= here
            count -= here
            if cache.used == cache.count:
                self.drop_oldest(client)
        return 0

    cdef int _take_again(self, HeldClient client, int64_t count, double share, Picks picks) except -1:
        """Pick `count` of the client's held samples, uniformly and with replacement; samples are not used up."""
        cdef HeldCache cache
        cdef uint32_t at, place
        while count:
            place = _pool_below(&self.random, <uint32_t>client.caches)
            cache = client.queue[place]
            # reject places beyond a smaller cache, so that each sample is equally likely
            at = _pool_below(&self.random, client.most)
            if at < cache.count:
                picks._add(client, cache, at, 1, share)
                count -= 1
                if self.most_times:
                    self._used_again(client, cache, place, at)
        return 0

    cdef int _used_again(self, HeldClient client, HeldCache cache, Py_ssize_t place, uint32_t at) except -1:
        """Count one more draw of a held sample; remove the sample at the limit of draws."""
        cdef uint32_t sample
        cache.list_left()
        if cache.times == NULL:
            cache.times = <uint32_t*>calloc(max(1, cache.view.samples), sizeof(uint32_t))
            if cache.times == NULL:
                raise MemoryError()
        sample = cache.left[at]
        cache.times[sample] += 1
        cache.again -= 1
        client.again -= 1
        if cache.times[sample] >= self.most_times:
            cache.left[at] = cache.left[cache.count - 1]
            self._shrink(client, cache, 1)
            if cache.count == cache.used:
                self.drop_oldest(client, place)
        return 0

    # Readers: each has samples reserved at each client, and takes samples by the client's name.

    def draw_elsewhere(self, uint64_t samples):
        """Count samples that a reader of this pool drew from other pools: the shares of clients here are shares of these draws too."""
        self.elsewhere += samples

    def reserve(self, bytes reader not None, Py_ssize_t total, uint64_t part=0, uint64_t of=1):
        """Reserve unused samples for a reader: each client's share of `total` by weight or by samples, whichever is more; 0 frees them.

        By weight, so that a client's share does not depend on the others' stock; by samples, so that there are enough samples if the heaviest
        clients have few. If readers divide the clients, each reader takes every `of`-th client in order of entry.
        """
        cdef HeldClient client
        cdef double together = 0.0, mass = 0.0, share
        cdef Py_ssize_t mine, others, wanted
        if part >= of:
            raise ValueError(f"part {part} of {of}")
        for client in self.clients:
            if client.number % of != part:
                continue
            others = max(0, client.unused - client.reserved + <Py_ssize_t>client.reserved_for.get(reader, 0))
            together += others
            mass += client.mass if others else 0.0
        for client in self.clients:
            mine = client.reserved_for.pop(reader, 0)
            client.reserved -= mine
            others = max(0, client.unused - client.reserved)
            wanted = 0
            if total > 0 and others > 0 and client.number % of == part:
                share = max(others / together, client.mass / mass if mass > 0.0 else 0.0)
                wanted = min(others, <Py_ssize_t>floor(total * share) + 1)
            if wanted:
                client.reserved_for[reader] = wanted
                client.reserved += wanted

    def sums(self, bytes reader not None, bint reuse, uint64_t part=0, uint64_t of=1):
        """Return packed `wire.CLIENT_SUMS` rows of the reader's clients that have a weight.

        D_c is scaled to the reader's part of u_c, and to its part of all draws, because other readers draw from other clients.
        """
        cdef HeldClient client
        cdef Py_ssize_t mine
        cdef list rows = []
        cdef SumsRow row
        if part >= of:
            raise ValueError(f"part {part} of {of}")
        for client in self.clients:
            if client.mass <= 0.0 or client.number % of != part:
                continue
            mine = client.reserved_for.get(reader, 0)
            mine = min(mine, client.unused)
            row.low, row.high, row.sequence = client.low, client.high, client.sequence
            row.mass, row.population, row.minimum = client.mass, <uint64_t>client.population, client.minimum
            row.between, row.reserved, row.flags = 0.0, <uint32_t>mine, 0
            if client.between > 0.0 and client.unused > 0:
                row.between = client.between * mine / client.unused / of
            if reuse and client.held > 0:
                row.reserved, row.flags = <uint32_t>client.held, 1
                if self.most_times:
                    row.reserved, row.flags = <uint32_t>min(client.again, <int64_t>0xFFFFFFFF), 0
            rows.append((<const uint8_t*>&row)[:sizeof(SumsRow)])
        return b"".join(rows)

    cdef int64_t _count_of(self, HeldClient client, int64_t count) noexcept:
        """Return how many of `count` samples a client can give with reuse."""
        if client.held == 0:
            return 0
        return min(count, client.again) if self.most_times else count

    def take(self, Layout layout not None, bytes reader not None, list wanted, bint reuse):
        """Draw by (client, count) pairs for a reader, as many as each client has. Return Picks in that order, not shuffled."""
        cdef HeldClient client
        cdef Picks picks
        cdef int64_t count, mine, most = 0
        for client, count in wanted:
            self._own(client)
            if count < 0:
                raise ValueError(f"a count of {count}")
            most += min(count, <int64_t>client.unused) if not reuse else self._count_of(client, count)
        picks = Picks(layout, most)
        for client, count in wanted:
            if reuse:
                self._take_again(client, min(self._count_of(client, count), most - picks.size), 1.0, picks)
                continue
            # Read only now, because an earlier pair may name the same client.
            mine = client.reserved_for.get(reader, 0)
            count = min(count, <int64_t>client.unused, mine + <int64_t>max(0, client.unused - client.reserved))
            self._take(client, count, 1.0, picks)
            if mine:
                client.reserved_for[reader] = max(0, mine - count)
                client.reserved -= min(mine, count)
        self.drawn += picks.size
        return picks

    def save(self, list wanted not None, bint reuse):
        """Return the state that `take` of these pairs would change, for `restore`. Cost: a look at the affected caches."""
        cdef HeldClient client
        cdef HeldCache cache
        cdef int64_t count
        cdef list clients = [], caches
        for client, count in wanted if not reuse or self.most_times else ():
            caches = []
            for cache in client.queue:
                if count <= 0 and not reuse:
                    break
                count -= cache.count - cache.used
                left = None if cache.left == NULL else (<const uint8_t*>cache.left)[: cache.count * sizeof(uint32_t)]
                times = None if cache.times == NULL else (<const uint8_t*>cache.times)[: cache.view.samples * sizeof(uint32_t)]
                caches.append((cache, cache.used, cache.count, cache.again, left, times))
            numbers = client.most, client.at_most, client.again, client.caches, client.nbytes, client.unused, client.held, client.reserved
            clients.append((client, list(client.queue), caches, numbers, dict(client.reserved_for)))
        return clients, (self.random, self.nbytes, self.caches, self.unused, self.held, self.drawn)

    def restore(self, tuple saved not None):
        """Restore a result of `save`. Only a `take` of the same pairs may have changed the pool since."""
        cdef HeldClient client
        cdef HeldCache cache
        clients, numbers = saved
        self.random, self.nbytes, self.caches, self.unused, self.held, self.drawn = numbers
        for client, queue, caches, numbers, reserved_for in clients:
            client.queue, client.reserved_for = list(queue), dict(reserved_for)
            client.most, client.at_most, client.again, client.caches, client.nbytes, client.unused, client.held, client.reserved = numbers
            for cache, used, count, again, left, times in caches:
                cache.used, cache.count, cache.again = used, count, again
                if left is None:
                    free(cache.left)
                    cache.left = NULL
                else:
                    memcpy(cache.left, <const char*>left, len(left))
                if times is None:
                    free(cache.times)
                    cache.times = NULL
                else:
                    memcpy(cache.times, <const char*>times, len(times))


def assemble(
    Layout layout not None, list drawn, list shares_of, list newest_of, double population, double left_out, double rarest, uint64_t seed
):
    """Return shuffled Picks of every sample of received DRAWN containers.

    Args:
        drawn: HeldCache of `layout` each.
        shares_of, newest_of: For each container float64 [owners]: pi_c and N_c, in the order of its OWNERS.
        population, left_out, rarest: N, weight left out, and the smallest N P(i), from the reader's sums.
    """
    cdef HeldCache cache
    cdef Picks picks
    cdef const double* share
    cdef const double* newest
    cdef const uint8_t* owners
    cdef const uint8_t* ids
    cdef uint32_t owner, i
    cdef Py_ssize_t total = 0
    cdef uint64_t random = seed
    for cache in drawn:
        if cache.layout is not layout or not layout.is_drawn:
            raise ValueError("a container has another layout")
        total += cache.view.samples
    picks = Picks(layout, total)
    picks.population, picks.left_out, picks.rarest = population, left_out, rarest
    for cache, of_owner, population_of in zip(drawn, shares_of, newest_of):
        share, newest = doubles_of(of_owner, len(of_owner)), doubles_of(population_of, len(of_owner))
        owners, ids = cache.view.block[layout.of_part[PART_OWNER]], cache.view.block[layout.of_part[PART_OWNERS]]
        picks.caches.append(cache)
        for i in range(cache.view.samples):
            owner = read32(owners + 4 * <size_t>i)
            if owner >= <size_t>len(of_owner):
                raise ValueError("fewer shares than owners")
            picks.pick[picks.size] = Pick(
                &cache.view, i, <uint32_t>picks.size, share[owner], newest[owner],
                read64(ids + 16 * <size_t>owner), read64(ids + 16 * <size_t>owner + 8),
            )
            picks.size += 1
    picks._shuffle(&random)
    return picks
