/* Values in few bits each, with numbers per block of them. Block b ends at cuts[b + 1]; without cuts, each has `block`
   values, and the last one may be shorter. */
INLINE TARGET int64_t FN(end_of_block)(const int64_t *cuts, int64_t b, int64_t start, int64_t block, int64_t n) {
    return cuts ? cuts[b + 1] : start + block < n ? start + block : n;
}

TARGET void FN(round_steps)(const float *v, int64_t n, int64_t block, const int64_t *cuts, int most, uint16_t *steps,
                            int8_t *multiples) {
    for (int64_t start = 0, stop, b = 0; start < n; start = stop, b++) {
        stop = FN(end_of_block)(cuts, b, start, block, n);
        int32_t top = 0;
        for (int64_t i = start; i < stop; i++) {
            int32_t size = FN(finite)(v[i]) & 0x7fffffff;
            top = size > top ? size : top;
        }
        FN(write_bf16)(steps + b, FN(of_bits)(top) / (float)most);
        float step = FN(read_bf16)(steps + b), high = (float)most;
        for (int64_t i = start; i < stop; i++) {
            float multiple = FN(of_bits)(FN(finite)(v[i])) / step;
            multiple = __builtin_rintf(multiple != multiple ? 0.0f : multiple);
            multiple = multiple > high ? high : multiple < -high ? -high : multiple;
            multiples[i] = (int8_t)(int32_t)multiple;
        }
    }
}

TARGET void FN(of_steps)(const int8_t *multiples, const float *steps, int64_t n, int64_t block, const int64_t *cuts,
                         float *out) {
    for (int64_t start = 0, stop, b = 0; start < n; start = stop, b++) {
        stop = FN(end_of_block)(cuts, b, start, block, n);
        float step = steps[b];
        for (int64_t i = start; i < stop; i++) out[i] = (float)multiples[i] * step;
    }
}

TARGET void FN(nearest_levels)(const float *v, const float *levels, int64_t n, int64_t block, const int64_t *cuts,
                               int count, uint8_t *fields) {
    for (int64_t start = 0, stop, b = 0; start < n; start = stop, b++, levels += count) {
        stop = FN(end_of_block)(cuts, b, start, block, n);
        for (int64_t i = start; i < stop; i++) {
            int32_t bits = FN(finite)(v[i]);
            fields[i] = (uint8_t)(bits >> 31 & ((bits & 0x7fffffff) != 0));
        }
        for (int j = 0; j + 1 < count; j++) {
            float between = (levels[j + 1] + levels[j]) / 2;
            for (int64_t i = start; i < stop; i++)
                fields[i] += (uint8_t)((FN(of_bits)(FN(finite)(v[i]) & 0x7fffffff) > between) << 1);
        }
    }
}

TARGET void FN(of_levels)(const uint8_t *fields, const float *levels, int64_t n, int64_t block, const int64_t *cuts,
                          int count, float *out) {
    float signed_levels[256];
    for (int64_t start = 0, stop, b = 0; start < n; start = stop, b++, levels += count) {
        stop = FN(end_of_block)(cuts, b, start, block, n);
        for (int j = 0; j < count; j++) signed_levels[2 * j] = levels[j], signed_levels[2 * j + 1] = -levels[j];
        for (int64_t i = start; i < stop; i++) out[i] = signed_levels[fields[i] & (2 * count - 1)];
    }
}

/* The sum of those of `block` magnitudes that are above `least`, and how many they are. */
INLINE TARGET float FN(sum_above)(const int32_t *sizes, int64_t block, float least, int32_t *count) {
    float parts[1024];
    int32_t low = FN(bits_of)(least), found = 0; /* as integers, magnitudes have the order of floats */
    for (int64_t i = 0; i < block; i++) {
        int32_t above = sizes[i] > low ? -1 : 0;
        parts[i] = FN(of_bits)(sizes[i] & above);
        found -= above;
    }
    for (int64_t half = block / 2; half; half /= 2)
        ELEMENTWISE for (int64_t i = 0; i < half; i++) parts[i] += parts[i + half];
    *count = found;
    return parts[0];
}

/* `block` is a power of two up to 1024. */
TARGET void FN(means)(const float *v, int64_t n, int64_t block, const int64_t *cuts, int count, float *low,
                      float *high) {
    for (int64_t start = 0, stop, b = 0; start < n; start = stop, b++) {
        stop = FN(end_of_block)(cuts, b, start, block, n);
        int64_t there = stop - start;
        int32_t sizes[1024], smallest = INT32_MAX, largest = 0, above;
        for (int64_t i = 0; i < there; i++) {
            int32_t size = sizes[i] = FN(finite)(v[start + i]) & 0x7fffffff;
            smallest = size < smallest ? size : smallest;
            largest = size > largest ? size : largest;
        }
        for (int64_t i = there; i < block; i++) sizes[i] = 0; /* adds nothing, and is above nothing */
        float total = FN(sum_above)(sizes, block, 0, &above), mean = total / (float)there;
        float below = FN(of_bits)(smallest), top = FN(of_bits)(largest);
        if (count == 1) below = top = mean;
        float split = __builtin_sqrtf(below > top / 256 ? below : top / 256) * __builtin_sqrtf(top);
        for (int round = 0; count > 1 && round < 3; round++) {
            float part = FN(sum_above)(sizes, block, split, &above);
            top = above ? part / (float)above : mean;
            below = above < there ? (total - part) / (float)(there - above) : top;
            split = (below + top) / 2;
        }
        low[b] = below, high[b] = top;
    }
}
