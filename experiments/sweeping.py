"""A sweep itself: at each value all arms in turn, a line for everything, and nothing run that is there already.

An arm that fails at a value is a line that says why, and so is a value that cannot be run, or not within its time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from experiments.arm_rows import ArmRow, Settings, Workshop
from experiments.arms import Run, in_turn, warm_up, warm_up_tokens
from experiments.compare_arms import PLAIN
from experiments.comparing import Contestant, in_words, sizes_of
from experiments.measuring import available_bytes, pass_grid
from experiments.run_lines import RunLog
from experiments.sweep_kinds import Kind, Setup, expected_turn_s, settings_of
from experiments.sweep_prompts import Call, Prompts
from layerskip.errors import DecodingError
from layerskip.search.acceptance import Acceptance
from layerskip.search.calibration import make_sampler_of
from layerskip.search.replay import Replay
from layerskip.search.texts import Text

__all__ = ["PLAN_OF", "RUN_KEY", "Sweep", "obstacle"]

RUN_KEY = ("value", "arm", "prompt", "repeat")
PLAN_OF = {
    "self": "plan",
    "exit": "exit",
    "trained": "trained",
    "eagle": "eagle",
}  # arms whose drafts can be replayed, and their plans

_WIDTHS = (1, 2, 3, 4, 6, 8, 16, 32)  # tokens a row of the passes that are timed
_ROOM = 32  # positions behind the text that drafts may need
_REPEATS = 5  # of each pass that is timed


@dataclass
class Sweep:
    """What is swept over what, and where it is written.

    Attributes:
        rows: arms by name; plain is first.
        given: settings of arms from the command line.
        setup: of the runs, but for the quantity that is swept.
        prompts: calls of different prompts at each value.
        budget_s: of a value, all told; None: as long as it takes.
        show: told what is going on, now and then.
    """

    shop: Workshop
    log: RunLog
    kind: Kind
    rows: Mapping[str, ArmRow]
    given: Mapping[str, Settings]
    setup: Setup
    values: Sequence[float]
    source: Prompts
    new_tokens: int
    prompts: int
    repeats: int
    budget_s: float | None = None
    show: Callable[[str], None] = lambda text: None

    def run(self, options: Mapping[str, Any]) -> None:
        """Everything, from the first line that is not there yet.

        Args:
            options: all that says what is swept; resumed sweeps must be of the same.
        """
        inspection = self.shop.model.inspection
        step_bytes = inspection.step_parameters * self.shop.model.decoder.dtype.itemsize
        self.log.begin(options, model={**sizes_of(self.shop.model), "step_bytes": step_bytes})
        for value in self.values:
            if not any(line["kind"] in ("done", "left_out") and line["value"] == value for line in self.log.lines):
                why = (
                    obstacle(self.shop, self.source, self.setup_at(value), self.new_tokens)
                    or self._too_slow(value)
                    or self._run_value(value)
                )
                if why is not None:
                    self.log.write("left_out", value=value, why=why)
        if not any(self.log.of("end")):
            self.log.write("end")

    def setup_at(self, value: float) -> Setup:
        """The conditions there."""
        return replace(self.setup, **{self.kind.field: value})

    def _too_slow(self, value: float) -> str | None:
        done = [(line["value"], line["turn_s"]) for line in self.log.of("done")]
        expected = expected_turn_s(self.kind, done, value)
        if self.budget_s is None or expected is None or expected <= self.budget_s:
            return None
        return f"a turn of all arms would take about {expected:,.0f} s, and --budget is {self.budget_s:g} s"

    def _run_value(self, value: float) -> str | None:
        """All arms in turn; why plain decoding failed, if it did, for then there is nothing to compare with."""
        began, setup = time.perf_counter(), self.setup_at(value)
        self.shop.decoding = setup.decoding
        calls = self.source.calls(setup, self.prompts)
        contestants: list[Contestant] = []
        for name, row in self.rows.items():
            contestants.append(self._made(name, row, setup, value, calls))
            if contestants[0].arm is None:
                return f"plain decoding failed: {contestants[0].error}"
        turns, turn_s = self.prompts * self.repeats, 0.0
        done = 0
        for turn in range(turns):
            if turn and self.budget_s is not None and time.perf_counter() - began + turn_s > self.budget_s:
                break
            turn_began = time.perf_counter()
            repeat, prompt = divmod(turn, self.prompts)
            self.show(f"{self.kind.field} {value:g}, turn {turn + 1} of {turns}")
            for each in in_turn(contestants, value, turn):
                self._call(each, calls[prompt], {"value": value, "arm": each.name, "prompt": prompt, "repeat": repeat})
                if contestants[0].arm is None:
                    return f"plain decoding failed: {contestants[0].error}"
            turn_s, done = max(turn_s, time.perf_counter() - turn_began), turn + 1
        turn_s = max(turn_s, self._said_turn_s(value))
        if self.budget_s is None or time.perf_counter() - began < self.budget_s:
            self._explain(value, setup, calls)
        contexts = [len(row) for call in calls for row in call.rows]
        self.log.write(
            "done",
            value=value,
            turns=done,
            of=turns,
            turn_s=turn_s,
            seconds=time.perf_counter() - began,
            setup=asdict(setup),
            context=median(contexts),
            cache_bytes=_cache_bytes(self.shop, self.source, setup, self.new_tokens),
            repeats_text=any(call.repeats_text for call in calls),
        )
        return None

    def _said_turn_s(self, value: float) -> float:
        """Seconds of a turn by its lines, for turns that an interrupted sweep has run before."""
        turns: dict[tuple[int, int], float] = {}
        for line in self.log.of("run", value=value, error=None):
            key = line["prompt"], line["repeat"]
            turns[key] = turns.get(key, 0.0) + line["call_s"]
        return max(turns.values(), default=0.0)

    def _made(self, name: str, row: ArmRow, setup: Setup, value: float, calls: Sequence[Call]) -> Contestant:
        """Make and warm up; a line says how that went, unless an earlier one does."""
        settings = {**settings_of(row, setup.drafts), **self.given.get(name, {})}
        contestant = Contestant(name, row, settings)
        *_, said = None, *self.log.of("arm", arm=name, value=value)
        if said is not None and said["error"] is not None:
            contestant.error = said["error"]
            return contestant
        self.show(f"making {name} at {self.kind.field} {value:g}")
        content: dict[str, Any] = {"value": value, "arm": name, "what": row.what, "settings": settings}
        try:
            row.check(name, self.shop)
            contestant.arm = row.make(self.shop, name, settings)
            device = self.shop.subject.device
            longest = max(calls, key=lambda call: max(map(len, call.rows)))
            peak = warm_up(contestant.arm, longest.rows, device, warm_up_tokens(device, self.new_tokens))
            content |= {"described": contestant.arm.settings, "peak_bytes": peak.bytes, "peak_how": peak.how}
        except Exception as error:
            contestant.arm, contestant.error = None, in_words(error)
        if said is None or contestant.error is not None:
            self.log.write("arm", **content, error=contestant.error)
        return contestant

    def _call(self, contestant: Contestant, call: Call, key: dict[str, Any]) -> None:
        """One run and its line; a contestant that fails is not called again at this value."""
        said = self.log.run(key)
        if said is None and contestant.arm is not None:
            try:
                content = {"error": None, **_run_to_dict(contestant, call, self.new_tokens)}
            except Exception as error:
                content = {"error": in_words(error)}
            said = self.log.write("run", **key, **content)
        if said is not None and said["error"] is not None:
            contestant.arm, contestant.error = None, said["error"]

    def _explain(self, value: float, setup: Setup, calls: Sequence[Call]) -> None:
        """What theory needs to know: passes by their width, and how far a draft's distributions overlap the model's."""
        said = {line["what"] for line in self.log.of("costs", value=value)}
        for what, measure in (("passes", self._pass_costs), ("overlap", self._overlaps)):
            if what not in said:
                self.show(f"{what} at {self.kind.field} {value:g}")
                try:
                    self.log.write("costs", value=value, what=what, error=None, **measure(value, setup, calls))
                except Exception as error:  # runs are what counts
                    self.log.write("costs", value=value, what=what, error=in_words(error))

    def _pass_costs(self, value: float, setup: Setup, calls: Sequence[Call]) -> dict[str, Any]:
        """Seconds of passes as wide as the runs' widest, in the middle of the answers."""
        decoder = self.shop.model.decoder
        context = (setup.context or self.source.usual_context) + self.new_tokens // 2
        widest = max((_widest(line["stats"]) for line in self.log.of("run", value=value, error=None)), default=1)
        enough = next((width for width in _WIDTHS if width >= widest), _WIDTHS[-1])
        widths = [width for width in _WIDTHS if width <= max(2, enough)]
        if context + max(widths) > decoder.max_positions:
            raise DecodingError(f"got no {max(widths)} positions behind {context:,} tokens to time passes in.")
        recorded = decoder.device.type == "cuda"
        found = pass_grid(decoder, [setup.batch], widths, [context], recorded=recorded, repeats=_REPEATS)
        cells = [
            {"batch": batch, "width": width, "context": behind, "pass_s": pass_s}
            for (batch, width, behind), pass_s in found.items()
        ]
        return {"cells": cells}

    def _overlaps(self, value: float, setup: Setup, calls: Sequence[Call]) -> dict[str, Any]:
        """Chance of a first draft to be accepted, by the logits along plain decoding's own answers; by arm."""
        model = self.shop.model
        plans = {arm: self.shop.plans[plan] for arm, plan in PLAN_OF.items() if arm in self.rows}
        lines = self.log.of("run", value=value, arm=PLAIN, repeat=0, error=None)
        texts = [
            Text(tuple(calls[line["prompt"]].rows[0]), tuple(line["first_row"]))
            for line in lines
            if len(line["first_row"]) > 1
        ]
        if not plans or not texts:
            return {"overlaps": {}}
        adapters = {arm: model.adapter(plan) for arm, plan in plans.items() if plan.adapter is not None}
        sampler = make_sampler_of(model, {"temperature": setup.temperature}) if setup.temperature else None
        replay = Replay(model.decoder, texts, draft_length=1, sampler=sampler, adapters=adapters.values())
        overlaps = {}
        for arm, plan in plans.items():
            path, adapter = plan.path(model.decoder.num_blocks), adapters.get(arm)
            head = None if plan.draft_vocabulary is None else model.decoder.partial_head(plan.draft_vocabulary)
            found = [
                outcome.acceptance(1)
                for batch in range(replay.num_batches)
                for outcome in replay.outcomes(path, batch, head, adapter=adapter)
            ]
            overlaps[arm] = Acceptance.pooled(found).by_offset[0]
        return {"overlaps": overlaps}


def _cache_bytes(shop: Workshop, source: Prompts, setup: Setup, new_tokens: int) -> int:
    """Of the keys and values of one call."""
    positions = (setup.context or source.usual_context) + new_tokens
    return setup.batch * positions * shop.model.inspection.kv_bytes_per_token


def obstacle(shop: Workshop, source: Prompts, setup: Setup, new_tokens: int) -> str | None:
    """Why nothing can be run there, in words; None: it can."""
    most = shop.model.decoder.max_positions
    if setup.context is not None and setup.context + new_tokens > most:
        return f"{setup.context:,} tokens and {new_tokens} new ones are more than the model's {most:,} positions"
    needed, free = _cache_bytes(shop, source, setup, new_tokens), available_bytes(shop.subject.device)
    if free is not None and needed > free:
        return f"its cache takes {needed / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB of memory are free"
    return None


def _run_to_dict(contestant: Contestant, call: Call, new_tokens: int) -> dict[str, Any]:
    """Call the arm; what its line says: of answers what tells them apart, and all of plain's first."""
    assert contestant.arm is not None
    run: Run = contestant.arm.call(call.rows, new_tokens)
    content = {name: value for name, value in vars(run).items() if name not in ("stats", "tokens")}
    return {
        **content,
        "settings": dict(contestant.settings),
        "rows": len(call.rows),
        "prompt_tokens": sum(map(len, call.rows)),
        "row_tokens": [len(row) for row in run.tokens],
        "answers": [hashlib.sha256(repr(row).encode()).hexdigest()[:8] for row in run.tokens],
        "first_row": run.tokens[0] if contestant.name == PLAIN else None,
        "stats": None if run.stats is None else asdict(run.stats),
    }


def _widest(stats: Mapping[str, Any] | None) -> int:
    """Tokens a row of the widest pass of a call, about."""
    if stats is None or not stats["proposed"]:
        return 1
    return 1 + round((len(stats["drafted_histogram"]) - 1) * (1 + stats["proposed_beside"] / stats["proposed"]))
