/* What loops on blocks of 64 values share. */

#define LARGEST_FLOAT 0x1.fffffep127f
#define LARGEST 0x1p100f
#define LARGEST_BITS 0x71800000 /* its bits */
#define INFINITE_BITS 0x7f800000

INLINE TARGET int32_t FN(bits_of)(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
INLINE TARGET float FN(of_bits)(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The bits of a value within +-2^100, NaN and Inf as zero. */
INLINE TARGET int32_t FN(finite)(float x) {
    int32_t bits = FN(bits_of)(x), size = bits & 0x7fffffff;
    int32_t within = (size > LARGEST_BITS ? LARGEST_BITS : size) | (bits & INT32_MIN);
    return size >= INFINITE_BITS ? 0 : within;
}

/* So that its sign bit tells what is below zero. */
INLINE TARGET int32_t FN(finite_without_minus_zero)(float x) {
    return FN(bits_of)(FN(of_bits)(FN(finite)(x)) + 0.0f);
}

/* The sum of 64 numbers; overwrites them. */
INLINE TARGET float FN(fold)(float *t) {
    eight eight_of, other_eight;
    four four_of, other_four;
    for (int i = 0; i < 32; i++) t[i] += t[i + 32];
    for (int i = 0; i < 16; i++) t[i] += t[i + 16];
    memcpy(&eight_of, t, 32), memcpy(&other_eight, t + 8, 32);
    eight_of += other_eight; /* compilers take loops as short as these apart */
    memcpy(&four_of, &eight_of, 16), memcpy(&other_four, (char *)&eight_of + 16, 16);
    four_of += other_four;
    return (four_of[0] + four_of[2]) + (four_of[1] + four_of[3]);
}

INLINE TARGET double FN(fold_doubles)(double *t) {
    four_doubles four_of, other_four;
    two_doubles two_of, other_two;
    for (int i = 0; i < 32; i++) t[i] += t[i + 32];
    for (int i = 0; i < 16; i++) t[i] += t[i + 16];
    for (int i = 0; i < 8; i++) t[i] += t[i + 8];
    memcpy(&four_of, t, 32), memcpy(&other_four, t + 4, 32);
    four_of += other_four;
    memcpy(&two_of, &four_of, 16), memcpy(&other_two, (char *)&four_of + 16, 16);
    two_of += other_two;
    return two_of[0] + two_of[1];
}

/* 64 bytes, each 0 or 1, as the bits of a word, and as eight bytes. */
INLINE TARGET uint64_t FN(word_of)(const uint8_t *flags) {
#ifdef FLAGS
    return FLAGS(flags);
#else
    uint64_t word = 0, eight;
    for (int i = 0; i < BLOCK / 8; i++) {
        memcpy(&eight, flags + 8 * i, 8);
        word |= (eight * 0x0102040810204080 >> 56) << 8 * i; /* their lowest bits side by side */
    }
    return word;
#endif
}

/* Which of 64 numbers are below zero. */
INLINE TARGET uint64_t FN(below_zero)(const float *v) {
#ifdef BELOW_ZERO
    uint64_t word = 0;
    for (int i = 0; i < BLOCK; i += STREAMED) word |= (uint64_t)(uint32_t)BELOW_ZERO(v + i) << i;
    return word;
#else
    uint8_t flags[BLOCK];
    for (int i = 0; i < BLOCK; i++) flags[i] = v[i] < 0;
    return FN(word_of)(flags);
#endif
}

INLINE TARGET void FN(pack_flags)(const uint8_t *flags, uint8_t *packed) {
    uint64_t word = FN(word_of)(flags);
    memcpy(packed, &word, sizeof word);
}

/* What decoded values do: 0 take the place of what is there, 1 are added to it, 2 are taken away from it. */
INLINE TARGET float FN(put)(float before, float value, const int how) {
    return how == 0 ? value : how == 1 ? before + value : before - value;
}

#define EVERY_HOW(call)                                                                                                \
    switch (how) { /* so that no loop asks */                                                                          \
        case 0: call(0) break;                                                                                         \
        case 1: call(1) break;                                                                                         \
        case 2: call(2) break;                                                                                         \
    }

/* The first block behind b of another tensor; there is one. */
INLINE TARGET int64_t FN(next_tensor)(const int64_t *place, int64_t b) {
    int64_t here = place[b];
    while (place[b] == here) b++;
    return b;
}

/* Of each row of numbers; of four side by side, as every sum waits for the one before it. */
TARGET void FN(tensor_sums)(const float *numbers, int64_t rows, const int64_t *place, int64_t blocks, int64_t tensors,
                            float *sums) {
    for (int64_t row = 0; row < rows; row += 4) {
        const float *of[4];
        float *to[4];
        for (int i = 0; i < 4; i++) {
            int64_t there = row + i < rows ? row + i : row; /* twice the same, if there are no four */
            of[i] = numbers + there * blocks, to[i] = sums + there * tensors;
        }
        for (int64_t b = 0; b < blocks;) {
            int64_t here = place[b];
            four sum = {0};
            while (b < blocks && place[b] == here) {
                int64_t stop = b + STRETCH < blocks ? b + STRETCH : blocks;
                four stretch = {0};
                if (place[stop - 1] != here) stop = FN(next_tensor)(place, b); /* so that no addition asks */
                for (; b < stop; b++) stretch += (four){of[0][b], of[1][b], of[2][b], of[3][b]};
                sum += stretch;
            }
            for (int i = 0; i < 4; i++) to[i][here] = sum[i];
        }
    }
}

/* The largest magnitude of each block, and the sum of its squares. */
TARGET void FN(block_norms)(const float *v, int64_t n, float *maxima, double *squares) {
    for (int64_t b = 0; b < n / BLOCK; b++, v += BLOCK) {
        int32_t top = 0;
        float sizes[BLOCK];
        double parts[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            int32_t size = FN(finite)(v[i]) & 0x7fffffff;
            top = size > top ? size : top;
            sizes[i] = FN(of_bits)(size);
        }
        for (int i = 0; i < BLOCK; i++) parts[i] = (double)sizes[i] * (double)sizes[i];
        maxima[b] = FN(of_bits)(top), squares[b] = FN(fold_doubles)(parts);
    }
}

TARGET void FN(tensor_norms)(const float *maxima, const double *squares, const int64_t *place, int64_t blocks,
                             float *most, double *sums) {
    for (int64_t b = 0; b < blocks;) {
        int64_t here = place[b];
        float top = 0;
        double sum = 0;
        while (b < blocks && place[b] == here) {
            int64_t stop = b + STRETCH < blocks ? b + STRETCH : blocks;
            double stretch = 0;
            if (place[stop - 1] != here) stop = FN(next_tensor)(place, b);
            for (; b < stop; b++) {
                top = maxima[b] > top ? maxima[b] : top;
                stretch += squares[b];
            }
            sum += stretch;
        }
        most[here] = top, sums[here] = sum;
    }
}
