"""Three regions that help each other out, and what a request of another region costs.

    python3 bench/regions.py PROGRAMS MODEL [--delay-ms MS]

PROGRAMS is a directory with `tidemill` and the programs of the roles; MODEL is whatever `up --model` takes. It needs `openssl`.

Each region is a cluster of its own. Regions reach each other over connections whose TLS ends at a relay of this script, as it does at many a load
balancer; it delays what it carries, and can be cut as a broken cable: nothing is closed, and nothing arrives. Requests go to `eu`. The first line is of requests that it answers itself; then
its decode worker is killed for good, and `us` answers; then the way to `us` is cut, and `asia` answers. A tenant that is pinned to `eu`
asks as well, and no other region may answer it. The exit status is 1 if an answer is not the one of `eu`, or one of the pinned tenant's leaves.
Standard output is Markdown, progress goes to standard error.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import secrets
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.error
import urllib.request

REQUEST_S = 60
ASKED = 40
PROMPTS = [f"{number}: " + f"The {thing} and the sea. " * 12 for number, thing in enumerate("mill wheel tide stone sluice miller grain harbour".split())]


class Refused(Exception):
    """An error at the end of a stream."""


class Cable:
    """A port whose TLS connections go to another one, each byte `delay` seconds later."""

    def __init__(self, loop, delay, to, tls):
        self.loop, self.delay, self.is_cut, self.to = loop, delay, False, to
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self.connected, "127.0.0.1", 0, ssl=tls), loop).result()
        self.port = server.sockets[0].getsockname()[1]

    async def connected(self, reader, writer):
        await asyncio.sleep(2 * self.delay)
        if self.is_cut:
            return await asyncio.sleep(3600)
        there = await asyncio.open_connection("127.0.0.1", self.to)
        await asyncio.gather(self.carry(reader, there[1]), self.carry(there[0], writer))

    async def carry(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                self.loop.call_later(self.delay, self.arrive, writer, chunk)
        self.loop.call_later(self.delay, self.arrive, writer, None)

    def arrive(self, writer, chunk):
        if self.is_cut or writer.is_closing():
            return
        if chunk is None:
            writer.close()
        else:
            writer.write(chunk)


def secret_of(home, *names):
    """The file with the secret of two regions."""
    path = home / ("-".join(sorted(names)) + ".secret")
    if not path.exists():
        path.write_text(secrets.token_hex(32))
    return path


class Region:
    def __init__(self, name, programs, model, home, others, flags):
        self.name = name
        config = home / f"{name}.toml"
        # What two regions have in common is a secret; the file of tenants is the same only so that one key serves for both.
        lines = [f"tenants = '{home}/tenants.sqlite'", "[regions]", f"name = '{name}'", "pins = { bank = ['eu'] }"]
        for other, cable in others.items():
            lines += ["[[regions.others]]", f"name = '{other}'", f"url = 'https://localhost:{cable.port}'", f"ca = '{home}/cert.pem'", f"secret = '{secret_of(home, name, other)}'"]
        config.write_text("\n".join(lines) + "\n")
        command = [programs / "tidemill", "up", "--model", model, "--served-model-name", "m", "--http", "127.0.0.1:0", "--log", "warn"]
        command += ["--prefill", "0", "--decode", "1", "--kvpool", "1", "--threads", "1", "--coordinator-config", config, "--restarts", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        self.port = int(self.process.stdout.readline().split()[1].removesuffix("/v1").rsplit(":", 1)[1])

    def decode_worker(self):
        """The process id of the region's decode worker."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"tidemill-decode" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())

    def stop(self):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(60)
        self.process.kill()


def ask(region, key, prompt):
    """Streams an answer. Returns the region that answered, the text, and the seconds to the first token."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    url = f"http://127.0.0.1:{region.port}/v1/completions"
    begun, first, text = time.monotonic(), None, ""
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=REQUEST_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise Refused(event["error"]["code"])
                first = first or time.monotonic() - begun
                text += "".join(choice["text"] for choice in event["choices"])
            elif line.startswith(b"data: [DONE]"):
                return answer.headers["x-tidemill-region"], text, first
    raise RuntimeError("the stream broke off")


def make_key(programs, admin, tenant):
    command = [programs / "tidemill", "keys", "create", "--url", admin, "--tenant", tenant, "--tier", "premium"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Drill:
    def __init__(self, eu, key, bank):
        self.eu, self.key, self.bank = eu, key, bank
        self.wanted, self.faults = None, 0

    def fault(self, text):
        self.faults += 1
        print(text, file=sys.stderr)

    def phase(self, name):
        """Asks for answers one after the other, compares them with the first ones, and prints a line."""
        regions, firsts, answers, repeated = [], [], [], 0
        for number in range(ASKED):
            begun = time.monotonic()
            try:
                region, text, first = ask(self.eu, self.key, PROMPTS[number % len(PROMPTS)])
            except urllib.error.HTTPError as error:
                # As clients do, whose libraries repeat a request after 502.
                if error.code != 502:
                    raise
                repeated += 1
                lost = time.monotonic() - begun
                region, text, first = ask(self.eu, self.key, PROMPTS[number % len(PROMPTS)])
                first += lost
            regions.append(region)
            firsts.append(1e3 * first)
            answers.append(text)
        self.wanted = self.wanted or answers
        wrong = sum(a != b for a, b in zip(answers, self.wanted))
        if wrong:
            self.fault(f"{name}: {wrong} wrong answers")
        bank = self.ask_as_bank()
        by = ", ".join(f"{region} {regions.count(region)}" for region in sorted(set(regions)))
        print(f"| {name} | {by} | {wrong} | {repeated} | {firsts[0]:.0f} | {statistics.median(firsts):.0f} | {max(firsts[1:]):.0f} | {bank} |", flush=True)

    def ask_as_bank(self):
        try:
            region, _, _ = ask(self.eu, self.bank, PROMPTS[0])
        except urllib.error.HTTPError as error:
            return f"refused ({error.code})"
        except Refused as error:
            return f"refused after waiting ({error})"
        if region != "eu":
            self.fault(f"the pinned tenant was answered in {region}")
        return region


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=pathlib.Path)
    parser.add_argument("model")
    parser.add_argument("--delay-ms", type=float, default=40.0, help="one way, between regions")
    args = parser.parse_args()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with contextlib.ExitStack() as stack:
        home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, "-out", home / "cert.pem", "-keyout", home / "key.pem"]
        subprocess.run(command, check=True, capture_output=True)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(home / "cert.pem", home / "key.pem")
        admin = f"127.0.0.1:{free_port()}"

        def start(name, others, *flags):
            region = Region(name, args.programs, args.model, home, others, flags)
            stack.callback(region.stop)
            return region

        # They know the region that relays to them, and have no way to it.
        nowhere = {"eu": types.SimpleNamespace(port=9)}
        us, asia = start("us", nowhere), start("asia", nowhere)
        cables = {region.name: Cable(loop, args.delay_ms / 1e3, region.port, tls) for region in (us, asia)}
        eu = start("eu", cables, "--admin", admin)
        key, bank = (make_key(args.programs, f"http://{admin}", tenant) for tenant in ("shop", "bank"))
        # The others read the file of tenants within a second.
        time.sleep(2)
        drill = Drill(eu, key, bank)
        print("| | answered by | wrong | repeated after 502 | first request: TTFT, ms | median | longest after the first | the pinned tenant |")
        print("|---|---|---:|---:|---:|---:|---:|---|")
        drill.phase("eu serves")
        os.kill(eu.decode_worker(), signal.SIGKILL)
        time.sleep(1)
        drill.phase("eu has lost its worker")
        cables["us"].is_cut = True
        drill.phase("and the way to us is cut")
        for region in (us, asia):
            with contextlib.suppress(urllib.error.HTTPError):
                ask(region, bank, PROMPTS[0])
                drill.fault(f"the pinned tenant was answered in {region.name}")
    sys.exit(1 if drill.faults else 0)


if __name__ == "__main__":
    main()
