/* Scaled copies of gradients, and their largest magnitudes, for each dtype. */

INLINE TARGET int32_t OF(copy)(const dtype *g, dtype *out, int64_t n, float scale) {
    int32_t top = 0;
    ELEMENTWISE for (int64_t i = 0; i < n; i++) {
        float x = OF(read)(g + i);
        int32_t size = FN(magnitude_f32)(x);
        OF(write)(out + i, x * scale);
        top = size > top ? size : top;
    }
    return top;
}

/* The same, past the caches where it would not stay there until all of a bucket is sent. */
INLINE TARGET int32_t OF(copy_out)(const dtype *g, dtype *out, int64_t n, float scale) {
    int32_t top = 0;
    if (FN(streams)((const float *)out, n)) {
        for (; n >= BLOCK; n -= BLOCK, g += BLOCK, out += BLOCK) {
            dtype block[BLOCK];
            int32_t size = OF(copy)(g, block, BLOCK, scale);
            FN(stream)(out, block, sizeof(block));
            top = size > top ? size : top;
        }
        FENCE;
    }
    int32_t size = OF(copy)(g, out, n, scale);
    return size > top ? size : top;
}

/* What lies from `start` to `stop` where all tensors follow one another, and zero behind each; `tops` are zero. */
TARGET void OF(copy_scaled)(const dtype *const *tensors, dtype *const *outs, const int64_t *lengths,
                            const int64_t *rooms, int64_t count, int64_t start, int64_t stop, float scale,
                            int32_t *tops) {
    const int fills = start == 0; /* one thread does */
    for (int64_t t = 0; t < count; start -= lengths[t], stop -= lengths[t], t++) {
        int64_t first = start > 0 ? start : 0, last = stop < lengths[t] ? stop : lengths[t];
        if (first < last) tops[t] = OF(copy_out)(tensors[t] + first, outs[t] + first, last - first, scale);
        if (fills) memset(outs[t] + lengths[t], 0, (rooms[t] - lengths[t]) * sizeof(dtype));
    }
}

/* Of what lies from `start` to `stop` where all tensors follow one another; `tops` are zero before. */
TARGET void OF(peaks)(const dtype *const *tensors, const int64_t *lengths, int64_t count, int64_t start,
                      int64_t stop, int32_t *tops) {
    for (int64_t t = 0; t < count; start -= lengths[t], stop -= lengths[t], t++) {
        int64_t first = start > 0 ? start : 0, last = stop < lengths[t] ? stop : lengths[t];
        const dtype *g = tensors[t];
        int32_t top = 0;
        for (int64_t i = first; i < last; i++) {
            int32_t size = FN(magnitude_f32)(OF(read)(g + i));
            top = size > top ? size : top;
        }
        tops[t] = top;
    }
}
