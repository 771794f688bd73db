"""Compiling for GPUs that are not at hand: what the compiler must know of them, and how it is asked."""

from longstraw_jax.deviceless.chips import CHIPS as CHIPS
from longstraw_jax.deviceless.chips import Chip as Chip
from longstraw_jax.deviceless.chips import named_chip as named_chip
from longstraw_jax.deviceless.compiler import TARGET as TARGET
from longstraw_jax.deviceless.compiler import Compiled as Compiled
from longstraw_jax.deviceless.compiler import abstract_mesh as abstract_mesh
from longstraw_jax.deviceless.compiler import compile_alone as compile_alone
from longstraw_jax.deviceless.compiler import compile_for as compile_for
from longstraw_jax.deviceless.compiler import devices as devices
from longstraw_jax.deviceless.compiler import executable_for as executable_for
from longstraw_jax.deviceless.compiler import require_compiler as require_compiler
