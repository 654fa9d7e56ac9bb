/* 256 levels between the smallest and the largest value of a row. */

/* Floats as integers of the same order, and back. */
INLINE TARGET int32_t FN(ordered)(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

#define STRETCH(bits)                                                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        int32_t key = FN(ordered)(bits);                                                                               \
        least = key < least ? key : least;                                                                             \
        most = key > most ? key : most;                                                                                \
    }

/* The smallest and the largest of values so far, as such integers. */
INLINE TARGET void FN(stretch)(const float *v, int64_t n, int32_t *low, int32_t *high) {
    int32_t least = *low, most = *high;
    STRETCH(FN(bits_of)(v[i]))
    if (most > LARGEST_BITS || least < FN(ordered)(INT32_MIN | LARGEST_BITS)) {
        least = *low, most = *high;
        STRETCH(FN(finite)(v[i])) /* costs twice as much */
    }
    *low = least, *high = most;
}

#undef STRETCH

/* As floats, 0 for -0. */
INLINE TARGET void FN(write_ends)(int32_t low, int32_t high, float *ends) {
    ends[0] = FN(of_bits)(FN(ordered)(low)) + 0.0f;
    ends[1] = FN(of_bits)(FN(ordered)(high)) + 0.0f;
}

/* Of what lies from start to stop in each row; rows may be mixed before. */
TARGET void FN(minmax_ends)(float *v, int64_t rows, int64_t stride, int64_t start, int64_t stop, float *ends,
                            const int64_t *table, int64_t parts, float keep, float add) {
    mixture of = {table, parts, keep, add};
    int64_t part = 0;
    for (int64_t row = 0; row < rows; row++) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int64_t i = row * stride + start, end = row * stride + stop, next; i < end; i = next) {
            next = end - i < PIECE ? end : i + PIECE;
            FN(mix_part)(&of, &part, v + i, i, next);
            FN(stretch)(v + i, next - i, &low, &high);
        }
        FN(write_ends)(low, high, ends + 2 * row);
    }
}

/* The largest value times it is finite. */
INLINE TARGET float FN(minmax_scale)(const float *ends) {
    float scale = 255.0f / (ends[1] - ends[0] + 1e-7f), low = __builtin_fabsf(ends[0]), high = __builtin_fabsf(ends[1]);
    float most = 0x1p127f / (low > high ? low : high);
    return scale < most ? scale : most;
}

/* The codes of values whose levels are whole numbers that an int32 holds, by operations that take 16 of them at once;
   returns the largest magnitude there is, as an integer, which tells whether they are. */
INLINE TARGET int32_t FN(codes_of_small)(const float *v, int64_t n, float scale, int32_t upper, uint8_t *codes) {
    int32_t most = 0, lower = upper - 255;
    for (int64_t i = 0; i < n; i++) {
        int32_t size = FN(bits_of)(v[i]) & 0x7fffffff, level = WHOLE(v[i] * scale);
        most = size > most ? size : most;
        level = level < upper ? level : upper;
        codes[i] = (uint8_t)((level > lower ? level : lower) - lower);
    }
    return most;
}

/* Of whatever there is; costs three times as much. */
INLINE TARGET void FN(codes_of_any)(const float *v, int64_t n, float scale, float upper, uint8_t *codes) {
    float lower = upper - 255.0f;
    for (int64_t i = 0; i < n; i++) {
        float level = __builtin_rintf(FN(of_bits)(FN(finite)(v[i])) * scale);
        level = (level < upper ? level : upper) - lower;
        int32_t code = (int32_t)(level > 0.0f ? level : 0.0f);
        codes[i] = (uint8_t)(code < 255 ? code : 255); /* of floats, both bounds would not be one operation each */
    }
}

INLINE TARGET void FN(codes_of_row)(const float *v, int64_t n, const float *ends, uint8_t *codes) {
    float scale = FN(minmax_scale)(ends), upper = __builtin_rintf(ends[1] * scale);
    int small = __builtin_fabsf(upper) < 0x1p22f;
    for (int64_t left; n > 0; n -= PIECE, v += PIECE, codes += PIECE) {
        left = n < PIECE ? n : PIECE;
        int32_t most = small ? FN(codes_of_small)(v, left, scale, (int32_t)upper, codes) : INT32_MAX;
        if (most > LARGEST_BITS || FN(of_bits)(most) * __builtin_fabsf(scale) > 0x1p30f)
            FN(codes_of_any)(v, left, scale, upper, codes);
    }
}

TARGET void FN(minmax_codes)(const float *v, int64_t rows, int64_t stride, int64_t n, const float *ends,
                             uint8_t *codes, int64_t codes_stride) {
    for (; rows > 0; rows--, v += stride, ends += 2, codes += codes_stride) FN(codes_of_row)(v, n, ends, codes);
}

/* level / scale in two operations, by 1 / scale as the sum of two floats. For few scales, such as 128 - 2^-17, it is a unit
   off (Brisebarre, Muller & Raina, "Accelerating correctly rounded floating-point division when the divisor is known in
   advance", IEEE Transactions on Computers 53(8), 2004). */
INLINE TARGET float FN(quotient)(float level, float inverse, float rest) {
    return __builtin_fmaf(level, inverse, level * rest);
}

INLINE TARGET float FN(rest_of)(float scale, float inverse) { return __builtin_fmaf(-scale, inverse, 1.0f) * inverse; }

/* Whether it is what division makes of every level there is in these rows. */
INLINE TARGET int FN(quotients_are_exact)(const float *ends, int64_t rows) {
    int32_t differ = 0;
    for (; rows > 0; rows--, ends += 2) {
        float scale = FN(minmax_scale)(ends), lower = __builtin_rintf(ends[1] * scale) - 255.0f, inverse = 1.0f / scale;
        float rest = FN(rest_of)(scale, inverse);
        for (int code = 0; code < 256; code++) {
            float level = (float)code + lower;
            differ |= FN(bits_of)(FN(quotient)(level, inverse, rest)) ^ FN(bits_of)(level / scale);
        }
    }
    return differ == 0;
}

INLINE TARGET void FN(put_minmax_how)(const uint8_t *codes, int64_t n, const float *ends, int exact, float *out,
                                      const int how) {
    float scale = FN(minmax_scale)(ends), lower = __builtin_rintf(ends[1] * scale) - 255.0f, inverse = 1.0f / scale;
    float rest = FN(rest_of)(scale, inverse);
    if (exact)
        for (int64_t i = 0; i < n; i++)
            out[i] = FN(put)(out[i], FN(quotient)((float)codes[i] + lower, inverse, rest), how);
    else
        for (int64_t i = 0; i < n; i++) out[i] = FN(put)(out[i], ((float)codes[i] + lower) / scale, how);
}

/* From start to stop; what is there then may be mixed. */
TARGET void FN(put_minmax)(const uint8_t *codes, int64_t start, int64_t stop, const float *ends, float *out, int how,
                           const int64_t *table, int64_t parts, float keep, float add) {
    int streams = how == 0 && FN(streams)(out + start, stop - start), exact = FN(quotients_are_exact)(ends, 1);
    mixture of = {table, parts, keep, add};
    int64_t part = 0;
    for (int64_t next; start < stop; start = next) {
        float values[PIECE], *to = streams && stop - start >= PIECE ? values : out + start;
        next = stop - start < PIECE ? stop : start + PIECE;
#define CALL(how) FN(put_minmax_how)(codes + start, next - start, ends, exact, to, how);
        EVERY_HOW(CALL)
#undef CALL
        FN(mix_part)(&of, &part, to, start, next);
        if (to == values)
            for (int i = 0; i < PIECE; i += BLOCK) FN(write_block)(out + start + i, values + i, 1);
    }
    if (streams) FENCE;
}

/* PIECE elements of a mean that is not kept: it is found twice, once for its ends and once for its codes. */
INLINE TARGET void FN(mean_of_rows)(const uint8_t *codes, int64_t ranks, int64_t stride, const float *ends,
                                    int exact, float divisor, int64_t n, float *mean) {
    FN(put_minmax_how)(codes, n, ends, exact, mean, 0);
    for (int64_t rank = 1; rank < ranks; rank++)
        FN(put_minmax_how)(codes + rank * stride, n, ends + 2 * rank, exact, mean, 1);
    if (divisor != 1)
        for (int64_t i = 0; i < n; i++) mean[i] /= divisor;
}

TARGET void FN(minmax_ends_of_mean)(const uint8_t *codes, int64_t ranks, int64_t stride, const float *ends,
                                    float divisor, int64_t n, float *of_mean) {
    int exact = FN(quotients_are_exact)(ends, ranks);
    int32_t low = INT32_MAX, high = INT32_MIN;
    float mean[PIECE];
    for (int64_t left; n > 0; n -= PIECE, codes += PIECE) {
        left = n < PIECE ? n : PIECE;
        FN(mean_of_rows)(codes, ranks, stride, ends, exact, divisor, left, mean);
        FN(stretch)(mean, left, &low, &high);
    }
    FN(write_ends)(low, high, of_mean);
}

TARGET void FN(minmax_codes_of_mean)(const uint8_t *codes, int64_t ranks, int64_t stride, const float *ends,
                                     float divisor, int64_t n, const float *of_mean, uint8_t *out) {
    int exact = FN(quotients_are_exact)(ends, ranks);
    float mean[PIECE];
    for (int64_t left; n > 0; n -= PIECE, codes += PIECE, out += PIECE) {
        left = n < PIECE ? n : PIECE;
        FN(mean_of_rows)(codes, ranks, stride, ends, exact, divisor, left, mean);
        FN(codes_of_row)(mean, left, of_mean, out);
    }
}
