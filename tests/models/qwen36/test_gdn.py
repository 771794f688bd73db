"""The Gated DeltaNet layer against its equations in numpy, and under several owners against one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.config import BlockSizes
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Segment
from longstraw_jax.models.qwen36.gdn import HeadShards
from longstraw_jax.models.qwen36.model import Qwen36Model
from longstraw_jax.models.qwen36.spec import Qwen36Spec
from longstraw_jax.sharding import Layout, Owners, make_mesh

SPEC = Qwen36Spec(
    vocab_size=32, hidden_size=12, intermediate_size=18, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=4, linear_value_head_dim=5)
TOKENS, GRANULE, CHUNK, TAPS = 24, 4, 4, SPEC.linear_conv_kernel_dim
OWNERS = (1, 2, 3, 6)
STATE = {"S": (6, 4, 5), "tail": (TAPS - 1, SPEC.conv_channels)}


@pytest.fixture
def layer(x64):
    """One layer's parameters, none constant, and keys so short that l2norm's epsilon shows; float64 for the test."""
    model, rng = build(1), np.random.default_rng(0)
    abstract = model.abstract_parameters()[0]["gdn"]

    def one(p):
        return 0.3 * rng.normal(size=p.shape[2:])

    tree = parameters.map_parameters(one, abstract)
    tree["linear_attn"]["in_proj_qkv"]["weight"] *= 5e-3
    return tree


@functools.cache
def build(count):
    """All parameters are trained, so they are one tree."""
    sizes = BlockSizes(recurrence=CHUNK)
    return Qwen36Model(SPEC, Owners(("context", "expert"), count), "float64", None, sizes)


@functools.cache
def program(count):
    """(layer, x, state, length, cotangents) -> (out, state, cotangents of the layer, of x, of the state), x device-major."""
    mesh, model = make_mesh(count), build(count)
    owners, layout = model.owners, Layout(model.owners, GRANULE)
    abstract = model.abstract_parameters()[0]["gdn"]
    specs = parameters.map_parameters(lambda p: PartitionSpec(*p.spec[2:]), abstract)
    replicated = parameters.map_parameters(lambda p: len(p.spec) == 0, abstract)

    def run(layer, x, state, length, out_bar, state_bar):
        segment = Segment(jnp.zeros(x.shape[0], int), jnp.int32(0), length, layout)
        (out, after), pull = jax.vjp(lambda p, x, s: model.bind("gdn", p, {})(x, s, segment), layer, x, state)
        layer_bar, x_bar, before_bar = pull((out_bar, state_bar))
        layer_bar = jax.tree.map(lambda g, whole: owners.sum(g) if whole else g, layer_bar, replicated)
        return out, after, layer_bar, x_bar, before_bar

    tokens, heads = owners.spec, {"S": PartitionSpec(owners.axes), "tail": PartitionSpec(None, owners.axes)}
    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(specs, tokens, heads, PartitionSpec(), tokens, heads),
        out_specs=(tokens, heads, specs, tokens, heads), check_vma=False))


def drawn(seed=1):
    """x [TOKENS, M], a state, and cotangents of both."""
    rng = np.random.default_rng(seed)
    x, x_bar = rng.normal(size=(2, TOKENS, SPEC.hidden_size))
    return x, *({name: rng.normal(size=shape) for name, shape in STATE.items()} for _ in range(2)), x_bar


def run(count, layer, x, state, length=TOKENS, out_bar=None, state_bar=None):
    """`program` on tokens in the order of the sequence and one owner's tail; results likewise, but tails as they come."""
    layout, shards = Layout(build(count).owners, GRANULE), HeadShards(SPEC, count)

    def deal(x):
        return layout.from_sequence(jnp.asarray(x)).reshape(x.shape)

    def split(state):
        return {"S": np.asarray(state["S"]), "tail": shards.split(jnp.asarray(state["tail"])).reshape(TAPS - 1, -1)}

    out_bar = jnp.zeros(x.shape) if out_bar is None else out_bar
    state_bar = jax.tree.map(jnp.zeros_like, split(state)) if state_bar is None else state_bar
    out, after, layer_bar, x_bar, before_bar = program(count)(
        layer, deal(x), split(state), jnp.int32(length), deal(out_bar), state_bar)
    sequence = [np.asarray(layout.to_sequence(y.reshape(count, -1, y.shape[-1]))) for y in (out, x_bar)]
    return sequence[0], after, layer_bar, sequence[1], before_bar


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_equations(p, x, state):
    """The layer in numpy, token by token (modeling_qwen3_5.Qwen3_5GatedDeltaNet and its decoder layer): (out, state)."""
    attn, eps = p["linear_attn"], SPEC.rms_norm_eps

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1 + w["weight"])

    def heads(x, count):
        return x.reshape(count, -1)

    u = norm(x, p["input_layernorm"])
    mixed, z, b, a = (u @ attn[f"in_proj_{name}"]["weight"].T for name in ("qkv", "z", "b", "a"))
    history, s = np.concatenate([state["tail"], mixed]), np.array(state["S"])
    out = np.zeros((len(x), 6, 5))
    for t in range(len(x)):
        window = history[t : t + TAPS]
        y = (window * attn["conv1d"]["weight"][:, 0].T).sum(0)
        q, k, v = np.split(y * sigmoid(y), [8, 16])
        q, k = (heads(c, 2) / np.sqrt((heads(c, 2) ** 2).sum(-1, keepdims=True) + 1e-6) for c in (q, k))
        v, beta = heads(v, 6), sigmoid(b[t])
        decay = np.exp(-np.exp(attn["A_log"]) * np.log1p(np.exp(a[t] + attn["dt_bias"])))
        for h in range(6):
            key, query = k[h // 3], q[h // 3] / np.sqrt(4)
            s[h] = s[h] * decay[h]
            s[h] = s[h] + np.outer(key, beta[h] * (v[h] - s[h].T @ key))
            out[t, h] = s[h].T @ query
    scaled = out / np.sqrt((out * out).mean(-1, keepdims=True) + eps) * attn["norm"]["weight"]
    gate = z.reshape(out.shape)
    h = x + (scaled * gate * sigmoid(gate)).reshape(len(x), -1) @ attn["out_proj"]["weight"].T
    gate, up, down = (p["mlp"][f"{name}_proj"]["weight"] for name in ("gate", "up", "down"))
    m = norm(h, p["post_attention_layernorm"])
    feed = (m @ gate.T) * sigmoid(m @ gate.T) * (m @ up.T)
    return h + feed @ down.T, {"S": s, "tail": history[len(x) :]}


@pytest.mark.parametrize("count", OWNERS)
def test_equations(layer, count):
    """Ragged lengths: what follows the last token changes neither the outputs before it nor the state."""
    x, state, *_ = drawn()
    for length in (1, 2, 3, 4, TOKENS - 5, TOKENS):
        padded = np.where(np.arange(TOKENS)[:, None] < length, x, 1e4)
        out, after, *_ = run(count, layer, padded, state, length)
        wanted, wanted_state = by_equations(layer, x[:length], state)
        np.testing.assert_allclose(out[:length], wanted, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(after["S"], wanted_state["S"], rtol=1e-9, atol=1e-11)
        tail = HeadShards(SPEC, count).split(jnp.asarray(wanted_state["tail"])).reshape(TAPS - 1, -1)
        np.testing.assert_allclose(after["tail"], tail, rtol=1e-11, atol=1e-13)


def test_the_epsilon_of_short_keys_shows(layer):
    """Guards the test above: with keys as long as usual it would not see a wrong epsilon."""
    x, state, *_ = drawn()
    attn = layer["linear_attn"]
    u = x / np.sqrt((x * x).mean(-1, keepdims=True)) * (1 + layer["input_layernorm"]["weight"])
    assert np.square(u @ attn["in_proj_qkv"]["weight"].T).mean() * SPEC.linear_key_head_dim < 1e-2


@pytest.mark.parametrize("count", OWNERS[1:])
def test_owners_equal_one(layer, count):
    """Outputs, state, and the cotangents of every parameter, of the input and of the entry state."""
    x, state, state_bar, out_bar = drawn(2)
    shards = HeadShards(SPEC, count)
    one = run(1, layer, x, state, TOKENS - 3, out_bar, jax.tree.map(jnp.asarray, state_bar))
    # a key head's copies hold the same tail; their cotangents add up, so one copy gets all of it here
    first = shards.split(jnp.arange(SPEC.conv_channels)).reshape(-1)
    first = np.unique(np.asarray(first), return_index=True)[1]
    spread = np.zeros((TAPS - 1, count * shards.channels))
    spread[:, first] = state_bar["tail"]
    many = run(count, layer, x, state, TOKENS - 3, out_bar, {"S": jnp.asarray(state_bar["S"]), "tail": jnp.asarray(spread)})

    def same(a, b, name):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)

    same(many[0][: TOKENS - 3], one[0][: TOKENS - 3], "out")
    same(many[1]["S"], one[1]["S"], "S")
    same(many[1]["tail"], shards.split(jnp.asarray(one[1]["tail"])).reshape(TAPS - 1, -1), "tail")
    for (path, a), b in zip(jax.tree.leaves_with_path(many[2]), jax.tree.leaves(one[2]), strict=True):
        same(a, b, jax.tree_util.keystr(path))
    same(many[3], one[3], "cotangent of x")
    same(many[4]["S"], one[4]["S"], "cotangent of S")
    channel = np.asarray(shards.split(jnp.arange(SPEC.conv_channels)).reshape(-1))
    gathered = np.zeros((TAPS - 1, SPEC.conv_channels))
    np.add.at(gathered, (slice(None), channel), np.asarray(many[4]["tail"]))
    same(gathered, one[4]["tail"], "cotangent of the tail")


@pytest.mark.parametrize("count", [1, 3])
def test_padding_is_inert(layer, count):
    """Two paddings, the same bits: outputs, state and the gradient that real tokens give."""
    x, state, state_bar, out_bar = drawn(3)
    real = np.arange(TOKENS)[:, None] < 10
    state_bar = {"S": jnp.asarray(state_bar["S"]), "tail": jnp.zeros((TAPS - 1, count * HeadShards(SPEC, count).channels))}
    results = []
    for filler in (0.0, 3.0, -1e3):
        out, after, layer_bar, x_bar, before_bar = run(
            count, layer, np.where(real, x, filler), state, 10, np.where(real, out_bar, 0), state_bar)
        np.testing.assert_array_equal(x_bar[10:], 0)
        results.append((out[:10], after, layer_bar, x_bar, before_bar))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


def test_two_segments_are_one(layer):
    x, state, *_ = drawn(4)
    whole, last, *_ = run(2, layer, x, state)
    for cut in (1, 2, 11):
        first, between, *_ = run(2, layer, np.pad(x[:cut], ((0, TOKENS - cut), (0, 0))), state, cut)
        rest = np.pad(x[cut:], ((0, cut), (0, 0)))
        second, end, *_ = run(2, layer, rest, {"S": between["S"], "tail": unsplit(2, between["tail"])}, TOKENS - cut)
        np.testing.assert_allclose(np.concatenate([first[:cut], second[: TOKENS - cut]]), whole, rtol=1e-9, atol=1e-11)
        for name in ("S", "tail"):
            np.testing.assert_allclose(end[name], last[name], rtol=1e-9, atol=1e-11)


def unsplit(count, tail):
    """The inverse of `HeadShards.split`, through the channels' numbers."""
    channel = np.asarray(HeadShards(SPEC, count).split(jnp.arange(SPEC.conv_channels)).reshape(-1))
    whole = np.zeros((TAPS - 1, SPEC.conv_channels))
    whole[:, channel] = tail
    return whole


@pytest.mark.parametrize("owners", [4, 5, 7, 12])
def test_refused_degrees(owners):
    wanted = f"{owners} context owners cannot share 6 Gated DeltaNet value heads evenly; use a mesh of 1, 2, 3, 6 devices"
    with pytest.raises(UnsupportedError, match=wanted):
        HeadShards(SPEC, owners)
    with pytest.raises(UnsupportedError, match=wanted):
        Qwen36Model(SPEC, Owners(("context", "expert"), owners))


@pytest.mark.parametrize(("keys", "values", "owners", "repeat"), [
    (2, 6, 1, 1), (2, 6, 2, 1), (2, 6, 3, 3), (2, 6, 6, 3), (16, 48, 24, 3), (4, 16, 8, 2),
])
def test_repeat(keys, values, owners, repeat):
    """As few copies of the key heads as the owners can share; every value head beside its own key head."""
    spec = dataclasses.replace(SPEC, linear_num_key_heads=keys, linear_num_value_heads=values)
    shards = HeadShards(spec, owners)
    assert (shards.repeat, shards.key_heads, shards.value_heads) == (repeat, keys * repeat // owners, values // owners)
    width_k, width_v = spec.linear_key_head_dim, spec.linear_value_head_dim
    head_of_channel = np.concatenate([np.repeat(np.arange(keys), width_k)] * 2 + [np.repeat(np.arange(values), width_v)])
    per_owner = shards.split(jnp.asarray(head_of_channel)[None])[0]
    assert per_owner.shape == (owners, shards.channels)
    for owner in per_owner:
        q, k, v = (np.asarray(x[0, :, 0]) for x in shards.heads(owner[None].astype(jnp.float32)))
        key_of_value = np.repeat(k, len(v) // len(k))
        np.testing.assert_array_equal(q, k)
        np.testing.assert_array_equal(key_of_value, v // (values // keys))
    np.testing.assert_array_equal(np.unique(np.asarray(per_owner)[:, -shards.value_heads * width_v :]), np.arange(values))


def test_statistics_stay_wide():
    """Under bfloat16 weights A_log, dt_bias and the state are float32."""
    model = Qwen36Model(SPEC, Owners(("context", "expert"), 1), "bfloat16")
    trainable, frozen = model.abstract_parameters()
    attn = frozen["gdn"]["linear_attn"]
    assert {name: str(attn[name].dtype) for name in ("A_log", "dt_bias")} == dict.fromkeys(("A_log", "dt_bias"), "float32")
    assert str(attn["in_proj_qkv"]["weight"].dtype) == "bfloat16"
    shapes, _ = model.abstract_recurrent()
    assert (shapes["S"].dtype, shapes["tail"].dtype) == (jnp.float32, jnp.bfloat16)
    assert shapes["S"].shape == (1, 3, 6, 4, 5)
