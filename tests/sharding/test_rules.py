"""Which dimension of a weight is shared out."""

import pytest
from jax.sharding import PartitionSpec

from longstraw_jax.errors import InputError
from longstraw_jax.sharding import EXPERT, SPLIT, WHOLE, Owners, PlacementRules

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


@pytest.mark.parametrize(("shape", "axes", "wanted"), [
    ((5, 8, 6, 7), (EXPERT, SPLIT, SPLIT), PartitionSpec(None, "expert", "context")),  # 2 context owners, 4 expert owners
    ((5, 8, 7, 6), (EXPERT, SPLIT, SPLIT), PartitionSpec(None, "expert", None, "context")),
    ((5, 8, 7, 9), (EXPERT, SPLIT, SPLIT), PartitionSpec(None, "expert")),
    ((4, 3, 6), (EXPERT, WHOLE, WHOLE), PartitionSpec("expert")),
    ((5, 16, 8), (SPLIT, SPLIT), PartitionSpec(None, AXES)),  # no expert's: over all owners
])
def test_experts_go_to_the_expert_owners(shape, axes, wanted):
    rules = PlacementRules(Owners(AXES, 8), Owners(("expert",), 4))
    assert rules.spec(shape, axes) == wanted
    assert rules.split_axis(shape, axes) == (len(wanted) - 1 if wanted[-1] != "expert" else None)


@pytest.mark.parametrize("expert", [None, Owners(("expert",), 4)])
def test_experts_that_the_owners_do_not_divide(expert):
    with pytest.raises(InputError, match="6 experts on .* wanted a number of owners that divides them"):
        PlacementRules(Owners(AXES, 8), expert).spec((5, 6, 8), (EXPERT, SPLIT))
