/* Products of thin matrices. */

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
