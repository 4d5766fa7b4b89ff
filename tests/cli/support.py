"""What the tests of the command share: running it, reading and writing safetensors, folders of their own."""

import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ["MOEFLUX"]
DEMO = ROOT / "models" / "demo"
FIXTURES = ROOT / "tests" / "fixtures"
TIMEOUT = 120  # seconds, for a sanitized build on a busy machine


def default_signals():
    """A background shell hands down an ignored SIGINT, Python an ignored SIGPIPE."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class Result:
    def __init__(self, code, out, err):
        self.code = code
        self.raw = out
        self.err = err.decode("utf-8", "replace")

    @property
    def out(self):
        return self.raw.decode("utf-8")

    @property
    def json(self):
        """Standard output, which must be exactly one JSON object."""
        value = json.loads(self.out)
        assert isinstance(value, dict), self.out
        return value


def moeflux(*args, stdin=b"", **more):
    done = subprocess.run([BINARY, *map(str, args)], input=stdin, capture_output=True, timeout=TIMEOUT,
                          preexec_fn=default_signals, **more)
    return Result(done.returncode, done.stdout, done.stderr)


def start(*args, **more):
    more.setdefault("stdout", subprocess.PIPE)
    return subprocess.Popen([BINARY, *map(str, args)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            preexec_fn=default_signals, **more)


def read_safetensors(path):
    """name -> (dtype, shape, bytes), with the rules of the format asserted."""
    data = pathlib.Path(path).read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    assert n % 8 == 0 and 8 + n <= len(data), (n, len(data))
    header = json.loads(data[8:8 + n])
    body = data[8 + n:]
    tensors, end_of_all = {}, 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        assert begin == end_of_all and end <= len(body), name
        end_of_all = end
        tensors[name] = (entry["dtype"], entry["shape"], body[begin:end])
    assert end_of_all == len(body)
    return tensors


def read_golden(path):
    """As read_safetensors, for files of others: the order of the data does not matter."""
    data = pathlib.Path(path).read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {name: (e["dtype"], e["shape"], data[8 + n + e["data_offsets"][0]:8 + n + e["data_offsets"][1]])
            for name, e in header.items()}


def floats(raw):
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def ints(raw):
    return struct.unpack(f"<{len(raw) // 4}i", raw)


class CliTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="moeflux-cli-")
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)

    def write(self, name, content):
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def copy_model(self, source=DEMO, name="model"):
        """A copy of a model folder that a test may spoil."""
        target = self.dir / name
        shutil.copytree(source, target)
        for path in target.iterdir():
            path.chmod(0o644)
        return target

    def expect_ok(self, *args, **more):
        result = moeflux(*args, **more)
        self.assertEqual(result.code, 0, result.err)
        return result

    def expect_error(self, args, *fragments, code=2, **more):
        """The command fails with this code, prints nothing on stdout and names the fragments."""
        result = moeflux(*args, **more)
        self.assertEqual(result.code, code, f"{args}: {result.err}")
        self.assertEqual(result.raw, b"", args)
        self.assertIn("moeflux: error: ", result.err)
        for fragment in fragments:
            self.assertIn(str(fragment), result.err)
        return result


def main():
    unittest.main(verbosity=1)
