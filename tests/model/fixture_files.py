"""Shared by the fixture generators: writes checkpoint files like the stock library."""
import json

from safetensors.torch import save_file


def save_shards(tensors, folder, num_shards):
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for s in range(num_shards):
        file = f"model-{s + 1:05}-of-{num_shards:05}.safetensors"
        part = names[s::num_shards]
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        weight_map.update({n: file for n in part})
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
