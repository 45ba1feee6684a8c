"""Prefill nodes, decode nodes and routers as processes."""
import copy

from serve_process import Serve, free_port, metrics


class Node(Serve):
    """A serve process of one role on its own ports. It can be killed and restarted on the same ports."""

    def __init__(self, binary, role, model, *flags):
        self.role, self.port, self.bootstrap_port = role, free_port(), free_port()
        super().__init__(binary, model, "--disaggregation-mode", role, "--disaggregation-bootstrap-port",
                         str(self.bootstrap_port), *flags)
        self.command[self.command.index("--port") + 1] = str(self.port)

    def again(self):
        return copy.copy(self)  # the same command; entering it starts a new process

    def is_empty(self):
        """Whether the node holds no requests, no pages and no slots of states."""
        now = metrics(self.url)
        return all(now[name] == 0 for name in
                   ("num_used_tokens", "num_leaked_pages", "num_prefill_inflight_queue_reqs", "num_running_reqs",
                    "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs", "num_queue_reqs",
                    "mamba_num_used_slots"))


class Router(Serve):
    def __init__(self, binary, prefill, decode, looks_apart=0.1):
        self.command = [binary, "router", "--port", "0", "--health-check-interval-secs", str(looks_apart),
                        "--pd-disaggregation"]
        for kind, nodes in (("--prefill", prefill), ("--decode", decode)):
            for node in nodes:
                self.command += [kind, f"http://127.0.0.1:{node.port}"]
