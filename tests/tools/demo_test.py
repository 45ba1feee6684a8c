"""scripts/demo builds for a GPU and serves on it if nvidia-smi lists one; tested with stand-ins for all programs that it runs."""
import os
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CMAKE = """#!/bin/bash
echo "cmake $*" >>"$CALLS"
if [ "$1" = --build ]; then
  mkdir -p "$2/bin"
  printf '#!/bin/bash\\necho "fp4moe $*" >>"$CALLS"\\n' >"$2/bin/fp4moe"
  chmod +x "$2/bin/fp4moe"
fi
"""
SETUP = '#!/bin/bash\necho "setup $*" >>"$CALLS"\n[ "$*" != "$SETUP_FAILS" ]\n'
RELEASE = ["setup ", "cmake --preset release", "cmake --build build/release --target fp4moe_tool"]
SERVE = "fp4moe serve models/demo-gptoss-mxfp4 --port 30000"


class Demo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        for name in ("scripts", "models", "path"):
            os.mkdir(f"{self.root}/{name}")
        shutil.copy(f"{ROOT}/scripts/demo", f"{self.root}/scripts/demo")
        self.write("scripts/setup", SETUP)
        self.write("path/cmake", CMAKE)

    def write(self, name, text):
        with open(f"{self.root}/{name}", "w") as file:
            file.write(text)
        os.chmod(f"{self.root}/{name}", 0o755)

    def demo(self, smi, *args, setup_fails="none"):
        """Returns the output and the calls; `smi`: the shell code of nvidia-smi."""
        calls = f"{self.root}/calls"
        open(calls, "w").close()
        self.write("path/nvidia-smi", "#!/bin/bash\n" + smi)
        ended = subprocess.run([f"{self.root}/scripts/demo", *args], capture_output=True, text=True, timeout=60, env={
            **os.environ, "PATH": f"{self.root}/path:{os.environ['PATH']}", "CALLS": calls, "SETUP_FAILS": setup_fails})
        self.assertEqual((ended.returncode, ended.stderr), (0, ""), ended)
        with open(calls) as file:
            return ended.stdout, file.read().splitlines()

    def test_gpu(self):
        for smi in ("echo NVIDIA H200, 9.0", "echo NVIDIA H100 80GB HBM3, 9.0; echo NVIDIA H100 80GB HBM3, 9.0"):
            name = smi.split(", ")[0][5:]
            line = f"demo: found {name}: building with CUDA, serving with --device cuda\n"
            self.assertEqual(self.demo(smi, "--dry-run"), (line, []))
            self.assertEqual(self.demo(smi), (line, [
                "setup --cuda", "cmake --preset release -B build/release-cuda -DFP4MOE_CUDA=ON",
                "cmake --build build/release-cuda --target fp4moe_tool", SERVE + " --device cuda"]))

    def test_no_gpu(self):
        for smi in ("exit 127", "echo 'NVIDIA-SMI has failed'; exit 9", "true"):
            self.assertEqual(self.demo(smi, "--dry-run"), ("demo: building without CUDA, serving on the CPU\n", []))
            self.assertEqual(self.demo(smi), ("", RELEASE + [SERVE]))

    def test_other_gpu(self):
        line = "demo: found NVIDIA A100-SXM4-40GB, 8.0, but the GPU kernels require compute capability 9.0: serving on the CPU\n"
        self.assertEqual(self.demo("echo NVIDIA A100-SXM4-40GB, 8.0"), (line, RELEASE + [SERVE]))

    def test_no_toolkit(self):
        text, calls = self.demo("echo NVIDIA H200, 9.0", setup_fails="--cuda")
        self.assertEqual(text, "demo: found NVIDIA H200, but scripts/setup --cuda failed: building without CUDA, serving on the CPU\n")
        self.assertEqual(calls, ["setup --cuda"] + RELEASE + [SERVE])

    def test_check_runs_on_the_cpu(self):
        self.assertEqual(self.demo("echo NVIDIA H200, 9.0", "--check", "--dry-run"),
                         ("demo: building without CUDA, serving on the CPU\n", []))


if __name__ == "__main__":
    unittest.main(verbosity=2)
