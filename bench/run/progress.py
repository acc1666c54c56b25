"""Shows what is running."""

import sys

from rich.console import Console


class Progress:
    """What is running: one line that changes on a terminal, else a line each."""

    def __init__(self):
        console = Console(stderr=True)
        self.terminal = console.is_terminal
        self.status = console.status("set-up", refresh_per_second=2)  # it runs beside what is timed

    def __enter__(self):
        if self.terminal:
            self.status.start()
        return self

    def __exit__(self, *_):
        self.status.stop()

    def __call__(self, text: str, left: float | None = None, often: bool = False):
        """text: which case does what; left: seconds of the budget; often: only for a terminal."""
        if left is not None:
            text += f", {max(0, left) / 60:.1f} min left"
        if self.terminal:
            self.status.update(text)
        elif not often:  # one write, so that lines of two threads do not run together
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
