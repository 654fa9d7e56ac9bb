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
    for (int i = 0; i < 32; i++) t[i] += t[i + 32];
    for (int i = 0; i < 16; i++) t[i] += t[i + 16];
    for (int i = 0; i < 8; i++) t[i] += t[i + 8];
    for (int i = 0; i < 4; i++) t[i] += t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* Eight bytes, each 0 or 1, as the bits of one. */
INLINE TARGET uint8_t FN(byte_of)(const uint8_t *flags) {
    uint64_t word;
    memcpy(&word, flags, 8);
    return (uint8_t)(word * 0x0102040810204080 >> 56);
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
