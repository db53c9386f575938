"""A self-draft that scores only some of the ids: the others are never drafted, and come out of the target as before."""

import pytest
import torch

from layerskip import DraftPlan, wrap
from layerskip.drafters import SelfDrafter
from layerskip.models.decoder import Decoder
from tests.contracts import PROMPTS
from tests.drafting import always
from tests.engines import drafter_of, make_engine
from tests.special_models import agreeing_model
from tests.tiny_models import FAMILY_NAMES, REPRESENTATIVES, VOCAB_SIZE, prompt, tiny_model, transformers_greedy

VOCABULARIES = {
    "one id": [27],
    "every second": list(range(0, VOCAB_SIZE, 2)),
    "the last ones": list(range(40, VOCAB_SIZE)),
    "all": list(range(VOCAB_SIZE)),
}
every_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)


def propose(vocabulary, prompts=PROMPTS, limits=(4, 4, 4), **options):
    """The first draft behind the prompts' first tokens, along an exit."""

    def make(decoder, context):
        return SelfDrafter(decoder, DraftPlan.exit(2).path(decoder.num_blocks), context, vocabulary)

    engine = make_engine(agreeing_model("llama"), prompts, make, **{"max_new_tokens": 16, **options})
    engine.read_prompts()
    with torch.inference_mode():
        limits = [limits[number] for number in engine.state.numbers]  # a row may have ended with its first token
        return drafter_of(engine).propose(engine.state, limits)


class TestDrafts:
    @every_vocabulary
    @pytest.mark.parametrize("controls", [{}, {"repetition_penalty": 1.4}], ids=["bare", "processors"])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_are_of_the_vocabulary(self, vocabulary, controls, do_sample):
        """Catches an index among the scored ids that passes for an id."""
        draft = propose(vocabulary, do_sample=do_sample, **controls)
        assert set(draft.tokens.flatten().tolist()) <= set(vocabulary)

    @pytest.mark.parametrize("controls", [{}, {"repetition_penalty": 1.4, "top_k": 5}], ids=["bare", "processors"])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_of_all_ids_are_those_without_a_vocabulary(self, controls, do_sample):
        some, whole = (propose(each, do_sample=do_sample, **controls) for each in (VOCABULARIES["all"], None))
        assert torch.equal(some.tokens, whole.tokens)
        if do_sample:
            torch.testing.assert_close(some.probs, whole.probs, rtol=0, atol=1e-12)

    @every_vocabulary
    def test_have_the_distribution_among_its_ids(self, vocabulary):
        """The whole one without the others, which the acceptance test divides by. Catches ids that moved up."""
        some, whole = (propose(each, do_sample=True, top_k=0, limits=(1, 1, 1)) for each in (vocabulary, None))
        kept = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(vocabulary), True)
        expected = whole.probs * kept
        torch.testing.assert_close(some.probs, expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-12)

    def test_are_the_likeliest_of_its_ids(self):
        """Greedily, without processors: the one case in which the few are not put among all."""
        vocabulary, model = VOCABULARIES["every second"], agreeing_model("llama")
        chosen = propose(vocabulary, limits=(1, 1, 1)).tokens
        for row, before in enumerate(PROMPTS):
            text = transformers_greedy(model, torch.tensor([before]), max_new_tokens=1)
            decoder = Decoder(model)
            cache, span = decoder.new_cache(1, text.shape[1]), decoder.span([0], text.shape[1])
            hidden = decoder.run(decoder.embed(text), decoder.full_path[:2], cache, span)
            assert chosen[row].item() == vocabulary[decoder.logits(hidden[:, -1:])[0, 0, vocabulary].argmax()]

    def test_obey_processors_by_id(self):
        """Catches suppressed ids that are looked for among the few by their place."""
        vocabulary = VOCABULARIES["every second"]
        banned = propose(vocabulary).tokens.flatten().tolist()
        draft = propose(vocabulary, suppress_tokens=banned)
        assert set(draft.tokens.flatten().tolist()) <= set(vocabulary) - set(banned)

    def test_a_processor_may_demand_an_id_that_is_not_among_them(self):
        """The draft is then that id, which its own scores say nothing of; catches one looked up behind their end."""

        def demand(input_ids, scores):
            return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([VOCAB_SIZE - 1]), 0.0)

        model, options = wrap(agreeing_model("llama")), {"max_new_tokens": 12, "eos_token_id": None}
        plan = DraftPlan.exit(2, draft_vocabulary=range(40))
        for governor in ("measured", "off"):
            result = model.generate(prompt(), plan=plan, governor=governor, logits_processor=[demand], **options)
            assert result.new_token_ids == [[VOCAB_SIZE - 1] * 12]

    def test_end_behind_an_unsure_one(self):
        """Confidence is among the ids that were scored, of which one is certain of itself."""
        assert propose([27], confidence_threshold=1.0).num_drafted == [4, 4, 4]
        assert max(propose(VOCABULARIES["every second"], confidence_threshold=0.999).num_drafted) == 1

    def test_end_behind_an_end_of_text(self):
        counts = propose([27], eos_token_id=(27,)).num_drafted
        assert counts and set(counts) == {1}


class TestOutput:
    @every_vocabulary
    @pytest.mark.parametrize("family", REPRESENTATIVES)
    def test_is_the_models_own(self, family, vocabulary):
        model = agreeing_model(family)
        plan = DraftPlan.exit(2, draft_vocabulary=vocabulary)
        result = wrap(model).generate(prompt(), **always(plan), max_new_tokens=24, eos_token_id=None)
        assert torch.equal(result.sequences, transformers_greedy(model, prompt(), max_new_tokens=24))
        pairs = list(zip(result.new_token_ids[0], result.drafted[0], strict=True))
        assert {token for token, drafted in pairs if drafted} <= set(vocabulary)
        assert result.stats.proposed > 0

    def test_holds_ids_that_are_never_drafted(self):
        model, vocabulary = agreeing_model("llama"), VOCABULARIES["every second"]
        plan = DraftPlan.exit(3, draft_vocabulary=vocabulary)
        result = wrap(model).generate(PROMPTS, **always(plan), max_new_tokens=24, eos_token_id=None)
        pairs = [
            pair for row in zip(result.new_token_ids, result.drafted, strict=True) for pair in zip(*row, strict=True)
        ]
        assert any(drafted for _, drafted in pairs)
        assert {token for token, _ in pairs} - set(vocabulary)

    @pytest.mark.parametrize("threshold", [0.0, 0.5])
    def test_where_every_id_that_could_be_drafted_is_banned(self, threshold):
        """The draft then has no distribution at all, which is no error: the target has."""
        model, banned = agreeing_model("llama"), [5, 16, 27, 44]
        plan = DraftPlan.exit(3, draft_vocabulary=banned, confidence_threshold=threshold)
        for do_sample in (False, True):
            options = {"suppress_tokens": banned, "do_sample": do_sample, "acceptance_rule": "invariant", "seed": 1}
            options |= {"max_new_tokens": 16, "eos_token_id": None}
            drafted, plain = (wrap(model).generate(PROMPTS, **each, **options) for each in (always(plan), {}))
            assert drafted.new_token_ids == plain.new_token_ids

    def test_does_not_depend_on_it_in_bfloat16_at_one_pass_width(self):
        model = wrap(tiny_model("llama", dtype=torch.bfloat16))
        options = {"max_new_tokens": 20, "eos_token_id": None, "pass_width": 5}
        plain = model.generate(prompt(), **options)
        plan = DraftPlan.exit(3, draft_vocabulary=VOCABULARIES["every second"])
        assert model.generate(prompt(), **always(plan), **options).new_token_ids == plain.new_token_ids


class TestHead:
    """The rows of the matrix that a draft reads."""

    @pytest.mark.parametrize("family", FAMILY_NAMES)
    @every_vocabulary
    def test_gives_the_logits_of_its_ids(self, family, vocabulary):
        """Also where the head is tied to the embedding."""
        decoder = Decoder(tiny_model(family))
        hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        some, whole = decoder.logits(hidden, decoder.partial_head(tuple(vocabulary))), decoder.logits(hidden)
        torch.testing.assert_close(some, whole[..., vocabulary], rtol=0, atol=1e-12)

    def test_is_made_once_for_a_plan_that_is_used_again(self):
        """A copy of some thousand rows in every call would cost more than it saves."""
        decoder = Decoder(tiny_model("llama"))
        assert decoder.partial_head((3, 4)) is decoder.partial_head((3, 4))

    def test_of_many_plans_only_the_newest_are_held(self):
        decoder = Decoder(tiny_model("llama"))
        for first in range(40):
            decoder.partial_head((first, 60))
        assert len(decoder._partial_heads) < 10
        assert decoder.partial_head((3, 60)).vocabulary.tolist() == [3, 60]
