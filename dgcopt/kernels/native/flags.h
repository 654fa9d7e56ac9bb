/* 64 conditions as the bits of a word. */

/* 64 bytes, each 0 or 1, as the bits of a word, and as eight bytes. */
INLINE TARGET uint64_t FN(word_of)(const uint8_t *flags) {
#ifdef FLAGS
    return FLAGS(flags);
#else
    uint64_t word = 0, eight;
    for (int i = 0; i < BLOCK / 8; i++) {
        memcpy(&eight, flags + 8 * i, 8);
        word |= (eight * 0x0102040810204080 >> 56) << 8 * i; /* their lowest bits side by side */
    }
    return word;
#endif
}

/* Which of 64 numbers are below zero. */
INLINE TARGET uint64_t FN(below_zero)(const float *v) {
#ifdef BELOW_ZERO
    uint64_t word = 0;
    for (int i = 0; i < BLOCK; i += STREAMED) word |= (uint64_t)(uint32_t)BELOW_ZERO(v + i) << i;
    return word;
#else
    uint8_t flags[BLOCK];
    for (int i = 0; i < BLOCK; i++) flags[i] = v[i] < 0;
    return FN(word_of)(flags);
#endif
}

INLINE TARGET void FN(pack_flags)(const uint8_t *flags, uint8_t *packed) {
    uint64_t word = FN(word_of)(flags);
    memcpy(packed, &word, sizeof word);
}
