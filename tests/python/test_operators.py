"""Operators who sign in at an identity provider: tokens and browsers, roles, and the record of what they do."""

import json
import pathlib
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from clusters import tidemill, wait_until
from conftest import MODEL
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from identity_provider import Provider, forged

ROLES = """
look = ["viewers"]
operate = ["sre"]
administer = ["admins"]
"""
#: A representative of each kind of route, with what it answers to those who may.
ROUTES = [
    ("GET", "/metrics", None, "look", 200),
    ("GET", "/cluster", None, "look", 200),
    ("GET", "/admin/spend", None, "look", 200),
    ("GET", "/admin/tenants", None, "look", 200),
    ("GET", "/registry", None, "look", 200),
    ("GET", "/rollouts", None, "look", 200),
    ("GET", "/admin/appeals", None, "operate", 200),
    ("POST", "/rollouts/pause", {"from": "nothing"}, "operate", 404),
    ("POST", "/admin/appeals/apl_0", {"decision": "upheld"}, "operate", 404),
    ("GET", "/admin/keys", None, "administer", 200),
    ("GET", "/admin/erasures", None, "administer", 200),
    ("GET", "/admin/export?tenant=acme", None, "administer", 200),
    ("GET", "/admin/backup", None, "administer", 200),
    ("PUT", "/admin/tenants/acme", {"tier": "paid"}, "administer", 200),
    ("POST", "/admin/keys", {"tenant": "acme"}, "administer", 200),
    ("DELETE", "/admin/keys/tm_000000000000", None, "administer", 404),
    ("POST", "/admin/erasures", {"tenant": "acme", "check": True}, "administer", 200),
    ("PUT", "/registry/alias/a", {"value": "llama3"}, "administer", 200),
    ("DELETE", "/coordinators/nobody", None, "administer", None),
]
GROUPS = {"look": "viewers", "operate": "sre", "administer": "admins"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Coordinator:
    """A coordinator by itself: operators need no workers."""

    def __init__(self, data, provider, more="", sections=""):
        self.data, self.port = data, free_port()
        self.admin = f"http://127.0.0.1:{self.port}"
        subprocess.run([tidemill(), "certs", data / "pki", "coordinator/coordinator-0"], check=True, capture_output=True)
        config = f"[operators]\nissuer = '{provider.issuer}'\nclient_id = '{provider.client_id}'\nurl = '{self.admin}'\n{ROLES}{more}\n{sections}"
        (data / "coordinator.toml").write_text(config)
        self.log = []
        self.start()

    def start(self):
        program = pathlib.Path(tidemill()).with_name("tidemill-coordinator")
        flags = ["--http", "127.0.0.1:0", "--admin", f"127.0.0.1:{self.port}", "--data", self.data / "data", "--audit", "30"]
        flags += ["--pki", self.data / "pki/coordinator/coordinator-0", "--model", MODEL, "--config", self.data / "coordinator.toml"]
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = queue.Queue()
        threading.Thread(target=lambda: [lines.put(line) for line in self.process.stdout], daemon=True).start()
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        try:
            line = lines.get(timeout=120)
        except queue.Empty:
            pytest.fail("".join(self.log))
        self.url = re.search(r"listening (http://\S+)", line)[1]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def ask(self, method, path, token=None, body=None, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            headers["authorization"] = f"Bearer {token}"
        if method in ("POST", "PUT"):
            headers.setdefault("content-type", "application/json")
        content = None if body is None else json.dumps(body)
        return httpx.request(method, self.admin + path, content=content, headers=headers, timeout=60)

    def records(self, kind):
        shown = subprocess.run([tidemill(), "audit", "show", self.data / "data/audit"], capture_output=True, text=True, check=True)
        return [record["event"] for record in map(json.loads, shown.stdout.splitlines()) if record["event"]["kind"] == kind]


class Browser(httpx.Client):
    """A browser as far as cookies, redirects and the headers of a page's own requests go."""

    def __init__(self, coordinator):
        super().__init__(base_url=coordinator.admin, timeout=60)
        self.origin = coordinator.admin

    def sign_in(self):
        begun = self.get("/console/sign-in")
        assert begun.status_code == 303, begun.text
        back = httpx.get(begun.headers["location"])
        return self.get(back.headers["location"])

    def change(self, method, path, body=None, origin="own", **headers):
        origin = {"origin": self.origin if origin == "own" else origin} if origin else {}
        return self.request(method, path, json=body, headers=origin | {"content-type": "application/json"} | headers)


@pytest.fixture(scope="module")
def provider():
    provider = Provider()
    yield provider
    provider.stop()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory, provider):
    data = tmp_path_factory.mktemp("operators")
    (data / "look").write_text("s3cret" * 8)
    coordinator = Coordinator(data, provider, f"look_token = '{data / 'look'}'")
    yield coordinator
    coordinator.stop()


@pytest.fixture
def browser(coordinator):
    with Browser(coordinator) as browser:
        yield browser


def test_each_role_may_do_what_its_row_says_and_no_more(coordinator, provider):
    for method, path, body, needed, answer in ROUTES:
        unknown = coordinator.ask(method, path, body=body)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "sign_in_required"), path
        assert unknown.headers["www-authenticate"] == "Bearer"
        for role, group in GROUPS.items():
            answered = coordinator.ask(method, path, provider.token(group), body)
            if list(GROUPS).index(role) < list(GROUPS).index(needed):
                error = answered.json()["error"]
                assert (answered.status_code, error["code"]) == (403, "role_required"), (role, path)
                assert f"needs the role `{needed}`, and ann@staff.example has `{role}`" in error["message"]
            else:
                assert answered.status_code not in (401, 403), (role, path, answered.text)
                assert answer in (None, answered.status_code), (role, path, answered.text)
    nobody = coordinator.ask("GET", "/cluster", provider.token("gardeners"))
    assert nobody.status_code == 403 and "`groups` names no role" in nobody.json()["error"]["message"]
    for path in ["/health", "/console", "/console/app.js", "/console/who"]:
        assert coordinator.ask("GET", path).status_code == 200, "there is nothing to see there"
    assert coordinator.ask("GET", "/ready").status_code == 503
    assert coordinator.ask("GET", "/nowhere").status_code == 404
    assert coordinator.ask("PATCH", "/admin/keys").status_code in (405, 415)


def test_what_changes_and_what_is_refused_is_recorded_with_who(coordinator, provider):
    changed = coordinator.ask("PUT", "/admin/tenants/recorded", provider.token("admins", name="Eve\r\nroot: all good"), {"tier": "paid"})
    assert changed.status_code == 200
    [record] = [event for event in coordinator.records("operator") if "/recorded" in event["did"]]
    assert record["who"] == {
        "issuer": provider.issuer, "subject": "u-ann", "name": "Eve??root: all good", "email": "ann@staff.example",
        "role": "administer", "by": "token",
    }  # fmt: skip
    assert (record["did"], record["asked"], record["verdict"]) == ("PUT /admin/tenants/recorded", '{"tier": "paid"}', "allowed")
    assert [end["status"] for end in coordinator.records("operator-end") if end["id"] == record["id"]] == [200]
    assert coordinator.ask("DELETE", "/admin/keys/tm_refused", provider.token("viewers")).status_code == 403
    assert coordinator.ask("DELETE", "/admin/keys/tm_unknown", "x.y.z").status_code == 401
    refused = {event["did"]: event for event in coordinator.records("operator") if event["verdict"] == "refused"}
    of_ann = refused["DELETE /admin/keys/tm_refused"]
    assert (of_ann["who"]["subject"], of_ann["who"]["role"], of_ann["why"], of_ann["status"]) == ("u-ann", "look", "role", 403)
    assert refused["DELETE /admin/keys/tm_unknown"]["who"] is None
    assert not any("all good" in line and line.startswith("root:") for line in coordinator.log), "no name makes a line of its own"
    verified = subprocess.run([tidemill(), "audit", "verify", coordinator.data / "data/audit"], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr


def test_refusals_do_not_fill_the_log(coordinator, provider):
    token = provider.token("viewers")
    with httpx.Client(base_url=coordinator.admin, headers={"authorization": f"Bearer {token}"}) as http:
        for _ in range(150):
            assert http.delete("/admin/keys/tm_flood").status_code == 403
    floods = [event for event in coordinator.records("operator") if "tm_flood" in event["did"]]
    assert len(floods) <= 121, "60 a minute"
    metrics = coordinator.ask("GET", "/metrics", token).text
    assert int(re.search(r'operator_requests_total{outcome="role"} (\d+)', metrics)[1]) >= 150


def test_tokens_that_are_not_for_operators_are_refused(coordinator, provider):
    public = provider.key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    claims = provider.claims()
    now = int(time.time())
    for what, token, words in [
        ("expired", provider.token(exp=now - 31), "expired"),
        ("not yet valid", provider.token(nbf=now + 60), "not valid yet"),
        ("without an end", provider.token(exp=None), "exp"),
        ("another audience", provider.token(aud="tidemill"), "Audience"),
        ("another issuer", provider.token(iss="https://id.example"), "Issuer"),
        ("without a subject", provider.token(sub=None), "sub"),
        ("alg none", forged(claims, {"alg": "none", "typ": "JWT", "kid": provider.kid}), "not a JSON web token"),
        ("HS256 by the public key", forged(claims, {"alg": "HS256", "kid": provider.kid}, public), "algorithm"),
        ("HS256 without a kid", forged(claims, {"alg": "HS256"}, public), "algorithm"),
        ("a stranger's key under our kid", provider.sign(claims, stranger), "InvalidSignature"),
        ("critical extensions", forged(claims, {"alg": "RS256", "crit": ["x"], "kid": provider.kid}, b"s"), "critical"),
        ("an API key", "tm_" + "0" * 64, "not a JSON web token"),
        ("cut", provider.token()[:-9], ""),
    ]:
        refused = coordinator.ask("GET", "/cluster", token)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (401, "invalid_token"), what
        assert words in error["message"] and token not in error["message"], (what, error)
    assert coordinator.ask("GET", "/cluster", provider.token(exp=now - 20)).status_code == 200, "clocks differ a little"
    assert coordinator.ask("GET", "/cluster", authorization="Basic dTpw").status_code == 401
    # A wrong token is not passed over for something else that would do.
    with Browser(coordinator) as browser:
        browser.sign_in()
        assert browser.get("/cluster").status_code == 200
        assert browser.get("/cluster", headers={"authorization": "Bearer x.y.z"}).status_code == 401


def test_a_storm_of_unknown_keys_asks_the_provider_little(coordinator, provider):
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    before, begun = provider.fetches, time.monotonic()
    with httpx.Client(base_url=coordinator.admin, timeout=60) as http:
        for n in range(100):
            token = provider.sign(provider.claims(), stranger, kid=f"unknown-{n}")
            assert http.get("/cluster", headers={"authorization": f"Bearer {token}"}).status_code == 401
    within = time.monotonic() - begun
    assert provider.fetches - before <= 1 + within // 10
    assert coordinator.ask("GET", "/cluster", provider.token()).status_code == 200


def test_a_new_key_of_the_provider_is_found(coordinator, provider):
    old = provider.token()
    assert coordinator.ask("GET", "/cluster", old).status_code == 200
    provider.rotate("ES256")
    # At most every ten seconds an unknown key has the keys fetched.
    wait_until(lambda: coordinator.ask("GET", "/cluster", provider.token()).status_code == 200, 30)
    assert coordinator.ask("GET", "/cluster", old).status_code == 401, "the old key was withdrawn"
    provider.rotate()
    wait_until(lambda: coordinator.ask("GET", "/cluster", provider.token()).status_code == 200, 30)


def test_programs_may_look_with_a_secret_and_nothing_else(coordinator):
    secret = "s3cret" * 8
    assert coordinator.ask("GET", "/metrics", secret).status_code == 200
    assert coordinator.ask("GET", "/admin/keys", secret).status_code == 403
    assert coordinator.ask("POST", "/rollouts/pause", secret, {"from": "x"}).status_code == 403
    assert coordinator.ask("GET", "/metrics", secret[:-1]).status_code == 401
    assert secret not in "".join(coordinator.log)


def test_the_command_line_sends_a_token(coordinator, provider, tmp_path):
    token = tmp_path / "token"

    def run(*arguments, status=0):
        done = subprocess.run([tidemill(), *arguments, "--url", coordinator.admin, "--token-file", token], capture_output=True, text=True)
        assert done.returncode == status, done
        return done.stdout + done.stderr

    token.write_text(provider.token("admins"))
    assert "tm_" in run("keys", "create", "--tenant", "by-command", "--tier", "paid")
    assert "by-command" in run("tenants", "list")
    assert "by-command" in run("usage", "--spend")
    assert "alias" in run("registry", "put", "alias", "b", "llama3") + run("registry", "list")
    run("cluster", "--once")
    run("backup", "--out", str(tmp_path / "backup.tar"))
    assert json.loads(run("export", "--tenant", "by-command").splitlines()[-1])["kind"] == "end"
    run("erase", "--tenant", "by-command", "--check")
    token.write_text(provider.token("viewers"))
    assert "needs the role `administer`" in run("keys", "list", status=1)
    run("tenants", "list")
    token.write_text("")
    assert "is empty" in run("tenants", "list", status=1)


def test_a_person_signs_in_with_a_browser_and_out(coordinator, provider, browser):
    assert browser.get("/console/who").json() == {"operator": None, "sign_in": True}
    assert browser.get("/cluster").status_code == 401
    landed = browser.sign_in()
    assert (landed.status_code, landed.headers["location"]) == (303, "/console#cluster")
    [session] = [cookie for cookie in landed.headers.get_list("set-cookie") if "-session-" in cookie]
    assert "HttpOnly" in session and "SameSite=Strict" in session and "Max-Age=28800" in session
    who = browser.get("/console/who").json()["operator"]
    assert (who["shown"], who["role"], who["subject"]) == ("ann@staff.example", "administer", "u-ann")
    assert browser.get("/admin/spend").json()["tenants"] is not None
    assert browser.change("PUT", "/admin/tenants/by-browser", {"tier": "paid"}).status_code == 200
    [record] = [event for event in coordinator.records("operator") if "by-browser" in event["did"]]
    assert record["who"]["by"] == "session"

    kept = dict(browser.cookies)
    assert browser.change("POST", "/console/sign-out", {}).json() == {"signed_out": True}
    assert browser.get("/console/who").json()["operator"] is None
    browser.cookies.update(kept)
    assert browser.get("/cluster").status_code == 401, "the session is over, whoever kept its cookie"
    assert {"sign-in", "sign-out"} <= {event["kind"] for kind in ["sign-in", "sign-out"] for event in coordinator.records(kind)}


def test_a_page_of_another_site_cannot_use_a_session(coordinator, provider, browser):
    browser.sign_in()
    for origin in ["https://evil.example", "null", f"http://localhost:{coordinator.port}", f"https://127.0.0.1:{coordinator.port}", None]:
        refused = browser.change("POST", "/admin/keys", {"tenant": "evil", "tier": "paid"}, origin=origin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_origin"), origin
        assert browser.change("POST", "/console/sign-out", {}, origin=origin).status_code == 403
    assert browser.change("POST", "/admin/keys", {"tenant": "evil"}, **{"sec-fetch-site": "cross-site"}).status_code == 403
    form = browser.post("/admin/keys", data={"tenant": "evil"}, headers={"origin": browser.origin})
    assert form.status_code == 415
    assert "evil" not in coordinator.ask("GET", "/admin/tenants", provider.token()).text
    assert browser.get("/console/who").json()["operator"], "the session is as before"


def test_a_sign_in_is_of_the_browser_that_began_it(coordinator, provider, browser):
    begun = browser.get("/console/sign-in")
    back = httpx.get(begun.headers["location"]).headers["location"]
    parameters = {name: values[0] for name, values in parse_qs(urlsplit(back).query).items()}
    with Browser(coordinator) as victim:
        lured = victim.get("/console/callback", params=parameters)
        assert (lured.status_code, lured.json()["error"]["code"]) == (400, "sign_in_failed"), "an attacker's code signs nobody in"
        victim.get("/console/sign-in")
        assert victim.get("/console/callback", params=parameters).status_code == 400
    for spoilt in [{"state": "x"}, {"state": ""}, {"code": "stolen"}]:
        assert browser.get("/console/callback", params=parameters | spoilt).status_code in (400, 401), spoilt
    denied = browser.get("/console/callback", params={"state": parameters["state"], "error": "<script>alert(1)</script>"})
    assert denied.status_code == 401 and "script" not in denied.text
    assert browser.get("/console/callback", params=parameters).status_code == 303
    again = browser.get("/console/callback", params=parameters)
    assert again.status_code != 303, "a code is used once"


def test_where_a_sign_in_ends_is_no_parameter_and_no_session_is_taken_over(coordinator, provider, browser):
    begun = browser.get("/console/sign-in", params={"return": "https://evil.example", "redirect_uri": "https://evil.example", "next": "//evil"})
    assert "evil" not in begun.headers["location"]
    back = httpx.get(begun.headers["location"]).headers["location"]
    name = f"tidemill-session-{coordinator.port}"
    browser.cookies.set(name, "fixed", domain="127.0.0.1", path="/")
    landed = browser.get(back + "&return=https://evil.example")
    assert landed.headers["location"] == "/console#cluster"
    assert f"{name}=fixed" not in "".join(landed.headers.get_list("set-cookie"))
    assert coordinator.ask("GET", "/cluster", cookie=f"{name}=fixed").status_code == 401


def test_an_id_token_for_another_client_or_another_sign_in_is_refused(coordinator, provider, browser):
    for spoil in [{"nonce": "other"}, {"nonce": None}, {"aud": "other"}, {"aud": [provider.client_id, "other"]}, {"exp": 1}]:
        provider.spoil = lambda claims, spoil=spoil: claims | spoil
        refused = browser.sign_in()
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_token"), spoil
    provider.spoil = lambda claims: claims | {"groups": ["gardeners"]}
    # Earlier refusals may have used up this minute's records.
    wait_until(lambda: browser.sign_in().status_code == 403 and coordinator.records("sign-in-refused"), 90)
    provider.spoil = lambda claims: claims
    assert browser.get("/console/who").json()["operator"] is None


def test_a_tenants_token_opens_nothing_for_operators_and_the_other_way_round(tmp_path, provider):
    """Both have one provider, which makes tokens for several audiences."""
    jwt = f"[jwt]\nissuer = '{provider.issuer}'\naudience = ['tidemill']\nalgorithms = ['RS256']\njwks_url = '{provider.issuer}/keys'\n"
    coordinator = Coordinator(tmp_path, provider, sections=jwt)
    try:
        tenants = provider.token("admins", aud="tidemill", tenant="acme", tier="paid")
        assert coordinator.ask("GET", "/admin/keys", tenants).status_code == 401
        operators = provider.token("admins", tenant="acme", tier="paid")
        assert coordinator.ask("GET", "/admin/keys", operators).status_code == 200
        models = [httpx.get(f"{coordinator.url}/v1/models", headers={"authorization": f"Bearer {token}"}) for token in [tenants, operators]]
        assert [answer.status_code for answer in models] == [200, 401]
    finally:
        coordinator.stop()


def test_the_keys_go_on_while_the_provider_is_gone_and_then_nobody_is_let_in(tmp_path):
    provider = Provider()
    coordinator = Coordinator(tmp_path, provider, "keys_max_age_s = 2\nkeys_kept_s = 8\n")
    try:
        wait_until(lambda: coordinator.ask("GET", "/cluster", provider.token()).status_code == 200, 20)
        with Browser(coordinator) as browser:
            browser.sign_in()
            provider.stop()
            stopped = time.monotonic()
            assert coordinator.ask("GET", "/cluster", provider.token()).status_code == 200, "the keys are known"
            wait_until(lambda: coordinator.ask("GET", "/cluster", provider.token()).status_code == 503, 30)
            assert 5 < time.monotonic() - stopped < 25, "for the stated time"
            refused = coordinator.ask("DELETE", "/admin/keys/tm_0", provider.token())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "provider_unreachable")
            assert refused.headers["retry-after"]
            assert browser.get("/cluster").status_code == 200, "a session has an end of its own"
            assert browser.get("/console/sign-in").status_code in (303, 503)
        provider.start()
        wait_until(lambda: coordinator.ask("GET", "/cluster", provider.token()).status_code == 200, 90)
    finally:
        coordinator.stop()
        provider.stop()


def test_a_coordinator_starts_before_its_provider(tmp_path):
    provider = Provider()
    provider.stop()
    coordinator = Coordinator(tmp_path, provider)
    try:
        assert coordinator.ask("GET", "/cluster", provider.token()).status_code == 503
        assert coordinator.ask("GET", "/health").status_code == 200
        provider.start()
        wait_until(lambda: coordinator.ask("GET", "/cluster", provider.token()).status_code == 200, 90)
    finally:
        coordinator.stop()
        provider.stop()


def test_another_provider_with_a_secret(tmp_path):
    """A provider that was not written for these tests: Authlib's, by `oidc-provider-mock`."""
    from oidc_provider_mock import User, run_server_in_thread

    bob = User(sub="bob", claims={"email": "bob@staff.example", "groups": ["sre"]})
    with run_server_in_thread(user_claims=[bob]) as server:
        provider = Provider("console")
        provider.stop()
        mock = type("Mock", (), {"issuer": f"http://localhost:{server.server_port}", "client_id": "console"})
        (tmp_path / "secret").write_text("s3cret\n")
        coordinator = Coordinator(tmp_path, mock, f"client_secret = '{tmp_path / 'secret'}'")
        try:
            with Browser(coordinator) as browser:
                begun = browser.get("/console/sign-in")
                answered = httpx.post(begun.headers["location"], data={"sub": "bob"})
                assert answered.status_code == 302, answered.text
                landed = browser.get(answered.headers["location"])
                assert landed.status_code == 303, landed.text
                who = browser.get("/console/who").json()["operator"]
                assert (who["shown"], who["role"]) == ("bob@staff.example", "operate")
        finally:
            coordinator.stop()


def test_a_section_that_would_let_the_wrong_in_is_refused(tmp_path, provider):
    program = pathlib.Path(tidemill()).with_name("tidemill-coordinator")
    config = tmp_path / "coordinator.toml"
    config.write_text(f"[operators]\nissuer = '{provider.issuer}'\nclient_id = 'x'\n{ROLES}")

    def started(*flags):
        command = [program, "--model", MODEL, "--pki", tmp_path, "--config", config, *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr

    assert "port of their own" in started()
    assert "--audit" in started("--admin", "127.0.0.1:0")
    config.write_text("[operators]\nissuer = 'http://id.example'\nclient_id = 'x'\nlook = ['a']")
    assert "https" in started("--admin", "127.0.0.1:0", "--audit", "1", "--data", str(tmp_path / "data"))


