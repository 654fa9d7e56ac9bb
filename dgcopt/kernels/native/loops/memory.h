/* accumulate, look and ahead, for each type of gradient and of memory. */

/* Ask for a block of elements of that size. */
INLINE TARGET void FN(soon)(const void *block, int size) {
    for (int line = 0; line < BLOCK * size; line += 64) __builtin_prefetch((const char *)block + line);
}

#define LOOPS(G, gtype, M, mtype, maxtype)                                                                             \
    /* The new v goes to `new`, unless this is a mere LOOK; with COMMIT u becomes the new one, and g zero. With REST that\
       is all, and v is not read. */                                                                                   \
    INLINE TARGET int32_t FN(block_##G##_##M)(const mtype *v, mtype *new, mtype *u, gtype *g, int64_t n, float m,      \
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
            if (mode & COMMIT) g[i] = 0;                                                                               \
            if (mode & REST) continue;                                                                                 \
            float sum = FN(read_##M)(v + i) + step;                                                                    \
            if (!(mode & LOOK)) FN(write_##M)(new + i, sum);                                                           \
            int32_t size = FN(magnitude_##M)(sum);                                                                     \
            top = size > top ? size : top;                                                                             \
        }                                                                                                              \
        return top;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    INLINE TARGET void FN(blocks_##G##_##M)(mtype *v, mtype *new, mtype *u, gtype *g, maxtype *maxima, int64_t n,      \
                                            float m, float keep, float scale, const int mode) {                        \
        gtype zeros[BLOCK] = {0};                                                                                      \
        mtype made[BLOCK];                                                                                             \
        int streams = mode & BESIDE && FN(streams)((const float *)new, n);                                             \
        for (int64_t i = 0; i < n; i += BLOCK) {                                                                       \
            int64_t size = n - i < BLOCK ? n - i : BLOCK;                                                              \
            gtype *here = g ? g + i : zeros;                                                                           \
            int32_t top;                                                                                               \
            if (size < BLOCK) {                                                                                        \
                top = FN(block_##G##_##M)(v + i, new + i, u + i, here, size, m, keep, scale, mode);                    \
            } else if (streams) {                                                                                      \
                top = FN(block_##G##_##M)(v + i, made, u + i, here, BLOCK, m, keep, scale, mode);                      \
                FN(stream)(new + i, made, sizeof made);                                                                \
            } else {                                                                                                   \
                top = FN(block_##G##_##M)(v + i, new + i, u + i, here, BLOCK, m, keep, scale, mode);                   \
            }                                                                                                          \
            if (!(mode & REST)) maxima[i / BLOCK] = (maxtype)top;                                                      \
        }                                                                                                              \
        if (streams) FENCE;                                                                                            \
    }                                                                                                                  \
                                                                                                                       \
    /* What lies from `first` to `last`, in parts of g; those that are missing are NULL. */                            \
    TARGET void FN(accumulate_##G##_##M)(mtype *v, mtype *new, mtype *u, gtype *const *parts, const int64_t *starts,   \
                                         const int64_t *stops, int64_t count, maxtype *maxima, int64_t first,          \
                                         int64_t last, float m, float keep, float scale, int mode) {                   \
        for (int64_t p = 0; p < count; p++) {                                                                          \
            int64_t i = starts[p] > first ? starts[p] : first, n = (stops[p] < last ? stops[p] : last) - i;            \
            if (n <= 0) continue;                                                                                      \
            gtype *g = parts[p] ? parts[p] + (i - starts[p]) : NULL;                                                   \
            switch (mode) { /* so that no loop asks */                                                                 \
                EACH(PASS, COMMIT, G, M)                                                                               \
                EACH(PASS, LOOK, G, M)                                                                                 \
                EACH(PASS, BESIDE, G, M)                                                                               \
                EACH(PASS, COMMIT | REST, G, M)                                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    INLINE TARGET void FN(rows_##G##_##M)(const mtype *v, mtype *u, gtype *const *parts, const int64_t *starts,        \
                                          const int64_t *stops, int64_t parts_there, const int64_t *blocks,            \
                                          int64_t count, mtype *rows, float m, float keep, float scale,                \
                                          const int mode) {                                                            \
        gtype zeros[BLOCK] = {0};                                                                                      \
        for (int64_t row = 0, p = 0; row < count; row++, rows += BLOCK) {                                              \
            int64_t i = blocks[row] * BLOCK;                                                                           \
            if (row + SOON < count) {                                                                                  \
                int64_t later = blocks[row + SOON] * BLOCK;                                                            \
                FN(soon)(v + later, sizeof(mtype)), FN(soon)(u + later, sizeof(mtype));                                \
                if (parts[p] && starts[p] <= later && later < stops[p])                                                \
                    FN(soon)(parts[p] + (later - starts[p]), sizeof(gtype));                                           \
            }                                                                                                          \
            p = FN(part_of)(starts, stops, parts_there, p, i);                                                         \
            int64_t left = stops[p] - i;                                                                               \
            gtype *g = parts[p] ? parts[p] + (i - starts[p]) : zeros;                                                  \
            if (left >= BLOCK) {                                                                                       \
                FN(block_##G##_##M)(v + i, rows, u + i, g, BLOCK, m, keep, scale, mode);                               \
            } else {                                                                                                   \
                memset(rows + left, 0, (BLOCK - left) * sizeof(mtype));                                                \
                FN(block_##G##_##M)(v + i, rows, u + i, g, left, m, keep, scale, mode);                                \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* Returns 1 if there is no such block. */                                                                         \
    TARGET int FN(ahead_##G##_##M)(const mtype *v, mtype *u, gtype *const *parts, const int64_t *starts,               \
                                   const int64_t *stops, int64_t parts_there, const int64_t *blocks, int64_t count,    \
                                   mtype *rows, float m, float keep, float scale, int mode) {                          \
        for (int64_t row = 0, p = 0; row < count; row++) {                                                             \
            if (!parts_there || blocks[row] < 0 || blocks[row] > INT64_MAX / BLOCK) return 1;                          \
            p = FN(part_of)(starts, stops, parts_there, p, blocks[row] * BLOCK);                                       \
            if (p < 0) return 1;                                                                                       \
        }                                                                                                              \
        switch (mode) { EACH(ROWS, 0, G, M) }                                                                          \
        return 0;                                                                                                      \
    }

#define EACH(DO, does, G, M)                                                                                           \
    DO((does), G, M) DO((does) | MOMENTUM, G, M) DO((does) | MOMENTUM | DAMPENED, G, M)                                \
    DO((does) | MOMENTUM | NESTEROV, G, M) DO((does) | MOMENTUM | DAMPENED | NESTEROV, G, M)
#define PASS(mode, G, M)                                                                                               \
    case mode: FN(blocks_##G##_##M)(v + i, new + i, u + i, g, maxima + i / BLOCK, n, m, keep, scale, mode); break;
#define ROWS(mode, G, M)                                                                                               \
    case mode: FN(rows_##G##_##M)(v, u, parts, starts, stops, parts_there, blocks, count, rows, m, keep, scale, mode); break;

LOOPS(f32, float, f32, float, int32_t)
LOOPS(f32, float, bf16, uint16_t, uint16_t)
LOOPS(bf16, uint16_t, f32, float, int32_t)
LOOPS(bf16, uint16_t, bf16, uint16_t, uint16_t)

#undef LOOPS
#undef EACH
#undef PASS
#undef ROWS

/* What lies from `start` to `stop` where all weights follow one another. */
#define LOOP(W, type)                                                                                                  \
    INLINE TARGET void FN(decay_one_##W)(type *w, type *b, int64_t n, float m, float adds, float weight_decay,         \
                                         float minus_lr, const int nesterov) {                                         \
        ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                                  \
            float x = FN(read_##W)(w + i), step = __builtin_fmaf(x, adds, FN(read_##W)(b + i) * m);                    \
            FN(write_##W)(b + i, step);                                                                                \
            FN(write_##W)(w + i, __builtin_fmaf(nesterov ? step * m + x * weight_decay : step, minus_lr, x));          \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET void FN(decay_##W)(type *const *weights, type *const *buffers, const int64_t *lengths, int64_t count,       \
                              int64_t start, int64_t stop, float m, float adds, float weight_decay, float minus_lr,    \
                              int nesterov) {                                                                          \
        for (int64_t t = 0; t < count; start -= lengths[t], stop -= lengths[t], t++) {                                 \
            int64_t first = start > 0 ? start : 0, last = stop < lengths[t] ? stop : lengths[t];                       \
            if (first >= last) continue;                                                                               \
            type *w = weights[t] + first, *b = buffers[t] + first;                                                     \
            if (nesterov)                                                                                              \
                FN(decay_one_##W)(w, b, last - first, m, adds, weight_decay, minus_lr, 1);                             \
            else                                                                                                       \
                FN(decay_one_##W)(w, b, last - first, m, adds, weight_decay, minus_lr, 0);                             \
        }                                                                                                              \
    }

LOOP(f32, float)
LOOP(bf16, uint16_t)

#undef LOOP
