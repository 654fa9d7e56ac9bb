/* Included by native.c once for each instruction set, with TARGET and FN set to it. The specification of every function
   is the one of the same name in torch.py. Lengths are of elements; nothing is allocated but in `select`. */

#ifndef DGCOPT_LOOPS_H
#define DGCOPT_LOOPS_H

enum { MOMENTUM = 1, DAMPENED = 2, NESTEROV = 4, COMMIT = 8 };

#if defined(__clang__)
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

#define INLINE static inline __attribute__((always_inline))

#endif

/* -- reading and writing float32 and bfloat16 ---------------------------------------------------------------------- */

INLINE TARGET float FN(read_f32)(const float *p) { return *p; }
INLINE TARGET void FN(write_f32)(float *p, float x) { *p = x; }
INLINE TARGET int32_t FN(magnitude_f32)(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}

INLINE TARGET float FN(read_bf16)(const uint16_t *p) {
    uint32_t bits = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE TARGET uint16_t FN(rounded)(float x) { /* to nearest, ties to even; NaN to the one that torch writes */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
}
INLINE TARGET void FN(write_bf16)(uint16_t *p, float x) { *p = FN(rounded)(x); }
INLINE TARGET int32_t FN(magnitude_bf16)(float x) { return FN(rounded)(x) & 0x7fff; }

/* -- accumulate and advance, for each type of gradient and of memory ----------------------------------------------- */

#define LOOPS(G, gtype, M, mtype, maxtype)                                                                             \
    INLINE TARGET int32_t FN(block_##G##_##M)(const mtype *old, mtype *new, mtype *u, gtype *g, int64_t n, float m,     \
                                              float keep, float scale, const int mode) {                               \
        int32_t top = 0;                                                                                               \
        ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                                  \
            float x = FN(read_##G)(g + i) * scale, step = x;                                                           \
            if (mode & MOMENTUM) {                                                                                     \
                float before = FN(read_##M)(u + i);                                                                    \
                float after = mode & DAMPENED ? __builtin_fmaf(x, keep, before * m) : __builtin_fmaf(before, m, x);    \
                if (mode & COMMIT) FN(write_##M)(u + i, after);                                                        \
                step = mode & NESTEROV ? __builtin_fmaf(after, m, x) : after;                                          \
            }                                                                                                          \
            float sum = FN(read_##M)(old + i) + step;                                                                  \
            FN(write_##M)(new + i, sum);                                                                               \
            if (mode & COMMIT) g[i] = 0;                                                                               \
            int32_t size = FN(magnitude_##M)(sum);                                                                     \
            top = size > top ? size : top;                                                                             \
        }                                                                                                              \
        return top;                                                                                                    \
    }                                                                                                                  \
                                                                                                                       \
    INLINE TARGET void FN(blocks_##G##_##M)(const mtype *old, mtype *new, mtype *u, gtype *g, maxtype *maxima,          \
                                            int64_t n, float m, float keep, float scale, const int mode) {             \
        gtype zeros[BLOCK] = {0};                                                                                      \
        int64_t start = 0;                                                                                             \
        for (; start + BLOCK <= n; start += BLOCK)                                                                     \
            maxima[start / BLOCK] = (maxtype)FN(block_##G##_##M)(old + start, new + start, u + start,                  \
                                                                 g ? g + start : zeros, BLOCK, m, keep, scale, mode);  \
        if (start < n)                                                                                                 \
            maxima[start / BLOCK] = (maxtype)FN(block_##G##_##M)(old + start, new + start, u + start,                  \
                                                                 g ? g + start : zeros, n - start, m, keep, scale,     \
                                                                 mode);                                                \
    }                                                                                                                  \
                                                                                                                       \
    TARGET void FN(accumulate_##G##_##M)(const mtype *old, mtype *new, mtype *u, gtype *g, maxtype *maxima, int64_t n,  \
                                         float m, float keep, float scale, int mode) {                                 \
        switch (mode) { /* so that no loop asks */                                                                     \
            CASE(0, G, M) CASE(8, G, M) CASE(1, G, M) CASE(3, G, M) CASE(5, G, M) CASE(7, G, M) CASE(9, G, M)          \
            CASE(11, G, M) CASE(13, G, M) CASE(15, G, M)                                                               \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    TARGET void FN(advance_##G##_##M)(mtype *u, gtype *g, int64_t n, float m, float keep, float scale, int dampened) {  \
        if (!g) {                                                                                                      \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                float before = FN(read_##M)(u + i);                                                                    \
                FN(write_##M)(u + i, dampened ? __builtin_fmaf(0, keep, before * m) : __builtin_fmaf(before, m, 0));   \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        if (dampened) {                                                                                                \
            ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                              \
                float x = FN(read_##G)(g + i) * scale;                                                                 \
                FN(write_##M)(u + i, __builtin_fmaf(x, keep, FN(read_##M)(u + i) * m));                                \
                g[i] = 0;                                                                                              \
            }                                                                                                          \
        } else {                                                                                                       \
            ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                              \
                float x = FN(read_##G)(g + i) * scale;                                                                 \
                FN(write_##M)(u + i, __builtin_fmaf(FN(read_##M)(u + i), m, x));                                       \
                g[i] = 0;                                                                                              \
            }                                                                                                          \
        }                                                                                                              \
    }

#define CASE(mode, G, M)                                                                                               \
    case mode: FN(blocks_##G##_##M)(old, new, u, g, maxima, n, m, keep, scale, mode); break;

LOOPS(f32, float, f32, float, int32_t)
LOOPS(f32, float, bf16, uint16_t, uint16_t)
LOOPS(bf16, uint16_t, f32, float, int32_t)
LOOPS(bf16, uint16_t, bf16, uint16_t, uint16_t)

#undef LOOPS
#undef CASE

/* -- select -------------------------------------------------------------------------------------------------------- */

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

/* -- packing fields of a few bits ---------------------------------------------------------------------------------- */

/* Eight fields, one a byte, are closed up in the low `width` bytes of a word: by pairs, pairs of pairs, and all. */

/* Each fold's gap, what stays in place, and what comes to lie above it. */
INLINE TARGET void FN(folds)(int width, int *gap, uint64_t *low, uint64_t *high) {
    for (int i = 0, lane = 8; i < 3; i++, lane *= 2) {
        int used = lane / 8 * width;
        gap[i] = lane - used, low[i] = 0;
        for (int start = 0; start < 64; start += 2 * lane) low[i] |= (((uint64_t)1 << used) - 1) << start;
        high[i] = low[i] << used;
    }
}

TARGET void FN(pack_small)(const uint8_t *fields, int64_t count, int width, uint8_t *packed) {
    uint64_t low[3], high[3];
    int gap[3];
    FN(folds)(width, gap, low, high);
    for (int64_t start = 0; start < count; start += 8, packed += width) {
        uint64_t word = 0;
        if (count - start >= 8)
            memcpy(&word, fields + start, 8);
        else
            memcpy(&word, fields + start, count - start);
        for (int i = 0; i < 3; i++) word = (word & low[i]) | (word >> gap[i] & high[i]);
        for (int i = 0; i < width; i++) packed[i] = (uint8_t)(word >> 8 * i);
    }
}

TARGET void FN(unpack_small)(const uint8_t *packed, int64_t count, int width, uint8_t *fields) {
    uint64_t low[3], high[3];
    int gap[3];
    FN(folds)(width, gap, low, high);
    for (int64_t start = 0; start < count; start += 8, packed += width) {
        uint64_t word = 0;
        for (int i = 0; i < width; i++) word |= (uint64_t)packed[i] << 8 * i;
        for (int i = 2; i >= 0; i--) word = (word & low[i]) | (word & high[i]) << gap[i];
        if (count - start >= 8)
            memcpy(fields + start, &word, 8);
        else
            memcpy(fields + start, &word, count - start);
    }
}

/* -- Rice codes of ascending indices ------------------------------------------------------------------------------- */

/* measures[0]: the smallest gap between neighbours, measures[1]: the sum of all quotients by 2^b. */
TARGET void FN(rice_measure)(const int64_t *indices, int64_t count, int b, int64_t *measures) {
    int64_t smallest = count ? indices[0] : 0, quotients = count ? indices[0] >> b : 0;
    for (int64_t i = 1; i < count; i++) {
        int64_t gap = indices[i] - indices[i - 1] - 1;
        smallest = gap < smallest ? gap : smallest;
        quotients += gap >> b;
    }
    measures[0] = smallest, measures[1] = quotients;
}

/* `packed` is zero. Of every remainder the b / 8 whole bytes, then all their other bits, then from `unary` on the
   quotients as zeros that end with a one, `room` bits at most. Returns 1 if they do not fit. */
TARGET int FN(rice_pack)(const int64_t *indices, int64_t count, int b, uint8_t *packed, int64_t unary, int64_t room) {
    int whole = b / 8, rest = b % 8;
    uint8_t *bits = packed + count * whole, *ends = packed + unary;
    int64_t end = 0, place = 0, before = -1;
    for (int64_t i = 0; i < count; i++, place += rest) {
        uint64_t gap = (uint64_t)(indices[i] - before - 1);
        before = indices[i];
        for (int byte = 0; byte < whole; byte++) packed[i * whole + byte] = (uint8_t)(gap >> 8 * byte);
        if (rest) {
            unsigned field = (unsigned)(gap >> 8 * whole & ((1u << rest) - 1)) << (place & 7);
            bits[place >> 3] |= (uint8_t)field;
            if (field >> 8) bits[(place >> 3) + 1] |= (uint8_t)(field >> 8);
        }
        end += (int64_t)(gap >> b);
        if (end >= room) return 1;
        ends[end >> 3] |= (uint8_t)(1 << (end & 7));
        end++;
    }
    return 0;
}

/* Returns 1 unless there are `count` indices, all below `numel`, and no other ones. */
TARGET int FN(rice_unpack)(const uint8_t *packed, int64_t count, int b, int64_t unary, int64_t bytes, int64_t numel,
                           int64_t *indices) {
    int whole = b / 8, rest = b % 8;
    const uint8_t *bits = packed + count * whole;
    int64_t found = 0, zeros = 0, place = 0, index = -1;
    for (int64_t at = unary; at < bytes; at++) {
        unsigned byte = packed[at];
        int seen = 0;
        for (; byte; byte &= byte - 1, found++, place += rest) {
            int end = __builtin_ctz(byte);
            if (found == count) return 1;
            int64_t gap = 0;
            for (int i = 0; i < whole; i++) gap |= (int64_t)packed[found * whole + i] << 8 * i;
            if (rest) {
                unsigned field = bits[place >> 3];
                if ((place & 7) + rest > 8) field |= (unsigned)bits[(place >> 3) + 1] << 8;
                gap |= (int64_t)(field >> (place & 7) & ((1u << rest) - 1)) << 8 * whole;
            }
            int64_t quotient = zeros + end - seen;
            if (quotient > numel >> b) return 1;
            index += gap + (quotient << b) + 1;
            if (index >= numel) return 1;
            indices[found] = index;
            zeros = 0, seen = end + 1;
        }
        zeros += 8 - seen;
    }
    return found != count;
}
