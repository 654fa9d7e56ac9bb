"""Compressors around other compressors."""
