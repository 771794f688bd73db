"""Operators with their plain reference and their GPU kernel, one folder each. Knows no model.

Attention without a mask is left to cuDNN where that is at hand. The other kernels are written in Pallas and compiled by its
Triton backend. JAX deprecated that backend in 0.11 and recommends Mosaic GPU, which cannot take its place here: it has no prefix
sums and no scatters, which packing survivors is made of, and its interpreter fails under `jax.checkpoint`, so that the tests
could not hold every use of the kernels against XLA. The same source compiles with JAX 0.10 to 0.12. The kernels' bodies are
`jax.numpy` but for masked loads and stores, and every operator keeps its XLA path: where a backend or a library is gone, `auto`
runs that.
"""

from longstraw_jax.kernels_pallas.dense_attention import dense_attention as dense_attention
from longstraw_jax.kernels_pallas.dense_attention import dense_choice as dense_choice
from longstraw_jax.kernels_pallas.dispatch import Implementation as Implementation
from longstraw_jax.kernels_pallas.dispatch import implementation as implementation
from longstraw_jax.kernels_pallas.dispatch import region as region
from longstraw_jax.kernels_pallas.dispatch import traced_for as traced_for
from longstraw_jax.kernels_pallas.dsa_select import Candidates as Candidates
from longstraw_jax.kernels_pallas.dsa_select import dsa_merge as dsa_merge
from longstraw_jax.kernels_pallas.dsa_select import dsa_select as dsa_select
from longstraw_jax.kernels_pallas.lse_merge import lse_merge as lse_merge
