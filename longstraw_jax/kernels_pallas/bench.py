"""The operators at their named shapes: timed on the GPU at hand, or compiled for one that is not there.

A time is that of one call among many in one compiled loop, so that launching from Python does not count. Bytes and FLOPs are
those that any implementation needs, and their shares are of what the same chip does in the same run: a copy of 1 GiB, and a
product of two 8,192 x 8,192 bfloat16 matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from longstraw_jax.deviceless import TARGET, compile_alone
from longstraw_jax.errors import UnsupportedError
from longstraw_jax.kernels_pallas.dense_attention import dense_attention
from longstraw_jax.kernels_pallas.dense_attention.shapes import SHAPES as ATTENTIONS
from longstraw_jax.kernels_pallas.dispatch import Implementation, implementation
from longstraw_jax.kernels_pallas.dsa_select import Candidates, dsa_select
from longstraw_jax.kernels_pallas.dsa_select.shapes import SHAPES as SELECTIONS
from longstraw_jax.kernels_pallas.dsa_select.shapes import SelectShape
from longstraw_jax.kernels_pallas.lse_merge import lse_merge
from longstraw_jax.kernels_pallas.lse_merge.shapes import SHAPES as MERGES


@dataclass(frozen=True)
class Subject:
    """One operator at one shape. `f` takes arrays of the shapes of `arguments`."""

    op: str
    shape: str
    f: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    bytes: int
    flops: int
    kernel: Implementation = "pallas"
    """The name of the operator's kernel."""

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        return self.kernel, "xla"

    def named(self, name: str) -> Callable:
        """`f` with an implementation; a new function, since JAX remembers by the function what it traced."""

        def f(*arguments):
            with implementation(name):
                return self.f(*arguments)

        return f

    def row(self, name: str, seconds: float | None = None, compiled_for: str | None = None, **more) -> dict:
        return {"op": self.op, "shape": self.shape, "implementation": name, "device": jax.devices()[0].device_kind,
                "seconds": seconds, "compiled_for": compiled_for, "bytes": self.bytes, "flops": self.flops, **more}


@dataclass(frozen=True)
class Rates:
    """Of the chip, measured: bytes per second of a copy, read and written ones both counted; FLOPs per second of a product."""

    copy: float
    matmul: float

    @classmethod
    def measured(cls, numbers: int = 2**28, side: int = 8192) -> Rates:
        copy = seconds_of(lambda x: x + 1, (jnp.ones(numbers, jnp.float32),))
        matmul = seconds_of(lambda x, y: x @ y, (jnp.ones((side, side), jnp.bfloat16), jnp.ones((side, side), jnp.bfloat16)))
        return cls(8 * numbers / copy, 2 * side**3 / matmul)


def subjects() -> list[Subject]:
    """Every operator, and the transpose of the differentiable one, at every named shape."""
    found = []
    for name, shape in MERGES.items():
        found.append(Subject("lse_merge", name, lse_merge, shape.abstract(), shape.bytes, shape.flops))
        found.append(Subject("lse_merge_and_pull", name, _merge_and_pull, shape.abstract() + shape.cotangents(),
                             shape.bytes + shape.pull_bytes, shape.flops + shape.pull_flops))
    for name, shape in SELECTIONS.items():
        found.append(Subject("dsa_select", name, _selection(shape), shape.abstract(), shape.bytes, shape.flops))
    for name, shape in ATTENTIONS.items():
        found.append(Subject("dense_attention", name, dense_attention, shape.abstract(), shape.bytes, shape.flops, kernel="cudnn"))
    return found


def compiled_rows(subject: Subject) -> Iterator[dict]:
    """A row an implementation: compiled for a GPU that is not there, which cuDNN's would ask for its kernel.

    Raises UnsupportedError where the compiler is missing.
    """
    for name in subject.implementations:
        if name == "cudnn":
            continue
        begun = time.perf_counter()
        compiled = compile_alone(subject.named(name), *subject.arguments)
        yield subject.row(name, compiled_for=TARGET.kind, compile_seconds=time.perf_counter() - begun,
                          temporary_bytes=compiled.memory_analysis().temp_size_in_bytes)


def timed_rows(subject: Subject, rates: Rates) -> Iterator[dict]:
    """A row an implementation: timed here. `max_difference` is from XLA's result, of positions the share that differs.

    A kernel that this GPU cannot run has no seconds, and says why as `refused`.
    """
    arguments = drawn(subject.arguments)
    wanted = jax.jit(subject.named("xla"))(*arguments)
    for name in subject.implementations:
        f = subject.named(name)
        try:
            difference = _difference(jax.jit(f)(*arguments), wanted)
        except UnsupportedError as error:
            yield subject.row(name, refused=str(error))
            continue
        seconds = seconds_of(f, arguments)
        yield subject.row(name, seconds=seconds, max_difference=difference, copy_bytes_per_second=rates.copy,
                          matmul_flops_per_second=rates.matmul, copy_share=subject.bytes / seconds / rates.copy,
                          matmul_share=subject.flops / seconds / rates.matmul)


def drawn(arguments: tuple[jax.ShapeDtypeStruct, ...], seed: int = 0) -> tuple[jax.Array, ...]:
    """Normal numbers, made on the device; positions from which everything is visible."""
    keys = jax.random.split(jax.random.key(seed), len(arguments))
    return tuple(jnp.full(x.shape, 2**30, x.dtype) if x.dtype == jnp.int32 else jax.random.normal(key, x.shape, x.dtype)
                 for key, x in zip(keys, arguments, strict=True))


def seconds_of(f: Callable, arguments: tuple[jax.Array, ...], least: float = 0.2, tries: int = 3) -> float:
    """Seconds of one call: the difference between a long and a short loop of calls, the fastest of `tries`.

    Every call's smallest floating argument takes a number from the result before, so that none can be left out or moved.
    """
    floating = [i for i, x in enumerate(arguments) if jnp.issubdtype(x.dtype, jnp.floating)]
    smallest = min(floating, key=lambda i: arguments[i].size)

    @jax.jit
    def loop(times, *arguments):
        def one(_, carried):
            moved = arguments[smallest] + carried.astype(arguments[smallest].dtype)
            results = jax.tree.leaves(f(*(moved if i == smallest else x for i, x in enumerate(arguments))))
            return 1e-30 * jnp.nan_to_num(sum(x.ravel()[0].astype(jnp.float32) for x in lax.optimization_barrier(results)))

        return lax.fori_loop(0, times, one, jnp.float32(0))

    def timed(times):
        begun = time.perf_counter()
        loop(times, *arguments).block_until_ready()
        return time.perf_counter() - begun

    timed(1)
    times = 1 + int(np.clip(least / max(timed(1), 1e-9), 4, 2000))
    return max(min((timed(times) - timed(1)) / (times - 1) for _ in range(tries)), 1e-9)


def _merge_and_pull(partials, lse, *cotangents):
    results, pull = jax.vjp(lse_merge, partials, lse)
    return *results, *pull(cotangents)


def _selection(shape: SelectShape) -> Callable:
    def f(q, w, positions, rows):
        return tuple(dsa_select(q, w, positions, shape.stretch(rows), 1024, Candidates.none(shape.queries, shape.k, q.dtype)))

    return f


def _difference(given, wanted) -> float:
    """The largest of floating numbers', or the share of positions in one result that are not in the other."""
    if jax.tree.leaves(given)[-1].dtype != jnp.int32:
        return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True))
    rows = zip(np.asarray(given[1]), np.asarray(wanted[1]), strict=True)
    return float(np.mean([1 - np.isin(x, y).mean() for x, y in rows]))
