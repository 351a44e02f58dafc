/* Kernels over the eight numbers of a tree's node, checks for finite floats, and the clock. */

#ifndef MEMOIRE_FLOATS_H
#define MEMOIRE_FLOATS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* Sums in pairs, so that additions do not depend on each other. Draws use running sums, which may differ in the
   last bit; memoire_pick handles a mass beyond all children. */
static inline double memoire_sum8(const double *c) {
    return ((c[0] + c[2]) + (c[4] + c[6])) + ((c[1] + c[3]) + (c[5] + c[7]));
}

static inline double memoire_least8(const double *c) {
    double a = c[0] < c[1] ? c[0] : c[1], b = c[2] < c[3] ? c[2] : c[3];
    double d = c[4] < c[5] ? c[4] : c[5], e = c[6] < c[7] ? c[6] : c[7];
    a = a < b ? a : b;
    d = d < e ? d : e;
    return a < d ? a : d;
}

static inline double memoire_least_positive8(const double *c) {
    double p[8];
    int i;
    for (i = 0; i < 8; i++) p[i] = c[i] > 0.0 ? c[i] : INFINITY;
    return memoire_least8(p);
}

/* Returns 1 if all of `size` bytes of floats are finite, else 0. Zero times a finite number is zero, and zero times
   another number is NaN, which stays: one instruction for a vector of numbers. */
typedef int (*memoire_check)(const char *source, int64_t size);

#define MEMOIRE_FINITE(name, type)                                                          \
    static int name(const char *source, int64_t size) {                                     \
        const char *end = source + size;                                                    \
        type rest = 0, one;                                                                 \
        for (; source != end; source += sizeof(type)) {                                     \
            memcpy(&one, source, sizeof(type));                                             \
            rest *= one;                                                                    \
        }                                                                                   \
        return rest == 0;                                                                   \
    }
MEMOIRE_FINITE(memoire_finite_floats, float)
MEMOIRE_FINITE(memoire_finite_doubles, double)

static int memoire_finite_halves(const char *source, int64_t size) {
    uint16_t half;
    int64_t i;
    for (i = 0; i < size; i += sizeof(half)) {
        memcpy(&half, source + i, sizeof(half));
        if ((half & 0x7c00) == 0x7c00) return 0;
    }
    return 1;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MEMOIRE_FINITE_WIDE(name, few, type, vector, kind)                                  \
    __attribute__((target("avx2"))) static int name(const char *source, int64_t size) {     \
        vector a = _mm256_setzero_##kind(), b = a;                                          \
        const char *end = source + (size & ~(int64_t)255);                                  \
        int i;                                                                              \
        for (; source != end; source += 256) {                                              \
            _Pragma("GCC unroll 4")                                                         \
            for (i = 0; i < 256; i += 64) {                                                 \
                a = _mm256_mul_##kind(a, _mm256_loadu_##kind((const type *)(source + i)));  \
                b = _mm256_mul_##kind(b, _mm256_loadu_##kind((const type *)(source + i + 32)));\
            }                                                                               \
        }                                                                                   \
        for (end += size & 224; source != end; source += 32)                                \
            a = _mm256_mul_##kind(a, _mm256_loadu_##kind((const type *)source));            \
        if (_mm256_movemask_##kind(_mm256_cmp_##kind(a, b, _CMP_UNORD_Q))) return 0;        \
        return !(size & 31) || few(source, size & 31);                                      \
    }
MEMOIRE_FINITE_WIDE(memoire_wide_floats, memoire_finite_floats, float, __m256, ps)
MEMOIRE_FINITE_WIDE(memoire_wide_doubles, memoire_finite_doubles, double, __m256d, pd)
#define MEMOIRE_HAS_WIDE() __builtin_cpu_supports("avx2")
#else
#define memoire_wide_floats memoire_finite_floats
#define memoire_wide_doubles memoire_finite_doubles
#define MEMOIRE_HAS_WIDE() 0
#endif

/* Returns the fastest check for floats of a width, in arrays of at least `size` bytes. */
static memoire_check memoire_check_of(int width, int64_t size) {
    int is_wide = size >= 32 && MEMOIRE_HAS_WIDE();
    if (width == 2) return memoire_finite_halves;
    if (width == 4) return is_wide ? memoire_wide_floats : memoire_finite_floats;
    return is_wide ? memoire_wide_doubles : memoire_finite_doubles;
}

/* Returns the child whose interval of running sums holds *mass, and reduces *mass to the rest within the child. If
   rounding puts the mass beyond all children, returns the last positive one: a child of sum 0 is never picked.
   (Bisection, with three comparisons, is not faster: measured.) */
static inline int64_t memoire_pick(const double *c, double *mass) {
    double before[9], m = *mass;
    int64_t k = 0, i;
    before[0] = 0.0;
    for (i = 0; i < 8; i++) before[i + 1] = before[i] + c[i];
    for (i = 1; i < 9; i++) k += m >= before[i];
    if (k == 8) {
        k = 7;
        while (k > 0 && !(c[k] > 0.0)) k--;
    }
    *mass = m - before[k];
    return k;
}

static inline double memoire_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#endif
