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
