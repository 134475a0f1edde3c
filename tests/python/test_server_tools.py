"""Tools that run at the front door, with the official client: a clock, and an endpoint of the operator's."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest
from clusters import Cluster, client
from conftest import MODEL
from test_tools import TEMPLATE

CONFIG = """
[server_tools]
hosts = ["127.0.0.1"]
rounds_max = 3
[[server_tools.tool]]
name = "weather"
description = "The weather in a city"
url = "{url}"
parameters = {{ type = "object", properties = {{ city = {{ enum = ["Kyoto", "Rome"] }} }}, required = ["city"], additionalProperties = false }}
"""


class Weather(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        text = b"sunny, 21 degrees"
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("location", self.server.elsewhere)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def start(status):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Weather)
    server.status, server.asked = status, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.fixture(scope="module")
def weather():
    (server, url), (elsewhere, elsewhere_url) = start(200), start(200)
    server.url, server.elsewhere, server.elsewhere_asked = url, elsewhere_url, elsewhere.asked
    yield server
    server.shutdown()
    elsewhere.shutdown()


@pytest.fixture(scope="module")
def cluster(weather, tmp_path_factory):
    data = tmp_path_factory.mktemp("tools")
    # A model whose template knows calls.
    shutil.copytree(MODEL, data / "caller")
    (data / "caller/chat_template.jinja").write_text(TEMPLATE)
    cluster = Cluster(data, CONFIG.format(url=weather.url), models=[data / "caller"])
    yield cluster
    cluster.stop()


def ask(cluster, tool, **fields):
    given = {"model": "caller", "input": "What about Kyoto?", "tool_choice": {"type": "function", "name": tool}, "max_output_tokens": 120, "parallel_tool_calls": False}
    body = {"server_tools": [tool]}
    return client(cluster, "none").responses.create(**(given | fields), temperature=0, extra_body=body)


def kinds(response):
    return [item.type for item in response.output if item.type != "reasoning"]


def test_a_call_runs_and_the_model_answers_to_what_came_of_it(cluster, weather):
    response = ask(cluster, "weather")
    assert kinds(response)[:3] == ["function_call", "function_call_output", "message"]
    call, returned = (item for item in response.output if item.type.startswith("function_call"))
    assert json.loads(call.arguments) == weather.asked[-1] and weather.asked[-1]["city"] in ["Kyoto", "Rome"]
    assert (returned.call_id, returned.output) == (call.call_id, "sunny, 21 degrees")
    assert 0 < response.usage.output_tokens <= 120, "what is asked for bounds all rounds together"
    # The second round's prompt begins with the first's, and its answer.
    assert response.usage.input_tokens_details.cached_tokens > 0
    again = client(cluster, "none").responses.retrieve(response.id)
    assert [item.id for item in again.output] == [item.id for item in response.output]
    later = client(cluster, "none").responses.create(
        model="caller", input="And tomorrow?", previous_response_id=response.id, max_output_tokens=16
    )
    known = [item.id for item in client(cluster, "none").responses.input_items.list(later.id, order="asc")]
    assert [item.id for item in response.output] == known[1:-1], "the next turn knows every step"


def test_a_stream_shows_each_step_as_it_happens(cluster):
    events = list(ask(cluster, "weather", stream=True))
    done = [event.item.type for event in events if event.type == "response.output_item.done" and event.item.type != "reasoning"]
    assert done[:3] == ["function_call", "function_call_output", "message"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds(events[-1].response) == done


def test_the_clock_tells_the_time(cluster):
    [returned] = [item for item in ask(cluster, "clock").output if item.type == "function_call_output"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ, \w+day", returned.output)


@pytest.mark.parametrize("status", [500, 302])
def test_what_goes_wrong_is_told_to_the_model_and_no_redirect_is_followed(cluster, weather, status):
    weather.status = status
    try:
        [returned] = [item for item in ask(cluster, "weather").output if item.type == "function_call_output"]
    finally:
        weather.status = 200
    assert returned.output == f"error: it answered with status {status}: sunny, 21 degrees"
    assert not weather.elsewhere_asked


def test_a_tool_that_is_not_there_is_named(cluster):
    with pytest.raises(openai.BadRequestError, match="no tool `shell`: it has `calculator`, `clock`, `weather`"):
        ask(cluster, "shell")
