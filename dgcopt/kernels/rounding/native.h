/* Stochastic rounding to levels, powers of two and trits. */

/* In [0, 1), a multiple of 2^-24. */
INLINE TARGET float FN(chance)(uint32_t i, uint32_t weyl, uint32_t second) {
    return (float)(int32_t)(FN(draw)(i, weyl, second) >> 8) * 0x1p-24f;
}

INLINE TARGET void FN(round_levels_width)(const float *v, const float *norms, const int64_t *place, int64_t start,
                                          int64_t n, int levels, int first, int second, uint8_t *packed,
                                          const int width) {
    for (int64_t b = 0; b < n / BLOCK; b++, v += BLOCK, packed += BLOCK / 8 * width) {
        float scale = (float)levels / norms[place[b]];
        uint32_t weyl = FN(weyl_of)(start + b * BLOCK, first);
        uint8_t fields[BLOCK];
        scale = scale < LARGEST_FLOAT ? scale : LARGEST_FLOAT;
        for (int i = 0; i < BLOCK; i++) {
            int32_t bits = FN(finite_without_minus_zero)(v[i]), size = bits & 0x7fffffff;
            float position = FN(of_bits)(size) * scale;
            int32_t level = (int32_t)position;
            level += FN(chance)((uint32_t)i, weyl, (uint32_t)second) < position - (float)level;
            level = level > levels ? levels : level;
            fields[i] = (uint8_t)(level | (int32_t)((uint32_t)bits >> 31) << (width - 1));
        }
        FN(pack_block)(fields, packed, width);
    }
}

TARGET void FN(round_levels)(const float *v, const float *norms, const int64_t *place, int64_t start, int64_t n,
                             int levels, int first, int second, int width, uint8_t *packed) {
#define CALL(width) FN(round_levels_width)(v, norms, place, start, n, levels, first, second, packed, width);
    EVERY_WIDTH(CALL)
#undef CALL
}

INLINE TARGET uint8_t FN(put_levels_how)(const uint8_t *packed, const float *scales, const int64_t *place, int64_t n,
                                         float *out, const int width, const int how) {
    uint8_t most = 0, fields[BLOCK];
    for (int64_t b = 0; b < n / BLOCK; b++, packed += BLOCK / 8 * width, out += BLOCK) {
        float scale = scales[place[b]];
        FN(unpack_block)(packed, fields, width);
        for (int i = 0; i < BLOCK; i++) {
            uint8_t level = fields[i] & ((1 << (width - 1)) - 1);
            most = level > most ? level : most;
        }
        for (int i = 0; i < BLOCK; i++) {
            uint32_t field = fields[i], sign = field >> (width - 1) << 31;
            float size = (float)(int32_t)(field & ((1u << (width - 1)) - 1)) * scale;
            out[i] = FN(put)(out[i], FN(of_bits)((int32_t)((uint32_t)FN(bits_of)(size) ^ sign)), how);
        }
    }
    return most;
}

INLINE TARGET uint8_t FN(put_levels_width)(const uint8_t *packed, const float *scales, const int64_t *place, int64_t n,
                                           float *out, const int width, int how) {
    uint8_t most = 0;
#define CALL_HOW(how) most = FN(put_levels_how)(packed, scales, place, n, out, width, how);
    EVERY_HOW(CALL_HOW)
#undef CALL_HOW
    return most;
}

/* Returns the highest level there is. */
TARGET int FN(put_levels)(const uint8_t *packed, int width, const float *scales, const int64_t *place, int64_t n,
                          float *out, int how) {
    uint8_t most = 0;
#define CALL(width) most = FN(put_levels_width)(packed, scales, place, n, out, width, how);
    EVERY_WIDTH(CALL)
#undef CALL
    return most;
}

TARGET void FN(round_powers)(const float *v, int64_t start, int64_t n, int first, int second, uint8_t *exponents,
                             uint8_t *signs) {
    for (int64_t b = 0; b < n / BLOCK; b++, v += BLOCK, exponents += BLOCK, signs += BLOCK / 8) {
        uint8_t flags[BLOCK];
        uint32_t weyl = FN(weyl_of)(start + b * BLOCK, first);
        for (int i = 0; i < BLOCK; i++) {
            int32_t bits = FN(finite_without_minus_zero)(v[i]), size = bits & 0x7fffffff;
            uint32_t up = FN(draw)((uint32_t)i, weyl, (uint32_t)second) >> 9;
            exponents[i] = (uint8_t)(((uint32_t)size + up) >> 23);
            flags[i] = (uint8_t)((uint32_t)bits >> 31);
        }
        FN(pack_flags)(flags, signs);
    }
}

INLINE TARGET uint8_t FN(put_powers_how)(const uint8_t *exponents, const uint8_t *signs, int64_t n, float *out,
                                         const int how) {
    uint8_t most = 0;
    int streams = how == 0 && FN(streams)(out, n);
    for (int64_t b = 0; b < n / BLOCK; b++, exponents += BLOCK, signs += BLOCK / 8, out += BLOCK) {
        float values[BLOCK];
        for (int i = 0; i < BLOCK; i++) most = exponents[i] > most ? exponents[i] : most;
        for (int half = 0; half < 2; half++) {
            uint32_t word;
            memcpy(&word, signs + 4 * half, 4);
            float *to = values + 32 * half;
            const float *before = out + 32 * half;
            const uint8_t *of = exponents + 32 * half;
            for (int i = 0; i < 32; i++) {
                uint32_t bits = (uint32_t)of[i] << 23 | (word >> i & 1) << 31;
                to[i] = FN(put)(before[i], FN(of_bits)((int32_t)bits), how);
            }
        }
        FN(write_block)(out, values, streams);
    }
    if (streams) FENCE;
    return most;
}

/* Returns the highest exponent there is. */
TARGET int FN(put_powers)(const uint8_t *exponents, const uint8_t *signs, int64_t n, float *out, int how) {
    uint8_t most = 0;
#define CALL(how) most = FN(put_powers_how)(exponents, signs, n, out, how);
    EVERY_HOW(CALL)
#undef CALL
    return most;
}

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
