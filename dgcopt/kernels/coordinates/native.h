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
#define dtype f32
#include "per_dtype.h"
#undef dtype
#define dtype bf16
#include "per_dtype.h"
#undef dtype

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

INLINE TARGET uint32_t FN(owner_turn)(int64_t row, uint32_t size) {
    return ((uint32_t)row * 2654435761u >> 16) % size;
}

/* `counts` has `size` elements, and `owners` as many as `positions`. */
TARGET int FN(by_owner)(const int64_t *positions, int64_t n, int64_t size, int32_t *owners, int64_t *order,
                        int64_t *places, int64_t *counts) {
    memset(counts, 0, (size_t)size * sizeof(int64_t));
    for (int64_t i = 0; i < n; i++) {
        if (positions[i] < 0) return 1;
        int64_t row = positions[i] / size;
        uint32_t owner = (uint32_t)(positions[i] - row * size) + FN(owner_turn)(row, (uint32_t)size);
        owners[i] = (int32_t)(owner < (uint32_t)size ? owner : owner - (uint32_t)size);
        counts[owners[i]]++;
    }
    for (int64_t owner = 0, start = 0; owner < size; owner++) { /* where each owner's begin, for now */
        int64_t count = counts[owner];
        counts[owner] = start;
        start += count;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t to = counts[owners[i]]++;
        order[to] = i;
        places[to] = positions[i] / size;
    }
    for (int64_t owner = size - 1; owner > 0; owner--) counts[owner] -= counts[owner - 1]; /* were ends */
    return 0;
}

TARGET int FN(of_owners)(const int64_t *places, const int64_t *counts, int64_t rows, int64_t size, int64_t *positions) {
    for (int64_t owner = 0; owner < rows; places += counts[owner], positions += counts[owner], owner++) {
        for (int64_t i = 0; i < counts[owner]; i++) {
            int64_t turned = owner - (int64_t)FN(owner_turn)(places[i], (uint32_t)size);
            positions[i] = places[i] * size + (turned < 0 ? turned + size : turned);
        }
    }
    return 0;
}
