"""The library of loops in C: the sources that all families share, and its loading and calling through ctypes."""
