"""Embedding and log-probabilities, split over the owners or replicated, against the plain forms in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from longstraw_jax.models.layers.vocabulary import Embedding, Head, largest_divisor
from longstraw_jax.sharding import Owners, PlacementRules, make_mesh

D, TOKENS, BLOCK, TEMPERATURE = 8, 6, 4, 0.7  # tokens of each owner; a block of 4 becomes two of 3
SPLITS = [(1, 250), (4, 24), (4, 250), (8, 250), (8, 256)]  # owners, vocabulary: 4 and 8 do not divide 250


def bound(module, weight):
    graph, _ = nnx.split(module)
    return nnx.merge(graph, {"weight": weight})


def placed(module, owners):
    """Where the engine puts the module's weight."""
    return PlacementRules(owners).spec(module.weight.shape, module.weight.get_metadata("axes"))


def owners_and_mesh(count):
    mesh = make_mesh(count)
    return Owners.of(mesh), mesh


def targets_of(vocabulary, tokens):
    """Random ones, and the edges of every shard among them."""
    targets = np.random.default_rng(1).integers(0, vocabulary, tokens)
    targets[:6] = 0, vocabulary - 1, vocabulary // 2, vocabulary // 2 - 1, vocabulary // 4, vocabulary // 4 - 1
    return targets


@functools.cache
def head_program(count, vocabulary, features=D, dtype="float64", block=BLOCK, wants_weight=True):
    """(weight, hidden, targets, cotangent) -> (logprobs, lse, cotangent of hidden, of the weight, added to ones)."""
    owners, mesh = owners_and_mesh(count)
    head = Head(vocabulary, features, dtype=dtype)

    def run(weight, hidden, targets, cotangent):
        shard = bound(head, weight)
        temperature = jnp.asarray(TEMPERATURE, cotangent.dtype)
        logprobs, lse = shard.logprobs(hidden, targets, owners, block, temperature)
        so_far = jnp.ones(weight.shape, cotangent.dtype) if wants_weight else None
        back, grown = shard.pull(hidden, targets, lse, cotangent, owners, block, temperature, so_far)
        if wants_weight and weight.shape[0] == vocabulary:  # replicated: every owner has its tokens' part
            grown = owners.sum(grown - 1) + 1
        return logprobs, lse, back, grown

    weight, tokens = placed(head, owners), owners.spec
    assert (weight == PartitionSpec(owners.axes)) == (vocabulary % count == 0)
    ins, outs = (weight, tokens, tokens, tokens), (tokens, tokens, tokens, weight)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
    # otherwise the CPU compiler leaves out roundings to bfloat16 that other devices make
    return jax.jit(mapped, compiler_options={"xla_allow_excess_precision": False})


def plain(weight, hidden, targets):
    scores = jax.nn.log_softmax(hidden @ weight.T / TEMPERATURE)
    return jnp.take_along_axis(scores, targets[:, None], 1)[:, 0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("count", "vocabulary"), SPLITS)
def test_logprobs_and_their_transpose(count, vocabulary):
    rng = np.random.default_rng(0)
    weight, hidden = jnp.asarray(rng.normal(size=(vocabulary, D))), jnp.asarray(rng.normal(size=(count * TOKENS, D)))
    targets, cotangent = jnp.asarray(targets_of(vocabulary, count * TOKENS)), jnp.asarray(rng.normal(size=count * TOKENS))
    logprobs, lse, back, grown = head_program(count, vocabulary)(weight, hidden, targets, cotangent)
    wanted, pull = jax.vjp(lambda w, h: plain(w, h, targets), weight, hidden)
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-12)
    np.testing.assert_allclose(lse, jax.scipy.special.logsumexp(hidden @ weight.T / TEMPERATURE, -1), rtol=1e-12)
    wanted_weight, wanted_hidden = pull(cotangent)
    np.testing.assert_allclose(back, wanted_hidden, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(grown - 1, wanted_weight, rtol=1e-9, atol=1e-13)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("count", "vocabulary"), [(4, 24), (4, 250)])
def test_pads_are_inert(count, vocabulary):
    rng = np.random.default_rng(2)
    weight, hidden = jnp.asarray(rng.normal(size=(vocabulary, D))), jnp.asarray(rng.normal(size=(count * TOKENS, D)))
    targets, cotangent = targets_of(vocabulary, count * TOKENS), rng.normal(size=count * TOKENS)
    pads = np.arange(count * TOKENS) % TOKENS >= 4
    cotangent = jnp.asarray(np.where(pads, 0, cotangent))
    results = []
    for filler in (0, -1, 10**6):
        ids = jnp.asarray(np.where(pads, filler, targets))
        logprobs, _, back, grown = map(np.asarray, head_program(count, vocabulary)(weight, hidden, ids, cotangent))
        assert np.isfinite(logprobs).all()
        np.testing.assert_array_equal(back[pads], 0)
        results.append((logprobs[~pads], back, grown))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("x64")
def test_without_a_weight_gradient():
    rng = np.random.default_rng(3)
    weight, hidden, cotangent = (jnp.asarray(rng.normal(size=s)) for s in ((24, D), (4 * TOKENS, D), 4 * TOKENS))
    targets = jnp.asarray(targets_of(24, 4 * TOKENS))
    frozen = head_program(4, 24, wants_weight=False)(weight, hidden, targets, cotangent)
    trained = head_program(4, 24)(weight, hidden, targets, cotangent)
    assert frozen[3] is None
    np.testing.assert_allclose(frozen[2], trained[2], rtol=1e-13)


@pytest.mark.parametrize("count", [1, 4])
def test_bfloat16_is_reduced_in_float32(count):
    vocabulary = 4096
    program = head_program(count, vocabulary, 16, "bfloat16")
    hidden = jnp.zeros((count * TOKENS, 16), jnp.bfloat16).at[:, 0].set(70)  # a logit of 100 at temperature 0.7
    weight = jnp.zeros((vocabulary, 16), jnp.bfloat16).at[1500, 0].set(1)
    targets = jnp.full(count * TOKENS, 1500)
    zeros = jnp.zeros(count * TOKENS)
    peaked, *_ = program(weight, hidden, targets, zeros)
    assert peaked.dtype == jnp.float32
    assert (peaked <= 0).all() and (peaked > -0.3).all()
    np.testing.assert_allclose(peaked, 0, atol=1e-5)
    flat, *_ = program(jnp.zeros_like(weight), hidden, targets, zeros)
    np.testing.assert_allclose(flat, -np.log(vocabulary), rtol=1e-6)  # bfloat16 has 8.3125 and 8.375 beside 8.3178

    rng = np.random.default_rng(5)
    weight, hidden = (jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16) for x in (weight, hidden))
    given, *_ = program(weight, hidden, targets, zeros)
    scores = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T / TEMPERATURE
    wanted = scores[:, 1500] - np.log(np.exp(scores).sum(-1))
    np.testing.assert_allclose(given, wanted, rtol=1e-5)  # logits rounded to bfloat16 would be off by 1e-2


def test_no_token_by_vocabulary_buffer():
    """Temporary memory is one block's logits: flat in the number of tokens."""
    vocabulary, count, block = 8192, 2, 16

    def temporary(tokens):
        shapes = [(vocabulary, 16), (count * tokens, 16), (count * tokens,), (count * tokens,)]
        dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
        program = head_program(count, vocabulary, 16, "float32", block)
        compiled = program.lower(*(jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary(512), temporary(1024)
    assert short < 512 * vocabulary * 4 / 4
    assert long - short < 512 * 16 * 4 * 8  # activations, no logits


@functools.cache
def embedding_program(count, features):
    """(table, ids, valid, cotangent) -> (rows, cotangent of the table)."""
    owners, mesh = owners_and_mesh(count)
    embedding = Embedding(20, features, dtype="float64")

    def run(table, ids, valid, cotangent):
        rows, pull = jax.vjp(lambda table: bound(embedding, table)(ids, valid, owners, jnp.float64), table)
        grown, = pull(cotangent)
        return rows, owners.sum(grown) if table.shape[1] == features else grown

    table, tokens = placed(embedding, owners), owners.spec
    return jax.jit(jax.shard_map(
        run, mesh=mesh, in_specs=(table, tokens, tokens, tokens), out_specs=(tokens, table), check_vma=False))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("count", "features"), [(1, 6), (4, 8), (4, 6)])
def test_embedding(count, features):
    rng = np.random.default_rng(4)
    table, cotangent = rng.normal(size=(20, features)), rng.normal(size=(count * TOKENS, features))
    ids, valid = rng.integers(0, 20, count * TOKENS), np.arange(count * TOKENS) % TOKENS < 4
    cotangent[~valid] = 0
    wanted = np.zeros_like(table)
    np.add.at(wanted, ids[valid], cotangent[valid])
    results = []
    for filler in (3, -7, 10**6):
        given = np.where(valid, ids, filler)
        rows, grown = map(np.asarray, embedding_program(count, features)(table, given, valid, cotangent))
        np.testing.assert_array_equal(rows[valid], table[ids[valid]])
        np.testing.assert_allclose(grown, wanted, rtol=1e-12, atol=1e-14)
        results.append(rows)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize(("size", "limit", "wanted"), [(12, 5, 4), (12, 12, 12), (12, 100, 12), (7, 6, 1), (1, 1, 1)])
def test_largest_divisor(size, limit, wanted):
    assert largest_divisor(size, limit) == wanted
