"""Ranking of a tree's leaves by weight: leaf of a rank, rank of a leaf, and sums over ranks."""

from libc.math cimport exp, expm1, log, log1p, pow
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memmove

from memoire._kernels.native cimport inside

# Order: all positive leaves of a tree, the heaviest first. It finds the rank of a leaf and the leaf of a rank quickly and
# exactly while weights change.
#
#     sequence   block 2          block 0          block 1      blocks of up to ORDER_BLOCK leaves, sorted inside,
#     leaves     9 4 7            1 8              5 2 3        one after the other; of equal weights the lower leaf first
#     before     0                3                5            leaves in the blocks in front: recomputed on demand
#
# A full block is split; two neighbours that fit into three quarters of a block are merged. So a change moves at most a block,
# and a million leaves are about eight thousand blocks, which are summed in microseconds.

cdef enum:
    ORDER_BLOCK = 256
    EXACT_TERMS = 64  # terms of the sum over ranks that are added; beyond, the Euler-Maclaurin formula is exact to rounding

cdef struct Order:
    int64_t blocks  # number of blocks in the sequence
    int64_t count  # number of leaves
    int64_t free_count
    bint settled
    double* weights  # [all blocks, ORDER_BLOCK]
    int32_t* leaves
    int32_t* used  # number of leaves of each block
    int32_t* free_blocks
    int32_t* sequence
    int64_t* before
    double sums[EXACT_TERMS + 1]  # sums of rank ** -alpha over the first ranks
    double alpha


cdef inline void order_take(Order* order, int64_t place) noexcept nogil:
    """Put an empty free block at this place of the sequence. The caller has moved the blocks from this place on up."""
    order.free_count -= 1
    order.sequence[place] = order.free_blocks[inside(order.free_count, order.free_count + 1)]
    order.used[order.sequence[place]] = 0


cdef inline bint order_is_before(double weight, int64_t leaf, double other, int64_t other_leaf) noexcept nogil:
    return weight > other or (weight == other and leaf < other_leaf)


cdef inline int64_t order_block(const Order* order, double weight, int64_t leaf) noexcept nogil:
    """Return the place in the sequence of the block for this leaf: the first block whose last leaf is not before it."""
    cdef int64_t low = 0, high = order.blocks - 1, middle, last
    while low < high:
        middle = (low + high) // 2
        last = order.sequence[middle] * <int64_t>ORDER_BLOCK + order.used[order.sequence[middle]] - 1
        if order_is_before(order.weights[last], order.leaves[last], weight, leaf):
            low = middle + 1
        else:
            high = middle
    return low


cdef inline int64_t order_within(const Order* order, int64_t block, double weight, int64_t leaf) noexcept nogil:
    """Return the number of leaves of a block that come before this leaf."""
    cdef const double* weights = order.weights + block * ORDER_BLOCK
    cdef const int32_t* leaves = order.leaves + block * ORDER_BLOCK
    cdef int64_t low = 0, high = order.used[block], middle
    while low < high:
        middle = (low + high) // 2
        if order_is_before(weights[middle], leaves[middle], weight, leaf):
            low = middle + 1
        else:
            high = middle
    return low


cdef inline void order_insert(Order* order, int64_t leaf, double weight) noexcept nogil:
    cdef int64_t place = order_block(order, weight, leaf), block = order.sequence[place], other, at, half
    cdef double* weights
    cdef int32_t* leaves
    if order.used[block] == ORDER_BLOCK:
        memmove(order.sequence + place + 1, order.sequence + place, (order.blocks - place) * sizeof(int32_t))
        order.blocks += 1
        order_take(order, place + 1)
        other, half = order.sequence[place + 1], ORDER_BLOCK // 2
        memcpy(order.weights + other * ORDER_BLOCK, order.weights + block * ORDER_BLOCK + half, half * sizeof(double))
        memcpy(order.leaves + other * ORDER_BLOCK, order.leaves + block * ORDER_BLOCK + half, half * sizeof(int32_t))
        order.used[block] = order.used[other] = <int32_t>half
        at = block * ORDER_BLOCK + half - 1
        if order_is_before(order.weights[at], order.leaves[at], weight, leaf):
            block = other
    weights, leaves = order.weights + block * ORDER_BLOCK, order.leaves + block * ORDER_BLOCK
    at = order_within(order, block, weight, leaf)
    memmove(weights + at + 1, weights + at, (order.used[block] - at) * sizeof(double))
    memmove(leaves + at + 1, leaves + at, (order.used[block] - at) * sizeof(int32_t))
    weights[at], leaves[at] = weight, <int32_t>leaf
    order.used[block] += 1
    order.count += 1
    order.settled = False


cdef inline void order_remove(Order* order, int64_t leaf, double weight) noexcept nogil:
    cdef int64_t place = order_block(order, weight, leaf), block = order.sequence[place]
    cdef int64_t at = inside(order_within(order, block, weight, leaf), order.used[block])
    cdef double* weights = order.weights + block * ORDER_BLOCK
    cdef int32_t* leaves = order.leaves + block * ORDER_BLOCK
    order.used[block] -= 1
    memmove(weights + at, weights + at + 1, (order.used[block] - at) * sizeof(double))
    memmove(leaves + at, leaves + at + 1, (order.used[block] - at) * sizeof(int32_t))
    order.count -= 1
    order.settled = False
    if place + 1 < order.blocks:
        order_merge(order, place)
    if place > 0:
        order_merge(order, place - 1)


cdef inline void order_merge(Order* order, int64_t place) noexcept nogil:
    """Merge a block with the next if both fit into three quarters of a block, or one of them is empty."""
    cdef int64_t block = order.sequence[place], other = order.sequence[place + 1]
    cdef int64_t kept = order.used[block], added = order.used[other]
    if kept > 0 and added > 0 and kept + added > ORDER_BLOCK * 3 // 4:
        return
    memcpy(order.weights + block * ORDER_BLOCK + kept, order.weights + other * ORDER_BLOCK, added * sizeof(double))
    memcpy(order.leaves + block * ORDER_BLOCK + kept, order.leaves + other * ORDER_BLOCK, added * sizeof(int32_t))
    order.used[block] = <int32_t>(kept + added)
    order.free_blocks[order.free_count] = <int32_t>other
    order.free_count += 1
    order.blocks -= 1
    memmove(order.sequence + place + 1, order.sequence + place + 2, (order.blocks - place - 1) * sizeof(int32_t))


cdef inline void order_settle(Order* order) noexcept nogil:
    cdef int64_t place, count = 0
    if order.settled:
        return
    for place in range(order.blocks):
        order.before[place] = count
        count += order.used[order.sequence[place]]
    order.settled = True


cdef inline int64_t order_rank(Order* order, int64_t leaf, double weight) noexcept nogil:
    """Return the rank of a leaf in the order; the heaviest leaf has rank 1."""
    cdef int64_t place = order_block(order, weight, leaf)
    order_settle(order)
    return order.before[place] + order_within(order, order.sequence[place], weight, leaf) + 1


cdef inline int64_t order_leaf(Order* order, int64_t rank) noexcept nogil:
    """Return the leaf of a rank from 1 to count."""
    cdef int64_t low = 0, high = order.blocks - 1, middle
    order_settle(order)
    while low < high:
        middle = (low + high + 1) // 2
        if order.before[middle] < rank:
            low = middle
        else:
            high = middle - 1
    return order.leaves[order.sequence[low] * <int64_t>ORDER_BLOCK + inside(rank - 1 - order.before[low], ORDER_BLOCK)]


# Probability by rank: P(rank) = rank ** -alpha / sum over all ranks. Each draw computes the sum up to a rank, and the rank of
# a sum, in constant time: so the segments of equal probability are right for any number of leaves.

cdef inline void order_set_alpha(Order* order, double alpha) noexcept nogil:
    cdef int rank
    order.alpha = alpha
    order.sums[0] = 0.0
    for rank in range(1, EXACT_TERMS + 1):
        order.sums[rank] = order.sums[rank - 1] + pow(rank, -alpha)


cdef inline double order_sum(const Order* order, int64_t rank) noexcept nogil:
    """Return the sum of r ** -alpha for r from 1 to rank."""
    cdef double a = order.alpha, x = <double>rank, n = EXACT_TERMS, power, first, tail
    if rank <= EXACT_TERMS:
        return order.sums[rank]
    power, first = pow(x, -a), pow(n, -a)
    tail = 0.5 * (power - first) + a * (first / n - power / x) / 12.0
    tail -= a * (a + 1.0) * (a + 2.0) * (first / (n * n * n) - power / (x * x * x)) / 720.0
    return order.sums[EXACT_TERMS] + _power_integral(x, a) + tail


cdef inline double _power_integral(double x, double alpha) noexcept nogil:
    """Return the integral of t ** -alpha from EXACT_TERMS to x."""
    cdef double n = EXACT_TERMS, exponent = 1.0 - alpha, logarithm = log(x / n)
    if exponent == 0.0:
        return pow(n, exponent) * logarithm
    return pow(n, exponent) * expm1(exponent * logarithm) / exponent


cdef inline int64_t order_find(const Order* order, double mass, int64_t count) noexcept nogil:
    """Return the rank from 1 to count whose interval of `order_sum` holds this mass."""
    cdef double n = EXACT_TERMS, exponent = 1.0 - order.alpha, scaled
    cdef int64_t rank, low = 1, high
    if count <= EXACT_TERMS or mass < order.sums[EXACT_TERMS]:
        high = min(count, <int64_t>EXACT_TERMS)
        while low < high:
            rank = (low + high) // 2
            if order.sums[rank] > mass:
                high = rank
            else:
                low = rank + 1
        return low
    # Invert the formula without the terms of the rank itself: the result is off by a rank or two, which steps correct.
    scaled = mass - order.sums[EXACT_TERMS] + pow(n, -order.alpha) * (0.5 - order.alpha / (12.0 * n))
    scaled /= pow(n, exponent)
    if exponent == 0.0:
        scaled = n * exp(scaled)
    else:
        scaled = n * exp(log1p(max(exponent * scaled, -1.0 + 1e-15)) / exponent)
    rank = <int64_t>min(max(scaled, n), <double>count)
    while rank < count and order_sum(order, rank) <= mass:
        rank += 1
    while rank > 1 and order_sum(order, rank - 1) > mass:
        rank -= 1
    return rank
