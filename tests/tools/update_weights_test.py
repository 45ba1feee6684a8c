"""Weights replaced while a server runs: update_weights_test.py BINARY [cuda]

Each output comes from one checkpoint, a checkpoint that cannot replace the loaded one is refused by name while the
old weights serve on, and the server then computes what a fresh start computes.
"""
import concurrent.futures
import contextlib
import http.client
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from urllib.parse import urlsplit

from pd_nodes import Node, Router
from serve_process import Serve, eventually, exit_without_gpu, metrics, num_gpus
from tiny_model import TinyModel

BINARY = os.path.abspath(sys.argv[1])
ON_GPU = "cuda" in sys.argv
STREAMS, SWAPS, TOKENS = 32, 20, 24
ROUTE = "/update_weights_from_disk"
FLAGS = ["--max-total-tokens", "4096", "--context-length", "128", "--disable-autotune"]
PLACE = ["--device", "cuda", "--enable-deterministic-inference"] if ON_GPU else ["--device", "cpu", "--threads", "2", "--weight-cache-dir", "none"]
TP4 = ["--tp", "4", "--ep", "4"]
PLACED = ["--moe-a2a-backend", "deepep", "--enable-eplb", "--ep-num-redundant-experts", "4", "--eplb-rebalance-num-iterations", "0"]
SHAPE = ["--num-hidden-layers", "2", "--hidden-size", "64", "--intermediate-size", "64", "--num-experts", "8", "--top-k",
         "2", "--num-heads", "4", "--vocab-size", "260"]


def call(serve, path, body=None, timeout=300):
    """Returns the status and the JSON of a response."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(serve.url).netloc, timeout=timeout)) as connection:
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def prompt(i):
    return [65 + (7 * i + k) % 26 for k in range(5 + i % 11)]


def generate(serve, i, stream=False):
    """The ids that the server generates for prompt i."""
    body = {"input_ids": prompt(i), "stream": stream,
            "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    if not stream:
        status, answer = call(serve, "/generate", body)
        assert status == 200, answer
        return answer["output_ids"]
    with contextlib.closing(http.client.HTTPConnection(urlsplit(serve.url).netloc, timeout=300)) as connection:
        connection.request("POST", "/generate", json.dumps(body))
        events = connection.getresponse().read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        return json.loads(events[-3][6:])["output_ids"]


def make_tiny(folder, like, dialect, seed, *more):
    is_mla = "deepseek" in like
    sizes = [*SHAPE, *(["--num-groups", "2", "--top-k-groups", "1"] if is_mla else
                       ["--num-kv-heads", "4", "--head-dim", "16"]), *more]
    subprocess.run([BINARY, "make-tiny", folder, "--like", like, "--dialect", dialect, "--seed", str(seed), *sizes],
                   check=True, capture_output=True)


def needs_two_gpus(test):
    if ON_GPU and num_gpus() < 2:
        test.skipTest("needs 2 GPUs")


class Checkpoints(unittest.TestCase):
    """Two checkpoints of one form."""

    def setUp(self):
        base = tempfile.TemporaryDirectory()
        self.addCleanup(base.cleanup)
        self.base = base.name
        self.a, self.b = self.path("a"), self.path("b")

    def path(self, name):
        return os.path.join(self.base, name)

    def make(self, like="gpt-oss-tiny", dialect="gpt-oss", *more):
        for seed, folder in enumerate((self.a, self.b), 1):
            make_tiny(folder, like, dialect, seed, *more)

    def serve(self, folder, *flags, launcher=()):
        return Serve(BINARY, folder, *PLACE, *FLAGS, *flags, launcher=launcher)

    def update(self, serve, folder, **more):
        return call(serve, ROUTE, {"model_path": folder, **more})

    def fresh(self, folder, flags, launcher=()):
        with self.serve(folder, *flags, launcher=launcher) as serve:
            return [generate(serve, i) for i in range(STREAMS)]


class UpdateWeights(Checkpoints):
    def check_swaps(self, *flags, launcher=(), swaps=SWAPS):
        fresh = {folder: self.fresh(folder, flags, launcher) for folder in (self.a, self.b)}
        self.assertNotEqual(fresh[self.a], fresh[self.b])
        ended, seen = threading.Event(), {folder: 0 for folder in fresh}

        def stream(i):
            while not ended.is_set():
                ids = generate(serve, i, stream=i % 2 == 0)
                source = [folder for folder in fresh if fresh[folder][i] == ids]
                self.assertTrue(source, f"prompt {i} gave {ids}, not {[fresh[f][i] for f in fresh]}")
                seen[source[0]] += 1

        num_moved = 0
        with self.serve(self.a, *flags, launcher=launcher) as serve, \
                concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(stream, i) for i in range(STREAMS)]
            try:
                for n in range(swaps):
                    folder = (self.b, self.a)[n % 2]
                    if "--enable-eplb" in flags:
                        status, moves = call(serve, "/rebalance_experts", {})
                        self.assertEqual(status, 200, moves)
                        num_moved += moves["num_experts"]
                    status, answer = self.update(serve, folder, weight_version=f"step {n}")
                    self.assertEqual((status, answer["success"]), (200, True), answer)
                    self.assertEqual(generate(serve, n), fresh[folder][n], f"swap {n}")
                    info = call(serve, "/get_model_info")[1]
                    self.assertEqual((info["model_path"], info["weight_version"]), (folder, f"step {n}"))
            finally:
                ended.set()
                for future in streams:
                    future.result()
            for i in range(STREAMS):
                self.assertEqual(generate(serve, i), fresh[folder][i])
            now = metrics(serve.url)
        self.assertEqual((now["num_failed_requests_total"], now["num_leaked_pages"]), (0, 0))
        self.assertTrue(all(seen.values()), seen)
        self.assertEqual(num_moved > 0, "--enable-eplb" in flags)
        if not launcher:  # mpirun exits with the signal's code
            self.assertEqual(serve.exit_code, 0)

    def test_swaps_on_one_rank(self):
        self.make()
        self.check_swaps()

    def test_swaps_with_a_draft_model_of_the_checkpoint(self):
        self.make("deepseek-v3-tiny", "modelopt", "--num-nextn-predict-layers", "1")
        self.check_swaps("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", swaps=6)

    def test_swaps_with_a_draft_model_of_a_separate_checkpoint(self):
        self.make()
        head = self.path("head")
        subprocess.run([BINARY, "make-tiny", head, "--eagle3-head", self.a], check=True, capture_output=True)
        self.check_swaps("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", head, swaps=6)

    def test_swaps_on_several_ranks(self):
        needs_two_gpus(self)
        self.make()
        self.check_swaps(*(["--tp", "2", "--ep", "2"] if ON_GPU else TP4))

    def test_swaps_with_placed_experts(self):
        needs_two_gpus(self)
        self.make("deepseek-v3-tiny", "modelopt", "--num-nextn-predict-layers", "1")
        self.check_swaps("--tp", "2" if ON_GPU else "4", *PLACED, "--speculative-algorithm", "NEXTN", swaps=8)

    @unittest.skipIf(ON_GPU, "a layout of CPU ranks")
    def test_swaps_in_other_layouts(self):
        self.make("deepseek-v3-tiny", "modelopt")
        for flags in ([*TP4, "--dp", "4", "--enable-dp-attention", "--moe-a2a-backend", "deepep"],
                      ["--tp", "2", "--moe-a2a-backend", "flashinfer", "--ep", "2", "--dense-quant", "q8"]):
            with self.subTest(flags):
                self.check_swaps(*flags, swaps=4)

    @unittest.skipIf(ON_GPU or shutil.which("mpirun") is None, "needs mpirun and CPU ranks")
    def test_swaps_in_two_processes(self):
        self.make()
        mpi = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
        self.check_swaps("--tp", "4", "--ep", "4", launcher=mpi, swaps=4)
        self.check_swaps("--tp", "4", *PLACED, "--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path",
                         self.b, launcher=mpi, swaps=4)

    @unittest.skipIf(ON_GPU, "GPUs have no weight cache")
    def test_a_weight_cache_is_mapped_for_each_checkpoint(self):
        self.make()
        cache = ["--weight-cache-dir", self.path("cache")]
        fresh = [self.fresh(folder, cache)[0] for folder in (self.a, self.b)]
        files = sorted(os.listdir(self.path("cache")))
        self.assertEqual(len(files), 2, files)
        times = [os.stat(os.path.join(self.path("cache"), file)).st_mtime_ns for file in files]
        with self.serve(self.a, *cache) as serve:
            for n in range(4):
                status, answer = self.update(serve, (self.b, self.a)[n % 2])
                self.assertEqual(status, 200, answer)
                self.assertEqual(generate(serve, 0), fresh[1 - n % 2])
        self.assertEqual([os.stat(os.path.join(self.path("cache"), file)).st_mtime_ns for file in files], times)
        self.assertEqual(sum("mapped from" in line for line in serve.lines), 5, serve.lines)

    def test_an_update_can_abort_the_requests(self):
        self.make()
        with self.serve(self.a, "--context-length", "4096", "--max-total-tokens", "8192") as serve, \
                concurrent.futures.ThreadPoolExecutor(1) as pool:
            long = pool.submit(call, serve, "/generate", {"input_ids": prompt(0), "sampling_params": {
                "max_new_tokens": 4000, "ignore_eos": True}})
            while metrics(serve.url)["num_running_reqs"] == 0:
                pass
            status, answer = self.update(serve, self.b, abort_all_requests=True)
            self.assertEqual(status, 200, answer)
            self.assertEqual(long.result()[1]["meta_info"]["finish_reason"]["type"], "abort")

    def test_the_request_is_checked(self):
        self.make()
        bad = {"load_format": "dummy", "flush_cache": False, "is_async": True, "draft_only": True, "torch_empty_cache": True,
               "keep_pause": True, "recapture_cuda_graph": True, "token_step": 3, "manifest": {}, "model": "a",
               "abort_all_requests": "no", "weight_version": 1}
        with self.serve(self.a) as serve:
            before = generate(serve, 0)
            for field, value in bad.items():
                status, answer = self.update(serve, self.b, **{field: value})
                self.assertEqual((status, answer["success"]), (400, False), answer)
                self.assertIn(field, answer["message"])
            for body in ({}, {"model_path": ""}, {"model_path": 3}, []):
                self.assertEqual(call(serve, ROUTE, body)[0], 400)
            neutral = {"load_format": "auto", "flush_cache": True, "is_async": False, "draft_only": False, "torch_empty_cache": False,
                       "keep_pause": False, "recapture_cuda_graph": False, "token_step": 0, "manifest": None}
            self.assertEqual(generate(serve, 0), before)
            status, answer = self.update(serve, self.b, **neutral)
            self.assertEqual((status, answer["num_paused_requests"]), (200, 0), answer)
            self.assertEqual(call(serve, "/v1/models")[1]["data"][0]["root"], self.b)


class UpdateNodes(Checkpoints):
    """A prefill node and a decode node are updated one after the other. Pages of one version never reach a node of another
    one: requests meanwhile end with an error that names the versions."""

    def node(self, role, folder, *more):
        return Node(BINARY, role, folder, *PLACE, *FLAGS, *more)

    def ask(self, router, i):
        """The ids for prompt i, or None after an error that names the cause."""
        body = {"input_ids": prompt(i), "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
        status, answer = call(router, "/generate", body)
        if status == 200:
            return answer["output_ids"]
        message = answer["error"]["message"]
        self.assertEqual(status, 503, message)
        self.assertRegex(message, r"weight version is \S+ on the prefill node and \S+ on the decode node|"
                         r"the weights of this node were updated to version \S+|updated its weights meanwhile|closed")
        return None

    def check_nodes(self, *flags, updates=6):
        fresh = {folder: self.fresh(folder, flags) for folder in (self.a, self.b)}
        ended, seen = threading.Event(), {folder: 0 for folder in fresh}

        def stream(i):
            while not ended.is_set():
                ids = self.ask(router, i)
                source = [folder for folder in fresh if fresh[folder][i] == ids]
                self.assertTrue(source or ids is None, f"prompt {i} gave {ids}, not {[fresh[f][i] for f in fresh]}")
                for folder in source:
                    seen[folder] += 1

        with self.node("prefill", self.a, *flags) as p, self.node("decode", self.a, *flags) as d, \
                Router(BINARY, [p], [d]) as router, concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(stream, i) for i in range(STREAMS)]
            try:
                for n in range(updates):
                    folder, order = (self.b, self.a)[n % 2], [(p, d), (d, p)][n // 2 % 2]
                    for node in order:
                        status, answer = self.update(node, folder, weight_version=f"v{n}")
                        self.assertEqual(status, 200, answer)
                        self.assertIsNone(self.ask(router, n)) if node is order[0] else None
                    # A connection that began before the update may still fail.
                    self.assertTrue(eventually(lambda: self.ask(router, n) == fresh[folder][n]))
                    before = seen[folder]
                    self.assertTrue(eventually(lambda: seen[folder] > before + 4))
            finally:
                ended.set()
                for future in streams:
                    future.result()
            self.assertEqual([self.ask(router, i) for i in range(STREAMS)], fresh[folder])
            self.assertTrue(eventually(p.is_empty))
            self.assertTrue(eventually(d.is_empty))
        self.assertTrue(all(seen.values()), seen)

    def test_nodes(self):
        self.make()
        self.check_nodes()

    def test_nodes_with_a_draft_model_of_the_checkpoint(self):
        self.make("deepseek-v3-tiny", "modelopt", "--num-nextn-predict-layers", "1")
        self.check_nodes("--speculative-algorithm", "NEXTN", updates=4)

    def test_refusals(self):
        self.make()
        with self.node("prefill", self.a, "--weight-version", "old") as p, \
                self.node("decode", self.a, "--weight-version", "old") as d, Router(BINARY, [p], [d]) as router:
            before = self.ask(router, 0)
            for node in (p, d):
                self.assertEqual(call(node, "/model_info")[1]["weight_version"], "old")
                for more in ({}, {"weight_version": "old"}, {"weight_version": ""}, {"weight_version": "n\u00e9w"}):
                    status, answer = self.update(node, self.b, **more)
                    self.assertEqual(status, 400, answer)
                    self.assertIn("weight", answer["message"])
                self.assertEqual(self.update(node, self.path("absent"), weight_version="new")[0], 400)
            self.assertEqual(self.ask(router, 0), before)


class Damaged:
    """Each method damages a copy of a checkpoint (a TinyModel) and returns words of the refusal. `m` is not yet written."""

    NORM = "model.layers.1.input_layernorm.weight"
    CODES = "model.layers.1.mlp.experts.3.down_proj.weight"

    @staticmethod
    def rewrite(m, change):
        m.write()
        path = os.path.join(m.folder, "model.safetensors")
        with open(path, "rb") as file:
            content = change(file.read())
        with open(path, "wb") as file:
            file.write(content)

    def with_config(self, m, key, value):
        m.config[key] = value
        m.write()
        return key, "loaded model"

    def missing_tensor(self, m):
        del m.header[self.NORM]
        return self.close_holes(m) + (self.NORM,)

    def close_holes(self, m):
        data = bytearray()
        for entry in sorted((e for name, e in m.header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"]):
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = [len(data), len(data) + end - begin]
            data += m.data[begin:end]
        m.data = data
        m.write()
        return ()

    def header(self, m, **changes):
        m.header[self.NORM].update(changes)
        m.write()

    def no_folder(self, m):
        shutil.rmtree(m.folder)
        return ("does not exist",)

    def no_file(self, m):
        os.remove(os.path.join(m.folder, "model.safetensors"))
        return ("model.safetensors",)

    def no_config(self, m):
        os.remove(os.path.join(m.folder, "config.json"))
        return ("config.json",)

    def broken_config(self, m):
        with open(os.path.join(m.folder, "config.json"), "w") as file:
            file.write('{"model_type": ')
        return ("config.json",)

    def other_hidden_size(self, m):
        return self.with_config(m, "hidden_size", 128) + ("128", "64")

    def other_eps(self, m):
        return self.with_config(m, "rms_norm_eps", 0.5)

    def more_layers(self, m):
        return self.with_config(m, "num_hidden_layers", 3)

    def unknown_setting(self, m):
        return self.with_config(m, "scale_everything", 2)

    def other_theta(self, m):
        m.config["rope_parameters"]["rope_theta"] = 77.0
        m.write()
        return "rope_theta", "77.0"

    def no_quantization(self, m):
        os.remove(os.path.join(m.folder, "hf_quant_config.json"))
        return ("hf_quant_config.json", "missing")

    def other_quantization(self, m):
        m.hf_quant["quantization"]["group_size"] = 32
        m.write()
        return "group_size", "32", "16"

    def empty_file(self, m):
        self.rewrite(m, lambda b: b"")
        return ("model.safetensors",)

    def header_cut(self, m):
        self.rewrite(m, lambda b: b[:100])
        return ("model.safetensors",)

    def length_cut(self, m):
        self.rewrite(m, lambda b: b[:5])
        return ("model.safetensors",)

    def huge_header(self, m):
        self.rewrite(m, lambda b: struct.pack("<Q", 2**62) + b[8:])
        return ("model.safetensors",)

    def header_is_no_json(self, m):
        self.rewrite(m, lambda b: b[:8] + b"[" + b[9:])
        return ("model.safetensors",)

    def data_cut(self, m):
        self.rewrite(m, lambda b: b[:-1])
        return ("model.safetensors",)

    def data_too_long(self, m):
        self.rewrite(m, lambda b: b + b"12345678")
        return ("model.safetensors",)

    def extra_tensor(self, m):
        m.add("model.layers.1.extra.weight", "BF16", [2], b"\0\0\0\0")
        m.write()
        return "model.layers.1.extra.weight", "no such tensor"

    def renamed_tensor(self, m):
        m.header["model.layers.1.input_layernorm.weights"] = m.header.pop(self.NORM)
        m.write()
        return (self.NORM,)

    def other_dtype(self, m):
        self.header(m, dtype="F16")
        return self.NORM, "F16", "BF16"

    def other_shape(self, m):
        self.header(m, shape=[8, 8])
        return self.NORM, "[8, 8]", "[64]"

    def shape_of_other_size(self, m):
        self.header(m, shape=[63])
        return (self.NORM,)

    def negative_shape(self, m):
        self.header(m, shape=[-64])
        return ("model.safetensors",)

    def overlap(self, m):
        begin, end = m.header[self.NORM]["data_offsets"]
        self.header(m, data_offsets=[begin - 2, end - 2])
        return ("model.safetensors",)

    def offset_behind_the_end(self, m):
        self.header(m, data_offsets=[2**40, 2**40 + 128])
        return ("model.safetensors",)

    def unknown_dtype(self, m):
        self.header(m, dtype="Q3")
        return ("Q3",)

    def nan_norm(self, m):
        m.put(self.NORM, 10, struct.pack("<H", 0x7FC0))
        m.write()
        return self.NORM, "NaN"

    def infinite_embedding(self, m):
        m.put("model.embed_tokens.weight", 0, struct.pack("<H", 0x7F80))
        m.write()
        return "model.embed_tokens.weight", "infinite"

    def nan_head(self, m):
        m.put("lm_head.weight", 2, struct.pack("<H", 0x7FC1))
        m.write()
        return "lm_head.weight", "NaN"

    def nan_block_scale(self, m):
        m.put(self.CODES + "_scale", 3, b"\x7f")
        m.write()
        return (self.CODES + "_scale",)

    def negative_block_scale(self, m):
        m.put(self.CODES + "_scale", 5, b"\x81")
        m.write()
        return (self.CODES + "_scale",)

    def nan_tensor_scale(self, m):
        m.put(self.CODES + "_scale_2", 0, struct.pack("<f", float("nan")))
        m.write()
        return (self.CODES + "_scale_2",)

    def zero_tensor_scale(self, m):
        m.put(self.CODES + "_scale_2", 0, bytes(4))
        m.write()
        return (self.CODES + "_scale_2",)

    def index(self, m, change):
        """Splits the checkpoint into two shards, of which `change` modifies the index."""
        os.remove(os.path.join(m.folder, "model.safetensors"))
        header, data = m.header, m.data
        names = sorted(name for name in header if name != "__metadata__")
        files = {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            shard, content = {}, bytearray()
            for name in part:
                begin, end = header[name]["data_offsets"]
                shard[name] = {**header[name], "data_offsets": [len(content), len(content) + end - begin]}
                content += data[begin:end]
                files[name] = f"model-0000{number}-of-00002.safetensors"
            text = json.dumps(shard).encode()
            text += b" " * (-len(text) % 8)
            with open(os.path.join(m.folder, f"model-0000{number}-of-00002.safetensors"), "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text + content)
        change(m.folder, files)
        with open(os.path.join(m.folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {}, "weight_map": files}, file)

    def shard_missing(self, m):
        self.index(m, lambda folder, files: files.update({self.NORM: "model-00003-of-00003.safetensors"}))
        return self.NORM, "model-00003-of-00003.safetensors"

    def shard_removed(self, m):
        self.index(m, lambda folder, files: os.remove(os.path.join(folder, "model-00002-of-00002.safetensors")))
        return ("model-00002-of-00002.safetensors",)

    def wrong_shard(self, m):
        other = {"1": "2", "2": "1"}
        self.index(m, lambda folder, files: files.update(
            {self.NORM: f"model-0000{other[files[self.NORM][10]]}-of-00002.safetensors"}))
        return (self.NORM,)

    def extra_shard(self, m):
        def change(folder, files):
            shutil.copy(os.path.join(folder, "model-00001-of-00002.safetensors"), os.path.join(folder, "copy.safetensors"))
            files["copy"] = "copy.safetensors"
        self.index(m, change)
        return ("copy.safetensors",)

    def outside_shard(self, m):
        self.index(m, lambda folder, files: files.update({self.NORM: "../model.safetensors"}))
        return ("../model.safetensors",)


class DamagedCheckpoints(unittest.TestCase):
    """The old weights serve on, bit for bit."""

    def check(self, *flags):
        damages = [name for name in vars(Damaged) if not name.startswith("_") and name.islower() and name not in (
            "rewrite", "with_config", "close_holes", "header", "index")]
        self.assertGreaterEqual(len(damages), 30)
        with tempfile.TemporaryDirectory() as base:
            model = TinyModel(BINARY, os.path.join(base, "good"), "deepseek-v3-tiny", "modelopt")
            with Serve(BINARY, model.folder, *PLACE, *FLAGS, *flags) as serve:
                before = [generate(serve, i) for i in range(4)]
                for name in damages:
                    with self.subTest(name):
                        folder = os.path.join(base, name)
                        damaged = TinyModel(BINARY, folder, "deepseek-v3-tiny", "modelopt")
                        words = getattr(Damaged(), name)(damaged)
                        status, answer = call(serve, ROUTE, {"model_path": folder})
                        self.assertEqual((status, answer["success"]), (400, False), answer)
                        for word in words:
                            self.assertIn(word, answer["message"])
                        self.assertEqual([generate(serve, i) for i in range(4)], before)
                        self.assertEqual(call(serve, "/get_model_info")[1]["model_path"], model.folder)
                self.assertEqual(call(serve, ROUTE, {"model_path": model.folder})[0], 200)
                self.assertEqual([generate(serve, i) for i in range(4)], before)
            self.assertEqual(serve.exit_code, 0)

    def test_one_rank(self):
        self.check()

    def test_several_ranks(self):
        needs_two_gpus(self)
        self.check("--tp", "2", "--ep", "2")

    def test_placed_experts_and_a_separate_draft_model(self):
        needs_two_gpus(self)
        with tempfile.TemporaryDirectory() as base:
            draft = TinyModel(BINARY, os.path.join(base, "draft"), "deepseek-v3-tiny", "modelopt")
            draft.write()
            self.check("--tp", "2" if ON_GPU else "4", *PLACED, "--speculative-algorithm", "STANDALONE",
                       "--speculative-draft-model-path", draft.folder)


if __name__ == "__main__":
    if ON_GPU:
        with tempfile.TemporaryDirectory() as probe:
            make_tiny(os.path.join(probe, "m"), "gpt-oss-tiny", "gpt-oss", 1)
            exit_without_gpu(BINARY, os.path.join(probe, "m"))
    unittest.main(argv=sys.argv[:1], verbosity=2)
