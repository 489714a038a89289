"""`python()`: an executable that runs a program of this project as Python does, but forks it off a warm process.

A program that imports torch and transformers takes 5 to 15 s of a core until its first line runs. There are some
hundred starts in the tests; that was most of their time. Write `python()` where `sys.executable` would stand:

    subprocess.run([python(), "-m", "tools.report", folder], cwd=ROOT, capture_output=True, text=True)
    subprocess.Popen([python(), "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "train.py"])

It is a stand-in of 30 ms. It asks a server, one for all processes of pytest, which has imported everything heavy and
computed nothing, to fork. The fork gets the arguments, folder, environment and open files of the stand-in, which
hands SIGINT, SIGTERM and SIGHUP on to it and ends as it ends. A stand-in that is killed takes the fork with it, a few
milliseconds later; sent KILL, it has the program killed by SIGKILL and ends only after it. What the program starts by
`sys.executable` is forked too, the ranks of torchrun as well.

A fork is not all that a start is. `psutil`, process groups and PR_SET_PDEATHSIG know the stand-in, not the program;
limits and priorities are not handed on; modules are not torn down at the end; sets of strings have the same order in
all forks. The real Python takes over where something is to be told before imports (HF_..., TRANSFORMERS_...,
PYTHON... other than in the server), in other folders than the project's, for other flags than -m, -c and -u, and on
systems other than Linux. Use `sys.executable` where the start itself is tested, or who dies with whom.
"""

import array
import atexit
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENVIRONMENT = dict(os.environ)  # before any test has changed it
KILL = signal.SIGUSR1
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, KILL)
READ_AT_IMPORT, TOLD = ("HF_", "TRANSFORMERS_", "PYTHON"), ("PYTHON", "PYTHONPATH")
HEAVY = """numpy datasets accelerate deepspeed peft torch.distributed.run transformers.trainer torch.utils.tensorboard
transformers.models.llama.modeling_llama train tools.play_llm_game tools.evaluate_games tools.assign_rewards
tools.report tools.prepare_data tools.tiny_world deepspeed.runtime.zero.muon.muon_optimizer""".split()
LIMIT, MOST_FILES = 1 << 17, 100  # bytes and open files of a message
_path = None


def python() -> str:
    """The path of the executable; the first call of all processes starts the server."""
    global _path
    if _path is None:
        _path = _find_server() if sys.platform == "linux" else sys.executable
    return _path


def _find_server() -> str:
    """The executable in the folder FORKS, which only this user may open; the server lives as long as FORKS_OWNER."""
    import tempfile

    folder, owner = os.environ.get("FORKS") or tempfile.mkdtemp(prefix="forks"), os.environ.get("FORKS_OWNER")
    path = f"{folder}/python"
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            _start_server(path, f"{folder}/socket", owner or str(os.getpid()))
    return path


def _start_server(path: str, address: str, owner: str) -> None:
    import subprocess

    here = os.path.abspath(__file__)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(100)
        subprocess.Popen(
            [sys.executable, here, "serve", path, str(listener.fileno()), owner],
            cwd=ROOT,
            env=ENVIRONMENT | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec "{sys.executable}" -IS "{here}" "{address}" "$@"\n')
    os.chmod(path, 0o700)


# --- the stand-in --------------------------------------------------------------------------------------------------


def stand_in(address: str, arguments: list[str]) -> None:
    """Have a fork run the program, and end as it ends."""
    if arguments[:1] == ["-B"]:  # multiprocessing hands the flag on
        del arguments[0]
    ignored = [number for number in HANDED_ON if signal.getsignal(number) == signal.SIG_IGN]
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if is_open(number)]
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    request |= {"ignored": ignored, "files": files}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    connection.sendmsg([json.dumps(request).encode()], [rights])
    caught = set(HANDED_ON) - set(ignored)
    for number in caught:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = json.loads(connection.recv(LIMIT))
    for number in caught:
        signal.signal(number, signal.SIG_DFL)
    if status is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def is_open(file: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(file))
    return False  # what listed them is closed


# --- the server ----------------------------------------------------------------------------------------------------


def serve(listener: socket.socket, path: str, owner: int) -> list[str]:
    """Fork a keeper for each stand-in, until the owner ends. Returns in each program, with its arguments."""
    import gc
    import importlib
    import logging

    logging.disable(logging.WARNING)  # DeepSpeed's: that there is no GPU
    for name in HEAVY:
        with contextlib.suppress(Exception):  # a broken program fails in its own tests, not in all
            importlib.import_module(name)
    with contextlib.suppress(ImportError):  # as above
        spare_repeated_work()
    logging.disable(logging.NOTSET)
    gc.freeze()
    sys.executable = path
    alive = os.pidfd_open(owner)
    while True:
        ready, _, _ = select.select([listener, alive], [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
                pass
        if alive in ready:  # pytest has ended
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(alive)
            return keep(connection)
        connection.close()


def spare_repeated_work() -> None:
    """Do once what torch's launcher and DeepSpeed do at each start, for a second and for three."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    # The original looks through all modules for the lines of source of all callers, eighteen times.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: info


def keep(connection: socket.socket) -> list[str]:
    """Fork the program, hand signals on, and tell how it ended. Returns in the program."""
    message, files, _, _ = socket.recv_fds(connection, LIMIT, MOST_FILES)
    request = json.loads(message)
    if not can_run(request):
        connection.send(b"null")
        os._exit(0)
    program = os.fork()
    if program == 0:
        connection.close()
        return become(request, files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(program)
    while ended not in select.select([ended, connection], [], [])[0]:
        sent = connection.recv(1)
        if sent:
            os.kill(program, signal.SIGKILL if sent[0] == KILL else sent[0])
        else:  # the stand-in was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):
        connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def can_run(request: dict) -> bool:
    """Whether a fork is what a new process would be."""
    how, environment = (request["arguments"] or ["-"])[0], request["environment"]
    read = [
        {name: value for name, value in each.items() if name.startswith(READ_AT_IMPORT) and name not in TOLD}
        for each in (environment, os.environ)
    ]
    places = {os.path.abspath(place) for place in environment.get("PYTHONPATH", ROOT).split(":")}
    flags = how in ("-m", "-c", "-u") or not how.startswith("-")
    return flags and read[0] == read[1] and places == {ROOT} and request["folder"] == ROOT


def become(request: dict, files: list[int]) -> list[str]:
    """Take over files, environment and signals; the arguments."""
    import numpy
    import torch

    os.setsid()
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 500) for file in files]  # out of the way of their numbers
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
    for file in (*set(files) - set(request["files"]), *moved):
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    numpy.random.seed()
    return request["arguments"]


def run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    import runpy

    unbuffered = arguments[0] == "-u"
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)
    how, *sys.argv = arguments[unbuffered:]
    if how == "-m":
        sys.path[0] = os.getcwd()
        sys.modules.pop(sys.argv[0], None)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[0] = ""
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(code, {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(how))
        sys.argv.insert(0, how)
        runpy.run_path(how, run_name="__main__")


def end() -> None:
    """Called after all other functions of atexit: freeing what was imported would take Python 0.4 s."""
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        status = None
        atexit.register(end)
        arguments = serve(socket.socket(fileno=int(sys.argv[3])), sys.argv[2], int(sys.argv[4]))
        try:
            run(arguments)
            status = 0
        except SystemExit as ended:
            if ended.code is None or isinstance(ended.code, int):
                status = (ended.code or 0) & 0xFF
            raise
    else:
        stand_in(sys.argv[1], sys.argv[2:])
