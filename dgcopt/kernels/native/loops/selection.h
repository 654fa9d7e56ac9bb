/* The largest magnitudes, exactly. */

/* The k-th largest of n codes, 1 <= k <= n, none negative; overwrites them. Digit by digit, from the highest. */
static TARGET int32_t FN(kth_largest)(int32_t *codes, int64_t n, int64_t k) {
    static const int shifts[] = {20, 10, 0};
    int32_t found = 0;
    for (int digit = 0; digit < 3; digit++) {
        int64_t counts[2048] = {0};
        int shift = shifts[digit], mask = digit ? 1023 : 2047;
        for (int64_t i = 0; i < n; i++) counts[codes[i] >> shift & mask]++;
        int bin = mask;
        while (counts[bin] < k) k -= counts[bin--];
        found |= bin << shift;
        if (counts[bin] == n && digit < 2) continue;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            int32_t code = codes[i];
            codes[kept] = code;
            kept += (code >> shift & mask) == bin;
        }
        n = kept;
    }
    return found;
}

#define SELECT(M, type, MAGNITUDE)                                                                                     \
    /* Positions of the `count` largest magnitudes among pieces [starts[i], stops[i]) that begin on block boundaries.   \
       `least` is a lower bound of them: only blocks whose maximum reaches it are looked at. */                        \
    static TARGET int FN(select_from_##M)(const type *flat, const type *maxima, const int64_t *starts,                 \
                                          const int64_t *stops, int64_t pieces, int64_t count, int32_t least,          \
                                          int64_t most, int64_t *positions) {                                          \
        int64_t *where = malloc(most * (2 * sizeof(int32_t) + sizeof(int64_t)));                                       \
        if (!where) return 1;                                                                                          \
        int32_t *codes = (int32_t *)(where + most), *scratch = codes + most;                                           \
        int64_t found = 0;                                                                                             \
        for (int64_t piece = 0; piece < pieces; piece++)                                                               \
            for (int64_t start = starts[piece]; start < stops[piece]; start += BLOCK) {                                \
                if (least && MAGNITUDE(maxima[start / BLOCK]) < least) continue;                                       \
                int64_t stop = start + BLOCK < stops[piece] ? start + BLOCK : stops[piece];                            \
                for (int64_t i = start; i < stop; i++) {                                                               \
                    int32_t code = MAGNITUDE(flat[i]);                                                                 \
                    where[found] = i, codes[found] = code;                                                             \
                    found += code >= least;                                                                            \
                }                                                                                                      \
            }                                                                                                          \
        memcpy(scratch, codes, found * sizeof(int32_t));                                                               \
        int32_t cut = FN(kth_largest)(scratch, found, count);                                                          \
        int64_t above = 0, taken = 0;                                                                                  \
        for (int64_t i = 0; i < found; i++) above += codes[i] > cut;                                                   \
        int64_t ties = count - above;                                                                                  \
        for (int64_t i = 0; i < found && taken < count; i++) {                                                         \
            int take = codes[i] > cut || (codes[i] == cut && ties-- > 0);                                              \
            positions[taken] = where[i];                                                                               \
            taken += take;                                                                                             \
        }                                                                                                              \
        free(where);                                                                                                   \
        return 0;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    TARGET int FN(select_##M)(const type *flat, const type *maxima, const int64_t *starts, const int64_t *stops,        \
                              const int64_t *pieces, const int64_t *counts, int64_t groups, int64_t *positions) {      \
        for (int64_t group = 0; group < groups; group++) {                                                             \
            int64_t blocks = 0, numel = 0, count = counts[group], piece = pieces[group];                               \
            for (int64_t i = 0; i < piece; i++) {                                                                      \
                numel += stops[i] - starts[i];                                                                         \
                blocks += (stops[i] - starts[i] + BLOCK - 1) / BLOCK;                                                  \
            }                                                                                                          \
            int32_t least = 0;                                                                                         \
            int64_t most = numel;                                                                                      \
            if (count < blocks) {                                                                                      \
                int32_t *tops = malloc(blocks * sizeof(int32_t));                                                      \
                if (!tops) return 1;                                                                                   \
                int64_t number = 0;                                                                                    \
                for (int64_t i = 0; i < piece; i++)                                                                    \
                    for (int64_t start = starts[i]; start < stops[i]; start += BLOCK)                                  \
                        tops[number++] = MAGNITUDE(maxima[start / BLOCK]);                                             \
                least = FN(kth_largest)(tops, blocks, count);                                                          \
                number = 0;                                                                                            \
                for (int64_t i = 0; i < piece; i++)                                                                    \
                    for (int64_t start = starts[i]; start < stops[i]; start += BLOCK)                                  \
                        number += MAGNITUDE(maxima[start / BLOCK]) >= least;                                           \
                free(tops);                                                                                            \
                most = number * BLOCK;                                                                                 \
            }                                                                                                          \
            if (count && FN(select_from_##M)(flat, maxima, starts, stops, piece, count, least, most + 1, positions))    \
                return 1;                                                                                              \
            starts += piece, stops += piece, positions += count;                                                       \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

#define MAGNITUDE_F32(bits) ((int32_t)((bits) & 0x7fffffff))
#define MAGNITUDE_BF16(bits) ((int32_t)((bits) & 0x7fff) << 16)

SELECT(f32, int32_t, MAGNITUDE_F32)
SELECT(bf16, uint16_t, MAGNITUDE_BF16)

#undef SELECT
#undef MAGNITUDE_F32
#undef MAGNITUDE_BF16
