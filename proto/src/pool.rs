//! What a KV pool node and its clients tell each other.
