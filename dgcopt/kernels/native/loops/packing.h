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

INLINE TARGET void FN(pack_width)(const uint8_t *fields, int64_t count, uint8_t *packed, const int width) {
    for (; count > 0; fields += 8, count -= 8, packed += width) {
        uint64_t word = 0;
        if (count >= 8)
            memcpy(&word, fields, 8);
        else
            memcpy(&word, fields, count);
        word = CLOSE(word, 8, LOW8);
        word = CLOSE(word, 16, LOW16);
        word = CLOSE(word, 32, LOW32);
        memcpy(packed, &word, width);
    }
}

INLINE TARGET void FN(unpack_width)(const uint8_t *packed, int64_t count, uint8_t *fields, const int width) {
    for (; count > 0; fields += 8, count -= 8, packed += width) {
        uint64_t word = 0;
        if (count >= 64) { /* at least 8 bytes are left, and all at once is fastest */
            memcpy(&word, packed, 8);
            word &= ((uint64_t)1 << 8 * width) - 1;
        } else
            memcpy(&word, packed, width);
        word = OPEN(word, 32, LOW32);
        word = OPEN(word, 16, LOW16);
        word = OPEN(word, 8, LOW8);
        if (count >= 8)
            memcpy(fields, &word, 8);
        else
            memcpy(fields, &word, count);
    }
}

#define EVERY_WIDTH(call)                                                                                              \
    switch (width) { /* so that masks are constants */                                                                 \
        case 1: call(1) break;                                                                                         \
        case 2: call(2) break;                                                                                         \
        case 3: call(3) break;                                                                                         \
        case 4: call(4) break;                                                                                         \
        case 5: call(5) break;                                                                                         \
        case 6: call(6) break;                                                                                         \
        case 7: call(7) break;                                                                                         \
    }

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
#undef EVERY_WIDTH
