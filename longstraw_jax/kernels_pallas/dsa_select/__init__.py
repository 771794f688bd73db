"""The selection of sparse attention: `api` is the operator, `reference` its formula."""

from longstraw_jax.kernels_pallas.dsa_select.api import dsa_merge as dsa_merge
from longstraw_jax.kernels_pallas.dsa_select.api import dsa_select as dsa_select
from longstraw_jax.kernels_pallas.dsa_select.candidates import Candidates as Candidates
