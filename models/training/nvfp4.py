"""NVFP4 in torch: rounding for training and packing for the checkpoint.

Blocks of 16 along the last dimension with one E4M3 scale each, times one tensor scale (amax / 2688).
"""
import torch

from mxfp4 import VALUES, magnitude_codes


def tensor_scale(amax):
    return amax.float() / 2688


def _parts(x, scale):
    """Returns x [..., K] divided by its blocks' scales, as [..., K/16, 16], and the E4M3 scales as floats."""
    b = x.float().unflatten(-1, (-1, 16))
    block = (b.abs().amax(-1, keepdim=True) / 6 / scale).clamp(max=448).to(torch.float8_e4m3fn).float()
    unit = block * scale
    return torch.where(unit > 0, b / torch.where(unit > 0, unit, torch.ones_like(unit)), torch.zeros_like(b)), block


def round_trip(x, scale):
    """x [..., K] -> the nearest NVFP4 values for this tensor scale, which broadcasts over blocks."""
    scaled, block = _parts(x, scale)
    grid = torch.tensor(VALUES, device=x.device)
    return (torch.sign(scaled) * grid[magnitude_codes(scaled.abs()).long()] * block * scale).flatten(-2)


def pack(w, scale):
    """w [N, K] -> codes [N, K/2] u8 (even column in the low nibble), block scales [N, K/16] E4M3."""
    scaled, block = _parts(w, scale)
    code = (magnitude_codes(scaled.abs()) | (torch.signbit(scaled).int() << 3)).to(torch.uint8)
    return ((code[..., 0::2] | (code[..., 1::2] << 4)).flatten(-2).contiguous(),
            block.squeeze(-1).to(torch.float8_e4m3fn))


def unpack(codes, block_scales, scale):
    """codes [N, K/2] u8, block_scales [N, K/16] E4M3, scale [] -> [N, K] float32; the inverse of pack."""
    grid = torch.tensor(VALUES + tuple(-v for v in VALUES), device=codes.device)
    values = grid[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, 16)) * (block_scales.float() * scale).unsqueeze(-1)).flatten(-2)
