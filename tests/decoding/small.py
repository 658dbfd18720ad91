"""A small random pair and requests for it."""

import jax

from eagle_jax.config import TreeConfig
from eagle_jax.decoding.decoder import AcceptanceRule
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import EagleHead, TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from tests.helpers import SMALL_LAYER

CONFIG = TransformerConfig(
    layer=SMALL_LAYER, num_layers=2, vocab_size=320, max_positions=512
)
HEAD = EagleHeadConfig(layer=SMALL_LAYER, vocab_size=320, max_positions=512)
TARGET = Transformer(config=CONFIG)
DRAFTER = TreeDrafter(
    model=EagleHead(config=HEAD), tree=TreeConfig(num_nodes=12, depth=3, width=4)
)
NUM_SLOTS = 192  # A size that no weight has.


def init_params() -> Params:
    target = transformer.init_params(jax.random.key(0), CONFIG)
    head = eagle_head.init_params(jax.random.key(1), HEAD)
    return Params(target=target, drafter=EagleHead.join(head, target))


def requests_like(variant: int, rule: AcceptanceRule = "coupled") -> Requests:
    """Two rows whose every value depends on the variant, and no shape."""
    return make_requests(
        [[1 + variant] * (3 + variant), [7]],
        max_new_tokens=[4 + 3 * variant, 9 - variant],
        max_length=40 + variant,
        temperature=0.0 if rule == "greedy" else 0.5 + variant,
        top_p=1.0 - 0.2 * variant,
        top_k=4 * variant,
        seeds=[variant, 10 + variant],
        stop_tokens=[variant] * variant,
    )
