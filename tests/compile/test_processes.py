"""Memory by kind, from smaps texts and from real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from compile.processes import Mapped, forget_peak, mapped_of, parse_smaps, stands_still, status_of, tree_of


def mapping(path: str, inode: int, rss: int, pss: int, anonymous: int) -> str:
    return (
        f"7f00-7f10 r--p 00000000 fe:00 {inode:<10} {path}\n"
        f"Size: 900 kB\nRss: {rss} kB\nPss: {pss} kB\nAnonymous: {anonymous} kB\nVmFlags: rd mr\n"
    )


SMAPS = (
    mapping("/srv/rec.tfb/segments/weights.bin", 11, 100, 50, 0)
    + mapping("/srv/rec.tfb-other/weights.bin", 12, 64, 32, 0)
    + mapping("/usr/lib/libc.so.6", 13, 80, 10, 4)
    + mapping("/memfd:slab (deleted)", 14, 40, 20, 0)
    + mapping("[heap]", 0, 30, 30, 30)
    + mapping("", 0, 7, 7, 7)
    + mapping("[vdso]", 0, 4, 0, 0)
)


def test_kinds_are_told_apart() -> None:
    kib = 1024
    seen = parse_smaps(SMAPS, (Path("/srv/rec.tfb"),))
    assert seen == Mapped(anonymous=41 * kib, shared=20 * kib, weights=50 * kib, libraries=38 * kib)
    assert parse_smaps(SMAPS, ()).weights == 0
    assert parse_smaps("", ()) == Mapped()


def test_this_process_has_anonymous_memory_and_libraries() -> None:
    seen, status = mapped_of(os.getpid(), ()), status_of(os.getpid())
    assert status is not None
    assert 1 << 20 < seen.anonymous < status.resident <= status.peak_resident
    assert seen.libraries > 0


def test_mapped_files_of_a_folder_are_weights(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x" * (4 << 20))
    program = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
        "sum(m[i] for i in range(0, len(m), 4096)); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert mapped_of(child.pid, (tmp_path,)).weights == 4 << 20
        assert child.pid in tree_of(os.getpid())
        forget_peak(child.pid)
        child.communicate()
    assert status_of(child.pid) is None
    assert mapped_of(child.pid, ()) == Mapped()


def test_a_process_stands_still_when_all_its_threads_do() -> None:
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not stands_still(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not stands_still(process.pid) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stands_still(process.pid)
        process.kill()
    assert stands_still(process.pid)
