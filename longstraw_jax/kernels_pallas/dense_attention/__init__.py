"""Attention without a mask: `api` is the operator, `reference` its formula, `cudnn` the library's kernel and its check."""

from longstraw_jax.kernels_pallas.dense_attention.api import dense_attention as dense_attention
from longstraw_jax.kernels_pallas.dense_attention.api import dense_choice as dense_choice
