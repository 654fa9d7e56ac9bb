/* The largest magnitudes of every chunk, exactly. After selection.h. */

#define FEW 128

/* As kth_largest; of few codes the one that fewer than k exceed, and k at least reach. */
INLINE TARGET int32_t FN(kth_of_few)(const int32_t *codes, int64_t n, int64_t k) {
    for (int64_t i = 0; i < n; i++) {
        int32_t above = 0, reach = 0;
        for (int64_t j = 0; j < n; j++) above += codes[j] > codes[i], reach += codes[j] >= codes[i];
        if (above < k && k <= reach) return codes[i];
    }
    return 0;
}

#define SELECT_CHUNKS(M, type, MAGNITUDE)                                                                              \
    TARGET int FN(select_chunks_##M)(const type *flat, const int64_t *starts, const int64_t *stops,                    \
                                     const int64_t *counts, int64_t chunks, int64_t *positions) {                      \
        int64_t most = 1;                                                                                              \
        for (int64_t c = 0; c < chunks; c++) most = stops[c] - starts[c] > most ? stops[c] - starts[c] : most;          \
        int32_t *memory = malloc((4 * most + 2) * sizeof(int32_t));                                                    \
        if (!memory) return 1;                                                                                         \
        int32_t *tops = memory, *scratch = tops + most, *codes = scratch + most, *where = codes + most + 1;            \
        for (int64_t c = 0; c < chunks; c++, positions += counts[c - 1]) {                                             \
            const type *chunk = flat + starts[c];                                                                      \
            int64_t n = stops[c] - starts[c], count = counts[c], width = BLOCK, found = 0;                             \
            while (width > 8 && n < 2 * width * count) width /= 2;                                                     \
            int64_t parts = (n + width - 1) / width;                                                                   \
            for (int64_t p = 0; p < parts; p++) {                                                                      \
                int64_t end = (p + 1) * width < n ? (p + 1) * width : n;                                               \
                int32_t top = 0;                                                                                       \
                for (int64_t i = p * width; i < end; i++) {                                                            \
                    int32_t code = MAGNITUDE(chunk[i]);                                                                \
                    top = code > top ? code : top;                                                                     \
                }                                                                                                      \
                tops[p] = top;                                                                                         \
            }                                                                                                          \
            int32_t least = 0; /* each of `count` parts holds a magnitude of this size */                              \
            if (count < parts && parts <= FEW)                                                                         \
                least = FN(kth_of_few)(tops, parts, count);                                                            \
            else if (count < parts) {                                                                                  \
                memcpy(scratch, tops, parts * sizeof(int32_t));                                                        \
                least = FN(kth_largest)(scratch, parts, count);                                                        \
            }                                                                                                          \
            for (int64_t p = 0; p < parts; p++) {                                                                      \
                if (tops[p] < least) continue;                                                                         \
                int64_t end = (p + 1) * width < n ? (p + 1) * width : n;                                               \
                for (int64_t i = p * width; i < end; i++) {                                                            \
                    int32_t code = MAGNITUDE(chunk[i]);                                                                \
                    codes[found] = code, where[found] = (int32_t)i;                                                    \
                    found += code >= least;                                                                            \
                }                                                                                                      \
            }                                                                                                          \
            int32_t cut;                                                                                               \
            if (found <= FEW)                                                                                          \
                cut = FN(kth_of_few)(codes, found, count);                                                             \
            else {                                                                                                     \
                memcpy(scratch, codes, found * sizeof(int32_t));                                                       \
                cut = FN(kth_largest)(scratch, found, count);                                                          \
            }                                                                                                          \
            int64_t ties = count, taken = 0;                                                                           \
            for (int64_t i = 0; i < found; i++) ties -= codes[i] > cut;                                                \
            for (int64_t i = 0; i < found && taken < count; i++) {                                                     \
                int take = codes[i] > cut || (codes[i] == cut && ties-- > 0);                                          \
                positions[taken] = starts[c] + where[i];                                                               \
                taken += take;                                                                                         \
            }                                                                                                          \
        }                                                                                                              \
        free(memory);                                                                                                  \
        return 0;                                                                                                      \
    }

SELECT_CHUNKS(f32, int32_t, MAGNITUDE_F32)
SELECT_CHUNKS(bf16, uint16_t, MAGNITUDE_BF16)

#undef SELECT_CHUNKS
#undef FEW
#undef MAGNITUDE_F32
#undef MAGNITUDE_BF16
