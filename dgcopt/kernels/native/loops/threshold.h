/* The magnitudes that reach a threshold. After selection.h. */

#define LARGER_SAMPLE 4096

/* Where magnitudes are `least` or more and not NaN, and their codes. Returns how many, or -1 if they need more room. */
static TARGET int64_t FN(collect)(const int32_t *flat, int64_t n, int32_t least, int64_t room, int64_t *where,
                                  int32_t *codes) {
    uint32_t range = (uint32_t)(INFINITE_BITS - least);
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t left = n - start < BLOCK ? n - start : BLOCK;
        uint8_t reach[BLOCK] = {0};
        uint64_t all = 0;
        if (left == BLOCK)
            for (int i = 0; i < BLOCK; i++) reach[i] = (uint32_t)((flat[start + i] & INT32_MAX) - least) <= range;
        else
            for (int i = 0; i < left; i++) reach[i] = (uint32_t)((flat[start + i] & INT32_MAX) - least) <= range;
        for (int i = 0; i < BLOCK / 8; i++) {
            uint64_t eight;
            memcpy(&eight, reach + 8 * i, 8);
            all |= (eight * 0x0102040810204080 >> 56) << 8 * i; /* their lowest bits side by side */
        }
        if (found + BLOCK > room) return -1;
        for (; all; all &= all - 1, found++) {
            where[found] = start + __builtin_ctzll(all);
            codes[found] = flat[where[found]] & INT32_MAX;
        }
    }
    return found;
}

/* Between which codes the k-th largest of n lies, most probably, by a sample. */
static TARGET void FN(bounds)(const int32_t *flat, int64_t n, int64_t k, int32_t *low, int32_t *high) {
    int64_t size = n / 16 < LARGER_SAMPLE ? n / 16 : LARGER_SAMPLE;
    *low = 0, *high = INT32_MAX;
    if (!size) return;
    int64_t after = rank_in_sample(k, n, size);
    int64_t before = 2 * (int64_t)((double)k / (double)n * (double)size) - after; /* as far on the other side */
    int32_t sample[LARGER_SAMPLE];
    for (int64_t i = 0; i < size; i++) sample[i] = flat[i * n / size] & INT32_MAX;
    if (after <= size) *low = FN(kth_by_parting)(sample, size, after);
    if (*low > INFINITE_BITS) *low = INFINITE_BITS;
    if (before > 0) *high = FN(kth_by_parting)(sample, size, before);
}

/* The k-th largest of the codes, 1 <= k <= n; `scratch` has room for as many. Those of `high` and more are counted. */
static TARGET int32_t FN(kth_below)(const int32_t *codes, int64_t n, int64_t k, int32_t high, int32_t *scratch) {
    int64_t above = 0, left = 0;
    for (int64_t i = 0; i < n; i++) above += codes[i] >= high;
    if (above >= k) above = 0, high = INT32_MAX;
    for (int64_t i = 0; i < n; i++) {
        scratch[left] = codes[i];
        left += codes[i] < high;
    }
    return FN(kth_largest)(scratch, left, k - above);
}

/* Those of `most` or fewer; of more the largest. Returns 1 if there is no memory left. */
TARGET int FN(positions_above)(const float *values, int64_t n, float threshold, int64_t most, int64_t *positions,
                               int64_t *count) {
    const int32_t *flat = (const int32_t *)values;
    int32_t least = FN(bits_of)(threshold), low, high;
    FN(bounds)(flat, n, most, &low, &high);
    int64_t room = 2 * most + (1 << 16), found = -1, taken = 0;
    int64_t *where = NULL;
    int32_t *codes = NULL;
    while (found < 0 || (found < most && low > least)) { /* once, unless the sample was misleading */
        if (where) low = least, room = n + BLOCK;
        if (low < least) low = least;
        free(where);
        where = malloc(room * (sizeof(int64_t) + 2 * sizeof(int32_t)));
        if (!where) return 1;
        codes = (int32_t *)(where + room);
        found = FN(collect)(flat, n, low, room, where, codes);
    }
    int32_t cut = most ? -1 : INT32_MAX;
    if (found > most && most) cut = FN(kth_below)(codes, found, most, high, codes + room);
    int64_t ties = most;
    for (int64_t i = 0; i < found; i++) ties -= codes[i] > cut;
    for (int64_t i = 0; i < found && taken < most; i++) {
        int take = codes[i] > cut || (codes[i] == cut && ties-- > 0);
        positions[taken] = where[i];
        taken += take;
    }
    free(where);
    *count = taken;
    return 0;
}

#undef LARGER_SAMPLE
