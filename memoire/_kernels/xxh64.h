/* Constants of XXH64, and copies of its stripes. */

#ifndef MEMOIRE_XXH64_H
#define MEMOIRE_XXH64_H

#include <stdint.h>
#include <string.h>

#define MEMOIRE_PRIME_1 0x9E3779B185EBCA87ULL
#define MEMOIRE_PRIME_2 0xC2B2AE3D27D4EB4FULL
#define MEMOIRE_PRIME_3 0x165667B19E3779F9ULL
#define MEMOIRE_PRIME_4 0x85EBCA77C2B2AE63ULL
#define MEMOIRE_PRIME_5 0x27D4EB2F165667C5ULL

#if defined(__SSE2__)
#include <emmintrin.h>
/* Past the processor's cache, to an address that is a multiple of 16: what is long is not read again soon. */
static inline void memoire_stream_stripe(uint8_t *to, const uint8_t *from) {
    _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
    _mm_stream_si128((__m128i *)(to + 16), _mm_loadu_si128((const __m128i *)(from + 16)));
}
#define memoire_streamed() _mm_sfence()
#else
#define memoire_stream_stripe(to, from) memcpy(to, from, 32)
#define memoire_streamed() ((void)0)
#endif

#endif
