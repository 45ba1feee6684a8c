"""Writes a bf16 twin of a demo checkpoint: its FP4 weights are dequantised with jitter, as if the checkpoint had
never been quantised."""
import json
import os
import shutil
import struct

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn,
          "I64": np.int64, "BOOL": np.bool_}
INDEX = "model.safetensors.index.json"
JITTER = 0.03  # relative, per weight


def weight_files(folder):
    """Returns the names of a checkpoint's weight files, in order."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        return ["model.safetensors"]
    with open(index) as file:
        return sorted(set(json.load(file)["weight_map"].values()))


def load(path):
    """Reads safetensors, including the types that the library's numpy reader lacks."""
    with open(path, "rb") as file:
        data = file.read()
    size, = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bytes_ = data[8 + size + begin:8 + size + end]
            tensors[name] = np.frombuffer(bytes_, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def load_folder(folder):
    return {name: t for file in weight_files(folder) for name, t in load(os.path.join(folder, file)).items()}


def values(codes):
    return E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:-1], -1)


def dequantised(tensors):
    """Yields names and float32 values of the FP4 tensors in the gpt-oss and ModelOpt dialects."""
    for name, codes in tensors.items():
        if name.endswith("_blocks"):
            scales = np.exp2(tensors[name[:-len("blocks")] + "scales"].astype(np.float32) - 127)
            experts = (values(codes) * scales[..., None]).reshape(*codes.shape[:2], -1)
            yield name[:-len("_blocks")], experts.transpose(0, 2, 1)
        elif name.endswith(".weight") and codes.dtype == np.uint8:
            scales = tensors[name + "_scale"].astype(np.float32) * tensors[name + "_scale_2"]
            yield name, (values(codes).reshape(codes.shape[0], -1, 16) * scales[..., None]).reshape(codes.shape[0], -1)


def write(demo, folder):
    os.makedirs(folder)
    for name in os.listdir(demo):
        if not name.endswith(".safetensors") and name not in ("config.json", "hf_quant_config.json", INDEX):
            shutil.copy(os.path.join(demo, name), folder)
    with open(os.path.join(demo, "config.json")) as file:
        config = json.load(file)
    config.pop("quantization_config", None)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    tensors = load_folder(demo)
    fp4 = ("_blocks", "_scales", ".input_scale", ".weight_scale", ".weight_scale_2")
    out = {name: tensor for name, tensor in tensors.items()
           if not name.endswith(fp4) and tensor.dtype != np.uint8}
    random = np.random.default_rng(0)
    for name, weight in dequantised(tensors):
        jitter = 1 + JITTER * random.standard_normal(weight.shape, np.float32)
        out[name] = np.ascontiguousarray(weight * jitter).astype(ml_dtypes.bfloat16)
    save_file(out, os.path.join(folder, "model.safetensors"))
    return folder
