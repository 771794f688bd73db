"""A strict session: eight fake CPU devices, annotations checked at every call, no implicit rank promotion, full products."""

import gc
import os
import warnings

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
# Compiling is what the suite costs on two cores; the machine code of its tiny shapes need not be fast.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import jaxtyping
import pytest
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

# Before the package is imported. The numeric tower is PEP 484's: an int does where a float is wanted.
jaxtyping.install_import_hook("longstraw_jax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

with warnings.catch_warnings():
    # beartype's advice about typing.Hashable, of which Flax makes the keys of nnx.State
    warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
    from longstraw_jax.capture import capture_program
    from longstraw_jax.conventional.autodiff import _loss_and_gradient
    from longstraw_jax.members import _members_program
    from longstraw_jax.sharding import fake_cpu_devices, make_mesh
    from longstraw_jax.sweep import sweep_program
    from longstraw_jax.update import update_program

fake_cpu_devices(8)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    # the same advice, for modules that tests import
    config.addinivalue_line("filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """After each file its programs go. Their machine code lies in memory maps of its own, a process may have 65,530 of them, and XLA
    ends the process where it gets no more."""
    yield
    for programs in (capture_program, _members_program, sweep_program, update_program, _loss_and_gradient):
        programs.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def x64():
    """64-bit mode for one test. Arrays of fixtures with a wider scope are made outside of it."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def mesh():
    """mesh(context, expert=1): a mesh of the first fake devices."""
    return make_mesh


@pytest.fixture
def per_owner():
    """per_owner(f, mesh, in_specs, out_specs): `f` on every device's shards, as the engine's programs run it."""

    def program(f, mesh, in_specs, out_specs):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))

    return program
