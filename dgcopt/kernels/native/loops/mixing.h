/* Weighted sums of flat tensors. */

INLINE TARGET void FN(mix_span)(const float *x, float keep, const float *y, float add, int64_t n, float *out) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) out[i] = __builtin_fmaf(y[i], add, x[i] * keep);
}

INLINE TARGET void FN(mix_in_place)(float *x, float keep, const float *y, float add, int64_t n) {
    FN(mix_span)(x, keep, y, add, n, x);
}

INLINE TARGET void FN(unmix_in_place)(float *mixed, float keep, const float *y, float add, int64_t n) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) mixed[i] = __builtin_fmaf(y[i], -add, mixed[i]) / keep;
}

/* From *row on the parts of y that lie between start and stop; the next call goes on from there. x is what lies at
   start. */
#define EVERY_PART(span)                                                                                               \
    for (; *row < of->rows; (*row)++) {                                                                                \
        const int64_t *part = of->table + 3 * *row;                                                                    \
        int64_t first = part[1] > start ? part[1] : start, last = part[2] < stop ? part[2] : stop;                     \
        const float *y = (const float *)(intptr_t)part[0];                                                             \
        if (part[1] <= start && stop <= part[2])                                                                       \
            FN(span)(x, of->keep, y + (start - part[1]), of->add, stop - start); /* for so many the compiler makes a loop of its own */ \
        else if (first < last)                                                                                         \
            FN(span)(x + (first - start), of->keep, y + (first - part[1]), of->add, last - first);                                 \
        if (part[2] >= stop) break;                                                                                    \
    }

INLINE TARGET void FN(mix_part)(const mixture *of, int64_t *row, float *x, int64_t start, int64_t stop) {
    EVERY_PART(mix_in_place)
}

INLINE TARGET void FN(unmix_part)(const mixture *of, int64_t *row, float *x, int64_t start, int64_t stop) {
    EVERY_PART(unmix_in_place)
}

#undef EVERY_PART

TARGET void FN(mix)(float *x, int64_t start, int64_t stop, const int64_t *table, int64_t rows, float keep, float add) {
    mixture of = {table, rows, keep, add};
    int64_t row = 0;
    FN(mix_part)(&of, &row, x + start, start, stop);
}

TARGET void FN(unmix)(float *x, int64_t start, int64_t stop, const int64_t *table, int64_t rows, float keep,
                      float add) {
    mixture of = {table, rows, keep, add};
    int64_t row = 0;
    FN(unmix_part)(&of, &row, x + start, start, stop);
}
