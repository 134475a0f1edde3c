"""The cost of a noisy free tenant for a paid one: the paid tenant's TTFT with and without it, by turns, in one run.

    noisy.py TIDEMILL [TURNS] [SECONDS] [FLAG...]

starts a cluster (`tidemill up FLAG...`, by default with `--engine echo`), gives a paid tenant four streams a second, and in every other
turn lets a free tenant ask ten times as often as it may (200 times a minute). Needs nothing but Python.
"""

import http.client
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

PAID_PER_S = 4
FREE_PER_S = 200 / 60
PROMPT_TOKENS = 128
ANSWER_TOKENS = 32


def main():
    tidemill = sys.argv[1]
    turns, seconds = (int(value) for value in (sys.argv[2:4] + ["8", "20"][len(sys.argv[2:4]) :]))
    flags = sys.argv[4:] or ["--engine", "echo", "--step-ms", "10", "--row-ms", "0.1", "--prompt-token-ms", "0.05"]
    with tempfile.TemporaryDirectory() as data:
        errors = pathlib.Path(data, "log")
        command = [tidemill, "up", "--http", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", data, *flags]
        with errors.open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as cluster:
            try:
                url = re.match(r"ready http://([^/]+)/v1", cluster.stdout.readline())[1]
                admin = re.search(r"operators' port (\S+)", errors.read_text())[1]
                measure(url, {tenant: key(tidemill, admin, tenant) for tenant in ["paid", "free"]}, turns, seconds)
            finally:
                cluster.send_signal(signal.SIGTERM)
                cluster.wait(60)


def key(tidemill, admin, tenant):
    command = [tidemill, "keys", "create", "--tenant", tenant, "--tier", tenant, "--url", admin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(url, keys, turns, seconds):
    times = {False: [], True: []}
    statuses = []
    turn(url, keys, False, 5, [], [])
    for number in range(turns):
        noisy = number % 2 == 1
        turn(url, keys, noisy, seconds, times[noisy], statuses)
    for noisy, name in [(False, "alone"), (True, "beside the free tenant")]:
        ordered = sorted(times[noisy])
        print(f"paid {name}: {len(ordered)} answers, TTFT p50 {at(ordered, 0.5):.1f} ms, p95 {at(ordered, 0.95):.1f} ms")
    print(f"ratio of the p95s: {at(sorted(times[True]), 0.95) / at(sorted(times[False]), 0.95):.3f}")
    print("free:", ", ".join(f"{statuses.count(status)} x {status}" for status in sorted(set(statuses))))


def at(ordered, quantile):
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def turn(url, keys, noisy, seconds, times, statuses):
    clients = [threading.Thread(target=every, args=(1 / PAID_PER_S, seconds, lambda n: times.append(ttft_ms(url, keys["paid"], n))))]
    if noisy:
        clients.append(threading.Thread(target=every, args=(1 / FREE_PER_S, seconds, lambda n: statuses.append(ask(url, keys["free"], n)))))
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def every(interval_s, seconds, work):
    """Begins work at a steady rate, whether or not the last is done."""
    began, running = time.monotonic(), []
    for n in range(int(seconds / interval_s)):
        time.sleep(max(0, began + n * interval_s - time.monotonic()))
        running.append(threading.Thread(target=work, args=(n,)))
        running[-1].start()
    for thread in running:
        thread.join()


def post(url, key, n):
    # Another prompt each time: nothing is cached.
    prompt = [(n * 7919 + i * 31 + int(time.monotonic() * 1000)) % 500 + 1 for i in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(url, timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def ttft_ms(url, key, n):
    began = time.monotonic()
    answer = post(url, key, n)
    assert answer.status == 200, answer.read()
    while not answer.readline().startswith(b"data:"):
        pass
    first = time.monotonic()
    answer.read()
    return (first - began) * 1e3


def ask(url, key, n):
    answer = post(url, key, n)
    answer.read()
    return answer.status


if __name__ == "__main__":
    main()
