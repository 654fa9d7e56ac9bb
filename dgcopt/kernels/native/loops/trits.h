/* Minus one, zero or one: five in a byte. Byte i holds those at i, i + stride, ... i + 4 stride. */

/* What lies before `n`, of the span of trits that starts at `from`, as long as a piece of bytes. */
INLINE TARGET int64_t FN(stop_of)(int64_t from, int64_t piece, int64_t n) {
    return from + piece < n ? from + piece : from < n ? n : from;
}

/* Where the blocks of one place end, `stop` at the latest. */
INLINE TARGET int64_t FN(run)(const int64_t *place, int64_t from, int64_t stop) {
    int64_t end = (from / BLOCK + 1) * BLOCK;
    while (end < stop && place[end / BLOCK] == place[from / BLOCK]) end += BLOCK;
    return end < stop ? end : stop;
}

INLINE TARGET void FN(pack_trits)(int8_t trits[5][PIECE], int64_t length, uint8_t *packed) {
    for (int64_t i = 0; i < length; i++) {
        unsigned high = (unsigned)(trits[0][i] + 1) * 9 + (unsigned)(trits[1][i] + 1) * 3 + (unsigned)(trits[2][i] + 1);
        packed[i] = (uint8_t)(high * 9 + (unsigned)(trits[3][i] + 1) * 3 + (unsigned)(trits[4][i] + 1));
    }
}

/* Returns 1 if a byte cannot be right. */
INLINE TARGET int FN(unpack_trits)(const uint8_t *packed, int64_t length, int8_t trits[5][PIECE]) {
    uint8_t wrong = 0;
    for (int64_t i = 0; i < length; i++) {
        uint16_t byte = packed[i]; /* n / 3 is n * 171 >> 9 for every byte */
        wrong |= (uint8_t)(byte > 242);
        uint16_t by3 = (uint16_t)(byte * 171 >> 9), by9 = (uint16_t)(by3 * 171 >> 9);
        uint16_t by27 = (uint16_t)(by9 * 171 >> 9), by81 = (uint16_t)(by27 * 171 >> 9);
        trits[4][i] = (int8_t)(byte - 3 * by3 - 1), trits[3][i] = (int8_t)(by3 - 3 * by9 - 1);
        trits[2][i] = (int8_t)(by9 - 3 * by27 - 1), trits[1][i] = (int8_t)(by27 - 3 * by81 - 1);
        trits[0][i] = (int8_t)(by81 - 1);
    }
    return wrong;
}

/* Bytes `first` and the next `length`, of values v[0 .. n]. */
TARGET void FN(round_trits)(const float *v, const float *scales, const int64_t *place, int64_t n, int64_t stride,
                            int key_first, int key_second, int64_t first, int64_t length, uint8_t *packed) {
    int8_t trits[5][PIECE];
    for (int64_t at = first, piece; at < first + length; at += piece) {
        piece = first + length - at < PIECE ? first + length - at : PIECE;
        for (int k = 0; k < 5; k++) {
            int64_t from = k * stride + at, stop = FN(stop_of)(from, piece, n);
            int8_t *to = trits[k];
            memset(to, -1, piece);
            for (int64_t end; from < stop; to += end - from, from = end) {
                end = FN(run)(place, from, stop);
                float scale = scales[place[from / BLOCK]];
                uint32_t weyl = FN(weyl_of)(from, key_first);
                const float *of = v + from;
                for (int64_t i = 0; i < end - from; i++) {
                    int32_t bits = FN(finite)(of[i]);
                    float chance = FN(chance)((uint32_t)i, weyl, (uint32_t)key_second);
                    int32_t kept = chance * scale < FN(of_bits)(bits & 0x7fffffff);
                    to[i] = (int8_t)(kept * (1 + 2 * (bits >> 31)));
                }
            }
        }
        FN(pack_trits)(trits, piece, packed + at);
    }
}

INLINE TARGET int FN(put_trits_how)(const uint8_t *packed, const float *scales, const int64_t *place, int64_t n,
                                    int64_t stride, int64_t first, int64_t length, float *out, const int how) {
    int8_t trits[5][PIECE];
    int wrong = 0;
    for (int64_t at = first, piece; at < first + length; at += piece) {
        piece = first + length - at < PIECE ? first + length - at : PIECE;
        wrong |= FN(unpack_trits)(packed + at, piece, trits);
        for (int k = 0; k < 5; k++) {
            int64_t from = k * stride + at, stop = FN(stop_of)(from, piece, n);
            const int8_t *of = trits[k];
            for (int64_t end; from < stop; of += end - from, from = end) {
                end = FN(run)(place, from, stop);
                float scale = scales[place[from / BLOCK]], *to = out + from;
                for (int64_t i = 0; i < end - from; i++) to[i] = FN(put)(to[i], (float)of[i] * scale, how);
            }
        }
    }
    return wrong;
}

/* Returns 1 if a byte cannot be right. */
TARGET int FN(put_trits)(const uint8_t *packed, const float *scales, const int64_t *place, int64_t n, int64_t stride,
                         int64_t first, int64_t length, float *out, int how) {
    int wrong = 0;
#define CALL(how) wrong = FN(put_trits_how)(packed, scales, place, n, stride, first, length, out, how);
    EVERY_HOW(CALL)
#undef CALL
    return wrong;
}

enum { FN(WORDS) = PIECE / 64 + 1, FN(VOTES) = 64 * FN(WORDS) };

/* What most voters say by `bytes` bytes of signs: the binary digits of how many say minus are kept in a word each, for
   64 elements at once. */
INLINE TARGET void FN(count_votes)(const uint8_t *votes, int64_t voters, int64_t stride, int64_t bytes, int8_t *says) {
    uint64_t digits[64][FN(WORDS)], more[FN(WORDS)], same[FN(WORDS)];
    uint8_t against[BLOCK], tied[BLOCK];
    int64_t half = voters / 2;
    int count = 0;
    while (voters >> count) count++;
    memset(digits, 0, count * sizeof(digits[0]));
    for (int64_t voter = 0; voter < voters; voter++) {
        uint64_t carry[FN(WORDS)] = {0};
        memcpy(carry, votes + voter * stride, bytes);
        for (int digit = 0; digit < count; digit++)
            for (int i = 0; i < FN(WORDS); i++) {
                uint64_t both = digits[digit][i] & carry[i];
                digits[digit][i] ^= carry[i];
                carry[i] = both;
            }
    }
    for (int i = 0; i < FN(WORDS); i++) more[i] = 0, same[i] = UINT64_MAX;
    for (int digit = count - 1; digit >= 0; digit--)
        for (int i = 0; i < FN(WORDS); i++) {
            uint64_t ones = digits[digit][i], wanted = half >> digit & 1 ? UINT64_MAX : 0;
            more[i] |= same[i] & ones & ~wanted;
            same[i] &= ~(ones ^ wanted);
        }
    for (int i = 0; i < FN(WORDS); i++) {
        uint64_t tie = voters & 1 ? 0 : same[i];
        FN(unpack_block)((const uint8_t *)(more + i), against, 1);
        FN(unpack_block)((const uint8_t *)&tie, tied, 1);
        for (int j = 0; j < BLOCK; j++) says[i * BLOCK + j] = (int8_t)(1 - tied[j] - 2 * against[j]);
    }
}

/* Bytes `first` and the next `length`, of what most voters say by a row of `bytes` bytes of signs each. */
TARGET void FN(majority)(const uint8_t *votes, int64_t voters, int64_t bytes, int64_t stride, int64_t first,
                         int64_t length, uint8_t *packed) {
    int8_t trits[5][PIECE], says[FN(VOTES)];
    for (int64_t at = first, piece; at < first + length; at += piece) {
        piece = first + length - at < PIECE ? first + length - at : PIECE;
        for (int k = 0; k < 5; k++) {
            int64_t from = k * stride + at, stop = FN(stop_of)(from, piece, 8 * bytes), byte = from / 8;
            memset(trits[k], -1, piece);
            if (from >= stop) continue;
            FN(count_votes)(votes + byte, voters, bytes, (stop + 7) / 8 - byte, says);
            memcpy(trits[k], says + from % 8, stop - from);
        }
        FN(pack_trits)(trits, piece, packed + at);
    }
}
