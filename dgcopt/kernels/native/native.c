/* The inner loops of dgcopt on a CPU, without torch or Python: plain functions on pointers, called through ctypes.

   loops.h includes the loops of all families. It is compiled once for each instruction set below, all in one library, and `dgcopt_cpu` says
   which of them this processor runs best. All need fused multiply-add in hardware, because torch's own loops use it and
   results must have the same bits. -ffp-contract=off keeps the compiler from fusing anything else. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64

#ifndef DGCOPT_SOURCES
#define DGCOPT_SOURCES ""
#endif

/* Which sources this was built from; empty if it was not setup.py that built it. */
const char *dgcopt_sources(void) { return DGCOPT_SOURCES; }

/* STREAM writes so many floats past the caches, to an address that is a multiple of their size; FENCE lets others see them.
   FLAGS makes 64 bytes of 0 or 1 the bits of a word, and BELOW_ZERO tells by bits which of as many numbers as STREAM
   writes are below zero, where an instruction does. */

#if defined(__x86_64__) || defined(__i386__)

#include <immintrin.h>

#define FENCE _mm_sfence()

#define TARGET __attribute__((target("avx2,fma,bmi,bmi2,lzcnt")))
#define SET avx2
#define STREAMED 8
#define STREAM(to, from) _mm256_stream_ps(to, _mm256_loadu_ps(from))
#define BELOW_ZERO(v) _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(v), _mm256_setzero_ps(), _CMP_LT_OS))
#include "loops.h"
#undef TARGET
#undef SET
#undef STREAMED
#undef STREAM
#undef BELOW_ZERO

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,lzcnt")))
#define SET avx512
#define STREAMED 16
#define STREAM(to, from) _mm512_stream_ps(to, _mm512_loadu_ps(from))
#define BELOW_ZERO(v) _mm512_cmp_ps_mask(_mm512_loadu_ps(v), _mm512_setzero_ps(), _CMP_LT_OS)
#define FLAGS(bytes) _mm512_test_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(1))
#include "loops.h"
#undef TARGET
#undef SET

const char *dgcopt_cpu(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return "avx2";
    return "";
}

#elif defined(__aarch64__)

#define TARGET
#define SET neon
#define STREAMED 4
#define STREAM(to, from) memcpy(to, from, 4 * sizeof(float))
#define FENCE
#include "loops.h"

const char *dgcopt_cpu(void) { return "neon"; }

#else

const char *dgcopt_cpu(void) { return ""; }

#endif
