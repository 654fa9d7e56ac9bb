/* The largest magnitudes, exactly. */

/* The k-th largest of a few codes, by parting them again and again (Hoare 1961); changes their order. */
static TARGET int32_t FN(kth_by_parting)(int32_t *codes, int64_t n, int64_t k) {
    int64_t first = 0, last = n - 1;
    while (first < last) {
        int32_t a = codes[first], b = codes[(first + last) / 2], c = codes[last];
        int32_t middle = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
        int64_t i = first, j = last;
        while (i <= j) {
            while (codes[i] > middle) i++;
            while (codes[j] < middle) j--;
            if (i <= j) {
                int32_t code = codes[i];
                codes[i++] = codes[j], codes[j--] = code;
            }
        }
        if (k - 1 <= j)
            last = j;
        else if (k - 1 >= i)
            first = i;
        else
            break;
    }
    return codes[k - 1];
}

/* The k-th largest of n codes, 1 <= k <= n, none negative; overwrites them. Many are told digit by digit, from the
   highest, after a sample has told most of those that are too small. */
static TARGET int32_t FN(kth_largest)(int32_t *codes, int64_t n, int64_t k) {
    static const int shifts[] = {20, 10, 0};
    if (n <= SAMPLE) return FN(kth_by_parting)(codes, n, k);
    int64_t size = sample_size(n), rank = rank_in_sample(k, n, size);
    if (rank < size / 2) {
        int32_t sample[SAMPLE], least;
        for (int64_t i = 0; i < size; i++) sample[i] = codes[i * n / size];
        least = FN(kth_by_parting)(sample, size, rank);
        int64_t reach = 0, kept = 0;
        for (int64_t i = 0; i < n; i++) reach += codes[i] >= least;
        if (reach >= k) {
            for (int64_t i = 0; i < n; i++) {
                int32_t code = codes[i];
                codes[kept] = code;
                kept += code >= least;
            }
            n = kept;
        }
    }
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
    TARGET void FN(block_maxima_##M)(const type *flat, int64_t n, type *maxima) {                                      \
        for (int64_t start = 0; start < n; start += BLOCK) {                                                           \
            int32_t top = 0;                                                                                           \
            for (int i = 0; i < BLOCK; i++) {                                                                          \
                int32_t code = MAGNITUDE(flat[start + i]);                                                             \
                top = code > top ? code : top;                                                                         \
            }                                                                                                          \
            maxima[start / BLOCK] = (type)(top >> (32 - 8 * (int)sizeof(type)));                                       \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    /* The numbers of all blocks of pieces [starts[i], stops[i]), which begin on block boundaries, that hold the       \
       `count` largest magnitudes: those whose maximum reaches `bound`, the count-th largest one, or 0. `numbers`: how \
       many blocks of each piece. Returns how many of all, -1 if there is no memory left. */                           \
    static TARGET int64_t FN(candidate_blocks_from_##M)(const type *maxima, const int64_t *starts, const int64_t *stops,\
                                                int64_t pieces, int64_t count, int64_t *blocks, int64_t *numbers,      \
                                                int32_t *bound) {                                                      \
        int64_t all = 0, found = 0;                                                                                    \
        int32_t least = 0;                                                                                             \
        for (int64_t i = 0; i < pieces; i++) all += (stops[i] - starts[i] + BLOCK - 1) / BLOCK;                        \
        if (0 < count && count < all) {                                                                                \
            int32_t *tops = malloc(all * sizeof(int32_t));                                                             \
            if (!tops) return -1;                                                                                      \
            int64_t number = 0;                                                                                        \
            for (int64_t i = 0; i < pieces; i++)                                                                       \
                for (int64_t block = starts[i] / BLOCK; block * BLOCK < stops[i]; block++)                             \
                    tops[number++] = MAGNITUDE(maxima[block]);                                                         \
            least = FN(kth_largest)(tops, all, count);                                                                 \
            free(tops);                                                                                                \
        }                                                                                                              \
        for (int64_t i = 0; i < pieces; i++) {                                                                         \
            int64_t before = found;                                                                                    \
            for (int64_t block = starts[i] / BLOCK; count && block * BLOCK < stops[i]; block++) {                      \
                blocks[found] = block;                                                                                 \
                found += MAGNITUDE(maxima[block]) >= least;                                                            \
            }                                                                                                          \
            numbers[i] = found - before;                                                                               \
        }                                                                                                              \
        *bound = least;                                                                                                \
        return found;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* `blocks` has room for one more than there are. Returns 1 if there is no memory left. */                         \
    TARGET int FN(candidate_blocks_##M)(const type *maxima, const int64_t *starts, const int64_t *stops,               \
                                const int64_t *pieces, const int64_t *counts, int64_t groups, int64_t *blocks,         \
                                int64_t *numbers, int64_t *found) {                                                    \
        *found = 0;                                                                                                    \
        for (int64_t group = 0; group < groups; group++) {                                                             \
            int32_t bound;                                                                                             \
            int64_t more = FN(candidate_blocks_from_##M)(maxima, starts, stops, pieces[group], counts[group], blocks + *found,\
                                                 numbers, &bound);                                                     \
            if (more < 0) return 1;                                                                                    \
            starts += pieces[group], stops += pieces[group], numbers += pieces[group], *found += more;                 \
        }                                                                                                              \
        return 0;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    /* A lower bound of the `count` largest magnitudes of some blocks, from a sample; 0 if that says nothing. */       \
    static TARGET int32_t FN(bound_##M)(const type *flat, const int64_t *blocks, int64_t number, int64_t count) {      \
        int64_t n = number * BLOCK, size = sample_size(n), rank = rank_in_sample(count, n, size);                      \
        if (rank > size * 3 / 4) return 0;                                                                             \
        int32_t sample[SAMPLE];                                                                                        \
        for (int64_t i = 0; i < size; i++) {                                                                           \
            int64_t place = i * n / size;                                                                              \
            sample[i] = MAGNITUDE(flat[blocks[place / BLOCK] * BLOCK + place % BLOCK]);                                \
        }                                                                                                              \
        return FN(kth_by_parting)(sample, size, rank);                                                                 \
    }                                                                                                                  \
                                                                                                                       \
    /* Which elements of the blocks reach `least`, and of what magnitude; returns how many. */                         \
    INLINE TARGET int64_t FN(candidates_##M)(const type *flat, const int64_t *stops, const int64_t *blocks,            \
                                         const int64_t *numbers, int64_t pieces, int32_t least, int64_t *where,        \
                                         int32_t *codes) {                                                             \
        int64_t found = 0;                                                                                             \
        for (int64_t piece = 0; piece < pieces; blocks += numbers[piece++])                                            \
            for (int64_t j = 0; j < numbers[piece]; j++) {                                                             \
                if (j + SOON < numbers[piece]) FN(soon)(flat + blocks[j + SOON] * BLOCK, sizeof(type));                \
                int64_t start = blocks[j] * BLOCK, n = stops[piece] - start < BLOCK ? stops[piece] - start : BLOCK;    \
                uint8_t reach[BLOCK] = {0};                                                                            \
                if (n == BLOCK)                                                                                        \
                    for (int i = 0; i < BLOCK; i++) reach[i] = MAGNITUDE(flat[start + i]) >= least;                    \
                else                                                                                                   \
                    for (int i = 0; i < n; i++) reach[i] = MAGNITUDE(flat[start + i]) >= least;                        \
                for (uint64_t all = FN(word_of)(reach); all; all &= all - 1) {                                         \
                    int64_t place = start + __builtin_ctzll(all);                                                      \
                    where[found] = place, codes[found++] = MAGNITUDE(flat[place]);                                     \
                }                                                                                                      \
            }                                                                                                          \
        return found;                                                                                                  \
    }                                                                                                                  \
                                                                                                                       \
    /* Positions of the `count` largest magnitudes, each `least` or more, in some blocks of the pieces. */             \
    static TARGET int FN(select_from_##M)(const type *flat, const int64_t *stops, int64_t pieces,                      \
                                          const int64_t *blocks, const int64_t *numbers, int64_t number,               \
                                          int64_t count, int32_t least, int64_t *positions) {                          \
        int64_t most = number * BLOCK; /* room, of which little is touched */                                          \
        int64_t *where = malloc(most * (2 * sizeof(int32_t) + sizeof(int64_t)));                                       \
        if (!where) return 1;                                                                                          \
        int32_t *codes = (int32_t *)(where + most), *scratch = codes + most;                                           \
        if (!least) least = FN(bound_##M)(flat, blocks, number, count);                                                \
        int64_t found = FN(candidates_##M)(flat, stops, blocks, numbers, pieces, least, where, codes);                 \
        if (found < count) found = FN(candidates_##M)(flat, stops, blocks, numbers, pieces, 0, where, codes);          \
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
    TARGET int FN(select_##M)(const type *flat, const type *maxima, const int64_t *starts, const int64_t *stops,       \
                              const int64_t *pieces, const int64_t *counts, int64_t groups, int64_t *positions) {      \
        for (int64_t group = 0; group < groups; group++) {                                                             \
            int64_t all = 0, count = counts[group], piece = pieces[group];                                             \
            for (int64_t i = 0; i < piece; i++) all += (stops[i] - starts[i] + BLOCK - 1) / BLOCK;                     \
            int64_t *blocks = malloc((all + 1 + piece) * sizeof(int64_t)), *numbers = blocks + all + 1;                \
            if (!blocks) return 1;                                                                                     \
            int32_t bound = 0;                                                                                         \
            int64_t number = FN(candidate_blocks_from_##M)(maxima, starts, stops, piece, count, blocks, numbers, &bound);\
            int failed = number < 0 || (count && FN(select_from_##M)(flat, stops, piece, blocks, numbers, number,      \
                                                                     count, bound, positions));                        \
            free(blocks);                                                                                              \
            if (failed) return 1;                                                                                      \
            starts += piece, stops += piece, positions += count;                                                       \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

#define MAGNITUDE_F32(bits) ((int32_t)((bits) & 0x7fffffff))
#define MAGNITUDE_BF16(bits) ((int32_t)((bits) & 0x7fff) << 16)

SELECT(f32, int32_t, MAGNITUDE_F32)
SELECT(bf16, uint16_t, MAGNITUDE_BF16)

#undef SELECT
