"""NVFP4 in torch: the rounding that training sees and the bytes that the checkpoint holds.

Blocks of 16 along the last dimension, an E4M3 scale each, over one tensor scale (decode direction, amax / 2688).
"""
import torch

from mxfp4 import VALUES, magnitude_codes


def tensor_scale(amax):
    return amax.float() / 2688


def _parts(x, scale):
    """x [..., K] in units of its blocks' scales [..., K/16, 16], and those scales as floats."""
    b = x.float().unflatten(-1, (-1, 16))
    block = (b.abs().amax(-1, keepdim=True) / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn).float()
    unit = block * scale
    return torch.where(unit > 0, b / torch.where(unit > 0, unit, torch.ones_like(unit)), torch.zeros_like(b)), block


def round_trip(x, scale):
    """x [..., K] -> the nearest values that NVFP4 can hold under this tensor scale, which broadcasts over blocks."""
    scaled, block = _parts(x, scale)
    grid = torch.tensor(VALUES, device=x.device)
    return (torch.sign(scaled) * grid[magnitude_codes(scaled.abs()).long()] * block * scale).flatten(-2)


def pack(w, scale):
    """w [N, K] -> codes [N, K/2] u8 (even column in the low nibble), block scales [N, K/16] E4M3."""
    scaled, block = _parts(w, scale)
    code = (magnitude_codes(scaled.abs()) | (torch.signbit(scaled).int() << 3)).to(torch.uint8)
    return ((code[..., 0::2] | (code[..., 1::2] << 4)).flatten(-2).contiguous(),
            block.squeeze(-1).to(torch.float8_e4m3fn))
