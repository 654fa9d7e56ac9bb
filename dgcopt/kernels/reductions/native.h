/* Maxima, norms and sums of blocks of 64 values and of tensors. Lengths are multiples of 64. */

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

#define dtype f32
#include "per_dtype.h"
#undef dtype
#define dtype bf16
#include "per_dtype.h"
#undef dtype

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

/* The first block behind b of another tensor; there is one. */
INLINE TARGET int64_t FN(next_tensor)(const int64_t *place, int64_t b) {
    int64_t here = place[b];
    while (place[b] == here) b++;
    return b;
}

/* Of each row of numbers; of four side by side, as every sum waits for the one before it. */
TARGET void FN(tensor_sums)(const float *numbers, int64_t rows, const int64_t *place, int64_t blocks, int64_t tensors,
                            double *sums) {
    for (int64_t row = 0; row < rows; row += 4) {
        const float *of[4];
        double *to[4];
        for (int i = 0; i < 4; i++) {
            int64_t there = row + i < rows ? row + i : row; /* twice the same, if there are no four */
            of[i] = numbers + there * blocks, to[i] = sums + there * tensors;
        }
        for (int64_t b = 0; b < blocks;) {
            int64_t here = place[b];
            double sum[4] = {0};
            while (b < blocks && place[b] == here) {
                int64_t stop = b + STRETCH < blocks ? b + STRETCH : blocks;
                four stretch = {0};
                if (place[stop - 1] != here) stop = FN(next_tensor)(place, b); /* so that no addition asks */
                for (; b < stop; b++) stretch += (four){of[0][b], of[1][b], of[2][b], of[3][b]};
                for (int i = 0; i < 4; i++) sum[i] += (double)stretch[i];
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
