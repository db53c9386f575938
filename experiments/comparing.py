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
from experiments.arms import Arm, in_turn, warm_up, warm_up_tokens
from experiments.compare_arms import PLAIN
from experiments.protocol import geometric_mean_of, paired_ratios, tasks_of
from experiments.questions import Question, evenly, token_ids
from experiments.report import is_long_enough
from experiments.run_lines import RunLog, run_of, run_to_dict
from layerskip.errors import DecodingError, InputError, SettingError
from layerskip.exactness import first_difference

__all__ = ["Comparison", "Contestant", "TUNED", "in_words", "longest_prompt", "sizes_of"]

TUNED = ", tuned"  # behind an arm's name


@dataclass
class Contestant:
    """An arm as it is to be run: a row with settings.

    Attributes:
        arm: None: it could not be made, or has failed.
        error: why a call of it has failed.
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
        if any(self.log.of("end")):
            return
        contestants = list(self._contestants())
        questions = [each for _ in range(self.repeats) for each in self.report]
        for index, question in enumerate(questions):
            self.show(f"question {index + 1} of {len(questions)}")
            self._ask(contestants, question, index // len(self.report), "report", turn_by_turn=True)
        self._look_into_partings()
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
            if name not in self.given and len(row.grid) > 1 and self.tuning:
                was_tuned = any(self.log.of("tuned", arm=name))
                chosen = self._tuned(name, row, plain) if was_tuned or contestant.arm is not None else None
                if chosen is not None and chosen != default:
                    yield self._made(Contestant(name + TUNED, row, chosen))

    def _made(self, contestant: Contestant) -> Contestant:
        """Make and warm up; a line says how that went, unless an earlier one does."""
        *_, said = None, *self.log.of("arm", arm=contestant.name)
        if said is not None and said["error"] is not None:
            return contestant
        name, row, shop = contestant.name, contestant.row, self.shop
        rows, new_tokens = [self._longest()], self._warm_up_tokens
        self.show(f"making {name}")
        content: dict[str, Any] = {"arm": name, "what": row.what, "settings": dict(contestant.settings)}
        began = time.perf_counter()
        try:
            contestant.arm = row.make(shop, name, contestant.settings)
            made_s = time.perf_counter() - began
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
            self._refuse_without_plain(contestant, error)
            contestant.arm = None
            content["error"] = in_words(error)
        if said is None or "error" in content:  # a resumed comparison may fail where the one before it did not
            self.log.write("arm", **{"error": None, **content})
        return contestant

    @property
    def _warm_up_tokens(self) -> int:
        return warm_up_tokens(self.shop.subject.device, self.new_tokens)

    def _longest(self) -> list[int]:
        return longest_prompt(self.shop.model, self.report, self.new_tokens, self.raw)

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
                warm_up(candidate.arm, [self._longest()], self.shop.subject.device, self._warm_up_tokens)
            except Exception as error:
                candidate.arm, candidate.error = None, in_words(error)
            candidates.append(candidate)
        base = Contestant(f"{name} #{PLAIN}", plain.row, {}, plain.arm)
        for index, question in enumerate(self.tuning):
            self.show(f"tuning {name}, question {index + 1} of {len(self.tuning)}")
            self._ask([base, *candidates], question, 0, "tuning", turn_by_turn=False)
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
        tasks = tasks_of(question.category for question in self.tuning)
        for question in self.tuning:
            if question.id in ratios:
                groups.setdefault(tasks[question.category], []).append(ratios[question.id])
        mean = geometric_mean_of(groups)
        return None if mean is None else mean.value

    def _speeds(self, arm: str) -> dict[tuple[str, int, int], float]:
        lines = self.log.of("run", arm=arm, split="tuning", error=None)
        runs = {(line["question"], line["turn"], line["repeat"]): run_of(line) for line in lines}
        return {key: run.tokens_per_s for key, run in runs.items() if is_long_enough(run)}

    def _ask(
        self, contestants: Sequence[Contestant], question: Question, repeat: int, split: str, *, turn_by_turn: bool
    ) -> None:
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
            for contestant in in_turn(contestants, *key.values()):
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
            self._refuse_without_plain(contestant, error)
            self._give_up(contestant, in_words(error))
            self.log.write("run", **content, error=contestant.error)
            return
        tokenizer: Any = self.shop.model.tokenizer
        text = tokenizer.decode(run.tokens[0], skip_special_tokens=True)
        self.log.write("run", **content, error=None, settings=dict(contestant.settings), text=text, **run_to_dict(run))

    @staticmethod
    def _give_up(contestant: Contestant, error: str) -> None:
        contestant.arm, contestant.error = None, error

    def _refuse_without_plain(self, contestant: Contestant, error: Exception) -> None:
        if contestant.row is self.rows[PLAIN]:
            raise DecodingError(
                f"got a failure of plain decoding, by which all arms are measured: {in_words(error)}. Make it decode "
                "first."
            ) from error

    def _look_into_partings(self) -> None:
        """For some answers that are not plain's, where they part, and whether a near-tie explains it.

        Of each arm those of turns spread evenly over all that differ, the first repeat's.
        """
        if self.shop.decoding["do_sample"] or self.gaps == 0:
            return
        runs = list(self.log.of("run", split="report", repeat=0, error=None))
        plain = {(line["question"], line["turn"]): line for line in runs if line["arm"] == PLAIN}
        differing: dict[str, list[dict[str, Any]]] = {}
        for line in runs:
            if plain[line["question"], line["turn"]]["tokens"] != line["tokens"]:
                differing.setdefault(line["arm"], []).append(line)
        for arm, lines in differing.items():
            for line in evenly(lines, self.gaps):
                place = {name: line[name] for name in ("question", "turn", "repeat")}
                if not any(self.log.of("parting", arm=arm, **place)):
                    self.show(f"where answers of {arm} part from plain's")
                    base = plain[line["question"], line["turn"]]["tokens"]
                    self.log.write("parting", arm=arm, **place, **self._parting(line, base))

    def _parting(self, line: Mapping[str, Any], base: Sequence[int]) -> dict[str, Any]:
        """Where the answer of `line` leaves `base`; an "error" if that cannot be told, such as for want of memory."""
        names = ("index", "token_a", "token_b", "gap", "logit_error", "rounding_step", "is_near_tie")
        try:
            found = first_difference(self.shop.model.hf_model, line["prompt"], base, line["tokens"])
        except Exception as error:  # runs are what counts
            return {"error": in_words(error)}
        assert found is not None
        return {"error": None, **{name: getattr(found, name) for name in names}}

    def _prompt(self, question: Question, answers: Sequence[str]) -> list[int]:
        return prompt_of(self.shop.model, question, answers, self.raw)

    def _fits(self, prompt: Sequence[int]) -> bool:
        return fits(self.shop.model, prompt, self.new_tokens)


def prompt_of(model: layerskip.Model, question: Question, answers: Sequence[str], raw: bool) -> list[int]:
    """The token ids of the turn behind `answers`.

    Raises:
        SettingError: the checkpoint has no tokenizer.
    """
    if model.tokenizer is None:
        raise SettingError("got a checkpoint without a tokenizer; expected one, for questions are in words.")
    return token_ids(question, answers, model.tokenizer, raw)


def fits(model: layerskip.Model, prompt: Sequence[int], new_tokens: int) -> bool:
    """Whether the model has positions for the prompt and as many new tokens."""
    return len(prompt) + new_tokens <= model.decoder.max_positions


def longest_prompt(model: layerskip.Model, questions: Sequence[Question], new_tokens: int, raw: bool) -> list[int]:
    """Of the first turns that fit into the model.

    Raises:
        SettingError: see `prompt_of`.
        InputError: none fits.
    """
    prompts, most = [prompt_of(model, question, (), raw) for question in questions], model.decoder.max_positions
    fitting = [each for each in prompts if fits(model, each, new_tokens)]
    if not fitting:
        raise InputError(
            f"got questions of {min(map(len, prompts)):,} tokens and more, and --new-tokens {new_tokens:,}, for a "
            f"model of {most:,} positions; expected one that fits. Give fewer new tokens or shorter questions."
        )
    return max(fitting, key=len)


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
