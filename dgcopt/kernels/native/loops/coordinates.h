/* Reading and changing a flat tensor at few positions. Each returns 1 if one of them lies outside, and changes nothing
   then. */

INLINE TARGET int FN(outside)(const int64_t *positions, int64_t count, int64_t n) {
    uint64_t most = 0;
    for (int64_t i = 0; i < count; i++) most = (uint64_t)positions[i] > most ? (uint64_t)positions[i] : most;
    return count && most >= (uint64_t)n;
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
#undef LATER

/* How many magnitudes are `least` or more and not NaN. */
TARGET void FN(count_reaching)(const float *flat, int64_t n, float least, int64_t *count) {
    const int32_t *codes = (const int32_t *)flat;
    int32_t low;
    memcpy(&low, &least, 4);
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t stop = start + BLOCK < n ? start + BLOCK : n;
        int32_t here = 0;
        for (int64_t i = start; i < stop; i++) {
            int32_t code = codes[i] & 0x7fffffff;
            here += (code >= low) & (code <= 0x7f800000);
        }
        found += here;
    }
    *count = found;
}

/* And where. */
TARGET void FN(positions_above)(const float *flat, int64_t n, float least, int64_t *positions) {
    const int32_t *codes = (const int32_t *)flat;
    int32_t low;
    memcpy(&low, &least, 4);
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        uint8_t reach[BLOCK] = {0};
        int64_t left = n - start < BLOCK ? n - start : BLOCK;
        for (int i = 0; i < left; i++) {
            int32_t code = codes[start + i] & 0x7fffffff;
            reach[i] = (code >= low) & (code <= 0x7f800000);
        }
        for (int i = 0; i < BLOCK; i += 8) {
            uint64_t eight;
            memcpy(&eight, reach + i, 8);
            for (; eight; eight &= eight - 1) positions[found++] = start + i + __builtin_ctzll(eight) / 8;
        }
    }
}
