"""A small model, a ragged group, and the conventional whole-sequence loss that the engine is held against."""

from __future__ import annotations

import numpy as np

from longstraw_jax.capture import capture
from longstraw_jax.config import BlockSizes, GradientConfig, LoraConfig, ObjectiveConfig
from longstraw_jax.conventional.autodiff import autodiff_gradient
from longstraw_jax.evidence import perturbed
from longstraw_jax.models import parameters
from longstraw_jax.models.qwen36.model import Qwen36Model
from longstraw_jax.models.qwen36.spec import Qwen36Spec
from longstraw_jax.policy import Policy, random_policy
from longstraw_jax.replay import replay
from longstraw_jax.sharding import Owners, make_mesh
from longstraw_jax.state import ResidentState
from longstraw_jax.sweep import sweep
from longstraw_jax.types import Group, Response

# two periods of two GDN layers and one attention layer; eight owners have to repeat the key heads
SPEC = Qwen36Spec(
    vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=12,
    full_attention_interval=3, max_position_embeddings=4096)
SIZES = BlockSizes(page=4, chunk=32, block=16, queries=2, keys=8, logits=1, recurrence=8)
OBJECTIVE = ObjectiveConfig(kl_beta=0.1)
PROMPT, LENGTHS = 75, (1, 37, 16)


def policy(mesh_shape: tuple[int, int], trainable: str = "lora", dtype: str = "float64", sizes: BlockSizes = SIZES) -> Policy:
    mesh = make_mesh(*mesh_shape)
    lora = LoraConfig(rank=3, alpha=5) if trainable == "lora" else None
    return perturbed(random_policy(Qwen36Model(SPEC, Owners.of(mesh), dtype, lora, sizes), mesh), seed=1, spread=0.1)


def group(lengths: tuple[int, ...] = LENGTHS, prompt: int = PROMPT, seed: int = 0) -> Group:
    """Random tokens, one in five masked."""
    rng = np.random.default_rng(seed)
    responses = [Response(rng.integers(0, 64, n), mask=rng.random(n) < 0.8, reward=float(i)) for i, n in enumerate(lengths)]
    return Group(rng.integers(0, 64, prompt), tuple(responses))


def others(g: Group, seed: int) -> list[np.ndarray]:
    """Log-probabilities that another policy might have given; far enough off for some ratios to be clipped."""
    rng = np.random.default_rng(seed)
    return [-4.2 + 0.4 * rng.standard_normal(len(r.ids)) for r in g.responses]


def ours(p: Policy, g: Group, objective: ObjectiveConfig = OBJECTIVE, gradient: str | GradientConfig = "response"):
    """Capture and replay, and the sweep where there is one."""
    state = capture(p, g.prompt_ids, gradient=gradient)
    return sweep(p, state, g.prompt_ids, replayed(p, state, g, objective, gradient), gradient=gradient)


def replayed(
    p: Policy, state: ResidentState, g: Group, objective: ObjectiveConfig = OBJECTIVE, gradient: str | GradientConfig = "response"
):
    return replay(p, state, g, old=others(g, 1), reference=others(g, 2), objective=objective, gradient=gradient)


def conventional(
    p: Policy, g: Group, objective: ObjectiveConfig = OBJECTIVE, fixed: int = PROMPT - 1
) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, gradient by checkpoint name) of plain autodiff, the state of the first `fixed` positions held fixed."""
    return autodiff_gradient(p, g, fixed=fixed, old=others(g, 1), reference=others(g, 2), objective=objective)


def by_name(p: Policy, gradient) -> dict[str, np.ndarray]:
    return parameters.to_host(gradient, p.model.abstract_parameters()[0])


def relative(x: np.ndarray, wanted: np.ndarray) -> float:
    """|x - wanted| / |wanted|; what ought to be 0 (an expert that no token chose) must be."""
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(x - wanted) / norm) if norm else float(np.linalg.norm(x))


def farthest(p: Policy, gradient, wanted: dict[str, np.ndarray]) -> float:
    """The largest relative difference of a parameter's gradient."""
    mine = by_name(p, gradient)
    assert mine.keys() == wanted.keys()
    return max(relative(mine[name], x) for name, x in wanted.items())
