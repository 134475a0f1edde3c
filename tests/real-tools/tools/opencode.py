"""opencode with a provider like OpenAI's. It may edit files, but run nothing."""

import json
import os

import turns

MODEL = os.environ["MODEL"]
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "Tidemill",
    "options": {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]},
    "models": {MODEL: {"name": MODEL, "limit": {"context": int(os.environ["WINDOW"]), "output": 512}}},
}
os.environ["OPENCODE_CONFIG_CONTENT"] = json.dumps({
    "provider": {"tidemill": provider},
    "model": f"tidemill/{MODEL}",
    "small_model": f"tidemill/{MODEL}",
    "autoupdate": False,
    "share": "disabled",
    "permission": {"edit": "allow", "bash": "deny", "webfetch": "deny"},
})


def command(text, number):
    return ["opencode", "run", *(["--continue"] if number else []), text]


print(turns.twenty(command))
