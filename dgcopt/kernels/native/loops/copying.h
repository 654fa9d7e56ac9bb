/* copy_scaled, for each type of gradient. */

#define LOOP(G, gtype)                                                                                                 \
    TARGET int32_t FN(copy_scaled_##G)(const gtype *g, gtype *out, int64_t n, float scale) {                           \
        int32_t top = 0;                                                                                               \
        ELEMENTWISE for (int64_t i = 0; i < n; i++) {                                                                  \
            float x = FN(read_##G)(g + i);                                                                             \
            int32_t size = FN(magnitude_f32)(x);                                                                       \
            FN(write_##G)(out + i, x * scale);                                                                         \
            top = size > top ? size : top;                                                                             \
        }                                                                                                              \
        return top;                                                                                                    \
    }

LOOP(f32, float)
LOOP(bf16, uint16_t)

#undef LOOP
