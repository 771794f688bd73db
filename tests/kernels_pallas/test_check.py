"""What a kernel has to show on the GPU at hand before it is used, and what comes of it if it does not."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import check, implementation, lse_merge
from longstraw_jax.kernels_pallas.check import fault
from longstraw_jax.kernels_pallas.dense_attention import cudnn
from longstraw_jax.kernels_pallas.dense_attention.compare import compare as compare_attention
from longstraw_jax.kernels_pallas.dense_attention.reference import dense_attention_reference
from longstraw_jax.kernels_pallas.dsa_select import kernel as selection
from longstraw_jax.kernels_pallas.dsa_select.compare import compare as compare_selection
from longstraw_jax.kernels_pallas.lse_merge.compare import compare as compare_merge
from longstraw_jax.kernels_pallas.lse_merge.reference import lse_merge_reference, pull_reference
from longstraw_jax.sharding import make_mesh

H, KV, D = 6, 2, 8


@pytest.fixture(autouse=True)
def _forget():
    fault.cache_clear()
    yield
    fault.cache_clear()


@pytest.mark.parametrize("sizes", [(1, 7, "float32", "float32"), (3, 16, "float32", "float32"), (8, 5, "bfloat16", "float32")])
def test_the_merge_passes(sizes):
    assert compare_merge(*sizes, interpret=True) is None


@pytest.mark.parametrize("sizes", [("bfloat16", 2, 16, 20), ("float32", 3, 5, 9), ("float16", 1, 8, 300)])
def test_the_selection_passes(sizes):
    assert compare_selection(*sizes, interpret=True) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_passes(monkeypatch, dtype):
    monkeypatch.setattr(cudnn, "attention", dense_attention_reference)
    assert compare_attention(dtype, H, KV, D) is None


def test_a_wrong_merge_is_found(monkeypatch):
    module = sys.modules[compare_merge.__module__]
    monkeypatch.setattr(module, "pull_merge", lambda *x, interpret: tuple(2 * y for y in pull_reference(*x)))
    assert "differs" in compare_merge(3, 16, "float32", "float32", interpret=True)
    monkeypatch.undo()
    monkeypatch.setattr(module, "merge", lambda partials, lse, interpret: lse_merge_reference(partials[1:], lse[1:]))
    assert compare_merge(3, 16, "float32", "float32", interpret=True) is None, "the first is empty"
    monkeypatch.setattr(module, "merge", lambda partials, lse, interpret: lse_merge_reference(partials[:-1], lse[:-1]))
    assert "differs" in compare_merge(3, 16, "float32", "float32", interpret=True)


def test_a_wrong_selection_is_found(monkeypatch):
    """The highest position of equal scores, not the lowest."""
    right = selection.select

    def backwards(q, w, positions, keys, candidates, interpret):
        found = right(q, w, positions, keys, candidates, interpret=interpret)
        return found._replace(positions=jnp.where(found.positions == found.positions.min(), 1, found.positions))

    monkeypatch.setattr(selection, "select", backwards)
    assert "other keys" in compare_selection("bfloat16", 2, 16, 20, interpret=True)


def two_based(q, k, v):
    out, lse = dense_attention_reference(q, k, v)
    return out, lse / np.log(2)


def unscaled(q, k, v):
    return dense_attention_reference(q * q.shape[-1] ** 0.5, k, v)


def other_heads(q, k, v):
    """Query heads dealt to the key-value heads in turn."""
    return dense_attention_reference(q, jnp.tile(k, (1, H // KV, 1)), jnp.tile(v, (1, H // KV, 1)))


def half(q, k, v):
    return dense_attention_reference(q, k[: k.shape[0] // 2], v[: v.shape[0] // 2])


def rounded(q, k, v):
    out, lse = dense_attention_reference(q, k, v)
    return out, lse.astype(q.dtype)


def undefined(q, k, v):
    out, lse = dense_attention_reference(q, k, v)
    return out * jnp.nan, lse


@pytest.mark.parametrize("kernel", [two_based, unscaled, other_heads, half, rounded, undefined])
def test_wrong_attention_is_found(monkeypatch, kernel):
    monkeypatch.setattr(cudnn, "attention", kernel)
    assert "differs" in compare_attention("bfloat16", H, KV, D)


@pytest.mark.parametrize(("compare", "sizes"), [
    (compare_merge, (3, 16, "float32", "float32")), (compare_selection, ("bfloat16", 2, 16, 20)),
    (compare_attention, ("bfloat16", H, KV, D))])
def test_what_a_kernel_raises_is_a_fault(compare, sizes):
    """None of them runs here but interpreted."""
    with pytest.warns(RuntimeWarning, match="operator runs as XLA, which is slower: the kernel fails: "):
        assert fault("operator", compare, *sizes).startswith("fails: ")


def test_it_is_asked_once_and_outside_of_the_trace_that_is_going_on():
    asked = []

    def compare(size):
        asked.append(float(jax.jit(jnp.sum)(jnp.ones(size))))  # no tracer
        return None

    def f(x):
        assert fault("operator", compare, 3) is None
        return x

    for _ in range(2):
        jax.jit(jax.shard_map(f, mesh=make_mesh(2), in_specs=PartitionSpec(), out_specs=PartitionSpec())).lower(jnp.ones(2))
    assert asked == [3.0]


def test_among_several_processes_it_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="operator: the kernel is off in process 0; ask for implementation 'xla' everywhere"):
        fault("operator", lambda: "is off")


def test_a_kernel_with_a_fault_is_not_used(monkeypatch):
    """On a GPU; where there is none nobody asks."""
    arguments = jnp.ones((2, 3, 1, 4)), jnp.zeros((2, 3, 1))
    traced = functools.partial(jax.make_jaxpr(lambda *x: lse_merge(*x)), *arguments)
    monkeypatch.setattr(check, "fault", lambda *sizes: "is off")
    assert "pallas_call" in str(traced())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    assert "pallas_call" not in str(traced())
    with implementation("pallas"), pytest.raises(UnsupportedError, match="is off; or ask for implementation 'xla'"):
        lse_merge(*arguments)
