"""The second family through the same engine: gradients against plain autodiff on meshes with both axes, choices, memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import engine_case as case
from longstraw_jax.capture import capture, paged_order
from longstraw_jax.config import BlockSizes, LoraConfig, ObjectiveConfig
from longstraw_jax.errors import InputError
from longstraw_jax.kernels_pallas import implementation
from longstraw_jax.members import members_program, pack
from longstraw_jax.models import parameters
from longstraw_jax.models.base import Branch, Pages, Segment
from longstraw_jax.models.glm52.spec import Glm52Spec
from longstraw_jax.models.registry import make_model, named_spec
from longstraw_jax.objective import settings_of
from longstraw_jax.policy import Policy, random_policy
from longstraw_jax.programs import StageProgram
from longstraw_jax.sharding import NO_POSITION, Layout, make_mesh
from longstraw_jax.state import abstract_state, empty_state, page_count, rows_spec
from longstraw_jax.sweep import sweep
from longstraw_jax.types import Response

# prompts and responses are longer than index_topk, so that attention is sparse; shared layers follow full ones in both stacks
SPEC = Glm52Spec(
    vocab_size=64, hidden_size=48, intermediate_size=64, moe_intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
    n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=2, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=10, index_topk=12, index_n_heads=16, index_head_dim=24,
    indexer_types=("full", "shared", "full", "full", "shared"), max_position_embeddings=4096)


def policy(mesh_shape: tuple[int, int], trainable: str = "lora", dtype: str = "float64", exchange: str = "auto") -> Policy:
    mesh = make_mesh(*mesh_shape)
    lora = LoraConfig(rank=3, alpha=5) if trainable == "lora" else None
    model = dataclasses.replace(make_model(SPEC, mesh, dtype=dtype, lora=lora, sizes=case.SIZES), exchange=exchange)
    return case.perturbed(random_policy(model, mesh), seed=1, spread=0.1)


@pytest.fixture(scope="module")
def conventional():
    with jax.enable_x64(True):
        return {(kind, gradient): case.conventional(policy((1, 1), kind), case.group(), fixed=fixed)
                for kind, gradient, fixed in (("lora", "response", case.PROMPT - 1), ("lora", "full", 0), ("all", "full", 0))}


# folded (expert=8) and unfolded; both exchanges of selected rows. The operators' own tests take the other meshes.
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("mesh", "trainable", "exchange"), [
    ((1, 8), "lora", "rounds"), ((2, 4), "all", "fetch")])
def test_the_gradient_is_autodiffs_on_every_mesh(mesh, trainable, exchange, conventional):
    p, group = policy(mesh, trainable, exchange=exchange), case.group()
    state = capture(p, group.prompt_ids, gradient="full")
    replayed = case.replayed(p, state, group, gradient="full")
    loss, wanted = conventional[trainable, "full"]
    assert replayed.loss == pytest.approx(loss, rel=1e-11)
    if trainable == "lora":
        assert case.farthest(p, replayed.gradient, conventional["lora", "response"][1]) < 1e-9
    assert case.farthest(p, sweep(p, state, group.prompt_ids, replayed).gradient, wanted) < 1e-9


def test_the_gradient_with_the_kernels_is_autodiffs():
    """Interpreted, and in float32, which the kernels take."""
    p, group = policy((2, 2), dtype="float32"), case.group()
    with implementation("pallas"):
        ours = case.ours(p, group, gradient="full")
    loss, wanted = case.conventional(p, group, fixed=0)
    assert ours.loss == pytest.approx(loss, rel=1e-5)
    assert case.farthest(p, ours.gradient, wanted) < 1e-4


def chosen(mesh_shape: tuple[int, int], exchange: str, dtype: str = "float64") -> dict[str, np.ndarray]:
    """What one `extend` over a whole prompt selects and routes, tokens in their order."""
    p = policy(mesh_shape, dtype=dtype, exchange=exchange)
    owners, tokens = p.model.owners, 96
    layout = Layout(owners, p.model.sizes.page)

    def run(trainable, frozen, rows, ids):
        branch = Branch(None, Pages.of(rows, jnp.int32(0), jnp.int32(0)), {})
        kept = p.model.extend(trainable, frozen, branch, Segment(ids, jnp.int32(0), jnp.int32(tokens), layout))[2]
        return jax.tree.map(lambda x: x.swapaxes(0, 1), p.model.choices(kept))

    rows, _ = empty_state(p.model, p.mesh, page_count(p.model, tokens))
    ids = np.random.default_rng(7).integers(0, SPEC.vocab_size, tokens).astype(np.int32)
    specs = [parameters.specs(tree) for tree in p.model.abstract_parameters()]
    program = StageProgram(run, p.mesh, (*specs, dict.fromkeys(rows, rows_spec(p.model)), owners.spec), owners.spec)
    kept = program(p.trainable, p.frozen, rows, paged_order(ids, layout))
    return {name: np.asarray(layout.to_sequence(jnp.asarray(np.asarray(x)).reshape(owners.count, -1, *x.shape[1:])))
            for name, x in kept.items()}


@pytest.mark.usefixtures("x64")
def test_the_same_tokens_are_selected_and_routed_on_every_mesh():
    wanted = chosen((1, 1), "rounds")
    assert (wanted["selection"] < NO_POSITION).sum(-1).max() == SPEC.index_topk
    for mesh, exchange in (((1, 8), "fetch"), ((8, 1), "rounds"), ((2, 4), "rounds"), ((4, 2), "fetch")):
        for name, x in chosen(mesh, exchange).items():
            np.testing.assert_array_equal(x, wanted[name], err_msg=f"{name} on {mesh}")


def test_the_kernels_select_the_same_tokens():
    with implementation("pallas"):
        kernels = chosen((2, 2), "rounds", "float32")
    for name, x in chosen((1, 1), "rounds", "float32").items():
        np.testing.assert_array_equal(kernels[name], x, err_msg=name)


def test_temporaries_do_not_depend_on_the_group():
    p = policy((2, 1), dtype="float32")
    trainable, frozen = (parameters.abstract_arrays(tree, p.mesh) for tree in p.model.abstract_parameters())
    state = abstract_state(p.model, p.mesh, page_count(p.model, 512))

    def temporaries(members):
        rows = pack(p.model, 0, [Response(np.zeros(32, int))] * members)
        program = members_program(p.model, p.mesh).compiled(
            trainable, frozen, trainable, (), *state, jnp.int32(512), rows, settings_of(ObjectiveConfig(), jnp.float32), jnp.int32(1))
        return program.memory_analysis().temp_size_in_bytes

    two, eight = temporaries(2), temporaries(8)
    assert abs(two - eight) <= 0.01 * two


def test_published_size_without_the_weights():
    mesh = AbstractMesh((1, 32), ("context", "expert"))
    model = make_model(named_spec("glm5.2"), mesh, dtype="bfloat16", lora=LoraConfig(8), sizes=BlockSizes())
    trainable, frozen = model.abstract_parameters()
    assert parameters.count(frozen) == pytest.approx(743.4e9, rel=1e-3)
    rows = {name: np.prod(x.shape) * 2 / (64 * 64) for name, x in model.abstract_rows(64, 64).items()}
    assert rows == {"latent": 89_856, "index": 5_376}
    names = {name for p in jax.tree.leaves(trainable, is_leaf=parameters.is_parameter) for name in parameters.checkpoint_names(p).ravel()}
    assert "model.layers.77.mlp.experts.255.down_proj.lora_B" in names
    assert not any("indexer" in name or ".gate.lora" in name for name in names)


def test_meshes_that_do_not_fit():
    with pytest.raises(InputError, match="8 experts on 3 expert owners"):
        make_model(SPEC, AbstractMesh((1, 3), ("context", "expert")), dtype="float32", lora=None, sizes=BlockSizes()).abstract_parameters()
