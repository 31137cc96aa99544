"""Models through the compiler in processes of their own, so that a crash of native code is a result and not the end."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from compile.progress import Progress

CaseT = TypeVar("CaseT")
ResultT = TypeVar("ResultT")
WorkerT = TypeVar("WorkerT", bound="Worker")
# Of messages so much is kept.
KEPT = 300


class Worker:
    """A process that runs `serve(pipe, *arguments)`, started anew when it has died; made and ended by `with`."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        self._serve, self._arguments = serve, arguments
        self._context = multiprocessing.get_context("forkserver")
        # What is slow to import is imported once.
        self._context.set_forkserver_preload(["bench.mutate_onnx", "compile.pipeline", "compile.backends.ort"])

    def __enter__(self: WorkerT) -> WorkerT:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        self.pipe, theirs = self._context.Pipe()
        # Not a daemon: the compiler starts processes of its own.
        self.process = self._context.Process(target=self._serve, args=(theirs, *self._arguments), daemon=False)
        self.process.start()
        theirs.close()

    def _end(self) -> None:
        self.kill()
        self.pipe.close()

    def kill(self) -> None:
        """End the process; who asks it next finds it dead."""
        self.process.kill()
        self.process.join()

    def renew(self) -> None:
        """Another process in its place."""
        self._end()
        self._start()


def requests(pipe: Any) -> Iterator[Any]:
    """In the worker: what it is sent, until nobody sends any more."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def spread(
    cases: Iterator[CaseT], workers: Sequence[WorkerT], run: Callable[[WorkerT, CaseT], ResultT]
) -> Iterator[tuple[ResultT, WorkerT]]:
    """Each case by the next worker that is free; results as they come, with the worker that made them."""
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
        running: dict[concurrent.futures.Future[ResultT], WorkerT] = {}
        for worker, case in zip(workers, cases, strict=False):
            running[threads.submit(run, worker, case)] = worker
        while running:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                worker = running.pop(future)
                yield future.result(), worker
                for case in itertools.islice(cases, 1):
                    running[threads.submit(run, worker, case)] = worker


class Enough(Exception):  # noqa: N818 - the end of a case, not an error
    """The model is written, loaded, run and compared; what follows is its memory, which takes three times as long."""


class UntilPlan(Progress):
    """Ends a compilation in front of "plan memory", behind `then`, which finds what was written; `whole` does not."""

    def __init__(self, then: Callable[[], None] | None = None, whole: bool = False) -> None:
        self.reached = ""
        self._then, self._whole = then, whole

    def phase(self, name: str, total: int = 0) -> None:  # noqa: ARG002
        if name == "plan memory" and not self._whole:
            if self._then is not None:
                self._then()
            raise Enough
        self.reached = name


def one_line(error: BaseException) -> str:
    """What an error says, of a length that a table takes."""
    return " ".join(str(error).split())[:KEPT] or type(error).__name__
