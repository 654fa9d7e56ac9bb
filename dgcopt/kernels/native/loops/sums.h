/* What loops on blocks of 64 values share. */

#define LARGEST_BITS 0x71800000 /* 2^100 */
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

/* 64 bytes, each 0 or 1, as the bits of eight. */
INLINE TARGET void FN(pack_flags)(const uint8_t *flags, uint8_t *packed) {
    uint64_t words[BLOCK / 8];
    memcpy(words, flags, BLOCK);
    for (int i = 0; i < BLOCK / 8; i++) {
        uint64_t word = words[i];
        word |= word >> 7, word |= word >> 14, word |= word >> 28; /* the bits above are those of other bytes */
        packed[i] = (uint8_t)word;
    }
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

TARGET void FN(tensor_sums)(const float *numbers, const int64_t *place, int64_t blocks, float *sums) {
    for (int64_t b = 0; b < blocks;) {
        int64_t here = place[b];
        float sum = sums[here];
        for (; b < blocks && place[b] == here; b++) sum += numbers[b];
        sums[here] = sum;
    }
}
