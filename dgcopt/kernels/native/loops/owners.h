/* Whose positions are. */

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
