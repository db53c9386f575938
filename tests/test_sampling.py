"""From logits to scores and distributions: transformers' own pipeline at the true prefix of every position, at once."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from layerskip.processing import make_processors
from layerskip.sampling import Sampler, distribution
from layerskip.settings import DecodingSettings
from tests.tiny_models import VOCAB_SIZE, prompt, tiny_model

EOS = 2
PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6, 8], [9, 5, 9, 6, 9], [11, 6, 11, 8, 11])

SETTINGS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [6, 8], *([9, token] for token in range(10, 40))]},
    "least length": {"min_length": 9},
    "least number of new tokens": {"min_new_tokens": 3},
    "suppressed tokens": {"suppress_tokens": [3, 4, 40]},
    "temperature": {"temperature": 0.6},
    "top k": {"top_k": 4},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.1},
    "typical p": {"typical_p": 0.6},
    "epsilon cutoff": {"epsilon_cutoff": 0.02},
    "eta cutoff": {"eta_cutoff": 0.02},
    "several": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 3, "temperature": 1.5, "top_k": 9,
        "top_p": 0.9,
    },
}  # fmt: skip


def random_logits(batch: int, tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(batch, tokens, VOCAB_SIZE, generator=generator)).to(dtype)


def sampler(*processors: LogitsProcessor, rows: int = 1, do_sample: bool = True) -> Sampler:
    """All rows share one list, as rows of equal prompt length do."""
    return Sampler([LogitsProcessorList(processors)] * rows, do_sample)


def scored(sampler: Sampler, logits: Tensor) -> Tensor:
    """Scores by processors that do not look at the prefix."""
    batch, tokens = logits.shape[:2]
    return sampler.scores(logits, prompt(tokens + 3, batch=batch), [3] * batch)


def probabilities(sampler: Sampler, logits: Tensor) -> Tensor:
    """The distributions that sampling draws from, likewise."""
    return distribution(scored(sampler, logits))[0]


@pytest.mark.parametrize("do_sample", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("given", SETTINGS.values(), ids=SETTINGS.keys())
def test_equals_transformers_pipeline_at_each_true_prefix(given, do_sample):
    """`generate` step by step on each row, against all steps of all rows in one call, as after a long draft.

    Rows have different prompt lengths. Catches a processor that sees too long or too short a prefix, another row's
    prompt, or comes in the wrong order.
    """
    settings = {"top_k": 0, **given, "do_sample": do_sample}
    if not do_sample:
        settings = {name: value for name, value in settings.items() if name in PREFIX_SETTINGS}
    raw, processed, sequences = zip(*(steps_of_generate(row, settings) for row in PROMPTS), strict=True)
    steps = min(map(len, raw))
    logits, expected = (torch.stack([row[:steps] for row in rows]) for rows in (raw, processed))

    processors = make_processors(
        DecodingSettings(**settings, eos_token_id=(EOS,)), LogitsProcessorList(), [len(row) for row in PROMPTS], "cpu"
    )
    token_ids = torch.zeros((len(PROMPTS), 30), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = sequence
    scores = Sampler(processors, do_sample).scores(logits, token_ids, [len(row) for row in PROMPTS])

    assert steps >= 4
    assert settings.keys() <= {"do_sample", "top_k"} or not torch.equal(logits, expected), (
        "the settings do nothing here"
    )
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(scores.argmax(-1), expected.argmax(-1))


PREFIX_SETTINGS = (
    "do_sample", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_length", "min_new_tokens",
    "suppress_tokens",
)  # fmt: skip


def steps_of_generate(row: list[int], settings: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Raw logits and processed scores, each (steps, vocab), of a run of `generate`, and its tokens."""
    torch.manual_seed(0)
    ids = torch.tensor([row])
    output = tiny_model("llama").generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, eos_token_id=EOS, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, output_logits=True, **settings,
    )  # fmt: skip
    return torch.cat(output.logits), torch.cat(output.scores), output.sequences[0]


def one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB_SIZE).float()


class Recorder(LogitsProcessor):
    """Notes the prefixes it is shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(scores)
        self.seen += input_ids.tolist()
        return scores


@pytest.mark.parametrize("lengths", [[4, 4], [4, 7]], ids=["equal", "ragged"])
@pytest.mark.parametrize("shared", [True, False], ids=["one list", "a list a row"])
def test_processors_see_the_true_prefix_of_each_position(lengths, shared):
    """Prompt, output and earlier drafts, and nothing of what stands behind; each row exactly once a position."""
    recorder, token_ids = Recorder(), prompt(12, batch=2)
    row_list = LogitsProcessorList([recorder])
    rows = [row_list, row_list if shared else LogitsProcessorList([recorder])]
    Sampler(rows, do_sample=True).scores(random_logits(2, 3), token_ids, lengths)
    expected = [token_ids[row, : lengths[row] + offset].tolist() for offset in range(3) for row in range(2)]
    assert recorder.seen == expected


def test_each_row_has_its_own_processors():
    """Catches rows of different prompt lengths going through the first row's list."""
    rows = [LogitsProcessorList([SuppressTokensLogitsProcessor([banned], device="cpu")]) for banned in (10, 20)]
    probs = probabilities(Sampler(rows, True), random_logits(2, 2))
    assert (probs[0, :, 10] == 0).all() and (probs[1, :, 20] == 0).all()
    assert (probs[0, :, 20] > 0).all() and (probs[1, :, 10] > 0).all()


def test_each_row_has_its_own_warpers():
    """As before on the fast path, where one call serves all rows: only those that share a list may share the call."""
    logits = random_logits(1, 2).expand(2, -1, -1)
    rows = [LogitsProcessorList([TopKLogitsWarper(kept)]) for kept in (2, 5)]
    probs = probabilities(Sampler(rows, True), logits)
    assert ((probs > 0).sum(-1) == torch.tensor([[2, 2], [5, 5]])).all()


@pytest.mark.parametrize("empty", [0, 1])
def test_a_row_without_processors_is_left_alone(empty):
    rows = [LogitsProcessorList([TopKLogitsWarper(2)]), LogitsProcessorList([TopKLogitsWarper(2)])]
    rows[empty] = LogitsProcessorList()
    kept = (probabilities(Sampler(rows, True), random_logits(2, 1)) > 0).sum(-1).flatten().tolist()
    assert kept[empty] == VOCAB_SIZE and kept[1 - empty] == 2


class SlowTopP(TopPLogitsWarper):
    """Of another type than those known not to look at the prefix."""


@pytest.mark.parametrize("rows", [1, 3])
def test_fast_path_equals_the_slow_path(rows):
    """Warpers that do not look at the prefix get all rows and positions in one call."""
    logits = random_logits(rows, 4)
    warpers = TemperatureLogitsWarper(0.8), TypicalLogitsWarper(0.9)
    fast = scored(sampler(*warpers, TopPLogitsWarper(0.8), rows=rows), logits)
    slow = scored(sampler(*warpers, SlowTopP(0.8), rows=rows), logits)
    assert torch.equal(fast, slow)


def test_positions_of_one_call_equal_calls_of_one_position():
    """Draft and target call it with different numbers of positions and must get the same numbers."""
    logits, token_ids = random_logits(2, 4), prompt(12, batch=2)
    rows = make_processors(
        DecodingSettings(do_sample=True, repetition_penalty=1.5, top_p=0.8), LogitsProcessorList(), [3, 5], "cpu"
    )
    together = Sampler(rows, True).scores(logits, token_ids, [3, 5])
    for offset in range(4):
        alone = Sampler(rows, True).scores(logits[:, offset : offset + 1], token_ids, [3 + offset, 5 + offset])
        assert torch.equal(alone[:, 0], together[:, offset])


def test_without_processors_it_is_the_softmax():
    logits = random_logits(2, 3)
    assert torch.equal(probabilities(sampler(rows=2), logits), logits.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_greedy_scores_without_processors_are_the_logits(dtype):
    """Not a copy in another dtype, which would read and write a whole vocabulary only to find the same maximum."""
    logits = random_logits(1, 2, dtype)
    assert scored(sampler(do_sample=False), logits) is logits


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_distributions_have_at_least_single_precision(dtype, wide):
    """In bfloat16 a distribution over a large vocabulary does not sum to 1."""
    probs = probabilities(sampler(), random_logits(1, 2, dtype))
    assert probs.dtype == wide
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2, dtype=wide))


class InPlace(LogitsProcessor):
    """Writes into its argument, as some of transformers' and many of users' processors do."""

    def __call__(self, input_ids, scores):
        scores[:, 5] = float("-inf")
        return scores


@pytest.mark.parametrize("do_sample", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("processors", [(), (InPlace(),), (TopKLogitsWarper(3),)], ids=["none", "in place", "warper"])
def test_logits_are_left_unchanged(processors, dtype, do_sample):
    """The draft's confidence and the scores handed to the user are read from them afterwards."""
    logits = random_logits(1, 2, dtype)
    before = logits.clone()
    distribution(scored(sampler(*processors, do_sample=do_sample), logits))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ids", "one id"])
def test_rows_without_a_next_token_are_flagged(bad, everywhere):
    """NaN anywhere, or every token banned; the other rows and positions are not touched.

    What stands there is still a distribution, so that padding behind a short draft cannot spread NaN.
    """
    logits = random_logits(2, 3)
    logits[1, 2, slice(None) if everywhere else slice(9, 10)] = bad
    probs, valid = distribution(scored(sampler(rows=2), logits))
    fine = bad == float("-inf") and not everywhere
    assert valid.tolist() == [[True] * 3, [True, True, fine]]
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))
    if not fine:
        assert torch.equal(probs[1, 2], one_hot(torch.tensor(0)))
    expected = probabilities(sampler(rows=2), random_logits(2, 3))
    assert torch.equal(probs[0], expected[0]) and torch.equal(probs[1, :2], expected[1, :2])


def test_sampling_from_infinite_logits_is_flagged():
    """A model that overflows in float16 gives +inf, of which softmax makes NaN: a token would be drawn at random."""
    logits = random_logits(1, 2)
    logits[0, 1, 4] = float("inf")
    probs, valid = distribution(scored(sampler(), logits))
    assert valid.tolist() == [[True, False]]
    assert probs.isfinite().all()


def test_processors_that_ban_everything_are_flagged():
    ban = SuppressTokensLogitsProcessor(list(range(VOCAB_SIZE)), device="cpu")
    _, valid = distribution(scored(sampler(ban), random_logits(1, 2)))
    assert not valid.any()
