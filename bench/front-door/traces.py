"""The cost of traces: a front door without them, beside one that keeps 1 % of them and one that keeps all, in turns of a second (`turns.py`).

    traces.py PROGRAMS [MODEL [ROUNDS [STREAMS]]]

PROGRAMS is the directory of one build. The collector is a process that reads what comes and answers that it has it. Needs `wrk` and Linux.
"""

import http.server
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
PROSE = HERE.parents[1] / "model/tests/fixtures/prose"


class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def collect(server):
    # It stands for another machine: what it takes of this one should not hold up the front door.
    os.nice(10)
    server.serve_forever()


def main():
    programs, model, rounds, streams = [*sys.argv[1:], None, None, None][:4]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector = multiprocessing.get_context("fork").Process(target=collect, args=(server,), daemon=True)
    collector.start()
    with tempfile.TemporaryDirectory() as directory:
        doors = [f"off={programs}"]
        for name, share in [("1%", 0.01), ("all", 1.0)]:
            config = pathlib.Path(directory, f"{name}.toml")
            config.write_text(f'[traces]\nurl = "http://127.0.0.1:{server.server_port}"\nshare = {share}\n')
            doors.append(f"{name}={programs},--coordinator-config,{config}")
        turns = [sys.executable, HERE / "turns.py", model or PROSE, rounds or "24", streams or "64", *doors]
        code = subprocess.run(turns, check=False).returncode
    collector.terminate()
    sys.exit(code)


if len(sys.argv) < 2:
    sys.exit(__doc__)
main()
