//! Files written by the format's own library, and broken files.

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
};
use tempfile::TempDir;
use tidemill_gguf::{GgufError, directory, file::Gguf};
use tokenizers::Tokenizer;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name)
}

/// Unpacks a file into a directory in a temporary one.
fn unpacked(name: &str) -> (TempDir, PathBuf) {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("unpacked");
    directory::write(&Gguf::open(&fixture(name)).unwrap(), &dir, &|_, _| ()).unwrap();
    (temporary, dir)
}

fn json(dir: &Path, file: &str) -> Value {
    serde_json::from_slice(&fs::read(dir.join(file)).unwrap()).unwrap()
}

#[test]
fn blocks_are_expanded_to_the_same_bits_as_the_formats_own_library() {
    let file = Gguf::open(&fixture("blocks.gguf")).unwrap();
    let find = |name: &str| file.tensors().iter().find(|tensor| tensor.name == name).unwrap();
    let mut seen = 0;
    for expected in file.tensors() {
        let Some(name) = expected.name.strip_suffix(".expected") else { continue };
        let tensor = find(name);
        let mut numbers = vec![0.0; 4 * tensor.kind.numbers()];
        tensor.kind.expand(file.bytes(tensor), &mut numbers);
        let expected = file.bytes(expected).as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        let bits: Vec<u32> = numbers.iter().map(|number| number.to_bits()).collect();
        assert_eq!(bits, expected.collect::<Vec<_>>(), "{name}");
        seen += 1;
    }
    assert_eq!(seen, 13);
}

#[test]
fn a_file_has_the_weights_and_settings_that_it_was_made_of() {
    for (file, original) in [("llama3.gguf", "llama3"), ("qwen2-00001-of-00002.gguf", "qwen2")] {
        let (_temporary, dir) = unpacked(file);
        let original = model(original);
        let [ours, theirs] = [&dir, &original].map(|dir| fs::read(dir.join("model.safetensors")).unwrap());
        let [ours, theirs] = [&ours, &theirs].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        assert_eq!(ours.len(), theirs.len(), "{file}");
        for (name, tensor) in theirs.iter() {
            let found = ours.tensor(name).unwrap();
            assert_eq!(found.shape(), tensor.shape(), "{name}");
            // Vectors are f32 in the file.
            let wide = |bytes: &[u8]| bytes.as_chunks().0.iter().flat_map(|[a, b]| [0, 0, *a, *b]).collect::<Vec<u8>>();
            let same = if tensor.shape().len() == 1 { found.data() == wide(tensor.data()) } else { found.data() == tensor.data() };
            assert!(same, "{file}: {name}");
        }
        let [ours, theirs] = [&dir, &original].map(|dir| json(dir, "config.json"));
        for key in ["architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
            .into_iter()
            .chain(["vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"])
        {
            assert_eq!(ours[key], theirs[key], "{file}: {key}");
        }
        let theta = theirs.get("rope_theta").unwrap_or(&theirs["rope_parameters"]["rope_theta"]);
        assert_eq!(ours["rope_theta"].as_f64(), theta.as_f64(), "{file}");
        let template = fs::read_to_string(original.join("chat_template.jinja")).map(Value::String);
        let template = template.unwrap_or_else(|_| json(&original, "tokenizer_config.json")["chat_template"].clone());
        assert_eq!(json(&dir, "tokenizer_config.json")["chat_template"], template, "{file}");
    }
    let (_temporary, dir) = unpacked("llama3.gguf");
    let rope = &json(&dir, "config.json")["rope_scaling"];
    assert_eq!((rope["rope_type"].as_str(), rope["factor"].as_f64()), (Some("llama3"), Some(8.0)), "found from its factors");
}

/// Compares texts with the ids that a tokenizer's own files give them.
#[test]
fn text_is_cut_into_the_same_tokens() {
    let texts = fs::read_to_string(model("corpus.txt")).unwrap();
    let texts = texts.lines().chain(["  two  spaces", "it's 12345 o'clock", "Straße, e\u{301}, 東京 😀", "", "\n\n \t end<|im_end|>"]);
    let texts: Vec<&str> = texts.collect();
    for (file, original) in [("llama3.gguf", "llama3"), ("qwen2-00001-of-00002.gguf", "qwen2")] {
        let (_temporary, dir) = unpacked(file);
        let [ours, theirs] = [&dir, &model(original)].map(|dir| Tokenizer::from_file(dir.join("tokenizer.json")).unwrap());
        for text in &texts {
            let [ours, theirs] = [&ours, &theirs].map(|tokenizer| tokenizer.encode(*text, true).unwrap().get_ids().to_vec());
            assert_eq!(ours, theirs, "{file}: {text:?}");
        }
    }
}

#[test]
fn pieces_are_found_as_sentencepiece_finds_them() {
    let (_temporary, dir) = unpacked("pieces.gguf");
    let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json")).unwrap();
    let expected: Vec<(String, Vec<u32>)> = serde_json::from_slice(&fs::read(fixture("pieces.json")).unwrap()).unwrap();
    for (text, ids) in expected {
        let encoding = tokenizer.encode(text.as_str(), false).unwrap();
        assert_eq!(encoding.get_ids(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
    let first = tokenizer.encode("The tide", true).unwrap().get_ids()[0];
    assert_eq!(tokenizer.id_to_token(first).as_deref(), Some("<s>"), "a text begins with its mark");
}

/// Opens and unpacks bytes, neither of which may panic.
fn try_all(bytes: &[u8]) -> Result<(), GgufError> {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    directory::write(&Gguf::open(&path)?, &temporary.path().join("unpacked"), &|_, _| ())
}

#[test]
fn what_is_wrong_with_a_file_is_said() {
    let whole = fs::read(fixture("llama3.gguf")).unwrap();
    let problem = |bytes: &[u8]| try_all(bytes).unwrap_err().to_string();
    assert!(problem(b"").contains("does not begin with GGUF"));
    assert!(problem(b"GGML\x03\0\0\0").contains("does not begin with GGUF"));
    assert!(problem(b"GGUF\x01\0\0\0").contains("version is 1"));
    assert!(problem(b"GGUF\0\0\0\x03").contains("other byte order"));
    assert!(problem(&whole[..whole.len() - 1]).contains("cut off: tensor"));
    assert!(problem(&whole[..1000]).contains("within its header") || problem(&whole[..1000]).contains("room for"));
    let mut claims = b"GGUF\x03\0\0\0".to_vec();
    claims.extend(u64::MAX.to_le_bytes());
    claims.extend(1u64.to_le_bytes());
    assert!(problem(&claims).contains("more than there is room for"));
    let edit = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut edited = whole.clone();
        edited[at..at + to.len()].copy_from_slice(to.as_bytes());
        problem(&edited)
    };
    assert!(edit("general.architecture", "general.xrchitecture").contains("general.architecture is missing"));
    assert!(edit("blk.1.attn_norm.weight", "blk.1.attn_form.weight").contains("blk.1.attn_form.weight"), "no tensor is left out unseen");
    assert!(edit("llama-bpe", "lemma-bpe").contains("lemma-bpe"));
    let part = fs::read(fixture("qwen2-00001-of-00002.gguf")).unwrap();
    assert!(problem(&part).contains("name does not end with -00001-of-00002.gguf"));
    assert!(try_all(&fs::read(fixture("qwen2-00002-of-00002.gguf")).unwrap()).unwrap_err().to_string().contains("not the first"));
}

#[test]
fn a_claim_that_the_file_cannot_keep_is_refused() {
    let whole = fs::read(fixture("llama3.gguf")).unwrap();
    let with = |key: &str, number: u32| {
        let at = whole.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + 4;
        let mut edited = whole.clone();
        edited[at..at + 4].copy_from_slice(&number.to_le_bytes());
        try_all(&edited).unwrap_err().to_string()
    };
    let error = with("llama.block_count", 1_000_000);
    assert!(error.contains("claims 1000000 layers"), "{error}");
    for key in ["llama.attention.head_count", "llama.attention.head_count_kv", "llama.context_length", "llama.feed_forward_length"] {
        let error = with(key, 0x8000_0001);
        assert!(error.contains(key) && error.contains("more than the 67108864"), "{error}");
    }
}

/// A file without keys, whose tensors `[1000]` of f32 begin at these offsets of 8000 bytes.
fn tensors_at(offsets: &[u64]) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((offsets.len() as u64).to_le_bytes());
    file.extend(0u64.to_le_bytes());
    for (nth, offset) in offsets.iter().enumerate() {
        let name = format!("t{nth}");
        file.extend((name.len() as u64).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend(1u32.to_le_bytes());
        file.extend(1000u64.to_le_bytes());
        file.extend(0u32.to_le_bytes());
        file.extend(offset.to_le_bytes());
    }
    file.resize(file.len().next_multiple_of(32) + 8000, 0);
    file
}

#[test]
fn tensors_do_not_multiply_a_files_bytes() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("model.gguf");
    fs::write(&path, tensors_at(&[0, 4000])).unwrap();
    assert_eq!(Gguf::open(&path).unwrap().tensors().len(), 2);
    fs::write(&path, tensors_at(&[0; 50])).unwrap();
    let error = Gguf::open(&path).err().unwrap().to_string();
    assert!(error.contains("share bytes"), "{error}");
}

#[test]
fn a_header_is_read_up_to_a_bound() {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(0u64.to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(1u64.to_le_bytes());
    file.extend(b"x");
    // A list of bytes.
    file.extend(9u32.to_le_bytes());
    file.extend(0u32.to_le_bytes());
    file.extend((65u64 << 20).to_le_bytes());
    file.resize(file.len() + (65 << 20), 0);
    let error = try_all(&file).unwrap_err().to_string();
    assert!(error.contains("more than there is room for"), "{error}");
}

#[test]
fn a_directory_is_whole_or_not_there() {
    let temporary = tempfile::tempdir().unwrap();
    let file = Gguf::open(&fixture("pieces.gguf")).unwrap();
    let below_a_file = temporary.path().join("file");
    fs::write(&below_a_file, "").unwrap();
    let error = directory::write(&file, &below_a_file.join("unpacked"), &|_, _| ()).unwrap_err();
    assert!(matches!(error, GgufError::Write { .. }), "{error}");
    let dir = temporary.path().join("unpacked");
    directory::write(&file, &dir, &|_, _| ()).unwrap();
    directory::write(&file, &dir, &|_, _| ()).unwrap();
    let names: Vec<_> = fs::read_dir(temporary.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "nothing is left of the draft of the second: {names:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_change_of_a_header_panics(
        file in prop::sample::select(vec!["pieces.gguf", "families/gpt-oss-mxfp4.gguf", "families/qwen2moe.gguf", "families/phi3.gguf"]),
        changes in prop::collection::vec((0usize..40_000, any::<u8>()), 1..8),
        cut in prop::option::of(0usize..40_000),
    ) {
        let mut bytes = fs::read(fixture(file)).unwrap();
        for (at, byte) in changes {
            // Most important data is at the beginning.
            let at = if byte % 2 == 0 { at % 2000 } else { at % bytes.len() };
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        let _ = try_all(&bytes);
    }
}
