"""Attention without a mask: its formula, and when the library's kernel runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax import deviceless
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import check, dense_attention, dense_choice, implementation, lse_merge, traced_for
from longstraw_jax.sharding import make_mesh

Q, S, H, KV, D = 5, 7, 6, 2, 8


def rows(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((Q, H, D), (S, KV, D), (S, KV, D)))


def by_hand(q, k, v):
    """(output, LSE) in float64, head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse = np.empty_like(q), np.empty(q.shape[:2])
    for h in range(H):
        scores = q[:, h] @ k[:, h // (H // KV)].T / np.sqrt(D)
        lse[:, h] = np.log(np.exp(scores).sum(1))
        out[:, h] = np.exp(scores - lse[:, h, None]) @ v[:, h // (H // KV)]
    return out, lse


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("name", ["auto", "xla", "cudnn"])
def test_equals_the_formula(dtype, tolerance, name):
    with jax.enable_x64(dtype == "float64"):
        given = rows(dtype)
        out, lse = jax.jit(lambda *x: dense_attention(*x, name))(*given)
        assert out.dtype == dtype and lse.dtype == max(np.dtype("float32"), np.dtype(dtype), key=lambda d: d.itemsize)
        for x, wanted, allowed in zip((out, lse), by_hand(*given), (tolerance, min(tolerance, 2e-6)), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float64), wanted, rtol=0, atol=allowed)


@pytest.mark.usefixtures("x64")
def test_partials_merge_to_attention_over_all_keys():
    q, k, v = rows("float64")
    parts = [dense_attention(q, k[a:b], v[a:b]) for a, b in ((0, 3), (3, S))]
    for x, wanted in zip(lse_merge(*map(jnp.stack, zip(*parts, strict=True))), by_hand(q, k, v), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-12)


def test_has_no_derivative():
    with pytest.raises(UnsupportedError, match="no derivative"):
        jax.grad(lambda *x: dense_attention(*x)[1].sum())(*rows("float32"))


@pytest.fixture
def gpu(monkeypatch):
    """gpu(fault): as if there were a GPU on which the check found that. For choices only: what would run is not there."""

    def pretend(fault):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(check, "fault", lambda *sizes: fault)

    return pretend


def test_the_library_is_taken_where_there_is_a_gpu_that_has_passed(gpu):
    q = rows("bfloat16")[0]
    assert dense_choice(q, KV) == "xla", "no GPU"
    gpu(None)
    assert dense_choice(q, KV) == dense_choice(q, KV, "cudnn") == "cudnn"
    assert dense_choice(q, KV, "xla") == "xla"
    for name, wanted in (("xla", "xla"), ("cudnn", "cudnn"), ("pallas", "cudnn")):
        with implementation(name):
            assert dense_choice(q, KV) == wanted


@pytest.mark.parametrize(("dtype", "fault", "reason"), [
    ("float32", None, "float32; wanted bfloat16 or float16"), ("bfloat16", "fails: no such kernel", "no such kernel")])
def test_where_it_cannot_xla_attends(gpu, dtype, fault, reason):
    gpu(fault)
    q = rows(dtype)[0]
    assert dense_choice(q, KV) == "xla"
    with pytest.raises(UnsupportedError, match=reason):
        dense_choice(q, KV, "cudnn")
    with implementation("cudnn"), pytest.raises(UnsupportedError, match="ask for implementation 'xla' or 'auto'"):
        dense_choice(q, KV)


def test_names_that_an_operator_does_not_have():
    with pytest.raises(UnsupportedError, match="dense_attention has no implementation 'pallas'; wanted auto, xla or cudnn"):
        dense_attention(*rows("float32"), "pallas")
    with pytest.raises(UnsupportedError, match="lse_merge has no implementation 'cudnn'"):
        lse_merge(jnp.ones((2, 3, 1, 4)), jnp.zeros((2, 3, 1)), "cudnn")


def test_programs_that_are_only_compiled_never_ask_the_library(gpu):
    """Their GPUs are not there to ask; also where this process has others."""
    gpu(None)
    q = rows("bfloat16")[0]
    assert dense_choice(q, KV) == "cudnn"
    for mesh in (make_mesh(2), deviceless.abstract_mesh(deviceless.TARGET, 2)):
        with traced_for(mesh):
            assert dense_choice(q, KV) == "xla"
