"""GRPO post-training on million-token prompts: the prompt is evaluated once, responses are replayed one at a time."""

from longstraw_jax import backend as backend
from longstraw_jax.capture import capture as capture
from longstraw_jax.config import BlockSizes as BlockSizes
from longstraw_jax.config import GradientConfig as GradientConfig
from longstraw_jax.config import LoraConfig as LoraConfig
from longstraw_jax.config import ObjectiveConfig as ObjectiveConfig
from longstraw_jax.config import OptimizerConfig as OptimizerConfig
from longstraw_jax.errors import InputError as InputError
from longstraw_jax.errors import LongstrawError as LongstrawError
from longstraw_jax.errors import UnsupportedError as UnsupportedError
from longstraw_jax.groups import read_groups as read_groups
from longstraw_jax.loading import load_policy as load_policy
from longstraw_jax.loading import save_adapter as save_adapter
from longstraw_jax.policy import Policy as Policy
from longstraw_jax.replay import Replay as Replay
from longstraw_jax.replay import replay as replay
from longstraw_jax.score import score as score
from longstraw_jax.sharding import fake_cpu_devices as fake_cpu_devices
from longstraw_jax.sharding import make_mesh as make_mesh
from longstraw_jax.state import ResidentState as ResidentState
from longstraw_jax.sweep import sweep as sweep
from longstraw_jax.tokenizer import load_tokenizer as load_tokenizer
from longstraw_jax.transaction import Transaction as Transaction
from longstraw_jax.types import Group as Group
from longstraw_jax.types import Response as Response
from longstraw_jax.update import init_optimizer as init_optimizer
from longstraw_jax.update import update as update

__version__ = "0.1.0"
