/* Values rounded at random, by numbers that follow from a key and a value's place. */

#define WEYL 0x9e3779b9u

/* 32 random bits for element i of a block: Weyl's sequence, which is at `weyl` where the block starts, mixed by two rounds
   of multiplication (Wellons, "lowbias32"). */
INLINE TARGET uint32_t FN(draw)(uint32_t i, uint32_t weyl, uint32_t second) {
    uint32_t x = i * WEYL + weyl;
    x ^= x >> 16;
    x = x * 0x21f0aaadu + second;
    x ^= x >> 15;
    x *= 0x735a2d97u;
    return x ^ x >> 15;
}
INLINE TARGET uint32_t FN(weyl_of)(int64_t start, int first) { return (uint32_t)start * WEYL + (uint32_t)first; }

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
