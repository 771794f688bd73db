"""The kernels become machine code of a Hopper GPU, at every named shape, without one."""

import importlib.util
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from longstraw_jax import deviceless
from longstraw_jax.backend import installed
from longstraw_jax.deviceless import compiler
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import Candidates, dsa_select, lse_merge
from longstraw_jax.kernels_pallas.dsa_select.shapes import SHAPES as SELECTIONS
from longstraw_jax.kernels_pallas.dsa_select.shapes import SelectShape
from longstraw_jax.kernels_pallas.lse_merge.shapes import SHAPES as MERGES


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        deviceless.require_compiler()
    except UnsupportedError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """Where XLA writes what it compiles."""
    monkeypatch.setattr(compiler, "OPTIONS", {**compiler.OPTIONS, "xla_dump_to": str(tmp_path)})
    return tmp_path


def ptxas() -> str:
    """The assembler that comes with the compiler's packages, or the machine's own."""
    places = importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations if installed("nvidia.cuda_nvcc") else ()
    return next((str(path) for place in places if (path := Path(place, "bin", "ptxas")).exists()), "ptxas")


def assert_fits(dump, *names):
    """Nothing is spilled, and a block's registers and shared memory are there on a Hopper GPU, by the compiler's and ptxas' counts."""
    launches = next(dump.glob("*.thunk_sequence.txt")).read_text()
    sources = {path: path.read_text() for path in dump.glob("*.ptx")}
    for name in names:
        threads, shared = map(int, re.search(rf" {name} grid: .* threads: \[(\d+), 1, 1\] +shared_memory: (\d+) bytes", launches).groups())
        path = next(path for path, text in sources.items() if f".entry {name}(" in text)
        said = subprocess.run([ptxas(), "-v", "--gpu-name=sm_90a", path, "-o", dump / "cubin"], capture_output=True, text=True, check=True)
        registers = int(re.search(r"Used (\d+) registers", said.stderr).group(1))
        assert "0 bytes spill stores, 0 bytes spill loads" in said.stderr
        assert threads * registers <= 65_536 and shared <= deviceless.TARGET.shared_memory


def kernels(compiled):
    """Names of the kernels in a program."""
    target = re.compile(r'custom_call_target="(__gpu\$xla.gpu.triton|triton_kernel)')
    lines = [line for line in compiled.as_text().splitlines() if target.search(line)]
    return {name for name in ("lse_merge", "pull_lse_merge", "dsa_survivors") if any(f"/{name}" in line for line in lines)}


def select(shape):
    """(the selection, its arguments) at a named shape."""

    def f(q, w, positions, rows):
        return tuple(dsa_select(q, w, positions, shape.stretch(rows), 1024, Candidates.none(shape.queries, shape.k, q.dtype)))

    return f, shape.abstract()


@pytest.mark.parametrize("name", MERGES)
def test_lse_merge(name, dump):
    shape = MERGES[name]
    compiled = deviceless.compile_alone(lse_merge, *shape.abstract())
    assert kernels(compiled) == {"lse_merge"}
    assert_fits(dump, "lse_merge")
    assert compiled.memory_analysis().temp_size_in_bytes < 1024, "the partials are not copied"


@pytest.mark.parametrize("name", MERGES)
def test_the_transpose_of_lse_merge(name, dump):
    shape = MERGES[name]

    def pull(partials, lse, *cotangents):
        return jax.vjp(lse_merge, partials, lse)[1](cotangents)

    compiled = deviceless.compile_alone(pull, *shape.abstract(), *shape.cotangents())
    assert kernels(compiled) == {"lse_merge", "pull_lse_merge"}
    assert_fits(dump, "pull_lse_merge")
    out = 4 * shape.tokens * shape.heads * (shape.width + 1)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.01 * out + 1024, "the output and its LSE are all that is kept"


@pytest.mark.parametrize("name", SELECTIONS)
def test_dsa_select(name, dump):
    f, arguments = select(SELECTIONS[name])
    compiled = deviceless.compile_alone(f, *arguments)
    assert kernels(compiled) == {"dsa_survivors"}
    assert_fits(dump, "dsa_survivors")


def test_the_selection_copies_no_layer_and_makes_no_matrix_of_scores():
    f, arguments = select(SelectShape(queries=64, keys=262_144, layers=3, heads=4, width=64, k=128))
    temporaries = deviceless.compile_alone(f, *arguments).memory_analysis().temp_size_in_bytes
    assert temporaries < 20e6  # buffers and their sort; a layer has 33.6 MB, all scores 67.1 MB


@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 256), (jnp.float16, 40)])
def test_dsa_select_of_other_types_and_widths(dtype, width):
    """Also in 64-bit mode, where integers are wide unless told otherwise; and keys that fill no whole tile."""
    f, arguments = select(SelectShape(queries=70, keys=4100, heads=3, width=width, k=5))
    arguments = [jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == jnp.bfloat16 else x.dtype) for x in arguments]
    with jax.enable_x64(True):
        assert kernels(deviceless.compile_alone(f, *arguments)) == {"dsa_survivors"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.usefixtures("x64")
def test_lse_merge_of_other_types_and_widths(dtype):
    shape = jax.ShapeDtypeStruct((5, 3, 7, 33), dtype), jax.ShapeDtypeStruct((5, 3, 7), jnp.float32)

    def f(partials, lse):
        return jax.grad(lambda *x: sum(y.sum() for y in lse_merge(*x)), (0, 1))(partials, lse)

    assert kernels(deviceless.compile_alone(f, *shape)) == {"lse_merge", "pull_lse_merge"}
