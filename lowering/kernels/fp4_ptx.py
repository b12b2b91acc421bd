"""PTX of FP4 casts for NVIDIA's chips from sm_100 on: instructions that Triton does not emit by itself.

``tests/triton_interpreter/exact_interpreter.py`` computes each text as the PTX ISA 8.6 defines it. sm_100 has
instructions on two FP32 numbers (`f32x2`); for sm_120 the assembler splits them in two.
"""

from __future__ import annotations

import triton.language as tl

from mxcompile.formats.stochastic import MULTIPLIER, ROUNDS, WEYL


def _philox() -> str:
    """Returns PTX for the two words of `formats.stochastic.philox`: index $2, stream $3, seed $4."""
    lines = [".reg .b64 product;", ".reg .b32 left, right, low, high, key;"]
    lines += ["mov.b32 left, $2;", "mov.b32 right, $3;", "mov.b32 key, $4;"]
    for _ in range(ROUNDS):
        lines += [
            f"mul.wide.u32 product, left, 0x{MULTIPLIER:X};",
            "mov.b64 {low, high}, product;",
            "lop3.b32 left, high, key, right, 0x96;",
            "mov.b32 right, low;",
            f"add.u32 key, key, 0x{WEYL:X};",
        ]
    lines += ["mov.b32 $0, left;", "mov.b32 $1, right;"]
    return "{\n    " + "\n    ".join(lines) + "\n}"


PHILOX = tl.constexpr(_philox())
"""PTX of one Philox call: both of its words."""

PAIRS = tl.constexpr("""{
    .reg .b8 first, second, third, fourth;
    cvt.rn.satfinite.e2m1x2.f32 first, $5, $1;
    cvt.rn.satfinite.e2m1x2.f32 second, $6, $2;
    cvt.rn.satfinite.e2m1x2.f32 third, $7, $3;
    cvt.rn.satfinite.e2m1x2.f32 fourth, $8, $4;
    mov.b32 $0, {first, second, third, fourth};
}""")
"""Four bytes with two E2M1 codes each: FP32 $1 to $4 in the low halves, $5 to $8 in the high halves."""

_TWO = """{{
    .reg .b64 left, right, result;
    .reg .f32 first, second;
    {sign}.f32 first, $4;
    {sign}.f32 second, $5;
    mov.b64 left, {{$2, $3}};
    mov.b64 right, {{first, second}};
    {operation}.rn.f32x2 result, left, right;
    mov.b64 {{$0, $1}}, result;
}}"""
ADD = tl.constexpr(_TWO.format(operation="add", sign="mov"))
"""($2 + $4, $3 + $5)."""
SUBTRACT = tl.constexpr(_TWO.format(operation="add", sign="neg"))
"""($2 − $4, $3 − $5)."""
MULTIPLY = tl.constexpr(_TWO.format(operation="mul", sign="mov"))
"""($2 · $4, $3 · $5)."""

ROUND = tl.constexpr("{ cvt.rn.bf16x2.f32 $0, $2, $1; }")
"""BF16 of $1 in the low half and of $2 in the high half."""

RECIPROCAL = tl.constexpr("""{
    .reg .f32 guess, error, negative;
    rcp.approx.ftz.f32 guess, $1;
    neg.f32 negative, $1;
    fma.rn.f32 error, negative, guess, 0f3F800000;
    fma.rn.f32 $0, guess, error, guess;
}""")
"""1 / $1 to nearest, for 2^−126 ≤ $1 < 2^126; NaN for 0. rcp.rn.f32 compiles to the same for this range."""

_RANDOM_PAIR = """
    mov.b64 both, {{${low}, ${high}}};
    mov.b64 factor, {{${factor}, ${factor}}};
    mul.rn.f32x2 both, both, factor;
    mov.b64 factor, 0x0080000000800000;
    mul.rn.f32x2 both, both, factor;
    mov.b64 {{first, second}}, both;
    lop3.b32 noise, ${word}, 0x0000FFFF, 0x00000001, 0xEA;
    mad.lo.u32 first, noise, 64, first;
    lop3.b32 noise, ${word}, 0xFFFF0000, 0x00010000, 0xEA;
    mad.hi.u32 second, noise, 0x00400000, second;
    and.b32 first, first, 0xFFC00000;
    and.b32 second, second, 0xFFC00000;
    mov.b64 both, {{first, second}};
    mov.b64 factor, 0x7E8000007E800000;
    mul.rn.f32x2 both, both, factor;
    mov.b64 {{x, y}}, both;
    cvt.rn.satfinite.e2m1x2.f32 byte{at}, y, x;"""


def _random_pairs() -> str:
    declared = [".b64 both, factor", ".b32 first, second, noise", ".f32 x, y", ".b8 byte<4>"]
    pairs = (
        _RANDOM_PAIR.format(at=at, low=1 + at, high=5 + at, factor=9 + at, word=13 + at) for at in range(4)
    )
    lines = "".join(f"\n    .reg {kind};" for kind in declared)
    return f"{{{lines}{''.join(pairs)}\n    mov.b32 $0, {{byte0, byte1, byte2, byte3}};\n}}"


RANDOM_PAIRS = tl.constexpr(_random_pairs())
"""Four bytes: codes of $1 to $4 (low) and $5 to $8 (high), times $9 to $12; random bits from $13 to $16.

2^−126 is the smallest normal FP32 number. Times 2^−126, E2M1's subnormals become FP32's subnormals, and the
last 22 bits of the sum with the random bits are cut off.
"""
