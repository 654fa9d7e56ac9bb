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

#define dtype f32
#include "per_dtype.h"
#undef dtype
#define dtype bf16
#include "per_dtype.h"
#undef dtype

#undef FEW

#define LARGER_SAMPLE 4096

/* Element i of `flat`, or where g is given of what that is to become. */
INLINE TARGET int32_t FN(element)(const float *flat, const float *g, const float *e, float decay, int64_t i) {
    return FN(bits_of)(g ? __builtin_fmaf(e[i], decay, g[i]) : flat[i]);
}

/* Where magnitudes are `least`, above 0, or more and not NaN, and what is there; if g is given, `flat` is made g + decay e
   first. Returns how many, or -1 if they need more room. */
static TARGET int64_t FN(collect)(float *flat, const float *g, const float *e, float decay, int64_t n, int32_t least,
                                  int64_t room, int64_t *where, int32_t *found) {
    uint32_t range = (uint32_t)(INFINITE_BITS - least);
    int64_t count = 0;
    int enough = 1, streams = FN(streams)(flat, n);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t left = n - start < BLOCK ? n - start : BLOCK;
        int32_t block[BLOCK] = {0};
        float sums[BLOCK];
        uint8_t reach[BLOCK];
        if (g && left == BLOCK) {
            for (int i = 0; i < BLOCK; i++) sums[i] = __builtin_fmaf(e[start + i], decay, g[start + i]);
            FN(write_block)(flat + start, sums, streams);
            memcpy(block, sums, sizeof block);
        } else {
            if (g)
                for (int64_t i = start; i < n; i++) flat[i] = __builtin_fmaf(e[i], decay, g[i]);
            memcpy(block, flat + start, left * sizeof(float));
        }
        for (int i = 0; i < BLOCK; i++) reach[i] = (uint32_t)((block[i] & INT32_MAX) - least) <= range;
        enough &= count + BLOCK <= room;
        for (uint64_t all = enough ? FN(word_of)(reach) : 0; all; all &= all - 1, count++) {
            int place = __builtin_ctzll(all);
            where[count] = start + place, found[count] = block[place];
        }
    }
    FENCE;
    return enough ? count : -1;
}

/* Between which codes the k-th largest of n lies, most probably, by a sample. */
static TARGET void FN(bounds)(const float *flat, const float *g, const float *e, float decay, int64_t n, int64_t k,
                              int32_t *low, int32_t *high) {
    int64_t size = n / 16 < LARGER_SAMPLE ? n / 16 : LARGER_SAMPLE;
    *low = 0, *high = INT32_MAX;
    if (!size) return;
    int64_t after = rank_in_sample(k, n, size);
    int64_t before = 2 * (int64_t)((double)k / (double)n * (double)size) - after; /* as far on the other side */
    int32_t sample[LARGER_SAMPLE];
    for (int64_t i = 0; i < size; i++) sample[i] = FN(element)(flat, g, e, decay, i * n / size) & INT32_MAX;
    if (after <= size) *low = FN(kth_by_parting)(sample, size, after);
    if (*low > INFINITE_BITS) *low = INFINITE_BITS;
    if (before > 0) *high = FN(kth_by_parting)(sample, size, before);
}

/* The k-th largest magnitude of n, 1 <= k <= n; `scratch` has room for as many. Those of `high` and more are counted. */
static TARGET int32_t FN(kth_below)(const int32_t *found, int64_t n, int64_t k, int32_t high, int32_t *scratch) {
    int64_t above = 0, left = 0;
    for (int64_t i = 0; i < n; i++) above += (found[i] & INT32_MAX) >= high;
    if (above >= k) above = 0, high = INT32_MAX;
    for (int64_t i = 0; i < n; i++) {
        int32_t code = found[i] & INT32_MAX;
        scratch[left] = code;
        left += code < high;
    }
    return FN(kth_largest)(scratch, left, k - above);
}

/* Those of `most` or fewer; of more the largest. Returns 1 if there is no memory left. */
TARGET int FN(select_above)(float *flat, const float *g, const float *e, float decay, int64_t n, float threshold,
                            int64_t most, int64_t *positions, int32_t *values, int64_t *count) {
    int32_t least = FN(bits_of)(threshold), low, high;
    FN(bounds)(flat, g, e, decay, n, most, &low, &high);
    int64_t room = 2 * most + (1 << 16), number = -1, taken = 0;
    int64_t *where = NULL;
    int32_t *found = NULL;
    while (number < 0 || (number < most && low > least)) { /* once, unless the sample was misleading */
        if (where) low = least, room = n + BLOCK, g = NULL;
        if (low < least) low = least;
        free(where);
        where = malloc(room * (sizeof(int64_t) + 2 * sizeof(int32_t)));
        if (!where) return 1;
        found = (int32_t *)(where + room);
        number = FN(collect)(flat, g, e, decay, n, low, room, where, found);
    }
    int32_t cut = most ? -1 : INT32_MAX;
    if (number > most && most) cut = FN(kth_below)(found, number, most, high, found + room);
    int64_t ties = most;
    for (int64_t i = 0; i < number; i++) ties -= (found[i] & INT32_MAX) > cut;
    for (int64_t i = 0; i < number && taken < most; i++) {
        int32_t code = found[i] & INT32_MAX;
        int take = code > cut || (code == cut && ties-- > 0);
        positions[taken] = where[i], values[taken] = found[i];
        taken += take;
    }
    free(where);
    *count = taken;
    return 0;
}

#undef LARGER_SAMPLE
