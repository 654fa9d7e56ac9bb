/* A gradient and what has not been sent, added up, and a number of each block of the sum: the specification is in
   ../../torch/residual.py. n is a multiple of 64. */

TARGET void FN(add_and_maxima)(const float *g, const float *e, float decay, int64_t n, float *out, float *maxima) {
    for (int64_t start = 0; start < n; start += BLOCK) {
        int32_t top = 0;
        ELEMENTWISE for (int64_t i = start; i < start + BLOCK; i++) {
            float sum = __builtin_fmaf(e[i], decay, g[i]);
            int32_t size = FN(bits_of)(sum) & INT32_MAX;
            out[i] = sum;
            top = size > top ? size : top;
        }
        maxima[start / BLOCK] = FN(of_bits)(top);
    }
}

TARGET void FN(add_and_norms)(const float *g, const float *e, float decay, int64_t n, float *out, float *norms) {
    for (int64_t start = 0; start < n; start += BLOCK) {
        float sizes[BLOCK];
        ELEMENTWISE for (int i = 0; i < BLOCK; i++) {
            float sum = __builtin_fmaf(e[start + i], decay, g[start + i]);
            out[start + i] = sum;
            sizes[i] = FN(of_bits)(FN(bits_of)(sum) & INT32_MAX);
        }
        norms[start / BLOCK] = FN(fold)(sizes);
    }
}
