"""Which implementation runs: by name, by region, by input, and by the platform that a program is compiled for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from longstraw_jax.errors import InputError, UnsupportedError
from longstraw_jax.kernels_pallas import Candidates, dsa_select, implementation, lse_merge, region
from longstraw_jax.kernels_pallas.dsa_select.shapes import SelectShape
from longstraw_jax.kernels_pallas.lse_merge.reference import lse_merge_reference

SHAPE = SelectShape(queries=3, keys=8, heads=2, width=4, k=2)


@pytest.fixture(autouse=True)
def _gpu():
    """What is traced may be for this GPU: since JAX 0.11 Triton asks."""
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("device",), (AxisType.Auto,), abstract_device=device)):
        yield


def merge(implementation="auto", dtype=jnp.float32):
    """The traced program of a merge."""
    arguments = jnp.ones((2, 3, 1, 4), dtype), jnp.zeros((2, 3, 1), dtype)
    return jax.jit(lambda *x: lse_merge(*x, implementation)).trace(*arguments)


def selection(implementation="auto", dtype=jnp.float32):
    def f(q, w, positions, rows):
        return tuple(dsa_select(q, w, positions, SHAPE.stretch(rows), 4, Candidates.none(3, 2, q.dtype), implementation))

    arguments = [jnp.zeros(x.shape, x.dtype if x.dtype == jnp.int32 else dtype) for x in SHAPE.abstract()]
    return jax.jit(f).trace(*arguments)


OPERATORS = pytest.mark.parametrize("trace", [merge, selection])


def kernels(traced, platform):
    """How many kernels a program has that are compiled, not interpreted."""
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return text.count("__gpu$xla.gpu.triton") + text.count("triton_kernel_call")


@OPERATORS
def test_the_platform_that_is_compiled_for_decides(trace):
    traced = trace()
    assert kernels(traced, "cpu") == 0
    assert kernels(traced, "cuda") == 1


@OPERATORS
def test_by_name(trace):
    assert "pallas_call" not in str(trace("xla").jaxpr)
    assert kernels(trace("pallas"), "cuda") == 1
    auto, xla, interpreted = (trace(name).lower(lowering_platforms=("cpu",)).as_text() for name in ("auto", "xla", "pallas"))
    assert len(interpreted) > 1.5 * len(xla) > len(auto)


@OPERATORS
def test_by_region(trace):
    with implementation("pallas"):
        assert region() == "pallas"
        assert "interpret=True" in str(trace().jaxpr)
        assert "pallas_call" not in str(trace("xla").jaxpr), "a name goes before the region"
        with implementation("xla"):
            assert "pallas_call" not in str(trace().jaxpr)
        assert region() == "pallas"
    assert region() == "auto"


@OPERATORS
@pytest.mark.usefixtures("x64")
def test_float64_runs_as_xla_or_not_at_all(trace):
    assert "pallas_call" not in str(trace(dtype=jnp.float64).jaxpr)
    with pytest.raises(UnsupportedError, match="float64; wanted bfloat16, float16 or float32"):
        trace("pallas", jnp.float64)
    with implementation("pallas"), pytest.raises(UnsupportedError, match="ask for implementation 'xla' or 'auto'"):
        trace(dtype=jnp.float64)


def test_no_such_implementation():
    with pytest.raises(InputError, match="'mosaic'; wanted one of auto, xla, pallas"), implementation("mosaic"):
        pass
    assert region() == "auto"


@pytest.mark.parametrize(("shape", "reason"), [((2, 0, 3, 4), "are empty"), ((2, 1, 1, 5000), "wanted at most 4096")])
def test_sizes_that_the_merge_kernel_refuses(shape, reason):
    arguments = jnp.zeros(shape), jnp.zeros(shape[:3])
    with pytest.raises(UnsupportedError, match=reason):
        lse_merge(*arguments, "pallas")
    assert lse_merge(*arguments)[0].shape == shape[1:]


def test_without_the_backend_auto_is_xla(monkeypatch):
    monkeypatch.setattr("longstraw_jax.kernels_pallas.dispatch.MISSING", "no such backend")
    assert "pallas_call" not in str(merge().jaxpr)
    with pytest.raises(UnsupportedError, match="no such backend"):
        merge("pallas")


def test_the_xla_merge_is_the_reference():
    rng = np.random.default_rng(0)
    arguments = jnp.float32(rng.normal(size=(3, 4, 2, 5))), jnp.float32(rng.normal(size=(3, 4, 2)))
    for a, b in zip(lse_merge(*arguments), lse_merge_reference(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
