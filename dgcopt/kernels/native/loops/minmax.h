/* 256 levels between the smallest and the largest value of a chunk. */

/* Floats as integers of the same order, and back. */
INLINE TARGET int32_t FN(ordered)(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

/* ends[0], ends[1]: the smallest and the largest of n > 0 values, 0 for -0. */
TARGET void FN(minmax_ends)(const float *v, int64_t n, float *ends) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        int32_t key = FN(ordered)(FN(finite)(v[i]));
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    ends[0] = FN(of_bits)(FN(ordered)(low)) + 0.0f;
    ends[1] = FN(of_bits)(FN(ordered)(high)) + 0.0f;
}

INLINE TARGET float FN(minmax_scale)(const float *ends) { return 255.0f / (ends[1] - ends[0] + 1e-7f); }

TARGET void FN(minmax_codes)(const float *v, int64_t n, const float *ends, uint8_t *codes) {
    float scale = FN(minmax_scale)(ends), upper = __builtin_rintf(ends[1] * scale), lower = upper - 255.0f;
    for (int64_t i = 0; i < n; i++) {
        float level = __builtin_rintf(FN(of_bits)(FN(finite)(v[i])) * scale);
        level = (level < upper ? level : upper) - lower;
        level = level < 0.0f ? 0.0f : level > 255.0f ? 255.0f : level;
        codes[i] = (uint8_t)(int32_t)level;
    }
}

INLINE TARGET void FN(put_minmax_how)(const uint8_t *codes, int64_t n, const float *ends, float *out, const int how) {
    float scale = FN(minmax_scale)(ends), upper = __builtin_rintf(ends[1] * scale), lower = upper - 255.0f;
    for (int64_t i = 0; i < n; i++) out[i] = FN(put)(out[i], ((float)codes[i] + lower) / scale, how);
}

TARGET void FN(put_minmax)(const uint8_t *codes, int64_t n, const float *ends, float *out, int how) {
#define CALL(how) FN(put_minmax_how)(codes, n, ends, out, how);
    EVERY_HOW(CALL)
#undef CALL
}
