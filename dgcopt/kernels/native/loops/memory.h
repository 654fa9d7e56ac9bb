/* accumulate and advance, for each type of gradient and of memory. */

#define LOOPS(G, gtype, M, mtype, maxtype)                                                                             \
    INLINE TARGET int32_t FN(block_##G##_##M)(const mtype *old, mtype *new, mtype *u, gtype *g, int64_t n, float m,     \
                                              float keep, float scale, const int mode) {                               \
        int32_t top = 0;                                                                                               \
        ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                                  \
            float x = FN(read_##G)(g + i) * scale, step = x;                                                           \
            if (mode & MOMENTUM) {                                                                                     \
                float before = FN(read_##M)(u + i);                                                                    \
                float after = mode & DAMPENED ? __builtin_fmaf(x, keep, before * m) : __builtin_fmaf(before, m, x);    \
                if (mode & COMMIT) FN(write_##M)(u + i, after);                                                        \
                step = mode & NESTEROV ? __builtin_fmaf(after, m, x) : after;                                          \
            }                                                                                                          \
            float sum = FN(read_##M)(old + i) + step;                                                                  \
            FN(write_##M)(new + i, sum);                                                                               \
            if (mode & COMMIT) g[i] = 0;                                                                               \
            int32_t size = FN(magnitude_##M)(sum);                                                                     \
            top = size > top ? size : top;                                                                             \
        }                                                                                                              \
        return top;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    INLINE TARGET void FN(blocks_##G##_##M)(const mtype *old, mtype *new, mtype *u, gtype *g, maxtype *maxima,          \
                                            int64_t n, float m, float keep, float scale, const int mode) {             \
        gtype zeros[BLOCK] = {0};                                                                                      \
        int64_t start = 0;                                                                                             \
        for (; start + BLOCK <= n; start += BLOCK)                                                                     \
            maxima[start / BLOCK] = (maxtype)FN(block_##G##_##M)(old + start, new + start, u + start,                  \
                                                                 g ? g + start : zeros, BLOCK, m, keep, scale, mode);  \
        if (start < n)                                                                                                 \
            maxima[start / BLOCK] = (maxtype)FN(block_##G##_##M)(old + start, new + start, u + start,                  \
                                                                 g ? g + start : zeros, n - start, m, keep, scale,     \
                                                                 mode);                                                \
    }                                                                                                                  \
                                                                                                                       \
    TARGET void FN(accumulate_##G##_##M)(const mtype *old, mtype *new, mtype *u, gtype *g, maxtype *maxima, int64_t n,  \
                                         float m, float keep, float scale, int mode) {                                 \
        switch (mode) { /* so that no loop asks */                                                                     \
            CASE(0, G, M) CASE(8, G, M) CASE(1, G, M) CASE(3, G, M) CASE(5, G, M) CASE(7, G, M) CASE(9, G, M)          \
            CASE(11, G, M) CASE(13, G, M) CASE(15, G, M)                                                               \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET void FN(advance_##G##_##M)(mtype *u, gtype *g, int64_t n, float m, float keep, float scale, int dampened) {  \
        if (!g) {                                                                                                      \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                float before = FN(read_##M)(u + i);                                                                    \
                FN(write_##M)(u + i, dampened ? __builtin_fmaf(0, keep, before * m) : __builtin_fmaf(before, m, 0));   \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        if (dampened) {                                                                                                \
            ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                              \
                float x = FN(read_##G)(g + i) * scale;                                                                 \
                FN(write_##M)(u + i, __builtin_fmaf(x, keep, FN(read_##M)(u + i) * m));                                \
                g[i] = 0;                                                                                              \
            }                                                                                                          \
        } else {                                                                                                       \
            ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                              \
                float x = FN(read_##G)(g + i) * scale;                                                                 \
                FN(write_##M)(u + i, __builtin_fmaf(FN(read_##M)(u + i), m, x));                                       \
                g[i] = 0;                                                                                              \
            }                                                                                                          \
        }                                                                                                              \
    }

#define CASE(mode, G, M)                                                                                               \
    case mode: FN(blocks_##G##_##M)(old, new, u, g, maxima, n, m, keep, scale, mode); break;

LOOPS(f32, float, f32, float, int32_t)
LOOPS(f32, float, bf16, uint16_t, uint16_t)
LOOPS(bf16, uint16_t, f32, float, int32_t)
LOOPS(bf16, uint16_t, bf16, uint16_t, uint16_t)

#undef LOOPS
#undef CASE
