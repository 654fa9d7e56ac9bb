/* Block maxima, for each dtype. */

TARGET void OF(block_maxima)(const BITS *flat, int64_t n, BITS *maxima) {
    for (int64_t start = 0; start < n; start += BLOCK) {
        int32_t top = 0;
        for (int i = 0; i < BLOCK; i++) {
            int32_t code = CODE(flat[start + i]);
            top = code > top ? code : top;
        }
        maxima[start / BLOCK] = (BITS)(top >> (32 - 8 * (int)sizeof(BITS)));
    }
}
