"""Meshes, the token owners' collectives, token layouts, placement rules. Knows no model."""

from longstraw_jax.sharding.layout import Layout as Layout
from longstraw_jax.sharding.mesh import AXES as AXES
from longstraw_jax.sharding.mesh import AnyMesh as AnyMesh
from longstraw_jax.sharding.mesh import fake_cpu_devices as fake_cpu_devices
from longstraw_jax.sharding.mesh import make_mesh as make_mesh
from longstraw_jax.sharding.mesh import offer_cpu_devices as offer_cpu_devices
from longstraw_jax.sharding.mesh import parse_mesh as parse_mesh
from longstraw_jax.sharding.mesh import platform_of as platform_of
from longstraw_jax.sharding.owners import Owners as Owners
from longstraw_jax.sharding.owners import gather_whole as gather_whole
from longstraw_jax.sharding.rules import EXPERT as EXPERT
from longstraw_jax.sharding.rules import SPLIT as SPLIT
from longstraw_jax.sharding.rules import WHOLE as WHOLE
from longstraw_jax.sharding.rules import PlacementRules as PlacementRules
from longstraw_jax.sharding.stretch import NO_POSITION as NO_POSITION
from longstraw_jax.sharding.stretch import Stretch as Stretch
