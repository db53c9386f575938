"""Keyboard interrupts, held back where they would break more than the work in hand.

Raised in the middle of a database's call, an interrupt can leave a connection behind whose transaction is open, which
locks this process out as well; raised while a thread is started, a thread that nobody ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["Interrupts", "held_interrupts"]


class Interrupts:
    """The interrupts of a block that holds them back, as `held_interrupts` gives it.

    Attributes:
        count: how many came and were not seen to yet; whoever sees to them sets it to 0.
        is_told: whether the handler in force was told of one.
    """

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.count, self.is_told = 0, False
        self._before, self._through = before, False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Count it; let the first one through where that is allowed, and the next one anywhere."""
        self.count += 1
        if self._through or self.count > 1:
            self.is_told = True
            self._before(number, frame)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """Work that may be broken off at any point.

        Raises:
            KeyboardInterrupt: also for one that came before.
        """
        if self.count:
            raise KeyboardInterrupt
        self._through = True
        try:
            yield
        finally:
            self._through = False


@contextlib.contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Hold the first interrupt back until the end of this block; the second one comes through at once.

    Within another such block nothing changes. Only the main thread gets interrupts: elsewhere none ever comes.

    Raises:
        KeyboardInterrupt: at the end, also of a block that failed, if one came that was not seen to. (Or what else the
            handler in force does.)
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield Interrupts(signal.default_int_handler)
        return
    outer = getattr(before, "__self__", None)
    if isinstance(outer, Interrupts):
        yield outer
        return
    interrupts = Interrupts(before)
    signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts.count and not interrupts.is_told:
            before(signal.SIGINT, None)
