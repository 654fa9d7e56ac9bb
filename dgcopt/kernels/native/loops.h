/* Included by native.c once for each instruction set, with TARGET and FN set to it. The specification of every function
   is the one of the same name in ../torch/. Lengths are of elements; nothing is allocated but in `select`. */

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

/* How many of n are looked at before all others. */
static int64_t sample_size(int64_t n) { return n / 16 < SAMPLE ? n / 16 : SAMPLE; }

/* The place in a sample that is most probably below the k-th of n: its own, and four standard deviations more. */
static int64_t rank_in_sample(int64_t k, int64_t n, int64_t size) {
    int64_t rank = (int64_t)((double)k / (double)n * (double)size), spread = 4;
    while (spread * spread < 16 * rank) spread++;
    return rank + spread;
}

#endif

#include "loops/floats.h"
#include "loops/sums.h"
#include "loops/copying.h"
#include "loops/parts.h"
#include "loops/memory.h"
#include "loops/mixing.h"
#include "loops/residual.h"
#include "loops/selection.h"
#include "loops/threshold.h"
#include "loops/chunks.h"
#include "loops/minmax.h"
#include "loops/coordinates.h"
#include "loops/dct.h"
#include "loops/owners.h"
#include "loops/packing.h"
#include "loops/products.h"
#include "loops/rice.h"
#include "loops/rounding.h"
#include "loops/drawing.h"
#include "loops/hashing.h"
#include "loops/signs.h"
#include "loops/trits.h"
#include "loops/values.h"
