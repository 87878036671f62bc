"""The kernels are right with each instruction set, also on an emulated ARM processor, and a set can be forced."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gmmvit_deploy.runtimes.kernels import libraries
from tests.runtimes.kernels.test_masked_attention import needs_kernel

KERNELS = Path(libraries.__file__).parent
PROGRAM = Path(__file__).with_name("against_formula.c")
LACKS = 2
"""Status of the program where the processor chooses another instruction set than the expected set."""
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

pytestmark = pytest.mark.integration


def compiled_program(compiler: list[str], out: Path, kernels: Path = KERNELS) -> Path:
    """Compile the program with the kernels."""
    sources = [str(PROGRAM), *map(str, sorted(kernels.glob("*.c")))]
    in_c = [word for source in sources for word in ("-x", "c", source)]  # a C++ compiler asks each time
    command = [*compiler, "-O2", "-I", str(kernels), *in_c, "-x", "none", "-lm", "-o", str(out)]
    subprocess.run(command, check=True)
    return out


def cplusplus() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]} here")
    return compiler


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program for this processor."""
    return compiled_program(cplusplus(), tmp_path_factory.mktemp("here") / "program")


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program for 64-bit ARM, which an emulator runs."""
    for needed in (CROSS, EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"no {needed} here; Debian has it in the packages g++-aarch64-linux-gnu and qemu-user")
    return compiled_program([CROSS, "-static"], tmp_path_factory.mktemp("arm") / "program")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("instruction_set", "arithmetic"),
    [("avx2", "1"), ("avx512", "1"), ("avx512-bf16", "1"), ("avx512-bf16", "2"), ("neon", "1"), ("neon-bf16", "2")],
)
def test_each_set_of_this_processor_computes_the_formulas(here: Path, instruction_set: str, arithmetic: str) -> None:
    environment = {**os.environ, "GMMVIT_CPU_ISA": instruction_set}
    answer = subprocess.run(
        [here, instruction_set, arithmetic], env=environment, check=False, capture_output=True, text=True
    )
    if answer.returncode == LACKS:
        pytest.skip(answer.stdout.strip())
    assert answer.returncode == 0, answer.stdout
    assert "right" in answer.stdout
    assert instruction_set.startswith("avx512") or "int8 products: not computed" in answer.stdout


def run_here(program: Path) -> subprocess.CompletedProcess[str]:
    """Compare with the formulas, with the best instruction set of this processor."""
    chosen = subprocess.run([program, "?", "1"], check=False, capture_output=True, text=True).stdout
    name = chosen.removeprefix("expected ?, got ").strip()
    return subprocess.run([program, name, "1"], check=False, capture_output=True, text=True)


def test_the_best_set_of_this_processor_computes_the_formulas(here: Path) -> None:
    answer = run_here(here)
    assert answer.returncode == 0, answer.stdout
    assert "right" in answer.stdout


@pytest.mark.nightly
def test_the_kernels_read_and_write_only_their_arrays(tmp_path: Path) -> None:
    """The compiler's checks of addresses and undefined operations stop the program at the first error."""
    checks = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    try:
        program = compiled_program([*cplusplus(), *checks], tmp_path / "program")
    except subprocess.CalledProcessError:
        pytest.skip("this compiler lacks the checks of addresses: -fsanitize=address")
    answer = run_here(program)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "right" in answer.stdout


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("processor", "instruction_set", "arithmetic"),
    [("cortex-a72", "neon", "1"), ("max", "neon-bf16", "1"), ("max", "neon-bf16", "2")],
)
def test_an_emulated_arm_processor_computes_the_formulas(
    on_arm: Path, processor: str, instruction_set: str, arithmetic: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GMMVIT_CPU_ISA"}
    answer = subprocess.run(
        [EMULATOR, "-cpu", processor, on_arm, instruction_set, arithmetic],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "right" in answer.stdout


@pytest.mark.nightly
def test_the_program_notices_wrong_results(tmp_path: Path) -> None:
    """A polynomial of 2^x that is slightly off fails the comparison."""
    wrong = tmp_path / "kernels"
    shutil.copytree(KERNELS, wrong, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    products = wrong / "attention_products.h"
    text = products.read_text(encoding="utf-8")
    assert "6.931469838e-01f" in text
    products.write_text(text.replace("6.931469838e-01f", "6.932469838e-01f"), encoding="utf-8")
    answer = run_here(compiled_program(cplusplus(), tmp_path / "program", wrong))
    assert answer.returncode == 1, answer.stdout
    assert "WRONG" in answer.stdout


@pytest.mark.nightly
@needs_kernel
@pytest.mark.parametrize(("value", "works"), [("mmx", False), ("", True)])
def test_a_set_that_the_processor_lacks_is_refused(value: str, works: bool) -> None:
    """In a process of its own: a library reads the variable once."""
    ask = (
        "from gmmvit_deploy.runtimes.programs.openvino import our_kernels;"
        "kernels, why = our_kernels('fp32'); print(kernels.instruction_set if kernels else why)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", ask],
        env={**os.environ, "GMMVIT_CPU_ISA": value},
        check=True,
        capture_output=True,
        text=True,
    )
    (stated,) = answer.stdout.splitlines()
    if works:
        assert stated in ("avx512-bf16", "avx512", "avx2", "neon-bf16", "neon")
    else:
        assert stated.startswith("GMMVIT_CPU_ISA is mmx, and this processor has ")
        assert stated.endswith("; unset it, or set it to one of these")
