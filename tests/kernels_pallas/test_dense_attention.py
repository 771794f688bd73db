"""Attention without a mask: its formula, when the library's kernel runs it, and the check that the kernel has to pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax import deviceless
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import dense_attention, dense_choice, implementation, lse_merge, traced_for
from longstraw_jax.kernels_pallas.dense_attention import cudnn
from longstraw_jax.kernels_pallas.dense_attention.reference import dense_attention_reference
from longstraw_jax.sharding import make_mesh

Q, S, H, KV, D = 5, 7, 6, 2, 8
HEADS = ("bfloat16", H, KV, D)


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
        monkeypatch.setattr(cudnn, "fault", lambda *heads: fault)

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


def formula(q, k, v):
    return dense_attention_reference(q, k, v)


def two_based(q, k, v):
    out, lse = formula(q, k, v)
    return out, lse / np.log(2)


def unscaled(q, k, v):
    return formula(q * q.shape[-1] ** 0.5, k, v)


def other_heads(q, k, v):
    """Query heads dealt to the key-value heads in turn."""
    return formula(q, jnp.tile(k, (1, H // KV, 1)), jnp.tile(v, (1, H // KV, 1)))


def causal(q, k, v):
    return formula(q, k[: k.shape[0] // 2], v[: v.shape[0] // 2])


def rounded(q, k, v):
    out, lse = formula(q, k, v)
    return out, lse.astype(q.dtype)


def undefined(q, k, v):
    out, lse = formula(q, k, v)
    return out * jnp.nan, lse


def unsupported(q, k, v):
    raise NotImplementedError("head dim\nand more")


@pytest.mark.parametrize("kernel", [two_based, unscaled, other_heads, causal, rounded, undefined, unsupported])
def test_the_check_finds(monkeypatch, kernel):
    monkeypatch.setattr(cudnn, "attention", kernel)
    wanted = "NotImplementedError: head dim$" if kernel is unsupported else "differs from the plain formula"
    with pytest.warns(RuntimeWarning, match=f"runs as XLA.*{wanted}"):
        assert cudnn.fault.__wrapped__(*HEADS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_check_passes_what_is_right_and_can_be_made_while_a_program_is_traced(monkeypatch, dtype):
    monkeypatch.setattr(cudnn, "attention", formula)
    found = []

    def f(x):
        found.append(cudnn.fault.__wrapped__(dtype, H, KV, D))
        return x

    jax.jit(jax.shard_map(f, mesh=make_mesh(2), in_specs=PartitionSpec(), out_specs=PartitionSpec())).lower(jnp.ones(2))
    assert found == [None]


def test_the_check_fails_here():
    """The call is the real one: without a GPU it raises, and that is a reason like any other."""
    with pytest.warns(RuntimeWarning, match="fails: "):
        assert cudnn.fault.__wrapped__(*HEADS).startswith("fails: ")


def test_among_several_processes_a_failed_check_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="in process 0.*everywhere"):
        cudnn.fault.__wrapped__(*HEADS)
