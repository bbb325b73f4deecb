"""What `large_blocks.c` takes over in a libc10, and what it leaves alone; its threads under a sanitizer."""

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from native_harness import SOURCES, run, sanitized

from surgeon_fx import allocator

pytestmark = [
    pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc"),
    pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="needs a 64-bit Linux"),
]
PAGE = 4096
PT_GNU_RELRO = 0x6474E552

LIBC10 = """
#include <stdlib.h>
#ifdef OWN_MALLOC
static int own_memalign(void **p, size_t alignment, size_t n) { return !(*p = aligned_alloc(alignment, n)); }
#define posix_memalign own_memalign
#endif
void *allocate(size_t n) { void *p; return posix_memalign(&p, 64, n) ? NULL : p; }
void release(void *p) { free(p); }
"""

PRELUDE = """
import ctypes, sys
libc10, blocks = ctypes.CDLL(sys.argv[1] + "/libc10.so"), ctypes.CDLL(sys.argv[1] + "/large_blocks.so")
libc10.allocate.restype, libc10.allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc10.release.argtypes = [ctypes.c_void_p]
def in_use():
    used, kept = ctypes.c_int64(), ctypes.c_int64()
    blocks.sfx_blocks_count(ctypes.byref(used), ctypes.byref(kept))
    return used.value
libc10.release(libc10.allocate(100))
"""


def build(folder: Path, *flags: str) -> None:
    (folder / "libc10.c").write_text(LIBC10)
    shared = ["gcc", "-O1", "-fPIC", "-shared", "-Wl,-z,relro,-z,now"]
    subprocess.run([*shared, *flags, "libc10.c", "-o", "libc10.so"], cwd=folder, check=True)
    subprocess.run([*shared, str(SOURCES / "large_blocks.c"), "-o", "large_blocks.so"], cwd=folder, check=True)


def python(folder: Path, code: str) -> list[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, (result.returncode, result.stderr)
    return result.stdout.split()


def test_takes_over_both_symbols(tmp_path):
    build(tmp_path)
    code = """
before = libc10.allocate(4 << 20)
print(blocks.sfx_blocks_install())
p = libc10.allocate(4 << 20)
print(in_use() >= 4 << 20)
libc10.release(p), libc10.release(before)
print(in_use())
"""
    assert python(tmp_path, code) == ["0", "True", "0"]


def test_takes_over_nothing_where_libc10_has_its_own_malloc(tmp_path):
    build(tmp_path, "-DOWN_MALLOC")
    status, used = python(
        tmp_path, "print(blocks.sfx_blocks_install()); p = libc10.allocate(4 << 20); print(in_use()); libc10.release(p)"
    )
    assert "allocator of its own" in allocator.REFUSALS[int(status)]
    assert used == "0"


def test_says_so_where_there_is_no_libc10(tmp_path):
    build(tmp_path)
    (tmp_path / "libc10.so").rename(tmp_path / "other.so")
    code = f"import ctypes; print(ctypes.CDLL('{tmp_path}/large_blocks.so').sfx_blocks_install())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no libc10" in allocator.REFUSALS[int(result.stdout)]


def test_leaves_a_replaced_free_alone(tmp_path):
    build(tmp_path)
    (tmp_path / "preload.c").write_text("#define _GNU_SOURCE\n#include <dlfcn.h>\n" + REPLACED_FREE)
    subprocess.run(["gcc", "-fPIC", "-shared", "preload.c", "-o", "preload.so", "-ldl"], cwd=tmp_path, check=True)
    command = [sys.executable, "-c", PRELUDE + "print(blocks.sfx_blocks_install())", str(tmp_path)]
    environment = {"LD_PRELOAD": str(tmp_path / "preload.so")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "has replaced them" in allocator.REFUSALS[int(result.stdout)]


REPLACED_FREE = """
void free(void *p) {
    static void (*next)(void *);
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    next(p);
}
"""


def test_a_page_that_is_not_protected_stays_writable(tmp_path):
    """The protected part ends inside the page of the import table, so the loader leaves that page writable."""
    build(tmp_path)
    end = shorten_relro(tmp_path / "libc10.so")
    code = f"""
base = next(int(l.split("-")[0], 16) for l in open("/proc/self/maps") if l.rstrip().endswith("libc10.so"))
word = ctypes.c_uint64.from_address(base + {end} - 8)
word.value = word.value
print(blocks.sfx_blocks_install())
word.value = word.value
libc10.release(libc10.allocate(4 << 20))
"""
    assert python(tmp_path, code) == ["0"]


def shorten_relro(path: Path) -> int:
    """Cuts a word off the protected part of an ELF file. Returns where the part ended."""
    data = bytearray(path.read_bytes())
    (first,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    for at in range(first, first + size * count, size):
        kind, _, _, address, _, _, length = struct.unpack_from("<IIQQQQQ", data, at)
        if kind == PT_GNU_RELRO:
            assert (address + length) % PAGE == 0, "the linker pads the protected part to whole pages"
            struct.pack_into("<Q", data, at + 40, length - 8)
            path.write_bytes(data)
            return int(address + length)
    raise AssertionError("no protected part")


HARNESS = Path(__file__).with_name("large_blocks_check.c")


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="needs a 64-bit system")
@pytest.mark.parametrize("sanitizers", ["undefined", "thread"])
def test_threads_and_forks_under_sanitizers(sanitizers):
    run(sanitized(sanitizers, HARNESS, alone=True))
