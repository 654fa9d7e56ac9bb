/* Fields of a few bits, side by side. */

/* Eight fields, one a byte, are closed up in the low `width` bytes of a word: by pairs, pairs of pairs, and all. */

/* Each fold's gap, what stays in place, and what comes to lie above it. */
INLINE TARGET void FN(folds)(int width, int *gap, uint64_t *low, uint64_t *high) {
    for (int i = 0, lane = 8; i < 3; i++, lane *= 2) {
        int used = lane / 8 * width;
        gap[i] = lane - used, low[i] = 0;
        for (int start = 0; start < 64; start += 2 * lane) low[i] |= (((uint64_t)1 << used) - 1) << start;
        high[i] = low[i] << used;
    }
}

TARGET void FN(pack_small)(const uint8_t *fields, int64_t count, int width, uint8_t *packed) {
    uint64_t low[3], high[3];
    int gap[3];
    FN(folds)(width, gap, low, high);
    for (int64_t start = 0; start < count; start += 8, packed += width) {
        uint64_t word = 0;
        if (count - start >= 8)
            memcpy(&word, fields + start, 8);
        else
            memcpy(&word, fields + start, count - start);
        for (int i = 0; i < 3; i++) word = (word & low[i]) | (word >> gap[i] & high[i]);
        for (int i = 0; i < width; i++) packed[i] = (uint8_t)(word >> 8 * i);
    }
}

TARGET void FN(unpack_small)(const uint8_t *packed, int64_t count, int width, uint8_t *fields) {
    uint64_t low[3], high[3];
    int gap[3];
    FN(folds)(width, gap, low, high);
    for (int64_t start = 0; start < count; start += 8, packed += width) {
        uint64_t word = 0;
        for (int i = 0; i < width; i++) word |= (uint64_t)packed[i] << 8 * i;
        for (int i = 2; i >= 0; i--) word = (word & low[i]) | (word & high[i]) << gap[i];
        if (count - start >= 8)
            memcpy(fields + start, &word, 8);
        else
            memcpy(fields + start, &word, count - start);
    }
}
