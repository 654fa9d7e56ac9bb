/* Parts of a flat tensor that lie apart: part p has the positions from starts[p] to stops[p]. From `part` on the one that
   has a position; -1 if none has it. */
INLINE TARGET int64_t FN(part_of)(const int64_t *starts, const int64_t *stops, int64_t parts, int64_t part,
                                  int64_t position) {
    if (position < starts[part]) part = 0;
    while (part + 1 < parts && position >= starts[part + 1]) part++;
    return starts[part] <= position && position < stops[part] ? part : -1;
}
