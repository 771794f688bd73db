"""Which dimension of a weight is shared out."""

import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.sharding import SPLIT, WHOLE, Owners, PlacementRules

AXES = ("context", "expert")


@pytest.mark.parametrize(("shape", "axes", "wanted"), [
    ((12, 8), (SPLIT, SPLIT), 0),  # the first that the owners divide
    ((7, 8), (SPLIT, SPLIT), 1),
    ((7, 9), (SPLIT, SPLIT), None),
    ((12, 8), (WHOLE, SPLIT), 1),
    ((12, 8), (WHOLE, WHOLE), None),
    ((8,), (WHOLE,), None),
    ((4, 8, 7, 12), (SPLIT, SPLIT), 3),  # stacked layers stay whole, though 4 would divide them
    ((4, 8, 12, 7), (SPLIT, SPLIT), 2),
    ((4, 8), (WHOLE,), None),
    ((2, 8), (SPLIT, WHOLE), None),  # fewer rows than owners
])
def test_split_axis(shape, axes, wanted):
    rules = PlacementRules(Owners(AXES, 4))
    assert rules.split_axis(shape, axes) == wanted
    assert rules.spec(shape, axes) == (PartitionSpec() if wanted is None else PartitionSpec(*[None] * wanted, AXES))


def test_one_owner_holds_every_size():
    assert PlacementRules(Owners(AXES, 1)).split_axis((7, 9), (SPLIT, SPLIT)) == 0
