"""The mpi fabric between two simulated hosts: network, host name and process id namespaces on this machine."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

BINARY = os.path.abspath(sys.argv[1])
SKIPPED = 77  # CTest's SKIP_RETURN_CODE
TAG = f"fp{os.getpid() % 100000}"  # interface names have at most 15 characters
SUBNET = f"10.{os.getpid() % 200 + 20}.77"
BRIDGE = TAG + "br"
HOSTS = {f"{SUBNET}.{i + 2}": f"{TAG}h{i}" for i in range(2)}  # address: namespace


def ip(*args):
    subprocess.run(["ip", *args], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def make_hosts():
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", SUBNET + ".1/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    for address, name in HOSTS.items():
        ip("netns", "add", name)
        ip("link", "add", name + "v", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", name + "v", "master", BRIDGE, "up")
        ip("-n", name, "addr", "add", address + "/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")


def remove_hosts():
    for name in HOSTS.values():
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "delete", BRIDGE], stderr=subprocess.DEVNULL)


# mpirun starts this agent instead of ssh: agent [options] HOST COMMAND...
AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
declare -A name=({names})
host=$1; shift
exec ip netns exec "${{name[$host]}}" unshare --uts --pid --fork --mount-proc bash -c "hostname ${{name[$host]}}; $*"
"""


class MpiHostsTest(unittest.TestCase):
    def setUp(self):
        file, self.agent = tempfile.mkstemp()
        with os.fdopen(file, "w") as agent:
            agent.write(AGENT.format(names=" ".join(f"[{a}]={n}" for a, n in HOSTS.items())))
        os.chmod(self.agent, 0o700)
        self.addCleanup(os.remove, self.agent)

    def run_job(self, processes, *args):
        network = ["--mca", "oob_tcp_if_include", SUBNET + ".0/24", "--mca", "btl_tcp_if_include", SUBNET + ".0/24"]
        done = subprocess.run(["mpirun", "--allow-run-as-root", "--bind-to", "none", "--map-by", "node",
                               "--mca", "plm_rsh_agent", self.agent, *network,
                               "-H", ",".join(address + ":2" for address in HOSTS), "-np", str(processes),
                               BINARY, *map(str, args)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        return done.returncode, done.stdout

    def test_every_operation(self):
        for processes, ranks in ((2, 4), (4, 4)):
            with self.subTest(processes=processes, ranks=ranks):
                code, output = self.run_job(processes, "all", ranks)
                self.assertEqual(code, 0, output)
                self.assertIn("ok\n", output)

    def test_configurations_that_differ(self):
        code, output = self.run_job(2, "config", 2)
        self.assertNotEqual(code, 0)
        self.assertIn("'layers 4' on process 0, 'layers 5' on process 1", output)

    def test_a_process_that_leaves_ends_the_job(self):
        code, output = self.run_job(2, "leave", 4)
        self.assertNotEqual(code, 0)
        self.assertNotIn("ok\n", output)


if __name__ == "__main__":
    try:
        for program in ("ip", "mpirun"):
            if shutil.which(program) is None:
                print(f"SKIPPED: there is no {program} on this machine")
                sys.exit(SKIPPED)
        make_hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        remove_hosts()
        print(f"SKIPPED: cannot make two hosts here ({error}): mpi between hosts is NOT tested", file=sys.stderr)
        sys.exit(SKIPPED)
    try:
        unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
    finally:
        remove_hosts()
