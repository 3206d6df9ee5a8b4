"""Numbers that the programs of one CUDA launch exchange through global memory.

A program publishes a number and a tag in one 64-bit word; others wait until the word has the tag that they expect, and read
the number. Programs that wait for one another form a group.

A group is made of programs with consecutive numbers. A GPU starts the blocks of a one-dimensional grid in the order of their
numbers, which the scans of NVIDIA's CUB rely on too. So an unfinished group waits for programs that have started, or that
start as soon as earlier groups end; a GPU with room for a single group completes the launch. Numbers from an atomic counter
would need no such order; they cost AttnRes 4 to 5 % of a backward on an H200.

Before the launch all words are 0. Tags count from 1.
"""

from .language import tl, triton


@triton.jit
def publish(p_words, b_value, tag):
    """Stores fp32 numbers, each with the tag in one int64 word."""
    b_bits = b_value.to(tl.uint32, bitcast=True).to(tl.int64) | (tl.cast(tag, tl.int64) << 32)
    tl.atomic_xchg(p_words, b_bits, sem="relaxed", scope="gpu")


@triton.jit
def collect(p_words, tag):
    """fp32, shaped as p_words: waits until every word has the tag, and returns their numbers."""
    return tl.inline_asm_elementwise(
        "{.reg .pred there; .reg .b64 word; .reg .b32 value, seen; AGAIN: ld.relaxed.gpu.global.b64 word, [$1];"
        " mov.b64 {value, seen}, word; setp.eq.b32 there, seen, $2; @!there bra AGAIN; mov.b32 $0, value;}",
        "=r,l,r",
        [p_words.to(tl.int64, bitcast=True), tag],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
