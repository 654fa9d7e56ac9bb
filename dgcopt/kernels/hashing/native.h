/* Random bits from a key and a position, random positions, and a hash. */

#define WEYL 0x9e3779b9u

/* 32 random bits for element i of a block: Weyl's sequence, which is at `weyl` where the block starts, mixed by two rounds
   of multiplication (Wellons, "lowbias32"). */
INLINE TARGET uint32_t FN(draw)(uint32_t i, uint32_t weyl, uint32_t second) {
    uint32_t x = i * WEYL + weyl;
    x ^= x >> 16;
    x = x * 0x21f0aaadu + second;
    x ^= x >> 15;
    x *= 0x735a2d97u;
    return x ^ x >> 15;
}
INLINE TARGET uint32_t FN(weyl_of)(int64_t start, int first) { return (uint32_t)start * WEYL + (uint32_t)first; }

TARGET void FN(draw_from_spans)(const int64_t *starts, const int64_t *lengths, int64_t n, int first, int second,
                                int64_t *positions) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) {
        uint64_t drawn = FN(draw)((uint32_t)i, (uint32_t)first, (uint32_t)second);
        positions[i] = starts[i] + (int64_t)(drawn * (uint64_t)lengths[i] >> 32);
    }
}

/* Two sums of each row's words times factors, modulo 2^64. The last row may be shorter, or empty. */
TARGET void FN(hash_rows)(const int32_t *words, int64_t count, const uint64_t *factors, int64_t row, uint64_t *sums) {
    for (;; words += row, count -= row, sums += 2) {
        int64_t here = count < row ? count : row;
        uint64_t first = 0, second = 0;
        for (int64_t i = 0; i < here; i++) {
            uint64_t word = (uint64_t)(int64_t)words[i];
            first += word * factors[i], second += word * factors[row + i];
        }
        sums[0] = first, sums[1] = second;
        if (here < row) return;
    }
}
