"""Which position each slot of each owner holds."""

import jax.numpy as jnp
import numpy as np
import pytest

from longstraw_jax.sharding import Layout, Owners

LAYOUTS = [(1, 4), (2, 1), (3, 4), (8, 64)]
GRANULES = 5


def dealt(count, granule):
    """The layout by hand: granules of consecutive offsets dealt to the owners in turn; [owners, slots]."""
    hands = [[] for _ in range(count)]
    for number in range(GRANULES * count):
        hands[number % count] += range(number * granule, (number + 1) * granule)
    return np.array(hands)


def layout(count, granule):
    return Layout(Owners(("context",), count), granule)


@pytest.mark.parametrize(("count", "granule"), LAYOUTS)
def test_offsets(count, granule):
    slots = jnp.arange(GRANULES * granule)
    for owner, hand in enumerate(dealt(count, granule)):
        np.testing.assert_array_equal(layout(count, granule).offsets(slots, owner), hand)
    every = layout(count, granule).offsets(slots[None], jnp.arange(count)[:, None])
    np.testing.assert_array_equal(every, dealt(count, granule))


@pytest.mark.parametrize(("count", "granule"), LAYOUTS)
def test_locate(count, granule):
    hands = dealt(count, granule)
    owner, slot = layout(count, granule).locate(jnp.arange(hands.size).reshape(GRANULES, -1))
    assert owner.shape == slot.shape == (GRANULES, hands.size // GRANULES)
    np.testing.assert_array_equal(hands[owner, slot].reshape(-1), np.arange(hands.size))


def test_pages_are_cyclic_and_a_block_is_contiguous():
    pages = layout(3, 64).offsets(64 * jnp.arange(4), 2) // 64
    np.testing.assert_array_equal(pages, [2, 5, 8, 11])  # owner(page) = page mod 3
    np.testing.assert_array_equal(layout(3, 5).offsets(jnp.arange(5), 1), np.arange(5, 10))


@pytest.mark.parametrize(("count", "granule"), LAYOUTS)
def test_slots_covering(count, granule):
    hands = dealt(count, granule)
    for tokens in {0, 1, granule - 1, granule, granule + 1, granule * count, granule * count + 1, hands.size}:
        fullest = max((hand < tokens).sum() for hand in hands)
        slots = int(layout(count, granule).slots_covering(tokens))
        assert slots % granule == 0
        assert slots - granule < fullest <= slots
    assert int(layout(count, granule).slots_covering(jnp.int32(1))) == granule


@pytest.mark.parametrize(("count", "granule"), LAYOUTS)
def test_to_and_from_sequence(count, granule):
    hands = dealt(count, granule)
    rows = jnp.stack([jnp.asarray(hands), -jnp.asarray(hands)], -1)  # [owners, slots, 2]
    sequence = layout(count, granule).to_sequence(rows)
    np.testing.assert_array_equal(sequence[:, 0], np.arange(hands.size))
    np.testing.assert_array_equal(sequence[:, 1], -np.arange(hands.size))
    np.testing.assert_array_equal(layout(count, granule).from_sequence(sequence), rows)
