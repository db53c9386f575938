"""The report of a search: complete, readable without the net, the same each time, and never half written."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import shutil
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerskip.errors import SearchError
from layerskip.identity import ModelIdentity
from layerskip.plan import DraftPlan
from layerskip.search.acceptance import best_speedup
from layerskip.search.candidate import Candidate
from layerskip.search.cost import uniform_costs
from layerskip.search.report import read_report, write_report, writing
from layerskip.search.report.gallery import PICTURES, Picture, hang
from layerskip.search.report.plots import predicted_speedups
from layerskip.search.report.tables import without_password
from layerskip.search.report.telling import headline, in_python, in_shell, is_start, layer_ranges
from layerskip.search.report.writing import ADAPTER, FILES
from layerskip.search.result import HeldOut, Interval, SearchResult, TrialRecord

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = Interval(math.nan, math.nan, math.nan)
NOT_MEASURED = HeldOut(0, 0, UNKNOWN, (), UNKNOWN, UNKNOWN)
OFFSETS = 6


def around(value: float, spread: float = 0.03) -> Interval:
    return Interval(value, value - spread, value + spread)


def make_trial(number: int, num_layers: int, generator: random.Random, strength: float = 0.1) -> TrialRecord:
    """A candidate whose acceptance falls with every sub-block left out, judged by costs that nobody measured."""
    share = generator.random() * 0.6
    attention, mlp = ([layer for layer in range(num_layers) if generator.random() < share] for _ in range(2))
    exit_layer = generator.randrange(1, num_layers) if num_layers > 2 and generator.random() < 0.3 else None
    candidate = Candidate.of(num_layers, attention, mlp, exit_layer, 64 if generator.random() < 0.5 else None)
    chance = math.exp(-strength * sum(map(len, candidate.skipped(num_layers))))
    offsets = tuple(chance * (1 - 0.02 * offset) for offset in range(OFFSETS))
    survival = np.cumprod(offsets).tolist()
    costs = uniform_costs(num_layers)
    speedup = best_speedup(survival, lambda length: costs.round_ratio(candidate, length))
    state = ("complete", "complete", "pruned", "failed")[number % 4]
    origin = f"leave-one-out {number}" if number < 3 else "elite"
    if state == "failed":
        return TrialRecord(number, state, origin, candidate)
    rate = sum(survival) / sum([1.0, *survival[:-1]])
    ratio = costs.draft_ratio(candidate)
    return TrialRecord(
        number, state, origin, candidate, offsets, rate, 0.01, ratio, speedup.ratio, speedup.num_draft_tokens, 1.5
    )


def make_result(num_layers: int = 12, num_trials: int = 24, speedup: float = 1.23, **fields: Any) -> SearchResult:
    """A search as it could have been."""
    generator = random.Random(0)
    trials = tuple(make_trial(number, num_layers, generator) for number in range(num_trials))
    complete = [trial for trial in trials if trial.state == "complete"]
    best = max(complete, key=lambda trial: trial.speedup or 0.0)
    drafts, ids = best.num_draft_tokens or 1, best.candidate.vocabulary_size
    plan = DraftPlan(
        best.candidate.skip_attention,
        best.candidate.skip_mlp,
        best.candidate.exit_layer,
        draft_vocabulary=None if ids is None else tuple(range(ids)),
        num_draft_tokens=drafts,
        target=ModelIdentity("llama", num_layers, 64, 256, "0123abcd"),
        provenance={"found_by": "a test"},
    )
    content: dict[str, Any] = {
        "plan": plan,
        "pays": speedup > 1,
        "best": best,
        "held_out": HeldOut(
            16,
            4096,
            around(0.8),
            tuple(around(chance * 0.97) for chance in best.acceptance_by_offset[:drafts]),
            around(2.5, 0.1),
            around(speedup, 0.05),
            around(speedup - 0.02),
        ),
        "front": tuple(sorted(complete, key=lambda trial: trial.draft_ratio or 0.0)[:5]),
        "trials": trials,
        "single_retention": {
            name: [0.0, *(generator.random() for _ in range(num_layers - 1))] for name in ("attention", "mlp")
        },
        "costs": uniform_costs(num_layers, vocabulary=256).to_dict(),
        "settings": {"sampler": "elite", "seed": 0, "budget": {"trials": 24}, "layers": list(range(40))},
        "conditions": {"model": "some/model", "dtype": "torch.bfloat16", "device": "cpu", "threads": 2, "gpu": None},
        "study": "nightly",
        "storage": "sqlite:///search.db",
        "block_passes": 1234.5,
        "seconds": 600.0,
    }
    return SearchResult(**(content | fields))


class Page(HTMLParser):
    """What the tests ask about a page."""

    VOID = ("meta", "link", "br", "path", "use", "rect")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def read_page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of `make_result()`; treat it as read-only."""
    folder = tmp_path_factory.mktemp("report")
    assert write_report(make_result(), folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def pictures() -> dict[str, Picture]:
    """Those of another report, drawn once."""
    return hang(make_result(speedup=1.5))


def test_all_files_are_there_and_nothing_else(report: Path) -> None:
    assert sorted(contents(report)) == sorted(set(FILES) - {ADAPTER})  # this plan has none
    for name in PICTURES:
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        svg = (report / f"{name}.svg").read_text(encoding="utf-8")
        assert "<svg" in svg and "var(--" not in svg, "a file of its own has colours of its own"


def test_page_needs_nothing_from_outside(report: Path) -> None:
    source = (report / "report.html").read_text(encoding="utf-8")
    page = read_page(report)
    assert page.open == []
    for unwanted in ("script", "img", "iframe", "object", "embed", "audio", "video"):
        assert page.named(unwanted) == []
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "srcset", "poster", "data"):
            address = attributes.get(name)
            assert address is None or address.startswith("#") or (tag, address) == ("link", "data:,")
        assert not [name for name in attributes if name.startswith("on")]
    assert "@import" not in source and "http://" not in source and "https://" not in source
    assert "default-src 'none'" in source, "the browser is told so as well"


def test_every_picture_stands_in_the_page_and_says_what_it_shows(report: Path) -> None:
    page = read_page(report)
    pictures = page.named("svg")
    assert len(pictures) == len(PICTURES)
    assert all(each["role"] == "img" and len(each["aria-label"] or "") > 40 for each in pictures)
    assert sorted(each["id"] or "" for each in page.named("figure")) == sorted(PICTURES)


def test_ids_are_unique_and_all_references_lead_somewhere(report: Path) -> None:
    page = read_page(report)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        for value in filter(None, attributes.values()):
            targets = [value[1:]] if value.startswith("#") else []
            targets += [each.split(")")[0] for each in value.split("url(#")[1:]]
            assert set(targets) <= set(ids)


def test_page_tells_the_result_in_words(report: Path) -> None:
    text = read_page(report).text
    assert "The best draft is predicted 1.23 times as fast as plain decoding" in text
    assert "1.18–1.28" in text and "on texts that the search never saw" in text
    assert "Measured by decoding for real: 1.21 times as fast" in text
    for words in ("What to do next", "What each sub-block is worth", "Words used here", "Plain decoding", "nightly"):
        assert words in text


def test_json_is_the_result_and_the_plan_can_be_loaded(report: Path) -> None:
    result = make_result()
    assert read_report(report) == json.loads(json.dumps(result.to_dict()))
    assert DraftPlan.load(report / "plan.json") == result.plan


def test_same_result_gives_the_same_bytes_also_from_several_threads(report: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: write_report(make_result(), tmp_path / name), ["one", "two"]))
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(report)


def test_settings_of_matplotlib_neither_reach_the_report_nor_are_changed(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whoever imports it now fails
    settings: dict[Any, Any] = {"lines.linewidth": 9.0, "font.size": 30.0, "figure.facecolor": "black"}
    with matplotlib.rc_context(settings):
        write_report(make_result(), tmp_path)
        assert {name: matplotlib.rcParams[name] for name in settings} == settings
    assert contents(tmp_path) == contents(report)


def test_what_people_wrote_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script><b a=\"&\">"
    result = make_result(num_trials=1)
    best = replace(result.best, origin=evil)
    strange = {"model": f"{evil}'; rm -rf ~; \"日本語", evil: [evil], "lone": "\udcff", "path": Path("a")}
    result = replace(
        result, best=best, trials=(best,), conditions=strange, settings={"name": evil}, study=evil, storage=evil
    )
    write_report(result, tmp_path)
    page = read_page(tmp_path)
    assert page.named("script") == page.named("b") == []
    assert page.text.count("<script>alert('x')</script>") >= 6
    assert read_report(tmp_path)["conditions"]["path"] == "a"


def test_passwords_of_a_database_are_not_passed_around(tmp_path: Path) -> None:
    write_report(make_result(storage="postgresql://me:s3cret@host:5432/db"), tmp_path)
    assert not [name for name, content in contents(tmp_path).items() if b"s3cret" in content]
    assert "postgresql://me:***@host:5432/db" in read_page(tmp_path).text
    assert without_password("sqlite:///a:b@c.db") == "sqlite:///a:b@c.db"


def all_of(state: str) -> SearchResult:
    trials = tuple(replace(trial, state=state, speedup=None) for trial in make_result().trials)
    return make_result(trials=trials, best=trials[0], front=(), held_out=NOT_MEASURED, pays=False, single_retention={})


def nothing_known() -> SearchResult:
    trial = TrialRecord(0, "running", "", Candidate())
    return SearchResult(DraftPlan.exit(1), False, trial, NOT_MEASURED, (), ())


def never_accepted() -> SearchResult:
    result = make_result()
    trials = tuple(
        replace(trial, acceptance_by_offset=(0.0,) * OFFSETS, acceptance_rate=0.0, standard_error=math.inf, speedup=0.5)
        for trial in result.trials
    )
    zero = Interval(0.0, 0.0, 0.0)
    held_out = HeldOut(1, 9, zero, (zero,) * OFFSETS, Interval(1.0, 1.0, 1.0), around(0.5))
    return make_result(trials=trials, best=trials[0], front=trials[:1], held_out=held_out, pays=False)


ODD: dict[str, Callable[[], SearchResult]] = {
    "one trial": lambda: make_result(num_trials=1),
    "all pruned": lambda: all_of("pruned"),
    "all failed": lambda: all_of("failed"),
    "nothing known": nothing_known,
    "nothing held out": lambda: make_result(held_out=NOT_MEASURED),
    "not measured": lambda: make_result(held_out=replace(make_result().held_out, measured_speedup=None)),
    "no front, costs or retention": lambda: make_result(front=(), costs={}, single_retention={}),
    "nothing retained": lambda: make_result(single_retention={"attention": [0.0] * 12, "mlp": [0.0] * 12}),
    "costs of another version": lambda: make_result(costs={"plain_s": 0.0, "verify_s": None}),
    "one layer": lambda: make_result(num_layers=1, num_trials=2, single_retention={"attention": [0.5], "mlp": [0.5]}),
    "128 layers": lambda: make_result(num_layers=128, num_trials=9),
    "slower": lambda: make_result(speedup=0.7),
    "never accepted": never_accepted,
    "long and foreign names": lambda: make_result(study="搜索 " * 300, conditions={"x" * 300: "ü" * 3000}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_results_are_reported_too(name: str, tmp_path: Path) -> None:
    result = ODD[name]()
    write_report(result, tmp_path)
    page = read_page(tmp_path)
    assert page.open == []
    drawn = {path.stem for path in tmp_path.glob("*.svg")}
    assert drawn == {path.stem for path in tmp_path.glob("*.png")} and len(page.named("svg")) == len(drawn)
    assert "draft-layers" in drawn
    assert " nan" not in page.text and " None" not in page.text
    assert read_report(tmp_path)["trials"] == json.loads(
        json.dumps(result.to_dict()["trials"]).replace("Infinity", "null")
    )


@pytest.mark.parametrize(
    ("result", "tone", "words"),
    [
        (make_result(), "good", "is predicted 1.23 times as fast as plain decoding (95\N{NO-BREAK SPACE}%: 1.18–1.28)"),
        (make_result(speedup=0.8), "bad", "Nothing beats plain decoding: the best candidate would take 1.25 times"),
        (make_result(speedup=1.03), "open", "which may be chance"),
        (make_result(speedup=1.01), "open", "but measured it is slower"),
        (make_result(pays=False), "open", "No gain to count on"),
        (make_result(held_out=NOT_MEASURED), "open", "on the texts of the search"),
        (nothing_known(), "none", "nothing that it could judge"),
    ],
)
def test_headline_is_as_sure_as_the_evidence(result: SearchResult, tone: str, words: str) -> None:
    found = headline(result)
    assert found.tone == tone
    assert words in found.title


def test_code_to_copy_is_code() -> None:
    result = make_result(conditions={"model": 'a "b" $(c)', "dtype": "torch.float32", "device": "cuda:0 (H200)"})
    compile(in_python(result), "report", "exec")
    assert r'layerskip.load("a \"b\" $(c)", dtype="float32", device="cuda:0")' in in_python(result)
    assert in_shell(result).startswith("layerskip generate --model 'a \"b\" $(c)' --dtype float32 --device cuda:0")


@pytest.mark.parametrize(
    ("layers", "text"), [((), ""), ((4,), "4"), ((1, 2, 3, 7, 9, 10), "1–3, 7, 9–10")], ids=["none", "one", "runs"]
)
def test_layers_in_words(layers: tuple[int, ...], text: str) -> None:
    assert layer_ranges(layers) == text


def test_starts_are_told_from_what_the_sampler_proposed() -> None:
    trial = make_result().trials[0]
    origins = {
        "exit 4": True,
        "the whole model": True,
        "greedy removal 3": True,
        "elite": False,
        "TPESampler": False,
        "": False,
    }
    for origin, start in origins.items():
        assert is_start(replace(trial, origin=origin), "elite") == start


def test_lines_of_equal_speedup_are_those_of_the_prediction() -> None:
    costs = uniform_costs(8)
    found = predicted_speedups(np.array([0.2, 0.9]), np.array([0.0, 0.7]), costs.verify_ratio, OFFSETS)
    for row, rate in enumerate((0.0, 0.7)):
        for column, ratio in enumerate((0.2, 0.9)):
            survival = [rate**length for length in range(1, OFFSETS + 1)]
            rounds = {length: length * ratio + costs.verify_ratio(length + 1) for length in range(1, OFFSETS + 1)}
            assert found[row, column] == pytest.approx(best_speedup(survival, rounds.__getitem__).ratio)


def failing_once(when: int, error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but its call number `when` fails."""
    calls = itertools.count()

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == when:
            raise error
        return real(*arguments, **options)

    return call


def copy_report(source: Path, target: Path) -> None:
    for file, content in contents(source).items():
        (target / file).write_bytes(content)


@pytest.mark.parametrize(
    ("owner", "name", "when"),
    [
        (Path, "write_bytes", 0),
        (Path, "write_bytes", 11),
        (Path, "write_text", 0),  # the plan
        (Path, "write_text", 2),  # the page
        (os, "replace", 1),
        (os, "replace", 14),
        (shutil, "copy2", 5),
    ],
)
def test_full_disk_leaves_the_old_report_whole(
    owner: Any,
    name: str,
    when: int,
    report: Path,
    pictures: dict[str, Picture],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy_report(report, tmp_path)
    (tmp_path / "search.db").write_bytes(b"not ours")
    before = contents(tmp_path)
    monkeypatch.setattr(writing, "hang", lambda result: pictures)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(owner, name, failing_once(when, full, getattr(owner, name)))
    with pytest.raises(SearchError, match=r"cannot write the search's report.*No space left.*Expected.*unchanged"):
        write_report(make_result(speedup=1.5), tmp_path)
    assert contents(tmp_path) == before


def test_interrupt_leaves_the_old_report_whole(
    report: Path, pictures: dict[str, Picture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_report(report, tmp_path)
    monkeypatch.setattr(writing, "hang", lambda result: pictures)
    monkeypatch.setattr(os, "replace", failing_once(8, KeyboardInterrupt(), os.replace))
    with pytest.raises(KeyboardInterrupt):
        write_report(make_result(speedup=1.5), tmp_path)
    assert contents(tmp_path) == contents(report)


def test_new_report_takes_the_place_of_the_old_one(report: Path, tmp_path: Path) -> None:
    copy_report(report, tmp_path)
    (tmp_path / "search.db").write_bytes(b"not ours")
    write_report(nothing_known(), tmp_path)
    assert sorted(contents(tmp_path)) == sorted(
        ["draft-layers.png", "draft-layers.svg", "plan.json", "report.html", "report.json", "search.db"]
    )


def test_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SearchError, match="cannot write the search's report"):
        write_report(nothing_known(), tmp_path / "file")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SearchError, match=r"pip install \"layerskip\[search\]\""):
        write_report(make_result(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"plan": {}}', "\x00"])
def test_what_is_no_report_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(SearchError, match=r"report\.json"):
        read_report(tmp_path)


def test_missing_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match="No such file"):
        read_report(tmp_path)


def test_template_is_packaged() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    files = {path.name for path in (ROOT / "search" / "report").iterdir() if path.suffix in (".jinja", ".css")}
    assert set(data["layerskip.search.report"]) == files
