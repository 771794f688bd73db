"""GLM-5.2's feed-forward halves: the dense one, and the routed one with everything about its experts but their matrices."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from longstraw_jax.models.base import Segment
from longstraw_jax.models.glm52.attention import AttentionHalf
from longstraw_jax.models.glm52.spec import Glm52Spec
from longstraw_jax.models.layers.declare import Constant, Fixed, Normal, parameter
from longstraw_jax.models.layers.experts import route, routing_weights
from longstraw_jax.models.layers.linear import INIT_STD
from longstraw_jax.models.layers.mlp import GatedMlp
from longstraw_jax.models.layers.norms import Norm
from longstraw_jax.models.layers.numerics import statistics_dtype
from longstraw_jax.sharding import SPLIT, WHOLE, Owners, gather_whole


class DenseLayer(AttentionHalf):
    def __init__(self, spec: Glm52Spec, linear, options_of, *, dtype):
        super().__init__(spec, linear, options_of, dtype=dtype)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMlp(spec.hidden_size, spec.intermediate_size, linear)

    def feed_forward(self, h: Float[Array, "T M"], segment: Segment) -> Float[Array, "T M"]:
        return h + self.mlp(self.post_attention_layernorm(h), segment.owners)


class Router(nnx.Module):
    """W and the bias that balances the experts' load, which is no parameter of the loss (DeepSeek-V3, 2024, section 2.1.2)."""

    def __init__(self, spec: Glm52Spec, *, dtype):
        self.shape = (spec.n_routed_experts, spec.hidden_size)
        self.weight = parameter(self.shape, dtype, (SPLIT, SPLIT), Normal(INIT_STD))
        self.e_score_correction_bias = parameter(self.shape[:1], statistics_dtype(dtype), (WHOLE,), Constant(0), Fixed)

    def whole(self, owners: Owners) -> Float[Array, "E M"]:
        return gather_whole(self.weight[...], self.shape, owners)


class RoutedMlp(nnx.Module):
    def __init__(self, spec: Glm52Spec, linear, *, dtype):
        self.gate = Router(spec, dtype=dtype)
        self.shared_experts = GatedMlp(spec.hidden_size, spec.moe_intermediate_size * spec.n_shared_experts, linear)


class RoutedLayer(AttentionHalf):
    def __init__(self, spec: Glm52Spec, linear, options_of, *, dtype):
        super().__init__(spec, linear, options_of, dtype=dtype)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype)
        self.mlp = RoutedMlp(spec, linear, dtype=dtype)

    def route(self, h: Float[Array, "T M"], segment: Segment) -> Int[Array, "T k"]:
        """The chosen experts."""
        gate = self.mlp.gate
        return route(self.post_attention_layernorm(h), gate.whole(segment.owners), gate.e_score_correction_bias[...],
                     self.spec.num_experts_per_tok)

    def around_experts(
        self, h: Float[Array, "T M"], routing: Int[Array, "T k"], segment: Segment
    ) -> tuple[Float[Array, "T M"], Float[Array, "T k"], Float[Array, "T M"]]:
        """(what the experts read, the weights of those in `routing`, the layer's output without their share)."""
        n = self.post_attention_layernorm(h)
        weights = routing_weights(n, self.mlp.gate.whole(segment.owners), routing, normalise=True, scale=self.spec.routed_scaling_factor)
        return n, weights, h + self.mlp.shared_experts(n, segment.owners)
