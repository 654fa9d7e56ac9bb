/* Reads and writes at some positions, for each dtype. */

TARGET int OF(gather)(const dtype *flat, int64_t n, const int64_t *positions, int64_t count, dtype *values) {
    if (FN(outside)(positions, count, n)) return 1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LATER < count) __builtin_prefetch(flat + positions[i + LATER]);
        values[i] = flat[positions[i]];
    }
    return 0;
}

TARGET int OF(subtract_at)(dtype *flat, int64_t n, const int64_t *positions, int64_t count,
                           const float *values) {
    if (FN(outside)(positions, count, n)) return 1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LATER < count) __builtin_prefetch(flat + positions[i + LATER], 1);
        dtype *place = flat + positions[i];
        OF(write)(place, OF(read)(place) - values[i]);
    }
    return 0;
}

TARGET int OF(clear_at)(dtype *flat, int64_t n, const int64_t *positions, int64_t count) {
    if (FN(outside)(positions, count, n)) return 1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LATER < count) __builtin_prefetch(flat + positions[i + LATER], 1);
        flat[positions[i]] = 0;
    }
    return 0;
}
