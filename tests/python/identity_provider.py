"""An OpenID provider on loopback that a test can make sign anything, change its keys, and go away."""

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa


class Provider:
    def __init__(self, client_id="tidemill-operators"):
        self.client_id = client_id
        self.person = {"sub": "u-ann", "email": "ann@staff.example", "name": "Ann", "groups": ["admins"]}
        self.fetches, self.tokens, self.codes = 0, [], {}
        self.spoil = lambda claims: claims
        self.rotate("RS256")
        self.port = 0
        self.start()

    def rotate(self, algorithm="RS256"):
        """A new key; the one before is withdrawn."""
        if algorithm == "RS256":
            self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            public = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        else:
            self.key = ec.generate_private_key(ec.SECP256R1())
            public = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.algorithm, self.kid = algorithm, secrets.token_hex(4)
        self.keys = [public | {"kid": self.kid, "use": "sig", "alg": algorithm}]

    @property
    def issuer(self):
        return f"http://127.0.0.1:{self.port}"

    def claims(self, **changes):
        now = int(time.time())
        claims = self.person | {"iss": self.issuer, "aud": self.client_id, "iat": now, "exp": now + 300}
        return {name: value for name, value in (claims | changes).items() if value is not None}

    def token(self, *groups, **changes):
        """A token of somebody in these groups."""
        return self.sign(self.claims(**({"groups": list(groups)} if groups else {}) | changes))

    def sign(self, claims, key=None, algorithm=None, kid=None):
        return jwt.encode(claims, key or self.key, algorithm or self.algorithm, headers={"kid": kid or self.kid})

    def start(self):
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, status, body, **headers):
                body = json.dumps(body).encode()
                self.send_response(status)
                for name, value in ({"content-type": "application/json", "content-length": len(body)} | headers).items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                if url.path == "/.well-known/openid-configuration":
                    provider.fetches += 1
                    endpoints = {name + "_endpoint": f"{provider.issuer}/{name}" for name in ["authorization", "token"]}
                    self.answer(200, {"issuer": provider.issuer, "jwks_uri": f"{provider.issuer}/keys"} | endpoints)
                elif url.path == "/keys":
                    self.answer(200, {"keys": provider.keys})
                elif url.path == "/authorization":
                    code = secrets.token_hex(8)
                    provider.codes[code] = query
                    back = urlencode({"code": code, "state": query["state"]})
                    self.answer(302, {}, location=f"{query['redirect_uri']}?{back}")
                else:
                    self.answer(404, {})

            def do_POST(self):
                form = {name: values[0] for name, values in parse_qs(self.rfile.read(int(self.headers["content-length"])).decode()).items()}
                asked = provider.codes.pop(form.get("code"), None)
                digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
                challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
                is_right = asked and (asked["code_challenge_method"], asked["code_challenge"]) == ("S256", challenge)
                if not is_right or form.get("redirect_uri") != asked["redirect_uri"] or form.get("client_id") != provider.client_id:
                    return self.answer(400, {"error": "invalid_grant"})
                claims = provider.spoil(provider.claims(nonce=asked["nonce"]))
                self.answer(200, {"access_token": "unused", "token_type": "Bearer", "id_token": provider.sign(claims)})

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


def forged(claims, header, secret=b""):
    """A token with this very header; signed with the secret by HMAC, if there is one."""
    import hmac

    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")

    signed = part(header) + b"." + part(claims)
    signature = base64.urlsafe_b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).rstrip(b"=") if secret else b""
    return (signed + b"." + signature).decode()
