"""The comparison itself: tune on one half of the questions, run in turn on the other, write a line for everything.

It goes on behind the lines that are there. An arm that fails is a line that says why; only plain decoding, which all
others are measured by, must not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import layerskip
from experiments.arm_rows import ArmRow, Settings, Workshop
from experiments.arms import WARM_UP_TOKENS, Arm, warm_up
from experiments.compare_arms import PLAIN
from experiments.protocol import geometric_mean_of, paired_ratios, task_of
from experiments.questions import Question, token_ids
from experiments.run_lines import RunLog, run_of, run_to_dict
from layerskip.errors import DecodingError, SettingError
from layerskip.exactness import first_difference

__all__ = ["Comparison", "Contestant", "TUNED", "in_words", "sizes_of"]

TUNED = ", tuned"  # behind an arm's name


@dataclass
class Contestant:
    """An arm as it is to be run: a row with settings.

    Attributes:
        arm: None: it could not be made, or has failed.
        error: why it could not be made.
    """

    name: str
    row: ArmRow
    settings: Settings
    arm: Arm | None = None
    error: str | None = None


@dataclass
class Comparison:
    """What is compared on what, and where it is written.

    Attributes:
        rows: by name; plain is first.
        given: settings from the command line by arm, which are then not tuned.
        tuning, report: questions.
        gaps: most answers of an arm whose difference from plain's is looked into.
        show: told what is going on, now and then.
    """

    shop: Workshop
    log: RunLog
    rows: Mapping[str, ArmRow]
    given: Mapping[str, Settings]
    tuning: Sequence[Question]
    report: Sequence[Question]
    new_tokens: int
    repeats: int
    raw: bool = False
    gaps: int = 4
    show: Callable[[str], None] = lambda text: None

    def run(self, options: Mapping[str, Any]) -> None:
        """Everything, from the first line that is not there yet.

        Args:
            options: all that says what is compared; resumed comparisons must be of the same.
        """
        self._begin(options)
        contestants = list(self._contestants())
        questions = [each for _ in range(self.repeats) for each in self.report]
        for index, question in enumerate(questions):
            self.show(f"question {index + 1} of {len(questions)}")
            self._ask(contestants, question, index // len(self.report), "report", turn_by_turn=True, first=index)
        self._look_into_partings()
        if not any(self.log.of("end")):
            self.log.write("end")

    def _begin(self, options: Mapping[str, Any]) -> None:
        names = {"tuning": [each.id for each in self.tuning], "report": [each.id for each in self.report]}
        self.log.begin(options, split=names, model=sizes_of(self.shop.model))

    def _contestants(self) -> Iterator[Contestant]:
        """All arms, with their default settings and, where others did better on the tuning half, with those, too."""
        plain = self._made(Contestant(PLAIN, self.rows[PLAIN], {}))
        yield plain
        for name, row in self.rows.items():
            if name == PLAIN:
                continue
            default = self.given.get(name, row.grid[0])
            contestant = self._made(Contestant(name, row, default))
            yield contestant
            if contestant.arm is not None and name not in self.given and len(row.grid) > 1 and self.tuning:
                chosen = self._tuned(name, row, plain)
                if chosen is not None and chosen != default:
                    yield self._made(Contestant(name + TUNED, row, chosen))

    def _made(self, contestant: Contestant) -> Contestant:
        """Make and warm up; a line says how that went, unless an earlier one does."""
        said = next(self.log.of("arm", arm=contestant.name), None)
        if said is not None and said["error"] is not None:
            return contestant
        name, row, shop = contestant.name, contestant.row, self.shop
        self.show(f"making {name}")
        content: dict[str, Any] = {"arm": name, "what": row.what, "settings": dict(contestant.settings)}
        began = time.perf_counter()
        try:
            contestant.arm = row.make(shop, name, contestant.settings)
            made_s = time.perf_counter() - began
            rows = [self._longest()]
            new_tokens = self.new_tokens if shop.subject.device.type == "cuda" else WARM_UP_TOKENS
            peak = warm_up(contestant.arm, rows, shop.subject.device, new_tokens)
            content |= {
                "described": contestant.arm.settings,
                "made_s": made_s,
                "peak_bytes": peak.bytes,
                "peak_how": peak.how,
                "peak_tokens": len(rows[0]) + new_tokens,
                "preparation": asdict(row.preparation(shop)),
            }
        except Exception as error:
            self._refuse_without_plain(name, error)
            contestant.arm = None
            content["error"] = in_words(error)
        if said is None:
            self.log.write("arm", **{"error": None, **content})
        return contestant

    def _longest(self) -> list[int]:
        prompts = (self._prompt(question, ()) for question in self.report)
        return max((each for each in prompts if self._fits(each)), key=len)

    def _tuned(self, name: str, row: ArmRow, plain: Contestant) -> Settings | None:
        """The settings of the grid that are fastest on the tuning half; None: none of them works."""
        for line in self.log.of("tuned", arm=name):
            chosen: Settings | None = line["chosen"]
            return chosen
        began = time.perf_counter()
        candidates = []
        for number, settings in enumerate(row.grid):
            candidate = Contestant(f"{name} #{number}", row, settings)
            try:
                candidate.arm = row.make(self.shop, candidate.name, settings)
                warm_up(candidate.arm, [self._longest()], self.shop.subject.device)
            except Exception as error:
                candidate.arm, candidate.error = None, in_words(error)
            candidates.append(candidate)
        base = Contestant(f"{name} #{PLAIN}", plain.row, {}, plain.arm)
        for index, question in enumerate(self.tuning):
            self.show(f"tuning {name}, question {index + 1} of {len(self.tuning)}")
            self._ask([base, *candidates], question, 0, "tuning", turn_by_turn=False, first=index)
        ratios = [self._ratio(candidate, base.name) for candidate in candidates]
        works = [index for index, ratio in enumerate(ratios) if ratio is not None]
        best = max(works, key=lambda index: ratios[index] or 0.0, default=None)
        line = self.log.write(
            "tuned",
            arm=name,
            candidates=[
                {"settings": each.settings, "ratio": ratio, "error": each.error}
                for each, ratio in zip(candidates, ratios, strict=True)
            ],
            chosen=None if best is None else row.grid[best],
            seconds=time.perf_counter() - began,
        )
        chosen = line["chosen"]
        return chosen

    def _ratio(self, candidate: Contestant, base: str) -> float | None:
        """Speed over plain's, over tasks; None if the candidate has failed."""
        if candidate.arm is None:
            return None
        ratios = paired_ratios(self._speeds(candidate.name), self._speeds(base))
        groups: dict[str, list[float]] = {}
        for question in self.tuning:
            if question.id in ratios:
                groups.setdefault(task_of(question.category), []).append(ratios[question.id])
        mean = geometric_mean_of(groups)
        return None if mean is None else mean.value

    def _speeds(self, arm: str) -> dict[tuple[str, int, int], float]:
        lines = self.log.of("run", arm=arm, split="tuning", error=None)
        speeds = {(line["question"], line["turn"], line["repeat"]): run_of(line).tokens_per_s for line in lines}
        return {key: speed for key, speed in speeds.items() if speed > 0}

    def _ask(self, contestants: Sequence[Contestant], question: Question, repeat: int, split: str, *,
             turn_by_turn: bool, first: int) -> None:  # fmt: skip
        """A conversation with all; after each turn plain's answer of the first repeat becomes everybody's history."""
        answers: list[str] = []
        turns = len(question.turns) if turn_by_turn else 1
        for turn in range(turns):
            prompt = self._prompt(question, answers)
            key = {"split": split, "question": question.id, "turn": turn, "repeat": repeat}
            if not self._fits(prompt):
                if not any(self.log.of("left_out", **key)):
                    self.log.write("left_out", **key, prompt_tokens=len(prompt))
                return
            start = (first + turn) % len(contestants)
            for contestant in (*contestants[start:], *contestants[:start]):
                self._call(contestant, prompt, {"arm": contestant.name, **key}, question.category)
            if turn + 1 < turns:
                said = self.log.run({"arm": PLAIN, **key, "repeat": 0})
                assert said is not None
                answers.append(str(said["text"]))

    def _call(self, contestant: Contestant, prompt: list[int], key: dict[str, Any], category: str) -> None:
        """One run and its line; a contestant that fails is not called again."""
        said = self.log.run(key)
        if said is not None or contestant.arm is None:
            if said is not None and said["error"] is not None:
                self._give_up(contestant, said["error"])
            return
        content = {**key, "category": category, "prompt": prompt, "prompt_tokens": len(prompt)}
        try:
            run = contestant.arm.call([prompt], self.new_tokens)
        except Exception as error:
            self._refuse_without_plain(contestant.name, error)
            self._give_up(contestant, in_words(error))
            self.log.write("run", **content, error=contestant.error)
            return
        tokenizer: Any = self.shop.model.tokenizer
        text = tokenizer.decode(run.tokens[0], skip_special_tokens=True)
        self.log.write("run", **content, error=None, settings=dict(contestant.settings), text=text, **run_to_dict(run))

    @staticmethod
    def _give_up(contestant: Contestant, error: str) -> None:
        contestant.arm, contestant.error = None, error

    def _refuse_without_plain(self, name: str, error: Exception) -> None:
        if name == PLAIN:
            raise DecodingError(
                f"got a failure of plain decoding, by which all arms are measured: {in_words(error)}. Make it decode "
                "first."
            ) from error

    def _look_into_partings(self) -> None:
        """For some answers that are not plain's, where they part, and whether a near-tie explains it."""
        if self.shop.decoding["do_sample"] or self.gaps == 0:
            return
        key = ("question", "turn", "repeat")
        runs = list(self.log.of("run", split="report", error=None))
        plain = {tuple(line[name] for name in key): line["tokens"] for line in runs if line["arm"] == PLAIN}
        looked: dict[str, list[tuple[Any, ...]]] = {}
        for line in self.log.of("parting"):
            looked.setdefault(line["arm"], []).append(tuple(line[name] for name in key))
        for line in runs:
            place, done = tuple(line[name] for name in key), looked.setdefault(line["arm"], [])
            base = plain.get(place)
            if base is None or base == line["tokens"] or len(done) >= self.gaps or place in done:
                continue
            self.show(f"where answers of {line['arm']} part from plain's")
            found = first_difference(self.shop.model.hf_model, line["prompt"], base, line["tokens"])
            assert found is not None
            names = ("index", "token_a", "token_b", "gap", "logit_error", "rounding_step", "is_near_tie")
            done.append(place)
            values = {name: getattr(found, name) for name in names}
            self.log.write("parting", arm=line["arm"], **{name: line[name] for name in key}, **values)

    def _prompt(self, question: Question, answers: Sequence[str]) -> list[int]:
        tokenizer = self.shop.model.tokenizer
        if tokenizer is None:
            raise SettingError("got a checkpoint without a tokenizer; expected one, for questions are in words.")
        return token_ids(question, answers, tokenizer, self.raw)

    def _fits(self, prompt: Sequence[int]) -> bool:
        return len(prompt) + self.new_tokens <= self.shop.model.decoder.max_positions


def sizes_of(model: layerskip.Model) -> dict[str, Any]:
    """What the model's weights and cache take, and how it was prepared."""
    return {
        "weights_bytes": model.inspection.parameters * model.decoder.dtype.itemsize,
        "cache_bytes_per_token": model.inspection.kv_bytes_per_token,
        "preparation": asdict(model.preparation),
    }


def in_words(error: Exception) -> str:
    """The kind of error and its first line."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
