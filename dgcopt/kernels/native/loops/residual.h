/* A gradient and what has not been sent, added up, and a number of each block of the sum: the specification is in
   ../../torch/residual.py. n is a multiple of 64. */

TARGET void FN(add_and_maxima)(const float *g, const float *e, float decay, int64_t n, float *out, float *maxima) {
    int streams = FN(streams)(out, n);
    for (int64_t start = 0; start < n; start += BLOCK) {
        int32_t top = 0;
        float sums[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            sums[i] = __builtin_fmaf(e[start + i], decay, g[start + i]);
            int32_t size = FN(bits_of)(sums[i]) & INT32_MAX;
            top = size > top ? size : top;
        }
        FN(write_block)(out + start, sums, streams);
        maxima[start / BLOCK] = FN(of_bits)(top);
    }
    FENCE;
}

TARGET void FN(add_and_norms)(const float *g, const float *e, float decay, int64_t n, float *out, float *norms) {
    int streams = FN(streams)(out, n);
    for (int64_t start = 0; start < n; start += BLOCK) {
        float sums[BLOCK], sizes[BLOCK];
        for (int i = 0; i < BLOCK; i++) {
            sums[i] = __builtin_fmaf(e[start + i], decay, g[start + i]);
            sizes[i] = FN(of_bits)(FN(bits_of)(sums[i]) & INT32_MAX);
        }
        FN(write_block)(out + start, sums, streams);
        norms[start / BLOCK] = FN(fold)(sizes);
    }
    FENCE;
}
