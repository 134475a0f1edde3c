"""Tools of MCP servers, which are the official SDK's, with the official client: one of today's, and one that has sessions."""

import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest
from checkpoints import caller_in
from clusters import Cluster, client, tidemill, wait_until
from conftest import MODEL

CONFIG = """
[server_tools]
hosts = ["127.0.0.1"]
rounds_max = 3
"""
SERVER = """
[[server_tools.mcp]]
name = "{name}"
url = "http://127.0.0.1:{port}/mcp"
timeout_ms = 2000
allowed = ["weather", "thermometer", "view", "forecast"]
"""


class Server:
    def __init__(self, name, *flags):
        self.name, self.flags, self.log, self.process = name, flags, [], None
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = taken.getsockname()[1]

    def start(self):
        command = [sys.executable, str(pathlib.Path(__file__).with_name("mcp_server.py")), str(self.port), *self.flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=lambda out: self.log.extend(out), args=(self.process.stdout,), daemon=True).start()
        wait_until(self.listens)
        return self

    def listens(self):
        assert self.process.poll() is None, self.log
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture(scope="module")
def servers():
    servers = {server.name: server for server in (Server("sky"), Server("old", "old"), Server("late"))}
    servers["sky"].start()
    servers["old"].start()
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def cluster(servers, tmp_path_factory):
    data = tmp_path_factory.mktemp("mcp")
    config = CONFIG + "".join(SERVER.format(name=server.name, port=server.port) for server in servers.values())
    cluster = Cluster(data, config, models=[caller_in(data)])
    yield cluster
    cluster.stop()
    assert any('"DELETE /mcp HTTP/1.1" 200' in line for line in servers["old"].log), "its session was ended"


def ask(cluster, tool, named=None, **fields):
    # A model with random weights likes white space.
    given = {"model": "caller", "input": "What about Kyoto?", "max_output_tokens": 400, "parallel_tool_calls": False, "temperature": 0}
    choice = {"tool_choice": {"type": "function", "name": tool}, "extra_body": {"server_tools": [named or tool]}}
    return client(cluster, "none").responses.create(**(given | choice | fields))


def eventually(cluster, tool, **fields):
    """Calls a tool, and retries until its server answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return ask(cluster, tool, **fields)
        except openai.InternalServerError as error:
            assert error.code == "tools_not_ready" and error.status_code == 503
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(0.2)


def returned(response):
    [item] = [item for item in response.output if item.type == "function_call_output"]
    return item.output


def metric(cluster, line):
    return re.findall(rf"^{re.escape(line)} (\S+)$", httpx.get(f"{cluster.admin}/metrics").text, re.M)


@pytest.mark.parametrize("server", ["sky", "old"])
@pytest.mark.parametrize("named", ["one tool", "all of a server"])
def test_a_call_runs_and_the_model_answers_to_what_came_of_it(cluster, server, named):
    tool = f"{server}__weather"
    response = eventually(cluster, tool, named=tool if named == "one tool" else server)
    assert [item.type for item in response.output if item.type != "reasoning"][:3] == ["function_call", "function_call_output", "message"]
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == tool
    assert re.fullmatch(rf"sunny in {json.loads(call.arguments)['city']}, call \d+", returned(response))


@pytest.mark.parametrize("server", ["sky", "old"])
def test_a_stream_shows_each_step_as_it_happens(cluster, server):
    events = list(ask(cluster, f"{server}__weather", stream=True))
    done = [event.item.type for event in events if event.type == "response.output_item.done" and event.item.type != "reasoning"]
    assert done[:3] == ["function_call", "function_call_output", "message"]
    assert "sunny in" in returned(events[-1].response)


@pytest.mark.parametrize("server", ["sky", "old"])
def test_what_goes_wrong_is_told_to_the_model(cluster, server):
    assert returned(ask(cluster, f"{server}__thermometer")) == "error: Error executing tool thermometer: there is no thermometer in Kyoto"
    began = time.monotonic()
    assert returned(ask(cluster, f"{server}__forecast")) == "error: no answer within 2s"
    assert time.monotonic() - began < 9, "nobody waits for a slow tool"
    assert metric(cluster, f'tidemill_server_tool_calls_total{{tool="{server}__forecast",outcome="failed"}}') == ["1"]


@pytest.mark.parametrize("server", ["sky", "old"])
def test_what_is_no_text_is_named(cluster, server):
    assert returned(ask(cluster, f"{server}__view")) == "green hills\n[an image was left out: image/png]"


def test_tools_that_are_not_there_or_not_allowed_are_named(cluster):
    with pytest.raises(openai.BadRequestError, match="no tool `sky__secret` for you: you may use of `sky` `sky__forecast`, .*`sky__weather`"):
        ask(cluster, "sky__secret")
    with pytest.raises(openai.BadRequestError, match="no tool `sea` for you: you may use `calculator`, `clock`, `late`, `old`, `sky`"):
        ask(cluster, "sea")


def test_a_server_that_is_down_comes_later(cluster, servers):
    with pytest.raises(openai.InternalServerError, match="has not answered") as refused:
        ask(cluster, "late__weather")
    assert refused.value.status_code == 503
    assert metric(cluster, 'tidemill_mcp_server_up{server="late"}') == ["0"]
    assert cluster.told(r"could not list the tools of an MCP server.*(late)")
    servers["late"].start()
    assert "sunny in" in returned(eventually(cluster, "late__weather"))
    wait_until(lambda: metric(cluster, 'tidemill_mcp_server_up{server="late"}') == ["1"])


@pytest.mark.parametrize("server", ["sky", "old"])
def test_a_server_may_be_restarted(cluster, servers, server):
    ask(cluster, f"{server}__weather")
    servers[server].stop()
    assert returned(ask(cluster, f"{server}__weather")).startswith("error: ")
    servers[server].start()
    # The new server knows no earlier session, and its count is 0. A client that failed to reach it in the meantime retries.
    wait_until(lambda: returned(ask(cluster, f"{server}__weather")).endswith(", call 1"), within_s=20)


@pytest.mark.parametrize("hosts, words", [("[]", "add `127.0.0.1:9` to server_tools.hosts"), ('["127.0.0.1:9"]', None)])
def test_a_host_that_is_not_listed_is_refused_at_start(tmp_path, hosts, words):
    config = tmp_path / "coordinator.toml"
    config.write_text(CONFIG.replace('["127.0.0.1"]', hosts) + SERVER.format(name="sky", port=9))
    command = [tidemill(), "up", "--http", "127.0.0.1:0", "--model", str(MODEL), "--data", str(tmp_path), "--coordinator-config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if words:
            _, told = process.communicate(timeout=60)
            assert process.returncode != 0 and words in told
        else:
            assert process.stdout.readline().startswith("ready http"), "a server that is down stops nothing"
    finally:
        process.terminate()
        process.communicate(timeout=60)
