/* Positions drawn at random. After rounding.h. */

TARGET void FN(draw_from_spans)(const int64_t *starts, const int64_t *lengths, int64_t n, int first, int second,
                                int64_t *positions) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) {
        uint64_t drawn = FN(draw)((uint32_t)i, (uint32_t)first, (uint32_t)second);
        positions[i] = starts[i] + (int64_t)(drawn * (uint64_t)lengths[i] >> 32);
    }
}
