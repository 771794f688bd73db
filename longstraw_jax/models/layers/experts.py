"""Routed experts that are dealt to the owners along the mesh's `expert` axis; forward and backward written out.

Router (DeepSeek-V3, 2024, eq. 12-16, without groups): p = sigmoid(W h), the top k of p + bias are chosen, weighted by p alone.
Experts: y = sum_k weight_k down_e(silu(gate_e h) * up_e h). There is no capacity: no token is dropped, whatever the routing.

Tokens lie on all owners, context x expert; an expert's matrices lie on its expert owner, split over the context owners. Tile by
tile the tokens of a row of expert owners are exchanged; each device sorts the (token, expert) pairs of its own experts and goes
through them in blocks of one expert's rows, so that the work follows the real counts, and the results go back as partial sums.

The backward pass takes the saved choice, runs the same blocks, forms the gate's and the up projection's rows again, and adds
parameter gradients in place into the accumulators: `jax.vjp` would return a tree as large as all experts, and cannot transpose
a loop whose length is data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from longstraw_jax.config import LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models.base import Tree
from longstraw_jax.models.layers.declare import Constant, Uniform, parameter
from longstraw_jax.models.layers.expected import expected, expected_blocks
from longstraw_jax.models.layers.linear import Adapter, declare_matrix
from longstraw_jax.models.layers.nf4 import whole_matrix
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.models.layers.stacked import read, write
from longstraw_jax.sharding import EXPERT, SPLIT, WHOLE, Owners, gather_whole

EXCHANGES = ("gather", "ragged")


def _scores(h: Float[Array, "T D"], gate_weight: Float[Array, "E D"]) -> Float[Array, "T E"]:
    """sigmoid(W h) in the statistics dtype. The product is taken in full: a rounded one would choose other experts."""
    wide = statistics_dtype(h.dtype)
    return jax.nn.sigmoid(jnp.einsum("td,ed->te", h.astype(wide), gate_weight.astype(wide), precision="highest"))


def route(h: Float[Array, "T D"], gate_weight: Float[Array, "E D"], bias: Float[Array, "E"], top_k: int) -> Int[Array, "T k"]:
    """The `top_k` experts of each token by score + bias, best first, ties to the lowest expert. No gradient passes.

    The caller saves them: a backward pass that chose again could choose differently.
    """
    scores = lax.stop_gradient(_scores(h, gate_weight))
    return lax.top_k(scores + bias.astype(scores.dtype)[None], top_k)[1].astype(jnp.int32)


def routing_weights(
    h: Float[Array, "T D"], gate_weight: Float[Array, "E D"], indices: Int[Array, "T k"], *, normalise: bool, scale: float
) -> Float[Array, "T k"]:
    """Weights of the chosen experts, in the statistics dtype: their scores, divided by their sum if `normalise`, times `scale`.

    For `jax.vjp`. Of a gate weight that is replicated the cotangent is this owner's tokens' part.
    """
    chosen = jnp.take_along_axis(_scores(h, gate_weight), indices, 1)
    if normalise:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + 1e-20)
    return chosen * scale


class ExpertLinear(nnx.Module):
    """Declares one projection of all experts of a layer: [experts, out, in], with adapters like `Linear`'s. Never called."""

    def __init__(
        self, experts: int, features_in: int, features_out: int, *, dtype, lora: LoraConfig | None = None, packed: bool = False
    ):
        self.weight = declare_matrix((experts, features_out, features_in), dtype, (EXPERT, SPLIT, SPLIT), packed)
        if lora:
            wide, bound = statistics_dtype(dtype), features_in**-0.5
            axes = (EXPERT, WHOLE, WHOLE)
            self.lora_A = parameter((experts, lora.rank, features_in), wide, axes, Uniform(-bound, bound), Adapter)
            self.lora_B = parameter((experts, features_out, lora.rank), wide, axes, Constant(0), Adapter)


class Experts(nnx.Module):
    """Declares the routed experts of a layer; `linear(name, experts, features_in, features_out)` makes the projections."""

    def __init__(self, experts: int, features: int, hidden: int, linear):
        self.gate_proj = linear("gate_proj", experts, features, hidden)
        self.up_proj = linear("up_proj", experts, features, hidden)
        self.down_proj = linear("down_proj", experts, hidden, features)


@dataclass(frozen=True)
class ExpertPlan:
    """How a family's experts are laid out and run. Hashable, so that it can be a static argument.

    `context`, `expert`: the owners along each mesh axis. `count`: experts in all. `features`, `hidden`: widths of the tokens and
    of an expert's inside. `scale`: of the adapters. `tile`: tokens of every owner that are exchanged at once. `block`: rows of
    one expert that are multiplied at once. Neither changes a result beyond rounding.

    `exchange`: "gather" sends every token to all expert owners of its row, on every backend; "ragged" sends one copy to each
    owner that has work for it, where XLA has the collective (GPU, TPU).
    """

    context: Owners
    expert: Owners
    count: int
    features: int
    hidden: int
    scale: float = 0.0
    tile: int = 256
    block: int = 256
    exchange: str = "gather"

    def __post_init__(self):
        if self.count % self.expert.count:
            raise InputError(f"{self.count} experts on {self.expert.count} expert owners; wanted a number of owners that divides them: "
                             "choose the mesh's expert=N accordingly")
        if self.exchange not in EXCHANGES:
            raise InputError(f"exchange is {self.exchange!r}; wanted one of {', '.join(EXCHANGES)}")

    @property
    def local(self) -> int:
        """Experts of one owner."""
        return self.count // self.expert.count

    def shape(self, projection: str) -> tuple[int, int]:
        """[out, in] of an expert's matrix."""
        return (self.features, self.hidden) if projection == "down_proj" else (self.hidden, self.features)

    @property
    def ragged(self) -> bool:
        return self.exchange == "ragged" and self.expert.count > 1


@dataclass(frozen=True)
class ExpertStack:
    """The experts of all layers, and which layer is meant.

    `parameters`: {projection: {"weight": [L, e, out, in], "lora_A": [L, e, rank, in], "lora_B": [L, e, out, rank]}} of this
    device's e experts; either of out and in may be split over the context owners, adapters may be absent, and weights may be
    {"codes", "scales"} of NF4. The whole stack is closed over and indexed by (layer, expert), so that no more than one expert is
    ever sliced, cast or gathered.
    """

    parameters: dict[str, dict[str, Array | dict[str, Array]]]
    layer: Int[Array, ""]
    plan: ExpertPlan

    def read(self, e: jax.Array, dtype) -> dict[str, dict[str, Array]]:
        """Expert e of this device, whole."""

        def part(stack):
            return read(stack, (self.layer, e), (1, 1, *stack.shape[2:]))[0, 0]

        def one(projection, name, stack):
            if name != "weight":
                return part(stack).astype(dtype)
            shape = self.plan.shape(projection)
            if isinstance(stack, dict):
                return whole_matrix(part(stack["codes"]), part(stack["scales"]), shape, self.plan.context, dtype)
            return gather_whole(part(stack).astype(dtype), shape, self.plan.context)

        return {p: {name: one(p, name, x) for name, x in stacks.items()} for p, stacks in self.parameters.items()}

    def zeros(self, gradient: Tree, dtype) -> dict[str, dict[str, Array]]:
        """Of one expert's parameters that `gradient` accumulates, whole."""
        return {p: {name: jnp.zeros(self.plan.shape(p) if name == "weight" else x.shape[2:], dtype) for name, x in stacks.items()}
                for p, stacks in gradient.items()}

    def add(self, gradient: Tree, e: jax.Array, parts: Tree) -> Tree:
        """`gradient` with expert e's `parts` added, in place inside a loop. A split weight's are summed over the context owners."""

        def one(stack, x):
            for axis in range(2):
                if stack.shape[2 + axis] != x.shape[axis]:
                    x = self.plan.context.scatter_sum(x, axis)
            # without the barrier the layout of the product that made x may spread to the whole stack, which is then copied
            x = lax.optimization_barrier(x).astype(stack.dtype)[None, None]
            return write(stack, read(stack, (self.layer, e), x.shape) + x, (self.layer, e))

        return jax.tree.map(one, gradient, parts)


def expert_ffn(
    x: Float[Array, "T D"], indices: Int[Array, "T k"], weights: Float[Array, "T k"], valid: Bool[Array, "T"], stack: ExpertStack
) -> Float[Array, "T D"]:
    """sum_k weights_k * expert_{indices_k}(x) of this owner's tokens, in x's dtype, summed in the statistics dtype.

    A token's indices are distinct experts, as `route` gives them. Where `valid` is false the result is 0 and no expert runs.
    """
    tiles = _Tiles.of(x, stack.plan)

    def one(xs):
        x, indices, weights = xs
        pairs, exchange = _sort(indices, weights, stack.plan)
        rows = exchange.send(x)

        def expert(e, out):
            mine = stack.read(e, x.dtype)

            def block(j, out):
                row, _, weight = pairs.block(e, j)
                y = _ffn(mine, _take(rows, row), stack.plan.scale)
                return _add(out, row, weight[:, None] * y)

            return lax.fori_loop(0, pairs.blocks(e), block, out)

        out = lax.fori_loop(0, stack.plan.local, expert, jnp.zeros(rows.shape, statistics_dtype(x.dtype)))
        return exchange.back(out).astype(x.dtype)

    return tiles.join(lax.map(one, tiles.cut_all(x, indices, weights, valid)))


def pull_expert_ffn(
    x: Float[Array, "T D"], indices: Int[Array, "T k"], weights: Float[Array, "T k"], valid: Bool[Array, "T"],
    cotangent: Float[Array, "T D"], stack: ExpertStack, gradient: Tree,
) -> tuple[Float[Array, "T D"], Float[Array, "T k"], Tree]:
    """The transpose of `expert_ffn`: cotangents of x and of the weights, in the statistics dtype, and `gradient` grown.

    `gradient` has the structure of a part of `stack.parameters`, those that are trained ({} for none), in the statistics dtype;
    the layer's entries are added to. What is left to sum, and `gradients.grown` does by the parameters' placement: adapters,
    and weights that the context owners could not split, hold the part of this row's tokens and must be summed over the context
    owners. A split weight's gradient is complete. Nothing is to be summed over the expert owners.
    """
    wide, tiles = statistics_dtype(x.dtype), _Tiles.of(x, stack.plan)
    wanted = {projection: frozenset(stacks) for projection, stacks in gradient.items()}

    def one(gradient, xs):
        x, indices, weights, cotangent = xs
        pairs, exchange = _sort(indices, weights, stack.plan)
        rows, rows_bar = exchange.send(x), exchange.send(cotangent.astype(x.dtype))

        def expert(e, carry):
            mine = stack.read(e, x.dtype)

            def block(j, carry):
                x_bar, weights_bar, parts = carry
                row, pair, weight = pairs.block(e, j)
                given = _take(rows, row), _take(rows_bar, row), weight
                x_part, weight_part, more = _pull_ffn(mine, *given, stack.plan.scale, wanted)
                weights_bar = weights_bar.at[pair].set(weight_part, mode="drop", unique_indices=True)
                return _add(x_bar, row, x_part), weights_bar, jax.tree.map(jnp.add, parts, more)

            x_bar, weights_bar, gradient = carry
            parts = stack.zeros(gradient, wide)
            x_bar, weights_bar, parts = lax.fori_loop(0, pairs.blocks(e), block, (x_bar, weights_bar, parts))
            return x_bar, weights_bar, stack.add(gradient, e, parts)

        start = jnp.zeros(rows.shape, wide), jnp.zeros(pairs.weights.shape, wide), gradient
        x_bar, weights_bar, gradient = lax.fori_loop(0, stack.plan.local, expert, start)
        weights_bar = stack.plan.expert.scatter_sum(weights_bar.reshape(-1, indices.shape[1]))
        return gradient, (exchange.back(x_bar), weights_bar)

    cut = *tiles.cut_all(x, indices, weights, valid), tiles.cut(cotangent, 0)
    gradient, (x_bar, weights_bar) = lax.scan(one, gradient, cut)
    return tiles.join(x_bar), tiles.join(weights_bar), gradient


def _linear(p: dict[str, Array], x: jax.Array, scale: float, dtype=None) -> jax.Array:
    """W x + scale B A x, like `Linear`; the result in `dtype` (default: x's)."""
    y = jnp.einsum("ni,oi->no", x, p["weight"], preferred_element_type=dtype)
    if "lora_A" not in p:
        return y
    low = jnp.einsum("ni,ri->nr", x, p["lora_A"])
    return y + jnp.einsum("nr,or->no", low, p["lora_B"], preferred_element_type=dtype) * jnp.asarray(scale, y.dtype)


def _pull_linear(p: dict[str, Array], x: jax.Array, y_bar: jax.Array, scale: float, wanted: Iterable[str]) -> tuple[jax.Array, dict]:
    """The transpose of `_linear`: (cotangent of x, cotangents of the `wanted` parameters), all in the statistics dtype."""
    wide = statistics_dtype(x.dtype)

    def product(formula, a, b):
        return jnp.einsum(formula, a, b, preferred_element_type=wide)

    x_bar, grads = product("no,oi->ni", y_bar, p["weight"]), {}
    if "weight" in wanted:
        grads["weight"] = product("no,ni->oi", y_bar, x)
    if "lora_A" in p:
        low_bar = (scale * product("no,or->nr", y_bar, p["lora_B"])).astype(x.dtype)
        x_bar = x_bar + product("nr,ri->ni", low_bar, p["lora_A"])
        if "lora_A" in wanted:
            grads["lora_A"] = product("nr,ni->ri", low_bar, x)
        if "lora_B" in wanted:
            low = jnp.einsum("ni,ri->nr", x, p["lora_A"])
            grads["lora_B"] = scale * product("no,nr->or", y_bar, low)
    return x_bar, grads


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _ffn(p: dict[str, dict[str, Array]], x: Float[Array, "n D"], scale: float) -> Float[Array, "n D"]:
    """One expert on a block of rows, the result in the statistics dtype."""
    inside = _gated(*(_linear(p[name], x, scale) for name in ("gate_proj", "up_proj")))
    return _linear(p["down_proj"], inside, scale, statistics_dtype(x.dtype))


def _pull_ffn(p, x, out_bar, weight, scale: float, wanted: dict[str, frozenset[str]]):
    """The transpose of weight * `_ffn`: cotangents of the rows x [n, D], of the weights [n], and of the wanted parameters.

    The weights' needs no output: <out_bar, down h> = <down^T out_bar, h>.
    """

    def names(projection):
        return wanted.get(projection, ())

    wide = statistics_dtype(x.dtype)
    gate, up = (_linear(p[name], x, scale).astype(wide) for name in ("gate_proj", "up_proj"))
    inside, pull_inside = jax.vjp(_gated, gate, up)
    y_bar = (weight[:, None] * out_bar.astype(wide)).astype(x.dtype)
    unweighted, _ = _pull_linear(p["down_proj"], inside.astype(x.dtype), out_bar, scale, ())
    _, down = _pull_linear(p["down_proj"], inside.astype(x.dtype), y_bar, scale, names("down_proj"))
    weight_bar = (unweighted * inside).sum(-1)
    gate_bar, up_bar = (bar.astype(x.dtype) for bar in pull_inside(weight[:, None] * unweighted))
    x_bar, gate_grads = _pull_linear(p["gate_proj"], x, gate_bar, scale, names("gate_proj"))
    more, up_grads = _pull_linear(p["up_proj"], x, up_bar, scale, names("up_proj"))
    grads = {"gate_proj": gate_grads, "up_proj": up_grads, "down_proj": down}
    return x_bar + more, weight_bar, {projection: grads[projection] for projection in wanted}


def _take(rows: jax.Array, row: jax.Array) -> jax.Array:
    """Rows by number, 0 for the numbers beyond the end."""
    return rows.at[row].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True)


def _add(rows: jax.Array, row: jax.Array, x: jax.Array) -> jax.Array:
    """`x` added to rows by number, none of them twice: no atomics, so the same sum on every run. Numbers beyond the end drop out."""
    return rows.at[row].add(x, mode="drop", unique_indices=True, indices_are_sorted=True)


@dataclass(frozen=True)
class _Tiles:
    """An owner's tokens cut into equal tiles, with a few pads at the end where they do not divide."""

    tokens: int
    tile: int
    count: int
    nobody: int

    @classmethod
    def of(cls, x: jax.Array, plan: ExpertPlan) -> _Tiles:
        tiles = -(-x.shape[0] // plan.tile)
        return cls(x.shape[0], -(-x.shape[0] // tiles), tiles, plan.count)

    def cut(self, x: jax.Array, pad: int) -> jax.Array:
        rest = self.count * self.tile - self.tokens
        x = jnp.pad(x, ((0, rest), (0, 0)), constant_values=pad) if rest else x
        return x.reshape(self.count, self.tile, x.shape[1])

    def cut_all(self, x: jax.Array, indices: jax.Array, weights: jax.Array, valid: jax.Array) -> tuple[jax.Array, ...]:
        """(x, indices, weights) [tiles, tile, ...]; pads are routed to an expert that nobody has."""
        indices = jnp.where(valid[:, None], indices.astype(jnp.int32), self.nobody)
        return self.cut(x, 0), self.cut(indices, self.nobody), self.cut(weights.astype(statistics_dtype(x.dtype)), 0)

    def join(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])[: self.tokens]


@dataclass(frozen=True)
class _Pairs:
    """The (token, expert) pairs of this device's experts, sorted by expert and then by token."""

    order: Int[Array, "P"]
    """Numbers of pairs, token * k + choice, those of other devices' experts at the end; a block of padding follows."""
    bounds: Int[Array, "e"]
    """Where each expert's pairs begin in `order`; one more for the end."""
    slots: Int[Array, "n"]
    """Row that holds each token."""
    weights: Float[Array, "nk"]
    size: int
    mean: float
    """Pairs of an expert, were all chosen equally often."""

    def blocks(self, e: jax.Array) -> jax.Array:
        blocks = -(-(self.bounds[e + 1] - self.bounds[e]) // self.size)
        return expected(blocks, expected_blocks(self.mean, self.size))

    def block(self, e: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(rows, pairs, weights) of block j of expert e. Beyond the expert's last pair: numbers beyond the end, and 0."""
        beyond = jnp.arange(self.size, dtype=jnp.int32)
        at = self.bounds[e] + j * self.size
        real, pair = at + beyond < self.bounds[e + 1], read(self.order, (at,), (self.size,))
        choices = self.weights.shape[0] // self.slots.shape[0]
        row = jnp.where(real, self.slots[pair // choices], self.slots.shape[0] + beyond)
        weight = jnp.where(real, self.weights[pair], 0)
        return row, jnp.where(real, pair, self.weights.shape[0] + beyond), weight


def _sort(indices: Int[Array, "t k"], weights: Float[Array, "t k"], plan: ExpertPlan) -> tuple[_Pairs, _Gather | _Ragged]:
    """This device's pairs among the tiles of all expert owners, and the way that tokens take to it and back."""
    everyone = plan.expert.gather(indices)
    exchange = _Ragged.of(everyone, plan) if plan.ragged else _Gather(plan.expert)
    local = (everyone - plan.expert.index() * plan.local if plan.expert.count > 1 else everyone).reshape(-1)
    key = jnp.where((local >= 0) & (local < plan.local), local, plan.local).astype(jnp.int32)
    key, order = lax.sort((key, jnp.arange(key.shape[0], dtype=jnp.int32)), num_keys=1, is_stable=True)
    bounds = jnp.searchsorted(key, jnp.arange(plan.local + 1, dtype=jnp.int32)).astype(jnp.int32)
    size = min(plan.block, key.shape[0])
    slots, weights = exchange.slots(everyone.shape[0]), plan.expert.gather(weights).reshape(-1)
    pairs = _Pairs(jnp.pad(order, (0, size)), bounds, slots, weights, size, key.shape[0] / plan.count)
    return pairs, exchange


@dataclass(frozen=True)
class _Gather:
    """Every token goes to every expert owner, and all their results are summed."""

    owners: Owners

    def slots(self, tokens: int) -> jax.Array:
        return jnp.arange(tokens, dtype=jnp.int32)

    def send(self, x: Float[Array, "t D"]) -> Float[Array, "n D"]:
        return self.owners.gather(x)

    def back(self, out: Float[Array, "n D"]) -> Float[Array, "t D"]:
        return self.owners.scatter_sum(out)


@dataclass(frozen=True)
class _Ragged:
    """One copy of a token goes to each expert owner that has work for it; the token's owner sums what comes back.

    A receiver holds the tokens of owner s from row s * tile on. A tile has room for all of a source's tokens, so none is dropped.
    The (small) choices of all owners are known to all, so that nobody has to be told where anything lies.
    """

    owners: Owners
    me: Int[Array, ""]
    goes: Int[Array, "N t k"]
    """Destination of each token's choices, N for pads, by source."""
    rank: Int[Array, "N t N"]
    """How many of the source's earlier tokens go to the destination."""
    counts: Int[Array, "N N"]
    """How many tokens go from source (first) to destination."""
    starts: Int[Array, "N N"]
    """Where they begin in the source's rows."""

    @classmethod
    def of(cls, indices: Int[Array, "n k"], plan: ExpertPlan) -> _Ragged:
        count = plan.expert.count
        goes = (indices // plan.local).reshape(count, -1, indices.shape[1])
        hit = (goes[..., None] == jnp.arange(count, dtype=jnp.int32)[None, None, None]).any(2).astype(jnp.int32)
        counts = hit.sum(1, dtype=jnp.int32)
        rank = jnp.cumsum(hit, 1, dtype=jnp.int32) - hit
        return cls(plan.expert, plan.expert.index(), goes, rank, counts, jnp.cumsum(counts, 1, dtype=jnp.int32) - counts)

    @property
    def _tile(self) -> int:
        return self.goes.shape[1]

    @property
    def _places(self) -> Int[Array, "N"]:
        """First row of each source's tokens at a receiver."""
        return jnp.arange(self.owners.count, dtype=jnp.int32) * self._tile

    def slots(self, tokens: int) -> jax.Array:
        return (self._places[:, None] + self.rank[..., self.me]).reshape(tokens)

    def _sent(self) -> tuple[Int[Array, "t k"], Bool[Array, "t k"], int]:
        """Row of each of my tokens' choices among those I send, whether it is the first choice of that row, and the row count."""
        goes = self.goes[self.me]
        rank = jnp.take_along_axis(self.rank[self.me], jnp.minimum(goes, self.owners.count - 1), 1)
        earlier = jnp.tril(jnp.ones((goes.shape[1],) * 2, bool), -1)
        again = ((goes[:, :, None] == goes[:, None, :]) & earlier[None]).any(2)
        row = jnp.take(self.starts[self.me], goes, mode="clip") + rank
        return row, (goes < self.owners.count) & ~again, self._tile * min(goes.shape[1], self.owners.count)

    def send(self, x: Float[Array, "t D"]) -> Float[Array, "n D"]:
        row, first, size = self._sent()
        token = jnp.broadcast_to(jnp.arange(self._tile, dtype=jnp.int32)[:, None], row.shape)
        token = jnp.zeros(size, jnp.int32).at[jnp.where(first, row, size)].set(token, mode="drop")
        room = jnp.zeros((self.owners.count * self._tile, x.shape[1]), x.dtype)
        mine = jnp.broadcast_to(self.me * self._tile, self.owners.count).astype(jnp.int32)
        return self.owners.ragged_exchange(
            x[token], room, self.starts[self.me], self.counts[self.me], mine, self.counts[:, self.me])

    def back(self, out: Float[Array, "n D"]) -> Float[Array, "t D"]:
        row, first, size = self._sent()
        room = jnp.zeros((size, out.shape[1]), out.dtype)
        room = self.owners.ragged_exchange(
            out, room, self._places, self.counts[:, self.me], self.starts[:, self.me], self.counts[self.me])

        def choice(i, total):
            return total + jnp.where(first[:, i, None], room[row[:, i]], 0)

        return lax.fori_loop(0, row.shape[1], choice, jnp.zeros((self._tile, out.shape[1]), out.dtype))
