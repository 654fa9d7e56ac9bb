/* Scaled copies of gradients, and their largest magnitudes. */

#define dtype f32
#include "per_dtype.h"
#undef dtype
#define dtype bf16
#include "per_dtype.h"
#undef dtype
