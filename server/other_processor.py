"""A second thread, on another processor than whoever hands it work.

Half of a large batch's drafts go to another thread for a millisecond or two, and are worth it only if that thread runs at
once. Schedulers that pack threads together (to let a virtual machine's other processors sleep) wake it on the caller's own
processor, where it waits for the caller: measured, two such halves then take as long as one after the other. So the
thread is kept off the caller's processor as it is given work: two system calls, 2 microseconds.

Where the system cannot say or choose processors (macOS), or allows only one, this is an ordinary executor of one thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["OtherProcessor"]


def _processor_asker():
    """A function that returns the number of the processor it is called on, or None where there is none."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        return ctypes.PyDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None


class OtherProcessor(ThreadPoolExecutor):
    """An executor of one thread; see the module's head."""

    def __init__(self, thread_name_prefix: str = "") -> None:
        super().__init__(max_workers=1, thread_name_prefix=thread_name_prefix)
        self._processor_now = _processor_asker()
        self._thread: int | None = None  # the system's number of it
        if self._processor_now is not None:
            self._thread = super().submit(threading.get_native_id).result()

    def submit(self, function, /, *args, **kwargs) -> Future:
        """As every executor's; called from any thread."""
        if self._thread is not None:
            self._keep_off_this_processor()
        return super().submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As every executor's."""
        self._thread = None  # the system may give its number to another thread
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _keep_off_this_processor(self) -> None:
        """Allow the thread all that the caller is allowed but where the caller is now."""
        try:
            os.sched_setaffinity(self._thread, os.sched_getaffinity(0) - {self._processor_now()})
        except OSError:  # there is no other, or choosing is forbidden: it runs where it may
            return
