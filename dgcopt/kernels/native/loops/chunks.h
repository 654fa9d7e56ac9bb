/* The largest magnitudes of every chunk, exactly. After selection.h. */

#define FEW 256

/* As kth_largest; of few codes bit by bit, from the highest. */
INLINE TARGET int32_t FN(kth_of_few)(const int32_t *codes, int64_t n, int64_t k) {
    int32_t kth = 0;
    for (int bit = 30; bit >= 0; bit--) {
        int32_t tried = kth | 1 << bit, reach = 0;
        for (int64_t i = 0; i < n; i++) reach += codes[i] >= tried;
        if (reach >= k) kth = tried;
    }
    return kth;
}

static TARGET int32_t FN(kth_of)(const int32_t *codes, int64_t n, int64_t k, int32_t *scratch) {
    if (n <= FEW) return FN(kth_of_few)(codes, n, k);
    memcpy(scratch, codes, n * sizeof(int32_t));
    return FN(kth_largest)(scratch, n, k);
}

#define CHUNKS(M, type, MAGNITUDE)                                                                                     \
    /* A lower bound of the `count` largest magnitudes: each of so many columns of the chunk holds one of that size. */\
    static TARGET int32_t FN(bound_of_chunk_##M)(const type *chunk, int64_t n, int64_t count, int32_t *tops) {         \
        int64_t columns = BLOCK;                                                                                       \
        while (columns < 2 * count) columns *= 2;                                                                      \
        if (2 * columns > n) return 0;                                                                                 \
        for (int64_t first = 0; first < columns; first += BLOCK) {                                                     \
            int32_t top[BLOCK] = {0}; /* in registers */                                                               \
            for (int64_t i = first; i + BLOCK <= n; i += columns)                                                      \
                for (int j = 0; j < BLOCK; j++) {                                                                      \
                    int32_t code = MAGNITUDE(chunk[i + j]);                                                            \
                    top[j] = code > top[j] ? code : top[j];                                                            \
                }                                                                                                      \
            memcpy(tops + first, top, sizeof top);                                                                     \
        }                                                                                                              \
        return FN(kth_of)(tops, columns, count, tops + columns);                                                       \
    }                                                                                                                  \
                                                                                                                       \
    /* The elements of `least` and more, and their codes; returns how many. */                                         \
    static TARGET int64_t FN(reaching_##M)(const type *chunk, int64_t n, int32_t least, int32_t *where,                \
                                           int32_t *codes) {                                                           \
        int64_t found = 0;                                                                                             \
        for (int64_t start = 0; start < n; start += BLOCK) {                                                           \
            int left = n - start < BLOCK ? (int)(n - start) : BLOCK;                                                   \
            uint8_t reach[BLOCK] = {0};                                                                                \
            if (left == BLOCK)                                                                                         \
                for (int i = 0; i < BLOCK; i++) reach[i] = MAGNITUDE(chunk[start + i]) >= least;                       \
            else                                                                                                       \
                for (int i = 0; i < left; i++) reach[i] = MAGNITUDE(chunk[start + i]) >= least;                        \
            for (uint64_t all = FN(word_of)(reach); all; all &= all - 1, found++) {                                    \
                where[found] = (int32_t)start + __builtin_ctzll(all);                                                  \
                codes[found] = MAGNITUDE(chunk[where[found]]);                                                         \
            }                                                                                                          \
        }                                                                                                              \
        return found;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* Positions, and what is there, of a chunk from its `start`; `memory` has room for four numbers per element. */   \
    static TARGET void FN(select_chunk_##M)(const type *chunk, int64_t start, int64_t n, int64_t count,                \
                                            int32_t *memory, int64_t *positions, type *values) {                       \
        int32_t *codes = memory, *where = memory + n, *scratch = memory + 2 * n;                                       \
        int32_t least = FN(bound_of_chunk_##M)(chunk, n, count, scratch);                                              \
        int64_t found = FN(reaching_##M)(chunk, n, least, where, codes), ties = count, taken = 0;                      \
        int32_t cut = FN(kth_of)(codes, found, count, scratch);                                                        \
        for (int64_t i = 0; i < found; i++) ties -= codes[i] > cut;                                                    \
        for (int64_t i = 0; i < found && taken < count; i++) {                                                         \
            int take = codes[i] > cut || (codes[i] == cut && ties-- > 0);                                              \
            positions[taken] = start + where[i], values[taken] = chunk[where[i]];                                      \
            taken += take;                                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* Of `flat`; if g is given, that is made g + decay e first. Returns 1 if there is no memory left. */              \
    TARGET int FN(select_chunks_##M)(type *flat, const float *g, const float *e, float decay, int64_t n,               \
                                     const int64_t *starts, const int64_t *stops, const int64_t *counts,               \
                                     int64_t chunks, int64_t *positions, type *values) {                               \
        int64_t most = 1;                                                                                              \
        for (int64_t c = 0; c < chunks; c++) most = stops[c] - starts[c] > most ? stops[c] - starts[c] : most;         \
        int32_t *memory = malloc(4 * most * sizeof(int32_t));                                                          \
        if (!memory) return 1;                                                                                         \
        for (int64_t c = 0; c < chunks; positions += counts[c], values += counts[c], c++) {                            \
            type *chunk = flat + starts[c];                                                                            \
            int64_t end = c + 1 < chunks ? starts[c + 1] : n; /* and the gap behind it */                              \
            if (g) ELEMENTWISE for (int64_t i = starts[c]; i < end; i++)                                               \
                ((float *)flat)[i] = __builtin_fmaf(e[i], decay, g[i]);                                                \
            FN(select_chunk_##M)(chunk, starts[c], stops[c] - starts[c], counts[c], memory, positions, values);        \
        }                                                                                                              \
        free(memory);                                                                                                  \
        return 0;                                                                                                      \
    }

CHUNKS(f32, int32_t, MAGNITUDE_F32)
CHUNKS(bf16, uint16_t, MAGNITUDE_BF16)

#undef CHUNKS
#undef FEW
#undef MAGNITUDE_F32
#undef MAGNITUDE_BF16
