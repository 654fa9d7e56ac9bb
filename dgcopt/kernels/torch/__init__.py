"""The inner loops in torch: the specification, which other implementations equal bit for bit; they run everywhere."""

from .chunks import *
from .coordinates import *
from .copying import *
from .dct import *
from .drawing import *
from .hashing import *
from .memory import *
from .minmax import *
from .mixing import *
from .owners import *
from .packing import *
from .products import *
from .residual import *
from .rice import *
from .rounding import *
from .selection import *
from .signs import *
from .sums import *
from .threshold import *
from .trits import *
from .values import *
