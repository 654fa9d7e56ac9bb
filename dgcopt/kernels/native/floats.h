/* Reading, writing and comparing float32 and bfloat16, and combining values with a tensor. */

#define LARGEST_FLOAT 0x1.fffffep127f
#define LARGEST 0x1p100f
#define LARGEST_BITS 0x71800000 /* its bits */
#define INFINITE_BITS 0x7f800000

INLINE TARGET float FN(read_f32)(const float *p) { return *p; }
INLINE TARGET void FN(write_f32)(float *p, float x) { *p = x; }
INLINE TARGET int32_t FN(magnitude_f32)(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}

INLINE TARGET float FN(read_bf16)(const uint16_t *p) {
    uint32_t bits = (uint32_t)*p << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE TARGET uint16_t FN(rounded)(float x) { /* to nearest, ties to even; NaN to the one that torch writes */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
}
INLINE TARGET void FN(write_bf16)(uint16_t *p, float x) { *p = FN(rounded)(x); }
INLINE TARGET int32_t FN(magnitude_bf16)(float x) { return FN(rounded)(x) & 0x7fff; }

/* Ask for a block of elements of that size. */
INLINE TARGET void FN(soon)(const void *block, int size) {
    for (int line = 0; line < BLOCK * size; line += 64) __builtin_prefetch((const char *)block + line);
}

/* Whether n numbers are too many to be in a cache when they are read again; to make room there for them takes longer. */
INLINE TARGET int FN(streams)(const float *to, int64_t n) { return n >= LARGE && (uintptr_t)to % 64 == 0; }

INLINE TARGET void FN(stream)(void *to, const void *block, int64_t size) {
    for (int64_t i = 0; i < size / (int64_t)sizeof(float); i += STREAMED) STREAM((float *)to + i, (const float *)block + i);
}

INLINE TARGET void FN(write_block)(float *to, const float *block, int streams) {
    if (streams)
        FN(stream)(to, block, BLOCK * sizeof(float));
    else
        memcpy(to, block, BLOCK * sizeof(float));
}

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
