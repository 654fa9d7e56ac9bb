/* The discrete cosine transform of tiles of a matrix, and its inverse, by Lee's recursion: see torch.py, whose
   order of operations this is, and which explains the numbers `w`. 16 neighbours are transformed side by side. */

#ifndef LANES
#define LANES 16
#endif
typedef float FN(lanes) __attribute__((vector_size(4 * LANES)));
#define V FN(lanes)

INLINE TARGET void FN(product)(V *x, V *spare, int n, const float *matrix, int down, int across) {
    for (int k = 0; k < n; k++) {
        spare[k] = x[0] * matrix[k * down];
        for (int j = 1; j < n; j++) spare[k] += x[j] * matrix[k * down + j * across];
    }
    memcpy(x, spare, n * sizeof *x);
}

/* Few numbers are transformed in registers. */
#define ANALYSE(n, half, inner)                                                                                        \
    INLINE TARGET void FN(analyse_##n)(V *x, const float *w) {                                                         \
        V even[half], odd[half];                                                                                       \
        for (int i = 0; i < half; i++) {                                                                               \
            even[i] = x[i] + x[n - 1 - i];                                                                             \
            odd[i] = (x[i] - x[n - 1 - i]) * w[i];                                                                     \
        }                                                                                                              \
        inner(even, w + half);                                                                                         \
        inner(odd, w + half);                                                                                          \
        for (int k = 0; k < half; k++) {                                                                               \
            x[2 * k] = even[k];                                                                                        \
            x[2 * k + 1] = k + 1 < half ? odd[k] + odd[k + 1] : odd[k];                                                \
        }                                                                                                              \
    }
#define COMPOSE(n, half, inner)                                                                                        \
    INLINE TARGET void FN(compose_##n)(V *x, const float *w) {                                                         \
        V even[half], odd[half];                                                                                       \
        for (int k = 0; k < half; k++) {                                                                               \
            even[k] = x[2 * k];                                                                                        \
            odd[k] = k ? x[2 * k + 1] + x[2 * k - 1] : x[1];                                                           \
        }                                                                                                              \
        inner(even, w + half);                                                                                         \
        inner(odd, w + half);                                                                                          \
        for (int i = 0; i < half; i++) {                                                                               \
            V part = odd[i] * w[i];                                                                                    \
            x[i] = even[i] + part;                                                                                     \
            x[n - 1 - i] = even[i] - part;                                                                             \
        }                                                                                                              \
    }
#define AS_IT_IS(x, w) (void)(w)

ANALYSE(2, 1, AS_IT_IS)
ANALYSE(4, 2, FN(analyse_2))
ANALYSE(8, 4, FN(analyse_4))
ANALYSE(16, 8, FN(analyse_8))
COMPOSE(2, 1, AS_IT_IS)
COMPOSE(4, 2, FN(compose_2))
COMPOSE(8, 4, FN(compose_4))
COMPOSE(16, 8, FN(compose_8))

/* A whole side: halves and quarters at once, so that all is stored twice instead of five times. */
static TARGET void FN(analyse_64)(V *x, V *spare, const float *w) {
    V *a = spare, *b = a + 16, *c = b + 16, *d = c + 16;
    for (int i = 0; i < 16; i++) {
        V even = x[i] + x[63 - i], odd = (x[i] - x[63 - i]) * w[i];
        V other_even = x[31 - i] + x[32 + i], other_odd = (x[31 - i] - x[32 + i]) * w[31 - i];
        a[i] = even + other_even, b[i] = (even - other_even) * w[32 + i];
        c[i] = odd + other_odd, d[i] = (odd - other_odd) * w[32 + i];
    }
    for (int part = 0; part < 64; part += 16) FN(analyse_16)(spare + part, w + 48);
    for (int k = 0; k < 15; k++) {
        V odd = d[k] + d[k + 1];
        x[4 * k] = a[k], x[4 * k + 1] = c[k] + odd, x[4 * k + 2] = b[k] + b[k + 1], x[4 * k + 3] = odd + c[k + 1];
    }
    x[60] = a[15], x[61] = c[15] + d[15], x[62] = b[15], x[63] = d[15];
}

static TARGET void FN(compose_64)(V *x, V *spare, const float *w) {
    V *a = spare, *b = a + 16, *c = b + 16, *d = c + 16;
    a[0] = x[0], b[0] = x[2], c[0] = x[1], d[0] = x[3] + x[1];
    for (int k = 1; k < 16; k++) {
        V odd = x[4 * k + 1] + x[4 * k - 1];
        a[k] = x[4 * k], b[k] = x[4 * k + 2] + x[4 * k - 2];
        c[k] = odd, d[k] = (x[4 * k + 3] + x[4 * k + 1]) + (x[4 * k - 1] + x[4 * k - 3]);
    }
    for (int part = 0; part < 64; part += 16) FN(compose_16)(spare + part, w + 48);
    for (int i = 0; i < 16; i++) {
        V right = b[i] * w[32 + i], other_right = d[i] * w[32 + i];
        V odd = (c[i] + other_right) * w[i], other_odd = (c[i] - other_right) * w[31 - i];
        V even = a[i] + right, other_even = a[i] - right;
        x[i] = even + odd, x[63 - i] = even - odd;
        x[31 - i] = other_even + other_odd, x[32 + i] = other_even - other_odd;
    }
}

/* x[k] <- the sum over j of x[j] cos(pi k (2 j + 1) / 2n); overwrites `spare`. */
static TARGET void FN(analyse)(V *x, V *spare, int n, const float *w) {
    int half = n / 2;
    if (n == 1) return;
    if (n == 16 || n == 64) {
        n == 16 ? FN(analyse_16)(x, w) : FN(analyse_64)(x, spare, w);
        return;
    }
    if (n % 2) {
        FN(product)(x, spare, n, w, n, 1);
        return;
    }
    for (int i = 0; i < half; i++) {
        V first = x[i], last = x[n - 1 - i];
        spare[i] = first + last;
        spare[half + i] = (first - last) * w[i];
    }
    FN(analyse)(spare, x, half, w + half);
    FN(analyse)(spare + half, x + half, half, w + half);
    for (int k = 0; k < half; k++) {
        x[2 * k] = spare[k];
        x[2 * k + 1] = k + 1 < half ? spare[half + k] + spare[half + k + 1] : spare[half + k];
    }
}

/* x[j] <- the sum over k of x[k] cos(pi k (2 j + 1) / 2n); overwrites `spare`. */
static TARGET void FN(compose)(V *x, V *spare, int n, const float *w) {
    int half = n / 2;
    if (n == 1) return;
    if (n == 16 || n == 64) {
        n == 16 ? FN(compose_16)(x, w) : FN(compose_64)(x, spare, w);
        return;
    }
    if (n % 2) {
        FN(product)(x, spare, n, w, 1, n);
        return;
    }
    for (int k = 0; k < half; k++) {
        spare[k] = x[2 * k];
        spare[half + k] = k ? x[2 * k + 1] + x[2 * k - 1] : x[1];
    }
    FN(compose)(spare, x, half, w + half);
    FN(compose)(spare + half, x + half, half, w + half);
    for (int i = 0; i < half; i++) {
        V even = spare[i], odd = spare[half + i] * w[i];
        x[i] = even + odd;
        x[n - 1 - i] = even - odd;
    }
}

/* Up to 16 numbers of each of `count` rows, which are `stride` apart, and zeros behind them. What is read next lies
   `next` from there. */
INLINE TARGET void FN(read_rows)(V *x, const float *from, int64_t stride, int64_t count, int64_t width, int64_t next) {
    if (width >= LANES) {
        for (int64_t i = 0; i < count; i++, from += stride) {
            __builtin_prefetch(from + next);
            memcpy(x + i, from, sizeof *x);
        }
        return;
    }
    memset(x, 0, count * sizeof *x);
    for (int64_t i = 0; i < count; i++) memcpy(x + i, from + i * stride, width * sizeof(float));
}

/* As `put`; 3 for the sign to take the place of what is there. */
INLINE TARGET float FN(put_or_sign)(float before, float value, const int how) {
    return how == 3 ? (float)((value > 0) - (value < 0)) : FN(put)(before, value, how);
}

/* And back. What takes the place of what is there is written past the caches: a matrix
   is large as a rule, and is not read again soon. */
INLINE TARGET void FN(write_rows)(const V *x, float *to, int64_t stride, int64_t count, int64_t width, int64_t next,
                                  const int how) {
    const int sets = how == 0 || how == 3;
    const int streams = sets && next && width >= LANES && (uintptr_t)to % 64 == 0 && stride % LANES == 0;
    for (int64_t i = 0; i < count; i++, x++, to += stride) {
        const float *values = (const float *)x;
        float made[LANES];
        if (next && !streams) __builtin_prefetch(to + next, 1);
        if (width >= LANES) {
            for (int c = 0; c < LANES; c++) made[c] = FN(put_or_sign)(sets ? 0 : to[c], values[c], how);
            if (streams)
                for (int c = 0; c < LANES; c += STREAMED) STREAM(to + c, made + c);
            else
                memcpy(to, made, sizeof made);
        } else {
            for (int c = 0; c < width; c++) to[c] = FN(put_or_sign)(to[c], values[c], how);
        }
    }
}

/* The first `count` numbers of up to 16 rows of a tile, side by side; zeros for the others. */
INLINE TARGET void FN(read_columns)(V *x, const float *from, int64_t count, int64_t rows) {
    if (rows >= LANES) {
        for (int64_t j = 0; j < count; j++, from++)
            for (int c = 0; c < LANES; c++) ((float *)(x + j))[c] = from[c * BLOCK];
        return;
    }
    memset(x, 0, count * sizeof *x);
    for (int64_t j = 0; j < count; j++)
        for (int64_t c = 0; c < rows; c++) ((float *)(x + j))[c] = from[c * BLOCK + j];
}

/* One tile of a matrix whose rows are `columns` apart: first along its columns, then along its rows. */
static TARGET void FN(dct_tile)(const float *from, float *out, int64_t columns, int64_t height, int64_t width,
                                const float *of_height, const float *of_width) {
    V x[BLOCK], spare[BLOCK];
    float tile[BLOCK * BLOCK];
    for (int64_t j = 0; j < width; j += LANES) {
        FN(read_rows)(x, from + j, columns, height, width - j, width);
        FN(analyse)(x, spare, (int)height, of_height + height);
        for (int64_t k = 0; k < height; k++) x[k] *= of_height[k];
        FN(write_rows)(x, tile + j, BLOCK, height, LANES, 0, 0);
    }
    for (int64_t k = 0; k < height; k += LANES) {
        FN(read_columns)(x, tile + k * BLOCK, width, height - k);
        FN(analyse)(x, spare, (int)width, of_width + width);
        for (int64_t l = 0; l < width; l++) x[l] *= of_width[l];
        FN(write_rows)(x, out + k, height, width, height - k, height * width, 0);
    }
}

/* And back: first along the rows, then along the columns. */
INLINE TARGET void FN(inverse_dct_tile)(const float *from, float *out, int64_t columns, int64_t height, int64_t width,
                                        const float *of_height, const float *of_width, const int how) {
    V x[BLOCK], spare[BLOCK];
    float tile[BLOCK * BLOCK];
    for (int64_t k = 0; k < height; k += LANES) {
        FN(read_rows)(x, from + k, height, width, height - k, height * width);
        for (int64_t l = 0; l < width; l++) x[l] *= of_width[l];
        FN(compose)(x, spare, (int)width, of_width + width);
        FN(write_rows)(x, tile + k, BLOCK, width, LANES, 0, 0);
    }
    for (int64_t j = 0; j < width; j += LANES) {
        FN(read_columns)(x, tile + j * BLOCK, height, width - j);
        for (int64_t k = 0; k < height; k++) x[k] *= of_height[k];
        FN(compose)(x, spare, (int)height, of_height + height);
        FN(write_rows)(x, out + j, columns, height, width - j, width, how);
    }
}

/* Calls for every tile of all matrices, each of them given by where it starts, its rows and its columns. `w` has the
   numbers for a side of n elements from `of[n % 64]` on. */
#define EVERY_TILE(call)                                                                                               \
    for (; count--; matrices += 3)                                                                                     \
        for (int64_t rows = matrices[1], columns = matrices[2], i = 0; i < rows; i += BLOCK)                           \
            for (int64_t j = 0; j < columns; j += BLOCK) {                                                             \
                int64_t height = rows - i < BLOCK ? rows - i : BLOCK, width = columns - j < BLOCK ? columns - j : BLOCK; \
                int64_t start = matrices[0] + i * columns;                                                             \
                call(start + j, start + height * j, columns, height, width, w + of[height % BLOCK],                    \
                     w + of[width % BLOCK])                                                                            \
            }

TARGET void FN(dct)(const float *flat, const int64_t *matrices, int64_t count, const float *w, const int64_t *of,
                    float *out) {
#define CALL(place, start, ...) FN(dct_tile)(flat + (place), out + (start), __VA_ARGS__);
    EVERY_TILE(CALL)
    FENCE;
#undef CALL
}

TARGET void FN(inverse_dct)(const float *frequencies, const int64_t *matrices, int64_t count, const float *w,
                            const int64_t *of, float *flat, int how) {
#define TILE(place, start, ...) FN(inverse_dct_tile)(frequencies + (start), flat + (place), __VA_ARGS__, HOW);
#define CALL(how)                                                                                                      \
    {                                                                                                                  \
        enum { HOW = how };                                                                                            \
        EVERY_TILE(TILE)                                                                                               \
    }
    EVERY_HOW(CALL)
    if (how == 3) CALL(3)
    FENCE;
#undef CALL
#undef TILE
}

#undef V
#undef ANALYSE
#undef COMPOSE
#undef AS_IT_IS
#undef EVERY_TILE

/* `right` lies row by row, each as long as one of `out`. */
TARGET void FN(put_product)(const float *left, const float *right, int64_t rows, int64_t columns, int64_t rank,
                            float *out, float *less) {
    for (int64_t i = 0; i < rows; i++, left += rank, out += columns, less = less ? less + columns : NULL) {
        if (rank == 1 && less) {
            ELEMENTWISE for (int64_t j = 0; j < columns; j++) {
                out[j] = left[0] * right[j];
                less[j] -= out[j];
            }
            continue;
        }
        ELEMENTWISE for (int64_t j = 0; j < columns; j++) out[j] = left[0] * right[j];
        for (int64_t k = 1; k < rank; k++)
            ELEMENTWISE for (int64_t j = 0; j < columns; j++) out[j] += left[k] * right[k * columns + j];
        if (less) ELEMENTWISE for (int64_t j = 0; j < columns; j++) less[j] -= out[j];
    }
}
