"""Where trials are kept: files of both kinds, what is refused and how, and what is waited for."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import Trial, TrialState
from sqlalchemy import event
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, PendingRollbackError

from layerskip.errors import SearchError
from layerskip.search import storage as module
from layerskip.search.storage import close_storage, open_storage, redacted, run_trial, with_retries

FILES = ["trials.db", "trials.sqlite3", "trials.log", "trials.journal"]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Opens storages, and closes them."""
    storages: list[BaseStorage] = []

    def open_one(name: str | Path, **settings: Any) -> BaseStorage:
        storages.append(open_storage(name if "://" in str(name) else tmp_path / name, **settings))
        return storages[-1]

    yield open_one
    for each in storages:
        close_storage(each)


def objective(trial: Trial) -> float:
    return (trial.suggest_float("x", -1.0, 1.0) - 0.5) ** 2


def rows(study: optuna.Study) -> list[tuple[int, TrialState, dict[str, Any]]]:
    return [(trial.number, trial.state, trial.params) for trial in study.trials]


@pytest.mark.parametrize("name", FILES)
def test_a_study_goes_on_where_it_was(opened: Any, name: str) -> None:
    study = optuna.create_study(study_name="s", storage=opened(name))
    for _ in range(3):
        assert run_trial(study, objective) is not None
    again = optuna.create_study(study_name="s", storage=opened(name), load_if_exists=True)
    assert rows(again) == rows(study)
    run_trial(again, objective)
    assert [trial.number for trial in study.trials] == [0, 1, 2, 3]
    assert study.best_value == min(trial.value or 0.0 for trial in again.trials)


def test_a_sqlite_url_is_the_file_it_names(opened: Any, tmp_path: Path) -> None:
    strange = tmp_path / "a {b} 100%"
    strange.mkdir()
    optuna.create_study(study_name="s", storage=opened(f"sqlite:///{strange}/trials.db"))
    assert optuna.get_all_study_names(opened(strange / "trials.db")) == ["s"]


def test_a_relative_path_does_not_follow_the_working_folder(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ["trials.db", "trials.log"]:
        storage = open_storage(name)
        (tmp_path / "other").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "other")
        optuna.create_study(study_name="s", storage=storage)
        close_storage(storage)
        monkeypatch.chdir(tmp_path)
        assert optuna.get_all_study_names(opened(name)) == ["s"]


@pytest.mark.parametrize("name", ["trials.db", "trials.log"])
def test_attributes_may_be_large(opened: Any, name: str) -> None:
    token_ids = list(range(100_000, 250_000))  # a megabyte
    study = optuna.create_study(study_name="s", storage=opened(name))
    study.set_user_attr("texts", token_ids)
    run_trial(study, lambda trial: trial.set_user_attr("texts", token_ids) or 1.0)  # type: ignore[func-returns-value]
    again = optuna.load_study(study_name="s", storage=opened(name))
    assert again.user_attrs["texts"] == token_ids
    assert again.trials[0].user_attrs["texts"] == token_ids


# What is refused


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("trials", ["trials", ".db", ".journal", "postgresql://"]),
        ("trials.sqlte", ["trials.sqlte", "Did you mean '.sqlite'?"]),
        ("none/trials.db", ["whose folder does not exist", "mkdir -p"]),
        ("none/trials.log", ["whose folder does not exist", "mkdir -p"]),
        ("folder.db", ["is no file"]),
        ("folder.log", ["is no file"]),
        ("text.db", ["is no SQLite database", "Name another file"]),
        ("text.log", ["is no journal", "Name another file"]),
        ("cut.db", ["cut.db", "no (intact) SQLite database"]),
        ("postgres://u:secret@h/d", ["'postgres'", "postgres://u:***@h/d", "Did you mean 'postgresql'?"]),
        ("redis://:secret@h", ["'redis'", "redis://:***@h"]),
        ("postgresql://u:se@secret:x@h/d", ["no valid URL", "%40"]),
        ("postgresql://u:secret@h:port/d", ["no valid URL"]),
        ("postgresql+nothing://u:secret@h/d", ["nothing", "not there"]),
        ("mysql://u:secret@h/d", ["mysqldb", "pip install mysqlclient"]),
        ("sqlite://", ["keeps nothing"]),
        ("sqlite:///:memory:", ["keeps nothing"]),
    ],
)
def test_what_is_no_storage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "MySQLdb", None)
    for name in ["folder.db", "folder.log"]:
        (tmp_path / name).mkdir()
    for name in ["text.db", "text.log"]:
        (tmp_path / name).write_text("epoch 1, loss 2.0 and no newline")
    (tmp_path / "cut.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 2000)
    with pytest.raises(SearchError) as caught:
        open_storage(target, notify=pytest.fail)
    for word in words:
        assert word in str(caught.value)
    assert "secret" not in str(caught.value)
    assert (tmp_path / "text.log").read_text() == "epoch 1, loss 2.0 and no newline"


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(SearchError, match=r'psycopg2, which is not there: pip install "layerskip\[postgres\]"'):
        open_storage("postgresql://u:secret@localhost/d", notify=pytest.fail)


def test_a_read_only_database_is_refused(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "trials.db").touch()
    with pytest.raises(SearchError, match="readonly database.* writable"):
        open_storage(f"sqlite:///file:{tmp_path}/trials.db?mode=ro&uri=true", notify=pytest.fail)


@pytest.mark.parametrize("name", ["trials.db", "trials.log"])
def test_a_place_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SearchError, match="cannot be written"):
        open_storage(tmp_path / name)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("postgresql://me:pw@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:p@w:/?x@host/db", "postgresql://me:***@host/db"),
        ("postgresql://host/db?user=me&password=pw&port=1", "postgresql://host/db?user=me&password=***&port=1"),
        ("mysql+pymysql://me@host/db?PASSWD=pw", "mysql+pymysql://me@host/db?PASSWD=***"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("me:pw@host/db", "me:***@host/db"),
        (r"C:\a@b.db", r"C:\a@b.db"),
        ("folder/a@b:c@d.db", "folder/a@b:c@d.db"),
    ],
)
def test_passwords_are_redacted(target: str, said: str) -> None:
    assert redacted(target) == said


# What is waited for


def refused(text: str = "connection refused", **attributes: Any) -> OperationalError:
    """As a driver's error that gives these codes."""
    original = type("DriverError", (Exception,), attributes)(text)
    return OperationalError("SELECT 1", {}, original)


def wrapped(cause: Exception) -> StorageInternalError:
    error = StorageInternalError("An exception is raised during the commit.")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        refused(),
        refused(pgcode="57P01"),
        refused(pgcode="53300"),
        refused(pgcode="40P01"),
        wrapped(refused("server closed the connection unexpectedly")),
        wrapped(DataError("", {}, Exception("gone"), connection_invalidated=True)),
        wrapped(PendingRollbackError("Can't reconnect until invalid transaction is rolled back.")),
        ConnectionResetError("reset"),
    ],
)
def test_waits_grow_until_the_storage_answers(error: Exception) -> None:
    answers, said = iter([error, error, error]), list[str]()

    def action() -> int:
        for each in answers:
            raise each
        return 7

    began = time.monotonic()
    assert with_retries(action, said.append, where="here", first_wait_s=0.02, longest_wait_s=0.04) == 7
    assert time.monotonic() - began >= 0.75 * (0.02 + 0.04 + 0.04)
    assert [line.count("storage here does not answer") for line in said] == [1, 1, 1, 0]
    assert said[-1] == "the storage here answers again"


def test_waiting_has_an_end() -> None:
    said: list[str] = []

    def action() -> None:
        raise refused("connection refused\nIs it running?")

    with pytest.raises(SearchError, match=r"storage here did not answer 3 times in .* connection refused\. Start it"):
        with_retries(action, said.append, 0.2, where="here", first_wait_s=0.05)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refused('FATAL:  password authentication failed for user "me"'), "user name and the password"),
        (refused("no", pgcode="28P01"), "user name and the password"),
        (refused('FATAL:  database "d" does not exist'), "createdb"),
        (refused("could not extend file", pgcode="53100"), "Free space"),
        (wrapped(DataError("", {}, Exception(1406, "Data too long"))), "64 KB"),
        (OSError(errno.ENOSPC, "No space left on device"), "Free space"),
        (OSError(errno.EROFS, "Read-only file system"), "writable"),
    ],
)
def test_what_waiting_does_not_mend_is_said_at_once(error: Exception, words: str) -> None:
    def action() -> None:
        raise error

    with pytest.raises(SearchError, match=f"storage here failed: .*{words}"):
        with_retries(action, pytest.fail, where="here")


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), optuna.exceptions.DuplicatedStudyError("x")])
def test_errors_that_are_not_of_the_storage_stay_what_they_are(error: Exception) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error)):
        with_retries(action, pytest.fail)


def test_a_locked_database_is_waited_for(opened: Any, tmp_path: Path) -> None:
    said: list[str] = []
    storage = opened(f"sqlite:///{tmp_path}/trials.db?timeout=0.1", notify=said.append)
    study = optuna.create_study(study_name="s", storage=storage)
    other = sqlite3.connect(tmp_path / "trials.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(0.5, lambda: (other.execute("COMMIT"), other.close()))
    release.start()
    study.set_user_attr("a", 1)
    release.join()
    assert study.user_attrs == {"a": 1}
    assert "database is locked" in said[0]
    assert said[-1].endswith("answers again")


def test_an_operation_whose_answer_was_lost_is_not_done_twice(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study, said, inner = optuna.create_study(storage=opened("trials.db", notify=(said := []).append)), said, None
    inner = RDBStorage.set_trial_state_values

    def deaf(self: Any, trial_id: int, state: TrialState, values: Any = None) -> bool:
        done = inner(self, trial_id, state, values)
        if state == TrialState.COMPLETE and not said:
            raise wrapped(refused("server closed the connection unexpectedly"))
        return done

    monkeypatch.setattr(RDBStorage, "set_trial_state_values", deaf)
    assert run_trial(study, objective) is not None
    assert len(said) == 2
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]


def test_everything_that_a_study_asks_is_waited_for(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transaction in three fails."""
    storage, said = opened("trials.db", notify=(said := []).append), said
    monkeypatch.setattr(module, "with_retries", lambda *args, **kwargs: with_retries(*args, first_wait_s=0.0, **kwargs))
    chance = random.Random(0)

    @event.listens_for(storage.engine, "begin")
    def _(connection: Any) -> None:
        if chance.random() < 1 / 3:
            raise refused()

    study = optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
    study.set_user_attr("a", 1)
    study.enqueue_trial({"x": 0.5})

    def reports(trial: Trial) -> float:
        value = objective(trial)
        trial.report(value, 1)
        trial.set_user_attr("b", 2)
        return value

    for _ in range(5):
        run_trial(study, reports)
    assert study.best_trial.params == {"x": 0.5}
    assert study.user_attrs == {"a": 1}
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 5
    assert len(said) > 20


# Full disks and records that were cut off


def test_a_full_disk_ends_the_search_and_loses_no_trial(opened: Any) -> None:
    storage = opened("trials.db", notify=pytest.fail)
    study = optuna.create_study(study_name="s", storage=storage)
    run_trial(study, objective)
    (pages,) = storage.engine.raw_connection().execute("PRAGMA page_count").fetchone()
    event.listen(storage.engine, "connect", lambda raw, _: raw.execute(f"PRAGMA max_page_count = {pages}"))
    storage.engine.dispose()
    with pytest.raises(SearchError, match="database or disk is full. Free space there"):
        study.set_user_attr("texts", "x" * 100_000)
    again = optuna.load_study(study_name="s", storage=opened("trials.db"))
    run_trial(again, objective)
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 2


def test_a_journal_on_a_full_disk_can_be_taken_up_again(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study(study_name="s", storage=opened("trials.log"))
    run_trial(study, objective)

    def full(_: int) -> None:
        with open(tmp_path / "trials.log", "rb+") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 5)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(SearchError, match="No space left on device.*Free space there"):
        patch.setattr(os, "fsync", full)
        study.set_user_attr("a", 1)
    run_trial(study, objective)  # this process goes on, once there is space
    again = optuna.load_study(study_name="s", storage=opened("trials.log"))
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 2
    assert again.user_attrs == {}


def test_the_last_record_of_a_journal_may_be_cut_off(opened: Any, tmp_path: Path) -> None:
    study = optuna.create_study(study_name="s", storage=opened("trials.log"))
    run_trial(study, objective)
    for cut in [b'{"op_code":8,"worker_id":"x","value":"' + b"1" * 100_000, b"{"]:
        with open(tmp_path / "trials.log", "ab") as file:
            file.write(cut)
        again = optuna.load_study(study_name="s", storage=opened("trials.log"))
        assert run_trial(again, objective) is not None
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3


def test_a_damaged_journal_is_named(opened: Any, tmp_path: Path) -> None:
    optuna.create_study(study_name="s", storage=opened("trials.log"))
    with open(tmp_path / "trials.log", "ab") as file:
        file.write(b"%%%\n{}\n")
    with pytest.raises(SearchError, match=r"journal .*trials\.log cannot be read"):
        opened("trials.log")


# Workers


# Imports the module under test without torch, for which several processes on a busy machine need a minute.
ALONE = f"""
import sys, types
for name in ["layerskip", "layerskip.search"]:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(Path(__file__).parents[1])!r} + "/" + name.split(".")[-1]]
"""

CREATE = f"""{ALONE}
import sys, time, pathlib, optuna
from layerskip.search.storage import close_storage, open_storage
target, gate = sys.argv[1], pathlib.Path(sys.argv[2])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
storage = open_storage(target)
study = optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
study.set_user_attr(sys.argv[3], 1)
close_storage(storage)
"""


def create_at_once(target: str, tmp_path: Path, count: int = 3) -> None:
    """Let processes create the tables and the study of a storage in the same moment."""
    gate = tmp_path / "gate"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", CREATE, target, str(gate)]
    workers = [
        subprocess.Popen(
            [*command, f"worker {number}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for number in range(count)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        gate.touch()
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


@pytest.mark.parametrize("name", ["trials.db", "trials.log"])
def test_workers_may_create_the_same_study_at_once(opened: Any, tmp_path: Path, name: str) -> None:
    create_at_once(str(tmp_path / name), tmp_path)
    study = optuna.load_study(study_name="s", storage=opened(name))
    assert sorted(study.user_attrs) == [f"worker {number}" for number in range(3)]


def test_tables_that_appear_meanwhile_are_no_error() -> None:
    errors = iter([IntegrityError("", {}, Exception("unique")), refused("table studies already exists")])

    def create() -> int:
        for error in errors:
            raise error
        return 3

    assert module._created(create) == 3


@pytest.mark.parametrize("name", ["trials.db", "trials.log"])
def test_a_trial_is_pruned_or_fails_as_in_optimize(opened: Any, name: str) -> None:
    study = optuna.create_study(storage=opened(name))

    def pruned(trial: Trial) -> float:
        trial.report(3.0, 1)
        raise optuna.TrialPruned

    def fails(trial: Trial) -> float:
        raise LookupError("of the objective")

    told = run_trial(study, pruned)
    assert told is not None and (told.state, told.value) == (TrialState.PRUNED, 3.0)
    with pytest.raises(LookupError, match="of the objective"):
        run_trial(study, fails)
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED, TrialState.FAIL]


@pytest.mark.parametrize("name", ["trials.db", "trials.log"])
def test_an_interrupted_trial_is_queued_again(opened: Any, name: str) -> None:
    study = optuna.create_study(storage=opened(name))

    def interrupted(trial: Trial) -> float:
        objective(trial)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(study, interrupted)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.WAITING]
    told = run_trial(study, objective)
    assert told is not None and (told.number, told.params) == (1, study.trials[0].params)


@pytest.mark.parametrize("late", [False, True])
def test_a_trial_that_others_gave_up_is_not_told(opened: Any, late: bool) -> None:
    study = optuna.create_study(storage=opened("trials.db"))

    def given_up(trial: Trial) -> float:
        value = objective(trial) if late else 0.0
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        return value if late else objective(trial)

    assert run_trial(study, given_up) is None
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]


def test_a_worker_that_died_before_its_first_heartbeat_is_noticed(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened("trials.db", heartbeat_interval=1, grace_period=2)
    study = optuna.create_study(storage=storage)
    study.enqueue_trial({"x": 0.5})
    with pytest.warns(UserWarning, match="Heartbeat"):
        study.ask()
    run_trial(study, objective)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING, TrialState.COMPLETE]
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 10)
    told = run_trial(study, objective)
    assert told is not None and told.params == {"x": 0.5}
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


def test_heartbeats_may_be_missed(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened("trials.db", heartbeat_interval=1, grace_period=1)
    study, beats, inner = optuna.create_study(storage=storage), list[bool](), RDBStorage.record_heartbeat

    def beat(self: Any, trial_id: int) -> None:
        beats.append(len(beats) % 2 == 1)
        if not beats[-1]:
            raise refused()
        inner(self, trial_id)

    def slow(trial: Trial) -> float:
        deadline = time.monotonic() + 60
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert storage._get_stale_trial_ids(study._study_id) == []
        return 1.0

    monkeypatch.setattr(RDBStorage, "record_heartbeat", beat)
    told = run_trial(study, slow)
    assert told is not None and told.state == TrialState.COMPLETE
    assert beats[:3] == [False, True, False]
