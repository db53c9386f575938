"""Where the trials of a search are kept, and what is done when that place fails for a while, or for good.

A database (SQLite file, PostgreSQL, MySQL) is written to by any number of workers: each shows that it lives by a
heartbeat, a trial whose heartbeat stopped is failed and queued again by whoever begins a trial next. A journal file
suits a network file system; it knows no heartbeats, so the trial of a killed worker stays "running" there.

Passwords stand in URLs: nothing here says a URL but by `redacted`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages._heartbeat import get_heartbeat_thread
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._file import get_lock_file
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError

from layerskip.errors import SearchError, did_you_mean
from layerskip.interrupts import held_interrupts
from layerskip.search.storage_faults import STORAGE_ERRORS, Notify, permanent, redacted, with_retries

__all__ = ["close_storage", "open_storage", "redacted", "run_trial", "with_retries"]

Result = TypeVar("Result")

SQLITE_SUFFIXES, JOURNAL_SUFFIXES = (".db", ".sqlite", ".sqlite3"), (".log", ".journal")
DRIVERS = {"postgresql": "psycopg2", "mysql": "mysqldb", "mariadb": "mysqldb", "sqlite": "pysqlite"}
_TIMEOUTS = {"pysqlite": {"timeout": 30}} | dict.fromkeys(
    ("psycopg2", "psycopg", "mysqldb", "pymysql"), {"connect_timeout": 10}
)
_INSTALL = {
    "psycopg2": 'pip install "layerskip[postgres]"',
    "mysqldb": "pip install mysqlclient, or pip install pymysql and write mysql+pymysql://",
}
_EXPECTED = (
    f"a file ending in {', '.join(SQLITE_SUFFIXES)} (SQLite) or {', '.join(JOURNAL_SUFFIXES)} (journal), or a URL "
    "like postgresql://user:password@host/database"
)

_SQLITE_START, _JOURNAL_START = b"SQLite format 3\0", b'{"op_code":'
_RACES = 20

# What a database is asked. Each is one transaction, so that one that failed can be asked again.
_OPERATIONS = (
    "create_new_study",
    "delete_study",
    "set_study_user_attr",
    "set_study_system_attr",
    "get_study_id_from_name",
    "get_study_name_from_id",
    "get_study_directions",
    "get_study_user_attrs",
    "get_study_system_attrs",
    "get_all_studies",
    "_create_new_trial",
    "_set_trial_param",
    "set_trial_user_attr",
    "set_trial_system_attr",
    "set_trial_intermediate_value",
    "get_trial",
    "get_trial_id_from_study_id_trial_number",
    "_get_trials",
    "_get_best_trial_id",
)


def open_storage(
    target: str | Path,
    *,
    notify: Notify | None = None,
    limit_s: float = 300.0,
    heartbeat_interval: int = 60,
    grace_period: int | None = None,
    max_retry: int = 3,
) -> BaseStorage:
    """Open the place where trials are kept, and create it if it is new.

    All that is asked of a database later waits in the same way while it does not answer.

    Args:
        target: a path (`.db`, `.sqlite`, `.sqlite3`: SQLite; `.log`, `.journal`: a journal) or a database's URL.
            `postgresql://` is read as `postgresql+psycopg2://`. An attribute of a study or trial may be of any length,
            but on MySQL of 64 KB.
        notify: is told whenever a database has to be waited for; None: a warning is logged.
        limit_s: for how long to wait for a database that does not answer, each time.
        heartbeat_interval: seconds between two signs of life of a running trial.
        grace_period: seconds without one after which a trial counts as dead; None: three intervals.
        max_retry: how often a trial whose worker died is queued again.

    Raises:
        SearchError: `target` names no storage, its driver is missing, it refuses us, it cannot be written, it is
            something else, or it did not answer for `limit_s`.
    """
    say = logging.getLogger(__name__).warning if notify is None else notify
    name = str(target)
    if "://" in name:
        url = _parsed(name)
    else:
        path = Path(name).expanduser()
        if path.suffix in JOURNAL_SUFFIXES:
            return _opened_journal(path.absolute())
        if path.suffix not in SQLITE_SUFFIXES:
            close = did_you_mean(path.suffix, SQLITE_SUFFIXES + JOURNAL_SUFFIXES) if path.suffix else ""
            raise SearchError(f"got the storage {redacted(name)!r}; expected {_EXPECTED}.{close}")
        url = URL.create("sqlite", database=str(path))
    if url.get_backend_name() == "sqlite":
        url = _checked_sqlite(url)
    rules: dict[str, Any] = {
        "heartbeat_interval": heartbeat_interval,
        "grace_period": 3 * heartbeat_interval if grace_period is None else grace_period,
    }
    where = redacted(name)
    return with_retries(
        lambda: _created(lambda: _Database(url, where, say, limit_s, max_retry, **rules)), say, limit_s, where=where
    )


def close_storage(storage: BaseStorage) -> None:
    """Give the connections of a storage back."""
    storage.remove_session()
    if isinstance(storage, RDBStorage):
        storage.engine.dispose()


def run_trial(study: optuna.Study, objective: Callable[[Trial], float | Sequence[float]]) -> FrozenTrial | None:
    """Run one trial as a worker among others.

    First, trials whose workers died are failed and queued again; then the next one is taken from the queue or from
    the sampler, with a heartbeat while `objective` runs. A trial that is interrupted by the keyboard is queued again.
    (`Study.optimize` does the same, but dies with an AssertionError if its trial was given up by the others.)

    Returns:
        The trial, complete or pruned; None if it was given up, because this process had been held up for longer than
        the grace period: another worker does it again.

    Raises:
        SearchError: the storage failed.
        Exception: what `objective` raised; the trial is failed.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fail_stale_trials is experimental", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Heartbeat of storage is supposed to be used with", UserWarning)
        optuna.storages.fail_stale_trials(study)
        trial = study.ask()
    values: float | Sequence[float] | None = None
    state = TrialState.COMPLETE
    try:
        with get_heartbeat_thread(trial._trial_id, study._storage):
            values = objective(trial)
    except optuna.TrialPruned:
        state = TrialState.PRUNED
    except UpdateFinishedTrialError:
        return None
    except BaseException as error:
        failed = study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        if isinstance(error, KeyboardInterrupt):
            _retrying(None)(study, failed)
        raise
    try:
        told = study.tell(trial, values, state, skip_if_finished=True)
    except UpdateFinishedTrialError:
        return None
    return None if told.state == TrialState.FAIL else told


class _Database(RDBStorage):
    """A relational database that is waited for, whichever operation it fails in."""

    def __init__(self, url: URL, where: str, notify: Notify, limit_s: float, max_retry: int, **rules: Any) -> None:
        self._where, self._notify, self._limit_s, self._quiet_until = where, notify, limit_s, 0.0
        options = {
            name: seconds for name, seconds in _TIMEOUTS.get(url.get_driver_name(), {}).items() if name not in url.query
        }
        # Never the values of a statement in a message: they can be hundreds of kilobytes.
        engine = {"pool_pre_ping": True, "hide_parameters": True, "connect_args": options}
        # Optuna fills in a template: braces of a password are none of it.
        address = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Argument ``heartbeat_interval`` is", ExperimentalWarning)
                super().__init__(address, engine, heartbeat_stale_trial_callback=_retrying(max_retry), **rules)
        except Exception as error:
            if hasattr(self, "engine"):
                self.engine.dispose()
            if isinstance(error, ImportError | NoSuchModuleError):
                driver = url.get_driver_name()
                how = _INSTALL.get(driver, f"pip install {driver}")
                raise SearchError(
                    f"the storage {where} needs the driver {driver}, which is not there: {how}."
                ) from error
            if isinstance(error, RuntimeError):  # another version's tables; Optuna says how to bring them up to date
                raise SearchError(f"the storage {where} cannot be used. {error}") from error
            raise
        if self.engine.name == "sqlite":
            self._begin_with_a_lock()

    def _begin_with_a_lock(self) -> None:
        """SQLite has no row locks: two workers could read that a trial waits, and both take it."""

        @event.listens_for(self.engine, "connect")
        def _(connection: Any, _record: Any) -> None:
            connection.isolation_level = None

        @event.listens_for(self.engine, "begin")
        def _(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        self.engine.dispose()  # connections made so far do not know it

    def patiently(self, action: Callable[[], Result]) -> Result:
        """See `with_retries`; after an outage no trial counts as dead until its heartbeat had time to come again."""

        def outage(message: str) -> None:
            self._quiet()
            self._notify(message)

        return with_retries(action, outage, self._limit_s, where=self._where)

    def _quiet(self) -> None:
        self._quiet_until = time.monotonic() + (self.grace_period or 0)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        def action() -> bool:
            try:
                return super(_Database, self).set_trial_state_values(trial_id, state, values)
            except UpdateFinishedTrialError:
                # Said already, if an earlier attempt was heard and only its answer was lost.
                found = self.get_trial(trial_id)
                if not retried or found.state != state or found.values != (values and list(values)):
                    raise
                return True
            except Exception:
                retried.append(True)
                raise

        retried: list[bool] = []
        return self.patiently(action)

    def record_heartbeat(self, trial_id: int) -> None:
        """Let a heartbeat be missed: the next one follows, and an exception would end them all."""
        try:
            super().record_heartbeat(trial_id)
        except STORAGE_ERRORS:
            self._quiet()

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Optuna's, and those whose worker died before the first heartbeat, which Optuna would leave running."""
        stale = super()._get_stale_trial_ids
        found = self.patiently(lambda: stale(study_id) + self._stillborn(study_id))
        return found if time.monotonic() >= self._quiet_until else []

    def _stillborn(self, study_id: int) -> list[int]:
        query = text(
            "SELECT trial_id FROM trials WHERE study_id = :study AND state = 'RUNNING' AND "
            "NOT EXISTS (SELECT 1 FROM trial_heartbeats WHERE trial_heartbeats.trial_id = trials.trial_id)"
        )
        with self.engine.connect() as connection:
            found = [int(row[0]) for row in connection.execute(query, {"study": study_id})]
        oldest = time.time() - 2 * (self.grace_period or 0)  # twice: clocks of machines differ
        starts = [(each, self.get_trial(each).datetime_start) for each in found]
        return [each for each, start in starts if start is not None and start.timestamp() < oldest]


def _patient(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _Database, *args: Any, **kwargs: Any) -> Any:
        return self.patiently(lambda: operation(self, *args, **kwargs))

    return method


for _operation in _OPERATIONS:
    setattr(_Database, _operation, _patient(getattr(RDBStorage, _operation)))


class _Journal(JournalFileBackend):
    """A journal whose last record may have been cut off, by a full disk or a lost machine."""

    def mend(self) -> None:
        """Drop the last record if it has no end: another one behind it would make the file unreadable."""
        with get_lock_file(self._lock), open(self._file_path, "rb+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) in (b"", b"\n"):
                return
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            with held_interrupts():  # else the lock may stay
                self.mend()
                super().append_logs(logs)
        except OSError as error:
            raise permanent(error, self._file_path) from error

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        try:
            with held_interrupts():  # else an open file may stay
                return iter(list(super().read_logs(log_number_from)))
        except (OSError, ValueError) as error:
            raise SearchError(
                f"the journal {self._file_path} cannot be read: {error}. Restore it, or name another file."
            ) from error


def _opened_journal(path: Path) -> BaseStorage:
    _check_file(path)
    try:
        with open(path, "ab+") as file:
            file.seek(0)
            start = file.read(len(_JOURNAL_START))
        if not _JOURNAL_START.startswith(start):
            raise SearchError(f"got the storage {path}, which is no journal of a search. Name another file.")
        # Not the lock by a symbolic link: Windows has none, and a relative path makes its grace period void.
        journal = _Journal(str(path), JournalFileOpenLock(str(path)))
        journal.mend()
        return JournalStorage(journal)
    except OSError as error:
        raise permanent(error, str(path)) from error


def _parsed(name: str) -> URL:
    scheme = name.partition("://")[0]
    dialect, _, driver = scheme.partition("+")
    if dialect not in DRIVERS:
        close = did_you_mean(dialect, DRIVERS)
        raise SearchError(
            f"got the storage {redacted(name)!r} of the unknown kind {scheme!r}; expected {_EXPECTED}.{close}"
        )
    url = None
    with contextlib.suppress(ArgumentError, ValueError):  # both quote parts of the URL
        url = make_url(name)
    if url is None or "@" in (url.host or ""):
        raise SearchError(
            f"got the storage {redacted(name)!r}, which is no valid URL; expected KIND://user:password@host:port/name. "
            "Write special characters of the password as %XX (@ is %40)."
        )
    return url.set(drivername=f"{dialect}+{driver or DRIVERS[dialect]}")


def _checked_sqlite(url: URL) -> URL:
    """With an absolute path to what is a SQLite file or not there yet."""
    if not url.database or ":memory:" in url.database:
        raise SearchError(f"got the storage {str(url)!r}, which keeps nothing; expected {_EXPECTED}.")
    if url.database.startswith("file:"):
        return url
    path = Path(url.database).expanduser().absolute()
    _check_file(path)
    if path.exists():
        with open(path, "rb") as file:
            start = file.read(len(_SQLITE_START))
        if start not in (b"", _SQLITE_START):
            raise SearchError(f"got the storage {path}, which is no SQLite database. Name another file.")
    return url.set(database=str(path))


def _check_file(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise SearchError(f"got the storage {path}, whose folder does not exist. Make it: mkdir -p {folder}")
    if path.exists() and not path.is_file():
        raise SearchError(f"got the storage {path}, which is no file; expected {_EXPECTED}.")
    # The folder too: locks lie beside the file.
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
        raise SearchError(f"got the storage {path}, which cannot be written. Change its rights, or name another place.")


def _created(create: Callable[[], Result]) -> Result:
    """Create tables while other processes do the same, each in the way of the others."""
    for _ in range(_RACES):
        try:
            return create()
        except DBAPIError as error:
            if not isinstance(error, IntegrityError) and "already exists" not in str(error.orig):
                raise
        time.sleep(random.uniform(0.0, 0.3))
    return create()


def _retrying(max_retry: int | None) -> RetryHeartbeatStaleTrialCallback:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RetryHeartbeatStaleTrialCallback is", ExperimentalWarning)
        return RetryHeartbeatStaleTrialCallback(max_retry)
