"""One GRPO step, top to bottom: capture, score, replay, sweep, update. The only module that sees all stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from longstraw_jax.capture import capture, capture_program
from longstraw_jax.config import GradientConfig, ObjectiveConfig, OptimizerConfig
from longstraw_jax.errors import InputError
from longstraw_jax.members import members_program
from longstraw_jax.objective import member_weights
from longstraw_jax.policy import Policy
from longstraw_jax.receipts import Receipt, Stage, parameter_bytes
from longstraw_jax.replay import Replay, replay
from longstraw_jax.score import score
from longstraw_jax.state import ResidentState, prompt_digest
from longstraw_jax.sweep import sweep, sweep_program
from longstraw_jax.types import Group
from longstraw_jax.update import init_optimizer, update

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass
class Transaction:
    """GRPO on fixed groups: `step` after `step`, the prompts captured anew each time since the parameters moved.

    `reference` is the policy that `kl_beta` pulls towards; by default the starting policy with its adapters off. `old` are
    per-group log-probabilities of the policy that sampled, where that was not the present one; without them the first step's
    own are kept for the later ones.
    """

    policy: Policy
    groups: Sequence[Group]
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gradient: str | GradientConfig = "response"
    reference: Policy | None = None
    old: list[list[np.ndarray]] | None = None
    name: str = "model"
    progress: Progress = lambda stage, done, total: None

    def __post_init__(self):
        self.gradient = GradientConfig.of(self.gradient)
        if not self.groups:
            raise InputError("no groups were given; wanted at least one prompt with its responses")
        for group in self.groups:
            group.check(self.policy.model.vocabulary)
        self._state = init_optimizer(self.policy, self.optimizer)
        self._reference_logprobs = None

    def step(self) -> Receipt:
        """One update from all groups. Where it raises, the policy is as it was."""
        clock, policy = _Clock(self.policy), self.policy
        if self.objective.kl_beta > 0 and self._reference_logprobs is None:
            self._reference_logprobs = [self._score_reference(group, clock) for group in self.groups]
        gradient, loss, figures, scored, held = None, 0.0, [], [], ({}, {})
        weights = member_weights(self.groups, self.objective.normalisation)
        for i, group in enumerate(self.groups):
            # for its own cosine a group starts its own accumulator
            result, now = self._group(policy, i, weights[i], None if self.gradient.measure_cosine else gradient, clock)
            held = max(held, now, key=lambda held: sum(sum(parts.values()) for parts in held))
            if gradient is not None and self.gradient.measure_cosine:
                result = replace(result, gradient=jax.tree.map(jax.numpy.add, gradient, result.gradient))
            gradient, loss = result.gradient, loss + result.loss
            figures.append({"group_id": group.group_id, "zero_spread": not group.advantages.any(), **result.metrics})
            scored.append(result.logprobs)
        with clock("update", 0):
            moved = update(policy, self._state, gradient, self.optimizer)
        self.progress("update", 1, 1)
        self.policy, self._state = moved.policy, moved.optimizer_state
        self.old = self.old or scored
        return self._receipt(clock, held, loss, moved.grad_norm, figures, policy is not moved.policy)

    def _group(self, policy: Policy, i: int, weights: np.ndarray, accumulator, clock: _Clock) -> tuple[Replay, tuple[dict, dict]]:
        """A group's gradient, and what was held for it. Its pages are gone before the next group's are made, and before the update."""
        state = self._capture(policy, self.groups[i], clock, self.gradient)
        result = self._replay(policy, state, i, weights, accumulator, clock)
        held = _held(state, result)
        return self._sweep(policy, state, self.groups[i], result, clock), held

    def _capture(self, policy: Policy, group: Group, clock: _Clock, gradient: GradientConfig) -> ResidentState:
        # one capacity for all groups, so that they share their programs
        capacity = max(len(g.prompt_ids) for g in self.groups) - 1
        with clock("capture", len(group.prompt_ids) - 1):
            return capture(policy, group.prompt_ids, capacity=capacity, gradient=gradient,
                           progress=lambda done, total: self.progress("capture", done, total))

    def _replay(self, policy: Policy, state: ResidentState, i: int, weights: np.ndarray, accumulator, clock: _Clock) -> Replay:
        group = self.groups[i]
        with clock("replay", sum(len(r.ids) for r in group.responses)):
            result = replay(
                policy, state, group, old=self.old and self.old[i], objective=self.objective, weights=weights,
                reference=self._reference_logprobs and self._reference_logprobs[i], gradient=self.gradient, accumulator=accumulator)
        self.progress("replay", i + 1, len(self.groups))
        return result

    def _sweep(self, policy: Policy, state: ResidentState, group: Group, result: Replay, clock: _Clock) -> Replay:
        if result.cotangent is None:
            return result
        with clock("sweep", state.length - self.gradient.reach(state.length)):
            return sweep(policy, state, group.prompt_ids, result, gradient=self.gradient,
                         progress=lambda done, total: self.progress("sweep", done, total))

    def _score_reference(self, group: Group, clock: _Clock) -> list[np.ndarray]:
        """The reference's own capture is dropped before the policy's is made: pages exist once at a time."""
        reference = self.reference or self.policy.reference()
        state = self._capture(reference, group, clock, GradientConfig())
        with clock("score", sum(len(r.ids) for r in group.responses)):
            return score(reference, state, group.responses, temperature=self.objective.temperature)

    def _receipt(self, clock: _Clock, held: tuple[dict, dict], loss: float, norm: float, figures: list[dict], updated: bool) -> Receipt:
        largest = max(self.groups, key=lambda g: len(g.prompt_ids) + max(len(r.ids) for r in g.responses))
        return Receipt(
            model=self.name, positions=len(largest.prompt_ids) + max(len(r.ids) for r in largest.responses),
            group=max(len(g.responses) for g in self.groups), mesh=dict(self.policy.mesh.shape), gradient=self.gradient.kind,
            prompt_gradient_window=self.gradient.prompt_gradient_window, loss=loss, grad_norm=norm, step=self.policy.step,
            updated=updated, stages=clock.stages,
            device_bytes={**parameter_bytes(self.policy, self._state), **held[0]}, host_bytes=held[1], metrics=figures,
            prompts=[prompt_digest(g.prompt_ids) for g in self.groups])


def _held(state: ResidentState, result: Replay) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per device between replay and update: on it, and in the host's memory for it."""
    cotangent = {"cotangent": result.cotangent.device_bytes()} if result.cotangent else {}
    return state.device_bytes() | cotangent, state.host_bytes()


class _Clock:
    """Times stages, compilation apart."""

    def __init__(self, policy: Policy):
        on = policy.model, policy.mesh
        self.programs = {"capture": [capture_program(*on)], "score": [members_program(*on)], "sweep": [sweep_program(*on)],
                         "replay": [members_program(*on), members_program(*on, to_prompt=True)]}
        self.stages: dict[str, Stage] = {}

    @contextlib.contextmanager
    def __call__(self, name: str, tokens: int) -> Iterator[None]:
        programs, begun = self.programs.get(name, []), time.perf_counter()
        compiled = sum(program.compile_seconds for program in programs)
        yield
        stage = self.stages.setdefault(name, Stage())
        compiling = sum(program.compile_seconds for program in programs) - compiled
        stage.seconds += time.perf_counter() - begun - compiling
        stage.compile_seconds += compiling
        stage.tokens += tokens
        stage.peak_device_bytes = max([stage.peak_device_bytes, *(program.peak_bytes() for program in programs)])
