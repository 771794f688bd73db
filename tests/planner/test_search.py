"""The largest workload that fits: exact to a chunk, in few compilations, on bytes that grow by steps."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from longstraw_jax.errors import InputError
from longstraw_jax.planner.search import doubling, largest

CHUNK, RESPONSE, MEMORY = 16, 8, 1000


@dataclass
class Machine:
    """Plans whose stages take what these functions of the positions say."""

    stages: dict
    asked: list = field(default_factory=list)

    def __call__(self, positions, only=None):
        self.asked.append((positions, only))
        peaks = {name: f(positions) for name, f in self.stages.items() if only in (None, name)}
        stage = max(peaks, key=peaks.get)
        workload = SimpleNamespace(positions=positions, response=RESPONSE)
        step = SimpleNamespace(workload=workload, chunk=CHUNK, mesh=SimpleNamespace(size=2))
        return SimpleNamespace(
            step=step, chip=SimpleNamespace(memory=MEMORY, name="h20"), reserve=50, peak_stage=stage, peak_device_bytes=peaks[stage],
            fits=peaks[stage] + 50 <= MEMORY)


def stepped(x):
    """Linear, with a step up and one down."""
    return 100 + x // CHUNK * 3 + (90 if x > 900 else 0) - (60 if x > 3000 else 0)


@pytest.mark.parametrize("start", [20, 1000, 3600, 100_000])
def test_exact_to_a_chunk(start):
    machine = Machine({"replay": stepped})
    found = largest(machine, start).step.workload.positions
    assert stepped(found) + 50 <= MEMORY < stepped(found + CHUNK) + 50
    assert len(machine.asked) <= 16


def test_another_stage_may_decide():
    """Cheap at the start, dearer where the first one fits."""
    machine = Machine({"capture": lambda x: 300 + x // 20, "sweep": lambda x: x // 10})
    found = largest(machine, 100).step.workload.positions
    assert found // 10 + 50 <= MEMORY < (found + CHUNK) // 10 + 50
    assert machine.asked[-1] == (found, None), "what is returned was compiled whole"


def test_nothing_fits():
    with pytest.raises(InputError, match="not even .* positions fit on 2 x h20"):
        largest(Machine({"replay": lambda x: 2000 + x}), 500)


@pytest.mark.parametrize(("ends", "wanted"), [((4, 4), [4]), ((4, 16), [4, 8, 16]), ((3, 20), [3, 6, 12, 20])])
def test_doubling(ends, wanted):
    assert doubling(*ends) == wanted
