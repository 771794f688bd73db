"""Exact global sparse selection: for every query the k visible positions with the highest index scores, over all owners.

Every owner keeps the k best of its own keys, and the union's k best by (score descending, position ascending) decide, so the
mesh, the layouts and the tiles never change what is selected, but for the rounding of the scores themselves. Positions carry no
gradient.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from longstraw_jax.config import BlockSizes
from longstraw_jax.kernels_pallas import Candidates, dsa_merge, dsa_select
from longstraw_jax.models.base import Segment
from longstraw_jax.models.layers.vocabulary import largest_divisor
from longstraw_jax.sharding import Owners, Stretch

Exchange = Literal["rounds", "fetch"]
"""What travels. `rounds`: queries to the owners of rows, results back; for short segments. `fetch`: the rows that the segment
can see to the owners of queries, once; for long ones. The results are the same."""

ALONE = Owners((), 1)
"""The only party among which queries travel when every owner has all rows at hand."""


def last_position(segment: Segment) -> jax.Array:
    """Position of the segment's last token, or pad: the same on every owner."""
    return segment.start + segment.owners.count * segment.ids.shape[0] - 1


def at_hand(exchange: Exchange, segment: Segment, sources: list[Stretch], sizes: BlockSizes) -> tuple[Owners, list[Stretch]]:
    """(the parties among which queries travel, the rows that each party looks into)."""
    if exchange == "rounds":
        return segment.owners, sources
    return ALONE, [source.fetch(sizes.keys, last_position(segment)) for source in sources]


def select(
    q: Float[Array, "T H D"], w: Float[Array, "T H"], segment: Segment, sources: list[Stretch], sizes: BlockSizes, k: int,
    exchange: Exchange = "rounds",
) -> Int[Array, "T {k}"]:
    """Positions that the owner's queries select, int32, ascending; NO_POSITION at the end where fewer than k are visible.

    Args:
      q, w: index queries and head weights, scaled, of the segment's tokens.
      sources: index keys [L, S, D] of the stretches that the segment can see, the segment's own among them.
      k: positions to select; of equal scores the lowest.
    """
    parties, sources = at_hand(exchange, segment, sources, sizes)
    tile = largest_divisor(q.shape[0], sizes.queries)
    positions = segment.positions().astype(jnp.int32)

    def one(i):
        everyone = [parties.gather(lax.dynamic_slice_in_dim(x, i * tile, tile)) for x in (q, w, positions)]
        candidates = Candidates.none(parties.count * tile, k, q.dtype)
        for source in sources:
            candidates = dsa_select(*everyone, source, sizes.keys, candidates)
        mine = Candidates(*(parties.exchange(x.reshape(parties.count, tile, k)) for x in candidates))
        return lax.sort(dsa_merge(mine).positions)

    return lax.map(one, jnp.arange(q.shape[0] // tile)).reshape(-1, k)
