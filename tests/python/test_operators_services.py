"""A whole cluster with an operator's own services: an identity provider whose keys it fetches, a usage sink, and overload."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jwt
import openai
import pytest
from clusters import Cluster, client, complete, wait_until
from cryptography.hazmat.primitives.asymmetric import ec

TOKEN = "a-token-of-the-sink"
CONFIG = """
[jwt]
issuer = "https://id.example"
audience = ["tidemill"]
algorithms = ["ES256"]
jwks_url = "{url}/jwks.json"
[usage_sink]
url = "{url}/usage"
token = "{token}"
[shedding]
kv_used = 0.000001
"""


class Services(BaseHTTPRequestHandler):
    """Serves the keys that the test has made, and accepts events unless told otherwise."""

    def do_GET(self):
        self.reply(200, {"keys": [self.server.public(name) for name in self.server.keys]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {TOKEN}" or self.server.refuses:
            self.server.refused += 1
            return self.reply(503, {})
        self.server.events.extend(body["events"])
        self.reply(200, {})

    def reply(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Services)
        self.keys, self.events, self.refuses, self.refused = {}, [], False, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def new_key(self, name):
        self.keys[name] = ec.generate_private_key(ec.SECP256R1())

    def public(self, name):
        return jwt.algorithms.ECAlgorithm.to_jwk(self.keys[name].public_key(), as_dict=True) | {"kid": name, "alg": "ES256", "use": "sig"}

    def token(self, key, **claims):
        usual = {"iss": "https://id.example", "aud": "tidemill", "exp": time.time() + 600, "tenant": "acme", "sub": "ann", "tier": "premium"}
        return jwt.encode(usual | claims, self.keys[key], "ES256", headers={"kid": key})


@pytest.fixture(scope="module")
def services():
    with Server() as server:
        server.new_key("first")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def cluster(services, tmp_path_factory):
    data = tmp_path_factory.mktemp("services")
    token = data / "sink.token"
    token.write_text(TOKEN)
    echo = ["--engine", "echo", "--step-ms", "100"]
    cluster = Cluster(data, CONFIG.format(url=services.url, token=token), *echo)
    yield cluster
    if cluster.process.poll() is None:
        cluster.stop()


def test_a_token_of_the_provider_opens_and_one_that_is_wrong_in_any_way_does_not(cluster, services):
    assert complete(client(cluster, services.token("first"))).usage.completion_tokens == 4
    stranger = Server()
    stranger.new_key("first")
    stranger.server_close()
    for wrong in [
        services.token("first", exp=time.time() - 600),
        services.token("first", aud="others"),
        services.token("first", iss="https://other.example"),
        stranger.token("first"),
        jwt.encode({"iss": "https://id.example", "aud": "tidemill", "tenant": "acme"}, None, "none"),
    ]:
        with pytest.raises(openai.AuthenticationError):
            complete(client(cluster, wrong))


def test_a_key_that_the_provider_has_made_since_counts_at_once(cluster, services):
    services.new_key("second")
    # Keys are not fetched more often than every few seconds, whatever tokens come.
    wait_until(lambda: opens(cluster, services.token("second")), within_s=30)


def test_the_sink_gets_every_request_once_also_after_it_was_down(cluster, services):
    asker = client(cluster, services.token("first", tenant="counted"))
    services.refuses = True
    for _ in range(3):
        complete(asker)
    wait_until(lambda: services.refused > 0)
    services.refuses = False
    complete(asker)

    def counted():
        return [event for event in services.events if event["tenant"] == "counted"]

    wait_until(lambda: len(counted()) >= 4, within_s=60)
    assert len({event["id"] for event in counted()}) == len(counted()) == 4
    assert {(event["user"], event["outcome"], event["output_tokens"]) for event in counted()} == {("ann", "ok", 4)}


def test_too_much_to_do_turns_free_away_first_then_paid_and_lets_them_in_again(cluster, services):
    free, paid, premium = (client(cluster, services.token("first", tenant=tier, tier=tier)) for tier in ["free", "paid", "premium"])
    with complete(premium, max_tokens=400, stream=True) as busy:
        next(iter(busy))
        refused = until_refused(free)
        assert refused.status_code == 503 and refused.code == "overloaded" and "`free`" in refused.message
        assert int(refused.response.headers["retry-after"]) >= 1
        assert until_refused(paid).code == "overloaded"
        assert complete(premium, max_tokens=1).choices, "premium is never turned away"
    for tier in [paid, free]:
        wait_until(lambda tier=tier: until_answered(tier), within_s=60)


def opens(cluster, token):
    try:
        complete(client(cluster, token))
    except openai.AuthenticationError:
        return False
    return True


def until_refused(asker):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            complete(asker, max_tokens=1)
        except openai.InternalServerError as refused:
            return refused
        time.sleep(0.2)
    raise AssertionError("nobody is turned away")


def until_answered(asker):
    try:
        return complete(asker, max_tokens=1).choices
    except openai.InternalServerError:
        return False
