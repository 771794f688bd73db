"""Router and routed experts against a plain evaluation of every expert on every token, in float64.

The experts are one layer of a stack whose other layers hold huge numbers. Pads hold huge numbers too.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from longstraw_jax.config import LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models.layers.experts import (
    ExpertLinear,
    ExpertPlan,
    Experts,
    ExpertStack,
    expert_ffn,
    pull_expert_ffn,
    route,
    routing_weights,
)
from longstraw_jax.sharding import EXPERT, SPLIT, WHOLE, Owners, PlacementRules, make_mesh

LAYERS, LAYER = 2, 1
EXPERTS, TOP_K, FEATURES, HIDDEN, RANK = 16, 3, 6, 8, 5
TOKENS = 7  # of every owner: two tiles of 4, the last with a pad
SCALE, ROUTED_SCALE = 0.7, 2.5
HUGE = 1e30
PAD = 1e200  # an expert makes infinity of it, and 0 * infinity is no 0
AXES = {"weight": (EXPERT, SPLIT, SPLIT), "lora_A": (EXPERT, WHOLE, WHOLE), "lora_B": (EXPERT, WHOLE, WHOLE)}
ADAPTED = ("gate_proj", "down_proj")
MESHES = [(1, 1), (1, 8), (8, 1), (2, 4), (4, 2)]


@dataclass(frozen=True)
class Case:
    """A program: the mesh, the exchange, and which parameters are trained."""

    mesh: tuple[int, int]
    exchange: str = "gather"
    trained: tuple[str, ...] = ("weight", "lora_A", "lora_B")

    @property
    def owners(self):
        return self.mesh[0] * self.mesh[1]

    @property
    def plan(self):
        context, expert = (Owners((axis,), n) for axis, n in zip(("context", "expert"), self.mesh, strict=True))
        return ExpertPlan(context, expert, EXPERTS, FEATURES, HIDDEN, SCALE, tile=4, block=2, exchange=self.exchange)


def shapes(experts=EXPERTS, features=FEATURES, hidden=HIDDEN, layers=LAYERS):
    """{projection: {name: shape}}; the up projection has no adapter."""
    sizes = {"gate_proj": (hidden, features), "up_proj": (hidden, features), "down_proj": (features, hidden)}
    made = {}
    for projection, (out, into) in sizes.items():
        made[projection] = {"weight": (layers, experts, out, into)}
        if projection in ADAPTED:
            made[projection] |= {"lora_A": (layers, experts, RANK, into), "lora_B": (layers, experts, out, RANK)}
    return made


def map_shapes(f, tree=None):
    return {p: {name: f(name, shape) for name, shape in stacks.items()} for p, stacks in (tree or shapes()).items()}


def specs(mesh):
    rules = PlacementRules(Owners.of(mesh), Owners.of(mesh, "expert"))
    return map_shapes(lambda name, shape: rules.spec(shape, AXES[name]))


def chosen(tree, names):
    return {p: {name: x for name, x in stacks.items() if name in names} for p, stacks in tree.items()}


@functools.cache
def program(case):
    """(h, cotangent, valid, gate weight, bias, experts) -> (y, indices, cotangent of h), (of the gate weight, of the experts)."""
    mesh, places = make_mesh(*case.mesh), specs(make_mesh(*case.mesh))
    owners, plan = Owners.of(mesh), case.plan

    def run(h, y_bar, valid, gate, bias, experts):
        stack = ExpertStack(experts, jnp.int32(LAYER), plan)
        indices = route(h, gate, bias, TOP_K)
        weights, pull_weights = jax.vjp(lambda h, g: routing_weights(h, g, indices, normalise=True, scale=ROUTED_SCALE), h, gate)
        y = expert_ffn(h, indices, weights, valid, stack)
        # the accumulators hold something already, as in the middle of a walk
        before = jax.tree.map(lambda x: jnp.ones(x.shape, weights.dtype), chosen(experts, case.trained))
        h_bar, weights_bar, after = pull_expert_ffn(h, indices, weights, valid, y_bar, stack, before)
        copies = chosen(jax.tree.map(owners.copies, places, is_leaf=lambda x: isinstance(x, PartitionSpec)), case.trained)
        after = jax.tree.map(lambda g, c: c.sum(g - 1), after, copies)
        more, gate_bar = pull_weights(weights_bar)
        return (y, indices, h_bar + more), (owners.sum(gate_bar), after)

    tokens, whole = owners.spec, PartitionSpec()
    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(tokens, tokens, tokens, whole, whole, places),
        out_specs=(tokens, (whole, chosen(places, case.trained))), check_vma=False))


def drawn(tokens, seed=0):
    """(h, cotangent of y, gate weight, experts); the experts' other layers are huge."""
    rng = np.random.default_rng(seed)

    def stack(name, shape):
        return np.where(np.arange(LAYERS).reshape(-1, 1, 1, 1) == LAYER, rng.normal(size=shape), HUGE)

    h, y_bar = rng.normal(size=(2, tokens, FEATURES))
    return h, y_bar, rng.normal(size=(EXPERTS, FEATURES)), map_shapes(stack)


@jax.jit
def dense(h, y_bar, gate, experts, indices, valid):
    """Every expert on every token, and what y_bar pulls back to (h, gate weight, experts)."""

    def matrix(p):
        return p["weight"] + SCALE * p["lora_B"] @ p["lora_A"] if "lora_A" in p else p["weight"]

    def forward(h, gate, experts):
        up, down, into = (matrix(jax.tree.map(lambda x: x[LAYER], experts[f"{name}_proj"])) for name in ("up", "down", "gate"))
        inside = jnp.einsum("td,efd->tef", h, into)
        inside = inside / (1 + jnp.exp(-inside)) * jnp.einsum("td,efd->tef", h, up)
        is_chosen = (indices[..., None] == jnp.arange(EXPERTS)[None, None]).any(1) & valid[:, None]
        scores = jnp.where(is_chosen, 1 / (1 + jnp.exp(-h @ gate.T)), 0)
        weights = ROUTED_SCALE * scores / (scores.sum(1, keepdims=True) + 1e-20)
        return jnp.einsum("te,tef,edf->td", weights, inside, down)

    y, pull = jax.vjp(forward, h, gate, experts)
    return y, pull(y_bar)


def plain_choice(h, gate, bias):
    return np.argsort(-(1 / (1 + np.exp(-h @ gate.T)) + bias), axis=1, kind="stable")[:, :TOP_K]


def routings(tokens):
    """{name: (bias, valid)}."""
    everyone, rng = np.ones(tokens, bool), np.random.default_rng(1)
    same, few = np.zeros(EXPERTS), np.zeros(EXPERTS)
    same[[5, 6, 13]] = 5  # two of them on one device of four
    few[::2] = -5  # every other expert goes without a token
    pads = rng.random(tokens) < 0.6
    return {"random": (np.zeros(EXPERTS), everyone), "all to the same": (same, everyone), "experts without a token": (few, everyone),
            "pads": (np.zeros(EXPERTS), pads), "pads only": (few, np.zeros(tokens, bool))}


def check(case, bias, valid, rtol=1e-9, dtype=None):
    h, y_bar, gate, experts = drawn(case.owners * TOKENS)
    given = [np.where(valid[:, None], x, PAD) for x in (h, y_bar)]
    (y, indices, h_bar), (gate_bar, grown) = program(case)(*given, valid, gate, bias, experts)
    wanted_indices = plain_choice(h, gate, bias)
    np.testing.assert_array_equal(np.asarray(indices)[valid], wanted_indices[valid])
    wanted, (wanted_h, wanted_gate, wanted_experts) = dense(h, y_bar, gate, experts, wanted_indices, valid)
    pairs = [("y", y, wanted), ("h", np.where(valid[:, None], h_bar, 0), wanted_h), ("gate", gate_bar, wanted_gate)]
    for p, stacks in grown.items():
        for name, x in stacks.items():
            np.testing.assert_array_equal(x[:LAYER], 0, err_msg=f"another layer's {p} {name} changed")
            pairs.append((f"{p} {name}", x, wanted_experts[p][name]))
    for name, a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * (1e-2 + np.abs(b).max()), err_msg=name)
    return y, h_bar


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", [Case(mesh) for mesh in MESHES], ids=lambda case: "x".join(map(str, case.mesh)))
def test_equals_every_expert_on_every_token(case):
    for bias, valid in routings(case.owners * TOKENS).values():
        y, h_bar = check(case, bias, valid)
        assert not np.asarray(y)[~valid].any() and not np.asarray(h_bar)[~valid].any()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("trained", [(), ("lora_A", "lora_B")], ids=["nothing", "adapters"])
def test_what_is_not_trained_gets_no_gradient(trained):
    check(Case((1, 1), trained=trained), *routings(TOKENS)["random"])


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """The collective that XLA has for GPUs and TPUs only, from those it has everywhere, by the text of its documentation."""
    me = lax.axis_index(axis_name)
    operands, starts, sizes, places = (lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets))
    for source in range(operands.shape[0]):
        at = jnp.arange(output.shape[0]) - places[source, me]
        here = (at >= 0) & (at < sizes[source, me])
        sent = operands[source, jnp.clip(starts[source, me] + at, 0, operands.shape[1] - 1)]
        output = jnp.where(here[:, None] & (sizes[source, me] == recv_sizes[source]), sent, output)
    return output


@pytest.mark.usefixtures("x64")
def test_ragged_exchange(monkeypatch):
    """The same values with one copy of a token for each destination; the collective itself is a stand-in on CPUs."""
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    case = Case((2, 4), "ragged")
    assert case.plan.ragged
    for bias, valid in routings(case.owners * TOKENS).values():
        check(case, bias, valid)


def abstract(case, tokens, dtype, **sizes):
    """Arguments of `program` without contents."""
    wide = jnp.promote_types(dtype, jnp.float32)
    experts = map_shapes(lambda name, shape: jax.ShapeDtypeStruct(shape, dtype if name == "weight" else wide), shapes(**sizes))
    count, _, features = experts["gate_proj"]["weight"].shape[1:]
    rows = jax.ShapeDtypeStruct((tokens, features), dtype)
    return (rows, rows, jax.ShapeDtypeStruct((tokens,), bool), jax.ShapeDtypeStruct((count, features), dtype),
            jax.ShapeDtypeStruct((count,), jnp.float32), experts)


def test_ragged_exchange_lowers_for_cuda():
    case = Case((2, 4), "ragged")
    text = program(case).trace(*abstract(case, 8 * TOKENS, jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@ragged_all_to_all" in line]
    assert len(calls) == 5  # forward there and back; backward there twice, and back
    assert all("[[0, 1, 2, 3], [4, 5, 6, 7]]" in line for line in calls)  # along the rows of the mesh


def test_exchange_of_a_plan():
    plan = Case((2, 4)).plan
    assert not plan.ragged
    assert replace(plan, exchange="ragged").ragged
    assert not replace(plan, exchange="ragged", expert=Owners(("expert",), 1)).ragged
    with pytest.raises(InputError, match="exchange is 'rounds'; wanted one of gather, ragged"):
        replace(plan, exchange="rounds")
    with pytest.raises(InputError, match="15 experts on 4 expert owners"):
        replace(plan, count=15)


def test_bfloat16_activations():
    """Results in the activations' dtype, cotangents and accumulators in float32."""
    bias, valid = routings(TOKENS)["pads"]
    h, y_bar, gate, experts = drawn(TOKENS)
    h, y_bar, gate = (jnp.asarray(x, jnp.bfloat16) for x in (h, y_bar, gate))
    experts = map_shapes(lambda name, x: jnp.asarray(x, jnp.bfloat16 if name == "weight" else jnp.float32), experts)
    (y, indices, h_bar), (gate_bar, grown) = program(Case((1, 1)))(h, y_bar, valid, gate, jnp.asarray(bias, jnp.float32), experts)
    assert y.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves((h_bar, grown))} == {jnp.dtype("float32")}
    with jax.enable_x64(True):
        h, y_bar, gate, experts = jax.tree.map(lambda x: np.asarray(x, np.float64), (h, y_bar, gate, experts))
        wanted, pulled = dense(h, y_bar, gate, experts, np.asarray(indices, np.int64), valid)
    for a, b in zip(jax.tree.leaves((y, h_bar, gate_bar, grown)), jax.tree.leaves((wanted, *pulled)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=3e-2 * np.abs(b).max())


def test_bfloat16_accumulates_in_float32():
    """One token's gradient is repeated, over many blocks: a bfloat16 sum would stop growing."""
    tokens = 1001
    plan = replace(Case((1, 1)).plan, count=1, tile=tokens, block=7)
    experts = map_shapes(lambda name, shape: jnp.ones((1, 1, *shape[2:]), jnp.bfloat16))
    stack = ExpertStack(experts, jnp.int32(0), plan)

    @jax.jit
    def down_gradient(valid):
        x = jnp.ones((tokens, FEATURES), jnp.bfloat16)
        given = x, jnp.zeros((tokens, 1), jnp.int32), jnp.ones((tokens, 1)), valid, x
        zero = {"down_proj": {"weight": jnp.zeros(experts["down_proj"]["weight"].shape)}}
        return pull_expert_ffn(*given, stack, zero)[2]["down_proj"]["weight"]

    np.testing.assert_allclose(down_gradient(jnp.ones(tokens, bool)), tokens * down_gradient(jnp.arange(tokens) == 5), rtol=1e-6)


def temporaries(experts, tokens=256):
    """(bytes of temporaries, of the experts) of forward and backward on one device, the accumulators donated."""
    plan = ExpertPlan(Owners(("context",), 1), Owners(("expert",), 1), experts, 32, 16, SCALE, tile=64, block=16)
    _, _, _, _, _, stacks = abstract(None, tokens, jnp.float32, experts=experts, features=32, hidden=16, layers=3)

    def run(x, indices, weights, valid, y_bar, stacks, gradient):
        stack = ExpertStack(stacks, jnp.int32(LAYER), plan)
        y = expert_ffn(x, indices, weights, valid, stack)
        return y, pull_expert_ffn(x, indices, weights, valid, y_bar, stack, gradient)

    rows, choices = jax.ShapeDtypeStruct((tokens, 32), jnp.float32), jax.ShapeDtypeStruct((tokens, TOP_K), jnp.float32)
    given = (rows, jax.ShapeDtypeStruct(choices.shape, jnp.int32), choices, jax.ShapeDtypeStruct((tokens,), bool), rows, stacks, stacks)
    memory = jax.jit(run, donate_argnums=6).lower(*given).compile().memory_analysis()
    held = sum(x.size * 4 for x in jax.tree.leaves(stacks))
    assert memory.alias_size_in_bytes >= held, "the accumulators are not grown in place"
    return memory.temp_size_in_bytes, held


def test_temporaries_do_not_grow_with_the_experts():
    (few, _), (many, held) = map(temporaries, (8, 64))
    assert many - few < 64 * 64  # the bounds of the experts' pairs; a row of each token and expert would be 64 * 256 * 16 * 4
    assert many < 0.2 * held  # no copy of a stack, or of a layer of it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_route_takes_the_lowest_expert_of_equal_ones(dtype):
    h = jnp.ones((2, FEATURES), dtype)
    gate = jnp.zeros((EXPERTS, FEATURES), dtype)
    bias = jnp.zeros(EXPERTS).at[jnp.asarray([9, 4])].set(0.5)
    np.testing.assert_array_equal(route(h, gate, bias, 4), [[4, 9, 0, 1]] * 2)
    assert route(h, gate, bias, 4).dtype == jnp.int32


def test_route_tells_close_scores_apart():
    """They differ by less than bfloat16 could show: 1/512 at a logit of 1."""
    h = jnp.ones((1, 2), jnp.bfloat16)
    gate = jnp.asarray([[1, 0], [1, 2**-9], [1, -(2**-9)]], jnp.bfloat16)
    np.testing.assert_array_equal(route(h, gate, jnp.zeros(3), 3), [[1, 0, 2]])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("normalise", [False, True])
def test_routing_weights(normalise):
    """The bias chooses and does not weigh; the gradient against finite differences."""
    h, _, gate, _ = drawn(TOKENS)
    bias = np.random.default_rng(2).normal(size=EXPERTS)
    indices = route(jnp.asarray(h), jnp.asarray(gate), jnp.asarray(bias), TOP_K)
    np.testing.assert_array_equal(indices, plain_choice(h, gate, bias))
    scores = np.take_along_axis(1 / (1 + np.exp(-h @ gate.T)), np.asarray(indices), 1)
    wanted = ROUTED_SCALE * (scores / scores.sum(1, keepdims=True) if normalise else scores)

    def weights(h, gate):
        return routing_weights(jnp.asarray(h), jnp.asarray(gate), indices, normalise=normalise, scale=ROUTED_SCALE)

    np.testing.assert_allclose(weights(h, gate), wanted, rtol=1e-12)
    jax.test_util.check_grads(weights, (h, gate), 1, ("rev",), rtol=1e-6, atol=1e-8)


def test_declared_parameters():
    """The shapes, placements and first values that `expert_ffn` expects, stacked over layers."""
    lora = LoraConfig(rank=RANK)

    def linear(name, *sizes):
        return ExpertLinear(*sizes, dtype="bfloat16", lora=lora if name in ADAPTED else None)

    module = nnx.eval_shape(lambda: nnx.vmap(lambda _: Experts(EXPERTS, FEATURES, HIDDEN, linear))(jnp.arange(LAYERS)))
    found = dict(nnx.to_flat_state(nnx.state(module)))
    assert {path: x.shape for path, x in found.items()} == {(p, n): shape for p, stacks in shapes().items() for n, shape in stacks.items()}
    for (_, name), x in found.items():
        assert x.get_metadata("axes") == AXES[name]
        assert x.dtype == ("bfloat16" if name == "weight" else "float32")
    a, b = (found["gate_proj", name].get_metadata("init") for name in ("lora_A", "lora_B"))
    values = a(np.random.default_rng(0), (RANK, FEATURES))
    assert not b(np.random.default_rng(0), (HIDDEN, RANK)).any() and 0.5 * FEATURES**-0.5 < np.abs(values).max() <= FEATURES**-0.5
