/* Momentum and unsent gradient: accumulate, its preview, and blocks of it, for each dtype of gradient and of memory. */

/* The new v goes to `new`, unless this is a mere LOOK; with COMMIT u becomes the new one, and g zero. With REST that
   is all, and v is not read. */
INLINE TARGET int32_t BOTH(block)(const dtype *v, dtype *new, dtype *u, gradient *g, int64_t n, float m,
                                  float keep, float scale, const int mode) {
    int32_t top = 0;
    ELEMENTWISE for (int64_t i = 0; i < n; i++) {
        float x = READ_GRADIENT(g + i) * scale, step = x;
        if (mode & MOMENTUM) {
            float before = OF(read)(u + i);
            float after = mode & DAMPENED ? __builtin_fmaf(x, keep, before * m) : __builtin_fmaf(before, m, x);
            if (mode & COMMIT) OF(write)(u + i, after);
            step = mode & NESTEROV ? __builtin_fmaf(after, m, x) : after;
        }
        if (mode & COMMIT) g[i] = 0;
        if (mode & REST) continue;
        float sum = OF(read)(v + i) + step;
        if (!(mode & LOOK)) OF(write)(new + i, sum);
        int32_t size = OF(magnitude)(sum);
        top = size > top ? size : top;
    }
    return top;
}

INLINE TARGET void BOTH(blocks)(dtype *v, dtype *new, dtype *u, gradient *g, BITS *maxima, int64_t n,
                                float m, float keep, float scale, const int mode) {
    gradient zeros[BLOCK] = {0};
    dtype made[BLOCK];
    int streams = mode & BESIDE && FN(streams)((const float *)new, n);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t size = n - i < BLOCK ? n - i : BLOCK;
        gradient *here = g ? g + i : zeros;
        int32_t top;
        if (size < BLOCK) {
            top = BOTH(block)(v + i, new + i, u + i, here, size, m, keep, scale, mode);
        } else if (streams) {
            top = BOTH(block)(v + i, made, u + i, here, BLOCK, m, keep, scale, mode);
            FN(stream)(new + i, made, sizeof made);
        } else {
            top = BOTH(block)(v + i, new + i, u + i, here, BLOCK, m, keep, scale, mode);
        }
        if (!(mode & REST)) maxima[i / BLOCK] = (BITS)top;
    }
    if (streams) FENCE;
}

/* What lies from `first` to `last`, in parts of g; those that are missing are NULL. */
TARGET void BOTH(accumulate)(dtype *v, dtype *new, dtype *u, gradient *const *parts, const int64_t *starts,
                             const int64_t *stops, int64_t count, BITS *maxima, int64_t first,
                             int64_t last, float m, float keep, float scale, int mode) {
    for (int64_t p = 0; p < count; p++) {
        int64_t i = starts[p] > first ? starts[p] : first, n = (stops[p] < last ? stops[p] : last) - i;
        if (n <= 0) continue;
        gradient *g = parts[p] ? parts[p] + (i - starts[p]) : NULL;
        switch (mode) { /* so that no loop asks */
            EACH(PASS, COMMIT)
            EACH(PASS, LOOK)
            EACH(PASS, BESIDE)
            EACH(PASS, COMMIT | REST)
        }
    }
}

INLINE TARGET void BOTH(rows)(const dtype *v, dtype *u, gradient *const *parts, const int64_t *starts,
                              const int64_t *stops, int64_t parts_there, const int64_t *blocks,
                              int64_t count, dtype *rows, float m, float keep, float scale,
                              const int mode) {
    gradient zeros[BLOCK] = {0};
    for (int64_t row = 0, p = 0; row < count; row++, rows += BLOCK) {
        int64_t i = blocks[row] * BLOCK;
        if (row + SOON < count) {
            int64_t later = blocks[row + SOON] * BLOCK;
            FN(soon)(v + later, sizeof(dtype)), FN(soon)(u + later, sizeof(dtype));
            if (parts[p] && starts[p] <= later && later < stops[p])
                FN(soon)(parts[p] + (later - starts[p]), sizeof(gradient));
        }
        p = FN(part_of)(starts, stops, parts_there, p, i);
        int64_t left = stops[p] - i;
        gradient *g = parts[p] ? parts[p] + (i - starts[p]) : zeros;
        if (left >= BLOCK) {
            BOTH(block)(v + i, rows, u + i, g, BLOCK, m, keep, scale, mode);
        } else {
            memset(rows + left, 0, (BLOCK - left) * sizeof(dtype));
            BOTH(block)(v + i, rows, u + i, g, left, m, keep, scale, mode);
        }
    }
}

/* Returns 1 if there is no such block. */
TARGET int BOTH(ahead)(const dtype *v, dtype *u, gradient *const *parts, const int64_t *starts,
                       const int64_t *stops, int64_t parts_there, const int64_t *blocks, int64_t count,
                       dtype *rows, float m, float keep, float scale, int mode) {
    for (int64_t row = 0, p = 0; row < count; row++) {
        if (!parts_there || blocks[row] < 0 || blocks[row] > INT64_MAX / BLOCK) return 1;
        p = FN(part_of)(starts, stops, parts_there, p, blocks[row] * BLOCK);
        if (p < 0) return 1;
    }
    switch (mode) { EACH(ROWS, 0) }
    return 0;
}
