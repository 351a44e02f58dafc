/* XXH3 with 64 bits, written from the public description of the algorithm (github.com/Cyan4973/xxHash, doc/xxhash_spec.md).

   Eight running sums consume stripes of 64 bytes. After 16 stripes the sums are scrambled. Each lane multiplies halves of 32
   bits, which vector units do for two, four or more lanes at once: the checksum is as fast as memory. `target`, if not
   NULL, receives a copy of the bytes in the same pass. */

#ifndef MEMOIRE_XXH3_H
#define MEMOIRE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define MEMOIRE_XXH3_X86 1
#include <immintrin.h>
#if defined(__clang__)
#define MEMOIRE_UNROLLED _Pragma("unroll")
#else
#define MEMOIRE_UNROLLED _Pragma("GCC unroll 16")
#endif
#elif defined(__aarch64__) && !defined(__AARCH64EB__)
#define MEMOIRE_XXH3_NEON 1
#include <arm_neon.h>
#endif

#define MEMOIRE_XXH3_STRIPE 64
#define MEMOIRE_XXH3_SECRET 192
#define MEMOIRE_XXH3_BLOCK ((MEMOIRE_XXH3_SECRET - MEMOIRE_XXH3_STRIPE) / 8) /* stripes */
#define MEMOIRE_XXH3_STREAMED_FROM ((size_t)1 << 17) /* bytes: copies from this size on bypass the cache */

#define MEMOIRE_P32_1 0x9E3779B1U
#define MEMOIRE_P32_2 0x85EBCA77U
#define MEMOIRE_P32_3 0xC2B2AE3DU
#define MEMOIRE_P64_1 0x9E3779B185EBCA87ULL
#define MEMOIRE_P64_2 0xC2B2AE3D27D4EB4FULL
#define MEMOIRE_P64_3 0x165667B19E3779F9ULL
#define MEMOIRE_P64_4 0x85EBCA77C2B2AE63ULL
#define MEMOIRE_P64_5 0x27D4EB2F165667C5ULL
#define MEMOIRE_MIX_1 0x165667919E3779F9ULL
#define MEMOIRE_MIX_2 0x9FB21C651E98DF25ULL

static const uint8_t memoire_xxh3_secret[MEMOIRE_XXH3_SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint32_t memoire_le32(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, 4);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

static inline uint64_t memoire_le64(const uint8_t *from) {
    return (uint64_t)memoire_le32(from) | (uint64_t)memoire_le32(from + 4) << 32;
}

static inline uint64_t memoire_rotate64(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

static inline uint64_t memoire_swap64(uint64_t word) {
    word = (word & 0x00FF00FF00FF00FFULL) << 8 | (word >> 8 & 0x00FF00FF00FF00FFULL);
    word = (word & 0x0000FFFF0000FFFFULL) << 16 | (word >> 16 & 0x0000FFFF0000FFFFULL);
    return word << 32 | word >> 32;
}

/* Returns the upper half xor the lower half of the product of 128 bits. */
static inline uint64_t memoire_fold_product(uint64_t left, uint64_t right) {
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t low = (left & 0xFFFFFFFF) * (right & 0xFFFFFFFF), high = (left >> 32) * (right >> 32);
    uint64_t cross = (left >> 32) * (right & 0xFFFFFFFF) + (low >> 32);
    uint64_t other = (left & 0xFFFFFFFF) * (right >> 32) + (cross & 0xFFFFFFFF);
    return (other << 32 | (low & 0xFFFFFFFF)) ^ (high + (cross >> 32) + (other >> 32));
#endif
}

static inline uint64_t memoire_avalanche(uint64_t sum) {
    sum = (sum ^ sum >> 37) * MEMOIRE_MIX_1;
    return sum ^ sum >> 32;
}

static inline uint64_t memoire_strong_avalanche(uint64_t sum) {
    sum = (sum ^ sum >> 33) * MEMOIRE_P64_2;
    sum = (sum ^ sum >> 29) * MEMOIRE_P64_3;
    return sum ^ sum >> 32;
}

static inline uint64_t memoire_mix16(const uint8_t *from, const uint8_t *secret, uint64_t seed) {
    return memoire_fold_product(
        memoire_le64(from) ^ (memoire_le64(secret) + seed), memoire_le64(from + 8) ^ (memoire_le64(secret + 8) - seed));
}

static inline uint64_t memoire_xxh3_to_16(const uint8_t *from, size_t size, uint64_t seed) {
    const uint8_t *secret = memoire_xxh3_secret;
    uint64_t low, high;
    if (size > 8) {
        low = memoire_le64(from) ^ ((memoire_le64(secret + 24) ^ memoire_le64(secret + 32)) + seed);
        high = memoire_le64(from + size - 8) ^ ((memoire_le64(secret + 40) ^ memoire_le64(secret + 48)) - seed);
        return memoire_avalanche(size + memoire_swap64(low) + high + memoire_fold_product(low, high));
    }
    if (size >= 4) {
        seed ^= memoire_swap64((uint32_t)seed); /* the lower half, its bytes reversed, into the upper */
        low = memoire_le32(from + size - 4) + ((uint64_t)memoire_le32(from) << 32);
        low ^= (memoire_le64(secret + 8) ^ memoire_le64(secret + 16)) - seed;
        low ^= memoire_rotate64(low, 49) ^ memoire_rotate64(low, 24);
        low *= MEMOIRE_MIX_2;
        low = (low ^ ((low >> 35) + size)) * MEMOIRE_MIX_2;
        return low ^ low >> 28;
    }
    if (size) {
        low = (uint32_t)from[0] << 16 | (uint32_t)from[size >> 1] << 24 | from[size - 1] | (uint32_t)size << 8;
        return memoire_strong_avalanche(low ^ ((uint64_t)(memoire_le32(secret) ^ memoire_le32(secret + 4)) + seed));
    }
    return memoire_strong_avalanche(seed ^ memoire_le64(secret + 56) ^ memoire_le64(secret + 64));
}

static inline uint64_t memoire_xxh3_to_240(const uint8_t *from, size_t size, uint64_t seed) {
    const uint8_t *secret = memoire_xxh3_secret;
    uint64_t sum = size * MEMOIRE_P64_1;
    size_t at;
    if (size <= 128) { /* pairs from both ends inwards */
        for (at = (size - 1) / 32 * 16;; at -= 16) {
            sum += memoire_mix16(from + at, secret + 2 * at, seed);
            sum += memoire_mix16(from + size - 16 - at, secret + 2 * at + 16, seed);
            if (!at) return memoire_avalanche(sum);
        }
    }
    for (at = 0; at < 128; at += 16) sum += memoire_mix16(from + at, secret + at, seed);
    sum = memoire_avalanche(sum);
    for (; at + 16 <= size; at += 16) sum += memoire_mix16(from + at, secret + at - 128 + 3, seed);
    return memoire_avalanche(sum + memoire_mix16(from + size - 16, secret + 136 - 17, seed));
}

/* Kinds of stores for the copy of the bytes. */
enum { MEMOIRE_NO_COPY, MEMOIRE_COPY, MEMOIRE_STREAM /* bypasses the processor's cache; the target is a multiple of 16 */ };

static inline int memoire_copy_of(const uint8_t *target, size_t size) {
    if (!target) return MEMOIRE_NO_COPY;
    return size < MEMOIRE_XXH3_STREAMED_FROM || (uintptr_t)target % 16 ? MEMOIRE_COPY : MEMOIRE_STREAM;
}

typedef void (*memoire_stripes)(
    uint64_t *sums, const uint8_t *from, size_t stripes, const uint8_t *secret, uint8_t *target, int copy);

static void memoire_stripes_plain(
    uint64_t *sums, const uint8_t *from, size_t stripes, const uint8_t *secret, uint8_t *target, int copy) {
    size_t stripe, lane;
    for (stripe = 0; stripe < stripes; stripe++, from += 64) {
        const uint8_t *key = secret + stripe % MEMOIRE_XXH3_BLOCK * 8;
        if (copy) memcpy(target + stripe * 64, from, 64);
        for (lane = 0; lane < 8; lane++) {
            uint64_t word = memoire_le64(from + 8 * lane), keyed = word ^ memoire_le64(key + 8 * lane);
            sums[lane ^ 1] += word;
            sums[lane] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
        }
        if (stripe % MEMOIRE_XXH3_BLOCK != MEMOIRE_XXH3_BLOCK - 1) continue;
        for (lane = 0; lane < 8; lane++) {
            uint64_t sum = sums[lane] ^ sums[lane] >> 47 ^ memoire_le64(secret + 128 + 8 * lane);
            sums[lane] = sum * MEMOIRE_P32_1;
        }
    }
}

#if MEMOIRE_XXH3_X86
static inline __attribute__((always_inline)) void memoire_store_16(uint8_t *target, __m128i word, int copy) {
    if (copy == MEMOIRE_STREAM) _mm_stream_si128((__m128i *)target, word);
    else _mm_storeu_si128((__m128i *)target, word);
}

static void memoire_stripes_sse2(
    uint64_t *sums, const uint8_t *from, size_t stripes, const uint8_t *secret, uint8_t *target, int copy) {
    const __m128i prime = _mm_set1_epi32((int)MEMOIRE_P32_1);
    __m128i sum[4];
    size_t stripe;
    int pair;
    for (pair = 0; pair < 4; pair++) sum[pair] = _mm_loadu_si128((const __m128i *)sums + pair);
    for (stripe = 0; stripe < stripes; stripe++, from += 64) {
        const uint8_t *key = secret + stripe % MEMOIRE_XXH3_BLOCK * 8;
        for (pair = 0; pair < 4; pair++) {
            __m128i word = _mm_loadu_si128((const __m128i *)from + pair);
            __m128i keyed = _mm_xor_si128(word, _mm_loadu_si128((const __m128i *)key + pair));
            __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
            if (copy) memoire_store_16(target + stripe * 64 + pair * 16, word, copy);
            sum[pair] = _mm_add_epi64(sum[pair], _mm_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2)));
            sum[pair] = _mm_add_epi64(sum[pair], product);
        }
        if (stripe % MEMOIRE_XXH3_BLOCK != MEMOIRE_XXH3_BLOCK - 1) continue;
        for (pair = 0; pair < 4; pair++) {
            __m128i mixed = _mm_xor_si128(sum[pair], _mm_srli_epi64(sum[pair], 47));
            mixed = _mm_xor_si128(mixed, _mm_loadu_si128((const __m128i *)(secret + 128) + pair));
            sum[pair] = _mm_add_epi64(
                _mm_mul_epu32(mixed, prime), _mm_slli_epi64(_mm_mul_epu32(_mm_srli_epi64(mixed, 32), prime), 32));
        }
    }
    for (pair = 0; pair < 4; pair++) _mm_storeu_si128((__m128i *)sums + pair, sum[pair]);
}

__attribute__((target("avx2"))) static void memoire_stripes_avx2(
    uint64_t *sums, const uint8_t *from, size_t stripes, const uint8_t *secret, uint8_t *target, int copy) {
    const __m256i prime = _mm256_set1_epi32((int)MEMOIRE_P32_1);
    __m256i sum[2];
    size_t stripe;
    int half;
    for (half = 0; half < 2; half++) sum[half] = _mm256_loadu_si256((const __m256i *)sums + half);
    for (stripe = 0; stripe < stripes; stripe++, from += 64) {
        const uint8_t *key = secret + stripe % MEMOIRE_XXH3_BLOCK * 8;
        for (half = 0; half < 2; half++) {
            __m256i word = _mm256_loadu_si256((const __m256i *)from + half);
            __m256i keyed = _mm256_xor_si256(word, _mm256_loadu_si256((const __m256i *)key + half));
            __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            if (copy == MEMOIRE_STREAM) {
                _mm_stream_si128((__m128i *)(target + stripe * 64 + half * 32), _mm256_castsi256_si128(word));
                _mm_stream_si128((__m128i *)(target + stripe * 64 + half * 32 + 16), _mm256_extracti128_si256(word, 1));
            } else if (copy) {
                _mm256_storeu_si256((__m256i *)(target + stripe * 64) + half, word);
            }
            sum[half] = _mm256_add_epi64(sum[half], _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2)));
            sum[half] = _mm256_add_epi64(sum[half], product);
        }
        if (stripe % MEMOIRE_XXH3_BLOCK != MEMOIRE_XXH3_BLOCK - 1) continue;
        for (half = 0; half < 2; half++) {
            __m256i mixed = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
            mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)(secret + 128) + half));
            sum[half] = _mm256_add_epi64(
                _mm256_mul_epu32(mixed, prime),
                _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime), 32));
        }
    }
    for (half = 0; half < 2; half++) _mm256_storeu_si256((__m256i *)sums + half, sum[half]);
}

/* Whole blocks with their keys in registers. A store that bypasses the cache fills a whole line if the target is aligned to it. */
__attribute__((target("avx512f"))) static void memoire_stripes_avx512(
    uint64_t *sums, const uint8_t *from, size_t stripes, const uint8_t *secret, uint8_t *target, int copy) {
    const __m512i prime = _mm512_set1_epi64((long long)MEMOIRE_P32_1), scramble = _mm512_loadu_si512(secret + 128);
    __m512i sum = _mm512_loadu_si512(sums), key[MEMOIRE_XXH3_BLOCK];
    int i;
    if (copy == MEMOIRE_STREAM && (uintptr_t)target % 64) {
        memoire_stripes_avx2(sums, from, stripes, secret, target, copy);
        return;
    }
    for (i = 0; i < MEMOIRE_XXH3_BLOCK; i++) key[i] = _mm512_loadu_si512(secret + 8 * i);
    for (; stripes >= MEMOIRE_XXH3_BLOCK; stripes -= MEMOIRE_XXH3_BLOCK) {
        MEMOIRE_UNROLLED
        for (i = 0; i < MEMOIRE_XXH3_BLOCK; i++, from += 64) {
            __m512i word = _mm512_loadu_si512(from), keyed = _mm512_xor_si512(word, key[i]);
            __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
            __m512i swapped = _mm512_shuffle_epi32(word, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
            if (copy == MEMOIRE_STREAM) _mm512_stream_si512((__m512i *)(target + 64 * i), word);
            else if (copy) _mm512_storeu_si512(target + 64 * i, word);
            sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
        }
        sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), scramble);
        sum = _mm512_add_epi64(
            _mm512_mul_epu32(sum, prime), _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32));
        if (copy) target += 64 * MEMOIRE_XXH3_BLOCK;
    }
    _mm512_storeu_si512(sums, sum);
    memoire_stripes_plain(sums, from, stripes, secret, target, copy);
}
#endif

#if MEMOIRE_XXH3_NEON
static void memoire_stripes_neon(
    uint64_t *sums, const uint8_t *from, size_t stripes, const uint8_t *secret, uint8_t *target, int copy) {
    const uint32x2_t prime = vdup_n_u32(MEMOIRE_P32_1);
    uint64x2_t sum[4];
    size_t stripe;
    int pair;
    for (pair = 0; pair < 4; pair++) sum[pair] = vld1q_u64(sums + 2 * pair);
    for (stripe = 0; stripe < stripes; stripe++, from += 64) {
        const uint8_t *key = secret + stripe % MEMOIRE_XXH3_BLOCK * 8;
        for (pair = 0; pair < 4; pair++) {
            uint8x16_t bytes = vld1q_u8(from + 16 * pair);
            uint64x2_t word = vreinterpretq_u64_u8(bytes);
            uint64x2_t keyed = veorq_u64(word, vreinterpretq_u64_u8(vld1q_u8(key + 16 * pair)));
            if (copy) vst1q_u8(target + stripe * 64 + 16 * pair, bytes);
            sum[pair] = vaddq_u64(sum[pair], vextq_u64(word, word, 1));
            sum[pair] = vmlal_u32(sum[pair], vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
        }
        if (stripe % MEMOIRE_XXH3_BLOCK != MEMOIRE_XXH3_BLOCK - 1) continue;
        for (pair = 0; pair < 4; pair++) {
            uint64x2_t mixed = veorq_u64(sum[pair], vshrq_n_u64(sum[pair], 47));
            mixed = veorq_u64(mixed, vreinterpretq_u64_u8(vld1q_u8(secret + 128 + 16 * pair)));
            sum[pair] = vshlq_n_u64(vmull_u32(vshrn_n_u64(mixed, 32), prime), 32);
            sum[pair] = vmlal_u32(sum[pair], vmovn_u64(mixed), prime);
        }
    }
    for (pair = 0; pair < 4; pair++) vst1q_u64(sums + 2 * pair, sum[pair]);
}
#endif

/* Returns the implementations for stripes that this processor supports, the fastest first, by number; NULL after the last. */
static inline memoire_stripes memoire_xxh3_way(int number) {
    memoire_stripes ways[5] = {NULL, NULL, NULL, NULL, NULL};
    int found = 0;
#if MEMOIRE_XXH3_X86
    __builtin_cpu_init();
    /* Older processors, which have AVX-512 without this extension, run slower while they use it. */
    if (__builtin_cpu_supports("avx512vbmi2")) ways[found++] = memoire_stripes_avx512;
    if (__builtin_cpu_supports("avx2")) ways[found++] = memoire_stripes_avx2;
    ways[found++] = memoire_stripes_sse2;
#elif MEMOIRE_XXH3_NEON
    ways[found++] = memoire_stripes_neon;
#endif
    ways[found++] = memoire_stripes_plain;
    return number >= 0 && number < found ? ways[number] : NULL;
}

static inline uint64_t memoire_xxh3_long(
    memoire_stripes take, const uint8_t *from, size_t size, uint64_t seed, uint8_t *target) {
    uint64_t sums[8] = {MEMOIRE_P32_3, MEMOIRE_P64_1, MEMOIRE_P64_2, MEMOIRE_P64_3,
                        MEMOIRE_P64_4, MEMOIRE_P32_2, MEMOIRE_P64_5, MEMOIRE_P32_1};
    const uint8_t *secret = memoire_xxh3_secret;
    uint8_t seeded[MEMOIRE_XXH3_SECRET];
    size_t stripes = (size - 1) / 64, at, byte;
    uint64_t sum = size * MEMOIRE_P64_1;
    int copy = memoire_copy_of(target, size);
    if (seed) {
        for (at = 0; at < MEMOIRE_XXH3_SECRET; at += 8) {
            uint64_t word = memoire_le64(secret + at) + (at % 16 ? 0 - seed : seed);
            for (byte = 0; byte < 8; byte++) seeded[at + byte] = (uint8_t)(word >> 8 * byte);
        }
        secret = seeded;
    }
    take(sums, from, stripes, secret, target, copy);
#if MEMOIRE_XXH3_X86
    if (copy == MEMOIRE_STREAM) _mm_sfence();
#endif
    if (target) memcpy(target + 64 * stripes, from + 64 * stripes, size - 64 * stripes);
    memoire_stripes_plain(sums, from + size - 64, 1, secret + 121, NULL, MEMOIRE_NO_COPY); /* ends with the last byte */
    for (at = 0; at < 8; at += 2) {
        sum += memoire_fold_product(
            sums[at] ^ memoire_le64(secret + 11 + 8 * at), sums[at + 1] ^ memoire_le64(secret + 19 + 8 * at));
    }
    return memoire_avalanche(sum);
}

/* Returns the XXH3 of `size` bytes at any alignment, by one of the implementations above. */
static inline uint64_t memoire_xxh3(
    memoire_stripes take, const uint8_t *from, size_t size, uint64_t seed, uint8_t *target) {
    if (size > 240) return memoire_xxh3_long(take, from, size, seed, target);
    if (target) memcpy(target, from, size);
    return size > 16 ? memoire_xxh3_to_240(from, size, seed) : memoire_xxh3_to_16(from, size, seed);
}

#endif
