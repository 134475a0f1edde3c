//! Checkpoints in bf16, whose products round numbers to bf16: their distance from f32.

use crate::{
    fixtures::{
        all_logits, argmax, family_tests, greedy_together, load, load_dir, load_f32, load_on, one_of_each_order, prompt_of, reference,
        restored,
    },
    reference::largest_difference,
};
use tidemill_kernels::Dtype;
use tidemill_proto::block::KvDtype;

/// Logits of the reference are within ±8. Every activation that a projection multiplies is rounded to 8 bits of fraction, an error of at
/// most 2^-9 of it, and sums of some hundred of them, over a few layers, keep a few units of that error. Measured: at most 0.06 to 0.16,
/// and 0.009 to 0.016 on average, 0.021 where layers keep a matrix; the same first token in 974 to 987 of 1,000 rows.
const LARGEST_MAX: f32 = 0.25;
const MEAN_MAX: f64 = 0.025;
/// The logits of random models lie close together, so a small change swaps the first two.
const AGREEMENT_PERCENT: usize = 95;

fn logits_differ_from_the_reference_by_no_more_than_the_rounding(family: &str) {
    for isa in one_of_each_order() {
        let mut model = load_on(family, KvDtype::F32, 2, Some(isa));
        for chunk in [4096, 7] {
            let difference = largest_difference(family, &mut model, chunk);
            println!("{family} on {isa}, chunks of {chunk}: {difference:e}");
            assert!(difference < LARGEST_MAX, "{family} on {isa} in chunks of {chunk}: logits differ by {difference}");
            assert!(difference > 1e-4, "{family}: activations were not rounded");
        }
    }
}

family_tests! { logits_differ_from_the_reference_by_no_more_than_the_rounding: in_bf16 in_bf16_with_state }

fn logits_differ_from_products_of_f32_by_little_on_average_and_rank_the_same_token_first(family: &str) {
    let (reference, _) = reference(family);
    let (mut exact, mut rounded) = (load_f32(family, KvDtype::F32), load(family, KvDtype::F32));
    let vocab = exact.config().vocab();
    let (mut sum, mut numbers, mut agree, mut rows) = (0.0, 0, 0, 0);
    for prompt in &reference.prompts {
        let [exact, rounded] = [&mut exact, &mut rounded].map(|model| all_logits(model, &prompt.ids, 256));
        sum += exact.iter().zip(&rounded).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>();
        numbers += exact.len();
        agree += exact.chunks(vocab).zip(rounded.chunks(vocab)).filter(|(a, b)| argmax(a) == argmax(b)).count();
        rows += exact.len() / vocab;
    }
    let mean = sum / numbers as f64;
    println!("{family}: mean {mean:e}, top-1 {agree} of {rows}");
    assert!(mean < MEAN_MAX, "{family}: logits differ by {mean} on average");
    assert!(agree * 100 >= rows * AGREEMENT_PERCENT, "{family}: the same first token in {agree} of {rows} rows");
}

family_tests! { logits_differ_from_products_of_f32_by_little_on_average_and_rank_the_same_token_first: in_bf16 in_bf16_with_state }

fn greedy_tokens_are_the_same_whatever_the_chunks_and_the_batch(family: &str) {
    let (reference, _) = reference(family);
    let prompts: Vec<_> = reference.prompts.iter().filter(|p| !p.greedy.is_empty()).map(|p| &p.ids[..]).collect();
    let mut model = load(family, KvDtype::F32);
    let expected = greedy_together(&mut model, &prompts, 64, 512);
    for chunk in [1, 7, 32] {
        assert!(greedy_together(&mut model, &prompts, 64, chunk) == expected, "{family} in chunks of {chunk}");
    }
    for (prompt, expected) in prompts.iter().zip(expected) {
        assert!(greedy_together(&mut model, &[prompt], 64, 512)[0] == expected, "{family}, prompt of {} alone", prompt.len());
    }
}

family_tests! { greedy_tokens_are_the_same_whatever_the_chunks_and_the_batch: in_bf16 in_bf16_with_state }

fn a_checkpoint_with_one_matrix_in_f32_is_computed_in_f32(family: &str) {
    let tokens = prompt_of(family, 100);
    // The embedding stays in bf16, as its factor is rounded to the embedding's type.
    let exact = restored(family, |name| if name.contains("embed_tokens") { Dtype::Bf16 } else { Dtype::F32 });
    let mut exact = load_dir(exact.path(), KvDtype::F32, 2, None);
    let mlp = if family == "lfm2" { "model.layers.0.feed_forward" } else { "model.layers.0.mlp" };
    let attention = if family.starts_with("qwen3-5") { "model.layers.3.self_attn" } else { "model.layers.1.self_attn" };
    for kept in [mlp, attention].map(|part| matrix_of(family, part)) {
        let mixed = restored(family, |name| if *name == kept { Dtype::F32 } else { Dtype::Bf16 });
        let mut mixed = load_dir(mixed.path(), KvDtype::F32, 2, None);
        assert!(all_logits(&mut mixed, &tokens, 32) == all_logits(&mut exact, &tokens, 32), "{family} with {kept}");
    }
}

family_tests! { a_checkpoint_with_one_matrix_in_f32_is_computed_in_f32: in_bf16 in_bf16_with_state }

/// The name of a matrix in this part of the family's layers.
fn matrix_of(family: &str, part: &str) -> String {
    let mut seen = Vec::new();
    restored(family, |name| {
        seen.push(name.to_owned());
        Dtype::Bf16
    });
    let is_matrix = |name: &String| name.starts_with(part) && name.ends_with(".weight") && !name.contains("norm");
    seen.into_iter().filter(is_matrix).max().expect("a matrix")
}
