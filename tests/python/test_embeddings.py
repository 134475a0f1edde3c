"""Embeddings, with the official client; tokens, as vLLM serves them."""

import base64
import math
import struct

import httpx
import openai
import pytest

TEXTS = ["The tide fills the pool.", "The wheel turns.", "潮が満ちる。" * 10]


@pytest.fixture
def embed(client, model):
    return lambda input, **parameters: client.embeddings.create(model=model, input=input, **parameters)


def test_together_or_alone_cold_or_cached_they_are_the_same(embed):
    together = embed(TEXTS)
    assert [one.index for one in together.data] == [0, 1, 2]
    assert together.usage.prompt_tokens == together.usage.total_tokens > len(TEXTS)
    for text, one in zip(TEXTS, together.data):
        assert embed(text).data[0].embedding == one.embedding
        assert abs(sum(number * number for number in one.embedding) - 1) < 1e-4
    first, second, _ = (one.embedding for one in together.data)
    assert first != second


def test_tokens_and_formats(embed, root, url, model):
    ids = httpx.post(f"{root}/tokenize", json={"prompt": TEXTS[0]}).raise_for_status().json()["tokens"]
    assert embed(ids).data[0].embedding == embed(TEXTS[0]).data[0].embedding
    plain = embed(TEXTS[0], encoding_format="float").data[0].embedding
    raw = httpx.post(f"{url}/embeddings", json={"model": model, "input": TEXTS[0], "encoding_format": "base64"}).raise_for_status().json()
    packed = base64.b64decode(raw["data"][0]["embedding"])
    numbers = struct.unpack(f"<{len(packed) // 4}f", packed)
    assert numbers == pytest.approx(plain, abs=1e-7)
    assert embed(TEXTS[0], dimensions=len(plain)).data[0].embedding == plain
    first = embed(TEXTS[0], dimensions=8, encoding_format="float").data[0].embedding
    assert math.isclose(math.hypot(*first), 1, abs_tol=1e-6)
    assert first == pytest.approx([number / math.hypot(*plain[:8]) for number in plain[:8]], abs=1e-6)
    for dimensions in 0, len(plain) + 1:
        with pytest.raises(openai.BadRequestError) as refused:
            embed(TEXTS[0], dimensions=dimensions)
        assert refused.value.param == "dimensions"


def test_tokens_there_and_back(root):
    tokens = httpx.post(f"{root}/tokenize", json={"prompt": TEXTS[2], "add_special_tokens": False}).raise_for_status().json()["tokens"]
    assert httpx.post(f"{root}/detokenize", json={"tokens": tokens}).raise_for_status().json() == {"prompt": TEXTS[2]}
