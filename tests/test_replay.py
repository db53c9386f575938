"""Anchored replay accepts what real drafting accepts: token by token in float64, and in the mean under sampling."""

import itertools
import math
from pathlib import Path

import pytest
import torch

import layerskip
from layerskip.errors import SearchError, SettingError
from layerskip.models.adapter import AdapterSpec
from layerskip.models.adapter_file import save_adapter
from layerskip.models.decoder import Decoder
from layerskip.sampling import Sampler
from layerskip.search.acceptance import Acceptance, best_speedup
from layerskip.search.candidate import Candidate
from layerskip.search.outcome import TextOutcome, anchors_of
from layerskip.search.replay import Replay
from layerskip.search.texts import Text
from tests.special_models import agreeing_model, likely_adapter
from tests.tiny_models import NUM_LAYERS, REPRESENTATIVES, VOCAB_SIZE, prompt, tiny_model

CANDIDATES = (
    Candidate.of(NUM_LAYERS, [2]),
    Candidate.of(NUM_LAYERS, [1, 3], [2]),
    Candidate.of(NUM_LAYERS, [0], [0, 3]),
    Candidate.of(NUM_LAYERS, exit_layer=2),
    Candidate.of(NUM_LAYERS, [1], exit_layer=3),
    Candidate.of(NUM_LAYERS),
)


def written(model: layerskip.Model, lengths: list[int], new_tokens: list[int], **settings: object) -> list[Text]:
    """The model's own answers to random prompts of these lengths."""
    texts = []
    for seed, (length, count) in enumerate(zip(lengths, new_tokens, strict=True)):
        ids = prompt(length, seed=seed)[0].tolist()
        (answer,) = model.generate(
            ids, max_new_tokens=count, eos_token_id=[], seed=seed, **{"do_sample": False, **settings}
        ).new_token_ids
        texts.append(Text(tuple(ids), tuple(answer)))
    return texts


def really_accepted(model: layerskip.Model, text: Text, position: int, plan: layerskip.DraftPlan) -> int:
    """Drafts that stand in the first round when the newest committed token is the text's token at `position`."""
    result = model.generate(
        list(text.token_ids[:position]),
        plan=plan,
        governor="off",
        do_sample=False,
        eos_token_id=[],
        # The prompt's pass gives the newest token; then a round for all drafts and the token behind them.
        max_new_tokens=plan.num_draft_tokens + 2,
    )
    first_round = [index for index, drafted in enumerate(result.drafted[0]) if index > 0 and not drafted][0]
    return first_round - 1


def plan_of(candidate: Candidate, length: int, **more: object) -> layerskip.DraftPlan:
    return layerskip.DraftPlan(
        skip_attention=candidate.skip_attention,
        skip_mlp=candidate.skip_mlp,
        exit_layer=candidate.exit_layer,
        num_draft_tokens=length,
        **more,
    )


TRAINED = {
    "jump": AdapterSpec(0),
    "exit alone": AdapterSpec(1, 2, reads_state=False),
    "jump from three states": AdapterSpec(0, further_states=(1, 3)),
    "exit and state": AdapterSpec(2),
}


def trained(model: layerskip.Model, name: str, folder: Path, **more: object) -> layerskip.DraftPlan:
    """A plan of trained blocks."""
    file = folder / "adapter.safetensors"
    save_adapter(likely_adapter(model.hf_model, TRAINED[name]), file, torch.float64)
    return layerskip.DraftPlan(exit_layer=TRAINED[name].exit_layer, adapter=file, **more)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_trained_blocks_are_replayed_as_they_draft(family: str, name: str, tmp_path: Path) -> None:
    """From the same anchors as all other candidates, in rows of other lengths and prompts, by all ids or by some."""
    model, length, found = layerskip.wrap(agreeing_model(family)), 3, set()
    texts = written(model, [9, 4, 13], [12, 9, 7])
    ids = tuple(range(0, VOCAB_SIZE, 2)) if name == "exit alone" else None
    plan = trained(model, name, tmp_path, num_draft_tokens=length, draft_vocabulary=ids)
    adapter, path = model.adapter(plan), plan.path(NUM_LAYERS)
    replay = Replay(model.decoder, texts, draft_length=length, batch_positions=24, adapters=[adapter])
    assert replay.num_batches > 1
    head = None if ids is None else model.decoder.partial_head(ids)
    for batch, shift in itertools.product(range(replay.num_batches), range(length)):
        drafted = replay.outcomes(path, batch, head, shift, adapter=adapter)
        others = replay.outcomes(CANDIDATES[0].path(NUM_LAYERS), batch, shift=shift)
        for text, outcome, other in zip(replay.texts_of(batch), drafted, others, strict=True):
            assert outcome.anchors.equal(other.anchors)
            anchors = outcome.anchors.unique().tolist()
            for anchor, accepted in zip(anchors, outcome.accepted_lengths(), strict=True):
                real = really_accepted(model, text, len(text.prompt) + anchor, plan)
                assert accepted == min(real, int((outcome.anchors == anchor).sum())), (shift, anchor)
                found.add(accepted)
    assert found >= {0, 1}


def test_trained_blocks_need_the_states_that_they_read(tmp_path: Path) -> None:
    model = layerskip.wrap(agreeing_model("llama"))
    adapter = model.adapter(trained(model, "jump", tmp_path))
    with pytest.raises(SearchError, match="not made for"):
        Replay(model.decoder, written(model, [5], [5])).outcomes((), 0, adapter=adapter)


@pytest.mark.parametrize("family", REPRESENTATIVES)
def test_every_anchor_accepts_what_real_drafting_accepts(family: str) -> None:
    model, length = layerskip.wrap(tiny_model(family)), 3
    texts = written(model, [9, 4, 13], [12, 9, 7])
    replay = Replay(model.decoder, texts, draft_length=length, batch_positions=24)
    assert replay.num_batches > 1
    found = set()
    for candidate in CANDIDATES:
        path = candidate.path(NUM_LAYERS)
        for shift in range(length):
            for batch in range(replay.num_batches):
                outcomes = replay.outcomes(path, batch, shift=shift)
                for text, outcome in zip(replay.texts_of(batch), outcomes, strict=True):
                    anchors = outcome.anchors.unique().tolist()
                    for anchor, accepted in zip(anchors, outcome.accepted_lengths(), strict=True):
                        observed = int((outcome.anchors == anchor).sum())
                        real = really_accepted(model, text, len(text.prompt) + anchor, plan_of(candidate, length))
                        assert accepted == min(real, observed), (candidate, shift, anchor)
                        found.add(accepted)
    assert found == set(range(length + 1))  # the test saw everything from total rejection to total acceptance


def test_a_draft_vocabulary_is_replayed_as_it_drafts() -> None:
    model, length = layerskip.wrap(tiny_model("llama")), 3
    (text,) = written(model, [9], [16])
    ids = tuple(range(0, VOCAB_SIZE, 2))
    replay = Replay(model.decoder, [text], draft_length=length)
    for candidate in CANDIDATES[:3]:
        (outcome,) = replay.outcomes(candidate.path(NUM_LAYERS), 0, model.decoder.partial_head(ids))
        for anchor, accepted in zip(outcome.anchors.unique().tolist(), outcome.accepted_lengths(), strict=True):
            plan = plan_of(candidate, length, draft_vocabulary=ids)
            real = really_accepted(model, text, len(text.prompt) + anchor, plan)
            assert accepted == min(real, int((outcome.anchors == anchor).sum()))


def test_few_kept_states_and_small_batches_change_nothing() -> None:
    model = layerskip.wrap(tiny_model("qwen3"))
    texts = written(model, [5, 9, 3, 11], [10, 6, 17, 8])
    by_setting = []
    for settings in ({}, {"state_bytes": 1}, {"batch_positions": 1}):
        replay = Replay(model.decoder, texts, draft_length=4, **settings)
        by_setting.append(
            {
                (candidate, text): each.acceptance(4)
                for candidate in CANDIDATES
                for batch in range(replay.num_batches)
                for text, each in zip(
                    replay.texts_of(batch), replay.outcomes(candidate.path(NUM_LAYERS), batch), strict=True
                )
            }
        )
    assert by_setting[0] == by_setting[1] == by_setting[2]


@pytest.mark.parametrize("name", ["skipped", "jump"])
def test_sampled_acceptance_is_that_of_the_real_loop(name: str, tmp_path: Path) -> None:
    """Monte Carlo: 3,000 sampled rounds against the mean over 3,000 texts; a false alarm is a 4.5-sigma event."""
    model, length, runs = layerskip.wrap(tiny_model("llama")), 2, 3000
    plan = plan_of(Candidate.of(NUM_LAYERS, [1], [2]), length)
    if name in TRAINED:
        plan = trained(model, name, tmp_path, num_draft_tokens=length)
    adapter = None if plan.adapter is None else model.adapter(plan)
    ids = prompt(5, seed=3)[0].tolist()
    sampling = {"do_sample": True, "temperature": 3.0, "top_k": 0, "eos_token_id": []}
    # Sampled continuations of one prompt: the newest token, and those that drafts from there may say.
    rows = model.generate([ids] * runs, max_new_tokens=1 + length, seed=0, **sampling).new_token_ids
    sampler = model_sampler(model, ids, sampling)
    replay = Replay(
        model.decoder, [Text(tuple(ids), tuple(row)) for row in rows], draft_length=length, sampler=sampler,
        batch_positions=1000, adapters=[] if adapter is None else [adapter],
    )  # fmt: skip
    survived = [[], []]
    for batch in range(replay.num_batches):
        # `shift` undoes that texts differ in where their anchors lie.
        for shift in range(length):
            for outcome in replay.outcomes(plan.path(NUM_LAYERS), batch, shift=shift, adapter=adapter):
                if outcome.anchors.tolist() == [0] * length:
                    acceptance = outcome.acceptance(length)
                    survived[0].append(acceptance.survived[0])
                    survived[1].append(acceptance.survived[1])
    assert len(survived[0]) == runs
    real = model.generate([ids] * runs, plan=plan, governor="off", max_new_tokens=length + 2, seed=10**6, **sampling)
    for offset in range(length):
        # Behind the first token, the round's drafts come first; how many of them stood:
        stood = [all(row[1 : 2 + offset]) for row in real.drafted]
        expected, got = torch.tensor(survived[offset]), torch.tensor(stood, dtype=torch.float64)
        error = math.sqrt(expected.var().item() / runs + got.var().item() / runs)
        assert 0.05 < got.mean().item() < 0.95
        assert abs(expected.mean().item() - got.mean().item()) < 4.5 * error


def model_sampler(model: layerskip.Model, ids: list[int], sampling: dict[str, object]) -> Sampler:
    from layerskip.processing import make_processors

    request = model.check(ids, max_new_tokens=4, **sampling)
    return Sampler(make_processors(request.settings, request.caller_processors, [len(ids)], "cpu"), True)


def test_tokens_that_the_target_could_not_have_drawn_are_no_numbers_out_of_range() -> None:
    """By rounding, top-k may leave out here what it did not when the text was drawn."""
    model = layerskip.wrap(tiny_model("llama"))
    sampler = model_sampler(model, [3, 4], {"do_sample": True, "temperature": 1.0, "top_k": 1})
    text = Text((3, 4), tuple(range(5, 25)))  # not what the model says
    replay = Replay(model.decoder, [text], draft_length=3, sampler=sampler)
    for candidate in CANDIDATES:
        (outcome,) = replay.outcomes(candidate.path(NUM_LAYERS), 0)
        assert ((outcome.stands >= 0) & (outcome.stands <= 1)).all()
        assert ((outcome.overlap >= 0) & (outcome.overlap <= 1)).all()


def test_drafts_that_the_next_anchor_cuts_short_are_not_counted() -> None:
    """Else the beginning of a text would count more than the rest, over all shifts."""
    stands = torch.ones(7, dtype=torch.float64)
    observed = [TextOutcome(stands, stands, anchors_of(7, 3, shift)).acceptance(3).observed for shift in range(3)]
    assert observed == [(3, 2, 2), (2, 2, 2), (2, 2, 1)]
    short = TextOutcome(stands[:2], stands[:2], anchors_of(2, 3, 0))  # cut by the text's end, not by an anchor
    assert short.acceptance(3).observed == (1, 1, 0)


def test_anchors_shift_over_all_positions() -> None:
    assert anchors_of(7, 3, 0).tolist() == [0, 0, 0, 3, 3, 3, 6]
    assert anchors_of(7, 3, 1).tolist() == [0, 1, 1, 1, 4, 4, 4]
    assert anchors_of(7, 3, 5).tolist() == [0, 0, 2, 2, 2, 5, 5]
    offsets = sorted(
        (position, position - anchor)
        for shift in range(3)
        for position, anchor in enumerate(anchors_of(9, 3, shift).tolist())
        if position > 1  # before them a draft may be cut short
    )
    assert offsets == [(position, offset) for position in range(2, 9) for offset in range(3)]


def test_arithmetic_of_acceptance() -> None:
    acceptance = Acceptance((6, 3, 1), (10, 10, 5))
    assert acceptance.survival == [0.6, 0.3, 0.2]
    assert acceptance.by_offset == pytest.approx([0.6, 0.5, 2 / 3])
    assert acceptance.tokens_per_round(2) == pytest.approx(1.9)
    assert acceptance.rate == pytest.approx(1.1 / 1.9)
    assert Acceptance((0, 0), (4, 4)).by_offset == [0, 0]
    assert Acceptance((1, 1), (2, 1)).survival == [0.5, 0.5]  # never rises
    assert Acceptance.pooled([acceptance, acceptance]).observed == (20, 20, 10)
    # algorithms: tau(0.8, 4) = 3.3616, c = 0.5, v = 1.15
    speedup = best_speedup([0.8**n for n in range(1, 9)], lambda length: length * 0.5 + 1.15)
    assert (speedup.num_draft_tokens, round(speedup.ratio, 2)) == (2, 1.13)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"draft_length": 0}, "draft_length=0"), ({"batch_positions": True}, "batch_positions=True")],
)
def test_bad_settings_are_refused(settings: dict[str, object], told: str) -> None:
    decoder = Decoder(tiny_model("llama"))
    with pytest.raises(SettingError, match=told):
        Replay(decoder, [Text((3, 4), (5, 6, 7))], **settings)
    with pytest.raises(SettingError, match="two continuation tokens"):
        Replay(decoder, [Text((3, 4), (5,))])


def test_numbers_that_are_not_finite_end_it() -> None:
    import copy

    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(SearchError, match="not|NaN"):
        Replay(Decoder(model), [Text((3, 4), (5, 6, 7))])
