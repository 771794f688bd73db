"""What is planned is what runs: the same jaxprs, traced from abstract arguments and from a step's own."""

import hashlib
import re

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from longstraw_jax.config import BlockSizes, GradientConfig, LoraConfig
from longstraw_jax.errors import InputError
from longstraw_jax.models.registry import named_spec
from longstraw_jax.planner.measured import measure
from longstraw_jax.planner.stages import Step, Workload
from longstraw_jax.programs import StageProgram
from longstraw_jax.sharding import AXES, make_mesh
from longstraw_jax.state import tree_bytes
from longstraw_jax.update import update_program

SIZES = BlockSizes(page=4, chunk=32, block=16, queries=4, keys=8, logits=2, recurrence=8)
LORA = LoraConfig(rank=2)
PROMPT, RESPONSE, MEMBERS = 70, 20, 2


def abstract(context: int, expert: int) -> AbstractMesh:
    """A mesh without devices, of CPUs."""
    return AbstractMesh((context, expert), AXES, axis_types=(AxisType.Auto,) * 2, abstract_device=AbstractDevice("cpu", None, "cpu"))


def digest(traced) -> str:
    """Of a jaxpr, whichever mesh of this shape it was traced on, and whatever addresses its functions had."""
    mesh = r"(Abstract)?Mesh\([^()]*axis_types=\([^)]*\)[^)]*\)"
    text = re.sub(mesh, "mesh", re.sub(r" at 0x[0-9a-f]+", "", str(traced.jaxpr)))
    return hashlib.sha256(text.encode()).hexdigest()


def workload(name: str, gradient: str, weights: str) -> Workload:
    return Workload(named_spec(name), PROMPT + RESPONSE, RESPONSE, MEMBERS, GradientConfig(gradient), LORA, SIZES, dtype="float32",
                    weights=weights)


@pytest.fixture
def executed(monkeypatch):
    """Digests of every program of a step that runs, in their order, once each."""
    seen = []
    compiled = StageProgram.compiled

    def spy(self, *args):
        seen.append(digest(self.jitted.trace(*args)))
        return compiled(self, *args)

    monkeypatch.setattr(StageProgram, "compiled", spy)
    return seen


@pytest.mark.parametrize(("name", "mesh", "weights"), [("qwen3.6-tiny", (2, 1), "nf4"), ("glm5.2-tiny", (1, 2), "plain")])
def test_stages_are_those_of_a_step(name, mesh, weights, executed):
    measured = measure(workload(name, "full", weights), make_mesh(*mesh))
    step = Step(workload(name, "full", weights), abstract(*mesh))
    planned = {stage.name: digest(stage.jitted.trace(*stage.arguments)) for stage in step.stages()}
    assert list(dict.fromkeys(executed)) == [planned[stage] for stage in ("capture", "replay", "sweep")]
    assert measured.seconds.keys() == {"capture", "replay", "sweep", "update"} and min(measured.seconds.values()) > 0
    assert measured.peak_bytes is None  # CPUs keep no account


def test_parts_that_differ():
    """A digest tells programs apart, or the test above would say nothing."""
    mesh = abstract(2, 1)
    one, other = (Step(workload("qwen3.6-tiny", gradient, "plain"), mesh).stages() for gradient in ("response", "full"))
    assert [stage.name for stage in one] == ["capture", "score", "replay", "update"]
    assert [stage.name for stage in other] == ["capture", "score", "replay", "sweep", "update"]
    digests = {stage.name: digest(stage.jitted.trace(*stage.arguments)) for stage in other}
    assert len(set(digests.values())) == len(digests)
    assert digests["score"] == digest(one[2].jitted.trace(*one[2].arguments)), "scoring is replay's program"


def test_cotangents_are_float32_beside_bfloat16():
    step = Step(Workload(named_spec("qwen3.6-tiny"), 90, 20, 2, GradientConfig("full"), LORA, SIZES), abstract(2, 1))
    assert tree_bytes(step.parts["cotangent"]) == 2 * tree_bytes(step.parts["pages"]) + tree_bytes(step.parts["recurrent"]["S"]) + (
        2 * tree_bytes(step.parts["recurrent"]["tail"]))


def test_the_update_is_the_updates_program():
    step = Step(workload("qwen3.6-tiny", "response", "plain"), abstract(2, 1))
    assert step.stages()[-1].jitted is update_program(step.workload.optimizer)


@pytest.mark.parametrize(("changes", "says"), [
    (dict(positions=20), "leave a prompt of 0"), (dict(response=0), "response is 0"), (dict(group=0), "group is 0")])
def test_workloads_that_cannot_be(changes, says):
    with pytest.raises(InputError, match=says):
        Workload(**{**dict(spec=named_spec("qwen3.6-tiny"), positions=90, response=20, group=2), **changes})


def test_a_window_is_swept_only():
    """Chunks from the window's first on, and as many entry states."""
    mesh = abstract(2, 1)
    gradient = GradientConfig("full", prompt_gradient_window=10)
    step = Step(Workload(named_spec("qwen3.6-tiny"), 90, 20, 2, gradient, LORA, SIZES), mesh)
    assert (step.chunks, step.swept) == (3, 2)  # 69 captured positions, held fixed below 59
    assert {x.shape[0] for x in jax.tree.leaves(step.parts["entries"])} == {2}
