"""Instructions, loops and waits that are read from machine code."""

from __future__ import annotations

import pytest

from mxcompile.offline.machine_code import Loop, parse

NVIDIA = """
	.sectionflags	@"SHF_BARRIERS=1"
.text.kernel:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   LDG.E.128 R8, desc[UR4][R2.64+0x800] ;
        /*0020*/                   FADD R6, R6, R9 ;
.L_x_0:
        /*0030*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0040*/                   UTCQMMA gdesc[UR8], gdesc[UR10], tmem[UR16], idesc[UR17] ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   SYNCS.PHASECHK.TRYWAIT P1, [R3], R4 ;
        /*0080*/              @!P1 BRA `(.L_x_2) ;
        /*0090*/                   NOP ;
        /*00a0*/                   LDG.E R20, desc[UR4][R2.64] ;
        /*00b0*/                   MUFU.EX2 R21, R20 ;
        /*00c0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00d0*/              @!P0 BRA `(.L_x_0) ;
        /*00e0*/               @P2 EXIT ;
        /*00f0*/                   EXIT ;
.L_x_3:
        /*0100*/                   FADD R1, R1, R1 ;
        /*0110*/                   BRA `(.L_x_0) ;
"""
OUTER, INNER = Loop(3, 13, 0), Loop(4, 6, 1)

AMD = """
kernel:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
	global_load_dwordx4 v[4:7], v2, s[0:1]
.LBB0_1:
	v_mfma_f32_32x32x16_bf16 a[0:15], v[4:5], v[6:7], a[0:15]
	s_barrier
	s_cbranch_scc0 .LBB0_1
; %bb.2:
	v_add_f32_e32 v1, v1, v2
	s_endpgm
"""


def test_loops_and_barriers_of_nvidia_code_are_counted():
    """Waits for an event are no loops, and what lies behind the end is not counted."""
    code = parse(NVIDIA)
    assert code.loops == (OUTER, INNER)
    assert code.product_loops == (OUTER, INNER)
    assert len(code.instructions) == 16
    assert [code.barriers(OUTER), code.barriers(INNER), code.barriers()] == [2, 1, 2]
    assert code.issued({}) == 15, "all but the NOP"
    assert code.issued({OUTER: 2, INNER: 8}) == 3 + 2 * (7 + 8 * 3) + 2


def test_round_trips_count_waits_per_loop_round():
    """Two loads and one use are one wait; the load of the outer loop is one each round."""
    code = parse(NVIDIA)
    assert code.round_trips({}) == 2
    assert code.round_trips({OUTER: 5, INNER: 8}) == 1 + 5


def test_loops_and_waits_of_amd_code_are_counted():
    """The scalar unit issues beside the vector units."""
    code = parse(AMD)
    (loop,) = code.product_loops
    assert code.issued({loop: 4}) == 1 + 4 + 1
    assert code.barriers(loop) == 1
    assert code.round_trips({loop: 4}) == 4, "in a loop that a load is in front of it may wait each round"


@pytest.mark.parametrize("text", ["", "no code at all"])
def test_empty_text_parses_to_no_instructions(text):
    assert parse(text).instructions == ()
