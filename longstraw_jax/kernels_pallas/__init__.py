"""Operators with their plain reference, one folder each. Knows no model."""

from longstraw_jax.kernels_pallas.dsa_select import Candidates as Candidates
from longstraw_jax.kernels_pallas.dsa_select import dsa_merge as dsa_merge
from longstraw_jax.kernels_pallas.dsa_select import dsa_select as dsa_select
from longstraw_jax.kernels_pallas.lse_merge import lse_merge as lse_merge
