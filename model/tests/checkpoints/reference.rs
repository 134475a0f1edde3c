//! Comparison with Hugging Face transformers, which computed in f32: logits and greedy tokens of every family, with f32 products. `bf16`
//! tests the effect of bf16 products.

use crate::fixtures::{all_logits, family_tests, greedy_together, load_f32, reference};
use tidemill_model::Model;
use tidemill_proto::block::KvDtype;

/// A chunk size that holds any prompt.
const WHOLE: usize = 4096;

/// Largest difference between the reference's logits and ours, computed in chunks.
pub(crate) fn largest_difference(family: &str, model: &mut Model, chunk: usize) -> f32 {
    let (reference, expected) = reference(family);
    let vocab = model.config().vocab();
    let mut largest = 0.0f32;
    for (prompt, expected) in reference.prompts.iter().zip(expected) {
        let logits = all_logits(model, &prompt.ids, chunk);
        for (expected, position) in expected.chunks(vocab).zip(&prompt.logit_rows) {
            for (ours, theirs) in logits[position * vocab..].iter().zip(expected) {
                largest = largest.max((ours - theirs).abs());
            }
        }
    }
    largest
}

/// Asserts that a quantized checkpoint, dequantized and computed in f32, has the reference's logits and greedy tokens.
pub(crate) fn assert_dequantized(form: &str, model: &mut Model) {
    for chunk in [4096, 7] {
        let difference = largest_difference(form, model, chunk);
        println!("{form}, chunks of {chunk}: {difference:e}");
        assert!(difference < 1e-4, "{form} in chunks of {chunk}: logits differ by {difference}");
    }
    let (reference, _) = reference(form);
    let ids: Vec<_> = reference.prompts.iter().map(|prompt| &prompt.ids[..]).collect();
    let greedy: Vec<_> = reference.prompts.iter().map(|prompt| prompt.greedy.clone()).collect();
    assert!(greedy.len() == 3 && greedy.iter().all(|tokens| tokens.len() == 64));
    assert_eq!(greedy_together(model, &ids, 64, 16), greedy, "{form}");
}

fn logits_are_those_of_the_reference(family: &str) {
    let mut model = load_f32(family, KvDtype::F32);
    for chunk in [WHOLE, 16, 7] {
        let difference = largest_difference(family, &mut model, chunk);
        println!("{family}, chunks of {chunk}: {difference:e}");
        assert!(difference < 1e-4, "{family} in chunks of {chunk}: logits differ by {difference}");
    }
}

family_tests! { logits_are_those_of_the_reference: all }

fn logits_with_rounded_keys_and_values_differ_by_no_more_than_the_rounding(family: &str) {
    // Logits are within ±8, and are sums of some hundred rounded products: a few units in the last place of bf16 (2^-9) and f16 (2^-12).
    for (dtype, tolerance) in [(KvDtype::Bf16, 0.25), (KvDtype::F16, 0.03)] {
        let difference = largest_difference(family, &mut load_f32(family, dtype), 32);
        println!("{family}, {dtype:?}: {difference:e}");
        assert!(difference < tolerance, "{family} with {dtype:?} K and V: logits differ by {difference}");
        assert!(difference > 1e-4, "{family}: K and V were not rounded to {dtype:?}");
    }
}

family_tests! { logits_with_rounded_keys_and_values_differ_by_no_more_than_the_rounding: dense }

fn greedy_tokens_are_those_of_the_reference_whatever_the_chunks(family: &str) {
    let (reference, _) = reference(family);
    let prompts: Vec<_> = reference.prompts.iter().filter(|p| !p.greedy.is_empty()).collect();
    assert!(prompts.len() >= 5 && prompts.iter().all(|p| p.greedy.len() == 64));
    let mut model = load_f32(family, KvDtype::F32);
    for chunk in [1, 7, 16, 32, 512] {
        let ids: Vec<_> = prompts.iter().map(|p| &p.ids[..]).collect();
        let together = greedy_together(&mut model, &ids, 64, chunk);
        for (prompt, tokens) in prompts.iter().zip(together) {
            assert_eq!(tokens, prompt.greedy, "{family}, prompt of {} in chunks of {chunk}", prompt.ids.len());
        }
    }
    for prompt in prompts {
        let alone = greedy_together(&mut model, &[&prompt.ids], 64, 512);
        assert_eq!(alone[0], prompt.greedy, "{family}, prompt of {} alone", prompt.ids.len());
    }
}

family_tests! { greedy_tokens_are_those_of_the_reference_whatever_the_chunks: all }
