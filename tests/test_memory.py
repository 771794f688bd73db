"""What the compiled programs hold: independent of the group, linear in the response's and the prompt's own state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import engine_case as case
from longstraw_jax.capture import capture_program
from longstraw_jax.config import ObjectiveConfig
from longstraw_jax.members import members_program, pack
from longstraw_jax.models import parameters
from longstraw_jax.objective import settings_of
from longstraw_jax.state import abstract_cotangent, abstract_state, page_count, tree_bytes
from longstraw_jax.sweep import sweep_program
from longstraw_jax.types import Response


@pytest.fixture(scope="module")
def policy():
    return case.policy((2, 1), dtype="float32")


@pytest.fixture(scope="module")
def members(policy):
    """members(G, R, P) -> (memory analysis of the program that also sums the prompt's cotangents, bytes per device of the state and
    of its cotangent), each compiled once."""
    trainable, frozen = (parameters.abstract_arrays(tree, policy.mesh) for tree in policy.model.abstract_parameters())
    done = {}

    def measure(group, response, prompt):
        if (group, response, prompt) not in done:
            state = abstract_state(policy.model, policy.mesh, page_count(policy.model, prompt))
            rows = pack(policy.model, 0, [Response(np.zeros(response, int))] * group)
            boundary = abstract_cotangent(policy.model, state)
            program = members_program(policy.model, policy.mesh, to_prompt=True).compiled(
                trainable, frozen, trainable, boundary, *state, jnp.int32(prompt), rows, settings_of(ObjectiveConfig(), jnp.float32),
                jnp.int32(1))
            done[group, response, prompt] = program.memory_analysis(), tree_bytes(state), tree_bytes(boundary)
        return done[group, response, prompt]

    return measure


def test_temporaries_do_not_depend_on_the_group(members):
    (two, _, cotangent), (eight, *_) = members(2, 32, 512), members(8, 32, 512)
    assert abs(two.temp_size_in_bytes - eight.temp_size_in_bytes) <= 0.01 * two.temp_size_in_bytes
    # in place: the cotangents that come in are the ones that go out
    assert two.alias_size_in_bytes == eight.alias_size_in_bytes > cotangent


def test_a_longer_response_adds_its_pages_only(policy, members):
    """At one block size; the pages, their float32 cotangents, and each block's entry state."""
    short, long = (members(2, response, 512)[0].temp_size_in_bytes for response in (32, 64))
    rows = sum(np.prod(x.shape) * 4 for x in policy.model.abstract_rows(32, 1).values()) / 2  # of 32 tokens, per owner
    recurrent = tree_bytes(abstract_state(policy.model, policy.mesh, 2)[1])
    own = 2 * rows + 2 * recurrent
    assert 0.5 * own < long - short < 1.5 * own


def test_a_longer_prompt_adds_its_state_and_cotangent_only(members):
    (short, *held), (long, *twice) = (members(2, 32, prompt) for prompt in (512, 1024))
    assert long.argument_size_in_bytes - short.argument_size_in_bytes == sum(twice) - sum(held) > 0
    assert abs(long.temp_size_in_bytes - short.temp_size_in_bytes) <= 0.01 * short.temp_size_in_bytes


def test_capture_grows_by_its_state_only_and_in_place(policy):
    trainable, frozen = (parameters.abstract_arrays(tree, policy.mesh) for tree in policy.model.abstract_parameters())

    def measure(prompt):
        state = abstract_state(policy.model, policy.mesh, page_count(policy.model, prompt))
        ids = jax.ShapeDtypeStruct((32,), np.int32)
        program = capture_program(policy.model, policy.mesh).compiled(trainable, frozen, *state, ids, jnp.int32(0), jnp.int32(32))
        return program.memory_analysis(), tree_bytes(state)

    (short, held), (long, twice) = measure(512), measure(1024)
    assert short.alias_size_in_bytes == held
    assert long.alias_size_in_bytes == twice
    assert abs(long.temp_size_in_bytes - short.temp_size_in_bytes) <= 0.01 * short.temp_size_in_bytes


def test_the_sweep_grows_by_state_and_cotangent_only_and_in_place(policy):
    trainable, frozen = (parameters.abstract_arrays(tree, policy.mesh) for tree in policy.model.abstract_parameters())

    def measure(prompt):
        state = abstract_state(policy.model, policy.mesh, page_count(policy.model, prompt))
        cotangent = abstract_cotangent(policy.model, state)
        ids = jax.ShapeDtypeStruct((32,), np.int32)
        program = sweep_program(policy.model, policy.mesh).compiled(
            trainable, frozen, trainable, cotangent, *state, ids, jnp.int32(0), jnp.int32(32), jnp.int32(0))
        return program.memory_analysis(), tree_bytes(state), tree_bytes(cotangent)

    (short, held, bar), (long, twice, bars) = measure(512), measure(1024)
    assert long.argument_size_in_bytes - short.argument_size_in_bytes == twice - held + bars - bar > 0
    assert long.alias_size_in_bytes - short.alias_size_in_bytes == bars - bar
    assert abs(long.temp_size_in_bytes - short.temp_size_in_bytes) <= 0.01 * short.temp_size_in_bytes
