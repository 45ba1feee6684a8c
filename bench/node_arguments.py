"""The command line of the benchmarks of prefill and decode nodes: BINARY, MODEL and flags with defaults."""
import argparse


def node_arguments(usage, **defaults):
    """Parses sys.argv. A flag is a number if its default is one, else text."""
    parser = argparse.ArgumentParser(usage=usage)
    parser.add_argument("binary")
    parser.add_argument("model")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()
