"""When to try again after a failure: at once after the first, then after pauses that double up to a limit.

A server that is late or wrong costs the caller one deadline per try, so tries must become rare while it fails; a
server that came back must be noticed soon, so the pause stays bounded. With the defaults a server that is always
late costs one deadline in two seconds.
"""

from __future__ import annotations

import time

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Counts failures in a row. `first` is the pause in seconds after the second one, `longest` the limit."""

    def __init__(self, first: float = 0.05, longest: float = 2.0, clock=time.monotonic) -> None:
        self.failures = 0
        self._first, self._longest, self._clock = first, longest, clock
        self._until = 0.0

    def allows(self) -> bool:
        """Whether it is time to try."""
        return self.failures < 2 or self._clock() >= self._until

    def remaining(self) -> float:
        """Seconds until `allows` will be true; 0 if it is."""
        return 0.0 if self.allows() else self._until - self._clock()

    def failure(self) -> None:
        """A try failed."""
        self.failures += 1
        if self.failures > 1:
            pause = min(self._first * 2.0 ** min(self.failures - 2, 30), self._longest)
            self._until = self._clock() + pause

    def success(self) -> None:
        """A try succeeded: the next failure counts as the first again."""
        self.failures = 0

    def try_now(self) -> None:
        """Something changed for the better: end the pause, but forget no failure."""
        self._until = 0.0
