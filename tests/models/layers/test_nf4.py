"""NF4: the table by its own formula, the nearest codes by brute force, shards of a matrix, the gradient past it."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from scipy.stats import norm

from longstraw_jax.config import LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Packed, Parameter
from longstraw_jax.models.layers.linear import Linear
from longstraw_jax.models.layers.nf4 import BLOCK, TABLE, Nf4Matrix, blocks_of, dequantise, quantise
from longstraw_jax.sharding import EXPERT, SPLIT, Owners, PlacementRules, make_mesh


def test_table_is_the_normal_distributions():
    """Dettmers et al. (2023), eq. 4 and its reference implementation: 8 positive and 7 negative quantiles, 0 between them."""
    end = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))
    positive = norm.ppf(np.linspace(end, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(end, 0.5, 8)[:-1])
    table = np.sort([*negative, 0, *positive])
    np.testing.assert_allclose(TABLE, table / table.max(), atol=1e-6)


def nearest(weight: np.ndarray) -> np.ndarray:
    """The matrix that NF4 stands for, every weight by itself."""
    out = np.zeros(weight.shape, np.float32)
    for index in np.ndindex(weight.shape):
        *row, i = index
        block = weight[*row, i // BLOCK * BLOCK : (i // BLOCK + 1) * BLOCK].astype(np.float32)
        scale = np.abs(block).max().astype(ml_dtypes.bfloat16).astype(np.float32)
        x = weight[index].astype(np.float32) / (scale or 1)
        out[index] = TABLE[np.abs(TABLE - x).argmin()] * scale
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 200), st.integers(0, 2**32 - 1), st.sampled_from(["normal", "sparse", "tiny", "bfloat16"]))
def test_codes_are_the_nearest(rows, features, seed, kind):
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, features)).astype(np.float32)
    weight *= {"sparse": rng.random((rows, features)) < 0.02, "tiny": 1e-30}.get(kind, 1)
    weight = weight.astype(ml_dtypes.bfloat16) if kind == "bfloat16" else weight
    codes, scales = quantise(weight)
    assert codes.shape == (rows, blocks_of(features), BLOCK // 2) and codes.dtype == np.uint8
    assert scales.shape == codes.shape[:-1] and scales.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(dequantise(jnp.asarray(codes), jnp.asarray(scales), features, jnp.float32), nearest(weight))


def test_zero_blocks_and_ends():
    weight = np.zeros((2, 130), np.float32)
    weight[1, 129] = -3
    codes, scales = quantise(weight)
    np.testing.assert_array_equal(scales.astype(np.float32), [[0, 0, 0], [0, 0, 3]])
    np.testing.assert_array_equal(dequantise(jnp.asarray(codes), jnp.asarray(scales), 130, jnp.float32), weight)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_weights_that_are_not_finite(bad):
    weight = np.ones((2, 70), np.float32)
    weight[1, 69] = bad
    with pytest.raises(InputError, match="not all of its weights are finite"):
        quantise(weight)


def packed_parameters(features_out: int, features_in: int, count: int) -> list[Parameter]:
    """(codes, scales) of two stacked matrices on so many owners."""
    module = nnx.eval_shape(lambda: Nf4Matrix((features_out, features_in), jnp.float32, (SPLIT, SPLIT), lambda rng, shape: np.zeros(shape)))
    rules = PlacementRules(Owners(("context", "expert"), count))
    stack = np.array(["layers.0.", "layers.1."], object)
    return [Parameter((2, *v.shape), np.dtype(v.dtype), PartitionSpec(None, *rules.spec(v.shape, v.get_metadata("axes"))), stack,
                      "q_proj.weight", v.get_metadata("init"), v.get_metadata("packed")) for v in (module.codes, module.scales)]


@pytest.mark.parametrize(("mesh", "shape"), [
    ((1, 1), (6, 100)), ((2, 2), (8, 100)), ((8, 1), (16, 64)), ((3, 1), (4, 190)), ((3, 1), (4, 100)), ((2, 1), (3, 256))])
def test_shards_are_those_of_the_whole(mesh, shape):
    """Split over rows, over blocks where owners do not divide the rows, or over nothing; codes and scales alike."""
    mesh = make_mesh(*mesh)
    whole = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    codes, scales = packed_parameters(*shape, mesh.size)
    assert [*codes.spec][:3] == [*scales.spec][:3]
    assert codes.entry_shape == scales.entry_shape == shape
    assert parameters.count({"codes": codes, "scales": scales}) == whole.size
    arrays = [parameters.place(p, mesh, lambda stack, index: whole[stack][index]) for p in (codes, scales)]
    named = parameters.to_host(dict(zip(("codes", "scales"), arrays, strict=True)), {"codes": codes, "scales": scales})
    wanted = [np.asarray(dequantise(*map(jnp.asarray, quantise(w)), shape[1], jnp.float32)) for w in whole]
    assert named.keys() == {"model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight"}
    for name, w in zip(named, wanted, strict=True):
        np.testing.assert_array_equal(named[name], w)


def test_a_tensor_that_is_not_finite_is_named():
    codes, _ = packed_parameters(4, 64, 1)
    with pytest.raises(InputError, match="tensor model.layers.1.q_proj.weight: not all of its weights are finite"):
        parameters.place(codes, make_mesh(), lambda stack, index: np.full((4, 64), np.nan if stack == (1,) else 1.0)[index])


@pytest.mark.usefixtures("x64")
def test_gradient_is_the_plain_layers_with_the_same_weights(per_owner):
    rng = np.random.default_rng(1)
    x, y_bar = rng.standard_normal((8, 70)), rng.standard_normal((8, 12))
    packed, plain = (nnx.eval_shape(lambda p=p: Linear(70, 12, dtype=jnp.float64, lora=LoraConfig(3, 5), packed=p)) for p in (True, False))
    codes, scales = map(jnp.asarray, quantise(rng.standard_normal((12, 70))))
    low = {"lora_A": rng.standard_normal((3, 70)), "lora_B": rng.standard_normal((12, 3))}
    rows, mesh = PartitionSpec("context"), make_mesh(2)

    def pulled(module, weight, spec):
        graph, state = nnx.split(module)

        def f(weight, low, x, y_bar):
            def forward(low, x):
                bound = nnx.merge(graph, {"weight": weight, **low})
                return bound(x, Owners(("context", "expert"), 2))

            y, pull = jax.vjp(forward, low, x)
            low_bar, x_bar = pull(y_bar)
            return y, jax.lax.psum(low_bar, "context"), x_bar

        return per_owner(f, mesh, (spec, PartitionSpec(), rows, rows), (rows, PartitionSpec(), rows))(weight, low, x, y_bar)

    ours = pulled(packed, {"codes": codes, "scales": scales}, {"codes": rows, "scales": rows})
    wanted = pulled(plain, dequantise(codes, scales, 70, jnp.float64), rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), ours, wanted)


def test_experts_go_to_their_owners_as_plain_ones_do():
    rules = PlacementRules(Owners(("context", "expert"), 4), Owners(("expert",), 2))
    matrix = nnx.eval_shape(lambda: Nf4Matrix((8, 6, 100), jnp.bfloat16, (EXPERT, SPLIT, SPLIT), lambda rng, shape: np.zeros(shape)))
    assert rules.spec(matrix.codes.shape, matrix.codes.get_metadata("axes")) == PartitionSpec(("expert",), ("context",))
    assert rules.spec(matrix.scales.shape, matrix.scales.get_metadata("axes")) == PartitionSpec(("expert",), ("context",))
    assert matrix.codes.get_metadata("packed") == Packed("codes", 100, np.dtype("bfloat16"))
    assert dataclasses.replace(packed_parameters(6, 100, 1)[0], stack=None, shape=(6, 2, 32)).entry_shape == (6, 100)
