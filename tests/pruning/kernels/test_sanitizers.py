"""The kernels read and write only their own memory, for every instruction set, and compile without a warning."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import sampled

from pruning.kernels import compiling

ROOT = Path(__file__).parents[3]
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
ISAS = {
    "native": "",
    "AVX-512 without VNNI": "-mno-avx512vnni -mno-amx-int8",
    "AVX2": "-mavx2 -mfma -mno-avx512f -mno-avxvnni",
    "SSE": "-march=x86-64",
}
"""Instruction set -> the compiler's flags for it."""
NAMES = ("kernels", "byte_kernels", "dense_steps", "sparse_layer", "sparse_sequence")
TESTS = tuple(
    f"tests/pruning/kernels/test_{name}.py" for name in ("kernels", "byte_kernels", "dense_steps", "sparse_layer")
)
LESS = "not recorded and not forked"
"""Tests of torch.compile and of fork, which a sanitizer makes slow, are left out."""
WRONG = "sum += *(const eight *)(values + i) * read", "sum += *(const eight *)(values + i + 1) * read"
"""A line of rows.c, and one that reads a weight too far."""


def _isas() -> list[str]:
    machine = os.uname().machine
    return [name for name in ISAS if name == "native" or machine == "x86_64"]


def _runtime() -> str:
    """Return the libraries to load before Python: the sanitizer's, and the C++ one, whose exceptions it intercepts."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc, whose sanitizers these tests use, is not installed")
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(Path(file).is_absolute() and Path(file).exists() for file in found):
        pytest.skip("gcc has no address sanitizer (libasan) here")
    return " ".join(found)


def _pytest(cache: Path, flags: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a process of its own, with kernels compiled with more flags."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), compiling.MORE_FLAGS: flags, **environment},
    )


def _sanitized(cache: Path, flags: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _pytest(
        cache,
        f"{SANITIZED} {flags}",
        *arguments,
        CC="gcc",
        LD_PRELOAD=_runtime(),
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
        OMP_NUM_THREADS="1",
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", _isas())
def test_kernels_pass_their_tests_under_sanitizers(isa: str, tmp_path: Path) -> None:
    done = _sanitized(tmp_path, ISAS[isa], *TESTS, "-k", LESS, "--timeout", "900")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "runtime error" not in done.stderr
    assert "passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isa", [isa for isa in _isas() if isa != "native"])
def test_kernels_pass_their_tests_on_other_instruction_sets(isa: str, tmp_path: Path) -> None:
    done = _pytest(tmp_path, ISAS[isa], *TESTS, "--timeout", "900")
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sanitizer_catches_a_kernel_that_reads_too_far(tmp_path: Path) -> None:
    runtime = _runtime()
    sources = tmp_path / "sources"
    shutil.copytree(compiling.SOURCES, sources)
    text = (sources / "rows.c").read_text()
    assert text.count(WRONG[0]) == 1
    code = (
        "from pathlib import Path; import torch\n"
        "from pruning.kernels import compiling; from pruning.kernels.row_kernel import KERNEL\n"
        "from pruning.kernels.sparse_weight import LayerShape, SparseWeight\n"
        f"compiling.SOURCES = Path({str(sources)!r})\n"
        "layer, weight = LayerShape('linear', 8, 2), SparseWeight.of(torch.ones(2, 8))\n"
        "arrays, bias = KERNEL.pack(weight, layer, {}), torch.zeros(2)\n"
        "arrays[2] = torch.frombuffer(bytearray(arrays[2].numpy().tobytes()), dtype=torch.float32)\n"
        "print(KERNEL.bind(layer, {}, arrays, bias, torch.Size([1, 8]))(torch.ones(1, 8), None).tolist())\n"
    )
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "CC": "gcc",
        compiling.MORE_FLAGS: SANITIZED,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    for line, caught in ((WRONG[0], False), (WRONG[1], True)):
        (sources / "rows.c").write_text(text.replace(WRONG[0], line))
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert ("AddressSanitizer" in done.stderr and "rows.c" in done.stderr) == caught, done.stderr[-2000:]
        assert (done.stdout.strip() == "[[8.0, 8.0]]") != caught


@sampled(16)
@pytest.mark.parametrize("isa", _isas())
def test_the_sources_compile_without_a_warning(isa: str, tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is installed")
    flags = [*compiling._flags(), *ISAS[isa].split(), "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    sources = map(str, sorted(compiling.SOURCES.glob("*.c")))
    command = [compiler, *flags, *compiling.THREADED, *sources, "-o", str(tmp_path / "kernels.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
