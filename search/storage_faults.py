"""What can go wrong with the place where trials are kept: what waiting mends, what it does not, and what to do then.

Told apart by the codes of SQLite, PostgreSQL and MySQL, and where a driver gives none, by its words.
"""

from __future__ import annotations

import random
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from layerskip.errors import SearchError
from layerskip.interrupts import held_interrupts

__all__ = ["STORAGE_ERRORS", "Notify", "permanent", "redacted", "with_retries"]

Notify = Callable[[str], None]
Result = TypeVar("Result")

STORAGE_ERRORS = (DBAPIError, StorageInternalError, PoolTimeoutError, OSError)

# Faults that no waiting mends: error codes (as `_code` writes them, or how they begin), what the driver's text says
# where it has no code (PostgreSQL's while connecting), and what to do.
_FAULTS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("28", "mysql:1044", "mysql:1045", "mysql:1698"),
        r"authentication failed|no password supplied|no pg_hba\.conf entry|role \".*\" does not exist|Access denied",
        "Check the user name and the password in the URL; write special characters there as %XX (@ is %40).",
    ),
    (
        ("3D", "mysql:1049"),
        r"database \".*\" does not exist|Unknown database",
        "Create that database (PostgreSQL: createdb NAME), or correct the name at the end of the URL.",
    ),
    (
        ("53100", "mysql:1021", "mysql:1114", "sqlite:13"),
        r"No space left on device",
        "Free space there, then start the same search again: it goes on behind the trials that are finished.",
    ),
    (
        ("sqlite:8", "sqlite:14", "25006"),
        r"Read-only file system|Permission denied",
        "Make it and its folder writable, or name another place.",
    ),
    (("sqlite:26", "sqlite:11"), r"$^", "It is no (intact) SQLite database: name another file, or move this one away."),
    (("42501",), r"permission denied", "Grant the user the right to create tables in that database, or use another."),
    (
        ("22001", "mysql:1406"),
        r"$^",
        "A value is too long for its column: MySQL's hold 64 KB; use PostgreSQL or SQLite.",
    ),
    (("sqlite:", "42", "54"), r"$^", "Look at the storage with its own tools, or name another."),
)


def redacted(target: str | Path) -> str:
    """Return `target` without the passwords that a URL holds, for messages."""
    name = str(target)
    scheme, mark, rest = name.partition("://") if "://" in name else ("", "", name)
    shortest = 0 if mark else 2  # a drive letter is no user name
    rest = re.sub(rf"^([^:/\\@?]{{{shortest},}}):.*@", r"\1:***@", rest, flags=re.DOTALL)
    rest = re.sub(r"([?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=)[^&]*", r"\1***", rest, flags=re.IGNORECASE)
    return scheme + mark + rest


def with_retries(
    action: Callable[[], Result],
    notify: Notify,
    limit_s: float = 300.0,
    *,
    where: str = "",
    first_wait_s: float = 0.5,
    longest_wait_s: float = 15.0,
) -> Result:
    """Do `action`; while its storage does not answer, wait and do it again.

    Args:
        action: leaves nothing half done when it fails.
        notify: is told before each wait, and when the storage answers again.
        where: the storage, redacted.
        first_wait_s, longest_wait_s: waits double from the one to the other.

    Raises:
        SearchError: the storage did not answer for `limit_s`, or it failed in a way that waiting does not mend.
    """
    began, wait_s, tries, storage = time.monotonic(), first_wait_s, 0, f"the storage {where}".rstrip()
    while True:
        tries += 1
        try:
            with held_interrupts():
                result = action()
        except STORAGE_ERRORS as error:
            if not _is_transient(error):
                raise permanent(error, where) from error
            reason = _reason(error)
            spent_s = time.monotonic() - began
            if spent_s + wait_s > limit_s:
                raise SearchError(
                    f"{storage} did not answer {tries} times in {spent_s:.0f} s; last: {reason}. Start it, or check "
                    "host, port and network; then start the same search again: finished trials are kept."
                ) from error
            notify(f"{storage} does not answer ({reason}); trying again in {wait_s:.1f} s, for {limit_s:.0f} s in all")
            time.sleep(wait_s * random.uniform(0.75, 1.0))
            wait_s = min(2 * wait_s, longest_wait_s)
        else:
            if tries > 1:
                notify(f"{storage} answers again")
            return result


def permanent(error: BaseException, where: str) -> SearchError:
    """What to raise for an error of the storage `where` (redacted) that waiting does not mend."""
    return SearchError(f"the storage {where} failed: {_reason(error)}. {_advice(error)}".rstrip())


def _driver_error(error: BaseException) -> BaseException:
    """What the driver raised, below SQLAlchemy's and Optuna's wrapping."""
    error = _unwrapped(error)
    return (error.orig or error) if isinstance(error, DBAPIError) else error


def _unwrapped(error: BaseException) -> BaseException:
    """SQLAlchemy's error, below Optuna's."""
    if isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    # Optuna asks once more in the transaction that has just failed (`RDBStorage._get_trials`).
    if isinstance(error, PendingRollbackError) and isinstance(error.__context__, DBAPIError):
        error = error.__context__
    return error


def _code(error: BaseException) -> str:
    """An SQLSTATE, "sqlite:N" or "mysql:N"; empty if the driver gives none."""
    state = getattr(error, "pgcode", None) or getattr(error, "sqlstate", None)
    if state:
        return str(state)
    if isinstance(error, sqlite3.Error):
        return f"sqlite:{getattr(error, 'sqlite_errorcode', 0) & 0xFF}"
    return f"mysql:{error.args[0]}" if error.args and isinstance(error.args[0], int) else ""


def _advice(error: BaseException) -> str:
    """What to do about a fault that waiting does not mend; empty if it is none of those."""
    driver = _driver_error(error)
    code = "" if isinstance(driver, OSError) else _code(driver)
    for codes, words, advice in _FAULTS:
        if (code and _matches(code, codes)) or re.search(words, str(driver)):
            return advice
    return ""


def _matches(code: str, codes: tuple[str, ...]) -> bool:
    # An SQLSTATE's first two characters are its class.
    return code in codes or (":" not in code and code[:2] in codes) or (code.partition(":")[0] + ":" in codes)


def _is_transient(error: BaseException) -> bool:
    error = _unwrapped(error)
    if isinstance(error, PoolTimeoutError | PendingRollbackError | ConnectionError | TimeoutError | InterruptedError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if _code(_driver_error(error)) in ("sqlite:5", "sqlite:6"):  # busy, locked
        return True
    lost = error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
    return lost and not _advice(error)


def _reason(error: BaseException) -> str:
    lines = str(_driver_error(error)).strip().splitlines() or [type(error).__name__]
    return lines[0].strip().rstrip(".")[:300]
