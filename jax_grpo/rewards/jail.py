"""What a sandboxed process does to itself before it runs a program: namespaces, limits, filters.

`nursery.py` sends this file and `walls.py` to a fresh interpreter, the nursery, which forks for
every program: cheaper than an interpreter each. They need the standard library only. Linux is
what they are written for; elsewhere the calls that are not there are left out, and the report
says so.

    nursery ── fork ── keeper ── unshare ── fork ── wait ── end what is left ── report the exit
                                              └── mounts ── limits ── user ── filters ── program

The keeper is trusted and waits; its child gives up all it can and becomes the program.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import marshal
import os
import resource
import select
import signal
import socket
import struct
from typing import Any

from jax_grpo.rewards.walls import (
    CLONE_NEWUSER,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PRIVATE,
    check,
    landlock,
    libc,
    linux,
    prctl,
    seccomp,
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2


# ------------------------------------------------------------- the nursery and its keepers

# What most programs import. None of them keeps a state: random would give all the same numbers.
PRELOADED = (
    "ast bisect collections contextlib copy dataclasses enum functools heapq itertools json math "
    "operator re string types typing"
).split()
PIPES = ("stdin", "stdout", "stderr", "requests", "frames", "commands", "reports")


def nurse(control: int) -> Any:
    """Fork for every message on a socket, which brings the `PIPES`; returns in programs alone.

    Returns:
        The program, source text or code.
    """
    if linux:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no burial
    parent = socket.socket(fileno=control)
    while os.open("/dev/null", os.O_RDONLY) < 9:
        pass  # so that what comes lies above the numbers that the program will have
    for name in PRELOADED:
        __import__(name)
    gc.freeze()  # a program's end would look at all that lies here, and so copy it
    while True:
        message, ancillary, _, _ = parent.recvmsg(1, socket.CMSG_SPACE(4 * len(PIPES)))
        if not message:
            os._exit(0)
        pipes = dict(zip(PIPES, struct.unpack(f"{len(PIPES)}i", ancillary[0][2]), strict=True))
        try:
            keeper = os.fork()
        except OSError as error:  # of this program alone: others depend on the nursery
            keeper = -1
            os.write(pipes["reports"], f"failed {error}\n".encode())
        if not keeper:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            parent.close()
            with open(pipes["commands"], "rb", closefd=False) as file:
                config, program = marshal.loads(file.read(int.from_bytes(file.read(4), "big")))
            enter(config, pipes)
            return program
        for descriptor in pipes.values():
            os.close(descriptor)


def enter(config: dict[str, Any], pipes: dict[str, int]) -> None:
    """Become the program's process; returns in it alone.

    config: "namespaces" ("root", "user" or ""), "drop" (give up being root), "limits" (a dict of
        seconds, memory, files, processes), "directory" (private, empty), "prefix" (where the
        interpreter lies), "readable" (what else it needs).
    pipes: "stdin", "stdout", "stderr", "requests" and "frames" are the program's. Anything that
        comes on "commands", or its end, ends the program; on "reports" go lines: "pid N KEEPER",
        then "ready FLAGS" or "failed WHY", then "ended CODE".
    """
    commands, reports = pipes["commands"], pipes["reports"]

    def report(text: str) -> None:
        os.write(reports, text.encode() + b"\n")

    try:
        user = choose_user() if config["drop"] else None
        if user is not None:
            os.chown(config["directory"], user, user)
            for name in PIPES[:5]:
                os.fchown(pipes[name], user, user)  # or it could not open /dev/stdin
        os.chdir(config["prefix"])  # the way there may be closed to that user, `.` is not
        if config["namespaces"] == "user":
            if user is not None:
                become(user)
            new_user_namespace()
        elif config["namespaces"] == "root":
            check(libc.unshare(PRIVATE))
        elif linux:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # what outlives the program comes to us
    except OSError as error:
        report(f"failed {error}")
        os._exit(1)
    if linux:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    child = os.fork()
    if not child:
        try:
            flags = confine(config, user)
            for number, name in enumerate(PIPES[:5]):
                os.dup2(pipes[name], number)
            report("ready " + " ".join(flags))
            os.closerange(5, 1 << 16)
            return
        except BaseException as error:
            report(f"failed {type(error).__name__}: {error}")
            os._exit(1)
    report(f"pid {child} {os.getpid()}")
    for name in PIPES[:5]:
        os.close(pipes[name])
    code = wait(child, commands)
    if not config["namespaces"]:
        end_leftovers(child, user)
    report(f"ended {code}")
    os.read(commands, 1)  # until then the child's number must be nobody else's
    os.waitpid(child, 0)
    os._exit(0)


def wait(child: int, commands: int) -> int:
    """Wait for the child's end, or end it on command; its exit code, not reaped."""
    watched, seconds = [commands], 0.02
    try:
        watched.append(os.pidfd_open(child))
        seconds = 60.0
    except (AttributeError, OSError):  # not Linux, or an old one: look now and then
        pass
    while True:
        ready, _, _ = select.select(watched, [], [], seconds)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        if commands in ready:
            os.kill(child, signal.SIGKILL)
            watched.remove(commands)  # it is enough to be told once
            seconds = 0.02


def end_leftovers(child: int, user: int | None) -> None:
    """Kill what a program without a process namespace of its own left behind."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    if user is not None:  # all of this user are this program's
        killer = os.fork()
        if not killer:
            become(user)
            try:
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(killer, 0)
    while linux:  # the others have come to us by now, their children will
        children = [pid for pid in children_of(os.getpid()) if pid != child]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def children_of(pid: int) -> list[int]:
    """The living and dead children of a process, from /proc."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(name))
    return found


# ------------------------------------------------------------------------------------- the child


def confine(config: dict[str, Any], user: int | None) -> list[str]:
    """Give up everything; the words say what was reached."""
    flags, limits, namespaces = [], config["limits"], config["namespaces"]
    if linux:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not namespaces:
        os.setpgid(0, 0)
    home = config["directory"]
    if namespaces:
        owner = os.getuid() if user is None else user
        home = private_files(home, config, owner)
        flags.append("namespaces")
    os.chdir(home)
    os.environ.update(HOME=home, TMPDIR=home, PATH="/usr/bin:/bin", LANG="C.UTF-8")
    if user is None and (namespaces != "user" or kernel() < (5, 14)):
        others = tasks_of(os.getuid())
    else:  # counted apart, with the keeper where it is the same user
        others = int(namespaces == "user")
    if user is not None and namespaces != "user":
        become(user)
    set_limits(limits, others)
    if os.getuid() != 0:
        flags.append("unprivileged")
    with open(os.__file__, "rb"):
        pass  # or the program could not import a thing: better a lower level than a wrong verdict
    if linux:
        check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))  # no capability at all
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it
        if not namespaces and landlock(home, [config["prefix"], *config["readable"]]):
            flags.append("landlock")
        if seccomp(among_others=not namespaces):
            flags.append("seccomp")
    return flags


def choose_user() -> int | None:
    """A user number that no other process has, by our process number."""
    if os.getuid() != 0:
        return None
    pid = os.getpid()
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
    except OSError:
        ranges = [[0, 0, 1 << 31]]
    for user in (1_900_000_000 + pid, 40_000 + pid % 20_000, 65_534):
        if any(start <= user < start + count for start, _, count in ranges):
            return user
    raise OSError(errno.EPERM, "no unprivileged user here")


def become(user: int) -> None:
    """Be that user and no other, in no group."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if linux:
        prctl(PR_SET_DUMPABLE, 1)  # or its own /proc would not be its own


def new_user_namespace() -> None:
    """Make namespaces as any user may: inside one where it is root, as itself."""
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(CLONE_NEWUSER | PRIVATE))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(
    source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str = ""
) -> None:
    """The system call, with text for its strings."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    check(libc.mount(*texts, ctypes.c_ulong(flags), options.encode() or None))


def private_files(root: str, config: dict[str, Any], owner: int) -> str:
    """Make a file system of what the interpreter needs, read-only, and an empty /tmp; go there."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in config["readable"]:
        if os.path.islink(path):  # /lib on most systems
            os.symlink(os.readlink(path), root + path)
        else:
            bind(path, root + path)
    if not os.path.lexists(root + config["prefix"]):
        bind(".", root + config["prefix"])
    for name in ("null", "zero", "full", "random", "urandom"):
        bind(f"/dev/{name}", f"{root}/dev/{name}", MS_NOSUID)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    files = config["limits"]["files"]
    for path, size in (("/tmp", files), ("/dev/shm", files // 4)):
        os.makedirs(root + path, exist_ok=True)
        options = f"mode=700,uid={owner},gid={owner},size={size},nr_inodes=4096"
        mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.mkdir(f"{root}/proc")
    try:
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except PermissionError:
        pass  # in a container that hides parts of /proc: the program does without
    mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(root)
    check(libc.pivot_root(b".", b"."))
    check(libc.umount2(b".", MNT_DETACH))
    return "/tmp"


def bind(source: str, target: str, flags: int = MS_NOSUID | MS_NODEV) -> None:
    """Show a file or directory read-only under another path."""
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, None, MS_BIND | MS_REC)
    # What the mount forbids already it must go on forbidding, or the kernel refuses.
    flags |= os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def set_limits(limits: dict[str, Any], others: int) -> None:
    """Limits of the kernel's on this process and each that it starts."""
    wanted = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": int(limits["seconds"]) + 2,  # should the parent not keep the time
        "RLIMIT_FSIZE": limits["files"],
        "RLIMIT_NOFILE": 64,
    }
    if linux:
        wanted["RLIMIT_AS"] = limits["memory"]
        wanted["RLIMIT_NPROC"] = others + limits["processes"]
        wanted["RLIMIT_MEMLOCK"] = wanted["RLIMIT_MSGQUEUE"] = 0
    for name, value in wanted.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def kernel() -> tuple[int, ...]:
    """The version, as (5, 14)."""
    return tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])


def tasks_of(user: int) -> int:
    """How many threads a user has: RLIMIT_NPROC counts them together."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc") if linux else ()):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count
