"""The second thread of the draft server is kept off the processor of whoever gives it work."""

import os
import threading
import time

import pytest

from redraft.server.other_processor import OtherProcessor

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors cannot be chosen here")


@pytest.fixture
def thread():
    with OtherProcessor("beside") as executor:
        yield executor


def test_it_is_one_thread_that_returns_and_raises_as_executors_do(thread):
    def name():
        time.sleep(0.01)
        return threading.get_ident()

    names = {future.result() for future in [thread.submit(name) for _ in range(5)]}
    assert len(names) == 1 and threading.get_ident() not in names
    assert thread.submit(divmod, 7, b=2).exception() is not None
    assert thread.submit(divmod, 7, 2).result() == (3, 1)


def test_it_may_run_on_all_of_the_callers_processors_but_the_one_the_caller_is_on(thread):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("only one processor is allowed")
    for _ in range(20):
        allowed = os.sched_getaffinity(0)
        others = thread.submit(os.sched_getaffinity, 0).result()
        assert others < allowed and len(others) == len(allowed) - 1


def test_it_follows_the_caller_whose_processors_have_been_changed(thread):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("only one processor is allowed")
    before = thread.submit(os.sched_getaffinity, 0).result()
    try:
        for processor in allowed:
            os.sched_setaffinity(0, {processor})  # nothing is left for the thread: it keeps what it had
            assert thread.submit(os.sched_getaffinity, 0).result() == before
    finally:
        os.sched_setaffinity(0, allowed)
    assert len(thread.submit(os.sched_getaffinity, 0).result()) == len(allowed) - 1


def test_without_a_choice_of_processors_it_is_an_ordinary_executor(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    allowed = os.sched_getaffinity(0)
    with OtherProcessor("beside") as executor:
        assert executor.submit(os.sched_getaffinity, 0).result() == allowed


def test_where_choosing_is_forbidden_work_is_done_all_the_same(thread, monkeypatch):
    def forbidden(thread, processors):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert thread.submit(divmod, 7, 2).result() == (3, 1)


def test_after_the_end_no_threads_processors_are_chosen(thread, monkeypatch):
    """Its number may be another thread's by then."""
    thread.shutdown()
    moved = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda number, processors: moved.append(number))
    with pytest.raises(RuntimeError):
        thread.submit(divmod, 7, 2)
    assert not moved
