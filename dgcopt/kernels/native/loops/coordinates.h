/* Reading and changing a flat tensor at few positions. Each returns 1 if one of them lies outside, and changes nothing
   then. */

INLINE TARGET int FN(outside)(const int64_t *positions, int64_t count, int64_t n) {
    uint64_t most = 0;
    for (int64_t i = 0; i < count; i++) most = (uint64_t)positions[i] > most ? (uint64_t)positions[i] : most;
    return count && most >= (uint64_t)n;
}

TARGET int FN(any_outside)(const int64_t *positions, int64_t count, int64_t n) { return FN(outside)(positions, count, n); }

INLINE TARGET int FN(outside_parts)(const int64_t *starts, const int64_t *stops, int64_t parts,
                                    const int64_t *positions, int64_t count) {
    for (int64_t i = 0, part = 0; i < count; i++) {
        if (!parts) return 1;
        part = FN(part_of)(starts, stops, parts, part, positions[i]);
        if (part < 0) return 1;
    }
    return 0;
}

#define LATER 16 /* so many positions from here, memory is asked for */
#define AT(M, type)                                                                                                    \
    TARGET int FN(gather_##M)(const type *flat, int64_t n, const int64_t *positions, int64_t count, type *values) {     \
        if (FN(outside)(positions, count, n)) return 1;                                                                \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            if (i + LATER < count) __builtin_prefetch(flat + positions[i + LATER]);                                    \
            values[i] = flat[positions[i]];                                                                            \
        }                                                                                                              \
        return 0;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    TARGET int FN(subtract_at_##M)(type *flat, int64_t n, const int64_t *positions, int64_t count,                     \
                                   const float *values) {                                                              \
        if (FN(outside)(positions, count, n)) return 1;                                                                \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            if (i + LATER < count) __builtin_prefetch(flat + positions[i + LATER], 1);                                 \
            type *place = flat + positions[i];                                                                         \
            FN(write_##M)(place, FN(read_##M)(place) - values[i]);                                                     \
        }                                                                                                              \
        return 0;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    TARGET int FN(clear_at_##M)(type *flat, int64_t n, const int64_t *positions, int64_t count) {                      \
        if (FN(outside)(positions, count, n)) return 1;                                                                \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            if (i + LATER < count) __builtin_prefetch(flat + positions[i + LATER], 1);                                 \
            flat[positions[i]] = 0;                                                                                    \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

AT(f32, float)
AT(bf16, uint16_t)

#undef AT

#define SOON_IN(tensors)                                                                                               \
    if (i + LATER < count && tensors[part] && starts[part] <= positions[i + LATER] &&                                  \
        positions[i + LATER] < stops[part])                                                                            \
        __builtin_prefetch(tensors[part] + (positions[i + LATER] - starts[part]), 1);

/* Parts that are missing are NULL. `sums`: what lies at each position when all has been added. */
TARGET int FN(add_at)(float *const *tensors, const int64_t *starts, const int64_t *stops, int64_t parts,
                      const int64_t *positions, const float *values, int64_t count, float *sums) {
    if (FN(outside_parts)(starts, stops, parts, positions, count)) return 1;
    int twice = 0; /* whether a position may be named twice: those of several messages do not ascend */
    for (int64_t i = 0, part = 0; i < count; i++) {
        part = FN(part_of)(starts, stops, parts, part, positions[i]);
        SOON_IN(tensors)
        sums[i] = 0;
        if (tensors[part]) sums[i] = tensors[part][positions[i] - starts[part]] += values[i];
        twice |= i && positions[i] <= positions[i - 1];
    }
    for (int64_t i = 0, part = 0; twice && i < count; i++) {
        part = FN(part_of)(starts, stops, parts, part, positions[i]);
        SOON_IN(tensors)
        if (tensors[part]) sums[i] = tensors[part][positions[i] - starts[part]];
    }
    return 0;
}

/* All are read before any is written, as a position may be named twice; `values` are overwritten. */
TARGET int FN(step_at)(float *const *weights, const float *rates, const int64_t *starts, const int64_t *stops,
                       int64_t parts, const int64_t *positions, float *values, int64_t count) {
    if (FN(outside_parts)(starts, stops, parts, positions, count)) return 1;
    for (int64_t i = 0, part = 0; i < count; i++) {
        part = FN(part_of)(starts, stops, parts, part, positions[i]);
        if (!weights[part]) continue;
        SOON_IN(weights)
        values[i] = __builtin_fmaf(values[i], rates[part], weights[part][positions[i] - starts[part]]);
    }
    for (int64_t i = 0, part = 0; i < count; i++) {
        part = FN(part_of)(starts, stops, parts, part, positions[i]);
        SOON_IN(weights)
        if (weights[part]) weights[part][positions[i] - starts[part]] = values[i];
    }
    return 0;
}

#undef SOON_IN
#undef LATER
