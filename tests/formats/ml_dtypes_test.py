"""Compares the scalar codecs with PyPI's ml_dtypes.  Usage: ml_dtypes_test.py PATH_OF_codec_dump

Known differences, each checked here rather than skipped:
  e2m1  ml_dtypes maps NaN to zero; we map it to +6 (0x7), as the GPU instruction does.
  e4m3  ml_dtypes turns infinities and values that round past 448 into NaN; we saturate. Its NaN keeps the sign;
        ours is 0x7f.
  e8m0  ml_dtypes rounds to nearest; we have two directed rules, compared here where x is a power of two.
  bf16  ml_dtypes turns every NaN into 0x7fc0 or 0xffc0; we keep the upper payload bits.
"""

import subprocess
import sys

import ml_dtypes
import numpy as np

RECORD = np.dtype([("e2m1", "u1"), ("e4m3", "u1"), ("e8m0_up", "u1"), ("e8m0_floor", "u1"), ("bf16", "u2"),
                   ("zero", "u2"), ("e2m1_value", "f4"), ("e4m3_value", "f4"), ("e8m0_value", "f4"),
                   ("bf16_value", "f4")])


def inputs():
    """float32 bit patterns: random ones, all bf16, all low halves, and every decision point with its
    neighbours."""
    rng = np.random.default_rng(1)
    values = [np.arange(16).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64),
              np.arange(0x7f).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
              2.0 ** np.arange(-149, 128)]
    points = []
    for v in map(np.unique, values):
        points += [v, (v[1:] + v[:-1]) / 2, np.array([v[-1] + (v[-1] - v[-2]) / 2])]
    points = np.concatenate(points)
    points = np.concatenate([points, -points])
    points = points[np.abs(points) < 2.0 ** 128].astype(np.float32)
    near = [np.nextafter(points, np.float32(s)) for s in (-np.inf, np.inf)]
    floats = np.concatenate([points, *near, np.float32([0, -0.0, np.inf, -np.inf])])
    return np.concatenate([
        floats.view(np.uint32),
        rng.integers(0, 1 << 32, 400_000, dtype=np.uint32),
        rng.normal(0, 3, 200_000).astype(np.float32).view(np.uint32),
        np.arange(1 << 16, dtype=np.uint32) << 16,
        np.arange(1 << 16, dtype=np.uint32) | 0x3f800000,
    ])


def expect_equal(name, x, actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.size > 0, f"{name}: nothing compared"
    bad = np.flatnonzero(actual != expected)
    assert bad.size == 0, (f"{name}: {bad.size} of {actual.size} differ, first at {x[bad[0]]!r}: "
                           f"{actual[bad[0]]} instead of {expected[bad[0]]}")
    print(f"{name}: {actual.size} equal")


def same_bits(values):
    """Bit patterns with all NaNs made equal."""
    return np.where(np.isnan(values), np.uint32(0x7fc00000), values.view(np.uint32))


def main(dump):
    bits = inputs()
    x = bits.view(np.float32)
    out = np.frombuffer(subprocess.run([dump], input=bits.tobytes(), stdout=subprocess.PIPE, check=True).stdout, RECORD)
    assert out.size == x.size
    nan, number = np.isnan(x), ~np.isnan(x)

    with np.errstate(over="ignore", invalid="ignore"):
        e2m1, e4m3 = x.astype(ml_dtypes.float4_e2m1fn), x.astype(ml_dtypes.float8_e4m3fn)
        e8m0, bf16 = np.abs(x).astype(ml_dtypes.float8_e8m0fnu), x.astype(ml_dtypes.bfloat16)

    expect_equal("e2m1 encode", x[number], out["e2m1"][number], e2m1[number].view(np.uint8))
    expect_equal("e2m1 encode NaN", x[nan], out["e2m1"][nan], np.full(nan.sum(), 7))

    overflow = number & np.isnan(e4m3.astype(np.float32))
    inside = number & ~overflow
    expect_equal("e4m3 encode", x[inside], out["e4m3"][inside], e4m3[inside].view(np.uint8))
    assert np.abs(x[overflow]).min() > 448
    expect_equal("e4m3 encode past 448", x[overflow], out["e4m3"][overflow], np.where(x[overflow] < 0, 0xfe, 0x7e))
    expect_equal("e4m3 encode NaN", x[nan], out["e4m3"][nan], np.full(nan.sum(), 0x7f))

    fraction, _ = np.frexp(np.abs(x))
    power = number & (fraction == 0.5) & (np.abs(x) >= np.float32(2.0 ** -127))
    codes = e8m0[power].view(np.uint8).astype(int)
    expect_equal("e8m0 encode, powers of two", x[power], out["e8m0_up"][power], codes)
    expect_equal("e8m0 OCP rule, powers of two", x[power], out["e8m0_floor"][power], np.maximum(codes - 2, 0))

    expect_equal("bf16 encode", x[number], out["bf16"][number], bf16[number].view(np.uint16))
    expect_equal("bf16 encode NaN", x[nan], out["bf16"][nan], (bits[nan] >> 16) | 0x40)

    low_byte, low_half = bits.astype(np.uint8), bits.astype(np.uint16)
    for name, dtype, code in (("e2m1_value", ml_dtypes.float4_e2m1fn, low_byte & 15),
                              ("e4m3_value", ml_dtypes.float8_e4m3fn, low_byte),
                              ("e8m0_value", ml_dtypes.float8_e8m0fnu, low_byte),
                              ("bf16_value", ml_dtypes.bfloat16, low_half)):
        expected = code.view(dtype).astype(np.float32)
        assert np.unique(code).size == {"e2m1_value": 16, "bf16_value": 1 << 16}.get(name, 256)
        expect_equal(name, code, same_bits(np.ascontiguousarray(out[name])), same_bits(expected))


if __name__ == "__main__":
    main(sys.argv[1])
