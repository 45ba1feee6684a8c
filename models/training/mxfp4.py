"""MXFP4 in torch: rounding for training and packing for the checkpoint.

Blocks of 32 along the last dimension; OCP scale rule (floor(log2 amax) - 2, saturating codes).
"""
import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def magnitude_codes(a):
    """a >= 0 -> code 0..7: nearest value, ties to the even mantissa, saturating."""
    return ((a > .25).int() + (a >= .75).int() + (a > 1.25).int() + (a >= 1.75).int() + (a > 2.5).int()
            + (a >= 3.5).int() + (a > 5).int())


def _blocks(w):
    b = w.float().unflatten(-1, (-1, 32))
    amax = b.abs().amax(-1, keepdim=True).clamp_min(2.0 ** -120)
    return b, torch.clamp(torch.floor(torch.log2(amax)) - 2, -127, 127)


def round_trip(w):
    """w [..., K] -> the nearest MXFP4 values."""
    b, exponent = _blocks(w)
    x = b / torch.exp2(exponent)
    grid = torch.tensor(VALUES, device=w.device)
    return (torch.sign(x) * grid[magnitude_codes(x.abs()).long()] * torch.exp2(exponent)).flatten(-2)


def pack(w):
    """w [..., N, K] -> blocks [..., N, K/32, 16] u8 (even column in the low nibble), scales [..., N, K/32] u8."""
    b, exponent = _blocks(w)
    x = b / torch.exp2(exponent)
    code = (magnitude_codes(x.abs()) | (torch.signbit(x).int() << 3)).to(torch.uint8)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).contiguous(), (exponent.squeeze(-1) + 127).to(torch.uint8)


def unpack(blocks, scales):
    """blocks [..., N, K/32, 16] u8, scales [..., N, K/32] u8 -> [..., N, K] float32; the inverse of pack."""
    grid = torch.tensor(VALUES + tuple(-v for v in VALUES), device=blocks.device)
    values = grid[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()]
    return (values * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)
