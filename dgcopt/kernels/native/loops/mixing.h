/* Weighted sums of two flat tensors. */

TARGET void FN(mix)(const float *x, float keep, const float *y, float add, int64_t n, float *out) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) out[i] = __builtin_fmaf(y[i], add, x[i] * keep);
}

TARGET void FN(unmix)(float *mixed, float keep, const float *y, float add, int64_t n) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) mixed[i] = __builtin_fmaf(y[i], -add, mixed[i]) / keep;
}
