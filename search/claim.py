"""Which of a study's workers prepares it: whoever's mark stands in the study, while that shows signs of life.

A worker that was killed leaves its mark behind. On the same machine the next one sees at once that the process is gone;
from another machine it is given three times its interval.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import optuna

from layerskip.errors import LayerSkipError

__all__ = ["Claim", "Overtaken"]

_MARK = "preparing"
_SILENT = 3  # intervals without a sign of life, after which a worker counts as dead
_CLOCKS_S = 300.0  # by which clocks of machines may differ
_SETTLE_S = 0.2


class Overtaken(Exception):
    """Another worker took this one for dead, and prepares the study now."""


class Claim:
    """A worker's claim to prepare a study: `take` it, then prepare inside ``with claim:``, which gives it back."""

    def __init__(self, study: optuna.Study, interval_s: float) -> None:
        """`interval_s`: between two signs of life."""
        self._study, self._interval_s, self._worker = study, interval_s, uuid.uuid4().hex
        self._beats = 0
        self._seen: tuple[Any, float] = (None, 0.0)  # another worker's mark, and since when it has stayed the same
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> bool:
        """Whether this worker is to prepare the study now: nobody is at it, or who was has died."""
        mark = self._mark()
        if mark is not None and self._lives(mark):
            return False
        self._write()
        time.sleep(_SETTLE_S)  # of workers that come at the same moment, the one whose mark was written last
        return self._is_mine()

    def confirm(self) -> None:
        """Make sure that the study is still this worker's to prepare.

        Raises:
            Overtaken: it is not.
        """
        if not self._is_mine():
            raise Overtaken

    def __enter__(self) -> Claim:
        self._done.clear()
        self._thread = threading.Thread(target=self._beat, name="layerskip-claim", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._is_mine():
            self._study.set_user_attr(_MARK, None)  # prepared, or given up: whoever comes next may begin at once

    def _beat(self) -> None:
        try:
            while not self._done.wait(self._interval_s) and self._is_mine():
                self._write()
        except LayerSkipError:  # the storage does not answer: the worker itself meets that too
            pass
        finally:
            self._study._storage.remove_session()  # this thread's own

    def _mark(self) -> Any:
        return self._study.user_attrs.get(_MARK)

    def _is_mine(self) -> bool:
        mark = self._mark()
        return mark is not None and bool(mark["by"] == self._worker)

    def _write(self) -> None:
        self._beats += 1
        mark = {"by": self._worker, "pid": os.getpid(), "machine": _machine(), "beat": self._beats, "at": time.time()}
        self._study.set_user_attr(_MARK, mark | {"interval_s": self._interval_s})

    def _lives(self, mark: dict[str, Any]) -> bool:
        if mark["machine"] is not None and mark["machine"] == _machine() and not _runs(mark["pid"]):
            return False
        if mark != self._seen[0]:
            self._seen = (mark, time.monotonic())
        silence_s, at = _SILENT * float(mark["interval_s"]), float(mark["at"])
        return time.monotonic() - self._seen[1] < silence_s and time.time() - at < silence_s + _CLOCKS_S


def _machine() -> str | None:
    """Names what has process ids of its own, a machine or a container; None: it cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}" if os.name == "posix" else None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
