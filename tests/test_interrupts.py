"""Keyboard interrupts at any moment: held back where they would leave a locked database or a thread behind."""

import random
import signal
import threading
import time

import optuna
import pytest

from layerskip.interrupts import held_interrupts
from layerskip.search.storage import close_storage, open_storage, run_trial


@pytest.fixture(autouse=True)
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_the_first_one_comes_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupts() as interrupts:
            interrupt()
            done.append(interrupts.count)
    assert done == [1]


def test_one_that_was_seen_to_does_not_come_again():
    with held_interrupts() as interrupts:
        interrupt()
        interrupts.count = 0


def test_a_second_one_comes_through_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with held_interrupts():
            with held_interrupts():
                interrupt()
                interrupt()
            done.append("not reached")
    assert not done


def test_one_comes_also_behind_a_block_that_failed():
    """Else a caller that tries again would never hear of it."""
    with pytest.raises(KeyboardInterrupt) as caught:
        with held_interrupts():
            interrupt()
            raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_nothing_is_told_once():
    called = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    with held_interrupts() as interrupts, interrupts.let_through():
        interrupt()
    assert len(called) == 1
    signal.signal(signal.SIGINT, before)


def test_it_is_let_through_where_that_is_allowed():
    done = []
    with held_interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            with interrupts.let_through():
                interrupt()
                done.append("not reached")
        with pytest.raises(KeyboardInterrupt):  # nor does work begin that is no longer wanted
            with interrupts.let_through():
                done.append("not reached")
        interrupts.count = 0
    assert not done


def test_other_handlers_stay_in_force():
    called = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    with held_interrupts():
        interrupt()
        assert not called
    assert called == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        interrupt()
    signal.signal(signal.SIGINT, before)


def test_other_threads_have_nothing_to_hold():
    counts = []

    def run():
        with held_interrupts() as interrupts, interrupts.let_through():
            counts.append(interrupts.count)

    with held_interrupts() as interrupts:
        interrupt()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        interrupts.count = 0
    assert counts == [0]


@pytest.mark.parametrize("name", ["trials.db", "trials.journal"])
def test_at_any_moment_of_a_trial(tmp_path, name):
    """A hundred times: no transaction stays open (which would be waited for), no thread, no trial half begun."""
    storage, moments = open_storage(tmp_path / name, heartbeat_interval=3600), random.Random(0)
    study = optuna.create_study(storage=storage)
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    threads = threading.active_count()
    try:
        for _ in range(100):
            with held_interrupts() as interrupts:

                def objective(trial, interrupts=interrupts):
                    x = trial.suggest_float("x", 0, 1)
                    with interrupts.let_through():
                        time.sleep(0.01)
                    trial.report(x, 0)
                    return x

                began = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.001, 0.06))
                try:
                    while not interrupts.count:
                        run_trial(study, objective)
                except KeyboardInterrupt:
                    pass
                interrupts.count = 0
            assert time.monotonic() - began < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        states = [each.state.name for each in study.get_trials(deepcopy=False)]
        close_storage(storage)
    assert threading.active_count() == threads
    assert "RUNNING" not in states and states.count("COMPLETE") > 10


@pytest.mark.parametrize("name", ["trials.db", "trials.journal"])
def test_at_any_moment_of_a_call(tmp_path, name):
    """Elsewhere than in a search's loop an interrupt comes as soon as the storage's call is done."""
    storage, moments = open_storage(tmp_path / name, heartbeat_interval=3600), random.Random(0)
    study = optuna.create_study(storage=storage)
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt())
    try:
        for _ in range(100):
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.001, 0.02))
            with pytest.raises(KeyboardInterrupt):
                while True:
                    study.set_user_attr("at", began)
            assert time.monotonic() - began < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        close_storage(storage)
