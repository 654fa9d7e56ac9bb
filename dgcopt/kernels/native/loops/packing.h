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
