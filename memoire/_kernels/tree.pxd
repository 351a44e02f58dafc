"""Sum tree with eight children for each node: its layout, and the loops over it."""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint8_t

from memoire._kernels.floats cimport least8, least_positive8, pick, sum8
from memoire._kernels.native cimport inside, prefetch

# Priority tree: wide nodes of eight children, one cache line each, in one contiguous array for each level.
#
#     level 2                        29                             one value: the total
#     level 1         10                             19             eight for each node above; here two are used
#     level 0   3 0 5 2 0 0 0 0             1 6 0 0 4 0 8 0         leaves: entry i is leaf i
#
# A sum is recomputed from its eight children after each change, so sums do not drift. Writing a leaf only marks its
# parent; `tree_settle` then recomputes each marked node once, level by level. Beside each sum of level 1 and above lies
# the least positive leaf under it (infinity if no leaf is positive), which only `tree_least` brings up to date.

cdef enum:
    MAX_LEVELS = 16
    CHUNK = 256  # masses that are searched together
    DIRTY = 1
    STALE = 2

cdef struct Tree:
    int64_t size
    int levels
    int64_t positive  # number of leaves above 0
    int64_t dirties
    int64_t stales
    double* sums[MAX_LEVELS]
    double* least[MAX_LEVELS]  # from level 1 up
    uint8_t* marks[MAX_LEVELS]  # from level 1 up: DIRTY if the node is in `dirty`, STALE if it is in `stale`
    int64_t* dirty  # nodes whose sums are to be recomputed
    int64_t* stale  # nodes whose least leaves are to be recomputed


cdef inline void tree_put(Tree* tree, int64_t leaf, double weight) noexcept nogil:
    """Write a leaf and mark its parent; sums are right only after `tree_settle`."""
    cdef double* place = tree.sums[0] + inside(leaf, tree.size)
    cdef int64_t parent = leaf >> 3
    if place[0] == weight:
        return
    tree.positive += <int>(weight > 0.0) - <int>(place[0] > 0.0)
    place[0] = weight
    if not tree.marks[1][parent] & DIRTY:
        tree.dirty[tree.dirties] = parent
        tree.dirties += 1
        if not tree.marks[1][parent] & STALE:
            tree.stale[tree.stales] = parent
            tree.stales += 1
        tree.marks[1][parent] = DIRTY | STALE


cdef inline void tree_settle(Tree* tree) noexcept nogil:
    """Recompute every sum above a changed leaf, each sum once."""
    cdef int64_t i, node, parent, kept, count = tree.dirties
    cdef int level
    if count == 0:
        return
    for level in range(1, tree.levels):
        kept = 0
        for i in range(count):
            node = tree.dirty[i]
            tree.marks[level][node] &= ~DIRTY
            tree.sums[level][node] = sum8(tree.sums[level - 1] + 8 * node)
            parent = node >> 3
            if level + 1 < tree.levels and not tree.marks[level + 1][parent] & DIRTY:
                tree.marks[level + 1][parent] |= DIRTY
                tree.dirty[kept] = parent
                kept += 1
        count = kept
    tree.dirties = 0


cdef inline double tree_least(Tree* tree) noexcept nogil:
    """Return the least leaf above 0, or infinity. Recomputes every node above a leaf that has changed since the last call."""
    cdef int64_t i, node, parent, kept, count
    cdef int level
    tree_settle(tree)  # so that no node is dirty without being stale
    count = tree.stales
    for level in range(1, tree.levels):
        kept = 0
        for i in range(count):
            node = tree.stale[i]
            tree.marks[level][node] &= ~STALE
            if level == 1:
                tree.least[1][node] = least_positive8(tree.sums[0] + 8 * node)
            else:
                tree.least[level][node] = least8(tree.least[level - 1] + 8 * node)
            parent = node >> 3
            if level + 1 < tree.levels and not tree.marks[level + 1][parent] & STALE:
                tree.marks[level + 1][parent] |= STALE
                tree.stale[kept] = parent
                kept += 1
        count = kept
    tree.stales = 0
    return tree.least[tree.levels - 1][0]


cdef inline double tree_total(const Tree* tree) noexcept nogil:
    return tree.sums[tree.levels - 1][0]


cdef inline void tree_find(const Tree* tree, const double* masses, int64_t count, int64_t* leaves) noexcept nogil:
    """Find for each mass in [0, total) the leaf whose interval of cumulative weight holds it, one level for all masses at a time.

    A mass of the total or above gives the last leaf above 0. It becomes infinite: rounding could move a finite mass to the leaf before.
    """
    cdef double left[CHUNK]
    cdef double total = tree_total(tree)
    cdef int64_t start, i, size
    cdef int level
    start = 0
    while start < count:
        size = min(<int64_t>CHUNK, count - start)
        for i in range(size):
            left[i] = masses[start + i] if masses[start + i] < total else INFINITY
            leaves[start + i] = 0
        for level in range(tree.levels - 2, -1, -1):
            for i in range(start, start + size):
                leaves[i] = 8 * leaves[i] + pick(tree.sums[level] + 8 * leaves[i], &left[i - start])
                if level > 0:
                    prefetch(tree.sums[level - 1] + 8 * leaves[i])
        start += CHUNK
