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
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import event

from layerskip.errors import SearchError
from layerskip.search import storage as storage_module
from layerskip.search.storage import close_storage, open_storage, run_trial
from tests import postgres_server
from tests.postgres_server import PostgresServer
from tests.test_search_storage import ALONE, create_at_once

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

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command, self.folder = command, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(self._log(len(self.processes)), "wb") as log:
            worker = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
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
        killed: number of the trial whose worker was killed.
        finished_before: trials that were finished when the server was stopped.
        said: by all workers.
    """

    study: optuna.Study
    killed: int
    finished_before: list[FrozenTrial]
    said: str


def search_through_faults(
    command: Sequence[str], server: PostgresServer, storage: BaseStorage, study_name: str, folder: Path
) -> Survived:
    """Run a search by workers of `command`, each of which ends when the study has its number of trials.

    The first worker is killed in the middle of a trial; two others come and find that out; a third one comes back; then
    the server restarts under the three of them.
    """
    workers = Workers(command, folder)
    study: list[optuna.Study] = []

    def found() -> bool:
        assert workers.alive(), workers.said()
        with contextlib.suppress(KeyError):
            study.append(optuna.load_study(study_name=study_name, storage=storage))
        return bool(study)

    def of(*states: TrialState) -> list[FrozenTrial]:
        return study[0].get_trials(states=states)

    def in_mid_trial() -> list[FrozenTrial]:
        """The trial that the victim is at, the victim held still; if it is between two trials it goes on."""
        assert victim.poll() is None, workers.said()
        if of(TrialState.COMPLETE) and of(TrialState.RUNNING):
            victim.send_signal(signal.SIGSTOP)
            if running := of(TrialState.RUNNING):
                return running
            victim.send_signal(signal.SIGCONT)
        return []

    try:
        victim = workers.start()
        until("the study is there", found)
        (trial,) = until("a trial runs", in_mid_trial)
        victim.kill()
        workers.start()
        workers.start()
        until("its trial is failed", lambda: trial.number in [each.number for each in of(TrialState.FAIL)])
        workers.start()
        until("the search goes on", lambda: len(of(TrialState.COMPLETE)) >= 5)
        finished = of(TrialState.COMPLETE)
        server.stop()
        server.start()
        until("all have ended", lambda: not workers.alive())
        return Survived(study[0], trial.number, finished, workers.said())
    finally:
        workers.close()


WORKER = f"""{ALONE}
import sys, time, optuna
from layerskip.search.storage import close_storage, open_storage, run_trial
url, name, trials = sys.argv[1], sys.argv[2], int(sys.argv[3])
storage = open_storage(
    url, notify=lambda text: print(text, file=sys.stderr, flush=True), heartbeat_interval=1, grace_period=2
)
study = optuna.create_study(study_name=name, storage=storage, load_if_exists=True)

def objective(trial):
    x = trial.suggest_float("x", -1.0, 1.0)
    time.sleep(0.25)
    return (x - 0.5) ** 2

while len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))) < trials:
    run_trial(study, objective)
close_storage(storage)
"""


def test_a_search_survives_a_killed_worker_and_a_server_that_restarts(
    postgres: PostgresServer, opened: Any, tmp_path: Path
) -> None:
    url, trials = postgres.new_database(), 25
    command = [sys.executable, "-W", "error", "-c", WORKER, url, "s", str(trials)]
    survived = search_through_faults(command, postgres, opened(url), "s", tmp_path)

    found = {trial.number: trial for trial in survived.study.trials}
    complete = [trial for trial in found.values() if trial.state == TrialState.COMPLETE]
    assert len(complete) >= trials
    assert TrialState.RUNNING not in {trial.state for trial in found.values()}
    for trial in survived.finished_before:
        assert found[trial.number] == trial, "a finished trial was lost or changed"
    assert {trial.value for trial in complete} == {(trial.params["x"] - 0.5) ** 2 for trial in complete}
    assert survived.study.best_value == min((trial.params["x"] - 0.5) ** 2 for trial in complete)
    assert "does not answer" in survived.said and "answers again" in survived.said

    killed = found[survived.killed]
    assert killed.state == TrialState.FAIL
    retries = [trial for trial in found.values() if trial.system_attrs.get("failed_trial") == killed.number]
    (again,) = [trial for trial in retries if trial.state == TrialState.COMPLETE]
    assert again.params.items() >= killed.params.items()  # none, if it was killed before it had any


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
