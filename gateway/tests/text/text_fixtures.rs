//! Tokenizer, chat template and detokenizer compared with the results of Hugging Face's transformers for the same inputs, for every model
//! family (`model/tests/fixtures/make.py`).

use serde::Deserialize;
use std::{fs, path::PathBuf, sync::Arc, time::SystemTime};
use tidemill_gateway::text::{TextModel, detokenizer::Detokenizer, template::ChatInput};

const FAMILIES: [&str; 5] = ["llama", "llama3", "mistral", "qwen2", "qwen3"];

#[derive(Deserialize)]
struct Reference {
    chats: Vec<Chat>,
    texts: Vec<Text>,
    prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<minijinja::Value>,
    add_generation_prompt: bool,
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    ids_no_special: Vec<u32>,
}

#[derive(Deserialize)]
struct Prompt {
    ids: Vec<u32>,
    greedy: Vec<u32>,
}

fn load(family: &str) -> (TextModel, Reference) {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(family);
    let reference = fs::read_to_string(dir.join("reference.json")).unwrap();
    (TextModel::load(&dir).unwrap(), serde_json::from_str(&reference).unwrap())
}

#[test]
fn chats_render_and_tokenize_as_in_transformers() {
    for family in FAMILIES {
        let (model, reference) = load(family);
        let template = model.template.as_ref().unwrap();
        assert!(!reference.chats.is_empty());
        for chat in reference.chats {
            let input = ChatInput { messages: chat.messages, add_generation_prompt: chat.add_generation_prompt, ..ChatInput::default() };
            let text = template.render(input, SystemTime::now()).unwrap();
            assert_eq!(text, chat.text, "{family}");
            assert_eq!(model.tokenizer.encode(&text, false).unwrap(), chat.ids, "{family}: {text:?}");
        }
    }
}

#[test]
fn texts_tokenize_as_in_transformers() {
    for family in FAMILIES {
        let (model, reference) = load(family);
        for Text { text, ids, ids_no_special } in reference.texts {
            assert_eq!(model.tokenizer.encode(&text, true).unwrap(), ids, "{family}: {text:?}");
            assert_eq!(model.tokenizer.encode(&text, false).unwrap(), ids_no_special, "{family}: {text:?}");
        }
    }
}

#[test]
fn token_by_token_the_same_text_as_at_once() {
    for family in FAMILIES {
        let (model, reference) = load(family);
        let texts = reference.texts.iter().map(|text| (&[][..], &text.ids_no_special[..]));
        // The output of a random model is mostly noise: pieces of characters in every order.
        let noise = reference.prompts.iter().map(|prompt| (&prompt.ids[..], &prompt.greedy[..]));
        for (prompt, ids) in texts.chain(noise) {
            let mut detokenizer = Detokenizer::new(Arc::clone(&model.tokenizer), prompt, true);
            let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
            text += &detokenizer.finish();
            if prompt.is_empty() {
                assert_eq!(text, model.tokenizer.decode(ids, true), "{family}");
            } else {
                let whole = model.tokenizer.decode(&[prompt, ids].concat(), true);
                let tail: String = text.chars().skip(1).collect();
                assert!(whole.ends_with(&tail), "{family}: {text:?} is not how {whole:?} ends");
            }
        }
    }
}

#[test]
fn the_bytes_of_tokens_make_the_bytes_of_the_text() {
    for family in FAMILIES {
        let (model, reference) = load(family);
        for Text { ids_no_special, .. } in reference.texts {
            let bytes: Vec<u8> = ids_no_special.iter().flat_map(|&id| model.tokenizer.token_bytes(id)).collect();
            assert_eq!(String::from_utf8(bytes).unwrap(), model.tokenizer.decode(&ids_no_special, false), "{family}");
        }
    }
}

#[test]
fn end_of_sequence_ids_come_from_all_files() {
    for (family, eos) in [("llama", &[1][..]), ("llama3", &[1, 2]), ("qwen3", &[0, 1])] {
        assert_eq!(load(family).0.eos_tokens(), eos, "{family}");
    }
}
