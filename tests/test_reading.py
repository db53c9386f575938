"""Long prompts are read in passes of bounded length: what is read is the same, and no pass is larger than allowed."""

import pytest
import torch

import layerskip
from layerskip import DraftPlan
from layerskip.models.adapter import Adapter, AdapterSpec
from layerskip.models.adapter_file import save_adapter
from layerskip.models.decoder import Decoder
from layerskip.models.span import Span
from layerskip.reading import read
from tests.drafting import always
from tests.special_models import agreeing_model
from tests.test_adapter import adapter_of
from tests.tiny_models import FAMILY_NAMES, NUM_LAYERS, prompt, tiny_model, transformers_greedy

OPTIONS = {"max_new_tokens": 8, "eos_token_id": None}
ROWS = [prompt(length, seed=length)[0].tolist() for length in (23, 4, 17, 8)]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    file = tmp_path_factory.mktemp("adapter") / "a.safetensors"
    save_adapter(adapter_of(agreeing_model("llama"), AdapterSpec(2)), file, torch.float64)
    return {
        "plain": None,
        "exit": DraftPlan.exit(2),
        "model": DraftPlan.model(tiny_model("llama")),
        "adapter": DraftPlan(exit_layer=2, adapter=str(file)),
        "lookup": DraftPlan.lookup(4),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 7, 29, 30, 31, None])
def test_a_row_is_run_once_and_in_order(size):
    """Catches a token that is left out, or read twice, where one pass ends and the next begins."""
    seen = []

    def run(starts, tokens):
        seen.extend(range(starts[0], starts[0] + tokens))
        assert tokens <= (size or 30)
        return torch.arange(starts[0], starts[0] + tokens).view(1, -1, 1)

    assert read(run, [5], [35], size).item() == 34
    assert seen == list(range(5, 35))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 20, None])
def test_each_row_gets_what_was_behind_its_own_last_token(size):
    starts, ends = [0, 3, 2, 9], [11, 4, 2 + 6, 9 + 11]

    def run(starts, tokens):
        return (torch.tensor(starts).unsqueeze(1) + torch.arange(tokens)).unsqueeze(2)

    assert read(run, starts, ends, size).flatten().tolist() == [end - 1 for end in ends]


@pytest.mark.parametrize("size", [1, 2, 5, 16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_text_is_the_models_own(family, size):
    """Windows of 6 tokens are among the families: they begin in one pass and end in another."""
    model = tiny_model(family)
    result = layerskip.wrap(model).generate(prompt(33), prefill_chunk_size=size, **OPTIONS)
    assert torch.equal(result.sequences, transformers_greedy(model, prompt(33), max_new_tokens=8))


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window"])
def test_the_cache_holds_the_same(family):
    """Not only near enough for the same tokens: keys, values and kept states to the last digits."""
    model, engines = layerskip.wrap(tiny_model(family)), []
    for size in (None, 1, 3, 8):
        engine = model.engine(model.check(ROWS, prefill_chunk_size=size, **OPTIONS))
        engine.state.cache = model.decoder.new_cache(4, 40, kept_states=[1, NUM_LAYERS])
        engine.read_prompts()
        engine.state.cache.check()
        engines.append(engine)
    whole, *others = (engine.state.cache for engine in engines)
    for other in others:
        for row, tokens in enumerate(ROWS):
            for ours, own in zip((*other.keys, *other.values), (*whole.keys, *whole.values), strict=True):
                torch.testing.assert_close(ours[row, :, : len(tokens)], own[row, :, : len(tokens)], rtol=0, atol=1e-11)
            for behind, states in other.states.items():
                torch.testing.assert_close(
                    states[row, : len(tokens)], whole.states[behind][row, : len(tokens)], rtol=0, atol=1e-11
                )


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", ["plain", "exit", "model", "adapter", "lookup"])
@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_rows_of_different_lengths_and_their_drafts(plans, name, size, sampled):
    """Drafts too: a draft model and trained blocks read the prompts in the same way."""
    model = layerskip.wrap(agreeing_model("llama"))
    options = {**OPTIONS, **always(plans[name]), **sampled}
    whole, ours = (model.generate(ROWS, prefill_chunk_size=each, **options) for each in (None, size))
    assert torch.equal(ours.sequences, whole.sequences) and ours.drafted == whole.drafted


class Watch:
    """Notes the longest pass and the largest mask."""

    def __init__(self, monkeypatch):
        self.tokens, self.mask = 0, 0
        run, run_adapter, build = Decoder.run, Adapter.run, Span._build_mask

        def noted(decoder, hidden, *arguments):
            self.tokens = max(self.tokens, hidden.shape[0] * hidden.shape[1])
            return run(decoder, hidden, *arguments)

        def noted_adapter(adapter, entry, *arguments):
            self.tokens = max(self.tokens, entry.shape[0] * entry.shape[1])
            return run_adapter(adapter, entry, *arguments)

        def built(span, window):
            mask = build(span, window)
            self.mask = max(self.mask, 0 if mask is None else mask.numel())
            return mask

        monkeypatch.setattr(Decoder, "run", noted)
        monkeypatch.setattr(Adapter, "run", noted_adapter)
        monkeypatch.setattr(Span, "_build_mask", built)


@pytest.mark.parametrize("name", ["exit", "model", "adapter"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_pass_needs_does_not_grow_with_the_prompt(plans, monkeypatch, name, batch):
    """Hidden states of as many tokens as were allowed; masks grow with the text in one direction only."""
    watch, model = Watch(monkeypatch), layerskip.wrap(agreeing_model("llama"))
    rows = prompt(120, batch=batch).tolist()
    rows[0] = rows[0][: 120 if batch == 1 else 90]
    model.generate(rows, prefill_chunk_size=16, **always(plans[name]), **OPTIONS)
    assert watch.tokens == batch * 16
    assert watch.mask <= batch * 2 * 16 * 130  # of both heads that share a key, over all slots
    session = model.session(prefill_chunk_size=16, **always(plans[name]), **OPTIONS)
    session.read(prompt(100)[0])
    session.generate(prompt(30, seed=1)[0])
    assert watch.tokens == batch * 16


def test_a_short_prompt_is_read_in_one_pass_without_a_mask(monkeypatch, llama):
    """By default, so that long prompts cost nothing where there are none."""
    watch, model = Watch(monkeypatch), layerskip.wrap(llama)
    model.engine(model.check(prompt(150), **OPTIONS)).read_prompts()
    assert (watch.tokens, watch.mask) == (150, 0)
    assert model.generate(prompt(), max_new_tokens=1).settings["prefill_chunk_size"] == 1024
