/* Included by native.c once for each instruction set, with TARGET and SET set to it. The specification of every function
   is the one of the same name in its family's torch.py. Lengths are of elements; only selection allocates memory.

   A family's native.h includes its loops on several dtypes (per_dtype.h) once for each, with `dtype` set to it. */

#ifndef DGCOPT_LOOPS_H
#define DGCOPT_LOOPS_H

enum { MOMENTUM = 1, DAMPENED = 2, NESTEROV = 4, COMMIT = 8, LOOK = 16, BESIDE = 32, REST = 64 };
enum { SAMPLE = 1024, SOON = 6, PIECE = 1024, STRETCH = 1024, LARGE = 1 << 17 };

#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#define WHOLE(x) ((int32_t)__builtin_rintf(x)) /* clang has no irintf */
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#define WHOLE(x) __builtin_irintf(x)
#endif

typedef float four __attribute__((vector_size(16)));
typedef float eight __attribute__((vector_size(32)));
typedef double two_doubles __attribute__((vector_size(16)));
typedef double four_doubles __attribute__((vector_size(32)));

/* keep * x + add * y, where y lies in parts: of each a row, which tells where it lies, where in x it begins, and where it
   ends there. */
typedef struct {
    const int64_t *table;
    int64_t rows;
    float keep, add;
} mixture;

#define INLINE static inline __attribute__((always_inline))

/* Names of functions: of one instruction set, name_avx2, and of one dtype too, name_f32_avx2. */
#define JOIN(a, b) JOIN_EXPANDED(a, b)
#define JOIN_EXPANDED(a, b) a##_##b
#define FN(name) JOIN(name, SET)
#define OF(name) FN(JOIN(name, dtype))

/* A dtype is also the C type of its elements; BITS is the integer of its width, and CODE(bits) the magnitude as an int32_t
   with the order of magnitudes, NaN last. */
typedef float f32;
typedef int32_t f32_bits;
typedef uint16_t bf16, bf16_bits;
#define BITS JOIN(dtype, bits)
#define CODE(bits) JOIN(code, dtype)(bits)
#define code_f32(bits) ((int32_t)((bits) & 0x7fffffff))
#define code_bf16(bits) ((int32_t)((bits) & 0x7fff) << 16)

/* How many of n are looked at before all others. */
static int64_t sample_size(int64_t n) { return n / 16 < SAMPLE ? n / 16 : SAMPLE; }

/* The place in a sample that is most probably below the k-th of n: its own, and four standard deviations more. */
static int64_t rank_in_sample(int64_t k, int64_t n, int64_t size) {
    int64_t rank = (int64_t)((double)k / (double)n * (double)size), spread = 4;
    while (spread * spread < 16 * rank) spread++;
    return rank + spread;
}

#endif

#include "floats.h"
#include "flags.h"
#include "parts.h"
#include "../reductions/native.h"
#include "../copying/native.h"
#include "../memory/native.h"
#include "../selection/native.h"
#include "../coordinates/native.h"
#include "../hashing/native.h"
#include "../packing/native.h"
#include "../rounding/native.h"
#include "../values/native.h"
#include "../minmax/native.h"
#include "../signs/native.h"
#include "../matrices/native.h"
