/* The largest magnitudes of groups, and of chunks, for each dtype: on the bits of floats. */

/* The numbers of the blocks of pieces [starts[i], stops[i]), which begin on block boundaries, that hold the `count`
   largest magnitudes: those with the `count` largest maxima, of equal ones the first. `bound`: the least of these, or 0.
   `numbers`: how many blocks of each piece. Returns how many of all, -1 if there is no memory left. */
static TARGET int64_t OF(candidate_blocks_from)(const BITS *maxima, const int64_t *starts, const int64_t *stops,
                                                int64_t pieces, int64_t count, int64_t *blocks, int64_t *numbers,
                                                int32_t *bound) {
    int64_t all = 0, found = 0, ties = count;
    int32_t least = 0;
    for (int64_t i = 0; i < pieces; i++) all += (stops[i] - starts[i] + BLOCK - 1) / BLOCK;
    if (0 < count && count < all) {
        int32_t *tops = malloc(all * sizeof(int32_t));
        if (!tops) return -1;
        int64_t number = 0;
        for (int64_t i = 0; i < pieces; i++)
            for (int64_t block = starts[i] / BLOCK; block * BLOCK < stops[i]; block++)
                tops[number++] = CODE(maxima[block]);
        least = FN(kth_largest)(tops, all, count);
        free(tops);
        for (int64_t i = 0; i < pieces; i++)
            for (int64_t block = starts[i] / BLOCK; block * BLOCK < stops[i]; block++) ties -= CODE(maxima[block]) > least;
    }
    for (int64_t i = 0; i < pieces; i++) {
        int64_t before = found;
        for (int64_t block = starts[i] / BLOCK; count && block * BLOCK < stops[i]; block++) {
            int32_t code = CODE(maxima[block]);
            blocks[found] = block;
            found += (code > least) | (count >= all) | ((code == least) & (ties > 0));
            ties -= code == least;
        }
        numbers[i] = found - before;
    }
    *bound = least;
    return found;
}

/* `blocks` has room for one more than there are. Returns 1 if there is no memory left. */
TARGET int OF(candidate_blocks)(const BITS *maxima, const int64_t *starts, const int64_t *stops,
                                const int64_t *pieces, const int64_t *counts, int64_t groups, int64_t *blocks,
                                int64_t *numbers, int64_t *found) {
    *found = 0;
    for (int64_t group = 0; group < groups; group++) {
        int32_t bound;
        int64_t more = OF(candidate_blocks_from)(maxima, starts, stops, pieces[group], counts[group], blocks + *found,
                                             numbers, &bound);
        if (more < 0) return 1;
        starts += pieces[group], stops += pieces[group], numbers += pieces[group], *found += more;
    }
    return 0;
}

/* A lower bound of the `count` largest magnitudes of some blocks, from a sample; 0 if that says nothing. */
static TARGET int32_t OF(bound)(const BITS *flat, const int64_t *blocks, int64_t number, int64_t count) {
    int64_t n = number * BLOCK, size = sample_size(n), rank = rank_in_sample(count, n, size);
    if (rank > size * 3 / 4) return 0;
    int32_t sample[SAMPLE];
    for (int64_t i = 0; i < size; i++) {
        int64_t place = i * n / size;
        sample[i] = CODE(flat[blocks[place / BLOCK] * BLOCK + place % BLOCK]);
    }
    return FN(kth_by_parting)(sample, size, rank);
}

/* Which elements of the blocks reach `least`, and of what magnitude; returns how many. */
INLINE TARGET int64_t OF(candidates)(const BITS *flat, const int64_t *stops, const int64_t *blocks,
                                     const int64_t *numbers, int64_t pieces, int32_t least, int64_t *where,
                                     int32_t *codes) {
    int64_t found = 0;
    for (int64_t piece = 0; piece < pieces; blocks += numbers[piece++])
        for (int64_t j = 0; j < numbers[piece]; j++) {
            if (j + SOON < numbers[piece]) FN(soon)(flat + blocks[j + SOON] * BLOCK, sizeof(BITS));
            int64_t start = blocks[j] * BLOCK, n = stops[piece] - start < BLOCK ? stops[piece] - start : BLOCK;
            uint8_t reach[BLOCK] = {0};
            if (n == BLOCK)
                for (int i = 0; i < BLOCK; i++) reach[i] = CODE(flat[start + i]) >= least;
            else
                for (int i = 0; i < n; i++) reach[i] = CODE(flat[start + i]) >= least;
            for (uint64_t all = FN(word_of)(reach); all; all &= all - 1) {
                int64_t place = start + __builtin_ctzll(all);
                where[found] = place, codes[found++] = CODE(flat[place]);
            }
        }
    return found;
}

/* Positions of the `count` largest magnitudes, each `least` or more, in some blocks of the pieces. */
static TARGET int OF(select_from)(const BITS *flat, const int64_t *stops, int64_t pieces,
                                  const int64_t *blocks, const int64_t *numbers, int64_t number,
                                  int64_t count, int32_t least, int64_t *positions) {
    int64_t most = number * BLOCK; /* room, of which little is touched */
    int64_t *where = malloc(most * (2 * sizeof(int32_t) + sizeof(int64_t)));
    if (!where) return 1;
    int32_t *codes = (int32_t *)(where + most), *scratch = codes + most;
    if (!least) least = OF(bound)(flat, blocks, number, count);
    int64_t found = OF(candidates)(flat, stops, blocks, numbers, pieces, least, where, codes);
    if (found < count) found = OF(candidates)(flat, stops, blocks, numbers, pieces, 0, where, codes);
    memcpy(scratch, codes, found * sizeof(int32_t));
    int32_t cut = FN(kth_largest)(scratch, found, count);
    int64_t above = 0, taken = 0;
    for (int64_t i = 0; i < found; i++) above += codes[i] > cut;
    int64_t ties = count - above;
    for (int64_t i = 0; i < found && taken < count; i++) {
        int take = codes[i] > cut || (codes[i] == cut && ties-- > 0);
        positions[taken] = where[i];
        taken += take;
    }
    free(where);
    return 0;
}

TARGET int OF(select)(const BITS *flat, const BITS *maxima, const int64_t *starts, const int64_t *stops,
                      const int64_t *pieces, const int64_t *counts, int64_t groups, int64_t *positions) {
    for (int64_t group = 0; group < groups; group++) {
        int64_t all = 0, count = counts[group], piece = pieces[group];
        for (int64_t i = 0; i < piece; i++) all += (stops[i] - starts[i] + BLOCK - 1) / BLOCK;
        int64_t *blocks = malloc((all + 1 + piece) * sizeof(int64_t)), *numbers = blocks + all + 1;
        if (!blocks) return 1;
        int32_t bound = 0;
        int64_t number = OF(candidate_blocks_from)(maxima, starts, stops, piece, count, blocks, numbers, &bound);
        int failed = number < 0 || (count && OF(select_from)(flat, stops, piece, blocks, numbers, number,
                                                                 count, bound, positions));
        free(blocks);
        if (failed) return 1;
        starts += piece, stops += piece, positions += count;
    }
    return 0;
}

/* A lower bound of the `count` largest magnitudes: each of so many columns of the chunk holds one of that size. */
static TARGET int32_t OF(bound_of_chunk)(const BITS *chunk, int64_t n, int64_t count, int32_t *tops) {
    int64_t columns = BLOCK;
    while (columns < 2 * count) columns *= 2;
    if (2 * columns > n) return 0;
    for (int64_t first = 0; first < columns; first += BLOCK) {
        int32_t top[BLOCK] = {0}; /* in registers */
        for (int64_t i = first; i + BLOCK <= n; i += columns)
            for (int j = 0; j < BLOCK; j++) {
                int32_t code = CODE(chunk[i + j]);
                top[j] = code > top[j] ? code : top[j];
            }
        memcpy(tops + first, top, sizeof top);
    }
    return FN(kth_of)(tops, columns, count, tops + columns);
}

/* The elements of `least` and more, and their codes; returns how many. */
static TARGET int64_t OF(reaching)(const BITS *chunk, int64_t n, int32_t least, int32_t *where,
                                   int32_t *codes) {
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int left = n - start < BLOCK ? (int)(n - start) : BLOCK;
        uint8_t reach[BLOCK] = {0};
        if (left == BLOCK)
            for (int i = 0; i < BLOCK; i++) reach[i] = CODE(chunk[start + i]) >= least;
        else
            for (int i = 0; i < left; i++) reach[i] = CODE(chunk[start + i]) >= least;
        for (uint64_t all = FN(word_of)(reach); all; all &= all - 1, found++) {
            where[found] = (int32_t)start + __builtin_ctzll(all);
            codes[found] = CODE(chunk[where[found]]);
        }
    }
    return found;
}

/* Positions, and what is there, of a chunk from its `start`; `memory` has room for four numbers per element. */
static TARGET void OF(select_chunk)(const BITS *chunk, int64_t start, int64_t n, int64_t count,
                                    int32_t *memory, int64_t *positions, BITS *values) {
    int32_t *codes = memory, *where = memory + n, *scratch = memory + 2 * n;
    int32_t least = OF(bound_of_chunk)(chunk, n, count, scratch);
    int64_t found = OF(reaching)(chunk, n, least, where, codes), ties = count, taken = 0;
    int32_t cut = FN(kth_of)(codes, found, count, scratch);
    for (int64_t i = 0; i < found; i++) ties -= codes[i] > cut;
    for (int64_t i = 0; i < found && taken < count; i++) {
        int take = codes[i] > cut || (codes[i] == cut && ties-- > 0);
        positions[taken] = start + where[i], values[taken] = chunk[where[i]];
        taken += take;
    }
}

/* Of `flat`; if g is given, that is made g + decay e first. Returns 1 if there is no memory left. */
TARGET int OF(select_chunks)(BITS *flat, const float *g, const float *e, float decay, int64_t n,
                             const int64_t *starts, const int64_t *stops, const int64_t *counts,
                             int64_t chunks, int64_t *positions, BITS *values) {
    int64_t most = 1;
    for (int64_t c = 0; c < chunks; c++) most = stops[c] - starts[c] > most ? stops[c] - starts[c] : most;
    int32_t *memory = malloc(4 * most * sizeof(int32_t));
    if (!memory) return 1;
    for (int64_t c = 0; c < chunks; positions += counts[c], values += counts[c], c++) {
        BITS *chunk = flat + starts[c];
        int64_t end = c + 1 < chunks ? starts[c + 1] : n; /* and the gap behind it */
        if (g) ELEMENTWISE for (int64_t i = starts[c]; i < end; i++)
            ((float *)flat)[i] = __builtin_fmaf(e[i], decay, g[i]);
        OF(select_chunk)(chunk, starts[c], stops[c] - starts[c], counts[c], memory, positions, values);
    }
    free(memory);
    return 0;
}
