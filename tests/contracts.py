"""Test suites of the interfaces, as classes: a new implementation gets its tests with two lines.

class TestMyDrafter(DrawingDrafterContract):
    make_drafter = staticmethod(MyDrafter)  # (decoder, context) -> drafter
"""

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from layerskip.drafters import Draft, DraftContext, Drafter
from layerskip.engine import Engine
from layerskip.models.adapter import Adapter
from layerskip.models.decoder import Decoder
from tests.chi_square import chi_square_p_value
from tests.engines import drafter_of, make_engine, run_checked
from tests.special_models import agreeing_model
from tests.tiny_models import VOCAB_SIZE, prompt, transformers_greedy

PROMPTS = [prompt(length, seed=length)[0].tolist() for length in (9, 4, 13)]


class PrefixBound(LogitsProcessor):
    """Forbids ids by a rule that needs the whole true prefix, and keeps the prefixes it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += input_ids.tolist()
        weights = torch.arange(1, input_ids.shape[1] + 1)
        forbidden = ((input_ids * weights).sum(1, keepdim=True) + torch.arange(scores.shape[1])) % 3 == 0
        return scores.masked_fill(forbidden, float("-inf"))


class DrafterContract:
    """What every drafter owes the engine (`layerskip.drafters.base.Drafter`).

    The target of all tests is one tiny Llama of four layers and 61 ids.
    """

    family = "llama"
    prompts = PROMPTS
    adapter: Adapter | None = None
    width = 0  # most tokens of a draft that is a whole tree

    def make_drafter(self, decoder: Decoder, context: DraftContext) -> Drafter:
        """Make the drafter under test for a target's `decoder`."""
        raise NotImplementedError

    @property
    def target(self):
        return agreeing_model(self.family)

    def engine(self, prompts=None, **options) -> Engine:
        prompts = self.prompts if prompts is None else prompts
        return make_engine(
            self.target,
            prompts,
            self.make_drafter,
            **{"max_new_tokens": 16, "adapter": self.adapter, "width": self.width, **options},
        )

    def propose(self, engine: Engine, limits: list[int]) -> Draft:
        """The first draft behind the prompts' first tokens, of the rows that have not ended with these."""
        engine.read_prompts()
        limits = [limits[number] for number in engine.state.numbers]
        with torch.inference_mode():
            return drafter_of(engine).propose(engine.state, limits)

    def own_rows(self, **settings) -> list[list[int]]:
        """What the target says by itself to each prompt."""
        texts = []
        for row in self.prompts:
            text = transformers_greedy(self.target, torch.tensor([row]), **{"max_new_tokens": 16, **settings})
            texts.append(text[0, len(row) :].tolist())
        return texts

    def test_a_draft_has_the_shapes_that_the_engine_expects(self):
        draft = self.propose(self.engine(), [4, 4, 4])
        batch, drafts = draft.tokens.shape
        assert batch == 3
        assert 0 < drafts <= (self.width or 4)
        assert max(draft.lengths) <= 4
        assert draft.tokens.dtype == torch.int64
        assert ((draft.tokens >= 0) & (draft.tokens < VOCAB_SIZE)).all()
        assert draft.probs is None, "greedy drafts are chosen, not drawn"
        assert [type(count) for count in draft.num_drafted] == [int] * 3
        assert not draft.confidences or list(map(len, draft.confidences)) == draft.num_drafted
        if draft.exact_states is not None:
            assert draft.exact_states.shape == (3, drafts, self.target.config.hidden_size)
            assert 0 < draft.exact_blocks <= self.target.config.num_hidden_layers

    @pytest.mark.parametrize("limits", [[1, 1, 1], [3, 0, 1], [0, 4, 2], [0, 0, 1]])
    def test_no_row_drafts_more_than_its_limit(self, limits):
        """Catches a draft that leaves no room for the token behind it, or that goes on in a finished row."""
        draft = self.propose(self.engine(), limits)
        assert all(0 <= count <= limit for count, limit in zip(draft.lengths, limits, strict=True))
        assert max(draft.num_drafted) <= draft.tokens.shape[1] <= (self.width or max(limits))

    def test_a_row_without_prospects_drafts_nothing_and_the_others_something(self):
        """The governor gives turns by the outlook, before a draft is made. Catches turns that come to nothing."""
        engine = self.engine()
        draft = self.propose(engine, [4, 4, 4])
        outlook = drafter_of(engine).outlook(engine.state)
        assert [grade is not None for grade in outlook] == [count > 0 for count in draft.num_drafted]

    def test_drafts_stand_behind_the_committed_tokens(self):
        """Verification reads them there. Catches drafts written elsewhere, and committed tokens written over."""
        engine = self.engine()
        engine.read_prompts()
        lengths, active = list(engine.state.lengths), list(engine.state.active)
        committed = [engine.state.token_ids[row, :length].tolist() for row, length in enumerate(lengths)]
        with torch.inference_mode():
            draft = drafter_of(engine).propose(engine.state, [4, 4, 4])
        for row, length in enumerate(lengths):
            count = draft.num_drafted[row]
            drafted = draft.tokens[row, :count].tolist()
            assert engine.state.token_ids[row, : length + count].tolist() == committed[row] + drafted
        assert (engine.state.lengths, engine.state.active) == (lengths, active)

    def test_the_same_state_gives_the_same_draft(self):
        first, second = (self.propose(self.engine(do_sample=True), [4, 4, 4]) for _ in range(2))
        assert torch.equal(first.tokens, second.tokens)
        assert first.num_drafted == second.num_drafted

    @pytest.mark.parametrize("max_drafts", [1, 3, 8])
    def test_greedy_output_is_the_targets(self, max_drafts):
        """Rows of different lengths together, the cache checked after every round."""
        assert run_checked(self.engine(max_drafts=max_drafts)) == self.own_rows()

    @pytest.mark.parametrize("max_drafts", [1, 4])
    def test_sampled_output_does_not_depend_on_the_draft(self, max_drafts):
        """Under the invariant rule, token by token; in rows of different lengths."""
        options = {"do_sample": True, "acceptance_rule": "invariant", "temperature": 0.8, "max_drafts": max_drafts}
        plain = make_engine(self.target, self.prompts, None, max_new_tokens=16, **options)
        assert run_checked(self.engine(**options)) == run_checked(plain)

    def test_a_row_drafts_the_same_alone_as_in_a_batch(self):
        """Catches a row that sees another row's tokens or cache."""
        together = self.propose(self.engine(), [4, 4, 4])
        for row, each in enumerate(self.prompts):
            alone = self.propose(self.engine([each]), [4])
            count = alone.num_drafted[0]
            assert together.num_drafted[row] == count
            assert together.tokens[row, :count].tolist() == alone.tokens[0, :count].tolist()

    def test_an_eos_ends_a_draft(self):
        """Drafting behind an end of text is work for nothing."""
        draft = self.propose(self.engine(), [4, 4, 4])
        eos = int(draft.tokens[0, 1])
        stopped = self.propose(self.engine(eos_token_id=(eos,)), [4, 4, 4])
        for row, count in enumerate(stopped.num_drafted):
            assert eos not in stopped.tokens[row, : count - 1].tolist()

    def test_an_eos_ends_the_row(self):
        for eos in {row[5] for row in self.own_rows()}:
            assert run_checked(self.engine(eos_token_id=(eos,))) == self.own_rows(eos_token_id=eos)

    def test_processors_see_the_true_prefix(self):
        """Every prefix that a processor saw is the prompt, committed tokens, and drafts behind them: no padding, no
        rejected draft. And the output is that of plain decoding with the processor.
        """
        processor = PrefixBound()
        engine = self.engine(processors=[processor])
        rows = run_checked(engine)
        assert rows == self.own_rows(logits_processor=[PrefixBound()])
        texts = [before + new for before, new in zip(self.prompts, rows, strict=True)]
        for seen in processor.seen:
            # All but the drafts of the round, of which there are at most four, is committed text.
            assert any(seen[: max(len(seen) - 4, len(before))] == text[: max(len(seen) - 4, len(before))]
                       for before, text in zip(self.prompts, texts, strict=True))  # fmt: skip
        for before, text in zip(self.prompts, texts, strict=True):
            for length in range(len(before), len(text)):
                assert text[:length] in processor.seen

    def test_processors_see_the_drafts_before_a_draft(self):
        """On the draft's side too: its distributions would otherwise be those of other places, and rarely accepted."""
        processor = PrefixBound()
        engine = self.engine(processors=[processor])
        engine.read_prompts()
        processor.seen.clear()
        lengths = list(engine.state.lengths)
        with torch.inference_mode():
            draft = drafter_of(engine).propose(engine.state, [4, 4, 4])
        expected = [
            engine.state.token_ids[row, : length + offset].tolist()
            for row, length in enumerate(lengths)
            for offset in range(draft.num_drafted[row])
        ]
        assert processor.seen == [] or sorted(processor.seen) == sorted(expected)

    def test_the_models_last_position(self):
        """Catches drafts beyond the room that the row's limit leaves."""
        longest = self.target.config.max_position_embeddings
        before = prompt(longest - 7, seed=3)
        engine = self.engine(before.tolist(), max_new_tokens=100, max_drafts=8)
        own = transformers_greedy(self.target, before, max_new_tokens=7)
        assert run_checked(engine) == [own[0, longest - 7 :].tolist()]

    def test_a_call_without_rounds(self):
        """One new token comes out of the prompt; nothing is ever drafted."""
        assert run_checked(self.engine(max_new_tokens=1)) == [row[:1] for row in self.own_rows()]

    def test_the_model_is_left_as_it_was(self):
        before = {name: parameter.clone() for name, parameter in self.target.state_dict().items()}
        run_checked(self.engine())
        for name, parameter in self.target.state_dict().items():
            assert torch.equal(parameter, before[name]), name


class DrawingDrafterContract(DrafterContract):
    """What is owed besides by a drafter that has a distribution of its own for each next token (`draft_chain`)."""

    def test_probs_are_the_distributions_of_the_drafts(self):
        """Every draft could have been drawn from its distribution."""
        draft = self.propose(self.engine(do_sample=True, top_k=7), [4, 4, 4])
        assert draft.probs.shape == (*draft.tokens.shape, VOCAB_SIZE)
        for row, count in enumerate(draft.num_drafted):
            probs = draft.probs[row, :count]
            torch.testing.assert_close(probs.sum(-1), torch.ones(count, dtype=probs.dtype))
            assert (probs >= 0).all()
            assert ((probs > 0).sum(-1) <= 7).all()
            assert (probs.gather(-1, draft.tokens[row, :count, None]) > 0).all()

    def test_drafts_are_drawn_from_the_distribution_they_name(self):
        """Chi-square of the first draft of 1,500 rows; false alarm 1e-6 for other seeds.

        Rejection sampling is only lossless if the named distribution is the true one.
        """
        engine = self.engine([PROMPTS[0]] * 1500, do_sample=True, temperature=0.7, top_k=5, max_new_tokens=4)
        engine.read_prompts()
        # One prefix for all rows, so that there is one distribution.
        engine.state.token_ids[:, 9] = engine.state.token_ids[0, 9]
        with torch.inference_mode():
            draft = drafter_of(engine).propose(engine.state, [1] * 1500)
        probs = draft.probs[:, 0]
        torch.testing.assert_close(probs, probs[:1].expand_as(probs))
        counts = torch.bincount(draft.tokens[:, 0], minlength=VOCAB_SIZE)
        common = probs[0] * 1500 >= 5
        assert counts[~common].sum() <= 30
        assert chi_square_p_value(counts[common], probs[0, common]) > 1e-6

    def test_a_low_confidence_ends_a_draft_behind_the_token(self):
        """The token itself is verified: to drop it would bias the output. No draft can be surer than certain."""
        draft = self.propose(self.engine(confidence_threshold=1.0), [4, 4, 4])
        assert min(draft.num_drafted) >= 1
        assert sum(draft.num_drafted) < 12

    def test_a_draft_goes_on_only_in_rows_that_are_to(self):
        """The governor is asked behind each draft. Catches one row's answer that acts on another."""
        engine = self.engine()
        engine.read_prompts()
        asked = []

        def goes_on(offset, confidences):
            asked.append((offset, list(confidences)))
            return [offset < 1, True, False]

        with torch.inference_mode():
            draft = drafter_of(engine).propose(engine.state, [4, 3, 4], goes_on)
        assert draft.num_drafted == [2, 3, 1]
        assert [offset for offset, _ in asked] == [0, 1, 2]
        for row, count in enumerate(draft.num_drafted):
            assert list(draft.confidences[row]) == [confidences[row] for _, confidences in asked[:count]]
            assert all(0 < sure <= 1 for sure in draft.confidences[row])
