"""The layers that call the operators, with the kernels (interpreted) and with XLA, on meshes: the same selection, the same attention."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import stretch_case as case
from longstraw_jax import deviceless
from longstraw_jax.config import BlockSizes
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas import check, implementation
from longstraw_jax.models.base import Pages, Segment
from longstraw_jax.models.layers.latent_attention import Selected, attend_selected
from longstraw_jax.models.layers.paged_attention import KeyValues, attend
from longstraw_jax.models.layers.selection import select
from longstraw_jax.sharding import Layout, Owners, make_mesh

H, D, K = 3, 4, 7
KV, V = 1, 3


@dataclass(frozen=True)
class Program:
    mesh: tuple[int, int]
    exchange: str

    @property
    def sizes(self):
        return BlockSizes(queries=3, keys=6)


PROGRAMS = [Program((2, 1), "fetch"), Program((2, 2), "rounds"), Program((8, 1), "rounds")]


def layers(given, mesh):
    """(q [T, H, D], w [T, H], prefix [L, S, D], own, lengths) -> (selection, latent out and lse, paged out and lse), jitted."""

    def run(q, w, prefix, own, lengths):
        segment, pages = case.segment_and_pages(mesh, "rows", prefix, own, lengths)
        sources = [p.stretch("rows", jnp.int32(case.LAYER), segment.owners) for p in pages]
        selection = select(q, w, segment, sources, given.sizes, K, given.exchange)
        selected = Selected(selection, segment, sources, 0.3, V, given.sizes, given.exchange)
        pairs = [KeyValues.of(paired(p), jnp.int32(case.LAYER), segment.owners, given.sizes.keys) for p in pages]
        return selection, attend_selected(q, selected), attend(q, segment, pairs, given.sizes)

    tokens, rows, scalar = PartitionSpec(mesh.axis_names), PartitionSpec(None, mesh.axis_names), PartitionSpec()
    specs = tokens, tokens, rows, rows, scalar
    size = (case.LAYERS, case.ROOM, D)
    lengths = {name: jax.ShapeDtypeStruct((), jnp.int32) for name in vars(case.LENGTHS[0])}
    shapes = *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((case.BLOCK, H, D), (case.BLOCK, H), size, size)), lengths
    placed = [jax.tree.map(lambda x, spec=spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), shape)
              for shape, spec in zip(shapes, specs, strict=True)]
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)).lower(*placed)


@functools.cache
def program(given, name):
    with implementation(name):
        return layers(given, make_mesh(*given.mesh)).compile()


def paired(pages):
    """The same rows as keys and, turned around, as values of one head."""
    x = pages.rows["rows"][..., None, :]
    return Pages({"k": x, "v": x[..., ::-1]}, pages.start, pages.length, pages.granule)


def run(given, name, lengths, arrays):
    pages, block = case.layouts(make_mesh(*given.mesh))
    q, w, prefix, own = arrays
    rows = case.stack(pages, prefix, lengths.prefix), case.stack(block, own, lengths.after)
    placed = [np.float32(x) for x in (*(case.to_owners(block, x) for x in (q, w)), *rows)]
    results = jax.tree.leaves(program(given, name)(*placed, lengths.arrays()))
    return [case.to_sequence(block, np.asarray(x)) for x in results]


def by_hand(lengths, q, w, prefix, own):
    """The selection by a stable sort of exact scores."""
    at = lengths.keys
    scores = np.einsum("th,ths->ts", w, np.maximum(np.einsum("thd,sd->ths", q, np.concatenate([prefix, own])) / 2, 0))
    scores = np.where((at[None] <= lengths.queries[:, None]) & (at != case.NONE), scores, -np.inf)
    order = np.argsort(-scores, 1, kind="stable")[:, :K]
    return np.sort(np.where(np.isfinite(np.take_along_axis(scores, order, 1)), at[order], case.NONE), 1)


@pytest.mark.parametrize("given", PROGRAMS, ids=repr)
def test_the_kernels_change_nothing(given):
    """Small integers: every score is exact in any order of summation, and many tie."""
    for seed, lengths in enumerate(case.LENGTHS):
        rng = np.random.default_rng(seed)
        arrays = [rng.integers(-1, 2, size).astype(float) for size in
                  ((case.BLOCK, H, D), (case.BLOCK, H), (case.ROOM, D), (case.ROOM, D))]
        kernels, xla = (run(given, name, lengths, arrays) for name in ("pallas", "xla"))
        np.testing.assert_array_equal(kernels[0], by_hand(lengths, *arrays))
        np.testing.assert_array_equal(kernels[0], xla[0])
        for x, wanted in zip(kernels[1:], xla[1:], strict=True):
            np.testing.assert_allclose(x, wanted, rtol=2e-6, atol=2e-6)


def test_the_kernels_did_run():
    """Interpreted, a kernel is a loop over its grid, which XLA's path has not."""
    loops = [program(PROGRAMS[1], name).as_text().count("while(") for name in ("pallas", "xla")]
    assert loops[0] >= loops[1] + 4


@pytest.mark.parametrize("given", PROGRAMS[1:], ids=repr)
def test_the_kernels_compile_inside_programs_for_several_gpus(given):
    try:
        gpus = deviceless.devices(deviceless.TARGET, given.mesh[0] * given.mesh[1])
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    text = layers(given, make_mesh(*given.mesh, gpus)).compile().as_text()
    assert all(f"/{name}" in text for name in ("dsa_survivors", "lse_merge"))
    assert "all-to-all" in text


@pytest.fixture
def gpus(monkeypatch):
    """Eight GPUs, as if they were at hand and the kernels had passed their checks on them."""
    try:
        found = deviceless.devices(deviceless.TARGET, 8)
    except UnsupportedError as missing:
        pytest.skip(str(missing))
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    monkeypatch.setattr(check, "fault", lambda *sizes: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return found


def test_attention_by_cudnn_compiles_for_gpus_and_needs_no_more_room(gpus):
    """Of a chunk over a prompt of two million tokens, at the sizes of the 27B model; as this JAX makes the call."""
    mesh, sizes = make_mesh(8, 1, gpus), BlockSizes()
    owners = Owners.of(mesh)

    def run(q, rows, start):
        pages = Pages.of({"k": rows, "v": rows}, jnp.int32(0), start)
        segment = Segment(jnp.zeros(q.shape[0], jnp.int32), start, jnp.int32(sizes.chunk), Layout(owners, sizes.page))
        return attend(q, segment, [KeyValues.of(pages, jnp.int32(1), owners, sizes.keys)], sizes)

    tokens, rows, scalar = PartitionSpec(mesh.axis_names), PartitionSpec(None, mesh.axis_names), PartitionSpec()
    shapes = ((sizes.chunk, 24, 256), tokens), ((2, 2**21 // sizes.page, sizes.page, 4, 256), rows), ((), scalar)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16 if shape else jnp.int32, sharding=NamedSharding(mesh, spec))
                 for shape, spec in shapes]
    calls, temporaries = {}, {}
    for name in ("auto", "xla"):
        with implementation(name):
            mapped = jax.shard_map(functools.partial(run), mesh=mesh, in_specs=(tokens, rows, scalar), out_specs=tokens, check_vma=False)
            compiled = jax.jit(mapped).lower(*arguments).compile(compiler_options=deviceless.compiler.OPTIONS)
        calls[name] = [line for line in compiled.as_text().splitlines() if "__cudnn$fmha" in line]
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
    assert len(calls["auto"]) == 1 and not calls["xla"]
    assert "bf16[1,24,2048,256]" in calls["auto"][0] and "f32[1,24,2048]" in calls["auto"][0], "the log-normaliser is not rounded"
    assert temporaries["auto"] < 1.001 * temporaries["xla"]
