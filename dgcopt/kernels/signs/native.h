/* Signs, one bit each. */

INLINE TARGET void FN(signs_of)(const float *v, uint8_t *flags, int64_t n, const int zero_is_minus) {
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = FN(bits_of)(v[i]), size = bits & 0x7fffffff;
        int32_t minus = (bits < 0) & (size != 0) & (size <= INFINITE_BITS);
        flags[i] = (uint8_t)(zero_is_minus ? minus | (size == 0) : minus);
    }
}

TARGET void FN(pack_signs)(const float *v, int64_t n, int zero_is_minus, uint8_t *packed) {
    uint8_t flags[BLOCK], rest[BLOCK / 8];
    for (; n >= BLOCK; n -= BLOCK, v += BLOCK, packed += BLOCK / 8) {
        if (zero_is_minus)
            FN(signs_of)(v, flags, BLOCK, 1);
        else
            FN(signs_of)(v, flags, BLOCK, 0);
        FN(pack_flags)(flags, packed);
    }
    if (!n) return;
    memset(flags, 0, BLOCK);
    FN(signs_of)(v, flags, n, zero_is_minus);
    FN(pack_flags)(flags, rest);
    memcpy(packed, rest, (n + 7) / 8);
}

TARGET void FN(mix_signs)(const float *x, float keep, const float *y, float add, int64_t n, float *out,
                          int zero_is_minus, uint8_t *packed) {
    int streams = FN(streams)(out, n);
    for (int64_t left; n > 0; n -= BLOCK, x += BLOCK, y += BLOCK, out += BLOCK, packed += BLOCK / 8) {
        float mixed[BLOCK];
        left = n < BLOCK ? n : BLOCK;
        FN(mix_span)(x, keep, y, add, left, mixed);
        FN(pack_signs)(mixed, left, zero_is_minus, packed);
        if (left == BLOCK)
            FN(write_block)(out, mixed, streams);
        else
            memcpy(out, mixed, left * sizeof(float));
    }
    FENCE;
}

/* Which values of a block are below zero, and the sums of both kinds; with values above LARGEST one of them is too. */
INLINE TARGET uint64_t FN(split)(const float *v, float *above, float *below) {
    float ups[BLOCK], downs[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        ups[i] = v[i] > 0 ? v[i] : 0;
        downs[i] = v[i] < 0 ? v[i] : 0;
    }
    *above = FN(fold)(ups), *below = 0.0f - FN(fold)(downs);
    return FN(below_zero)(v);
}

/* The signs of a block, the sums of what is above and of what is below zero, and how many are below. */
INLINE TARGET void FN(split_block)(const float *v, uint8_t *packed, float *above, float *below, float *minuses) {
    float up, down;
    uint64_t word = FN(split)(v, &up, &down);
    if (up + down > LARGEST) { /* costs as much again */
        float within[BLOCK];
        for (int i = 0; i < BLOCK; i++) within[i] = FN(of_bits)(FN(finite)(v[i]));
        word = FN(split)(within, &up, &down);
    }
    memcpy(packed, &word, sizeof word);
    *above = up, *below = down, *minuses = (float)__builtin_popcountll(word);
}

TARGET void FN(split_signs)(const float *v, int64_t n, uint8_t *packed, float *above, float *below, float *minuses) {
    for (int64_t b = 0; b < n / BLOCK; b++)
        FN(split_block)(v + b * BLOCK, packed + b * (BLOCK / 8), above + b, below + b, minuses + b);
}

/* From start to stop, whole blocks; x may be mixed before. */
TARGET void FN(split_sum)(float *x, const float *y, int64_t start, int64_t stop, float *v, uint8_t *packed,
                          float *above, float *below, float *minuses, const int64_t *table, int64_t rows, float keep,
                          float add) {
    int streams = FN(streams)(v + start, stop - start);
    mixture of = {table, rows, keep, add};
    int64_t row = 0;
    x += start, y += start, v += start;
    for (int64_t b = start / BLOCK; b < stop / BLOCK; b++, v += BLOCK, x += BLOCK, y += BLOCK) {
        int64_t at = b * BLOCK;
        float sums[BLOCK];
        FN(mix_part)(&of, &row, x, at, at + BLOCK);
        for (int i = 0; i < BLOCK; i++) sums[i] = x[i] + y[i];
        FN(write_block)(v, sums, streams);
        FN(split_block)(sums, packed + b * (BLOCK / 8), above + b, below + b, minuses + b);
    }
    FENCE;
}

/* Let a block's signs take effect: above and below have the bits of what they stand for. */
INLINE TARGET void FN(put_block)(const uint8_t *packed, int32_t above, int32_t below, float *out, const int how) {
    for (int half = 0; half < 2; half++) {
        uint32_t word;
        memcpy(&word, packed + 4 * half, 4);
        float *to = out + 32 * half;
        for (int i = 0; i < 32; i++)
            to[i] = FN(put)(to[i], FN(of_bits)(above ^ ((above ^ below) & -(int32_t)(word >> i & 1))), how);
    }
}

TARGET void FN(split_sum_of_signs)(const float *base, const uint8_t *const *packed, int64_t ranks, const float *scales,
                                   int64_t tensors, const int64_t *place, const int64_t *lengths, int64_t n, float *v,
                                   uint8_t *signs, float *above, float *below, float *minuses) {
    int streams = FN(streams)(v, n);
    for (int64_t b = 0; b < n / BLOCK; b++, v += BLOCK, base += BLOCK) {
        float sums[BLOCK];
        memcpy(sums, base, BLOCK * sizeof(float));
        for (int64_t rank = 0; rank < ranks; rank++) {
            float scale = scales[rank * tensors + place[b]];
            FN(put_block)(packed[rank] + b * (BLOCK / 8), FN(bits_of)(scale), FN(bits_of)(-scale), sums, 1);
        }
        if (lengths[b] < BLOCK) memset(sums + lengths[b], 0, (BLOCK - lengths[b]) * sizeof(float));
        FN(write_block)(v, sums, streams);
        FN(split_block)(sums, signs + b * (BLOCK / 8), above + b, below + b, minuses + b);
    }
    FENCE;
}

INLINE TARGET void FN(put_signs_how)(const uint8_t *packed, const float *above, const float *below,
                                     const int64_t *place, int64_t start, int64_t stop, float *out, const int how,
                                     const mixture *of) {
    int streams = how == 0 && FN(streams)(out + start, stop - start);
    int64_t row = 0;
    for (int64_t b = start / BLOCK; b < stop / BLOCK; b++) {
        int64_t at = b * BLOCK;
        int32_t plus = FN(bits_of)(above[place[b]]), minus = FN(bits_of)(-below[place[b]]);
        float values[BLOCK], *to = streams ? values : out + at;
        FN(put_block)(packed + b * (BLOCK / 8), plus, minus, to, how);
        FN(mix_part)(of, &row, to, at, at + BLOCK);
        if (streams) FN(write_block)(out + at, values, 1);
    }
    if (streams) FENCE;
}

/* From start to stop, whole blocks; what is there then may be mixed. */
TARGET void FN(put_signs)(const uint8_t *packed, const float *above, const float *below, const int64_t *place,
                          int64_t start, int64_t stop, float *out, int how, const int64_t *table, int64_t rows,
                          float keep, float add) {
    mixture of = {table, rows, keep, add};
#define CALL(how) FN(put_signs_how)(packed, above, below, place, start, stop, out, how, &of);
    EVERY_HOW(CALL)
#undef CALL
}
