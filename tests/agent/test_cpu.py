"""What of the processor decides how weights are laid out."""

from __future__ import annotations

from agent.cpu import parse_cpuinfo, this_cpu

X86 = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 158
model name\t: Some CPU @ 3.00GHz
stepping\t: 10
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse2 ssse3 avx2 avx512_vnni {other}
"""
CORTEX = """\
processor\t: {number}
BogoMIPS\t: 108.00
Features\t: fp asimd {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x{variant}
CPU part\t: 0xd0b
CPU revision\t: 1
"""


def test_x86_keeps_what_kernels_are_chosen_by() -> None:
    first = parse_cpuinfo("x86_64", X86.format(mhz=1, other="pti"))
    assert first == parse_cpuinfo("x86_64", X86.format(mhz=2, other="new_kernel_flag") + "\n" + X86)
    assert first.models == ("GenuineIntel 6 158 10 Some CPU @ 3.00GHz",)
    assert first.features == ("avx2", "avx512_vnni", "sse2", "ssse3")


def test_arm_boards_with_two_kinds_of_core_have_what_both_have() -> None:
    text = (
        CORTEX.format(number=0, features="asimddp", variant=4) + "\n" + CORTEX.format(number=1, features="", variant=1)
    )
    cpu = parse_cpuinfo("aarch64", text)
    assert cpu.models == ("0x41 8 0x1 0xd0b 1", "0x41 8 0x4 0xd0b 1")
    assert cpu.features == ("asimd", "fp")


def test_nothing_known_is_no_error() -> None:
    assert parse_cpuinfo("riscv64", "").features == ()


def test_this_one() -> None:
    assert this_cpu() == this_cpu()
    assert this_cpu().architecture
