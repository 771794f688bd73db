"""The gated delta rule (Yang et al., 2024, "Gated Delta Networks", eq. 10): plain recurrence, and the chunked form that runs.

Per value head, with state S [K, V]:

    S <- exp(g_t) S;  delta = beta_t (v_t - S^T k_t);  S <- S + k_t delta^T;  o_t = S^T q_t
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Chunks whose inner quantities are alive at once in a backward pass; the groups before are recomputed from their entry state.
_CHUNKS_PER_GROUP = 32


def delta_rule_recurrent(
    q: Float[Array, "T H K"], k: Float[Array, "T H K"], v: Float[Array, "T H V"], g: Float[Array, "T H"],
    beta: Float[Array, "T H"], state: Float[Array, "H K V"],
) -> tuple[Float[Array, "T H V"], Float[Array, "H K V"]]:
    """The oracle: one token after the other. `g` is the logarithm of the decay, <= 0."""

    def token(s, x):
        q, k, v, g, beta = x
        s = s * jnp.exp(g)[:, None, None]
        delta = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", s, k))
        s = s + k[:, :, None] * delta[:, None, :]
        return s, jnp.einsum("hkv,hk->hv", s, q)

    state, out = lax.scan(token, state, (q, k, v, g, beta))
    return out, state


def delta_rule_chunked(
    q: Float[Array, "T Hk K"], k: Float[Array, "T Hk K"], v: Float[Array, "T H V"], g: Float[Array, "T H"],
    beta: Float[Array, "T H"], state: Float[Array, "H K V"], chunk: int,
) -> tuple[Float[Array, "T H V"], Float[Array, "H K V"]]:
    """The same in chunks of `chunk` tokens: matrix products inside a chunk, the state only from chunk to chunk.

    Value head h uses key head h // (H / Hk). Any T: a ragged tail is filled with tokens that leave the state alone. Memory of
    the backward pass is one group of chunks plus a state per group.
    """
    tokens = q.shape[0]
    group = chunk * min(_CHUNKS_PER_GROUP, -(-tokens // chunk))
    pad = -tokens % group
    xs = [jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)) for x in (q, k, v, g, beta)]
    xs = [x.reshape(-1, group, *x.shape[1:]) for x in xs]
    run = jax.checkpoint(lambda s, x: _group(s, *x, chunk=chunk), prevent_cse=False)
    state, out = lax.scan(run, state, tuple(xs))
    return out.reshape(-1, *out.shape[2:])[:tokens], state


def _group(state, q, k, v, g, beta, *, chunk: int):
    """A whole number of chunks [C, H, ...] from one entry state, all quantities that do not need the state first."""
    repeat = v.shape[1] // q.shape[1]
    q, k = (jnp.repeat(_by_chunk(x, chunk), repeat, 1) for x in (q, k))
    v, g, beta = _by_chunk(v, chunk), _by_chunk(g, chunk), _by_chunk(beta, chunk)
    log_decay = jnp.cumsum(g, -1)
    visible = jnp.tril(jnp.ones((chunk, chunk), bool))
    # masked before exp: above the diagonal the difference is positive and would overflow, and give NaN gradients
    between = jnp.exp(jnp.where(visible, log_decay[..., :, None] - log_decay[..., None, :], -jnp.inf))
    keys = beta[..., None] * jnp.einsum("nhid,nhjd->nhij", k, k) * between
    system = jnp.where(jnp.tril(visible, -1), keys, 0) + jnp.eye(chunk, dtype=keys.dtype)[None, None]
    right = jnp.concatenate([beta[..., None] * v, (beta * jnp.exp(log_decay))[..., None] * k], -1)
    solved = lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    values, weights = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    scores = jnp.einsum("nhid,nhjd->nhij", q, k) * between
    reading = q * jnp.exp(log_decay)[..., None]
    writing = k * jnp.exp(log_decay[..., -1:] - log_decay)[..., None]

    def step(s, x):
        values, weights, scores, reading, writing, decay = x
        delta = values - weights @ s
        out = reading @ s + scores @ delta
        return s * decay[:, None, None] + jnp.einsum("hck,hcv->hkv", writing, delta), out

    state, out = lax.scan(step, state, (values, weights, scores, reading, writing, jnp.exp(log_decay[..., -1])))
    return state, out.swapaxes(1, 2).reshape(-1, *out.shape[1:2], out.shape[-1])


def unit_lower_inverse(a: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """(I + a)^-1 of a strictly lower triangular `a`, C a power of two, by doubling the size of the inverted diagonal blocks:

        [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]

    Products only, which suits every backend; a batch of small triangular solves is slow on CPUs. Unlike the series
    sum (-a)^n it multiplies no large powers: with equal keys those reach 10^18 and cancel.
    """
    size, lead = a.shape[-1], a.shape[:-2]
    x = jnp.ones((*lead, size, 1, 1), a.dtype)
    half = 1
    while half < size:
        pairs = size // (2 * half)
        blocks = jnp.moveaxis(jnp.diagonal(a.reshape(*lead, pairs, 2 * half, pairs, 2 * half), axis1=-4, axis2=-2), -1, -3)
        top, bottom = (x.reshape(*lead, pairs, 2, half, half)[..., i, :, :] for i in (0, 1))
        corner = -bottom @ blocks[..., half:, :half] @ top
        x = jnp.concatenate([jnp.concatenate([top, jnp.zeros_like(top)], -1), jnp.concatenate([corner, bottom], -1)], -2)
        half *= 2
    return x.reshape(a.shape)


def _by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """[T, H, ...] -> [chunks, H, chunk, ...]."""
    return x.reshape(-1, chunk, *x.shape[1:]).swapaxes(1, 2)
