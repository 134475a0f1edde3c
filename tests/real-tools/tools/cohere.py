"""Cohere's clients of both versions of its API."""

import os

import cohere

documents = ["the sea is wide", "a cat sleeps", "boats sail on the sea"]
for kind in cohere.Client, cohere.ClientV2:
    client = kind(os.environ["OPENAI_API_KEY"], base_url=os.environ["SERVER"])
    ranked = client.rerank(model="ranker", query="the sea", documents=documents, top_n=2).results
    assert len(ranked) == 2 and ranked[0].relevance_score >= ranked[1].relevance_score, ranked
print(f"ranks {[rank.index for rank in ranked]} of {len(documents)} documents by each")
