"""Token embedding and the vocabulary-parallel log-probability, both shared out over the owners.

Logits exist for one block of tokens at a time; forward and backward are written out, so that nothing [tokens, vocabulary]
is kept between them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from longstraw_jax.models.layers.declare import Normal, parameter
from longstraw_jax.models.layers.linear import INIT_STD
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.sharding import SPLIT, WHOLE, Owners


class Embedding(nnx.Module):
    """Rows of a [V, D] table that is split over D: every owner looks up its columns of all tokens, one exchange assembles them."""

    def __init__(self, vocabulary: int, features: int, *, dtype):
        self.features = features
        self.weight = parameter((vocabulary, features), dtype, (WHOLE, SPLIT), Normal(INIT_STD))

    def __call__(self, ids: Int[Array, "T"], valid: Bool[Array, "T"], owners: Owners, dtype) -> Float[Array, "T D"]:
        table = self.weight[...].astype(dtype)
        ids = jnp.where(valid, ids, 0)  # a pad may hold any number
        if table.shape[1] == self.features:
            return table[ids]
        columns = table[owners.gather(ids)].reshape(owners.count, ids.shape[0], -1)
        return owners.exchange(columns).swapaxes(0, 1).reshape(ids.shape[0], self.features)


class Head(nnx.Module):
    """The [V, D] output matrix, split over V."""

    def __init__(self, vocabulary: int, features: int, *, dtype):
        self.vocabulary = vocabulary
        self.weight = parameter((vocabulary, features), dtype, (SPLIT, WHOLE), Normal(INIT_STD))

    def logprobs(
        self, hidden: Float[Array, "T D"], targets: Int[Array, "T"], owners: Owners, block: int, temperature: ScalarLike
    ) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
        """(log p(target), log sum exp) per token, in the statistics dtype, at `temperature`."""
        tiles = _Tiles(self, hidden, owners, block, temperature)

        def one(x):
            hidden, targets = x
            logits, local = tiles.logits(hidden, targets)
            top = tiles.owners.max(logits.max(-1))
            lse = top + jnp.log(tiles.owners.sum(jnp.exp(logits - top[:, None]).sum(-1)))
            hit = jnp.take_along_axis(logits, jnp.clip(local, 0, logits.shape[1] - 1)[:, None], 1)[:, 0]
            target = tiles.owners.sum(jnp.where(tiles.mine(local), hit, 0))
            return tiles.own(target - lse), tiles.own(lse)

        return jax.tree.map(lambda x: x.reshape(-1), lax.map(one, (tiles.cut(hidden), tiles.cut(targets))))

    def pull(
        self, hidden: Float[Array, "T D"], targets: Int[Array, "T"], lse: Float[Array, "T"], cotangent: Float[Array, "T"],
        owners: Owners, block: int, temperature: ScalarLike, weight_gradient: Float[Array, "v D"] | None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "v D"] | None]:
        """The transpose of `logprobs`: the cotangent of `hidden`, and `weight_gradient` plus the weight's (None: not wanted).

        d log p(target) / d logits = one_hot(target) - softmax. A shard of the weight gets its whole gradient; a replicated
        weight gets this owner's tokens' part.
        """
        tiles = _Tiles(self, hidden, owners, block, temperature)

        def one(gradient, x):
            hidden, targets, lse, cotangent = x
            logits, local = tiles.logits(hidden, targets)
            softmax = jnp.exp(logits - tiles.owners.gather(lse)[:, None])
            one_hot = jnp.arange(logits.shape[1])[None] == jnp.where(tiles.mine(local), local, -1)[:, None]
            slope = (one_hot - softmax) * (tiles.owners.gather(cotangent) / temperature)[:, None]
            if gradient is not None:
                gradient = gradient + jnp.einsum("tv,td->vd", slope, tiles.owners.gather(hidden).astype(slope.dtype))
            back = jnp.einsum("tv,vd->td", slope.astype(hidden.dtype), tiles.weight, preferred_element_type=slope.dtype)
            return gradient, tiles.owners.scatter_sum(back).astype(hidden.dtype)

        gradient, back = lax.scan(one, weight_gradient, tuple(map(tiles.cut, (hidden, targets, lse, cotangent))))
        return back.reshape(hidden.shape), gradient


class _Tiles:
    """What both directions share: token blocks of all owners against this owner's part of the vocabulary.

    A vocabulary that the owners do not divide is replicated; each owner then needs only its own tokens, and the collectives
    fall away.
    """

    def __init__(self, head: Head, hidden: jax.Array, owners: Owners, block: int, temperature: ScalarLike):
        self.weight = head.weight[...].astype(hidden.dtype)
        self.owners = owners if self.weight.shape[0] != head.vocabulary else Owners((), 1)
        self.first = owners.index() * self.weight.shape[0] if self.owners.count > 1 else 0
        self.block = largest_divisor(hidden.shape[0], block)
        self.temperature = temperature
        self.dtype = statistics_dtype(hidden.dtype)

    def cut(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, self.block, *x.shape[1:])

    def logits(self, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [owners * block, own vocabulary], and the targets counted from this owner's first entry."""
        x = jnp.einsum("td,vd->tv", self.owners.gather(hidden), self.weight, preferred_element_type=self.dtype)
        return x / self.temperature, self.owners.gather(targets) - self.first

    def mine(self, local: jax.Array) -> jax.Array:
        return (local >= 0) & (local < self.weight.shape[0])

    def own(self, x: jax.Array) -> jax.Array:
        return x if self.owners.count == 1 else lax.dynamic_slice_in_dim(x, self.owners.index() * self.block, self.block)


def largest_divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` that is no larger than `limit`."""
    return next(d for d in range(min(size, limit), 0, -1) if size % d == 0)
