"""The merge of partial attentions: `api` is the operator, `reference` its formula."""

from longstraw_jax.kernels_pallas.lse_merge.api import lse_merge as lse_merge
