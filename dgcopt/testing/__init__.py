"""Conformance kits: the promises of compressors and averaging algorithms, checked on simulated ranks.

def test_mine():
    dgcopt.testing.check_compressor(MyCompressor(ratio=0.1))
    dgcopt.testing.check_averaging(MyAveraging(every=2))
"""

from .averaging import check_averaging
from .compressors import check_compressor
from .report import ConformanceError, Report

__all__ = ["ConformanceError", "Report", "check_averaging", "check_compressor"]
