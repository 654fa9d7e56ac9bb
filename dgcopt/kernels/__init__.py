"""The inner loops of compression: operations on as many elements as the model has parameters.

A folder is a family of operations. Its torch.py is the specification and runs everywhere; native.py calls loops in C
(native.h) on the CPU; triton.py has kernels for CUDA. All give the same bits. The family's __init__.py registers its
operations, and callers use them from here: `from ..kernels import select`.

To add an operation:

1. Specify it in the family's torch.py: signature, docstring, and the order of every rounded addition.
2. Write the loop in native.h (per_dtype.h if it runs on several dtypes) and its caller in native.py, which checks
   lengths and dtypes before the loop reads out of bounds. Rebuild: `python setup.py build_ext --inplace --force`.
3. Write the kernel in triton.py, with the same signature.
4. Register it in __init__.py with a `Kernel`, which says for which dtypes and layouts C and Triton are used.
5. Test it in tests/unit/kernels/test_FAMILY.py with `all_implementations`, which compares the three.
6. Add its operands to scripts/bench_operations.py: with them it is compiled for CUDA and timed.
"""

from .blocks import *
from .coordinates import *
from .copying import *
from .floats import *
from .hashing import *
from .kernel import Kernel
from .matrices import *
from .memory import *
from .minmax import *
from .native.library import in_use, instructions
from .packing import *
from .parts import Mixture, Parts
from .reductions import *
from .rounding import *
from .rows import *
from .selection import *
from .signs import *
from .triton.available import has_triton
from .values import *
