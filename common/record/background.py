"""Checkpoints that are written beside the training (--async-save)."""

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one function at a time in a thread. Its error is raised by the next `start` or `finish`."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Run `write` in the background, once the function before has returned."""
        self.finish()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Wait until it has returned."""
        self.wait()
        if error := self.error:
            self.error = None
            raise error

    def wait(self, seconds: float | None = None) -> bool:
        """As `finish`, where an error of its own is of no use: the run ends with another, or has lost ranks. Returns
        False if it has not returned within `seconds`."""
        if self.thread:
            self.thread.join(seconds)
            if self.thread.is_alive():
                return False
            self.thread = None
        return True
