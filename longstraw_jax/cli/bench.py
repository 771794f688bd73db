"""`longstraw bench`: what is measured on the devices at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from longstraw_jax.cli.bench_kernels import BenchKernels
from longstraw_jax.cli.bench_step import BenchStep


@dataclass(frozen=True)
class Bench:
    """Measures on the devices at hand; without a GPU, compiles for one that is not there."""

    what: Annotated[
        Annotated[BenchKernels, tyro.conf.subcommand("kernels", prefix_name=False)]
        | Annotated[BenchStep, tyro.conf.subcommand("step", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()
