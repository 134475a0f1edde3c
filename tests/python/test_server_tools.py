"""Tools that run at the front door, with the official client: a clock, and an endpoint of the operator's."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import httpx
import openai
import pytest
from checkpoints import caller_in
from clusters import Cluster, client

# More tokens than any call of the weather has: four places of white space of up to 42 tokens, and what is between them.
MOST = 300
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
    cluster = Cluster(data, CONFIG.format(url=weather.url), models=[caller_in(data)])
    yield cluster
    cluster.stop()


def ask(cluster, tool, **fields):
    given = {"model": "caller", "input": "What about Kyoto?", "tool_choice": {"type": "function", "name": tool}, "max_output_tokens": MOST, "parallel_tool_calls": False}
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
    assert 0 < response.usage.output_tokens <= MOST, "what is asked for bounds all rounds together"
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


def chat(cluster, *tools, **fields):
    choice = {"type": "function", "function": {"name": tools[0]}}
    given = {"model": "caller", "messages": [{"role": "user", "content": "What about Kyoto?"}], "tool_choice": choice, "max_tokens": MOST}
    given |= {"temperature": 0, "parallel_tool_calls": False} | fields
    return client(cluster, "none").chat.completions.create(**given, extra_body={"server_tools": tools})


def messages(cluster, **fields):
    claude = anthropic.Anthropic(base_url=cluster.url.removesuffix("/v1"), api_key="unused", max_retries=0)
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    given = {"model": "caller", "messages": [{"role": "user", "content": "What about Kyoto?"}], "tool_choice": choice, "max_tokens": MOST}
    return claude.messages.create(**(given | fields), extra_body={"server_tools": ["weather"], "temperature": 0})


def test_a_chat_shows_each_step_whole_and_streamed(cluster, weather):
    completion = chat(cluster, "weather")
    [choice] = completion.choices
    [step] = choice.message.server_tool_calls
    assert (step["function"]["name"], step["output"]) == ("weather", "sunny, 21 degrees")
    assert json.loads(step["function"]["arguments"]) == weather.asked[-1]
    assert choice.message.content and not choice.message.tool_calls and choice.finish_reason in ["stop", "length"]
    assert 0 < completion.usage.completion_tokens <= MOST, "what is asked for bounds all rounds together"
    assert completion.usage.prompt_tokens_details.cached_tokens > 0, "the second round's prompt begins with the first's"

    said, steps, finishes, order, usage = "", [], [], [], None
    for chunk in chat(cluster, "weather", stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not choice.delta.tool_calls, "a call that runs here is not the client's"
            said += choice.delta.content or ""
            ran = getattr(choice.delta, "server_tool_calls", [])
            steps += ran
            order += ["ran"] * len(ran) + ["said"] * bool(choice.delta.content)
            finishes += [choice.finish_reason] if choice.finish_reason else []
    assert [(call["function"], call["output"]) for call in steps] == [(step["function"], step["output"])]
    assert said == completion.choices[0].message.content and finishes == [completion.choices[0].finish_reason]
    assert order[0] == "ran" and order[-1] == "said", "the step comes before what is said of it"
    assert usage.completion_tokens == completion.usage.completion_tokens


def test_messages_show_each_step_and_take_them_back(cluster):
    message = messages(cluster)
    kinds = [block.type for block in message.content if block.type != "thinking"]
    assert kinds[:3] == ["server_tool_use", "server_tool_result", "text"], kinds
    used, returned = (block for block in message.content if block.type.startswith("server_tool"))
    assert (used.name, returned.tool_use_id, returned.content) == ("weather", used.id, "sunny, 21 degrees")
    events = list(messages(cluster, stream=True))
    begun = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert begun == [block.type for block in message.content]
    assert [event.type for event in events].count("message_stop") == 1
    history = [{"role": "user", "content": "What about Kyoto?"}, {"role": "assistant", "content": [block.to_dict() for block in message.content]}]
    next_turn = messages(cluster, messages=[*history, {"role": "user", "content": "And tomorrow?"}], tool_choice={"type": "auto"}, max_tokens=8)
    # Its prompt begins with the second round's, which is longer than half of both.
    both = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert next_turn.usage.cache_read_input_tokens > both / 2


def test_an_answer_without_room_for_another_round_runs_nothing(cluster, weather):
    stream = chat(cluster, "weather", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    [called] = [chunk.usage for chunk in stream if chunk.choices and hasattr(chunk.choices[0].delta, "server_tool_calls")]
    before = len(weather.asked)
    [choice] = chat(cluster, "weather", max_tokens=called.completion_tokens).choices
    assert choice.finish_reason == "length" and not hasattr(choice.message, "server_tool_calls")
    assert len(weather.asked) == before
    [choice] = chat(cluster, "weather", max_tokens=called.completion_tokens + 1).choices
    assert choice.finish_reason == "length" and len(choice.message.server_tool_calls) == 1
    assert len(weather.asked) == before + 1


@pytest.mark.parametrize("fields, param", [({"n": 2}, "n"), ({"extra": "conversation"}, "conversation")])
def test_what_cannot_have_rounds_is_refused(cluster, fields, param):
    body = {"model": "caller", "messages": [{"role": "user", "content": "hi"}], "server_tools": ["clock"]}
    if param == "conversation":
        body |= {"conversation": httpx.post(f"{cluster.url}/conversations", json={}).json()["id"]}
    else:
        body |= fields
    refused = httpx.post(f"{cluster.url}/chat/completions", json=body, timeout=30)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


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
    with pytest.raises(openai.BadRequestError, match="no tool `shell` for you: you may use `calculator`, `clock`, `weather`"):
        ask(cluster, "shell")


def test_a_tool_is_for_those_who_may_use_it(weather, tmp_path):
    config = CONFIG.format(url=weather.url).replace('name = "weather"\n', 'name = "weather"\ntenants = ["friend"]\n')
    cluster = Cluster(tmp_path, config, models=[caller_in(tmp_path)])
    try:
        free, friend = cluster.key("stranger", "free"), cluster.key("friend", "free")
        given = {"model": "caller", "input": "What about Kyoto?", "max_output_tokens": 4}
        for tool, key, may in (("weather", free, False), ("weather", friend, True), ("clock", free, True)):
            ask = lambda: client(cluster, key).responses.create(**given, extra_body={"server_tools": [tool]})
            if may:
                assert ask().status in ("completed", "incomplete")
            else:
                with pytest.raises(openai.BadRequestError, match="no tool `weather` for you: you may use `calculator`, `clock`"):
                    ask()
    finally:
        cluster.stop()
