"""The levels of evidence, shown on the machine at hand (DESIGN section 9).

1 execution: the transaction completes. 2 response operators: captured and replayed log-probabilities against a plain forward
pass over the whole sequence. 3 distributed update: replicas bitwise equal, and the update equal to one device's.
4 full gradient: parameter by parameter against conventional autodiff and against PyTorch, the response gradient beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from longstraw_jax.capture import capture
from longstraw_jax.config import BlockSizes, LoraConfig, OptimizerConfig
from longstraw_jax.conventional.autodiff import autodiff_gradient
from longstraw_jax.loading import load_policy, to_weights
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Parameter
from longstraw_jax.policy import Policy
from longstraw_jax.replay import replay
from longstraw_jax.sweep import sweep
from longstraw_jax.transaction import Transaction
from longstraw_jax.types import Group, Response
from longstraw_jax.update import replicas_equal

TOLERANCES = {"float64": 1e-9, "float32": 2e-4}
"""Largest difference of log-probabilities, and relative difference of an update or a parameter's gradient, that passes."""
PYTORCH_TOLERANCE, PYTORCH_COSINE = 1e-3, 0.99999
"""Relative difference and cosine of every parameter's gradient to PyTorch's, which is float32 in any case."""


@dataclass(frozen=True)
class Case:
    """What is verified: a model on several meshes, one group."""

    model: str
    meshes: Sequence[Mesh]
    """The first is the one that the others are compared with."""
    group: Group
    dtype: str
    sizes: BlockSizes
    lora: LoraConfig | None
    """None: every parameter is trained."""
    seed: int = 0

    def policy(self, mesh: Mesh) -> Policy:
        """The model with a non-zero adapter: a fresh one (B = 0) would hide mistakes in half of its gradient."""
        policy = load_policy(self.model, mesh, lora=self.lora, trainable="lora" if self.lora else "all", dtype=self.dtype,
                             sizes=self.sizes, seed=self.seed)
        return perturbed(policy, self.seed + 1)


def perturbed(policy: Policy, seed: int, spread: float = 0.05) -> Policy:
    """The policy with noise on its trainable parameters, the same on every mesh."""

    def one(p: Parameter, x: jax.Array) -> jax.Array:
        noisy = dataclasses.replace(p, init=lambda rng, shape: spread * rng.standard_normal(shape))
        return x + parameters.first_value(noisy, policy.mesh, seed)

    abstract = policy.model.abstract_parameters()[0]
    return dataclasses.replace(
        policy, trainable=parameters.map_parameters(one, abstract, policy.trainable), origin=Policy.new_origin(), step=0)


def random_group(vocabulary: int, prompt: int, response: int, members: int, seed: int = 0) -> Group:
    """Random tokens with ragged response lengths, some tokens masked, and rewards 0, 1, 2, .."""
    rng = np.random.default_rng(seed)
    lengths = [response, *rng.integers(1, response + 1, members - 1)]
    responses = [Response(rng.integers(0, vocabulary, n), mask=rng.random(n) < 0.9, reward=float(i)) for i, n in enumerate(lengths)]
    return Group(rng.integers(0, vocabulary, prompt), tuple(responses))


def verify(case: Case, note: Callable[[str], None] = lambda text: None) -> dict:
    """Runs and reports every level, with the full gradient: {"levels": {"1": {"status": .., figures ..}, ..}}."""
    runs = []
    for mesh in case.meshes:
        note(f"one step on mesh {_shown(mesh)}")
        runs.append(_Run.of(case, mesh))
    note("the plain forward pass over the whole sequences")
    levels = {"1": _execution(runs), "2": _operators(case, runs), "3": _distributed(case, runs), "4": _full_gradient(case, note)}
    return {"model": case.model, "dtype": case.dtype, "positions": runs[0].receipt.positions, "group": len(case.group.responses),
            "gradient": "full", "levels": levels}


@dataclass(frozen=True)
class _Run:
    """One SGD step on one mesh."""

    mesh: Mesh
    before: Policy
    after: Policy
    receipt: object
    logprobs: list[np.ndarray]

    @classmethod
    def of(cls, case: Case, mesh: Mesh) -> _Run:
        before = case.policy(mesh)
        step = Transaction(before, [case.group], optimizer=OptimizerConfig("sgd", learning_rate=1.0), gradient="full", name=case.model)
        receipt = step.step()
        return cls(mesh, before, step.policy, receipt, step.old[0])

    def change(self) -> dict[str, np.ndarray]:
        before, after = (parameters.to_host(p.trainable, p.model.abstract_parameters()[0]) for p in (self.before, self.after))
        return {name: after[name] - before[name] for name in before}


def _execution(runs: list[_Run]) -> dict:
    finite = all(np.isfinite(run.receipt.loss) and np.isfinite(run.receipt.grad_norm) for run in runs)
    return {"status": _status(finite and all(run.receipt.updated for run in runs)), "receipts": [run.receipt.as_dict() for run in runs]}


def _operators(case: Case, runs: list[_Run]) -> dict:
    plain = _plain_logprobs(runs[0].before, case.group)
    worst = {_shown(run.mesh): max(float(np.abs(a - b).max()) for a, b in zip(run.logprobs, plain, strict=True)) for run in runs}
    return {"status": _status(max(worst.values()) <= TOLERANCES[case.dtype]), "max_logprob_difference": worst,
            "tolerance": TOLERANCES[case.dtype]}


def _plain_logprobs(policy: Policy, group: Group) -> list[np.ndarray]:
    weights, start = to_weights(policy), len(group.prompt_ids) - 1
    longest = max(len(r.ids) for r in group.responses)
    forward = jax.jit(lambda w, ids: policy.model.reference_logprobs(w, ids, 0))
    with jax.default_matmul_precision("highest"):
        rows = [forward(weights, jnp.asarray(np.concatenate([group.prompt_ids, np.pad(r.ids, (0, longest - len(r.ids)))])))
                for r in group.responses]
    return [np.asarray(row)[start : start + len(r.ids)] for row, r in zip(rows, group.responses, strict=True)]


def _distributed(case: Case, runs: list[_Run]) -> dict:
    if len(runs) < 2:
        return {"status": "not_run", "reason": "only one mesh was asked for; give --mesh more than one device"}
    one, *others = (run.change() for run in runs)
    difference = {_shown(run.mesh): max(_relative(other[name], one[name]) for name in one)
                  for run, other in zip(runs[1:], others, strict=True)}
    equal = {_shown(run.mesh): replicas_equal(run.after.trainable) for run in runs}
    passed = all(equal.values()) and max(difference.values()) <= TOLERANCES[case.dtype]
    return {"status": _status(passed), "replicas_bitwise_equal": equal, "max_relative_difference": difference,
            "compared_with": _shown(runs[0].mesh), "tolerance": TOLERANCES[case.dtype]}


def _full_gradient(case: Case, note: Callable[[str], None]) -> dict:
    """On the last mesh, whose programs the steps before have compiled."""
    note("the gradient of the whole sequences by JAX's autodiff")
    policy = case.policy(case.meshes[-1])
    response, full = _gradients(policy, case.group)
    autodiff = _compared(full, autodiff_gradient(policy, case.group)[1])
    tolerance = TOLERANCES[case.dtype]
    figures = {"autodiff": {**_summary(autodiff), "tolerance": tolerance}}
    passed = figures["autodiff"]["max_relative_difference"] <= tolerance
    note("the same by PyTorch and transformers")
    pytorch = _pytorch(policy, case.group)
    if isinstance(pytorch, str):
        figures["pytorch"] = {"status": "not_run", "reason": pytorch}
    else:
        summary = _summary(_compared(full, pytorch))
        figures["pytorch"] = {**summary, "tolerance": PYTORCH_TOLERANCE, "least_cosine": PYTORCH_COSINE}
        passed &= summary["max_relative_difference"] <= PYTORCH_TOLERANCE and summary["min_cosine"] >= PYTORCH_COSINE
    together = (np.concatenate([x[name].ravel() for name in full]) for x in (response, full))
    figures["response"] = {**_summary(_compared(response, full)), "cosine": _cosine(*together)}
    return {"status": _status(passed), "compared_on": _shown(policy.mesh), **figures, "parameters": autodiff}


def _gradients(policy: Policy, group: Group) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(response gradient, full gradient) by checkpoint name."""
    abstract = policy.model.abstract_parameters()[0]
    state = capture(policy, group.prompt_ids, gradient="full")
    replayed = replay(policy, state, group, gradient="full")
    response = parameters.to_host(replayed.gradient, abstract)
    return response, parameters.to_host(sweep(policy, state, group.prompt_ids, replayed).gradient, abstract)


def _pytorch(policy: Policy, group: Group) -> dict[str, np.ndarray] | str:
    """PyTorch's gradient, or why there is none."""
    try:
        from longstraw_jax.conventional.pytorch import pytorch_gradient
    except ImportError as error:
        return f"{error.name or error} is not installed; pip install torch 'transformers>=5.24'"
    return pytorch_gradient(policy, group)


def _compared(gradient: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[dict]:
    """A row per parameter, the farthest first."""
    rows = [{"parameter": name, "relative_difference": _relative(gradient[name], x), "cosine": _cosine(gradient[name], x),
             "max_deviation": float(np.abs(gradient[name] - x).max())} for name, x in wanted.items()]
    return sorted(rows, key=lambda row: -row["relative_difference"])


def _summary(rows: list[dict]) -> dict:
    return {"max_relative_difference": max(row["relative_difference"] for row in rows), "min_cosine": min(row["cosine"] for row in rows),
            "max_deviation": max(row["max_deviation"] for row in rows), "worst": rows[:5]}


def _cosine(x: np.ndarray, y: np.ndarray) -> float:
    """1 where both are 0, 0 where one is."""
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    return float(np.vdot(x, y) / norms) if norms else float(not x.any() and not y.any())


def _relative(x: np.ndarray, wanted: np.ndarray) -> float:
    """|x - wanted| / |wanted| in the 2-norm; 0 where both are 0."""
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(x - wanted) / norm) if norm else float(np.linalg.norm(x) > 0)


def _status(passed: bool) -> str:
    return "pass" if passed else "fail"


def _shown(mesh: Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1 or mesh.size == 1 and axis == "context")
