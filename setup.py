"""Build the inner loops in C, if there is a compiler; everything else is in setup.cfg.

The library has neither Python nor torch in it, so one wheel serves all their versions. Linux only: elsewhere, and where
the build fails, the wheel is pure Python and compression runs in torch.
"""

import hashlib
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("dgcopt/kernels")
SOURCE, HEADERS = KERNELS / "native" / "native.c", sorted(KERNELS.rglob("*.h"))
LIBRARY = "dgcopt.kernels.libdgcopt"
OLDEST_GLIBC = 17
"""Minor version of the glibc of manylinux2014, the oldest that pip still knows for all processors."""


def digest() -> str:
    """Return the hash of the sources, which dgcopt/kernels/native/library.py computes too."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in (SOURCE, *HEADERS))).hexdigest()[:16]


class build_loops(build_ext):
    """The library's name, without the tag of a Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class any_python(bdist_wheel):
    """py3-none-PLATFORM, where PLATFORM is the oldest manylinux that has every symbol which the library needs."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.get_finalized_command("build_ext").get_ext_fullpath(LIBRARY))
        if not library.exists():
            return "py3", "none", "any"
        versions = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())]
        platform = super().get_tag()[2]
        if versions:  # none with another libc, such as musl
            platform = platform.replace("linux_", f"manylinux_2_{max(OLDEST_GLIBC, *versions)}_", 1)
        return "py3", "none", platform


loops = Extension(
    LIBRARY,
    sources=[str(SOURCE)],
    depends=[str(path) for path in HEADERS],
    # where sources are at hand, a library that was built from others is not used
    define_macros=[("DGCOPT_SOURCES", f'"{digest()}"')],
    # fused multiply-add where the source says so, and nowhere else: results must be torch's to the bit; square
    # roots by one instruction, which nobody asks for errno
    extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno"],
    optional=True,
)

setup(
    ext_modules=[loops] if sys.platform == "linux" else [],
    cmdclass={"build_ext": build_loops, "bdist_wheel": any_python},
)
