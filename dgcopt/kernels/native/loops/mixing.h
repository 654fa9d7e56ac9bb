/* Weighted sums of flat tensors. */

INLINE TARGET void FN(mix_span)(const float *x, float keep, const float *y, float add, int64_t n, float *out) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) out[i] = __builtin_fmaf(y[i], add, x[i] * keep);
}

INLINE TARGET void FN(unmix_span)(float *mixed, float keep, const float *y, float add, int64_t n) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) mixed[i] = __builtin_fmaf(y[i], -add, mixed[i]) / keep;
}

/* Of each part a row: where it lies, where in x, and how long. x[start .. stop] alone is changed. */
#define EVERY_PART(call)                                                                                               \
    for (int64_t row = 0; row < rows; row++, table += 3) {                                                             \
        int64_t first = table[1] > start ? table[1] : start, last = table[1] + table[2];                               \
        const float *y = (const float *)(intptr_t)table[0];                                                            \
        last = last < stop ? last : stop;                                                                              \
        if (first < last) call;                                                                                        \
    }

TARGET void FN(mix)(float *x, float keep, const int64_t *table, int64_t rows, float add, int64_t start, int64_t stop) {
    EVERY_PART(FN(mix_span)(x + first, keep, y + (first - table[1]), add, last - first, x + first))
}

TARGET void FN(unmix)(float *x, float keep, const int64_t *table, int64_t rows, float add, int64_t start,
                      int64_t stop) {
    EVERY_PART(FN(unmix_span)(x + first, keep, y + (first - table[1]), add, last - first))
}

#undef EVERY_PART
