"""The program of a worker process, which runs environments for the pool.

It is not a `multiprocessing` child: those import the user's script again, which trains a second time if it lacks
`if __name__ == "__main__"`, and a notebook has no script to import.

The pool sends the environment factory first, then lists of jobs with the numbers of ended episodes. The worker sends
an empty message when it has loaded the factory and when it starts a job. It answers each job with one message, in
order (see `answers`): an `Observation` or `StepResult`, `(kind, message)` on failure, and `None` for a replayed job
with the expected digest or a job whose episode has ended; to skip these, it reads messages between jobs. An empty
message dismisses the worker. If the pool dies without one, it ends with its temporary files and its processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections import deque
from typing import Any

import cloudpickle

from ...prompts.conversation import prefix_digests
from ...utils.show import outlive_readers
from ..causes import in_words
from ..contract import Observation, StepResult, TextEnvironment
from ..validation import EnvironmentContractError, constructed, factory_name, validate_observation, validate_step
from .answers import Answer, encode, pictures_in
from .channel import Channel, WorkerChannel
from .limits import PoolLimits
from .scratch import clear

_PROCESS = os.getpid()


class WorkerLoop:
    """The environments of one worker. Instances are reused, since constructing one may be costly."""

    def __init__(self, environment_factory, limits: PoolLimits):
        self.factory, self.name, self.limits = environment_factory, factory_name(environment_factory), limits
        self.idle: list[Any] = []
        self.running: dict[int, Any] = {}
        self.shown: dict[int, set[str]] = {}  # images that an episode's answers have sent to the pool

    def end(self, episode: int) -> None:
        """Return an episode's environment to the idle ones."""
        self.shown.pop(episode, None)
        if episode in self.running:
            environment = self.running.pop(episode)
            with contextlib.suppress(Exception):  # a class of the user's own may have no such method
                environment.end_episode()
            self.idle.append(environment)

    def reset(self, episode: int, task: bytes) -> Observation:
        environment = self.idle.pop() if self.idle else constructed(self.factory, f"what {self.name} constructs")
        with self._playing(episode, environment):
            return validate_observation(environment.reset(**pickle.loads(task)), f"{self.name}.reset", self.limits)

    def step(self, episode: int, action: str) -> StepResult:
        environment = self.running.pop(episode)
        with self._playing(episode, environment):
            return validate_step(environment.step(action), f"{self.name}.step", self.limits)

    @contextlib.contextmanager
    def _playing(self, episode: int, environment):
        """Close an environment that raises: its state is unknown, so it is not reused."""
        try:
            yield
        except BaseException:
            _exit_if_forked()
            with contextlib.suppress(Exception):
                environment.close()
            raise
        _exit_if_forked()
        self.running[episode] = environment

    def is_unusable(self) -> bool:
        """Return whether an environment asks for this process to be replaced, e.g. for an agent that does not end."""
        environments = (*self.idle, *self.running.values())
        return any(isinstance(one, TextEnvironment) and one.needs_new_worker() for one in environments)

    def close(self) -> None:
        for environment in [*self.idle, *self.running.values()]:
            with contextlib.suppress(Exception):
                environment.close()


def _exit_if_forked() -> None:
    """Exit if this is a fork of the worker, made by an environment, that returned into the worker's code."""
    if os.getpid() != _PROCESS:
        os._exit(0)


def digest(answer: Observation | StepResult) -> str:
    """Return a 16-byte hexadecimal hash of all fields of an answer that the agent or trainer sees."""
    seen, facts = answer, ()
    if isinstance(answer, StepResult):
        seen, facts = answer.observation, (answer.reward, answer.terminated, answer.truncated)
    text = repr((seen.text, seen.state_key, seen.admissible_actions, seen.task, facts, *seen.images))
    if seen.request is not None:
        request = seen.request
        text += repr((prefix_digests(request.messages, request.tools)[-1], request.stop, request.max_tokens))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def run_job(loop: WorkerLoop, command: str, episode: int, argument: Any, expected: str | None) -> tuple:
    """Run one job; return its digest and result. The environment of an ended episode becomes idle."""
    call = f"{loop.name}.{command}"
    try:
        answer = (loop.reset if command == "reset" else loop.step)(episode, argument)
    except Exception as error:
        shown = f"({argument!r})" if command == "step" else ""
        if isinstance(error, EnvironmentContractError):
            return None, ("invalid", f"{error} {shown}".rstrip())
        trace = "".join(traceback.format_exception(error))  # of a group, its last line says nothing
        return None, ("exception", f"{call}{shown} raised\n{trace}{in_words(error)}\n")
    if isinstance(answer, StepResult) and (answer.terminated or answer.truncated):
        loop.end(episode)
    if expected is None:
        return digest(answer), answer
    if digest(answer) == expected:
        loop.shown.setdefault(episode, set()).update(pictures_in(answer))  # the pool has them
        return expected, None
    loop.end(episode)
    text = (answer.observation if isinstance(answer, StepResult) else answer).text
    return None, ("lost", f"{call} returned something else than before: {text[:200]!r}")


def answer_job(loop: WorkerLoop, is_wanted: bool, number: int, episode: int, *job: Any) -> bytes:
    """Return the message that answers a job, which is not run if its episode has failed or (`is_wanted`) ended."""
    result, started = (None, None), time.perf_counter()
    if is_wanted and (episode in loop.running or job[0] == "reset"):
        result = run_job(loop, job[0], episode, *job[1:])
    _exit_if_forked()
    seconds = time.perf_counter() - started
    shown = loop.shown.setdefault(episode, set()) if episode in loop.running else set()
    try:
        return encode(Answer(number, *result, seconds), shown)
    except (ValueError, RecursionError) as error:
        return encode(Answer(number, None, ("invalid", f"the answer cannot be sent to the trainer: {error}")))


def load_environments(setup: bytes) -> WorkerLoop:
    """Return the environments of a worker. If the factory cannot be loaded, each reset says so."""
    try:
        return WorkerLoop(*cloudpickle.loads(setup))
    except Exception as error:  # else the pool would start a worker for each episode
        failure = error

    def environment_factory():
        raise RuntimeError(f"it cannot be loaded in a worker: {in_words(failure)}") from failure

    return WorkerLoop(environment_factory, PoolLimits())


def serve(pool: Channel) -> bool:
    """Run jobs until the pool dismisses the worker; return `False` if it died instead."""
    queue: deque[tuple] = deque()
    ended: set[int] = set()  # which may have jobs in the queue
    loop = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            if not queue and loop is not None and loop.is_unusable():  # between jobs: its episodes are replayed
                os._exit(1)
            for message in pool.receive(wait=not queue):
                if loop is None:
                    loop = load_environments(message)
                    pool.send(b"")
                elif not message:
                    loop.close()
                    return True
                else:
                    over, jobs = pickle.loads(message)
                    ended = ended.union(over) if queue else set()
                    for episode in over:
                        loop.end(episode)
                    queue.extend(jobs)
            if queue:
                number, episode, *job = queue.popleft()
                pool.send(b"")
                pool.send(answer_job(loop, episode not in ended, number, episode, *job))
    if loop is not None:
        loop.close()
    return False


def end_with_pool(descriptor: int, scratch: str, patience: float = 5.0) -> None:
    """Wait for the pool to disconnect, then end this process, its children and its temporary files.

    It runs in a thread, so that it also ends a hanging environment.
    """
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up only
    poll.poll()
    time.sleep(patience)  # environments may close
    clear([scratch])
    os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)


def main(descriptor: int, scratch: str) -> None:
    outlive_readers()  # an environment may print
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and closes the channel
    threading.Thread(target=end_with_pool, args=(descriptor, scratch), daemon=True).start()
    if not serve(WorkerChannel(descriptor)):
        clear([scratch])
