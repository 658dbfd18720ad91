"""Every drafter in the loop: the text stays plain decoding's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import Limits
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import (
    Calibration,
    Confidence,
    LookaheadDrafter,
    LookupDrafter,
    RecyclingDrafter,
    RootOnly,
    SmallModel,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.drafting.calibration import UNCALIBRATED
from eagle_jax.drafting.rest import RestConfig, make_rest
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.interface import Drafter, Params, TargetOutput
from eagle_jax.models.transformer import Transformer
from eagle_jax.processors import ProcessorConfig
from eagle_jax.testing import ToyModel, assert_same_tokens, assert_valid_tree
from eagle_jax.tree import EAGLE1_TREE, chain, from_paths
from tests import tiny
from tests.helpers import make_draws, texts

VOCABULARY = 24
CONFIG = tiny.target_config(vocab_size=VOCABULARY)
HEAD = tiny.head_config(vocab_size=VOCABULARY)
TARGET = Transformer(config=CONFIG)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 3, 5, 6], [2, 2]]

HEAD_TREES = {
    "eagle1": EAGLE1_TREE,
    "bush": from_paths([(0,), (1,), (2,), (1, 0), (2, 0), (2, 1), (2, 1, 0)]),
    "chain": chain(4),
    "chain of fewer tokens": chain(4),
    "chain of 1": chain(1),
    "nothing": chain(0),
    "more ranks than tokens": from_paths([(rank,) for rank in range(VOCABULARY + 3)]),
}
FEWER = jnp.array([0, 3, 4, 9, 10, 11, 17, 18, 22, 23])
MODEL_TREES = {
    "small bush": HEAD_TREES["bush"],
    "small eagle2": TreeConfig(num_nodes=10, depth=3, width=3),
    "small eagle2, calibrated": TreeConfig(num_nodes=9, depth=3, width=3),
}
HEADS = {
    "medusa": tiny.medusa(VOCABULARY, has_output_heads=False),
    "hydra": tiny.hydra(VOCABULARY, has_prefix=False),
    "hydra, prefix": tiny.hydra(VOCABULARY, has_prefix=True),
    "dflash": tiny.block(VOCABULARY, is_next=False),
    "dflash, window, causal": tiny.block(
        VOCABULARY, is_next=False, sliding_window=3, is_causal=True
    ),
    "dspark": tiny.block(VOCABULARY, is_next=True),
    "dspark eagle2": tiny.block(VOCABULARY, is_next=True),
}
SAMPLED = {"bush, drawn": HEAD_TREES["bush"]}
WITHOUT_WEIGHTS: dict[str, Drafter] = {
    "lookup": LookupDrafter(depth=4),
    "lookup tree": LookupDrafter(depth=3, num_matches=3, max_ngram=2),
    "lookup of nothing": LookupDrafter(depth=0),
    "rest": make_rest(RestConfig(datastore=__file__), lambda _: [1, 2, 3, 5, 6, 2]),
    "lookahead": LookaheadDrafter(vocab_size=VOCABULARY),
    "lookahead of 1": LookaheadDrafter(
        vocab_size=VOCABULARY, level=2, window=1, guesses=1
    ),
    "recycling": RecyclingDrafter(vocab_size=VOCABULARY),
}
# The order of ranks turns round: the third child's value falls least.
TURNED = Confidence(exponents=((2.0, 1.5, 0.5), (0.5, 0.25, 0.125)))
CALIBRATED = Calibration(greedy=TURNED, sampled=dataclasses.replace(TURNED, kappa=2.0))
SWITCHES = {
    "switch": SwitchDrafter(
        first=LookupDrafter(depth=6),
        second=TreeDrafter(
            model=EagleHead(config=HEAD),
            tree=TreeConfig(num_nodes=10, depth=3, width=3),
            calibration=CALIBRATED,
        ),
        min_match=2,
    ),
}
METHODS = [*SWITCHES, *HEAD_TREES, *SAMPLED, *HEADS, *MODEL_TREES, *WITHOUT_WEIGHTS]


@pytest.fixture(scope="module")
def target_params() -> Any:
    return tiny.target_params(CONFIG)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A decoder as a `Target` and nothing more, whose cache has another layout."""

    decoder: Transformer

    def init_cache(self, batch: int, capacity: int) -> Any:
        return {"inner": self.decoder.init_cache(batch, capacity)}

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> TargetOutput:
        return self.decoder.forward(params, tokens, positions, mask, cache["inner"])

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        return self.decoder.unembed(params, hidden)

    def commit(
        self, cache: Any, entries: Any, path: jax.Array, count: jax.Array
    ) -> Any:
        return {"inner": self.decoder.commit(cache["inner"], entries, path, count)}


def small_model(target: Any) -> SmallModel:
    return SmallModel(target=target, vocab_size=VOCABULARY)


def make(name: str, target_params: Any) -> tuple[Drafter, Params]:
    if name in WITHOUT_WEIGHTS:
        return WITHOUT_WEIGHTS[name], Params(target=target_params)
    if name in HEADS:
        tree = MODEL_TREES["small eagle2" if "eagle2" in name else "small bush"]
        drafter = TreeDrafter(model=HEADS[name], tree=tree)
        params = tiny.heads_params(HEADS[name], target_params)
        return drafter, Params(target=target_params, drafter=params)
    if name in MODEL_TREES:
        decoder = Transformer(config=CONFIG)
        drafter = TreeDrafter(
            model=small_model(decoder),
            tree=MODEL_TREES[name],
            calibration=CALIBRATED if "calibrated" in name else UNCALIBRATED,
        )
        # The target's own first layer: a model that is right now and then.
        layers = target_params.layers[:1]
        smaller = dataclasses.replace(target_params, layers=layers)
        return drafter, Params(target=target_params, drafter=smaller)
    drafter = SWITCHES.get(name) or TreeDrafter(
        model=EagleHead(config=HEAD),
        tree=(HEAD_TREES | SAMPLED)[name],
        sampled=name in SAMPLED,
    )
    # A tree of one node needs no head.
    params: Any = () if name == "nothing" else tiny.head_params(HEAD, target_params)
    if "fewer" in name:
        params = EagleHead.narrow(params, FEWER)
    return drafter, Params(target=target_params, drafter=params)


def requests_of(prompts: list[list[int]], **settings: Any) -> Requests:
    return make_requests(prompts, prompt_bucket=16, **settings)


# One of each kind: what follows the tree is the same for all.
@pytest.mark.parametrize(
    "name",
    ["switch", "eagle1", "medusa", "dspark", "small bush", "lookup", "lookahead"],
)
def test_greedy_text_is_plain_decodings(target_params: Any, name: str) -> None:
    drafter, params = make(name, target_params)
    requests = requests_of(PROMPTS[-1:], max_new_tokens=29)
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance="greedy")
    found = speculative.generate(decoder, params, requests)
    assert_plain(requests, found, Params(target=target_params), "greedy")


@pytest.mark.parametrize("name", METHODS)
def test_sampled_text_is_plain_decodings_and_every_tree_is_valid(
    target_params: Any, name: str
) -> None:
    drafter, params = make(name, target_params)
    requests = requests_of(
        PROMPTS,
        max_new_tokens=[30, 1, 17, 29],
        temperature=[1.0, 1.0, 0.0, 1.0],
        seeds=range(4),
    )
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance="coupled")
    state = speculative.prefill(decoder, params, requests, num_slots=64)
    while state.is_running.any():
        state, done = speculative.decode_round(decoder, params, state)
        for row in range(4):
            assert_valid_tree(jax.tree.map(lambda x, row=row: x[row], done.tree))
    assert_plain(requests, state, Params(target=target_params), "coupled")


def changing(drafter: Drafter) -> list[Drafter]:
    """Drafters that share a state: none, a chain of one, and the one that is given."""
    found = [RootOnly(drafter=drafter), drafter]
    if isinstance(drafter, TreeDrafter):
        shorter = dataclasses.replace(
            drafter, tree=chain(1), shared_depth=drafter.depth
        )
        found.insert(1, shorter)
    return found


# One of each kind of state.
CHANGING = ["switch", "chain", "hydra, prefix", "dspark", "small eagle2", "lookup"]


@pytest.mark.parametrize("name", [*CHANGING, "lookahead", "recycling"])
def test_text_stays_plain_decodings_while_trees_change(
    target_params: Any, name: str
) -> None:
    drafter, params = make(name, target_params)
    requests = requests_of(
        PROMPTS,
        max_new_tokens=[30, 1, 17, 29],
        temperature=[1.0, 1.0, 0.0, 1.0],
        seeds=range(4),
    )
    decoders = [Decoder(target=TARGET, drafter=one) for one in changing(drafter)]
    state = speculative.prefill(decoders[-1], params, requests, num_slots=64)
    rng = np.random.default_rng(0)
    while state.is_running.any():
        one = decoders[rng.integers(len(decoders))]
        state = speculative.decode_until(one, params, state, Limits(1, 4))
    assert_plain(requests, state, Params(target=target_params), "coupled")


# What lookahead and recycling have learned from a text is not in it.
@pytest.mark.parametrize("name", CHANGING)
def test_after_rounds_without_drafts_trees_are_those_of_the_text(
    target_params: Any, name: str
) -> None:
    drafter, params = make(name, target_params)
    decoder = Decoder(target=TARGET, drafter=drafter)
    resting = Decoder(target=TARGET, drafter=RootOnly(drafter=drafter))
    requests = requests_of(PROMPTS, max_new_tokens=40)
    state = speculative.prefill(decoder, params, requests, num_slots=64)
    state = speculative.decode_until(decoder, params, state, Limits(1, 4))
    # More than can wait.
    state = speculative.decode_until(resting, params, state, Limits(9, 4))
    prompts = [
        state.tokens[row, :length].tolist()
        for row, length in enumerate((state.lengths - 1).tolist())
    ]
    again = make_requests(prompts, max_new_tokens=2, prompt_bucket=64)
    read = speculative.prefill(decoder, params, again, num_slots=64)
    assert read.root.tolist() == state.root.tolist()
    trees = [
        speculative.decode_round(decoder, params, one)[1].tree for one in (state, read)
    ]
    for field in ("tokens", "parents", "is_node"):
        one, other = (np.asarray(getattr(tree, field)) for tree in trees)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["medusa", "chain of fewer tokens", "rest"])
def test_processed_text_is_plain_decodings(target_params: Any, name: str) -> None:
    drafter, params = make(name, target_params)
    requests = requests_of(
        PROMPTS,
        max_new_tokens=30,
        temperature=[0.0, 1.0, 0.0, 1.0],
        seeds=range(4),
        processors=[
            ProcessorConfig(repetition_penalty=1.5, no_repeat_ngram_size=2),
            ProcessorConfig(frequency_penalty=0.5, bad_words=[[3], [1, 2]]),
            ProcessorConfig(presence_penalty=0.5, logit_bias={7: -3.0}),
            ProcessorConfig(),
        ],
    )
    state = speculative.generate(
        Decoder(target=TARGET, drafter=drafter), params, requests
    )
    assert_plain(requests, state, Params(target=target_params), "coupled")


def assert_plain(requests: Requests, found: Any, params: Params, rule: Any) -> None:
    decoder = Decoder(target=TARGET, acceptance=rule)
    plain = autoregressive.generate(decoder, params, requests)
    assert_same_tokens(texts(requests, found), texts(requests, plain))
    np.testing.assert_array_equal(found.stop_reason, plain.stop_reason)


# The second tree has room for every candidate, and expands all of its first level.
@pytest.mark.parametrize("tree", [chain(3), TreeConfig(num_nodes=7, depth=2, width=2)])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_target_as_its_own_small_model_is_always_accepted(
    target_params: Any, tree: Any, batch: int
) -> None:
    drafter = TreeDrafter(model=small_model(TARGET), tree=tree)
    params = Params(target=target_params, drafter=target_params)
    requests = requests_of(PROMPTS[-batch:], max_new_tokens=25)
    state = speculative.generate(
        Decoder(target=TARGET, drafter=drafter, acceptance="greedy"),
        params,
        requests,
        num_slots=64,
    )
    # The first token is the prefill's; every round adds a whole path.
    rounds = 24 // (drafter.depth + 1)
    np.testing.assert_array_equal(state.num_rounds, [rounds] * batch)


def test_a_small_model_is_read_where_the_text_stands(target_params: Any) -> None:
    """Its distributions after a root are those of a fresh model over the whole text."""
    drafter, params = make("small bush", target_params)
    requests = requests_of(PROMPTS, max_new_tokens=20)
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance="greedy")
    state = speculative.prefill(decoder, params, requests, num_slots=64)
    model = Transformer(config=CONFIG)
    for _ in range(2):
        before = state.lengths.tolist(), jnp.array(state.tokens)
        state, done = speculative.decode_round(decoder, params, state)
        rows, slots = before[1].shape
        positions = jnp.broadcast_to(jnp.arange(slots), before[1].shape)
        nothing = model.init_cache(rows, 0)
        output = model.forward(params.drafter, before[1], positions, None, nothing)
        every = model.unembed(params.drafter, output.hidden)
        for row, length in enumerate(before[0]):
            logits = every[row, length - 1]
            expected = np.argsort(-np.asarray(logits), kind="stable")[:3]
            found = np.asarray(done.tree.tokens[row, 1:4])
            if bool(done.count[row]):
                np.testing.assert_array_equal(found, expected)


# Of two layers: in the second, what an earlier draft saw makes a difference.
@pytest.mark.parametrize("name", ["small eagle2", "small bush"])
def test_a_model_that_runs_all_drafts_again_drafts_the_same_trees(
    target_params: Any, name: str
) -> None:
    params = Params(target=target_params, drafter=target_params)
    requests = requests_of(PROMPTS, max_new_tokens=12, temperature=[0.0, 1.0, 1.0, 0.0])

    def trees(model: SmallModel) -> list[Any]:
        drafter = TreeDrafter(model=model, tree=MODEL_TREES[name])
        decoder = Decoder(target=TARGET, drafter=drafter)
        state = speculative.prefill(decoder, params, requests, num_slots=64)
        found = []
        for _ in range(3):
            state, done = speculative.decode_round(decoder, params, state)
            found.append(done.tree)
        return found

    ours, theirs = trees(small_model(TARGET)), trees(small_model(Foreign(TARGET)))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.parents, other.parents)
        np.testing.assert_array_equal(one.is_node, other.is_node)
        np.testing.assert_allclose(one.log_values, other.log_values, atol=1e-4)


def test_lookup_searches_the_text_so_far(target_params: Any) -> None:
    drafter, params = make("lookup", target_params)
    requests = requests_of(PROMPTS, max_new_tokens=20)
    decoder = Decoder(target=TARGET, drafter=drafter, acceptance="greedy")
    state = speculative.prefill(decoder, params, requests, num_slots=64)
    for _ in range(5):
        state, _ = speculative.decode_round(decoder, params, state)
        for row, length in enumerate(state.lengths.tolist()):
            searched = state.drafter_state
            assert searched.length[row] == length - 1
            found = searched.tokens[row, : length - 1].tolist()
            assert found == state.tokens[row, : length - 1].tolist()


def test_calibrated_values_are_those_of_their_tokens() -> None:
    model = ToyModel(vocab_size=5, sharpness=1.0, seed=3)
    exponents = TURNED.exponents[0]
    drafter = TreeDrafter(
        model=model,
        tree=TreeConfig(num_nodes=4, depth=1, width=3),
        calibration=CALIBRATED,
    )
    root = jnp.zeros(1, jnp.int32)
    state = drafter.init_state(1, 64)
    tree, _ = drafter.propose((), state, root, make_draws(1))
    output, _ = model.read((), state, root)
    log_probs = np.asarray(jax.nn.log_softmax(model.logits((), output, level=1)))[0]
    by_rank = np.argsort(-log_probs)
    expected = {
        int(token): exponents[rank] * log_probs[token]
        for rank, token in enumerate(by_rank[:3])
    }
    found = dict(
        zip(tree.tokens[0, 1:].tolist(), tree.log_values[0, 1:].tolist(), strict=True)
    )
    assert found == pytest.approx(expected, abs=1e-5)
    assert list(found) != by_rank[:3].tolist()  # These exponents turn the order round.
