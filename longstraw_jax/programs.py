"""How a stage becomes a program: one `jit(shard_map(...))`, every collective written out, big buffers donated."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from longstraw_jax.kernels_pallas import region, traced_for
from longstraw_jax.sharding import AnyMesh


class StageProgram:
    """A function of every device's shards, compiled once per argument shapes and implementation that the region asks for; the
    executables are kept and can be asked.

    `placed`: the outputs' shardings, where some of them are in another memory than the device's.

    Replication is not checked by JAX (check_vma): accumulators differ between devices until their one sum at the end.
    Products of float32 matrices are taken in full: the delta rule's chunks need it, and the large products are narrower anyway.
    """

    def __init__(self, f: Callable, mesh: AnyMesh, in_specs: Any, out_specs: Any, donate: Sequence[int] = (), placed: Any = None):
        def jitted(_region):
            def exact(*args):  # a new one each time: JAX remembers by the function what it traced
                with jax.default_matmul_precision("highest"), traced_for(mesh):
                    return f(*args)

            mapped = jax.shard_map(exact, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return jax.jit(mapped, donate_argnums=tuple(donate), out_shardings=placed)

        self._jitted = functools.cache(jitted)
        self.executables: dict[Any, jax.stages.Compiled] = {}
        self.compile_seconds = 0.0
        """Spent compiling so far, all shapes together."""

    @property
    def jitted(self) -> Any:
        """The function as the region has it run."""
        return self._jitted(region())

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)(*args)

    def compiled(self, *args: Any) -> jax.stages.Compiled:
        """The executable for arguments like these; arrays or `jax.ShapeDtypeStruct`s."""
        key = region(), *((jax.numpy.shape(x), jax.numpy.result_type(x)) for x in jax.tree.leaves(args))
        if key not in self.executables:
            begun = time.perf_counter()
            self.executables[key] = self.jitted.lower(*args).compile()
            self.compile_seconds += time.perf_counter() - begun
        return self.executables[key]

    def peak_bytes(self) -> int:
        """Of the largest executable: arguments, outputs and temporaries of one device, by the compiler's count."""
        return max((_peak(x.memory_analysis()) for x in self.executables.values()), default=0)


def _peak(m: Any) -> int:
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
