"""Operators with their plain reference, one folder each. Knows no model."""

from longstraw_jax.kernels_pallas.lse_merge import lse_merge as lse_merge
