"""The program inside of the sandbox: it closes the doors behind itself and runs the code from its
standard input.

`sandbox.py` starts it with the text of this file, and a call of `main`. So it imports nothing but
the standard library, and little of it, because imports are most of its time. A failure to close a
door ends it before the code runs.
"""

from __future__ import annotations

import _ast
import ctypes
import os
import resource
import sys

_NAME = "<python>"  # of the code, in tracebacks
_LANDLOCK = {"create": 444, "add": 445, "restrict": 446}  # the numbers of all architectures
_FOLDER, _FILE, _NULL = 0b1101, 0b0101, 0b0110  # 1: execute, 2: write, 4: read, 8: list a folder
_EPERM, _ENOSYS, _SIGKILL = 1, 38, 9
_NEW_USER, _THREAD = 0x10000000, 0x00010000  # flags of clone
# Memory that no limit counts, ways to get rights back, and parts of the kernel with a long record.
_REFUSED = """
unshare setns mount fsopen open_tree memfd_create memfd_secret shmget io_uring_setup keyctl add_key
request_key bpf userfaultfd perf_event_open
"""
# A process with threads that reads files. No socket, program, signal to others or change of a file
_ALLOWED = """
access alarm arch_prctl brk clock_getres clock_gettime clock_nanosleep close close_range dup dup2
dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 exit exit_group faccessat
faccessat2 fadvise64 fcntl fstat fstatfs futex get_robust_list getcpu getcwd getdents64 getegid
geteuid getgid getgroups getitimer getpgid getpgrp getpid getppid getpriority getrandom getresgid
getresuid getrlimit getrusage getsid gettid gettimeofday getuid ioctl lseek lstat madvise membarrier
mincore mmap mprotect mremap msync munmap nanosleep newfstatat open openat pause pipe pipe2 poll
ppoll pread64 preadv preadv2 pselect6 read readlink readlinkat readv restart_syscall rseq
rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait
sched_getaffinity sched_getparam sched_getscheduler sched_yield select set_robust_list
set_tid_address setitimer sigaltstack stat statfs statx sysinfo time timerfd_create timerfd_gettime
timerfd_settime times umask uname wait4 waitid write writev
"""


class _Argument(ctypes.Structure):
    """scmp_arg_cmp of libseccomp: holds if argument `number` & `mask` == `value`."""

    _fields_ = (
        ("number", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


def main(
    level: str, limits: dict[str, int], readable: list[str], user: int, parent: int, seconds: int
) -> None:
    """Close the doors of `level`, then run the code. `user` 0: the user stays."""
    # bwrap does not see that its parent ended before it began, so the code has an end of its own.
    _call("alarm", seconds)
    code = sys.stdin.buffer.read().decode()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if level != "bwrap":  # which does it itself
        _call("prctl", 1, _SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # which has ended before
            sys.exit(1)
    if level == "landlock":
        _close_files(readable)
    if level != "none":
        _close_kernel(has_programs=level == "bwrap")
    _run(code)


def _call(function: str, *arguments: object) -> int:
    """Call a function of the C library. OSError if it fails."""
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


def _close_files(readable: list[str]) -> None:
    """Let this process read the given files and folders, and nothing else."""
    version = _call("syscall", _LANDLOCK["create"], None, 0, 1)
    num_rights = 13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16
    handled = ctypes.c_uint64((1 << num_rights) - 1)
    rules = _call("syscall", _LANDLOCK["create"], ctypes.byref(handled), 8, 0)
    rights = {path: _FOLDER if os.path.isdir(path) else _FILE for path in readable}
    for path, right in {**rights, "/dev/urandom": _FILE, os.devnull: _NULL}.items():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = right.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
        _call("syscall", _LANDLOCK["add"], rules, 1, rule, 0)
        os.close(place)
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _call("syscall", _LANDLOCK["restrict"], rules, 0)
    os.close(rules)


def _close_kernel(*, has_programs: bool) -> None:
    """Refuse system calls: those of `_REFUSED`, or without programs all but `_ALLOWED`."""
    library = ctypes.CDLL("libseccomp.so.2")
    begin = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(("seccomp_init", library))
    allow, refuse, is_absent = 0x7FFF0000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS
    context = ctypes.c_void_p(begin(allow if has_programs else refuse))

    def add(action: int, name: str, *conditions: tuple[int, int, int]) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        tests = (_Argument * len(conditions))(*((at, 7, *rest) for at, *rest in conditions))
        result = library.seccomp_rule_add_array(context, action, number, len(conditions), tests)
        if result and (number >= 0 or conditions):  # else this machine has no such call
            raise OSError(-result, f"libseccomp: {name}: {os.strerror(-result)}")

    add(is_absent, "clone3")  # hides its flags. The C library then uses clone
    if has_programs:
        add(refuse, "clone", (0, _NEW_USER, _NEW_USER))
    else:
        add(allow, "clone", (0, _THREAD, _THREAD))
        add(allow, "prlimit64", (2, (1 << 64) - 1, 0))  # reads a limit
    for name in (_REFUSED if has_programs else _ALLOWED).split():
        add(refuse if has_programs else allow, name)
    result = library.seccomp_load(context)
    if result:
        raise OSError(-result, f"libseccomp: {os.strerror(-result)}")


def _run(code: str) -> None:
    """Run the code. The value of an expression at its end is printed."""
    space: dict[str, object] = {"__name__": "__main__"}
    try:
        tree, value = compile(code, _NAME, "exec", _ast.PyCF_ONLY_AST), None
        assert isinstance(tree, _ast.Module)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), space)
        if isinstance(last, _ast.Expr):
            value = eval(compile(_ast.Expression(last.value), _NAME, "eval"), space)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    except Exception as error:
        import linecache
        import traceback

        linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
        place = error.__traceback__  # begins with frames of this program
        while place is not None and place.tb_frame.f_code.co_filename != _NAME:
            place = place.tb_next
        traceback.print_exception(error.with_traceback(place))
        sys.exit(1)
