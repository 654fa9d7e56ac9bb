/* Reading and writing float32 and bfloat16. */

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
