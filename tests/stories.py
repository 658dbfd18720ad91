"""A trained pair that tells stories, and its texts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from eagle_jax.checkpoints import load_target
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter
from eagle_jax.engine.wording import load_tokenizer
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig, EagleHeadParams
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer, TransformerParams
from tests.heads.samples import load_head
from tests.helpers import texts

NEW_TOKENS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stories:
    """Target, heads and the prompts."""

    target: Transformer
    target_params: TransformerParams
    head: EagleHeadConfig
    trained: EagleHeadParams
    random: EagleHeadParams
    tokenizer: Any
    openings: list[list[int]]

    def drafter(self, **tree: Any) -> TreeDrafter:
        return TreeDrafter(model=EagleHead(config=self.head), tree=TreeConfig(**tree))

    def params(self, head: EagleHeadParams) -> Params:
        drafter_params = EagleHead.join(head, self.target_params)
        return Params(target=self.target_params, drafter=drafter_params)


def load_stories(shared: Path) -> Stories:
    """Reads them from the folder with trained models and data."""
    folder = shared / "models" / "stories260K"
    config, params = load_target(folder)
    head, trained = load_head(shared / "models/stories260K-eagle", config, params)
    tokenizer = load_tokenizer(folder, config.vocab_size)
    openings = json.loads((shared / "data" / "story_openings.json").read_text())
    return Stories(
        target=Transformer(config=config),
        target_params=params,
        head=head,
        trained=trained,
        random=EagleHead(config=head).init(jax.random.key(0)),
        tokenizer=tokenizer,
        openings=[tokenizer(opening).input_ids for opening in openings],
    )


def batches(
    stories: Stories, size: int, *, new_tokens: int = NEW_TOKENS, **settings: Any
) -> list[Requests]:
    """All openings in batches of mixed lengths; row i draws with seed i."""
    prompts = stories.openings
    return [
        make_requests(
            prompts[start : start + size],
            max_new_tokens=new_tokens,
            stop_tokens=[2],
            seeds=range(start, start + len(prompts[start : start + size])),
            prompt_bucket=64,
            **settings,
        )
        for start in range(0, len(prompts), size)
    ]


def plain_texts(
    stories: Stories, requests: list[Requests], *, greedy: bool
) -> list[list[int]]:
    found: list[list[int]] = []
    for some in requests:
        state = autoregressive.generate(
            Decoder(
                target=stories.target, acceptance="greedy" if greedy else "coupled"
            ),
            Params(target=stories.target_params),
            some,
            num_slots=128,
        )
        found += texts(some, state)
    return found


def speculate(
    stories: Stories,
    requests: Requests,
    head: EagleHeadParams,
    rule: speculative.AcceptanceRule,
    **tree: Any,
) -> DecodeState:
    return speculative.generate(
        Decoder(
            target=stories.target, drafter=stories.drafter(**tree), acceptance=rule
        ),
        stories.params(head),
        requests,
        num_slots=128,
    )
