"""What a command prints, passed on by the program that runs it."""

import os
import stat
import threading
import time
from contextlib import suppress


class Output:
    """The command's stdout or stderr: the watcher's own; and since when nothing came.

    A terminal and a file are inherited: the time of their last change tells. A pipe's does not, so
    what goes to a pipe is read here, and passed on.
    """

    def __init__(self, number: int):
        self.number, self.thread, self.given, self.last = number, None, number, time.monotonic()
        self.writing = False
        mode = os.fstat(number).st_mode
        self.changed = os.fstat(number).st_mtime_ns
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            source, self.given = os.pipe()
            self.thread = threading.Thread(target=self.copy, args=(source,), daemon=True)

    def start(self) -> None:
        """Once the command has its end."""
        if self.thread:
            os.close(self.given)
            self.thread.start()

    def copy(self, source: int) -> None:
        with suppress(OSError):  # nobody reads what we write: the next one who writes will know
            while text := os.read(source, 65536):
                self.last, self.writing = time.monotonic(), True
                while text:
                    text = text[os.write(self.number, text) :]
                self.writing = False
        os.close(source)

    def quiet_since(self) -> float:
        if not self.thread and (changed := os.fstat(self.number).st_mtime_ns) != self.changed:
            self.changed, self.last = changed, time.monotonic()
        return self.last

    def on_its_way(self, ended: float) -> bool:
        """Whether some of it is not passed on yet, after a command that ended then: its reader is
        slow, or it is not yet read here. A process that outlives the command may hold the pipe, so
        two quiet seconds end it.
        """
        recent = time.monotonic() - max(self.last, ended) < 2
        return bool(self.thread and self.thread.is_alive() and (self.writing or recent))
