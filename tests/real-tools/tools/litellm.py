"""LiteLLM as a proxy: OpenAI's and Anthropic's clients speak to it, and it to the server."""

import os
import pathlib
import socket
import subprocess
import time
import urllib.request

import anthropic
import openai

CONFIG = f"""
model_list:
  - model_name: chat
    litellm_params: {{model: "hosted_vllm/{os.environ['MODEL']}", api_base: "{os.environ['SERVER']}/v1", api_key: os.environ/OPENAI_API_KEY}}
  - model_name: openai
    litellm_params: {{model: "openai/{os.environ['MODEL']}", api_base: "{os.environ['SERVER']}/v1", api_key: os.environ/OPENAI_API_KEY}}
  - model_name: embedder
    litellm_params: {{model: "openai/embedder", api_base: "{os.environ['SERVER']}/v1", api_key: os.environ/OPENAI_API_KEY}}
  - model_name: ranker
    litellm_params: {{model: "hosted_vllm/ranker", api_base: "{os.environ['SERVER']}", api_key: os.environ/OPENAI_API_KEY}}
"""
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
READY_S = 180
KEY = "sk-of-the-proxy"
ask = {"max_tokens": 60, "messages": [{"role": "user", "content": "What is the weather in Oslo?"}]}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for(url):
    deadline = time.monotonic() + READY_S
    while True:
        try:
            return urllib.request.urlopen(url, timeout=5)
        except OSError:
            assert proxy.poll() is None and time.monotonic() < deadline, "the proxy does not start"
            time.sleep(0.5)


pathlib.Path("config.yaml").write_text(CONFIG)
url = f"http://127.0.0.1:{free_port()}"
command = ["litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", url.rsplit(":", 1)[1]]
proxy = subprocess.Popen(command, env=os.environ | {"LITELLM_MASTER_KEY": KEY})
wait_for(f"{url}/health/liveliness")
client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
calls = 0
for model in "chat", "openai":
    whole = client.chat.completions.create(model=model, **ask)
    assert whole.usage.completion_tokens > 0 and whole.choices[0].message.content, whole
    chunks = list(client.chat.completions.create(model=model, **ask, stream=True, stream_options={"include_usage": True}))
    assert any(chunk.usage for chunk in chunks) and any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks), chunks
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": TOOL}}
    called = client.chat.completions.create(model=model, **ask, tools=[tool], tool_choice="required").choices[0].message
    assert called.tool_calls[0].function.name == "get_weather", called
    calls += len(called.tool_calls)
    response = client.responses.create(model=model, input="Say hello.", max_output_tokens=20)
    assert response.output_text, response
message = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0).messages.create(
    model="chat", **ask, tools=[{"name": "get_weather", "input_schema": TOOL}], tool_choice={"type": "any"}
)
assert message.content[-1].type == "tool_use" and list(message.content[-1].input) == ["city"], message
assert len(client.embeddings.create(model="embedder", input=["the sea", "a boat"]).data) == 2
ranked = client.post("/rerank", cast_to=object, body={"model": "ranker", "query": "the sea", "documents": ["a boat", "a cat"]})
assert len(ranked["results"]) == 2, ranked
print(f"{calls} calls by OpenAI's client, {message.content[-1].name}({message.content[-1].input}) by Anthropic's")
