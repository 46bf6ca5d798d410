"""Blocks that no fork divides, each tried in a process of its own: what fails there hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BEGIN = """
import os, signal, threading, time

hooks = {"last": lambda: None}
os.register_at_fork(before=lambda: hooks["last"]())  # the first one runs last

from growcache.cache.locks import fork_lock as undivided

def forked(act):
    child = os.fork()
    if child == 0:
        try:
            os._exit(act())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def begun(run):
    inside = threading.Event()
    thread = threading.Thread(target=run, args=[inside])
    thread.start()
    inside.wait()
    return thread
"""


def run(program: str, complaint: str = "") -> str:
    """Return what a program prints, which must end well, and complain of nothing else."""
    done = subprocess.run(
        # Python 3.12 and newer deprecate a fork of a process with threads, which is tried here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGIN + program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(complaint)
    assert complaint or not done.stderr
    return done.stdout.strip()


def test_a_fork_waits_for_the_blocks_of_other_threads() -> None:
    assert (
        run("""
state = []
def divided(inside):
    with undivided():
        state.append("half")
        inside.set()
        time.sleep(0.3)
        state.append("whole")
thread = begun(divided)
print(forked(lambda: len(state)))
thread.join()
""")
        == "2"
    )


def test_a_block_may_wait_for_a_thread_that_enters_one_while_a_fork_waits() -> None:
    """A finalizer does so, which runs in any thread at any time."""
    assert (
        run("""
def other():
    with undivided():
        pass
def outer(inside):
    with undivided():
        inside.set()
        time.sleep(0.3)  # the fork waits by now
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(300)
        print("joined" if not thread.is_alive() else "hung", flush=True)
thread = begun(outer)
print(forked(lambda: 0))
thread.join()
""")
        == "joined\n0"
    )


def test_a_block_waits_for_a_fork_that_has_begun() -> None:
    assert (
        run("""
entered = threading.Event()
def enters():
    with undivided():
        entered.set()
def last():
    threading.Thread(target=enters).start()
    assert not entered.wait(0.3)
hooks["last"] = last
print(forked(entered.is_set), entered.wait(300))
""")
        == "0 True"
    )


def test_a_thread_may_fork_within_a_block_of_its_own() -> None:
    assert (
        run("""
with undivided():
    with undivided():
        def act():
            with undivided():
                return 0
        print(forked(act))
print(forked(lambda: 0))
""")
        == "0\n0"
    )


def test_a_lock_is_free_in_the_child() -> None:
    assert (
        run("""
lock = threading.RLock()
stop = threading.Event()
def holds(inside):
    while not stop.is_set():
        with undivided(), lock:
            inside.set()
def takes():
    with undivided(), lock:
        return 0
threads = [begun(holds) for _ in range(2)]
print({forked(takes) for _ in range(20)})
stop.set()
""")
        == "{0}"
    )


def test_an_interrupt_does_not_end_the_wait_of_a_fork() -> None:
    """Python prints what a hook of a fork raises, whenever that is, and goes on."""
    program = """
signal.signal(signal.SIGINT, signal.default_int_handler)
state = []
def divided(inside):
    with undivided():
        inside.set()
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)
        state.append("whole")
thread = begun(divided)
print(forked(lambda: len(state)))
thread.join()
with undivided():
    print("free")
"""
    assert run(program, "Exception ignored") == "1\nfree"


def test_interrupts_leave_no_thread_in_a_block() -> None:
    assert (
        run("""
class Interrupt(Exception):
    pass
def interrupt(*_):
    raise Interrupt
signal.signal(signal.SIGALRM, interrupt)
for _ in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-4)
        while True:
            with undivided():
                pass
    except Interrupt:
        pass
def forks():
    began = time.monotonic()
    print(forked(lambda: 0), time.monotonic() - began < 8)
thread = threading.Thread(target=forks)
thread.start()
thread.join()
""")
        == "0 True"
    )


def test_two_threads_may_fork_at_once() -> None:
    assert (
        run("""
stop = threading.Event()
def enters(inside):
    while not stop.is_set():
        with undivided():
            inside.set()
entering = begun(enters)
def enter():
    with undivided():
        return 0
found = []
threads = [
    threading.Thread(target=lambda: found.extend(forked(enter) for _ in range(20)))
    for _ in range(3)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
stop.set()
print(set(found), len(found))
""")
        == "{0} 60"
    )
