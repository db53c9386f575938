"""Engines without the front door: for tests that bring their own drafter, or look between two rounds."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from layerskip.assembly import PlannedDrafter, build_engine
from layerskip.drafters import Draft, DraftContext, Drafter, draft_chain
from layerskip.drafters.base import GoesOn
from layerskip.engine import Engine
from layerskip.models.adapter import Adapter
from layerskip.models.decoder import Decoder
from layerskip.plan import DraftPlan
from layerskip.request import Request
from layerskip.settings import DecodingSettings
from layerskip.state import DecodeState

MakeDrafter = Callable[[Decoder, DraftContext], Drafter]


def make_engine(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    make_drafter: MakeDrafter | None,
    *,
    max_drafts: int = 4,
    acceptance_rule: str = "maximal",
    seeds: Sequence[int] | None = None,
    confidence_threshold: float = 0.0,
    processors: Sequence[object] = (),
    tokenizer=None,
    governor: str = "off",
    adapter: Adapter | None = None,
    pass_width: int | None = None,
    num_siblings: int = 0,
    width: int = 0,
    **settings,
) -> Engine:
    """An engine over `prompts`; `settings` are fields of `DecodingSettings`, taken as they are.

    With a `pass_width` rows that have ended are kept to the end.
    """
    request = Request(
        prompts=[list(each) for each in prompts],
        settings=DecodingSettings(**settings),
        plan=DraftPlan(num_draft_tokens=max_drafts, confidence_threshold=confidence_threshold),
        acceptance_rule=acceptance_rule,
        seeds=list(range(len(prompts)) if seeds is None else seeds),
        caller_processors=LogitsProcessorList(processors),
        caller_criteria=StoppingCriteriaList(),
        governor=governor,
        pass_width=pass_width,
    )
    decoder = Decoder(model)
    planned = {}
    if make_drafter is not None:
        planned["drafter"] = PlannedDrafter(
            partial(make_drafter, decoder), 0.1, max_drafts, adapter=adapter, num_siblings=num_siblings, width=width
        )
    return build_engine(decoder, request, planned, tokenizer)


def drafter_of(engine: Engine) -> Drafter:
    """The engine's only drafter."""
    (drafter,) = engine.drafters.values()
    return drafter


def run_checked(engine: Engine) -> list[list[int]]:
    """Decode to the end, round by round, checking after each that the cache holds what was committed and no more.

    Returns:
        Each row's new tokens.
    """
    rows: list[list[int]] = [[] for _ in range(engine.state.batch)]
    commits = engine.read_prompts()
    while True:
        for commit in commits:
            rows[commit.row].append(commit.token_id)
        engine.state.cache.check()
        assert engine.state.cache.lengths == [length - 1 for length in engine.state.lengths]
        if not any(engine.state.active):
            return rows
        commits = engine.decode_round()
        assert commits, "a round that commits nothing would go on for ever"


class ScriptedDrafter:
    """Proposes what `script` says, whatever the model thinks of it: the token at each index of each row's text.

    It drafts with certainty (one-hot), and unlike a drafter that looks at its tokens it goes on behind an EOS.
    """

    def __init__(self, context: DraftContext, script: Callable[[int, int], int]) -> None:
        """`script` maps (row, index in the row's tokens, prompt included) to a token id."""
        self.context = context
        self.script = script

    def begin(self, state: DecodeState) -> None:
        pass

    def outlook(self, state: DecodeState) -> list[int | None]:
        return [0] * state.batch

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        count = max(limits)
        tokens = torch.tensor(
            [
                [self.script(number, length + i) for i in range(count)]
                for number, length in zip(state.numbers, state.lengths, strict=True)
            ]
        )
        for offset in range(count):
            state.token_ids[state.rows, state.indices(offset)] = tokens[:, offset]
        probs = torch.nn.functional.one_hot(tokens, self.context.vocab_size).double()
        return Draft(tokens, list(limits), probs)

    def catch_up(self, state: DecodeState) -> None:
        """Nothing."""

    def observe(self, state: DecodeState) -> None:
        pass


class LogitsDrafter:
    """Draws from fixed logits (vocab), the same at every position: a draft that knows nothing of the model."""

    def __init__(self, context: DraftContext, logits: torch.Tensor) -> None:
        self.context = context
        self.logits = logits

    def begin(self, state: DecodeState) -> None:
        pass

    def outlook(self, state: DecodeState) -> list[int | None]:
        return [0] * state.batch

    def propose(self, state: DecodeState, limits: Sequence[int], goes_on: GoesOn | None = None) -> Draft:
        logits = self.logits.expand(state.batch, 1, -1)
        return draft_chain(lambda offset: logits, self.context, state, limits, goes_on)

    def catch_up(self, state: DecodeState) -> None:
        """Nothing."""

    def observe(self, state: DecodeState) -> None:
        pass
