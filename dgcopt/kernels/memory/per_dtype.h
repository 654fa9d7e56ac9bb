/* Weight decay with momentum, for each dtype. */

INLINE TARGET void OF(decay_one)(dtype *w, dtype *b, int64_t n, float m, float adds, float weight_decay,
                                 float minus_lr, const int nesterov) {
    ELEMENTWISE for (int64_t i = 0; i < n; i++) {
        float x = OF(read)(w + i), step = __builtin_fmaf(x, adds, OF(read)(b + i) * m);
        OF(write)(b + i, step);
        OF(write)(w + i, __builtin_fmaf(nesterov ? step * m + x * weight_decay : step, minus_lr, x));
    }
}
TARGET void OF(decay)(dtype *const *weights, dtype *const *buffers, const int64_t *lengths, int64_t count,
                      int64_t start, int64_t stop, float m, float adds, float weight_decay, float minus_lr,
                      int nesterov) {
    for (int64_t t = 0; t < count; start -= lengths[t], stop -= lengths[t], t++) {
        int64_t first = start > 0 ? start : 0, last = stop < lengths[t] ? stop : lengths[t];
        if (first >= last) continue;
        dtype *w = weights[t] + first, *b = buffers[t] + first;
        if (nesterov)
            OF(decay_one)(w, b, last - first, m, adds, weight_decay, minus_lr, 1);
        else
            OF(decay_one)(w, b, last - first, m, adds, weight_decay, minus_lr, 0);
    }
}
