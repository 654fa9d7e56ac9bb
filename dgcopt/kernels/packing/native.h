/* Fields of a few bits, side by side. */

/* Eight fields, one a byte, are closed up in the low `width` bytes of a word: by pairs, pairs of pairs, and all. Of
   each fold: the gap, what stays in place, and what comes to lie above it. */
#define GAP(lane) ((lane) - (lane) / 8 * width)
#define FIELD(lane) (((uint64_t)1 << (lane) / 8 * width) - 1)
#define LOW8 (FIELD(8) * 0x0001000100010001u)
#define LOW16 (FIELD(16) * 0x0000000100000001u)
#define LOW32 FIELD(32)
#define CLOSE(word, lane, low) (((word) & (low)) | ((word) >> GAP(lane) & (low) << (lane) / 8 * width))
#define OPEN(word, lane, low) (((word) & (low)) | ((word) & (low) << (lane) / 8 * width) << GAP(lane))

/* The low bytes of eight words, one after another, and back: by words of that size where there are such. */
#define NARROW(type)                                                                                                   \
    {                                                                                                                  \
        type low[BLOCK / 8];                                                                                           \
        for (int i = 0; i < BLOCK / 8; i++) low[i] = (type)words[i];                                                   \
        memcpy(packed, low, sizeof(low));                                                                              \
    }
#define WIDEN(type)                                                                                                    \
    {                                                                                                                  \
        type low[BLOCK / 8];                                                                                           \
        memcpy(low, packed, sizeof(low));                                                                              \
        for (int i = 0; i < BLOCK / 8; i++) words[i] = low[i];                                                         \
    }

INLINE TARGET void FN(narrow)(const uint64_t *words, uint8_t *packed, const int width) {
    switch (width) {
        case 1: NARROW(uint8_t) break;
        case 2: NARROW(uint16_t) break;
        case 4: NARROW(uint32_t) break;
        default: /* what is written too far is overwritten */
            for (int i = 0; i < BLOCK / 8; i++)
                memcpy(packed + i * width, words + i, i * width + 8 <= BLOCK / 8 * width ? 8 : width);
    }
}

INLINE TARGET void FN(widen)(const uint8_t *packed, uint64_t *words, const int width) {
    switch (width) {
        case 1: WIDEN(uint8_t) break;
        case 2: WIDEN(uint16_t) break;
        case 4: WIDEN(uint32_t) break;
        default:
            for (int i = 0; i < BLOCK / 8; i++) {
                words[i] = 0;
                memcpy(words + i, packed + i * width, i * width + 8 <= BLOCK / 8 * width ? 8 : width);
                if (width < 8) words[i] &= ((uint64_t)1 << 8 * width) - 1;
            }
    }
}

/* 64 fields. */
INLINE TARGET void FN(pack_block)(const uint8_t *fields, uint8_t *packed, const int width) {
    uint64_t words[BLOCK / 8];
    memcpy(words, fields, BLOCK);
    if (width < 8)
        for (int i = 0; i < BLOCK / 8; i++) {
            uint64_t word = CLOSE(words[i], 8, LOW8);
            word = CLOSE(word, 16, LOW16);
            words[i] = CLOSE(word, 32, LOW32);
        }
    FN(narrow)(words, packed, width);
}

INLINE TARGET void FN(unpack_block)(const uint8_t *packed, uint8_t *fields, const int width) {
    uint64_t words[BLOCK / 8];
    FN(widen)(packed, words, width);
    if (width < 8)
        for (int i = 0; i < BLOCK / 8; i++) {
            uint64_t word = OPEN(words[i], 32, LOW32);
            word = OPEN(word, 16, LOW16);
            words[i] = OPEN(word, 8, LOW8);
        }
    memcpy(fields, words, BLOCK);
}

INLINE TARGET void FN(pack_width)(const uint8_t *fields, int64_t count, uint8_t *packed, const int width) {
    uint8_t last[BLOCK] = {0}, rest[BLOCK];
    for (; count >= BLOCK; fields += BLOCK, count -= BLOCK, packed += BLOCK / 8 * width)
        FN(pack_block)(fields, packed, width);
    if (!count) return;
    memcpy(last, fields, count);
    FN(pack_block)(last, rest, width);
    memcpy(packed, rest, (count + 7) / 8 * width);
}

INLINE TARGET void FN(unpack_width)(const uint8_t *packed, int64_t count, uint8_t *fields, const int width) {
    uint8_t last[BLOCK] = {0}, rest[BLOCK];
    for (; count >= BLOCK; fields += BLOCK, count -= BLOCK, packed += BLOCK / 8 * width)
        FN(unpack_block)(packed, fields, width);
    if (!count) return;
    memcpy(last, packed, (count + 7) / 8 * width);
    FN(unpack_block)(last, rest, width);
    memcpy(fields, rest, count);
}

#ifndef EVERY_WIDTH
#define EVERY_WIDTH(call)                                                                                              \
    switch (width) { /* so that masks are constants */                                                                 \
        case 1: call(1) break;                                                                                         \
        case 2: call(2) break;                                                                                         \
        case 3: call(3) break;                                                                                         \
        case 4: call(4) break;                                                                                         \
        case 5: call(5) break;                                                                                         \
        case 6: call(6) break;                                                                                         \
        case 7: call(7) break;                                                                                         \
        case 8: call(8) break;                                                                                         \
    }
#endif

TARGET void FN(pack_small)(const uint8_t *fields, int64_t count, int width, uint8_t *packed) {
#define CALL(width) FN(pack_width)(fields, count, packed, width);
    EVERY_WIDTH(CALL)
#undef CALL
}

TARGET void FN(unpack_small)(const uint8_t *packed, int64_t count, int width, uint8_t *fields) {
    if (!width && count) memset(fields, 0, count);
#define CALL(width) FN(unpack_width)(packed, count, fields, width);
    EVERY_WIDTH(CALL)
#undef CALL
}

#undef GAP
#undef FIELD
#undef LOW8
#undef LOW16
#undef LOW32
#undef CLOSE
#undef OPEN
#undef NARROW
#undef WIDEN

/* Rice codes of ascending indices. */

/* Of each of `rows` of `length`, of which the first `counts` indices count: the smallest gap between neighbours, or behind the last one up to
   `numel`; the sum of quotients by 2^b. */
TARGET void FN(rice_measure)(const int64_t *indices, const int64_t *counts, int64_t rows, int64_t length, int b,
                             int64_t numel, int64_t *smallest, int64_t *quotients) {
    for (int64_t row = 0; row < rows; indices += length, row++) {
        int64_t least = counts[row] ? indices[0] : 0, sum = counts[row] ? indices[0] >> b : 0;
        for (int64_t i = 1; i < counts[row]; i++) {
            int64_t gap = indices[i] - indices[i - 1] - 1;
            least = gap < least ? gap : least;
            sum += gap >> b;
        }
        if (counts[row] && numel - 1 - indices[counts[row] - 1] < least) least = numel - 1 - indices[counts[row] - 1];
        smallest[row] = least, quotients[row] = sum;
    }
}

/* At which byte the unary parts start. */
INLINE TARGET int64_t FN(rice_unary)(int64_t count, int b) { return count * (b / 8) + (count + 7) / 8 * (b % 8); }

/* `packed` is zero. Of every remainder the b / 8 whole bytes, then all their other bits, then from `unary` on the
   quotients as zeros that end with a one, `room` bits at most. Returns 1 if they do not fit. */
static TARGET int FN(rice_pack_row)(const int64_t *indices, int64_t count, int b, uint8_t *packed, int64_t unary,
                                    int64_t room) {
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

/* Rows of so many bytes. Returns 1 if one has too few. */
TARGET int FN(rice_pack)(const int64_t *indices, const int64_t *counts, int64_t rows, int64_t length, int b,
                         uint8_t *packed, int64_t bytes) {
    for (int64_t row = 0; row < rows; indices += length, row++, packed += bytes) {
        int64_t unary = FN(rice_unary)(counts[row], b);
        if (unary > bytes || FN(rice_pack_row)(indices, counts[row], b, packed, unary, 8 * (bytes - unary))) return 1;
    }
    return 0;
}

/* Returns 1 unless there are `count` indices, all below `numel`, and no other ones. The last is repeated to `length`. */
static TARGET int FN(rice_unpack_row)(const uint8_t *packed, int64_t count, int b, int64_t unary, int64_t bytes,
                                      int64_t numel, int64_t *indices, int64_t length) {
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
    for (int64_t i = found; i < length; i++) indices[i] = index;
    return found != count;
}

/* Says of each row whether it is `wrong`. */
TARGET void FN(rice_unpack)(const uint8_t *packed, const int64_t *counts, int64_t rows, int64_t length, int b,
                            int64_t bytes, int64_t numel, int64_t *indices, uint8_t *wrong) {
    for (int64_t row = 0; row < rows; indices += length, row++, packed += bytes) {
        int64_t unary = FN(rice_unary)(counts[row], b);
        wrong[row] = unary > bytes ||
                     FN(rice_unpack_row)(packed, counts[row], b, unary, bytes, numel, indices, length);
    }
}
