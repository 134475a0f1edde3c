"""Which model answers: rules, splits, pins of tenants, rollouts with the official clients. Two tiny models."""

import json
import os
import socket
import subprocess
import time

import anthropic
import httpx
import openai
import pytest
from conftest import MODEL, running_cluster

OTHER = MODEL.parent / "qwen2"
CONFIG = """
[router]
region_header = "x-region"
pins = { bank = "large" }
auto = { small = "small", large = "large" }

[[route]]
name = "europe"
region = ["eu"]
model = "small"

[[route]]
name = "german"
asked = ["chat"]
language = ["de"]
model = "large"

[[route]]
asked = ["chat"]
split = { small = 50, large = 50 }
"""
HARD = "Prove this theorem:\n```python\ndef f(x):\n    return x\n```"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def routed(tmp_path_factory):
    """A cluster with rules, and its operators' port."""
    config = tmp_path_factory.mktemp("routes") / "coordinator.toml"
    config.write_text(CONFIG)
    admin = f"127.0.0.1:{free_port()}"
    names = ["--served-model-name", "small", "--model", str(OTHER), "--served-model-name", "large"]
    flags = ["--coordinator-config", str(config), "--admin", admin, "--prefill", "0", "--kvpool", "0"]
    with running_cluster(*names, *flags, operators=f"http://{admin}") as url:
        yield url, f"http://{admin}"


@pytest.fixture(scope="module")
def client(routed):
    with openai.OpenAI(base_url=routed[0], api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def chat(client, model, text="Hello", **fields):
    messages = [{"role": "user", "content": text}]
    answer = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, max_tokens=4, temperature=0, **fields
    )
    return answer.headers.get("x-tidemill-model"), answer.headers.get("x-tidemill-route"), answer.parse()


def test_auto_is_small_or_large_in_every_protocol(routed, client):
    for text, model in [("Hello", "small"), (HARD, "large")]:
        told, why, answer = chat(client, "auto", text)
        assert (told, answer.model) == (model, model) and why.startswith("auto: ")
        assert answer.usage.tidemill["route"] == {"asked": "auto", "model": model, "why": why}
        assert client.completions.create(model="auto", prompt=text, max_tokens=4).model == model
        assert client.responses.create(model="auto", input=text, max_output_tokens=16).model == model
        root = routed[0].removesuffix("/v1")
        with anthropic.Anthropic(base_url=root, api_key="unused", max_retries=0) as messages:
            answer = messages.messages.create(
                model="auto", max_tokens=4, messages=[{"role": "user", "content": text}]
            )
            assert answer.model == model
    with client.chat.completions.create(
        model="auto", messages=[{"role": "user", "content": HARD}], max_tokens=4, stream=True
    ) as stream:
        assert {chunk.model for chunk in stream} == {"large"}


def test_rules_in_their_order_and_names_that_can_be_asked_for(client):
    assert chat(client, "large", extra_headers={"X-Region": "eu"})[:2] == ("small", "rule europe")
    german = "Guten Tag, ich würde gerne wissen, wann der nächste Zug nach Hause fährt."
    assert chat(client, "chat", german)[:2] == ("large", "rule german")
    assert [model.id for model in client.models.list()] == ["small", "large", "auto", "chat"]
    with pytest.raises(openai.NotFoundError, match="serves `small`, `large`"):
        chat(client, "gpt")


def test_users_stay_where_a_split_puts_them(client):
    models = {}
    for user in range(24):
        models[user] = {chat(client, "chat", user=f"user-{user}")[0] for _ in range(2)}
    assert all(len(each) == 1 for each in models.values())
    assert set.union(*models.values()) == {"small", "large"}


def test_a_rollout_by_the_command_line(routed, client):
    url, admin = routed

    def rollout(*args, code=0):
        command = [os.environ["TIDEMILL_BIN"], "rollout", *args, "--url", admin]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert ran.returncode == code, ran.stderr
        return ran.stdout + ran.stderr

    assert "--no-gate" in rollout("start", "--from", "small", "--to", "large", code=1)
    easy = ["--requests-min", "5", "--latency-ratio", "1000", "--goodput-under", "1", "--shadow", "1"]
    golden = ["--golden-from", "0.91", "--golden-to", "0.90"]
    rollout("start", "--from", "small", "--to", "large", "--steps", "30,100", "--step-seconds", "2", *golden, *easy)
    there, deadline = set(), time.monotonic() + 60
    while True:
        state = json.loads(rollout("status", "--json"))["rollouts"][0]
        for user in range(12):
            model, _, answer = chat(client, "small", user=f"user-{user}")
            assert model == answer.model
            if model == "large":
                there.add(user)
            else:
                assert user not in there, "nobody moves back"
        if state["state"] == "done":
            break
        assert state["state"] == "running" and time.monotonic() < deadline, state
    assert there == set(range(12))
    shadows = state["shadows"]
    assert shadows["same"] + shadows["differs"] > 0 and shadows["failed"] == 0, shadows
    assert "done" in rollout("status") and "small -> large" in rollout("status")
    rollout("abort", "--from", "small")
    deadline = time.monotonic() + 10
    while chat(client, "small")[0] != "small":
        assert time.monotonic() < deadline
    rollout("forget", "--from", "small")
    metrics = httpx.get(f"{admin}/metrics").text
    assert 'tidemill_routed_total{model="large",by="rollout"}' in metrics


def test_a_pinned_tenant_gets_its_model_and_pays_for_it(routed):
    url, admin = routed
    # From here on there are keys.
    made = {}
    for tenant in ["bank", "shop"]:
        made[tenant] = httpx.post(f"{admin}/admin/keys", json={"tenant": tenant, "tier": "paid"}).json()["key"]
    with openai.OpenAI(base_url=url, api_key=made["bank"], max_retries=0) as bank:
        assert chat(bank, "small")[:2] == ("large", "pin of bank")
        assert chat(bank, "auto", extra_headers={"X-Region": "eu"})[0] == "large"
    with openai.OpenAI(base_url=url, api_key=made["shop"], max_retries=0) as shop:
        assert chat(shop, "small")[:2] == ("small", "asked")
        # A client that does not name its users counts as one user.
        assert len({chat(shop, "chat")[0] for _ in range(6)}) == 1
