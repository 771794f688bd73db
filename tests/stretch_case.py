"""One sequence for tests of selection: a prompt in cyclic pages and a branch in evenly shared blocks, the same on every mesh.

Whatever lies beyond a length, and every other layer of the stack, holds huge numbers.
"""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from longstraw_jax.models.base import Pages, Segment
from longstraw_jax.sharding import Layout, Owners

ROOM = 48  # tokens that the prompt, and that the branch, have room for
BLOCK = 24  # tokens of a segment
PAGE = 2
LAYERS, LAYER = 3, 1
HUGE = 1e30
NONE = 2**31 - 1


@dataclass(frozen=True)
class Lengths:
    """Tokens: of the prompt, of the branch before the segment, of the branch with it."""

    prefix: int
    before: int
    after: int

    def arrays(self):
        return {name: np.int32(n) for name, n in vars(self).items()}

    @property
    def queries(self):
        """Positions of the segment's slots, pads included."""
        return self.prefix + self.before + np.arange(BLOCK)

    @property
    def keys(self):
        """Positions of all rows, prompt's and branch's; NONE where a row is not real."""
        at = np.arange(ROOM)
        return np.concatenate([np.where(at < self.prefix, at, NONE), np.where(at < self.after, self.prefix + at, NONE)])


LENGTHS = [
    Lengths(ROOM, BLOCK, ROOM),
    Lengths(ROOM - PAGE - 1, BLOCK, BLOCK + 5),  # a page half full, one empty; pads behind the segment
    Lengths(1, 0, BLOCK - 1),  # most owners hold no row of the prompt
]


def layouts(mesh):
    """Of the prompt and of the branch."""
    owners = Owners.of(mesh)
    return Layout(owners, PAGE), Layout(owners, BLOCK // owners.count)


def segment_and_pages(mesh, name, prefix, own, lengths):
    """Inside a program: the segment, and the pages of the prompt and of the branch."""
    granule = layouts(mesh)[1].granule
    start, length = lengths["prefix"] + lengths["before"], lengths["after"] - lengths["before"]
    segment = Segment(jnp.zeros(granule, int), start, length, layouts(mesh)[1])
    return segment, [Pages({name: prefix}, jnp.int32(0), lengths["prefix"], PAGE),
                     Pages({name: own}, lengths["prefix"], lengths["after"], granule)]


@functools.cache
def _order(layout, tokens):
    """Place in the sequence of each entry of a sharded array. NumPy, as what follows: every eager jnp operation is compiled."""
    count = layout.owners.count
    return np.asarray(layout.offsets(np.arange(tokens // count)[None], np.arange(count)[:, None])).reshape(-1)


def to_owners(layout, x):
    """[tokens, ...] in the order of the sequence -> the device-major order of a sharded array."""
    return x[_order(layout, len(x))]


def to_sequence(layout, x):
    y = np.empty_like(x)
    y[_order(layout, len(x))] = x
    return y


def stack(layout, x, length):
    """A layer's rows [ROOM, C] among other layers' -> [LAYERS, slots, C]; only `length` tokens are real."""
    rows = np.full((LAYERS, *x.shape), HUGE)
    rows[LAYER] = to_owners(layout, np.where(np.arange(ROOM)[:, None] < length, x, HUGE))
    return rows
