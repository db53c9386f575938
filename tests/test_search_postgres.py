"""Trials in a real PostgreSQL: workers that are killed, a server that restarts, and what it refuses."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import event

from layerskip.errors import SearchError
from layerskip.models.synthetic import synthetic_model
from layerskip.plan import DraftPlan
from layerskip.search import storage as storage_module
from layerskip.search.storage import close_storage, open_storage, run_trial
from layerskip.search.trials import FINISHED, space_of
from tests import postgres_server
from tests.postgres_server import PostgresServer
from tests.test_search_storage import create_at_once

postgres = postgres_server.postgres


@pytest.fixture
def opened() -> Iterator[Any]:
    storages: list[BaseStorage] = []

    def open_one(url: str, **settings: Any) -> BaseStorage:
        storages.append(open_storage(url, heartbeat_interval=1, grace_period=2, **settings))
        return storages[-1]

    yield open_one
    for each in storages:
        close_storage(each)


def until(what: str, condition: Callable[[], Any], limit_s: float = 120.0) -> Any:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:.0f} s in vain until {what}"
        time.sleep(0.05)
    return found


# A search by several workers


class Workers:
    """Processes of one command, killed for certain at the end; what they say goes into files."""

    def __init__(self, command: Callable[[int], Sequence[str | Path]], folder: Path) -> None:
        self.command, self.folder = command, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        environment, number = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}, len(self.processes)
        with open(self._log(number), "wb") as log:
            worker = subprocess.Popen(
                self.command(number), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self.processes.append(worker)
        return worker

    def said(self) -> str:
        return "\n".join(self._log(number).read_text() for number in range(len(self.processes)))

    def alive(self) -> bool:
        """Whether some still run; those that ended must have ended well, or killed by us."""
        ended = {worker.poll() for worker in self.processes}
        assert ended <= {None, 0, -signal.SIGKILL}, self.said()
        return None in ended

    def close(self) -> None:
        for worker in self.processes:
            worker.kill()
            worker.wait()

    def _log(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"


@dataclass
class Survived:
    """A study that went through it all.

    Attributes:
        prepared: what its workers share, when it was prepared.
        killed: number of the trial whose worker, the first one, was killed.
        finished_before: trials that were finished when the server was stopped.
        said: by all workers.
    """

    study: optuna.Study
    prepared: dict[str, Any]
    killed: int
    finished_before: list[FrozenTrial]
    said: str


def search_through_faults(
    command: Callable[[int], Sequence[str | Path]],
    server: PostgresServer,
    storage: BaseStorage,
    study_name: str,
    folder: Path,
) -> Survived:
    """Run a search by workers of `command`, each of which ends when the study has its number of trials.

    Three begin at once. The first one is killed in the middle of a trial, and another one started; when the killed
    trial was given up, the server restarts under the three of them.
    """
    workers = Workers(command, folder)
    study: list[optuna.Study] = []

    def prepared() -> bool:
        assert workers.alive(), workers.said()
        with contextlib.suppress(KeyError):
            study[:] = [optuna.load_study(study_name=study_name, storage=storage)]
        return bool(study) and study[0].user_attrs.get("prepared", False)

    def of(*states: TrialState) -> list[FrozenTrial]:
        return study[0].get_trials(deepcopy=False, states=states)

    def all_in_mid_trial() -> bool:
        """Whether each worker is at a trial; the victim is then held still, else it goes on."""
        assert victim.poll() is None, workers.said()
        if len(of(TrialState.RUNNING)) == 3:
            victim.send_signal(signal.SIGSTOP)
            if len(of(TrialState.RUNNING)) == 3:
                return True
            victim.send_signal(signal.SIGCONT)
        return False

    try:
        victim, *_ = (workers.start() for _ in range(3))
        until("the study is prepared", prepared)
        shared = study[0].user_attrs
        until("all workers are at a trial", all_in_mid_trial)
        victim.kill()
        workers.start()
        (killed,) = until("its trial is given up", lambda: of(TrialState.FAIL))
        finished = study[0].get_trials(states=FINISHED)
        server.stop()
        server.start()
        until("all have ended", lambda: not workers.alive())
        return Survived(study[0], shared, killed.number, finished, workers.said())
    finally:
        workers.close()


def test_a_search_survives_a_killed_worker_and_a_server_that_restarts(
    postgres: PostgresServer, opened: Any, tmp_path: Path
) -> None:
    trials, secret = 200, "p@ss {word}/%"
    database = postgres.new_database().partition("?")[0].rpartition("/")[2]
    postgres.require_password("worker", secret)
    postgres.execute(f"ALTER DATABASE {database} OWNER TO worker")
    url, folder = postgres.url(database, "worker", secret), tmp_path / "written"
    folder.mkdir()
    # Of four blocks the last two add nothing.
    synthetic_model("tiny", torch.float32, agreement=1.0, from_block=2).save_pretrained(tmp_path / "model")
    counts = {
        "budget": f"{trials} trials",
        "heartbeat": 2,
        "positions": 6000,  # so that those who go on are still at it when the killed one is missed
        "held-out-positions": 256,
        "new-tokens": 64,
        "draft-length": 3,
        "context": 16,
        "protect-first": 0,
        "protect-last": 0,
    }
    options = [word for name, value in counts.items() for word in ("--" + name, str(value))]
    command = [sys.executable, "-m", "layerskip.cli", "search", tmp_path / "model", "--storage", url, "--study", "s"]
    command += [*options, "--no-prune", "--no-measure"]
    survived = search_through_faults(
        lambda number: [*command, "--out", folder / f"{number}.json"], postgres, opened(url), "s", tmp_path
    )

    found = {trial.number: trial for trial in survived.study.trials}
    complete = [trial for trial in found.values() if trial.state == TrialState.COMPLETE]
    assert sum(trial.state in FINISHED for trial in found.values()) >= trials
    assert TrialState.RUNNING not in {trial.state for trial in found.values()}
    assert 1 <= len(survived.finished_before) < trials
    for trial in survived.finished_before:
        assert found[trial.number] == trial, "a finished trial was lost or changed"
    values: dict[Any, set[float | None]] = {}
    for trial in complete:
        values.setdefault(space_of(survived.study).candidate(trial.params), set()).add(trial.value)
    assert {len(each) for each in values.values()} == {1}, "workers judge by other texts or costs"
    assert "does not answer" in survived.said and "answers again" in survived.said

    for name in ("made_for", "calibration", "costs", "retention"):
        assert survived.study.user_attrs[name] == survived.prepared[name], "it was prepared twice"
    assert survived.study.user_attrs["preparing"] is None

    killed = found[survived.killed]
    assert killed.state == TrialState.FAIL
    retries = [trial for trial in found.values() if trial.system_attrs.get("failed_trial") == killed.number]
    (again,) = [trial for trial in retries if trial.state == TrialState.COMPLETE]
    assert again.params.items() >= killed.params.items()  # none, if it was killed before it had any

    plans = [DraftPlan.load(folder / f"{number}.json") for number in (1, 2, 3)]
    for plan in plans:
        assert plan.path(4) == plans[0].path(4) and plan.num_draft_tokens == plans[0].num_draft_tokens
        assert max(step.block for step in plan.path(4)) < 2
        assert plan.provenance["held_out"]["acceptance_rate"]["value"] == 1.0
    assert not (folder / "0.json").exists()
    written = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    assert len(written) > 3
    for part in ("word}", "p%40ss", "p@ss"):
        assert part not in survived.said and not any(part.encode() in each for each in written)


# One process


def test_a_running_trial_survives_a_restart_of_the_server(postgres: PostgresServer, opened: Any) -> None:
    said: list[str] = []
    study = optuna.create_study(storage=opened(postgres.new_database(), notify=said.append))

    def objective(trial: Trial) -> float:
        value = trial.suggest_float("x", 0.0, 1.0)
        postgres.stop()
        later = threading.Timer(1.5, postgres.start)  # heartbeats are missed meanwhile
        later.start()
        trial.report(value, 1)
        later.join()
        trial.set_user_attr("a", 1)
        return value

    told = run_trial(study, objective)
    assert told is not None and (told.state, told.user_attrs) == (TrialState.COMPLETE, {"a": 1})
    assert told.intermediate_values == {1: told.value}
    assert "does not answer" in said[0] and said[-1].endswith("answers again")


def test_connections_may_be_cut_anywhere(
    postgres: PostgresServer, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a transaction: one statement in eight finds its connection gone."""
    said: list[str] = []
    storage = opened(postgres.new_database(), notify=said.append)
    patient = storage_module.with_retries
    monkeypatch.setattr(storage_module, "with_retries", lambda *args, **kw: patient(*args, first_wait_s=0.0, **kw))
    chance = random.Random(0)

    @event.listens_for(storage.engine, "before_cursor_execute")
    def cut(*_: Any) -> None:
        if chance.random() < 1 / 8:
            postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    def objective(trial: Trial) -> float:
        value = trial.suggest_float("x", 0.0, 1.0)
        trial.report(value, 1)
        trial.set_user_attr("a", 1)
        return value

    study = optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
    study.enqueue_trial({"x": 0.0})
    for _ in range(3):
        assert run_trial(study, objective) is not None
    assert len(said) > 5
    event.remove(storage.engine, "before_cursor_execute", cut)
    assert study.best_params == {"x": 0.0}
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    assert [(trial.user_attrs, trial.intermediate_values) for trial in complete] == [
        ({"a": 1}, {1: trial.value}) for trial in complete
    ]
    assert len(complete) == 3


def test_workers_may_create_the_same_study_at_once(postgres: PostgresServer, opened: Any, tmp_path: Path) -> None:
    url = postgres.new_database()
    create_at_once(url, tmp_path)
    study = optuna.load_study(study_name="s", storage=opened(url))
    assert sorted(study.user_attrs) == [f"worker {number}" for number in range(3)]


def test_attributes_may_be_large(postgres: PostgresServer, opened: Any) -> None:
    url, token_ids = postgres.new_database(), list(range(100_000, 250_000))  # a megabyte
    study = optuna.create_study(study_name="s", storage=opened(url))
    study.set_user_attr("texts", token_ids)
    assert optuna.load_study(study_name="s", storage=opened(url)).user_attrs == {"texts": token_ids}


def test_the_server_refuses_and_is_not_asked_again(postgres: PostgresServer, opened: Any) -> None:
    postgres.require_password("searcher", "p@ss {word}/%")
    database = postgres.new_database().partition("?")[0].rpartition("/")[2]
    postgres.execute(f"GRANT ALL ON DATABASE {database} TO searcher")
    for url, words in [
        (postgres.url(database, "searcher", "secret"), "user name and the password"),
        (postgres.url(database, "nobody"), "user name and the password"),
        (postgres.url("missing"), "createdb"),
        (postgres.url(database, "searcher", "p@ss {word}/%"), "Grant the user the right"),
    ]:
        with pytest.raises(SearchError, match=words) as caught:
            opened(url, notify=pytest.fail)
        assert not any(secret in str(caught.value) for secret in ("secret", "word}", "p%40ss"))
    postgres.execute(f"ALTER DATABASE {database} OWNER TO searcher")
    optuna.create_study(study_name="s", storage=opened(postgres.url(database, "searcher", "p@ss {word}/%")))


def test_a_server_that_is_not_there_is_waited_for(postgres: PostgresServer, opened: Any) -> None:
    url, said = postgres.new_database(), list[str]()
    postgres.stop()
    try:
        with pytest.raises(SearchError, match=r"did not answer \d times in .* s; last: .*\. Start it, or check"):
            opened(url, notify=said.append, limit_s=1.0)
        assert len(said) >= 1
    finally:
        postgres.start()
    optuna.create_study(study_name="s", storage=opened(url))
