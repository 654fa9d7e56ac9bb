/* Minus one, zero or one: five in a byte. */

/* `length` bytes, of 5 * length trits that there are. */
TARGET void FN(pack_trits)(const int8_t *trits, int64_t length, int64_t stride, uint8_t *packed) {
    const int8_t *a = trits, *b = a + stride, *c = b + stride, *d = c + stride, *e = d + stride;
    ELEMENTWISE for (int64_t i = 0; i < length; i++) {
        unsigned high = (unsigned)(a[i] + 1) * 9 + (unsigned)(b[i] + 1) * 3 + (unsigned)(c[i] + 1);
        packed[i] = (uint8_t)(high * 9 + (unsigned)(d[i] + 1) * 3 + (unsigned)(e[i] + 1));
    }
}

/* Returns 1 if a byte cannot be right. */
TARGET int FN(unpack_trits)(const uint8_t *packed, int64_t length, int64_t stride, int8_t *trits) {
    int8_t *a = trits, *b = a + stride, *c = b + stride, *d = c + stride, *e = d + stride;
    uint8_t wrong = 0;
    ELEMENTWISE for (int64_t i = 0; i < length; i++) {
        uint16_t byte = packed[i]; /* n / 3 is n * 171 >> 9 for every byte */
        wrong |= (uint8_t)(byte > 242);
        uint16_t by3 = (uint16_t)(byte * 171 >> 9), by9 = (uint16_t)(by3 * 171 >> 9);
        uint16_t by27 = (uint16_t)(by9 * 171 >> 9), by81 = (uint16_t)(by27 * 171 >> 9);
        e[i] = (int8_t)(byte - 3 * by3 - 1), d[i] = (int8_t)(by3 - 3 * by9 - 1), c[i] = (int8_t)(by9 - 3 * by27 - 1);
        b[i] = (int8_t)(by27 - 3 * by81 - 1), a[i] = (int8_t)(by81 - 1);
    }
    return wrong;
}

INLINE TARGET void FN(put_trits_how)(const int8_t *trits, const float *scales, const int64_t *place, int64_t n,
                                     float *out, const int how) {
    for (int64_t b = 0; b < n / BLOCK; b++, out += BLOCK, trits += BLOCK) {
        float scale = scales[place[b]];
        for (int i = 0; i < BLOCK; i++) out[i] = FN(put)(out[i], (float)trits[i] * scale, how);
    }
}

TARGET void FN(put_trits)(const int8_t *trits, const float *scales, const int64_t *place, int64_t n, float *out,
                          int how) {
#define CALL(how) FN(put_trits_how)(trits, scales, place, n, out, how);
    EVERY_HOW(CALL)
#undef CALL
}
