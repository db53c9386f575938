"""What is trained is what drafts: every rollout equals real drafting from its anchor, in float64, on every family."""

import pytest
import torch

import layerskip
from layerskip.drafters import DraftContext, SelfDrafter
from layerskip.models.adapter import AdapterSpec
from layerskip.rules import make_rule
from layerskip.sampling import Sampler
from layerskip.state import DecodeState
from layerskip.training.rollout import rollout
from tests.special_models import adapter_of
from tests.tiny_models import FAMILY_NAMES, prompt, tiny_model

SPECS = [
    AdapterSpec(0),
    AdapterSpec(2),
    AdapterSpec(2, 2, reads_state=False),
    AdapterSpec(1, 2),
    AdapterSpec(0, further_states=(1, 3)),
    AdapterSpec(2, further_states=(2,)),
]
OFFSETS = 4


@torch.no_grad()
def real_outputs(decoder, adapter, tokens, anchor):
    """The adapter's logits at each offset when really drafting behind `anchor`, fed with the text's own tokens."""
    heard = []

    class Listening(SelfDrafter):
        def propose(self, state, limits, goes_on=None):
            original = self.decoder.logits

            def logits(hidden, head=None, norm=None):
                heard.append(original(hidden, head, norm))
                offset = len(heard) - 1
                forced = torch.full_like(heard[-1], -1e9)
                if anchor + offset + 1 < tokens.shape[1]:
                    forced[0, 0, tokens[0, anchor + offset + 1]] = 0.0
                return forced

            self.decoder.logits = logits
            try:
                return super().propose(state, limits, goes_on)
            finally:
                del self.decoder.logits

    context = DraftContext(
        Sampler([[]], False), make_rule("maximal", torch.tensor([0]), False), frozenset(), 0.0, decoder.vocab_size
    )
    cache = decoder.new_cache(1, tokens.shape[1] + OFFSETS + 1, adapter.spec.num_blocks, adapter.kept_states)
    state = DecodeState([tokens[0, : anchor + 1].tolist()], [99], cache, decoder.device)
    drafter = Listening(decoder, [decoder.full_path[i] for i in range(adapter.spec.exit_layer)], context, None, adapter)
    drafter.begin(state)
    if anchor:
        span = decoder.span([0], anchor)
        decoder.run(decoder.embed(tokens[:, :anchor], span), decoder.full_path, cache, span)
    cache.commit([anchor])
    drafter.propose(state, [OFFSETS])
    return torch.cat(heard, dim=1)[0]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_rollout_is_what_would_be_drafted(family, spec):
    hf_model = tiny_model(family)
    decoder, tokens = layerskip.wrap(hf_model).decoder, prompt(14)
    adapter = adapter_of(hf_model, spec)
    with torch.no_grad():
        cache = decoder.new_cache(1, tokens.shape[1], kept_states=adapter.kept_states)
        span = decoder.span([0], tokens.shape[1])
        embedded = decoder.embed(tokens, span)
        decoder.run(embedded, decoder.full_path, cache, span)
        states = {0: embedded, **cache.states}
        outputs = rollout(decoder, adapter, states, OFFSETS)
        logits = [decoder.logits(each, norm=adapter.final_norm)[0] for each in outputs]
        later = rollout(decoder, adapter, states, OFFSETS, first=5)
    for anchor in (0, 1, 5, 9):
        real = real_outputs(decoder, adapter, tokens, anchor)
        for offset in range(OFFSETS):
            torch.testing.assert_close(logits[offset][anchor + offset], real[offset], rtol=1e-9, atol=1e-9)
    for offset in range(OFFSETS):  # what lies before the first anchor need not be read again at each offset
        torch.testing.assert_close(later[offset][:, offset:], outputs[offset][:, 5 + offset :], rtol=1e-9, atol=1e-9)
