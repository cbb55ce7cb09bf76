"""What a run shows on rank 0's terminal: a progress bar, or a line now and then where there is no terminal."""

import sys
import time
from typing import Any

from common.console import say

LINE_SECONDS = 10.0  # between two lines where there is no terminal


class Terminal:
    """Rank 0's output on the terminal; a silent one says nothing."""

    def __init__(self, first_step: int, total_steps: int, is_silent: bool = False):
        self.first_step, self.total_steps, self.is_silent = first_step, total_steps, is_silent
        self.began = self.last_line = time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty() and not is_silent:
            from tqdm import tqdm

            steps: dict[str, Any] = {"total": total_steps, "initial": first_step, "unit": "step"}
            self.bar = tqdm(**steps, dynamic_ncols=True, smoothing=0.1)

    def progress(self, step: int, text: str) -> None:
        """Show that `step` steps are done."""
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif time.monotonic() - self.last_line > LINE_SECONDS:
            self.last_line = time.monotonic()
            seconds_a_step = (self.last_line - self.began) / max(1, step - self.first_step)
            left = seconds_a_step * (self.total_steps - step)
            self.line(f"step {step}/{self.total_steps}: {text}, {left:,.0f} s left")

    def line(self, text: str) -> None:
        """Print one line, above the progress bar where there is one."""
        if self.bar is not None:
            self.bar.clear()
        if not self.is_silent:
            say(text, rank=0)
        if self.bar is not None:
            self.bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
