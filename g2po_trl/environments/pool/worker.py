"""The process that hosts environments, started by the pool.

It is a program of its own and not a `multiprocessing` child: those import the user's script again, which trains a
second time when its author forgot `if __name__ == "__main__"`, and a notebook has no script to import.

The pool sends what makes an environment, and then, whenever there are some, lists of jobs and the numbers of episodes
that it has ended. The worker says with an empty message that it has loaded the one, and that it takes up each of the
lists; every job is answered by one message, in their order, see `answers`: by an `Observation` or
`StepResult`, `(kind, message)` when it failed, and `None` when it was played again and its answer had the mark it
should, or there is nothing to play it in. Between jobs it reads what has arrived, so that jobs of episodes that were
ended are not done. An empty message dismisses it. When the pool has gone without one the process ends as well, and its
temporary files and what it started with it: the pool cannot see to that.
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

from ..contract import Observation, StepResult
from ..validation import EnvironmentContractError, factory_name, validate_observation, validate_step
from .answers import Answer, encode
from .channel import WorkerEnd
from .scratch import clear

LOOK = 0.001  # seconds between two looks at what has arrived, while there are jobs


class EpisodeTooLongError(RuntimeError):
    """No step hung, but all together took too long."""


class WorkerLoop:
    """Environments of one worker, played in turn. Objects are kept and reset again: making one may be costly."""

    def __init__(
        self,
        environment_factory,
        max_observation_characters: int | None,
        episode_timeout: float | None,
    ):
        self.factory, self.name = environment_factory, factory_name(environment_factory)
        self.max_characters, self.episode_timeout = max_observation_characters, episode_timeout
        self.seconds: dict[int, float] = {}  # each episode so far
        self.process = os.getpid()
        self.idle: list[Any] = []
        self.playing: dict[int, Any] = {}

    def end(self, episode: int) -> None:
        """The environment of an episode waits for the next one."""
        self.seconds.pop(episode, None)
        if episode in self.playing:
            self.idle.append(self.playing.pop(episode))

    def reset(self, episode: int, task: bytes):
        arguments = pickle.loads(task)
        environment = self.idle.pop() if self.idle else self.factory()
        with self._closed_on_failure(environment):
            observation = validate_observation(
                environment.reset(**arguments), f"{self.name}.reset", self.max_characters
            )
        self.playing[episode], self.seconds[episode] = environment, 0.0
        return observation

    def step(self, episode: int, action: str):
        environment = self.playing.pop(episode)
        with self._closed_on_failure(environment):
            result = validate_step(environment.step(action), f"{self.name}.step", self.max_characters)
        self.playing[episode] = environment
        return result

    def play(self, command: str, episode: int, argument: Any):
        """Reset or step, on the episode's clock."""
        started = time.perf_counter()
        result = (self.reset if command == "reset" else self.step)(episode, argument)
        self.seconds[episode] = seconds = self.seconds[episode] + time.perf_counter() - started
        if self.episode_timeout is not None and seconds > self.episode_timeout:
            raise EpisodeTooLongError(
                f"the environment has taken {seconds:.1f} s for this episode, more than {self.episode_timeout:g} s"
            )
        return result

    @contextlib.contextmanager
    def _closed_on_failure(self, environment):
        """An environment that fails is not played again: who knows what state it is in."""
        try:
            yield
        except Exception:
            _leave_if_forked(self.process)
            with contextlib.suppress(Exception):
                environment.close()
            raise
        finally:
            _leave_if_forked(self.process)

    def close(self) -> None:
        for environment in [*self.idle, *self.playing.values()]:
            with contextlib.suppress(Exception):
                environment.close()


def _leave_if_forked(process: int) -> None:
    """End here what is not this process but a fork of it: a fork that an environment made, and that came back from
    there as if it were the worker."""
    if os.getpid() != process:
        os._exit(0)


def mark(answer: Observation | StepResult) -> str:
    """16 bytes, in hexadecimal, that tell all an agent would notice of an answer."""
    seen, facts = answer, ()
    if isinstance(answer, StepResult):
        seen, facts = answer.observation, (answer.reward, answer.terminated, answer.truncated)
    text = repr((seen.text, seen.state_key, seen.admissible_actions, seen.task, facts))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def work(host: WorkerLoop, command: str, episode: int, argument: Any, expected: str | None) -> tuple[str | None, Any]:
    """Do one job: its mark and its answer. An episode that it ends, or that fails, gives its environment back."""
    call = f"{host.name}.{command}"
    shown = f"({argument!r})" if command == "step" else ""
    try:
        answer = host.play(command, episode, argument)
    except Exception as error:
        host.end(episode)
        if isinstance(error, EpisodeTooLongError):
            return None, ("timeout", f"{call}: {error}")
        if isinstance(error, EnvironmentContractError):
            return None, ("invalid", f"{error} {shown}".rstrip())
        return None, ("exception", f"{call}{shown} raised\n{traceback.format_exc()}")
    if isinstance(answer, StepResult) and (answer.terminated or answer.truncated):
        host.end(episode)
    if expected is None:
        return mark(answer), answer
    if mark(answer) == expected:
        return expected, None
    host.end(episode)
    text = (answer.observation if isinstance(answer, StepResult) else answer).text
    return None, ("lost", f"{call} answers otherwise than before: {text[:200]!r}")


def answered(number: int, seconds: float, mark: str | None, result: Any) -> bytes:
    """The message that answers a job; of a result that cannot be sent, that it cannot."""
    try:
        return encode(Answer(number, seconds, mark, result))
    except (ValueError, RecursionError) as error:
        return encode(Answer(number, seconds, None, ("invalid", f"the answer cannot be sent to the trainer: {error}")))


def serve(pool: WorkerEnd) -> bool:
    """Play until the pool has no more to play. Has it said so? Else it has died."""
    host = unusable = None
    process, dismissed = os.getpid(), False
    try:
        host = WorkerLoop(*cloudpickle.loads(pool.receive()))
    except EOFError:
        return False
    except Exception:  # every episode is told, else the pool would start a worker for each
        unusable = "exception", f"the environment_factory cannot be loaded in a worker\n{traceback.format_exc()}"
    queue: deque[tuple] = deque()
    ended: set[int] = set()  # of which there may be jobs in the queue
    looked = 0.0
    with contextlib.suppress(EOFError, OSError):
        pool.send(b"")
        while not dismissed:
            messages = []
            if not queue:
                ended.clear()
                messages = [pool.receive()]
            elif time.perf_counter() - looked > LOOK:
                messages, looked = pool.arrived(), time.perf_counter()
            for message in messages:
                if not message:
                    dismissed = True
                    break
                over, jobs = pickle.loads(message)
                ended.update(over)
                if host is not None:
                    for episode in over:
                        host.end(episode)
                queue.extend((place == 0, *job) for place, job in enumerate(jobs))
            if not queue or dismissed:
                continue
            first_of_its_list, number, episode, command, argument, expected = queue.popleft()
            if first_of_its_list:
                pool.send(b"")
            started, made = time.perf_counter(), (None, unusable)
            if host is not None:
                playable = episode in host.playing or command == "reset"  # it has not failed
                made = (None, None)
                if playable and episode not in ended:
                    made = work(host, command, episode, argument, expected)
            _leave_if_forked(process)
            pool.send(answered(number, time.perf_counter() - started, *made))
    if host is not None:
        host.close()
    return dismissed


def end_with(descriptor: int, scratch: str, patience: float = 5.0) -> None:
    """End this process, what it started and its temporary files when the pool has gone, even if an environment hangs
    just then."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up alone
    poll.poll()
    time.sleep(patience)  # environments may close
    clear([scratch])
    os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os._exit(1)


def main(descriptor: int, lock: int, scratch: str) -> None:
    os.set_inheritable(lock, False)  # open as long as this process lives
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; it closes the channel
    threading.Thread(target=end_with, args=(descriptor, scratch), daemon=True).start()
    if not serve(WorkerEnd(descriptor)):
        clear([scratch])
