"""Device code that fills tables of offsets, from 64 arguments of a launch: lists of up to as many blocks take one."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "first",
        *("o_0", "o_1", "o_2", "o_3", "o_4", "o_5", "o_6", "o_7"),
        *("o_8", "o_9", "o_10", "o_11", "o_12", "o_13", "o_14", "o_15"),
        *("o_16", "o_17", "o_18", "o_19", "o_20", "o_21", "o_22", "o_23"),
        *("o_24", "o_25", "o_26", "o_27", "o_28", "o_29", "o_30", "o_31"),
        *("o_32", "o_33", "o_34", "o_35", "o_36", "o_37", "o_38", "o_39"),
        *("o_40", "o_41", "o_42", "o_43", "o_44", "o_45", "o_46", "o_47"),
        *("o_48", "o_49", "o_50", "o_51", "o_52", "o_53", "o_54", "o_55"),
        *("o_56", "o_57", "o_58", "o_59", "o_60", "o_61", "o_62", "o_63"),
    ]
)
def attn_res_long_table_kernel(
    p_table,
    first,
    o_0: tl.int64,
    o_1: tl.int64,
    o_2: tl.int64,
    o_3: tl.int64,
    o_4: tl.int64,
    o_5: tl.int64,
    o_6: tl.int64,
    o_7: tl.int64,
    o_8: tl.int64,
    o_9: tl.int64,
    o_10: tl.int64,
    o_11: tl.int64,
    o_12: tl.int64,
    o_13: tl.int64,
    o_14: tl.int64,
    o_15: tl.int64,
    o_16: tl.int64,
    o_17: tl.int64,
    o_18: tl.int64,
    o_19: tl.int64,
    o_20: tl.int64,
    o_21: tl.int64,
    o_22: tl.int64,
    o_23: tl.int64,
    o_24: tl.int64,
    o_25: tl.int64,
    o_26: tl.int64,
    o_27: tl.int64,
    o_28: tl.int64,
    o_29: tl.int64,
    o_30: tl.int64,
    o_31: tl.int64,
    o_32: tl.int64,
    o_33: tl.int64,
    o_34: tl.int64,
    o_35: tl.int64,
    o_36: tl.int64,
    o_37: tl.int64,
    o_38: tl.int64,
    o_39: tl.int64,
    o_40: tl.int64,
    o_41: tl.int64,
    o_42: tl.int64,
    o_43: tl.int64,
    o_44: tl.int64,
    o_45: tl.int64,
    o_46: tl.int64,
    o_47: tl.int64,
    o_48: tl.int64,
    o_49: tl.int64,
    o_50: tl.int64,
    o_51: tl.int64,
    o_52: tl.int64,
    o_53: tl.int64,
    o_54: tl.int64,
    o_55: tl.int64,
    o_56: tl.int64,
    o_57: tl.int64,
    o_58: tl.int64,
    o_59: tl.int64,
    o_60: tl.int64,
    o_61: tl.int64,
    o_62: tl.int64,
    o_63: tl.int64,
):
    """64 entries of a table of offsets, from `first` on: as `attn_res_table_kernel`."""
    p_entry = p_table + first
    tl.store(p_entry, o_0)
    tl.store(p_entry + 1, o_1)
    tl.store(p_entry + 2, o_2)
    tl.store(p_entry + 3, o_3)
    tl.store(p_entry + 4, o_4)
    tl.store(p_entry + 5, o_5)
    tl.store(p_entry + 6, o_6)
    tl.store(p_entry + 7, o_7)
    tl.store(p_entry + 8, o_8)
    tl.store(p_entry + 9, o_9)
    tl.store(p_entry + 10, o_10)
    tl.store(p_entry + 11, o_11)
    tl.store(p_entry + 12, o_12)
    tl.store(p_entry + 13, o_13)
    tl.store(p_entry + 14, o_14)
    tl.store(p_entry + 15, o_15)
    tl.store(p_entry + 16, o_16)
    tl.store(p_entry + 17, o_17)
    tl.store(p_entry + 18, o_18)
    tl.store(p_entry + 19, o_19)
    tl.store(p_entry + 20, o_20)
    tl.store(p_entry + 21, o_21)
    tl.store(p_entry + 22, o_22)
    tl.store(p_entry + 23, o_23)
    tl.store(p_entry + 24, o_24)
    tl.store(p_entry + 25, o_25)
    tl.store(p_entry + 26, o_26)
    tl.store(p_entry + 27, o_27)
    tl.store(p_entry + 28, o_28)
    tl.store(p_entry + 29, o_29)
    tl.store(p_entry + 30, o_30)
    tl.store(p_entry + 31, o_31)
    tl.store(p_entry + 32, o_32)
    tl.store(p_entry + 33, o_33)
    tl.store(p_entry + 34, o_34)
    tl.store(p_entry + 35, o_35)
    tl.store(p_entry + 36, o_36)
    tl.store(p_entry + 37, o_37)
    tl.store(p_entry + 38, o_38)
    tl.store(p_entry + 39, o_39)
    tl.store(p_entry + 40, o_40)
    tl.store(p_entry + 41, o_41)
    tl.store(p_entry + 42, o_42)
    tl.store(p_entry + 43, o_43)
    tl.store(p_entry + 44, o_44)
    tl.store(p_entry + 45, o_45)
    tl.store(p_entry + 46, o_46)
    tl.store(p_entry + 47, o_47)
    tl.store(p_entry + 48, o_48)
    tl.store(p_entry + 49, o_49)
    tl.store(p_entry + 50, o_50)
    tl.store(p_entry + 51, o_51)
    tl.store(p_entry + 52, o_52)
    tl.store(p_entry + 53, o_53)
    tl.store(p_entry + 54, o_54)
    tl.store(p_entry + 55, o_55)
    tl.store(p_entry + 56, o_56)
    tl.store(p_entry + 57, o_57)
    tl.store(p_entry + 58, o_58)
    tl.store(p_entry + 59, o_59)
    tl.store(p_entry + 60, o_60)
    tl.store(p_entry + 61, o_61)
    tl.store(p_entry + 62, o_62)
    tl.store(p_entry + 63, o_63)
