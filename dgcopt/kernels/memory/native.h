/* Momentum and unsent gradient, weight decay, and weighted sums. */

#define BOTH(name) FN(JOIN(JOIN(name, gradient), dtype))
#define READ_GRADIENT FN(JOIN(read, gradient))
#define EACH(DO, does)                                                                                                 \
    DO((does)) DO((does) | MOMENTUM) DO((does) | MOMENTUM | DAMPENED)                                                  \
    DO((does) | MOMENTUM | NESTEROV) DO((does) | MOMENTUM | DAMPENED | NESTEROV)
#define PASS(mode)                                                                                                     \
    case mode: BOTH(blocks)(v + i, new + i, u + i, g, maxima + i / BLOCK, n, m, keep, scale, mode); break;
#define ROWS(mode)                                                                                                     \
    case mode: BOTH(rows)(v, u, parts, starts, stops, parts_there, blocks, count, rows, m, keep, scale, mode); break;

#define gradient f32
#define dtype f32
#include "per_two_dtypes.h"
#undef dtype
#define dtype bf16
#include "per_two_dtypes.h"
#undef dtype
#undef gradient
#define gradient bf16
#define dtype f32
#include "per_two_dtypes.h"
#undef dtype
#define dtype bf16
#include "per_two_dtypes.h"
#undef dtype
#undef gradient

#undef BOTH
#undef READ_GRADIENT
#undef EACH
#undef PASS
#undef ROWS

#define dtype f32
#include "per_dtype.h"
#undef dtype
#define dtype bf16
#include "per_dtype.h"
#undef dtype

INLINE TARGET void FN(mix_span)(const float *x, float keep, const float *y, float add, int64_t n, float *out) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) out[i] = __builtin_fmaf(y[i], add, x[i] * keep);
}

/* With those parts of y that lie between start and stop, from *row on; the next call goes on from there. x is what lies
   at start. */
INLINE TARGET void FN(mix_part)(const mixture *of, int64_t *row, float *x, int64_t start, int64_t stop) {
    for (; *row < of->rows; (*row)++) {
        const int64_t *part = of->table + 3 * *row;
        int64_t first = part[1] > start ? part[1] : start, last = part[2] < stop ? part[2] : stop;
        const float *y = (const float *)(intptr_t)part[0];
        if (part[1] <= start && stop <= part[2]) /* for so many the compiler makes a loop of its own */
            FN(mix_span)(x, of->keep, y + (start - part[1]), of->add, stop - start, x);
        else if (first < last)
            FN(mix_span)(x + (first - start), of->keep, y + (first - part[1]), of->add, last - first, x + (first - start));
        if (part[2] >= stop) break;
    }
}

TARGET void FN(mix)(float *x, int64_t start, int64_t stop, const int64_t *table, int64_t rows, float keep, float add) {
    mixture of = {table, rows, keep, add};
    int64_t row = 0;
    FN(mix_part)(&of, &row, x + start, start, stop);
}
