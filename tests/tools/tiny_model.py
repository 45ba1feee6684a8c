"""A make-tiny checkpoint that tests modify and rewrite."""
import json
import os
import struct
import subprocess


class TinyModel:
    """A make-tiny checkpoint as (config, hf_quant, header, data) that tests can break."""

    def __init__(self, binary, folder, like, dialect):
        self.folder = folder
        subprocess.run([binary, "make-tiny", folder, "--like", like, "--dialect", dialect, "--num-hidden-layers", "2",
                        "--hidden-size", "64", "--intermediate-size", "32", "--num-experts", "4", "--top-k", "2",
                        "--vocab-size", "260"] + (["--num-groups", "2", "--top-k-groups", "1"] if "deepseek" in like
                                                  else []), check=True, capture_output=True)
        self.config, self.hf_quant = self.read("config.json"), self.read("hf_quant_config.json")
        with open(os.path.join(folder, "model.safetensors"), "rb") as file:
            self.header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            self.data = bytearray(file.read())

    def read(self, name):
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            return None
        with open(path) as file:
            return json.load(file)

    def write(self):
        for name, content in (("config.json", self.config), ("hf_quant_config.json", self.hf_quant)):
            if content is not None:
                with open(os.path.join(self.folder, name), "w") as file:
                    json.dump(content, file)
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(self.folder, "model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + self.data)

    def put(self, name, at, content):
        begin = self.header[name]["data_offsets"][0] + at
        self.data[begin:begin + len(content)] = content

    def add(self, name, dtype, shape, content):
        begin = len(self.data)
        self.header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(content)]}
        self.data += content
