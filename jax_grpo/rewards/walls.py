"""Calls of the Linux kernel that Python has no function for, and the two filters made of them.

Part of what runs in the sandbox: it needs the standard library only. Elsewhere than on Linux it
can be imported, and its filters say that they are not there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 1 << 28, 1 << 29, 1 << 30
PRIVATE = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
ANY_NEW = PRIVATE | CLONE_NEWCGROUP | CLONE_NEWUSER
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38

# System calls by machine: x86-64, then those of the generic table (ARM and others).
CALLS = {
    "x86_64": {
        **dict(pivot_root=155, ptrace=101, mount=165, umount2=166, swapon=167, reboot=169),
        **dict(init_module=175, delete_module=176, kexec_load=246, add_key=248, request_key=249),
        **dict(keyctl=250, unshare=272, perf_event_open=298, open_by_handle_at=304, setns=308),
        **dict(process_vm_readv=310, process_vm_writev=311, finit_module=313, bpf=321),
        **dict(userfaultfd=323, kexec_file_load=320, clone=56, prctl=157, socket=41, setpgid=109),
        **dict(setsid=112, kill=62, tkill=200, tgkill=234, rt_sigqueueinfo=129, chroot=161),
        **dict(rt_tgsigqueueinfo=297, prlimit64=302, capset=126, acct=163, personality=135),
        **dict(memfd_create=319, shmget=29, semget=64, msgget=68, fcntl=72, ioctl=16),
        **dict(setpriority=141, sched_setparam=142, sched_setscheduler=144, sched_setattr=314),
        **dict(sched_setaffinity=203, ioprio_set=251, migrate_pages=256, move_pages=279),
    },
    "aarch64": {
        **dict(pivot_root=41, ptrace=117, mount=40, umount2=39, swapon=224, reboot=142),
        **dict(init_module=105, delete_module=106, kexec_load=104, add_key=217, request_key=218),
        **dict(keyctl=219, unshare=97, perf_event_open=241, open_by_handle_at=265, setns=268),
        **dict(process_vm_readv=270, process_vm_writev=271, finit_module=273, bpf=280),
        **dict(userfaultfd=282, kexec_file_load=294, clone=220, prctl=167, socket=198, setpgid=154),
        **dict(setsid=157, kill=129, tkill=130, tgkill=131, rt_sigqueueinfo=138, chroot=51),
        **dict(rt_tgsigqueueinfo=240, prlimit64=261, capset=91, acct=89, personality=92),
        **dict(memfd_create=279, shmget=194, semget=190, msgget=186, fcntl=25, ioctl=29),
        **dict(setpriority=140, sched_setparam=118, sched_setscheduler=119, sched_setattr=274),
        **dict(sched_setaffinity=122, ioprio_set=30, migrate_pages=238, move_pages=239),
    },
}
# The same number everywhere.
NEWER = {
    **dict(pidfd_send_signal=424, io_uring_setup=425, open_tree=428, move_mount=429, fsopen=430),
    **dict(pidfd_getfd=438, memfd_secret=447),
}
CLONE3, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 435, 444, 445, 446
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NEVER = (
    "pivot_root ptrace mount umount2 swapon reboot init_module delete_module kexec_load add_key "
    "request_key keyctl unshare perf_event_open open_by_handle_at setns process_vm_readv "
    "process_vm_writev finit_module bpf userfaultfd kexec_file_load chroot acct capset personality "
    "io_uring_setup open_tree move_mount fsopen pidfd_getfd "
    "memfd_create memfd_secret shmget semget msgget"  # memory that no limit of ours counts
).split()
# Without a process namespace a program could leave its group, or signal others of its user, or
# slow them down.
NEVER_AMONG_OTHERS = (
    "socket setpgid setsid tkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal setpriority "
    "sched_setparam sched_setscheduler sched_setattr ioprio_set migrate_pages move_pages"
).split()
# Requests that have the kernel send the signal: F_SETOWN, F_SETSIG, F_SETOWN_EX.
SIGNAL_OWNERS = [("fcntl", 8), ("fcntl", 10), ("fcntl", 15), ("ioctl", 0x8901), ("ioctl", 0x8902)]
AF_INET6 = 10

libc = ctypes.CDLL(None, use_errno=True)
linux = sys.platform == "linux"


def check(result: int) -> int:
    """What a call of libc gave; OSError when it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(number: int, *arguments: int) -> int:
    """A system call that libc has no function for."""
    return check(libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments)))


def prctl(option: int, value: int) -> None:
    """Change a property of this process."""
    check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def landlock(home: str, readable: list[str]) -> bool:
    """Reading where the interpreter lies, everything in one directory, and nothing elsewhere."""
    execute, read_file, read_dir = 1, 4, 8
    try:
        abi = call(LANDLOCK_CREATE, 0, 0, 1)
        everything = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1
        rules = ctypes.create_string_buffer(struct.pack("Q", everything))
        rule_set = call(LANDLOCK_CREATE, ctypes.addressof(rules), 8, 0)
        within = everything & ~(1 << 6 | 1 << 11)  # no device files
        reading = execute | read_file | read_dir
        devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
        for path, allowed in (
            [(home, within)]
            + [(path, reading) for path in readable]
            + [(path, read_file | 2) for path in devices]
        ):
            descriptor = os.open(path, os.O_PATH)
            if not os.path.isdir(path):
                allowed &= execute | read_file | 2
            rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor))
            call(LANDLOCK_ADD, rule_set, 1, ctypes.addressof(rule), 0)
            os.close(descriptor)
        call(LANDLOCK_RESTRICT, rule_set, 0)
        os.close(rule_set)
    except OSError:
        return False
    return True


def seccomp(among_others: bool) -> bool:
    """Refuse the system calls that no honest program needs."""
    machine = os.uname().machine
    if machine not in CALLS or sys.byteorder != "little":
        return False
    numbers = {**CALLS[machine], **NEWER}
    load, equal, above, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, absent = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    number, arch, first, second = 0, 4, 16, 24  # where they lie in struct seccomp_data
    program = [(load, 0, 0, arch), (equal, 1, 0, AUDIT_ARCH[machine]), (give, 0, 0, 0x80000000)]
    program += [(load, 0, 0, number), (above, 0, 1, 0x40000000), (give, 0, 0, refuse)]
    for name in NEVER + (NEVER_AMONG_OTHERS if among_others else []):
        program += [(equal, 0, 1, numbers[name]), (give, 0, 0, refuse)]
    program += [(equal, 0, 1, CLONE3), (give, 0, 0, absent)]  # libc then takes clone
    tests = [
        ("clone", first, any_bit, ANY_NEW, 0),
        ("prctl", first, equal, PR_SET_PDEATHSIG, 0),
        ("socket", first, above, AF_INET6, 0),  # AF_VSOCK reaches out of any network namespace
    ]
    if among_others:  # signals to itself alone
        tests += [(name, first, equal, os.getpid(), 1) for name in ("kill", "tgkill")]
        tests += [(name, first, equal, 0, 1) for name in ("prlimit64", "sched_setaffinity")]
        tests += [(name, second, equal, request, 0) for name, request in SIGNAL_OWNERS]
    for name, argument, test, value, negated in tests:
        jumps = (1, 0) if negated else (0, 1)
        program += [(equal, 0, 4, numbers[name]), (load, 0, 0, argument), (test, *jumps, value)]
        program += [(give, 0, 0, refuse), (load, 0, 0, number)]
    program += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    )
    try:
        check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_ulong(ctypes.addressof(header)), 0, 0))
    except OSError:
        return False
    return True
